//! What was found, as tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::Row;
use crate::radv::{FAMILIES, Statistics};
use crate::verdict::{Compiler, Verdict};

/// A number's name, and where it is.
type Column = (&'static str, fn(&Statistics) -> u64);

/// RADV's numbers, as `variants` names them.
const COLUMNS: [Column; 9] = [
    ("vgprs", |s| s.vgprs),
    ("spills", |s| s.spills),
    ("scalar_spills", |s| s.scalar_spills),
    ("scratch", |s| s.scratch),
    ("occupancy", |s| s.occupancy),
    ("lds", |s| s.lds),
    ("code", |s| s.code),
    ("latency", |s| s.latency),
    ("inverse_throughput", |s| s.inverse_throughput),
];

/// Every variant a line: what each compiler said, and RADV's numbers by family.
pub fn variants(rows: &[Row]) -> String {
    let compilers = Compiler::all();
    let mut text = "variant,form".to_string();
    for compiler in &compilers {
        let _ = write!(text, ",{compiler}");
    }
    for family in FAMILIES {
        for (column, _) in COLUMNS {
            let _ = write!(text, ",{} {column}", family.name);
        }
    }
    text.push('\n');
    for row in rows {
        let _ = write!(text, "{},{}", row.name(), row.form);
        for compiler in &compilers {
            text.push_str(match row.verdicts.get(compiler) {
                None => ",not run",
                Some(Verdict::Accepted | Verdict::Compiled(_)) => ",yes",
                Some(Verdict::Unsuited) => ",unsuited",
                Some(Verdict::Covered) => ",covered",
                Some(Verdict::Rejected(_)) => ",NO",
            });
        }
        for family in 0..FAMILIES.len() {
            match row.verdicts.get(&Compiler::Radv(family)).and_then(Verdict::statistics) {
                Some(s) => COLUMNS.iter().for_each(|(_, number)| _ = write!(text, ",{}", number(s))),
                None => text.push_str(&",".repeat(COLUMNS.len())),
            }
        }
        text.push('\n');
    }
    text
}

/// By compiler: how many it was asked of, and how many it took.
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
        let accepted = count(|v| matches!(v, Verdict::Accepted | Verdict::Compiled(_)));
        let rejected = count(|v| matches!(v, Verdict::Rejected(_)));
        let unsuited = count(|v| matches!(v, Verdict::Unsuited));
        let covered = count(|v| matches!(v, Verdict::Covered));
        let _ = writeln!(text, "| {compiler} | {accepted} | {rejected} | {unsuited} | {covered} |");
    }
    text
}

/// By stage, form and family: the worst of each number.
pub fn stages(rows: &[Row]) -> String {
    let mut worst: BTreeMap<(&str, &str, usize), Vec<&Statistics>> = BTreeMap::new();
    for row in rows {
        for family in 0..FAMILIES.len() {
            if let Some(s) = row.verdicts.get(&Compiler::Radv(family)).and_then(Verdict::statistics) {
                worst.entry((row.stage(), &row.form, family)).or_default().push(s);
            }
        }
    }
    let mut text =
        "| stage | form | GPU | variants | VGPRs | spills | scratch | subgroups per SIMD | LDS | latency |\n\
                    |---|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
            .to_string();
    for ((stage, form, family), all) in worst {
        let most = |number: fn(&Statistics) -> u64| all.iter().map(|s| number(s)).max().unwrap_or_default();
        let (vgprs, spills, scratch) = (most(|s| s.vgprs), most(|s| s.spills), most(|s| s.scratch));
        let fewest = all.iter().map(|s| s.occupancy).min().unwrap_or_default();
        let (lds, latency) = (most(|s| s.lds), most(|s| s.latency));
        let (family, count) = (FAMILIES[family].name, all.len());
        let _ = writeln!(
            text,
            "| {stage} | {form} | {family} | {count} | {vgprs} | {spills} | {scratch} | {fewest} | {lds} | {latency} |"
        );
    }
    text
}

/// The committed page.
pub fn page(stages: &str, compilers: &str) -> String {
    format!(
        "# What compilers make of the kernels\n\n\
         Written by `scripts/shaders --write`, which has RADV and DXC compile a part of the variants: one that has every three values\n\
         of axes that occur together, RADV all for its matrix units too. By stage, form (the shader in `shaders`\n\
         that its loop is in) and GPU, the worst of all variants,\n\
         as Mesa 25.0's RADV reports them: vector registers, those that go to memory, bytes of memory of a subgroup's own,\n\
         subgroups that a SIMD holds at once (the fewest), bytes of workgroup memory, and the compiler's estimate of cycles, which\n\
         compares variants of one kernel and nothing else. Forms that end in `cpu` or `invocation` are for software drivers.\n\n\
         {stages}\n\
         What each compiler said, `naga` being its validator and `naga-…` its writers:\n\n\
         {compilers}"
    )
}
