//! The blocks of shaders. In a copy of the repository, kernels flag the blocks that run. The page
//! lists the others.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;

use crate::page::folder_of;
use crate::tree;

const INTRODUCTION: &str = "<!-- Written by `scripts/coverage --page`. -->
# Branches of shaders that the tests run

`scripts/coverage` compiles a copy of the library. In each block of each shader, the copy stores a flag in a buffer.
A block is the body of a function, of a branch or of a loop. It counts as run if one invocation of one variant ran it.
Tests that make pipelines without a `Gpu` do not count. Nor do kernels that use all storage buffers of a device.
The tests ran on lavapipe, where the default leaves out slow tests (`in_turn!`) and seven of eight usual runs.
";

/// A block of a function.
#[derive(Clone, Debug)]
pub struct Block {
    pub file: String,
    pub line: usize,
    /// The line of text that opens the block.
    pub opening: String,
    /// The place after its bracket.
    at: usize,
}

/// The blocks of a shader, in order.
pub fn blocks(file: &str, text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut depth = 0;
    let mut statement = String::new();
    let mut start = 0;
    for (n, line) in text.split_inclusive('\n').enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        for (at, c) in code.char_indices() {
            match c {
                '{' => {
                    let opens = statement.trim_start();
                    // A struct has no statements, and a switch has only cases.
                    if !opens.starts_with("struct") && !opens.starts_with("switch") {
                        let opening = line.trim().into();
                        blocks.push(Block { file: file.into(), line: n + 1, opening, at: start + at + 1 });
                    }
                    depth += 1;
                }
                '}' => depth -= 1,
                _ => {}
            }
            match c {
                '{' | '}' | ';' => statement.clear(),
                _ => statement.push(c),
            }
        }
        start += line.len();
    }
    assert_eq!(depth, 0, "{file}");
    blocks
}

/// Writes a copy of the repository whose kernels flag `blocks`, numbered from 0.
pub fn write_tree(repo: &Path, at: &Path, blocks: &[Block]) -> io::Result<()> {
    tree::copy(repo, at, &["src", "shaders"])?;
    for (n, block) in blocks.iter().enumerate().rev() {
        tree::edit(&at.join(&block.file), |mut text| {
            text.insert_str(block.at, &format!(" cover({n}u);"));
            text
        })?;
    }
    for (file, from, to) in EDITS {
        tree::edit(&at.join(file), |text| text.replace(from, to))?;
    }
    let hook = include_str!("../coverage_hook.rs").replace("BLOCKS", &format!("{}u64", blocks.len()));
    tree::edit(&at.join("src/lib.rs"), |text| text + &hook)
}

/// The flags of all runs, and the notes about kernels without flags.
pub fn read_flags(text: &str, count: usize) -> (Vec<bool>, Vec<&str>) {
    let mut flags = vec![false; count];
    let mut notes = Vec::new();
    for line in text.lines() {
        match line.split_once(' ') {
            Some((_, note)) => notes.push(note),
            None => {
                if let Some(flag) = line.parse().ok().and_then(|n: usize| flags.get_mut(n)) {
                    *flag = true;
                }
            }
        }
    }
    (flags, notes)
}

/// The page. `reasons` has the reason of a block that no test runs, by its file or by its file and
/// opening.
pub fn page(blocks: &[Block], flags: &[bool], runs: &str, reasons: &BTreeMap<String, String>) -> String {
    let mut folders: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for (block, flag) in blocks.iter().zip(flags) {
        let counts = folders.entry(folder_of(&block.file)).or_default();
        counts[0] += 1;
        counts[1] += usize::from(*flag);
    }
    let mut page = INTRODUCTION.to_string();
    let run = flags.iter().filter(|flag| **flag).count();
    let _ = writeln!(page, "\n{runs}\n\n{run} of {} blocks ran.\n", blocks.len());
    page += "| folder | blocks | run |\n|---|--:|--:|\n";
    for (folder, [all, run]) in &folders {
        let _ = writeln!(page, "| {folder} | {all} | {run} |");
    }
    page += "\n## Blocks that no test ran\n\n| block | reason |\n|---|---|\n";
    let mut files: BTreeMap<&str, usize> = BTreeMap::new();
    for (block, flag) in blocks.iter().zip(flags) {
        *files.entry(&block.file).or_default() += usize::from(*flag);
    }
    for (file, _) in files.iter().filter(|(_, run)| **run == 0) {
        let count = blocks.iter().filter(|block| block.file == **file).count();
        let reason = reasons.get(*file).map_or("", String::as_str);
        let _ = writeln!(page, "| {file}, all {count} | {reason} |");
    }
    for (block, _) in
        blocks.iter().zip(flags).filter(|(block, flag)| !**flag && files[block.file.as_str()] > 0)
    {
        let Block { file, line, opening, .. } = block;
        let key = format!("{file} {opening}");
        let reason = reasons.get(&key).or_else(|| reasons.get(file)).map_or("", String::as_str);
        let _ = writeln!(page, "| {file}:{line} `{}` | {reason} |", opening.replace('|', "\\|"));
    }
    page
}

/// The places where the library binds the flags.
const EDITS: [(&str, &str, &str); 12] = [
    ("src/kernel/mod.rs", "    unrolled(&text)\n}", "    crate::coverage::with_stub(unrolled(&text))\n}"),
    (
        "src/kernel/pipelines.rs",
        "struct Compiler {\n",
        "struct Compiler {\n    flags: Arc<crate::coverage::Flags>,\n",
    ),
    (
        "src/kernel/pipelines.rs",
        "Compiler { device: device.clone(),",
        "Compiler { flags: crate::coverage::Flags::new(device), device: device.clone(),",
    ),
    (
        "src/kernel/pipelines.rs",
        "    /// The device of these pipelines.\n",
        "    pub(crate) fn flags(&self) -> &crate::coverage::Flags { &self.0.compiler.flags }\n
    /// The device of these pipelines.\n",
    ),
    (
        "src/kernel/pipelines.rs",
        "        guarded(&self.device, label, || {\n",
        "        let has_room = kernel.storage_buffers() < facts.max_storage_buffers;
        let (text, flags) = self.flags.instrumented(label, text, has_room);
        guarded(&self.device, label, || {\n",
    ),
    (
        "src/kernel/pipelines.rs",
        "bind_group_layouts: &[Some(&layout)],",
        "bind_group_layouts: &[Some(&layout), flags.as_ref().map(|(layout, _)| layout)]
                    [..1 + usize::from(flags.is_some())],",
    ),
    (
        "src/kernel/pipelines.rs",
        "    pub layout: wgpu::BindGroupLayout,\n",
        "    pub layout: wgpu::BindGroupLayout,\n    pub flags: Option<wgpu::BindGroup>,\n",
    ),
    (
        "src/kernel/pipelines.rs",
        "Compiled { pipeline, layout,",
        "Compiled { flags: flags.map(|(_, group)| group), pipeline, layout,",
    ),
    (
        "src/kernel/bindings.rs",
        "    pub bind_group: wgpu::BindGroup,\n",
        "    pub bind_group: wgpu::BindGroup,\n    pub flags: Option<wgpu::BindGroup>,\n",
    ),
    (
        "src/kernel/recording.rs",
        "BoundDispatch { pipeline: compiled.pipeline, bind_group,",
        "BoundDispatch { flags: compiled.flags, pipeline: compiled.pipeline, bind_group,",
    ),
    (
        "src/kernel/recording.rs",
        "            pass.dispatch_workgroups(",
        "            if let Some(flags) = &step.flags { pass.set_bind_group(1, flags, &[]); }
            pass.dispatch_workgroups(",
    ),
    (
        "src/gpu/mod.rs",
        "        Gpu { device",
        "        pipelines.flags().read_with(&queue);\n        Gpu { device",
    ),
];
