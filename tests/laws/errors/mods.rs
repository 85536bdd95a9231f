//! Errors of custom functions and their captures.

use wgpu_attention::Backward;
use wgpu_attention::mask::{BoundScoreMod, Captured, MaskMod, ScoreMod};

use super::*;

pub(super) fn mods() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let held = gpu.upload(&[0f32; 64]).expect("memory");
    let of = |dtype| TensorView::new(&held, dtype, [1, 4, 1, 9]);
    let captured = [Captured::float("table"), Captured::number("ids")];
    let text = "struct Uniforms { a: f32, b: vec2<u32> }
        fn score_mod(score: f32, at: At) -> f32 {
            return score + table_at(0u, 0u, 0u, ids_at(0u, 0u, 0u, at.key)) * uniforms().a;
        }";
    let own = ScoreMod::capturing(text, &captured).expect("a mod");
    assert_eq!(own, ScoreMod::capturing(text, &captured).expect("the same"));
    let right = [of(DType::F32), of(DType::U32)];
    let beyond = TensorView::new(&held, DType::U32, [1, 4, 1, 99]);
    let none = TensorView::new(&held, DType::U32, [1, 4, 0, 1]);
    let numbers = "`score_mod`: `Uniforms` has 16 bytes, ";
    let cases: [(&str, BoundScoreMod); 9] = [
        ("`score_mod`: the function captures table, ids, but 0 tensors were passed", own.into()),
        ("`score_mod`: the function captures table, ids, but 1 tensors were passed", own.with(&right[..1])),
        (numbers, own.with(&right)),
        (numbers, own.with(&right).uniforms(&[0; 20])),
        ("`table`: dtype must be", own.with(&[of(DType::U32), of(DType::U32)]).uniforms(&[0; 16])),
        ("`ids`: dtype must be U32", own.with(&[of(DType::F32), of(DType::F32)]).uniforms(&[0; 16])),
        ("`ids`: the view ends at byte", own.with(&[of(DType::F32), beyond]).uniforms(&[0; 16])),
        ("`ids`: an axis is 0", own.with(&[of(DType::F32), none]).uniforms(&[0; 16])),
        ("`score_mod`: the function captures table, ids, but 3 tensors", own.with(&[right[0]; 3])),
    ];
    let (attention, buffers) = (bench.attention.clone(), bench.buffers());
    let size = attention.scratch_size(&parts(buffers.each_ref()).forward()).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    for (words, bound) in cases {
        let call = parts(buffers.each_ref()).mask(Mask::none().score_mod(bound)).forward();
        bench.refuses_with(words, &[words], |encoder| attention.forward(encoder, &call, &mut scratch));
    }

    // Gradients of captured tensors.
    let shape = [1, 4, 1, 9];
    let [lse, d_out, d_table] = [0; 3].map(|_| gpu.buffer(1 << 12).expect("a buffer"));
    let [lse, d_out] =
        [(&lse, SHAPE.lse()), (&d_out, SHAPE.out())].map(|(t, s)| TensorView::new(t, DType::F32, s));
    let d_table = Some(TensorView::new(&d_table, DType::F32, shape));
    let Parts { q, k, v, out, .. } = parts(buffers.each_ref());
    let bound = own.with(&right).uniforms(&[0; 16]);
    let bits = "fn score_mod(score: f32, at: At) -> f32 {
            return score + bitcast<f32>(bitcast<u32>(table_at(0u, 0u, 0u, 0u)));
        }";
    let bits = ScoreMod::capturing(bits, &captured[..1]).expect("a mod");
    let cases: [(&str, BoundScoreMod, &[_]); 3] = [
        (
            "`score_mod`: the function captures 2 tensors, but 3 gradients are requested",
            bound,
            &[d_table, None, None],
        ),
        ("`score_mod`: `ids` does not hold floats, so it has no gradient", bound, &[None, d_table]),
        ("`score_mod`: `bitcast` is not differentiable here\n", bits.with(&right[..1]), &[d_table]),
    ];
    for (words, bound, gradients) in cases {
        let mask = Mask::none().score_mod(bound);
        let forward = Forward::new(q, k, v, out).lse(lse).mask(mask);
        let call = Backward::new(forward, d_out).d_captured(gradients);
        bench.refuses_with(words, &[words], |encoder| attention.backward(encoder, &call, &mut scratch));
    }

    let plain = "fn score_mod(score: f32, at: At) -> f32 { return score; }";
    let many: Vec<_> = (0..5).map(|n| Captured::float(format!("t{n}"))).collect();
    let refused = ScoreMod::capturing(plain, &many).expect_err("too many");
    bench.seen.insert(read("many", &refused, &["`score_mod`: 5 tensors are captured, but at most 4"]));
    for names in
        [vec!["a", "a"], vec!["1a"], vec![""], vec!["a b"], vec!["a_at() -> f32 { } fn x"], vec!["\u{e4}"]]
    {
        let captured: Vec<_> = names.iter().map(|name| Captured::float(*name)).collect();
        assert!(ScoreMod::capturing(plain, &captured).is_err(), "{names:?}");
    }
    let refused = MaskMod::new(plain).expect_err("no mask");
    bench.seen.insert(read(
        "no mask",
        &refused,
        &["`mask_mod`: the function is missing; declare `fn mask_mod(at: At) -> bool`"],
    ));
    bench.seen
}
