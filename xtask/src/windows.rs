//! Builds programs for Windows on Linux with mingw's linker, and runs them under Wine. Wine's
//! Direct3D 12 uses lavapipe, and Microsoft's compiler compiles the shaders.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::browser::{Log, Toolchain};
use crate::error::{At, Result, failed};
use crate::gpu::Setup;
use crate::repo::Repo;
use crate::{dawn, files, process};

const TARGET: &str = "x86_64-pc-windows-gnu";
const WINE: &str = "/usr/lib/wine/wine64";

/// The programs that rustc starts, and their names in the packages.
const MINGW: [(&str, &str); 2] = [
    ("x86_64-w64-mingw32-gcc", "x86_64-w64-mingw32-gcc-win32"),
    ("x86_64-w64-mingw32-dlltool", "x86_64-w64-mingw32-dlltool"),
];

/// A display and cargo's settings. The display runs until the value is dropped.
pub struct Windows {
    wrapper: PathBuf,
    variables: Vec<(&'static str, OsString)>,
    display: Display,
}

impl Windows {
    /// Fetches Rust's standard library for Windows and FXC. `setup`: the set-up of the driver
    /// `wine`.
    pub fn prepare(repo: &Repo, setup: &Setup) -> Result<Self> {
        let wrapper = setup.runner().ok_or_else(|| failed("Wine is run on Linux on x86_64 only"))?;
        let folder = repo.folder("windows")?;
        let log = Log::new(folder.join("log"))?;
        let toolchain = Toolchain::get(repo, TARGET, &log)?
            .ok_or_else(|| failed("no standard library of Rust for Windows"))?;

        let (bin, temporary) = (folder.join("bin"), folder.join("tmp"));
        std::fs::create_dir_all(&temporary).at(&temporary)?;
        std::fs::create_dir_all(&bin).at(&bin)?;
        for (name, program) in MINGW {
            let text = format!("#!/bin/sh\nexec {} /usr/bin/{program} \"$@\"\n", wrapper.display());
            files::replace(&bin.join(name), &text, true)?;
        }
        let dawn = dawn::fetch(repo, || log.stream())?;
        let fxc = dawn.join("node_modules/webgpu/dist/win32-x64/d3dcompiler_47.dll");
        // The folder of cargo's tests. A program loads the DLL from its folder.
        let deps = repo.target.join(TARGET).join("release/deps");
        std::fs::create_dir_all(&deps).at(&deps)?;
        std::fs::copy(&fxc, deps.join("d3dcompiler_47.dll")).at(&fxc)?;

        let display = Display::start(wrapper)?;
        // Wine's Direct3D could also draw with OpenGL, but this adapter must use Vulkan.
        let mut registry = Command::new(wrapper);
        registry.args([WINE, "reg", "add", r"HKCU\Software\Wine\Direct3D", "/v", "renderer"]);
        registry.args(["/t", "REG_SZ", "/d", "vulkan", "/f"]).env("DISPLAY", &display.name);
        registry.stdin(Stdio::null()).stdout(log.stream()).stderr(log.stream());
        process::run(&mut registry)?;

        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths(std::iter::once(bin).chain(env::split_paths(&path))).map_err(failed)?;
        let mut variables: Vec<(&'static str, OsString)> = toolchain.variables().collect();
        variables.push(("PATH", path));
        // A folder where programs of the packages see the files that rustc writes for them.
        variables.push(("TMPDIR", temporary.into()));
        Ok(Windows { wrapper: wrapper.into(), variables, display })
    }

    /// Prepares `cargo test --release`. The command so far may only have arguments for cargo.
    pub fn apply(&self, cargo: &mut Command) {
        cargo.args(["--target", TARGET, "--config", "profile.release.opt-level=1"]);
        // The tests take longer to compile than to run.
        cargo.args(["--config", "profile.release.package.tests.opt-level=0"]);
        cargo.envs(self.variables.iter().cloned());
        cargo.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER", format!("{} {WINE}", self.wrapper.display()));
        cargo.env("DISPLAY", &self.display.name).env("LIBGL_ALWAYS_SOFTWARE", "true");
        cargo.env("WGPU_BACKEND", "dx12").env("WGPU_DX12_COMPILER", "fxc");
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        // Wine's server waits until its last program ends, but some programs stay.
        let mut end = Command::new(&self.wrapper);
        end.args(["/usr/lib/wine/wineserver64", "-k"]).stdin(Stdio::null());
        let _ = end.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// An X server in memory: Wine finds no Vulkan without one.
struct Display {
    server: Child,
    name: String,
}

impl Display {
    fn start(wrapper: &Path) -> Result<Self> {
        let mut server = Command::new(wrapper);
        server.args(["/usr/bin/Xvfb", "-displayfd", "1", "-nolisten", "tcp", "-screen", "0", "640x480x24"]);
        server.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = server.spawn().at(wrapper)?;
        let mut number = String::new();
        let out = server.stdout.take().ok_or_else(|| failed("a process without a pipe"))?;
        BufReader::new(out).read_line(&mut number)?;
        let display = Display { server, name: format!(":{}", number.trim()) };
        if display.name == ":" { Err(failed("no display of X for Wine")) } else { Ok(display) }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
