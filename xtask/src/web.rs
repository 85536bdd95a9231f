//! `scripts/web`: builds the page of examples/web, and serves it or drives it in browsers.

use std::ffi::OsString;
use std::process::Command;

use crate::browser::{Log, Program, Runtime, TRIPLE, Toolchain, build, get, joined};
use crate::error::Result;
use crate::process;
use crate::repo::Repo;

const USAGE: &str = "\
scripts/web [--port N]: builds the page of examples/web and serves it on 127.0.0.1 [default: 8080; 0: any free port].

It also serves the weights, if `cargo run --release -p embed` has fetched them (with the same WGPU_ATTENTION_CACHE).
Otherwise the page asks for files.

scripts/web --test [chromium] [firefox] [--out FOLDER]: tests the page in headless Chromium, on SwiftShader, and in
headless Firefox, on lavapipe, or in the given one. It checks numbers against stored ones, the keyboard, names for
screen readers, and messages, and it takes pictures. FOLDER gets the pictures [default: target/web]. Without weights, a
browser or node it prints a line that begins with \"skipped:\".

Everything is fetched into target; nothing is installed. `scripts/browser --help` lists the downloads.
";

const PAGE: Program = Program { cargo: &["-p", "web", "--bin", "web"], place: "web" };

const BROWSERS: [Runtime; 2] = [Runtime::Chromium, Runtime::Firefox];

/// The requested action.
#[derive(Debug, PartialEq)]
enum Job {
    Help,
    Serve { port: u16 },
    Test { browsers: Vec<Runtime>, out: Option<OsString> },
}

impl Job {
    fn of(words: Vec<OsString>) -> std::result::Result<Self, lexopt::Error> {
        use lexopt::prelude::{Long, Short, Value, ValueExt};
        let (mut port, mut test, mut out, mut browsers) = (None, false, None, Vec::new());
        let mut parser = lexopt::Parser::from_args(words);
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => return Ok(Job::Help),
                Long("port") => port = Some(parser.value()?.parse()?),
                Long("test") => test = true,
                Long("out") => out = Some(parser.value()?),
                Value(name) if BROWSERS.iter().any(|browser| name == browser.name()) => {
                    browsers.extend(Runtime::named(&name));
                }
                other => return Err(other.unexpected()),
            }
        }
        match (test, port, out) {
            (false, port, None) if browsers.is_empty() => Ok(Job::Serve { port: port.unwrap_or(8080) }),
            (true, None, out) => {
                if browsers.is_empty() {
                    browsers = BROWSERS.into();
                }
                Ok(Job::Test { browsers, out })
            }
            (false, ..) => Err("--out and browsers are for --test".into()),
            (true, ..) => Err("--port is not for --test, which takes one that is free".into()),
        }
    }
}

pub fn main(repo: &Repo, words: Vec<OsString>) -> Result {
    let job = Job::of(words)?;
    if job == Job::Help {
        print!("{USAGE}");
        return Ok(());
    }
    // The toolchain, wasm-bindgen's tool and Chromium are the same as for scripts/browser.
    let folder = repo.folder("browser")?;
    let log = Log::new(folder.join("log.web"))?;
    if !process::have(&["node"]) {
        log.skip("there is no node, which serves the page");
        return Ok(());
    }
    let Some(toolchain) = Toolchain::get(repo, TRIPLE, &log)? else { return Ok(()) };
    let browsers = match &job {
        Job::Test { browsers, .. } => get(repo, &folder, &log, browsers),
        _ => Vec::new(),
    };
    if matches!(job, Job::Test { .. }) && browsers.is_empty() {
        return Ok(());
    }
    build(repo, &folder, &toolchain, PAGE)?;

    let mut node = Command::new("node");
    node.current_dir(&repo.root);
    let program = folder.join(PAGE.place);
    match job {
        Job::Help => return Ok(()),
        Job::Serve { port } => node.arg("examples/web/serve.mjs").arg(program).arg(port.to_string()),
        Job::Test { out, .. } => {
            let out = match out {
                Some(out) => out,
                None => repo.folder("web")?.into(),
            };
            node.arg("examples/web/test.mjs").args([program.into(), out]);
            node.args(browsers.iter().map(|(browser, path)| joined(&format!("{}=", browser.name()), path)))
        }
    };
    process::run(&mut node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs() {
        let job = |words: &[&str]| Job::of(words.iter().map(OsString::from).collect());
        assert_eq!(job(&[]).unwrap(), Job::Serve { port: 8080 });
        assert_eq!(job(&["--port", "0"]).unwrap(), Job::Serve { port: 0 });
        let both = || BROWSERS.to_vec();
        assert_eq!(job(&["--test"]).unwrap(), Job::Test { browsers: both(), out: None });
        assert_eq!(
            job(&["--test", "--out", "x"]).unwrap(),
            Job::Test { browsers: both(), out: Some("x".into()) }
        );
        assert_eq!(
            job(&["--test", "firefox"]).unwrap(),
            Job::Test { browsers: vec![Runtime::Firefox], out: None }
        );
        assert_eq!(job(&["--test", "--help"]).unwrap(), Job::Help);
        for wrong in [
            &["--port", "x"][..],
            &["--port", "70000"],
            &["--out", "x"],
            &["--test", "--port", "1"],
            &["x"],
            &["firefox"],
            &["--test", "deno"],
        ] {
            assert!(job(wrong).is_err(), "{wrong:?}");
        }
    }
}
