//! The gradients of projections: of inputs, weights and biases, wide and narrow, in any layout,
//! written and accumulated.

use wgpu_attention::matmul::{Activation, Linear, ProjectionBackward, ProjectionForward};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{Real, project_backward, widen};
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{DType, Error, KernelOptions, Projection, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed, window};
use crate::harness::{FORMS, Judged, Place, Profile, Report, Rng, Values, defaults, due, full, stored};
use crate::laws::property::{Draws, float, seed};

/// Returns a forward call with `d_y` as its output too, because gradients do not read the output.
fn forward<'a>(x: TensorView<'a>, weight: TensorView<'a>, d_y: TensorView<'a>) -> ProjectionForward<'a> {
    ProjectionForward::new(x, Linear { weight, bias: None }, d_y)
}

fn gradients<'a>(x: TensorView<'a>, weight: TensorView<'a>, d_y: TensorView<'a>) -> ProjectionBackward<'a> {
    ProjectionBackward::new(forward(x, weight, d_y), d_y)
}

/// One product with its data, and the earlier contents of its gradients.
#[derive(Clone, Debug)]
struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    /// Weights `[in, out]` in memory.
    transposed: bool,
    batch: usize,
    length: usize,
    heads: usize,
    dim: usize,
    features: usize,
    narrow: bool,
    /// True if one narrow matrix serves all heads.
    shared: bool,
    /// The types of x, weight, d_y.
    dtypes: [DType; 3],
    /// The types of d_x, d_weight, d_bias, if wanted.
    wanted: [Option<DType>; 3],
    accumulates: bool,
    seed: u64,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Case { profile, form, layout, transposed, batch, length, heads, dim, features, .. } = self;
        let Case { narrow, shared, dtypes, wanted, accumulates, seed, .. } = self;
        write!(
            f,
            "{}, {form:?}, {layout:?}, transposed {transposed}, narrow {narrow}, shared {shared}, ",
            profile.name
        )?;
        write!(f, "{dtypes:?} to {wanted:?}, accumulates {accumulates}, seed {seed}, ")?;
        write!(f, "[batch, length, heads, dim, features]: {:?}", [batch, length, heads, dim, features])
    }
}

/// Tensors in logical order: x, weight, d_y.
struct Data {
    x: Vec<f32>,
    weight: Vec<f32>,
    d_y: Vec<f32>,
    before: [Vec<f32>; 3],
}

impl Case {
    /// Returns a product of `rows × features` by `features × columns`, in sequences and heads that
    /// divide them.
    fn of([rows, columns, features]: [usize; 3], form: Target, layout: Layout, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0xbac_0a4d);
        let part = |n: usize, rng: &mut Rng| {
            Some(rng.pick(&[1, 2, 3, 5])).filter(|m| n.is_multiple_of(*m)).unwrap_or(1)
        };
        let (batch, heads) = (part(rows, rng), part(columns, rng));
        Case {
            profile: full(),
            form,
            layout,
            transposed: rng.chance(0.3),
            batch,
            length: rows / batch,
            heads,
            dim: columns / heads,
            features,
            narrow: false,
            shared: false,
            dtypes: [DType::F32; 3],
            wanted: [Some(DType::F32); 3],
            accumulates: false,
            seed,
        }
    }

    fn random(seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x1ea4_bac4);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let narrow = rng.chance(0.5);
        let heads = rng.pick(&[1, 2, 3, 4]);
        let read = rng.pick(&[1, 3, 4, 8, 17, 33, 68]);
        let dtype = float(rng);
        let second = if rng.chance(0.5) { dtype } else { float(rng) };
        let wanted = [0; 3].map(|_| {
            let dtype = if rng.chance(0.5) { DType::F32 } else { dtype };
            rng.chance(0.85).then_some(dtype)
        });
        let window = Layout::Window(rng.word());
        Case {
            profile,
            form: rng.pick(&FORMS),
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window, window]),
            transposed: rng.chance(0.3),
            batch: rng.pick(&[1, 2, 3]),
            length: rng.pick(&[1, 2, 5, 16, 33, 66]),
            heads,
            dim: rng.pick(&[1, 3, 4, 8, 17, 65]),
            features: if narrow { read * heads } else { read },
            narrow,
            shared: narrow && rng.chance(0.5),
            dtypes: [dtype, second, dtype],
            wanted,
            accumulates: rng.chance(0.4),
            seed,
        }
    }

    /// Returns the number of features that a product reads.
    fn read(&self) -> usize {
        if self.narrow { self.features / self.heads } else { self.features }
    }

    /// Returns the shapes of x, the weight, d_y and the bias.
    fn shapes(&self) -> [[usize; 4]; 4] {
        let Case { batch, length, heads, dim, features, .. } = *self;
        let matrix = match (self.narrow, self.shared) {
            (false, _) => [1, 1, heads * dim, features],
            (true, true) => [1, 1, dim, self.read()],
            (true, false) => [1, heads, dim, self.read()],
        };
        [[batch, 1, length, features], matrix, [batch, heads, length, dim], [1, 1, 1, heads * dim]]
    }

    fn data(&self) -> Data {
        let rng = &mut Rng::new(self.seed ^ 0x5eed);
        let mut normals = |shape: [usize; 4], dtype| stored(&rng.normals(shape.iter().product()), dtype);
        let [x, weight, d_y, bias] = self.shapes();
        let [dx, dw, dy] = self.dtypes;
        let wanted = self.wanted.map(|dtype| dtype.unwrap_or(DType::F32));
        Data {
            x: normals(x, dx),
            weight: normals(weight, dw),
            d_y: normals(d_y, dy),
            before: [normals(x, wanted[0]), normals(weight, wanted[1]), normals(bias, wanted[2])],
        }
    }

    /// Returns d_x, d_weight and d_bias, head by head if each head reads other features. They are
    /// added to the earlier contents.
    fn gradients<R: Real>(&self, data: &Data, of: impl Fn(&[f32]) -> Vec<R>) -> [Vec<R>; 3] {
        let Case { batch, length, heads, dim, features, .. } = *self;
        let (x, weight, d_y) = (of(&data.x), of(&data.weight), of(&data.d_y));
        let rows = batch * length;
        // [rows, heads, dim]
        let by_row: Vec<R> = (0..rows * heads * dim)
            .map(|n| {
                let (row, h, d) = (n / dim / heads, n / dim % heads, n % dim);
                d_y[((row / length * heads + h) * length + row % length) * dim + d]
            })
            .collect();
        let mut all = data.before.each_ref().map(|before| of(before));
        if !self.accumulates {
            all.iter_mut().for_each(|x| x.fill(R::zero()));
        }
        let add = |to: &mut R, x: R| *to = *to + x;
        let [d_x, d_w, d_b] = &mut all;
        if !self.narrow {
            let got = project_backward(&x, &weight, &by_row, features, heads * dim).expect("it fits");
            d_x.iter_mut().zip(got.d_x).for_each(|(to, x)| add(to, x));
            d_w.iter_mut().zip(got.d_weight).for_each(|(to, x)| add(to, x));
            d_b.iter_mut().zip(got.d_bias).for_each(|(to, x)| add(to, x));
            return all;
        }
        let read = self.read();
        for h in 0..heads {
            let matrix = if self.shared { 0 } else { h } * dim * read;
            let x: Vec<R> =
                x.chunks_exact(features).flat_map(|row| row[h * read..][..read].to_vec()).collect();
            let d_y: Vec<R> =
                by_row.chunks_exact(heads * dim).flat_map(|row| row[h * dim..][..dim].to_vec()).collect();
            let got =
                project_backward(&x, &weight[matrix..][..dim * read], &d_y, read, dim).expect("it fits");
            for (n, x) in got.d_x.iter().enumerate() {
                add(&mut d_x[n / read * features + h * read + n % read], *x);
            }
            d_w[matrix..].iter_mut().zip(got.d_weight).for_each(|(to, x)| add(to, x));
            d_b[h * dim..].iter_mut().zip(got.d_bias).for_each(|(to, x)| add(to, x));
        }
        all
    }

    fn truth(&self, data: &Data) -> [Judged; 3] {
        let exact = self.gradients::<f64>(data, widen);
        let naive = self.gradients::<f32>(data, |x| x.to_vec());
        let magnitudes = self.gradients::<f64>(data, |x| x.iter().map(|x| f64::from(x.abs())).collect());
        let mut n = 0;
        exact.map(|want| {
            let naive = widened(&naive[n], self.wanted[n].unwrap_or(DType::F32));
            let magnitude = largest(magnitudes[n].iter().copied());
            n += 1;
            Judged { tolerance: Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32), want }
        })
    }

    /// Returns places of x, the weight, d_y and the bias.
    fn places(&self, rng: &mut Rng) -> [Place; 4] {
        let shapes = self.shapes();
        let mut places = match self.layout {
            Layout::Window(seed) => shapes.map(|shape| window(shape, rng, seed)),
            layout => layout.places(shapes),
        };
        if self.transposed {
            places[1] = Place::transposed(shapes[1]);
        }
        places
    }

    /// Returns the results of `times` runs, which must all be the same.
    fn run(&self, data: &Data, times: usize) -> Result<[Option<Vec<f64>>; 3], String> {
        let Case { profile, dtypes, .. } = *self;
        let rng = &mut Rng::new(self.seed ^ 0xf1ace);
        let [x_at, w_at, y_at, _] = self.places(rng);
        let input = |x: &[f32], dtype, place| Placed::input(profile, Values::Floats(x), dtype, place);
        let x = input(&data.x, dtypes[0], x_at);
        let weight = input(&data.weight, dtypes[1], w_at);
        let d_y = input(&data.d_y, dtypes[2], y_at);
        let [dx_at, dw_at, _, db_at] = self.places(rng);
        let places = [dx_at, dw_at, db_at];
        profile.tidy();
        let operator = Projection::with_pipelines(profile.gpu.pipelines())
            .kernel_options(KernelOptions::new().target(self.form));
        let mut first: Option<[Option<Vec<f64>>; 3]> = None;
        for _ in 0..times {
            let outs = [0, 1, 2].map(|n| {
                self.wanted[n].map(|dtype| match self.accumulates {
                    true => Placed::holding(profile, &data.before[n], dtype, places[n]),
                    false => Placed::output(profile, dtype, places[n]),
                })
            });
            let [d_x, d_w, d_b] = outs.each_ref().map(|out| out.as_ref().map(Placed::view));
            let forward = forward(x.view(), weight.view(), d_y.view()).narrow(self.narrow);
            let call = ProjectionBackward::new(forward, d_y.view())
                .d_x(d_x)
                .d_weight(d_w)
                .d_bias(d_b)
                .accumulate(self.accumulates);
            profile
                .gpu
                .submit(|encoder| operator.backward(encoder, &[call]))
                .map_err(|e| format!("refused: {e}"))?;
            let names = ["d_x", "d_weight", "d_bias"];
            let mut got = [None, None, None];
            for (n, out) in outs.iter().enumerate() {
                if let Some(out) = out {
                    got[n] = Some(pollster::block_on(out.download_async(names[n], profile))?);
                }
            }
            let bits = |got: &[Option<Vec<f64>>; 3]| {
                got.iter().flatten().flatten().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            match &first {
                Some(first) if bits(first) != bits(&got) => return Err("other bits the second time".into()),
                Some(_) => {}
                None => first = Some(got),
            }
        }
        first.ok_or_else(|| "never run".into())
    }

    /// Returns the largest error over tolerance.
    fn outcome(&self, times: usize) -> Result<f64, String> {
        let data = self.data();
        let got = self.run(&data, times)?;
        let names = ["d_x", "d_weight", "d_bias"];
        let mut worst: f64 = 0.0;
        for ((judged, got), name) in self.truth(&data).iter().zip(&got).zip(names) {
            if let Some(got) = got {
                worst = worst.max(judged.judge(got).map_err(|e| format!("{name}: {e}"))?);
            }
        }
        Ok(worst)
    }
}

/// Returns the error over tolerance of a small product with the device's default plans.
pub fn plain(profile: &'static Profile) -> Result<f64, String> {
    let case = Case::of([33, 20, 12], Target::Auto, Layout::Dense, 1);
    Case { profile, ..case }.outcome(1)
}

const SIZES: [usize; 6] = [1, 3, 63, 64, 65, 130];

#[test]
fn every_size_matches_the_reference() {
    let seed = seed();
    crate::harness::in_turn!();
    let mut report = Report::new("projection backward, sizes");
    for n in 0..SIZES.len() * SIZES.len() {
        let (i, j) = (n / SIZES.len(), n % SIZES.len());
        let size = [SIZES[i], SIZES[j], SIZES[(i + 2 * j + n / 7) % SIZES.len()]];
        // The seed is odd: the dense layouts are the aligned ones.
        let layout = [Layout::Dense, Layout::Window(2 * n as u64 + 1), Layout::Blhd][(i + j) % 3];
        let case = Case::of(size, FORMS[(n + i) % 2], layout, seed.wrapping_add(n as u64));
        report.record(&format!("{size:?}"), &case, case.outcome(1));
    }
    report.finish();
}

/// Tiles of 128, vec4 along every possible axis, several heads and sequences.
#[test]
fn large_products_match_the_reference() {
    let seed = seed();
    let mut report = Report::new("projection backward, large");
    for (n, size) in [[2 * 1030, 1024, 132], [3 * 256, 384, 1540]].into_iter().enumerate() {
        for layout in [Layout::Dense, Layout::Blhd] {
            for transposed in [false, true] {
                if !due(&format!("large gradients of products, {layout:?}, {transposed}")) {
                    continue;
                }
                let case = Case { transposed, ..Case::of(size, Target::Gpu, layout, seed + n as u64) };
                report.record(&format!("{size:?}"), &case, case.outcome(1));
            }
        }
    }
    report.finish();
}

#[test]
fn random_products_match_the_reference() {
    crate::harness::in_turn!();
    let seed = seed();
    let mut report = Report::new("projection backward");
    for n in (Draws { name: "projection backward", always: 30, most: 80, group: 1 }).numbers() {
        let case = Case::random(seed.wrapping_add(n as u64));
        report.record(&format!("draw {n}"), &case, case.outcome(1));
    }
    report.finish();
}

/// Sums over batch entries, rows and heads that are not adjacent in memory.
#[test]
fn shared_matrix_gets_summed_gradient() {
    crate::harness::in_turn!();
    let mut report = Report::new("projection backward, shared");
    for form in FORMS {
        for (batch, length, heads, read, layout) in
            [(3, 5, 4, 8, Layout::Dense), (2, 21, 3, 5, Layout::Dense), (3, 9, 2, 7, Layout::Window(11))]
        {
            let case = Case {
                narrow: true,
                shared: true,
                batch,
                length,
                heads,
                dim: 12,
                features: heads * read,
                ..Case::of([1, 1, 1], form, layout, 5)
            };
            report.record("shared", &case, case.outcome(1));
        }
    }
    report.finish();
}

/// With `accumulate`, every gradient adds to the earlier contents, in every type, and in vec4 too.
#[test]
fn gradients_accumulate() {
    let seed = seed();
    crate::harness::in_turn!();
    let mut report = Report::new("projection backward, accumulated");
    for (n, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
        for (form, layout) in [(FORMS[0], Layout::Dense), (FORMS[1], Layout::Window(3))] {
            let case = Case {
                accumulates: true,
                dtypes: [dtype; 3],
                wanted: [Some(dtype); 3],
                ..Case::of([66, 24, 36], form, layout, seed.wrapping_add(n as u64))
            };
            report.record("accumulated", &case, case.outcome(1));
        }
    }
    report.finish();
}

#[test]
fn the_same_call_gives_the_same_bits() {
    let mut report = Report::new("projection backward, bits");
    for form in FORMS {
        for (size, layout) in [([130, 65, 63], Layout::Window(5)), ([260, 72, 64], Layout::Blhd)] {
            let case = Case::of(size, form, layout, 77);
            report.record("20 times", &case, case.outcome(20));
        }
    }
    report.finish();
}

/// Queries, keys and values of one x in one call: d_x is the sum over the three. The gradient of a
/// tied weight is a sum, too.
#[test]
fn shared_gradient_gets_the_sum() {
    let profile = full();
    let gpu = &profile.gpu;
    let (rows, d_in) = (37, 20);
    let rng = &mut Rng::new(3);
    let outs = [24, 8, 8];
    let x = rng.normals(rows * d_in);
    let weights = outs.map(|out| rng.normals(out * d_in));
    let d_ys = outs.map(|out| rng.normals(rows * out));
    let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
    let x_buffer = upload(&x);
    let [w_buffers, y_buffers] = [&weights, &d_ys].map(|all| all.each_ref().map(|x| upload(x)));
    for form in FORMS {
        let before: Vec<f32> = (0..rows * d_in).map(|n| n as f32 / 64.0).collect();
        for (accumulate, tied) in [(false, false), (true, false), (false, true)] {
            let d_x = upload(&before);
            let d_ws = [0, 1, 2].map(|n| gpu.buffer(4 * outs[n] * d_in).expect("a buffer"));
            let products: Vec<_> = [0, 1, 2]
                .map(|n| {
                    let view = |buffer, columns| TensorView::sequence(buffer, DType::F32, [1, rows, columns]);
                    let matrix = |buffer| TensorView::matrix(buffer, DType::F32, [outs[n], d_in]);
                    let d_w = if tied && n == 2 { &d_ws[1] } else { &d_ws[n] };
                    gradients(view(&x_buffer, d_in), matrix(&w_buffers[n]), view(&y_buffers[n], outs[n]))
                        .d_x(view(&d_x, d_in))
                        .d_weight(matrix(d_w))
                        .accumulate(accumulate && n == 0)
                })
                .to_vec();
            let operator =
                Projection::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
            gpu.submit(|e| operator.backward(e, &products)).expect("a call");
            let mut want: Vec<f64> = if accumulate { widen(&before) } else { vec![0.0; rows * d_in] };
            let parts = [0, 1, 2].map(|n| {
                let [x, w, y] = [&x, &weights[n], &d_ys[n]].map(|x| widen::<f64>(x));
                project_backward(&x, &w, &y, d_in, outs[n]).expect("it fits")
            });
            parts.iter().for_each(|part| want.iter_mut().zip(&part.d_x).for_each(|(sum, x)| *sum += x));
            let near = |got: &wgpu_attention::wgpu::Buffer, want: &[f64], what: &str| {
                let got: Vec<f32> = gpu.download(got, want.len()).expect("a read-back");
                let off = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
                assert!(off < 2e-5, "{form:?}, {accumulate}, {tied}: {what} is off by {off}");
            };
            near(&d_x, &want, "d_x");
            near(&d_ws[0], &parts[0].d_weight, "d_weight");
            let sum: Vec<f64> = parts[1]
                .d_weight
                .iter()
                .zip(&parts[2].d_weight)
                .map(|(a, b)| a + if tied { *b } else { 0.0 })
                .collect();
            near(&d_ws[1], &sum, "d_weight");
        }
    }
}

/// A NaN reaches exactly the results that depend on it.
#[test]
fn nan_shows() {
    let gpu = &full().gpu;
    for form in FORMS {
        let (rows, d_in, d_out) = (70, 5, 67);
        let mut d_y = vec![0.5f32; rows * d_out];
        d_y[3 * d_out + 2] = f32::NAN;
        let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
        let (x, w, y) = (upload(&vec![1.0; rows * d_in]), upload(&vec![1.0; d_out * d_in]), upload(&d_y));
        let [d_x, d_w, d_b] =
            [rows * d_in, d_out * d_in, d_out].map(|n| gpu.buffer(4 * n).expect("a buffer"));
        let view = |buffer, columns| TensorView::sequence(buffer, DType::F32, [1, rows, columns]);
        let matrix = |buffer| TensorView::matrix(buffer, DType::F32, [d_out, d_in]);
        let call = gradients(view(&x, d_in), matrix(&w), view(&y, d_out))
            .d_x(view(&d_x, d_in))
            .d_weight(matrix(&d_w))
            .d_bias(TensorView::vector(&d_b, DType::F32, d_out));
        let operator =
            Projection::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
        gpu.submit(|e| operator.backward(e, &[call])).expect("a call");
        for (buffer, n, of, width) in [(&d_x, rows, 3, d_in), (&d_w, d_out, 2, d_in), (&d_b, d_out, 2, 1)] {
            let got: Vec<f32> = gpu.download(buffer, n * width).expect("a read-back");
            for (i, row) in got.chunks_exact(width).enumerate() {
                assert!(row.iter().all(|x| x.is_nan() == (i == of)), "{form:?}: row {i}: {row:?}");
            }
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..7).map(|_| gpu.buffer(1 << 12).expect("a buffer")).collect();
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    // Four heads of 2 from 6 features.
    let (x, w, d_y) = (view(0, [2, 1, 5, 6]), view(1, [1, 1, 8, 6]), view(2, [2, 4, 5, 2]));
    let (d_x, d_w, d_b) = (view(3, [2, 1, 5, 6]), view(4, [1, 1, 8, 6]), view(5, [1, 1, 1, 8]));
    let good = || gradients(x, w, d_y).d_x(d_x).d_weight(d_w).d_bias(d_b);
    let operator = Projection::with_pipelines(gpu.pipelines());
    let refused = |calls: &[ProjectionBackward], words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, calls).expect_err(words[0]).to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
    };
    let new = |x, w, d_y| [gradients(x, w, d_y).d_x(d_x)];
    let typed = |n: usize, shape, dtype| TensorView::new(&buffers[n], dtype, shape);
    refused(&new(view(0, [2, 2, 5, 6]), w, d_y), &["`x`", "heads must be 1", "got 2"]);
    refused(&new(x, w, view(2, [3, 4, 5, 2])), &["`d_y`", "batch must be 2", "got 3"]);
    refused(&new(x, w, view(2, [2, 4, 4, 2])), &["`d_y`", "length must be 5", "got 4"]);
    refused(&new(x, w, view(2, [2, 4, 0, 2])), &["`d_y`", "length is 0"]);
    refused(&new(x, view(1, [1, 1, 7, 6]), d_y), &["`linear.weight`", "out (rows) must be 8", "got 7"]);
    refused(&new(x, view(1, [1, 1, 8, 5]), d_y), &["`linear.weight`", "in (columns) must be 6", "got 5"]);
    refused(&new(typed(0, [2, 1, 5, 6], DType::U32), w, d_y), &["`x`", "F32, F16 or BF16", "U32"]);
    refused(&new(x, w, typed(2, [2, 4, 5, 2], DType::Bool)), &["`d_y`", "F32, F16 or BF16", "Bool"]);
    refused(&new(x, w, d_y.with_offset(1 << 12)), &["`d_y`", "byte"]);
    refused(&new(x, w, d_y.with_strides([usize::MAX; 4])), &["`d_y`", "2^32"]);
    let far = [1 << 20, 1, 1 << 20, 6];
    let many = gradients(
        view(0, far).with_strides([0, 0, 0, 1]),
        w,
        view(2, [1 << 20, 4, 1 << 20, 2]).with_strides([0, 2, 0, 1]),
    );
    refused(&[many.d_bias(d_b)], &["`x`", "2^32"]);
    refused(&[good().d_x(view(3, [2, 1, 5, 5]))], &["`d_x`", "dim must be 6", "got 5"]);
    refused(&[good().d_x(view(3, [2, 1, 4, 6]))], &["`d_x`", "length must be 5", "got 4"]);
    refused(&[good().d_x(typed(3, [2, 1, 5, 6], DType::U32))], &["`d_x`", "F32, F16 or BF16"]);
    refused(&[good().d_x(d_x.with_strides([0, 0, 6, 1]))], &["`d_x`", "share memory"]);
    refused(&[good().d_weight(view(4, [1, 1, 6, 8]))], &["`d_weight`", "out (rows) must be 8", "got 6"]);
    refused(&[good().d_weight(d_w.with_strides([0, 0, 0, 1]))], &["`d_weight`", "share memory"]);
    refused(&[good().d_bias(view(5, [1, 1, 1, 9]))], &["`d_bias`", "dim must be 8", "got 9"]);
    refused(&[good().d_bias(d_b.with_strides([0, 0, 0, 0]))], &["`d_bias`", "share memory"]);
    refused(&[good().d_bias(d_b.with_offset(1 << 11))], &["`d_bias`", "byte"]);
    refused(&[good().d_x(view(0, [2, 1, 5, 6]))], &["`d_x`", "`x`"]);
    refused(&[good().d_weight(view(2, [1, 1, 8, 6]))], &["`d_weight`", "`d_y`"]);
    refused(&[good().d_bias(view(1, [1, 1, 1, 8]))], &["`d_bias`", "`linear.weight`"]);
    refused(&[good().d_bias(view(4, [1, 1, 1, 8]))], &["`d_weight`", "`d_bias`", "overlap"]);
    // The same memory in another view.
    refused(&[good(), good().d_x(d_x.with_offset(1))], &["`d_x`", "overlap"]);
    refused(
        &[good(), good().d_weight(d_w.transposed(0, 1).with_strides([48, 48, 1, 8]))],
        &["`d_weight`", "overlap"],
    );
    // An output that is the input of another product.
    refused(&[good(), gradients(x, d_w, d_y).d_x(d_x)], &["`d_weight`", "`linear.weight`"]);
    let no_storage = gpu.device().create_buffer(&wgpu_attention::wgpu::BufferDescriptor {
        label: None,
        size: 1 << 12,
        usage: wgpu_attention::wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let unusable = TensorView::new(&no_storage, DType::F32, [1, 1, 1, 8]);
    refused(&[good().d_bias(unusable)], &["`d_bias`", "STORAGE"]);
    // Four heads do not divide 6 features.
    refused(
        &[ProjectionBackward::new(forward(x, w, d_y).narrow(true), d_y)],
        &["`features` is 6", "4 (`heads`)"],
    );
    let active = forward(x, w, d_y).activation(Activation::Silu);
    refused(&[ProjectionBackward::new(active, d_y).d_x(d_x)], &["`activation`", "`Elementwise`"]);
    let narrow = forward(view(0, [2, 1, 5, 8]), view(1, [1, 1, 2, 2]), d_y).narrow(true);
    let narrow = ProjectionBackward::new(narrow, d_y);
    refused(&[narrow.d_weight(view(4, [1, 4, 2, 2]))], &["`d_weight`", "heads must be 1", "got 4"]);
    let units = KernelOptions::new().matrix_units(MatrixUnits::Always);
    let insisting = Projection::with_pipelines(gpu.pipelines()).kernel_options(units);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let error = insisting.backward(&mut encoder, &[good()]).expect_err("no matrix units");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");

    assert!(operator.backward(&mut encoder, &[]).is_ok());
    assert!(operator.backward(&mut encoder, &[gradients(x, w, d_y)]).is_ok());
    assert!(operator.backward(&mut encoder, &[good(), good()]).is_ok());
}
