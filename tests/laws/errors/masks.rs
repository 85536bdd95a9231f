//! Errors of the parts of a mask.

use wgpu_attention::Alignment;
use wgpu_attention::mask::{Blocks, DeviceMask, Pattern, PatternPart};

use super::*;

const SIZE: [usize; 2] = [2, 2];
const FLOAT: &str = "F32, F16 or BF16";

/// A tensor of a mask: name, dtype, right shape, axis names, and a mask with it. A partner tensor,
/// if needed, has the last shape.
struct Tensor {
    name: &'static str,
    dtype: &'static str,
    shape: [usize; 4],
    axes: [&'static str; 4],
    mask: for<'a> fn(TensorView<'a>, TensorView<'a>) -> DeviceMask<'a>,
    partner: [usize; 4],
}

fn tensors() -> Vec<Tensor> {
    let [b, h, i, j] = SHAPE.weights();
    let of = |name, dtype, shape, axes: [&'static str; 2], mask| {
        let axes = ["batch", "heads", axes[0], axes[1]];
        Tensor { name, dtype, shape, axes, mask, partner: [1; 4] }
    };
    let (rows, cols, head) = ([b, h, i, 1], [b, h, 1, j], [b, h, 1, 1]);
    let starts = [b, 1, 1, 3];
    let (per_query, per_key) = (["q_len", "dim"], ["length", "kv_len"]);
    let packed = ["length", "sequences + 1"];
    let blocks = ["q_len / size[0]", "kv_len / size[1]"];
    vec![
        of("lengths", "U32", rows, per_query, |t, _| Mask::none().lengths(t)),
        of("query_offsets", "U32", [b, 1, 1, 1], ["length", "dim"], |t, _| Mask::causal().query_offsets(t)),
        of("prefix", "U32", rows, per_query, |t, _| Mask::none().prefix(t)),
        Tensor {
            partner: starts,
            ..of("query_starts", "U32", starts, packed, |t, p| Mask::none().packed(t, p))
        },
        Tensor {
            partner: starts,
            ..of("key_starts", "U32", starts, packed, |t, p| Mask::none().packed(p, t))
        },
        of("query_documents", "U32", rows, per_query, |t, p| Mask::none().documents(t, p)),
        of("key_documents", "U32", cols, per_key, |t, p| Mask::none().documents(p, t)),
        of("blocks", "U32", [b, h, 2, 3], blocks, |t, _| Mask::none().blocks(Blocks::new(t, SIZE))),
        of("globals", "Bool", cols, per_key, |t, _| Mask::none().globals(t)),
        of("slopes", FLOAT, head, ["length", "dim"], |t, _| Mask::none().alibi(t)),
        of("slopes", FLOAT, head, ["length", "dim"], |t, _| Mask::none().alibi_symmetric(t)),
        of("relative", FLOAT, [b, h, 1, 5], ["length", "distances"], |t, _| Mask::none().relative(t)),
        of("sink_logits", FLOAT, head, ["length", "dim"], |t, _| Mask::none().sink_logits(t)),
    ]
}

pub(super) fn tensors_of_masks() -> Seen {
    let mut bench = Bench::new();
    let other = bench.gpu.buffer(1 << 12).expect("a buffer");
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = parts(buffers.each_ref()).forward();
    let mut refuses = |words: &[&str], mask: DeviceMask| {
        let call = good.mask(mask);
        let size = attention.scratch_size(&good).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(words[0], words, |e| attention.forward(e, &call, &mut scratch));
    };
    for Tensor { name, dtype, shape, axes, mask, partner } in tensors() {
        let right = match dtype {
            "U32" => DType::U32,
            "Bool" => DType::Bool,
            _ => DType::F32,
        };
        let quoted = format!("`{name}`");
        let partner = TensorView::new(&other, DType::U32, partner);
        let floats = [DType::F32, DType::F16, DType::BF16];
        for wrong in floats.into_iter().chain([DType::U32, DType::Bool]) {
            if wrong != right && !(dtype == FLOAT && floats.contains(&wrong)) {
                let words = [&quoted, &format!("must be {dtype}")[..], &format!("{wrong:?}")];
                refuses(&words, mask(TensorView::new(&other, wrong, shape), partner));
            }
        }
        for (axis, axis_name) in axes.into_iter().enumerate() {
            let mut more = shape;
            more[axis] += 1;
            let got = format!("got {}", more[axis]);
            let expected = match (name, axis) {
                // The number of key starts must match the number of query starts.
                ("query_starts", 3) => ["`key_starts`: sequences + 1 must be 4", "got 3"].map(String::from),
                ("key_starts", 3) => ["`key_starts`: sequences + 1 must be 3".into(), got],
                ("relative", 3) => ["`relative`: distances must be 2·r + 1, odd".into(), got],
                _ if shape[axis] == 1 => [format!("{quoted}: {axis_name} must be 1,"), got],
                _ => [format!("{quoted}: {axis_name} must be {} or 1", shape[axis]), got],
            };
            refuses(
                &expected.each_ref().map(String::as_str),
                mask(TensorView::new(&other, right, more), partner),
            );
        }
        // The same memory rules as for every input.
        let out = TensorView::new(&buffers[3], right, shape);
        refuses(&["`out`", &quoted, "a separate buffer"], mask(out, partner));
        let past = TensorView::new(&other, right, shape).with_offset(1 << 12);
        refuses(&[&quoted, "ends at byte", "4096"], mask(past, partner));
    }
    let view = |shape| TensorView::new(&other, DType::U32, shape);
    let one = "`query_starts`: sequences + 1 must be at least 2";
    refuses(&[one, "got 1"], Mask::none().packed(view([2, 1, 1, 1]), view([2, 1, 1, 1])));
    let tree = TensorView::new(&other, DType::Bool, [1; 4]);
    let starts = view([1, 1, 1, 2]);
    refuses(&["a tree in packed sequences"], Mask::none().packed(starts, starts).tree(tree));
    let offsets = Mask::causal().packed(starts, starts);
    refuses(&["query offsets in packed sequences"], offsets.query_offsets(view([1; 4])));
    refuses(&["query offsets in packed sequences"], offsets.aligned(Alignment::Offset(3)));
    for n in [1 << 29, -(1 << 29), i64::MAX, i64::MIN] {
        refuses(&["alignment offset", "below 2^29"], Mask::causal().aligned(Alignment::Offset(n)));
    }
    let floats = |shape| TensorView::new(&other, DType::F32, shape);
    refuses(&["`relative`: distances", "odd", "got 2"], Mask::none().relative(floats([1, 1, 1, 2])));
    for size in [[0, 2], [2, 0], [0, 0]] {
        refuses(&["`blocks`: size is 0"], Mask::none().blocks(Blocks::new(view([1; 4]), size)));
    }
    for (words, pattern) in patterns() {
        refuses(&words, Mask::causal().pattern(pattern));
    }
    bench.seen.into_iter().collect()
}

fn patterns() -> Vec<([&'static str; 3], Pattern)> {
    let part = PatternPart::Both;
    let size = |option, n| [option, n, "at least 1 and below 2^29"];
    let stride = |n| size("pattern stride", n);
    let summary = |n| ["pattern summary", n, "at least 1 and at most the stride"];
    vec![
        (size("pattern dilation", "is 0"), Pattern::Dilated { dilation: 0 }),
        (stride("is 0"), Pattern::Strided { stride: 0, part }),
        (stride("is 0"), Pattern::Fixed { stride: 0, summary: 0, part }),
        (size("pattern block", "is 0"), Pattern::Local { block: 0 }),
        (size("pattern block", "is 536870912"), Pattern::Local { block: 1 << 29 }),
        (size("pattern dilation", "is "), Pattern::Dilated { dilation: usize::MAX }),
        (summary("is 0"), Pattern::Fixed { stride: 4, summary: 0, part }),
        (summary("is 5"), Pattern::Fixed { stride: 4, summary: 5, part }),
    ]
}

/// Errors of a block map that shall be written.
pub(super) fn block_maps() -> Seen {
    let mut bench = Bench::new();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let buffers = [0, 1].map(|_| gpu.buffer(1 << 12).expect("a buffer"));
    let [own, of_mask] = &buffers;
    let (b, i, j) = (SHAPE.batch, SHAPE.q_len, SHAPE.kv_len);
    let good = TensorView::new(own, DType::U32, [2, 4, 2, 3]);
    let keep = TensorView::new(of_mask, DType::Bool, SHAPE.weights());
    let map = |shape| TensorView::new(own, DType::U32, shape);
    let lengths = [b, i, j];
    let rows = ["`blocks`", "q_len / size[0] must be 2", "got 1"];
    let cols = ["`blocks`", "kv_len / size[1] must be 3", "got 1"];
    let heads = ["`blocks`", "heads must be 4 or 1", "got 3"];
    let far = "below 2^29";
    type Refused<'a> = ([&'a str; 3], [usize; 3], TensorView<'a>, [usize; 2]);
    let cases: Vec<Refused> = vec![
        (rows, lengths, map([2, 4, 1, 3]), SIZE),
        (cols, lengths, map([2, 4, 2, 1]), SIZE),
        (rows, lengths, map([1, 1, 1, 1]), SIZE),
        (["`blocks`", "must be 3", "got 4"], lengths, map([2, 4, 2, 4]), SIZE),
        (heads, lengths, map([2, 3, 2, 3]), SIZE),
        (["`blocks`", "batch must be 2 or 1", "got 3"], lengths, map([3, 4, 2, 3]), SIZE),
        (["q_len", "18446744073709552000", far], [b, usize::MAX, j], good, SIZE),
        (["kv_len", "18446744073709552000", far], [b, i, usize::MAX], good, SIZE),
        (["batch", "4294967296", far], [1 << 32, i, j], good, SIZE),
        (["batch", "is 0", "at least 1"], [0, i, j], good, SIZE),
        (["`blocks`", "size is 0", "at least 1"], lengths, good, [0, 2]),
        (["`blocks`", "must be U32", "F32"], lengths, TensorView::new(own, DType::F32, [2, 4, 2, 3]), SIZE),
        (
            ["`blocks`", "`attn_mask`", "a separate buffer"],
            lengths,
            TensorView::new(of_mask, DType::U32, [2, 4, 2, 3]),
            SIZE,
        ),
        (["`blocks`", "ends at byte", "4096"], lengths, good.with_offset(1 << 10), SIZE),
        (["`blocks`", "share memory", "[2, 4, 2, 3]"], lengths, good.with_strides([0, 6, 3, 1]), SIZE),
    ];
    for (words, lengths, map, size) in cases {
        let mask = Mask::none().attn_mask(keep);
        bench.refuses_with(words[1], &words, |e| {
            attention.classify(e, &mask, lengths, &Blocks::new(map, size))
        });
    }
    bench.seen.into_iter().collect()
}

/// Errors of slices, from `Gpu` and from the reference.
pub(super) fn slices_of_masks() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let [q, k, v] = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
    let [wq, wk, wv] = [&q, &k, &v].map(|x| widen::<f64>(x));
    let mut refused = |words: &[&str], mask: HostMask| {
        let options = Options::new().mask(mask);
        let error = gpu.attention(&q, &k, &v, SHAPE, &options).expect_err("refused by Gpu");
        seen.insert(read("Gpu", &error, words));
        let error = reference::attention::<f64>(&wq, &wk, &wv, SHAPE, &options).expect_err("refused");
        seen.insert(read("reference", &error, words));
    };
    let (numbers, bools, floats) = ([0u32; 30], [true; 30], [0.5f32; 30]);
    let n = |len: usize, shape| HostTensor::new(&numbers[..len], shape);
    let f = |len: usize, shape| HostTensor::new(&floats[..len], shape);
    let g = |len: usize, shape| HostTensor::new(&bools[..len], shape);
    refused(&["`prefix`", "24 elements expected, got 23"], Mask::none().prefix(n(23, [2, 4, 3, 1])));
    let shape = [
        "`lengths`: q_len must be 3 or 1, got 2 (shape [2, 4, 2, 1]; expected",
        "[batch or 1, heads or 1, q_len or 1, 1])",
    ];
    refused(&shape, Mask::none().lengths(n(16, [2, 4, 2, 1])));
    let shape = ["`slopes`: heads must be 4 or 1, got 2", "expected [batch or 1, heads or 1, 1, 1])"];
    refused(&shape, Mask::none().alibi(f(2, [1, 2, 1, 1])));
    let shape = ["`query_offsets`: heads must be 1, got 4", "expected [batch or 1, 1, 1, 1])"];
    refused(&shape, Mask::none().query_offsets(n(4, [1, 4, 1, 1])));
    let shape =
        ["`relative`: heads must be 4 or 1, got 3", "expected [batch or 1, heads or 1, 1, distances])"];
    refused(&shape, Mask::none().relative(f(15, [1, 3, 1, 5])));
    refused(&["`prefix`: dim must be 1", "got 5"], Mask::none().prefix(n(5, [1, 1, 1, 5])));
    let starts = [2, 1, 1, 3];
    refused(
        &["`query_starts`", "6 elements expected, got 3"],
        Mask::none().packed(n(3, starts), n(6, starts)),
    );
    refused(&["`key_starts`", "6 elements expected, got 5"], Mask::none().packed(n(6, starts), n(5, starts)));
    let longer = Mask::none().packed(n(3, [1, 1, 1, 3]), n(4, [1, 1, 1, 4]));
    refused(&["`key_starts`: sequences + 1 must be 3", "got 4"], longer);
    let one = Mask::none().packed(n(1, [1; 4]), n(1, [1; 4]));
    refused(&["`query_starts`: sequences + 1 must be at least 2", "got 1"], one);
    let heads = Mask::none().packed(n(12, [1, 4, 1, 3]), n(3, [1, 1, 1, 3]));
    refused(&["`query_starts`: heads must be 1", "got 4"], heads);
    let queries = Mask::none().documents(n(2, [1, 1, 2, 1]), n(5, [1, 1, 1, 5]));
    refused(&["`query_documents`: q_len must be 3 or 1", "got 2"], queries);
    let keys = Mask::none().documents(n(3, [1, 1, 3, 1]), n(4, [1, 1, 1, 4]));
    refused(&["`key_documents`: kv_len must be 5 or 1", "got 4"], keys);
    let blocks = |len, shape, size| Mask::none().blocks(Blocks::new(n(len, shape), size));
    refused(&["`blocks`: q_len / size[0] must be 2 or 1", "got 3"], blocks(9, [1, 1, 3, 3], SIZE));
    refused(&["`blocks`", "6 elements expected, got 5"], blocks(5, [1, 1, 2, 3], SIZE));
    refused(&["`blocks`: size is 0"], blocks(1, [1; 4], [1, 0]));
    refused(&["`globals`: kv_len must be 5 or 1", "got 3"], Mask::none().globals(g(3, [1, 1, 1, 3])));
    refused(&["`globals`: length must be 1", "got 3"], Mask::none().globals(g(15, [1, 1, 3, 5])));
    refused(&["`slopes`: heads must be 4 or 1", "got 2"], Mask::none().alibi(f(2, [1, 2, 1, 1])));
    refused(&["`slopes`", "4 elements expected, got 3"], Mask::none().alibi_symmetric(f(3, [1, 4, 1, 1])));
    refused(
        &["`relative`: distances must be 2·r + 1, odd", "got 4"],
        Mask::none().relative(f(4, [1, 1, 1, 4])),
    );
    refused(&["`relative`", "20 elements expected, got 5"], Mask::none().relative(f(5, [1, 4, 1, 5])));
    refused(&["`sink_logits`: dim must be 1", "got 5"], Mask::none().sink_logits(f(5, [1, 1, 1, 5])));
    for (words, pattern) in patterns() {
        refused(&words, Mask::causal().pattern(pattern));
    }
    seen
}

/// Errors of scores as an output, which only the staged path has in memory.
pub(super) fn scores_as_an_output() -> Seen {
    let gpu = &full().gpu;
    let scores = gpu.buffer(8192).expect("a buffer");
    let good = TensorView::new(&scores, DType::F32, SHAPE.weights());
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let mut bench = Bench::on(
        gpu,
        Config::new(SHAPE.heads, SHAPE.head_dim)
            .kernel_options(KernelOptions::new().algorithm(Algorithm::Fused)),
    );
    let (buffers, attention) = (bench.buffers(), bench.attention.clone());
    let call = parts(buffers.each_ref()).forward().scores(good, ScoreStage::Scaled);
    let words = ["scores", "fused path", "Auto"];
    bench.refuses_with("scores", &words, |e| attention.forward(e, &call, &mut scratch));
    bench.refuses_with("prepare", &words, |_| attention.prepare(&call, &mut scratch).map(drop));
    let error = attention.scratch_size(&call).expect_err("refused");
    bench.seen.insert(read("scratch_size", &error, &words));
    let fused = bench.seen;

    let mut bench = Bench::on(gpu, Config::new(SHAPE.heads, SHAPE.head_dim));
    bench.seen.extend(fused);
    let (buffers, attention) = (bench.buffers(), bench.attention.clone());
    let mut refuses = |words: &[&str], call: &Forward| {
        bench.refuses_with(words[0], words, |e| attention.forward(e, call, &mut scratch));
    };
    let with = |view, stage| parts(buffers.each_ref()).forward().scores(view, stage);
    for stage in [ScoreStage::Scaled, ScoreStage::Softcapped, ScoreStage::Biased] {
        for (axis, name) in ["batch", "heads", "q_len", "kv_len"].into_iter().enumerate() {
            for more in [1isize, -1] {
                let mut shape = SHAPE.weights();
                let wanted = format!("`scores`: {name} must be {}", shape[axis]);
                shape[axis] = shape[axis].strict_add_signed(more);
                let got = format!("got {}", shape[axis]);
                refuses(&[&wanted, &got], &with(TensorView::new(&scores, DType::F32, shape), stage));
            }
        }
        let numbers = TensorView::new(&scores, DType::U32, SHAPE.weights());
        refuses(&["`scores`", "F32, F16 or BF16", "U32"], &with(numbers, stage));
        refuses(&["`scores`", "ends at byte", "8192"], &with(good.with_offset(2000), stage));
        refuses(&["`scores`", "share memory"], &with(good.with_strides([0, 0, 0, 1]), stage));
    }
    let of_q = TensorView::new(&buffers[0], DType::F32, SHAPE.weights());
    refuses(&["`scores`", "shares its buffer with `q`"], &with(of_q, ScoreStage::Scaled));
    let both = with(good, ScoreStage::Biased).weights(good);
    refuses(&["`scores`", "shares its buffer with `weights`"], &both);
    bench.seen
}

/// Errors of weights on the fused path. Only the staged path has weights in memory.
pub(super) fn weights_on_the_fused_path() -> Seen {
    let gpu = &full().gpu;
    let mut bench = Bench::on(
        gpu,
        Config::new(SHAPE.heads, SHAPE.head_dim)
            .kernel_options(KernelOptions::new().algorithm(Algorithm::Fused)),
    );
    let buffers = bench.buffers();
    let attention = bench.attention.clone();
    let weights = gpu.buffer(count(SHAPE.weights()) * 4).expect("a buffer");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    for heads in [1, SHAPE.heads] {
        let view = TensorView::new(&weights, DType::F32, [SHAPE.batch, heads, SHAPE.q_len, SHAPE.kv_len]);
        let call = parts(buffers.each_ref()).forward().weights(view);
        let words = ["attention weights", "fused path", "Auto"];
        bench.refuses_with("weights", &words, |e| attention.forward(e, &call, &mut scratch));
        bench.refuses_with("prepare", &words, |_| attention.prepare(&call, &mut scratch).map(drop));
        let error = attention.scratch_size(&call).expect_err("refused");
        bench.seen.insert(read("scratch_size", &error, &words));
    }
    bench.seen
}
