//! Errors of gradients of a mask's tensors.

use wgpu_attention::Backward;
use wgpu_attention::mask::{Captured, ScoreMod};

use super::*;

/// A mask with the tensor, and a call that requests its gradient.
struct Gradient {
    name: &'static str,
    missing: &'static str,
    shape: [usize; 4],
    axes: [&'static str; 4],
    mask: for<'a> fn(TensorView<'a>) -> DeviceMask<'a>,
    ask: for<'a> fn(Backward<'a>, TensorView<'a>) -> Backward<'a>,
}

fn all() -> [Gradient; 5] {
    let [b, h, i, j] = SHAPE.weights();
    let per_head = ["batch", "heads", "length", "dim"];
    [
        Gradient {
            name: "d_bias",
            missing: "the mask has no bias",
            shape: [b, 1, i, j],
            axes: per_head,
            mask: |t| Mask::none().bias(t),
            ask: |call, t| call.d_bias(t),
        },
        Gradient {
            name: "d_slopes",
            missing: "the mask has no ALiBi slopes",
            shape: [1, h, 1, 1],
            axes: per_head,
            mask: |t| Mask::none().alibi_symmetric(t),
            ask: |call, t| call.d_slopes(t),
        },
        Gradient {
            name: "d_relative",
            missing: "the mask has no table",
            shape: [1, h, 1, 5],
            axes: ["batch", "heads", "length", "distances"],
            mask: |t| Mask::none().relative(t),
            ask: |call, t| call.d_relative(t),
        },
        Gradient {
            name: "d_sinks",
            missing: "the mask has no sink logits",
            shape: [b, h, 1, 1],
            axes: per_head,
            mask: |t| Mask::none().sink_logits(t),
            ask: |call, t| call.d_sinks(t),
        },
        Gradient {
            name: "d_captured",
            missing: "the mask has no `score_mod`",
            shape: [b, h, 3, 2],
            axes: per_head,
            mask: |t| {
                let text = "fn score_mod(score: f32, at: At) -> f32 { return score * captured_at(0u, 0u, 0u, at.key); }";
                let own = ScoreMod::capturing(text, &[Captured::float("captured")]).expect("a mod");
                Mask::none().score_mod(own.with(&[t]))
            },
            ask: |call, t| call.d_captured(&[Some(t)]),
        },
    ]
}

pub(super) fn gradients_of_masks() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let [lse, d_out, d_q, own, gradient] = [0; 5].map(|_| gpu.buffer(1 << 12).expect("a buffer"));
    let [lse, d_out] =
        [(&lse, SHAPE.lse()), (&d_out, SHAPE.out())].map(|(t, s)| TensorView::new(t, DType::F32, s));
    let d_q = TensorView::new(&d_q, DType::F32, SHAPE.q());
    let buffers = bench.buffers();
    let Parts { q, k, v, out, .. } = parts(buffers.each_ref());
    let attention = bench.attention.clone();
    let forward = Forward::new(q, k, v, out).lse(lse);
    let (plain, masked) = (Backward::new(forward, d_out), |mask| Backward::new(forward.mask(mask), d_out));
    let size = attention.backward_scratch_size(&plain.d_q(d_q)).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut refuses = |words: &[&str], call: Backward| {
        bench.refuses_with(words[0], words, |e| attention.backward(e, &call, &mut scratch));
    };
    refuses(&["the backward pass", "no gradient is requested"], plain);
    for Gradient { name, missing, shape, axes, mask, ask } in all() {
        let quoted = format!("`{name}`");
        let of = |dtype, shape| TensorView::new(&gradient, dtype, shape);
        let call = masked(mask(TensorView::new(&own, DType::F32, shape)));
        attention.backward_scratch_size(&ask(call, of(DType::F32, shape))).expect("a correct call");
        refuses(&[name, missing], ask(plain, of(DType::F32, shape)));
        // The same error occurs together with another gradient.
        refuses(&[name, missing], ask(plain, of(DType::F32, shape)).d_q(d_q));
        for (axis, axis_name) in axes.into_iter().enumerate() {
            // One more on the axis, and another broadcast than the mask's tensor.
            for other in [shape[axis] + 1, if shape[axis] == 1 { 2 } else { 1 }] {
                let mut wrong = shape;
                wrong[axis] = other;
                let words =
                    [format!("{quoted}: {axis_name} must be {}", shape[axis]), format!("got {other}")];
                refuses(&words.each_ref().map(String::as_str), ask(call, of(DType::F32, wrong)));
            }
        }
        for wrong in [DType::F16, DType::BF16, DType::U32, DType::Bool] {
            let words = [&quoted, "dtype must be F32", &format!("{wrong:?}")];
            refuses(&words, ask(call, of(wrong, shape)));
        }
        for (other, buffer) in [("q", q.buffer()), ("d_out", d_out.buffer()), ("lse", lse.buffer())] {
            let words = [&quoted, "shares its buffer", &format!("`{other}`")];
            refuses(&words, ask(call, TensorView::new(buffer, DType::F32, shape)));
        }
        refuses(&[&quoted, "shares its buffer"], ask(call, TensorView::new(&own, DType::F32, shape)));
        refuses(
            &["`d_q`", &quoted, "overlap"],
            ask(call.d_q(d_q), TensorView::new(d_q.buffer(), DType::F32, shape)),
        );
        let end = of(DType::F32, shape).with_offset(1 << 10);
        refuses(&[&quoted, "ends at byte"], ask(call, end));
        // The dtype of the mask's tensor is allowed.
        let halves = masked(mask(TensorView::new(&own, DType::BF16, shape)));
        attention.backward_scratch_size(&ask(halves, of(DType::BF16, shape))).expect("a correct call");
        refuses(&[&quoted, "dtype must be BF16", "U32"], ask(halves, of(DType::U32, shape)));
    }
    bench.seen
}
