//! The list of known and permitted faults: `permitted.txt`.

use crate::verdict::{Compiler, Verdict};

/// A line of the list.
#[derive(Debug)]
pub struct Permitted {
    pub line: &'static str,
    compiler: &'static str,
    /// Values of axes, or forms. A kernel must have all of them.
    kernel: Vec<&'static str>,
    kind: &'static str,
    most: u64,
    /// True if a fault matched the line.
    pub used: bool,
}

/// Reads lines `COMPILER: AXES: KIND<=MOST: REASON`. A compiler's name may be the beginning of
/// several names.
pub fn read() -> Result<Vec<Permitted>, String> {
    let lines =
        include_str!("../permitted.txt").lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| parse(line).ok_or_else(|| format!("permitted.txt: not understood: {line}"))).collect()
}

fn parse(line: &'static str) -> Option<Permitted> {
    let mut parts = line.splitn(4, ": ");
    let (compiler, axes, what, reason) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let (kind, most) = what.split_once("<=")?;
    let kernel = axes.split_whitespace().collect();
    let known = ["rejected", "spills", "scalar_spills", "memory", "uniform_loads"].contains(&kind)
        && !reason.is_empty();
    known.then_some(Permitted { line, compiler, kernel, kind, most: most.parse().ok()?, used: false })
}

impl Permitted {
    fn is_about(&self, compiler: Compiler, axes: &[&str]) -> bool {
        compiler.to_string().starts_with(self.compiler) && self.kernel.iter().all(|axis| axes.contains(axis))
    }

    /// True if a compiler that the line names has run.
    pub fn is_judged(&self, ran: &[Compiler]) -> bool {
        ran.iter().any(|compiler| compiler.to_string().starts_with(self.compiler))
    }
}

/// Returns the faults of a verdict that no line permits.
pub fn unexplained(
    permitted: &mut [Permitted],
    compiler: Compiler,
    axes: &[&str],
    verdict: &Verdict,
) -> Vec<(&'static str, u64)> {
    let mut faults = verdict.faults();
    faults.retain(|(kind, amount)| {
        let mut explained = false;
        for line in permitted.iter_mut().filter(|p| p.kind == *kind && p.is_about(compiler, axes)) {
            let enough = *amount <= line.most;
            line.used |= enough;
            explained |= enough;
        }
        !explained
    });
    faults
}
