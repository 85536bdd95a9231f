//! A program that records one call of attention. `scripts/size` measures it.

use wgpu_attention::{Attention, Config, DType, Forward, Mask, Scratch, TensorView, wgpu};

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = instance.request_adapter(&Default::default()).await?;
    let config = Config::new(8, 64);
    let (required_features, required_limits) = config.required(&adapter);
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    let (device, queue) = adapter.request_device(&descriptor).await?;
    let [x, out] = [0, 1].map(|_| {
        let usage = TensorView::USAGES;
        device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 1 << 20,
            usage,
            mapped_at_creation: false,
        })
    });
    let view = |buffer| TensorView::new(buffer, DType::F32, [1, 8, 512, 64]);
    let call = Forward::new(view(&x), view(&x), view(&x), view(&out)).mask(Mask::causal());
    let attention = Attention::new(&device, config)?;
    let mut scratch = Scratch::new(&device, attention.scratch_size(&call)?)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    attention.forward(&mut encoder, &call, &mut scratch)?;
    queue.submit([encoder.finish()]);
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    pollster::block_on(run())
}
