//! Errors name what is wrong, before anything is recorded.

use wgpu_attention::attention::ScoreStage;
use wgpu_attention::cache::CacheLayout;
use wgpu_attention::mask::{Blocks, DeviceMask, MaskMod, Pattern, PatternPart, ScoreMod};
use wgpu_attention::selected::{SelectedAttention, SelectedBackward, SelectedConfig, SelectedForward};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{
    Backward, Cache, CacheConfig, Config, DType, Dropout, Forward, KernelOptions, Mask, Scratch, ScratchSize,
    TensorView,
};

use crate::harness::{defaults, full};

const Q: [usize; 4] = [2, 4, 5, 8];
const K: [usize; 4] = [2, 2, 9, 8];
const V: [usize; 4] = [2, 2, 9, 6];
const OUT: [usize; 4] = [2, 4, 5, 6];
const LSE: [usize; 4] = [2, 4, 5, 1];
const PAIRS: [usize; 4] = [2, 4, 5, 9];
const INDICES: [usize; 4] = [2, 1, 5, 3];
const WEIGHTS: [usize; 4] = [2, 4, 5, 3];

fn says(error: &wgpu_attention::Error, words: &[&str]) {
    let error = error.to_string();
    assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
}

struct Bench {
    buffers: Vec<wgpu::Buffer>,
}

impl Bench {
    fn new() -> Self {
        Bench { buffers: (0..16).map(|_| full().gpu.buffer(65536).expect("a buffer")).collect() }
    }

    fn typed(&self, n: usize, dtype: DType, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.buffers[n], dtype, shape)
    }

    fn view(&self, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        self.typed(n, DType::F32, shape)
    }

    fn numbers(&self, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        self.typed(n, DType::U32, shape)
    }

    /// A call without faults.
    fn forward(&self) -> Forward<'_> {
        Forward::new(self.view(0, Q), self.view(1, K), self.view(2, V), self.view(3, OUT))
            .lse(self.view(4, LSE))
    }

    fn indices(&self) -> TensorView<'_> {
        self.numbers(5, INDICES)
    }

    fn call(&self) -> SelectedForward<'_> {
        SelectedForward::new(self.forward(), self.indices())
    }

    fn masked<'a>(&'a self, mask: DeviceMask<'a>) -> SelectedForward<'a> {
        SelectedForward::new(self.forward().mask(mask), self.indices())
    }
}

fn attention() -> Config {
    Config::new(4, 8).kv_heads(2).value_dim(6)
}

fn config() -> SelectedConfig {
    SelectedConfig::new(attention())
}

fn made(config: SelectedConfig) -> SelectedAttention {
    SelectedAttention::with_pipelines(full().gpu.pipelines(), config).expect("an operator")
}

fn no_scratch() -> Scratch {
    Scratch::new(full().gpu.device(), ScratchSize::default()).expect("nothing")
}

/// Checks that a call and its size are refused for the same reason. The encoder still works.
fn refused(config: SelectedConfig, call: SelectedForward, words: &[&str]) {
    let (operator, gpu) = (made(config), &full().gpu);
    let size = operator.scratch_size(&call).expect_err("an error");
    says(&size, words);
    let result = gpu.submit(|encoder| {
        let e = operator.forward(encoder, &call, &mut no_scratch()).expect_err("an error");
        assert_eq!(e.to_string(), size.to_string());
        Ok(())
    });
    result.expect("an empty submission");
    let prepared = operator.prepare(&call, &mut no_scratch()).map(drop);
    assert_eq!(prepared.expect_err("an error").to_string(), size.to_string());
}

#[test]
fn bad_options_are_errors() {
    let gpu = &full().gpu;
    let unmade = |config: SelectedConfig, words: &[&str]| {
        says(&SelectedAttention::with_pipelines(gpu.pipelines(), config).expect_err("an error"), words);
    };
    unmade(config().block(0), &["`block` is 0", "1 to 2^20"]);
    unmade(config().block((1 << 20) + 1), &["`block`", "1 to 2^20"]);
    unmade(config().window((1 << 28) + 1), &["`window`", "at most 2^28"]);
    unmade(config().window(usize::MAX), &["`window`", "at most 2^28"]);
    unmade(SelectedConfig::new(attention().value_dim(9)).latent(true), &["`value_dim` is 9", "head_dim"]);
    unmade(SelectedConfig::new(Config::new(4, 8).kv_heads(3)), &["`heads`", "kv_heads"]);
    unmade(SelectedConfig::new(attention().dtype(DType::Bool)), &["Bool"]);
    unmade(SelectedConfig::new(attention().scale(f64::NAN)), &["scale", "finite"]);
    let staged = attention().kernel_options(KernelOptions::new().algorithm(Algorithm::Staged));
    unmade(SelectedConfig::new(staged), &["staged path", "`Algorithm::Auto`"]);
    made(config().block(1 << 20).window(1 << 28));
}

#[test]
fn bad_tensors_are_errors() {
    let b = Bench::new();
    let [q, k, v, out] = [b.view(0, Q), b.view(1, K), b.view(2, V), b.view(3, OUT)];
    let of = |q, k, v, out| SelectedForward::new(Forward::new(q, k, v, out), b.indices());
    let refused = |call, words: &[&str]| refused(config(), call, words);
    refused(of(b.typed(0, DType::F16, Q), k, v, out), &["`q`", "F32", "F16"]);
    refused(of(b.view(0, [2, 3, 5, 8]), k, v, out), &["`q`", "heads must be 4", "got 3"]);
    refused(of(q, b.view(1, [2, 4, 9, 8]), v, out), &["`k`", "heads must be 2", "got 4"]);
    refused(of(q, k, b.view(2, K), out), &["`v`", "dim must be 6", "got 8"]);
    refused(of(q, k, v, b.view(3, Q)), &["`out`", "dim must be 6", "got 8"]);
    refused(of(q, k, v, b.view(2, OUT)), &["`out`", "`v`"]);

    let of = |indices| SelectedForward::new(b.forward(), indices);
    refused(of(b.typed(5, DType::F32, INDICES)), &["`indices`", "U32", "F32"]);
    refused(of(b.numbers(5, [1, 1, 5, 3])), &["`indices`", "batch must be 2", "got 1"]);
    refused(of(b.numbers(5, [2, 1, 4, 3])), &["`indices`", "length must be 5", "got 4"]);
    refused(of(b.numbers(5, [2, 3, 5, 3])), &["list heads is 3", "1, kv_heads or heads"]);
    refused(of(b.numbers(5, [2, 8, 5, 3])), &["list heads is 8"]);
    refused(of(b.numbers(5, [2, 1, 5, 0])), &["`indices`", "is 0"]);
    refused(of(b.numbers(5, [2, 0, 5, 3])), &["`indices`", "is 0"]);
    refused(of(b.indices().slice(3, 2, 2)), &["`indices`", "slice(3, 2, 2)"]);
    refused(of(b.indices().with_offset(16384)), &["`indices`", "ends at byte"]);
    refused(of(b.numbers(3, INDICES)), &["`out`", "`indices`"]);
    refused(of(b.numbers(4, INDICES)), &["`lse`", "`indices`"]);

    let of = |weights| b.call().weights(weights);
    refused(of(b.typed(6, DType::U32, WEIGHTS)), &["`weights`", "U32"]);
    refused(of(b.view(6, [2, 2, 5, 3])), &["`weights`", "heads must be 4", "got 2"]);
    refused(of(b.view(6, [2, 4, 5, 9])), &["`weights`", "must be 3", "got 9"]);
    refused(of(b.view(6, [1, 1, 5, 3])), &["`weights`", "batch must be 2"]);
    refused(of(b.view(6, WEIGHTS).with_strides([60, 15, 3, 0])), &["`weights`", "share memory"]);
    let names = ["`q`", "`k`", "`v`", "`out`", "`lse`", "`indices`"];
    for (n, name) in names.into_iter().enumerate() {
        refused(of(b.view(n, WEIGHTS)), &["`weights`", name]);
    }
    let sinks = b.masked(Mask::causal().sink_logits(b.view(7, [1, 4, 1, 1])));
    refused(sinks.weights(b.view(7, WEIGHTS)), &["`weights`", "`sink_logits`"]);

    // Only the scratch is too small.
    let operator = made(config());
    assert!(operator.scratch_size(&b.call()).is_ok());
    let mut encoder = full().gpu.device().create_command_encoder(&Default::default());
    says(&operator.forward(&mut encoder, &b.call(), &mut no_scratch()).expect_err("an error"), &["scratch"]);
    says(&operator.prepare(&b.call(), &mut no_scratch()).expect_err("an error"), &["scratch"]);
}

#[test]
fn bad_calls_are_errors() {
    let b = Bench::new();
    let of = |forward| SelectedForward::new(forward, b.indices());
    let pairs = b.view(7, PAIRS);
    refused(config(), of(b.forward().weights(pairs)), &["weights of all keys", "selected call"]);
    refused(config(), of(b.forward().scores(pairs, ScoreStage::Scaled)), &["scores", "fused path"]);
    let seeded = Dropout::Seeded { p: 0.5, seed: 1 };
    refused(config(), of(b.forward().dropout(seeded)), &["dropout", "omit it"]);

    let latent = config().latent(true);
    refused(latent, b.call(), &["latent values apart from the keys", "`k.slice(3, 0, value_dim)`"]);
    let keys = b.view(1, K);
    let later = Forward::new(b.view(0, Q), keys, keys.slice(3, 1, 6), b.view(3, OUT));
    refused(latent, of(later), &["latent values apart from the keys"]);
    let dense = Forward::new(b.view(0, Q), keys, b.view(1, V), b.view(3, OUT));
    refused(latent, of(dense), &["latent values apart from the keys"]);
    let first = Forward::new(b.view(0, Q), keys, keys.slice(3, 0, 6), b.view(3, OUT));
    assert!(made(latent).scratch_size(&of(first)).is_ok());

    let weights = b.view(6, WEIGHTS);
    let [q, k, v, out] = [b.view(0, Q), b.view(1, K), b.view(2, V), b.view(3, OUT)];
    refused(config(), of(Forward::new(q, k, v, out)).weights(weights), &["weights without `lse`"]);
    let capped = SelectedConfig::new(attention().softcap(2.0));
    refused(capped, b.call().weights(weights), &["weights with a softcap"]);
    assert!(made(capped).scratch_size(&b.call()).is_ok());

    let cache = |layout| {
        let config = CacheConfig::new(2, 8, 16).value_dim(6).batch(2).layout(layout);
        Cache::with_pipelines(full().gpu.pipelines(), config).expect("a cache")
    };
    let cached = cache(CacheLayout::Contiguous);
    let to = |cache| Forward::with_cache(b.view(0, Q), cache, b.view(3, OUT)).at_end().lse(b.view(4, LSE));
    assert!(made(config()).scratch_size(&of(to(&cached))).is_ok());
    refused(config(), of(to(&cached)).weights(weights), &["weights with a cache", "as tensors"]);
    refused(config(), of(to(&cached).weights(pairs)), &["weights of all keys"]);
    let ring = cache(CacheLayout::Ring { sink_tokens: 0 });
    refused(config(), of(to(&ring)), &["a ring cache", "use pages"]);
    let other = SelectedConfig::new(Config::new(4, 12).kv_heads(2).value_dim(6));
    refused(other, of(to(&cached)), &["`cache.head_dim`"]);
}

#[test]
fn bad_masks_are_errors() {
    let b = Bench::new();
    let refused = |mask, words: &[&str]| refused(config(), b.masked(mask), words);
    let plain: DeviceMask = Mask::causal();
    let changed = ["a mask that changes scores", "only hide keys"];
    refused(plain.bias(b.view(7, PAIRS)), &changed);
    refused(plain.alibi(b.view(7, [1, 4, 1, 1])), &changed);
    refused(plain.relative(b.view(7, [1, 4, 1, 9])), &changed);
    let doubled = ScoreMod::new("fn score_mod(score: f32, at: At) -> f32 { return 2.0 * score; }");
    refused(plain.score_mod(doubled.expect("a function").with(&[])), &changed);
    let blocks = Blocks::new(b.numbers(7, [1, 1, 1, 1]), [16, 16]);
    refused(plain.blocks(blocks), &["a block map", "as indices"]);
    refused(plain.lengths(b.numbers(7, [3, 1, 1, 1])), &["`lengths`", "batch", "got 3"]);
    refused(plain.lengths(b.numbers(3, [2, 1, 1, 1])), &["`out`", "`lengths`"]);
    refused(plain.sink_logits(b.view(3, [1, 4, 1, 1])), &["`out`", "`sink_logits`"]);

    // Rules by head need lists by head.
    let by_head = ["may differ by head", "a list for each head"];
    let bools = b.typed(7, DType::Bool, PAIRS);
    let pattern = Pattern::Strided { stride: 3, part: PatternPart::ByHead };
    let odd = MaskMod::new("fn mask_mod(at: At) -> bool { return at.key % 2u == 1u; }");
    let masks = [
        plain.lengths(b.numbers(7, [2, 4, 1, 1])),
        plain.attn_mask(bools),
        plain.key_padding_mask(b.typed(7, DType::Bool, [2, 4, 1, 9])),
        plain.pattern(pattern),
        plain.mask_mod(odd.expect("a function").with(&[])),
    ];
    for mask in masks {
        refused(mask, &by_head);
        let of_heads = SelectedForward::new(b.forward().mask(mask), b.numbers(5, [2, 4, 5, 3]));
        made(config()).scratch_size(&of_heads).expect("lists by head");
        let of_groups = SelectedForward::new(b.forward().mask(mask), b.numbers(5, [2, 2, 5, 3]));
        says(&made(config()).scratch_size(&of_groups).expect_err("shared lists"), &by_head);
    }
    for mask in [plain.sink_logits(b.view(7, [2, 4, 1, 1])), plain.lengths(b.numbers(7, [2, 1, 5, 1]))] {
        made(config()).scratch_size(&b.masked(mask)).expect("a mask of all heads");
    }
}

#[test]
fn bad_backward_calls_are_errors() {
    let b = Bench::new();
    let (d_out, d_q) = (b.view(8, OUT), b.view(9, Q));
    let refused = |config: SelectedConfig, backward: Backward, words: &[&str]| {
        let (operator, call) = (made(config), SelectedBackward::new(backward, b.indices()));
        let size = operator.backward_scratch_size(&call).expect_err("an error");
        says(&size, words);
        let mut encoder = full().gpu.device().create_command_encoder(&Default::default());
        let recorded = operator.backward(&mut encoder, &call, &mut no_scratch()).expect_err("an error");
        let prepared = operator.prepare_backward(&call, &mut no_scratch()).map(drop).expect_err("an error");
        assert_eq!([recorded, prepared].map(|e| e.to_string()), [(); 2].map(|()| size.to_string()));
    };
    let new = |forward| Backward::new(forward, d_out).d_q(d_q);
    let good = new(b.forward());
    refused(config(), Backward::new(b.forward(), d_out), &["no gradient is requested"]);
    refused(config(), Backward::new(b.forward(), b.view(8, Q)).d_q(d_q), &["`d_out`", "dim must be 6"]);
    refused(config(), good.d_lse(b.view(10, OUT)), &["`d_lse`", "dim must be 1"]);
    refused(config(), good.d_q(b.view(9, K)), &["`d_q`", "heads must be 4"]);
    refused(config(), good.d_k(b.typed(10, DType::F16, K)), &["`d_k`", "F16"]);
    refused(config(), good.d_v(b.view(10, K)), &["`d_v`", "dim must be 6"]);
    refused(config(), good.d_k(b.view(1, K)), &["`d_k`", "`k`"]);
    refused(config(), good.d_k(b.view(9, K)), &["`d_q`", "`d_k`", "overlap"]);
    refused(config(), good.d_k(b.view(5, K)), &["`d_k`", "`indices`"]);
    refused(config(), good.d_sinks(b.view(10, [1, 4, 1, 1])), &["d_sinks", "no sink logits"]);
    refused(config(), good.d_bias(b.view(10, PAIRS)), &["d_bias", "no bias"]);
    let [q, k, v, out] = [b.view(0, Q), b.view(1, K), b.view(2, V), b.view(3, OUT)];
    refused(config(), new(Forward::new(q, k, v, out)), &["without `lse`"]);
    refused(config(), new(b.forward().dropout(Dropout::Seeded { p: 0.5, seed: 1 })), &["dropout", "omit it"]);
    let biased: DeviceMask = Mask::causal().bias(b.view(7, PAIRS));
    refused(config(), new(b.forward().mask(biased)), &["a mask that changes scores"]);
    let by_head: DeviceMask = Mask::causal().lengths(b.numbers(7, [2, 4, 1, 1]));
    refused(config(), new(b.forward().mask(by_head)), &["may differ by head"]);
    let sinks: DeviceMask = Mask::causal().sink_logits(b.view(7, [1, 4, 1, 1]));
    let with_sinks = new(b.forward().mask(sinks));
    refused(config(), with_sinks.d_sinks(b.view(5, [1, 4, 1, 1])), &["`d_sinks`", "`indices`"]);

    let latent = config().latent(true);
    refused(latent, good, &["latent values apart from the keys"]);
    let same = Forward::new(q, k, k.slice(3, 0, 6), out).lse(b.view(4, LSE));
    refused(latent, new(same).d_v(b.view(10, V)), &["`d_v` of latent values", "omit `d_v`"]);
    let size = made(latent).backward_scratch_size(&SelectedBackward::new(new(same), b.indices()));
    size.expect("a latent call");

    let cache =
        Cache::with_pipelines(full().gpu.pipelines(), CacheConfig::new(2, 8, 16).value_dim(6).batch(2));
    let cache = cache.expect("a cache");
    let cached = Forward::with_cache(q, &cache, out).at_end().lse(b.view(4, LSE));
    refused(config(), new(cached), &["cache", "no gradient"]);

    let operator = made(config());
    let of = |indices| operator.backward_scratch_size(&SelectedBackward::new(good, indices));
    says(&of(b.view(5, INDICES)).expect_err("an error"), &["`indices`", "U32"]);
    says(&of(b.numbers(5, [2, 3, 5, 3])).expect_err("an error"), &["list heads is 3"]);
    let call = SelectedBackward::new(good, b.indices());
    assert!(operator.backward_scratch_size(&call).is_ok());
    let mut encoder = full().gpu.device().create_command_encoder(&Default::default());
    says(&operator.backward(&mut encoder, &call, &mut no_scratch()).expect_err("an error"), &["scratch"]);
}

#[test]
fn too_many_tensors_are_errors() {
    let b = Bench::new();
    let operator = SelectedAttention::with_pipelines(defaults().gpu.pipelines(), config());
    let operator = operator.expect("an operator");
    let numbers = |n| b.numbers(n, [2, 1, 1, 1]);
    let bools = |n, shape| b.typed(n, DType::Bool, shape);
    let five = Mask::causal().lengths(numbers(7)).prefix(numbers(8)).query_offsets(numbers(9));
    let five = five.attn_mask(bools(10, [2, 1, 5, 9])).key_padding_mask(bools(11, [2, 1, 1, 9]));
    operator.scratch_size(&b.masked(five)).expect("eight buffers");
    let error = operator.scratch_size(&b.masked(five.globals(bools(12, [2, 1, 1, 9]))));
    says(&error.expect_err("nine buffers"), &["storage buffers", "needs 9", "8"]);
}
