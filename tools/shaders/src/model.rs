//! Predicts the share of a core's arithmetic that the fused kernel should reach. The inputs are the
//! work of a full tile (`tile.rs`), the workgroups of a core, and published rates. The model omits
//! rates that vendors do not publish.

use std::fmt::Write as _;

use crate::Row;
use crate::assembly::{Counts, Kind};
use crate::gpus::GPUS;
use crate::mesa::Statistics;
use crate::tile::Tile;
use crate::verdict::{Compiler, Verdict};

/// The rates of a core per clock. A core is a multiprocessor (NVIDIA) or a work-group processor
/// (AMD). Rates count invocations.
struct Rates {
    name: &'static str,
    /// The GPU of [`GPUS`] whose counts are used.
    counts: &'static str,
    /// Multiply-adds, additions and products of f32.
    floats: f64,
    /// Other vector instructions.
    others: f64,
    units: Units,
    exp2: Option<f64>,
    /// Bytes of workgroup memory that invocations load. Bytes that neighbours share count for each.
    workgroup_bytes: f64,
    /// Multiply-adds of matrix instructions, f16 with sums in f32.
    matrix: Option<f64>,
    /// KiB of workgroup memory.
    memory: u64,
    /// The number of units in a core, as the driver's occupancy counts them.
    parts: u64,
    source: &'static str,
}

/// The way in which instructions share units.
#[derive(Clone, Copy, PartialEq)]
enum Units {
    /// Floats and other instructions have separate units. All instructions share the issue rate, in
    /// invocations a clock. Matrix units work in parallel.
    Apart { issue: f64 },
    /// Vector and matrix instructions follow each other. Other instructions are issued in parallel.
    One,
}

const AMPERE: Rates = Rates {
    name: "NVIDIA Ampere (GA102, sm_86)",
    counts: "nvk-ampere",
    floats: 128.0,
    others: 64.0,
    units: Units::Apart { issue: 128.0 },
    exp2: Some(16.0),
    workgroup_bytes: 128.0,
    matrix: Some(256.0),
    memory: 100,
    parts: 1,
    source: "CUDA C++ Programming Guide; NVIDIA Ampere GA102 GPU Architecture (GeForce RTX 3080: tensor rate with f32 \
             sums)",
};

const RATES: [Rates; 6] = [
    Rates {
        name: "NVIDIA Turing (TU102, sm_75)",
        counts: "nvk-turing",
        floats: 64.0,
        others: 64.0,
        units: Units::Apart { issue: 128.0 },
        exp2: Some(16.0),
        workgroup_bytes: 64.0,
        matrix: Some(256.0),
        memory: 64,
        parts: 1,
        source: "CUDA C++ Programming Guide, table of arithmetic throughput; NVIDIA Turing GPU Architecture \
                 (GeForce RTX 2080 Ti: tensor rate with f32 sums); NVIDIA Ampere GA102 GPU Architecture (bytes)",
    },
    AMPERE,
    // The same instructions as Ampere's.
    Rates {
        name: "NVIDIA Hopper (GH100, sm_90)",
        matrix: None,
        memory: 228,
        source: "CUDA C++ Programming Guide. The tensor rate that NVIDIA publishes is of instructions of four subgroups at \
                 once; what those of one subgroup reach is not published",
        ..AMPERE
    },
    Rates {
        name: "AMD RDNA 2 (navi21)",
        counts: "radv-navi21",
        floats: 128.0,
        others: 128.0,
        units: Units::One,
        exp2: Some(32.0),
        workgroup_bytes: 256.0,
        matrix: None,
        memory: 128,
        parts: 4,
        source: "AMD, Introducing RDNA Architecture; RDNA 2 Instruction Set Architecture (banks of workgroup memory)",
    },
    Rates {
        name: "AMD RDNA 3 (navi31)",
        counts: "radv-navi31",
        floats: 256.0,
        others: 128.0,
        units: Units::One,
        exp2: None,
        workgroup_bytes: 256.0,
        matrix: Some(512.0),
        memory: 128,
        parts: 4,
        source: "ROCm Compute Profiler, performance model of RDNA (subgroups of 64 issue two halves of a float instruction \
                 at once); RDNA3 Instruction Set Architecture (banks); GPUOpen, Using the Matrix Cores of AMD RDNA 4",
    },
    Rates {
        name: "AMD RDNA 4 (gfx1201)",
        counts: "radv-gfx1201",
        floats: 256.0,
        others: 128.0,
        units: Units::One,
        exp2: None,
        workgroup_bytes: 256.0,
        matrix: Some(1024.0),
        memory: 128,
        parts: 4,
        source: "peak rates of the Radeon RX 9070 XT; RDNA4 Instruction Set Architecture (banks); GPUOpen, Using the Matrix \
                 Cores of AMD RDNA 4",
    },
];

/// Clocks of a core for a subgroup's part of a tile, by unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Clocks {
    /// Multiply-adds of the products: the floor.
    floor: f64,
    vector: f64,
    exp2: f64,
    workgroup: f64,
}

impl Clocks {
    fn of(rates: &Rates, counts: &Counts, subgroup: f64, matrix: bool) -> Self {
        let invocations = |kinds: &[Kind]| counts.sum(kinds) as f64 * subgroup;
        let matrix_clocks = rates.matrix.map_or(0.0, |rate| counts.matrix_multiply_adds as f64 / rate);
        let floor = if matrix { matrix_clocks } else { invocations(&[Kind::MultiplyAdd]) / rates.floats };
        let floats = invocations(&[Kind::MultiplyAdd, Kind::Float]) / rates.floats;
        let whole = [Kind::Max, Kind::Compare, Kind::Select, Kind::Integer];
        let vector = match rates.units {
            Units::Apart { issue } => {
                let issued = counts.all() as f64 * subgroup / issue;
                floats.max(invocations(&whole) / rates.others).max(issued).max(matrix_clocks)
            }
            Units::One => {
                let rest = invocations(&whole) + invocations(&[Kind::Exp2, Kind::Convert, Kind::Move]);
                floats + rest / rates.others + matrix_clocks
            }
        };
        let exp2 = rates.exp2.map_or(0.0, |rate| invocations(&[Kind::Exp2]) / rate);
        Clocks {
            floor,
            vector,
            exp2,
            workgroup: counts.workgroup_bytes as f64 * subgroup / rates.workgroup_bytes,
        }
    }

    /// Returns the clocks if no unit waits for another.
    fn least(&self) -> f64 {
        self.vector.max(self.exp2).max(self.workgroup)
    }
}

/// The prediction for a kernel on a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Prediction {
    /// Workgroups that a core holds.
    workgroups: u64,
    whole: Clocks,
    /// Shares of the floor. `most`: everything overlaps. `least`: the products and the rest follow
    /// each other. `share` is between, by the number of workgroups on a core.
    most: f64,
    least: f64,
    share: f64,
}

impl Prediction {
    fn of(
        rates: &Rates,
        tile: &Tile,
        statistics: &Statistics,
        held: u64,
        invocations: u64,
        memory: u64,
        matrix: bool,
    ) -> Self {
        let clocks = |counts: &Counts| Clocks::of(rates, counts, statistics.subgroup as f64, matrix);
        let whole = clocks(&tile.all());
        let together = whole.least();
        let apart = clocks(&tile.products).least() + clocks(&tile.outside).least();
        let by_registers = held * rates.parts / invocations;
        let workgroups = by_registers.min(rates.memory * 1024 / memory.max(1)).max(1);
        let clocks = together + (apart - together) / workgroups as f64;
        Prediction {
            workgroups,
            whole,
            most: whole.floor / together,
            least: whole.floor / apart,
            share: whole.floor / clocks,
        }
    }
}

/// Returns the table of rates.
fn rates() -> String {
    let mut text = "| GPU | counts of | multiply-adds | other vector instructions | issued | exp2 | bytes of workgroup memory | \
                    multiply-adds of matrix instructions, f16 with f32 sums | from |\n|---|---|--:|--:|--:|--:|--:|--:|---|\n"
        .to_string();
    for rates in &RATES {
        let Rates { name, counts, floats, others, workgroup_bytes, source, .. } = rates;
        let known = |rate: Option<f64>| rate.map_or("–".into(), |rate| rate.to_string());
        let issue = match rates.units {
            Units::Apart { issue } => issue.to_string(),
            Units::One => String::new(),
        };
        let _ = writeln!(
            text,
            "| {name} | {counts} | {floats} | {others} | {issue} | {} | {workgroup_bytes} | {} | {source} |",
            known(rates.exp2),
            known(rates.matrix)
        );
    }
    text
}

/// Returns the table of predictions, for the tiles that plans choose for many rows.
fn predictions(rows: &[Row]) -> String {
    let mut text = "| form | tile | GPU | workgroups a core | floor | vectors | exp2 | workgroup memory | share if all \
                    overlaps | if products and the rest do not | predicted |\n|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_string();
    let mut lines = Vec::new();
    for row in rows {
        let (Some(facts), Some(tile_name)) = (row.facts(), row.large_tile()) else { continue };
        for (order, rates) in
            RATES.iter().enumerate().filter(|(_, rates)| !facts.matrix || rates.matrix.is_some())
        {
            let Some(gpu) = GPUS.iter().position(|gpu| gpu.name == rates.counts) else { continue };
            let statistics = row.verdicts.get(&Compiler::Mesa(gpu)).and_then(Verdict::statistics);
            let Some((statistics, tile)) = statistics.and_then(|s| Some((s, s.tile?))) else { continue };
            let (invocations, memory) =
                (u64::from(row.kernel.invocations), u64::from(row.kernel.workgroup_memory));
            let held = GPUS[gpu].driver.held(statistics.occupancy, statistics.subgroup);
            let found = Prediction::of(rates, &tile, statistics, held, invocations, memory, facts.matrix);
            let Clocks { floor, vector, exp2, workgroup } = found.whole;
            let exp2 = if rates.exp2.is_some() { format!("{exp2:.0}") } else { String::new() };
            let line = format!(
                "| {} | {tile_name} | {} | {} | {floor:.0} | {vector:.0} | {exp2} | {workgroup:.0} | {:.2} | {:.2} | **{:.2}** |",
                row.form, rates.name, found.workgroups, found.most, found.least, found.share
            );
            lines.push((row.form.clone(), row.channels(), row.number("rows"), order, line));
        }
    }
    lines.sort();
    for (.., line) in lines {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Returns the section between the marks in `benches/PREDICTIONS.md`.
pub fn section(rows: &[Row], date: &str) -> String {
    format!(
        "Of {date}. Counts are of a full tile of keys, as [SHADERS.md](SHADERS.md) has them; f32 for fused_gpu, f16 for \
         fused_matrix.\n\n\
         ### Rates\n\n\
         Per clock and core: a multiprocessor of NVIDIA's, a work-group processor (two compute units) of AMD's.\n\
         – is what a GPU does not have or nobody publishes, and not in the model.\n\n\
         {}\n\
         Not in the model: Apple's GPUs, whose driver gives no text to count in; Qualcomm's, of whose rates too few are \
         published.\n\n\
         ### Model\n\n\
         The floor of a subgroup's part of a tile is the clocks that its multiply-adds in the two products take alone. Beside it:\n\n\
         * vectors: on NVIDIA's the largest of floats, other vector instructions, matrix instructions, and issuing all instructions,\n  \
           which have units apart, moves and conversions counted as issued alone; on AMD's the sum of vector and matrix\n  \
           instructions, beside which all others are issued;\n\
         * exp2; bytes of workgroup memory as invocations get them: a broadcast takes no bank twice, but its words have to reach\n  \
           each invocation.\n\n\
         If everything overlaps a tile takes the largest of them. If products and the rest (the softmax, stores of weights) follow\n\
         each other it takes the largest of each, added. Barriers keep the two apart in a workgroup, other workgroups on the core\n\
         fill the gap: with n of them a tile takes an n-th of the way from the first to the second. Latency has no other\n\
         part in it, nor have global memory, barriers themselves, and conflicts of banks.\n\n\
         ### Clocks of a subgroup's part of a tile, and shares of the floor\n\n\
         {}",
        rates(),
        predictions(rows)
    )
}

/// The marks around the section that is written into the page.
const BEGIN: &str = "<!-- Written by `scripts/shaders --write`: -->\n";
const END: &str = "<!-- By hand again. -->\n";

/// Returns `page` with `section` between the marks.
pub fn written(page: &str, section: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{section}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assembly::blocks;
    use crate::gpus::{Driver, find};

    fn counts(text: &str) -> Counts {
        blocks(Driver::Radv, text).iter().fold(Counts::default(), |sum, block| sum.plus(&block.counts))
    }

    #[test]
    fn clocks_are_of_the_units_that_instructions_share() {
        let text = "\tv_fma_f32 v0, v1, v2, v3\n".repeat(8)
            + &"\tv_add_nc_u32 v0, v1, v2\n".repeat(4)
            + &"\ts_waitcnt vmcnt(0)\n".repeat(4)
            + "\tds_load_b64 v0, v1\n\tv_exp_f32 v0, v1\n";
        let counts = counts(&text);
        let of = |name: &str, subgroup| {
            let rates = RATES.iter().find(|rates| rates.counts == name).expect("a GPU");
            Clocks::of(rates, &counts, subgroup, false)
        };
        // 8 multiply-adds take 4 clocks, all 18 instructions 4.5; a load of 8 bytes 4.
        let turing = of("nvk-turing", 32.0);
        assert_eq!((turing.floor, turing.vector, turing.exp2, turing.workgroup), (4.0, 4.5, 2.0, 4.0));
        // 13 vector instructions, one after the other, for twice as many invocations.
        let rdna2 = of("radv-navi21", 64.0);
        assert_eq!((rdna2.floor, rdna2.vector, rdna2.exp2, rdna2.workgroup), (4.0, 6.5, 2.0, 2.0));
        assert_eq!(turing.least(), 4.5);
    }

    #[test]
    fn workgroups_fill_each_others_gaps() {
        let rates = &RATES[0];
        let products = counts(&"\tv_fma_f32 v0, v1, v2, v3\n".repeat(64));
        let outside = counts(&"\tv_exp_f32 v0, v1\n".repeat(8));
        let tile = Tile { products, outside, each: 8 };
        let statistics = Statistics {
            subgroup: 32,
            registers: 0,
            spills: 0,
            memory: None,
            occupancy: 0,
            instructions: 0,
            cycles: None,
            scalar_spills: None,
            lds: None,
            code: None,
            mad_share: None,
            tile: None,
        };
        let of = |occupancy: u64, memory| {
            Prediction::of(rates, &tile, &statistics, 32 * occupancy, 128, memory, false)
        };
        // 32 clocks of products, 16 of exp2.
        let alone = of(4, 1024);
        assert_eq!((alone.workgroups, alone.most, alone.least), (1, 1.0, 32.0 / 48.0));
        assert_eq!((alone.share, of(8, 1024).share), (32.0 / 48.0, 32.0 / 40.0));
        assert_eq!(of(16, 30 << 10).workgroups, 2);
    }

    #[test]
    fn counts_are_of_gpus_that_there_are() {
        assert!(RATES.iter().all(|rates| find(rates.counts).is_some()));
    }

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let page = format!("a\n{BEGIN}old\n{END}b\n");
        assert_eq!(written(&page, "new"), Some(format!("a\n{BEGIN}\nnew\n{END}b\n")));
        assert_eq!(written("a", "new"), None);
    }
}
