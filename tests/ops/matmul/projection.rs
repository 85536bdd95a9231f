//! The projection operator: up to three products at once into heads of any layout, and more than
//! three. Matrix units run the same.

use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::project;
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{DType, Error, KernelOptions, Linear, Projection, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::device::{believing, matrices};
use crate::harness::run::{Placed, window};
use crate::harness::{
    FORMS, Image, Judged, Place, Profile, Report, Rng, Values, defaults, due, full, rest, stored,
};
use crate::laws::property::{Draws, float, seed};

/// One product with its data: `x` `[batch, length, features]`, narrow weights `[heads or 1, dim,
/// read]`.
#[derive(Clone, Debug)]
struct Side {
    batch: usize,
    length: usize,
    heads: usize,
    dim: usize,
    features: usize,
    shared: bool,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

/// The layout of a product's tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    Random,
    Dense,
    /// Weights `[in, out]` in memory.
    Transposed,
    /// Windows with odd offsets and steps.
    Window,
}

/// Products in one recording.
#[derive(Clone, Debug)]
struct Case {
    profile: &'static Profile,
    form: Target,
    units: MatrixUnits,
    narrow: bool,
    one_buffer: bool,
    /// The types of x, weights, biases, outputs.
    dtypes: [DType; 4],
    sides: Vec<Side>,
    lie: Lie,
    seed: u64,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Case { profile, form, units, narrow, one_buffer, dtypes, sides, lie, .. } = self;
        let sizes: Vec<_> = sides.iter().map(|s| [s.batch, s.length, s.heads, s.dim, s.features]).collect();
        write!(
            f,
            "{}, {form:?}, {units:?}, narrow {narrow}, one buffer {one_buffer}, {dtypes:?}, {lie:?}, ",
            profile.name
        )?;
        write!(f, "[batch, length, heads, dim, features]: {sizes:?}")
    }
}

impl Case {
    fn random(seed: u64) -> Self {
        let profile = if Rng::new(seed).chance(0.3) { defaults() } else { full() };
        Self::random_on(profile, MatrixUnits::Auto, seed)
    }

    fn random_on(profile: &'static Profile, units: MatrixUnits, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x0009_4073_c710);
        let narrow = rng.chance(0.4);
        let mut dtypes = [0; 4].map(|_| float(rng));
        if units == MatrixUnits::Always {
            // Matrix units do not multiply BF16. Biases may be BF16.
            for n in [0, 1, 3].into_iter().filter(|n| dtypes[*n] == DType::BF16).collect::<Vec<_>>() {
                dtypes[n] = DType::F32;
            }
        }
        let batch = rng.pick(&[1, 2, 3]);
        let one_batch = rng.chance(0.7);
        let some_bias = rng.chance(0.7);
        let sides = (0..rng.pick(&[1, 2, 3, 3, 4]))
            .map(|_| {
                let heads = rng.pick(&[1, 2, 3]);
                let read = rng.pick(&[1, 3, 4, 8, 17, 33]);
                let batch = if one_batch { batch } else { rng.pick(&[1, 2, 3, 4]) };
                let (length, dim) = (rng.pick(&[1, 2, 5, 16, 33, 66]), rng.pick(&[1, 3, 4, 8, 17, 65]));
                let features = if narrow { read * heads } else { read };
                let shared = narrow && rng.chance(0.3);
                let x = stored(&rng.normals(batch * length * features), dtypes[0]);
                let weight = rng.normals(if shared { 1 } else { heads } * dim * read);
                let bias =
                    (some_bias && rng.chance(0.7)).then(|| stored(&rng.normals(heads * dim), dtypes[2]));
                Side {
                    batch,
                    length,
                    heads,
                    dim,
                    features,
                    shared,
                    x,
                    weight: stored(&weight, dtypes[1]),
                    bias,
                }
            })
            .collect();
        let form = rng.pick(&FORMS);
        Case {
            profile,
            form,
            units,
            narrow,
            one_buffer: rng.chance(0.6),
            dtypes,
            sides,
            lie: Lie::Random,
            seed,
        }
    }

    /// True if x and weights are multiplied in f16 although they are F32.
    fn rounds(&self) -> bool {
        self.units == MatrixUnits::Always && self.dtypes[..2] != [DType::F16; 2]
    }

    /// Returns the largest error over tolerance.
    fn outcome(&self) -> Result<f64, String> {
        let Case { profile, dtypes, narrow, .. } = *self;
        let rng = &mut Rng::new(self.seed ^ 0x9_1ace);
        let seed = self.seed;
        let place = |shape, rng: &mut Rng| match self.lie {
            Lie::Random if rng.chance(0.5) => Place::dense(shape),
            Lie::Random => window(shape, rng, seed),
            Lie::Dense | Lie::Transposed => Place::dense(shape),
            Lie::Window => window(shape, rng, seed | 1),
        };
        let floats = |x: &[f32], dtype, place| Placed::input(profile, Values::Floats(x), dtype, place);
        let mut outs: Vec<Place> = Vec::new();
        let mut inputs = Vec::new();
        for side in &self.sides {
            let Side { batch, length, heads, dim, features, .. } = *side;
            let x = floats(&side.x, dtypes[0], place([batch, 1, length, features], rng));
            let matrix = match narrow {
                false => [1, 1, heads * dim, features],
                true => [1, if side.shared { 1 } else { heads }, dim, features / heads],
            };
            let transposed = self.lie == Lie::Transposed || self.lie == Lie::Random && rng.chance(0.3);
            let at = if transposed { Place::transposed(matrix) } else { place(matrix, rng) };
            let weight = floats(&side.weight, dtypes[1], at);
            let bias = side.bias.as_ref().map(|b| floats(b, dtypes[2], place([1, 1, 1, b.len()], rng)));
            inputs.push((x, weight, bias));
            let mut out = place([batch, heads, length, dim], rng);
            if self.one_buffer {
                let before = outs.last().map_or(0, |last| last.len);
                (out.offset, out.len) = (out.offset + before, out.len + before);
            }
            outs.push(out);
        }
        let len = outs.iter().map(|out| out.len).max().unwrap_or(0);
        let image = |out: &Place| Image::output(dtypes[3], &Place { len, ..*out });
        let buffers: Vec<_> = if self.one_buffer {
            let buffer = image(&outs[0]).upload(&profile.gpu);
            outs.iter().map(|_| buffer.clone()).collect()
        } else {
            outs.iter().map(|out| image(out).upload(&profile.gpu)).collect()
        };
        let products: Vec<_> = inputs
            .iter()
            .zip(&outs)
            .zip(&buffers)
            .map(|(((x, weight, bias), out), buffer)| {
                ProjectionForward::new(
                    x.view(),
                    Linear { weight: weight.view(), bias: bias.as_ref().map(Placed::view) },
                    image(out).view(buffer, out),
                )
                .narrow(narrow)
            })
            .collect();
        profile.tidy();
        let operator = Projection::with_pipelines(profile.gpu.pipelines()).kernel_options(
            KernelOptions::new().target(self.form).matrix_units(self.units).f16_operands(self.rounds()),
        );
        profile
            .gpu
            .submit(|encoder| operator.forward(encoder, &products))
            .map_err(|e| format!("refused: {e}"))?;

        let mut worst: f64 = 0.0;
        for (n, side) in self.sides.iter().enumerate() {
            let bytes = image(&outs[n]).bytes;
            let after = profile.gpu.download::<u8>(&buffers[n], bytes.len()).map_err(|e| e.to_string())?;
            // Elements of the other outputs in the same buffer count as written.
            let mut expected = image(&outs[n]);
            for (_, other) in outs.iter().enumerate().filter(|(m, _)| self.one_buffer && *m != n) {
                let size = dtypes[3].bytes();
                for at in other.indices() {
                    expected.bytes[at * size..][..size].copy_from_slice(&after[at * size..][..size]);
                }
            }
            let got = expected.collect(&after, &outs[n]).map_err(|e| format!("product {n}: {e}"))?;
            let judged = side.truth(narrow, dtypes[3], self.rounds());
            worst = worst.max(judged.judge(&got).map_err(|e| format!("product {n}: {e}"))?);
        }
        Ok(worst)
    }
}

impl Side {
    /// Returns `[batch, heads, length, dim]`, computed in plain loops over one head at a time.
    fn heads<R: wgpu_attention::reference::Real>(&self, narrow: bool) -> Vec<R> {
        let Side { heads, dim, features, .. } = *self;
        let read = if narrow { features / heads } else { features };
        let wide = |x: &[f32]| wgpu_attention::reference::widen::<R>(x);
        let (weight, bias) = (wide(&self.weight), self.bias.as_ref().map(|b| wide(b)));
        let mut out = Vec::new();
        for sequence in self.x.chunks_exact(self.length * features) {
            for h in 0..heads {
                let first = if narrow { h * read } else { 0 };
                let x: Vec<f32> =
                    sequence.chunks_exact(features).flat_map(|row| row[first..][..read].to_vec()).collect();
                let matrix = if self.shared { 0 } else { h };
                let w = &weight[matrix * dim * read..][..dim * read];
                let bias = bias.as_ref().map(|b| &b[h * dim..][..dim]);
                out.extend(project(&wide(&x), w, bias, read, dim).expect("it fits"));
            }
        }
        out
    }

    /// Returns the exact result, with the tolerance of a naive computation. With `rounds`, its
    /// operands are rounded to f16.
    fn truth(&self, narrow: bool, dtype: DType, rounds: bool) -> Judged {
        let kind = if rounds { DType::F16 } else { DType::F32 };
        let operands = Side { x: stored(&self.x, kind), weight: stored(&self.weight, kind), ..self.clone() };
        let naive = widened(&operands.heads::<f32>(narrow), dtype);
        let want = self.heads::<f64>(narrow);
        let most = |x: &[f32]| largest(x.iter().map(|x| f64::from(*x)));
        let term = most(&self.x) * most(&self.weight) + self.bias.as_deref().map_or(0.0, most);
        let tolerance = Tolerance::from_naive(&naive, &want, term, EPSILON_F32);
        Judged { want, tolerance }
    }
}

#[test]
fn random_products_match_the_reference() {
    let seed = seed();
    let mut report = Report::new("projection");
    for n in (Draws { name: "projection", always: 20, most: 40, group: 1 }).numbers() {
        let case = Case::random(seed.wrapping_add(n as u64));
        report.record(&format!("draw {n}"), &case, case.outcome());
    }
    report.finish();
}

/// Few rows on a GPU, with columns and features around the kernel's workgroups and steps. NaN and
/// infinities reach exactly the results that depend on them.
#[test]
fn few_rows_match_on_gpus() {
    let seed = seed();
    let mut report = Report::new("projection of few rows");
    let sizes = [(1, 1), (7, 128), (8, 127), (9, 65), (33, 300), (64, 576)];
    let lies = [Lie::Dense, Lie::Transposed, Lie::Window];
    for (n, (columns, features)) in sizes.into_iter().enumerate() {
        for (lie, rows) in lies.into_iter().flat_map(|lie| [1, 3, 8].map(|rows| (lie, rows))) {
            let mut case =
                product(full(), DType::F32, [rows, columns, features], lie, seed.wrapping_add(n as u64));
            (case.form, case.units) = (Target::Gpu, MatrixUnits::Never);
            report.record(&format!("{rows} rows"), &case, case.outcome());
            let last = [case.sides[0].x.len() - 1, case.sides[0].weight.len() - 1];
            if rows == 3 {
                case.sides[0].x[last[0]] = f32::NAN;
                case.sides[0].weight[last[1]] = f32::INFINITY;
                report.record("NaN and infinity", &case, case.outcome());
            }
        }
    }
    report.finish();
}

/// Sizes around every tile and fragment.
const SIZES: [usize; 13] = [1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129];

/// Returns one product of `rows × features` by `features × columns`, in sequences and heads that
/// divide them.
fn product(
    profile: &'static Profile,
    dtype: DType,
    [rows, columns, features]: [usize; 3],
    lie: Lie,
    seed: u64,
) -> Case {
    let rng = &mut Rng::new(seed ^ 0x3a7_e111);
    let [batch, heads] = [rows, columns].map(|n| rng.pick(&[1, 1, 2, 3]).min(n)).map(|n| n.max(1));
    let batch = if rows.is_multiple_of(batch) { batch } else { 1 };
    let heads = if columns.is_multiple_of(heads) { heads } else { 1 };
    let mut normals = |n: usize| stored(&rng.normals(n), dtype);
    let side = Side {
        batch,
        length: rows / batch,
        heads,
        dim: columns / heads,
        features,
        shared: false,
        x: normals(rows * features),
        weight: normals(columns * features),
        bias: Some(normals(columns)),
    };
    Case {
        profile,
        form: Target::Auto,
        units: MatrixUnits::Always,
        narrow: false,
        one_buffer: false,
        dtypes: [dtype; 4],
        sides: vec![side],
        lie,
        seed,
    }
}

/// All pairs of rows, columns and features. Every kernel takes seconds to compile, so there are few
/// kinds of layout.
#[test]
fn matrix_units_take_every_size() {
    crate::harness::in_turn!();
    let seed = seed();
    Report::on_matrix_units("projection on matrix units", |report, profile| {
        for n in 0..SIZES.len() * SIZES.len() {
            let (i, j) = (n / SIZES.len(), n % SIZES.len());
            let size = [SIZES[i], SIZES[j], SIZES[(i + 2 * j) % SIZES.len()]];
            let in_fours = size[1..].iter().all(|n| n.is_multiple_of(4));
            let lie = [Lie::Window, if in_fours { Lie::Transposed } else { Lie::Dense }, Lie::Dense][n % 3];
            let few = profile.compiles_fast() || lie == Lie::Window;
            let key = format!("projection, sizes, {lie:?}");
            if !(few && due(&key) || rest(&key)) {
                continue;
            }
            let case = product(profile, DType::F16, size, lie, seed.wrapping_add(n as u64));
            report.record(&format!("{size:?}"), &case, case.outcome());
        }
    });
}

#[test]
fn matrix_units_round_permitted_operands() {
    crate::harness::in_turn!();
    let seed = seed();
    Report::on_matrix_units("rounded projection on matrix units", |report, profile| {
        if !profile.compiles_fast() && !rest("rounded projection") {
            return;
        }
        for (n, size) in SIZES.into_iter().enumerate() {
            let size = [size, SIZES[(n + 5) % SIZES.len()], size];
            let case = product(profile, DType::F32, size, Lie::Window, seed.wrapping_add(n as u64));
            report.record(&format!("{size:?}"), &case, case.outcome());
        }
        for lie in [Lie::Dense, Lie::Transposed] {
            let case = product(profile, DType::F32, [70, 72, 44], lie, seed);
            report.record("as vec4", &case, case.outcome());
        }
    });
}

/// Drivers that choose the subgroup size may choose another one than the plan's.
#[test]
fn matrix_units_in_subgroups_of_other_sizes() {
    Report::on_matrix_units("projection in subgroups of other sizes", |report, profile| {
        for times in [2, 4] {
            let width = times * profile.widest_subgroup();
            let few = profile.compiles_fast() && times == 4;
            let key = format!("projection, width {times} times, {}", profile.name);
            if !(few && due(&key) || rest(&key)) {
                continue;
            }
            let case = product(believing(profile, width), DType::F16, [70, 68, 40], Lie::Dense, 1);
            report.record(&format!("width {width}"), &case, case.outcome());
        }
    });
}

/// Several products, narrow ones, mixed types.
#[test]
fn matrix_units_take_every_product() {
    let seed = seed();
    let draws = Draws { name: "products on matrix units", always: 4, most: 4, group: 1 }.numbers();
    Report::on_matrix_units("products on matrix units", |report, profile| {
        for (place, n) in draws.iter().copied().enumerate() {
            // With fragments that compile fast, two of four are usual.
            let few = profile.compiles_fast() && place % 2 == 0;
            let key = format!("product {n}, {}", profile.name);
            if !(few && due(&key) || rest(&key)) {
                continue;
            }
            let case = Case::random_on(profile, MatrixUnits::Always, seed.wrapping_add(n as u64));
            report.record(&format!("draw {n}"), &case, case.outcome());
        }
    });
}

/// Products that fill a GPU with large tiles.
#[test]
fn matrix_units_take_large_tiles() {
    Report::on_matrix_units("large tiles on matrix units", |report, profile| {
        for lie in [Lie::Dense, Lie::Transposed] {
            let few = profile.compiles_fast() && lie == Lie::Dense;
            let key = format!("large tiles, {lie:?}, {}", profile.name);
            if !(few && due(&key) || rest(&key)) {
                continue;
            }
            let case = product(profile, DType::F16, [1411, 1412, 36], lie, 1);
            report.record("large", &case, case.outcome());
        }
    });
}

/// NaN and infinities reach exactly the results that depend on them.
#[test]
fn matrix_units_let_nan_and_infinity_through() {
    crate::harness::in_turn!();
    Report::on_matrix_units("NaN and infinity on matrix units", |report, profile| {
        if !profile.compiles_fast() && !rest("projection, NaN") {
            return;
        }
        for (n, value) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
            for units in [MatrixUnits::Never, MatrixUnits::Always] {
                let [rows, columns, features] = [67, 70, 45];
                let mut case = product(profile, DType::F16, [rows, columns, features], Lie::Window, n as u64);
                case.units = units;
                let side = &mut case.sides[0];
                side.x[3 * features + 44] = value;
                side.x[66 * features] = value;
                side.weight[69 * features + 2] = value;
                report.record(&format!("{value}"), &case, case.outcome());
            }
        }
        // A number above f16's range becomes infinite.
        let mut case = product(profile, DType::F32, [40, 40, 40], Lie::Dense, 1);
        case.sides[0].x[5 * 40 + 5] = 1e6;
        let got = case.outcome();
        assert!(got.as_ref().is_err_and(|e| e.contains("inf")), "{}: {got:?}", profile.name);
    });
}

#[test]
fn matrix_units_are_refused_by_name() {
    let refused = |profile: &Profile, dtype, operands, why: &str| {
        let buffers = [(); 3].map(|()| profile.gpu.buffer(1 << 12).expect("a buffer"));
        let view = |n: usize| TensorView::matrix(&buffers[n], dtype, [8, 8]);
        let linear = Linear { weight: view(1), bias: None };
        let product = ProjectionForward::new(view(0), linear, view(2));
        let record = |units| {
            let operator = Projection::with_pipelines(profile.gpu.pipelines());
            let operator =
                operator.kernel_options(KernelOptions::new().matrix_units(units).f16_operands(operands));
            profile.gpu.submit(|encoder| operator.forward(encoder, &[product]))
        };
        for units in [MatrixUnits::Auto, MatrixUnits::Never] {
            record(units).expect("a form without matrix units");
        }
        let error = record(MatrixUnits::Always).expect_err("a refusal");
        let text = error.to_string();
        assert!(matches!(error, Error::Unsupported { .. }), "{}: {text}", profile.name);
        assert!(text.contains("matrix units") && text.contains(why), "{}: {text}", profile.name);
    };
    refused(defaults(), DType::F32, true, "features");
    refused(full(), DType::F32, true, "features");
    for profile in matrices() {
        refused(profile, DType::F32, false, "f16_operands");
    }
}
