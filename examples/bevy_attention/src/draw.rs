//! Draws the agents from their buffer, in a pass after Bevy's passes of the view.

use std::collections::HashMap;

use bevy::camera::Camera2d;
use bevy::prelude::*;
use bevy::render::renderer::{RenderContext, RenderDevice, ViewQuery};
use bevy::render::view::ViewTarget;
use wgpu_attention::wgpu;

use crate::crowd::GROUPS;
use crate::plugin::RenderCrowd;

/// The shader, and a pipeline for each kind of view.
#[derive(Resource)]
pub struct Drawing {
    module: wgpu::ShaderModule,
    pipelines: HashMap<(wgpu::TextureFormat, u32), (wgpu::RenderPipeline, wgpu::BindGroup)>,
}

impl Drawing {
    pub fn new(device: &wgpu::Device) -> Self {
        let text = format!("const GROUPS = {GROUPS}u;\n{}", include_str!("draw.wgsl"));
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("crowd draw"),
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        Drawing { module, pipelines: HashMap::new() }
    }
}

/// Draws one triangle for each agent into the view's texture.
pub fn draw(
    view: ViewQuery<&ViewTarget, With<Camera2d>>,
    crowd: Res<RenderCrowd>,
    device: Res<RenderDevice>,
    mut drawing: ResMut<Drawing>,
    mut context: RenderContext,
) {
    let target = view.into_inner();
    let samples = target.sampled_main_texture().map_or(1, |texture| texture.sample_count());
    let kind = (target.main_texture_format(), samples);
    let Drawing { module, pipelines } = &mut *drawing;
    let (pipeline, bindings) =
        pipelines.entry(kind).or_insert_with(|| pipeline(device.wgpu_device(), module, kind, crowd.agents()));

    let mut pass = context.command_encoder().begin_render_pass(&wgpu::RenderPassDescriptor {
        label: Some("crowd draw"),
        color_attachments: &[Some(target.get_color_attachment())],
        ..Default::default()
    });
    // The largest square in the middle.
    let [width, height] = [target.main_texture().width() as f32, target.main_texture().height() as f32];
    let side = width.min(height);
    pass.set_viewport((width - side) / 2.0, (height - side) / 2.0, side, side, 0.0, 1.0);
    pass.set_pipeline(pipeline);
    pass.set_bind_group(0, &*bindings, &[]);
    pass.draw(0..3, 0..crowd.count() as u32);
}

fn pipeline(
    device: &wgpu::Device,
    module: &wgpu::ShaderModule,
    (format, samples): (wgpu::TextureFormat, u32),
    agents: &wgpu::Buffer,
) -> (wgpu::RenderPipeline, wgpu::BindGroup) {
    let pipeline = device.create_render_pipeline(&wgpu::RenderPipelineDescriptor {
        label: Some("crowd draw"),
        layout: None,
        vertex: wgpu::VertexState {
            module,
            entry_point: Some("corner"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            buffers: &[],
        },
        primitive: wgpu::PrimitiveState::default(),
        depth_stencil: None,
        multisample: wgpu::MultisampleState { count: samples, ..Default::default() },
        fragment: Some(wgpu::FragmentState {
            module,
            entry_point: Some("fill"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            targets: &[Some(format.into())],
        }),
        multiview_mask: None,
        cache: None,
    });
    let bindings = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("crowd draw"),
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: agents.as_entire_binding() }],
    });
    (pipeline, bindings)
}
