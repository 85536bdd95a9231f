//! Runs the cases of other projects' suites, and writes docs/conformance.md: `conformance FOLDER
//! [SUITE...] [--page PAGE] [--share N/OF]`. `scripts/conformance` makes the cases first.

mod attention_gym;
mod cached;
mod calls;
mod case;
mod dense;
mod fla;
mod flash_attention;
mod flashinfer;
mod ggml;
mod mods;
mod onnx;
mod outcome;
mod page;
mod rule;
mod section;
mod suites;
mod tables;
mod tensor;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lexopt::prelude::*;
use wgpu_attention::{Config, Gpu, wgpu};

use case::Case;
use section::{Section, Verdict};
use suites::{SUITES, Suite};

struct Options {
    /// The folder with a folder of cases for each suite.
    folder: PathBuf,
    suites: Vec<&'static Suite>,
    page: Option<PathBuf>,
    /// The number of this share, from 0, and the number of shares.
    share: (usize, usize),
}

impl Options {
    fn read() -> Result<Self, lexopt::Error> {
        let (mut folder, mut page, mut share) = (None, None, (0, 1));
        let mut suites = Vec::new();
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("page") => page = Some(parser.value()?.into()),
                Long("share") => {
                    let text = parser.value()?.string()?;
                    let numbers =
                        text.split_once('/').and_then(|(n, of)| Some((n.parse().ok()?, of.parse().ok()?)));
                    let found = numbers.filter(|(n, of)| (1..=*of).contains(n));
                    let (n, of): (usize, usize) = found.ok_or("--share is N/OF, with N from 1 to OF")?;
                    share = (n - 1, of);
                }
                Value(path) if folder.is_none() => folder = Some(path.into()),
                Value(name) => {
                    let suite = SUITES.iter().find(|suite| name == suite.folder);
                    suites.push(suite.ok_or_else(|| format!("no suite {}", name.display()))?);
                }
                _ => return Err(argument.unexpected()),
            }
        }
        if suites.is_empty() {
            suites = SUITES.iter().collect();
        }
        Ok(Options { folder: folder.ok_or("no folder of cases")?, suites, page, share })
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("conformance: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the share. Returns false if a case failed.
fn run() -> Result<bool, Box<dyn std::error::Error>> {
    let options = Options::read()?;
    let gpu = device()?;
    let mut failures = 0;
    for suite in &options.suites {
        let section = run_suite(&gpu, suite, &options)?;
        print!("{}", section.summary());
        failures += section.failures();
        if let Some(path) = &options.page {
            page::store(&options.folder, &section)?;
            std::fs::write(path, page::text(&gpu, &options.folder))?;
        }
    }
    Ok(failures == 0)
}

/// Opens the device. A software driver gets no 16-bit arithmetic, because it compiles such kernels
/// for minutes. Halves are then pairs in words.
fn device() -> Result<Gpu, Box<dyn std::error::Error>> {
    let gpu = Gpu::new()?;
    if gpu.device().adapter_info().device_type != wgpu::DeviceType::Cpu {
        return Ok(gpu);
    }
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))?;
    let (required_features, required_limits) = Config::new(1, 1).required(&adapter);
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))?;
    Ok(Gpu::with_device(device, queue))
}

fn run_suite(
    gpu: &Gpu,
    suite: &'static Suite,
    options: &Options,
) -> Result<Section, Box<dyn std::error::Error>> {
    let mut section = Section::new(suite);
    for (n, file) in files(&options.folder.join(suite.folder))?.iter().enumerate() {
        if n % options.share.1 != options.share.0 {
            continue;
        }
        let case = Case::read(file).map_err(|why| format!("{}: {why}", file.display()))?;
        let verdict = Verdict::of(&case, (suite.run)(gpu, &case));
        section.add(&case, verdict);
    }
    Ok(section)
}

/// Returns the files of cases in a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|ext| ext == "safetensors"));
    files.sort();
    if files.is_empty() {
        return Err(format!("no cases in {}", folder.display()).into());
    }
    Ok(files)
}
