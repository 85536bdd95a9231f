//! Plans that were measured to be faster than the plans by the rules, and their file.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Write as _};

use super::registers::Registers;

/// Calls that share one measurement: equal numbers, and lengths rounded up to powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Class([u32; Class::WORDS]);

impl Class {
    const WORDS: usize = 9;

    /// Returns the class of calls with the same `kind` and `exact` and with similar `lengths`. The
    /// caller defines the meaning of `exact` for each `kind`.
    pub fn new(kind: u32, exact: [u32; 4], lengths: [usize; 4]) -> Self {
        let mut words = [kind; Self::WORDS];
        words[1..5].copy_from_slice(&exact);
        words[5..].copy_from_slice(&lengths.map(|n| usize::BITS - n.saturating_sub(1).leading_zeros()));
        Class(words)
    }
}

/// Deviations of a plan from the rules. A plan ignores a pick that does not suit the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pick {
    /// Use the staged path.
    pub staged: bool,
    pub no_matrix: bool,
    pub no_decode: bool,
    pub no_subgroups: bool,
    /// Plan for a GPU with this number of registers.
    pub registers: Option<Registers>,
    /// Rows of a workgroup; 0 for the number by the rules.
    pub rows: u32,
    /// Keys of a block, or invocations of a workgroup of a product; 0 for the number by the rules.
    pub keys: u32,
    /// The number of splits by the rules is multiplied by 2 to this power.
    pub splits: i8,
}

/// The most doublings of splits.
const MOST_DOUBLINGS: i8 = 8;

impl Pick {
    const WORDS: usize = 5;

    fn words(&self) -> [u32; Self::WORDS] {
        let flags = [self.staged, self.no_matrix, self.no_decode, self.no_subgroups];
        let flags = flags.iter().enumerate().fold(0, |bits, (n, flag)| bits | u32::from(*flag) << n);
        let registers = self.registers.and_then(|r| Registers::ALL.iter().position(|other| *other == r));
        let splits = self.splits + MOST_DOUBLINGS;
        [flags, registers.map_or(0, |n| n as u32 + 1), self.rows, self.keys, splits as u32]
    }

    fn from_words([flags, registers, rows, keys, splits]: [u32; Self::WORDS]) -> Option<Self> {
        let registers = match registers {
            0 => None,
            n => Some(*Registers::ALL.get(n as usize - 1)?),
        };
        let splits = i8::try_from(splits).ok()?.checked_sub(MOST_DOUBLINGS)?;
        let flag = |n: u32| flags >> n & 1 == 1;
        let known = flags < 16 && rows <= 1024 && keys <= 1024 && splits <= MOST_DOUBLINGS;
        known.then(|| Pick {
            staged: flag(0),
            no_matrix: flag(1),
            no_decode: flag(2),
            no_subgroups: flag(3),
            registers,
            rows,
            keys,
            splits,
        })
    }
}

impl fmt::Display for Pick {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Pick { staged, no_matrix, no_decode, no_subgroups, registers, rows, keys, splits } = *self;
        let mut parts = Vec::new();
        for (set, name) in [
            (staged, "staged"),
            (no_matrix, "no matrix units"),
            (no_decode, "no decode kernel"),
            (no_subgroups, "no subgroup reductions"),
        ] {
            parts.extend(set.then(|| name.to_string()));
        }
        parts.extend(registers.map(|registers| format!("{registers:?} registers").to_lowercase()));
        parts.extend((rows > 0).then(|| format!("tiles of {rows} x {keys}")));
        parts.extend((splits != 0).then(|| format!("splits x {}", f64::exp2(splits.into()))));
        f.write_str(if parts.is_empty() { "by the rules".into() } else { parts.join(", ") }.as_str())
    }
}

/// The picks of one device.
pub(crate) type Picks = HashMap<Class, Pick>;

/// FNV-1a with 64 bits (Fowler, Noll, Vo): the same on every machine and in every version.
pub(crate) fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    // The length comes first, so that different parts give different bytes.
    let bytes = parts
        .into_iter()
        .flat_map(|part| (part.len() as u64).to_le_bytes().into_iter().chain(part.iter().copied()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The results of [`Pipelines::tune`](crate::Pipelines::tune), from one device or several. Write
/// them to a file, or ship them with an application for the devices that were measured.
///
/// The bytes are text, with one line for each class of calls. Entries for other devices, drivers or
/// versions of this crate are ignored, but stay in the file. Damaged lines, and files of another
/// format, are ignored.
///
/// ```
/// use wgpu_attention::tuning::TuningCache;
/// let mut tuned = TuningCache::from_bytes(include_bytes!("../../CHANGELOG.md")); // not such a file: nothing
/// tuned.merge(&TuningCache::from_bytes(&tuned.to_bytes()));
/// assert!(tuned.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TuningCache {
    entries: BTreeMap<(u64, Class), Pick>,
}

const FORMAT: &str = "wgpu-attention tuned 1";

impl TuningCache {
    /// Returns an empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of entries, including entries for other devices.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds the entries of `other`. They replace entries of the same device and class.
    pub fn merge(&mut self, other: &TuningCache) {
        self.entries.extend(&other.entries);
    }

    /// Returns the bytes that [`from_bytes`](Self::from_bytes) reads.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = format!("{FORMAT}\n");
        for ((device, class), pick) in &self.entries {
            let mut line = format!("{device:016x}");
            for word in class.0.into_iter().chain(pick.words()) {
                let _ = write!(line, " {word}");
            }
            let _ = writeln!(text, "{line} {:016x}", hash([line.as_bytes()]));
        }
        text.into_bytes()
    }

    /// Reads the entries of `bytes`, as far as they can be read.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut lines =
            bytes.split(|byte| *byte == b'\n').map(|line| std::str::from_utf8(line).unwrap_or(""));
        if lines.next().map(str::trim_end) != Some(FORMAT) {
            return TuningCache::new();
        }
        TuningCache { entries: lines.filter_map(|line| entry(line.trim_end())).collect() }
    }

    /// Reads the file at `path`. The cache is empty if there is no such file or if it cannot be
    /// read.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read(path: impl AsRef<std::path::Path>) -> Self {
        let read = || {
            let mut file = std::fs::File::open(path)?;
            // Another process may be writing. Without file locks, a file that is half written has
            // fewer whole lines.
            let _ = file.lock_shared();
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut file, &mut bytes)?;
            Ok::<_, std::io::Error>(bytes)
        };
        read().map_or_else(|_| TuningCache::new(), |bytes| TuningCache::from_bytes(&bytes))
    }

    /// Adds these entries to the file at `path`, and returns all entries of the file. It creates
    /// the file if there is none. Several processes may write at the same time.
    ///
    /// # Errors
    /// A path that cannot be written.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn write(&self, path: impl AsRef<std::path::Path>) -> std::io::Result<TuningCache> {
        use std::io::{Read as _, Seek as _, Write as _};
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        file.lock()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let mut all = TuningCache::from_bytes(&bytes);
        all.merge(self);
        file.rewind()?;
        file.set_len(0)?;
        file.write_all(&all.to_bytes())?;
        Ok(all)
    }

    /// Returns the entries of one device, with its `picks`.
    pub(crate) fn of(device: u64, picks: Option<&Picks>) -> Self {
        let picks = picks.into_iter().flatten();
        TuningCache { entries: picks.map(|(class, pick)| ((device, *class), *pick)).collect() }
    }

    /// Returns the picks of one device.
    pub(crate) fn picks(&self, device: u64) -> Picks {
        let of_device = self.entries.iter().filter(|((of, _), _)| *of == device);
        of_device.map(|((_, class), pick)| (*class, *pick)).collect()
    }
}

/// Reads a line of the file, unless it is damaged.
fn entry(line: &str) -> Option<((u64, Class), Pick)> {
    let (line, check) = line.rsplit_once(' ')?;
    if check != format!("{:016x}", hash([line.as_bytes()])) {
        return None;
    }
    let (device, words) = line.split_once(' ')?;
    let device = u64::from_str_radix(device, 16).ok()?;
    let words: Vec<u32> = words.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
    let (class, pick) = words.split_at_checked(Class::WORDS)?;
    let pick = Pick::from_words(pick.try_into().ok()?)?;
    Some(((device, Class(class.try_into().ok()?)), pick))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> TuningCache {
        let mut tuned = TuningCache::new();
        for (n, registers) in [None, Some(Registers::Narrow), Some(Registers::Wide)].into_iter().enumerate() {
            let class = Class::new(n as u32, [1, 2, 3, 4], [5, 1 << n, 0, usize::MAX]);
            let pick = Pick {
                staged: n == 0,
                no_matrix: n == 1,
                no_decode: n == 2,
                no_subgroups: n > 0,
                registers,
                rows: 16 << n,
                keys: n as u32,
                splits: 3 * n as i8 - 3,
            };
            tuned.merge(&TuningCache::of(7 + n as u64 / 2, Some(&Picks::from([(class, pick)]))));
        }
        tuned
    }

    #[test]
    fn cache_survives_a_round_trip() {
        assert_eq!(TuningCache::from_bytes(&some().to_bytes()), some());
        assert_eq!([7, 8, 9].map(|device| some().picks(device).len()), [2, 1, 0]);
        let windows = String::from_utf8(some().to_bytes()).expect("text").replace('\n', "\r\n");
        assert_eq!(TuningCache::from_bytes(windows.as_bytes()), some());
        let mut both = some();
        both.merge(&some());
        assert_eq!(both, some());
    }

    #[test]
    fn classes_round_lengths_up_to_powers_of_two() {
        let of = |n| Class::new(0, [0; 4], [n, 1, 1, 1]);
        for (a, b, same) in
            [(1, 2, false), (2, 3, false), (3, 4, true), (5, 8, true), (8, 9, false), (1025, 2048, true)]
        {
            assert_eq!(of(a) == of(b), same, "{a} {b}");
        }
    }

    /// A file that is cut off at any byte keeps its whole lines.
    #[test]
    fn truncated_files_lose_what_was_cut() {
        let bytes = some().to_bytes();
        let lines = bytes.iter().filter(|byte| **byte == b'\n').count() - 1;
        for end in 0..bytes.len() {
            let read = TuningCache::from_bytes(&bytes[..end]);
            assert!(read.entries.iter().all(|(key, pick)| some().entries.get(key) == Some(pick)));
            let whole = bytes[..end].iter().filter(|byte| **byte == b'\n').count().saturating_sub(1);
            // The last line is complete even without its line end.
            assert!(read.len() == whole || read.len() == whole + 1, "{end}: {} of {lines}", read.len());
        }
    }

    #[test]
    fn no_flipped_bit_changes_an_entry() {
        let bytes = some().to_bytes();
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let read = TuningCache::from_bytes(&flipped);
            assert!(
                read.entries.iter().all(|(key, pick)| some().entries.get(key) == Some(pick)),
                "bit {bit}"
            );
            assert!(read.len() >= some().len() - 2 || read.is_empty(), "bit {bit}");
        }
    }

    /// Returns the path of a file for this test. The file does not exist yet.
    fn path(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("wgpu-attention-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn files_grow_and_damaged_ones_are_replaced() {
        let path = path("files");
        assert_eq!(TuningCache::read(&path), TuningCache::new());
        let [first, second] = [7, 8].map(|device| TuningCache::of(device, Some(&some().picks(device))));
        assert_eq!(first.write(&path).expect("a file"), first);
        assert_eq!(second.write(&path).expect("a file"), some());
        assert_eq!(TuningCache::read(&path), some());
        std::fs::write(&path, [0xff; 4000]).expect("a file");
        assert_eq!(TuningCache::read(&path), TuningCache::new());
        assert_eq!(first.write(&path).expect("a file"), first);
        assert_eq!(TuningCache::read(&path), first);
        std::fs::remove_file(&path).expect("a file");
        assert!(first.write(path.join("below a file that is not there")).is_err());
    }

    const WRITER: &str = "WGPU_ATTENTION_TEST_WRITER";
    const WRITES: usize = 60;

    /// This test starts itself twice. Each process adds separate entries, one by one.
    #[test]
    fn two_processes_write_at_once() {
        let entry = |device: u64, n: usize| {
            let class = Class::new(0, [n as u32; 4], [1; 4]);
            TuningCache::of(device, Some(&Picks::from([(class, Pick { rows: n as u32, ..Pick::default() })])))
        };
        if let Ok(told) = std::env::var(WRITER) {
            let (device, path) = told.split_once(' ').expect("a device and a path");
            for n in 0..WRITES {
                let all = entry(device.parse().expect("a number"), n).write(path).expect("a file");
                assert!(all.len() > n);
            }
            return;
        }
        let path = path("processes");
        let spawn = |device: u64| {
            // `current_exe` may be a loader that started this program.
            std::process::Command::new(std::env::args_os().next().expect("a program"))
                .args(["--exact", "device::tuned::tests::two_processes_write_at_once"])
                .env(WRITER, format!("{device} {}", path.display()))
                .stdout(std::process::Stdio::null())
                .spawn()
                .expect("a process")
        };
        for mut process in [1, 2].map(spawn) {
            assert!(process.wait().expect("an end").success());
        }
        let mut all = TuningCache::new();
        (0..WRITES).for_each(|n| [1, 2].iter().for_each(|device| all.merge(&entry(*device, n))));
        assert_eq!(TuningCache::read(&path), all);
        std::fs::remove_file(&path).expect("a file");
    }

    #[test]
    fn numbers_out_of_range_are_ignored() {
        for words in
            [[16, 0, 0, 0, 8], [0, 4, 0, 0, 8], [0, 0, 2000, 0, 8], [0, 0, 0, 2000, 8], [0, 0, 0, 0, 17]]
        {
            assert_eq!(Pick::from_words(words), None, "{words:?}");
        }
        assert_eq!(Pick::from_words(Pick::default().words()), Some(Pick::default()));
        assert_eq!(Pick::from_words([0, 0, 0, 0, u32::MAX]), None);
    }
}
