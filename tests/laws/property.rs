//! Random problems, compared with the reference. The draws are the same in every run.
//! `WGPU_ATTENTION_TEST_SEED` changes them, `WGPU_ATTENTION_TEST_DRAWS` changes their number.

use std::collections::HashMap;

use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{Alignment, DType, Shape};

use crate::harness::report::judge_outputs;
use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Profile, Report, Rng, Rules, Setup, Weights, defaults, due,
    full, planned_by_name, rest, run,
};

/// The broadcast axes of a tensor of the mask. `None`: the mask does not have the tensor.
pub type Repeats = Option<[bool; 4]>;

/// Everything random about a mask.
#[derive(Clone, Copy, Debug, Default)]
pub struct MaskDraw {
    pub causal: bool,
    pub top_left: bool,
    pub window: Option<[usize; 2]>,
    pub pattern: Option<Pattern>,
    pub exclude_self: bool,
    pub lengths: Repeats,
    pub prefix: Repeats,
    /// Only the batch axis counts.
    pub query_offsets: Repeats,
    /// The offset of all batch entries, if `query_offsets` is `None`.
    pub offset: Option<i64>,
    /// Only the batch axis counts.
    pub packed: Repeats,
    pub documents: Option<[[bool; 4]; 2]>,
    pub blocks: Option<([bool; 4], [usize; 2])>,
    pub attn_mask: Repeats,
    pub tree: Repeats,
    pub key_padding_mask: Repeats,
    pub globals: Repeats,
    pub bias: Repeats,
    pub slopes: Repeats,
    pub symmetric: bool,
    /// The broadcast axes, and the largest distance in the table.
    pub relative: Option<([bool; 4], usize)>,
    pub sinks: Repeats,
}

/// Draws a pattern of any kind, fine or coarse.
fn pattern(rng: &mut Rng, kv_len: usize) -> Pattern {
    let stride = if rng.chance(0.6) { rng.between(1, 9) } else { rng.between(1, kv_len + 3) };
    let part = rng.pick(&[PatternPart::Near, PatternPart::Far, PatternPart::Both, PatternPart::ByHead]);
    match rng.below(4) {
        0 => Pattern::Dilated { dilation: stride },
        1 => Pattern::Strided { stride, part },
        2 => Pattern::Fixed { stride, summary: rng.between(1, stride), part },
        _ => Pattern::Local { block: stride },
    }
}

/// Draws starts of sequences among `len` rows, with rows before and after that belong to no
/// sequence.
fn starts(rng: &mut Rng, sequences: usize, len: usize) -> Vec<u32> {
    let mut starts: Vec<_> = (0..=sequences).map(|_| rng.between(0, len) as u32).collect();
    starts.sort_unstable();
    if rng.chance(0.7) {
        (starts[0], starts[sequences]) = (0, len as u32);
    }
    starts
}

impl MaskDraw {
    pub fn random(rng: &mut Rng, kv_len: usize) -> Self {
        let mut draw = MaskDraw { top_left: rng.chance(0.4), ..Default::default() };
        // None, one part, or several together.
        for _ in 0..rng.pick(&[0, 1, 1, 1, 2, 2, 3, 3]) {
            let repeats = [0; 4].map(|_| rng.chance(0.5));
            let window = Some([rng.below(kv_len + 3), rng.below(kv_len + 3)]);
            match rng.below(18) {
                0 => draw.causal = true,
                1 => draw.window = window,
                2 => draw.exclude_self = true,
                3 => draw.lengths = Some(repeats),
                4 => draw.attn_mask = Some(repeats),
                5 => draw.key_padding_mask = Some(repeats),
                6 => draw.bias = Some(repeats),
                7 => draw.pattern = Some(pattern(rng, kv_len)),
                8 => {
                    // A prefix has an effect only together with a rule that hides keys.
                    (draw.prefix, draw.causal) = (Some(repeats), draw.causal || rng.chance(0.8));
                }
                9 => draw.packed = Some(repeats),
                10 => draw.documents = Some([repeats, [0; 4].map(|_| rng.chance(0.4))]),
                11 => {
                    let size = [0; 2].map(|_| rng.pick(&[1, 2, 3, 8, 16, 33, 64, 200]));
                    draw.blocks = Some((repeats, size));
                }
                12 => {
                    draw.globals = Some(repeats);
                    draw.window = draw.window.or(window.filter(|_| rng.chance(0.8)));
                }
                13 | 14 => (draw.slopes, draw.symmetric) = (Some(repeats), rng.chance(0.5)),
                17 => {
                    draw.tree = Some(repeats.map(|r| r && rng.chance(0.7)));
                    draw.causal = draw.causal || rng.chance(0.5);
                }
                15 => draw.relative = Some((repeats, rng.pick(&[0, 1, 3, 16, 200]))),
                _ => draw.sinks = Some(repeats),
            }
        }
        // Query positions are drawn if a rule depends on them. Packed sequences and trees define
        // positions themselves.
        let speaks = draw.causal || draw.window.is_some() || draw.pattern.is_some() || draw.exclude_self;
        if speaks || draw.slopes.is_some() || draw.relative.is_some() || draw.tree.is_some() {
            match rng.below(6) {
                0 | 1 => draw.query_offsets = Some([rng.chance(0.4), false, false, false]),
                2 => draw.offset = Some(rng.between(0, kv_len + 3) as i64 - 3),
                _ => {}
            }
        }
        if draw.packed.is_some() {
            (draw.tree, draw.query_offsets, draw.offset) = (None, None, None);
        }
        draw
    }

    /// Returns the rules for problems of `shape`. The last `appended` keys are outside the rules.
    /// Sums of the added terms are exact in f32.
    pub fn rules(&self, rng: &mut Rng, shape: &Shape, appended: usize) -> Rules {
        let [batch, heads, q_len, kv_len] = shape.weights();
        let len = kv_len - appended;
        let pairs = [batch, heads, q_len, len];
        let of = |repeats: [bool; 4], mut to: [usize; 4]| {
            (0..4).filter(|a| repeats[*a]).for_each(|a| to[a] = 1);
            to
        };
        fn part<T>(shape: [usize; 4], mut draw: impl FnMut() -> T) -> HostData<T> {
            HostData { data: (0..shape.iter().product()).map(|_| draw()).collect(), shape }
        }
        let bools = |rng: &mut Rng, repeats: Repeats, to: [usize; 4], p: f64| {
            repeats.map(|repeats| part(of(repeats, to), || rng.chance(p)))
        };
        let lengths = |rng: &mut Rng, repeats: Repeats| {
            let mut draw = || match rng.below(8) {
                0 => 0,
                1 => len as u32 + 5,
                2 => u32::MAX,
                _ => rng.between(1, len) as u32,
            };
            repeats.map(|repeats| part(of(repeats, [batch, heads, q_len, 1]), &mut draw))
        };
        let normal = |rng: &mut Rng| (128.0 * rng.normal()).round() / 64.0;
        let documents = self.documents.map(|[queries, keys]| {
            let number = rng.pick(&[2, 3, 8]);
            let mut draw = || [0, 7, u32::MAX, 3, 4, 5, 6, 1 << 31][rng.below(number)];
            [
                part(of(queries, [batch, heads, q_len, 1]), &mut draw),
                part(of(keys, [batch, heads, 1, len]), &mut draw),
            ]
        });
        let packed = self.packed.map(|repeats| {
            let sequences = rng.between(1, 5);
            let batch = if repeats[0] { 1 } else { batch };
            [q_len, len].map(|n| {
                let all = (0..batch).flat_map(|_| starts(rng, sequences, n)).collect();
                HostData::new(all, [batch, 1, 1, sequences + 1])
            })
        });
        let blocks = self.blocks.map(|(repeats, size)| {
            let shape = [batch, heads, q_len.div_ceil(size[0]), len.div_ceil(size[1])];
            (part(of(repeats, shape), || rng.below(3) as u32), size)
        });
        let table = |(mut repeats, reach): ([bool; 4], usize)| {
            repeats[3] = false;
            of(repeats, [batch, heads, 1, 2 * reach + 1])
        };
        let per_head = |repeats| of(repeats, [batch, heads, 1, 1]);
        Rules {
            score_mod: None,
            mask_mod: None,
            causal: self.causal,
            alignment: match self.offset {
                Some(offset) => Alignment::Offset(offset),
                None if self.top_left => Alignment::TopLeft,
                None => Alignment::BottomRight,
            },
            window: self.window,
            pattern: self.pattern,
            exclude_self: self.exclude_self,
            lengths: lengths(rng, self.lengths),
            prefix: lengths(rng, self.prefix),
            query_offsets: self.query_offsets.map(|repeats| {
                part(of(repeats, [batch, 1, 1, 1]), || match rng.below(10) {
                    0 => 0,
                    // A distance past every key. The added term stays exact in f32.
                    1 => len as u32 + 500,
                    _ => rng.between(0, len) as u32,
                })
            }),
            packed,
            documents,
            blocks,
            attn_mask: bools(rng, self.attn_mask, pairs, 0.6),
            tree: bools(rng, self.tree, [batch, heads, q_len, q_len], 0.6),
            key_padding_mask: bools(rng, self.key_padding_mask, pairs, 0.8),
            globals: bools(rng, self.globals, [batch, heads, 1, len], 0.2),
            bias: self.bias.map(|repeats| {
                part(of(repeats, pairs), || match rng.below(20) {
                    0..3 => f32::NEG_INFINITY,
                    // PyTorch's finfo.min: weight zero if other keys are visible, otherwise a score
                    // like any other.
                    3 => f32::MIN,
                    _ => normal(rng),
                })
            }),
            slopes: self.slopes.map(|repeats| {
                part(per_head(repeats), || rng.pick(&[1.0, 0.25, 0.0625, -0.125, 0.0, 0.00390625]))
            }),
            symmetric: self.symmetric,
            relative: self.relative.map(|draw| part(table(draw), || normal(rng))),
            sinks: self.sinks.map(|repeats| {
                let mut draw = || match rng.below(8) {
                    0 => f32::NEG_INFINITY,
                    1 => 100.0,
                    _ => 2.0 * rng.normal(),
                };
                part(per_head(repeats), &mut draw)
            }),
        }
    }

    /// Returns the same mask with one part less, or a simpler part.
    pub fn simpler(&self) -> Vec<Self> {
        let without: [fn(&mut Self); 28] = [
            |m| m.causal = false,
            |m| m.top_left = false,
            |m| m.window = None,
            |m| m.pattern = None,
            |m| m.exclude_self = false,
            |m| m.lengths = None,
            |m| m.prefix = None,
            |m| m.query_offsets = None,
            |m| m.offset = None,
            |m| m.query_offsets = m.query_offsets.map(|_| [true, false, false, false]),
            |m| m.packed = None,
            |m| m.documents = None,
            |m| m.blocks = None,
            |m| m.attn_mask = None,
            |m| m.tree = None,
            |m| m.key_padding_mask = None,
            |m| m.globals = None,
            |m| m.bias = None,
            |m| m.slopes = None,
            |m| m.symmetric = false,
            |m| m.relative = None,
            |m| m.sinks = None,
            |m| m.pattern = m.pattern.map(|_| Pattern::Dilated { dilation: 2 }),
            |m| m.documents = m.documents.map(|_| [[true, true, false, false]; 2]),
            |m| m.blocks = m.blocks.map(|(_, size)| ([true, true, false, false], size)),
            |m| m.blocks = m.blocks.map(|(repeats, _)| (repeats, [1; 2])),
            |m| m.relative = m.relative.map(|_| ([true; 4], 1)),
            |m| m.prefix = m.prefix.map(|_| [true; 4]),
        ];
        let apply = |change: &fn(&mut Self)| {
            let mut simpler = *self;
            change(&mut simpler);
            simpler
        };
        without.iter().map(apply).filter(|m| format!("{m:?}") != format!("{self:?}")).collect()
    }
}

/// The source of dropout decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DropDraw {
    None,
    Seeded,
    Given,
}

impl DropDraw {
    pub fn random(rng: &mut Rng) -> Self {
        rng.pick(&[DropDraw::None, DropDraw::None, DropDraw::None, DropDraw::Seeded, DropDraw::Given])
    }

    pub fn dropout(self, rng: &mut Rng, weights: [usize; 4]) -> Option<DropoutData> {
        let p = rng.pick(&[0.0, 0.1, 0.5, 0.9]);
        match self {
            DropDraw::None => None,
            DropDraw::Seeded => Some(DropoutData::Seeded { p, seed: rng.word() }),
            DropDraw::Given => {
                let shape = weights.map(|n| if rng.chance(0.3) { 1 } else { n });
                Some(DropoutData::Given {
                    p,
                    keep: HostData::new(rng.bools(shape.iter().product(), 0.5), shape),
                })
            }
        }
    }
}

/// Returns another length between the same powers of two, a multiple of 4 if this one is.
pub fn same_tile(length: usize, rng: &mut Rng) -> usize {
    let most = length.next_power_of_two();
    let step = if length.is_multiple_of(4) { 4 } else { 1 };
    let shorter = length - step * rng.below(length.div_ceil(4).div_ceil(step));
    let same = shorter.next_power_of_two() == most && shorter.is_multiple_of(4) == length.is_multiple_of(4);
    if same { shorter } else { length }
}

/// Like [`same_tile`], for channels: the same number of vec4, full ones if they are full here.
fn same_vectors(dim: usize, rng: &mut Rng) -> usize {
    if dim.is_multiple_of(4) { dim } else { dim / 4 * 4 + rng.between(1, 3) }
}

/// Returns other sizes for the kernels of `shape`.
pub fn other_sizes(shape: Shape, rng: &mut Rng) -> Shape {
    let mut other = shape;
    // Fused kernels exist for few rows, counted in eights, and for many.
    let tiles = |shape: &Shape| (shape.q_len * shape.group()).div_ceil(8).min(5);
    for _ in 0..8 {
        (other.q_len, other.heads) = (same_tile(shape.q_len, rng), shape.kv_heads * rng.pick(&[1, 2, 3]));
        if tiles(&other) == tiles(&shape) {
            break;
        }
        (other.q_len, other.heads) = (shape.q_len, shape.heads);
    }
    (other.batch, other.kv_len) = (rng.pick(&[1, 2, 3]), same_tile(shape.kv_len, rng));
    (other.head_dim, other.value_dim) =
        (same_vectors(shape.head_dim, rng), same_vectors(shape.value_dim, rng));
    other
}

/// Returns another layout for the same kernels.
pub fn other_strides(layout: Layout, rng: &mut Rng) -> Layout {
    match layout {
        // An even seed decides which tensors are aligned.
        Layout::Window(seed) if !seed.is_multiple_of(2) => Layout::Window(rng.word() | 1),
        layout => layout,
    }
}

pub const LENGTHS: &[usize] = &[1, 1, 2, 3, 4, 5, 8, 11, 16, 17, 31, 32, 63, 64, 65, 67, 127, 129];
pub const DIMS: &[usize] = &[1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 17, 31, 32, 33, 64, 65];

pub fn weights(rng: &mut Rng) -> Weights {
    let dtype = float(rng);
    rng.pick(&[Weights::None, Weights::None, Weights::PerHead(dtype), Weights::Mean(dtype)])
}

pub fn profile(rng: &mut Rng) -> &'static Profile {
    if rng.chance(0.3) { defaults() } else { full() }
}

/// Draws F32 or a narrower type.
pub fn float(rng: &mut Rng) -> DType {
    rng.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16])
}

/// Everything random about a problem and its run.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    seed: u64,
    shape: Shape,
    /// Additive scores: true for a vector per head.
    additive: Option<bool>,
    mask: MaskDraw,
    drop: DropDraw,
    scale: Option<f64>,
    softcap: Option<f64>,
    /// The standard deviation of queries.
    spread: f32,
    profile: &'static str,
    form: Target,
    path: Algorithm,
    dtype: DType,
    bias: DType,
    layout: Layout,
    lse: bool,
    weights: Weights,
}

impl Draw {
    pub fn random(seed: u64) -> Self {
        let rng = &mut Rng::new(seed);
        let kv_heads = rng.pick(&[1, 1, 2, 3]);
        let mut shape = Shape {
            batch: rng.pick(&[1, 1, 2, 3]),
            heads: kv_heads * rng.pick(&[1, 1, 2, 3]),
            kv_heads,
            q_len: rng.pick(LENGTHS),
            kv_len: rng.pick(LENGTHS),
            head_dim: rng.pick(DIMS),
            value_dim: rng.pick(DIMS),
        };
        if rng.chance(0.3) {
            (shape.kv_len, shape.value_dim) = (shape.q_len, shape.head_dim);
        }
        if shape.weights().iter().product::<usize>() > 30_000 {
            (shape.batch, shape.heads, shape.kv_heads) = (1, 1, 1);
        }
        let mut profile = profile(rng);
        // A separate generator, so that the other draws stay the same.
        let few = &mut Rng::new(seed ^ 0x4e6);
        if profile.name == "full" && few.chance(0.3) {
            profile = planned_by_name(few.pick(&["64 registers", "128 registers", "256 registers"]))
                .expect("there is one");
        } else if profile.name == "full" && few.chance(0.3) {
            profile = planned_by_name(few.pick(&["4 lanes", "16 lanes"])).expect("there is one");
        }
        let weights = weights(rng);
        let path = if weights == Weights::None {
            rng.pick(&[Algorithm::Fused, Algorithm::Fused, Algorithm::Staged])
        } else {
            Algorithm::Staged
        };
        Draw {
            seed,
            shape,
            additive: None,
            mask: MaskDraw::random(rng, shape.kv_len),
            drop: DropDraw::random(rng),
            scale: rng.chance(0.3).then(|| rng.pick(&[0.0, 0.5, 1.0, -0.25])),
            softcap: rng.chance(0.2).then(|| rng.pick(&[0.5, 5.0, 50.0])),
            spread: rng.pick(&[0.1, 1.0, 1.0, 8.0]),
            profile: profile.name,
            form: rng.pick(&FORMS),
            path,
            dtype: float(rng),
            bias: float(rng),
            layout: match rng.below(6) {
                0 => Layout::Dense,
                1 => Layout::Blhd,
                2 => Layout::Packed,
                _ => Layout::Window(rng.word()),
            },
            lse: rng.chance(0.5),
            weights,
        }
    }

    /// Returns the same problem with additive scores.
    pub fn with_additive_scores(self) -> Self {
        Draw { additive: Some(self.seed.is_multiple_of(2)), scale: None, softcap: None, ..self }
    }

    /// Returns other sizes, data and strides for the same shaders, because compilation dominates
    /// the time.
    pub fn again(mut self) -> Self {
        let rng = &mut Rng::new(self.seed ^ 0xa6a12);
        self.seed = rng.word();
        self.shape = other_sizes(self.shape, rng);
        self.layout = other_strides(self.layout, rng);
        self
    }

    pub fn case(&self) -> Case {
        let rng = &mut Rng::new(self.seed ^ 0x5eed);
        let mut case = Case::random(format!("draw {:#x}", self.seed), self.shape);
        case.q.iter_mut().for_each(|q| *q *= self.spread);
        case.rules = self.mask.rules(rng, &self.shape, 0);
        case.dropout = self.drop.dropout(rng, self.shape.weights());
        (case.scale, case.softcap) = (self.scale, self.softcap);
        let vectors = self.additive.map(|each| if each { self.shape.heads } else { 1 });
        case.score_vector = vectors.map(|n| rng.normals(n * self.shape.head_dim));
        case
    }

    pub fn setup(&self, case: &Case) -> Setup {
        let Draw { form, path, dtype, bias, layout, lse, weights, .. } = *self;
        let whole = || if self.profile == "full" { full() } else { defaults() };
        let profile = planned_by_name(self.profile).unwrap_or_else(whole);
        let setup = Setup { profile, form, path, dtype, bias, layout, lse, weights };
        let path = if setup.too_many_buffers(case) { Algorithm::Auto } else { path };
        Setup { path, ..setup }
    }

    pub fn outcome(&self) -> Result<f64, String> {
        let case = self.case();
        let setup = self.setup(&case);
        let stored = case.stored(setup.dtype, setup.bias);
        let truth = stored.truth(setup.dtype, setup.weights);
        run(&stored, &setup).and_then(|got| judge_outputs(&case.expected, case.shape, &truth, &got, false))
    }

    /// Returns simpler variants of this draw.
    pub fn simpler(&self) -> Vec<Self> {
        let mut all: Vec<Self> = self.mask.simpler().into_iter().map(|mask| Draw { mask, ..*self }).collect();
        let smaller = |n: usize| [1, n / 2, n - 1].into_iter().filter(move |m| (1..n).contains(m));
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let s = self.shape;
        let mut shapes: Vec<Shape> = Vec::new();
        shapes.extend(smaller(batch).map(|batch| Shape { batch, ..s }));
        shapes.extend((heads > kv_heads).then_some(Shape { heads: kv_heads, ..s }));
        shapes.extend((kv_heads > 1).then_some(Shape { heads: heads / kv_heads, kv_heads: 1, ..s }));
        shapes.extend(smaller(q_len).map(|q_len| Shape { q_len, ..s }));
        shapes.extend(smaller(kv_len).map(|kv_len| Shape { kv_len, ..s }));
        shapes.extend(smaller(head_dim).map(|head_dim| Shape { head_dim, ..s }));
        shapes.extend(smaller(value_dim).map(|value_dim| Shape { value_dim, ..s }));
        all.extend(shapes.into_iter().map(|shape| Draw { shape, ..*self }));
        let less: [fn(&mut Self); 8] = [
            |d| d.drop = DropDraw::None,
            |d| d.scale = None,
            |d| d.softcap = None,
            |d| d.dtype = DType::F32,
            |d| d.bias = DType::F32,
            |d| d.layout = Layout::Dense,
            |d| d.lse = false,
            |d| d.weights = Weights::None,
        ];
        for change in less {
            let mut draw = *self;
            change(&mut draw);
            all.push(draw);
        }
        all.retain(|draw| format!("{draw:?}") != format!("{self:?}"));
        all
    }
}

/// Returns the simplest failing variant of a failing draw, and its error.
fn shrunk<D: Copy + std::fmt::Debug>(
    draw: D,
    simpler: impl Fn(&D) -> Vec<D>,
    outcome: impl Fn(&D) -> Result<f64, String>,
) -> String {
    let (mut draw, mut what) = (draw, String::new());
    let mut left = 150;
    'again: while left > 0 {
        for candidate in simpler(&draw) {
            left -= 1;
            if let Err(e) = outcome(&candidate) {
                (draw, what) = (candidate, e);
                continue 'again;
            }
            if left == 0 {
                break;
            }
        }
        break;
    }
    format!("simplest that fails: {draw:?}: {what}")
}

/// Returns the outcome of a draw. The first failing draws are also simplified.
pub fn judged<D: Copy + std::fmt::Debug>(
    report: &Report,
    draw: D,
    simpler: impl Fn(&D) -> Vec<D>,
    outcome: impl Fn(&D) -> Result<f64, String>,
) -> Result<f64, String> {
    outcome(&draw).map_err(|what| {
        let simplest = if report.failed() < 3 { shrunk(draw, simpler, outcome) } else { String::new() };
        format!("{what}\n    {draw:?}\n    {simplest}")
    })
}

/// The draws of a test. The first `always` are usual runs. The others, up to `most`, run by share
/// in groups of `group`, which share kernels.
pub struct Draws {
    pub name: &'static str,
    pub always: usize,
    pub most: usize,
    pub group: usize,
}

impl Draws {
    /// Returns the numbers of the draws that run.
    pub fn numbers(&self) -> Vec<usize> {
        let Draws { name, always, most, group } = *self;
        let numbers: Vec<usize> = match variable("WGPU_ATTENTION_TEST_DRAWS") {
            Some(count) => (0..count as usize).collect(),
            None => {
                let runs = |n: &usize| {
                    let key = format!("{name}, draws {}", n / group);
                    *n < always && due(&key) || rest(&key)
                };
                (0..most).filter(runs).collect()
            }
        };
        crate::harness::say(&format!("{name}: {} draws", numbers.len()));
        numbers
    }
}

/// Returns the base of all seeds.
pub fn seed() -> u64 {
    variable("WGPU_ATTENTION_TEST_SEED").unwrap_or(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|x| x.parse().unwrap_or_else(|_| panic!("{name} is {x}, no number")))
}

#[test]
fn random_problems_match_the_reference() {
    let seed = seed();
    let mut report = Report::new("property");
    let mut seen = HashMap::new();
    let draws = Draws { name: "property", always: 150, most: 400, group: 5 }.numbers();
    for n in draws.iter().copied() {
        let draw = (0..n % 5).fold(Draw::random(seed.wrapping_add(n as u64 / 5)), |draw, _| draw.again());
        *seen.entry((draw.profile, format!("{:?} {:?}", draw.path, draw.form), draw.dtype)).or_insert(0) += 1;
        let outcome = judged(&report, draw, Draw::simpler, Draw::outcome);
        report.record(&format!("draw {n}"), &draw.setup(&draw.case()), outcome);
    }
    report.finish();
    // The default draws contain every combination of device, target and type. One tenth of them
    // with another seed may not.
    let others = std::env::var_os("WGPU_ATTENTION_TEST_SEED").is_some();
    assert!(others || draws.len() < 400 || seen.len() >= 20, "{seen:?}");
}
