//! The end of a command: an exit status, and a message to print.

use std::fmt::{self, Display};
use std::process::ExitStatus;

pub type Result<T = ()> = std::result::Result<T, Error>;

#[derive(Debug)]
pub struct Error {
    pub status: u8,
    /// Empty if the message was already printed.
    pub text: String,
}

/// An operation failed.
pub fn failed(text: impl Display) -> Error {
    Error { status: 1, text: text.to_string() }
}

/// The request is impossible.
pub fn refused(text: impl Display) -> Error {
    Error { status: 2, text: text.to_string() }
}

/// A program failed and has printed the reason itself.
pub fn ended(status: ExitStatus) -> Error {
    Error { status: status.code().and_then(|code| code.try_into().ok()).unwrap_or(1), text: String::new() }
}

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        failed(error)
    }
}

impl From<lexopt::Error> for Error {
    fn from(error: lexopt::Error) -> Self {
        refused(error)
    }
}

/// Adds the file to an error: `fs::read(&path).at(&path)?`.
pub trait At<T> {
    fn at(self, what: impl AsRef<std::path::Path>) -> Result<T>;
}

impl<T> At<T> for std::io::Result<T> {
    fn at(self, what: impl AsRef<std::path::Path>) -> Result<T> {
        self.map_err(|error| failed(format!("{}: {error}", what.as_ref().display())))
    }
}
