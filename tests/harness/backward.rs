//! Gradients on a device, in a layout, compared with the reference.

use std::fmt;

use wgpu_attention::additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
use wgpu_attention::inspect::magnitudes::additive_attention_backward_magnitudes;
use wgpu_attention::reference::compare::{EPSILON_F16, EPSILON_F32, Tolerance};
use wgpu_attention::reference::{self, Gradients, Real, widen};
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{
    Attention, Backward, Config, DType, Forward, KernelOptions, Scratch, ScratchSize, TensorView,
};

use super::case::{Case, HostData, Judged, Rules, in_f32, largest, widened};
use super::device::Profile;
use super::gradients::Problem;
use super::memory::{Place, Values, stored};
use super::mods::OwnScore;
use super::random::Rng;
use super::run::{Layout, Placed, PlacedRules, device_dropout, place_dropout, place_values};

/// The gradients that a setup can request.
pub const NAMES: [&str; COUNT] =
    ["d_q", "d_k", "d_v", "d_bias", "d_slopes", "d_relative", "d_sinks", "d_captured", "d_score_vector"];
pub const COUNT: usize = 9;

/// The index of the score vector's gradient.
const VECTOR: usize = 8;

/// The device, target, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct BackwardSetup {
    pub profile: &'static Profile,
    pub form: Target,
    pub dtype: DType,
    /// The type of the gradients of q, k, v and the score vector.
    pub gradient: DType,
    pub bias: DType,
    pub layout: Layout,
    /// True if the call adds to existing values.
    pub accumulates: bool,
    /// The wanted gradients of q, k, v.
    pub wanted: [bool; 3],
    /// The wanted gradients of tensors that change scores, where the mask has them.
    pub added: [bool; 5],
    /// The type of those gradients: `bias` or F32.
    pub added_dtype: DType,
}

impl fmt::Display for BackwardSetup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let BackwardSetup { profile, form, dtype, gradient, bias, layout, accumulates, wanted, .. } = self;
        let (name, BackwardSetup { added, added_dtype, .. }) = (profile.name, self);
        write!(
            f,
            "{name}, {form:?}, {dtype:?}, gradients {gradient:?}, bias {bias:?}, {layout:?}, adds {accumulates}, {wanted:?}, \
             of added {added:?} {added_dtype:?}",
        )
    }
}

impl BackwardSetup {
    /// All gradients in f32, of dense f32 tensors.
    pub fn plain(profile: &'static Profile, form: Target) -> Self {
        BackwardSetup {
            profile,
            form,
            dtype: DType::F32,
            gradient: DType::F32,
            bias: DType::F32,
            layout: Layout::Dense,
            accumulates: false,
            wanted: [true; 3],
            added: [true; 5],
            added_dtype: DType::F32,
        }
    }

    /// Gradients on the matrix units of `profile`, of F16 tensors, with tiles that software drivers
    /// compile in seconds.
    pub fn matrix(profile: &'static Profile) -> Self {
        BackwardSetup { dtype: DType::F16, ..Self::plain(profile, Target::Software) }
    }

    pub fn random(rng: &mut Rng, profile: &'static Profile, forms: [Target; 2]) -> Self {
        let mut float = |p| {
            let half = DType::F16;
            if rng.chance(p) { rng.pick(&[half, DType::BF16]) } else { DType::F32 }
        };
        let (dtype, bias) = (float(0.4), float(0.2));
        let window = Layout::Window(rng.word());
        BackwardSetup {
            profile,
            form: rng.pick(&forms),
            dtype,
            gradient: if rng.chance(0.5) { dtype } else { DType::F32 },
            bias,
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window]),
            accumulates: rng.chance(0.3),
            wanted: rng.pick(&[
                [true; 3],
                [true; 3],
                [true, false, false],
                [false, true, false],
                [false, false, true],
            ]),
            added: rng.pick(&[[true; 5], [false; 5]]),
            added_dtype: if rng.chance(0.5) { bias } else { DType::F32 },
        }
    }
}

impl BackwardSetup {
    /// Returns the wanted gradients of `problem`, by [`NAMES`].
    pub fn wanted(&self, problem: &Problem) -> [bool; COUNT] {
        let Rules { bias, slopes, relative, sinks, score_mod, .. } = &problem.case.rules;
        let [bias, slopes, relative, sinks] = [bias, slopes, relative, sinks].map(Option::is_some);
        let captured = score_mod.as_ref().is_some_and(|own| own.reads.is_some());
        let additive = problem.case.score_vector.is_some();
        let has = [bias, slopes, relative, sinks, captured];
        std::array::from_fn(|n| match n {
            0..3 => self.wanted[n],
            VECTOR => additive && self.added[0],
            // Tensors that are added to additive scores have no gradients.
            _ => self.added[n - 3] && has[n - 3] && !additive,
        })
    }

    /// Returns the type of a gradient, by [`NAMES`].
    fn dtype_of(&self, n: usize) -> DType {
        if n < 3 || n == VECTOR { self.gradient } else { self.added_dtype }
    }
}

/// Returns the values that a gradient is added to: the same for the same problem.
fn before(problem: &Problem, n: usize, len: usize, gradient: DType) -> Vec<f32> {
    let x = Rng::named(&format!("{} before {n}", problem.case.name)).normals(len);
    stored(&x, gradient)
}

/// Returns gradients or magnitudes by [`NAMES`], empty for tensors that the mask does not have.
fn of_tensors<R: Real>(problem: &Problem, gradients: Gradients<R>, magnitudes: bool) -> [Vec<R>; COUNT] {
    let Gradients {
        d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks, d_score_fn, d_score_vector, ..
    } = gradients;
    let Problem { case, appended, .. } = problem;
    let d_captured =
        case.rules.score_mod.as_ref().zip(d_score_fn).and_then(|(own, d_score)| {
            own.gradient(case.shape, *appended, &case.scores(), &d_score, magnitudes)
        });
    let [d_bias, d_slopes, d_relative, d_sinks, d_captured, d_score_vector] =
        [d_bias, d_slopes, d_relative, d_sinks, d_captured, d_score_vector].map(Option::unwrap_or_default);
    [d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks, d_captured, d_score_vector]
}

/// Returns `problem` with inputs as the setup stores them.
pub fn stored_problem(problem: &Problem, setup: &BackwardSetup) -> Problem {
    let round = |x: &[f64]| {
        let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
        widen::<f64>(&stored(&x, setup.dtype))
    };
    Problem {
        case: problem.case.stored(setup.dtype, setup.bias),
        d_out: round(&problem.d_out),
        d_lse: problem.d_lse.as_ref().map(|x| x.iter().map(|x| f64::from(*x as f32)).collect()),
        ..problem.clone()
    }
}

/// Returns the expected results of a [`stored_problem`]. The naive computation takes Σⱼ weight ·
/// d_weight from `out` as stored. The difference acts like a change of `d_lse`.
pub fn truth(problem: &Problem, setup: &BackwardSetup) -> [Judged; COUNT] {
    let shape = problem.case.shape;
    let exact = of_tensors(problem, problem.gradients(), false);
    let out = problem.case.reference::<f64>().out;
    let as_stored = widen::<f64>(&stored(&out.iter().map(|x| *x as f32).collect::<Vec<_>>(), setup.dtype));
    let rows = problem.d_out.chunks_exact(shape.value_dim).zip(out.chunks_exact(shape.value_dim));
    let mut d_lse = problem.d_lse.clone().unwrap_or_else(|| vec![0.0; shape.lse().iter().product()]);
    for ((d_lse, stored), (d_out, out)) in
        d_lse.iter_mut().zip(as_stored.chunks_exact(shape.value_dim)).zip(rows)
    {
        // For queries without a key, d_out may be NaN.
        let terms = d_out.iter().zip(stored.iter().zip(out)).filter(|(_, (stored, out))| stored != out);
        *d_lse -= terms.map(|(d, (stored, out))| d * (stored - out)).sum::<f64>();
    }
    let [naive, magnitudes] = [false, true].map(|magnitudes| {
        let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let options = problem.case.options();
        let case = &problem.case;
        let (d_out, d_lse) = (narrow(&problem.d_out), narrow(&d_lse));
        let got = match &case.score_vector {
            Some(vector) => {
                let gradients = if magnitudes {
                    additive_attention_backward_magnitudes::<f32>
                } else {
                    reference::additive_attention_backward::<f32>
                };
                gradients(&case.q, &case.k, &case.v, vector, &d_out, Some(&d_lse), shape, &options)
            }
            None => {
                let gradients = if magnitudes {
                    reference::attention_backward_magnitudes::<f32>
                } else {
                    reference::attention_backward::<f32>
                };
                gradients(&case.q, &case.k, &case.v, &d_out, Some(&d_lse), shape, &options)
            }
        };
        of_tensors(problem, got.expect("the problem fits the reference"), magnitudes)
    });
    // The dot is d_out · out − d_lse. It uses the forward pass's weights, whose scores have other
    // roundings. Because d_v needs no dot, its tolerance covers only the rounding of its sum. A
    // score function is an exception: WGSL's functions may be off by more than f32's rounding (sin
    // by 2⁻¹¹).
    let of_scores = 1.0 + problem.case.largest_score() / 4.0;
    let mut n = 0;
    let all: Vec<Judged> = exact
        .into_iter()
        .zip(naive.into_iter().zip(magnitudes))
        .map(|(mut want, (mut naive, magnitude))| {
            let (dtype, of_v) = (setup.dtype_of(n), n == 2);
            let mut magnitude = largest(magnitude.iter().map(|x| x.f64()));
            if setup.accumulates {
                let before = before(problem, n, want.len(), dtype);
                want.iter_mut().zip(&before).for_each(|(x, before)| *x += f64::from(*before));
                naive.iter_mut().zip(&before).for_each(|(x, before)| *x += before);
                magnitude += largest(before.iter().map(|x| f64::from(*x)));
            }
            n += 1;
            let naive = widened(&naive, dtype);
            let of_scores = if of_v && problem.case.rules.score_mod.is_none() { 1.0 } else { of_scores };
            let mut tolerance = Tolerance::gradient(&naive, &want, magnitude * of_scores, EPSILON_F32);
            if setup.profile.matrix {
                // Matrix units multiply f16. Each term rounds the weight or the gradient of the
                // score to f16. The output, and so that gradient, comes from rounded weights, too:
                // half a unit in the last place each.
                tolerance.absolute += EPSILON_F16 * magnitude;
                // A weight below half of 2⁻³⁸ is lost: f16's smallest number over the factor of the
                // weights.
                if of_v {
                    let terms = (shape.q_len * shape.heads / shape.kv_heads) as f64;
                    tolerance.absolute += 2f64.powi(-39) * terms * largest(problem.d_out.iter().copied());
                }
            }
            // If a sink has all of a row's weight, the other weights may be below f32's normal
            // numbers. Devices may flush those.
            tolerance.absolute += 1024.0 * f64::from(f32::MIN_POSITIVE);
            Judged { want, tolerance }
        })
        .collect();
    all.try_into().expect("one each")
}

/// Runs the forward pass and the backward pass of a [`stored_problem`], checks everything around
/// the gradients and returns them.
pub async fn run_backward_async(
    problem: &Problem,
    setup: &BackwardSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<[Option<Vec<f64>>; COUNT], String> {
    let BackwardSetup { profile, form, dtype, layout, .. } = *setup;
    profile.tidy();
    let kernel_options = KernelOptions::new().target(form);
    let kernel_options = if profile.matrix {
        kernel_options.matrix_units(MatrixUnits::Always).f16_operands(true)
    } else {
        kernel_options
    };
    let case = &problem.case;
    let shape = case.shape;
    let [q_at, k_at, v_at, out_at, lse_at, d_out_at, d_lse_at] =
        layout.places([shape.q(), shape.k(), shape.v(), shape.out(), shape.lse(), shape.out(), shape.lse()]);
    let floats = |x: &[f32], dtype, place| Placed::input(profile, Values::Floats(x), dtype, place);
    let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let inputs = [(&case.q, q_at), (&case.k, k_at), (&case.v, v_at)].map(|(x, at)| floats(x, dtype, at));
    let qkv = [inputs[0].view(), inputs[1].view(), inputs[2].view()];
    let d_out = floats(&narrow(&problem.d_out), dtype, d_out_at);
    let d_lse = problem.d_lse.as_ref().map(|x| floats(&narrow(x), DType::F32, d_lse_at));
    let out = Placed::output(profile, dtype, out_at);
    let lse = Placed::output(profile, DType::F32, lse_at);
    let rules = PlacedRules::new(profile, &case.rules, setup.bias, layout);
    let keep = place_dropout(profile, case.dropout.as_ref(), layout);
    // Places like those of the inputs, in separate buffers.
    let Rules { bias, slopes, relative, sinks, score_mod, .. } = &case.rules;
    let of_mask = |part: &Option<HostData<f32>>| part.as_ref().map_or([1; 4], |part| part.shape);
    let [d_bias, d_slopes, d_relative, d_sinks] = [bias, slopes, relative, sinks].map(of_mask);
    let d_captured = score_mod.as_ref().and_then(OwnScore::gradient_shape).unwrap_or([1; 4]);
    let vector_heads = case.score_vector.as_ref().map_or(1, |v| v.len() / shape.head_dim);
    let of_vector = [1, vector_heads, 1, shape.head_dim];
    let shapes =
        [shape.q(), shape.k(), shape.v(), d_bias, d_slopes, d_relative, d_sinks, d_captured, of_vector];
    let places = match layout {
        Layout::Window(seed) => Layout::Window(seed ^ 0x5a).places(shapes),
        layout => layout.places(shapes),
    };
    let wanted = setup.wanted(problem);
    let place = |n: usize, at: Place| {
        let dtype = setup.dtype_of(n);
        wanted[n].then(|| {
            if setup.accumulates {
                floats(&before(problem, n, at.shape.iter().product(), dtype), dtype, at)
            } else {
                Placed::output(profile, dtype, at)
            }
        })
    };
    let placed: [Option<Placed>; COUNT] = std::array::from_fn(|n| place(n, places[n]));
    let [d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks, d_captured, d_score_vector] = &placed;

    fn view(placed: &Option<Placed>) -> Option<TensorView<'_>> {
        placed.as_ref().map(Placed::view)
    }
    let kernel_options = change(kernel_options);
    let config = Config::of(&shape)
        .dtype(dtype)
        .scale(case.scale)
        .softcap(case.softcap)
        .kernel_options(kernel_options);
    let dropout = device_dropout(case.dropout.as_ref(), keep.as_ref());
    let [q, k, v] = qkv;
    let forward = Forward::new(q, k, v, out.view()).mask(rules.mask()).lse(lse.view()).dropout(dropout);
    let refused = |e: wgpu_attention::Error| format!("refused: {e}");
    let device = profile.gpu.device();
    if let Some(vector) = &case.score_vector {
        let vector = place_values(profile, Values::Floats(vector), dtype, of_vector, layout, 78);
        let config = AdditiveConfig::new(shape.heads, shape.head_dim)
            .kv_heads(shape.kv_heads)
            .value_dim(shape.value_dim)
            .dtype(dtype)
            .kernel_options(kernel_options);
        let forward = AdditiveForward::new(q, k, v, vector.view(), out.view())
            .mask(rules.mask())
            .lse(lse.view())
            .dropout(dropout);
        let call = AdditiveBackward::new(forward, d_out.view())
            .d_lse(view(&d_lse))
            .d_q(view(d_q))
            .d_k(view(d_k))
            .d_v(view(d_v))
            .d_score_vector(view(d_score_vector))
            .accumulate(setup.accumulates);
        let attention =
            AdditiveAttention::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
        let size: ScratchSize = attention.scratch_size(&forward).map_err(refused)?;
        let size = size.max(attention.backward_scratch_size(&call).map_err(refused)?);
        let mut scratch = Scratch::new(device, size).map_err(refused)?;
        profile
            .gpu
            .submit(|e| {
                attention.forward(e, &forward, &mut scratch)?;
                attention.backward(e, &call, &mut scratch)
            })
            .map_err(refused)?;
        return read_gradients(profile, case, &placed, &lse).await;
    }
    let call = Backward::new(forward, d_out.view())
        .d_lse(view(&d_lse))
        .d_q(view(d_q))
        .d_k(view(d_k))
        .d_v(view(d_v))
        .d_bias(view(d_bias))
        .d_slopes(view(d_slopes))
        .d_relative(view(d_relative))
        .d_sinks(view(d_sinks))
        .d_captured(&d_captured.as_ref().map_or(Vec::new(), |placed| vec![Some(placed.view())]))
        .accumulate(setup.accumulates);

    let attention = Attention::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
    let size: ScratchSize = attention.scratch_size(&forward).map_err(refused)?;
    let size = size.max(attention.backward_scratch_size(&call).map_err(refused)?);
    let mut scratch = Scratch::new(device, size).map_err(refused)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    attention.forward(&mut encoder, &forward, &mut scratch).map_err(refused)?;
    attention.backward(&mut encoder, &call, &mut scratch).map_err(refused)?;
    profile.gpu.queue().submit([encoder.finish()]);
    read_gradients(profile, case, &placed, &lse).await
}

/// Reads gradients back, and checks the lse.
async fn read_gradients(
    profile: &Profile,
    case: &Case,
    placed: &[Option<Placed>; COUNT],
    lse: &Placed,
) -> Result<[Option<Vec<f64>>; COUNT], String> {
    let mut got = [const { None }; COUNT];
    for ((got, placed), name) in got.iter_mut().zip(placed).zip(NAMES) {
        if let Some(placed) = placed {
            *got = Some(placed.download_async(name, profile).await?);
        }
    }
    // Without an exact forward pass, the gradients would prove nothing.
    let lse = lse.download_async("lse", profile).await?;
    let exact = in_f32(case.reference::<f64>().lse);
    let naive = widened(&case.reference::<f32>().lse, DType::F32);
    Judged::new(&naive, exact, case.largest_score() + 1.0).judge(&lse).map_err(|e| format!("lse: {e}"))?;
    Ok(got)
}

/// Returns the largest error over tolerance of the wanted gradients.
pub fn judge(truth: &[Judged; COUNT], got: &[Option<Vec<f64>>; COUNT]) -> Result<f64, String> {
    let mut worst = 0.0f64;
    for ((truth, got), name) in truth.iter().zip(got).zip(NAMES) {
        if let Some(got) = got {
            worst = worst.max(truth.judge(got).map_err(|e| format!("{name}: {e}"))?);
        }
    }
    Ok(worst)
}

impl super::report::Report {
    /// Runs `problem` in one setup.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_backward(&mut self, problem: &Problem, setup: &BackwardSetup) {
        pollster::block_on(self.check_backward_async(problem, setup));
    }

    /// Like [`check_backward`](Self::check_backward), not blocking.
    pub async fn check_backward_async(&mut self, problem: &Problem, setup: &BackwardSetup) {
        let problem = &stored_problem(problem, setup);
        let got = run_backward_async(problem, setup, |kernel_options| kernel_options).await;
        let judged = match got {
            Err(e) if e.contains("max_storage_buffers_per_shader_stage") => {
                return self.skip(format!("on `{}`: {e}", setup.profile.name), &problem.case.name);
            }
            got => got.and_then(|got| judge(&truth(problem, setup), &got)),
        };
        self.record(&problem.case.name, setup, judged);
    }
}
