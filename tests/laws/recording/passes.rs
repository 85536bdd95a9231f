//! The compute passes and dispatches of calls: the table of docs/guide/embedding.md.

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, Keep, Tokens};
use wgpu_attention::layers::{
    DecoderBackward, DecoderForward, DecoderLayerWeights, DecoderMemory, EncoderBackward, EncoderForward,
    EncoderLayerWeights, FeedForwardWeights, NormOrder, TransformerLayerConfig,
};
use wgpu_attention::linear_attention::{LinearAttention, LinearConfig, LinearForward};
use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::recurrent::{Decay, RecurrentAttention, RecurrentConfig, RecurrentForward};
use wgpu_attention::rows::{
    LogSoftmax, LogSoftmaxForward, Norm, NormConfig, NormForward, NormWeights, TopK, TopKForward,
};
use wgpu_attention::selected::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward, SelectedAttention, SelectedBackward, SelectedConfig, SelectedForward,
};
use wgpu_attention::{
    Backward, Cache, CacheConfig, Error, Prepared, Projection, Recorder, TransformerDecoder,
    TransformerEncoder, inspect,
};

use super::*;
use crate::harness::{full, root};

const MARK: &str = "<!-- tests/laws/recording/passes.rs -->\n";
const LENGTH: usize = 128;
const FEATURES: usize = 256;
const HEADS: usize = 4;

/// Buffers of zeros for a call: one that it reads, and others that it writes.
struct Zeros {
    pipelines: Pipelines,
    read: wgpu::Buffer,
    written: Vec<wgpu::Buffer>,
}

impl Zeros {
    /// Plans are those of a GPU, on every device that runs this test.
    fn new(gpu: &Gpu) -> Self {
        let buffer = |bytes| gpu.buffer(bytes).expect("a buffer");
        Zeros {
            pipelines: inspect::as_gpu(gpu.device(), None),
            read: buffer(16 << 20),
            written: (0..6).map(|_| buffer(2 << 20)).collect(),
        }
    }

    fn read(&self, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.read, DType::F32, shape)
    }

    fn written(&self, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.written[n], DType::F32, shape)
    }

    fn linear(&self, out: usize, from: usize) -> Linear<'_> {
        Linear { weight: self.read([1, 1, out, from]), bias: Some(self.read([1, 1, 1, out])) }
    }

    fn heads(&self) -> MultiHeadWeights<'_> {
        let [query, key, value, out] = [self.linear(FEATURES, FEATURES); 4];
        MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None }
    }

    fn feed_forward(&self) -> FeedForwardWeights<'_> {
        let (up, down) = (self.linear(4 * FEATURES, FEATURES), self.linear(FEATURES, 4 * FEATURES));
        FeedForwardWeights { up, gate: None, down }
    }

    fn norm(&self) -> NormWeights<'_> {
        NormWeights { weight: Some(self.read([1, 1, 1, FEATURES])), bias: None }
    }

    fn config() -> TransformerLayerConfig {
        TransformerLayerConfig::new(MultiHeadConfig::new(FEATURES, HEADS), 4 * FEATURES)
    }

    fn encoder(&self, layers: usize) -> TransformerEncoder {
        self.stack(Self::config(), self.feed_forward(), layers)
    }

    /// A stack with the norm before each part and a gate, as Llama has.
    fn gated(&self, layers: usize) -> TransformerEncoder {
        let gate = Some(self.linear(4 * FEATURES, FEATURES));
        let config = Self::config().order(NormOrder::Pre).norm(NormConfig::rms()).gated(true);
        self.stack(config, FeedForwardWeights { gate, ..self.feed_forward() }, layers)
    }

    fn stack(
        &self,
        config: TransformerLayerConfig,
        feed_forward: FeedForwardWeights,
        layers: usize,
    ) -> TransformerEncoder {
        let layer = EncoderLayerWeights { attention: self.heads(), feed_forward, norms: [self.norm(); 2] };
        let weights = vec![layer; layers];
        TransformerEncoder::with_pipelines(&self.pipelines, config, &weights, Some(self.norm()))
            .expect("a stack")
    }

    fn decoder(&self, layers: usize) -> TransformerDecoder {
        let layer = DecoderLayerWeights {
            self_attention: self.heads(),
            cross_attention: self.heads(),
            feed_forward: self.feed_forward(),
            norms: [self.norm(); 3],
        };
        let weights = vec![layer; layers];
        TransformerDecoder::with_pipelines(&self.pipelines, Self::config(), &weights, Some(self.norm()))
            .expect("a stack")
    }

    fn cache(&self, layers: usize, layout: CacheLayout) -> Cache {
        let config = CacheConfig::new(HEADS, FEATURES / HEADS, 1024).layers(layers).batch(2).layout(layout);
        self.made(config)
    }

    fn made(&self, config: CacheConfig) -> Cache {
        Cache::with_pipelines(&self.pipelines, config).expect("a cache")
    }

    fn scratch(&self, size: Result<ScratchSize, Error>) -> Scratch {
        Scratch::new(self.pipelines.device(), size.expect("a size")).expect("scratch")
    }

    /// Returns the dispatches of a prepared call. In an encoder it opens one pass, in a pass none.
    fn prepared(&self, prepare: impl FnOnce() -> Result<Prepared, Error>) -> usize {
        let (prepared, bound) = inspect::bound(prepare);
        let prepared = prepared.expect("a preparation");
        let mut encoder = self.encode();
        assert_eq!(inspect::passes(|| prepared.record(&mut encoder)).1, 1);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert_eq!(inspect::passes(|| prepared.record(&mut pass)).1, 0);
        bound.len()
    }

    /// Returns the dispatches of a call that changes a cache. It is recorded into a pass, opens no
    /// other one, and is valid.
    fn in_pass(&self, record: impl FnOnce(&mut wgpu::ComputePass) -> Result<(), Error>) -> usize {
        let mut encoder = self.encode();
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let (bound, passes) = inspect::passes(|| inspect::bound(|| record(&mut pass)));
        bound.0.expect("a recording");
        assert_eq!(passes, 0);
        drop(pass);
        let scope = self.pipelines.device().push_error_scope(wgpu::ErrorFilter::Validation);
        drop(encoder.finish());
        assert!(pollster::block_on(scope.pop()).is_none(), "an invalid recording");
        bound.1.len()
    }

    fn encode(&self) -> wgpu::CommandEncoder {
        self.pipelines.device().create_command_encoder(&Default::default())
    }
}

/// A count for each of L layers and a remainder: `7 L + 1`.
fn of_layers(count: impl Fn(usize) -> usize) -> String {
    let [one, three] = [1, 3].map(&count);
    let each = (three - one) / 2;
    assert_eq!(count(2), one + each, "the same dispatches in each layer");
    match one - each {
        0 => format!("{each} L"),
        rest => format!("{each} L + {rest}"),
    }
}

type Rows = Vec<(&'static str, String)>;

fn of_attention(z: &Zeros, rows: &mut Rows) {
    let attention = |path| {
        let config = Config::new(8, 64).kernel_options(KernelOptions::new().algorithm(path));
        Attention::with_pipelines(&z.pipelines, config).expect("an operator")
    };
    let wide = [1, 8, 512, 64];
    let call = |q_len: usize, kv_len: usize| {
        let [q, kv] = [[1, 8, q_len, 64], [1, 8, kv_len, 64]];
        Forward::new(z.read(q), z.read(kv), z.read(kv), z.written(0, q))
    };
    let mut forward = |name, path, call: Forward| {
        let operator = attention(path);
        let mut scratch = z.scratch(operator.scratch_size(&call));
        rows.push((name, z.prepared(|| operator.prepare(&call, &mut scratch)).to_string()));
    };
    forward("attention, 512 queries and keys", Algorithm::Fused, call(512, 512).mask(Mask::causal()));
    forward("attention, 1 query and 4096 keys", Algorithm::Fused, call(1, 4096));
    forward("attention by stages", Algorithm::Staged, call(512, 512));
    let operator = attention(Algorithm::Fused);
    let attended = call(512, 512).lse(z.read([1, 8, 512, 1]));
    let back = Backward::new(attended, z.read(wide));
    let back = back.d_q(z.written(1, wide)).d_k(z.written(2, wide)).d_v(z.written(3, wide));
    let mut scratch = z.scratch(operator.backward_scratch_size(&back));
    let count = z.prepared(|| operator.prepare_backward(&back, &mut scratch));
    rows.push(("attention, backward", count.to_string()));
    let linear = LinearAttention::with_pipelines(&z.pipelines, LinearConfig::new(8, 64).causal(true));
    let linear = linear.expect("an operator");
    let call = LinearForward::new(z.read(wide), z.read(wide), z.read(wide), z.written(0, wide));
    let mut scratch = z.scratch(linear.scratch_size(&call));
    let count = z.prepared(|| linear.prepare(&call, &mut scratch));
    rows.push(("linear attention, causal", count.to_string()));
    let config = RecurrentConfig::new(8, 64).decay(Decay::PerHead).delta(true).normalize_qk(1e-6);
    let recurrent = RecurrentAttention::with_pipelines(&z.pipelines, config).expect("an operator");
    for (name, length) in [("recurrent attention, gated delta rule", LENGTH), ("the same, 1 token", 1)] {
        let [of, rates] = [64, 1].map(|channels| [1, 8, length, channels]);
        let state = z.written(1, [1, 8, 64, 64]);
        let call = RecurrentForward::new(z.read(of), z.read(of), z.read(of), z.written(0, of));
        let call = call.decay(z.read(rates)).beta(z.read(rates)).state(state);
        let mut scratch = z.scratch(recurrent.scratch_size(&call));
        let count = z.prepared(|| recurrent.prepare(&call, &mut scratch));
        rows.push((name, count.to_string()));
    }
    let config = Config::new(8, 64).kv_heads(1);
    let selected = SelectedAttention::with_pipelines(&z.pipelines, SelectedConfig::new(config).window(16));
    let selected = selected.expect("an operator");
    let kv = z.read([1, 1, 512, 64]);
    let indices = TensorView::new(&z.read, DType::U32, [1, 1, 512, 64]);
    let attended = Forward::new(z.read(wide), kv, kv, z.written(0, wide)).mask(Mask::causal());
    let call = SelectedForward::new(attended, indices);
    let mut scratch = z.scratch(selected.scratch_size(&call));
    let count = z.prepared(|| selected.prepare(&call, &mut scratch));
    rows.push(("selected attention, 512 queries with 80 keys each", count.to_string()));
    let attended = attended.lse(z.read([1, 8, 512, 1]));
    let d_kv = |n| z.written(n, [1, 1, 512, 64]);
    let back = Backward::new(attended, z.read(wide)).d_q(z.written(1, wide)).d_k(d_kv(2)).d_v(d_kv(3));
    let call = SelectedBackward::new(back, indices);
    let mut scratch = z.scratch(selected.backward_scratch_size(&call));
    let count = z.prepared(|| selected.prepare_backward(&call, &mut scratch));
    rows.push(("selected attention, backward", count.to_string()));
    let native = NativeSparseAttention::with_pipelines(&z.pipelines, NativeSparseConfig::new(config));
    let native = native.expect("an operator");
    let gates = z.read([1, 8, 512, 3]);
    let call = NativeSparseForward::new(z.read(wide), kv, kv, gates, z.written(0, wide));
    let mut scratch = z.scratch(native.scratch_size(&call));
    let count = z.prepared(|| native.prepare(&call, &mut scratch));
    rows.push(("native sparse attention, 512 queries", count.to_string()));
    let branches = NativeSparseBranches {
        out: z.read([3, 8, 512, 64]),
        lse: z.read([3, 8, 512, 1]),
        indices: TensorView::new(&z.read, DType::U32, [1, 1, 512, 16]),
    };
    let back = NativeSparseBackward::new(call.branches(branches), z.read(wide)).d_q(z.written(1, wide));
    let back = back.d_k(d_kv(2)).d_v(d_kv(3)).d_gates(z.written(0, [1, 8, 512, 3]));
    let mut scratch = z.scratch(native.backward_scratch_size(&back));
    let count = z.prepared(|| native.prepare_backward(&back, &mut scratch));
    rows.push(("native sparse attention, backward", count.to_string()));
}

fn of_rows_and_products(z: &Zeros, rows: &mut Rows) {
    let x = z.read([1, 1, LENGTH, FEATURES]);
    let out = |n| z.written(n, [1, 1, LENGTH, FEATURES]);
    let projection = Projection::with_pipelines(&z.pipelines);
    let linear = z.linear(FEATURES, FEATURES);
    let products = [0, 1, 2].map(|n| ProjectionForward::new(x, linear, out(n)));
    let count = z.prepared(|| projection.prepare(&products));
    rows.push(("projections of q, k and v", count.to_string()));
    let back = ProjectionBackward::new(ProjectionForward::new(x, linear, x), x).d_x(out(0));
    let back = back.d_weight(z.written(1, [1, 1, FEATURES, FEATURES]));
    let back = back.d_bias(z.written(2, [1, 1, 1, FEATURES]));
    let count = z.prepared(|| projection.prepare_backward(&[back]));
    rows.push(("projection, backward", count.to_string()));
    let norm = Norm::with_pipelines(&z.pipelines, NormConfig::layer()).expect("a norm");
    let soft = LogSoftmax::with_pipelines(&z.pipelines);
    let top = TopK::with_pipelines(&z.pipelines);
    let indices = TensorView::new(&z.written[0], DType::U32, [1, 1, LENGTH, 4]);
    let counts = [
        z.prepared(|| norm.prepare(&NormForward::new(x, out(0)))),
        z.prepared(|| soft.prepare(&LogSoftmaxForward::new(x, out(0)))),
        z.prepared(|| top.prepare(&TopKForward::new(x, indices))),
    ];
    assert_eq!(counts, [1; 3]);
    rows.push(("norm, log-softmax or top-k", "1".into()));
}

fn of_layers_and_stacks(z: &Zeros, rows: &mut Rows) {
    let (x, out, d_x) = {
        let shape = [2, 1, LENGTH, FEATURES];
        (z.read(shape), z.written(0, shape), z.written(1, shape))
    };
    let layer =
        MultiHeadAttention::with_pipelines(&z.pipelines, MultiHeadConfig::new(FEATURES, HEADS), &z.heads());
    let layer = layer.expect("a layer");
    let call = MultiHeadForward::self_attention(x, out).mask(Mask::causal());
    let mut scratch = z.scratch(layer.scratch_size(&call));
    let count = z.prepared(|| layer.prepare(&call, &mut scratch));
    rows.push(("multi-head layer", count.to_string()));
    let back = MultiHeadBackward::new(call, x).d_query(d_x).d_key(d_x).d_value(d_x);
    let mut scratch = z.scratch(layer.backward_scratch_size(&back));
    let count = z.prepared(|| layer.prepare_backward(&back, &mut scratch));
    rows.push(("multi-head layer, gradient of its input", count.to_string()));
    let encodes = EncoderForward::new(x, out).mask(Mask::causal());
    let memory = z.read([3 * 2, HEADS, LENGTH, FEATURES / HEADS]);
    let decodes = |layers| {
        let memory = memory.slice(0, 0, layers * 2);
        DecoderForward::new(x, DecoderMemory { keys: memory, values: memory }, out).mask(Mask::causal())
    };
    let encoder = |layers| {
        let stack = z.encoder(layers);
        let mut scratch = z.scratch(stack.scratch_size(&encodes));
        z.prepared(|| stack.prepare(&encodes, &mut scratch))
    };
    rows.push(("encoder or decoder-only stack of L layers", of_layers(encoder)));
    let encoder = |layers| {
        let (stack, back) = (z.encoder(layers), EncoderBackward::new(encodes, x).d_x(d_x));
        let mut scratch = z.scratch(stack.backward_scratch_size(&back));
        z.prepared(|| stack.prepare_backward(&back, &mut scratch))
    };
    rows.push(("the same, gradient of its input", of_layers(encoder)));
    let decoder = |layers| {
        let (stack, call) = (z.decoder(layers), decodes(layers));
        let mut scratch = z.scratch(stack.scratch_size(&call));
        z.prepared(|| stack.prepare(&call, &mut scratch))
    };
    rows.push(("decoder with a memory, L layers", of_layers(decoder)));
    let decoder = |layers| {
        let stack = z.decoder(layers);
        let back = DecoderBackward::new(decodes(layers), x, x).d_x(d_x);
        let mut scratch = z.scratch(stack.backward_scratch_size(&back));
        z.prepared(|| stack.prepare_backward(&back, &mut scratch))
    };
    rows.push(("the same, gradient of its input", of_layers(decoder)));
}

/// Records one step of a stack with a cache: `advance`, then all layers.
fn step(
    into: &mut impl Recorder,
    stack: &TransformerEncoder,
    (cache, scratch, rope): (&mut Cache, &mut Scratch, &Rope),
    [x, out]: [TensorView; 2],
) -> Result<(), Error> {
    cache.advance(into, Tokens::All(x.shape()[2]))?;
    let at = RowPositions::Tensor(cache.starts());
    let call = EncoderForward::new(x, out).mask(Mask::causal()).cache(&*cache).rotary(rope, at);
    stack.forward(into, &call, scratch)
}

fn of_caches(z: &Zeros, rows: &mut Rows) {
    let mut cache = z.cache(3, CacheLayout::Contiguous);
    let (new, other) = ([2, HEADS, 1, FEATURES / HEADS], [1, 0]);
    let mut add = |name, count: usize| rows.push((name, count.to_string()));
    add("`Cache::advance` or `rewind`", z.in_pass(|pass| cache.advance(pass, Tokens::All(8))));
    assert_eq!(z.in_pass(|pass| cache.rewind(pass, Tokens::All(1))), 1);
    add("the same with `Tokens::Each`", z.in_pass(|pass| cache.advance(pass, Tokens::Each(&[1, 2]))));
    let append =
        Append::new(z.read([2, HEADS, 2, FEATURES / HEADS]), z.read([2, HEADS, 2, FEATURES / HEADS]));
    add("`Cache::append`, `read` or `overwrite`", z.in_pass(|pass| cache.append(pass, 0, &append)));
    let read = CacheRead::new(z.written(0, new), z.written(1, new));
    assert_eq!(z.in_pass(|pass| cache.read(pass, 0, &read)), 1);
    let one = Append::new(z.read(new), z.read(new));
    assert_eq!(z.in_pass(|pass| cache.overwrite(pass, 0, &one, RowPositions::Start(0))), 1);
    cache.truncate(0, 4).expect("shorter");
    add("`Cache::flush`", z.in_pass(|pass| cache.flush(pass)));
    let reorder = |layers| {
        let mut cache = z.cache(layers, CacheLayout::Contiguous);
        z.in_pass(|pass| cache.advance(pass, Tokens::All(8)));
        z.in_pass(|pass| cache.reorder(pass, &other))
    };
    rows.push(("`Cache::reorder` of L layers", of_layers(reorder)));
    let compact = |layers| {
        let config = CacheConfig::new(HEADS, FEATURES / HEADS, 64).layers(layers).batch(2).compacts(true);
        let mut cache = z.made(config);
        z.in_pass(|pass| cache.advance(pass, Tokens::All(8)));
        z.in_pass(|pass| cache.compact(pass, Keep::Each(&[&[1, 5], &[7]])))
    };
    rows.push(("`Cache::compact` of L layers", of_layers(compact)));
    let rope = Rope::new(z.pipelines.device(), RopeConfig::new(FEATURES / HEADS)).expect("a rope");
    for (name, length, gated) in [
        ("prompt of a stack of L layers, with a cache", 64, false),
        ("one token of that stack", 1, false),
        ("prompt of a stack like Llama's, with a cache", 64, true),
        ("one token of it", 1, true),
    ] {
        let steps = |layers| {
            let stack = if gated { z.gated(layers) } else { z.encoder(layers) };
            let mut cache = z.cache(layers, CacheLayout::Contiguous);
            let [x, out] = [z.read([2, 1, length, FEATURES]), z.written(0, [2, 1, length, FEATURES])];
            z.in_pass(|pass| cache.advance(pass, Tokens::All(length)));
            let at = RowPositions::Tensor(cache.starts());
            let call = EncoderForward::new(x, out).mask(Mask::causal()).cache(&cache).rotary(&rope, at);
            let mut scratch = z.scratch(stack.scratch_size(&call));
            z.in_pass(|pass| step(pass, &stack, (&mut cache, &mut scratch, &rope), [x, out]))
        };
        rows.push((name, of_layers(steps)));
    }
}

#[test]
fn table_of_dispatches_is_true() {
    let z = Zeros::new(&full().gpu);
    let mut rows = Rows::new();
    of_attention(&z, &mut rows);
    of_rows_and_products(&z, &mut rows);
    of_layers_and_stacks(&z, &mut rows);
    of_caches(&z, &mut rows);
    let lines: String = rows.iter().map(|(call, count)| format!("| {call} | {count} |\n")).collect();
    let table = format!("{MARK}\n| call | dispatches |\n|---|---|\n{lines}\n");
    let path = root().join("docs/guide/embedding.md");
    let text = std::fs::read_to_string(&path).expect("the page");
    if text.contains(&table) {
        return;
    }
    assert!(std::env::var_os("WGPU_ATTENTION_WRITE").is_some(), "embedding.md needs this table:\n{table}");
    let start = text.find(MARK).expect("the mark of the table");
    let body = &text[start + MARK.len() + 1..];
    let end = start + MARK.len() + 1 + body.find("\n\n").expect("the end of the table") + 2;
    std::fs::write(&path, format!("{}{table}{}", &text[..start], &text[end..])).expect("the page");
}

/// Steps in one pass, `advance` included, give the bits of steps in an encoder. Pages are taken and
/// shared within the pass, and sequences are reordered.
#[test]
fn whole_steps_fit_in_one_pass() {
    let gpu = &full().gpu;
    let z = Zeros::new(gpu);
    let (batch, heads, dim) = (2, HEADS, FEATURES / HEADS);
    let row = [batch, heads, 1, dim];
    let size = row.iter().product::<usize>();
    let x = gpu.upload(&noise(8 * size, 0.37)).expect("an upload");
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(heads, dim)).expect("an operator");
    for layout in [
        CacheLayout::Contiguous,
        CacheLayout::Ring { sink_tokens: 1 },
        CacheLayout::Paged { page: 16, pages: 8 },
    ] {
        let outs = [false, true].map(|is_one_pass| {
            let config = CacheConfig::new(heads, dim, 8).batch(batch).layout(layout);
            let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
            let out = gpu.upload(&vec![POISON; 6 * size]).expect("an upload");
            let at = |buffer, n| TensorView::new(buffer, DType::F32, row).with_offset(n * size);
            let call = Forward::with_cache(at(&x, 0), &cache, at(&out, 0)).at_end();
            let mut scratch = z.scratch(attention.scratch_size(&call.mask(Mask::causal())));
            let mut encoder = encoder(gpu);
            let before = inspect::passes(|| {
                if is_one_pass {
                    let mut pass = encoder.begin_compute_pass(&Default::default());
                    steps(&mut pass, &mut cache, &attention, &mut scratch, at, [&x, &out]);
                } else {
                    steps(&mut encoder, &mut cache, &attention, &mut scratch, at, [&x, &out]);
                }
            });
            assert_eq!(before.1 == 0, is_one_pass, "{layout:?}");
            gpu.queue().submit([encoder.finish()]);
            let lengths = gpu.download::<u32>(cache.lengths().buffer(), 16).expect("a read-back");
            (gpu.download::<u32>(&out, 6 * size).expect("a read-back"), lengths)
        });
        assert!(!outs[0].0.contains(&POISON.to_bits()), "{layout:?}: a step wrote nothing");
        assert!(outs[0] == outs[1], "{layout:?}: other bits in one pass");
    }
}

/// Six tokens. The host changes the cache in between in all the ways that it can.
fn steps<'a>(
    into: &mut impl Recorder,
    cache: &mut Cache,
    attention: &Attention,
    scratch: &mut Scratch,
    at: impl Fn(&'a wgpu::Buffer, usize) -> TensorView<'a>,
    [x, out]: [&'a wgpu::Buffer; 2],
) {
    for n in 0..6 {
        match n {
            2 => cache.truncate(0, 1).expect("shorter"),
            3 => cache.reorder(into, &[1, 0]).expect("a recording"),
            4 => cache.reorder(into, &[0, 0]).expect("a recording"),
            5 => cache.rewind(into, Tokens::Each(&[1, 0])).expect("a recording"),
            _ => {}
        }
        let tokens = if n == 1 { Tokens::Each(&[1, 1]) } else { Tokens::All(1) };
        cache.advance(into, tokens).expect("room");
        cache.append(into, 0, &Append::new(at(x, n), at(x, n + 1))).expect("a recording");
        let call = Forward::with_cache(at(x, n + 2), cache, at(out, n)).mask(Mask::causal());
        attention.forward(into, &call, scratch).expect("a recording");
    }
}
