//! A copy of the repository under `target`, to be changed and compiled.

use std::path::Path;
use std::{fs, io};

/// Makes the copy. Only `folders` are copied; everything else is linked.
pub fn copy(repo: &Path, to: &Path, folders: &[&str]) -> io::Result<()> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(repo)? {
        let name = entry?.file_name();
        let (from, to) = (repo.join(&name), to.join(&name));
        match name.to_string_lossy().as_ref() {
            "target" | ".git" => {}
            name if folders.contains(&name) => copy_folder(&from, &to)?,
            _ => std::os::unix::fs::symlink(from, to)?,
        }
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// Changes a file, which must differ then.
pub fn edit(path: &Path, change: impl FnOnce(String) -> String) -> io::Result<()> {
    let text = fs::read_to_string(path)?;
    let changed = change(text.clone());
    if changed == text {
        return Err(io::Error::other(format!("{} has no place for an edit", path.display())));
    }
    fs::write(path, changed)
}
