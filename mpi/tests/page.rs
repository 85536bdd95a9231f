//! Checks that docs/internals/rings.md has the tables that the plan computes.
//! `WGPU_ATTENTION_WRITE=1` writes them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use wgpu_attention_mpi::plan::{Forecast, Machine, Workload, forecast, smallest_block};
use wgpu_attention_mpi::{Schedule, SequenceMask};

/// Machines: a card, a link, and the path from the device to the link. The rates of attention are
/// published values of FlashAttention on each card (f16 or bf16, head_dim 128).
const MACHINES: [(&str, Machine); 5] = [
    ("H100, NVLink 4, GPU-aware", machine(648e12, 450e9, f64::INFINITY)),
    ("H100, 400 Gbit/s each, GPU-aware", machine(648e12, 50e9, f64::INFINITY)),
    ("H100, 400 Gbit/s each, staged over PCIe 5", machine(648e12, 50e9, 55e9)),
    ("A100, 200 Gbit/s each, staged over PCIe 4", machine(200e12, 25e9, 25e9)),
    ("RTX 4090, 100 Gbit/s each, staged over PCIe 4", machine(150e12, 12.5e9, 25e9)),
];

const fn machine(flops: f64, link: f64, staging: f64) -> Machine {
    Machine { flops, link, staging, latency: 1e-5 }
}

fn workload(length: usize, ranks: usize, schedule: Schedule) -> Workload {
    let mask = SequenceMask::causal();
    Workload { length, ranks, heads: 32, kv_heads: 8, head_dim: 128, element: 2, schedule, mask }
}

fn of(length: usize, ranks: usize, schedule: Schedule, machine: &Machine) -> Forecast {
    forecast(&workload(length, ranks, schedule), machine).expect("a ring")
}

fn tables() -> String {
    let mut text =
        String::from("| machine | smallest block, tokens | with 8 key heads for 32 |\n|---|---|---|\n");
    for (name, machine) in &MACHINES {
        let [all, grouped] = [32, 8].map(|kv_heads| smallest_block(machine, 32, kv_heads, 2));
        let _ = writeln!(text, "| {name} | {all:.0} | {grouped:.0} |");
    }
    text += "\n| machine | tokens | devices | contiguous | zigzag | sent in all, zigzag | longest idle, zigzag |\n|---|---|---|---|---|---|---|\n";
    for (name, machine) in &MACHINES {
        for (length, ranks) in [(65536, 8), (262_144, 16), (1 << 20, 64)] {
            let [ring, zigzag] =
                [Schedule::Contiguous, Schedule::Zigzag].map(|schedule| of(length, ranks, schedule, machine));
            let _ = writeln!(
                text,
                "| {name} | {length} | {ranks} | {:.1} ms, {:.0} % | {:.1} ms, {:.0} % | {:.1} GB | {:.1} ms |",
                1e3 * ring.seconds,
                1e2 * ring.share(),
                1e3 * zigzag.seconds,
                1e2 * zigzag.share(),
                zigzag.bytes as f64 / 1e9,
                1e3 * zigzag.idle,
            );
        }
    }
    text
}

#[test]
fn the_page_has_what_the_plan_computes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/internals/rings.md");
    let page = fs::read_to_string(&path).expect("docs/internals/rings.md");
    let (start, end) = ("<!-- what the plan computes -->\n", "<!-- end -->\n");
    let from = page.find(start).expect("a mark") + start.len();
    let to = page.find(end).expect("a second mark");
    let tables = tables();
    if std::env::var_os("WGPU_ATTENTION_WRITE").is_some() {
        fs::write(&path, [&page[..from], &tables, &page[to..]].concat()).expect("docs/internals/rings.md");
        return;
    }
    assert_eq!(&page[from..to], tables, "WGPU_ATTENTION_WRITE=1 writes it anew");
}
