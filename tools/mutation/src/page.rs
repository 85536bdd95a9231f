//! The page of results.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::results::Entry;

const INTRODUCTION: &str = "<!-- Written by `scripts/mutation --page`. -->
# Faults that the tests find

`scripts/mutation` puts one small fault at a time into a shader or into host code. It runs the default tests that reach the fault.
A fault is killed if a test fails, if the program crashes, or if a run takes too long.
The faults are drawn with a fixed seed, at most four in a file. Cost models, reference code and checks of devices have none.
A fault is not reached if no test executes the changed code, or binds a kernel with the changed shader.
The tests ran on lavapipe, where the default leaves out slow tests (`in_turn!`) and seven of eight usual runs.
";

/// The results of some faults.
#[derive(Default)]
struct Counts {
    run: usize,
    killed: usize,
    refused: usize,
    survived: usize,
    not_reached: usize,
    open: usize,
}

impl Counts {
    fn add(&mut self, entry: &Entry) {
        self.run += 1;
        let count = match entry.outcome.as_str() {
            "survived" => &mut self.survived,
            "not reached" => &mut self.not_reached,
            "open" => &mut self.open,
            "refused by the compiler" => &mut self.refused,
            _ => &mut self.killed,
        };
        *count += 1;
    }

    fn row(&self, name: &str) -> String {
        let Counts { run, killed, refused, survived, not_reached, open } = self;
        format!("| {name} | {run} | {killed} | {survived} | {not_reached} | {open} | {refused} |\n")
    }
}

/// The first two parts of a path.
pub fn folder_of(file: &str) -> String {
    file.split('/').take(2).collect::<Vec<_>>().join("/")
}

/// The page of faults that ran, with their names. `drawn` counts all faults.
pub fn text(entries: &[(String, &Entry)], drawn: usize) -> String {
    let mut all = Counts::default();
    entries.iter().for_each(|(_, entry)| all.add(entry));
    let mut page = INTRODUCTION.to_string();
    let Counts { run, killed, refused, open, .. } = &all;
    let parts: BTreeSet<&str> =
        entries.iter().flat_map(|(_, entry)| &entry.parts).map(String::as_str).collect();
    let decided = run - refused - open;
    let _ = writeln!(
        page,
        "\n{run} of {drawn} faults ran. The compiler refused {refused}. {open} are open: tests are left to run. \
         Tests killed {killed} of the other {decided}. Tests that ran: {}. \
         `tools/mutation/faults.jsonl` has each fault with the test that killed it.",
        parts.into_iter().collect::<Vec<_>>().join(", ")
    );
    let by_kind = |entry: &Entry| entry.fault.kind.to_string();
    let by_folder = |entry: &Entry| folder_of(&entry.fault.file);
    for (title, name) in [("kind", &by_kind as &dyn Fn(&Entry) -> String), ("folder", &by_folder)] {
        let mut groups: BTreeMap<String, Counts> = BTreeMap::new();
        entries.iter().for_each(|(_, entry)| groups.entry(name(entry)).or_default().add(entry));
        let _ = writeln!(
            page,
            "\n| {title} | faults | killed | survived | not reached | open | refused |\n|---|--:|--:|--:|--:|--:|--:|"
        );
        groups.iter().for_each(|(name, counts)| page += &counts.row(name));
        page += &all.row("all");
    }
    page + &survivors(entries)
}

fn survivors(entries: &[(String, &Entry)]) -> String {
    let mut text =
        "\n## Survivors\n\n| fault | kind | outcome | tests that reach it | reason |\n|---|---|---|--:|---|\n".to_string();
    for (name, entry) in entries.iter().filter(|(_, entry)| entry.may_be_found()) {
        let Entry { fault, outcome, tests, reason, .. } = entry;
        let _ = writeln!(
            text,
            "| {} | {} | {outcome} | {tests} | {reason} |",
            name.replace('|', "\\|"),
            fault.kind
        );
    }
    text
}
