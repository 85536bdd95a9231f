//! Khronos' validator, with one process per module: it accepts one file.

use std::path::Path;
use std::process::Command;

use crate::verdict::Verdict;

/// `command`: the program; before it the loader that runs it, if any.
pub fn check(command: &[String], module: &Path) -> Verdict {
    let (program, arguments) = command.split_first().expect("a command");
    let run = Command::new(program).args(arguments).args(["--target-env", "vulkan1.3"]).arg(module).output();
    match run {
        Ok(run) if run.status.success() && run.stdout.is_empty() && run.stderr.is_empty() => {
            Verdict::Accepted
        }
        Ok(run) => {
            let text = [run.stdout, run.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            Verdict::Rejected(format!("{} {}", run.status, text.concat()))
        }
        Err(error) => Verdict::Rejected(error.to_string()),
    }
}
