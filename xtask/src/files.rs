//! Files and folders.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

use crate::error::{At, Result, failed};

/// Writes `text` unless the file already has it. A concurrent reader sees the whole old or the
/// whole new text.
pub fn replace(path: &Path, text: &str, executable: bool) -> Result {
    if fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}", process::id()));
    let new = PathBuf::from(new);
    fs::write(&new, text).at(&new)?;
    if executable {
        make_executable(&new).at(&new)?;
    }
    fs::rename(&new, path).at(path)
}

pub fn make_executable(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let _ = path;
    Ok(())
}

/// Removes a folder with its contents, if it exists.
pub fn remove_all(folder: &Path) -> Result {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at(folder),
        _ => Ok(()),
    }
}

/// Returns the bytes of all files in a folder.
pub fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).at(folder)? {
        let entry = entry.at(folder)?;
        let data = entry.metadata().at(entry.path())?;
        bytes += if data.is_dir() { size(&entry.path())? } else { data.len() };
    }
    Ok(bytes)
}

/// Returns the files of a folder whose names end with `end`, sorted; none if there is no folder.
pub fn ending(folder: &Path, end: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(end));
    files.sort();
    files
}

/// A folder for one run. It is removed when the value is dropped.
pub struct Temporary(pub PathBuf);

impl Temporary {
    pub fn new(parent: &Path, name: &str) -> Result<Self> {
        let names = (0..).map(|n: u32| parent.join(format!("{name}-{}-{n}", process::id())));
        for path in names {
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Temporary(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(format!("{}: {error}", path.display()))),
            }
        }
        unreachable!("there is always another number")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced() {
        let temporary = Temporary::new(&std::env::temp_dir(), "xtask-test-files").unwrap();
        let file = temporary.0.join("file.json");
        replace(&file, "one", false).unwrap();
        replace(&file, "two", true).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(size(&temporary.0).unwrap(), 3);
        assert_eq!(ending(&temporary.0, ".json"), [file]);
        assert!(ending(&temporary.0, ".deb").is_empty());
        let folder = temporary.0.clone();
        drop(temporary);
        assert!(!folder.exists());
        remove_all(&folder).unwrap();
    }
}
