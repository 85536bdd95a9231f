//! Errors of `Attention`.

use super::*;

pub(super) fn configurations() -> Seen {
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
    refused(&["`heads` is 6", "multiple of 4", "`kv_heads`"], Config::new(6, 8).kv_heads(4));
    refused(&["`config`", "F32, F16 or BF16", "U32"], Config::new(4, 8).dtype(DType::U32));
    refused(&["`config`", "F32, F16 or BF16", "Bool"], Config::new(4, 8).dtype(DType::Bool));
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e39] {
        refused(&["`scale` is", &scale.to_string(), "finite"], Config::new(4, 8).scale(scale));
    }
    for cap in [0.0, -0.0, -1.0, f64::NAN, f64::INFINITY, 1e39, 1e-39] {
        refused(&["`softcap` is", &cap.to_string(), "above 0"], Config::new(4, 8).softcap(cap));
    }
    seen
}

pub(super) fn zero_sizes() -> Seen {
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

pub(super) fn mismatched_shapes() -> Seen {
    let mut bench = Bench::new();
    // One more on an axis. The error names the first tensor that differs from those before it.
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

pub(super) fn strides_and_offsets() -> Seen {
    let mut bench = Bench::new();
    // The output [2, 4, 3, 6] with repeated, touching and interleaved elements.
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
        bench.refuses(
            "a far window",
            &[&name, "slice(2, 18446744073709551615, 3)", "axis 2 (length)"],
            |call, _| {
                *tensor(call, n) = tensor(call, n).slice(2, usize::MAX, 3);
            },
        );
    }
    // A broadcast axis may be long, but not longer than an index.
    for n in [1, 2] {
        bench.refuses("a long repeated axis", &["2^32"], |call, _| {
            for view in [&mut call.k, &mut call.v] {
                let [b, h, _, d] = view.shape();
                let length = if n == 1 { usize::MAX } else { 1 << 32 };
                *view = reshaped(view, [b, h, length, d]).with_strides([0, 0, 0, 1]);
            }
        });
    }
    // Past the end of the buffer, by many elements and by one.
    let ends = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out()].map(|s| count(s) + RESCALE_THRESHOLD);
    for n in 0..4 {
        for past in [1, 1000] {
            let words = [
                format!("`{}`", TENSORS[n]),
                format!("ends at byte {}", (ends[n] + past) * 4),
                format!("has {}", ends[n] * 4),
            ];
            bench.refuses("past the end", &words.each_ref().map(String::as_str), |call, _| {
                *tensor(call, n) = tensor(call, n).with_offset(RESCALE_THRESHOLD + past);
            });
        }
    }
    bench.seen
}

pub(super) fn memory_shared_with_an_output() -> Seen {
    let mut bench = Bench::new();
    for (n, name) in ["q", "k", "v"].iter().enumerate() {
        let words = ["`out`", &format!("`{name}`"), "a separate buffer"];
        bench.refuses("out is an input", &words, |call, buffers| {
            let view = tensor(call, n);
            *view = TensorView::new(&buffers[3], DType::F32, view.shape());
        });
    }
    let large = bench.gpu.buffer(1 << 16).expect("a buffer");
    let pair = |shape, offset| TensorView::new(&large, DType::F32, shape).with_offset(offset);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = parts(buffers.each_ref());
    let size = attention.scratch_size(&good.forward()).expect("a size");
    let mut refuses = |context: &str, words: &[&str], call: Parts| {
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(context, words, |e| attention.forward(e, &call.forward(), &mut scratch));
    };

    // Two inputs of different types overlap in the buffer of the output.
    let (q, out) = (pair(SHAPE.q(), 0), pair(SHAPE.out(), 4096));
    let lengths = TensorView::new(&large, DType::U32, [SHAPE.batch, 1, 1, 1]);
    let overlapping = Parts { q, out, mask: Mask::none().lengths(lengths), ..good };
    refuses("inputs in one buffer with out", &["`q`", "`lengths`", "overlap"], overlapping);
    // Apart, but nearer to each other than bindings may be.
    let alignment = gpu.device().limits().min_storage_buffer_offset_alignment;
    let multiple = format!("a multiple of {alignment} bytes");
    let behind = |shape: [usize; 4]| count(shape) + 1;
    let out = pair(SHAPE.out(), behind(SHAPE.q()));
    refuses("out near q", &["`out`", "`q`", &multiple], Parts { q: pair(SHAPE.q(), 1), out, ..good });
    let bias = pair(SHAPE.weights(), behind(SHAPE.out()));
    let bias = Parts { out: pair(SHAPE.out(), 1), mask: Mask::none().bias(bias), ..good };
    refuses("out and bias", &["`out`", "`bias`"], bias);
    let lse = Parts { lse: Some(pair(SHAPE.lse(), behind(SHAPE.k()))), k: pair(SHAPE.k(), 1), ..good };
    refuses("lse and k", &["`lse`", "`k`"], lse);
    let weights = Some(pair(SHAPE.weights(), behind(SHAPE.v())));
    let weights = Parts { weights, v: pair(SHAPE.v(), 1), ..good };
    refuses("weights and v", &["`weights`", "`v`"], weights);
    // Two outputs in one place.
    let both = Parts { out: pair(SHAPE.out(), 0), lse: Some(pair(SHAPE.lse(), 100)), ..good };
    refuses("out over lse", &["`out`", "`lse`"], both);
    let weights = Some(pair(SHAPE.weights(), behind(SHAPE.out())));
    let near = Parts { out: pair(SHAPE.out(), 1), weights, ..good };
    refuses("weights near out", &["`out`", "`weights`"], near);
    [bench.seen, outputs_near_each_other()].into_iter().flatten().collect()
}

/// On a plain device, bindings start at multiples of 256 bytes. Outputs in one buffer must be at
/// least that far apart.
fn outputs_near_each_other() -> Seen {
    let mut bench = Bench::on(&defaults().gpu, Config::new(SHAPE.heads, SHAPE.head_dim));
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let n = count(SHAPE.out());
    let large = gpu.upload(&vec![POISON; 1024]).expect("an upload");
    let buffers = bench.buffers();
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let at = |lse: usize| Parts {
        out: TensorView::new(&large, DType::F32, SHAPE.out()),
        lse: Some(TensorView::new(&large, DType::F32, SHAPE.lse()).with_offset(lse)),
        ..parts(buffers.each_ref())
    };
    assert_ne!(n * 4 % 256, 0, "out must end between two multiples");
    for offset in [n, n + 1, (n * 4).next_multiple_of(256) / 4 - 1] {
        bench.refuses_with("out near lse", &["`out`", "`lse`", "binding alignment"], |e| {
            attention.forward(e, &at(offset).forward(), &mut scratch)
        });
    }
    let apart = (n * 4).next_multiple_of(256) / 4;
    gpu.submit(|e| attention.forward(e, &at(apart).forward(), &mut scratch)).expect("apart");
    let got = gpu.download::<f32>(&large, apart + count(SHAPE.lse())).expect("a read-back");
    assert!(max_error(&widen(&got[..n]), &bench.want) < 1e-5);
    assert!(got[n..apart].iter().all(|x| *x == POISON) && got[apart..].iter().all(|x| *x != POISON));
    bench.seen
}

pub(super) fn unusable_buffers() -> Seen {
    let [own, other] = devices(|_| ());
    let mut bench = Bench::on(&own, Config::new(SHAPE.heads, SHAPE.head_dim));
    let usage = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::UNIFORM;
    let unusable = buffer(bench.gpu.device(), 1 << 16, usage);
    let foreign = buffer(other.device(), 1 << 16, wgpu::BufferUsages::STORAGE);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let size = attention.scratch_size(&parts(buffers.each_ref()).forward()).expect("a size");
    for (n, name) in TENSORS.iter().enumerate() {
        let name = format!("`{name}`");
        for (buffer, words) in [
            (&unusable, &[&name[..], "usage", "STORAGE", "create_buffer"][..]),
            (&foreign, &[&name[..], "another device", "Pipelines"][..]),
        ] {
            let mut call = parts(buffers.each_ref());
            let view = tensor(&mut call, n);
            *view = TensorView::new(buffer, DType::F32, view.shape());
            let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
            bench.refuses_with(&name, words, |e| attention.forward(e, &call.forward(), &mut scratch));
            // The same dtype is refused in a mask.
            if n == 0 {
                let mask = Mask::none().bias(TensorView::new(buffer, DType::F32, SHAPE.weights()));
                let call = Parts { mask, ..parts(buffers.each_ref()) };
                let words: Vec<_> = words.iter().map(|w| if *w == name { "`bias`" } else { w }).collect();
                bench.refuses_with("bias", &words, |e| attention.forward(e, &call.forward(), &mut scratch));
            }
        }
    }
    bench.seen
}

pub(super) fn dtypes() -> Seen {
    let mut bench = Bench::new();
    for (n, name) in TENSORS.iter().enumerate() {
        let name = format!("`{name}`");
        for dtype in [DType::F16, DType::BF16, DType::U32, DType::Bool] {
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
    let good = parts(buffers.each_ref());
    let pairs = SHAPE.weights();
    let lengths = [SHAPE.batch, SHAPE.heads, SHAPE.q_len, 1];
    let cases = [
        ("`lengths`", "U32", "F32", good.mask(Mask::none().lengths(view(DType::F32, lengths)))),
        ("`attn_mask`", "Bool", "U32", good.mask(Mask::none().attn_mask(view(DType::U32, pairs)))),
        (
            "`key_padding_mask`",
            "Bool",
            "F32",
            good.mask(Mask::none().key_padding_mask(view(DType::F32, pairs))),
        ),
        ("`bias`", "F32, F16 or BF16", "Bool", good.mask(Mask::none().bias(view(DType::Bool, pairs)))),
        ("`lse`", "F32", "F16", Parts { lse: Some(view(DType::F16, SHAPE.lse())), ..good }),
        ("`weights`", "F32, F16 or BF16", "U32", Parts { weights: Some(view(DType::U32, pairs)), ..good }),
        (
            "`dropout`",
            "Bool",
            "U32",
            Parts { dropout: Some(Dropout::Given { p: 0.5, keep: view(DType::U32, pairs) }), ..good },
        ),
    ];
    for (name, expected, got, call) in cases {
        let mut scratch =
            Scratch::new(gpu.device(), attention.scratch_size(&good.forward()).expect("a size"))
                .expect("scratch");
        bench.refuses_with(name, &[name, expected, got], |e| {
            attention.forward(e, &call.forward(), &mut scratch)
        });
    }
    bench.seen
}

pub(super) fn shapes_of_masks_and_outputs() -> Seen {
    let mut bench = Bench::new();
    let other = bench.gpu.buffer(1 << 16).expect("a buffer");
    let view = |dtype, shape| TensorView::new(&other, dtype, shape);
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = parts(buffers.each_ref());
    let size = attention.scratch_size(&good.forward()).expect("a size");
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
            (
                "`attn_mask`",
                pairs,
                " or 1",
                good.mask(Mask::none().attn_mask(view(DType::Bool, more(pairs)))),
            ),
            (
                "`key_padding_mask`",
                pairs,
                " or 1",
                good.mask(Mask::none().key_padding_mask(view(DType::Bool, more(pairs)))),
            ),
            ("`bias`", pairs, " or 1", good.mask(Mask::none().bias(view(DType::F32, more(pairs))))),
            ("`dropout`", pairs, " or 1", Parts { dropout: Some(given), ..good }),
            ("`lse`", rows, ",", Parts { lse: Some(view(DType::F32, more(rows))), ..good }),
            ("`weights`", pairs, ",", Parts { weights: Some(view(DType::F32, more(pairs))), ..good }),
        ];
        for (name, shape, or, call) in cases {
            let last = if shape == rows { "dim" } else { "kv_len" };
            // If the axis may be broadcast, a size of 1 is named once.
            let or = if shape[axis] == 1 { "," } else { or };
            let expected = format!("{} must be {}{or}", ["batch", "heads", "q_len", last][axis], shape[axis]);
            let words = [name, &expected, &format!("got {}", shape[axis] + 1)];
            let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
            bench.refuses_with(name, &words, |e| attention.forward(e, &call.forward(), &mut scratch));
        }
    }
    // A number of heads that is neither all nor one.
    let [b, _, i, j] = pairs;
    let some = Parts { weights: Some(view(DType::F32, [b, 2, i, j])), ..good };
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    bench.refuses_with("weights", &["`weights`", "heads must be 4", "got 2"], |e| {
        attention.forward(e, &some.forward(), &mut scratch)
    });
    bench.seen
}

pub(super) fn dropout_probabilities() -> Seen {
    let mut bench = Bench::new();
    for p in [1.0, 1.5, -0.1, f64::NAN, f64::INFINITY] {
        let words = ["`dropout.p`", &p.to_string(), "at least 0 and below 1"];
        bench.refuses("dropout", &words, |call, _| call.dropout = Some(Dropout::Seeded { p, seed: 1 }));
    }
    bench.seen
}

/// Errors of calls whose kernels are disabled.
pub(super) fn disabled_kernels() -> Seen {
    use Family::{
        BF16Tensors, CacheQ4, F16Tensors, FusedCpu, FusedGpu, ProductsCpu, ProductsGpu, StagedCpu, StagedGpu,
    };

    let mut seen = Seen::new();
    let full = full();
    let without = |families: &[Family]| {
        let pipelines = Pipelines::new(full.gpu.device());
        families.iter().for_each(|family| pipelines.avoid(*family));
        assert!(families.iter().all(|family| *pipelines.report().verdict(*family) == Verdict::Avoided));
        Gpu::with_pipelines(full.gpu.queue().clone(), pipelines)
    };
    let says =
        |context: &str, family: &str, error: Error| read(context, &error, &[family, "Pipelines::report"]);
    let gpu = without(&[F16Tensors, CacheQ4]);
    let half = Config::new(4, 8).dtype(DType::F16);
    seen.insert(says("F16", "F16", Attention::with_pipelines(gpu.pipelines(), half).expect_err("disabled")));
    let bf16 = Config::new(4, 8).dtype(DType::BF16);
    Attention::with_pipelines(gpu.pipelines(), bf16).expect("another type");
    let without_bf16 = without(&[BF16Tensors]);
    let error = Attention::with_pipelines(without_bf16.pipelines(), bf16).expect_err("disabled");
    seen.insert(says("BF16", "BF16 tensors", error));
    let config = CacheConfig::new(2, 8, 16);
    let of_four_bits = config.storage(CacheStorage::Q4(ScaleGroup::Row));
    let error = Cache::with_pipelines(gpu.pipelines(), of_four_bits).expect_err("disabled");
    seen.insert(says("a cache", "Q4 caches", error));
    Cache::with_pipelines(gpu.pipelines(), config).expect("another storage");

    let x = noise(4 * 5 * 8, 0.7);
    let shape = Shape::new(1, 4, 5, 8);
    let attention = |gpu: &Gpu, weights| gpu.attention(&x, &x, &x, shape, &Options::new().weights(weights));
    let gpu = without(&[FusedGpu, FusedCpu]);
    attention(&gpu, false).expect("by stages");
    gpu.pipelines().avoid(StagedGpu);
    attention(&gpu, true).expect("by the other form");
    gpu.pipelines().avoid(StagedCpu);
    for weights in [false, true] {
        let error = attention(&gpu, weights).expect_err("nothing is left");
        seen.insert(says("attention", "staged", error));
    }
    gpu.pipelines().allow(FusedCpu);
    attention(&gpu, false).expect("allowed");
    seen.insert(says("weights", "staged", attention(&gpu, true).expect_err("nothing is left")));

    let gpu = without(&[ProductsGpu, ProductsCpu]);
    let buffers = [(); 3].map(|()| gpu.upload(&x).expect("an upload"));
    let [rows, weight, out] = &buffers;
    let weight = TensorView::matrix(weight, DType::F32, [8, 8]);
    let call = ProjectionForward::new(
        TensorView::sequence(rows, DType::F32, [1, 20, 8]),
        Linear { weight, bias: None },
        TensorView::sequence(out, DType::F32, [1, 20, 8]),
    );
    let projection = Projection::with_pipelines(gpu.pipelines());
    let error = gpu.submit(|encoder| projection.forward(encoder, &[call])).expect_err("nothing is left");
    seen.insert(says("a projection", "projections", error));
    gpu.pipelines().allow(ProductsGpu);
    gpu.submit(|encoder| projection.forward(encoder, &[call])).expect("allowed");
    seen
}

/// Errors on devices with lower limits than the defaults.
pub(super) fn limits() -> Seen {
    let mut seen = Seen::new();
    let plain = Config::new(SHAPE.heads, SHAPE.head_dim);
    let heads = plain.kernel_options(KernelOptions::new().algorithm(Algorithm::Staged));

    // In bytes: q 768, k 640, v 480, out 576, scores 768.
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
    // The fused path stores no scores.
    let fused = plain.kv_heads(SHAPE.kv_heads).value_dim(SHAPE.value_dim);
    let fused = Attention::with_pipelines(small.pipelines(), fused).expect("an operator");
    assert_eq!(fused.scratch_size(&long).expect("a size"), ScratchSize::default());
    // A size from a larger device.
    let large = Attention::with_pipelines(
        full().gpu.pipelines(),
        heads.kv_heads(SHAPE.kv_heads).value_dim(SHAPE.value_dim),
    )
    .expect("an operator");
    let size = large.scratch_size(&long).expect("a size");
    let error = Scratch::new(small.device(), size).expect_err("a limit");
    seen.insert(read("scratch", &error, &["`scratch`", "1152 bytes", "allows 768"]));

    let limited = |path, form, change: fn(&mut wgpu::Limits), words: &[&str], call: fn(&mut Parts)| {
        let gpu = device(change);
        let [q, k, v, out] = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out()];
        let buffers = [q, k, v, out].map(|s| gpu.buffer(count(s) * 4).expect("a buffer"));
        let mut call_ = parts(buffers.each_ref());
        call(&mut call_);
        let call_ = call_.forward();
        let config = plain
            .kv_heads(SHAPE.kv_heads)
            .value_dim(SHAPE.value_dim)
            .kernel_options(KernelOptions::new().target(form).algorithm(path));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let size = attention.scratch_size(&call_).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = attention.forward(&mut encoder, &call_, &mut scratch).expect_err("a limit");
        gpu.queue().submit([encoder.finish()]);
        read("a limit", &error, words)
    };
    let rest = |_: &mut Parts| ();
    seen.insert(limited(
        Algorithm::Staged,
        Target::Gpu,
        |limits| limits.max_compute_invocations_per_workgroup = 128,
        &["256 invocations", "is 128", "max_compute_invocations_per_workgroup"],
        rest,
    ));
    seen.insert(limited(
        Algorithm::Staged,
        Target::Gpu,
        |limits| limits.max_compute_workgroup_storage_size = 1024,
        &["bytes of workgroup memory", "is 1024", "max_compute_workgroup_storage_size"],
        rest,
    ));
    seen.insert(limited(
        Algorithm::Staged,
        Target::Software,
        |limits| limits.max_storage_buffers_per_shader_stage = 3,
        &["4 storage buffers", "is 3", "max_storage_buffers_per_shader_stage"],
        |call| {
            // A mask accepts any bytes.
            let at = |dtype| TensorView::new(call.q.buffer(), dtype, [1, 1, 3, 5]);
            call.mask = Mask::none()
                .attn_mask(at(DType::Bool))
                .key_padding_mask(at(DType::Bool))
                .bias(at(DType::F32));
        },
    ));
    seen.insert(limited(
        Algorithm::Fused,
        Target::Software,
        |limits| limits.max_storage_buffers_per_shader_stage = 4,
        &["5 storage buffers", "is 4", "max_storage_buffers_per_shader_stage"],
        |call| {
            call.mask = Mask::none().attn_mask(TensorView::new(call.q.buffer(), DType::Bool, [1, 1, 3, 5]))
        },
    ));
    // The work limit is so small that there are too many dispatches: one per batch entry.
    let gpu = &full().gpu;
    let many = Shape { batch: (1 << 16) + 1, ..Shape::new(1, 1, 1, 1) };
    let buffers = [(); 4].map(|()| gpu.buffer(many.batch * 4).expect("a buffer"));
    let [q, k, v, out] = buffers.each_ref().map(|b| TensorView::new(b, DType::F32, many.q()));
    let call = Forward::new(q, k, v, out);
    let config = Config::new(1, 1).kernel_options(KernelOptions::new().work_limit(1));
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let error = attention.prepare(&call, &mut scratch).expect_err("a limit");
    seen.insert(read("a work limit", &error, &["`work_limit` is 1;", "65536 dispatches"]));

    // A grid that is too wide for one dispatch is cut into parts, as long as their number is
    // allowed.
    let narrow = device(|limits| limits.max_compute_workgroups_per_dimension = 1);
    for path in [Algorithm::Fused, Algorithm::Staged] {
        let mut bench = Bench::on(&narrow, plain.kernel_options(KernelOptions::new().algorithm(path)));
        bench.works("one workgroup per dispatch");
    }
    let buffers = [(); 4].map(|()| narrow.buffer(many.batch * 4).expect("a buffer"));
    let [q, k, v, out] = buffers.each_ref().map(|b| TensorView::new(b, DType::F32, many.q()));
    let call = Forward::new(q, k, v, out);
    let config = Config::new(1, 1).kernel_options(KernelOptions::new().algorithm(Algorithm::Staged));
    let attention = Attention::with_pipelines(narrow.pipelines(), config).expect("an operator");
    let size = attention.scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(narrow.device(), size).expect("scratch");
    let error = attention.prepare(&call, &mut scratch).expect_err("a limit");
    let words = ["65537 workgroups", "is 1;", "max_compute_workgroups_per_dimension"];
    seen.insert(read("too many dispatches", &error, &words));
    seen
}
