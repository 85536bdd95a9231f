//! `scripts/mpi`: runs a program with an MPI, and with the tools that build Rust's bindings of MPI.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{At, Result, refused};
use crate::files;
use crate::gpu::drivers::Bundle;
use crate::gpu::fetch;
use crate::gpu::unpacked::Cpu;
use crate::process;
use crate::repo::Repo;

const USAGE: &str = "\
usage: scripts/mpi COMMAND [ARGS...]   runs COMMAND with an MPI
       scripts/mpi --have              prints whether there is one, without fetching

If mpirun and mpicc are installed, COMMAND runs with them, and building needs libclang. Otherwise, on Linux with apt
and Debian's keyring, Open MPI 4.1 and libclang 14 are fetched once from Debian bookworm into target/mpi. This needs no
root and installs nothing. With a device: scripts/mpi scripts/gpu COMMAND.
";

/// The libraries that `mpicc`, `mpirun` and `libclang` load, except libc and the compiler's
/// libraries.
const OPEN_MPI: Bundle = Bundle {
    name: "openmpi",
    title: "Open MPI 4.1 and libclang 14",
    size: "60 MB",
    suites: &["bookworm"],
    packages: &[
        "openmpi-bin",
        "openmpi-common",
        "libopenmpi-dev",
        "libopenmpi3",
        "libpmix2",
        "libmunge2",
        "libhwloc15",
        "libltdl7",
        "libevent-2.1-7",
        "libevent-core-2.1-7",
        "libevent-pthreads-2.1-7",
        "libnl-3-200",
        "libnl-route-3-200",
        "libibverbs1",
        "librdmacm1",
        "libfabric1",
        "libucx0",
        "libnuma1",
        "zlib1g",
        "libclang1-14",
        "libclang-common-14-dev",
        "libllvm14",
        "libz3-4",
        "libedit2",
        "libbsd0",
        "libmd0",
        "libxml2",
        "libicu72",
        "liblzma5",
        "libtinfo6",
        "libffi8",
    ],
    alone: true,
    part: None,
};

/// True if the machine has an MPI.
fn is_here() -> bool {
    process::have(&["mpirun", "mpicc"])
}

fn can_fetch() -> bool {
    env::consts::OS == "linux"
        && Cpu::named(env::consts::ARCH).is_some()
        && process::have(&["apt-get", "dpkg-deb"])
        && fetch::knows_debian()
}

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    let Some((program, rest)) = arguments.split_first() else {
        print!("{USAGE}");
        return Ok(());
    };
    if program == "-h" || program == "--help" {
        print!("{USAGE}");
        return Ok(());
    }
    if program == "--have" {
        if is_here() || can_fetch() {
            return Ok(());
        }
        return Err(refused("no mpirun and mpicc here, and no Debian packages to take them from"));
    }
    let mut command = Command::new(program);
    command.args(rest);
    // Open MPI refuses to start as root without both variables.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    if !is_here() {
        command.envs(variables(&unpacked(repo)?)?);
    }
    process::exec(&mut command).map(|never| match never {})
}

/// Returns the folder of the packages. It fetches them if needed.
fn unpacked(repo: &Repo) -> Result<PathBuf> {
    if !can_fetch() {
        return Err(refused(
            "no mpirun and mpicc here, and no Debian packages to take them from; install Open MPI or MPICH \
             with its compiler, and libclang",
        ));
    }
    let cpu = Cpu::named(env::consts::ARCH).ok_or_else(|| refused("no packages for this processor"))?;
    let base = repo.target.join("mpi");
    let log = base.join("openmpi.log");
    let place = fetch::fetch(&base, &OPEN_MPI, cpu, &log)
        .map_err(|error| refused(format!("{error}\nfull log: {}", log.display())))?;
    Ok(place.root())
}

/// Returns the variables with which Open MPI finds its files in `root`, and builds find Open MPI
/// and libclang.
fn variables(root: &Path) -> Result<Vec<(&'static str, OsString)>> {
    let bin = root.join("usr/bin");
    let shims = root.join("shims");
    fs::create_dir_all(&shims).at(&shims)?;
    for name in ["mpirun", "mpiexec", "mpicc"] {
        let program = bin.join(format!("{name}.openmpi"));
        let script = format!("#!/bin/sh\nexec '{}' \"$@\"\n", program.display());
        files::replace(&shims.join(name), &script, true)?;
    }
    let triple = format!("{}-linux-gnu", env::consts::ARCH);
    let libraries = root.join("usr/lib").join(&triple);
    let mut search = vec![libraries.clone(), libraries.join("openmpi/lib"), root.join("lib").join(&triple)];
    search.extend(env::split_paths(&env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    search.retain(|path| !path.as_os_str().is_empty());
    let mut path = vec![shims.clone()];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let join = |paths: Vec<PathBuf>| env::join_paths(paths).map_err(|error| refused(error.to_string()));
    // The compiler's headers. libclang searches them relative to its place.
    let of_clang = files::ending(&root.join("usr/lib/llvm-14/lib/clang"), "");
    let headers = of_clang.first().map(|folder| format!("-I{}", folder.join("include").display()));
    Ok(vec![
        ("PATH", join(path)?),
        ("LD_LIBRARY_PATH", join(search)?),
        ("OPAL_PREFIX", root.join("usr").into()),
        ("MPICC", shims.join("mpicc").into()),
        ("LIBCLANG_PATH", libraries.into()),
        ("BINDGEN_EXTRA_CLANG_ARGS", headers.unwrap_or_default().into()),
        // Transports of a single machine. The last variables silence messages about missing
        // compression.
        ("OMPI_MCA_btl", "self,vader,tcp".into()),
        ("OMPI_MCA_pml", "ob1".into()),
        ("OMPI_MCA_mca_base_component_show_load_errors", "0".into()),
        ("PMIX_MCA_pcompress_base_silence_warning", "1".into()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Temporary;

    #[test]
    fn open_mpi_gets_its_paths() {
        let temporary = Temporary::new(&env::temp_dir(), "xtask-test-mpi").unwrap();
        fs::create_dir_all(temporary.0.join("usr/lib/llvm-14/lib/clang/14.0.6/include")).unwrap();
        let variables = variables(&temporary.0).unwrap();
        let of = |wanted: &str| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.to_string_lossy().into_owned()).unwrap()
        };
        assert_eq!(of("OPAL_PREFIX"), temporary.0.join("usr").display().to_string());
        assert!(of("BINDGEN_EXTRA_CLANG_ARGS").ends_with("llvm-14/lib/clang/14.0.6/include"));
        assert!(of("PATH").starts_with(&temporary.0.join("shims").display().to_string()));
        let shim = fs::read_to_string(temporary.0.join("shims/mpirun")).unwrap();
        assert!(shim.contains("usr/bin/mpirun.openmpi"));
    }
}
