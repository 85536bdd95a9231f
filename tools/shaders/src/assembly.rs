//! Reads a driver's text of the GPU code into basic blocks, with counts of their instructions by
//! kind.

use std::collections::{BTreeSet, HashMap};

use crate::gpus::Driver;

/// The kind of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    MultiplyAdd,
    Matrix,
    Exp2,
    WorkgroupLoad,
    WorkgroupStore,
    /// Other arithmetic on floats.
    Float,
    /// Maxima and minima of floats.
    Max,
    Compare,
    Select,
    Convert,
    /// Addresses and other integer arithmetic, by invocation.
    Integer,
    Move,
    /// Loads and stores of buffers.
    Buffer,
    /// Instructions that a subgroup executes once in a separate unit, such as addresses of the
    /// uniform.
    Scalar,
    /// Branches, barriers, waits.
    Control,
}

impl Kind {
    pub const ALL: [Kind; 15] = [
        Kind::MultiplyAdd,
        Kind::Matrix,
        Kind::Exp2,
        Kind::WorkgroupLoad,
        Kind::WorkgroupStore,
        Kind::Float,
        Kind::Max,
        Kind::Compare,
        Kind::Select,
        Kind::Convert,
        Kind::Integer,
        Kind::Move,
        Kind::Buffer,
        Kind::Scalar,
        Kind::Control,
    ];
}

/// The number of instructions of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Counts {
    kinds: [u64; Kind::ALL.len()],
    /// Multiply-adds of matrix instructions, for a subgroup.
    pub matrix_multiply_adds: u64,
    /// Bytes of workgroup memory that an invocation loads and stores.
    pub workgroup_bytes: u64,
    /// Multiply-adds that the instructions compute: two each for pairs of f16.
    pub products: u64,
    /// Bytes that an invocation loads from workgroup memory and buffers.
    pub loaded: u64,
}

impl Counts {
    fn one(kind: Kind, times: u64) -> Self {
        let mut counts = Counts::default();
        counts.kinds[kind as usize] = times;
        counts.products = if kind == Kind::MultiplyAdd { times } else { 0 };
        counts
    }

    pub fn of(&self, kind: Kind) -> u64 {
        self.kinds[kind as usize]
    }

    pub fn sum(&self, kinds: &[Kind]) -> u64 {
        kinds.iter().map(|kind| self.of(*kind)).sum()
    }

    pub fn all(&self) -> u64 {
        self.kinds.iter().sum()
    }

    /// Returns the counts multiplied by `times`.
    pub fn times(&self, times: u64) -> Self {
        Counts {
            kinds: self.kinds.map(|n| n * times),
            matrix_multiply_adds: self.matrix_multiply_adds * times,
            workgroup_bytes: self.workgroup_bytes * times,
            products: self.products * times,
            loaded: self.loaded * times,
        }
    }

    pub fn plus(&self, other: &Counts) -> Self {
        let mut kinds = self.kinds;
        kinds.iter_mut().zip(other.kinds).for_each(|(n, more)| *n += more);
        Counts {
            kinds,
            matrix_multiply_adds: self.matrix_multiply_adds + other.matrix_multiply_adds,
            workgroup_bytes: self.workgroup_bytes + other.workgroup_bytes,
            products: self.products + other.products,
            loaded: self.loaded + other.loaded,
        }
    }
}

/// A basic block, and the numbers of the blocks that may follow it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    pub counts: Counts,
    pub next: Vec<usize>,
}

/// The target of a branch.
#[derive(Clone, Debug, PartialEq)]
struct Jump {
    /// `None` if it ends the kernel.
    to: Option<String>,
    always: bool,
}

/// The content of a line of the text.
#[derive(Clone, Debug, PartialEq)]
enum Line {
    /// Begins the basic block of this name.
    Label(String),
    Instruction {
        counts: Counts,
        jump: Option<Jump>,
    },
    Other,
}

/// Returns the basic blocks in the order of the text; none for a driver without a text.
pub fn blocks(driver: Driver, text: &str) -> Vec<Block> {
    let parse = match driver {
        Driver::Nvk => nak,
        Driver::Radv => aco,
        Driver::Turnip => ir3,
        Driver::Honeykrisp => return Vec::new(),
    };
    let mut blocks = vec![Block::default()];
    let mut labels = HashMap::new();
    let mut jumps: Vec<(usize, Jump)> = Vec::new();
    // `falls`: true if the current block continues in the next one. `ended`: true if a new block
    // begins.
    let (mut falls, mut ended) = (true, false);
    for line in text.lines() {
        let parsed = parse(line);
        if parsed == Line::Other {
            continue;
        }
        if ended || matches!(parsed, Line::Label(_)) {
            let number = blocks.len();
            if falls {
                blocks[number - 1].next.push(number);
            }
            blocks.push(Block::default());
            (falls, ended) = (true, false);
        }
        let here = blocks.len() - 1;
        match parsed {
            Line::Label(name) => _ = labels.insert(name, here),
            Line::Instruction { counts, jump } => {
                blocks[here].counts = blocks[here].counts.plus(&counts);
                if let Some(jump) = jump {
                    falls = !jump.always;
                    ended = true;
                    jumps.push((here, jump));
                }
            }
            Line::Other => {}
        }
    }
    for (from, jump) in jumps {
        if let Some(to) = jump.to.and_then(|name| labels.get(&name)) {
            blocks[from].next.push(*to);
        }
    }
    blocks
}

/// A loop: its header block, and all of its blocks.
pub struct Loop {
    pub header: usize,
    pub body: BTreeSet<usize>,
}

/// Returns the natural loops. A back edge goes to a block that dominates the edge's source.
pub fn loops(blocks: &[Block]) -> Vec<Loop> {
    let mut before = vec![Vec::new(); blocks.len()];
    for (n, block) in blocks.iter().enumerate() {
        block.next.iter().for_each(|next| before[*next].push(n));
    }
    let reached = |without: Option<usize>| {
        let mut seen = vec![false; blocks.len()];
        let mut open: Vec<usize> = (0..1).filter(|n| Some(*n) != without).collect();
        while let Some(n) = open.pop() {
            if !std::mem::replace(&mut seen[n], true) {
                open.extend(blocks[n].next.iter().filter(|next| Some(**next) != without));
            }
        }
        seen
    };
    let always = reached(None);
    let mut loops = Vec::new();
    for header in 0..blocks.len() {
        let candidates: Vec<usize> = before[header].iter().copied().filter(|n| always[*n]).collect();
        if candidates.is_empty() || !always[header] {
            continue;
        }
        let around = reached(Some(header));
        let mut body = BTreeSet::from([header]);
        let mut open: Vec<usize> = candidates.into_iter().filter(|n| *n == header || !around[*n]).collect();
        let is_loop = !open.is_empty();
        while let Some(n) = open.pop() {
            if body.insert(n) {
                open.extend(before[n].iter().filter(|n| always[**n]));
            }
        }
        if is_loop {
            loops.push(Loop { header, body });
        }
    }
    loops
}

fn starts(name: &str, with: &[&str]) -> bool {
    with.iter().any(|start| name.starts_with(start))
}

/// Parses a line of NVK. `r38 = ffma.ftz r94 r99 r38 // delay=1` follows `block.u 38 L56 [36, 37]
/// -> {`. A conditional instruction has `@!p1` before its name.
fn nak(line: &str) -> Line {
    if let Some(block) = line.strip_prefix("block") {
        let label = block.split_whitespace().find(|word| word.starts_with('L'));
        return Line::Label(label.unwrap_or_default().into());
    }
    let Some((line, _)) = line.split_once("// delay") else { return Line::Other };
    let line = line.split_once(" = ").map_or(line, |(_, made)| made);
    let mut words = line.split_whitespace().peekable();
    let conditional = words.next_if(|word| word.starts_with('@')).is_some();
    let name = words.next().unwrap_or_default();
    if name == "exit" {
        let jump = Some(Jump { to: None, always: !conditional });
        return Line::Instruction { counts: Counts::one(Kind::Control, 1), jump };
    }
    if name == "bra" {
        let arguments: Vec<&str> = words.collect();
        let always = !conditional && arguments.iter().all(|word| word.starts_with('L') || *word == "pT");
        let jump = Some(Jump { to: arguments.last().map(|to| to.to_string()), always });
        return Line::Instruction { counts: Counts::one(Kind::Control, 1), jump };
    }
    let kind = match name {
        _ if starts(name, &["ffma", "hfma2"]) => Kind::MultiplyAdd,
        _ if starts(name, &["hmma", "imma"]) => Kind::Matrix,
        _ if starts(name, &["mufu.exp2", "mufu.ex2"]) => Kind::Exp2,
        _ if starts(name, &["ld.shared", "ldsm"]) => Kind::WorkgroupLoad,
        _ if name.starts_with("st.shared") => Kind::WorkgroupStore,
        _ if starts(name, &["ld.", "st.", "ldc", "atom"]) => Kind::Buffer,
        _ if starts(name, &["fmnmx", "hmnmx"]) => Kind::Max,
        _ if starts(name, &["fadd", "fmul", "mufu", "hadd2", "hmul2"]) => Kind::Float,
        _ if starts(name, &["isetp", "fsetp", "hsetp2", "plop3"]) => Kind::Compare,
        _ if name.starts_with("sel") => Kind::Select,
        _ if starts(name, &["f2f", "i2f", "f2i", "i2i", "frnd"]) => Kind::Convert,
        _ if starts(name, &["mov", "prmt", "r2ur", "s2r", "cs2r", "shfl"]) => Kind::Move,
        _ if starts(name, &["bssy", "bsync", "bclear", "nop", "bar", "membar", "break", "warpsync"]) => {
            Kind::Control
        }
        _ => Kind::Integer,
    };
    let mut counts = Counts::one(kind, 1);
    if let Some(size) = name.strip_prefix("hmma.m") {
        let sides: Vec<u64> =
            size.split(['n', 'k', '.']).map_while(|side| side.parse().ok()).take(3).collect();
        counts.matrix_multiply_adds = sides.iter().product();
    }
    if matches!(kind, Kind::WorkgroupLoad | Kind::WorkgroupStore) {
        // `ldsm.16.m8n8.x4` loads four fragments of 8 × 8 f16, with four bytes of each for an
        // invocation.
        let last = name.rsplit('.').next().unwrap_or_default();
        let number = |start: char| last.strip_prefix(start).and_then(|n| n.parse::<u64>().ok());
        counts.workgroup_bytes =
            number('x').map(|fragments| 4 * fragments).or(number('b').map(|bits| bits / 8)).unwrap_or(4);
    }
    counts.products *= if name.starts_with("hfma2") { 2 } else { 1 };
    counts.loaded = match name.rsplit(".b").next().and_then(|bits| bits.parse::<u64>().ok()) {
        _ if kind == Kind::WorkgroupLoad => counts.workgroup_bytes,
        Some(bits) if name.starts_with("ld.global") => bits / 8,
        _ => 0,
    };
    Line::Instruction { counts, jump: None }
}

/// Parses a line of RADV: `v_dual_fmac_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5 ; c8…`, indented,
/// after `BB12:`. Dual instructions count as two.
fn aco(line: &str) -> Line {
    if line.starts_with("BB") {
        return Line::Label(line.trim_end().trim_end_matches(':').into());
    }
    let name = |part: &str| part.split_whitespace().next().unwrap_or_default().to_owned();
    if !line.starts_with(char::is_whitespace) || !name(line).contains('_') {
        return Line::Other;
    }
    let first = name(line);
    let target = || line.split_whitespace().nth(1).map(String::from);
    let jump = match first.as_str() {
        "s_endpgm" => Some(Jump { to: None, always: true }),
        "s_branch" => Some(Jump { to: target(), always: true }),
        _ if first.starts_with("s_cbranch") => Some(Jump { to: target(), always: false }),
        _ => None,
    };
    let counts = line.split(';').next().unwrap_or_default().split(" :: ").map(|part| aco_counts(&name(part)));
    Line::Instruction { counts: counts.fold(Counts::default(), |sum, one| sum.plus(&one)), jump }
}

fn aco_counts(name: &str) -> Counts {
    let plain = name.replace("v_dual_", "v_");
    let is_float = ["_f32", "_f16", "_f64"].iter().any(|of| plain.contains(of));
    let mad = ["v_fma", "v_pk_fma", "v_mac_f", "v_mad_f", "v_mad_mix", "v_dot2"];
    let control =
        ["s_waitcnt", "s_wait_", "s_delay", "s_nop", "s_barrier", "s_branch", "s_cbranch", "s_clause"];
    let more = ["s_set_inst", "s_inst_prefetch", "s_endpgm", "s_sendmsg", "s_sethalt", "s_code_end"];
    let kind = match plain.as_str() {
        n if starts(n, &["v_wmma", "v_swmmac"]) => Kind::Matrix,
        n if starts(n, &mad) => Kind::MultiplyAdd,
        n if n.starts_with("v_exp") => Kind::Exp2,
        n if starts(n, &["ds_load", "ds_read"]) => Kind::WorkgroupLoad,
        n if starts(n, &["ds_store", "ds_write"]) => Kind::WorkgroupStore,
        n if starts(n, &["v_mov", "v_readfirstlane", "v_swap", "v_permlane", "v_readlane", "ds_"]) => {
            Kind::Move
        }
        n if n.starts_with("v_cndmask") => Kind::Select,
        n if n.starts_with("v_cmp") => Kind::Compare,
        n if n.starts_with("v_cvt") => Kind::Convert,
        n if is_float && starts(n, &["v_max", "v_min", "v_pk_max", "v_pk_min"]) => Kind::Max,
        n if is_float && n.starts_with("v_") => Kind::Float,
        n if n.starts_with("v_") => Kind::Integer,
        n if starts(n, &["buffer_", "global_", "flat_", "scratch_", "image_"]) => Kind::Buffer,
        n if starts(n, &control) || starts(n, &more) => Kind::Control,
        _ => Kind::Scalar,
    };
    let mut counts = Counts::one(kind, 1);
    if kind == Kind::Matrix {
        counts.matrix_multiply_adds = 16 * 16 * 16;
    }
    if matches!(kind, Kind::WorkgroupLoad | Kind::WorkgroupStore) {
        let two = if plain.contains("2addr") || plain.contains("read2") || plain.contains("write2") {
            2
        } else {
            1
        };
        let sizes = [("_b128", 16), ("_b96", 12), ("_b64", 8), ("16", 2), ("u8", 1), ("i8", 1), ("_b8", 1)];
        let size = sizes.iter().find(|(of, _)| plain.contains(of)).map_or(4, |(_, size)| *size);
        counts.workgroup_bytes = two * size;
    }
    let pairs = starts(&plain, &["v_pk_fma", "v_dot2"]);
    counts.products *= if pairs { 2 } else { 1 };
    counts.loaded = match kind {
        Kind::WorkgroupLoad => counts.workgroup_bytes,
        Kind::Buffer if starts(&plain, &["buffer_load", "global_load"]) => loaded_width(&plain),
        _ => 0,
    };
    counts
}

/// Returns the bytes that AMD's buffer load of this name loads for an invocation.
fn loaded_width(name: &str) -> u64 {
    let widths = [("dwordx4", 16), ("dwordx3", 12), ("dwordx2", 8), ("dword", 4)];
    let later = [("b128", 16), ("b96", 12), ("b64", 8), ("b32", 4)];
    widths.into_iter().chain(later).find(|(end, _)| name.ends_with(end)).map_or(2, |(_, bytes)| bytes)
}

/// Parses a line of Turnip: `(ss)(rpt1)mad.f32 r1.x, …`, after `l12:`. `rpt1` repeats the
/// instruction for the next registers. `(nop3)`: three empty instructions.
fn ir3(line: &str) -> Line {
    let mut rest = line.trim();
    if let Some(label) = rest.strip_suffix(':').filter(|label| label.starts_with('l') && !label.contains(' '))
    {
        return Line::Label(label.into());
    }
    let (mut times, mut nothing) = (1, 0);
    while let Some((flag, after)) = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
        let count = |name| flag.strip_prefix(name).and_then(|n: &str| n.parse::<u64>().ok()).unwrap_or(0);
        times += count("rpt");
        nothing += count("nop");
        rest = after;
    }
    let name = rest.split_whitespace().next().unwrap_or_default();
    // The lines before and after the code are comments and sentences.
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        return Line::Other;
    }
    let target = || rest.split_once('#').map(|(_, label)| label.trim().to_owned());
    let jump = match name {
        "end" => Some(Jump { to: None, always: true }),
        "jump" => Some(Jump { to: target(), always: true }),
        // `predt` and `predf` begin predicated code, without a branch.
        _ if starts(name, &["br", "bany", "ball", "shps", "getone", "getlast"]) => {
            Some(Jump { to: target(), always: false })
        }
        _ => None,
    };
    let kind = match name {
        _ if name.starts_with("mad.f") => Kind::MultiplyAdd,
        "exp2" => Kind::Exp2,
        _ if name.starts_with("ldl") => Kind::WorkgroupLoad,
        _ if name.starts_with("stl") => Kind::WorkgroupStore,
        _ if starts(name, &["max.f", "min.f"]) => Kind::Max,
        _ if starts(
            name,
            &["add.f", "mul.f", "rcp", "rsq", "log2", "sqrt", "sin", "cos", "absneg.f", "floor.f"],
        ) =>
        {
            Kind::Float
        }
        _ if starts(name, &["cmps", "cmpv"]) => Kind::Compare,
        _ if name.starts_with("sel") => Kind::Select,
        _ if name.starts_with("cov") => Kind::Convert,
        _ if starts(name, &["mov", "swz", "gat", "sct"]) => Kind::Move,
        _ if starts(name, &["isam", "stib", "ldib", "ldg", "stg", "ldc", "stc", "resinfo", "sam"]) => {
            Kind::Buffer
        }
        _ if jump.is_some() => Kind::Control,
        _ if starts(name, &["nop", "bar", "fence", "pred", "sleep", "sync", "shpe"]) => Kind::Control,
        _ => Kind::Integer,
    };
    let mut counts = Counts::one(kind, times).plus(&Counts::one(Kind::Control, nothing));
    if matches!(kind, Kind::WorkgroupLoad | Kind::WorkgroupStore) {
        let words = rest.rsplit(',').next().and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(1);
        let size = if name.ends_with("16") { 2 } else { 4 };
        counts.workgroup_bytes = times * words * size;
    }
    counts.loaded = match kind {
        Kind::WorkgroupLoad => counts.workgroup_bytes,
        // `isam.v.base0 (u32)(xyzw)r6.y, …`
        Kind::Buffer if name.starts_with("isam") => {
            let to = rest.split_whitespace().nth(1).unwrap_or_default();
            let letters = to.rsplit_once(')').map_or(to, |(before, _)| before);
            4 * letters.chars().filter(|c| "xyzw".contains(*c)).count().max(1) as u64
        }
        _ => 0,
    };
    Line::Instruction { counts, jump }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(kind: Kind, times: u64) -> Line {
        Line::Instruction { counts: Counts::one(kind, times), jump: None }
    }

    /// Kinds, multiply-adds of matrices, bytes, and the branch target.
    type Counted = (Vec<(Kind, u64)>, u64, u64, Option<(Option<String>, bool)>);

    fn counted(line: Line) -> Counted {
        let Line::Instruction { counts, jump } = line else { return Default::default() };
        let kinds = Kind::ALL.into_iter().map(|kind| (kind, counts.of(kind))).filter(|(_, n)| *n > 0);
        let jump = jump.map(|jump| (jump.to, jump.always));
        (kinds.collect(), counts.matrix_multiply_adds, counts.workgroup_bytes, jump)
    }

    fn is(line: Line, kind: Kind) -> bool {
        line == instruction(kind, 1)
    }

    /// Multiply-adds computed, and bytes loaded.
    fn done(line: Line) -> (u64, u64) {
        let Line::Instruction { counts, .. } = line else { return Default::default() };
        (counts.products, counts.loaded)
    }

    #[test]
    fn products_and_loads() {
        assert_eq!(done(nak("      r38      = hfma2 r94 r99 r38   // delay=1")), (2, 0));
        assert_eq!(done(nak("      r0..4 = ld.shared.strong.cta.b128 [r9+0x10]   // delay=1")), (0, 16));
        assert_eq!(done(nak("      r0..4 = @p0 ld.global.a64.constant.b64 [r8..10]   // delay=1")), (0, 8));
        assert_eq!(done(nak("      st.shared.b128 [r9+0x10] r0..4   // delay=1")), (0, 0));
        assert_eq!(
            done(aco("\tv_dual_fmac_f32 v1, v2, v3 :: v_dual_fmac_f32 v4, v5, v6   ; c8000000")),
            (2, 0)
        );
        assert_eq!(done(aco("\tv_dot2_f32_f16 v0, v1, v2, v0 ; cc")), (2, 0));
        assert_eq!(done(aco("\tds_read2st64_b32 v[80:81], v14 offset1:2 ; d8")), (0, 8));
        assert_eq!(done(aco("\tbuffer_load_dwordx4 v[4:7], v3, s[4:7], 0 offen ; e0")), (0, 16));
        assert_eq!(done(aco("\tbuffer_load_d16_u16 v4, v3, s[4:7], 0 offen ; e0")), (0, 2));
        assert_eq!(done(ir3("(ss)(rpt1)mad.f32 r11.w, r5.x, (r)r0.z, (r)(last)r11.w")), (2, 0));
        assert_eq!(done(ir3("(sy)ldl.u32 r0.x, l[r1.x+4], 4")), (0, 16));
        assert_eq!(done(ir3("isam.v.base0 (u32)(xyzw)r6.y, r6.x, s#0, t#0")), (0, 16));
    }

    #[test]
    fn lines_of_nvk() {
        assert_eq!(nak("block.u 249 L460 [248] -> {"), Line::Label("L460".into()));
        assert_eq!(nak("} -> [249, 251]"), Line::Other);
        assert!(is(
            nak("      r38      = ffma.ftz r94 r99 r38                  // delay=1"),
            Kind::MultiplyAdd
        ));
        assert!(is(nak("@!p0  r38      = mufu.exp2.f32 r94                     // delay=1"), Kind::Exp2));
        assert!(is(nak("      p1       = isetp.lt.u32 r94 r99                  // delay=1"), Kind::Compare));
        let hmma = "      r8..12    = hmma.m16n8k16.f32 r0..4 r4..6 r8..12   // delay=1 rd:1 wr:2";
        assert_eq!(counted(nak(hmma)), (vec![(Kind::Matrix, 1)], 2048, 0, None));
        let load = "      r8..12    = ld.shared.strong.cta.b128 [r4+0x10]   // delay=1 wr:2";
        assert_eq!(counted(nak(load)), (vec![(Kind::WorkgroupLoad, 1)], 0, 16, None));
        let fragments = "      r16..20   = ldsm.16.m8n8.x4 [r11+0x10]   // delay=2 rd:0 wr:1";
        assert_eq!(counted(nak(fragments)), (vec![(Kind::WorkgroupLoad, 1)], 0, 16, None));
        let to = |always| Some((Some("L463".to_string()), always));
        let branch = |line| counted(nak(line)).3;
        assert_eq!(branch("                 bra !up0 L463             // delay=1"), to(false));
        assert_eq!(branch("                 bra pT L463               // delay=1"), to(true));
        assert_eq!(branch("@!p0             bra pT L463               // delay=1"), to(false));
        assert_eq!(branch("                 exit                      // delay=1"), Some((None, true)));
    }

    #[test]
    fn lines_of_radv() {
        assert_eq!(aco("BB104:"), Line::Label("BB104".into()));
        assert!(is(aco("\tv_fmac_f32_e32 v56, v10, v82         ; 5670a50a"), Kind::MultiplyAdd));
        let dual = "\tv_dual_fmac_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5   ; c8000000";
        assert_eq!(counted(aco(dual)).0, [(Kind::MultiplyAdd, 1), (Kind::Move, 1)]);
        assert!(is(aco("\tv_max3_f32 v1, v2, v3, v4            ; d6"), Kind::Max));
        assert!(is(aco("\tv_max_u32_e32 v1, v2, v3             ; d6"), Kind::Integer));
        assert!(is(aco("\tv_sub_f32_e32 v1, v2, v3             ; d6"), Kind::Float));
        assert!(is(aco("\ts_waitcnt lgkmcnt(0)                 ; bf"), Kind::Control));
        assert!(is(aco("\ts_add_u32 s1, s2, s3                 ; bf"), Kind::Scalar));
        let bytes = |line| counted(aco(line)).2;
        assert_eq!(bytes("\tds_load_b64 v[80:81], v14 offset:5952"), 8);
        assert_eq!(bytes("\tds_write_b128 v14, v[80:83]"), 16);
        assert_eq!(bytes("\tds_load_2addr_b32 v[80:81], v14 offset1:1"), 8);
        assert_eq!(bytes("\tds_load_u16_d16_hi v80, v14"), 2);
        let to = |always| Some((Some("BB105".to_string()), always));
        assert_eq!(counted(aco("\ts_cbranch_scc0 BB105                 ; bfa10024")).3, to(false));
        assert_eq!(counted(aco("\ts_branch BB105                       ; bfa10024")).3, to(true));
        assert_eq!(counted(aco("\tv_wmma_f32_16x16x16_f16 v[1:8], v[9:16], v[17:24], v[1:8]")).1, 4096);
    }

    #[test]
    fn lines_of_turnip() {
        assert_eq!(ir3("l845:"), Line::Label("l845".into()));
        let mad = "(ss)(rpt1)mad.f32 r11.w, r5.x, (r)r0.z, (r)(last)r11.w";
        assert_eq!(ir3(mad), instruction(Kind::MultiplyAdd, 2));
        let waits = counted(ir3("(nop3) mad.f32 r14.x, r4.z, r0.w, r14.x")).0;
        assert_eq!(waits, [(Kind::MultiplyAdd, 1), (Kind::Control, 3)]);
        assert_eq!(ir3("(rpt5)nop"), instruction(Kind::Control, 6));
        assert_eq!(counted(ir3("(sy)ldl.u32 r28.x, l[r0.x+272], 4")).2, 16);
        let to = |label: &str, always| Some((Some(label.to_string()), always));
        assert_eq!(counted(ir3("brao !p0.y, !p0.z, #l762")).3, to("l762", false));
        assert_eq!(counted(ir3("jump #l762")).3, to("l762", true));
        assert_eq!(ir3("; num_ubos:           0"), Line::Other);
    }

    #[test]
    fn blocks_follow_each_other_and_jumps() {
        let text = "BB0:\n\tv_mov_b32 v0, 0\nBB1:\n\ts_cbranch_scc0 BB3\n\tv_mov_b32 v0, 0\n\ts_branch BB1\n\
                    BB3:\n\tv_exp_f32 v0, v0\n\ts_endpgm\n";
        let found = blocks(Driver::Radv, text);
        // The first block is the text before any label.
        let next: Vec<_> = found.iter().map(|block| block.next.clone()).collect();
        assert_eq!(next, [vec![1], vec![2], vec![3, 4], vec![2], vec![]]);
        assert_eq!(found[4].counts.of(Kind::Exp2), 1);
        assert!(blocks(Driver::Honeykrisp, text).is_empty());
    }
}
