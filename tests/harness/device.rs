//! The devices that every case runs on, made once.

use std::cell::OnceCell;
use std::sync::{LazyLock, Mutex};

use wgpu_attention::{Gpu, Pipelines, inspect};

pub use super::profile::Profile;

/// `profile` with a plan that believes in subgroups of `width`, which must not be less than they
/// have.
pub fn believing(profile: &Profile, width: u32) -> &'static Profile {
    let side = if profile.name == "matrix 8" { 8 } else { 16 };
    let pipelines = inspect::with_fragments(profile.gpu.device(), side, Some(width));
    let gpu = Gpu::with_pipelines(profile.gpu.queue().clone(), pipelines);
    Box::leak(Box::new(Profile { name: profile.name, gpu, matrix: true }))
}

/// `profile` with plans for a GPU that has about so many registers for an invocation.
pub fn with_registers(profile: &Profile, count: u32) -> &'static Profile {
    Box::leak(Box::new(planned_for("few registers", profile, inspect::with_registers, count)))
}

/// Makes pipelines of a device that is planned for as if it had so many of something.
type Plan = fn(&wgpu::Device, u32) -> Pipelines;

fn planned_for(name: &'static str, profile: &Profile, plan: Plan, count: u32) -> Profile {
    let pipelines = plan(profile.gpu.device(), count);
    let gpu = Gpu::with_pipelines(profile.gpu.queue().clone(), pipelines);
    Profile { name, gpu, matrix: false }
}

/// Everything the adapter gives that is not experimental.
pub fn full() -> &'static Profile {
    lent(0, || pollster::block_on(Profile::full(&adapter())))
}

/// As [`full`], with plans for a GPU that has 64 or 128 registers for an invocation, or for a
/// software driver of 4 or 16
/// lanes: by its name, which says so.
pub fn planned_by_name(name: &str) -> Option<&'static Profile> {
    let (kind, name, plan, count): (_, _, Plan, _) = match name {
        "64 registers" => (4, "64 registers", inspect::with_registers, 64),
        "128 registers" => (5, "128 registers", inspect::with_registers, 128),
        "4 lanes" => (6, "4 lanes", inspect::with_lanes, 4),
        "16 lanes" => (7, "16 lanes", inspect::with_lanes, 16),
        _ => return None,
    };
    Some(lent(kind, || planned_for(name, &pollster::block_on(Profile::full(&adapter())), plan, count)))
}

/// What every WebGPU device has: no features, the default limits.
pub fn defaults() -> &'static Profile {
    lent(1, || pollster::block_on(Profile::defaults(&adapter())))
}

/// The sides of the fragments that the adapter runs: 8, 16, both or none.
pub fn fragments() -> &'static [u32] {
    static SIDES: LazyLock<Vec<u32>> = LazyLock::new(|| inspect::fragments(&adapter()));
    &SIDES
}

/// With matrix units for each of [`fragments`].
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

const KINDS: usize = 8;

/// A device for as long as a test's thread lives, with the kernels that earlier tests have
/// compiled: who counts them clears them first, or has a device of its own. Tests that run at once
/// have devices of their own: a software driver compiles and computes on one thread per device.
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
            // Not when given back: it may panic.
            idle.inspect(|profile| profile.tidy());
            Lent { kind, profile: idle.unwrap_or_else(|| Box::leak(Box::new(make()))) }
        };
        lent[kind].get_or_init(lend).profile
    })
}

/// Whether the adapter is a program.
pub fn is_software() -> bool {
    static SOFTWARE: LazyLock<bool> =
        LazyLock::new(|| adapter().get_info().device_type == wgpu::DeviceType::Cpu);
    *SOFTWARE
}

pub fn profiles() -> [&'static Profile; 2] {
    [full(), defaults()]
}

/// A device of the test's own, without features: the default limits, changed.
pub fn device(change: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
    let [gpu] = devices(change);
    gpu
}

/// As [`device`], several of one instance: across instances wgpu cannot tell whose a buffer is.
pub fn devices<const N: usize>(change: impl FnOnce(&mut wgpu::Limits)) -> [Gpu; N] {
    devices_with(wgpu::Features::empty(), change)
}

/// As [`devices`], with features.
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

fn adapter() -> wgpu::Adapter {
    super::validation::listen();
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    if super::validation::on() {
        // Without it wgpu does not ask for messages.
        descriptor.flags |= wgpu::InstanceFlags::DEBUG;
    }
    let instance = wgpu::Instance::new(descriptor);
    pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
        .expect("tests need an adapter: run them as `scripts/gpu cargo test --release`")
}
