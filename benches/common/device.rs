//! The device of the benches.

use wgpu_attention::{Gpu, Pipelines, inspect, wgpu};

pub struct Opened {
    pub instance: wgpu::Instance,
    /// The features of the adapter, enabled on the device or not.
    pub offered: wgpu::Features,
    pub gpu: Gpu,
    /// The sides of the fragments of the device's matrix units: f16 · f16, summed in f32.
    pub fragments: Vec<u32>,
}

/// Creates an instance that honours `WGPU_BACKEND` and wgpu's other variables.
pub fn instance() -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env())
}

/// Returns the fastest adapter.
#[cfg(not(target_arch = "wasm32"))]
pub fn adapter(instance: &wgpu::Instance) -> wgpu::Adapter {
    pollster::block_on(adapter_async(instance))
}

async fn adapter_async(instance: &wgpu::Instance) -> wgpu::Adapter {
    let options = wgpu::RequestAdapterOptions {
        power_preference: wgpu::PowerPreference::HighPerformance,
        ..Default::default()
    };
    instance.request_adapter(&options).await.expect("an adapter")
}

/// Opens the fastest adapter's device, with the features that the benches use.
#[cfg(not(target_arch = "wasm32"))]
pub fn open() -> Opened {
    pollster::block_on(open_async())
}

/// The async variant of `open`.
pub async fn open_async() -> Opened {
    let instance = instance();
    let adapter = adapter_async(&instance).await;
    let offered = adapter.features();
    let matrix = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    let useful =
        wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP | matrix;
    let features = useful & offered;
    let experimental_features = if features.contains(matrix) {
        // SAFETY: benches may run kernels that may be wrong, and check results before they measure
        // times.
        unsafe { wgpu::ExperimentalFeatures::enabled() }
    } else {
        wgpu::ExperimentalFeatures::disabled()
    };
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("bench"),
        required_features: features,
        required_limits: adapter.limits(),
        experimental_features,
        ..Default::default()
    };
    let (device, queue) = request(&adapter, &descriptor).await;
    let needed = matrix | wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP;
    let fragments = if features.contains(needed) { inspect::fragments(&adapter) } else { Vec::new() };
    let pipelines = Pipelines::with_adapter(&device, &adapter);
    Opened { instance, offered, gpu: Gpu::with_pipelines(queue, pipelines), fragments }
}

/// Requests a device with features and limits of the adapter.
async fn request(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> (wgpu::Device, wgpu::Queue) {
    #[cfg(any(windows, target_os = "linux"))]
    if super::settings::unchecked() {
        println!("unchecked: a device without robust access to buffers");
        // SAFETY: only kernels of the crate and of the benches run on the device. `Kernel::new`
        // requires that they stay inside their buffers.
        let made = unsafe { wgpu_attention::unchecked_vulkan::request_device(adapter, descriptor) };
        return made.unwrap_or_else(|error| panic!("WGPU_ATTENTION_UNCHECKED: {error}"));
    }
    let made = adapter.request_device(descriptor).await;
    made.expect("the adapter gives a device with its own features and limits")
}

/// True if a processor does the device's work.
pub fn software(gpu: &Gpu) -> bool {
    gpu.device().adapter_info().device_type == wgpu::DeviceType::Cpu
}
