//! The devices that every case runs on. Each is made once.

use std::cell::OnceCell;
use std::sync::{LazyLock, Mutex};

use wgpu_attention::{Gpu, Pipelines, inspect};

pub use super::profile::Profile;

/// Returns `profile` with a plan for subgroups of `width`, which must be at least the real width.
pub fn believing(profile: &Profile, width: u32) -> &'static Profile {
    let side = if profile.name == "matrix 8" { 8 } else { 16 };
    let pipelines = inspect::with_fragments(profile.gpu.device(), side, Some(width));
    let gpu = Gpu::with_pipelines(profile.gpu.queue().clone(), pipelines);
    Box::leak(Box::new(Profile { name: profile.name, gpu, matrix: true }))
}

/// Returns `profile` with plans for a GPU that has about `count` registers per invocation.
pub fn with_registers(profile: &Profile, count: u32) -> &'static Profile {
    Box::leak(Box::new(planned_for("register count", profile, inspect::with_registers, count)))
}

/// Makes the pipelines of a device, with a plan for a given count of one resource.
type Plan = fn(&wgpu::Device, u32) -> Pipelines;

fn planned_for(name: &'static str, profile: &Profile, plan: Plan, count: u32) -> Profile {
    let pipelines = plan(profile.gpu.device(), count);
    let gpu = Gpu::with_pipelines(profile.gpu.queue().clone(), pipelines);
    Profile { name, gpu, matrix: false }
}

/// Every feature of the adapter that is not experimental.
pub fn full() -> &'static Profile {
    lent(0, || pollster::block_on(Profile::full(&adapter())))
}

/// Like [`full`], with plans for another device. The name chooses a GPU, a GPU with a number of
/// registers, or a driver of 4 or 16 lanes.
pub fn planned_by_name(name: &str) -> Option<&'static Profile> {
    let (kind, name, plan, count): (_, _, Plan, _) = match name {
        "64 registers" => (4, "64 registers", inspect::with_registers, 64),
        "128 registers" => (5, "128 registers", inspect::with_registers, 128),
        "256 registers" => (9, "256 registers", inspect::with_registers, 256),
        "4 lanes" => (6, "4 lanes", inspect::with_lanes, 4),
        "16 lanes" => (7, "16 lanes", inspect::with_lanes, 16),
        "a GPU" => (8, "a GPU", |device, _| inspect::as_gpu(device, None), 0),
        _ => return None,
    };
    Some(lent(kind, || planned_for(name, &pollster::block_on(Profile::full(&adapter())), plan, count)))
}

/// The guaranteed minimum of WebGPU: no features, the default limits.
pub fn defaults() -> &'static Profile {
    lent(1, || pollster::block_on(Profile::defaults(&adapter())))
}

/// The sides of the matrix fragments that the adapter runs: 8, 16, both or none.
pub fn fragments() -> &'static [u32] {
    static SIDES: LazyLock<Vec<u32>> = LazyLock::new(|| inspect::fragments(&adapter()));
    &SIDES
}

/// Devices with matrix units, one for each of [`fragments`].
pub fn matrices() -> impl Iterator<Item = &'static Profile> {
    fragments().iter().map(|side| {
        let (kind, name) = if *side == 8 { (2, "matrix 8") } else { (3, "matrix 16") };
        lent(kind, || {
            let adapter = adapter();
            let others =
                wgpu::Features::all_experimental_mask() - wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
            let features = adapter.features() - others;
            let made = pollster::block_on(Profile::make(name, &adapter, features, adapter.limits()));
            let pipelines = inspect::with_fragments(made.gpu.device(), *side, None);
            let gpu = Gpu::with_pipelines(made.gpu.queue().clone(), pipelines);
            Profile { gpu, matrix: true, ..made }
        })
    })
}

/// Devices that no test uses at the moment, by kind.
static IDLE: [Mutex<Vec<&Profile>>; KINDS] = [const { Mutex::new(Vec::new()) }; KINDS];

const KINDS: usize = 10;

/// A device for the life of a test's thread, with the kernels that earlier tests have compiled. A
/// test that counts kernels clears them first, or makes a separate device. Tests that run in
/// parallel use separate devices: a software driver compiles and computes on one thread per device.
struct Lent {
    kind: usize,
    profile: &'static Profile,
}

impl Drop for Lent {
    fn drop(&mut self) {
        super::listed::write(self.profile.gpu.pipelines());
        IDLE[self.kind].lock().expect("no test panics here").push(self.profile);
    }
}

thread_local! {
    static LENT: [OnceCell<Lent>; KINDS] = const { [const { OnceCell::new() }; KINDS] };
}

fn lent(kind: usize, make: impl FnOnce() -> Profile) -> &'static Profile {
    LENT.with(|lent| {
        let lend = || {
            let idle = IDLE[kind].lock().expect("no test panics here").pop();
            // Not on return of the device, because `tidy` may panic.
            idle.inspect(|profile| profile.tidy());
            Lent { kind, profile: idle.unwrap_or_else(|| Box::leak(Box::new(make()))) }
        };
        lent[kind].get_or_init(lend).profile
    })
}

/// True if the adapter is a software driver.
pub fn is_software() -> bool {
    static SOFTWARE: LazyLock<bool> =
        LazyLock::new(|| adapter().get_info().device_type == wgpu::DeviceType::Cpu);
    *SOFTWARE
}

pub fn profiles() -> [&'static Profile; 2] {
    [full(), defaults()]
}

/// Makes a separate device for the test, without features, with changed default limits.
pub fn device(change: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
    let [gpu] = devices(change);
    gpu
}

/// Like [`device`], for several devices of one instance. Across instances wgpu cannot tell which
/// device a buffer belongs to.
pub fn devices<const N: usize>(change: impl FnOnce(&mut wgpu::Limits)) -> [Gpu; N] {
    devices_with(wgpu::Features::empty(), change)
}

/// Like [`devices`], with features.
pub fn devices_with<const N: usize>(
    required_features: wgpu::Features,
    change: impl FnOnce(&mut wgpu::Limits),
) -> [Gpu; N] {
    let adapter = adapter();
    let mut required_limits = wgpu::Limits::default();
    change(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    [(); N].map(|()| {
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
        Gpu::with_device(device, queue)
    })
}

/// Makes a separate device with exactly these features and limits.
pub fn exact_device(required_features: wgpu::Features, required_limits: wgpu::Limits) -> Gpu {
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter().request_device(&descriptor)).expect("a device");
    Gpu::with_device(device, queue)
}

pub fn adapter() -> wgpu::Adapter {
    super::validation::listen();
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    if super::validation::on() {
        // Without this flag wgpu requests no messages.
        descriptor.flags |= wgpu::InstanceFlags::DEBUG;
    }
    let instance = wgpu::Instance::new(descriptor);
    pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
        .expect("tests need an adapter: run them as `scripts/gpu cargo test --release`")
}
