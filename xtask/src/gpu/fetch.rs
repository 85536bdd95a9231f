//! Fetches a bundle of packages with apt-get and unpacks it. It needs no root, installs nothing and
//! writes nowhere else. apt checks the archive's signatures.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, io};

use super::drivers::{Bundle, Interface};
use super::unpacked::{Cpu, Unpacked};
use super::{root, say};
use crate::error::{At, Error, Result};
use crate::files::{self, Temporary};
use crate::process;

/// Keyrings of Debian's archive.
const KEYRINGS: [&str; 3] = [
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
    "/etc/apt/trusted.gpg.d/debian-archive-keyring.gpg",
];

const MIRROR: &str = "WGPU_ATTENTION_DEBIAN_MIRROR";

fn keyring() -> Option<&'static str> {
    KEYRINGS.into_iter().find(|path| File::open(path).is_ok())
}

/// True if there is a Debian archive that this machine can verify.
pub fn knows_debian() -> bool {
    keyring().is_some() && !mirrors().is_empty()
}

/// Returns the mirrors that apt knows: first those whose Release file names Debian. On Debian
/// without fetched lists, any mirror counts. A wrong mirror does no harm, because signatures are
/// checked.
fn mirrors() -> Vec<String> {
    if let Some(mirror) = env::var(MIRROR).ok().filter(|mirror| !mirror.is_empty()) {
        return vec![mirror];
    }
    let ask = |more: &[&str]| {
        let format = "$(ORIGIN)|$(RELEASE)|$(REPO_URI)";
        let ask = ["indextargets", "--format", format, "Created-By: Packages"];
        process::quiet_output(Command::new("apt-get").args(ask).args(more)).unwrap_or_default()
    };
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let is_debian = system.lines().any(|line| ["ID=debian", "ID=\"debian\""].contains(&line));
    let unread =
        if is_debian { ask(&["-o", "APT::Get::IndexTargets::ReleaseInfo=false"]) } else { String::new() };
    mirrors_of(&ask(&[]), &unread)
}

/// Returns mirrors from `read` (targets with a known Release file) and from `unread` (any target).
fn mirrors_of(read: &str, unread: &str) -> Vec<String> {
    let mut mirrors: Vec<String> = Vec::new();
    for line in read.lines().filter(|line| line.starts_with("Debian|")).chain(unread.lines()) {
        let [_, release, address] = line.splitn(3, '|').collect::<Vec<_>>()[..] else { continue };
        if !release.contains("security") && !mirrors.iter().any(|known| known == address) {
            mirrors.push(address.into());
        }
    }
    mirrors.truncate(4);
    mirrors
}

/// apt's lists, cache and package status in a separate folder, with the machine's proxies and
/// passwords.
struct Apt<'a> {
    folder: &'a Path,
    log: &'a Path,
}

impl Apt<'_> {
    /// Writes the configuration with `sources`, one a line, or with the machine's sources.
    fn configure(&self, sources: Option<&str>, release: &str) -> io::Result<()> {
        let apt = self.folder.join("apt");
        let _ = fs::remove_dir_all(&apt);
        for folder in ["state/lists/partial", "cache/archives/partial", "log"] {
            fs::create_dir_all(apt.join(folder))?;
        }
        fs::write(apt.join("status"), "")?;
        let at = |name: &str| apt.join(name).display().to_string();
        let mut settings: Vec<(&str, String)> = vec![
            ("Dir::State", at("state")),
            ("Dir::State::lists", at("state/lists")),
            ("Dir::State::status", at("status")),
            ("Dir::Cache", at("cache")),
            ("Dir::Cache::archives", at("cache/archives")),
            ("Dir::Log", at("log")),
            ("Dir::Etc::preferences", "/dev/null".into()),
            ("Dir::Etc::preferencesparts", "/dev/null".into()),
            ("APT::Default-Release", release.into()),
            ("APT::Get::AllowUnauthenticated", "false".into()),
            ("Acquire::AllowInsecureRepositories", "false".into()),
            ("Acquire::AllowWeakRepositories", "false".into()),
            ("Acquire::AllowDowngradeToInsecureRepositories", "false".into()),
            ("APT::Install-Recommends", "false".into()),
            // root's apt would change to a user who may not access this folder.
            ("APT::Sandbox::User", "root".into()),
            ("APT::Update::Error-Mode", "any".into()),
            ("Acquire::Languages", "none".into()),
            ("Acquire::http::Timeout", "30".into()),
            ("Acquire::https::Timeout", "30".into()),
        ];
        if let Some(sources) = sources {
            let list = self.folder.join("sources.list");
            fs::write(&list, sources)?;
            settings.push(("Dir::Etc::sourcelist", list.display().to_string()));
            settings.push(("Dir::Etc::sourceparts", "/dev/null".into()));
        }
        let mut text = String::new();
        for (name, value) in settings {
            let _ = writeln!(text, "{name} \"{value}\";");
        }
        for hook in ["APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success", "DPkg::Post-Invoke"] {
            let _ = writeln!(text, "#clear {hook};");
        }
        fs::write(self.folder.join("apt.conf"), text)
    }

    /// Runs apt-get with its output in the log. Returns true if it succeeds.
    fn run(&self, arguments: &[&str]) -> bool {
        let mut apt = Command::new("apt-get");
        apt.current_dir(self.folder)
            .arg("-c")
            .arg(self.folder.join("apt.conf"))
            .args(["-q", "-y"])
            .args(arguments);
        logged(&mut apt, self.log)
    }

    fn archives(&self) -> Vec<PathBuf> {
        files::ending(&self.folder.join("apt/cache/archives"), ".deb")
    }
}

fn logged(command: &mut Command, log: &Path) -> bool {
    let streams =
        OpenOptions::new().append(true).create(true).open(log).and_then(|log| Ok((log.try_clone()?, log)));
    let Ok((out, err)) = streams else { return false };
    command.stdin(Stdio::null()).stdout(out).stderr(err).status().is_ok_and(|status| status.success())
}

fn note(log: &Path, text: &str) {
    if let Ok(mut log) = OpenOptions::new().append(true).create(true).open(log) {
        let _ = writeln!(log, "{text}");
    }
}

/// Fetches and unpacks `bundle` into `base/NAME`, once. It uses a temporary folder, and renames it
/// when it is complete. apt's output goes into `log`. An error names the fault in it.
pub fn fetch(base: &Path, bundle: &Bundle, cpu: &'static Cpu, log: &Path) -> Result<Unpacked> {
    fs::create_dir_all(base).at(base)?;
    let ready = Unpacked::new(base.join(bundle.name), cpu);
    let path = base.join("lock");
    let lock = File::create(&path).at(&path)?;
    // A file system without locks behaves as if this program ran alone.
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        say("waiting for another set-up ...");
        lock.lock().at(&path)?;
    }
    if ready.is(bundle) {
        return Ok(ready);
    }
    for entry in fs::read_dir(base).at(base)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(".new-") {
            files::remove_all(&entry.path())?;
        }
    }
    fs::write(log, "").at(log)?;
    if !process::have(&["apt-get", "dpkg-deb"]) {
        return Err(wrong("no apt-get here"));
    }
    let temporary = Temporary::new(base, ".new")?;
    let apt = Apt { folder: &temporary.0, log };
    download(&apt, bundle, cpu)?;
    say(format!("unpacking {} ...", bundle.title));
    let new = unpack(&apt, bundle, cpu).map_err(|error| {
        note(log, &format!("E: {error}"));
        wrong("could not unpack the packages")
    })?;
    if ready.folder.exists() {
        fs::rename(&ready.folder, temporary.0.join("old")).at(&ready.folder)?;
    }
    fs::rename(&new.folder, &ready.folder).at(&ready.folder)?;
    say(format!(
        "{} is ready in {} ({}M)",
        bundle.title,
        ready.folder.display(),
        files::size(&ready.folder)? >> 20
    ));
    Ok(ready)
}

fn wrong(text: &str) -> Error {
    Error { status: 2, text: text.into() }
}

fn download(apt: &Apt, bundle: &Bundle, cpu: &Cpu) -> Result {
    let release = bundle.suites.last().copied().unwrap_or_default();
    if bundle.suites.is_empty() {
        say_download(bundle);
        apt.configure(None, release)?;
        // A single bad source of the machine does not matter.
        apt.run(&["update"]);
    } else {
        let keyring = keyring()
            .ok_or_else(|| wrong("the Debian archive keyring is missing (package debian-archive-keyring)"))?;
        let mirrors = mirrors();
        if mirrors.is_empty() {
            return Err(wrong("apt's configuration names no Debian mirror"));
        }
        say_download(bundle);
        let mut fetched = false;
        for mirror in mirrors {
            let line = |suite| {
                format!(
                    "deb [arch={} target=Packages signed-by={keyring}] {mirror} {suite} main\n",
                    cpu.debian
                )
            };
            let sources: String = bundle.suites.iter().map(line).collect();
            apt.configure(Some(&sources), release)?;
            fetched = apt.run(&["update"]);
            if fetched {
                break;
            }
        }
        if !fetched {
            return Err(wrong("could not fetch or verify the package lists"));
        }
    }
    let how: &[&str] =
        if bundle.alone { &["download"] } else { &["install", "--download-only", "--no-install-recommends"] };
    if !apt.run(&[how, bundle.packages].concat()) {
        return Err(wrong("could not download or verify the packages"));
    }
    match bundle.part {
        Some((package, _)) if !apt.run(&["download", package]) => {
            Err(wrong(&format!("could not download or verify {package}")))
        }
        _ => Ok(()),
    }
}

fn say_download(bundle: &Bundle) {
    say(format!("downloading {} (about {}) ...", bundle.title, bundle.size));
}

/// Unpacks the downloaded packages into a folder like the one that programs use.
fn unpack(apt: &Apt, bundle: &Bundle, cpu: &'static Cpu) -> Result<Unpacked> {
    let new = Unpacked::new(apt.folder.join("out"), cpu);
    let root = new.root();
    fs::create_dir_all(&root).at(&root)?;
    let wrong = |deb: &Path| wrong(&format!("{} cannot be unpacked", deb.display()));
    let alone = if bundle.alone { files::ending(apt.folder, ".deb") } else { Vec::new() };
    for deb in apt.archives().into_iter().chain(alone) {
        let is_libc = deb.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libc6_"));
        // A program that is linked against a newer libc than the packages' needs the machine's
        // libc.
        if is_libc && machine_has_newer_libc(&deb) {
            continue;
        }
        if !logged(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&root), apt.log) {
            return Err(wrong(&deb));
        }
    }
    if let Some((_, patterns)) = bundle.part {
        for deb in files::ending(apt.folder, ".deb") {
            let script = "deb=$1 root=$2; shift 2; \
                dpkg-deb --fsys-tarfile \"$deb\" | tar -x -C \"$root\" --wildcards \"$@\"";
            let mut sh = Command::new("sh");
            sh.args(["-c", script, "sh"]).arg(&deb).arg(&root).args(patterns);
            if !logged(&mut sh, apt.log) {
                return Err(wrong(&deb));
            }
        }
    }
    if bundle.drivers().any(|driver| driver.interface == Interface::Root) {
        root::complete(&root)?;
    }
    for (n, driver) in bundle.drivers().enumerate() {
        // The bundle's main driver must be there.
        if n == 0 || new.has(driver) {
            new.check(driver)?;
        }
    }
    new.mark(bundle, &apt.folder.parent().unwrap_or(Path::new("")).join(bundle.name))?;
    Ok(new)
}

fn machine_has_newer_libc(deb: &Path) -> bool {
    let own = process::quiet_output(Command::new("getconf").arg("GNU_LIBC_VERSION")).unwrap_or_default();
    let own = own.split_whitespace().last().unwrap_or("0");
    let theirs =
        process::quiet_output(Command::new("dpkg-deb").arg("-f").arg(deb).arg("Version")).unwrap_or_default();
    process::quiet_output(Command::new("dpkg").args(["--compare-versions", own, "gt", theirs.trim()]))
        .is_some()
}

/// Returns the lines of a log that describe errors, at most four.
pub fn errors_of(log: &Path) -> Vec<String> {
    let text = fs::read(log).unwrap_or_default();
    let is_error = |line: &&str| {
        let starts = |word: &str| line.strip_prefix(word).is_some_and(|rest| rest.starts_with([':', ' ']));
        ["E", "Err", "W", "dpkg-deb", "tar"].into_iter().any(starts)
    };
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().filter(is_error).collect();
    lines[lines.len().saturating_sub(4)..].iter().map(|line| line.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_that_say_debian_come_first() {
        let read = "Debian|stable|http://a/debian\nDebian|stable|http://a/debian\nUbuntu|noble|http://u/ubuntu\n\
            Debian|stable-security|http://a/debian-security\nDebian|stable|http://b/debian";
        assert_eq!(mirrors_of(read, ""), ["http://a/debian", "http://b/debian"]);
        assert_eq!(mirrors_of("", "||http://c/debian\n|x|http://c/debian\n"), ["http://c/debian"]);
        let many: String = (0..9).map(|n| format!("Debian|stable|http://{n}\n")).collect();
        assert_eq!(mirrors_of(&many, "").len(), 4);
        assert!(mirrors_of("nonsense\n", "nonsense").is_empty());
    }

    #[test]
    fn errors_in_logs() {
        let folder = Temporary::new(&env::temp_dir(), "xtask-test-fetch").unwrap();
        let log = folder.0.join("log");
        fs::write(&log, "Get:1 x\nE: one\nErr:2 two\nEverything\nW: three\ntar: four\ndpkg-deb: five\n")
            .unwrap();
        assert_eq!(errors_of(&log), ["Err:2 two", "W: three", "tar: four", "dpkg-deb: five"]);
        assert!(errors_of(&folder.0.join("none")).is_empty());
    }
}
