//! Finds and runs programs, with time limits.

use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use crate::error::{Result, ended, refused};

/// The end of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ok,
    Failed(i32),
    /// Ended by a signal.
    Crashed(i32),
    TimedOut,
}

impl From<ExitStatus> for Outcome {
    fn from(status: ExitStatus) -> Self {
        #[cfg(unix)]
        if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
            return Outcome::Crashed(signal);
        }
        match status.code() {
            Some(0) => Outcome::Ok,
            // The exit status of `timeout`.
            Some(124) => Outcome::TimedOut,
            // The exit status of shells.
            Some(code @ 129..=199) => Outcome::Crashed(code - 128),
            code => Outcome::Failed(code.unwrap_or(-1)),
        }
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Outcome::Ok => f.write_str("ok"),
            Outcome::Failed(status) => write!(f, "failed, status {status}"),
            Outcome::Crashed(signal) => write!(f, "crashed, signal {signal}"),
            Outcome::TimedOut => f.write_str("timed out"),
        }
    }
}

/// Runs `command` for at most `limit`.
pub fn within(limit: Duration, command: &mut Command) -> io::Result<Outcome> {
    let end = Instant::now() + limit;
    let mut child = command.stdin(Stdio::null()).spawn()?;
    if let Some(status) = wait_until(end, &mut child)? {
        return Ok(status.into());
    }
    child.kill()?;
    // A program that hangs in a GPU's driver does not end even now. It is left behind.
    wait_until(Instant::now() + Duration::from_secs(5), &mut child)?;
    Ok(Outcome::TimedOut)
}

fn wait_until(end: Instant, child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        let status = child.try_wait()?;
        let left = end.saturating_duration_since(Instant::now());
        if status.is_some() || left.is_zero() {
            return Ok(status);
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Runs `command`, which prints its errors itself.
pub fn run(command: &mut Command) -> Result {
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    if status.success() { Ok(()) } else { Err(ended(status)) }
}

/// Returns the output of `command`, which must succeed.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| cannot_start(command, &error))?;
    if !output.status.success() {
        return Err(ended(output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the output of `command` if it can be started and succeeds. Its errors are not shown.
pub fn quiet_output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn cannot_start(command: &Command, error: &io::Error) -> crate::error::Error {
    refused(format!("{}: {error}", command.get_program().display()))
}

/// Replaces this process by `command`.
pub fn exec(command: &mut Command) -> Result<std::convert::Infallible> {
    #[cfg(unix)]
    let error = std::os::unix::process::CommandExt::exec(command);
    #[cfg(not(unix))]
    let error = match command.status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(error) => error,
    };
    // The exit statuses of shells.
    let status = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    let text = format!("{}: {error}", command.get_program().display());
    Err(crate::error::Error { status, text })
}

/// Returns the program that `name` starts.
pub fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let name = Path::new(name.as_ref());
    if name.components().count() > 1 {
        return is_executable(name).then(|| name.into());
    }
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| is_executable(path))
}

/// True if all of `names` can be started.
pub fn have(names: &[&str]) -> bool {
    names.iter().all(|name| find(name).is_some())
}

fn is_executable(path: &Path) -> bool {
    #[cfg(unix)]
    let runs =
        |data: &std::fs::Metadata| std::os::unix::fs::PermissionsExt::mode(&data.permissions()) & 0o111 != 0;
    #[cfg(not(unix))]
    let runs = |_: &std::fs::Metadata| true;
    path.metadata().is_ok_and(|data| data.is_file() && runs(&data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_in_words() {
        let of =
            |script: &str| within(Duration::from_secs(20), Command::new("sh").args(["-c", script])).unwrap();
        let words = ["exit 0", "exit 7", "exit 101", "exit 124", "exit 139", "kill -9 $$"];
        assert_eq!(
            words.map(|script| of(script).to_string()),
            [
                "ok",
                "failed, status 7",
                "failed, status 101",
                "timed out",
                "crashed, signal 11",
                "crashed, signal 9"
            ]
        );
    }

    #[test]
    fn hanging_processes_are_ended() {
        let start = Instant::now();
        let outcome = within(Duration::from_millis(100), Command::new("sleep").arg("60")).unwrap();
        assert_eq!(outcome, Outcome::TimedOut);
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn programs_are_found() {
        assert!(find("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(find("no-such-program"), None);
        assert_eq!(find("./Cargo.toml"), None);
        assert!(have(&["sh", "true"]) && !have(&["sh", "no-such-program"]));
    }
}
