//! How much of a kernel's inner loops multiplies and adds, by the drivers' text of what the GPU runs.

use crate::gpus::Driver;

/// A basic block is an inner loop if it has so many multiply-adds, or matrix instructions.
const MULTIPLY_ADDS: u64 = 32;
const MATRIX: u64 = 8;

/// Counts of instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    pub multiply_adds: u64,
    pub matrix: u64,
    pub all: u64,
    /// Multiply-adds that they do: two each if they take pairs of f16.
    pub products: u64,
    /// Bytes that an invocation loads: from workgroup memory, and from buffers.
    pub shared: u64,
    pub buffers: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.multiply_adds += other.multiply_adds;
        self.matrix += other.matrix;
        self.all += other.all;
        self.products += other.products;
        self.shared += other.shared;
        self.buffers += other.buffers;
    }
}

/// What a line of the text is.
#[derive(Debug, PartialEq)]
enum Line<'a> {
    /// Begins a basic block.
    Label(&'a str),
    Instructions {
        counts: Counts,
        /// A branch, after which another block begins.
        ends: bool,
        /// Where it leads to.
        target: Option<&'a str>,
    },
    /// The blocks that may follow the one before.
    Leads(&'a str),
    Other,
}

#[derive(Default)]
struct Block<'a> {
    label: &'a str,
    counts: Counts,
    targets: Vec<&'a str>,
}

/// None: the driver has no text.
fn blocks(driver: Driver, text: &str) -> Option<Vec<Block<'_>>> {
    let parse = match driver {
        Driver::Nvk => nak,
        Driver::Radv => aco,
        Driver::Turnip => ir3,
        Driver::Honeykrisp => return None,
    };
    let mut blocks = vec![Block::default()];
    for line in text.lines() {
        let last = blocks.len() - 1;
        match parse(line) {
            Line::Label(label) => blocks.push(Block { label, ..Block::default() }),
            Line::Instructions { counts, ends, target } => {
                blocks[last].counts += counts;
                blocks[last].targets.extend(target);
                if ends {
                    blocks.push(Block::default());
                }
            }
            Line::Leads(to) => blocks[last].targets.extend(to.split(", ")),
            Line::Other => {}
        }
    }
    Some(blocks)
}

/// Multiply-adds, or matrix instructions, of a hundred instructions of the basic blocks that have many; none: there is no
/// such block.
pub fn of(driver: Driver, text: &str) -> Option<f64> {
    let mut sum = Counts::default();
    for Block { counts, .. } in blocks(driver, text)? {
        if counts.multiply_adds >= MULTIPLY_ADDS || counts.matrix >= MATRIX {
            sum += counts;
        }
    }
    (sum.all > 0).then(|| 100.0 * (sum.multiply_adds + sum.matrix) as f64 / sum.all as f64)
}

/// The basic blocks with a fourth or more of the multiply-adds, or matrix instructions, of the block that has most of
/// them; and all of the innermost loops around them, or the blocks themselves where they are in none.
pub fn inner_loops(driver: Driver, text: &str) -> Option<(Counts, Counts)> {
    let blocks = blocks(driver, text)?;
    // Loops as blocks are laid out: from where a branch leads back to, to the branch.
    let back = |(from, block): (usize, &Block)| {
        let to = |label: &&str| blocks[..=from].iter().position(|block| block.label == *label);
        block.targets.iter().filter_map(to).map(|to| to..=from).collect::<Vec<_>>()
    };
    let loops: Vec<_> = blocks.iter().enumerate().flat_map(back).collect();
    let weight = |block: &Block| (block.counts.matrix, block.counts.products);
    let most = blocks.iter().map(weight).max()?;
    let heavy = |block: &Block| match most {
        (0, products) => products > 0 && 4 * block.counts.products >= products,
        (matrix, _) => 4 * block.counts.matrix >= matrix,
    };
    let (mut these, mut inside) = (Counts::default(), vec![false; blocks.len()]);
    for n in (0..blocks.len()).filter(|n| heavy(&blocks[*n])) {
        let around = loops.iter().filter(|range| range.contains(&n));
        let range = around.min_by_key(|range| range.end() - range.start()).cloned().unwrap_or(n..=n);
        inside[range].fill(true);
        these += blocks[n].counts;
    }
    let mut sum = Counts::default();
    blocks.iter().zip(inside).filter(|(_, inside)| *inside).for_each(|(block, _)| sum += block.counts);
    (sum.products + sum.matrix > 0).then_some((these, sum))
}

/// `      r38      = ffma.ftz r94 r99 r38     // delay=1`, in `block 249 L460 [248] -> {` … `} -> [249, 251]`.
fn nak(line: &str) -> Line<'_> {
    if line.starts_with("block") {
        return Line::Label(line.split_whitespace().nth(1).unwrap_or_default());
    }
    if let Some(to) = line.strip_prefix("} -> [") {
        return Line::Leads(to.trim_end_matches(']'));
    }
    let Some((line, _)) = line.split_once("// delay") else { return Line::Other };
    let made = line.split_once(" = ").map_or(line, |(_, made)| made);
    let name = made.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
    let pairs = name.starts_with("hfma2");
    let is = pairs || name.starts_with("ffma");
    let loaded = match name.rsplit('.').next().map(|width| (width, width.trim_start_matches(['b', 'x']))) {
        // Tiles of 8 × 8, of which an invocation gets four bytes each.
        Some((_, tiles)) if name.starts_with("ldsm") => 4 * tiles.parse().unwrap_or(1),
        Some((_, bits)) if name.starts_with("ld.") => bits.parse().unwrap_or(0) / 8,
        _ => 0,
    };
    let counts = Counts {
        multiply_adds: is.into(),
        matrix: name.starts_with("hmma").into(),
        all: 1,
        products: u64::from(is) + u64::from(pairs),
        shared: if name.starts_with("ldsm") || name.starts_with("ld.shared") { loaded } else { 0 },
        buffers: if name.starts_with("ld.global") { loaded } else { 0 },
    };
    Line::Instructions { counts, ends: false, target: None }
}

/// `v_dual_fmac_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5   ; c8…`, after `BB12:`, indented. Dual instructions are two.
fn aco(line: &str) -> Line<'_> {
    if line.starts_with("BB") {
        return Line::Label(line.split(':').next().unwrap_or_default());
    }
    let name = |part: &str| part.split_whitespace().next().unwrap_or_default().to_owned();
    let first = name(line);
    if !line.starts_with(char::is_whitespace) || !first.contains('_') {
        return Line::Other;
    }
    let starts =
        ["v_fma", "v_pk_fma", "v_dual_fma", "v_mac_f", "v_mad_f", "v_mad_mix", "v_dot2", "v_dual_dot2"];
    let is = |part: &&str| starts.iter().any(|start| name(part).starts_with(start));
    let pairs = |part: &&str| ["v_pk_fma", "v_dot2", "v_dual_dot2"].iter().any(|s| name(part).starts_with(s));
    let multiply_adds = line.split(" :: ").filter(is).count() as u64;
    let ends = ["s_cbranch", "s_branch"].iter().any(|start| first.starts_with(start));
    let counts = Counts {
        multiply_adds,
        matrix: first.starts_with("v_wmma").into(),
        all: line.split(" :: ").count() as u64,
        products: multiply_adds + line.split(" :: ").filter(pairs).count() as u64,
        shared: if ["ds_read", "ds_load"].iter().any(|s| first.starts_with(s)) { width(&first) } else { 0 },
        buffers: if ["buffer_load", "global_load"].iter().any(|s| first.starts_with(s)) {
            width(&first)
        } else {
            0
        },
    };
    Line::Instructions { counts, ends, target: line.split_whitespace().nth(1).filter(|_| ends) }
}

/// Bytes that AMD's load of this name gives an invocation.
fn width(name: &str) -> u64 {
    // Two of them from two places: `ds_read2st64_b32`, `ds_load_2addr_b64`.
    let twice = if name.contains("read2") || name.contains("_2addr") { 2 } else { 1 };
    let words = ["dwordx4", "dwordx3", "dwordx2", "dword"].iter().position(|words| name.ends_with(words));
    let bytes = match words {
        Some(n) => 4 * (4 - n as u64),
        None => ["b128", "b96", "b64", "b32"]
            .iter()
            .position(|w| name.ends_with(w))
            .map_or(2, |n| 4 * (4 - n as u64)),
    };
    twice * bytes
}

/// `(ss)(rpt1)mad.f32 r1.x, …`, after `l12:`: done once more, for the next registers. `(nop3)`: three that do nothing.
fn ir3(line: &str) -> Line<'_> {
    let mut rest = line.trim();
    if let Some(label) = rest.strip_suffix(':').filter(|label| label.starts_with('l')) {
        return Line::Label(label);
    }
    let (mut times, mut nothing) = (1, 0);
    while let Some((flag, after)) = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
        let count = |name| flag.strip_prefix(name).and_then(|n: &str| n.parse::<u64>().ok()).unwrap_or(0);
        times += count("rpt");
        nothing += count("nop");
        rest = after;
    }
    let mut words = rest.split_whitespace();
    let name = words.next().unwrap_or_default();
    // The lines before and after it are comments and sentences.
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        return Line::Other;
    }
    let multiply_adds = if name.starts_with("mad.f") { times } else { 0 };
    let ends = ["br", "bany", "ball", "jump"].iter().any(|start| name.starts_with(start));
    let bytes = if name.ends_with("16") { 2 } else { 4 };
    // The last operand is how many; a texture's are letters.
    let many = || rest.rsplit(", ").next().and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(1);
    let letters = || {
        words.clone().next().map_or(1, |word| word.chars().filter(|c| "xyzw".contains(*c)).count() as u64 - 1)
    };
    let counts = Counts {
        multiply_adds,
        matrix: 0,
        all: times + nothing,
        products: multiply_adds,
        shared: if name.starts_with("ldl") { bytes * many() } else { 0 },
        buffers: if name.starts_with("isam") { 4 * letters() } else { 0 },
    };
    Line::Instructions { counts, ends, target: rest.split_once('#').map(|(_, label)| label).filter(|_| ends) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `text`, which is one instruction, counts, and whether it ends a block.
    fn counts(line: Line) -> (Counts, bool) {
        match line {
            Line::Instructions { counts, ends, .. } => (counts, ends),
            other => panic!("{other:?}"),
        }
    }

    fn line(multiply_adds: u64, all: u64, ends: bool) -> (Counts, bool) {
        (Counts { multiply_adds, products: multiply_adds, all, ..Counts::default() }, ends)
    }

    fn loads(shared: u64, buffers: u64) -> (Counts, bool) {
        (Counts { all: 1, shared, buffers, ..Counts::default() }, false)
    }

    #[test]
    fn lines_of_nvk() {
        assert_eq!(nak("block.u 249 L460 [248] -> {"), Line::Label("249"));
        assert_eq!(nak("} -> [249, 251]"), Line::Leads("249, 251"));
        let ffma = "      r38      = ffma.ftz r94 r99 r38                           // delay=1";
        assert_eq!(counts(nak(ffma)), line(1, 1, false));
        let pairs = "      r38      = hfma2 r94 r99 r38                           // delay=1";
        assert_eq!(counts(nak(pairs)).0.products, 2);
        let hmma = "      r8..12    = hmma.m16n8k16.f32 r0..4 r4..6 r8..12   // delay=1 rd:1 wr:2";
        assert_eq!(counts(nak(hmma)).0, Counts { matrix: 1, all: 1, ..Counts::default() });
        assert_eq!(counts(nak("                 bra !up0 L463             // delay=1")), line(0, 1, false));
        let shared = "      r0..4 = ld.shared.strong.cta.b128 [r9+0x10]   // delay=1";
        assert_eq!(counts(nak(shared)), loads(16, 0));
        let buffer = "      r0..4 = @p0 ld.global.a64.constant.b64 [r8..10]   // delay=1";
        assert_eq!(counts(nak(buffer)), loads(0, 8));
    }

    #[test]
    fn lines_of_radv() {
        assert_eq!(aco("BB104:"), Line::Label("BB104"));
        assert_eq!(counts(aco("\tv_fmac_f32_e32 v56, v10, v82         ; 5670a50a")), line(1, 1, false));
        let dual = "\tv_dual_fmac_f32 v1, v2, v3 :: v_dual_fmac_f32 v4, v5, v6   ; c8000000";
        assert_eq!(counts(aco(dual)), line(2, 2, false));
        let half = "\tv_dual_mul_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5   ; c8";
        assert_eq!(counts(aco(half)), line(0, 2, false));
        assert_eq!(counts(aco("\tv_dot2_f32_f16 v0, v1, v2, v0 ; cc")).0.products, 2);
        let branch = aco("\ts_cbranch_scc0 BB105                 ; bfa10024");
        let Line::Instructions { target, ends: true, .. } = branch else { panic!("{branch:?}") };
        assert_eq!(target, Some("BB105"));
        assert_eq!(counts(aco("\tds_load_b64 v[80:81], v14 offset:5952")), loads(8, 0));
        assert_eq!(counts(aco("\tds_read2st64_b32 v[80:81], v14 offset1:2")), loads(8, 0));
        assert_eq!(counts(aco("\tbuffer_load_dwordx4 v[4:7], v3, s[4:7], 0 offen")), loads(0, 16));
        assert_eq!(counts(aco("\tbuffer_load_d16_u16 v4, v3, s[4:7], 0 offen")), loads(0, 2));
    }

    #[test]
    fn lines_of_turnip() {
        assert_eq!(ir3("l845:"), Line::Label("l845"));
        let twice = "(ss)(rpt1)mad.f32 r11.w, r5.x, (r)r0.z, (r)(last)r11.w";
        assert_eq!(counts(ir3(twice)), line(2, 2, false));
        assert_eq!(counts(ir3("(nop3) mad.f32 r14.x, r4.z, r0.w, r14.x")), line(1, 4, false));
        assert_eq!(counts(ir3("(rpt5)nop")), line(0, 6, false));
        let branch = ir3("brao !p0.y, !p0.z, #l762");
        let Line::Instructions { target, ends: true, .. } = branch else { panic!("{branch:?}") };
        assert_eq!(target, Some("l762"));
        assert_eq!(ir3("; num_ubos:           0"), Line::Other);
        assert_eq!(counts(ir3("(sy)ldl.u32 r0.x, l[r1.x+4], 4")), loads(16, 0));
        assert_eq!(counts(ir3("isam.v.base0 (u32)(xyzw)r6.y, r6.x, s#0, t#0")), loads(0, 16));
    }

    #[test]
    fn only_blocks_with_many_count() {
        let few = "\tv_fma_f32 v0, v1, v2, v3\n".repeat(31);
        assert_eq!(of(Driver::Radv, &format!("BB0:\n{few}BB1:\n{few}")), None);
        let many = format!("{few}\tv_fma_f32 v0, v1, v2, v3\n{}", "\ts_nop 0\n".repeat(32));
        assert_eq!(of(Driver::Radv, &format!("BB0:\n{few}BB1:\n{many}")), Some(50.0));
        assert_eq!(of(Driver::Honeykrisp, &many), None);
    }

    #[test]
    fn loops_are_counted_whole() {
        let (add, other) = ("\tv_fma_f32 v0, v1, v2, v3\n", "\ts_nop 0\n");
        let products = add.repeat(8);
        // Around the loop BB2 … BB3 is another; in BB1 are few.
        let text = format!(
            "BB0:\n{other}BB1:\n{add}BB2:\n{products}BB3:\n{other}\ts_cbranch_scc0 BB2 ; 0\n{other}\ts_branch BB1 ; 0\n"
        );
        let (blocks, loops) = inner_loops(Driver::Radv, &text).expect("a loop");
        assert_eq!((blocks.products, blocks.all), (8, 8));
        assert_eq!((loops.products, loops.all), (8, 10));
        // Without a loop the block.
        let text = format!("BB0:\n{other}BB1:\n{products}{other}");
        let (_, loops) = inner_loops(Driver::Radv, &text).expect("a block");
        assert_eq!((loops.products, loops.all), (8, 9));
        assert_eq!(inner_loops(Driver::Radv, other), None);
    }
}
