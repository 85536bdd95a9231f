//! Makes a separate root from packages. It makes the files that the packages' scripts would make,
//! and a script that starts programs there. The script uses chroot in a user namespace, and so
//! needs no root.

use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::drivers::Driver;
use super::shell;
use crate::error::{At, Result, failed};

/// Makes the links and folders of a whole system, and the files of the script of the package
/// libwine.
pub fn complete(root: &Path) -> Result {
    for folder in ["proc", "dev", "sys", "etc", "home", "tmp/.X11-unix", "var/tmp"] {
        let path = root.join(folder);
        fs::create_dir_all(&path).at(&path)?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        link(&format!("usr/{name}"), &root.join(name))?;
    }
    link("dash", &root.join("usr/bin/sh"))?;
    let zlib = root.join("usr/x86_64-w64-mingw32/lib/zlib1.dll");
    let windows = root.join("usr/lib/x86_64-linux-gnu/wine/x86_64-windows");
    if zlib.exists() && windows.is_dir() {
        let path = windows.join("zlib1.dll");
        fs::write(&path, builtin(&zlib)?).at(&path)?;
    }
    Ok(())
}

/// Marks a DLL as one of Wine's.
fn builtin(dll: &Path) -> Result<Vec<u8>> {
    const MARK: &[u8; 16] = b"Wine builtin DLL";
    let mut bytes = Vec::new();
    fs::File::open(dll).and_then(|mut file| file.read_to_end(&mut bytes)).at(dll)?;
    let place = bytes.get_mut(64..96).ok_or_else(|| failed(format!("{} is no DLL", dll.display())))?;
    place.fill(0);
    place[..16].copy_from_slice(MARK);
    Ok(bytes)
}

/// Makes a link, unless something is at its place.
#[cfg(unix)]
fn link(to: &str, at: &Path) -> Result {
    if at.symlink_metadata().is_ok() { Ok(()) } else { std::os::unix::fs::symlink(to, at).at(at) }
}

#[cfg(not(unix))]
fn link(_: &str, at: &Path) -> Result {
    Err(failed(format!("{}: no links here", at.display())))
}

/// Returns a script that starts a program in `root`. It also makes `folders` visible there, at the
/// same paths.
pub fn wrapper(root: &Path, driver: &Driver, folders: &[PathBuf]) -> String {
    let mut text = format!(
        "#!/bin/sh\n# PROGRAM [ARGS...] of the packages of {}, in a root of their own (made by scripts/gpu)\n\
         # Of the machine: libraries by cargo, and a folder with which Wine crashes.\nunset LD_LIBRARY_PATH TMPDIR\n",
        driver.title
    );
    let common = [("HOME", "/home"), ("PATH", "/usr/bin:/usr/sbin")];
    for (name, value) in common.iter().chain(driver.variables) {
        let _ = writeln!(text, "export {name}={}", shell::quote(value));
    }
    let words: Vec<String> = std::iter::once(root)
        .chain(folders.iter().map(PathBuf::as_path))
        .map(|path| shell::quote(&path.display().to_string()))
        .collect();
    text + &format!(
        r#"exec unshare --user --map-root-user --mount sh -c '
  root=$1 && shift && mount --make-rprivate / || exit
  for folder in proc dev sys; do mount --rbind /$folder "$root/$folder" || exit; done
  while [ "$1" != -- ]; do mkdir -p "$root$1" && mount --rbind "$1" "$root$1" && shift || exit; done
  shift
  [ -d "$root$PWD" ] || PWD=/
  exec unshare --root "$root" --wd "$PWD" "$@"' sh {} -- "$@"
"#,
        words.join(" ")
    )
}

/// Checks that a program starts there.
pub fn check(wrapper: &Path, program: &str) -> Result {
    let output = Command::new(wrapper).args([program, "--version"]).output().at(wrapper)?;
    if output.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        Err(failed(format!("no user namespace in which to change the root: {}", said.trim())))
    }
}

#[cfg(test)]
mod tests {
    use super::super::drivers;
    use super::*;
    use crate::files::Temporary;

    #[test]
    fn a_root_is_completed() {
        let temporary = Temporary::new(&std::env::temp_dir(), "xtask-test-root").unwrap();
        let root = &temporary.0;
        for folder in
            ["usr/bin", "usr/x86_64-w64-mingw32/lib", "usr/lib/x86_64-linux-gnu/wine/x86_64-windows"]
        {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let zlib = root.join("usr/x86_64-w64-mingw32/lib/zlib1.dll");
        fs::write(&zlib, [7; 100]).unwrap();
        complete(root).unwrap();
        complete(root).unwrap();
        assert_eq!(fs::read_link(root.join("lib64")).unwrap(), Path::new("usr/lib64"));
        assert_eq!(fs::read_link(root.join("usr/bin/sh")).unwrap(), Path::new("dash"));
        let marked = fs::read(root.join("usr/lib/x86_64-linux-gnu/wine/x86_64-windows/zlib1.dll")).unwrap();
        assert_eq!(
            (marked.len(), &marked[64..80], &marked[80..97]),
            (100, &b"Wine builtin DLL"[..], &[&[0; 16][..], &[7]].concat()[..])
        );
        fs::write(&zlib, [7; 90]).unwrap();
        assert!(complete(root).is_err());
    }

    #[test]
    fn scripts_that_start_programs() {
        let text = wrapper(Path::new("/a/root"), drivers::find("wine").unwrap(), &["/b c".into()]);
        assert!(text.contains("export WINEPREFIX=/home/wine\n"));
        assert!(text.ends_with("' sh /a/root '/b c' -- \"$@\"\n"));
    }
}
