//! Turns a buffer of attention weights into a texture, on the device. Nothing is read back.

use canvas::heat;
use wgpu_attention::{Error, Gpu};

/// One map in a buffer of many: its queries and keys, and its first element.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Map {
    pub rows: u32,
    pub columns: u32,
    pub first: u32,
    pub unused: u32,
}

impl Map {
    /// The map of head `n` of `[.., rows, columns]`.
    pub fn new(n: usize, [rows, columns]: [usize; 2]) -> Self {
        let [rows, columns] = [rows, columns].map(|n| n as u32);
        Map { rows, columns, first: n as u32 * rows * columns, unused: 0 }
    }
}

/// The pipelines of `heat.wgsl`, and the texture.
pub struct Heat {
    gpu: Gpu,
    pipelines: [wgpu::ComputePipeline; 2],
    layout: wgpu::BindGroupLayout,
    palette: wgpu::Buffer,
    map: wgpu::Buffer,
    /// The largest weight of the map, one f32.
    pub largest: wgpu::Buffer,
    pub texture: wgpu::Texture,
}

impl Heat {
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        let device = gpu.device();
        let module = device.create_shader_module(wgpu::include_wgsl!("heat.wgsl"));
        let layout = layout(device);
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some("heat"),
            bind_group_layouts: &[Some(&layout)],
            ..Default::default()
        });
        let pipelines = ["largest", "draw"].map(|entry| {
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some("heat"),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(entry),
                compilation_options: Default::default(),
                cache: None,
            })
        });
        let map = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("map"),
            size: size_of::<Map>() as u64,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        Ok(Heat {
            pipelines,
            layout,
            palette: gpu.upload(&palette())?,
            map,
            largest: gpu.buffer(size_of::<f32>())?,
            texture: texture(device, [1, 1]),
            gpu: gpu.clone(),
        })
    }

    /// Records the picture of `map` in `weights`. Returns true if the texture is a new one.
    pub fn record(&mut self, encoder: &mut wgpu::CommandEncoder, weights: &wgpu::Buffer, map: Map) -> bool {
        let device = self.gpu.device();
        let size = [map.columns, map.rows];
        let is_new = [self.texture.width(), self.texture.height()] != size;
        if is_new {
            self.texture = texture(device, size);
        }
        self.gpu.queue().write_buffer(&self.map, 0, bytemuck::bytes_of(&map));
        let picture = self.texture.create_view(&Default::default());
        let buffers = [&self.map, weights, &self.palette, &self.largest];
        let mut entries: Vec<_> = (0..).zip(buffers).map(|(n, b)| entry(n, b.as_entire_binding())).collect();
        entries.push(entry(4, wgpu::BindingResource::TextureView(&picture)));
        let bindings = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("heat"),
            layout: &self.layout,
            entries: &entries,
        });
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_bind_group(0, &bindings, &[]);
        let [largest, draw] = &self.pipelines;
        pass.set_pipeline(largest);
        pass.dispatch_workgroups(1, 1, 1);
        pass.set_pipeline(draw);
        pass.dispatch_workgroups(map.columns.div_ceil(8), map.rows.div_ceil(8), 1);
        is_new
    }
}

/// The colours of the other examples' pictures, as RGBA.
fn palette() -> [u32; 256] {
    std::array::from_fn(|n| {
        let [r, g, b] = heat((n as f32 / 255.0).powi(2));
        u32::from_le_bytes([r, g, b, 255])
    })
}

fn entry(binding: u32, resource: wgpu::BindingResource<'_>) -> wgpu::BindGroupEntry<'_> {
    wgpu::BindGroupEntry { binding, resource }
}

fn layout(device: &wgpu::Device) -> wgpu::BindGroupLayout {
    let buffer = |ty| wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None };
    let storage = |read_only| buffer(wgpu::BufferBindingType::Storage { read_only });
    let picture = wgpu::BindingType::StorageTexture {
        access: wgpu::StorageTextureAccess::WriteOnly,
        format: wgpu::TextureFormat::Rgba8Unorm,
        view_dimension: wgpu::TextureViewDimension::D2,
    };
    let types =
        [buffer(wgpu::BufferBindingType::Uniform), storage(true), storage(true), storage(false), picture];
    let entries: Vec<_> = (0..)
        .zip(types)
        .map(|(binding, ty)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty,
            count: None,
        })
        .collect();
    device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some("heat"), entries: &entries })
}

/// egui samples textures of this format without a conversion.
fn texture(device: &wgpu::Device, [width, height]: [u32; 2]) -> wgpu::Texture {
    device.create_texture(&wgpu::TextureDescriptor {
        label: Some("heat"),
        size: wgpu::Extent3d { width, height, depth_or_array_layers: 1 },
        mip_level_count: 1,
        sample_count: 1,
        dimension: wgpu::TextureDimension::D2,
        format: wgpu::TextureFormat::Rgba8Unorm,
        usage: wgpu::TextureUsages::STORAGE_BINDING
            | wgpu::TextureUsages::TEXTURE_BINDING
            | wgpu::TextureUsages::COPY_SRC,
        view_formats: &[],
    })
}
