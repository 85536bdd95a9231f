//! The indexer of sparse attention: cases, their expected results, and runs.

use wgpu_attention::reference::{
    IndexerGradients, IndexerInputs, Real, indexer_backward, indexer_indices, indexer_scatter,
    indexer_scores, widen,
};
use wgpu_attention::selected::{Indexer, IndexerBackward, IndexerForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Scratch, Shape};

use super::case::{Judged, Rules, largest, widened};
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed, PlacedRules};

/// A problem of an indexer. `heads` of the shape are those of the queries.
#[derive(Clone, Debug)]
pub struct IndexerCase {
    pub name: String,
    pub shape: Shape,
    pub rules: Rules,
    pub scale: f64,
    pub selected: usize,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub w: Vec<f32>,
    /// `[batch, q_len, kv_len]`.
    pub d_scores: Vec<f32>,
    /// True if sums in f32 are exact.
    pub exact: bool,
}

/// The device, target, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct IndexerSetup {
    pub profile: &'static Profile,
    pub form: Target,
    /// The types of queries and keys, and of weights, values and `d_scores`.
    pub dtypes: [DType; 2],
    /// The type of gradients: F32, or that of each input.
    pub wide_gradients: bool,
    pub layout: Layout,
    /// The channels with one scale, for keys of 8 bits.
    pub group: Option<usize>,
}

impl std::fmt::Display for IndexerSetup {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let IndexerSetup { profile, form, dtypes, wide_gradients, layout, group } = self;
        write!(
            f,
            "{}, {form:?}, {dtypes:?}, wide gradients {wide_gradients}, {layout:?}, groups of {group:?}",
            profile.name
        )
    }
}

fn refused(error: wgpu_attention::Error) -> String {
    error.to_string()
}

/// Keys of 8 bits: words of four integers, scales, and the values of the keys.
struct Quantised {
    words: Vec<u32>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

fn quantised(k: &[f32], group: usize, dtype: DType) -> Quantised {
    let (mut integers, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for part in k.chunks_exact(group) {
        let most = part.iter().fold(0f32, |most, x| most.max(x.abs())).max(1e-3);
        let scale = stored(&[most / 127.0], dtype)[0];
        for x in part {
            let n = (x / scale).round().clamp(-128.0, 127.0);
            integers.push(n as i8 as u8);
            values.push(n * scale);
        }
        scales.push(scale);
    }
    let words = integers.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    Quantised { words, scales, values }
}

impl IndexerCase {
    pub fn random(name: impl Into<String>, shape: Shape, rules: Rules, selected: usize) -> Self {
        let name = name.into();
        let mut rng = Rng::named(&name);
        let Shape { batch, heads, q_len, kv_len, head_dim, .. } = shape;
        let q = rng.normals(batch * heads * q_len * head_dim);
        let k = rng.normals(batch * kv_len * head_dim);
        let w = rng.normals(batch * q_len * heads);
        let d_scores = rng.normals(batch * q_len * kv_len);
        let scale = 1.0 / (head_dim as f64).sqrt();
        IndexerCase { name, shape, rules, scale, selected, q, k, w, d_scores, exact: false }
    }

    /// Returns the case with small multiples of 1/4, of which many scores are equal.
    pub fn with_ties(mut self) -> Self {
        for x in [&mut self.q, &mut self.k, &mut self.w].into_iter().flatten() {
            *x = (*x * 2.0).round().clamp(-3.0, 3.0) / 4.0;
        }
        (self.scale, self.exact) = (1.0, true);
        self
    }

    /// Returns the case with inputs rounded to the types of a run.
    pub fn stored(&self, setup: &IndexerSetup) -> Self {
        let [own, other] = setup.dtypes;
        let k = match setup.group {
            Some(group) => quantised(&self.k, group, other).values,
            None => stored(&self.k, own),
        };
        IndexerCase {
            q: stored(&self.q, own),
            k,
            w: stored(&self.w, other),
            d_scores: stored(&self.d_scores, other),
            exact: self.exact && setup.group.is_none(),
            ..self.clone()
        }
    }

    /// Returns the case with the absolute values of all numbers.
    fn absolute(&self) -> Self {
        let mut case = self.clone();
        case.scale = case.scale.abs();
        let lists = [&mut case.q, &mut case.k, &mut case.w, &mut case.d_scores];
        lists.into_iter().flatten().for_each(|x| *x = x.abs());
        case
    }

    fn with_inputs<R: Real, T>(&self, f: impl FnOnce(&IndexerInputs<R>) -> T) -> T {
        let (q, k, w) = (widen::<R>(&self.q), widen::<R>(&self.k), widen::<R>(&self.w));
        // The kernel has the factor in f32.
        let scale = f64::from(self.scale as f32);
        f(&IndexerInputs { q: &q, k: &k, w: &w, scale, mask: self.rules.host() })
    }

    pub fn scores<R: Real>(&self) -> Vec<R> {
        self.with_inputs(|inputs| indexer_scores(inputs, self.shape).expect("it fits"))
    }

    pub fn gradients<R: Real>(&self, d_scores: &[f32]) -> IndexerGradients<R> {
        let d_scores = widen::<R>(d_scores);
        self.with_inputs(|inputs| indexer_backward(inputs, self.shape, &d_scores).expect("it fits"))
    }

    fn indices<R: Real>(&self, scores: &[R]) -> Vec<u32> {
        indexer_indices(scores, self.shape.kv_len, self.selected).expect("it fits")
    }

    fn operator(setup: &IndexerSetup) -> Indexer {
        let options = KernelOptions::new().target(setup.form);
        Indexer::with_pipelines(setup.profile.gpu.pipelines()).kernel_options(options)
    }

    fn shapes(&self) -> [[usize; 4]; 5] {
        let Shape { batch, heads, q_len, kv_len, head_dim, .. } = self.shape;
        [
            [batch, heads, q_len, head_dim],
            [batch, 1, kv_len, head_dim],
            [batch, 1, q_len, heads],
            [batch, 1, q_len, self.selected],
            [batch, 1, q_len, kv_len],
        ]
    }

    /// Places the inputs, and calls `run` with a call that requests nothing. `whole` is the case
    /// before rounding.
    fn placed<T>(&self, whole: &Self, setup: &IndexerSetup, run: impl FnOnce(IndexerForward) -> T) -> T {
        let IndexerSetup { profile, dtypes: [own, other], layout, group, .. } = *setup;
        let [of_q, of_k, of_w, ..] = self.shapes();
        let floats = |x: &[f32], dtype, place| Placed::input(profile, Values::Floats(x), dtype, place);
        let groups = self.shape.head_dim / group.unwrap_or(1);
        let words = [of_k[0], 1, of_k[2], of_k[3] / 4];
        let [q_at, k_at, w_at, words_at, scales_at] =
            layout.places([of_q, of_k, of_w, words, [of_k[0], 1, of_k[2], groups]]);
        let (q, w) = (floats(&self.q, own, q_at), floats(&self.w, other, w_at));
        let rules = PlacedRules::new(profile, &self.rules, DType::F32, layout);
        let (k, scales) = match group {
            None => (floats(&self.k, own, k_at), None),
            Some(group) => {
                let keys = quantised(&whole.k, group, other);
                let words = Placed::input(profile, Values::Numbers(&keys.words), DType::U32, words_at);
                (words, Some(floats(&keys.scales, other, scales_at)))
            }
        };
        let call = IndexerForward::new(q.view(), k.view(), w.view())
            .key_scales(scales.as_ref().map(Placed::view))
            .scale(self.scale as f32)
            .mask(rules.mask());
        run(call)
    }

    /// Runs a call with all outputs, and a call with the indices alone. Judges both.
    pub async fn forward_async(&self, setup: &IndexerSetup) -> Result<f64, String> {
        let IndexerSetup { profile, dtypes: [_, other], layout, .. } = *setup;
        profile.tidy();
        let case = self.stored(setup);
        let [.., list, matrix] = self.shapes();
        let [indices_at, values_at, scores_at] = layout.places([list, list, matrix]);
        let indices = Placed::output(profile, DType::U32, indices_at);
        let again = Placed::output(profile, DType::U32, indices_at);
        let values = Placed::output(profile, other, values_at);
        let scores = Placed::output(profile, DType::F32, scores_at);
        let operator = Self::operator(setup);
        case.placed(self, setup, |call| {
            let gpu = &profile.gpu;
            let all = call.indices(indices.view()).values(values.view()).scores(scores.view());
            for call in [all, call.indices(again.view())] {
                let size = operator.scratch_size(&call).map_err(refused)?;
                let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
                gpu.submit(|e| operator.forward(e, &call, &mut scratch)).map_err(refused)?;
            }
            Ok::<_, String>(())
        })?;
        let got = scores.download_async("scores", profile).await?;
        let (exact, naive) = (case.scores::<f64>(), case.scores::<f32>());
        let magnitude = largest(case.absolute().scores::<f64>().into_iter().filter(|x| x.is_finite()));
        let judged = Judged::new(&widened(&naive, DType::F32), exact.clone(), magnitude);
        let ratio = judged.judge(&got).map_err(|e| format!("scores: {e}"))?;
        if case.exact && got != exact {
            return Err("exact sums differ".into());
        }
        // The order must be that of the kernel's scores, whose bits do not depend on the outputs.
        let want = self.indices(&got);
        for (name, placed) in [("indices", &indices), ("indices alone", &again)] {
            let got = placed.download_async(name, profile).await?;
            if let Some(n) = (0..want.len()).find(|n| got.get(*n) != Some(&f64::from(want[*n]))) {
                return Err(format!("{name}: element {n} is {:?}, not {}", got.get(n), want[n]));
            }
        }
        let of_values = values.download_async("values", profile).await?;
        let at = |(n, j): (usize, &u32)| match *j {
            u32::MAX => f32::NEG_INFINITY,
            j => got[n / self.selected * self.shape.kv_len + j as usize] as f32,
        };
        let want: Vec<f32> = want.iter().enumerate().map(at).collect();
        let want = widened(&want, other);
        if of_values != want {
            return Err(format!("values: {of_values:?}, not {want:?}"));
        }
        Ok(ratio)
    }

    /// The lists of a backward call: the best keys, a key twice, an index past the end, and none.
    pub fn lists(&self) -> (Vec<u32>, Vec<f32>) {
        let (mut indices, k) = (self.indices(&self.scores::<f64>()), self.selected);
        let kv_len = self.shape.kv_len as u32;
        for (n, row) in indices.chunks_exact_mut(k).enumerate() {
            row[n % k] = [row[0], kv_len, u32::MAX, n as u32 % kv_len][n % 4];
        }
        let d_scores = Rng::named(&format!("{} lists", self.name)).normals(indices.len());
        (indices, d_scores)
    }

    /// Runs the backward pass with a matrix of gradients, or with lists.
    pub async fn backward_async(
        &self,
        setup: &IndexerSetup,
        listed: bool,
    ) -> Result<(f64, [Vec<f64>; 3]), String> {
        let IndexerSetup { profile, dtypes: [own, other], layout, wide_gradients, .. } = *setup;
        profile.tidy();
        let case = self.stored(setup);
        let [of_q, of_k, of_w, list, matrix] = self.shapes();
        let (indices, given) = case.lists();
        let given = stored(&given, other);
        let dense = if listed {
            indexer_scatter(&indices, &given, self.selected, self.shape.kv_len).expect("it fits")
        } else {
            case.d_scores.clone()
        };
        let [indices_at, list_at, matrix_at, q_at, k_at, w_at] =
            layout.places([list, list, matrix, of_q, of_k, of_w]);
        let placed = Placed::input(profile, Values::Numbers(&indices), DType::U32, indices_at);
        let d_scores = if listed { (&given, list_at) } else { (&dense, matrix_at) };
        let d_scores = Placed::input(profile, Values::Floats(d_scores.0), other, d_scores.1);
        let types = if wide_gradients { [DType::F32; 3] } else { [own, own, other] };
        let [d_q, d_k, d_w] = [(types[0], q_at), (types[1], k_at), (types[2], w_at)]
            .map(|(dtype, place)| Placed::output(profile, dtype, place));
        let operator = Self::operator(setup);
        case.placed(self, setup, |call| {
            let call = IndexerBackward::new(call, d_scores.view())
                .indices(listed.then(|| placed.view()))
                .d_q(d_q.view())
                .d_k(d_k.view())
                .d_w(d_w.view());
            let gpu = &profile.gpu;
            let size = operator.backward_scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
            gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)
        })?;
        let (exact, naive) = (case.gradients::<f64>(&dense), case.gradients::<f32>(&dense));
        let sizes: Vec<f32> = dense.iter().map(|x| x.abs()).collect();
        let sizes = case.absolute().gradients::<f64>(&sizes);
        let mut worst: f64 = 0.0;
        let mut all = [const { Vec::new() }; 3];
        let tensors = [
            ("d_q", &d_q, exact.d_q, naive.d_q, sizes.d_q),
            ("d_k", &d_k, exact.d_k, naive.d_k, sizes.d_k),
            ("d_w", &d_w, exact.d_w, naive.d_w, sizes.d_w),
        ];
        for (n, (name, placed, exact, naive, sizes)) in tensors.into_iter().enumerate() {
            all[n] = placed.download_async(name, profile).await?;
            let judged = Judged::gradient([exact, widen(&naive)], None, types[n], largest(sizes));
            worst = worst.max(judged.judge(&all[n]).map_err(|e| format!("{name}: {e}"))?);
        }
        Ok((worst, all))
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl IndexerCase {
    /// Like `forward_async`, blocking.
    pub fn forward(&self, setup: &IndexerSetup) -> Result<f64, String> {
        pollster::block_on(self.forward_async(setup))
    }

    /// Like `backward_async`, blocking.
    pub fn backward(&self, setup: &IndexerSetup, listed: bool) -> Result<(f64, [Vec<f64>; 3]), String> {
        pollster::block_on(self.backward_async(setup, listed))
    }
}

/// A shape of an indexer.
pub fn indexer_shape([batch, heads, q_len, kv_len, head_dim]: [usize; 5]) -> Shape {
    Shape { batch, heads, kv_heads: 1, q_len, kv_len, head_dim, value_dim: head_dim }
}
