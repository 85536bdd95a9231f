//! A layer's gradients on a device: of PyTorch's `nn.MultiheadAttention` and of random layers, on
//! both targets. Also bits, split work and memory.

use wgpu_attention::layers::{
    LinearGradients, MultiHeadBackward, MultiHeadConfig, MultiHeadForward, MultiHeadGradients,
    MultiHeadWeights,
};
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Alignment, DType, KernelOptions, Linear, Mask, MultiHeadAttention, Scratch, ScratchSize, TensorView,
};

use crate::harness::gradients::LayerProblem;
use crate::harness::layer::LayerCase;
use crate::harness::layer_backward::{Each, LayerBackwardSetup, NAMES, run_layer_backward_async};
use crate::harness::layer_options::LayerOptions;
use crate::harness::random::noise;
use crate::harness::{DropoutData, FORMS, HostData, Report, Rng, Vector, due, full, rest};
use crate::laws::property_layers;
use crate::ops::layers::mha;

fn run(
    problem: &LayerProblem,
    setup: &LayerBackwardSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Each<Vec<f64>>, String> {
    pollster::block_on(run_layer_backward_async(problem, setup, change))
}

/// Returns both targets, with and without saved activations. The `nth` of the four always runs.
fn setups(name: &str, nth: usize) -> Vec<LayerBackwardSetup> {
    let all = FORMS.into_iter().flat_map(|form| [true, false].map(|keeps| (form, keeps))).enumerate();
    let runs = all.filter(|(n, (form, keeps))| {
        let key = format!("gradients, {name}, {form:?}, {keeps}");
        n % 4 == nth % 4 && due(&key) || rest(&key)
    });
    runs.map(|(_, (form, keeps))| LayerBackwardSetup { keeps, ..LayerBackwardSetup::plain(full(), form) })
        .collect()
}

/// The gradients from PyTorch.
#[test]
fn gradients_match_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("layer gradients of vectors");
    let names: Vec<_> = mha::NAMES.iter().filter(|name| name.contains("_bwd_")).collect();
    assert_eq!(names.len(), 2);
    for name in names {
        let vector = Vector::load(mha::FAMILY, name);
        let case = LayerCase { one_input: false, ..mha::case(name) };
        let problem = LayerProblem { case, d_out: vector.f64("dout"), d_lse: None };
        for (form, keeps) in FORMS.into_iter().zip([true, false]) {
            let setup = LayerBackwardSetup { keeps, ..LayerBackwardSetup::plain(full(), form) };
            report.check_layer_backward(&problem, &setup);
            let got = run(&problem, &setup, |kernel_options| kernel_options).expect("it ran for the report");
            let of = ["dq", "dk", "dv", "dw_q", "dw_k", "dw_v", "dw_o", "db_q", "db_k", "db_v", "db_o"];
            for ((got, of), name) in got.iter().zip(of).zip(NAMES) {
                let (want, tolerance) = vector.expected(of).expect("a gradient");
                let got = got.as_ref().expect("it was wanted");
                compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{}: {name}: {e}", vector.name));
            }
        }
    }
    report.finish();
}

/// Every PyTorch layer with a known output: masks, appended keys, other widths, no biases.
#[test]
fn gradients_of_pytorch_layers_match() {
    crate::harness::in_turn!();
    let mut report = Report::new("layer gradients of others' layers");
    for (n, name) in mha::NAMES.iter().enumerate() {
        let problem = LayerProblem::new(mha::case(name), n % 2 == 0);
        setups(name, n).iter().for_each(|setup| report.check_layer_backward(&problem, setup));
    }
    report.finish();
}

const SHAPE: MultiHeadShape = MultiHeadShape { batch: 2, q_len: 19, kv_len: 33 };

fn options() -> LayerOptions {
    LayerOptions {
        kv_heads: 2,
        value_dim: 5,
        key_features: 17,
        value_features: 10,
        out_features: 21,
        ..LayerOptions::new(24, 4)
    }
}

/// Score terms of the mask are not added to the scores of appended keys. The gradients of appended
/// keys are sums over the batch.
#[test]
fn appended_keys() {
    crate::harness::in_turn!();
    let mut report = Report::new("layer gradients with appended keys");
    let MultiHeadShape { batch, q_len, kv_len } = SHAPE;
    let heads = options().heads;
    // The bias and the table have one element for each key or distance, or one for all of them.
    let kinds = [
        ("each", [batch, heads, q_len, kv_len], [1, heads, 1, 7]),
        ("all", [1, heads, q_len, 1], [batch, heads, 1, 1]),
    ];
    for (n, (kind, bias, relative)) in kinds.into_iter().enumerate() {
        let name = format!("appended, an element for {kind}");
        let config = LayerOptions { add_zero_attn: n == 0, ..options() };
        let mut case = LayerCase::random(name.clone(), config, SHAPE, true);
        let rng = &mut Rng::named(&name);
        let mut of = |shape: [usize; 4]| Some(HostData::new(rng.normals(shape.iter().product()), shape));
        (case.rules.bias, case.rules.relative) = (of(bias), of(relative));
        (case.rules.slopes, case.rules.symmetric) = (of([1, heads, 1, 1]), true);
        case.rules.sinks = of([1, heads, 1, 1]);
        // Some queries see only the appended key.
        case.rules.causal = true;
        case.rules.alignment = Alignment::Offset(-4);
        let problem = LayerProblem::new(case, true);
        // One setup on each target, one with saved activations and one without.
        setups(&name, [0, 3][n]).iter().for_each(|setup| report.check_layer_backward(&problem, setup));
    }
    report.finish();
}

/// Draws a random layer and its run. The draws of a group share kernels.
fn draw(n: usize) -> (LayerProblem, LayerBackwardSetup) {
    let group = (n / GROUP) as u64;
    let first = property_layers::Draw::random(0x6ad1 ^ group);
    let drawn = (0..n % GROUP).fold(first, |draw, _| draw.again());
    let rng = &mut Rng::new(0xbac ^ group);
    (LayerProblem::new(drawn.case(), rng.chance(0.5)), LayerBackwardSetup::random(rng, drawn.setup()))
}

/// The random layers that always run, and all of them.
const DRAWS: [usize; 2] = [16, 200];
/// The draws in a group. All use the kernels of the first one.
const GROUP: usize = 8;

#[test]
fn random_layers() {
    let mut report = Report::new("gradients of random layers");
    for n in 0..DRAWS[1] {
        let key = format!("gradients of random layers {}", n / GROUP);
        if n < DRAWS[0] && due(&key) || rest(&key) {
            let (problem, setup) = draw(n);
            report.check_layer_backward(&problem, &setup);
        }
    }
    report.finish();
}

fn bits(got: &Each<Vec<f64>>) -> Vec<Vec<u64>> {
    got.iter().flatten().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Every run gives the same bits, with and without saved activations, and with any split of the
/// work.
#[test]
fn bits_are_the_same() {
    crate::harness::in_turn!();
    let shape = MultiHeadShape { batch: 2, q_len: 40, kv_len: 70 };
    let config = LayerOptions { add_zero_attn: true, ..options() };
    let mut case = LayerCase::random("the same bits of a layer".into(), config, shape, true);
    case.rules.causal = true;
    case.rules.slopes = Some(HostData::new(vec![0.5, 0.25, 0.125, 0.0625], [1, 4, 1, 1]));
    case.dropout = Some(DropoutData::Seeded { p: 0.1, seed: 5 });
    let problem = LayerProblem::new(case, true);
    let of_forms = FORMS.map(|form| {
        let of = |keeps, limit: Option<u64>| {
            let setup = LayerBackwardSetup { keeps, ..LayerBackwardSetup::plain(full(), form) };
            let change = |kernel_options: KernelOptions| {
                limit.into_iter().fold(kernel_options, KernelOptions::work_limit)
            };
            bits(&run(&problem, &setup, change).expect("it runs"))
        };
        let first = of(true, None);
        assert_eq!(first.len(), 14, "all but what the mask has not");
        for n in 0..8 {
            assert!(of(true, None) == first, "{form:?}: other bits in run {n}");
        }
        assert!(of(false, None) == first, "{form:?}: other bits where nothing is kept");
        for limit in [1, 100_000, 1_000_000] {
            let cut = of(false, Some(limit));
            assert!(cut == first, "{form:?}: other bits with dispatches of {limit} operations");
        }
        first
    });
    assert!(of_forms[0] != of_forms[1], "one form stands for both");
}

/// A layer with one buffer for all its weights. The gradients use one buffer like `in_proj_weight`,
/// and one for the output projection.
struct Packed {
    layer: MultiHeadAttention,
    /// Holds x, y, context, lse, d_y, d_x, and the gradients of in_proj_weight, in_proj_bias,
    /// out_proj.weight, out_proj.bias.
    buffers: [wgpu::Buffer; 10],
    length: usize,
}

const EMBED: usize = 24;
const HEADS: usize = 3;
const BATCH: usize = 2;

impl Packed {
    fn new(length: usize) -> Self {
        let gpu = &full().gpu;
        let upload = |n: usize, seed: f32| gpu.upload(&noise(n, seed)).expect("an upload");
        let (weights, biases) = (upload(4 * EMBED * EMBED, 0.37), upload(4 * EMBED, 0.71));
        let linear = |n: usize| Linear {
            weight: TensorView::matrix(&weights, DType::F32, [EMBED, EMBED]).with_offset(n * EMBED * EMBED),
            bias: Some(TensorView::vector(&biases, DType::F32, EMBED).with_offset(n * EMBED)),
        };
        let weights = MultiHeadWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        let config = MultiHeadConfig::new(EMBED, HEADS);
        let layer = MultiHeadAttention::with_pipelines(gpu.pipelines(), config, &weights).expect("a layer");
        // On GPUs splits of the keys need additional memory.
        let layer = layer.kernel_options(KernelOptions::new().splits(1));
        let rows = BATCH * length;
        let sizes = [
            rows * EMBED,
            rows * EMBED,
            rows * EMBED,
            rows * HEADS,
            rows * EMBED,
            rows * EMBED,
            3 * EMBED * EMBED,
            3 * EMBED,
            EMBED * EMBED,
            EMBED,
        ];
        let mut seed = 0.1;
        let buffers = sizes.map(|n| {
            seed += 0.17;
            upload(n, seed)
        });
        Packed { layer, buffers, length }
    }

    fn sequence(&self, n: usize) -> TensorView<'_> {
        TensorView::sequence(&self.buffers[n], DType::F32, [BATCH, self.length, EMBED])
    }

    fn forward(&self, keeps: bool) -> MultiHeadForward<'_> {
        let call = MultiHeadForward::self_attention(self.sequence(0), self.sequence(1)).mask(Mask::causal());
        if !keeps {
            return call;
        }
        call.context(self.sequence(2)).lse(TensorView::new(
            &self.buffers[3],
            DType::F32,
            [BATCH, HEADS, self.length, 1],
        ))
    }

    fn backward(&self, keeps: bool) -> MultiHeadBackward<'_> {
        let weight = |buffer: usize, n: usize| {
            TensorView::matrix(&self.buffers[buffer], DType::F32, [EMBED, EMBED])
                .with_offset(n * EMBED * EMBED)
        };
        let bias = |buffer: usize, n: usize| {
            TensorView::vector(&self.buffers[buffer], DType::F32, EMBED).with_offset(n * EMBED)
        };
        let linear =
            |at: usize, n| LinearGradients { weight: Some(weight(at, n)), bias: Some(bias(at + 1, n)) };
        MultiHeadBackward::new(self.forward(keeps), self.sequence(4))
            .d_query(self.sequence(5))
            .d_key(self.sequence(5))
            .d_value(self.sequence(5))
            .d_weights(MultiHeadGradients {
                query: linear(6, 0),
                key: linear(6, 1),
                value: linear(6, 2),
                out: linear(8, 0),
                bias_kv: None,
                qk_norm: Default::default(),
                gate: Default::default(),
            })
    }

    fn scratch(&self, keeps: bool) -> Scratch {
        let size = self.layer.backward_scratch_size(&self.backward(keeps)).expect("a size");
        let size = size.max(self.layer.scratch_size(&self.forward(keeps)).expect("a size"));
        Scratch::new(full().gpu.device(), size).expect("scratch")
    }

    /// Returns x, d_y and the gradients.
    fn contents(&self) -> Vec<Vec<f32>> {
        let of = |n: &usize| {
            let buffer = &self.buffers[*n];
            full().gpu.download::<f32>(buffer, buffer.size() as usize / 4).expect("a read-back")
        };
        [0, 4, 5, 6, 7, 8, 9].iter().map(of).collect()
    }
}

/// A layer in a user's layout, compared with the same layer with separate tensors.
#[test]
fn packed_gradients_of_self_attention() {
    crate::harness::in_turn!();
    let packed = Packed::new(13);
    let gpu = &full().gpu;
    let mut scratch = packed.scratch(true);
    gpu.submit(|encoder| {
        packed.layer.forward(encoder, &packed.forward(true), &mut scratch)?;
        packed.layer.backward(encoder, &packed.backward(true), &mut scratch)
    })
    .expect("recorded");
    let got = packed.contents();

    let [x, d_y] = [&got[0], &got[1]];
    let (weights, biases) = (noise(4 * EMBED * EMBED, 0.37), noise(4 * EMBED, 0.71));
    let config = LayerOptions::new(EMBED, HEADS);
    let shape = MultiHeadShape { batch: BATCH, q_len: 13, kv_len: 13 };
    let mut case = LayerCase::random("packed".into(), config, shape, false);
    case.inputs = [x.clone(), x.clone(), x.clone()];
    case.one_input = true;
    for (n, linear) in case.linears.iter_mut().enumerate() {
        linear.weight = weights[n * EMBED * EMBED..][..EMBED * EMBED].to_vec();
        linear.bias = Some(biases[n * EMBED..][..EMBED].to_vec());
    }
    case.rules.causal = true;
    let d_out = d_y.iter().map(|x| f64::from(*x)).collect();
    let problem = LayerProblem { case, d_out, d_lse: None };
    let setup = LayerBackwardSetup::plain(full(), Target::Auto);
    let mut report = Report::new("gradients of packed weights");
    report.check_layer_backward(&problem, &setup);
    report.finish();
    let want = run(&problem, &setup, |t| t).expect("it runs");
    let want = |n: usize| want[n].clone().expect("it was wanted").into_iter().map(|x| x as f32);
    let join = |n: [usize; 3]| n.into_iter().flat_map(want).collect::<Vec<f32>>();
    let want = [
        want(0).collect(),
        join([3, 4, 5]),
        join([7, 8, 9]),
        want(6).collect(),
        want(10).collect::<Vec<f32>>(),
    ];
    for (n, (got, want)) in got[2..].iter().zip(want).enumerate() {
        assert!(got.iter().any(|x| *x != 0.0) && *got == want, "buffer {n} of the gradients");
    }
}

/// The caller's pass, and a prepared call.
#[test]
fn recorded_in_a_callers_pass() {
    let packed = Packed::new(9);
    let gpu = &full().gpu;
    let mut scratch = packed.scratch(false);
    let record = |encoder: &mut wgpu::CommandEncoder, scratch: &mut Scratch| {
        packed.layer.backward(encoder, &packed.backward(false), scratch)
    };
    gpu.submit(|encoder| record(encoder, &mut scratch)).expect("recorded");
    let want = packed.contents();
    // Preparing writes nothing.
    let clear = |encoder: &mut wgpu::CommandEncoder| {
        (5..10).for_each(|n| encoder.clear_buffer(&packed.buffers[n], 0, None));
    };
    gpu.submit(|encoder| {
        clear(encoder);
        packed.layer.prepare_backward(&packed.backward(false), &mut scratch).map(drop)
    })
    .expect("prepared");
    assert!(packed.contents()[2..].iter().flatten().all(|x| *x == 0.0));
    gpu.submit(|encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        packed.layer.backward(&mut pass, &packed.backward(false), &mut scratch)
    })
    .expect("recorded");
    assert!(packed.contents() == want);
}

/// The scratch has its documented size, and twice that for twice the lengths.
#[test]
fn scratch_is_linear() {
    let of = |length: usize, keeps: bool| {
        let packed = Packed::new(length);
        packed.layer.backward_scratch_size(&packed.backward(keeps)).expect("a size").total() as usize
    };
    for length in [32, 64, 2048] {
        let tokens = BATCH * length;
        // Queries, keys and values, their gradients, the gradient of the heads' outputs, and the
        // queries' stats.
        let kept = 4 * tokens * EMBED * (3 + 3 + 1) + 16 * tokens * HEADS;
        assert_eq!(of(length, true), kept, "length {length}");
        assert_eq!(
            of(length, false),
            kept + tokens * (4 * EMBED + 4 * HEADS),
            "length {length}, nothing kept"
        );
    }
    let packed = Packed::new(32);
    // Fewer gradients need less.
    let bias = |call: MultiHeadBackward<'_>| packed.layer.backward_scratch_size(&call).expect("a size");
    let plain = MultiHeadBackward::new(packed.forward(true), packed.sequence(4));
    let out = LinearGradients {
        weight: None,
        bias: Some(TensorView::vector(&packed.buffers[9], DType::F32, EMBED)),
    };
    let out = MultiHeadGradients { out, ..MultiHeadGradients::default() };
    assert_eq!(bias(plain.d_weights(out)), ScratchSize::default());
    let queries = bias(plain.d_query(packed.sequence(5))).total() as usize;
    assert_eq!(queries, 4 * BATCH * 32 * EMBED * (3 + 1 + 1) + 16 * BATCH * 32 * HEADS);
}
