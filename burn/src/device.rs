//! Devices that Burn and the library share.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use burn::tensor::wgpu::{WgpuOptions, WgpuSetup};
use burn_cubecl::CubeDevice;
use wgpu_attention::{Pipelines, Scratch, ScratchSize, wgpu};

use crate::error::{Error, Result};

/// The library's state on a device of Burn.
#[derive(Debug)]
pub(crate) struct Shared {
    pub queue: wgpu::Queue,
    pub pipelines: Pipelines,
    scratch: Mutex<Scratch>,
}

static DEVICES: LazyLock<RwLock<HashMap<CubeDevice, Arc<Shared>>>> = LazyLock::new(RwLock::default);

/// Creates a device of Burn and shares it with the library.
///
/// ```no_run
/// use burn::tensor::Device;
/// let device = wgpu_attention_burn::init(Device::wgpu_options())?;
/// # Ok::<(), wgpu_attention_burn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Init`] if Burn cannot create the device, or if it has created it before.
#[cfg(not(target_family = "wasm"))]
pub fn init(options: WgpuOptions) -> Result<Device> {
    let (device, setup) = options.init_with_setup()?;
    share(&device, &setup)?;
    Ok(device)
}

/// Creates a device of Burn in a browser and shares it with the library.
///
/// # Errors
/// As `init`.
pub async fn init_async(options: WgpuOptions) -> Result<Device> {
    let (device, setup) = options.init_with_setup_async().await?;
    share(&device, &setup)?;
    Ok(device)
}

/// Shares a device of Burn with the library. `setup` must hold the handles of `device`.
///
/// Use it if the application made the wgpu device and registered it with Burn:
///
/// ```no_run
/// use burn::tensor::Device;
/// use burn::tensor::wgpu::WgpuSetup;
/// # fn f(setup: WgpuSetup) -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::wgpu_options().setup(setup.clone()).init()?;
/// wgpu_attention_burn::share(&device, &setup)?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Backend`] if `device` is not a wgpu device.
pub fn share(device: &Device, setup: &WgpuSetup) -> Result<()> {
    let device = cube_device(device)?;
    let pipelines = Pipelines::with_adapter(&setup.device, &setup.adapter);
    let scratch = Mutex::new(Scratch::new(&setup.device, ScratchSize::default())?);
    let shared = Shared { queue: setup.queue.clone(), pipelines, scratch };
    DEVICES.write().unwrap_or_else(PoisonError::into_inner).insert(device, Arc::new(shared));
    Ok(())
}

/// Returns the pipelines of a shared device, to check, tune or compile kernels in advance.
///
/// # Errors
/// [`Error::UnknownDevice`] if the device is not shared.
pub fn pipelines(device: &Device) -> Result<Pipelines> {
    Ok(shared("device", &cube_device(device)?)?.pipelines.clone())
}

/// Returns the device of Burn's wgpu runtime.
pub(crate) fn cube_device(device: &Device) -> Result<CubeDevice> {
    let inner = device.clone().inner();
    match inner.as_dispatch() {
        DispatchDevice::Cube(device @ CubeDevice::Wgpu(_)) => Ok(device.clone()),
        other => Err(Error::Backend { tensor: "device", found: format!("{other:?}") }),
    }
}

/// Returns the state of the device of `tensor`.
pub(crate) fn shared(tensor: &'static str, device: &CubeDevice) -> Result<Arc<Shared>> {
    let found = DEVICES.read().unwrap_or_else(PoisonError::into_inner).get(device).cloned();
    found.ok_or_else(|| Error::UnknownDevice { tensor, device: format!("{device:?}") })
}

impl Shared {
    /// Records into an encoder with temporary memory of `size`, and submits.
    pub fn submit(
        &self,
        size: ScratchSize,
        record: impl FnOnce(
            &mut wgpu::CommandEncoder,
            &mut Scratch,
        ) -> std::result::Result<(), wgpu_attention::Error>,
    ) -> Result<()> {
        let device = self.pipelines.device();
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        scratch.ensure(device, size)?;
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        record(&mut encoder, &mut scratch)?;
        self.queue.submit([encoder.finish()]);
        Ok(())
    }
}
