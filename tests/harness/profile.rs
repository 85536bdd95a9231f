//! A device that cases run on.

use wgpu_attention::Gpu;

/// A device with a name for messages.
#[derive(Debug)]
pub struct Profile {
    pub name: &'static str,
    pub gpu: Gpu,
    /// True if calls shall use its matrix units.
    pub matrix: bool,
}

impl Profile {
    /// Every feature of `adapter` that is not experimental.
    pub async fn full(adapter: &wgpu::Adapter) -> Self {
        let features = adapter.features() - wgpu::Features::all_experimental_mask();
        Self::make("full", adapter, features, adapter.limits()).await
    }

    /// The guaranteed minimum of WebGPU: no features, the default limits.
    pub async fn defaults(adapter: &wgpu::Adapter) -> Self {
        Self::make("defaults", adapter, wgpu::Features::empty(), wgpu::Limits::default()).await
    }

    pub async fn make(
        name: &'static str,
        adapter: &wgpu::Adapter,
        required_features: wgpu::Features,
        required_limits: wgpu::Limits,
    ) -> Self {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some(name),
            required_features,
            required_limits,
            // SAFETY: tests may run kernels that may be wrong.
            experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
            ..Default::default()
        };
        let (device, queue) = adapter
            .request_device(&descriptor)
            .await
            .expect("the adapter gives a device with its own limits and one with the default limits");
        let f16 = device.features().contains(wgpu::Features::SHADER_F16);
        super::say(&format!("device `{name}`: {}, f16: {f16}", adapter.get_info().name));
        Profile { name, gpu: Gpu::with_device(device, queue), matrix: false }
    }

    /// False for matrix units whose kernels take longest to compile.
    pub fn compiles_fast(&self) -> bool {
        let software = self.gpu.device().adapter_info().device_type == wgpu::DeviceType::Cpu;
        self.name != "matrix 16" || !software
    }

    /// Returns the invocations of the widest subgroup that its driver may choose.
    pub fn widest_subgroup(&self) -> u32 {
        self.gpu.device().adapter_info().subgroup_max_size
    }

    /// Clears compiled shaders if there are many: the shaders of all tests take gigabytes.
    pub fn tidy(&self) {
        #[cfg(not(target_arch = "wasm32"))]
        super::listed::check(self.gpu.pipelines());
        // Kernels for matrix units are the largest.
        if self.gpu.pipelines().compiled() > if self.matrix { 20 } else { 60 } {
            #[cfg(not(target_arch = "wasm32"))]
            super::listed::write(self.gpu.pipelines());
            self.gpu.pipelines().clear();
            let _ = self.gpu.device().poll(wgpu::PollType::Poll);
        }
    }
}
