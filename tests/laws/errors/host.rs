//! Errors of scratch, slices and read-backs.

use super::*;

pub(super) fn scratch() -> Seen {
    let [own, other] = devices(|_| ());
    let plain = Config::new(SHAPE.heads, SHAPE.head_dim);
    let mut fused = Bench::on(&own, plain);
    assert_eq!(fused.scratch.size(), ScratchSize::default(), "the fused path has no scores to store");
    fused.works("without scratch");
    let mut bench = Bench::on(&own, plain.kernel_options(KernelOptions::new().algorithm(Algorithm::Staged)));
    let buffers = bench.buffers();
    let (attention, gpu) = (bench.attention.clone(), bench.gpu.clone());
    let good = parts(buffers.each_ref());
    let call = good.forward();
    let size = attention.scratch_size(&call).expect("a size");
    let needed = size.total().to_string();

    let mut none = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let words = ["scratch", "0 bytes", "scores", &needed, "scratch_size"];
    bench.refuses_with("no scratch", &words, |e| attention.forward(e, &call, &mut none));
    // A scratch for a call with fewer keys.
    let short = Parts { k: good.k.slice(2, 0, 2), v: good.v.slice(2, 0, 2), ..good }.forward();
    let less = attention.scratch_size(&short).expect("a size");
    assert!(less.total() < size.total());
    let mut little = Scratch::new(gpu.device(), less).expect("scratch");
    let words = ["scores", &needed, &less.total().to_string()];
    bench.refuses_with("little scratch", &words, |e| attention.forward(e, &call, &mut little));
    let mut foreign = Scratch::new(other.device(), size).expect("scratch");
    let words = ["a scratch on another device", "Scratch::new"];
    bench.refuses_with("another's scratch", &words, |e| attention.forward(e, &call, &mut foreign));
    bench.refuses_with("another's scratch, larger", &words, |_| {
        foreign.ensure(gpu.device(), size).map(|_| ())
    });
    // Calls that need no scratch check its device, too.
    let (buffers, one_pass) = (fused.buffers(), fused.attention.clone());
    let plain = parts(buffers.each_ref()).forward();
    let mut empty = Scratch::new(other.device(), ScratchSize::default()).expect("scratch");
    fused.refuses_with("another's empty scratch", &words, |e| one_pass.forward(e, &plain, &mut empty));

    assert_eq!(little.ensure(gpu.device(), size).map_err(|e| e.to_string()), Ok(true));
    assert_eq!((little.size(), little.ensure(gpu.device(), less).expect("no need")), (size, false));
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut little)).expect("scratch that has grown");
    // The text of a size lists only its non-zero parts.
    assert!(format!("{size:?}").starts_with("ScratchSize {\"scores\": "), "{size:?}");
    assert!(!format!("{size:?}").contains(": 0"), "{size:?}");
    assert_eq!(format!("{:?}", ScratchSize::default()), "ScratchSize {}");
    bench.seen
}

pub(super) fn slices() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let [q, k, v] = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
    let wide = [&q, &k, &v].map(|x| widen::<f64>(x));
    let mut both = |words: &[&str], cut: [usize; 3], shape: Shape, options: Options| {
        let part = |x: &[f32], n: usize| x[..x.len() - n].to_vec();
        let [q, k, v] = [part(&q, cut[0]), part(&k, cut[1]), part(&v, cut[2])];
        let error = gpu.attention(&q, &k, &v, shape, &options).expect_err("refused by Gpu");
        seen.insert(read("Gpu", &error, words));
        let [q, k, v] = [0, 1, 2].map(|n| wide[n][..wide[n].len() - cut[n]].to_vec());
        let error = reference::attention::<f64>(&q, &k, &v, shape, &options);
        seen.insert(read("reference", &error.expect_err("refused by the reference"), words));
    };
    let plain = Options::default();
    both(&["`q`", "192 elements expected", "got 191"], [1, 0, 0], SHAPE, plain);
    both(&["`k`", "160 elements expected", "got 158"], [0, 2, 0], SHAPE, plain);
    both(&["`v`", "120 elements expected", "got 0"], [0, 0, 120], SHAPE, plain);
    // Dimensions whose product exceeds every slice.
    let far = Shape { batch: usize::MAX, ..SHAPE };
    both(&["`q`", "got 192"], [0; 3], far, plain);
    both(&["`shape`", "q_len is 0"], [0; 3], Shape { q_len: 0, ..SHAPE }, plain);
    both(&["`heads` is 4", "3 (`kv_heads`)"], [0; 3], Shape { kv_heads: 3, ..SHAPE }, plain);

    let (lengths, bools, floats) = ([1; 24], [true; 120], [0.5; 120]);
    let mut masked = |words: &[&str], mask: HostMask| both(words, [0; 3], SHAPE, plain.mask(mask));
    let rows = [2, 4, 3, 1];
    masked(&["`lengths`", "24", "got 23"], Mask::none().lengths(HostTensor::new(&lengths[..23], rows)));
    masked(
        &["`attn_mask`", "120", "got 119"],
        Mask::none().attn_mask(HostTensor::new(&bools[..119], SHAPE.weights())),
    );
    masked(
        &["`key_padding_mask`", "15", "got 120"],
        Mask::none().key_padding_mask(HostTensor::new(&bools, [1, 1, 3, 5])),
    );
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
        both(words, [0; 3], SHAPE, plain.dropout(dropout));
    };
    dropped(&["`dropout`", "kv_len must be 5 or 1", "got 4"], &bools[..4], [1, 1, 1, 4]);
    dropped(&["`dropout`", "15 elements", "got 14"], &bools[..14], [1, 1, 3, 5]);
    dropped(&["`dropout`", "15 elements", "got 120"], &bools, [1, 1, 3, 5]);
    both(&["`dropout.p`", "1.5"], [0; 3], SHAPE, plain.dropout(Dropout::Seeded { p: 1.5, seed: 0 }));
    both(&["scale", "NaN", "finite"], [0; 3], SHAPE, plain.scale(f64::NAN));
    both(&["softcap", "is 0", "above 0"], [0; 3], SHAPE, plain.softcap(0.0));

    let appended = plain.appended(1);
    let error = gpu.attention(&q, &k, &v, SHAPE, &appended).expect_err("for layers only");
    seen.insert(read("appended", &error, &["options.appended", "MultiHeadAttention", "`k`"]));
    let appended = plain.appended(SHAPE.kv_len + 1);
    let error = reference::attention::<f64>(&wide[0], &wide[1], &wide[2], SHAPE, &appended);
    seen.insert(read("appended", &error.expect_err("refused"), &["appended", "6"]));

    let out = gpu.attend(&q, &k, &v, SHAPE, Mask::none()).expect("a correct call");
    assert_eq!(out.len(), count(SHAPE.out()));
    seen
}

pub(super) fn reading_back() -> Seen {
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

    // A device that its owner has destroyed must cause neither a panic nor a wrong result.
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

/// Errors of one layer's mask that does not fit the stack's rows.
pub(super) fn layers_of_stacks() -> Seen {
    let error = crate::ops::layers::stacks::by_layer::mask_of_other_keys();
    Seen::from([read("a mask of layer 1", &error, &["`layer_calls[1]`: `attn_mask`", "must be"])])
}

/// Errors that tests cannot provoke, so only their messages are checked. A missing adapter depends
/// on the environment of the process, and tests cannot restart themselves under another loader.
/// Memory does not run out on demand: drivers grant it lazily, and other tests need it.
pub(super) fn unprovoked_errors() -> Seen {
    let missing = Error::NoAdapter("none".into());
    let full = Error::OutOfMemory { what: "scratch", description: "no room".into() };
    Seen::from([
        read("no adapter", &missing, &["adapter", "none", "Vulkan driver", "your own device"]),
        read("no memory", &full, &["memory", "scratch", "no room"]),
    ])
}
