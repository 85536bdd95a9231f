//! Every error, provoked through the public face: what its message says, that nothing was recorded, and
//! that the next correct call works.

use std::collections::BTreeSet;

use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{
    self, HostLinear, HostWeights, LayerShape, Options, multi_head, project, widen,
};
use wgpu_attention::{
    Attention, Config, DType, Dropout, Error, Forward, Gpu, HostMask, HostTensor, LayerConfig, LayerForward,
    LayerWeights, Linear, Mask, MultiHeadAttention, Projection, ProjectionForward, Scratch, ScratchSize,
    Shape, TensorView, Tiling,
};

use crate::harness::{defaults, full};

/// Every dimension is another number, so that no axis can be mistaken for the next.
const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 8, value_dim: 6 };
const POISON: f32 = -12345.0;
/// Elements behind every tensor, for shapes that are one too long.
const SLACK: usize = 256;

fn noise(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 + 1.0) * seed).sin()).collect()
}

fn count(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

/// What a message must hold.
fn read(context: &str, error: &Error, words: &[&str]) -> &'static str {
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{context}: no {word:?} in {message:?}");
    }
    variant(error)
}

/// The variant's name.
fn variant(error: &Error) -> &'static str {
    let debug = format!("{error:?}");
    let found = variants().into_iter().find(|name| {
        debug.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '(']) || rest.is_empty())
    });
    found.expect("a variant of the enum")
}

/// The variants' names, from the enum's own text: one added without a case here fails the last test.
fn variants() -> Vec<&'static str> {
    let text = include_str!("../src/error.rs");
    let body = text.split_once("pub enum Error {").expect("the enum").1;
    let names = body.lines().filter_map(|line| line.strip_prefix("    ")).filter_map(|line| {
        let name = line.split([' ', '(', ',']).next().unwrap_or_default();
        (name.starts_with(|c: char| c.is_ascii_uppercase())).then_some(name)
    });
    names.collect()
}

/// The attention problem of [`SHAPE`] on a device, ready to be spoiled.
struct Bench {
    gpu: Gpu,
    attention: Attention,
    tensors: [wgpu::Buffer; 3],
    out: wgpu::Buffer,
    scratch: Scratch,
    want: Vec<f64>,
    seen: BTreeSet<&'static str>,
}

impl Bench {
    fn new() -> Self {
        Self::on(&full().gpu, Config::new(SHAPE.heads, SHAPE.head_dim))
    }

    fn on(gpu: &Gpu, config: Config) -> Self {
        let gpu = gpu.clone();
        let data = [(SHAPE.q(), 0.37), (SHAPE.k(), 0.73), (SHAPE.v(), 1.19)]
            .map(|(shape, seed)| noise(count(shape), seed));
        let [q, k, v] = [0, 1, 2].map(|n| widen(&data[n]));
        let want = reference::attention::<f64>(&q, &k, &v, &SHAPE, &Options::default()).expect("a truth").out;
        let upload = |data: &[f32]| gpu.upload(&[data, &[POISON; SLACK]].concat()).expect("an upload");
        let tensors = [0, 1, 2].map(|n| upload(&data[n]));
        let out = upload(&vec![POISON; count(SHAPE.out())]);
        let config = config.kv_heads(SHAPE.kv_heads).value_dim(SHAPE.value_dim);
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let [q, k, v] = &tensors;
        let size = attention.scratch_size(&forward([q, k, v, &out])).expect("a size");
        let scratch = Scratch::new(gpu.device(), size).expect("scratch");
        Bench { gpu, attention, tensors, out, scratch, want, seen: BTreeSet::new() }
    }

    /// Handles of their own, so that a call can live beside a mutable bench.
    fn buffers(&self) -> [wgpu::Buffer; 4] {
        let [q, k, v] = self.tensors.clone();
        [q, k, v, self.out.clone()]
    }

    /// Spoils the correct call with `change`; its error must hold `words`.
    fn refuses(
        &mut self,
        context: &str,
        words: &[&str],
        change: impl for<'a> FnOnce(&mut Forward<'a>, &'a [wgpu::Buffer; 4]),
    ) {
        let buffers = self.buffers();
        let mut call = forward(buffers.each_ref());
        change(&mut call, &buffers);
        let (attention, device) = (self.attention.clone(), self.gpu.device().clone());
        let size = attention.scratch_size(&forward(buffers.each_ref())).expect("a size");
        let mut scratch = Scratch::new(&device, size).expect("scratch");
        self.refuses_with(context, words, |encoder| attention.forward(encoder, &call, &mut scratch));
    }

    /// As [`refuses`](Self::refuses), of anything that records.
    fn refuses_with(
        &mut self,
        context: &str,
        words: &[&str],
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) {
        let scope = self.gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let error = record(&mut encoder).expect_err(context);
        self.seen.insert(read(context, &error, words));

        // The encoder still takes commands, and holds nothing but these.
        let marker = self.gpu.upload(&[1u32; 4]).expect("an upload");
        encoder.clear_buffer(&marker, 0, None);
        self.gpu.queue().submit([encoder.finish()]);
        assert_eq!(self.gpu.download::<u32>(&marker, 4).expect("a read-back"), [0; 4], "{context}");
        let n = count(SHAPE.out()) + SLACK;
        let out = self.gpu.download::<f32>(&self.out, n).expect("a read-back");
        assert!(out.iter().all(|x| *x == POISON), "{context}: something was recorded");
        let hidden = pollster::block_on(scope.pop());
        assert!(hidden.is_none(), "{context}: {}", hidden.map(|e| e.to_string()).unwrap_or_default());
        self.works(context);
    }

    /// The correct call gives the right result. Leaves the output poisoned again.
    fn works(&mut self, context: &str) {
        let buffers = self.buffers();
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let call = forward(buffers.each_ref());
        self.attention.forward(&mut encoder, &call, &mut self.scratch).expect(context);
        self.gpu.queue().submit([encoder.finish()]);
        let n = count(SHAPE.out());
        let out = self.gpu.download::<f32>(&self.out, n).expect("a read-back");
        let error = max_error(&widen(&out), &self.want);
        assert!(error < 1e-5, "after {context}: off by {error}");
        self.gpu.queue().write_buffer(&self.out, 0, bytemuck::cast_slice(&vec![POISON; n]));
    }
}

fn forward(buffers: [&wgpu::Buffer; 4]) -> Forward<'_> {
    let shapes = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out()];
    let [q, k, v, out] = [0, 1, 2, 3].map(|n| TensorView::new(buffers[n], DType::F32, shapes[n]));
    Forward::new(q, k, v, out)
}

const TENSORS: [&str; 4] = ["q", "k", "v", "out"];
const AXES: [&str; 4] = ["batch", "heads", "length", "dim"];

fn tensor<'c, 'a>(call: &'c mut Forward<'a>, n: usize) -> &'c mut TensorView<'a> {
    [&mut call.q, &mut call.k, &mut call.v, &mut call.out].into_iter().nth(n).expect("one of four")
}

fn reshaped<'a>(view: &TensorView<'a>, shape: [usize; 4]) -> TensorView<'a> {
    TensorView::new(view.buffer(), view.dtype(), shape)
}

fn buffer(device: &wgpu::Device, bytes: usize, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let size = bytes as u64;
    let label = Some("a test's");
    device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
}

/// A device with limits of its own.
fn device(change: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
    let [gpu] = devices(change);
    gpu
}

/// Devices of one instance: across instances wgpu cannot tell whose a buffer is.
fn devices<const N: usize>(change: impl FnOnce(&mut wgpu::Limits)) -> [Gpu; N] {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("an adapter");
    let mut required_limits = wgpu::Limits::default();
    change(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    [(); N].map(|()| {
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
        Gpu::with_device(device, queue)
    })
}

type Seen = BTreeSet<&'static str>;

/// A test for each subject, which gives the variants it has provoked, and one over all of them.
macro_rules! subjects {
    ($($name:ident,)*) => {
        mod refused {
            $(#[test] fn $name() { assert!(!super::$name().is_empty()); })*
        }

        #[test]
        fn every_variant_has_a_case() {
            let mut seen = Seen::new();
            $(seen.extend($name());)*
            let all: Seen = variants().into_iter().collect();
            assert!(all.len() >= 17, "the enum's text was not understood: {all:?}");
            assert_eq!(seen, all);
        }
    };
}

subjects! {
    configurations, zero_sizes, shapes_that_disagree, strides_and_offsets, memory_shared_with_an_output, buffers_that_do_not_serve, dtypes, shapes_of_masks_and_further_outputs, dropout_probabilities, missing_features, limits, scratch, slices, layers, projections, reading_back, what_cannot_be_provoked,
}

fn configurations() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let mut refused = |words: &[&str], config: Config| {
        let error = Attention::with_pipelines(gpu.pipelines(), config).expect_err("refused");
        seen.insert(read("a configuration", &error, words));
    };
    refused(&["`shape`", "heads is 0", "at least 1"], Config::new(0, 8));
    refused(&["`shape`", "kv_heads is 0"], Config::new(4, 8).kv_heads(0));
    refused(&["`shape`", "head_dim is 0"], Config::new(4, 0));
    refused(&["`shape`", "value_dim is 0"], Config::new(4, 8).value_dim(0));
    refused(&["heads 6", "divisible", "kv_heads 4"], Config::new(6, 8).kv_heads(4));
    refused(&["`config`", "F32 or F16", "U32"], Config::new(4, 8).dtype(DType::U32));
    refused(&["`config`", "F32 or F16", "Bool"], Config::new(4, 8).dtype(DType::Bool));
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused(&["scale is", &scale.to_string(), "finite"], Config::new(4, 8).scale(scale));
    }
    for cap in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(&["softcap is", &cap.to_string(), "above 0"], Config::new(4, 8).softcap(cap));
    }
    seen
}

fn zero_sizes() -> Seen {
    let mut bench = Bench::new();
    for (n, name) in TENSORS.iter().enumerate() {
        for (axis, axis_name) in AXES.iter().enumerate() {
            let words = [format!("`{name}`"), format!("{axis_name} is 0"), "at least 1".into()];
            bench.refuses(name, &words.each_ref().map(String::as_str), |call, _| {
                let view = tensor(call, n);
                let mut shape = view.shape();
                shape[axis] = 0;
                *view = reshaped(view, shape);
            });
        }
    }
    bench.seen
}

fn shapes_that_disagree() -> Seen {
    let mut bench = Bench::new();
    // One more on an axis, and who is blamed: the first tensor that differs from those before it.
    let blamed = [
        [
            "`k`: batch must be 3, got 2",
            "`q`: heads must be 4, got 5",
            "`out`: length must be 4, got 3",
            "`q`: dim must be 8, got 9",
        ],
        [
            "`k`: batch must be 2, got 3",
            "`k`: heads must be 2, got 3",
            "`v`: length must be 6, got 5",
            "`k`: dim must be 8, got 9",
        ],
        [
            "`v`: batch must be 2, got 3",
            "`v`: heads must be 2, got 3",
            "`v`: length must be 5, got 6",
            "`v`: dim must be 6, got 7",
        ],
        [
            "`out`: batch must be 2, got 3",
            "`out`: heads must be 4, got 5",
            "`out`: length must be 3, got 4",
            "`out`: dim must be 6, got 7",
        ],
    ];
    for (n, messages) in blamed.iter().enumerate() {
        for (axis, message) in messages.iter().enumerate() {
            bench.refuses(TENSORS[n], &[message, "shape ["], |call, _| {
                let view = tensor(call, n);
                let mut shape = view.shape();
                shape[axis] += 1;
                *view = reshaped(view, shape);
            });
        }
    }
    bench.seen
}

fn strides_and_offsets() -> Seen {
    let mut bench = Bench::new();
    // out [2, 4, 3, 6]: repeated, meeting, interleaved.
    for strides in [[0, 18, 6, 1], [72, 18, 6, 0], [72, 18, 5, 1], [72, 6, 6, 1], [1, 1, 1, 1]] {
        let words = ["`out`", "share memory", &format!("{strides:?}"), "[2, 4, 3, 6]"];
        bench.refuses("meeting strides", &words, |call, _| call.out = call.out.with_strides(strides));
    }
    for (n, name) in TENSORS.iter().enumerate() {
        let name = format!("`{name}`");
        for offset in [usize::MAX, 1 << 32, u32::MAX as usize] {
            let words = [&name[..], "past 2^32", &offset.to_string()];
            bench.refuses("a far offset", &words, |call, _| {
                *tensor(call, n) = tensor(call, n).with_offset(offset);
            });
        }
        for stride in [usize::MAX, usize::MAX / 2, 1 << 32] {
            bench.refuses("a wide stride", &[&name, "2^32", &stride.to_string()], |call, _| {
                let mut strides = tensor(call, n).strides();
                strides[0] = stride;
                *tensor(call, n) = tensor(call, n).with_strides(strides);
            });
        }
        bench.refuses("a far window", &[&name, "2^32"], |call, _| {
            *tensor(call, n) = tensor(call, n).slice(2, usize::MAX, 3);
        });
    }
    // An axis of repeated elements may be long, but not longer than an index.
    for n in [1, 2] {
        bench.refuses("a long repeated axis", &["2^32"], |call, _| {
            for view in [&mut call.k, &mut call.v] {
                let [b, h, _, d] = view.shape();
                let length = if n == 1 { usize::MAX } else { 1 << 32 };
                *view = reshaped(view, [b, h, length, d]).with_strides([0, 0, 0, 1]);
            }
        });
    }
    // Past the end of the buffer, by much and by one element.
    let ends = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out()].map(|s| count(s) + SLACK);
    for n in 0..4 {
        for past in [1, 1000] {
            let words = [
                format!("`{}`", TENSORS[n]),
                format!("ends at byte {}", (ends[n] + past) * 4),
                format!("has {}", ends[n] * 4),
            ];
            bench.refuses("past the end", &words.each_ref().map(String::as_str), |call, _| {
                *tensor(call, n) = tensor(call, n).with_offset(SLACK + past);
            });
        }
    }
    bench.seen
}

fn memory_shared_with_an_output() -> Seen {
    let mut bench = Bench::new();
    for (n, name) in ["q", "k", "v"].iter().enumerate() {
        let words = ["`out`", &format!("`{name}`"), "a buffer of its own"];
        bench.refuses("out is an input", &words, |call, buffers| {
            let view = tensor(call, n);
            *view = TensorView::new(&buffers[3], DType::F32, view.shape());
        });
    }
    let large = bench.gpu.buffer(1 << 16).expect("a buffer");
    let pair = |shape, offset| TensorView::new(&large, DType::F32, shape).with_offset(offset);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = forward(buffers.each_ref());
    let size = attention.scratch_size(&good).expect("a size");
    let mut refuses = |context: &str, words: &[&str], call: Forward| {
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(context, words, |e| attention.forward(e, &call, &mut scratch));
    };

    // Far apart, but in one buffer.
    let disjoint = Forward { q: pair(SHAPE.q(), 0), out: pair(SHAPE.out(), 4096), ..good };
    refuses("disjoint windows", &["`out`", "`q`"], disjoint);
    let bias =
        Forward { out: pair(SHAPE.out(), 0), ..good }.mask(Mask::none().bias(pair(SHAPE.weights(), 4096)));
    refuses("out and bias", &["`out`", "`bias`"], bias);
    let lse = Forward { lse: Some(pair(SHAPE.lse(), 4096)), k: pair(SHAPE.k(), 0), ..good };
    refuses("lse and k", &["`lse`", "`k`"], lse);
    let weights = Forward { weights: Some(pair(SHAPE.weights(), 4096)), v: pair(SHAPE.v(), 0), ..good };
    refuses("weights and v", &["`weights`", "`v`"], weights);
    // Two outputs.
    let both = Forward { out: pair(SHAPE.out(), 0), lse: Some(pair(SHAPE.lse(), 100)), ..good };
    refuses("out over lse", &["`out`", "`lse`"], both);
    let beside = Forward { out: pair(SHAPE.out(), 0), weights: Some(pair(SHAPE.weights(), 4096)), ..good };
    refuses("out beside weights", &["`out`", "`weights`"], beside);
    bench.seen
}

fn buffers_that_do_not_serve() -> Seen {
    let [own, other] = devices(|_| ());
    let mut bench = Bench::on(&own, Config::new(SHAPE.heads, SHAPE.head_dim));
    let usage = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::UNIFORM;
    let unusable = buffer(bench.gpu.device(), 1 << 16, usage);
    let foreign = buffer(other.device(), 1 << 16, wgpu::BufferUsages::STORAGE);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let size = attention.scratch_size(&forward(buffers.each_ref())).expect("a size");
    for (n, name) in TENSORS.iter().enumerate() {
        let name = format!("`{name}`");
        for (buffer, words) in [
            (&unusable, &[&name[..], "usage", "STORAGE", "create_buffer"][..]),
            (&foreign, &["wgpu refused", "a test's", "Device"][..]),
        ] {
            let mut call = forward(buffers.each_ref());
            let view = tensor(&mut call, n);
            *view = TensorView::new(buffer, DType::F32, view.shape());
            let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
            bench.refuses_with(&name, words, |e| attention.forward(e, &call, &mut scratch));
            // Nor as part of a mask.
            if n == 0 {
                let mask = Mask::none().bias(TensorView::new(buffer, DType::F32, SHAPE.weights()));
                let call = forward(buffers.each_ref()).mask(mask);
                let words: Vec<_> = words.iter().map(|w| if *w == name { "`bias`" } else { w }).collect();
                bench.refuses_with("bias", &words, |e| attention.forward(e, &call, &mut scratch));
            }
        }
    }
    bench.seen
}

fn dtypes() -> Seen {
    let mut bench = Bench::new();
    for (n, name) in TENSORS.iter().enumerate() {
        let name = format!("`{name}`");
        for dtype in [DType::F16, DType::U32, DType::Bool] {
            let words = [&name, "must be F32", &format!("{dtype:?}")[..]];
            bench.refuses("a dtype", &words, |call, _| {
                let view = tensor(call, n);
                *view = TensorView::new(view.buffer(), dtype, view.shape());
            });
        }
    }
    let other = bench.gpu.buffer(1 << 16).expect("a buffer");
    let view = |dtype, shape| TensorView::new(&other, dtype, shape);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = forward(buffers.each_ref());
    let pairs = SHAPE.weights();
    let lengths = [SHAPE.batch, SHAPE.heads, SHAPE.q_len, 1];
    let cases = [
        ("`lengths`", "U32", "F32", good.mask(Mask::none().lengths(view(DType::F32, lengths)))),
        ("`keep`", "Bool", "U32", good.mask(Mask::none().keep(view(DType::U32, pairs)))),
        ("`keys`", "Bool", "F32", good.mask(Mask::none().keys(view(DType::F32, pairs)))),
        ("`bias`", "F32 or F16", "Bool", good.mask(Mask::none().bias(view(DType::Bool, pairs)))),
        ("`lse`", "F32", "F16", Forward { lse: Some(view(DType::F16, SHAPE.lse())), ..good }),
        ("`weights`", "F32 or F16", "U32", Forward { weights: Some(view(DType::U32, pairs)), ..good }),
        (
            "`dropout`",
            "Bool",
            "U32",
            Forward { dropout: Some(Dropout::Given { p: 0.5, keep: view(DType::U32, pairs) }), ..good },
        ),
    ];
    for (name, expected, got, call) in cases {
        let mut scratch =
            Scratch::new(gpu.device(), attention.scratch_size(&good).expect("a size")).expect("scratch");
        bench.refuses_with(name, &[name, expected, got], |e| attention.forward(e, &call, &mut scratch));
    }
    bench.seen
}

fn shapes_of_masks_and_further_outputs() -> Seen {
    let mut bench = Bench::new();
    let other = bench.gpu.buffer(1 << 16).expect("a buffer");
    let view = |dtype, shape| TensorView::new(&other, dtype, shape);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = forward(buffers.each_ref());
    let size = attention.scratch_size(&good).expect("a size");
    let pairs = SHAPE.weights();
    let rows = [SHAPE.batch, SHAPE.heads, SHAPE.q_len, 1];
    for axis in 0..4 {
        let more = |mut shape: [usize; 4]| {
            shape[axis] += 1;
            shape
        };
        let given = Dropout::Given { p: 0.5, keep: view(DType::Bool, more(pairs)) };
        let cases = [
            ("`lengths`", rows, " or 1", good.mask(Mask::none().lengths(view(DType::U32, more(rows))))),
            ("`keep`", pairs, " or 1", good.mask(Mask::none().keep(view(DType::Bool, more(pairs))))),
            ("`keys`", pairs, " or 1", good.mask(Mask::none().keys(view(DType::Bool, more(pairs))))),
            ("`bias`", pairs, " or 1", good.mask(Mask::none().bias(view(DType::F32, more(pairs))))),
            ("`dropout`", pairs, " or 1", Forward { dropout: Some(given), ..good }),
            ("`lse`", rows, ",", Forward { lse: Some(view(DType::F32, more(rows))), ..good }),
            ("`weights`", pairs, ",", Forward { weights: Some(view(DType::F32, more(pairs))), ..good }),
        ];
        for (name, shape, or, call) in cases {
            let last = if shape == rows { "dim" } else { "kv_len" };
            // Where the axis may be repeated, 1 is said once.
            let or = if shape[axis] == 1 { "," } else { or };
            let expected = format!("{} must be {}{or}", ["batch", "heads", "q_len", last][axis], shape[axis]);
            let words = [name, &expected, &format!("got {}", shape[axis] + 1)];
            let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
            bench.refuses_with(name, &words, |e| attention.forward(e, &call, &mut scratch));
        }
    }
    // Some of the heads are neither all nor their mean.
    let [b, _, i, j] = pairs;
    let some = Forward { weights: Some(view(DType::F32, [b, 2, i, j])), ..good };
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    bench.refuses_with("weights", &["`weights`", "heads must be 4", "got 2"], |e| {
        attention.forward(e, &some, &mut scratch)
    });
    bench.seen
}

fn dropout_probabilities() -> Seen {
    let mut bench = Bench::new();
    for p in [1.0, 1.5, -0.1, f32::NAN, f32::INFINITY] {
        let words = ["dropout p", &f64::from(p).to_string(), "at least 0 and below 1"];
        bench.refuses("dropout", &words, |call, _| call.dropout = Some(Dropout::Seeded { p, seed: 1 }));
    }
    bench.seen
}

fn missing_features() -> Seen {
    let gpu = &defaults().gpu;
    let mut seen = Seen::new();
    let words = ["SHADER_F16", "F16", "request_device"];
    let half = Config::new(4, 8).dtype(DType::F16);
    let error = Attention::with_pipelines(gpu.pipelines(), half).expect_err("no f16");
    seen.insert(read("a configuration", &error, &words));
    let layer = Layer::new(gpu);
    let half = LayerConfig { dtype: DType::F16, ..layer.config };
    let error = MultiHeadAttention::with_pipelines(gpu.pipelines(), half, &layer.weights());
    seen.insert(read("a layer", &error.expect_err("no f16"), &words));
    // As a part of a call that is f32 otherwise.
    let mut bench = Bench::on(gpu, Config::new(SHAPE.heads, SHAPE.head_dim));
    bench.refuses("an f16 bias", &words, |call, _| {
        call.mask = Mask::none().bias(TensorView::new(call.q.buffer(), DType::F16, [1, 1, 3, 5]));
    });
    bench.refuses("f16 weights", &words, |call, buffers| {
        call.weights = Some(TensorView::new(&buffers[3], DType::F16, [2, 1, 3, 5]));
    });
    seen.extend(bench.seen);
    seen
}

/// On devices made with less than the defaults.
fn limits() -> Seen {
    let mut seen = Seen::new();
    let heads = Config::new(SHAPE.heads, SHAPE.head_dim);

    // q is 768 bytes, k 640, v 480, out 576, the scores 768.
    let small = device(|limits| limits.max_storage_buffer_binding_size = 768);
    let mut bench = Bench::on(&small, heads);
    bench.works("tensors of just the limit");
    bench.refuses(
        "a wide q",
        &["`q`", "1136 bytes", "allows 768", "max_storage_buffer_binding_size"],
        |call, _| {
            call.q = call.q.with_strides([144, 36, 12, 1]);
        },
    );
    bench.refuses("long keys", &["scratch"], |call, _| {
        for view in [&mut call.k, &mut call.v] {
            let [b, h, _, d] = view.shape();
            *view = reshaped(view, [b, h, 9, d]).with_strides([0, 0, 0, 1]);
        }
    });
    seen.extend(bench.seen);
    let [k, v] = [SHAPE.k(), SHAPE.v()].map(|[b, h, _, d]| [b, h, 9, d]);
    let buffers = [(); 4].map(|()| small.buffer(4096).expect("a buffer"));
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape).with_strides([0, 0, 0, 1]);
    let long = Forward::new(
        TensorView::new(&buffers[0], DType::F32, SHAPE.q()),
        view(1, k),
        view(2, v),
        TensorView::new(&buffers[3], DType::F32, SHAPE.out()),
    );
    let error = bench.attention.scratch_size(&long).expect_err("a limit");
    seen.insert(read("scratch_size", &error, &["`scores (scratch)`", "1152 bytes", "allows 768"]));
    // A size that a larger device gave.
    let large =
        Attention::with_pipelines(full().gpu.pipelines(), *bench.attention.config()).expect("an operator");
    let size = large.scratch_size(&long).expect("a size");
    let error = Scratch::new(small.device(), size).expect_err("a limit");
    seen.insert(read("scratch", &error, &["`scratch`", "1152 bytes", "allows 768"]));

    let limited = |tiling, change: fn(&mut wgpu::Limits), words: &[&str], call: fn(&mut Forward)| {
        let gpu = device(change);
        let [q, k, v, out] = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out()];
        let buffers = [q, k, v, out].map(|s| gpu.buffer(count(s) * 4).expect("a buffer"));
        let mut call_ = forward(buffers.each_ref());
        call(&mut call_);
        let config = heads.kv_heads(SHAPE.kv_heads).value_dim(SHAPE.value_dim).tiling(tiling);
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let size = attention.scratch_size(&call_).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = attention.forward(&mut encoder, &call_, &mut scratch).expect_err("a limit");
        gpu.queue().submit([encoder.finish()]);
        read("a limit", &error, words)
    };
    let rest = |_: &mut Forward| ();
    seen.insert(limited(
        Tiling::Uniform,
        |limits| limits.max_compute_workgroups_per_dimension = 7,
        &["workgroups", "is 8", "allows 7", "max_compute_workgroups_per_dimension"],
        rest,
    ));
    seen.insert(limited(
        Tiling::Workgroup,
        |limits| limits.max_compute_invocations_per_workgroup = 128,
        &["invocations", "is 256", "allows 128", "max_compute_invocations_per_workgroup"],
        rest,
    ));
    seen.insert(limited(
        Tiling::Workgroup,
        |limits| limits.max_compute_workgroup_storage_size = 1024,
        &["workgroup memory", "allows 1024", "max_compute_workgroup_storage_size"],
        rest,
    ));
    seen.insert(limited(
        Tiling::Uniform,
        |limits| limits.max_storage_buffers_per_shader_stage = 3,
        &["storage buffers", "is 4", "allows 3", "max_storage_buffers_per_shader_stage"],
        |call| {
            // Any bytes do for a mask.
            let at = |dtype| TensorView::new(call.q.buffer(), dtype, [1, 1, 3, 5]);
            call.mask = Mask::none().keep(at(DType::Bool)).keys(at(DType::Bool)).bias(at(DType::F32));
        },
    ));
    seen
}

fn scratch() -> Seen {
    let [own, other] = devices(|_| ());
    let mut bench = Bench::on(&own, Config::new(SHAPE.heads, SHAPE.head_dim));
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let call = forward(buffers.each_ref());
    let size = attention.scratch_size(&call).expect("a size");
    let needed = size.total().to_string();

    let mut none = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let words = ["scratch", "0 bytes", "scores", &needed, "scratch_size"];
    bench.refuses_with("no scratch", &words, |e| attention.forward(e, &call, &mut none));
    // For a call with fewer keys.
    let short = Forward { k: call.k.slice(2, 0, 2), v: call.v.slice(2, 0, 2), ..call };
    let less = attention.scratch_size(&short).expect("a size");
    assert!(less.total() < size.total());
    let mut little = Scratch::new(gpu.device(), less).expect("scratch");
    let words = ["scores", &needed, &less.total().to_string()];
    bench.refuses_with("little scratch", &words, |e| attention.forward(e, &call, &mut little));
    let mut foreign = Scratch::new(other.device(), size).expect("scratch");
    let words = ["wgpu refused", "attention.scratch", "Device"];
    bench.refuses_with("another's scratch", &words, |e| attention.forward(e, &call, &mut foreign));
    bench.seen
}

fn slices() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let [q, k, v] = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
    let wide = [&q, &k, &v].map(|x| widen::<f64>(x));
    let mut both = |words: &[&str], cut: [usize; 3], shape: Shape, options: Options| {
        let part = |x: &[f32], n: usize| x[..x.len() - n].to_vec();
        let [q, k, v] = [part(&q, cut[0]), part(&k, cut[1]), part(&v, cut[2])];
        let error = gpu.attention(&q, &k, &v, &shape, &options).expect_err("refused by Gpu");
        seen.insert(read("Gpu", &error, words));
        let [q, k, v] = [0, 1, 2].map(|n| wide[n][..wide[n].len() - cut[n]].to_vec());
        let error = reference::attention::<f64>(&q, &k, &v, &shape, &options);
        seen.insert(read("reference", &error.expect_err("refused by the reference"), words));
    };
    let plain = Options::default();
    both(&["`q`", "192 elements expected", "got 191"], [1, 0, 0], SHAPE, plain);
    both(&["`k`", "160 elements expected", "got 158"], [0, 2, 0], SHAPE, plain);
    both(&["`v`", "120 elements expected", "got 0"], [0, 0, 120], SHAPE, plain);
    // Dimensions whose product no slice can have.
    let far = Shape { batch: usize::MAX, ..SHAPE };
    both(&["`q`", "got 192"], [0; 3], far, plain);
    both(&["`shape`", "q_len is 0"], [0; 3], Shape { q_len: 0, ..SHAPE }, plain);
    both(&["heads 4", "kv_heads 3"], [0; 3], Shape { kv_heads: 3, ..SHAPE }, plain);

    let (lengths, bools, floats) = ([1; 24], [true; 120], [0.5; 120]);
    let mut masked = |words: &[&str], mask: HostMask| both(words, [0; 3], SHAPE, Options { mask, ..plain });
    let rows = [2, 4, 3, 1];
    masked(&["`lengths`", "24", "got 23"], Mask::none().lengths(HostTensor::new(&lengths[..23], rows)));
    masked(&["`keep`", "120", "got 119"], Mask::none().keep(HostTensor::new(&bools[..119], SHAPE.weights())));
    masked(&["`keys`", "15", "got 120"], Mask::none().keys(HostTensor::new(&bools, [1, 1, 3, 5])));
    masked(&["`bias`", "120", "got 0"], Mask::none().bias(HostTensor::new(&floats[..0], SHAPE.weights())));
    masked(
        &["`bias`", "q_len must be 3 or 1", "got 2"],
        Mask::none().bias(HostTensor::new(&floats[..10], [1, 1, 2, 5])),
    );
    masked(
        &["`lengths`", "dim must be 1", "got 5"],
        Mask::none().lengths(HostTensor::new(&lengths[..5], [1, 1, 1, 5])),
    );

    let mut dropped = |words: &[&str], keep, shape| {
        let dropout = Some(Dropout::Given { p: 0.5, keep: HostTensor::new(keep, shape) });
        both(words, [0; 3], SHAPE, Options { dropout, ..plain });
    };
    dropped(&["`dropout`", "kv_len must be 5 or 1", "got 4"], &bools[..4], [1, 1, 1, 4]);
    dropped(&["`dropout`", "15 elements", "got 14"], &bools[..14], [1, 1, 3, 5]);
    dropped(&["`dropout`", "15 elements", "got 120"], &bools, [1, 1, 3, 5]);
    both(
        &["dropout p", "1.5"],
        [0; 3],
        SHAPE,
        Options { dropout: Some(Dropout::Seeded { p: 1.5, seed: 0 }), ..plain },
    );
    both(&["scale", "NaN", "finite"], [0; 3], SHAPE, Options { scale: Some(f64::NAN), ..plain });
    both(&["softcap", "is 0", "above 0"], [0; 3], SHAPE, Options { softcap: Some(0.0), ..plain });

    let appended = Options { appended: 1, ..plain };
    let error = gpu.attention(&q, &k, &v, &SHAPE, &appended).expect_err("for layers only");
    seen.insert(read("appended", &error, &["options.appended", "MultiHeadAttention", "`k`"]));
    let appended = Options { appended: SHAPE.kv_len + 1, ..plain };
    let error = reference::attention::<f64>(&wide[0], &wide[1], &wide[2], &SHAPE, &appended);
    seen.insert(read("appended", &error.expect_err("refused"), &["appended", "6"]));

    let out = gpu.attend(&q, &k, &v, SHAPE, Mask::none()).expect("a correct call");
    assert_eq!(out.len(), count(SHAPE.out()));
    seen
}

fn layers() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let layer = Layer::new(gpu);
    let good = layer.weights();
    let other = gpu.buffer(1 << 12).expect("a buffer");
    let matrix = |rows, columns| TensorView::matrix(&other, DType::F32, [rows, columns]);
    let vector = |n| TensorView::vector(&other, DType::F32, n);
    let mut refused = |words: &[&str], config: LayerConfig, weights: LayerWeights| {
        let error = MultiHeadAttention::with_pipelines(gpu.pipelines(), config, &weights);
        seen.insert(read("a layer", &error.expect_err("refused"), words));
    };
    let c = layer.config;
    let weight = |weight| Linear { weight, bias: None };
    let biased = |n| Some(vector(n));
    // embed 12, 4 heads of 3, 2 kv heads.
    refused(
        &["`weights.query`", "out (rows) must be 12", "got 13"],
        c,
        LayerWeights { query: weight(matrix(13, 12)), ..good },
    );
    refused(
        &["`weights.query`", "in (columns) must be 12", "got 11"],
        c,
        LayerWeights { query: weight(matrix(12, 11)), ..good },
    );
    refused(
        &["`weights.key`", "out (rows) must be 6", "got 12"],
        c,
        LayerWeights { key: weight(matrix(12, 12)), ..good },
    );
    refused(
        &["`weights.value`", "in (columns) must be 12", "got 6"],
        c,
        LayerWeights { value: weight(matrix(6, 6)), ..good },
    );
    refused(
        &["`weights.out`", "out (rows) must be 12", "got 6"],
        c,
        LayerWeights { out: weight(matrix(6, 12)), ..good },
    );
    refused(
        &["`bias.query`", "dim must be 12", "got 6"],
        c,
        LayerWeights { query: Linear { bias: biased(6), ..good.query }, ..good },
    );
    refused(
        &["`bias.key`", "dim must be 6", "got 12"],
        c,
        LayerWeights { key: Linear { bias: biased(12), ..good.key }, ..good },
    );
    refused(
        &["`bias.value`", "dim must be 6", "got 5"],
        c,
        LayerWeights { value: Linear { bias: biased(5), ..good.value }, ..good },
    );
    refused(
        &["`bias.out`", "dim must be 12", "got 1"],
        c,
        LayerWeights { out: Linear { bias: biased(1), ..good.out }, ..good },
    );
    refused(
        &["`appended.key`", "dim must be 6", "got 3"],
        c,
        LayerWeights { appended: Some([vector(3), vector(6)]), ..good },
    );
    refused(
        &["`appended.value`", "dim must be 6", "got 7"],
        c,
        LayerWeights { appended: Some([vector(6), vector(7)]), ..good },
    );
    let whole = TensorView::matrix(&other, DType::U32, [12, 12]);
    refused(&["`weights.query`", "F32 or F16", "U32"], c, LayerWeights { query: weight(whole), ..good });
    if full().f16 {
        let half = TensorView::matrix(&other, DType::F16, [6, 12]);
        refused(&["`weights.key`", "F32", "F16"], c, LayerWeights { key: weight(half), ..good });
    }
    let small = gpu.buffer(16).expect("a buffer");
    let short = TensorView::matrix(&small, DType::F32, [12, 12]);
    refused(&["`weights.out`", "byte 576", "has 16"], c, LayerWeights { out: weight(short), ..good });
    refused(&["`layer`", "heads is 0"], LayerConfig { heads: 0, ..c }, good);
    refused(&["`layer`", "out_features is 0"], LayerConfig { out_features: 0, ..c }, good);
    refused(&["heads 4", "kv_heads 3"], LayerConfig { kv_heads: 3, ..c }, good);
    let narrow = LayerConfig { narrow: true, kv_heads: 4, value_features: 10, ..c };
    refused(&["value_features 10", "divisible", "heads 4"], narrow, good);
    refused(&["softcap is -1", "above 0"], LayerConfig { softcap: Some(-1.0), ..c }, good);
    refused(&["scale is inf", "finite"], LayerConfig { scale: Some(f32::INFINITY), ..c }, good);
    for far in [usize::MAX, 1 << 63] {
        refused(&["heads · head_dim", "below 2^32"], LayerConfig { head_dim: far, ..c }, good);
        refused(&["heads · head_dim", "below 2^32"], LayerConfig { heads: far, kv_heads: 1, ..c }, good);
        refused(&["heads · value_dim", "below 2^32"], LayerConfig { value_dim: far, ..c }, good);
        refused(&["key_features", "below 2^32"], LayerConfig { key_features: far, ..c }, good);
    }
    seen.extend(layer.calls());
    seen
}

fn projections() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let projection = Projection::with_pipelines(gpu.pipelines());
    let buffers = [(); 3].map(|()| gpu.buffer(1 << 12).expect("a buffer"));
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let linear = Linear { weight: view(1, [1, 1, 8, 6]), bias: None };
    let good =
        ProjectionForward { x: view(0, [2, 1, 5, 6]), linear, out: view(2, [2, 4, 5, 2]), narrow: false };
    let aside = |n| Some(view(1, [1, 1, 1, n]).with_offset(512));
    let cases: [(&[&str], &[ProjectionForward]); 9] = [
        (&["`x`", "heads must be 1", "got 2"], &[ProjectionForward { x: view(0, [2, 2, 5, 6]), ..good }]),
        (&["`out`", "batch must be 2", "got 3"], &[ProjectionForward { out: view(2, [3, 4, 5, 2]), ..good }]),
        (
            &["`out`", "length must be 5", "got 4"],
            &[ProjectionForward { out: view(2, [2, 4, 4, 2]), ..good }],
        ),
        (
            &["`linear.weight`", "in (columns) must be 6", "got 7"],
            &[
                good,
                ProjectionForward { linear: Linear { weight: view(1, [1, 1, 8, 7]), bias: None }, ..good },
            ],
        ),
        (
            &["`linear.bias`", "dim must be 8", "got 9"],
            &[ProjectionForward { linear: Linear { bias: aside(9), ..linear }, ..good }],
        ),
        (
            &["narrow", "apart"],
            &[
                good,
                ProjectionForward {
                    linear: Linear { weight: view(1, [1, 2, 2, 3]), bias: None },
                    out: view(2, [2, 2, 5, 2]).with_offset(512),
                    narrow: true,
                    ..good
                },
            ],
        ),
        (&["`out`", "`linear.weight`"], &[ProjectionForward { out: view(1, [2, 4, 5, 2]), ..good }]),
        (&["`out`"], &[good, good]),
        (
            &["`x`", "F32 or F16", "Bool"],
            &[ProjectionForward { x: TensorView::new(&buffers[0], DType::Bool, [2, 1, 5, 6]), ..good }],
        ),
    ];
    for (words, products) in cases {
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory");
        bench.refuses_with(words[0], words, |e| projection.forward(e, products, &mut scratch));
    }
    bench.seen
}

fn reading_back() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let mut refused = |words: &[&str], error: Error| seen.insert(read("a read-back", &error, words));
    let closed = buffer(gpu.device(), 64, wgpu::BufferUsages::STORAGE);
    refused(
        &["wgpu refused", "read-back", "COPY_SRC"],
        gpu.download::<f32>(&closed, 4).expect_err("no usage"),
    );
    let open = gpu.upload(&[1.0f32, 2.0, 3.0, 4.0]).expect("an upload");
    refused(&["wgpu refused", "read-back"], gpu.download::<f32>(&open, 5).expect_err("too short"));
    refused(&["wgpu refused"], gpu.download::<f32>(&open, usize::MAX).expect_err("too short"));
    refused(&["wgpu refused"], gpu.download::<f32>(&open, usize::MAX / 4 + 2).expect_err("too short"));
    refused(&["wgpu refused", "a buffer"], gpu.buffer(1 << 60).expect_err("too large"));
    assert!(gpu.download::<f32>(&open, 0).expect("nothing to read").is_empty());
    assert_eq!(gpu.download::<f32>(&open, 3).expect("a read-back"), [1.0, 2.0, 3.0]);
    assert_eq!(gpu.download::<u8>(&open, 3).expect("a read-back"), [0, 0, 128]);
    assert_eq!(gpu.download::<()>(&open, 3).expect("three nothings").len(), 3);

    // A device that its owner has destroyed stays silent: the error is not a panic and not a wrong result.
    let gone = device(|_| ());
    let kept = gone.upload(&[1.0f32; 4]).expect("an upload");
    gone.device().destroy();
    let error = gone.download::<f32>(&kept, 4).expect_err("a lost device");
    seen.insert(read("a lost device", &error, &["lost", "create a new device"]));
    let [q, k, v] = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
    let error = gone.attend(&q, &k, &v, SHAPE, Mask::none()).expect_err("a lost device");
    seen.insert(read("a lost device", &error, &["lost", "create a new device"]));
    seen
}

/// What cannot be provoked here: an adapter that is missing (its absence is decided by the environment of
/// the whole process, and tests cannot start themselves again under a loader), and memory that runs out
/// (which drivers grant lazily, and other tests need). Only their messages are read.
fn what_cannot_be_provoked() -> Seen {
    let missing = Error::NoAdapter("none".into());
    let full = Error::OutOfMemory { what: "scratch", description: "no room".into() };
    Seen::from([
        read("no adapter", &missing, &["adapter", "none", "Vulkan driver", "your own device"]),
        read("no memory", &full, &["memory", "scratch", "no room"]),
    ])
}

/// A small layer on a device.
struct Layer {
    gpu: Gpu,
    config: LayerConfig,
    buffer: wgpu::Buffer,
    data: Vec<f32>,
}

impl Layer {
    fn new(gpu: &Gpu) -> Self {
        let data = noise(12 * 12 * 4, 0.7);
        let config = LayerConfig { kv_heads: 2, ..LayerConfig::new(12, 4) };
        Layer { gpu: gpu.clone(), config, buffer: gpu.upload(&data).expect("an upload"), data }
    }

    fn weights(&self) -> LayerWeights<'_> {
        let linear = |rows, offset| Linear {
            weight: TensorView::matrix(&self.buffer, DType::F32, [rows, 12]).with_offset(offset),
            bias: None,
        };
        LayerWeights {
            query: linear(12, 0),
            key: linear(6, 144),
            value: linear(6, 288),
            out: linear(12, 432),
            appended: None,
        }
    }

    /// Spoiled calls, each followed by a correct one.
    fn calls(&self) -> Seen {
        let gpu = &self.gpu;
        let mut seen = Seen::new();
        let layer = MultiHeadAttention::with_pipelines(gpu.pipelines(), self.config, &self.weights())
            .expect("a layer");
        let x = noise(2 * 5 * 12, 0.9);
        let context = noise(2 * 7 * 12, 1.3);
        let input = gpu.upload(&[&x[..], &[POISON; SLACK]].concat()).expect("an upload");
        let keys = gpu.upload(&[&context[..], &[POISON; SLACK]].concat()).expect("an upload");
        let out = gpu.upload(&vec![POISON; 2 * 5 * 12 + SLACK]).expect("an upload");
        let sequence = |buffer, shape| TensorView::sequence(buffer, DType::F32, shape);
        let good = LayerForward::cross_attention(
            sequence(&input, [2, 5, 12]),
            sequence(&keys, [2, 7, 12]),
            sequence(&out, [2, 5, 12]),
        );
        let part = |offset, n| HostLinear {
            weight: &widen::<f64>(&self.data)[offset..][..n].to_vec().leak()[..],
            bias: None,
        };
        let weights = HostWeights {
            query: part(0, 144),
            key: part(144, 72),
            value: part(288, 72),
            out: part(432, 144),
            appended: None,
        };
        let inputs = [widen(&x), widen(&context), widen(&context)];
        let shape = LayerShape { batch: 2, q_len: 5, kv_len: 7 };
        let want = multi_head::<f64>(
            inputs.each_ref().map(|i| &i[..]),
            shape,
            &self.config,
            &weights,
            &Options::default(),
        )
        .expect("a truth");

        let bad = [
            (
                &["`query`", "dim must be 12", "got 11"][..],
                LayerForward { query: sequence(&input, [2, 5, 11]), ..good },
            ),
            (
                &["`query`", "heads must be 1", "got 2"],
                LayerForward { query: TensorView::new(&input, DType::F32, [2, 2, 5, 6]), ..good },
            ),
            (
                &["`key`", "batch must be 2", "got 1"],
                LayerForward { key: sequence(&keys, [1, 7, 12]), ..good },
            ),
            (
                &["`key`", "dim must be 12", "got 13"],
                LayerForward { key: sequence(&keys, [2, 7, 13]), ..good },
            ),
            (
                &["`value`", "length must be 7", "got 6"],
                LayerForward { value: sequence(&keys, [2, 6, 12]), ..good },
            ),
            (
                &["`out`", "length must be 5", "got 7"],
                LayerForward { out: sequence(&out, [2, 7, 12]), ..good },
            ),
            (&["`out`", "dim must be 12", "got 6"], LayerForward { out: sequence(&out, [2, 5, 6]), ..good }),
            (&["`out`", "`query`"], LayerForward { out: sequence(&input, [2, 5, 12]), ..good }),
            (&["`out`", "weights."], LayerForward { out: sequence(&self.buffer, [2, 5, 12]), ..good }),
            (&["`out`", "share memory"], LayerForward { out: good.out.with_strides([60, 60, 0, 1]), ..good }),
            (
                &["`key`", "F32", "U32"],
                LayerForward { key: TensorView::sequence(&keys, DType::U32, [2, 7, 12]), ..good },
            ),
            (&["`query`", "length is 0"], LayerForward { query: sequence(&input, [2, 0, 12]), ..good }),
            (&["`value`", "byte"], LayerForward { value: good.value.with_offset(SLACK + 1), ..good }),
            (
                &["`keys`", "kv_len must be 7 or 1", "got 5"],
                good.mask(Mask::none().keys(TensorView::new(&input, DType::Bool, [2, 1, 1, 5]))),
            ),
            (
                &["`lse`", "q_len must be 5", "got 4"],
                LayerForward { lse: Some(TensorView::new(&keys, DType::F32, [2, 4, 4, 1])), ..good },
            ),
            (
                &["dropout p", "-1"],
                LayerForward { dropout: Some(Dropout::Seeded { p: -1.0, seed: 0 }), ..good },
            ),
            (
                &["2^32"],
                LayerForward {
                    key: sequence(&keys, [2, usize::MAX, 12]).with_strides([0, 0, 0, 1]),
                    value: sequence(&keys, [2, usize::MAX, 12]).with_strides([0, 0, 0, 1]),
                    ..good
                },
            ),
        ];
        let size = layer.scratch_size(&good).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        let mut check =
            |words: &[&str], encoder: wgpu::CommandEncoder, error: Error, scratch: &mut Scratch| {
                seen.insert(read("a layer's call", &error, words));
                gpu.queue().submit([encoder.finish()]);
                let after = gpu.download::<f32>(&out, 2 * 5 * 12).expect("a read-back");
                assert!(after.iter().all(|x| *x == POISON), "{words:?}: something was recorded");
                let mut encoder = gpu.device().create_command_encoder(&Default::default());
                layer.forward(&mut encoder, &good, scratch).expect("the correct call");
                gpu.queue().submit([encoder.finish()]);
                let after = gpu.download::<f32>(&out, 2 * 5 * 12).expect("a read-back");
                let error = max_error(&widen(&after), &want.out);
                assert!(error < 1e-4, "after {words:?}: off by {error}");
                gpu.queue().write_buffer(&out, 0, bytemuck::cast_slice(&[POISON; 2 * 5 * 12]));
            };
        for (words, call) in bad {
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let error = layer.forward(&mut encoder, &call, &mut scratch).expect_err(words[0]);
            check(words, encoder, error, &mut scratch);
        }
        let mut none = Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = layer.forward(&mut encoder, &good, &mut none).expect_err("no scratch");
        check(&["0 bytes", "scratch_size"], encoder, error, &mut scratch);
        seen
    }
}

/// The reference refuses what does not fit it, too.
#[test]
fn the_reference_of_a_layer_refuses_wrong_lengths() {
    let config = LayerConfig::new(4, 2);
    let (x, w) = (vec![0.5f64; 12], vec![0.25f64; 16]);
    let shape = LayerShape { batch: 1, q_len: 3, kv_len: 3 };
    let linear = HostLinear { weight: &w[..], bias: None };
    let good = HostWeights { query: linear, key: linear, value: linear, out: linear, appended: None };
    let run = |inputs, shape, weights: &HostWeights<f64>| {
        multi_head::<f64>(inputs, shape, &config, weights, &Options::default()).map(|heads| heads.out)
    };
    let error = |result: Result<Vec<f64>, Error>| result.expect_err("refused").to_string();
    assert_eq!(run([&x, &x, &x], shape, &good).expect("a correct call").len(), 12);
    assert!(error(run([&x[1..], &x, &x], shape, &good)).contains("12 elements expected, got 11"));
    assert!(error(run([&x, &x[1..], &x], shape, &good)).contains("12 elements expected, got 11"));
    let short = HostLinear { weight: &w[1..], bias: None };
    assert!(error(run([&x, &x, &x], shape, &HostWeights { key: short, ..good })).contains("16 elements"));
    assert!(error(run([&x, &x, &x], shape, &HostWeights { out: short, ..good })).contains("weights.out"));
    let biased = HostLinear { weight: &w, bias: Some(&x[..3]) };
    assert!(error(run([&x, &x, &x], shape, &HostWeights { value: biased, ..good })).contains("4 elements"));
    assert!(error(run([&x, &x, &x], shape, &HostWeights { out: biased, ..good })).contains("4 elements"));
    let appended = HostWeights { appended: Some((&x[..4], &x[..3])), ..good };
    assert!(error(run([&x, &x, &x], shape, &appended)).contains("4 elements"));
    let far = LayerShape { batch: usize::MAX, ..shape };
    assert!(error(run([&x, &x, &x], far, &good)).contains("got 12"));
    assert_eq!(project(&x, &w, None, 4, 4).len(), 12);
}

/// NaN and infinity among the inputs are computed with, not hidden and not refused.
#[test]
fn bad_numbers_show() {
    let gpu = &full().gpu;
    for tiling in [Tiling::Uniform, Tiling::Workgroup] {
        for (name, bad, at) in [
            ("q", f32::NAN, 0),
            ("k", f32::NAN, 1),
            ("v", f32::NAN, 2),
            ("q", f32::INFINITY, 0),
            ("v", f32::INFINITY, 2),
        ] {
            let mut data = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
            data[at][1] = bad;
            let [q, k, v] = data.each_ref().map(|x| widen::<f64>(x));
            let want =
                reference::attention::<f64>(&q, &k, &v, &SHAPE, &Options::default()).expect("a truth").out;
            let buffers = data.each_ref().map(|x| gpu.upload(x).expect("an upload"));
            let out = gpu.upload(&vec![POISON; count(SHAPE.out())]).expect("an upload");
            let [bq, bk, bv] = &buffers;
            let call = forward([bq, bk, bv, &out]);
            let config = Config::new(4, 8).kv_heads(2).value_dim(6).tiling(tiling);
            let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
            let mut scratch =
                Scratch::new(gpu.device(), attention.scratch_size(&call).expect("a size")).expect("scratch");
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            attention.forward(&mut encoder, &call, &mut scratch).expect("bad numbers are numbers");
            gpu.queue().submit([encoder.finish()]);
            let got: Vec<f64> = widen(&gpu.download::<f32>(&out, want.len()).expect("a read-back"));
            assert!(want.iter().any(|x| !x.is_finite()), "the case has no effect");
            for (n, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = if want.is_finite() { (got - want).abs() < 1e-5 } else { !got.is_finite() };
                assert!(same, "{tiling:?}, {bad} in {name}: element {n} is {got}, not {want}");
            }
        }
    }
}
