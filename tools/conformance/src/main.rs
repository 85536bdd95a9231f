//! Runs the cases of other projects' suites, and writes docs/conformance.md: `conformance FOLDER
//! [--page PAGE] [--share N/OF]`. `scripts/conformance` fetches the cases first.

mod case;
mod onnx;
mod page;
mod tensor;

use std::path::PathBuf;
use std::process::ExitCode;

use lexopt::prelude::*;
use wgpu_attention::Gpu;

use case::Case;
use onnx::Outcome;
use page::{Page, Verdict};

struct Options {
    folder: PathBuf,
    page: Option<PathBuf>,
    /// The number of this share, from 0, and the number of shares.
    share: (usize, usize),
}

impl Options {
    fn read() -> Result<Self, lexopt::Error> {
        let (mut folder, mut page, mut share) = (None, None, (0, 1));
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
                _ => return Err(argument.unexpected()),
            }
        }
        Ok(Options { folder: folder.ok_or("no folder of cases")?, page, share })
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
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&options.folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|ext| ext == "safetensors"));
    files.sort();
    if files.is_empty() {
        return Err(format!("no cases in {}", options.folder.display()).into());
    }
    let gpu = Gpu::new()?;
    let mut page = Page::new(&gpu);
    for (n, file) in files.iter().enumerate() {
        if n % options.share.1 != options.share.0 {
            continue;
        }
        let case = Case::read(file).map_err(|why| format!("{}: {why}", file.display()))?;
        let verdict = match onnx::run(&gpu, &case) {
            Ok(Outcome::Refused(why)) => Verdict::Refused(why),
            Ok(Outcome::Computed(outputs)) => Verdict::of(&case, &outputs),
            Err(onnx::Failed(why)) => Verdict::Failed(why),
        };
        page.add(&case, verdict);
    }
    print!("{}", page.summary());
    if let Some(path) = options.page {
        std::fs::write(path, page.text())?;
    }
    Ok(page.failures() == 0)
}
