//! Checks naga's HLSL with Microsoft's older compiler. wgpu's DX12 backend uses it unless an
//! application ships DXC. It is a Windows library: `fxc.c` calls it, and Wine runs `fxc.c`.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::verdict::{Listing, Verdict};

/// The compiler of one thread: a process that compiles files one after the other.
pub struct Fxc {
    child: Child,
    files: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Fxc {
    /// Starts `command` (words, separated by spaces).
    pub fn new(command: &str) -> std::io::Result<Self> {
        let mut words = command.split(' ');
        let mut program = Command::new(words.next().unwrap_or_default());
        program.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = program.spawn()?;
        let (files, answers) = (child.stdin.take(), child.stdout.take());
        let (Some(files), Some(answers)) = (files, answers) else {
            return Err(std::io::Error::other("a process without pipes"));
        };
        Ok(Fxc { child, files, answers: BufReader::new(answers) })
    }

    /// Compiles the HLSL file at `path`.
    pub fn check(&mut self, path: &Path) -> Verdict {
        let mut line = String::new();
        let asked = writeln!(self.files, "{}", path.display()).and_then(|()| self.files.flush());
        match asked.and_then(|()| self.answers.read_line(&mut line)) {
            Err(error) => Verdict::Rejected(error.to_string()),
            Ok(_) => parse(&line).unwrap_or_else(|| Verdict::Rejected(format!("no answer: {line:?}"))),
        }
    }
}

impl Drop for Fxc {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads an answer of `fxc.c`.
fn parse(line: &str) -> Option<Verdict> {
    let fields: Vec<&str> = line.trim_end().split('\t').collect();
    match fields[..] {
        ["ok", seconds, instructions, registers, arrays] => Some(Verdict::Listed(Listing {
            seconds: seconds.parse().ok()?,
            instructions: instructions.parse().ok()?,
            registers: registers.parse().ok()?,
            arrays: arrays.parse().ok()?,
        })),
        ["error", seconds, message] => Some(Verdict::Rejected(format!("{message} (after {seconds} s)"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let listing = Listing { seconds: 0.25, instructions: 120, registers: 9, arrays: 16 };
        assert_eq!(parse("ok\t0.25\t120\t9\t16\r\n"), Some(Verdict::Listed(listing)));
        let rejected = Verdict::Rejected("error X3663: thread sync (after 1.5 s)".into());
        assert_eq!(parse("error\t1.5\terror X3663: thread sync\n"), Some(rejected));
        assert_eq!(parse("ok\t0.25\n"), None);
        assert_eq!(parse(""), None);
    }
}
