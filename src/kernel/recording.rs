//! Records dispatches into the caller's pass. Every step that can fail happens before the first
//! dispatch is recorded.

use super::guard::guarded;
use super::{
    BindingCache, BindingKey, BoundDispatch, Dispatch, PipelineKey, Pipelines, Requirements, Sharing,
};
use crate::tensor::Error;

#[cfg(feature = "inspect")]
thread_local! {
    /// Labels and grids of the dispatches that this thread has bound, while [`log`] runs.
    static BOUND: std::cell::RefCell<Option<Vec<Bound>>> = const { std::cell::RefCell::new(None) };
    /// The compute passes that this thread has opened in encoders.
    static PASSES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The label of a dispatch, and its workgroups along each axis.
#[cfg(feature = "inspect")]
pub(crate) type Bound = (&'static str, [u32; 3]);

/// Runs `work`. Returns its result and the dispatches that it bound on this thread.
#[cfg(feature = "inspect")]
pub(crate) fn log<T>(work: impl FnOnce() -> T) -> (T, Vec<Bound>) {
    BOUND.set(Some(Vec::new()));
    let result = work();
    (result, BOUND.take().unwrap_or_default())
}

/// Returns the number of compute passes that this thread has opened in encoders so far.
#[cfg(feature = "inspect")]
pub(crate) fn passes() -> usize {
    PASSES.get()
}

/// The largest number of parts of a grid. Within WebGPU's limits that many parts have more than
/// 2^32 workgroups.
const MOST_PARTS: u64 = 1 << 16;

/// A part of a grid that exceeds the device's limits: its first workgroup, and its workgroups along
/// each axis.
struct Part {
    first: [u32; 3],
    grid: [u32; 3],
}

/// Splits `grid` into parts of at most `most` workgroups along each axis.
///
/// # Errors
/// [`Error::Limit`] for more than [`MOST_PARTS`] parts.
fn parts(grid: [u32; 3], most: u32) -> Result<Vec<Part>, Error> {
    let most = most.max(1);
    let count = grid.map(|n| u64::from(n.div_ceil(most)));
    if count.into_iter().fold(1, u64::saturating_mul) > MOST_PARTS {
        return Err(Error::Limit {
            what: "workgroups along an axis",
            needed: grid.into_iter().max().unwrap_or(0).into(),
            limit: most.into(),
            name: "max_compute_workgroups_per_dimension",
        });
    }
    let along = |axis: usize| {
        (0..grid[axis]).step_by(most as usize).map(move |first| (first, most.min(grid[axis] - first)))
    };
    let mut all = Vec::new();
    for z in along(2) {
        for y in along(1) {
            all.extend(along(0).map(|x| {
                let axes = [x, y, z];
                Part { first: axes.map(|(first, _)| first), grid: axes.map(|(_, count)| count) }
            }));
        }
    }
    Ok(all)
}

impl Pipelines {
    /// Compiles and binds every dispatch, in order. Grids that exceed the device's limits are split
    /// into parts. Dispatches that `bindings` already contains are not bound again.
    pub(crate) fn bind(
        &self,
        label: &'static str,
        dispatches: &[Dispatch],
        bindings: &BindingCache,
    ) -> Result<Prepared, Error> {
        bindings.check_device(self.device())?;
        self.refuse_disabled(dispatches)?;
        let call = bindings.begin();
        let bound = self.bind_all(dispatches, bindings, call);
        bindings.end(call, self.device());
        Ok(Prepared { label, dispatches: bound? })
    }

    fn bind_all(
        &self,
        dispatches: &[Dispatch],
        bindings: &BindingCache,
        call: u64,
    ) -> Result<Vec<(BoundDispatch, [u32; 3])>, Error> {
        let most = self.max_workgroups();
        let mut bound = Vec::with_capacity(dispatches.len());
        let mut later = dispatches;
        while let [dispatch, rest @ ..] = later {
            later = rest;
            #[cfg(feature = "inspect")]
            BOUND.with_borrow_mut(|log| {
                log.as_mut().into_iter().for_each(|log| log.push((dispatch.variant.label(), dispatch.grid)));
            });
            if dispatch.grid.iter().all(|n| *n <= most) {
                bound.push((self.bind_one(dispatch, later, None, bindings, call)?, dispatch.grid));
                continue;
            }
            for Part { first, grid } in parts(dispatch.grid, most)? {
                bound.push((self.bind_one(dispatch, later, Some(first), bindings, call)?, grid));
            }
        }
        Ok(bound)
    }

    /// The pipeline of a dispatch. `is_part` is true for a part of its grid.
    fn key_of(&self, call: &Dispatch, is_part: bool) -> Result<PipelineKey, Error> {
        let sharing = Sharing::of(&call.tensors, &call.variant, self)?;
        Ok(PipelineKey { variant: call.variant.clone(), is_part, sharing })
    }

    /// Compiles `first`, and the missing pipelines of `dispatches`.
    fn compile_ahead(&self, first: &PipelineKey, dispatches: &[Dispatch]) {
        let most = self.max_workgroups();
        let mut missing = vec![first.clone()];
        for call in dispatches {
            let is_part = call.grid.iter().any(|n| *n > most);
            if let Ok(key) = self.key_of(call, is_part)
                && !missing.contains(&key)
                && !self.has(&key)
            {
                missing.push(key);
            }
        }
        self.compile_together(missing);
    }

    /// Binds a dispatch. If its pipeline is missing, it also compiles those of `later` dispatches.
    fn bind_one(
        &self,
        call: &Dispatch,
        later: &[Dispatch],
        first: Option<[u32; 3]>,
        bindings: &BindingCache,
        number: u64,
    ) -> Result<BoundDispatch, Error> {
        let tensors = call.tensors.iter().map(|w| (w.buffer.clone(), w.start, w.size)).collect();
        let key = BindingKey { variant: call.variant.clone(), params: call.params.clone(), tensors, first };
        if let Some(bound) = bindings.get(&key, number) {
            return Ok(bound);
        }
        let pipeline = self.key_of(call, first.is_some())?;
        let sharing = pipeline.sharing.clone();
        if !later.is_empty() && !self.has(&pipeline) {
            self.compile_ahead(&pipeline, later);
        }
        let compiled = self.get(pipeline)?;
        let device = self.device();
        let windows = sharing.bound(&call.tensors);
        let bind_group = guarded(device, "a tensor's buffer", || {
            let (params, rest) = key.params.split_at(compiled.params_bytes.min(key.params.len()));
            let params = uniform(device, params);
            let rest = (!rest.is_empty()).then(|| uniform(device, rest));
            let first = first.map(|[x, y, z]| uniform(device, bytemuck::cast_slice(&[x, y, z, 0])));
            let shifts = sharing.shifts(&call.tensors, &call.variant, self);
            let shifts = (!shifts.is_empty()).then(|| uniform(device, bytemuck::cast_slice(&shifts)));
            let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: params.as_entire_binding() }];
            for (n, window) in &windows {
                let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: window.buffer,
                    offset: window.start,
                    size: wgpu::BufferSize::new(window.size),
                });
                entries.push(wgpu::BindGroupEntry { binding: *n as u32 + 1, resource });
            }
            for (n, rest) in [&rest, &shifts, &first].into_iter().flatten().enumerate() {
                let binding = (call.tensors.len() + 1 + n) as u32;
                entries.push(wgpu::BindGroupEntry { binding, resource: rest.as_entire_binding() });
            }
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(call.variant.label()),
                layout: &compiled.layout,
                entries: &entries,
            })
        });
        let bind_group = bind_group.map_err(|error| self.named(error, call))?;
        let alignment = device.limits().min_storage_buffer_offset_alignment;
        let requirements = compiled.requirements.with_windows(key.params.len(), &windows, alignment).into();
        let bound = BoundDispatch { pipeline: compiled.pipeline, bind_group, requirements };
        bindings.keep(key, bound.clone(), number);
        Ok(bound)
    }
}

impl Pipelines {
    /// Adds the names of the kernel and the tensor to the error of a buffer of another device.
    fn named(&self, error: Error, call: &Dispatch) -> Error {
        let Error::OtherDevice { .. } = error else { return error };
        let bindings = self.bindings_of(&call.variant);
        let mut named = bindings.iter().zip(&call.tensors);
        match named.find(|(_, window)| is_of_other_device(self.device(), window.buffer)) {
            Some((binding, _)) => {
                Error::OtherDevice { kernel: call.variant.label(), tensor: binding.name.clone() }
            }
            None => error,
        }
    }
}

/// True if `device` cannot bind `buffer`, because another device made it. wgpu has no direct
/// question for this.
fn is_of_other_device(device: &wgpu::Device, buffer: &wgpu::Buffer) -> bool {
    let bound = guarded(device, "a tensor's buffer", || {
        let ty = wgpu::BufferBindingType::Storage { read_only: true };
        let entry = wgpu::BindGroupLayoutEntry {
            binding: 0,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        };
        let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &[entry] };
        let layout = device.create_bind_group_layout(&descriptor);
        let resource = wgpu::BufferBinding { buffer, offset: 0, size: wgpu::BufferSize::new(4) };
        let entry = wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(resource) };
        device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &layout,
            entries: &[entry],
        })
    });
    matches!(bound, Err(Error::OtherDevice { .. }))
}

/// Creates a uniform. It is never rewritten, so later calls do not change the parameters of a
/// recorded call.
fn uniform(device: &wgpu::Device, bytes: &[u8]) -> wgpu::Buffer {
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("attention.params"),
        size: bytes.len() as u64,
        usage: wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: true,
    });
    if let Ok(mut mapped) = buffer.slice(..).get_mapped_range_mut() {
        mapped.slice(..).copy_from_slice(bytes);
    }
    buffer.unmap();
    buffer
}

/// A call that is checked, compiled and bound. It can be recorded any number of times, and
/// recording it creates nothing.
///
/// Some drivers compile only at the first submission: see [`Pipelines`].
///
/// It holds the buffers of the tensors and the parameters of its call. Later changes of a
/// [`Cache`](crate::Cache), in lengths that the host knows, do not change it.
#[derive(Clone, Debug)]
pub struct Prepared {
    label: &'static str,
    dispatches: Vec<(BoundDispatch, [u32; 3])>,
}

impl Prepared {
    /// Records the call. It submits, copies and reads back nothing.
    pub fn record(&self, into: &mut impl Recorder) {
        into.record(self);
    }

    /// Returns the features, limits and buffer usages that the call needs. A call that a browser
    /// or another device will run may need others there.
    ///
    /// ```no_run
    /// # use wgpu_attention::{Attention, Error, Forward, Scratch};
    /// # fn f(attention: &Attention, call: &Forward, scratch: &mut Scratch) -> Result<(), Error> {
    /// let needs = attention.prepare(call, scratch)?.requirements();
    /// println!("{:?}, {:?}", needs.features, needs.usages);
    /// println!("{} storage buffers", needs.limits.max_storage_buffers_per_shader_stage);
    /// # Ok(()) }
    /// ```
    pub fn requirements(&self) -> Requirements {
        self.dispatches
            .iter()
            .fold(Requirements::none(), |all, (bound, grid)| all.and(&bound.requirements).with_grid(*grid))
    }

    /// A call without dispatches.
    pub(crate) fn empty(label: &'static str) -> Self {
        Prepared { label, dispatches: Vec::new() }
    }

    /// Appends the dispatches of another call.
    pub(crate) fn then(mut self, other: Prepared) -> Self {
        if self.dispatches.is_empty() {
            return other;
        }
        self.dispatches.extend(other.dispatches);
        self
    }

    /// Records the call into `pass`.
    fn record_in(&self, pass: &mut wgpu::ComputePass) {
        for (step, [x, y, z]) in &self.dispatches {
            pass.set_pipeline(&step.pipeline);
            pass.set_bind_group(0, &step.bind_group, &[]);
            pass.dispatch_workgroups(*x, *y, *z);
        }
    }
}

/// The target of a recording: a [`wgpu::CommandEncoder`] or a [`wgpu::ComputePass`]. In an encoder,
/// each call has a separate compute pass. In a pass, calls replace the pipeline and bind group 0.
/// [`WarmUp`] around one of them compiles without computing.
pub trait Recorder: sealed::Recorder {}

mod sealed {
    pub trait Recorder {
        fn record(&mut self, call: &super::Prepared);
    }
}

impl Recorder for wgpu::CommandEncoder {}

impl sealed::Recorder for wgpu::CommandEncoder {
    fn record(&mut self, call: &Prepared) {
        if call.dispatches.is_empty() {
            return;
        }
        #[cfg(feature = "inspect")]
        PASSES.set(PASSES.get() + 1);
        let label = Some(call.label);
        call.record_in(
            &mut self.begin_compute_pass(&wgpu::ComputePassDescriptor { label, timestamp_writes: None }),
        );
    }
}

impl Recorder for wgpu::ComputePass<'_> {}

impl sealed::Recorder for wgpu::ComputePass<'_> {
    fn record(&mut self, call: &Prepared) {
        call.record_in(self);
    }
}

/// Records calls with no workgroups: they read and write no tensor. Some drivers compile a kernel
/// when it is first submitted, such as Mesa's lavapipe. They compile it when this recording is
/// submitted. Submit it when a delay does no harm, for example while weights are loaded.
///
/// The host does the same as in a real recording. A [`Cache`](crate::Cache) whose `advance` was
/// recorded counts new tokens that the device does not have: use a temporary cache.
///
/// ```no_run
/// # use wgpu_attention::{Attention, Error, Forward, Gpu, Scratch, WarmUp};
/// # fn f(gpu: &Gpu, attention: &Attention, call: &Forward, scratch: &mut Scratch) -> Result<(), Error> {
/// gpu.submit(|encoder| attention.forward(&mut WarmUp(encoder), call, scratch))
/// # }
/// ```
#[derive(Debug)]
pub struct WarmUp<'a, R: Recorder>(pub &'a mut R);

impl<R: Recorder> Recorder for WarmUp<'_, R> {}

impl<R: Recorder> sealed::Recorder for WarmUp<'_, R> {
    fn record(&mut self, call: &Prepared) {
        let mut dispatches: Vec<(BoundDispatch, [u32; 3])> = Vec::new();
        for (bound, _) in &call.dispatches {
            if dispatches.iter().all(|(known, _)| known.pipeline != bound.pipeline) {
                dispatches.push((bound.clone(), [0; 3]));
            }
        }
        self.0.record(&Prepared { label: call.label, dispatches });
    }
}
