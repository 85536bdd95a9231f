//! Chromium's compiler, in Dawn for Node.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use crate::verdict::Verdict;

/// Adds the directive that Tint needs and naga does not.
fn text(wgsl: &str) -> String {
    if wgsl.contains("subgroup") { format!("enable subgroups;\n{wgsl}") } else { wgsl.to_string() }
}

/// Returns Tint's verdicts on `texts`. `scratch`: a file to write.
pub fn check(dawn: &Path, texts: &[&str], scratch: &Path) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let ended = compile(dawn, texts, scratch, &mut verdicts);
    let why = ended.map_or_else(|error| error.to_string(), |said| format!("Dawn ended before this: {said}"));
    verdicts.resize(texts.len(), Verdict::Rejected(why));
    verdicts
}

fn compile(
    dawn: &Path,
    texts: &[&str],
    scratch: &Path,
    verdicts: &mut Vec<Verdict>,
) -> Result<String, Box<dyn Error>> {
    let listed: Vec<String> = texts.iter().map(|wgsl| text(wgsl)).collect();
    std::fs::write(scratch, serde_json::Value::from(listed).to_string())?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tint.mjs");
    let run = Command::new("node").arg(script).arg(dawn).arg(scratch).output()?;
    for line in String::from_utf8(run.stdout)?.lines() {
        let messages: Vec<String> = serde_json::from_str(line)?;
        verdicts.push(match messages.as_slice() {
            [] => Verdict::Accepted,
            _ => Verdict::Rejected(messages.join("\n")),
        });
    }
    Ok(format!("{}: {}", run.status, String::from_utf8_lossy(&run.stderr)))
}
