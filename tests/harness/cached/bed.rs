//! A cache on a device and its model: both move together, and the model judges the cache.

use wgpu_attention::cache::{Append, CacheStorage, Keep, Tokens};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, Cache, Config, DType, Error, Forward, KernelOptions, Scratch, ScratchSize, Shape, TensorView,
};

use super::model::{Count, Data, Kind, Sequence, Token};
use crate::harness::case::{Case, HostData, Judged, Rules, Weights};
use crate::harness::device::Profile;
use crate::harness::meaning;
use crate::harness::memory::{Place, Values, stored};
use crate::harness::random::Rng;
use crate::harness::run::{Got, Layout, Placed, PlacedRules};

impl Count {
    /// Calls `f` with the rows. Device counts are in a buffer.
    pub fn with<T>(&self, profile: &Profile, f: impl FnOnce(Tokens) -> T) -> T {
        match self {
            Count::All(n) => f(Tokens::All(*n)),
            Count::Each(counts) => f(Tokens::Each(counts)),
            Count::Device { counts, most } => {
                let place = Place::nested([counts.len(), 1, 1, 1], [0, 1, 2, 3], [0; 4], 2, 5);
                let placed = Placed::input(profile, Values::Numbers(counts), DType::U32, place);
                f(Tokens::Device { counts: placed.view(), most: *most })
            }
        }
    }
}

/// An attention call on the cache.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub layer: usize,
    pub form: Target,
    pub dtype: DType,
    /// The type of tensors that are added to scores.
    pub bias: DType,
    pub splits: Option<usize>,
    /// Queries of every sequence. `None`: as many as the last advance added.
    pub rows: Option<usize>,
    pub rules: &'a Rules,
    pub softcap: Option<f64>,
    pub layout: Layout,
    pub lse: bool,
}

impl<'a> Ask<'a> {
    pub fn new(form: Target, rules: &'a Rules) -> Self {
        Ask {
            layer: 0,
            form,
            dtype: DType::F32,
            bias: DType::F32,
            splits: None,
            rows: None,
            rules,
            softcap: None,
            layout: Layout::Dense,
            lse: true,
        }
    }
}

/// A cache and its model.
pub struct Bed {
    pub profile: &'static Profile,
    pub kind: Kind,
    pub data: Data,
    pub cache: Cache,
    pub sequences: Vec<Sequence>,
    /// The most rows of the last advance.
    pub advanced: usize,
    /// The type of keys and values, and their layout.
    pub dtype: DType,
    pub layout: Layout,
    /// True if new tokens are NaN. A rewind must remove them before any attention call.
    pub bad: bool,
    pub rng: Rng,
}

impl Bed {
    pub fn new(profile: &'static Profile, kind: Kind, data: Data, seed: u64) -> Self {
        profile.tidy();
        let cache = Cache::with_pipelines(profile.gpu.pipelines(), kind.config()).expect("a cache");
        Bed {
            profile,
            kind,
            data,
            cache,
            sequences: vec![Sequence::default(); kind.batch],
            advanced: 0,
            dtype: DType::F32,
            layout: Layout::Dense,
            bad: false,
            rng: Rng::new(seed),
        }
    }

    pub fn scratch(&self) -> Scratch {
        Scratch::new(self.profile.gpu.device(), ScratchSize::default()).expect("scratch")
    }

    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.profile.gpu.device().create_command_encoder(&Default::default())
    }

    pub fn submit(&self, encoder: wgpu::CommandEncoder) {
        self.profile.gpu.queue().submit([encoder.finish()]);
    }

    /// Draws tokens with data for every layer.
    fn draw(&mut self) -> Vec<Token> {
        (0..self.kind.layers).map(|_| self.draw_token()).collect()
    }

    /// Draws the keys and values of a token in one layer.
    pub(super) fn draw_token(&mut self) -> Token {
        let Kind { kv_heads, head_dim, value_dim, .. } = self.kind;
        let (data, dtype, [keys, values]) = (self.data, self.dtype, self.kind.storages());
        let mut side = |storage, dim| -> Vec<f32> {
            (0..kv_heads).flat_map(|_| stored(&data.row(&mut self.rng, storage, dim), dtype)).collect()
        };
        Token { k: side(keys, head_dim), v: side(values, value_dim) }
    }

    /// Advances the cache by `count` and appends new tokens to every layer.
    pub fn grow(&mut self, count: &Count) -> Result<(), Error> {
        let most = count.most();
        let mut encoder = self.encoder();
        let profile = self.profile;
        count.with(profile, |rows| self.cache.advance(&mut encoder, rows))?;
        self.advanced = most;
        let longest = self.kind.longest();
        for s in 0..self.kind.batch {
            let wanted = count.of(s);
            let stored = self.sequences[s].len() - self.sequences[s].removed;
            let fits = stored.saturating_add(wanted) <= longest;
            let n = if fits { wanted } else { 0 };
            let new: Vec<_> = (0..n).map(|_| self.draw()).collect();
            let sequence = &mut self.sequences[s];
            sequence.refused += u32::from(!fits);
            sequence.fresh = n;
            sequence.tokens.extend(new);
            sequence.high = sequence.high.max(sequence.len());
        }
        let held: Vec<_> = (0..self.kind.layers).map(|layer| self.place_new(layer)).collect();
        for (layer, [k, v]) in held.iter().enumerate() {
            self.cache.append(&mut encoder, layer, &Append::new(k.view(), v.view()))?;
        }
        self.submit(encoder);
        Ok(())
    }

    /// Places keys and values of the last advance. Rows past a sequence's count are NaN.
    fn place_new(&self, layer: usize) -> [Placed; 2] {
        let Kind { batch, kv_heads, head_dim, value_dim, .. } = self.kind;
        let rows = self.advanced;
        let shapes = [head_dim, value_dim].map(|dim| [batch, kv_heads, rows, dim]);
        let places = self.layout.places(shapes);
        [0, 1].map(|side| {
            let dim = shapes[side][3];
            let part = HostData::of(shapes[side], |[s, h, i, d]| {
                let Sequence { tokens, fresh, .. } = &self.sequences[s];
                if i >= *fresh {
                    return f32::NAN;
                }
                if self.bad {
                    return f32::NAN;
                }
                let token = &tokens[tokens.len() - fresh + i][layer];
                [&token.k, &token.v][side][h * dim + d]
            });
            Placed::input(self.profile, Values::Floats(&part.data), self.dtype, places[side])
        })
    }

    /// Moves the cache back by `count`.
    pub fn rewind(&mut self, count: &Count) -> Result<(), Error> {
        let mut encoder = self.encoder();
        let profile = self.profile;
        count.with(profile, |rows| self.cache.rewind(&mut encoder, rows))?;
        self.submit(encoder);
        self.advanced = 0;
        for (s, sequence) in self.sequences.iter_mut().enumerate() {
            let to = sequence.len() - count.of(s).min(sequence.len());
            if sequence.can_return_to(&self.kind, to) {
                sequence.return_to(&self.kind, to);
            } else {
                sequence.refused += 1;
            }
            sequence.fresh = 0;
        }
        Ok(())
    }

    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.cache.fork(from, to)?;
        if from != to {
            let copy = self.sequences[from].clone();
            let sequence = &mut self.sequences[to];
            (sequence.tokens, sequence.high, sequence.fresh) = (copy.tokens, copy.high, 0);
            (sequence.lost, sequence.removed) = (copy.lost, copy.removed);
        }
        Ok(())
    }

    /// Copies each sequence from its parent, in the cache and in the model.
    pub fn reorder(&mut self, parents: &[usize]) -> Result<(), Error> {
        let mut encoder = self.encoder();
        self.cache.reorder(&mut encoder, parents)?;
        self.submit(encoder);
        self.advanced = 0;
        let before = self.sequences.clone();
        for (sequence, parent) in self.sequences.iter_mut().zip(parents) {
            let Sequence { tokens, high, lost, removed, .. } = before[*parent].clone();
            (sequence.tokens, sequence.high, sequence.fresh) = (tokens, high, 0);
            (sequence.lost, sequence.removed) = (lost, removed);
        }
        Ok(())
    }

    /// Removes all tokens except those of `keep`, in the cache and in the model. Each layer and
    /// head of each sequence has a list of indices among its stored tokens. With `on_device` they
    /// are in tensors; otherwise all layers and heads have the first list.
    pub fn compact(&mut self, keep: &[Vec<Vec<Vec<usize>>>], on_device: bool) -> Result<(), Error> {
        let Kind { batch, kv_heads, layers, .. } = self.kind;
        let mut encoder = self.encoder();
        if on_device {
            let n = keep[0][0][0].len();
            let place = Place::nested([batch, kv_heads, 1, n], [0, 1, 2, 3], [0; 4], 2, 3);
            let placed: Vec<_> = (0..layers)
                .map(|layer| {
                    let of = |s: usize| keep[s][layer].iter().flatten().map(|t| *t as u32);
                    let numbers: Vec<u32> = (0..batch).flat_map(of).collect();
                    Placed::input(self.profile, Values::Numbers(&numbers), DType::U32, place)
                })
                .collect();
            let views: Vec<_> = placed.iter().map(Placed::view).collect();
            self.cache.compact(&mut encoder, Keep::Device(&views))?;
        } else {
            let lists: Vec<&[usize]> = keep.iter().map(|lists| &lists[0][0][..]).collect();
            self.cache.compact(&mut encoder, Keep::Each(&lists))?;
        }
        self.submit(encoder);
        self.advanced = 0;
        for (sequence, lists) in self.sequences.iter_mut().zip(keep) {
            sequence.fresh = 0;
            for (layer, head) in (0..layers).flat_map(|layer| (0..kv_heads).map(move |head| (layer, head))) {
                let list = if on_device { &lists[layer][head] } else { &lists[0][0] };
                let positions = (0..sequence.len()).map(|position| [layer, head, position]);
                let stored: Vec<_> = positions.filter(|token| !sequence.lost.contains(token)).collect();
                let kept: Vec<_> = list.iter().map(|index| stored[*index]).collect();
                sequence.lost.extend(stored.into_iter().filter(|token| !kept.contains(token)));
            }
            sequence.removed = sequence.len() - lists[0][0].len();
        }
        Ok(())
    }

    pub fn flush(&mut self) {
        let mut encoder = self.encoder();
        self.cache.flush(&mut encoder).expect("a recording");
        self.submit(encoder);
    }

    /// Reads a view of the cache's sequence table, one number per sequence.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn numbers(&self, view: TensorView) -> Vec<u32> {
        pollster::block_on(self.numbers_async(view))
    }

    async fn numbers_async(&self, view: TensorView<'_>) -> Vec<u32> {
        let [stride, ..] = view.strides();
        let words = view.offset() + (self.kind.batch - 1) * stride + 1;
        let table: Vec<u32> =
            self.profile.gpu.download_async(view.buffer(), words).await.expect("a read-back");
        (0..self.kind.batch).map(|s| table[view.offset() + s * stride]).collect()
    }

    /// Checks that lengths and refusals on the device are the model's, and that the host's bounds
    /// contain the lengths.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_sequence_table(&self) -> Result<(), String> {
        pollster::block_on(self.check_book_async())
    }

    /// Like [`check_sequence_table`](Self::check_sequence_table), not blocking.
    pub async fn check_book_async(&self) -> Result<(), String> {
        let want = |f: fn(&Sequence) -> u32| self.sequences.iter().map(f).collect::<Vec<_>>();
        let lengths = self.numbers_async(self.cache.lengths()).await;
        let wanted = want(|s| s.len() as u32);
        if lengths != wanted {
            return Err(format!("lengths {lengths:?} on the device, not {wanted:?}"));
        }
        let refusals = self.numbers_async(self.cache.refusals()).await;
        let wanted = want(|s| s.refused);
        if refusals != wanted {
            return Err(format!("refusals {refusals:?} on the device, not {wanted:?}"));
        }
        for (s, sequence) in self.sequences.iter().enumerate() {
            let [least, most] = self.cache.len_bounds(s).expect("a sequence");
            if !(least..=most).contains(&sequence.len()) {
                return Err(format!("{} tokens of {s} are not in {least}..={most}", sequence.len()));
            }
        }
        Ok(())
    }

    /// Returns the attention case of one sequence from the model's data, with queries `q`. The data
    /// is not rounded to the storage.
    fn case(&self, s: usize, q: Vec<f32>, ask: &Ask) -> Case {
        let Kind { heads, kv_heads, head_dim, value_dim, .. } = self.kind;
        let ring = self.kind.ring().map_or(0, |[sinks, _]| sinks);
        let sequence = &self.sequences[s];
        let len = sequence.len();
        let q_len = q.len() / (heads * head_dim);
        let shape = Shape { batch: 1, heads, kv_heads, q_len, kv_len: len, head_dim, value_dim };
        let side = |dim: usize, of: fn(&Token) -> &Vec<f32>| -> Vec<f32> {
            let row = |h: usize| {
                sequence.tokens.iter().flat_map(move |token| of(&token[ask.layer])[h * dim..][..dim].to_vec())
            };
            (0..kv_heads).flat_map(row).collect()
        };
        let rules = ask.rules.stored(ask.bias);
        // Queries see a ring's first tokens at any distance.
        let far = Rules { window: None, pattern: None, ..rules.clone() };
        let pairs = shape.weights();
        let keep = HostData::of(pairs, |[_, h, i, j]| {
            let rules = if j < ring { &far } else { &rules };
            let head = h / (heads / kv_heads);
            sequence.holds(&self.kind, [ask.layer, head, j]) && meaning::sees(rules, &shape, [s, h, i, j])
        });
        let bias = HostData::of(pairs, |[_, h, i, j]| meaning::adds(&rules, &shape, [s, h, i, j]));
        let sinks = rules
            .sinks
            .as_ref()
            .map(|part| HostData::of([1, heads, 1, 1], |[_, h, ..]| meaning::at(part, [s, h, 0, 0])));
        Case {
            name: format!("sequence {s}"),
            shape,
            q,
            k: side(head_dim, |t| &t.k),
            v: side(value_dim, |t| &t.v),
            scale: None,
            score_vector: None,
            softcap: ask.softcap,
            rules: Rules {
                attn_mask: Some(keep),
                bias: Some(bias),
                sinks,
                score_mod: rules.score_mod,
                mask_mod: rules.mask_mod,
                ..Default::default()
            },
            dropout: None,
            expected: Default::default(),
        }
    }

    /// Runs `ask` and judges every sequence by the model. Returns the largest error over tolerance.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn ask(&mut self, ask: &Ask) -> Result<f64, String> {
        pollster::block_on(self.ask_async(ask))
    }

    /// Like [`ask`](Self::ask), not blocking.
    pub async fn ask_async(&mut self, ask: &Ask<'_>) -> Result<f64, String> {
        let Kind { batch, heads, kv_heads, head_dim, value_dim, .. } = self.kind;
        let profile = self.profile;
        let rows = ask.rows.unwrap_or(self.advanced);
        let queries: Vec<usize> =
            self.sequences.iter().map(|s| if ask.rows.is_some() { rows } else { s.fresh }).collect();
        let shape = |heads, dim| [batch, heads, rows, dim];
        let drawn: Vec<f32> = stored(&self.rng.normals(batch * heads * rows * head_dim), ask.dtype);
        // Queries past a sequence's count are NaN.
        let mut q = HostData::new(drawn, shape(heads, head_dim));
        for (n, x) in q.data.iter_mut().enumerate() {
            let (s, i) = (n / (heads * rows * head_dim), n / head_dim % rows);
            *x = if i < queries[s] { *x * 0.5 } else { f32::NAN };
        }
        let [q_at, out_at, lse_at] = ask.layout.places([q.shape, shape(heads, value_dim), shape(heads, 1)]);
        let placed = Placed::input(profile, Values::Floats(&q.data), ask.dtype, q_at);
        let out = Placed::output(profile, ask.dtype, out_at);
        let lse = ask.lse.then(|| Placed::output(profile, DType::F32, lse_at));
        let rules = PlacedRules::new(profile, ask.rules, ask.bias, ask.layout);

        let config = Config::new(heads, head_dim)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .dtype(ask.dtype)
            .softcap(ask.softcap)
            .kernel_options(
                ask.splits.into_iter().fold(KernelOptions::new().target(ask.form), KernelOptions::splits),
            );
        let refused = |e: Error| format!("refused: {e}");
        let attention = Attention::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
        let mut call = Forward::with_cache(placed.view(), &self.cache, out.view())
            .layer(ask.layer)
            .mask(rules.mask())
            .lse(lse.as_ref().map(Placed::view));
        if ask.rows.is_some() {
            call = call.at_end();
        }
        let size = attention.scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
        let mut encoder = self.encoder();
        attention.forward(&mut encoder, &call, &mut scratch).map_err(refused)?;
        self.submit(encoder);
        let Got { out, lse, .. } = Got::read(profile, &out, lse.as_ref(), None).await?;

        let mut worst = 0f64;
        for (s, own) in queries.iter().enumerate() {
            let row = |h: usize, i: usize| (s * heads + h) * rows + i;
            // Rows that are not queries, and rows without a key.
            let seen = if self.sequences[s].len() == 0 { 0 } else { *own };
            for (h, i) in (0..heads).flat_map(|h| (seen..rows).map(move |i| (h, i))) {
                let nothing = ask.rules.sinks.as_ref().map_or(f64::NEG_INFINITY, |part| {
                    f64::from(stored(&[meaning::at(part, [s, h, 0, 0])], ask.bias)[0])
                });
                let zeros = out[row(h, i) * value_dim..][..value_dim].iter().all(|x| *x == 0.0);
                // The sink's logarithm of one may be off by one rounding.
                let near = |got: f64| got == nothing || (got - nothing).abs() <= 1e-6 * nothing.abs();
                if !zeros || lse.as_ref().is_some_and(|lse| !near(lse[row(h, i)])) {
                    return Err(format!("sequence {s}, head {h}: row {i} is not a query and not nothing"));
                }
            }
            if seen == 0 {
                continue;
            }
            let part = |dim: usize, x: &[f64], h: usize| x[row(h, 0) * dim..row(h, seen) * dim].to_vec();
            let narrow =
                (0..heads).flat_map(|h| q.data[row(h, 0) * head_dim..row(h, seen) * head_dim].to_vec());
            let case = self.case(s, narrow.collect(), ask);
            let got = (0..heads).flat_map(|h| part(value_dim, &out, h)).collect::<Vec<_>>();
            let got_lse =
                lse.as_ref().map(|lse| (0..heads).flat_map(|h| part(1, lse, h)).collect::<Vec<_>>());
            let ratio = self.judge(&case, ask, &got, got_lse.as_deref());
            worst = worst.max(ratio.map_err(|e| format!("sequence {s}, {}: {e}", self.sequences[s].len()))?);
        }
        Ok(worst)
    }

    /// Judges row by row, with twice the naive error, the floor and the effect of the storage's
    /// rounding.
    fn judge(&self, case: &Case, ask: &Ask, out: &[f64], lse: Option<&[f64]>) -> Result<f64, String> {
        let truth = case.truth(ask.dtype, Weights::None);
        let value_dim = case.shape.value_dim;
        let bounds = self.rounding(case);
        let rows = out.len() / value_dim;
        let mut worst = 0f64;
        for n in 0..rows {
            let [of_out, of_lse] = bounds.as_ref().map_or([0.0; 2], |bounds| bounds[n]);
            let judged = |judged: &Judged, range: std::ops::Range<usize>, more: f64| {
                let mut own = Judged { want: judged.want[range].to_vec(), ..judged.clone() };
                own.tolerance.absolute += more;
                own
            };
            let range = n * value_dim..(n + 1) * value_dim;
            let ratio = judged(&truth.out, range.clone(), of_out).judge(&out[range]);
            worst = worst.max(ratio.map_err(|e| format!("out, row {n}: {e}"))?);
            if let Some(lse) = lse {
                let ratio = judged(&truth.lse, n..n + 1, of_lse).judge(&lse[n..n + 1]);
                worst = worst.max(ratio.map_err(|e| format!("lse, row {n}: {e}"))?);
            }
        }
        Ok(worst)
    }

    /// Returns how far the storage's rounding may move each row of out and lse, or `None` if it is
    /// exact.
    ///
    /// No score moves by more than Δ = |scale| Σ |q_d| off(k_d). So lse moves by at most Δ, and
    /// weights stay within e^{±2Δ}.
    fn rounding(&self, case: &Case) -> Option<Vec<[f64; 2]>> {
        let exact = self.kind.hadamard.is_none()
            && self.kind.storages().iter().all(|storage| match storage {
                CacheStorage::F32 => true,
                CacheStorage::F16 | CacheStorage::BF16 => self.data == Data::Lossless,
                _ => false,
            });
        if exact {
            return None;
        }
        let Shape { heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = case.shape;
        let off = |x: &[f32], storage, dim: usize| -> Vec<f64> {
            x.chunks(dim).flat_map(|row| self.data.off(&self.kind, storage, row)).collect()
        };
        let [keys, values] = self.kind.storages();
        let (off_k, off_v) = (off(&case.k, keys, head_dim), off(&case.v, values, value_dim));
        let weights = case.reference::<f64>().weights.expect("asked for");
        let scale = case.scale_value().abs();
        let row = |n: usize| {
            let (h, _) = (n / q_len, n % q_len);
            let q = &case.q[n * head_dim..][..head_dim];
            let (mut delta, mut moved) = (0f64, 0f64);
            let mut values = vec![0f64; value_dim];
            for j in 0..kv_len {
                let weight = weights[n * kv_len + j];
                let key = h / (heads / kv_heads) * kv_len + j;
                let rounding = &off_k[key * head_dim..][..head_dim];
                // A weight of 0 belongs to a hidden key, or to a key that no rounding makes
                // visible.
                if weight > 0.0 {
                    let sum: f64 = q.iter().zip(rounding).map(|(q, off)| f64::from(q.abs()) * off).sum();
                    delta = delta.max(scale * sum);
                    for d in 0..value_dim {
                        values[d] += weight * f64::from(case.v[key * value_dim + d].abs());
                        moved = moved.max(off_v[key * value_dim + d]);
                    }
                }
            }
            let most = values.into_iter().fold(0.0, f64::max);
            [((2.0 * delta).exp() - 1.0) * most + moved, delta]
        };
        Some((0..heads * q_len).map(row).collect())
    }
}
