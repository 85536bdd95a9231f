//! Attention's gradients, compared with differences: every option alone, any two, and random ones.

use wgpu_attention::Shape;
use wgpu_attention::mask::{Pattern, PatternPart};

use crate::harness::gradients::{Compared, Problem};
use crate::harness::{Case, DropoutData, HostData, Rng, Rules};
use crate::laws::property::MaskDraw;

/// Everything about a problem except its data.
#[derive(Clone, Debug)]
pub struct Draw {
    pub shape: Shape,
    pub mask: MaskDraw,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    /// Seeded dropout, or dropout by a tensor.
    pub dropout: Option<bool>,
    pub appended: usize,
    pub d_lse: bool,
}

impl Draw {
    fn plain() -> Self {
        let shape = Shape { batch: 2, heads: 2, kv_heads: 2, q_len: 4, kv_len: 5, head_dim: 3, value_dim: 3 };
        let mask = MaskDraw::default();
        Draw { shape, mask, scale: None, softcap: None, dropout: None, appended: 0, d_lse: false }
    }

    pub fn random(rng: &mut Rng) -> Self {
        let kv_heads = rng.between(1, 2);
        let kv_len = rng.between(1, 8);
        let appended = if rng.chance(0.2) { rng.between(1, 2) } else { 0 };
        let shape = Shape {
            batch: rng.between(1, 2),
            heads: kv_heads * rng.between(1, 3),
            kv_heads,
            q_len: rng.between(1, 7),
            kv_len: kv_len + appended,
            head_dim: rng.between(1, 4),
            value_dim: rng.between(1, 4),
        };
        Draw {
            shape,
            mask: MaskDraw::random(rng, kv_len),
            scale: rng.chance(0.2).then_some(-0.75),
            softcap: rng.chance(0.25).then_some(1.5),
            dropout: rng.chance(0.3).then(|| rng.chance(0.5)),
            appended,
            d_lse: rng.chance(0.5),
        }
    }

    pub fn problem(&self, name: &str) -> Problem {
        self.problem_of(name, |_| ())
    }

    fn problem_of(&self, name: &str, change: impl FnOnce(&mut Rules)) -> Problem {
        let rng = &mut Rng::named(name);
        let case = Case::random(name, self.shape).with(|c| {
            c.rules = self.mask.rules(rng, &self.shape, self.appended);
            change(&mut c.rules);
            (c.scale, c.softcap) = (self.scale, self.softcap);
            c.dropout = self.dropout.map(|seeded| dropout(rng, seeded, self.shape.weights()));
        });
        Problem::new(case, self.appended, self.d_lse)
    }

    /// Returns a problem that suits finite differences.
    fn smooth(&self, name: &str) -> Problem {
        self.problem_of(name, smooth)
    }
}

/// Limits values, so that neither a step nor a score is rounded away.
pub fn smooth(rules: &mut Rules) {
    let sinks = rules.sinks.iter_mut().flat_map(|part| &mut part.data);
    sinks.for_each(|x| *x = (*x * 64.0).round() / 64.0);
    let bias = rules.bias.iter_mut().flat_map(|part| &mut part.data);
    bias.filter(|x| **x == f32::MIN).for_each(|x| *x = -30.0);
}

pub fn dropout(rng: &mut Rng, seeded: bool, [batch, _, q_len, kv_len]: [usize; 4]) -> DropoutData {
    let p = 0.375;
    if seeded {
        return DropoutData::Seeded { p, seed: rng.word() };
    }
    let keep = HostData::new(rng.bools(batch * q_len * kv_len, 0.6), [batch, 1, q_len, kv_len]);
    DropoutData::Given { p, keep }
}

/// An option, and a function that sets it.
type Set = (&'static str, fn(&mut Draw));

const OPTIONS: &[Set] = &[
    ("scale", |d| d.scale = Some(1.5)),
    ("softcap", |d| d.softcap = Some(0.75)),
    ("lse", |d| d.d_lse = true),
    ("seeded dropout", |d| d.dropout = Some(true)),
    ("given dropout", |d| d.dropout = Some(false)),
    ("grouped heads", |d| d.shape.heads = 4),
    ("one key head", |d| d.shape.kv_heads = 1),
    ("wider values", |d| d.shape.value_dim = 5),
    ("narrower values", |d| d.shape.value_dim = 1),
    ("more queries", |d| d.shape.q_len = 7),
    ("appended", |d| (d.appended, d.shape.kv_len) = (2, d.shape.kv_len + 2)),
    ("causal", |d| d.mask.causal = true),
    ("causal, top left", |d| (d.mask.causal, d.mask.top_left) = (true, true)),
    ("causal, offset", |d| (d.mask.causal, d.mask.offset) = (true, Some(-1))),
    ("causal, offsets", |d| (d.mask.causal, d.mask.query_offsets) = (true, Some([false; 4]))),
    ("window", |d| d.mask.window = Some([1, 1])),
    ("exclude self", |d| d.mask.exclude_self = true),
    ("lengths", |d| d.mask.lengths = Some([false, true, true, true])),
    ("lengths of queries", |d| d.mask.lengths = Some([false; 4])),
    ("keep", |d| d.mask.attn_mask = Some([false, true, false, false])),
    ("key padding", |d| d.mask.key_padding_mask = Some([false, true, true, false])),
    ("tree", |d| d.mask.tree = Some([true, true, false, false])),
    ("bias", |d| d.mask.bias = Some([false; 4])),
    ("bias of all of the batch", |d| d.mask.bias = Some([true, false, false, false])),
    ("bias of all heads", |d| d.mask.bias = Some([false, true, false, false])),
    ("bias of all queries", |d| d.mask.bias = Some([false, false, true, false])),
    ("bias of all keys", |d| d.mask.bias = Some([true, false, false, true])),
    ("alibi", |d| d.mask.slopes = Some([true, false, false, false])),
    ("alibi of the batch", |d| d.mask.slopes = Some([false, true, false, false])),
    ("symmetric alibi", |d| (d.mask.slopes, d.mask.symmetric) = (Some([false; 4]), true)),
    ("relative", |d| d.mask.relative = Some(([true, false, true, false], 2))),
    ("relative of all heads", |d| d.mask.relative = Some(([false, true, true, false], 1))),
    ("sinks", |d| d.mask.sinks = Some([true, false, true, true])),
    ("sinks of the batch", |d| d.mask.sinks = Some([false, true, true, true])),
    ("strided", |d| d.mask.pattern = Some(Pattern::Strided { stride: 2, part: PatternPart::ByHead })),
    ("dilated", |d| d.mask.pattern = Some(Pattern::Dilated { dilation: 2 })),
    ("packed", |d| d.mask.packed = Some([false; 4])),
    ("blocks", |d| d.mask.blocks = Some(([false; 4], [2, 2]))),
    ("prefix", |d| (d.mask.prefix, d.mask.causal) = (Some([false, true, true, true]), true)),
    ("documents", |d| d.mask.documents = Some([[false, true, false, true], [false, true, true, false]])),
    ("globals", |d| (d.mask.globals, d.mask.window) = (Some([false; 4]), Some([1, 0]))),
];

/// True if the mask builder accepts the combination.
fn fit(draw: &Draw) -> bool {
    let MaskDraw { packed, tree, query_offsets, offset, .. } = &draw.mask;
    packed.is_none() || tree.is_none() && query_offsets.is_none() && offset.is_none()
}

/// Every input must have been compared at enough non-zero gradients.
fn enough(compared: &Compared, each: usize) {
    for name in ["q", "k", "v", "bias", "slopes", "relative", "sinks"] {
        assert!(compared.get(name).is_some_and(|n| *n >= each), "{name}: {compared:?}");
    }
}

#[test]
fn single_option_gradients_match_differences() {
    let mut compared = Compared::new();
    Draw::plain().smooth("gradients, plain").check(usize::MAX, &mut compared);
    for (name, set) in OPTIONS {
        let mut draw = Draw::plain();
        set(&mut draw);
        for n in 0..2 {
            draw.smooth(&format!("gradients, {name}, {n}")).check(usize::MAX, &mut compared);
        }
    }
    enough(&compared, 2);
}

#[test]
fn option_pair_gradients_match_differences() {
    let mut compared = Compared::new();
    for (n, (first, set)) in OPTIONS.iter().enumerate() {
        for (second, and_set) in &OPTIONS[n + 1..] {
            let mut draw = Draw::plain();
            set(&mut draw);
            and_set(&mut draw);
            if fit(&draw) {
                draw.smooth(&format!("gradients, {first} and {second}")).check(8, &mut compared);
            }
        }
    }
    enough(&compared, 100);
}

#[test]
fn random_problem_gradients_match_differences() {
    let mut compared = Compared::new();
    for seed in 0..1500 {
        let draw = Draw::random(&mut Rng::new(seed ^ 0x6ad));
        draw.smooth(&format!("gradients {seed}")).check(4, &mut compared);
    }
    enough(&compared, 100);
}
