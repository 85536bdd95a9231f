//! Uploads of tensors, and attention layers by the names of several models. These tests need a
//! device.

use safetensors::tensor::{Dtype, TensorView, serialize};
use wgpu_attention::{DType, Gpu, MultiHeadAttention, Pipelines, wgpu};
use wgpu_attention_models::{AttentionTensors, Error, Gguf, Naming, Safetensors, upload, upload_f32};

fn gpu() -> Gpu {
    Gpu::new().expect("a device: run with scripts/gpu")
}

fn file(tensors: &[(String, Vec<usize>, Vec<u8>)], dtype: Dtype) -> Safetensors {
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).expect("a tensor"))
    });
    Safetensors::from_bytes("test", serialize(views, None).expect("a file")).expect("a file")
}

/// Bytes whose pattern does not repeat with the length of a chunk.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn buffers_hold_what_the_file_does() {
    let gpu = gpu();
    let file =
        Gguf::open(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/every_type.gguf")).expect("a file");
    for name in ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"] {
        let tensor = file.tensor(name).expect(name);
        let stored = upload(&gpu, &tensor).expect(name);
        let bytes: Vec<u8> = gpu.download(&stored.buffer, tensor.bytes().len()).expect(name);
        assert_eq!(bytes, tensor.bytes(), "{name}");
        let wide = upload_f32(&gpu, &tensor).expect(name);
        let values: Vec<u32> = gpu.download(&wide.buffer, tensor.count()).expect(name);
        assert_eq!(values, tensor.to_f32().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "{name}");
        let view = wide.view().expect(name);
        assert_eq!((view.dtype(), view.shape()), (DType::F32, [1, 2, 3, 64]), "{name}");
        match name {
            "F16" => assert_eq!(stored.view().expect(name).dtype(), DType::F16),
            "BF16" => assert_eq!(stored.view().expect(name).dtype(), DType::BF16),
            "F32" => assert_eq!(stored.view().expect(name).dtype(), DType::F32),
            _ => assert!(matches!(stored.view(), Err(Error::Type { .. })), "{name}"),
        }
    }
}

#[test]
fn several_pieces_and_odd_lengths() {
    let gpu = gpu();
    // More than two chunks of 8 Mi elements, the last with an odd number of 16-bit elements.
    let odd = (16 << 20) + 7;
    let file =
        file(&[("long".into(), vec![odd], noise(2 * odd)), ("short".into(), vec![1], noise(2))], Dtype::BF16);
    for name in ["long", "short"] {
        let tensor = file.tensor(name).expect(name);
        let buffer = upload(&gpu, &tensor).expect(name).buffer;
        assert_eq!(buffer.size(), (tensor.bytes().len() as u64).next_multiple_of(4));
        let bytes: Vec<u8> = gpu.download(&buffer, tensor.bytes().len()).expect(name);
        assert!(bytes == tensor.bytes(), "{name}");
        let values: Vec<u32> =
            gpu.download(&upload_f32(&gpu, &tensor).expect(name).buffer, tensor.count()).expect(name);
        assert!(
            values.iter().eq(tensor.to_f32().iter().map(|x| x.to_bits()).collect::<Vec<_>>().iter()),
            "{name}"
        );
    }
}

#[test]
fn oversized_tensors_are_refused() {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("an adapter");
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 20, ..Default::default() };
    let (device, queue) = pollster::block_on(
        adapter.request_device(&wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() }),
    )
    .expect("a device");
    let gpu = Gpu::with_pipelines(queue, Pipelines::new(&device));
    let just = 1 << 18;
    let file = file(
        &[
            ("fits".into(), vec![just], noise(4 * just)),
            ("large".into(), vec![just + 1], noise(4 * just + 4)),
            ("empty".into(), vec![0, 3], vec![]),
        ],
        Dtype::F32,
    );
    let tensor = |name: &str| file.tensor(name).expect("there");
    assert!(upload(&gpu, &tensor("fits")).is_ok());
    let error = upload(&gpu, &tensor("large")).expect_err("too large").to_string();
    assert_eq!(
        error,
        "`large` needs 1048580 bytes, but the device allows 1048576 (`max_storage_buffer_binding_size`); request a higher limit or \
         use a smaller model"
    );
    assert!(matches!(upload(&gpu, &tensor("empty")), Err(Error::Shape { .. })));
}

/// The names of layer 3's projections in each naming scheme, and whether each has a bias.
const NAMES: [(Naming, [(&str, bool); 4]); 7] = [
    (
        Naming::Bert,
        [
            ("encoder.layer.3.attention.self.query", true),
            ("encoder.layer.3.attention.self.key", true),
            ("encoder.layer.3.attention.self.value", true),
            ("encoder.layer.3.attention.output.dense", true),
        ],
    ),
    (
        Naming::Bert,
        [
            ("bert.encoder.layer.3.attention.self.query", true),
            ("bert.encoder.layer.3.attention.self.key", true),
            ("bert.encoder.layer.3.attention.self.value", true),
            ("bert.encoder.layer.3.attention.output.dense", true),
        ],
    ),
    (
        Naming::Llama,
        [
            ("model.layers.3.self_attn.q_proj", false),
            ("model.layers.3.self_attn.k_proj", false),
            ("model.layers.3.self_attn.v_proj", false),
            ("model.layers.3.self_attn.o_proj", false),
        ],
    ),
    (
        Naming::WhisperEncoder,
        [
            ("model.encoder.layers.3.self_attn.q_proj", true),
            ("model.encoder.layers.3.self_attn.k_proj", false),
            ("model.encoder.layers.3.self_attn.v_proj", true),
            ("model.encoder.layers.3.self_attn.out_proj", true),
        ],
    ),
    (
        Naming::WhisperDecoder,
        [
            ("decoder.layers.3.self_attn.q_proj", true),
            ("decoder.layers.3.self_attn.k_proj", false),
            ("decoder.layers.3.self_attn.v_proj", true),
            ("decoder.layers.3.self_attn.out_proj", true),
        ],
    ),
    (
        Naming::WhisperCross,
        [
            ("model.decoder.layers.3.encoder_attn.q_proj", true),
            ("model.decoder.layers.3.encoder_attn.k_proj", false),
            ("model.decoder.layers.3.encoder_attn.v_proj", true),
            ("model.decoder.layers.3.encoder_attn.out_proj", true),
        ],
    ),
    (
        Naming::Gguf,
        [
            ("blk.3.attn_q", false),
            ("blk.3.attn_k", false),
            ("blk.3.attn_v", false),
            ("blk.3.attn_output", false),
        ],
    ),
];

/// 4 heads and 2 key/value heads of 8 channels, for inputs 24 and 20 wide.
const SIZES: [[usize; 2]; 4] = [[32, 24], [16, 20], [16, 20], [24, 32]];

fn layer(names: &[(&str, bool); 4], sizes: [[usize; 2]; 4]) -> Safetensors {
    let mut tensors = Vec::new();
    for ((name, bias), [rows, columns]) in names.iter().zip(sizes) {
        tensors.push((format!("{name}.weight"), vec![rows, columns], noise(2 * rows * columns)));
        if *bias {
            tensors.push((format!("{name}.bias"), vec![rows], noise(2 * rows)));
        }
    }
    file(&tensors, Dtype::BF16)
}

#[test]
fn attention_layers_by_their_names() {
    let gpu = gpu();
    for (naming, names) in NAMES {
        let file = layer(&names, SIZES);
        let tensors = AttentionTensors::new(&file, naming, 3).expect("a layer");
        let each = [tensors.query, tensors.key, tensors.value, tensors.out];
        for (got, (name, bias)) in each.iter().zip(names) {
            assert_eq!(got.weight.name(), format!("{name}.weight"));
            assert_eq!(got.bias.map(|b| b.name().to_owned()), bias.then(|| format!("{name}.bias")));
        }
        // The operator itself checks shapes against the configuration.
        let config = tensors.config(4).expect("4 heads");
        let buffers = tensors.upload_f32(&gpu).expect("buffers");
        let weights = buffers.view().expect("views");
        MultiHeadAttention::with_pipelines(gpu.pipelines(), config, &weights).expect("a layer");
        let buffers = tensors.upload(&gpu).expect("buffers");
        let weights = buffers.view().expect("views");
        MultiHeadAttention::with_pipelines(gpu.pipelines(), config.dtype(DType::BF16), &weights)
            .expect("a layer");

        for heads in [0, 3, 64] {
            assert!(matches!(tensors.config(heads), Err(Error::Shape { .. })), "{heads}");
        }
        let error = AttentionTensors::new(&file, naming, 4).expect_err("no layer 4");
        assert!(matches!(error, Error::Missing { .. }), "{error}");
    }
}

#[test]
fn layers_that_do_not_fit_together() {
    let (naming, names) = NAMES[0];
    for (at, size) in [(2, [16, 24]), (2, [8, 20]), (3, [24, 16]), (3, [20, 32])] {
        let mut sizes = SIZES;
        sizes[at] = size;
        let error = AttentionTensors::new(&layer(&names, sizes), naming, 3).map(|_| ()).expect_err("no fit");
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    }
    let vector = names.map(|(name, _)| (format!("{name}.weight"), vec![4], noise(8)));
    let error =
        AttentionTensors::new(&file(&vector, Dtype::BF16), naming, 3).map(|_| ()).expect_err("no matrix");
    assert!(error.to_string().contains("the model needs [out_features, in_features]"), "{error}");
    let mut short = vec![("encoder.layer.3.attention.self.query.weight".into(), vec![32, 24], noise(1536))];
    short.push(("encoder.layer.3.attention.self.query.bias".into(), vec![31], noise(62)));
    let error = AttentionTensors::new(&file(&short, Dtype::BF16), naming, 3).map(|_| ()).expect_err("no fit");
    assert!(error.to_string().contains("has shape [31], but the model needs [32]"), "{error}");
}

#[test]
fn unusable_tensors_are_refused() {
    let gpu = gpu();
    let file = file(
        &[("deep".into(), vec![1, 1, 1, 2, 2], noise(16)), ("x".into(), vec![4], noise(16))],
        Dtype::F32,
    );
    let deep = upload(&gpu, &file.tensor("deep").expect("there")).expect("a buffer");
    let error = deep.view().expect_err("five dimensions").to_string();
    assert_eq!(
        error,
        "`deep` has shape [1, 1, 1, 2, 2], but the model needs at most four dimensions; check that the file belongs to this model"
    );
    gpu.device().destroy();
    let x = file.tensor("x").expect("there");
    for got in [upload(&gpu, &x), upload_f32(&gpu, &x)] {
        assert!(matches!(got, Err(Error::Device(wgpu_attention::Error::DeviceLost(_)))), "{got:?}");
    }
}
