//! Runs every kernel variant through every compiler that needs no GPU. `scripts/shaders` runs this
//! program, and its header explains the tables.

mod assembly;
mod call;
mod compiled;
mod cover;
mod cpp;
mod dxc;
mod fxc;
mod gpus;
mod mad_share;
mod meaning;
mod mesa;
mod model;
mod msl;
mod permitted;
mod spirv_val;
mod table;
mod tile;
mod tint;
mod translate;
mod verdict;
mod verdict_cache;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use gpus::{Covering, Driver, GPUS, Gpu};
use support::wgsl;
use translate::Translated;
use verdict::{Compiler, Verdict};
use verdict_cache::VerdictCache;
use wgpu_attention::inspect::{KernelText, kernels};

/// The repository's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The bytes of workgroup memory of a D3D12 device. The host gives such devices no kernel that
/// needs more.
const MOST_D3D12_MEMORY: u32 = 32 << 10;

/// Folder, name and text of each shader.
macro_rules! shaders {
    ($($folder:literal $name:literal,)*) => {
        [$(($name, include_str!(concat!("../../../shaders/", $folder, "/", $name, ".wgsl")))),*]
    };
}

/// The shaders that contain a kernel's loop, by name. A kernel has at most one of them.
const FORMS: [(&str, &str); 19] = shaders![
    "." "additive/cpu",
    "." "additive/gpu",
    "attention" "fused/cpu",
    "attention" "fused/gpu",
    "attention" "fused_backward/cpu",
    "attention" "fused_backward/gpu",
    "attention" "fused/matrix",
    "attention" "decode/cpu",
    "attention" "decode/gpu",
    "." "matmul/cpu",
    "." "matmul/few_rows",
    "." "matmul/gpu",
    "." "matmul/matrix",
    "matmul" "quantized/few_rows_cpu",
    "matmul" "quantized/few_rows_gpu",
    "selected" "indexer/cpu",
    "selected" "indexer/gpu",
    "attention" "softmax/row_per_invocation",
    "attention" "softmax/row_per_workgroup",
];

/// The shaders that plans choose only for software drivers.
const OF_SOFTWARE: [&str; 8] = [
    "additive_cpu",
    "fused_cpu",
    "fused_backward_cpu",
    "decode_cpu",
    "matmul_cpu",
    "quantized_few_rows_cpu",
    "indexer_cpu",
    "softmax_row_per_invocation",
];

/// A kernel and the compilers' verdicts.
struct Row {
    kernel: KernelText,
    /// The shader of [`FORMS`] that contains its loop, with `_` for `/`.
    form: String,
    verdicts: BTreeMap<Compiler, Verdict>,
}

impl Row {
    fn name(&self) -> &str {
        &self.kernel.name
    }

    fn stage(&self) -> &str {
        self.kernel.label.strip_prefix("attention.").unwrap_or(self.kernel.label)
    }

    fn matrix_units(&self) -> bool {
        wgsl::matrix_units(&self.kernel.wgsl)
    }

    /// Returns the axes that select kernels: the words of the name, and the form.
    fn axes(&self) -> Vec<&str> {
        let mut axes: Vec<&str> = self.name().split(' ').collect();
        axes.extend((!self.form.is_empty()).then_some(self.form.as_str()));
        axes
    }

    /// True if plans for the GPU may choose the kernel. Tiles must suit its registers. Its matrix
    /// units must have fragments of 16 × 16.
    fn is_for(&self, gpu: Gpu) -> bool {
        // Tiles of linear attention are not listed as forms.
        let narrow = self.axes().contains(&"tiles=LinearTiles") && !self.axes().contains(&"workgroup=64");
        // Software drivers have kernels of one lane.
        let moves = ["cache_compact", "cache_reorder"].contains(&self.stage());
        let one_lane = moves && self.kernel.wgsl.contains("const LANES: u32 = 1u;");
        if narrow || one_lane || OF_SOFTWARE.contains(&self.form.as_str()) {
            return false;
        }
        let registers = gpu.driver.registers();
        // Square tiles need scalar registers.
        if self.scores_of_row() == Some(8) && gpu.driver != Driver::Radv {
            return false;
        }
        if ["fused_gpu", "decode_gpu"].contains(&self.form.as_str()) {
            return registers.iter().any(|word| self.axes().contains(word));
        }
        let wide = match self.form.as_str() {
            "matmul_gpu" => self.axes().contains(&"side=128"),
            "fused_backward_gpu" => {
                self.axes().contains(&"of=KeysAndValues") || self.axes().contains(&"side=64")
            }
            _ => false,
        };
        if wide {
            return registers.contains(&"registers=Wide");
        }
        if !self.matrix_units() {
            return true;
        }
        let Some(subgroup) = gpu.matrix_subgroup else { return false };
        let axes = self.axes();
        // Names of projections contain the number of invocations of four subgroups.
        let [width, lanes] = [format!("width={subgroup}"), format!("lanes={}", 4 * subgroup)];
        axes.contains(&"fragment=Sixteen")
            && (axes.contains(&width.as_str()) || axes.contains(&lanes.as_str()))
    }

    /// Returns the properties that variants of one tile share: the stage, the form and the words
    /// with numbers. Kernels without a loop have none.
    fn tile(&self) -> Option<String> {
        let numbers = |word: &&str| {
            word.split_once('=').is_some_and(|(_, value)| value.starts_with(|c: char| c.is_ascii_digit()))
        };
        let words: Vec<&str> = self.name().split(' ').filter(numbers).collect();
        (!self.form.is_empty()).then(|| format!("{} {} {}", self.stage(), self.form, words.join(" ")))
    }

    /// Returns the distance from the plainest variant of the tile. The plainest variant is f32 (f16
    /// on matrix units), in vectors of four, without a mask.
    fn frills(&self) -> (bool, usize, usize) {
        let words = || self.name().split(' ');
        let slow =
            words().filter(|word| ["=One", "=F16", "=BF16"].iter().any(|end| word.ends_with(end))).count();
        (self.facts().is_none(), slow, words().count())
    }

    /// Returns the number of the word `name=number` in the kernel's name.
    fn number(&self, name: &str) -> Option<u64> {
        self.name().split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
    }

    /// Returns the output channels that a workgroup of a fused form computes.
    fn channels(&self) -> Option<u64> {
        self.number("slice").or(self.number("value"))
    }

    /// Returns the rows and channels of a fused form's plainest variant, if plans choose it for
    /// many rows.
    fn large_tile(&self) -> Option<String> {
        self.facts()?;
        let subgroups =
            self.number("sub_rows").zip(self.number("subgroups")).map(|(rows, count)| rows * count);
        let large = self.number("rows").filter(|rows| *rows >= 64).or(subgroups)?;
        let is_exact = self.form != "fused_matrix" || self.axes().contains(&"exact");
        let square = if self.scores_of_row() == Some(8) { ", square" } else { "" };
        is_exact.then_some(format!("{large} × {}{square}", self.channels()?))
    }

    /// Returns the scores of an invocation in a row, of the fused tiles that say how many share it.
    fn scores_of_row(&self) -> Option<u64> {
        Some(self.number("keys")? / self.number("lanes").filter(|_| self.form == "fused_gpu")?)
    }

    /// Returns the work of a tile of keys, for the plainest variants of the fused forms. Queries
    /// and keys have as many channels as values.
    fn facts(&self) -> Option<tile::Facts> {
        let words: Vec<&str> = self.name().split(' ').collect();
        let matrix = self.form == "fused_matrix";
        let dtype = if matrix { "F16" } else { "F32" };
        let start = format!("attention.fused q={dtype} k={dtype} v={dtype} out={dtype} mask tiles");
        let plain = self.name().strip_prefix(&start).is_some_and(|tiles| tiles.starts_with([' ', '=']));
        if !plain || !words.ends_with(&["width=Four", "store=Four"]) {
            return None;
        }
        if matrix {
            let [rows, keys, head] = [self.number("sub_rows")?, self.number("keys")?, self.number("head")?];
            let (value, width) = (self.number("value")?, self.number("width")?);
            let pairs = rows * keys;
            let (scores, sums) = (pairs * head, pairs * value);
            return Some(tile::Facts {
                scores,
                sums,
                scores_turn: scores,
                sums_turn: sums,
                matrix,
                each: pairs / width,
                parts: 1,
                same_part: width,
            });
        }
        if self.form != "fused_gpu" {
            return None;
        }
        // As in the shader: `lanes` neighbouring invocations share the keys, and a chunk has 16
        // channels. Weights are stored 32 keys at a time, by 8 lanes.
        let (lanes, slice) = (self.number("lanes")?, self.number("slice")?);
        let rows = self.number("rows")? * lanes / self.number("workgroup")?;
        let keys = self.number("keys")?;
        let (each, sums) = (rows * keys / lanes, rows * slice / lanes);
        Some(tile::Facts {
            scores: each * slice,
            sums: sums * keys,
            scores_turn: each * 16,
            sums_turn: sums * self.number("v_keys")?,
            matrix,
            each,
            parts: keys / 32,
            same_part: if self.scores_of_row() == Some(8) { 64 } else { 32 },
        })
    }
}

/// The options of the command line and of `scripts/shaders`.
struct Options {
    /// Runs every variant through every compiler.
    all: bool,
    /// The folder of the committed tables, if they are to be written.
    write: Option<PathBuf>,
    /// The share of the variants, for compilers that check only a part of them.
    share: Option<Share>,
    /// Words that a kernel's name must have.
    words: Vec<String>,
}

/// A share: `number`, counted from 1, of `of`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    number: u64,
    of: u64,
}

impl Share {
    fn parse(text: &str) -> Option<Self> {
        let (number, of) = text.split_once('/')?;
        let (number, of) = (number.parse().ok()?, of.parse().ok()?);
        (1..=of).contains(&number).then_some(Share { number, of })
    }

    /// True if the share contains the kernel; FNV-1a of the name decides.
    fn holds(self, name: &str) -> bool {
        (translate::fnv(name.bytes()) >> 32) % self.of == self.number - 1
    }
}

impl Options {
    fn read() -> Result<Self, lexopt::Error> {
        use lexopt::prelude::*;
        let mut options = Options { all: false, write: None, share: None, words: Vec::new() };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("all") => options.all = true,
                Long("share") => {
                    let text = parser.value()?.string()?;
                    let share = Share::parse(&text).ok_or_else(|| format!("{text} is no share, as 3/8"))?;
                    options.share = Some(share);
                }
                Long("write") => {
                    options.write = Some(root().join("benches"));
                }
                Value(word) => options.words.push(word.string()?),
                other => return Err(other.unexpected()),
            }
        }
        options.all |= !options.words.is_empty();
        if options.write.is_some() && (options.all || options.share.is_some()) {
            return Err("--write is for what a run without words, --all and --share compiles".into());
        }
        if options.all && options.share.is_some() {
            return Err("--share is for what a run without words and --all compiles".into());
        }
        Ok(options)
    }
}

/// The places of the compilers, from `scripts/shaders`. Compilers that it could not get are absent.
struct Tools {
    spirv_val: Option<Vec<String>>,
    dawn: Option<PathBuf>,
    /// The C++ compiler.
    cxx: Option<String>,
    dxc: Option<PathBuf>,
    /// The command that starts `fxc.c`.
    fxc: Option<String>,
    /// The programs that run a command with a driver.
    mesa: Vec<(Driver, PathBuf)>,
}

impl Tools {
    fn of_environment() -> Self {
        let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let mesa = Driver::ALL.into_iter().filter_map(|driver| {
            let name = format!("SHADERS_{}", driver.name().to_uppercase());
            Some((driver, path(&name)?))
        });
        let words = |text: String| text.split(' ').map(String::from).collect();
        Tools {
            spirv_val: std::env::var("SHADERS_SPIRV_VAL").ok().map(words),
            dawn: path("SHADERS_DAWN"),
            cxx: std::env::var("SHADERS_CXX").ok(),
            dxc: path("SHADERS_DXC"),
            fxc: std::env::var("SHADERS_FXC").ok(),
            mesa: mesa.collect(),
        }
    }
}

type Said = Vec<(usize, Compiler, Verdict)>;
/// Part of the work of a compiler.
type Job<'a> = (Compiler, Box<dyn FnOnce() -> Said + Send + 'a>);
/// The time of each compiler, summed over all cores.
type Times = BTreeMap<Compiler, Duration>;

/// Runs `jobs` on all cores, in order.
fn run(jobs: VecDeque<Job>) -> (Said, Times) {
    let jobs = Mutex::new(jobs);
    let done = Mutex::new((Vec::new(), Times::new()));
    let next = || jobs.lock().expect("nobody panics with it").pop_front();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some((compiler, job)) = next() {
                    let start = Instant::now();
                    let more = job();
                    let mut done = done.lock().expect("nobody panics with it");
                    done.0.extend(more);
                    *done.1.entry(compiler).or_default() += start.elapsed();
                }
            });
        }
    });
    done.into_inner().expect("nobody panicked with it")
}

/// Prints each variant's name, the hash of its SPIR-V and the hash of its meaning, for
/// `scripts/snapshot`.
fn kernel_hashes() -> Result<(), Box<dyn Error>> {
    let kernels = Mutex::new(kernels().into_iter());
    let lines = Mutex::new(Vec::new());
    let next = || kernels.lock().expect("nobody panics with it").next();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some(KernelText { name, wgsl, .. }) = next() {
                    let hashes = translate::spirv_hash(&wgsl)
                        .and_then(|spirv| Ok((spirv, translate::fnv(meaning::meaning(&wgsl)?.bytes()))));
                    let line = match hashes {
                        Ok((spirv, meaning)) => format!("{name} {spirv:016x} {meaning:016x}"),
                        Err(why) => format!("{name} {why}"),
                    };
                    lines.lock().expect("nobody panics with it").push(line);
                }
            });
        }
    });
    let mut lines = lines.into_inner()?;
    lines.sort_unstable();
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // The error is printed as an answer, because nothing reads standard error.
        ["mesa", gpu] => return mesa::serve(gpu).inspect_err(|error| println!("{error}")),
        ["kernel-hashes"] => return kernel_hashes(),
        ["call", ..] => return call::run(&arguments[1..]),
        ["compiled", folder, notes, date, page] => return compiled::run(folder, notes, date, page),
        _ => {}
    }
    // naga's panics are reported with the kernel that caused them.
    std::panic::set_hook(Box::new(|_| {}));
    let options = Options::read()?;
    let tools = Tools::of_environment();
    let out = PathBuf::from(std::env::var_os("SHADERS_OUT").unwrap_or("target/shaders".into()));
    let modules = out.join("spirv");
    if modules.exists() {
        std::fs::remove_dir_all(&modules)?;
    }
    std::fs::create_dir_all(&modules)?;
    let modules = modules.canonicalize()?;

    let mut permitted = permitted::read()?;
    let mut rows = rows(&options)?;
    if rows.is_empty() {
        return Err("no kernel has these words in its name".into());
    }
    println!("{} kernel variants", rows.len());
    let start = Instant::now();
    let translated = translate_all(&mut rows, &modules);
    println!("naga: {:.0} s", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let tasks = tasks(&rows, &tools, &options);
    println!("which compiler gets which: {:.0} s", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let cache = VerdictCache::open(&out.join("verdicts.jsonl"), &root())?;
    let (said, times) = run(jobs(&rows, &translated, &tasks, &modules, &cache));
    said.into_iter().for_each(|(n, compiler, verdict)| _ = rows[n].verdicts.insert(compiler, verdict));
    println!("the others: {:.0} s, of which, all cores together,", start.elapsed().as_secs_f64());
    for (compiler, time) in times {
        let asked = |row: &&Row| row.verdicts.get(&compiler).is_some_and(Verdict::is_asked);
        let count = rows.iter().filter(asked).count();
        println!("  {compiler}: {:.1} s for {count} variants", time.as_secs_f64());
    }

    std::fs::write(out.join("variants.csv"), table::variants(&rows))?;
    let (compilers, loops, small) = (table::compilers(&rows), table::loops(&rows), table::small(&rows));
    let fxc = table::fxc(&rows);
    let (tiles, predicted) =
        (table::tiles(&rows), model::section(&rows, &std::env::var("SHADERS_DATE").unwrap_or_default()));
    println!(
        "\n{loops}\n{tiles}\n{predicted}\n{small}\n{fxc}\n{compilers}\nevery variant: {}\n",
        out.join("variants.csv").display()
    );
    if let Some(folder) = &options.write {
        std::fs::write(folder.join("SHADERS.md"), table::page(&loops, &tiles, &small, &fxc, &compilers))?;
        let path = folder.join("PREDICTIONS.md");
        let page = model::written(&std::fs::read_to_string(&path)?, &predicted)
            .ok_or("PREDICTIONS.md lacks the marks")?;
        std::fs::write(path, page)?;
    }
    let complete = options.words.is_empty() && options.share.is_none();
    let bad = judge(&rows, &mut permitted, complete);
    for line in &bad {
        println!("{line}");
    }
    if !bad.is_empty() {
        println!("{} faults", bad.len());
        std::process::exit(1);
    }
    Ok(())
}

fn rows(options: &Options) -> Result<Vec<Row>, Box<dyn Error>> {
    // The host rewrites everything after the first line.
    let forms = FORMS.map(|(name, text)| (name.replace('/', "_"), text.lines().next().unwrap_or_default()));
    let form = |kernel: &KernelText| {
        let found = forms.iter().find(|(_, start)| kernel.wgsl.contains(start));
        found.map_or_else(String::new, |(stem, _)| stem.clone())
    };
    let wanted = |kernel: &KernelText| {
        options.words.iter().all(|word| kernel.name.split(' ').any(|part| part == word))
    };
    let rows = kernels().into_iter().filter(wanted);
    let rows: Vec<Row> =
        rows.map(|kernel| Row { form: form(&kernel), kernel, verdicts: BTreeMap::new() }).collect();
    let absent = forms.iter().find(|(form, _)| rows.iter().all(|row| row.form != *form));
    match absent {
        Some((form, _)) if options.words.is_empty() => Err(format!("no kernel has the form {form}").into()),
        _ => Ok(rows),
    }
}

/// Runs naga's part, with a file for each module.
fn translate_all(rows: &mut [Row], modules: &Path) -> Vec<Translated> {
    let all = Mutex::new((0..rows.len()).map(|_| Translated::default()).collect::<Vec<_>>());
    let jobs = chunks(0..rows.len(), 64).map(|chunk| {
        let (rows, all) = (&*rows, &all);
        let job = move || {
            let mut said = Vec::new();
            for n in chunk {
                let mut made = translate::translate(&rows[n].kernel);
                said.extend(made.verdicts.drain(..).map(|(compiler, verdict)| (n, compiler, verdict)));
                if let Some(words) = made.spirv.take() {
                    match std::fs::write(module(modules, n), bytemuck::cast_slice::<u32, u8>(&words)) {
                        Ok(()) => made.module = true,
                        Err(error) => {
                            said.push((n, Compiler::NagaSpirv, Verdict::Rejected(error.to_string())))
                        }
                    }
                }
                all.lock().expect("nobody panics with it")[n] = made;
            }
            said
        };
        let job: Job = (Compiler::Naga, Box::new(job));
        job
    });
    let (said, _) = run(jobs.collect());
    let translated = all.into_inner().expect("nobody panicked with it");
    said.into_iter().for_each(|(n, compiler, verdict)| _ = rows[n].verdicts.insert(compiler, verdict));
    translated
}

fn module(modules: &Path, n: usize) -> PathBuf {
    modules.join(format!("{n}.spv"))
}

fn chunks(all: impl IntoIterator<Item = usize>, size: usize) -> impl Iterator<Item = Vec<usize>> {
    let all: Vec<usize> = all.into_iter().collect();
    all.chunks(size).map(<[usize]>::to_vec).collect::<Vec<_>>().into_iter()
}

/// A compiler with the rows that it compiles.
struct Task {
    compiler: Compiler,
    tool: Tool,
    /// True for the rows that suit the compiler, by row.
    suits: Vec<bool>,
    taken: Vec<bool>,
}

impl Task {
    /// Returns the key of the verdict on a row.
    fn key(&self, n: usize, row: &Row, cache: &VerdictCache) -> u64 {
        let compiler = self.compiler.to_string();
        let (command, asked) = match &self.tool {
            Tool::Tint(path) | Tool::Dxc(path) => (path.display().to_string(), String::new()),
            Tool::SpirvVal(words) => (words.join(" "), String::new()),
            Tool::Fxc(command) | Tool::Cpp(command) => (command.clone(), String::new()),
            Tool::Mesa(mesa) => {
                let asked = format!("{} {:?}", mesa.texts.contains(&n), row.facts());
                (format!("{} {:?}", mesa.runner.display(), mesa.made), asked)
            }
        };
        let kernel = &row.kernel;
        let bound = format!("{} {}", kernel.bindings.len(), kernel.binds_mods);
        cache.key(&[&compiler, &command, &kernel.wgsl, &bound, &asked])
    }
}

enum Tool {
    /// The folder that contains Dawn.
    Tint(PathBuf),
    /// The program; before it the loader that runs it, if any.
    SpirvVal(Vec<String>),
    /// The library.
    Dxc(PathBuf),
    /// The command that starts FXC.
    Fxc(String),
    /// The command.
    Cpp(String),
    Mesa(Mesa),
}

struct Mesa {
    gpu: Gpu,
    runner: PathBuf,
    /// The time when the drivers were fetched.
    made: Option<SystemTime>,
    /// The rows whose text is read: one variant of each tile.
    texts: HashSet<usize>,
}

impl Tool {
    fn mesa(&self) -> Option<&Mesa> {
        if let Tool::Mesa(mesa) = self { Some(mesa) } else { None }
    }
}

/// Marks rows that suit the compiler. Together they have every combination of values of axes that
/// `covering` requires.
fn covered(rows: &[Row], suits: &[bool], with_tiles: bool, covering: Covering) -> Vec<bool> {
    let mut taken = suits.to_vec();
    for (matrix_units, values) in [(false, covering.values), (true, covering.matrix)] {
        if values == gpus::ALL {
            continue;
        }
        let these: Vec<usize> =
            (0..rows.len()).filter(|n| suits[*n] && rows[*n].matrix_units() == matrix_units).collect();
        // Tiles determine the registers. Each tile must occur with each value of an axis.
        let tiles: Vec<Option<String>> =
            these.iter().map(|n| rows[*n].tile().filter(|_| with_tiles)).collect();
        let axes: Vec<Vec<&str>> = these
            .iter()
            .zip(&tiles)
            .map(|(n, tile)| rows[*n].axes().into_iter().chain(tile.as_deref()).collect())
            .collect();
        for (n, covers) in these.into_iter().zip(cover::cover(&axes, values)) {
            taken[n] = covers;
        }
    }
    taken
}

/// Marks a share of the `taken` rows. It also marks rows with every value of an axis, unless the
/// `taken` rows cover only single values.
fn thinned(
    rows: &[Row],
    suits: &[bool],
    with_tiles: bool,
    covering: Covering,
    taken: &[bool],
    share: Share,
) -> Vec<bool> {
    let few = covering.values == 1;
    let each = if few { vec![false; rows.len()] } else { covered(rows, suits, with_tiles, gpus::EACH) };
    let kept = |n: usize| each[n] || taken[n] && share.holds(rows[n].name());
    (0..rows.len()).map(kept).collect()
}

/// Returns the tasks of the available compilers, the slowest first.
fn tasks(rows: &[Row], tools: &Tools, options: &Options) -> Vec<Task> {
    let mut tasks = Vec::new();
    let every = Covering { values: gpus::ALL, matrix: gpus::ALL };
    let task = |compiler, tool: Tool, suits: Vec<bool>, covering| {
        let mesa = tool.mesa().is_some();
        let covering = if options.all { every } else { covering };
        let mut taken = covered(rows, &suits, mesa, covering);
        for (n, row) in rows.iter().enumerate().filter(|_| mesa) {
            taken[n] |= suits[n] && row.facts().is_some();
        }
        if let Some(share) = options.share {
            taken = thinned(rows, &suits, mesa, covering, &taken, share);
        }
        let tool = match tool {
            Tool::Mesa(mesa) => Tool::Mesa(Mesa { texts: plainest(rows, &taken), ..mesa }),
            tool => tool,
        };
        Task { compiler, tool, suits, taken }
    };
    for (number, gpu) in GPUS.into_iter().enumerate() {
        let Some((_, runner)) = tools.mesa.iter().find(|(driver, _)| *driver == gpu.driver) else { continue };
        if let Err(why) = mesa::opens(runner, gpu) {
            println!("skipped: {}: {why}", gpu.name);
            continue;
        }
        let suits = rows.iter().map(|row| row.is_for(gpu)).collect();
        let made = runner.metadata().and_then(|of_file| of_file.modified()).ok();
        let mesa = Mesa { gpu, runner: runner.clone(), made, texts: HashSet::new() };
        tasks.push(task(Compiler::Mesa(number), Tool::Mesa(mesa), suits, gpu.covering));
    }
    tasks.sort_by_key(|task| std::cmp::Reverse(task.taken.iter().filter(|taken| **taken).count()));
    let plain = || rows.iter().map(|row| !row.matrix_units()).collect();
    let on_d3d12 = |row: &Row| !row.matrix_units() && row.kernel.workgroup_memory <= MOST_D3D12_MEMORY;
    if let Some(library) = &tools.dxc {
        let suits = rows.iter().map(on_d3d12).collect();
        tasks.push(task(Compiler::Dxc, Tool::Dxc(library.clone()), suits, gpus::PAIRS));
    }
    if let Some(command) = &tools.fxc {
        // Shader model 5.1 has neither 16-bit types nor subgroups.
        let suits = |row: &Row| {
            on_d3d12(row)
                && !wgsl::halves(&row.kernel.wgsl)
                && !wgsl::subgroups(&row.kernel.wgsl)
                && !OF_SOFTWARE.contains(&row.form.as_str())
        };
        let suits = rows.iter().map(suits).collect();
        tasks.push(task(Compiler::Fxc, Tool::Fxc(command.clone()), suits, gpus::PAIRS));
    }
    if let Some(command) = &tools.cxx {
        let suits = |row: &Row| row.verdicts.get(&Compiler::Metal) != Some(&Verdict::Unsuited);
        let suits = rows.iter().map(suits).collect();
        tasks.push(task(Compiler::Cpp, Tool::Cpp(command.clone()), suits, gpus::PAIRS));
    }
    if let Some(dawn) = &tools.dawn {
        tasks.push(task(Compiler::Tint, Tool::Tint(dawn.clone()), plain(), every));
    }
    if let Some(command) = &tools.spirv_val {
        let all = vec![true; rows.len()];
        tasks.push(task(Compiler::SpirvVal, Tool::SpirvVal(command.clone()), all, every));
    }
    tasks
}

/// Returns the plainest marked variant of each tile.
fn plainest(rows: &[Row], taken: &[bool]) -> HashSet<usize> {
    let mut best: HashMap<String, usize> = HashMap::new();
    for (n, row) in rows.iter().enumerate().filter(|(n, _)| taken[*n]) {
        let Some(tile) = row.tile() else { continue };
        let known = best.entry(tile).or_insert(n);
        if row.frills() < rows[*known].frills() {
            *known = n;
        }
    }
    best.into_values().collect()
}

/// Returns the jobs of all compilers except naga, the slowest first.
fn jobs<'a>(
    rows: &'a [Row],
    translated: &'a [Translated],
    tasks: &'a [Task],
    modules: &'a Path,
    cache: &'a VerdictCache,
) -> VecDeque<Job<'a>> {
    let mut jobs: VecDeque<Job> = VecDeque::new();
    for task in tasks {
        let compiler = task.compiler;
        jobs.push_back((compiler, Box::new(move || passed_over(task))));
        let has_input = |n: usize| match task.tool {
            Tool::Tint(_) | Tool::Fxc(_) | Tool::Cpp(_) => true,
            Tool::Dxc(_) => translated[n].hlsl.is_some(),
            Tool::SpirvVal(_) | Tool::Mesa(_) => translated[n].module,
        };
        let (mut asked, mut earlier) = (Vec::new(), Said::new());
        for n in (0..rows.len()).filter(|n| task.taken[*n] && has_input(*n)) {
            match cache.get(task.key(n, &rows[n], cache)) {
                Some(verdict) => earlier.push((n, compiler, verdict.clone())),
                None => asked.push(n),
            }
        }
        jobs.push_back((compiler, Box::new(move || earlier)));
        // A program that starts once for a chunk is slow to start.
        let size = if let Tool::Tint(_) = task.tool { 600 } else { 100 };
        for chunk in chunks(asked, size) {
            let job: Box<dyn FnOnce() -> Said + Send> = match &task.tool {
                Tool::Mesa(mesa) => Box::new(move || mesa_job(mesa, compiler, &chunk, rows, modules)),
                Tool::Dxc(library) => Box::new(move || dxc_job(library, &chunk, rows, translated)),
                Tool::Fxc(command) => Box::new(move || fxc_job(command, &chunk, rows, modules)),
                Tool::Cpp(command) => Box::new(move || cpp_job(command, &chunk, rows, modules)),
                Tool::Tint(dawn) => Box::new(move || tint_job(dawn, &chunk, rows, modules)),
                Tool::SpirvVal(command) => {
                    let check = move |n| (n, compiler, spirv_val::check(command, &module(modules, n)));
                    Box::new(move || chunk.into_iter().map(check).collect())
                }
            };
            let and_stored = move || {
                let mut said = job();
                for (n, _, verdict) in &mut said {
                    if let Err(error) = cache.store(task.key(*n, &rows[*n], cache), verdict) {
                        *verdict = Verdict::Rejected(format!("the verdict could not be stored: {error}"));
                    }
                }
                said
            };
            jobs.push_back((compiler, Box::new(and_stored)));
        }
    }
    jobs
}

/// Returns the verdicts on rows that the compiler skips: unsuited rows, and rows that were not
/// marked.
fn passed_over(task: &Task) -> Said {
    let verdict = |(n, (suits, taken)): (usize, (&bool, &bool))| match (suits, taken) {
        (false, _) => Some((n, task.compiler, Verdict::Unsuited)),
        (true, false) => Some((n, task.compiler, Verdict::Covered)),
        (true, true) => None,
    };
    task.suits.iter().zip(&task.taken).enumerate().filter_map(verdict).collect()
}

fn mesa_job(mesa: &Mesa, compiler: Compiler, chunk: &[usize], rows: &[Row], modules: &Path) -> Said {
    let job = |n: &usize| mesa::Job {
        module: module(modules, *n),
        buffers: rows[*n].kernel.bindings.len(),
        mods: rows[*n].kernel.binds_mods,
        text: mesa.texts.contains(n),
        tile: rows[*n].facts(),
    };
    let jobs: Vec<_> = chunk.iter().map(job).collect();
    let compiled = mesa::check(&mesa.runner, mesa.gpu, &jobs).into_iter().zip(chunk);
    let verdict = |(result, n): (Result<mesa::Statistics, String>, &usize)| {
        let planned = mesa.gpu.matrix_subgroup.filter(|_| rows[*n].matrix_units());
        let verdict = match (result, planned) {
            (Ok(s), Some(planned)) if s.subgroup != u64::from(planned) => {
                Verdict::Rejected(format!("subgroups of {}, not {planned}", s.subgroup))
            }
            (Ok(statistics), _) => Verdict::Compiled(Box::new(statistics)),
            (Err(why), _) => Verdict::Rejected(why),
        };
        (*n, compiler, verdict)
    };
    compiled.map(verdict).collect()
}

fn tint_job(dawn: &Path, chunk: &[usize], rows: &[Row], modules: &Path) -> Said {
    let texts = chunk.iter().map(|n| rows[*n].kernel.wgsl.as_str()).collect::<Vec<_>>();
    let first = chunk.first().copied().unwrap_or_default();
    let said = tint::check(dawn, &texts, &modules.join(format!("{first}.json")));
    chunk.iter().zip(said).map(|(n, verdict)| (*n, Compiler::Tint, verdict)).collect()
}

fn dxc_job(library: &Path, chunk: &[usize], rows: &[Row], translated: &[Translated]) -> Said {
    let dxc = dxc::Dxc::new(library);
    let check = |n: &usize| {
        let verdict = match (&dxc, &translated[*n].hlsl) {
            (Ok(dxc), Some(hlsl)) => dxc.check(hlsl, wgsl::halves(&rows[*n].kernel.wgsl)),
            (Ok(_), None) => Verdict::Unsuited,
            (Err(error), _) => Verdict::Rejected(error.to_string()),
        };
        (*n, Compiler::Dxc, verdict)
    };
    chunk.iter().map(check).collect()
}

fn fxc_job(command: &str, chunk: &[usize], rows: &[Row], modules: &Path) -> Said {
    let mut fxc = fxc::Fxc::new(command);
    let mut check = |n: usize| -> Result<Verdict, String> {
        let fxc = fxc.as_mut().map_err(|error| error.to_string())?;
        let path = modules.join(format!("{n}.hlsl"));
        let hlsl = translate::shader_model_5_1(&rows[n].kernel.wgsl)?;
        std::fs::write(&path, hlsl).map_err(|error| error.to_string())?;
        Ok(fxc.check(&path))
    };
    chunk.iter().map(|n| (*n, Compiler::Fxc, check(*n).unwrap_or_else(Verdict::Rejected))).collect()
}

fn cpp_job(command: &str, chunk: &[usize], rows: &[Row], modules: &Path) -> Said {
    let write = |n: usize| -> Result<PathBuf, String> {
        let path = modules.join(format!("{n}.metal"));
        std::fs::write(&path, translate::msl_text(&rows[n].kernel.wgsl)?)
            .map_err(|error| error.to_string())?;
        Ok(path)
    };
    let mut said = Said::new();
    let (mut written, mut paths) = (Vec::new(), Vec::new());
    for n in chunk {
        match write(*n) {
            Ok(path) => {
                written.push(*n);
                paths.push(path);
            }
            Err(why) => said.push((*n, Compiler::Cpp, Verdict::Rejected(why))),
        }
    }
    let first = chunk.first().copied().unwrap_or_default();
    let checked = cpp::check(command, &paths, &modules.join(format!("{first}.cpp")));
    said.extend(written.into_iter().zip(checked).map(|(n, verdict)| (n, Compiler::Cpp, verdict)));
    said
}

/// Returns a line for every failure: faults that no line permits, and lines that no fault needs.
fn judge(rows: &[Row], permitted: &mut [permitted::Permitted], complete: bool) -> Vec<String> {
    let mut bad = Vec::new();
    let mut ran = Vec::new();
    for row in rows {
        let axes = row.axes();
        for (compiler, verdict) in &row.verdicts {
            if verdict.is_asked() && !ran.contains(compiler) {
                ran.push(*compiler);
            }
            for (kind, amount) in permitted::unexplained(permitted, *compiler, &axes, verdict) {
                let why = if let Verdict::Rejected(why) = verdict {
                    format!(": {why}")
                } else {
                    format!(" {amount}")
                };
                bad.push(format!("{compiler}: {}: {kind}{why}", row.name()));
            }
            // The driver's text was read.
            let read = verdict.statistics().filter(|s| s.mad_share.is_some() && row.facts().is_some());
            if read.is_some_and(|s| s.tile.is_none()) {
                bad.push(format!("{compiler}: {}: no full tile found in its text", row.name()));
            }
        }
    }
    if complete {
        for form in ["fused_gpu", "fused_matrix"] {
            if !rows.iter().any(|row| row.form == form && row.facts().is_some()) {
                bad.push(format!("{form}: no variant has a name whose tiles are counted"));
            }
        }
        let stale = permitted.iter().filter(|line| !line.used && line.is_judged(&ran));
        bad.extend(stale.map(|line| format!("permitted.txt: nothing needs the line: {}", line.line)));
    }
    bad
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_of_one_share() {
        let shares: Vec<Share> = (1..=8).filter_map(|n| Share::parse(&format!("{n}/8"))).collect();
        assert_eq!(shares.len(), 8);
        let mut sizes = [0; 8];
        for n in 0..4000 {
            let name = format!("fused tiles={n} dtype=F16");
            let of: Vec<usize> = (0..8).filter(|share| shares[*share].holds(&name)).collect();
            assert_eq!(of.len(), 1, "{name}");
            sizes[of[0]] += 1;
        }
        assert!(sizes.iter().all(|size| (400..600).contains(size)), "{sizes:?}");
        assert!(["0/8", "9/8", "8", "1/0", "a/b", "-1/2"].iter().all(|text| Share::parse(text).is_none()));
    }
}
