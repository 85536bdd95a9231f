//! The devices that every case runs on, made once.

use std::sync::OnceLock;

use wgpu_attention::Gpu;

/// A device with a name for messages.
#[derive(Debug)]
pub struct Profile {
    pub name: &'static str,
    pub gpu: Gpu,
    pub f16: bool,
}

/// Everything the adapter gives that is not experimental.
pub fn full() -> &'static Profile {
    static FULL: OnceLock<Profile> = OnceLock::new();
    FULL.get_or_init(|| {
        let adapter = adapter();
        let features = adapter.features() - wgpu::Features::all_experimental_mask();
        make("full", &adapter, features, adapter.limits())
    })
}

/// What every WebGPU device has: no features, the default limits.
pub fn defaults() -> &'static Profile {
    static DEFAULTS: OnceLock<Profile> = OnceLock::new();
    DEFAULTS.get_or_init(|| make("defaults", &adapter(), wgpu::Features::empty(), wgpu::Limits::default()))
}

pub fn profiles() -> [&'static Profile; 2] {
    [full(), defaults()]
}

fn adapter() -> wgpu::Adapter {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
        .expect("tests need an adapter: run them as `scripts/gpu cargo test --release`")
}

fn make(
    name: &'static str,
    adapter: &wgpu::Adapter,
    required_features: wgpu::Features,
    required_limits: wgpu::Limits,
) -> Profile {
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some(name),
        required_features,
        required_limits,
        ..Default::default()
    }))
    .expect("the adapter gives a device with its own limits and one with the default limits");
    let f16 = device.features().contains(wgpu::Features::SHADER_F16);
    super::say(&format!("device `{name}`: {}, f16: {f16}", adapter.get_info().name));
    Profile { name, gpu: Gpu::with_device(device, queue), f16 }
}
