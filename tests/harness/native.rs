//! Native sparse attention: cases, their expected results, and runs.

use wgpu_attention::reference::{
    NativeSparseAttended, NativeSparseGradients, NativeSparseInputs, Real, native_sparse_attention,
    native_sparse_attention_backward, native_sparse_attention_backward_magnitudes, native_sparse_scores,
    widen,
};
use wgpu_attention::selected::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward,
};
use wgpu_attention::{Config, DType, KernelOptions, Scratch, Shape};

use super::case::{Judged, largest, widened};
use super::memory::{Values, stored, stored_error};
use super::operator_setup::OperatorSetup;
use super::random::Rng;
use super::run::Placed;

/// The gradients of a call, in the order of their tensors. Gradients of separate keys come last.
pub const GRADIENTS: [&str; 8] =
    ["d_q", "d_k", "d_v", "d_gates", "d_compressed k", "d_compressed v", "d_window k", "d_window v"];

/// The numbers of a configuration.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    pub compression: [usize; 2],
    pub selection: [usize; 2],
    pub always: [usize; 2],
    pub window: usize,
}

/// A problem of native sparse attention.
#[derive(Clone, Debug)]
pub struct NativeCase {
    pub name: String,
    pub shape: Shape,
    pub numbers: Numbers,
    pub softcap: Option<f64>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub gates: Vec<f32>,
    /// Separate keys and values.
    pub compressed: Option<[Vec<f32>; 2]>,
    pub window: Option<[Vec<f32>; 2]>,
    pub d_out: Vec<f32>,
}

/// The results of a run.
pub struct Ran {
    /// The largest error over tolerance.
    pub ratio: f64,
    pub out: Vec<f64>,
    /// The outputs of the branches.
    pub branches: Vec<f64>,
    pub indices: Vec<u32>,
}

fn refused(e: wgpu_attention::Error) -> String {
    format!("refused: {e}")
}

impl NativeCase {
    /// Returns a case with random inputs, and gates from 0 to 1.
    pub fn random(name: impl Into<String>, shape: Shape, numbers: Numbers) -> Self {
        let name = name.into();
        let mut rng = Rng::named(&name);
        let mut of = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let (q, k, v, d_out) = (of(shape.q()), of(shape.k()), of(shape.v()), of(shape.out()));
        let gates = of(Self::gates_shape(&shape)).into_iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        let [compressed, window] = [None, None];
        NativeCase { name, shape, numbers, softcap: None, q, k, v, gates, compressed, window, d_out }
    }

    /// Returns the case with own compressed keys, or own keys of the window.
    pub fn with_own(mut self, [compressed, window]: [bool; 2]) -> Self {
        let mut rng = Rng::named(&format!("{} keys", self.name));
        let mut of = |shape: Shape| [shape.k(), shape.v()].map(|s| rng.normals(s.iter().product()));
        self.compressed = compressed.then(|| of(self.compressed_shape()));
        self.window = window.then(|| of(self.shape));
        self
    }

    pub fn gates_shape(shape: &Shape) -> [usize; 4] {
        [shape.batch, shape.heads, shape.q_len, 3]
    }

    fn compressed_shape(&self) -> Shape {
        let config = self.config(DType::F32, KernelOptions::new());
        Shape { kv_len: config.compressed_len(self.shape.kv_len), ..self.shape }
    }

    pub fn config(&self, dtype: DType, options: KernelOptions) -> NativeSparseConfig {
        let Numbers { compression: [length, stride], selection: [block, count], always, window } =
            self.numbers;
        let config = Config::of(&self.shape).dtype(dtype).softcap(self.softcap).kernel_options(options);
        NativeSparseConfig::new(config)
            .compression(length, stride)
            .selection(block, count)
            .always(always[0], always[1])
            .window(window)
    }

    /// Returns the case with inputs rounded to the types of a run.
    fn stored(&self, setup: &OperatorSetup) -> Self {
        let of = |x: &Vec<f32>| stored(x, setup.dtype);
        let pair = |own: &Option<[Vec<f32>; 2]>| own.as_ref().map(|own| own.each_ref().map(of));
        NativeCase {
            q: of(&self.q),
            k: of(&self.k),
            v: of(&self.v),
            gates: stored(&self.gates, setup.gradient),
            compressed: pair(&self.compressed),
            window: pair(&self.window),
            d_out: of(&self.d_out),
            ..self.clone()
        }
    }

    /// The blocks of rows, as pairs of a row and its block.
    fn rows_of_blocks(&self) -> Vec<[usize; 2]> {
        let Shape { batch, kv_heads, kv_len, .. } = self.shape;
        let ([length, stride], blocks) = (self.numbers.compression, self.compressed_shape().kv_len);
        let mut all = Vec::new();
        for head in 0..batch * kv_heads {
            for row in 0..kv_len {
                let of_row = (0..blocks).filter(|c| (c * stride..c * stride + length).contains(&row));
                all.extend(of_row.map(|c| [head * kv_len + row, head * blocks + c]));
            }
        }
        all
    }

    /// The means that a device stores.
    fn means(&self, dtype: DType) -> [Vec<f32>; 2] {
        let shape = self.compressed_shape();
        let of = |x: &[f32], dim: usize, len: usize| {
            let mut means = vec![0f64; len];
            for [row, block] in self.rows_of_blocks() {
                for d in 0..dim {
                    means[block * dim + d] += f64::from(x[row * dim + d]);
                }
            }
            let length = self.numbers.compression[0] as f64;
            stored(&means.into_iter().map(|x| (x / length) as f32).collect::<Vec<_>>(), dtype)
        };
        let Shape { head_dim, value_dim, .. } = shape;
        [
            of(&self.k, head_dim, shape.k().iter().product()),
            of(&self.v, value_dim, shape.v().iter().product()),
        ]
    }

    /// Calls `f` with the inputs of the reference. Means of half types are inputs, because a device
    /// rounds them.
    fn with_inputs<R: Real, T>(&self, dtype: DType, f: impl FnOnce(&NativeSparseInputs<R>, &[R]) -> T) -> T {
        let [q, k, v, gates, d_out] =
            [&self.q, &self.k, &self.v, &self.gates, &self.d_out].map(|x| widen::<R>(x));
        let pair = |own: &[Vec<f32>; 2]| own.each_ref().map(|x| widen::<R>(x));
        let compressed = match &self.compressed {
            Some(own) => Some(pair(own)),
            None => (dtype != DType::F32).then(|| pair(&self.means(dtype))),
        };
        let window = self.window.as_ref().map(pair);
        let inputs = NativeSparseInputs {
            q: &q,
            k: &k,
            v: &v,
            gates: &gates,
            compressed: compressed.as_ref().map(|[k, v]| [k.as_slice(), v.as_slice()]),
            window: window.as_ref().map(|[k, v]| [k.as_slice(), v.as_slice()]),
        };
        f(&inputs, &d_out)
    }

    fn attended<R: Real>(&self, dtype: DType, indices: &[u32]) -> NativeSparseAttended<R> {
        let config = self.config(dtype, KernelOptions::new());
        self.with_inputs(dtype, |inputs, _| {
            native_sparse_attention(inputs, indices, self.shape, &config).expect("it fits")
        })
    }

    /// Gradients in the order of [`GRADIENTS`], or the sums of the absolute values of their terms.
    fn gradients<R: Real>(&self, dtype: DType, indices: &[u32], magnitudes: bool) -> Vec<Vec<R>> {
        let config = self.config(dtype, KernelOptions::new());
        let of = if magnitudes {
            native_sparse_attention_backward_magnitudes
        } else {
            native_sparse_attention_backward
        };
        let all: NativeSparseGradients<R> = self.with_inputs(dtype, |inputs, d_out| {
            of(inputs, indices, d_out, self.shape, &config).expect("it fits")
        });
        let (mut d_k, mut d_v) = (all.d_k, all.d_v);
        let [mut of_compressed, of_window] = [all.d_compressed, all.d_window].map(Option::unwrap_or_default);
        if self.compressed.is_none() && dtype != DType::F32 {
            // The gradients of means that are inputs of the reference only.
            let length = R::of(self.numbers.compression[0] as f64);
            let Shape { head_dim, value_dim, .. } = self.shape;
            for [row, block] in self.rows_of_blocks() {
                for (sums, terms, dim) in
                    [(&mut d_k, &of_compressed[0], head_dim), (&mut d_v, &of_compressed[1], value_dim)]
                {
                    for d in 0..dim {
                        sums[row * dim + d] = sums[row * dim + d] + terms[block * dim + d] / length;
                    }
                }
            }
            of_compressed = Default::default();
        }
        let [c_k, c_v] = of_compressed;
        let [w_k, w_v] = of_window;
        vec![all.d_q, d_k, d_v, all.d_gates, c_k, c_v, w_k, w_v]
    }

    fn operator(&self, setup: &OperatorSetup) -> Result<NativeSparseAttention, String> {
        let config = self.config(setup.dtype, KernelOptions::new().target(setup.form));
        NativeSparseAttention::with_pipelines(setup.profile.gpu.pipelines(), config).map_err(refused)
    }

    fn place(&self, setup: &OperatorSetup) -> Tensors {
        let OperatorSetup { profile, dtype, gradient, layout, .. } = *setup;
        let shape = self.shape;
        let Shape { batch, heads, kv_heads, q_len, value_dim, .. } = shape;
        let rows = |dim| [3 * batch, heads, q_len, dim];
        let listed = [batch, kv_heads, q_len, self.numbers.selection[1]];
        let [q, k, v, out, gates] =
            layout.places([shape.q(), shape.k(), shape.v(), shape.out(), Self::gates_shape(&shape)]);
        let [branches, lse, indices] = layout.places([rows(value_dim), rows(1), listed]);
        let input = |x: &[f32], place| Placed::input(profile, Values::Floats(x), dtype, place);
        let pair = |own: &Option<[Vec<f32>; 2]>, shape: Shape| {
            let [k, v] = layout.places([shape.k(), shape.v()]);
            own.as_ref().map(|own| [input(&own[0], k), input(&own[1], v)])
        };
        Tensors {
            q: input(&self.q, q),
            k: input(&self.k, k),
            v: input(&self.v, v),
            gates: Placed::input(profile, Values::Floats(&self.gates), gradient, gates),
            compressed: pair(&self.compressed, self.compressed_shape()),
            window: pair(&self.window, shape),
            out: Placed::output(profile, dtype, out),
            branches: Placed::output(profile, dtype, branches),
            lse: Placed::output(profile, DType::F32, lse),
            indices: Placed::output(profile, DType::U32, indices),
        }
    }

    /// Checks that a device selected the best blocks. Scores may differ by rounding.
    fn check_indices(&self, dtype: DType, indices: &[u32]) -> Result<(), String> {
        let Shape { q_len, kv_len, .. } = self.shape;
        let [block, count] = self.numbers.selection;
        let config = self.config(dtype, KernelOptions::new());
        let exact =
            self.with_inputs::<f64, _>(dtype, |inputs, _| native_sparse_scores(inputs, self.shape, &config));
        let naive =
            self.with_inputs::<f32, _>(dtype, |inputs, _| native_sparse_scores(inputs, self.shape, &config));
        let (exact, naive) = (exact.expect("it fits"), naive.expect("it fits"));
        let apart = exact.iter().zip(&naive).map(|(x, y)| x - f64::from(*y)).filter(|x| x.is_finite());
        // A mean that lies between two stored numbers may be rounded to either.
        let tolerance = 2.0 * largest(apart) + 1e-6 + 4.0 * stored_error(dtype);
        let blocks = kv_len.div_ceil(block);
        for (n, (row, got)) in exact.chunks(blocks).zip(indices.chunks(count)).enumerate() {
            let own = (kv_len - q_len + n % q_len) / block;
            let mut listed: Vec<usize> =
                got.iter().filter(|j| **j != u32::MAX).map(|j| *j as usize).collect();
            let told = listed.len();
            listed.sort_unstable();
            listed.dedup();
            if told != listed.len() || told != count.min(own + 1) || listed.iter().any(|j| *j > own) {
                return Err(format!("row {n} selects {got:?}"));
            }
            let least = listed.iter().map(|j| row[*j]).fold(f64::INFINITY, f64::min);
            let better = (0..=own).find(|j| !listed.contains(j) && row[*j] > least + tolerance);
            if let Some(j) = better {
                return Err(format!("row {n} selects {got:?} and not {j}: scores {row:?}"));
            }
        }
        Ok(())
    }

    /// Runs the forward pass.
    pub async fn forward_async(&self, setup: &OperatorSetup) -> Result<Ran, String> {
        let OperatorSetup { profile, dtype, .. } = *setup;
        profile.tidy();
        let case = self.stored(setup);
        let tensors = case.place(setup);
        let (operator, call) = (case.operator(setup)?, tensors.call());
        let size = operator.scratch_size(&call).map_err(refused)?;
        let gpu = &profile.gpu;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.forward(e, &call, &mut scratch)).map_err(refused)?;
        let indices = tensors.indices(setup).await?;
        case.check_indices(dtype, &indices)?;
        let out = tensors.out.download_async("out", profile).await?;
        let branches = tensors.branches.download_async("branches", profile).await?;
        let lse = tensors.lse.download_async("lse", profile).await?;
        let (exact, naive) = (case.attended::<f64>(dtype, &indices), case.attended::<f32>(dtype, &indices));
        // A device stores the branches before their sum.
        let stored = naive.branches.each_ref().map(|x| widened(x, dtype));
        let gate = |n: usize, branch: usize| f64::from(case.gates[n / case.shape.value_dim * 3 + branch]);
        let sum = (0..naive.out.len()).map(|n| (0..3).map(|b| gate(n, b) * stored[b][n]).sum::<f64>() as f32);
        let sum: Vec<f32> = sum.collect();
        let values = largest([&case.v].into_iter().chain(case.own_values()).flatten().map(|v| f64::from(*v)));
        let judge = |name: &str, naive: &[f64], exact: Vec<f64>, size: f64, got: &[f64]| {
            Judged::new(naive, exact, size).judge(got).map_err(|e| format!("{name}: {e}"))
        };
        let mut ratio = judge("out", &widened(&sum, dtype), exact.out.clone(), values, &out)?;
        ratio = ratio.max(judge("branches", &stored.concat(), exact.branches.concat(), values, &branches)?);
        let of_lse = widened(&naive.lse.concat(), DType::F32);
        let finite = largest(exact.lse.concat().into_iter().filter(|x| x.is_finite()));
        ratio = ratio.max(judge("lse", &of_lse, exact.lse.concat(), finite + 1.0, &lse)?);
        Ok(Ran { ratio, out, branches, indices })
    }

    fn own_values(&self) -> impl Iterator<Item = &Vec<f32>> {
        [&self.compressed, &self.window].into_iter().flatten().map(|[_, v]| v)
    }

    /// Runs both passes. Returns the largest error over tolerance, and the gradients. Gradients of
    /// absent tensors are empty.
    pub async fn backward_async(&self, setup: &OperatorSetup) -> Result<(f64, Vec<Vec<f64>>), String> {
        let OperatorSetup { profile, dtype, gradient, layout, accumulates, .. } = *setup;
        profile.tidy();
        let case = self.stored(setup);
        let tensors = case.place(setup);
        let (operator, gpu, forward) = (case.operator(setup)?, &profile.gpu, tensors.call());
        let size = operator.scratch_size(&forward).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.forward(e, &forward, &mut scratch)).map_err(refused)?;
        let indices = tensors.indices(setup).await?;

        let (shape, compressed) = (case.shape, case.compressed_shape());
        let shapes = [
            shape.q(),
            shape.k(),
            shape.v(),
            Self::gates_shape(&shape),
            compressed.k(),
            compressed.v(),
            shape.k(),
            shape.v(),
        ];
        let wanted = |n: usize| match n {
            4 | 5 => case.compressed.is_some(),
            6 | 7 => case.window.is_some(),
            _ => true,
        };
        let places = layout.places(shapes);
        let before: Vec<Vec<f32>> = (0..8)
            .map(|n| stored(&Rng::new(n as u64).normals(shapes[n].iter().product()), gradient))
            .collect();
        let written: Vec<Option<Placed>> = (0..8)
            .map(|n| {
                wanted(n).then(|| Placed::gradient(profile, &before[n], (gradient, places[n]), accumulates))
            })
            .collect();
        let view = |n: usize| written[n].as_ref().map(Placed::view);
        let [d_out_at] = layout.places([shape.out()]);
        let d_out = Placed::input(profile, Values::Floats(&case.d_out), dtype, d_out_at);
        let mut call = NativeSparseBackward::new(forward, d_out.view())
            .d_q(view(0))
            .d_k(view(1))
            .d_v(view(2))
            .d_gates(view(3))
            .accumulate(accumulates);
        if let (Some(k), Some(v)) = (view(4), view(5)) {
            call = call.d_compressed(k, v);
        }
        if let (Some(k), Some(v)) = (view(6), view(7)) {
            call = call.d_window_keys(k, v);
        }
        let size = operator.backward_scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)?;

        let exact = case.gradients::<f64>(dtype, &indices, false);
        let naive = case.gradients::<f32>(dtype, &indices, false);
        let sizes = case.gradients::<f64>(dtype, &indices, true);
        let (mut all, mut worst) = (Vec::new(), 0f64);
        for (n, (exact, naive)) in exact.into_iter().zip(naive).enumerate() {
            let Some(placed) = &written[n] else {
                all.push(Vec::new());
                continue;
            };
            let got = placed.download_async(GRADIENTS[n], profile).await?;
            let magnitude = largest(sizes[n].iter().copied());
            let before = accumulates.then_some(&before[n][..]);
            let mut judged =
                Judged::gradient([exact, widened(&naive, DType::F32)], before, gradient, magnitude);
            // The passes read stored outputs of branches, and stored gradients of them.
            judged.tolerance.absolute += 2.0 * stored_error(dtype) * magnitude;
            worst = worst.max(judged.judge(&got).map_err(|e| format!("{}: {e}", GRADIENTS[n]))?);
            all.push(got);
        }
        Ok((worst, all))
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl NativeCase {
    /// Like `forward_async`, blocking.
    pub fn forward(&self, setup: &OperatorSetup) -> Result<Ran, String> {
        pollster::block_on(self.forward_async(setup))
    }

    /// Like `backward_async`, blocking.
    pub fn backward(&self, setup: &OperatorSetup) -> Result<(f64, Vec<Vec<f64>>), String> {
        pollster::block_on(self.backward_async(setup))
    }
}

/// The tensors of a call on the device.
struct Tensors {
    q: Placed,
    k: Placed,
    v: Placed,
    gates: Placed,
    compressed: Option<[Placed; 2]>,
    window: Option<[Placed; 2]>,
    out: Placed,
    branches: Placed,
    lse: Placed,
    indices: Placed,
}

impl Tensors {
    fn call(&self) -> NativeSparseForward<'_> {
        let call = NativeSparseForward::new(
            self.q.view(),
            self.k.view(),
            self.v.view(),
            self.gates.view(),
            self.out.view(),
        );
        let call = match &self.compressed {
            Some([k, v]) => call.compressed(k.view(), v.view()),
            None => call,
        };
        let call = match &self.window {
            Some([k, v]) => call.window_keys(k.view(), v.view()),
            None => call,
        };
        call.branches(NativeSparseBranches {
            out: self.branches.view(),
            lse: self.lse.view(),
            indices: self.indices.view(),
        })
    }

    async fn indices(&self, setup: &OperatorSetup) -> Result<Vec<u32>, String> {
        let got = self.indices.download_async("indices", setup.profile).await?;
        Ok(got.into_iter().map(|index| index as u32).collect())
    }
}
