//! The devices that cases run on in a browser. `prepare` makes them before the cases run.

use std::cell::OnceCell;

pub use crate::harness::profile::Profile;

thread_local! {
    static MADE: OnceCell<[&'static Profile; 2]> = const { OnceCell::new() };
}

/// Makes the devices.
pub async fn prepare() -> Result<(), String> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    // In browsers an adapter gives only one device.
    let options = Default::default();
    let [one, other] = [instance.request_adapter(&options).await, instance.request_adapter(&options).await];
    let (one, other) = (one.map_err(|e| e.to_string())?, other.map_err(|e| e.to_string())?);
    let leak = |profile| -> &'static Profile { Box::leak(Box::new(profile)) };
    let made = [leak(Profile::full(&one).await), leak(Profile::defaults(&other).await)];
    MADE.with(|m| m.set(made)).map_err(|_| "the devices are made once".into())
}

pub fn profiles() -> [&'static Profile; 2] {
    MADE.with(|made| *made.get().expect("the devices are made first"))
}

pub fn full() -> &'static Profile {
    profiles()[0]
}

pub fn defaults() -> &'static Profile {
    profiles()[1]
}

/// WGSL has no matrix units.
pub fn matrices() -> impl Iterator<Item = &'static Profile> {
    std::iter::empty()
}

pub fn is_software() -> bool {
    false
}
