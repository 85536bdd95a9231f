//! Errors of `Attention::backward`.

use wgpu_attention::Backward;

use super::*;

/// The tensors of a backward call, to be spoiled one by one.
#[derive(Clone, Copy)]
struct Call<'a> {
    /// The tensors q, k, v, out, lse, d_out.
    inputs: [TensorView<'a>; 6],
    d_lse: TensorView<'a>,
    gradients: [Option<TensorView<'a>>; 3],
    mask: DeviceMask<'a>,
    dropout: Option<Dropout<TensorView<'a>>>,
}

impl<'a> Call<'a> {
    fn backward(&self) -> Backward<'a> {
        let [q, k, v, out, lse, d_out] = self.inputs;
        let [d_q, d_k, d_v] = self.gradients;
        let forward = Forward::new(q, k, v, out).lse(lse).mask(self.mask).dropout(self.dropout);
        Backward::new(forward, d_out).d_lse(self.d_lse).d_q(d_q).d_k(d_k).d_v(d_v)
    }
}

const INPUTS: [&str; 6] = ["q", "k", "v", "out", "lse", "d_out"];
const GRADIENTS: [&str; 3] = ["d_q", "d_k", "d_v"];

pub(super) fn gradients() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let buffers: Vec<_> = (0..10).map(|_| gpu.buffer(1 << 13).expect("a buffer")).collect();
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let shapes = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out(), SHAPE.lse(), SHAPE.out()];
    let good = Call {
        inputs: [0, 1, 2, 3, 4, 5].map(|n| view(n, shapes[n])),
        d_lse: view(6, SHAPE.lse()),
        gradients: [0, 1, 2].map(|n| Some(view(7 + n, shapes[n]))),
        mask: DeviceMask::none(),
        dropout: None,
    };
    let attention = bench.attention.clone();
    let size = attention.backward_scratch_size(&good.backward()).expect("a size");
    assert_eq!(size.total(), 16 * count(SHAPE.lse()) as u64);
    let mut refused = |context: &str, words: &[&str], call: Call| {
        let call = call.backward();
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(context, words, |e| attention.backward(e, &call, &mut scratch));
    };
    let longer = |t: TensorView<'_>, axis: usize| {
        let mut shape = t.shape();
        shape[axis] += 1;
        shape
    };

    for (n, name) in INPUTS.into_iter().enumerate() {
        let with = |t| {
            let mut call = good;
            call.inputs[n] = t;
            call
        };
        let t = good.inputs[n];
        let words = |what: &str| [format!("`{name}`"), what.to_string()];
        let refused_with = |refused: &mut dyn FnMut(&str, &[&str], Call), what: &str, t| {
            refused(name, &words(what).each_ref().map(String::as_str), with(t));
        };
        let half = TensorView::new(t.buffer(), DType::U32, t.shape());
        refused_with(&mut refused, "U32", half);
        let mut empty = t.shape();
        empty[0] = 0;
        refused_with(&mut refused, "batch is 0", reshaped(&t, empty));
        refused_with(&mut refused, "byte", t.with_offset(1 << 20));
        // An output in an input's buffer.
        let own = TensorView::new(&buffers[8], DType::F32, t.shape());
        refused_with(&mut refused, "`d_k`", own);
    }
    for (n, name) in [(4, "lse"), (5, "d_out")] {
        for axis in 0..4 {
            let mut call = good;
            call.inputs[n] = reshaped(&good.inputs[n], longer(good.inputs[n], axis));
            refused(name, &[&format!("`{name}`"), "must be"], call);
        }
    }
    for axis in 0..4 {
        let d_lse = reshaped(&good.d_lse, longer(good.d_lse, axis));
        refused("d_lse", &["`d_lse`", "must be"], Call { d_lse, ..good });
    }
    refused(
        "d_lse",
        &["`d_lse`", "F32"],
        Call { d_lse: TensorView::new(&buffers[6], DType::F16, SHAPE.lse()), ..good },
    );
    for (n, name) in GRADIENTS.into_iter().enumerate() {
        let with = |t| {
            let mut call = good;
            call.gradients[n] = Some(t);
            call
        };
        let t = good.gradients[n].expect("a view");
        for axis in 0..4 {
            refused(name, &[&format!("`{name}`"), "must be"], with(reshaped(&t, longer(t, axis))));
        }
        let bf16 = TensorView::new(t.buffer(), DType::BF16, t.shape());
        refused(name, &[&format!("`{name}`"), "F32", "BF16"], with(bf16));
        refused(name, &[&format!("`{name}`"), "share memory"], with(t.with_strides([0, 8, 8, 1])));
        // Two outputs in one place.
        let other = good.gradients[(n + 1) % 3].expect("a view");
        let same = TensorView::new(other.buffer(), DType::F32, t.shape());
        refused(name, &[&format!("`{name}`"), GRADIENTS[(n + 1) % 3]], with(same));
    }
    let none = Call { gradients: [None; 3], ..good };
    refused("no gradient", &["`d_q`", "`d_k`", "`d_v`"], none);
    let bias = |shape| Mask::none().bias(TensorView::new(&buffers[8], DType::F32, shape));
    refused("a gradient in the bias", &["`d_k`", "`bias`"], Call { mask: bias([1, 1, 3, 5]), ..good });
    refused("a bias", &["`bias`"], Call { mask: bias([1, 1, 4, 5]), ..good });
    let certain = Some(Dropout::Seeded { p: 1.0, seed: 0 });
    refused("dropout", &["1"], Call { dropout: certain, ..good });
    let keep =
        Some(Dropout::Given { p: 0.5, keep: TensorView::new(&buffers[9], DType::Bool, SHAPE.weights()) });
    refused("what is kept in d_v", &["`d_v`", "`dropout`"], Call { dropout: keep, ..good });

    // A forward call without lse, or to a cache.
    let [q, k, v, out, lse, d_out] = good.inputs;
    let config = CacheConfig::new(SHAPE.kv_heads, SHAPE.head_dim, 16).batch(SHAPE.batch);
    let cache = Cache::with_pipelines(gpu.pipelines(), config.value_dim(SHAPE.value_dim)).expect("a cache");
    for (forward, words) in [
        (Forward::new(q, k, v, out), ["a call without `lse`", "call `.lse("]),
        (Forward::with_cache(q, &cache, out).lse(lse), ["attention to a cache", "as tensors"]),
    ] {
        let call = Backward::new(forward, d_out).d_q(good.gradients[0]);
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(words[0], &words, |e| attention.backward(e, &call, &mut scratch));
    }

    // A scratch without room.
    let small = ScratchSize::default();
    let mut scratch = Scratch::new(gpu.device(), small).expect("scratch");
    let call = good.backward();
    bench.refuses_with("scratch", &["row_stats"], |e| attention.backward(e, &call, &mut scratch));

    // A mask with more tensors than the remaining bindings.
    let gpu = &defaults().gpu;
    let on = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let mask = Mask::none()
        .bias(on(0, DType::F32, [1, 1, 3, 5]))
        .attn_mask(on(1, DType::Bool, [1, 1, 3, 5]))
        .key_padding_mask(on(2, DType::Bool, [1, 1, 1, 5]));
    let config = Config::of(&SHAPE);
    let few = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let error = few.backward_scratch_size(&Call { mask, ..good }.backward()).expect_err("too many");
    let mut seen = bench.seen;
    seen.insert(read("many tensors", &error, &["9", "8", "max_storage_buffers_per_shader_stage"]));
    seen
}
