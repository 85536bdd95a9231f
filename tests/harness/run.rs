//! Runs a case on a device, in a layout.

use std::cell::Cell;
use std::convert::Infallible;
use std::fmt;

use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};
use wgpu_attention::{Attention, Config, DType, Dropout, Forward, KernelOptions, Mask, Scratch, TensorView};

use super::case::{Case, DropoutData, Rules, Weights};
use super::device::{Profile, defaults, full, matrices};
use super::memory::{GUARD, Image, Place, Values};
use super::placed_mods::PlacedMods;
use super::random::Rng;
use super::rest::{due, rest};

pub const FORMS: [Target; 2] = [Target::Gpu, Target::Software];

/// The memory layout of a call's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[batch, heads, length, dim]`.
    Dense,
    /// `[batch, length, heads, dim]`.
    Blhd,
    /// q, k and v in one `[batch, length, 3, heads, dim]` buffer where their shapes allow it.
    Packed,
    /// Every tensor, masks included, is a window of a larger buffer with random axis order,
    /// padding, steps and offsets. With an odd seed, no window is aligned for vec4 loads.
    Window(u64),
}

impl Layout {
    /// Returns places of tensors with these shapes.
    pub fn places<const N: usize>(self, shapes: [[usize; 4]; N]) -> [Place; N] {
        match self {
            Layout::Window(seed) => {
                let mut rng = Rng::new(seed);
                shapes.map(|shape| window(shape, &mut rng, seed))
            }
            Layout::Blhd => shapes.map(Place::blhd),
            _ => shapes.map(Place::dense),
        }
    }
}

/// Returns a random window. With an even `seed`, every other one is aligned for vec4 loads.
pub fn window(shape: [usize; 4], rng: &mut Rng, seed: u64) -> Place {
    let order =
        if rng.chance(0.3) { rng.shuffled([0, 1, 2, 3]) } else { rng.pick(&[[0, 1, 2, 3], [0, 2, 1, 3]]) };
    if seed.is_multiple_of(2) && rng.chance(0.5) {
        let pads = [0; 4].map(|_| 4 * rng.below(3));
        return Place::nested(shape, order, pads, 1, GUARD + 4 * rng.below(50));
    }
    let pads = [0; 4].map(|_| rng.below(6));
    let step = if rng.chance(0.2) { 2 } else { 1 };
    Place::nested(shape, order, pads, step, GUARD + 2 * rng.below(300) + 1)
}

/// The device, target, path, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub profile: &'static Profile,
    pub form: Target,
    pub path: Algorithm,
    pub dtype: DType,
    pub bias: DType,
    pub layout: Layout,
    pub lse: bool,
    pub weights: Weights,
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Setup { profile, form, path, dtype, bias, layout, lse, weights } = self;
        write!(
            f,
            "{}, {path:?}, {form:?}, {dtype:?}, bias {bias:?}, {layout:?}, lse {lse}, weights {weights:?}",
            profile.name
        )
    }
}

impl Setup {
    /// Runs in f32 on dense tensors, with the lse.
    pub fn plain(profile: &'static Profile, form: Target, path: Algorithm) -> Self {
        Setup {
            profile,
            form,
            path,
            dtype: DType::F32,
            bias: DType::F32,
            layout: Layout::Dense,
            lse: true,
            weights: Weights::None,
        }
    }

    /// Runs on the matrix units of `profile`, in F16, with tiles that software drivers compile in a
    /// second.
    pub fn matrix(profile: &'static Profile, layout: Layout) -> Self {
        Setup { dtype: DType::F16, layout, ..Setup::plain(profile, Target::Software, Algorithm::Fused) }
    }

    /// True if the fused path needs more storage buffers for `case` than the device binds.
    pub fn too_many_buffers(&self, case: &Case) -> bool {
        let given = usize::from(matches!(case.dropout, Some(DropoutData::Given { .. })));
        let buffers = 4
            + usize::from(case.score_vector.is_some())
            + usize::from(self.lse)
            + case.rules.tensors()
            + given;
        let most = self.profile.gpu.device().limits().max_storage_buffers_per_shader_stage;
        self.path == Algorithm::Fused && buffers > most as usize
    }
}

/// Returns setups with both targets of every path, in f32, f16 and bf16, in every layout, with and
/// without features. Not all combinations occur. One target has dense layouts, the other windows.
/// The mask's rules decide a kernel. They also decide which setups always run, so that cases with
/// the same rules share kernels. Each target runs once on the staged and once on the fused path.
/// Tensors that are added to scores are F32, so that f16 runs share their softmax. The tests
/// `property` and `biases` use F16.
pub fn setups(case: &Case) -> Vec<Setup> {
    setups_where(case, due(&case.rules.names().join(" ")))
}

/// Like [`setups`], with the usual runs if `due`.
pub fn setups_where(case: &Case, due: bool) -> Vec<Setup> {
    // The seed is odd: the dense layouts are aligned, and every kind of alignment compiles one more
    // shader.
    let window = Layout::Window(Rng::named(&case.name).word() | 1);
    let rng = &mut Rng::named(&case.rules.names().join(" "));
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let first = rng.below(2);
    let always = [0, 1].map(|_| [rng.below(2), 2 + rng.below(2)]);
    // Types of the device without features, on the fused path and on the staged one. On one target
    // the fused path has f32.
    let plain = if always[1][1] == 2 && rng.below(2) == 0 { [bf16, f32] } else { [f32, bf16] };
    let dense = [
        (full(), f32, Algorithm::Staged, Layout::Dense, Weights::PerHead(f32)),
        (full(), f32, Algorithm::Staged, Layout::Packed, Weights::Mean(f32)),
        (full(), f32, Algorithm::Fused, Layout::Blhd, Weights::None),
        // Without features a device has no f16.
        (defaults(), plain[0], Algorithm::Fused, Layout::Packed, Weights::None),
        (full(), f16, Algorithm::Staged, Layout::Blhd, Weights::None),
    ];
    let windows = [
        (full(), f16, Algorithm::Staged, window, Weights::PerHead(f16)),
        (defaults(), plain[1], Algorithm::Staged, window, Weights::PerHead(plain[1])),
        (full(), f32, Algorithm::Fused, window, Weights::None),
        (full(), f16, Algorithm::Fused, Layout::Blhd, Weights::None),
        (full(), f32, Algorithm::Staged, window, Weights::PerHead(f32)),
    ];
    let mut all = Vec::new();
    let mut add = |always: bool, setup: Setup| {
        if always && due || rest(&format!("{}, {setup}", case.name)) {
            all.push(setup);
        }
    };
    let forms = [(FORMS[first], dense), (FORMS[1 - first], windows)];
    for ((form, runs), always) in forms.into_iter().zip(always) {
        for (n, (profile, dtype, path, layout, weights)) in runs.into_iter().enumerate() {
            let setup = Setup { profile, form, path, dtype, bias: f32, layout, lse: true, weights };
            add(always.contains(&n), setup);
        }
    }
    for (profile, layout) in matrices().zip([Layout::Blhd, window]) {
        add(false, Setup::matrix(profile, layout));
    }
    all
}

/// The outputs of a run, in logical order.
#[derive(Clone, Debug, PartialEq)]
pub struct Got {
    pub out: Vec<f64>,
    pub lse: Option<Vec<f64>>,
    pub weights: Option<Vec<f64>>,
}

impl Got {
    /// Reads the outputs of a run back, and checks everything around them.
    pub async fn read(
        profile: &Profile,
        out: &Placed,
        lse: Option<&Placed>,
        weights: Option<&Placed>,
    ) -> Result<Self, String> {
        let mut got = Got { out: out.download_async("out", profile).await?, lse: None, weights: None };
        if let Some(lse) = lse {
            got.lse = Some(lse.download_async("lse", profile).await?);
        }
        if let Some(weights) = weights {
            got.weights = Some(weights.download_async("weights", profile).await?);
        }
        Ok(got)
    }

    /// Returns the bits, for comparing runs.
    pub fn bits(&self) -> Vec<u64> {
        let all = [Some(&self.out), self.lse.as_ref(), self.weights.as_ref()];
        all.into_iter().flatten().flatten().map(|x| x.to_bits()).collect()
    }
}

/// A tensor on the device with its surrounding elements.
pub struct Placed {
    image: Image,
    place: Place,
    buffer: wgpu::Buffer,
}

impl Placed {
    pub fn input(profile: &Profile, values: Values, dtype: DType, place: Place) -> Self {
        let image = Image::input(values, dtype, &place);
        Placed { buffer: image.upload(&profile.gpu), image, place }
    }

    pub fn output(profile: &Profile, dtype: DType, place: Place) -> Self {
        let image = Image::output(dtype, &place);
        Placed { buffer: image.upload(&profile.gpu), image, place }
    }

    /// Makes an output that holds `values` before the run.
    pub fn holding(profile: &Profile, values: &[f32], dtype: DType, place: Place) -> Self {
        let mut image = Image::output(dtype, &place);
        image.write(Values::Floats(values), &place);
        Placed { buffer: image.upload(&profile.gpu), image, place }
    }

    /// Makes an output, which holds `before` already if a call adds to it.
    pub fn gradient(
        profile: &Profile,
        before: &[f32],
        (dtype, place): (DType, Place),
        accumulates: bool,
    ) -> Self {
        if accumulates {
            Placed::holding(profile, before, dtype, place)
        } else {
            Placed::output(profile, dtype, place)
        }
    }

    pub fn view(&self) -> TensorView<'_> {
        self.image.view(&self.buffer, &self.place)
    }

    pub async fn download_async(&self, what: &str, profile: &Profile) -> Result<Vec<f64>, String> {
        let got = self.image.download_async(&profile.gpu, &self.buffer, &self.place).await;
        #[cfg(not(target_arch = "wasm32"))]
        super::validation::check()?;
        got.map_err(|e| format!("{what}: {e}"))
    }
}

/// The tensors of a mask on the device.
pub struct PlacedRules(Mask<Placed, Placed, Placed>, PlacedMods);

impl PlacedRules {
    pub fn new(profile: &Profile, rules: &Rules, bias: DType, layout: Layout) -> Self {
        // A new salt per tensor gives each tensor a different layout.
        let salt = Cell::new(0);
        let input = |values, dtype, shape| {
            salt.set(salt.get() + 1);
            Ok::<_, Infallible>(place_values(profile, values, dtype, shape, layout, salt.get()))
        };
        let Ok(mask) = rules.mask().try_map(
            |_, part| input(Values::Numbers(&part.data), DType::U32, part.shape),
            |_, part| input(Values::Bools(&part.data), DType::Bool, part.shape),
            |_, part| input(Values::Floats(&part.data), bias, part.shape),
        );
        let mods = PlacedMods::new(profile, rules.score_mod.as_ref(), rules.mask_mod.as_ref(), layout);
        PlacedRules(mask, mods)
    }

    pub fn mask(&self) -> DeviceMask<'_> {
        fn view<'a>(_: &'static str, t: &'a Placed) -> Result<TensorView<'a>, Infallible> {
            Ok(t.view())
        }
        let Ok(mask) = self.0.as_ref().try_map(view, view, view);
        self.1.add(mask)
    }
}

/// Places a tensor of a mask, dense or in a separate window.
pub fn place_values(
    profile: &Profile,
    values: Values,
    dtype: DType,
    shape: [usize; 4],
    layout: Layout,
    salt: u64,
) -> Placed {
    let place = match layout {
        Layout::Window(seed) => window(shape, &mut Rng::new(seed ^ salt), seed),
        _ => Place::dense(shape),
    };
    Placed::input(profile, values, dtype, place)
}

/// Places the dropout's tensor on the device, if it has one.
pub fn place_dropout(profile: &Profile, dropout: Option<&DropoutData>, layout: Layout) -> Option<Placed> {
    let Some(DropoutData::Given { keep, .. }) = dropout else { return None };
    let place = match layout {
        Layout::Window(seed) => window(keep.shape, &mut Rng::new(seed ^ 5), seed),
        // Keys are far apart, so a read past the last key is far outside.
        Layout::Blhd => Place::transposed(keep.shape),
        _ => Place::dense(keep.shape),
    };
    Some(Placed::input(profile, Values::Bools(&keep.data), DType::Bool, place))
}

pub fn device_dropout<'a>(
    dropout: Option<&DropoutData>,
    keep: Option<&'a Placed>,
) -> Option<Dropout<TensorView<'a>>> {
    match (dropout?, keep) {
        (DropoutData::Seeded { p, seed }, _) => Some(Dropout::Seeded { p: *p, seed: *seed }),
        (DropoutData::Given { p, .. }, Some(keep)) => Some(Dropout::Given { p: *p, keep: keep.view() }),
        _ => None,
    }
}

/// Returns the type and shape of the wanted weights.
pub fn weights_wanted(weights: Weights, [b, h, i, j]: [usize; 4]) -> Option<(DType, [usize; 4])> {
    match weights {
        Weights::None => None,
        Weights::PerHead(dtype) => Some((dtype, [b, h, i, j])),
        Weights::Mean(dtype) => Some((dtype, [b, 1, i, j])),
    }
}

/// Runs `case`, whose data must fit `setup.dtype`, and checks everything around its outputs.
#[cfg(not(target_arch = "wasm32"))]
pub fn run(case: &Case, setup: &Setup) -> Result<Got, String> {
    run_with(case, setup, |config| config)
}

/// Like [`run`], with the changes of `change`.
#[cfg(not(target_arch = "wasm32"))]
pub fn run_with(
    case: &Case,
    setup: &Setup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Got, String> {
    pollster::block_on(run_async(case, setup, change))
}

/// Like [`run_with`], not blocking.
pub async fn run_async(
    case: &Case,
    setup: &Setup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Got, String> {
    let Setup { profile, form, path, dtype, layout, .. } = *setup;
    profile.tidy();
    let shape = case.shape;
    let [q_at, k_at, v_at, out_at, lse_at] =
        layout.places([shape.q(), shape.k(), shape.v(), shape.out(), shape.lse()]);
    let floats = |x, place| Placed::input(profile, Values::Floats(x), dtype, place);
    let packed_image;
    let (packed, apart);
    let [q, k, v] = if layout == Layout::Packed && shape.q() == shape.k() && shape.q() == shape.v() {
        let places = [0, 1, 2].map(|n| Place::packed(shape.q(), n));
        let parts = [(&case.q, places[0]), (&case.k, places[1]), (&case.v, places[2])]
            .map(|(x, place)| (Values::Floats(x), place));
        packed_image = Image::inputs(&parts, dtype);
        packed = packed_image.upload(&profile.gpu);
        TensorView::packed_qkv(&packed, dtype, shape.q())
    } else {
        apart = [floats(&case.q, q_at), floats(&case.k, k_at), floats(&case.v, v_at)];
        [apart[0].view(), apart[1].view(), apart[2].view()]
    };
    let out = Placed::output(profile, dtype, out_at);
    let lse = setup.lse.then(|| Placed::output(profile, DType::F32, lse_at));
    let weights = weights_wanted(setup.weights, shape.weights())
        .map(|(dtype, shape)| Placed::output(profile, dtype, layout.places([[1; 4], shape])[1]));
    let rules = PlacedRules::new(profile, &case.rules, setup.bias, layout);
    let keep = place_dropout(profile, case.dropout.as_ref(), layout);

    let mut kernel_options = KernelOptions::new().target(form).algorithm(path);
    if profile.matrix {
        kernel_options = kernel_options.matrix_units(MatrixUnits::Always).f16_operands(true);
    }
    let kernel_options = change(kernel_options);
    let refused = |e: wgpu_attention::Error| format!("refused: {e}");
    let device = profile.gpu.device();
    if let Some(vector) = &case.score_vector {
        let heads = vector.len() / shape.head_dim;
        let vector =
            place_values(profile, Values::Floats(vector), dtype, [1, heads, 1, shape.head_dim], layout, 77);
        let config = AdditiveConfig::new(shape.heads, shape.head_dim)
            .kv_heads(shape.kv_heads)
            .value_dim(shape.value_dim)
            .dtype(dtype)
            .kernel_options(kernel_options);
        let call = AdditiveForward::new(q, k, v, vector.view(), out.view())
            .mask(rules.mask())
            .lse(lse.as_ref().map(Placed::view))
            .weights(weights.as_ref().map(Placed::view))
            .dropout(device_dropout(case.dropout.as_ref(), keep.as_ref()));
        let attention =
            AdditiveAttention::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
        let size = attention.scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(device, size).map_err(refused)?;
        profile.gpu.submit(|e| attention.forward(e, &call, &mut scratch)).map_err(refused)?;
        return Got::read(profile, &out, lse.as_ref(), weights.as_ref()).await;
    }
    let config = Config::of(&shape)
        .dtype(dtype)
        .scale(case.scale)
        .softcap(case.softcap)
        .kernel_options(kernel_options);
    let call = Forward::new(q, k, v, out.view())
        .mask(rules.mask())
        .lse(lse.as_ref().map(Placed::view))
        .weights(weights.as_ref().map(Placed::view))
        .dropout(device_dropout(case.dropout.as_ref(), keep.as_ref()));

    let attention = Attention::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
    let size = attention.scratch_size(&call).map_err(refused)?;
    let mut scratch = Scratch::new(device, size).map_err(refused)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    attention.forward(&mut encoder, &call, &mut scratch).map_err(refused)?;
    profile.gpu.queue().submit([encoder.finish()]);
    Got::read(profile, &out, lse.as_ref(), weights.as_ref()).await
}
