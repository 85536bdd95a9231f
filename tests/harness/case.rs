//! An attention problem with its data, and its expected results.

use std::convert::Infallible;

use half::{bf16, f16};
use wgpu_attention::mask::{Blocks, HostMask, Pattern};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{self, Attended, Options, Real, average_heads, widen};
use wgpu_attention::{Alignment, DType, Dropout, HostTensor, Mask, Shape};

use super::memory::stored;
use super::mods::{OwnMask, OwnScore};
use super::random::Rng;

/// Dense elements with their shape. An axis of length 1 is broadcast.
#[derive(Clone, Debug, PartialEq)]
pub struct HostData<T> {
    pub data: Vec<T>,
    pub shape: [usize; 4],
}

impl<T: Copy> HostData<T> {
    pub fn new(data: Vec<T>, shape: [usize; 4]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>());
        HostData { data, shape }
    }

    /// Computes elements from their index.
    pub fn of(shape: [usize; 4], f: impl Fn([usize; 4]) -> T) -> Self {
        let [b, h, l, d] = shape;
        let at = |n: usize| f([n / (l * d) / h, n / (l * d) % h, n / d % l, n % d]);
        HostData { data: (0..b * h * l * d).map(at).collect(), shape }
    }

    pub fn host(&self) -> HostTensor<'_, T> {
        HostTensor::new(&self.data, self.shape)
    }
}

/// A mask as data. [`Rules::mask`] makes the crate's mask from it.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    pub causal: bool,
    pub alignment: Alignment,
    pub window: Option<[usize; 2]>,
    pub pattern: Option<Pattern>,
    pub exclude_self: bool,
    pub lengths: Option<HostData<u32>>,
    pub prefix: Option<HostData<u32>>,
    pub query_offsets: Option<HostData<u32>>,
    /// The starts of the query sequences and of the key sequences.
    pub packed: Option<[HostData<u32>; 2]>,
    /// The document numbers of queries and of keys.
    pub documents: Option<[HostData<u32>; 2]>,
    /// The block map and the size of its blocks.
    pub blocks: Option<(HostData<u32>, [usize; 2])>,
    pub attn_mask: Option<HostData<bool>>,
    pub tree: Option<HostData<bool>>,
    pub key_padding_mask: Option<HostData<bool>>,
    pub globals: Option<HostData<bool>>,
    pub bias: Option<HostData<f32>>,
    pub slopes: Option<HostData<f32>>,
    /// True if the slopes count distances on both sides.
    pub symmetric: bool,
    pub relative: Option<HostData<f32>>,
    pub sinks: Option<HostData<f32>>,
    pub score_mod: Option<OwnScore>,
    pub mask_mod: Option<OwnMask>,
}

/// A mask built from parts.
pub type DataMask<'a> = Mask<&'a HostData<u32>, &'a HostData<bool>, &'a HostData<f32>>;

impl Rules {
    /// Builds the mask by the public builder.
    pub fn mask(&self) -> DataMask<'_> {
        let mut mask = Mask::none().aligned(self.alignment);
        if self.causal {
            mask = mask.and_causal();
        }
        if let Some([left, right]) = self.window {
            mask = mask.window(left, right);
        }
        if let Some(pattern) = self.pattern {
            mask = mask.pattern(pattern);
        }
        if self.exclude_self {
            mask = mask.exclude_self();
        }
        if let Some(lengths) = &self.lengths {
            mask = mask.lengths(lengths);
        }
        if let Some(prefix) = &self.prefix {
            mask = mask.prefix(prefix);
        }
        if let Some(offsets) = &self.query_offsets {
            mask = mask.query_offsets(offsets);
        }
        if let Some([queries, keys]) = &self.packed {
            mask = mask.packed(queries, keys);
        }
        if let Some([queries, keys]) = &self.documents {
            mask = mask.documents(queries, keys);
        }
        if let Some((map, size)) = &self.blocks {
            mask = mask.blocks(Blocks::new(map, *size));
        }
        if let Some(attn_mask) = &self.attn_mask {
            mask = mask.attn_mask(attn_mask);
        }
        if let Some(tree) = &self.tree {
            mask = mask.tree(tree);
        }
        if let Some(key_padding_mask) = &self.key_padding_mask {
            mask = mask.key_padding_mask(key_padding_mask);
        }
        if let Some(globals) = &self.globals {
            mask = mask.globals(globals);
        }
        if let Some(bias) = &self.bias {
            mask = mask.bias(bias);
        }
        if let Some(slopes) = &self.slopes {
            mask = if self.symmetric { mask.alibi_symmetric(slopes) } else { mask.alibi(slopes) };
        }
        if let Some(table) = &self.relative {
            mask = mask.relative(table);
        }
        if let Some(sinks) = &self.sinks {
            mask = mask.sink_logits(sinks);
        }
        mask
    }

    /// Returns the names of the rules that a kernel's text contains.
    pub fn names(&self) -> Vec<&'static str> {
        let Rules { lengths, prefix, packed, documents, blocks, attn_mask, tree, key_padding_mask, .. } =
            self;
        let Rules { globals, bias, slopes, relative, sinks, .. } = self;
        let all = [
            ("causal", self.causal),
            ("window", self.window.is_some()),
            ("pattern", self.pattern.is_some()),
            ("exclude_self", self.exclude_self),
            ("lengths", lengths.is_some()),
            ("prefix", prefix.is_some()),
            ("packed", packed.is_some()),
            ("documents", documents.is_some()),
            ("blocks", blocks.is_some()),
            ("attn_mask", attn_mask.is_some()),
            ("tree", tree.is_some()),
            ("key_padding_mask", key_padding_mask.is_some()),
            ("globals", globals.is_some()),
            ("bias", bias.is_some()),
            ("slopes", slopes.is_some()),
            ("relative", relative.is_some()),
            ("sinks", sinks.is_some()),
            ("score_mod", self.score_mod.is_some()),
            ("mask_mod", self.mask_mod.is_some()),
        ];
        all.into_iter().filter_map(|(name, given)| given.then_some(name)).collect()
    }

    pub fn host(&self) -> HostMask<'_> {
        fn host<'a, T: Copy>(
            _: &'static str,
            part: &'a HostData<T>,
        ) -> Result<HostTensor<'a, T>, Infallible> {
            Ok(part.host())
        }
        let Ok(mut mask): Result<HostMask, Infallible> = self.mask().try_map(host, host, host);
        if let Some(own) = &self.score_mod {
            mask = mask.score_fn(&*own.host);
            if let Some(slope) = &own.slope {
                mask = mask.score_fn_slope(&**slope);
            }
        }
        if let Some(own) = &self.mask_mod {
            mask = mask.mask_fn(&*own.host);
        }
        mask
    }

    /// Returns the rules with tensors that are added to scores rounded to `dtype`.
    pub fn stored(&self, dtype: DType) -> Self {
        let mut rules = self.clone();
        let floats = [&mut rules.bias, &mut rules.slopes, &mut rules.relative, &mut rules.sinks];
        floats.into_iter().flatten().for_each(|part| part.data = stored(&part.data, dtype));
        rules
    }

    /// Returns the number of tensors in the mask.
    pub fn tensors(&self) -> usize {
        let Rules {
            lengths,
            prefix,
            query_offsets,
            packed,
            documents,
            blocks,
            attn_mask,
            tree,
            key_padding_mask,
            globals,
            ..
        } = self;
        let bools = [attn_mask, tree, key_padding_mask, globals].into_iter().flatten().count();
        let pairs = [packed, documents].into_iter().flatten().count();
        let counts =
            [lengths, prefix, query_offsets].into_iter().flatten().count() + usize::from(blocks.is_some());
        counts + bools + 2 * pairs + self.floats().count()
    }

    /// Returns every float tensor.
    pub fn floats(&self) -> impl Iterator<Item = &HostData<f32>> {
        [&self.bias, &self.slopes, &self.relative, &self.sinks].into_iter().flatten()
    }
}

/// Dropout as data.
#[derive(Clone, Debug)]
pub enum DropoutData {
    Seeded { p: f64, seed: u64 },
    Given { p: f64, keep: HostData<bool> },
}

impl DropoutData {
    pub fn host(&self) -> Dropout<HostTensor<'_, bool>> {
        match self {
            DropoutData::Seeded { p, seed } => Dropout::Seeded { p: *p, seed: *seed },
            DropoutData::Given { p, keep } => Dropout::Given { p: *p, keep: keep.host() },
        }
    }

    /// Returns the factor of weights that dropout does not remove.
    pub fn factor(&self) -> f64 {
        let (DropoutData::Seeded { p, .. } | DropoutData::Given { p, .. }) = self;
        1.0 / (1.0 - *p)
    }
}

/// The attention weights that a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weights {
    None,
    PerHead(DType),
    Mean(DType),
}

/// Outputs of another library, and their tolerance.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    pub out: Option<(Vec<f64>, Tolerance)>,
    pub lse: Option<(Vec<f64>, Tolerance)>,
    /// Weights of every head.
    pub weights: Option<(Vec<f64>, Tolerance)>,
    /// Weights averaged over heads.
    pub mean_weights: Option<(Vec<f64>, Tolerance)>,
}

/// An attention problem.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub shape: Shape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    /// The vector of additive scores, `[heads, hidden]` or `[hidden]`.
    pub score_vector: Option<Vec<f32>>,
    pub rules: Rules,
    pub dropout: Option<DropoutData>,
    pub expected: Expected,
}

impl Case {
    /// Returns random data, the same for the same name.
    pub fn random(name: impl Into<String>, shape: Shape) -> Self {
        let name = name.into();
        let mut rng = Rng::named(&name);
        let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let (q, k, v) = (normals(shape.q()), normals(shape.k()), normals(shape.v()));
        Case {
            name,
            shape,
            q,
            k,
            v,
            scale: None,
            softcap: None,
            score_vector: None,
            rules: Rules::default(),
            dropout: None,
            expected: Expected::default(),
        }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Returns the case with inputs as `dtype` and the bias as `bias` stores them.
    pub fn stored(&self, dtype: DType, bias: DType) -> Self {
        Case {
            q: stored(&self.q, dtype),
            k: stored(&self.k, dtype),
            v: stored(&self.v, dtype),
            score_vector: self.score_vector.as_ref().map(|v| stored(v, dtype)),
            rules: self.rules.stored(bias),
            ..self.clone()
        }
    }

    pub fn options(&self) -> Options<'_> {
        Options::new()
            .scale(self.scale)
            .softcap(self.softcap)
            .mask(self.rules.host())
            .dropout(self.dropout.as_ref().map(DropoutData::host))
            .weights(true)
    }

    /// Returns the factor of `q·k`.
    pub fn scale_value(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.shape.head_dim as f64).sqrt())
    }

    pub fn reference<R: Real>(&self) -> Attended<R> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| widen::<R>(x));
        let options = self.options();
        let attended = match &self.score_vector {
            Some(vector) => reference::additive_attention(&q, &k, &v, &widen(vector), self.shape, &options),
            None => reference::attention(&q, &k, &v, self.shape, &options),
        };
        attended.expect("the case fits the reference")
    }

    /// Returns scaled products of queries and keys, or additive scores.
    pub fn scores(&self) -> Vec<f64> {
        if let Some(vector) = &self.score_vector {
            let [q, k, vector] = [&self.q, &self.k, vector].map(|x| widen(x));
            return reference::additive_scores(&q, &k, &vector, self.shape).expect("it fits");
        }
        let scale = self.scale_value();
        reference::scores(&widen(&self.q), &widen(&self.k), self.shape, scale).expect("it fits")
    }

    /// Returns the largest finite score before the softmax.
    pub fn largest_score(&self) -> f64 {
        let scores = self.scores();
        let part = |part: &Option<HostData<f32>>| {
            let all = part.iter().flat_map(|b| &b.data).map(|b| f64::from(*b));
            largest(all.filter(|b| b.abs() < HIDES))
        };
        let Rules { bias, slopes, relative, sinks, .. } = &self.rules;
        let offsets = self.rules.query_offsets.iter().flat_map(|part| &part.data);
        let constant =
            if let Alignment::Offset(n) = self.rules.alignment { n.unsigned_abs() as f64 } else { 0.0 };
        let offset = offsets.fold(constant, |most, n| most.max(f64::from((*n).min(1 << 29))));
        let furthest = (self.shape.q_len + self.shape.kv_len) as f64 + offset;
        largest(scores) + part(bias) + part(slopes) * furthest + part(relative) + part(sinks)
    }

    /// Returns the expected results of a run that stores `out` as `dtype`. Call it on the result of
    /// [`Case::stored`].
    pub fn truth(&self, dtype: DType, weights: Weights) -> Truth {
        self.truth_beside(self.reference::<f32>(), dtype, weights)
    }

    /// The same for matrix units, which multiply f16: operands and weights are rounded to f16.
    pub fn truth_of_halves(&self, dtype: DType, weights: Weights) -> Truth {
        let halves = Case { rules: self.rules.clone(), ..self.stored(DType::F16, DType::F32) };
        let mut naive = halves.reference::<f32>();
        let probabilities = naive.weights.clone().expect("asked for");
        let Shape { heads, kv_heads, q_len, kv_len, value_dim, .. } = self.shape;
        for (row, out) in naive.out.chunks_exact_mut(value_dim).enumerate() {
            let head = row / q_len;
            let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let weights = &probabilities[row * kv_len..][..kv_len];
            out.fill(0.0);
            for (j, weight) in weights.iter().enumerate().filter(|(_, w)| **w != 0.0) {
                let weight = f16::from_f32(*weight).to_f32();
                let values = &halves.v[(kv_head * kv_len + j) * value_dim..][..value_dim];
                // A value may be infinite if its weight rounds to zero.
                let values = values.iter().map(|v| if weight == 0.0 { 0.0 } else { *v });
                out.iter_mut().zip(values).for_each(|(sum, v)| *sum += weight * v);
            }
        }
        self.truth_beside(naive, dtype, weights)
    }

    /// Returns the expected results, with a tolerance from a naive result.
    fn truth_beside(&self, naive: Attended<f32>, dtype: DType, weights: Weights) -> Truth {
        let exact = self.reference::<f64>();
        let factor = self.dropout.as_ref().map_or(1.0, DropoutData::factor);
        let values = largest(self.v.iter().map(|v| f64::from(*v)));
        // The naive result includes the one rounding to f16 at the end, so the floor stays that of
        // f32.
        let out = Judged::new(&widened(&naive.out, dtype), exact.out, values * factor);
        let lse = in_f32(exact.lse);
        let lse = Judged::new(&widened(&naive.lse, DType::F32), lse, self.largest_score() + 1.0);
        let Shape { batch, heads, .. } = self.shape;
        let per_head = naive.weights.expect("asked for");
        let exact_weights = exact.weights.expect("asked for");
        let weights = match weights {
            Weights::None => None,
            Weights::PerHead(d) => Some(Judged::new(&widened(&per_head, d), exact_weights, factor)),
            Weights::Mean(d) => Some(Judged::new(
                &widened(&average_heads(&per_head, batch, heads).expect("it fits"), d),
                average_heads(&exact_weights, batch, heads).expect("it fits"),
                factor,
            )),
        };
        Truth { out, lse, weights }
    }
}

/// A bias of at least this size hides a key if other keys are visible. As a score, it would permit
/// any error of the others.
pub const HIDES: f64 = 1e30;

/// Rounds the lse of rows that have only such biases to f32.
pub fn in_f32(lse: Vec<f64>) -> Vec<f64> {
    lse.into_iter().map(|x| if x.abs() < HIDES { x } else { f64::from(x as f32) }).collect()
}

/// Rounds a result of f32 arithmetic to `dtype`.
pub fn widened(x: &[f32], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F16 => x.iter().map(|x| f16::from_f32(*x).to_f64()).collect(),
        DType::BF16 => x.iter().map(|x| bf16::from_f32(*x).to_f64()).collect(),
        _ => x.iter().map(|x| f64::from(*x)).collect(),
    }
}

/// Returns the largest absolute value of the finite elements.
pub fn largest(x: impl IntoIterator<Item = f64>) -> f64 {
    x.into_iter().filter(|x| x.is_finite()).fold(0.0, |m, x| m.max(x.abs()))
}

/// The expected results of a run.
#[derive(Clone, Debug)]
pub struct Truth {
    pub out: Judged,
    pub lse: Judged,
    pub weights: Option<Judged>,
}

/// The expected values of one output, and their tolerance.
#[derive(Clone, Debug)]
pub struct Judged {
    pub want: Vec<f64>,
    pub tolerance: Tolerance,
}

impl Judged {
    /// Allows twice the naive error and the floor of f32 for terms of `magnitude`.
    pub fn new(naive: &[f64], want: Vec<f64>, magnitude: f64) -> Self {
        let tolerance = Tolerance::from_naive(naive, &want, magnitude, EPSILON_F32);
        Judged { want, tolerance }
    }

    /// Judges a gradient in tensors of `dtype`. The tolerance is three times the naive error, plus
    /// the f32 floor for sums of terms of up to `magnitude`. The call may have added the gradient
    /// to `before`.
    pub fn gradient(
        [exact, naive]: [Vec<f64>; 2],
        before: Option<&[f32]>,
        dtype: DType,
        magnitude: f64,
    ) -> Self {
        let added = |x: Vec<f64>| -> Vec<f64> {
            let before = |n: usize| before.map_or(0.0, |before| f64::from(before[n]));
            x.into_iter().enumerate().map(|(n, x)| x + before(n)).collect()
        };
        let want = added(exact);
        let naive: Vec<f32> = added(naive).into_iter().map(|x| x as f32).collect();
        let tolerance = Tolerance::gradient(&widened(&naive, dtype), &want, magnitude, EPSILON_F32);
        Judged { want, tolerance }
    }

    /// Returns the error over the tolerance, or a message about the mismatch.
    pub fn judge(&self, got: &[f64]) -> Result<f64, String> {
        // A NaN or infinite naive result of a finite exact one would permit everything.
        if !self.tolerance.absolute.is_finite() {
            return Err(format!("tolerance {} tests nothing", self.tolerance.absolute));
        }
        let difference = compare(got, &self.want, self.tolerance).map_err(|e| e.to_string())?;
        Ok(difference.absolute / self.tolerance.absolute.max(f64::MIN_POSITIVE))
    }
}
