//! Every kernel variant, put through every compiler that can be had without a GPU. `scripts/shaders` runs it, and says what
//! the tables are.

mod cover;
mod dxc;
mod permitted;
mod radv;
mod spirv_val;
mod table;
mod tint;
mod translate;
mod verdict;

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use support::wgsl;
use translate::Translated;
use verdict::{Compiler, Verdict};
use wgpu_attention::inspect::{KernelText, kernels};

/// The repository's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The shaders that hold a kernel's loop: a kernel has at most one of them.
const FORMS: [&str; 10] = [
    "fused/cpu",
    "fused/gpu",
    "fused/matrix",
    "decode/cpu",
    "decode/gpu",
    "matmul/cpu",
    "matmul/gpu",
    "matmul/matrix",
    "softmax/row_per_invocation",
    "softmax/row_per_workgroup",
];

/// A kernel and what was said of it.
struct Row {
    kernel: KernelText,
    /// The shader that its loop is in, of [`FORMS`].
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

    /// What a kernel is chosen by: the words of its name, and its form.
    fn axes(&self) -> Vec<&str> {
        let mut axes: Vec<&str> = self.name().split(' ').collect();
        axes.extend((!self.form.is_empty()).then_some(self.form.as_str()));
        axes
    }

    /// Whether plans for RADV may choose it: it has fragments of 16 × 16 alone, and subgroups as wide as it likes best.
    fn is_for(&self, family: radv::Family) -> bool {
        let axes = self.axes();
        // Projections say how many invocations four subgroups have.
        let wide = axes.contains(&"width=64") || axes.contains(&"lanes=256");
        !self.matrix_units() || family.matrix_units && axes.contains(&"fragment=Sixteen") && wide
    }
}

/// What the command line and `scripts/shaders` say.
struct Options {
    /// Every variant through every compiler.
    all: bool,
    /// Where the committed table goes, if it is to be written.
    write: Option<PathBuf>,
    /// Only kernels that have these words in their names.
    words: Vec<String>,
}

impl Options {
    fn read() -> Result<Self, lexopt::Error> {
        use lexopt::prelude::*;
        let mut options = Options { all: false, write: None, words: Vec::new() };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("all") => options.all = true,
                Long("write") => {
                    options.write = Some(root().join("benches/SHADERS.md"));
                }
                Value(word) => options.words.push(word.string()?),
                other => return Err(other.unexpected()),
            }
        }
        options.all |= !options.words.is_empty();
        if options.write.is_some() && options.all {
            return Err("--write is for what a run without words and --all compiles".into());
        }
        Ok(options)
    }
}

/// Where the compilers are: `scripts/shaders` says so, and nothing of those it could not get.
struct Tools {
    spirv_val: Option<Vec<String>>,
    dawn: Option<PathBuf>,
    dxc: Option<PathBuf>,
    radv: Option<PathBuf>,
}

impl Tools {
    fn of_environment() -> Self {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let words = |text: String| text.split(' ').map(String::from).collect();
        Tools {
            spirv_val: std::env::var("SHADERS_SPIRV_VAL").ok().map(words),
            dawn: path("SHADERS_DAWN"),
            dxc: path("SHADERS_DXC"),
            radv: path("SHADERS_RADV"),
        }
    }
}

type Said = Vec<(usize, Compiler, Verdict)>;
type Job<'a> = Box<dyn FnOnce() -> Said + Send + 'a>;

/// Runs `jobs` on all cores, the first ones first.
fn run(jobs: VecDeque<Job>) -> Said {
    let jobs = Mutex::new(jobs);
    let said = Mutex::new(Vec::new());
    let next = || jobs.lock().expect("nobody panics with it").pop_front();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some(job) = next() {
                    let more = job();
                    said.lock().expect("nobody panics with it").extend(more);
                }
            });
        }
    });
    said.into_inner().expect("nobody panicked with it")
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().nth(1).as_deref() == Some("radv") {
        // As an answer: nobody listens to standard error.
        return radv::serve().inspect_err(|error| println!("{error}"));
    }
    // What naga panics at is told with the kernel it panicked at.
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
    let taken = if options.all {
        vec![true; rows.len()]
    } else {
        // Those for matrix units all: nothing else comes as near to what registers hold.
        let near = rows.iter().map(|row| row.matrix_units() && radv::FAMILIES.iter().any(|f| row.is_for(*f)));
        let covering = cover::cover(&rows.iter().map(Row::axes).collect::<Vec<_>>());
        covering.into_iter().zip(near).map(|(covers, near)| covers || near).collect()
    };
    let count = taken.iter().filter(|taken| **taken).count();
    if count < rows.len() {
        println!(
            "dxc and radv: {count} of them, which have every three values of axes that occur together (--all: all of them)"
        );
    }
    let start = Instant::now();
    let said = run(jobs(&rows, &translated, &taken, &tools, &modules));
    said.into_iter().for_each(|(n, compiler, verdict)| _ = rows[n].verdicts.insert(compiler, verdict));
    println!("the others: {:.0} s", start.elapsed().as_secs_f64());

    std::fs::write(out.join("variants.csv"), table::variants(&rows))?;
    let (compilers, stages) = (table::compilers(&rows), table::stages(&rows));
    println!("\n{stages}\n{compilers}\nevery variant: {}\n", out.join("variants.csv").display());
    if let Some(path) = &options.write {
        std::fs::write(path, table::page(&stages, &compilers))?;
    }
    let bad = judge(&rows, &mut permitted, options.words.is_empty());
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
    let mut forms = Vec::new();
    let root = root().join("shaders");
    for form in FORMS {
        forms
            .push((form.replace('/', "_"), std::fs::read_to_string(root.join(form).with_extension("wgsl"))?));
    }
    let form = |kernel: &KernelText| {
        let found = forms.iter().find(|(_, text)| kernel.wgsl.contains(text));
        found.map_or_else(String::new, |(stem, _)| stem.clone())
    };
    let wanted = |kernel: &KernelText| {
        options.words.iter().all(|word| kernel.name.split(' ').any(|part| part == word))
    };
    let rows = kernels().into_iter().filter(wanted);
    Ok(rows.map(|kernel| Row { form: form(&kernel), kernel, verdicts: BTreeMap::new() }).collect())
}

/// naga's part, with a file for each module.
fn translate_all(rows: &mut [Row], modules: &Path) -> Vec<Translated> {
    let all = Mutex::new((0..rows.len()).map(|_| Translated::default()).collect::<Vec<_>>());
    let jobs = chunks(0..rows.len(), 64).map(|chunk| {
        let (rows, all) = (&*rows, &all);
        let job = move || {
            let mut said = Vec::new();
            for n in chunk {
                let mut made = translate::translate(&rows[n].kernel.wgsl, rows[n].matrix_units());
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
        Box::new(job) as Job
    });
    let said = run(jobs.collect());
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

/// Everything that is not naga, the slowest first.
fn jobs<'a>(
    rows: &'a [Row],
    translated: &'a [Translated],
    taken: &'a [bool],
    tools: &'a Tools,
    modules: &'a Path,
) -> VecDeque<Job<'a>> {
    let mut jobs: VecDeque<Job> = VecDeque::new();
    let compiled = || (0..rows.len()).filter(|n| translated[*n].module);
    if let Some(runner) = &tools.radv {
        for (number, family) in radv::FAMILIES.into_iter().enumerate() {
            let compiler = Compiler::Radv(number);
            jobs.push_back(passed_over(compiler, rows, taken, move |row| row.is_for(family)));
            let asked = compiled().filter(|n| taken[*n] && rows[*n].is_for(family));
            for chunk in chunks(asked, 250) {
                jobs.push_back(Box::new(move || radv_job(runner, family, compiler, &chunk, rows, modules)));
            }
        }
    }
    if let Some(library) = &tools.dxc {
        jobs.push_back(passed_over(Compiler::Dxc, rows, taken, |row| !row.matrix_units()));
        let asked = (0..rows.len()).filter(|n| taken[*n] && translated[*n].hlsl.is_some());
        for chunk in chunks(asked, 100) {
            jobs.push_back(Box::new(move || dxc_job(library, &chunk, rows, translated)));
        }
    }
    if let Some(dawn) = &tools.dawn {
        jobs.push_back(passed_over(Compiler::Tint, rows, &[], |row| !row.matrix_units()));
        let asked = (0..rows.len()).filter(|n| !rows[*n].matrix_units());
        for chunk in chunks(asked, 600) {
            jobs.push_back(Box::new(move || {
                let texts = chunk.iter().map(|n| rows[*n].kernel.wgsl.as_str()).collect::<Vec<_>>();
                let said = tint::check(dawn, &texts, &modules.join(format!("{}.json", chunk[0])));
                chunk.into_iter().zip(said).map(|(n, verdict)| (n, Compiler::Tint, verdict)).collect()
            }));
        }
    }
    if let Some(command) = &tools.spirv_val {
        for chunk in chunks(compiled(), 100) {
            jobs.push_back(Box::new(move || {
                let check = |n| (n, Compiler::SpirvVal, spirv_val::check(command, &module(modules, n)));
                chunk.into_iter().map(check).collect()
            }));
        }
    }
    jobs
}

/// What `compiler` is not asked of: what does not suit it, and what is not taken (of an empty `taken` everything is).
fn passed_over<'a>(
    compiler: Compiler,
    rows: &'a [Row],
    taken: &'a [bool],
    suits: impl Fn(&Row) -> bool + Send + 'a,
) -> Job<'a> {
    Box::new(move || {
        let verdict = |(n, row): (usize, &Row)| match (suits(row), taken.get(n)) {
            (false, _) => Some((n, compiler, Verdict::Unsuited)),
            (true, Some(false)) => Some((n, compiler, Verdict::Covered)),
            (true, _) => None,
        };
        rows.iter().enumerate().filter_map(verdict).collect()
    })
}

fn radv_job(
    runner: &Path,
    family: radv::Family,
    compiler: Compiler,
    chunk: &[usize],
    rows: &[Row],
    modules: &Path,
) -> Said {
    let job = |n: &usize| radv::Job { module: module(modules, *n), buffers: rows[*n].kernel.bindings.len() };
    let jobs: Vec<_> = chunk.iter().map(job).collect();
    let compiled = radv::check(runner, family, &jobs).into_iter().zip(chunk);
    let verdict = |(result, n): (Result<radv::Statistics, String>, &usize)| {
        let verdict = match result {
            Ok(s) if rows[*n].matrix_units() && s.subgroup != radv::SUBGROUP => {
                Verdict::Rejected(format!("subgroups of {}, not {}", s.subgroup, radv::SUBGROUP))
            }
            Ok(statistics) => Verdict::Compiled(statistics),
            Err(why) => Verdict::Rejected(why),
        };
        (*n, compiler, verdict)
    };
    compiled.map(verdict).collect()
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

/// A line for everything that fails: what no line permits, and lines that nothing needs.
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
        }
    }
    if complete {
        let stale = permitted.iter().filter(|line| !line.used && line.is_judged(&ran));
        bad.extend(stale.map(|line| format!("permitted.txt: nothing needs the line: {}", line.line)));
    }
    bad
}
