//! The results as tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::Row;
use crate::assembly::Kind;
use crate::gpus::{Driver, GPUS};
use crate::mesa::Statistics;
use crate::verdict::{Compiler, Listing, Verdict};

/// A number's name, and its accessor.
type Column = (&'static str, fn(&Statistics) -> Option<u64>);

/// The drivers' numbers, as `variants` names them. It adds the share of multiply-adds.
const COLUMNS: [Column; 9] = [
    ("registers", |s| Some(s.registers)),
    ("spills", |s| Some(s.spills)),
    ("memory", |s| s.memory),
    ("occupancy", |s| Some(s.occupancy)),
    ("instructions", |s| Some(s.instructions)),
    ("cycles", |s| s.cycles),
    ("scalar_spills", |s| s.scalar_spills),
    ("lds", |s| s.lds),
    ("code", |s| s.code),
];

/// Returns a line for every variant: each compiler's verdict, and the drivers' numbers by GPU.
pub fn variants(rows: &[Row]) -> String {
    let compilers = Compiler::all();
    let mut text = "variant,form".to_string();
    for compiler in &compilers {
        let _ = write!(text, ",{compiler}");
    }
    for gpu in GPUS {
        for (column, _) in COLUMNS {
            let _ = write!(text, ",{} {column}", gpu.name);
        }
        let _ = write!(text, ",{} mad_share", gpu.name);
    }
    text.push_str(",fxc seconds,fxc instructions,fxc registers,fxc arrays\n");
    for row in rows {
        let _ = write!(text, "{},{}", row.name(), row.form);
        for compiler in &compilers {
            text.push_str(match row.verdicts.get(compiler) {
                None => ",not run",
                Some(verdict) if verdict.is_accepted() => ",yes",
                Some(Verdict::Unsuited) => ",unsuited",
                Some(Verdict::Covered) => ",covered",
                Some(_) => ",NO",
            });
        }
        for gpu in 0..GPUS.len() {
            let statistics = row.verdicts.get(&Compiler::Mesa(gpu)).and_then(Verdict::statistics);
            for (_, number) in COLUMNS {
                let number = statistics.and_then(number).map(|n| n.to_string());
                let _ = write!(text, ",{}", number.unwrap_or_default());
            }
            let share = statistics.and_then(|s| s.mad_share).map(|share| format!("{share:.0}"));
            let _ = write!(text, ",{}", share.unwrap_or_default());
        }
        match row.verdicts.get(&Compiler::Fxc) {
            Some(Verdict::Listed(fxc)) => {
                let Listing { seconds, instructions, registers, arrays } = fxc;
                let _ = write!(text, ",{seconds},{instructions},{registers},{arrays}");
            }
            _ => text.push_str(",,,,"),
        }
        text.push('\n');
    }
    text
}

/// Returns the worst of FXC's numbers, by stage and form.
pub fn fxc(rows: &[Row]) -> String {
    let mut worst: BTreeMap<(&str, &str), (usize, Listing)> = BTreeMap::new();
    for row in rows {
        let Some(Verdict::Listed(fxc)) = row.verdicts.get(&Compiler::Fxc) else { continue };
        let none = Listing { seconds: 0.0, instructions: 0, registers: 0, arrays: 0 };
        let (count, most) = worst.entry((row.stage(), &row.form)).or_insert((0, none));
        *count += 1;
        *most = Listing {
            seconds: most.seconds.max(fxc.seconds),
            instructions: most.instructions.max(fxc.instructions),
            registers: most.registers.max(fxc.registers),
            arrays: most.arrays.max(fxc.arrays),
        };
    }
    let mut text =
        "| stage | form | variants | seconds | instructions | registers | arrays |\n|---|---|--:|--:|--:|--:|--:|\n"
            .to_string();
    for ((stage, form), (count, most)) in worst {
        let Listing { seconds, instructions, registers, arrays } = most;
        let _ = writeln!(
            text,
            "| {stage} | {form} | {count} | {seconds:.1} | {instructions} | {registers} | {arrays} |"
        );
    }
    text
}

/// Returns by compiler how many variants it compiled, and how many it accepted.
pub fn compilers(rows: &[Row]) -> String {
    let mut text =
        "| compiler | accepted | rejected | not for it | covered by others |\n|---|--:|--:|--:|--:|\n"
            .to_string();
    for compiler in Compiler::all() {
        let verdicts: Vec<_> = rows.iter().filter_map(|row| row.verdicts.get(&compiler)).collect();
        if verdicts.is_empty() {
            let _ = writeln!(text, "| {compiler} | not run | | | |");
            continue;
        }
        let count = |is: fn(&Verdict) -> bool| verdicts.iter().filter(|v| is(v)).count();
        let accepted = count(Verdict::is_accepted);
        let rejected = count(|v| matches!(v, Verdict::Rejected(_)));
        let unsuited = count(|v| matches!(v, Verdict::Unsuited));
        let covered = count(|v| matches!(v, Verdict::Covered));
        let _ = writeln!(text, "| {compiler} | {accepted} | {rejected} | {unsuited} | {covered} |");
    }
    text
}

/// The worst numbers of several variants.
struct Worst<'a>(Vec<&'a Statistics>);

impl Worst<'_> {
    fn most(&self, number: impl Fn(&Statistics) -> Option<u64>) -> String {
        let most = self.0.iter().filter_map(|s| number(s)).max();
        most.map(|n| n.to_string()).unwrap_or_default()
    }

    fn fewest(&self) -> u64 {
        self.0.iter().map(|s| s.occupancy).min().unwrap_or_default()
    }

    /// Returns the least and the most share, among variants whose text was read.
    fn mad_share(&self) -> String {
        let shares = || self.0.iter().filter_map(|s| s.mad_share.map(|share| share.round() as u64));
        match (shares().min(), shares().max()) {
            (Some(least), Some(most)) if least < most => format!("{least}–{most}"),
            (least, _) => least.map(|n| n.to_string()).unwrap_or_default(),
        }
    }

    fn cells(&self) -> String {
        let (registers, spills) = (self.most(|s| Some(s.registers)), self.most(|s| Some(s.spills)));
        let (memory, instructions) = (self.most(|s| s.memory), self.most(|s| Some(s.instructions)));
        let (count, fewest) = (self.0.len(), self.fewest());
        format!("{count} | {registers} | {spills} | {memory} | {fewest} | {instructions}")
    }
}

/// Groups the compiled variants by stage, form and `by` of the GPU's number.
fn grouped<K: Ord>(
    rows: &[Row],
    takes: impl Fn(&Row) -> bool,
    by: impl Fn(usize) -> K,
) -> BTreeMap<(&str, &str, K), Worst<'_>> {
    let mut worst = BTreeMap::new();
    for row in rows.iter().filter(|row| takes(row)) {
        for gpu in 0..GPUS.len() {
            if let Some(s) = row.verdicts.get(&Compiler::Mesa(gpu)).and_then(Verdict::statistics) {
                let key = (row.stage(), row.form.as_str(), by(gpu));
                worst.entry(key).or_insert_with(|| Worst(Vec::new())).0.push(s);
            }
        }
    }
    worst
}

/// Returns the table of kernels with loops, by stage, form and GPU.
pub fn loops(rows: &[Row]) -> String {
    let mut text = "| stage | form | GPU | variants | registers | spills | memory | occupancy | instructions | mad share |\n\
                    |---|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_string();
    for ((stage, form, gpu), worst) in grouped(rows, |row| !row.form.is_empty(), |gpu| gpu) {
        let (gpu, cells, share) = (GPUS[gpu].name, worst.cells(), worst.mad_share());
        let _ = writeln!(text, "| {stage} | {form} | {gpu} | {cells} | {share} |");
    }
    text
}

/// Returns the table of the other kernels, by stage and driver.
pub fn small(rows: &[Row]) -> String {
    let number = |gpu: usize| Driver::ALL.iter().position(|driver| *driver == GPUS[gpu].driver);
    let mut text =
        "| stage | driver | variants × GPUs | registers | spills | memory | occupancy | instructions |\n\
                    |---|---|--:|--:|--:|--:|--:|--:|\n"
            .to_string();
    for ((stage, _, driver), worst) in grouped(rows, |row| row.form.is_empty(), number) {
        let driver = driver.map_or("", |n| Driver::ALL[n].name());
        let _ = writeln!(text, "| {stage} | {driver} | {} |", worst.cells());
    }
    text
}

/// Returns the table of a full tile's work in the fused kernel, by its size and GPU.
pub fn tiles(rows: &[Row]) -> String {
    use Kind::*;
    let parts: [(&str, &[Kind]); 9] = [
        ("exp2", &[Exp2]),
        ("floats", &[MultiplyAdd, Float]),
        ("max", &[Max]),
        ("compare, select", &[Compare, Select]),
        ("convert", &[Convert]),
        ("whole numbers", &[Integer, Scalar]),
        ("move", &[Move]),
        ("memory", &[WorkgroupLoad, WorkgroupStore, Buffer]),
        ("control", &[Control]),
    ];
    let mut text = "| form | tile | GPU | instructions | multiply-adds or matrix | workgroup memory | exp2 | the rest | outside \
                    the products, per score |"
        .to_string();
    parts.iter().for_each(|(name, _)| _ = write!(text, " {name} |"));
    text.push_str("\n|---|---|---|");
    text.push_str(&"--:|".repeat(6 + parts.len()));
    text.push('\n');
    let mut lines = Vec::new();
    for row in rows {
        let Some(name) = row.large_tile() else { continue };
        for (gpu, about) in GPUS.iter().enumerate() {
            let statistics = row.verdicts.get(&Compiler::Mesa(gpu)).and_then(Verdict::statistics);
            let Some(tile) = statistics.and_then(|s| s.tile) else { continue };
            let all = tile.all();
            let work = tile.products.sum(&[MultiplyAdd, Matrix]);
            let memory = all.sum(&[WorkgroupLoad, WorkgroupStore]);
            let rest = all.all() - work - memory - all.of(Exp2);
            let per_score = |n: u64| n as f64 / tile.each as f64;
            let mut line = format!(
                "| {} | {name} | {} | {} | {work} | {memory} | {} | {rest} | **{:.1}** |",
                row.form,
                about.name,
                all.all(),
                all.of(Exp2),
                per_score(tile.outside.all())
            );
            for (_, kinds) in &parts {
                let _ = write!(line, " {:.1} |", per_score(tile.outside.sum(kinds)));
            }
            lines.push((row.form.as_str(), row.channels(), row.number("rows"), gpu, line));
        }
    }
    lines.sort();
    for (.., line) in lines {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// The meaning of the columns, by driver.
const LEGEND: &str = "\
| | NVK | RADV | Honeykrisp | Turnip |
|---|---|---|---|---|
| registers | 32 bits, of 255 | vector registers, 32 bits, of 256 | 16 bits, of 255 | vectors of four, of 48 |
| spills | stores to memory | registers | values | stores to memory |
| memory | bytes of an invocation: spills, and arrays that are indexed | bytes of a subgroup: the same | bytes of an invocation | not told |
| occupancy, the fewest | subgroups that a multiprocessor holds | subgroups that a SIMD holds, as if of 32 on RDNA | invocations that a core holds, of 1024 | subgroups that a core holds |
| mad share | by `NAK assembly` | by `Assembly` | no text | by `IR3 Assembly` |
";

/// Returns the committed page.
pub fn page(loops: &str, tiles: &str, small: &str, fxc: &str, compilers: &str) -> String {
    let covering = |values: usize| {
        let these = GPUS.iter().filter(|gpu| gpu.covering.values == values);
        these.map(|gpu| gpu.name).collect::<Vec<_>>().join(", ")
    };
    let (each, every_three) = (covering(1), covering(3));
    format!(
        "# What compilers make of the kernels\n\n\
         Written by `scripts/shaders --write`. Mesa 26's drivers compile for GPUs that are not there: NVK for NVIDIA's, RADV for AMD's,\n\
         Honeykrisp for Apple's, Turnip for Qualcomm's. They, and DXC, see a part of the variants: one that has every two\n\
         values of axes that occur together, where a tile is a value too; every three for {every_three}, every one for\n\
         {each}.\n\n\
         The tables have the worst of all variants, in the drivers' own numbers, which compare variants on one GPU and nothing else:\n\n\
         {LEGEND}\n\
         Mad share: of a hundred instructions of the inner loops (basic blocks with 32 multiply-adds or 8 matrix\n\
         instructions) those that multiply and add, or are matrix instructions; the least and the most of one variant of each tile. Where it is\n\
         empty there is no such block.\n\n\
         Forms for software drivers are not asked of GPUs. What spills, or keeps arrays in memory, is\n\
         listed with its reason in `tools/shaders/permitted.txt`. Another vendor's compiler may do better or worse; a register file\n\
         is the chip's, so that what cannot fit here will not fit there.\n\n\
         ## Kernels with a loop, by form (the shader in `shaders` that the loop is in) and GPU\n\n\
         {loops}\n\
         ## A full tile of the fused kernel, by its rows and channels\n\n\
         What an invocation does for a tile of keys that every row sees whole, where no maximum moves and no score is −∞ or NaN: f32\n\
         (f16 on matrix units), no mask, as many channels of queries and keys as of values. `tools/shaders/src/tile.rs` says how\n\
         these blocks are found. What is outside the loops of the two products is the softmax, the stores of its weights, and on\n\
         matrix units staging; it is divided by the scores of an invocation, and then by what it does. Whole numbers are\n\
         addresses, those of a whole subgroup (RADV's scalar instructions) among them; control is branches, barriers and waits.\n\n\
         {tiles}\n\
         ## The others, by driver\n\n\
         {small}\n\
         ## FXC, by stage and form\n\n\
         The worst of all variants that FXC compiled, with wgpu's flags of a release build: seconds of a processor, instructions,\n\
         registers of four words, and registers of arrays that are indexed and so lie in memory.\n\n\
         {fxc}\n\
         ## Verdicts of the compilers: `naga` is its validator, `naga-…` its writers, `metal` checks of its module, `c++` g++\n\n\
         {compilers}"
    )
}
