//! Khronos' validator: a process per module, since it takes no more.

use std::path::Path;
use std::process::Command;

use crate::verdict::Verdict;

/// `command`: the program, after the loader it runs through, if any.
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
