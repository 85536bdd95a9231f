//! Errors from wgpu's error scopes and panics.

#[cfg(not(target_arch = "wasm32"))]
use crate::device::opengl::lock_opengl;

use crate::tensor::Error;

/// Runs `make`, and returns an error if wgpu reports one or panics.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn guarded<T>(
    device: &wgpu::Device,
    what: &'static str,
    make: impl FnOnce() -> T,
) -> Result<T, Error> {
    let _guard = lock_opengl(device);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make));
    let validation = now(validation.pop());
    let internal = now(internal.pop());
    let memory = now(memory.pop());
    if let Some(error) = memory {
        return Err(Error::OutOfMemory { what, description: error.to_string() });
    }
    if is_lost(device) {
        return Err(Error::DeviceLost(format!("wgpu failed to create {what}")));
    }
    if let Some(error) = validation.or(internal) {
        if is_of_other_device(&error) {
            return Err(Error::OtherDevice { kernel: what, tensor: "a tensor".into() });
        }
        return Err(Error::Refused { what, description: error.to_string() });
    }
    made.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("wgpu panicked");
        Error::Refused { what, description: text.to_string() }
    })
}

/// True if wgpu refused a bind group because another device made one of its buffers.
#[cfg(not(target_arch = "wasm32"))]
fn is_of_other_device(error: &wgpu::Error) -> bool {
    use wgpu::wgc::{binding_model::CreateBindGroupError, device::DeviceError};
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        if let Some(CreateBindGroupError::Device(DeviceError::DeviceMismatch(_))) = error.downcast_ref() {
            return true;
        }
        next = error.source();
    }
    false
}

/// True if the device is lost. On a lost device wgpu creates invalid resources without an error:
/// only the application's callback is called. A buffer without any usage, which wgpu otherwise
/// always refuses, then gives no error either.
#[cfg(not(target_arch = "wasm32"))]
fn is_lost(device: &wgpu::Device) -> bool {
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let _ = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4,
        usage: wgpu::BufferUsages::empty(),
        mapped_at_creation: false,
    });
    now(scope.pop()).is_none()
}

/// Runs `make` without error scopes, because browsers resolve error scopes after this function
/// returns. A [`Watch`] or the application's error handler receives the errors.
#[cfg(target_arch = "wasm32")]
pub(crate) fn guarded<T>(_: &wgpu::Device, _: &'static str, make: impl FnOnce() -> T) -> Result<T, Error> {
    Ok(make())
}

/// Error scopes in a browser, around calls that do not wait. On native targets it does nothing,
/// because [`guarded`] returns the errors.
pub(crate) struct Watch {
    // The fields are dropped in this order: the last pushed scope first.
    #[cfg(target_arch = "wasm32")]
    scopes: [wgpu::ErrorScopeGuard; 3],
}

#[cfg(target_arch = "wasm32")]
impl Watch {
    pub fn begin(device: &wgpu::Device) -> Self {
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        Watch { scopes: [validation, internal, memory] }
    }

    /// Ends the scopes. The future returns the errors that they caught.
    pub fn end(self, what: &'static str) -> impl Future<Output = Result<(), Error>> {
        let [validation, internal, memory] = self.scopes.map(wgpu::ErrorScopeGuard::pop);
        async move {
            if let Some(error) = memory.await {
                return Err(Error::OutOfMemory { what, description: error.to_string() });
            }
            match (validation.await, internal.await) {
                (Some(error), _) | (None, Some(error)) => {
                    Err(Error::Refused { what, description: error.to_string() })
                }
                (None, None) => Ok(()),
            }
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Watch {
    pub fn begin(_: &wgpu::Device) -> Self {
        Watch {}
    }

    pub async fn end(self, _: &'static str) -> Result<(), Error> {
        Ok(())
    }
}

/// The result of a future that is ready at once, such as an error scope on native backends.
#[cfg(not(target_arch = "wasm32"))]
fn now(scope: impl Future<Output = Option<wgpu::Error>>) -> Option<wgpu::Error> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(scope).poll(&mut context) {
        std::task::Poll::Ready(error) => error,
        std::task::Poll::Pending => None,
    }
}
