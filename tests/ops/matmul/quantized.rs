//! Products with quantised weights, and rows of quantised tables, compared with the reference. They
//! cover every format, target, number of rows, layout and type.

use half::f16;
use wgpu_attention::matmul::{
    QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{dequantize, project, quantize};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, FORMS, Judged, Profile, Report, Rng, Values, defaults, full, rest, stored};

/// Returns blocks of random bits. Their scales are typical of weights, or near the smallest of f16.
/// Offsets have the same sign as in files.
fn blocks(format: QuantizedFormat, n: usize, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..n {
        // Below 2⁻¹⁴ an f16 is subnormal.
        let d = if rng.chance(0.2) { 3e-6 } else { 0.01 } * (1.0 + rng.normal().abs());
        let d = if rng.chance(0.1) { -d } else { d };
        bytes.extend(f16::from_f32(d).to_le_bytes());
        if format == QuantizedFormat::Q4_1 {
            bytes.extend(f16::from_f32(-8.0 * d).to_le_bytes());
        }
        let rest = format.block_bytes() - if format == QuantizedFormat::Q4_1 { 4 } else { 2 };
        bytes.extend((0..rest).map(|_| rng.word() as u8));
    }
    bytes
}

/// Uploads `bytes` after `offset` bytes that must not affect a result, and with more bytes after
/// them.
fn upload(profile: &Profile, bytes: &[u8], offset: usize) -> wgpu::Buffer {
    let mut all = vec![0xff; offset];
    all.extend(bytes);
    all.resize(all.len().next_multiple_of(4) + 64, 0xff);
    profile.gpu.upload(&all).expect("an upload")
}

struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    format: QuantizedFormat,
    /// The sizes batch, length, heads, dim, features.
    sizes: [usize; 5],
    /// The types of x and out.
    dtypes: [DType; 2],
    offset: usize,
    seed: u64,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Case { profile, form, layout, format, sizes, dtypes, offset, .. } = self;
        let profile = profile.name;
        write!(f, "{profile}, {form:?}, {layout:?}, {format:?}, {sizes:?}, {dtypes:?}, offset {offset}")
    }
}

impl Case {
    fn random(form: Target, format: QuantizedFormat, rows: usize, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x000b_10c5);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let first = if rng.chance(0.5) { DType::F32 } else { rng.pick(FLOATS) };
        let window = Layout::Window(rng.word());
        let batch = if rows.is_multiple_of(3) { 3 } else { 1 };
        Case {
            profile,
            form,
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window]),
            format,
            sizes: [
                batch,
                rows / batch,
                rng.pick(&[1, 3]),
                rng.pick(&[1, 7, 16, 64, 70]),
                32 * rng.pick(&[1, 2, 3, 18]),
            ],
            dtypes: [first, if rng.chance(0.6) { first } else { DType::F32 }],
            offset: 4 * rng.below(100),
            seed,
        }
    }

    fn outcome(&self) -> Result<f64, String> {
        let Case { profile, layout, format, sizes, dtypes, offset, .. } = *self;
        let [batch, length, heads, dim, features] = sizes;
        let rng = &mut Rng::new(self.seed);
        profile.tidy();
        let bytes = blocks(format, heads * dim * features / QuantizedFormat::BLOCK, rng);
        let x = stored(&rng.normals(batch * length * features), dtypes[0]);
        let [x_place, _] = layout.places([[batch, 1, length, features], [1; 4]]);
        let [_, out_place] = layout.places([[1; 4], [batch, heads, length, dim]]);
        let x_at = Placed::input(profile, Values::Floats(&x), dtypes[0], x_place);
        let out = Placed::output(profile, dtypes[1], out_place);
        let buffer = upload(profile, &bytes, offset);
        let weight = QuantizedMatrix::new(&buffer, format, [heads * dim, features]).with_offset(offset);
        let operator = QuantizedProjection::with_pipelines(profile.gpu.pipelines())
            .kernel_options(KernelOptions::new().target(self.form));
        let call = QuantizedForward::new(x_at.view(), weight, out.view());
        profile.gpu.submit(|e| operator.forward(e, &[call])).map_err(|e| e.to_string())?;
        let got = pollster::block_on(out.download_async("out", profile))?;

        // [batch, heads, length, dim] of [batch, length, heads, dim]
        let by_heads = |y: Vec<f64>| -> Vec<f64> {
            let at = |n: usize| {
                let (b, h, i, d) =
                    (n / (heads * length * dim), n / (length * dim) % heads, n / dim % length, n % dim);
                ((b * length + i) * heads + h) * dim + d
            };
            (0..y.len()).map(|n| y[at(n)]).collect()
        };
        let weights = dequantize::<f32>(format, &bytes).map_err(|e| e.to_string())?;
        let wide: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
        let x_wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let product = |e: wgpu_attention::Error| e.to_string();
        let want = by_heads(project(&x_wide, &wide, None, features, heads * dim).map_err(product)?);
        let naive = project(&x, &weights, None, features, heads * dim).map_err(product)?;
        let naive = by_heads(naive.into_iter().map(f64::from).collect());
        let naive: Vec<f32> = naive.into_iter().map(|x| x as f32).collect();
        let term = largest(x_wide) * largest(wide);
        let tolerance = Tolerance::from_naive(&widened(&naive, dtypes[1]), &want, term, EPSILON_F32);
        Judged { want, tolerance }.judge(&got)
    }
}

/// Rows that are stored as whole vectors.
#[test]
fn aligned_rows_match_the_reference() {
    let mut report = Report::new("quantized, aligned rows");
    for (form, format) in FORMS.into_iter().zip(QuantizedFormat::ALL) {
        let layout = Layout::Dense;
        let (sizes, dtypes) = ([1, 33, 2, 16, 64], [DType::F32; 2]);
        let case = Case { profile: full(), form, layout, format, sizes, dtypes, offset: 8, seed: 5 };
        report.record("33 rows", &case, case.outcome());
    }
    report.finish();
}

#[test]
fn products_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("quantized");
    for form in FORMS {
        for (f, format) in QuantizedFormat::ALL.into_iter().enumerate() {
            for (r, rows) in [1, 2, 3, 4, 5, 8, 9, 33, 66].into_iter().enumerate() {
                for n in 0..6 {
                    if n > 1 && !rest(&format!("quantized {form:?} {format:?} {rows} {n}")) {
                        continue;
                    }
                    let case = Case::random(form, format, rows, (1000 * f + 100 * r + n) as u64);
                    report.record(&format!("{rows} rows"), &case, case.outcome());
                }
            }
        }
    }
    report.finish();
}

/// More columns than the workgroups along an axis: each workgroup computes several.
#[test]
fn tables_past_grid_are_complete() {
    let mut report = Report::new("quantized, many columns");
    for form in FORMS {
        let case = Case {
            profile: defaults(),
            form,
            layout: Layout::Dense,
            format: QuantizedFormat::Q8_0,
            sizes: [1, 1, 1, 4 * 65535 + 9, 32],
            dtypes: [DType::F32; 2],
            offset: 0,
            seed: 7,
        };
        report.record("many columns", &case, case.outcome());
    }
    report.finish();
}

/// The same product has the same bits in every run.
#[test]
fn bits_are_the_same_every_time() {
    let gpu = &full().gpu;
    let rng = &mut Rng::new(3);
    let weights = upload(full(), &blocks(QuantizedFormat::Q4_1, 18 * 40, rng), 0);
    let x = gpu.upload(&rng.normals(576)).expect("x");
    let out = gpu.buffer(4 * 40).expect("out");
    for form in FORMS {
        let operator = QuantizedProjection::with_pipelines(gpu.pipelines())
            .kernel_options(KernelOptions::new().target(form));
        let weight = QuantizedMatrix::new(&weights, QuantizedFormat::Q4_1, [40, 576]);
        let call = QuantizedForward::new(
            TensorView::sequence(&x, DType::F32, [1, 1, 576]),
            weight,
            TensorView::sequence(&out, DType::F32, [1, 1, 40]),
        );
        let run = || {
            gpu.submit(|e| operator.forward(e, &[call])).expect("a recording");
            gpu.download::<u32>(&out, 40).expect("a read-back")
        };
        let first = run();
        assert!((0..3).all(|_| run() == first), "{form:?}");
    }
}

/// Each weight is exactly that of its block, on the device too. An invalid row id gives NaN.
#[test]
fn rows_of_tables_are_exact() {
    let mut report = Report::new("quantized rows");
    for (f, format) in QuantizedFormat::ALL.into_iter().enumerate() {
        for n in 0..6u64 {
            let rng = &mut Rng::new(100 * f as u64 + n);
            let profile = if n % 2 == 0 { full() } else { defaults() };
            let layout = if n < 3 { Layout::Dense } else { Layout::Window(rng.word()) };
            let dtype = [DType::F32, DType::F32, DType::BF16][n as usize % 3];
            let (rows, features, offset) = (rng.between(1, 50), 32 * rng.between(1, 4), 4 * rng.below(9));
            let [batch, length] = [rng.pick(&[1, 2]), rng.pick(&[1, 5, 40])];
            let bytes = blocks(format, rows * features / 32, rng);
            let ids: Vec<u32> = (0..batch * length)
                .map(|i| if i == 3 { u32::MAX } else { rng.below(rows + 1) as u32 })
                .collect();
            profile.tidy();
            let buffer = upload(profile, &bytes, offset);
            let [ids_place, _] = layout.places([[batch, 1, length, 1], [1; 4]]);
            let [_, out_place] = layout.places([[1; 4], [batch, 1, length, features]]);
            let ids_at = Placed::input(profile, Values::Numbers(&ids), DType::U32, ids_place);
            let out = Placed::output(profile, dtype, out_place);
            let table = QuantizedMatrix::new(&buffer, format, [rows, features]).with_offset(offset);
            let operator = QuantizedProjection::with_pipelines(profile.gpu.pipelines());
            let call = QuantizedRows::new(table, ids_at.view(), out.view());
            let outcome = (|| {
                profile.gpu.submit(|e| operator.rows(e, &call)).map_err(|e| e.to_string())?;
                let got = pollster::block_on(out.download_async("out", profile))?;
                let weights = dequantize::<f32>(format, &bytes).map_err(|e| e.to_string())?;
                let weights = stored(&weights, dtype);
                let missing = vec![f32::NAN; features];
                let row = |id: &u32| weights.chunks(features).nth(*id as usize).unwrap_or(&missing).to_vec();
                let want: Vec<f32> = ids.iter().flat_map(row).collect();
                let same =
                    |(got, want): (&f64, &f32)| *got == f64::from(*want) || got.is_nan() && want.is_nan();
                let off = got.iter().zip(&want).position(|pair| !same(pair));
                match off {
                    None if got.len() == want.len() => Ok(0.0),
                    _ => Err(format!("differs at {off:?}: {:?}", off.map(|n| (got[n], want[n])))),
                }
            })();
            let setup = format!("{}, {layout:?}, {format:?}, {dtype:?}", profile.name);
            report.record(&format!("{rows} rows of {features}"), &setup, outcome);
        }
    }
    report.finish();
}

/// A quantised weight is off by half a step at most. A single step agrees with its block.
#[test]
fn reference_quantises_and_dequantises() {
    let rng = &mut Rng::new(5);
    let x = rng.normals(32 * 50);
    for (format, steps) in [(QuantizedFormat::Q4_1, 15.0), (QuantizedFormat::Q8_0, 254.0)] {
        let bytes = quantize(format, &x).expect("blocks");
        assert_eq!(bytes.len(), 50 * format.block_bytes());
        let back = dequantize::<f64>(format, &bytes).expect("weights");
        for (block, back) in x.chunks(32).zip(back.chunks(32)) {
            let span = match format {
                QuantizedFormat::Q4_1 => {
                    largest(block.iter().map(|x| f64::from(*x - block[0]))).max(0.0) * 2.0
                }
                _ => 2.0 * largest(block.iter().map(|x| f64::from(*x))),
            };
            // Half a step, and the rounding of the scales to f16.
            let most = span / steps * 0.5 + span / 1024.0;
            for (x, back) in block.iter().zip(back) {
                assert!((f64::from(*x) - back).abs() <= most, "{format:?}: {x} became {back}, step {most}");
            }
        }
    }
    // By hand: d = 2, m = −3; byte 1 is 0x5a: weight 1 is 10, weight 17 is 5.
    let mut block = [f16::from_f32(2.0).to_le_bytes(), f16::from_f32(-3.0).to_le_bytes()].concat();
    block.extend([0x00, 0x5a]);
    block.resize(20, 0);
    let weights = dequantize::<f32>(QuantizedFormat::Q4_1, &block).expect("a block");
    assert_eq!((weights[0], weights[1], weights[16], weights[17]), (-3.0, 17.0, -3.0, 7.0));
    let mut block = f16::from_f32(0.5).to_le_bytes().to_vec();
    block.extend([0x80, 0x7f]);
    block.resize(34, 0xff);
    let weights = dequantize::<f32>(QuantizedFormat::Q8_0, &block).expect("a block");
    assert_eq!(weights[..3], [-64.0, 63.5, -0.5]);
    assert!(dequantize::<f32>(QuantizedFormat::Q8_0, &block[1..]).is_err());
    assert!(quantize(QuantizedFormat::Q4_1, &x[1..]).is_err());
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..4).map(|_| gpu.buffer(8192).expect("a buffer")).collect();
    let [q4, q8] = QuantizedFormat::ALL;
    let matrix = |format, shape| QuantizedMatrix::new(&buffers[0], format, shape);
    let sequence = |n: usize, shape| TensorView::sequence(&buffers[n], DType::F32, shape);
    let operator = QuantizedProjection::with_pipelines(gpu.pipelines());
    let refused = |call: QuantizedForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &[call]).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &[call]).is_err());
    };
    let (x, out) = (sequence(1, [1, 2, 64]), sequence(2, [1, 2, 8]));
    let good = matrix(q4, [8, 64]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    operator.forward(&mut encoder, &[QuantizedForward::new(x, good, out)]).expect("a good call");
    operator.forward(&mut encoder, &[]).expect("no call");
    refused(QuantizedForward::new(x, matrix(q4, [8, 48]), out), &["48", "block", "32"]);
    refused(QuantizedForward::new(x, matrix(q8, [8, 0]), out), &["`weight`", "in (columns)"]);
    refused(QuantizedForward::new(x, matrix(q8, [0, 64]), out), &["`weight`", "out (rows)"]);
    refused(QuantizedForward::new(x, good.with_offset(2), out), &["offset", "2", "4"]);
    refused(QuantizedForward::new(x, good.with_offset(8192), out), &["`weight`", "8192"]);
    refused(QuantizedForward::new(x, matrix(q4, [usize::MAX, 64]), out), &["`weight`"]);
    refused(QuantizedForward::new(x, matrix(q4, [9, 64]), out), &["linear.weight", "out (rows)", "8", "9"]);
    refused(
        QuantizedForward::new(x, matrix(q4, [8, 96]), out),
        &["linear.weight", "in (columns)", "64", "96"],
    );
    refused(QuantizedForward::new(x, good, sequence(1, [1, 2, 8])), &["`out`", "`x`"]);
    refused(QuantizedForward::new(x, good, sequence(0, [1, 2, 8])), &["`out`", "`weight`"]);
    refused(QuantizedForward::new(x, good, sequence(2, [1, 3, 8])), &["`out`", "length"]);
    let numbers = TensorView::sequence(&buffers[1], DType::U32, [1, 2, 64]);
    refused(QuantizedForward::new(numbers, good, out), &["`x`", "F32, F16 or BF16"]);
    refused(
        QuantizedForward::new(x, good, TensorView::sequence(&buffers[2], DType::Bool, [1, 2, 8])),
        &["`out`"],
    );

    let refused = |call: QuantizedRows, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.rows(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.rows(&mut pass, &call).is_err());
    };
    let ids = |shape| TensorView::new(&buffers[1], DType::U32, shape);
    let out = sequence(2, [1, 2, 64]);
    operator.rows(&mut encoder, &QuantizedRows::new(good, ids([1, 1, 2, 1]), out)).expect("a good call");
    refused(QuantizedRows::new(good, sequence(1, [1, 2, 1]), out), &["`ids`", "U32"]);
    refused(QuantizedRows::new(good, ids([1, 1, 2, 2]), out), &["`ids`", "dim"]);
    refused(QuantizedRows::new(good, ids([1, 1, 3, 1]), out), &["`out`", "length"]);
    refused(QuantizedRows::new(matrix(q8, [8, 32]), ids([1, 1, 2, 1]), out), &["`out`", "dim", "32"]);
    refused(QuantizedRows::new(good, ids([1, 1, 2, 1]), sequence(0, [1, 2, 64])), &["`out`", "`table`"]);
    refused(QuantizedRows::new(good, ids([1, 1, 2, 1]), sequence(1, [1, 2, 64])), &["`out`", "`ids`"]);
}
