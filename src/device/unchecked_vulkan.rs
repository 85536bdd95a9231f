//! A Vulkan device without robust access to buffers, to measure what robust access costs.
//!
//! wgpu enables `robustBufferAccess` and `robustBufferAccess2` on each Vulkan device that has them.
//! The driver then checks each load and each store against its binding.
//! [`ShaderRuntimeChecks::unchecked`](wgpu::ShaderRuntimeChecks::unchecked) removes only the checks
//! that naga writes into a shader. [`request_device`] makes a device without the driver's checks.
//!
//! Nothing else in this crate uses the module. It exists on Windows, Linux, Android and FreeBSD.
//!
//! # Who checks an access to a buffer
//!
//! A trusted shader comes from `create_shader_module_trusted` with `unchecked()`, as all kernels of
//! this crate do. An ordinary shader comes from `create_shader_module`. wgpu-hal asks naga to check
//! buffers if the adapter lacks `robustBufferAccess2`. It does not look at the device. In the
//! table, "has 2" is an adapter with that feature:
//!
//! | device | adapter | ordinary shader | trusted shader |
//! |---|---|---|---|
//! | wgpu's | has 2 | the driver, by binding | the driver, by binding |
//! | wgpu's | lacks 2 | naga, by binding | the driver, by buffer |
//! | this module's | has 2 | **nobody** | **nobody** |
//! | this module's | lacks 2 | naga, by binding | **nobody** |
//!
//! "By buffer" means that a load may return any data of the bound buffer. A driver that checks by
//! binding returns zeros, and ignores stores. naga clamps an index (`BoundsCheckPolicy::Restrict`).
//! On every device, naga checks the other indices of ordinary shaders. These are indices of
//! vectors, of workgroup memory, and of arrays in registers. A load without any check needs both a
//! device of this module and a trusted shader.
//!
//! wgpu-hal's `open_with_callback` is not enough. Its callback can drop `robustBufferAccess2`, but
//! wgpu-hal sets `robustBufferAccess` after it. With that feature alone, NVK (Mesa's driver for
//! NVIDIA) compiles the same checks. So this module calls `vkCreateDevice`.
//!
//! # Example
//!
//! ```no_run
//! use wgpu_attention::{Pipelines, unchecked_vulkan, wgpu};
//!
//! # fn f(adapter: &wgpu::Adapter) -> Result<Pipelines, unchecked_vulkan::RequestError> {
//! let descriptor = wgpu::DeviceDescriptor::default();
//! // SAFETY: the program runs only kernels of this crate on the device.
//! let (device, _queue) = unsafe { unchecked_vulkan::request_device(adapter, &descriptor) }?;
//! # Ok(Pipelines::new(&device)) }
//! ```

use ash::{ext, vk};
use wgpu::hal::api::Vulkan;

/// The reason why there is no device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The adapter belongs to another backend.
    #[error(
        "the adapter's backend is {0}, but only a Vulkan device can be made without robust access; \
         request an adapter from an instance with `Backends::VULKAN`"
    )]
    NotVulkan(wgpu::Backend),
    /// wgpu refuses the descriptor for this adapter.
    #[error(transparent)]
    Refused(#[from] wgpu::RequestDeviceError),
    /// The driver made no device.
    #[error("the driver made no device without robust access: {0}")]
    Driver(String),
}

/// Makes a device and its queue as `Adapter::request_device` does, but without
/// `robustBufferAccess`, `robustBufferAccess2` and `robustImageAccess2`.
///
/// `robustImageAccess` stays as wgpu has it. wgpu first makes its own device from the descriptor,
/// which is dropped. So every descriptor that wgpu refuses is an error here too.
///
/// # Errors
///
/// See [`RequestError`].
///
/// # Safety
///
/// WebGPU's guarantee ends for the whole device. These promises concern every shader on it, also
/// those of the application and of other libraries:
///
/// * A shader reads and writes storage and uniform buffers only inside its bindings, for all data
///   that it may get. See [the table](self#who-checks-an-access-to-a-buffer) for ordinary shaders.
///   The kernels of this crate promise this on every device, also with functions of a caller.
/// * Each index of an index buffer names a vertex inside the vertex buffers of its draw. Nothing
///   in wgpu checks the values of indices.
/// * The device runs no shaders of people who are not trusted, such as those of a web page.
///
/// A broken promise is undefined behaviour. A load may return another buffer's data, which may
/// belong to another part of the process. A store may corrupt it. The driver may lose the device.
/// No message tells what happened.
///
/// The function also departs from wgpu-hal's contract. `Adapter::device_from_raw` expects every
/// feature of `physical_device_features`, and this device lacks the three above. Version 30.0.1 of
/// wgpu-hal reads none of them from a device. Read its source again before you use another version.
pub unsafe fn request_device(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Result<(wgpu::Device, wgpu::Queue), RequestError> {
    let backend = adapter.get_info().backend;
    if backend != wgpu::Backend::Vulkan {
        return Err(RequestError::NotVulkan(backend));
    }
    // `create_device_from_hal` checks neither features nor limits.
    drop(pollster::block_on(adapter.request_device(descriptor))?);
    // SAFETY: the caller guarantees what the device does not enforce.
    let opened = unsafe { open(adapter, descriptor) }?;
    // SAFETY: the device was made from this adapter, with the descriptor's features.
    Ok(unsafe { adapter.create_device_from_hal(opened, descriptor) }?)
}

/// # Safety
/// As for [`request_device`]. The adapter supports the descriptor's features and limits.
unsafe fn open(
    adapter: &wgpu::Adapter,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Result<wgpu::hal::OpenDevice<Vulkan>, RequestError> {
    let refused = |error: &dyn std::fmt::Display| RequestError::Driver(error.to_string());
    let features = descriptor.required_features;
    // SAFETY: nothing here destroys the adapter.
    let hal = unsafe { adapter.as_hal::<Vulkan>() };
    let hal = hal.ok_or(RequestError::NotVulkan(adapter.get_info().backend))?;
    let extensions = hal.required_device_extensions(features);
    // The extension stays enabled, as wgpu-hal expects. A feature that is not listed is off.
    let listed: Vec<_> = extensions.iter().copied().filter(|name| *name != ext::robustness2::NAME).collect();
    let mut chain = hal.physical_device_features(&listed, features);
    let core = chain.get_core().robust_buffer_access(false);
    let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
    // wgpu-hal uses the first queue of the first family.
    let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(0).queue_priorities(&[1.0])];
    let info = vk::DeviceCreateInfo::default().queue_create_infos(&queues).enabled_extension_names(&names);
    let info = chain.add_to_device_create(info).enabled_features(&core);
    let instance = hal.shared_instance().raw_instance();
    // SAFETY: the device supports what wgpu-hal enables on it, and this enables less.
    let raw = unsafe { instance.create_device(hal.raw_physical_device(), &info, None) };
    let raw = raw.map_err(|error| refused(&error))?;
    let (limits, hints) = (&descriptor.required_limits, &descriptor.memory_hints);
    // SAFETY: the device was made from this adapter, with this queue and these extensions. The
    // caller guarantees what the missing features would enforce.
    unsafe { hal.device_from_raw(raw, None, &extensions, features, limits, hints, 0, 0) }
        .map_err(|error| refused(&error))
}
