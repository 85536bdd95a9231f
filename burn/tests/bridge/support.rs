//! The device of the tests, random tensors and comparisons.

use std::sync::OnceLock;

use burn::tensor::{Device, Tensor, TensorData};

/// The device that all tests share.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| wgpu_attention_burn::init(Device::wgpu_options()).expect("a device")).clone()
}

/// Numbers in −1 to 1 that depend on the seed alone.
pub fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A tensor of [`numbers`].
pub fn tensor<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let data = numbers(seed, shape.iter().product());
    Tensor::from_data(TensorData::new(data, shape), device)
}

/// The elements as f32.
pub fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().try_into_vec::<f32>().expect("f32")
}

/// Checks that two tensors agree within `tolerance`, absolute.
#[track_caller]
pub fn assert_close<const D: usize>(got: Tensor<D>, expected: Tensor<D>, tolerance: f32) {
    assert_eq!(got.dims(), expected.dims());
    assert_values(&read(got), &read(expected), tolerance);
}

/// As [`assert_close`].
#[track_caller]
pub fn assert_values(got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    for (n, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= tolerance, "element {n}: {got}, expected {expected}");
    }
}
