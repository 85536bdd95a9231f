//! Errors of rotations and sums, on devices and in the reference.

use wgpu_attention::position::{
    AddPositions, MAX_POSITION, PositionTable, Positions, Rope, RopeConfig, RopeOrder, RopeScaling,
    RopeSections, Rotate, Rotation, RowPositions, Sinusoid,
};
use wgpu_attention::reference;
use wgpu_attention::wgpu;
use wgpu_attention::{DType, Error, Gpu, HostTensor, TensorView};

use super::says;
use crate::harness::device::devices;
use crate::harness::{defaults, full};

#[test]
fn bad_configurations_are_refused() {
    let device = full().gpu.device();
    let refused = |config: RopeConfig, words: &[&str]| {
        says(config.check().expect_err("refused"), words);
        says(Rope::new(device, config).expect_err("refused"), words);
        says(
            reference::rotate(&[1.0f64; 4], [1, 1, 1, 4], &config, RowPositions::Start(0))
                .expect_err("refused"),
            words,
        );
        assert!(config.frequencies().is_empty());
    };
    let four = RopeConfig::new(4);
    refused(RopeConfig::new(0), &["rotary_dim is 0"]);
    refused(RopeConfig::new(7), &["`rotary_dim` is 7", "multiple of 2"]);
    refused(RopeConfig::new(65_538), &["`rotary_dim` is 65538", "at most 65536"]);
    for base in [1.0, 0.0, -10.0, f64::NAN, f64::INFINITY] {
        refused(four.base(base), &["rope base is", &base.to_string(), "above 1"]);
    }
    for factor in [0.5, -1.0, f64::NAN, f64::INFINITY] {
        refused(four.scaling(RopeScaling::Linear { factor }), &["`factor` is", "at least 1"]);
        refused(four.scaling(RopeScaling::NtkAware { factor }), &["`factor` is", "at least 1"]);
    }
    assert!(four.scaling(RopeScaling::Linear { factor: 1.0 }).check().is_ok());
    let yarn = |factor, original_len, beta_fast, beta_slow, attention_factor| {
        four.scaling(RopeScaling::Yarn { factor, original_len, beta_fast, beta_slow, attention_factor })
    };
    assert!(yarn(2.0, 512, 32.0, 1.0, None).check().is_ok());
    refused(yarn(0.0, 512, 32.0, 1.0, None), &["`factor` is 0"]);
    refused(yarn(2.0, 0, 32.0, 1.0, None), &["`original_len` is 0"]);
    refused(yarn(2.0, 512, 32.0, 0.0, None), &["`beta_slow` is 0"]);
    refused(yarn(2.0, 512, 1.0, 1.0, None), &["`beta_fast` is 1"]);
    refused(yarn(2.0, 512, f64::NAN, 1.0, None), &["`beta_fast` is NaN"]);
    for amplitude in [0.0, -1.0, 1e300, 1e-300, f64::NAN] {
        refused(yarn(2.0, 512, 32.0, 1.0, Some(amplitude)), &["`attention_factor` is"]);
    }
    let llama = |factor, low_freq_factor, high_freq_factor, original_len| {
        four.scaling(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len })
    };
    assert!(llama(8.0, 1.0, 4.0, 8192).check().is_ok());
    refused(llama(f64::NAN, 1.0, 4.0, 8192), &["`factor` is NaN"]);
    refused(llama(8.0, 0.0, 4.0, 8192), &["`low_freq_factor` is 0"]);
    refused(llama(8.0, 4.0, 4.0, 8192), &["`high_freq_factor` is 4"]);
    refused(llama(8.0, 1.0, 4.0, 0), &["`original_len` is 0"]);

    let contiguous = |pairs| four.sections(RopeSections::Contiguous(pairs));
    let interleaved = |n: usize, pairs| RopeConfig::new(2 * n).sections(RopeSections::Interleaved(pairs));
    assert!(contiguous([0, 2, 0]).check().is_ok() && interleaved(8, [3, 3, 2]).check().is_ok());
    let sum = "the sum of the rope's sections is";
    refused(contiguous([1, 1, 1]), &[sum, "3;", "`rotary_dim / 2`"]);
    refused(contiguous([1, 0, 0]), &[sum, "1;"]);
    refused(contiguous([usize::MAX, 3, 2]), &[sum]);
    refused(interleaved(8, [3, 3, 1]), &[sum, "7;"]);
    refused(interleaved(8, [2, 3, 3]), &["the interleaved section of width is 3", "at most a third"]);
    refused(interleaved(7, [1, 3, 3]), &["the interleaved section of height is 3", "at most a third"]);

    for (dim, base, words) in
        [(0, 1e4, "sinusoid dim is 0"), (4, 0.5, "sinusoid base is 0.5"), (65_537, 1e4, "65537")]
    {
        says(Sinusoid::new(device, dim, base).expect_err("refused"), &[words]);
        says(reference::sinusoid::<f64>(dim, base, 0, 1).expect_err("refused"), &[words]);
    }
    // 65536 channels are 192 MiB of table.
    let small = defaults().gpu.device();
    let words = ["`rope`", "201326592", "134217728"];
    says(Rope::new(small, RopeConfig::new(65_536)).expect_err("refused"), &words);
    says(Sinusoid::new(small, 65_536, 1e4).expect_err("refused"), &["`sinusoid`", "201326592"]);
}

/// The parts of a rotation, to be spoiled one by one.
struct Turn<'a> {
    x: TensorView<'a>,
    out: Option<TensorView<'a>>,
    rotation: Rotation<'a>,
    at: RowPositions<TensorView<'a>>,
}

impl<'a> Turn<'a> {
    fn call(&self) -> Rotate<'a> {
        Rotate::new(self.x, self.rotation, self.at).out(self.out)
    }
}

/// The parts of a sum.
struct Sum<'a> {
    x: TensorView<'a>,
    out: Option<TensorView<'a>>,
    table: PositionTable<&'a Sinusoid, TensorView<'a>>,
    at: RowPositions<TensorView<'a>>,
    scale: f64,
}

impl<'a> Sum<'a> {
    fn call(&self) -> AddPositions<'a> {
        AddPositions::new(self.x, self.table, self.at).out(self.out).scale(self.scale)
    }
}

/// The tensors of a rotation and of a sum, ready to be spoiled.
struct Bench {
    gpu: Gpu,
    rope: Rope,
    sinusoid: Sinusoid,
    x: wgpu::Buffer,
    out: wgpu::Buffer,
    table: wgpu::Buffer,
    positions: wgpu::Buffer,
}

const SHAPE: [usize; 4] = [2, 3, 5, 8];
const POISON: u32 = 0x7fc1_2345;

impl Bench {
    fn new(gpu: &Gpu) -> Self {
        let poison = vec![POISON; 1024];
        let upload = || gpu.upload(&poison).expect("an upload");
        Bench {
            gpu: gpu.clone(),
            rope: Rope::new(gpu.device(), RopeConfig::new(6)).expect("a rope"),
            sinusoid: Sinusoid::new(gpu.device(), 8, 1e4).expect("a sinusoid"),
            x: upload(),
            out: upload(),
            table: upload(),
            positions: upload(),
        }
    }

    fn rotate(&self) -> Turn<'_> {
        let [x, out] = [&self.x, &self.out].map(|b| TensorView::new(b, DType::F32, SHAPE));
        Turn {
            x,
            out: Some(out),
            rotation: Rotation::Rope(&self.rope),
            at: RowPositions::Tensor(self.at([2, 1, 5, 1])),
        }
    }

    fn add(&self) -> Sum<'_> {
        let [x, out] = [&self.x, &self.out].map(|b| TensorView::new(b, DType::F32, SHAPE));
        let table = PositionTable::Learned(TensorView::new(&self.table, DType::F32, [1, 1, 9, 8]));
        Sum { x, out: Some(out), table, at: RowPositions::Start(4), scale: 1.0 }
    }

    fn at(&self, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.positions, DType::U32, shape)
    }

    /// Checks that a call is refused in an encoder and in a pass, and that nothing was written.
    fn refuses(
        &self,
        words: &[&str],
        record: impl Fn(&Positions, &mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) {
        let positions = Positions::with_pipelines(self.gpu.pipelines());
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let error = record(&positions, &mut encoder).expect_err("refused");
        says(error, words);
        self.gpu.queue().submit([encoder.finish()]);
        for buffer in [&self.x, &self.out] {
            let now = self.gpu.download::<u32>(buffer, 1024).expect("a read-back");
            assert!(now.iter().all(|word| *word == POISON), "{words:?}: something was recorded");
        }
    }

    fn refuses_rotation<'a>(&'a self, words: &[&str], change: impl Fn(&mut Turn<'a>)) {
        let mut call = self.rotate();
        change(&mut call);
        let call = call.call();
        self.refuses(words, |positions, encoder| positions.rotate(encoder, &call));
        self.refuses(words, |positions, encoder| positions.rotate_backward(encoder, &call));
        self.refuses(words, |positions, encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            positions.rotate(&mut pass, &call)
        });
    }

    fn refuses_sum<'a>(&'a self, words: &[&str], change: impl Fn(&mut Sum<'a>)) {
        let mut call = self.add();
        change(&mut call);
        let call = call.call();
        self.refuses(words, |positions, encoder| positions.add(encoder, &call));
        self.refuses(words, |positions, encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            positions.add(&mut pass, &call)
        });
    }
}

#[test]
fn bad_calls_are_errors() {
    let bench = Bench::new(&full().gpu);
    let view = |buffer, dtype, shape| TensorView::new(buffer, dtype, shape);
    let Bench { x, out, table, .. } = &bench;
    let [f32, u32] = [DType::F32, DType::U32];
    let learned = |shape| PositionTable::Learned(view(table, f32, shape));

    // Tensors of either call.
    bench.refuses_rotation(&["`x`", "heads is 0"], |c| c.x = view(x, f32, [2, 0, 5, 8]));
    bench.refuses_rotation(&["`x`", "F32, F16 or BF16", "U32"], |c| c.x = view(x, u32, SHAPE));
    bench.refuses_rotation(&["`x`", "ends at byte", "4096"], |c| c.x = c.x.with_offset(900));
    bench.refuses_rotation(&["`x`", "2^32"], |c| c.x = c.x.with_offset(usize::MAX));
    bench.refuses_rotation(&["`out`", "F32, F16 or BF16", "Bool"], |c| {
        c.out = Some(view(out, DType::Bool, SHAPE))
    });
    bench.refuses_rotation(&["`out`", "heads must be 3", "got 2"], |c| {
        c.out = Some(view(out, f32, [2, 2, 5, 8]))
    });
    bench.refuses_rotation(&["`out`", "share memory"], |c| {
        c.out = Some(view(out, f32, SHAPE).with_strides([0, 0, 0, 1]));
    });
    bench.refuses_rotation(&["`x`", "share memory"], |c| {
        (c.x, c.out) = (c.x.with_strides([0, 0, 0, 1]), None);
    });
    bench.refuses_rotation(&["`out`", "shares its buffer with `x`"], |c| c.out = Some(c.x));
    bench.refuses_rotation(&["`out`", "shares its buffer with `positions`"], |c| {
        c.at = RowPositions::Tensor(view(out, u32, [1, 1, 5, 1]));
    });
    bench.refuses_rotation(&["`x`", "shares its buffer with `positions`"], |c| {
        (c.out, c.at) = (None, RowPositions::Tensor(view(x, u32, [1, 1, 5, 1])));
    });
    bench.refuses_sum(&["`out`", "dim must be 8", "got 7"], |c| c.out = Some(view(out, f32, [2, 3, 5, 7])));
    bench.refuses_sum(&["`out`", "shares its buffer with `table`"], |c| {
        c.table = PositionTable::Learned(view(out, f32, [1, 1, 9, 8]));
    });

    // Positions.
    bench.refuses_rotation(&["`positions`", "U32", "F32"], |c| {
        c.at = RowPositions::Tensor(view(table, f32, [2, 1, 5, 1]));
    });
    for (shape, words) in [
        ([3, 1, 5, 1], "batch must be 2 or 1, got 3"),
        ([2, 3, 5, 1], "axes must be 1 (3 are for a rotation by a rope with `RopeConfig::sections`), got 3"),
        ([2, 1, 4, 1], "length must be 5 or 1, got 4"),
        ([2, 1, 5, 2], "dim must be 1, got 2"),
        ([2, 1, 0, 1], "length is 0"),
    ] {
        bench.refuses_rotation(&["`positions`", words], |c| c.at = RowPositions::Tensor(bench.at(shape)));
        bench.refuses_sum(&["`positions`", words], |c| c.at = RowPositions::Tensor(bench.at(shape)));
    }
    let words = ["`start` is 16777212", "at most 2^24"];
    bench.refuses_rotation(&words, |c| c.at = RowPositions::Start(MAX_POSITION - 3));
    bench.refuses_rotation(&["`start` is 4294967295"], |c| c.at = RowPositions::Start(u32::MAX));
    bench.refuses_sum(&words, |c| {
        (c.at, c.table) = (RowPositions::Start(MAX_POSITION - 3), PositionTable::Sinusoid(&bench.sinusoid));
    });
    bench.refuses_sum(&["`table`", "length must be at least 10", "got 9"], |c| c.at = RowPositions::Start(5));
    bench.refuses_sum(&["`table`", "at least 4294967300", "got 9"], |c| c.at = RowPositions::Start(u32::MAX));

    // The added tensor, and the scale of x.
    let wide = Rope::new(bench.gpu.device(), RopeConfig::new(10)).expect("a rope");
    let mut call = bench.rotate();
    call.rotation = Rotation::Rope(&wide);
    bench.refuses(&["`x`", "dim must be at least 10", "got 8"], |p, e| p.rotate(e, &call.call()));
    bench.refuses_sum(&["`x`", "dim must be 8", "got 6"], |c| {
        (c.x, c.out) = (view(x, f32, [2, 3, 5, 6]), None);
        c.table = PositionTable::Sinusoid(&bench.sinusoid);
    });
    for (shape, words) in [
        ([2, 1, 9, 8], "batch must be 1, got 2"),
        ([1, 2, 9, 8], "heads must be 1, got 2"),
        ([1, 1, 9, 7], "dim must be 8, got 7"),
        ([1, 1, 0, 8], "length is 0"),
    ] {
        bench.refuses_sum(&["`table`", words], |c| c.table = learned(shape));
    }
    bench.refuses_sum(&["`table`", "F32, F16 or BF16", "U32"], |c| {
        c.table = PositionTable::Learned(view(table, u32, [1, 1, 9, 8]));
    });
    for scale in [f64::NAN, f64::INFINITY, 1e39] {
        bench.refuses_sum(&["`scale` is", "finite"], |c| c.scale = scale);
    }

    // Cosines and sines.
    let tables = |cos, sin| Rotation::CosSin { cos, sin, order: RopeOrder::Half };
    let shaped = |shape| view(table, f32, shape);
    bench.refuses_rotation(&["`cos`", "F32, F16 or BF16", "U32"], |c| {
        c.rotation = tables(view(table, u32, [2, 1, 5, 3]), shaped([2, 1, 5, 3]));
    });
    bench.refuses_rotation(&["`sin`", "F32", "U32"], |c| {
        c.rotation = tables(shaped([2, 1, 5, 3]), view(table, u32, [2, 1, 5, 3]));
    });
    for (shape, words) in [
        ([3, 1, 5, 3], "batch must be 2 or 1, got 3"),
        ([2, 3, 5, 3], "heads must be 1, got 3"),
        ([2, 1, 0, 3], "length is 0"),
        ([2, 1, 5, 0], "pairs is 0"),
        ([2, 1, 5, 5], "pairs must be at most 4 (half of the 8 channels of `x`), got 5"),
    ] {
        bench.refuses_rotation(&["`cos`", words], |c| c.rotation = tables(shaped(shape), shaped(shape)));
    }
    for (shape, words) in [
        ([1, 1, 5, 3], "batch must be 2, got 1"),
        ([2, 1, 4, 3], "length must be 5, got 4"),
        ([2, 1, 5, 2], "pairs must be 3, got 2"),
    ] {
        bench.refuses_rotation(&["`sin`", words], |c| {
            c.rotation = tables(shaped([2, 1, 5, 3]), shaped(shape));
        });
    }
    bench.refuses_rotation(&["`cos`", "length must be at least 6 (`start + length`), got 5"], |c| {
        (c.rotation, c.at) = (tables(shaped([2, 1, 5, 3]), shaped([2, 1, 5, 3])), RowPositions::Start(1));
    });
    bench.refuses_rotation(&["`cos`", "ends at byte", "4096"], |c| {
        c.rotation = tables(shaped([2, 1, 5, 3]).with_offset(1000), shaped([2, 1, 5, 3]));
    });
    bench.refuses_rotation(&["`out`", "shares its buffer with `sin`"], |c| {
        c.rotation = tables(shaped([2, 1, 5, 3]), view(out, f32, [2, 1, 5, 3]));
    });
    bench.refuses_rotation(&["`x`", "shares its buffer with `cos`"], |c| {
        c.out = None;
        c.rotation = tables(view(x, f32, [2, 1, 5, 3]), shaped([2, 1, 5, 3]));
    });

    // Positions on three axes.
    let rope = RopeConfig::new(6).sections(RopeSections::Contiguous([1, 1, 1]));
    let rope = Rope::new(bench.gpu.device(), rope).expect("a rope");
    for (shape, words) in [
        ([2, 2, 5, 1], "axes must be 3 (time, height and width) or 1, got 2"),
        ([2, 4, 5, 1], "axes must be 3 (time, height and width) or 1, got 4"),
        ([2, 0, 5, 1], "heads is 0"),
        // The order of `transformers`, without the transposition.
        ([3, 2, 5, 1], "batch must be 2 or 1, got 3"),
        ([2, 3, 4, 1], "length must be 5 or 1, got 4"),
    ] {
        let mut call = bench.rotate();
        (call.rotation, call.at) = (Rotation::Rope(&rope), RowPositions::Tensor(bench.at(shape)));
        let call = call.call();
        bench.refuses(&["`positions`", words], |p, e| p.rotate(e, &call));
        bench.refuses(&["`positions`", words], |p, e| p.rotate_backward(e, &call));
    }
    bench.refuses_rotation(&["`positions`", "axes must be 1", "got 3"], |c| {
        let table = shaped([2, 1, 5, 3]);
        (c.rotation, c.at) = (tables(table, table), RowPositions::Tensor(bench.at([2, 3, 5, 1])));
    });

    // Buffers and devices.
    let usage = wgpu::BufferUsages::COPY_SRC;
    let plain = wgpu::BufferDescriptor { label: None, size: 4096, usage, mapped_at_creation: false };
    let plain = bench.gpu.device().create_buffer(&plain);
    let mut call = bench.rotate();
    call.x = view(&plain, f32, SHAPE);
    bench.refuses(&["`x`", "STORAGE"], |p, e| p.rotate(e, &call.call()));

    let [one, other] = devices(|limits| {
        limits.max_storage_buffer_binding_size = 1 << 20;
    });
    let (bench, stranger) = (Bench::new(&one), Bench::new(&other));
    let mut call = bench.rotate();
    call.rotation = Rotation::Rope(&stranger.rope);
    bench.refuses(&["`rotation_table`", "another device"], |p, e| p.rotate(e, &call.call()));
    let big = one.buffer(2 << 20).expect("a buffer");
    let mut call = bench.rotate();
    call.x = view(&big, f32, SHAPE).with_strides([300_000, 8, 24, 1]);
    bench.refuses(&["`x`", "allows 1048576"], |p, e| p.rotate(e, &call.call()));

    // The unspoiled calls are right.
    let positions = Positions::with_pipelines(one.pipelines());
    one.submit(|e| positions.rotate(e, &bench.rotate().call())).expect("a rotation");
    one.submit(|e| positions.add(e, &bench.add().call())).expect("a sum");
}

#[test]
fn reference_refuses_bad_shapes() {
    let (x, config, shape) = ([0.5f64; 24], RopeConfig::new(4), [1, 2, 3, 4]);
    let rotate = |x: &[f64], shape, at| reference::rotate(x, shape, &config, at);
    says(
        rotate(&x[1..], shape, RowPositions::Start(0)).expect_err("refused"),
        &["`x`: 24 elements expected, got 23"],
    );
    says(rotate(&[], [1, 0, 3, 4], RowPositions::Start(0)).expect_err("refused"), &["heads is 0"]);
    says(rotate(&x, [1, 4, 3, 2], RowPositions::Start(0)).expect_err("refused"), &["dim must be at least 4"]);
    says(
        rotate(&x, shape, RowPositions::Start(MAX_POSITION - 1)).expect_err("refused"),
        &["`start` is 16777214"],
    );
    assert!(rotate(&x, shape, RowPositions::Start(MAX_POSITION - 2)).is_ok());
    let two = RowPositions::Tensor(HostTensor::new(&[1, 2], [1, 1, 2, 1]));
    says(rotate(&x, shape, two).expect_err("refused"), &["`positions`: length must be 3 or 1, got 2"]);
    let short = RowPositions::Tensor(HostTensor::new(&[1, 2], [1, 1, 3, 1]));
    says(rotate(&x, shape, short).expect_err("refused"), &["`positions`: 3 elements expected, got 2"]);
    let axes = |shape: [usize; 4]| RowPositions::Tensor(HostTensor::new(&[1; 9][..3 * shape[1]], shape));
    says(
        rotate(&x, shape, axes([1, 3, 3, 1])).expect_err("refused"),
        &["axes must be 1", "sections", "got 3"],
    );
    let on_axes = config.sections(RopeSections::Contiguous([1, 1, 0]));
    let rotate_on_axes = |at| reference::rotate(&x, shape, &on_axes, at);
    says(rotate_on_axes(axes([1, 2, 3, 1])).expect_err("refused"), &["axes must be 3", "or 1, got 2"]);
    let short = RowPositions::Tensor(HostTensor::new(&[1; 8], [1, 3, 3, 1]));
    says(rotate_on_axes(short).expect_err("refused"), &["`positions`: 9 elements expected, got 8"]);
    assert!(rotate_on_axes(axes([1, 3, 3, 1])).is_ok());
    let add = |table: &[f64], start| {
        reference::add_positions(&x, shape, PositionTable::Learned(table), RowPositions::Start(start), 1.0)
    };
    says(add(&x[..13], 0).expect_err("refused"), &["`table`: 12 elements expected, got 13"]);
    says(add(&[], 0).expect_err("refused"), &["`table`: 4 elements expected, got 0"]);
    says(add(&x[..12], 1).expect_err("refused"), &["`table`: length must be at least 4", "got 3"]);
    assert_eq!(add(&x[..12], 0).expect("fits"), [1.0; 24]);
    assert!(reference::sinusoid::<f32>(4, 1e4, 0, 0).expect("nothing").is_empty());
    says(reference::sinusoid::<f32>(4, 1e4, 7, usize::MAX).expect_err("refused"), &["`start` is 7"]);
    says(reference::sinusoid::<f32>(4, 1e4, MAX_POSITION, 2).expect_err("refused"), &["`start` is 16777215"]);
    let (cos, sin) = ([1.0; 6], [0.0; 6]);
    let by = |cos: &[f64], sin: &[f64]| reference::rotate_by(&x, shape, RopeOrder::Half, cos, sin);
    assert_eq!(by(&cos, &sin).expect("fits"), x);
    says(by(&cos[1..], &sin).expect_err("refused"), &["`cos`: 3 elements expected, got 5"]);
    says(by(&cos, &sin[1..]).expect_err("refused"), &["`sin`: 6 elements expected, got 5"]);
}
