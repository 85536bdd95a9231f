//! The features, limits and buffer usages that calls need.

use super::{ENABLE_F16, ENABLE_MATRIX, Kernel};
use crate::tensor::{TensorView, Window};

/// Texts that need a feature of the device, and the feature.
const FEATURES: [(&str, wgpu::Features); 4] = [
    (ENABLE_F16, wgpu::Features::SHADER_F16),
    (ENABLE_MATRIX, wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
    ("@builtin(subgroup_", wgpu::Features::SUBGROUP),
    ("subgroupShuffleXor(", wgpu::Features::SUBGROUP),
];

/// The features, limits and buffer usages that a call needs. [`Prepared::requirements`] returns
/// them.
///
/// A device with exactly these features and limits runs the call's kernels, with buffers of exactly
/// these usages. All values come from the kernels that the call has bound. On another device, plans
/// may choose other kernels, which need less or more.
/// [`Config::required`](crate::Config::required) lists the values to request for fast and long
/// calls before a device exists.
///
/// [`Prepared::requirements`]: crate::Prepared::requirements
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Requirements {
    /// The usages of each buffer of a tensor: [`TensorView::USAGES`].
    pub usages: wgpu::BufferUsages,
    /// The features that the kernels use.
    pub features: wgpu::Features,
    /// The limits of compute passes and buffers that the call reaches. All other limits are
    /// `Limits::downlevel_webgl2_defaults`. Add the limits of your application with
    /// `Limits::or_better_values_from`.
    pub limits: wgpu::Limits,
}

impl Requirements {
    /// The requirements of a call without dispatches.
    pub(super) fn none() -> Self {
        let limits = wgpu::Limits {
            max_buffer_size: 0,
            max_uniform_buffer_binding_size: 0,
            max_uniform_buffers_per_shader_stage: 0,
            max_bind_groups: 0,
            max_bindings_per_bind_group: 0,
            // The largest value that WebGPU allows. Bindings lower it.
            min_storage_buffer_offset_alignment: 256,
            ..wgpu::Limits::downlevel_webgl2_defaults()
        };
        Requirements { usages: TensorView::USAGES, features: wgpu::Features::empty(), limits }
    }

    /// The requirements of a pipeline.
    pub(super) fn of_kernel(kernel: &Kernel) -> Self {
        let mut all = Self::none();
        let used = FEATURES.iter().filter(|(text, _)| kernel.wgsl.contains(text));
        all.features = used.fold(all.features, |features, (_, feature)| features | *feature);
        let [invocations, memory, buffers] = kernel.limits().map(|(_, needed, _)| needed);
        let uniforms = kernel.bindings.iter().filter(|binding| binding.uniform.is_some()).count() as u32 + 1;
        let limits = &mut all.limits;
        limits.max_compute_invocations_per_workgroup = invocations;
        limits.max_compute_workgroup_size_x = invocations;
        (limits.max_compute_workgroup_size_y, limits.max_compute_workgroup_size_z) = (1, 1);
        limits.max_compute_workgroup_storage_size = memory;
        limits.max_storage_buffers_per_shader_stage = buffers;
        limits.max_uniform_buffers_per_shader_stage = uniforms;
        limits.max_bind_groups = 1;
        // wgpu counts the highest number of a binding.
        limits.max_bindings_per_bind_group = kernel.bindings.len() as u32 + 1;
        all
    }

    /// Adds the bindings of a dispatch. Their offsets are multiples of `alignment`.
    pub(super) fn with_windows(mut self, params: usize, windows: &[(usize, Window)], alignment: u32) -> Self {
        let limits = &mut self.limits;
        limits.max_uniform_buffer_binding_size = limits.max_uniform_buffer_binding_size.max(params as u64);
        limits.max_buffer_size = limits.max_buffer_size.max(params as u64);
        limits.min_storage_buffer_offset_alignment = alignment;
        for (_, window) in windows {
            limits.max_buffer_size = limits.max_buffer_size.max(window.buffer.size());
            limits.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size.max(window.size);
        }
        self
    }

    /// Adds the grid of a dispatch.
    pub(super) fn with_grid(mut self, grid: [u32; 3]) -> Self {
        let most = &mut self.limits.max_compute_workgroups_per_dimension;
        *most = grid.into_iter().fold(*most, u32::max);
        self
    }

    /// The requirements of both calls.
    pub fn and(self, other: &Self) -> Self {
        Requirements {
            usages: self.usages | other.usages,
            features: self.features | other.features,
            limits: self.limits.or_better_values_from(&other.limits),
        }
    }
}
