//! The programs behind `scripts/`. Each has a thin script in front: `scripts/drivers` runs `xtask
//! drivers`.

mod browser;
mod dawn;
mod drivers;
mod error;
mod files;
mod gpu;
mod gpu_report;
mod mpi;
mod npm;
mod package;
mod process;
mod prose;
mod repo;
mod size;
mod terminal;
mod web;
mod windows;

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use error::{Result, refused};
use repo::Repo;

type Main = fn(&Repo, Vec<OsString>) -> Result;

const COMMANDS: [(&str, Main); 11] = [
    ("browser", browser::main),
    ("dawn", dawn::main),
    ("drivers", drivers::main),
    ("gpu", gpu::main),
    ("gpu-report", gpu_report::main),
    ("mpi", mpi::main),
    ("package", package::main),
    ("prose", prose::main),
    ("size", size::main),
    ("terminal", terminal::main),
    ("web", web::main),
];

/// Runs a command. The scripts pass `--repo FOLDER COMMAND [ARGUMENTS...]`. Without a repository it
/// is `run-packed FOLDER [OPTIONS]`.
fn run(arguments: &[OsString]) -> (&str, Result) {
    match arguments {
        [option, repo, command, rest @ ..] if option == "--repo" => {
            let Some((name, main)) = COMMANDS.iter().find(|(name, _)| command == name) else {
                return ("xtask", Err(refused(format!("there is no {}", command.display()))));
            };
            (name, Repo::new(Path::new(repo)).and_then(|repo| main(&repo, rest.to_vec())))
        }
        [command, folder, rest @ ..] if command == "run-packed" => {
            ("gpu-report", gpu_report::run_packed(Path::new(folder), rest.to_vec()))
        }
        _ => ("xtask", Err(refused("usage: scripts/xtask COMMAND [ARGUMENTS...]"))),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let (name, result) = run(&arguments);
    let Err(error) = result else { return ExitCode::SUCCESS };
    if !error.text.is_empty() {
        eprintln!("scripts/{name}: {}", error.text);
    }
    error.status.into()
}
