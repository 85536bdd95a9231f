//! Makes one call of the crate's attention on the default device, so that the device's driver
//! compiles the kernels.

use std::error::Error;

use wgpu_attention::{Attention, Config, DType, Forward, Gpu, Pipelines, Scratch, TensorView, inspect, wgpu};

/// `arguments`: `f32` or `f16` without matrix units, or `matrix` (f16 with matrix units), then
/// QUERIES, KEYS, HEAD_DIM. The call has 8 heads.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [kind, queries, keys, head_dim] = arguments else {
        return Err("f32|f16|matrix QUERIES KEYS HEAD_DIM".into());
    };
    let (queries, keys, head_dim): (usize, usize, usize) =
        (queries.parse()?, keys.parse()?, head_dim.parse()?);
    let (dtype, bytes) = match kind.as_str() {
        "f32" => (DType::F32, 4),
        "f16" | "matrix" => (DType::F16, 2),
        other => return Err(format!("{other}: f32, f16 or matrix").into()),
    };
    let gpu = pollster::block_on(open(kind == "matrix"))?;
    let tensor = |rows: usize| gpu.buffer(8 * rows * head_dim * bytes);
    let (q, k, v, out) = (tensor(queries)?, tensor(keys)?, tensor(keys)?, tensor(queries)?);
    let view = |buffer, rows| TensorView::new(buffer, dtype, [1, 8, rows, head_dim]);
    let call = Forward::new(view(&q, queries), view(&k, keys), view(&v, keys), view(&out, queries));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(8, head_dim).dtype(dtype))?;
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
    println!("{}", inspect::compiled(gpu.pipelines()).join("\n"));
    Ok(())
}

/// Opens a device as an application does that enables every useful feature.
async fn open(matrix_units: bool) -> Result<Gpu, Box<dyn Error>> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await?;
    let matrix = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    if matrix_units && !adapter.features().contains(matrix) {
        return Err("no matrix units".into());
    }
    let mut useful = wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP;
    // SAFETY: this tool runs drivers of GPUs that are not present. Nothing reads the results.
    let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
    let experimental = if matrix_units { experimental } else { wgpu::ExperimentalFeatures::disabled() };
    useful.set(matrix, matrix_units);
    let (device, queue) = adapter
        .request_device(&wgpu::DeviceDescriptor {
            required_features: useful & adapter.features(),
            required_limits: adapter.limits(),
            experimental_features: experimental,
            ..Default::default()
        })
        .await?;
    let pipelines = Pipelines::with_adapter(&device, &adapter);
    Ok(Gpu::with_pipelines(queue, pipelines))
}
