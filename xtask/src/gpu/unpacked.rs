//! Unpacked packages, and the scripts that start programs with their drivers.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::drivers::{Bundle, Driver, Interface};
use super::{root, shell};
use crate::error::{At, Result, failed};
use crate::files;

/// The version of the unpacking. Raise it when unpacking changes: packages are then fetched again.
const RECIPE: u32 = 5;

/// A processor's names, and the path of its dynamic loader.
#[derive(Debug)]
pub struct Cpu {
    pub name: &'static str,
    pub debian: &'static str,
    loader: &'static str,
    host_loader: &'static str,
}

const CPUS: [Cpu; 2] = [
    Cpu {
        name: "x86_64",
        debian: "amd64",
        loader: "ld-linux-x86-64.so.2",
        host_loader: "/lib64/ld-linux-x86-64.so.2",
    },
    Cpu {
        name: "aarch64",
        debian: "arm64",
        loader: "ld-linux-aarch64.so.1",
        host_loader: "/lib/ld-linux-aarch64.so.1",
    },
];

impl Cpu {
    pub fn named(name: &str) -> Option<&'static Self> {
        CPUS.iter().find(|cpu| cpu.name == name)
    }
}

/// The folder of a bundle.
pub struct Unpacked {
    pub folder: PathBuf,
    cpu: &'static Cpu,
}

impl Unpacked {
    pub fn new(folder: PathBuf, cpu: &'static Cpu) -> Self {
        Unpacked { folder, cpu }
    }

    pub fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// True if it is complete and matches the current `bundle`.
    pub fn is(&self, bundle: &Bundle) -> bool {
        fs::read_to_string(self.folder.join("stamp")).is_ok_and(|text| text == stamp(bundle, &self.folder))
    }

    /// Marks it as complete, to be used at `folder`.
    pub fn mark(&self, bundle: &Bundle, folder: &Path) -> Result {
        let path = self.folder.join("stamp");
        fs::write(&path, stamp(bundle, folder)).at(&path)
    }

    /// Returns the folders of libraries.
    fn libraries(&self) -> Vec<PathBuf> {
        let folders =
            ["usr/lib", "lib"].map(|lib| self.root().join(format!("{lib}/{}-linux-gnu", self.cpu.name)));
        folders.into_iter().filter(|folder| folder.is_dir()).collect()
    }

    /// Returns the packages' dynamic loader, or the machine's if its libc is used.
    fn loader(&self) -> PathBuf {
        let own = self
            .libraries()
            .into_iter()
            .map(|folder| folder.join(self.cpu.loader))
            .find(|path| path.exists());
        own.unwrap_or_else(|| self.cpu.host_loader.into())
    }

    fn library_path(&self) -> String {
        let folders: Vec<String> =
            self.libraries().iter().map(|folder| folder.display().to_string()).collect();
        folders.join(":")
    }

    /// Returns the path of a library or program of the packages.
    fn find(&self, name: &str) -> Result<PathBuf> {
        let folders = ["usr/lib/chromium", "usr/lib/wine", "usr/bin"].map(|folder| self.root().join(folder));
        let mut paths = self.libraries().into_iter().chain(folders).map(|folder| folder.join(name));
        paths.find(|path| path.exists()).ok_or_else(|| failed(format!("no {name} in the packages")))
    }

    /// True if the packages have the driver. They are not the same for every processor.
    pub fn has(&self, driver: &Driver) -> bool {
        self.find(driver.file).is_ok()
    }

    /// Checks that the driver is here and finds all its libraries.
    pub fn check(&self, driver: &Driver) -> Result {
        if let Some(library) = driver.preload {
            self.find(library)?;
        }
        let mut list = Command::new(self.loader());
        list.arg("--library-path").arg(self.library_path()).arg("--list").arg(self.find(driver.file)?);
        let output = list.output()?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let is_wrong = |line: &&str| ["not found", "error", "cannot"].iter().any(|word| line.contains(word));
        let missing: Vec<&str> = text.lines().filter(is_wrong).collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(failed(format!("{}: {}", driver.file, missing.join("\n"))))
        }
    }

    /// Returns the variables that programs need to find `driver`.
    pub fn variables(&self, driver: &Driver) -> Vec<(&'static str, String)> {
        let icd = self.folder.join(driver.icd()).display().to_string();
        let mut variables = match driver.interface {
            Interface::Vulkan => vec![("WGPU_BACKEND", "vulkan".into()), ("VK_DRIVER_FILES", icd)],
            Interface::Egl => vec![("WGPU_BACKEND", "gl".into())],
            Interface::Tools => Vec::new(),
            // The root's variables mean nothing outside of the root.
            Interface::Root => return Vec::new(),
        };
        let root = self.root().display().to_string();
        variables
            .extend(driver.variables.iter().map(|&(name, value)| (name, value.replace("{root}", &root))));
        variables
    }

    /// Writes the files that `driver` needs in addition to its packages. Programs in a separate
    /// root see `folders`.
    pub fn install(&self, driver: &Driver, folders: &[PathBuf]) -> Result<PathBuf> {
        if driver.interface == Interface::Vulkan {
            let (version, library) =
                (self.api_version(driver), self.find(driver.file)?.display().to_string());
            let icd = serde_json::json!({
                "file_format_version": "1.0.1",
                "ICD": {"api_version": version, "library_path": library},
            });
            files::replace(&self.folder.join(driver.icd()), &format!("{icd}\n"), false)?;
        }
        let wrapper = self.folder.join(driver.wrapper());
        if driver.interface == Interface::Root {
            files::replace(&wrapper, &root::wrapper(&self.root(), driver, folders), true)?;
            root::check(&wrapper, self.cpu.host_loader)?;
        } else {
            files::replace(&wrapper, &self.wrapper(driver)?, true)?;
        }
        Ok(wrapper)
    }

    /// Returns the version in the packages' ICD file.
    fn api_version(&self, driver: &Driver) -> String {
        let folders = ["usr/share/vulkan/icd.d", "usr/lib/chromium"].map(|folder| self.root().join(folder));
        let version = folders.iter().flat_map(|folder| files::ending(folder, ".json")).find_map(|path| {
            let file: Value = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
            let (library, version) =
                (file["ICD"]["library_path"].as_str()?, file["ICD"]["api_version"].as_str()?);
            library.ends_with(driver.file).then(|| version.to_owned())
        });
        version.unwrap_or_else(|| "1.3.0".into())
    }

    fn wrapper(&self, driver: &Driver) -> Result<String> {
        let mut text =
            format!("#!/bin/sh\n# PROGRAM [ARGS...] with {} (made by scripts/gpu)\n", driver.title);
        for (name, value) in self.variables(driver) {
            let _ = writeln!(text, "export {name}={}", shell::quote(&value));
        }
        let _ = write!(text, "exec {}", shell::quote(&self.loader().display().to_string()));
        if let Some(library) = driver.preload {
            let _ = write!(text, " --preload {}", shell::quote(&self.find(library)?.display().to_string()));
        }
        let _ = writeln!(
            text,
            " --library-path \"{}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\" \"$@\"",
            self.library_path()
        );
        Ok(text)
    }
}

/// Returns the text that changes whenever the folder must be fetched again.
fn stamp(bundle: &Bundle, folder: &Path) -> String {
    let Bundle { suites, packages, part, .. } = bundle;
    let part = part.map(|(package, _)| package).unwrap_or_default();
    let lists = format!("{} {part}, {}", packages.join(" "), suites.join(" "));
    format!("recipe {RECIPE} in {}: {lists}\n", folder.display())
}

#[cfg(test)]
mod tests {
    use super::super::drivers;
    use super::*;
    use crate::files::Temporary;

    /// Returns a folder with the named files.
    fn unpacked(names: &[&str]) -> (Temporary, Unpacked) {
        let temporary = Temporary::new(&std::env::temp_dir(), "xtask-test-unpacked").unwrap();
        let unpacked = Unpacked::new(temporary.0.join("bundle"), Cpu::named("x86_64").unwrap());
        for name in names {
            let path = unpacked.root().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        (temporary, unpacked)
    }

    #[test]
    fn a_wrapper_for_a_driver_that_is_not_the_bundle_s_main_one() {
        let names = [
            "usr/lib/x86_64-linux-gnu/libvulkan_radeon.so",
            "usr/lib/x86_64-linux-gnu/libamdgpu_noop_drm_shim.so",
            "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
        ];
        let (_temporary, unpacked) = unpacked(&names);
        let radv = drivers::find("radv").unwrap();
        let json = r#"{"ICD": {"api_version": "1.4.1", "library_path": "/usr/lib/libvulkan_radeon.so"}}"#;
        let theirs = unpacked.root().join("usr/share/vulkan/icd.d/radeon_icd.json");
        fs::create_dir_all(theirs.parent().unwrap()).unwrap();
        fs::write(theirs, json).unwrap();

        let wrapper = unpacked.install(radv, &[]).unwrap();
        assert_eq!(wrapper, unpacked.folder.join("run-radv"));
        let (at, root) = (unpacked.folder.display(), unpacked.root());
        let root = root.display();
        let expected = format!(
            "#!/bin/sh\n# PROGRAM [ARGS...] with RADV 26 (made by scripts/gpu)\n\
             export WGPU_BACKEND=vulkan\nexport VK_DRIVER_FILES={at}/radv.json\n\
             exec {root}/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 --preload \
             {root}/usr/lib/x86_64-linux-gnu/libamdgpu_noop_drm_shim.so --library-path \
             \"{root}/usr/lib/x86_64-linux-gnu:{root}/lib/x86_64-linux-gnu\
             ${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\" \"$@\"\n"
        );
        assert_eq!(fs::read_to_string(wrapper).unwrap(), expected);
        let icd: Value =
            serde_json::from_str(&fs::read_to_string(unpacked.folder.join("radv.json")).unwrap()).unwrap();
        assert_eq!(icd["ICD"]["api_version"], "1.4.1");
        assert_eq!(
            icd["ICD"]["library_path"],
            format!("{root}/usr/lib/x86_64-linux-gnu/libvulkan_radeon.so")
        );
    }

    #[test]
    fn without_the_packages_libc_the_machine_s_loader_is_used() {
        let (_temporary, unpacked) = unpacked(&["usr/lib/x86_64-linux-gnu/libvulkan_lvp.so"]);
        assert_eq!(unpacked.loader(), Path::new("/lib64/ld-linux-x86-64.so.2"));
        assert!(unpacked.has(drivers::find("lavapipe").unwrap()));
        let error = unpacked.check(drivers::find("swiftshader").unwrap()).unwrap_err();
        assert_eq!(error.text, "no libvk_swiftshader.so in the packages");
    }

    #[test]
    fn a_folder_is_redone_when_its_packages_change() {
        let (_temporary, unpacked) = unpacked(&["x"]);
        let bundle = drivers::find("lavapipe").unwrap().bundle;
        assert!(!unpacked.is(bundle));
        unpacked.mark(bundle, &unpacked.folder).unwrap();
        assert!(unpacked.is(bundle));
        assert!(!unpacked.is(drivers::find("lavapipe-25").unwrap().bundle));
        unpacked.mark(bundle, Path::new("/elsewhere")).unwrap();
        assert!(!unpacked.is(bundle));
    }
}
