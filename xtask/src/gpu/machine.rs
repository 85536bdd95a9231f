//! The drivers that a machine has installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

use crate::process;

/// The folders of the dynamic linker.
pub struct Libraries {
    /// The output of `ldconfig -p`.
    known: String,
    folders: Vec<PathBuf>,
}

impl Libraries {
    pub fn installed() -> Self {
        let path = format!("{}:/usr/sbin:/sbin", env::var("PATH").unwrap_or_default());
        let known =
            process::quiet_output(Command::new("ldconfig").arg("-p").env("PATH", path)).unwrap_or_default();
        let mut folders = list("LD_LIBRARY_PATH");
        folders.push("/run/opengl-driver/lib".into());
        Libraries { known, folders }
    }

    pub fn has(&self, name: &str) -> bool {
        let of_this_machine = |line: &str| {
            let kind = line.trim_start().strip_prefix(name).and_then(|rest| rest.strip_prefix(" (libc6,"));
            kind.is_some_and(|kind| kind.starts_with("x86-64") || kind.starts_with("AArch64"))
        };
        self.known.lines().any(of_this_machine)
            || self.folders.iter().any(|folder| folder.join(name).exists())
    }
}

/// The machine's drivers that suffice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wanted {
    /// A driver for a device node.
    Hardware,
    /// Any driver, also in software.
    Any,
}

pub struct Machine {
    libraries: Libraries,
    /// Folders that may contain `vulkan/icd.d`.
    data: Vec<PathBuf>,
    nodes: Nodes,
}

/// Device nodes of GPUs.
#[derive(Clone, Copy, Default)]
struct Nodes {
    render: bool,
    nvidia: bool,
    dxg: bool,
}

impl Machine {
    pub fn look() -> Self {
        let home = |name: &str, below: &str| match env::var_os(name).filter(|path| !path.is_empty()) {
            Some(path) => PathBuf::from(path),
            None => PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(below),
        };
        let or = |mut list: Vec<PathBuf>, default: &str| {
            if list.is_empty() {
                list.push(default.into());
            }
            list
        };
        let fixed = ["/etc", "/usr/share", "/usr/local/share", "/usr/local/etc", "/run/opengl-driver/share"];
        let mut data: Vec<PathBuf> = fixed.map(PathBuf::from).into();
        data.push(home("XDG_CONFIG_HOME", ".config"));
        data.extend(or(list("XDG_CONFIG_DIRS"), "/etc/xdg"));
        data.push(home("XDG_DATA_HOME", ".local/share"));
        data.extend(list("XDG_DATA_DIRS"));
        let nvidia = |name: &str| {
            name.strip_prefix("nvidia").is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit()))
        };
        let nodes = Nodes {
            render: any_file("/dev/dri", |name| name.starts_with("renderD")),
            nvidia: any_file("/dev", nvidia),
            dxg: Path::new("/dev/dxg").exists(),
        };
        Machine { libraries: Libraries::installed(), data, nodes }
    }

    pub fn has_gpu(&self) -> bool {
        self.nodes.render || self.nodes.nvidia || self.nodes.dxg
    }

    /// True if there is `libvulkan.so.1`, and a driver file (ICD) whose library exists.
    pub fn has_vulkan(&self, wanted: Wanted) -> bool {
        let files = || {
            self.data.iter().flat_map(|folder| crate::files::ending(&folder.join("vulkan/icd.d"), ".json"))
        };
        self.libraries.has("libvulkan.so.1") && files().any(|icd| self.is_driver(&icd, wanted))
    }

    fn is_driver(&self, icd: &Path, wanted: Wanted) -> bool {
        let Some(library) = library_of(icd) else { return false };
        let exists = match library.find('/') {
            Some(0) => Path::new(&library).exists(),
            Some(_) => icd.with_file_name(&library).exists(),
            None => self.libraries.has(&library),
        };
        if !exists || wanted == Wanted::Any {
            return exists;
        }
        let named = |words: &[&str]| words.iter().any(|word| library.contains(word));
        !named(&["libvulkan_lvp", "swiftshader"])
            && (self.nodes.render
                || self.nodes.nvidia && named(&["nvidia", "NVIDIA"])
                || self.nodes.dxg && named(&["dzn"]))
    }
}

/// Returns the library that an ICD file names.
fn library_of(icd: &Path) -> Option<String> {
    let file: Value = serde_json::from_str(&fs::read_to_string(icd).ok()?).ok()?;
    Some(file["ICD"]["library_path"].as_str()?.to_owned())
}

fn any_file(folder: &str, wanted: impl Fn(&str) -> bool) -> bool {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| entry.file_name().to_str().is_some_and(&wanted))
}

/// Returns the folders that a variable names.
fn list(variable: &str) -> Vec<PathBuf> {
    let value = env::var_os(variable).unwrap_or_default();
    env::split_paths(&value).filter(|folder| !folder.as_os_str().is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Temporary;

    const LDCONFIG: &str = "2 libs found in cache `/etc/ld.so.cache'\n\
        \tlibvulkan.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libvulkan.so.1\n\
        \tlibvulkan_radeon.so (libc6) => /lib/i386-linux-gnu/libvulkan_radeon.so\n";

    fn machine(data: &Path, known: &str, nodes: Nodes) -> Machine {
        let libraries = Libraries { known: known.into(), folders: vec![data.join("lib")] };
        Machine { libraries, data: vec![data.into()], nodes }
    }

    fn with_driver(library: &str) -> Temporary {
        let folder = Temporary::new(&env::temp_dir(), "xtask-test-machine").unwrap();
        fs::create_dir_all(folder.0.join("vulkan/icd.d")).unwrap();
        fs::create_dir_all(folder.0.join("lib")).unwrap();
        let icd = format!("{{\"ICD\": {{\"api_version\": \"1.3.0\", \"library_path\": \"{library}\"}}}}");
        fs::write(folder.0.join("vulkan/icd.d/a.json"), icd).unwrap();
        folder
    }

    fn add_library(folder: &Temporary, name: &str) {
        fs::write(folder.0.join("lib").join(name), "").unwrap();
    }

    const RENDER: Nodes = Nodes { render: true, nvidia: false, dxg: false };
    const NVIDIA: Nodes = Nodes { render: false, nvidia: true, dxg: false };

    #[test]
    fn libraries_of_other_machines_do_not_count() {
        let libraries = Libraries { known: LDCONFIG.into(), folders: Vec::new() };
        assert!(libraries.has("libvulkan.so.1"));
        assert!(!libraries.has("libvulkan.so"));
        assert!(!libraries.has("libvulkan_radeon.so"));
    }

    #[test]
    fn a_driver_needs_its_library_and_the_loader() {
        let folder = with_driver("libvulkan_radeon.so");
        let has = |known, wanted| machine(&folder.0, known, RENDER).has_vulkan(wanted);
        assert!(!has(LDCONFIG, Wanted::Any));
        add_library(&folder, "libvulkan_radeon.so");
        assert!(has(LDCONFIG, Wanted::Any) && has(LDCONFIG, Wanted::Hardware));
        assert!(!has("", Wanted::Any));
    }

    #[test]
    fn software_is_no_hardware() {
        let folder = with_driver("../../lib/libvulkan_lvp.so");
        add_library(&folder, "libvulkan_lvp.so");
        let has = |wanted| machine(&folder.0, LDCONFIG, RENDER).has_vulkan(wanted);
        assert!(has(Wanted::Any) && !has(Wanted::Hardware));
    }

    #[test]
    fn a_driver_suits_its_node() {
        for (library, fits) in [("libGLX_nvidia.so.0", true), ("libvulkan_radeon.so", false)] {
            let folder = with_driver(library);
            add_library(&folder, library);
            assert_eq!(machine(&folder.0, LDCONFIG, NVIDIA).has_vulkan(Wanted::Hardware), fits, "{library}");
            assert!(
                !machine(&folder.0, LDCONFIG, Nodes::default()).has_vulkan(Wanted::Hardware),
                "{library}"
            );
        }
    }
}
