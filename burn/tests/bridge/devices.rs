//! Devices: of the application, unknown ones, two in a call, other threads, a lost one.

use std::thread;

use burn::tensor::wgpu::WgpuSetup;
use burn::tensor::{Device, Tensor};
use wgpu_attention::wgpu;
use wgpu_attention_burn::{Error, attention, share};

use crate::support::{assert_close, device, tensor};

/// A device that the application makes and gives to both.
fn application() -> (Device, WgpuSetup) {
    let instance = wgpu::Instance::default();
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("an adapter");
    let descriptor = wgpu::DeviceDescriptor {
        required_limits: adapter.limits(),
        required_features: adapter.features() & wgpu::Features::SHADER_F16,
        ..Default::default()
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
    let backend = adapter.get_info().backend;
    let setup = WgpuSetup { instance, adapter, device, queue, backend };
    (Device::wgpu_options().setup(setup.clone()).init().expect("Burn takes the device"), setup)
}

fn attend(device: &Device) -> Result<Tensor<4>, Error> {
    let [q, k, v] = [1, 2, 3].map(|seed| tensor::<4>(seed, [1, 2, 9, 16], device));
    attention(q, k, v, None, None, Default::default())
}

#[test]
fn application_device_serves_both() {
    let (device, setup) = application();
    let error = attend(&device).unwrap_err();
    assert!(matches!(error, Error::UnknownDevice { tensor: "query", .. }), "{error}");
    share(&device, &setup).unwrap();
    let there = attend(&device).unwrap().into_data();
    let here = attend(&crate::support::device()).unwrap();
    assert_close(Tensor::from_data(there, &crate::support::device()), here, 1e-6);
}

#[test]
fn mixed_devices_are_an_error() {
    let (other, setup) = application();
    share(&other, &setup).unwrap();
    let [q, k] = [device(), other].map(|device| tensor::<4>(1, [1, 2, 9, 16], &device));
    let error = attention(q.clone(), k, q, None, None, Default::default()).unwrap_err();
    assert!(matches!(error, Error::Devices { tensor: "key", .. }), "{error}");
}

#[test]
fn other_threads_tensors_are_ready() {
    let device = device();
    let expected = attend(&device).unwrap();
    for _ in 0..4 {
        let make = |seed| {
            let device = device.clone();
            thread::spawn(move || tensor::<4>(seed, [1, 2, 9, 16], &device) * 1.0).join().expect("a tensor")
        };
        let [q, k, v] = [1, 2, 3].map(make);
        let out = attention(q, k, v, None, None, Default::default()).unwrap();
        let read = thread::spawn(move || out.into_data()).join().expect("a result");
        assert_close(Tensor::from_data(read, &device), expected.clone(), 1e-6);
    }
}

#[test]
fn threads_share_a_device() {
    let device = device();
    let expected = attend(&device).unwrap().into_data();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..8 {
                    assert_eq!(attend(&device).unwrap().into_data(), expected);
                }
            });
        }
    });
}

#[test]
fn call_on_lost_device_returns() {
    let (device, setup) = application();
    share(&device, &setup).unwrap();
    let tensors = [1, 2, 3].map(|seed| tensor::<4>(seed, [1, 2, 9, 16], &device));
    let [q, k, v] = tensors.clone();
    attention(q, k, v, None, None, Default::default()).unwrap().into_data();
    setup.device.destroy();
    let [q, k, v] = tensors;
    // wgpu accepts the submission, or the call is an error. Burn panics in reads on a lost device,
    // so this test reads nothing, and its tensors are never freed.
    let result = attention(q, k, v, None, None, Default::default());
    println!("a call on a lost device: {:?}", result.as_ref().map(|out| out.dims()));
    std::mem::forget(result);
}
