//! The page docs/guide/masks.md and its pictures, generated from the presets.
//! `WGPU_ATTENTION_WRITE=1` writes them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use wgpu_attention::HostTensor;
use wgpu_attention::mask::At;
use wgpu_attention::presets::{self, MaskPreset, ScorePreset};

use crate::harness::root;

/// The content of a picture.
enum Drawn {
    /// The visible pairs of this many queries and keys. Queries are aligned to the last keys.
    Pairs(MaskPreset, [usize; 2]),
    /// The terms that are added to scores.
    Added(ScorePreset, [usize; 2]),
    /// The function of the score.
    Curve(ScorePreset),
}

/// A preset in a reader's code.
struct Entry {
    code: &'static str,
    drawn: Drawn,
}

impl Entry {
    fn name(&self) -> &'static str {
        match &self.drawn {
            Drawn::Pairs(preset, _) => preset.name(),
            Drawn::Added(preset, _) | Drawn::Curve(preset) => preset.name(),
        }
    }
}

macro_rules! entry {
    ($drawn:ident, $code:expr $(, $size:expr)?) => {
        Entry { code: stringify!($code), drawn: Drawn::$drawn($code.expect("a preset") $(, $size)?) }
    };
}

const TOKENS: usize = 48;
/// The tokens in pictures in shades of grey.
const SMALL: usize = 20;

/// Returns the entries in the order of the page.
fn entries() -> Vec<Entry> {
    let all = [TOKENS; 2];
    let small = [SMALL; 2];
    fn of_tokens<T: Copy>(data: &[T]) -> HostTensor<'_, T> {
        HostTensor::new(data, [1, 1, 1, data.len()])
    }
    let globals: Vec<bool> = (0..TOKENS).map(|n| [0, 1, 22].contains(&n)).collect();
    let globals = of_tokens(&globals);
    let prefix = HostTensor::new(&[14], [1; 4]);
    let ids: Vec<u32> = (0..TOKENS).map(|n| [0, 1, 2, 0][n / 12]).collect();
    let ids = of_tokens(&ids);
    let [documents, prompts] = [[0, 1, 2, 3, 4, 5u32], [0, 0, 0, 3, 3, 3]]
        .map(|of| (0..TOKENS).map(|n| of[n / 8]).collect::<Vec<_>>());
    let [documents, prompts] = [of_tokens(&documents), of_tokens(&prompts)];
    let parents: Vec<Option<u32>> = (0..32u32).map(|n| n.checked_sub(1).map(|n| n / 2)).collect();
    let intervals = presets::picture_intervals(&[4, 20, 21, 36], 48).expect("markers");
    let intervals = HostTensor::new(&intervals, [1, 1, 4, 2]);
    let selected: Vec<bool> = (0..36).map(|n| n % 7 == 0 || n * 5 % 11 < 3).collect();
    let selected = HostTensor::new(&selected, [1, 1, 6, 6]);
    let slopes = presets::alibi_slopes(8);
    let slopes = HostTensor::new(&slopes, [1, 8, 1, 1]);
    let table: Vec<f32> = (0..17).map(|n| ((n * n) as f32).sin()).collect();
    let table = HostTensor::new(&table, [1, 1, 1, 17]);
    let grid: Vec<f32> =
        (0..63).map(|n| -((n / 9 - 3i32).pow(2) as f32) - ((n % 9 - 4).pow(2) as f32)).collect();
    let grid = HostTensor::new(&grid, [1, 1, 7, 9]);
    let buckets: Vec<f32> = (0..32).map(|n| (n % 16) as f32 * if n < 16 { -1.0 } else { -0.5 }).collect();
    let buckets = HostTensor::new(&buckets, [1, 1, 1, 32]);
    // A ring of nodes, and some chords.
    let graph: Vec<bool> = (0..SMALL * SMALL)
        .map(|n| {
            let apart = (n / SMALL).abs_diff(n % SMALL);
            apart == 1 || apart == SMALL - 1 || apart == 9 && (n / SMALL + n % SMALL).is_multiple_of(3)
        })
        .collect();
    let distances = presets::shortest_paths(&graph, SMALL, 7).expect("a graph");
    let distances = HostTensor::new(&distances, [1, 1, SMALL, SMALL]);
    let lengths: Vec<f32> = (0..9).map(|n| -(n as f32)).collect();
    let lengths = HostTensor::new(&lengths, [1, 1, 1, 9]);
    let types = HostTensor::new(&[0.0, 1.0, 2.0, 3.0, 2.0, 1.0], [1, 1, 2, 3]);
    let paths: Vec<u32> = (0..2 * SMALL * SMALL)
        .map(|n| {
            let (i, j, edge) = (n / 2 / SMALL, n / 2 % SMALL, n % 2);
            if i.abs_diff(j) / 4 > edge { (i / 4 + j / 4 + edge) as u32 % 3 } else { u32::MAX }
        })
        .collect();
    let paths = HostTensor::new(&paths, [1, SMALL, SMALL, 2]);
    vec![
        entry!(Pairs, presets::causal(), all),
        entry!(Pairs, presets::sliding(8), all),
        entry!(Pairs, presets::dilated(12, 3), all),
        entry!(Pairs, presets::local(12), all),
        entry!(Pairs, presets::global_sliding(4, globals), all),
        entry!(Pairs, presets::prefix_lm(prefix), all),
        entry!(Pairs, presets::documents(ids), all),
        entry!(Pairs, presets::shared_prefix(documents, prompts), all),
        entry!(Pairs, presets::block_diffusion(24, 6), all),
        entry!(Pairs, presets::tree(&parents, 1), [32, TOKENS]),
        entry!(Pairs, presets::draft_blocks(16, 8), [32, TOKENS]),
        entry!(Pairs, presets::flamingo(intervals, 6), [TOKENS, 24]),
        entry!(Pairs, presets::selected_tiles(selected, 8), all),
        entry!(Pairs, presets::svg_spatial(4, 11, 12, true), all),
        entry!(Pairs, presets::svg_temporal(4, 11, 2), all),
        entry!(Pairs, presets::natten([6, 8], [3, 5], [1, 1]), all),
        entry!(Pairs, presets::tiled_natten([6, 8], [3, 5], [3, 4]), all),
        entry!(Pairs, presets::morton_natten(8, [3, 3]), [64; 2]),
        entry!(Pairs, presets::shifted_windows([6, 8], [3, 4], [1, 2]), all),
        entry!(Pairs, presets::sliding_tiles([8, 10], [4, 6], [2, 2], 4), [84; 2]),
        entry!(Added, presets::alibi(slopes), small),
        entry!(Added, presets::relative(table), small),
        entry!(Added, presets::relative_2d(grid, [4, 5]), small),
        entry!(Added, presets::t5(buckets, 24, true), small),
        entry!(Added, presets::sandwich(8, 128, SMALL), small),
        entry!(Added, presets::graphormer(lengths, distances), small),
        entry!(Added, presets::graphormer_edges(types, paths), small),
        entry!(Curve, presets::softcap(4.0)),
        entry!(Curve, presets::relu()),
        entry!(Curve, presets::squared_relu()),
        entry!(Curve, presets::sigmoid(-2.0)),
        entry!(Curve, presets::gelu(0.25)),
    ]
}

fn at(i: usize, j: usize, [q_len, kv_len]: [usize; 2]) -> At {
    let mut at = At::default();
    (at.query, at.key) = (i as u32, j as u32);
    (at.q_len, at.kv_len) = (q_len as u32, kv_len as u32);
    at.position = (kv_len + i) as i32 - q_len as i32;
    at
}

/// Returns rectangles that cover the cells for which `filled` is true, as one path.
fn path([rows, columns]: [usize; 2], filled: impl Fn(usize, usize) -> bool) -> String {
    let mut path = String::new();
    // Maps a run of cells to the row in which it begins, while the rows below continue it.
    let mut open: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for row in 0..=rows {
        let mut runs = Vec::new();
        let mut column = 0;
        while row < rows && column < columns {
            let first = column;
            while column < columns && filled(row, column) {
                column += 1;
            }
            if column > first {
                runs.push((first, column));
            }
            column += 1;
        }
        let ended: Vec<_> = open.keys().copied().filter(|run| !runs.contains(run)).collect();
        for (first, end) in ended {
            let top = open.remove(&(first, end)).expect("it is open");
            let _ = write!(path, "M{first} {top}H{end}V{row}H{first}z");
        }
        for run in runs {
            open.entry(run).or_insert(row);
        }
    }
    path
}

/// Returns a picture with a title, of `width` by `height` units of `scale` pixels.
fn svg(title: &str, [width, height]: [usize; 2], scale: usize, inside: &str) -> String {
    let [w, h] = [width, height].map(|n| n * scale);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {width} {height}\">\n\
         <title>{title}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#eef2f7\"/>\n{inside}</svg>\n"
    )
}

/// Shades from light to dark.
const SHADES: [&str; 8] =
    ["#dfe6ee", "#c3cfdd", "#a6b7ca", "#899fb6", "#6c86a1", "#506d8b", "#355373", "#1b3a5a"];

fn picture(entry: &Entry) -> String {
    let name = entry.name();
    match &entry.drawn {
        Drawn::Pairs(preset, size) => {
            let path = path(*size, |i, j| preset.sees(&at(i, j, *size)));
            let title = format!("{name}: rows are queries, columns keys, dark is seen");
            svg(&title, [size[1], size[0]], 4, &format!("<path fill=\"#1b3a5a\" d=\"{path}\"/>\n"))
        }
        Drawn::Added(preset, size) => {
            let added = |i, j| preset.score(0.0, &at(i, j, *size));
            let pairs = || (0..size[0]).flat_map(|i| (0..size[1]).map(move |j| (i, j)));
            let least = pairs().map(|(i, j)| added(i, j)).fold(f64::INFINITY, f64::min);
            let most = pairs().map(|(i, j)| added(i, j)).fold(f64::NEG_INFINITY, f64::max);
            // Slightly more than rounded, so that no value is at the edge between two shades.
            let shade = |i, j| (((added(i, j) - least) / (most - least) * 7.0 + 0.501) as usize).min(7);
            let mut inside = String::new();
            for (n, colour) in SHADES.iter().enumerate() {
                let path = path(*size, |i, j| shade(i, j) == n);
                let _ = writeln!(inside, "<path fill=\"{colour}\" d=\"{path}\"/>");
            }
            let title = format!("{name}: rows are queries, columns keys, dark is added most");
            svg(&title, [size[1], size[0]], 8, &inside)
        }
        Drawn::Curve(preset) => {
            let mut lines = String::new();
            let mut drawing = false;
            for n in 0..=96 {
                let score = f64::from(n - 48) / 6.0;
                let value = preset.score(score, &At::default());
                let inside = value.abs() <= 8.0;
                if inside {
                    let word = if drawing { 'L' } else { 'M' };
                    let _ = write!(lines, "{word}{n} {:.1}", 48.0 - 6.0 * value);
                }
                drawing = inside;
            }
            let title = format!("{name}: from scores of −8 to 8, to the right, to −8 to 8, upwards");
            let axes = "<path d=\"M0 48H96M48 0V96\" stroke=\"#a6b7ca\" stroke-width=\".5\"/>";
            let line = format!("<path d=\"{lines}\" fill=\"none\" stroke=\"#1b3a5a\" stroke-width=\"1.5\"/>");
            svg(&title, [96, 96], 2, &format!("{axes}\n{line}\n"))
        }
    }
}

/// Returns the documentation of every preset function as paragraphs, by its name.
fn documented() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for file in ["masks", "grids", "scores"] {
        let code = std::fs::read_to_string(root().join(format!("src/presets/{file}.rs"))).expect(file);
        let mut lines: Vec<&str> = Vec::new();
        let mut rest = code.lines().peekable();
        while let Some(line) = rest.next() {
            if let Some(line) = line.strip_prefix("///") {
                lines.push(line.trim());
                continue;
            }
            if let Some(name) = line.strip_prefix("pub fn ") {
                let name: String = name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let mut signature = line.to_string();
                while !signature.contains('{') {
                    signature += rest.next().expect("a body");
                }
                if signature.contains("Preset, Error>") {
                    let text = lines.split(|line| line.is_empty()).map(|lines| unlinked(&lines.join(" ")));
                    found.insert(name, text.collect());
                }
            }
            lines.clear();
        }
    }
    found
}

/// Returns the text without links to items, which a page does not have.
fn unlinked(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("[`") {
        out += &rest[..at];
        let name = &rest[at + 1..];
        let end = name.find(']').expect("a link ends");
        out += &name[..end];
        rest = &name[end + 1..];
        if rest.starts_with("(crate::") {
            rest = &rest[rest.find(')').expect("a link's target ends") + 1..];
        }
    }
    out + rest
}

/// Returns the text between the marks of the page.
fn sections(entries: &[Entry]) -> String {
    let documented = documented();
    let names: Vec<&String> = documented.keys().collect();
    let mut shown: Vec<&str> = entries.iter().map(Entry::name).collect();
    shown.sort_unstable();
    assert_eq!(names, shown, "left: the functions, right: what the page shows");
    let mut page = String::new();
    for entry in entries {
        let (name, code) = (entry.name(), entry.code);
        let paragraphs = &documented[name];
        let meaning = &paragraphs[0];
        let _ = write!(page, "### {name}\n\n![{name}](../masks/{name}.svg)\n\n{meaning}\n\n`{code}?`");
        match paragraphs.iter().find(|p| p.starts_with("Built in: ")) {
            Some(built_in) => writeln!(page, " · {built_in}\n"),
            None => writeln!(page, "\n"),
        }
        .expect("a String");
    }
    page
}

const MARKS: [&str; 2] =
    ["<!-- presets, written by tests/ops/mask/mask_pages.rs -->\n", "<!-- end of presets -->\n"];

/// Returns each file and its expected contents.
fn files() -> Vec<(PathBuf, String)> {
    let page = root().join("docs/guide/masks.md");
    let text = std::fs::read_to_string(&page).expect("docs/guide/masks.md");
    let [(start, _), (end, _)] = MARKS.map(|mark| text.match_indices(mark).next().expect(mark));
    let entries = entries();
    let text = format!("{}\n{}{}", &text[..start + MARKS[0].len()], sections(&entries), &text[end..]);
    let picture = |entry: &Entry| (root().join(format!("docs/masks/{}.svg", entry.name())), picture(entry));
    std::iter::once((page, text)).chain(entries.iter().map(picture)).collect()
}

#[test]
fn mask_page_matches_presets() {
    let files = files();
    if std::env::var_os("WGPU_ATTENTION_WRITE").is_some() {
        for (path, text) in &files {
            std::fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
    for (path, text) in &files {
        let there = std::fs::read_to_string(path).unwrap_or_default();
        let again = "WGPU_ATTENTION_WRITE=1 cargo nextest run -p tests mask_pages";
        assert!(there == *text, "{} is not of this code: {again}", path.display());
        assert!(text.len() < 8 << 10 || path.extension().is_some_and(|e| e == "md"), "{}", path.display());
    }
    let there = std::fs::read_dir(root().join("docs/masks")).expect("docs/masks").count();
    assert_eq!(there + 1, files.len(), "pictures of nothing");
}

#[test]
fn cells_are_covered_once() {
    let filled = |i: usize, j: usize| j < 2 && i < 3 || i == 1 || (i + j) % 4 == 3;
    let path = path([5, 7], filled);
    let mut covered = [[0; 7]; 5];
    for rectangle in path.split('M').skip(1) {
        let numbers = rectangle.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty());
        let numbers: Vec<usize> = numbers.map(|n| n.parse().expect("a number")).collect();
        let [left, top, right, bottom, _] = numbers[..] else { panic!("{rectangle}") };
        covered[top..bottom].iter_mut().for_each(|row| row[left..right].iter_mut().for_each(|n| *n += 1));
    }
    for (i, j) in (0..5).flat_map(|i| (0..7).map(move |j| (i, j))) {
        assert_eq!(covered[i][j], i32::from(filled(i, j)), "{i} {j}: {path}");
    }
}
