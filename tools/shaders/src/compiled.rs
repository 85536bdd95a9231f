//! Compares this crate's kernels with other programs' kernels, as drivers compile them. It reads
//! files of the layer `capture`, which `scripts/compiled` gathers, and writes
//! `benches/COMPILED.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use crate::assembly::{self, Counts, Kind};
use crate::gpus::{self, Driver, Gpu};
use crate::mad_share;

/// The workloads: folders in a GPU's folder, and their titles on the page.
const WORKLOADS: [(&str, &str); 3] = [
    ("f32", "f32, without matrix units: 8 heads, 1024 queries, 1024 keys"),
    ("matrix", "f16, on matrix units: 8 heads, 1024 queries, 1024 keys"),
    ("decode", "f32, decode: 8 heads, 1 query, 4096 keys"),
];

/// The GPUs of the page. The other GPUs resemble one of them.
const ON_THE_PAGE: [&str; 7] =
    ["nvk-turing", "nvk-ampere", "radv-navi21", "radv-navi31", "radv-gfx1201", "honeykrisp-m1", "turnip-750"];

/// A program's kernel, as the page lists it.
struct Kernel {
    driver: String,
    registers: u64,
    spills: u64,
    memory: Option<u64>,
    occupancy: u64,
    subgroup: u64,
    instructions: u64,
    /// Counts of the blocks that multiply, and of the loops around them.
    inner: Option<(Counts, Counts)>,
}

#[derive(serde::Deserialize)]
struct Captured {
    #[serde(default)]
    driver: String,
    subgroups: Vec<u64>,
    statistics: BTreeMap<String, u64>,
    texts: BTreeMap<String, String>,
}

impl Kernel {
    /// Reads a pipeline. Returns `None` if it lacks statistics that all pipelines have.
    fn new(gpu: Gpu, captured: &Captured) -> Option<Self> {
        let names = gpu.driver.names();
        let value = |name: &str| captured.statistics.get(name).copied();
        let text = names.text.and_then(|name| captured.texts.get(name));
        Some(Kernel {
            driver: captured.driver.clone(),
            registers: value(names.registers)?,
            spills: value(names.spills)?,
            memory: names.memory.and_then(value),
            occupancy: value(names.occupancy)?,
            subgroup: *captured.subgroups.first()?,
            instructions: value(names.instructions)?,
            inner: text.and_then(|text| mad_share::inner_loops(&assembly::blocks(gpu.driver, text))),
        })
    }

    /// Returns the kernel with matrix instructions, else the one with the most multiply-adds, among
    /// a folder's kernels with exponentials. If none has any, the one with the largest module. The
    /// others copy, convert or merge.
    fn of_folder(gpu: Gpu, folder: &Path) -> Result<Option<Self>, Box<dyn Error>> {
        let mut best: Option<(u64, Kernel)> = None;
        let Ok(files) = std::fs::read_dir(folder) else { return Ok(None) };
        for file in files {
            let path = file?.path();
            let module = path.with_extension("spv");
            let is_pipeline = path.extension().is_some_and(|end| end == "json") && module.exists();
            if is_pipeline && exponentials(&module)? {
                let captured = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
                let size = std::fs::metadata(&module)?.len();
                let kernel = Kernel::new(gpu, &captured).map(|kernel| (size, kernel));
                let key = |(size, kernel): &(u64, Kernel)| (kernel.is_matrix(), kernel.products(), *size);
                best = kernel.filter(|k| best.as_ref().is_none_or(|b| key(k) > key(b))).or(best);
            }
        }
        Ok(best.map(|(_, kernel)| kernel))
    }

    /// The multiply-adds of the blocks that multiply; 0 if the driver gives no text.
    fn products(&self) -> u64 {
        self.inner.map_or(0, |(blocks, _)| blocks.products)
    }

    fn is_matrix(&self) -> bool {
        self.inner.is_some_and(|(blocks, _)| blocks.of(Kind::Matrix) > 0)
    }

    /// Returns the invocations that the GPU's unit holds.
    fn held(&self, driver: Driver) -> u64 {
        driver.held(self.occupancy, self.subgroup)
    }
}

/// True if a module has an exponential, to base e or 2.
fn exponentials(module: &Path) -> Result<bool, Box<dyn Error>> {
    const EXT_INST: u32 = 12;
    let words = ash::util::read_spv(&mut std::fs::File::open(module)?)?;
    let mut rest = words.get(5..).unwrap_or_default();
    while let Some(first) = rest.first() {
        if first & 0xffff == EXT_INST && matches!(rest.get(4), Some(27 | 29)) {
            return Ok(true);
        }
        rest = rest.get((first >> 16).max(1) as usize..).unwrap_or_default();
    }
    Ok(false)
}

/// A row of the table.
struct Quantity {
    name: &'static str,
    /// True if the largest number is the best.
    most: bool,
    value: fn(&Kernel, Gpu) -> Option<f64>,
    digits: usize,
}

const fn least(name: &'static str, value: fn(&Kernel, Gpu) -> Option<f64>, digits: usize) -> Quantity {
    Quantity { name, most: false, value, digits }
}

const fn most(name: &'static str, value: fn(&Kernel, Gpu) -> Option<f64>, digits: usize) -> Quantity {
    Quantity { name, most: true, value, digits }
}

/// Returns `what` divided by `each`, if `each` is not 0.
fn per(what: u64, each: u64) -> Option<f64> {
    (each > 0).then(|| what as f64 / each as f64)
}

/// Returns `what` for each multiply-add, in the blocks that multiply. Returns `None` if matrix
/// units multiply.
fn each(kernel: &Kernel, what: fn(&Counts) -> u64) -> Option<f64> {
    let (blocks, _) = kernel.inner.filter(|(blocks, _)| blocks.of(Kind::Matrix) == 0)?;
    per(what(&blocks), blocks.products)
}

const QUANTITIES: [Quantity; 10] = [
    least("registers", |k, _| Some(k.registers as f64), 0),
    least("spills", |k, _| Some(k.spills as f64), 0),
    least("memory", |k, _| k.memory.map(|bytes| bytes as f64), 0),
    most("occupancy", |k, gpu| Some(k.held(gpu.driver) as f64), 0),
    least("instructions in all", |k, _| Some(k.instructions as f64), 0),
    least("instructions per multiply-add", |k, _| each(k, Counts::all), 2),
    least("bytes loaded per multiply-add", |k, _| each(k, |c| c.loaded), 2),
    least("instructions per multiply-add, whole loops", loops_each, 2),
    least(
        "instructions per matrix instruction",
        |k, _| k.inner.and_then(|(c, _)| per(c.all(), c.of(Kind::Matrix))),
        2,
    ),
    least(
        "instructions per matrix instruction, whole loops",
        |k, _| k.inner.and_then(|(_, c)| per(c.all(), c.of(Kind::Matrix))),
        2,
    ),
];

fn loops_each(kernel: &Kernel, _: Gpu) -> Option<f64> {
    let (_, loops) = kernel.inner.filter(|(_, loops)| loops.of(Kind::Matrix) == 0)?;
    per(loops.all(), loops.products)
}

/// The programs, by their folders: this crate first, then its unchecked variant, which is not
/// compared.
const COLUMNS: [(&str, &str); 9] = [
    ("ours", "ours"),
    ("ours-unchecked", "(unchecked)"),
    ("burn-wgsl", "Burn, WGSL"),
    ("burn-spirv", "Burn, SPIR-V"),
    ("burn-spirv-2", "Burn, 2 subgroups"),
    ("burn-spirv-4", "Burn, 4 subgroups"),
    ("burn-spirv-8", "Burn, 8 subgroups"),
    ("ort", "ONNX Runtime"),
    ("ggml", "ggml"),
];

/// This crate on a device without robust access to buffers. wgpu always enables robust access.
const UNCHECKED: usize = 1;

/// The programs' kernels for a GPU and a workload, in the table's columns.
struct Case {
    gpu: Gpu,
    head_dim: &'static str,
    kernels: Vec<Option<Kernel>>,
}

/// A line of a table: its cells, and the columns of the best.
struct Line<'a> {
    quantity: &'a Quantity,
    cells: Vec<Option<String>>,
    best: Vec<bool>,
}

impl Line<'_> {
    /// True if there is a program to compare with.
    fn is_comparison(&self) -> bool {
        let others = self.cells.iter().enumerate().filter(|(column, _)| *column > UNCHECKED);
        self.cells[0].is_some() && others.flat_map(|(_, cell)| cell).next().is_some()
    }
}

impl Case {
    fn read(folder: &Path, workload: &str) -> Result<Vec<Self>, Box<dyn Error>> {
        let mut cases = Vec::new();
        for gpu in ON_THE_PAGE.into_iter().filter_map(gpus::find) {
            for head_dim in ["64", "128"] {
                let at = folder.join(gpu.name).join(format!("{workload}-{head_dim}"));
                let kernels = COLUMNS.iter().map(|(column, _)| Kernel::of_folder(gpu, &at.join(column)));
                let kernels = kernels.collect::<Result<Vec<_>, _>>()?;
                if kernels.iter().any(Option::is_some) {
                    cases.push(Case { gpu, head_dim, kernels });
                }
            }
        }
        Ok(cases)
    }

    /// Returns `None` if no driver reports the number, or if all numbers are 0.
    fn line<'a>(&self, quantity: &'a Quantity) -> Option<Line<'a>> {
        let digits = quantity.digits;
        let cell =
            |kernel: &Kernel| (quantity.value)(kernel, self.gpu).map(|value| format!("{value:.digits$}"));
        let cells: Vec<Option<String>> = self.kernels.iter().map(|k| k.as_ref().and_then(cell)).collect();
        // The rounded numbers of the page decide.
        let number = |cell: &String| cell.parse::<f64>().unwrap_or_default();
        let all = || {
            let compared = cells.iter().enumerate().filter(|(column, _)| *column != UNCHECKED);
            compared.filter_map(|(_, cell)| cell.as_ref()).map(number)
        };
        let best = if quantity.most { all().reduce(f64::max) } else { all().reduce(f64::min) }?;
        if all().all(|value| value == 0.0) {
            return None;
        }
        let is_best = |cell: &Option<String>| cell.as_ref().is_some_and(|cell| number(cell) == best);
        let best = cells.iter().enumerate().map(|(n, cell)| n != UNCHECKED && is_best(cell)).collect();
        Some(Line { quantity, cells, best })
    }
}

/// Returns the table of a workload. A line before it counts the rows in which this crate is the
/// best.
fn table(title: &str, cases: &[Case]) -> String {
    let has = |column: &usize| cases.iter().any(|case| case.kernels[*column].is_some());
    let columns: Vec<usize> = (0..COLUMNS.len()).filter(has).collect();
    let titles: Vec<&str> = columns.iter().map(|column| COLUMNS[*column].1).collect();
    let mut table = format!("| GPU | head_dim | | {} |\n|---|--:|---|", titles.join(" | "));
    table += &"--:|".repeat(columns.len());
    table.push('\n');
    let (mut best, mut worse) = (Vec::new(), Vec::new());
    for quantity in &QUANTITIES {
        let lines = cases.iter().filter_map(|case| Some((case, case.line(quantity)?)));
        let lines: Vec<_> = lines.filter(|(_, line)| line.is_comparison()).collect();
        let not = lines.iter().filter(|(_, line)| !line.best[0]);
        let not: Vec<String> = not.map(|(case, _)| format!("{} {}", case.gpu.name, case.head_dim)).collect();
        if not.is_empty() {
            best.extend((!lines.is_empty()).then_some(quantity.name));
        } else {
            let all = lines.len();
            worse.push(format!(
                "* {}: in {} of {all}; not {}",
                quantity.name,
                all - not.len(),
                not.join(", ")
            ));
        }
    }
    for case in cases {
        for line in QUANTITIES.iter().filter_map(|quantity| case.line(quantity)) {
            let cell = |column: &usize| match &line.cells[*column] {
                Some(cell) if line.best[*column] && line.is_comparison() => format!("**{cell}**"),
                cell => cell.clone().unwrap_or_default(),
            };
            let cells = columns.iter().map(cell).collect::<Vec<_>>().join(" | ");
            _ = writeln!(
                table,
                "| {} | {} | {} | {cells} |",
                case.gpu.name, case.head_dim, line.quantity.name
            );
        }
    }
    let best = match best.join(", ") {
        none if none.is_empty() => "In no quantity is ours the best everywhere:".into(),
        some => format!("Ours is the best, or among the best, everywhere in {some}; elsewhere:"),
    };
    format!("## {title}\n\n{best}\n\n{}\n\n{table}", worse.join("\n"))
}

/// `folder`: the files that `scripts/compiled` gathered. `page`: the file to write, which begins
/// with `notes`.
pub fn run(folder: &str, notes: &str, date: &str, page: &str) -> Result<(), Box<dyn Error>> {
    let mut text = std::fs::read_to_string(notes)?;
    let mut drivers = BTreeSet::new();
    let mut tables = String::new();
    for (workload, title) in WORKLOADS {
        let cases = Case::read(Path::new(folder), workload)?;
        let kernels = cases.iter().flat_map(|case| &case.kernels).flatten();
        drivers.extend(kernels.map(|kernel| kernel.driver.clone()).filter(|driver| !driver.is_empty()));
        tables += &format!("\n{}", table(title, &cases));
    }
    let drivers = drivers.into_iter().collect::<Vec<_>>().join(", ");
    text += &format!("\nDrivers: {drivers}. Made on {date}.\n{tables}");
    std::fs::write(page, text)?;
    Ok(())
}
