//! The devices that every case runs on, made once.

use std::cell::OnceCell;
use std::sync::Mutex;

use wgpu_attention::Gpu;

/// A device with a name for messages.
#[derive(Debug)]
pub struct Profile {
    pub name: &'static str,
    pub gpu: Gpu,
    pub f16: bool,
}

impl Profile {
    /// Compiled shaders take gigabytes when those of all tests are kept.
    pub fn tidy(&self) {
        if self.gpu.pipelines().compiled() > 60 {
            self.gpu.pipelines().clear();
            let _ = self.gpu.device().poll(wgpu::PollType::Poll);
        }
    }
}

/// Everything the adapter gives that is not experimental.
pub fn full() -> &'static Profile {
    lent(0, || {
        let adapter = adapter();
        let features = adapter.features() - wgpu::Features::all_experimental_mask();
        make("full", &adapter, features, adapter.limits())
    })
}

/// What every WebGPU device has: no features, the default limits.
pub fn defaults() -> &'static Profile {
    lent(1, || make("defaults", &adapter(), wgpu::Features::empty(), wgpu::Limits::default()))
}

/// With matrix units for fragments of 8 × 8 and of 16 × 16, where the adapter has any: lavapipe lists the former and runs
/// both, and crashes in its compiler with either when its subgroups are not 8 wide. On other drivers only what is listed.
pub fn matrices() -> impl Iterator<Item = &'static Profile> {
    let adapter = adapter();
    let listed = adapter.cooperative_matrix_properties();
    let lavapipe = adapter.get_info().name.starts_with("llvmpipe");
    let crashes = lavapipe && adapter.get_info().subgroup_max_size != 8;
    let sides = [(2, "matrix 8", 8), (3, "matrix 16", 16)].into_iter();
    sides.filter(move |(.., side)| !crashes && listed.iter().any(|p| p.m_size == *side || lavapipe)).map(
        |(kind, name, side)| {
            lent(kind, || {
                let adapter = self::adapter();
                let features = adapter.features();
                let wanted = (features - wgpu::Features::all_experimental_mask())
                    | (features & wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
                let made = make(name, &adapter, wanted, adapter.limits());
                let pipelines = wgpu_attention::inspect::with_fragments(made.gpu.device(), side);
                Profile { gpu: Gpu::with_pipelines(made.gpu.queue().clone(), pipelines), ..made }
            })
        },
    )
}

/// Devices that no test uses at the moment, by kind.
static IDLE: [Mutex<Vec<&Profile>>; KINDS] = [const { Mutex::new(Vec::new()) }; KINDS];

const KINDS: usize = 4;

/// A device for as long as a test's thread lives. Tests that run at once have devices of their own: a software
/// driver compiles and computes on one thread per device.
struct Lent {
    kind: usize,
    profile: &'static Profile,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.profile.tidy();
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
            Lent { kind, profile: idle.unwrap_or_else(|| Box::leak(Box::new(make()))) }
        };
        lent[kind].get_or_init(lend).profile
    })
}

pub fn profiles() -> [&'static Profile; 2] {
    [full(), defaults()]
}

fn adapter() -> wgpu::Adapter {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
        .expect("tests need an adapter: run them as `scripts/gpu cargo test --release`")
}

fn make(
    name: &'static str,
    adapter: &wgpu::Adapter,
    required_features: wgpu::Features,
    required_limits: wgpu::Limits,
) -> Profile {
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some(name),
        required_features,
        required_limits,
        // SAFETY: tests may run what may be wrong.
        experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
        ..Default::default()
    }))
    .expect("the adapter gives a device with its own limits and one with the default limits");
    let f16 = device.features().contains(wgpu::Features::SHADER_F16);
    super::say(&format!("device `{name}`: {}, f16: {f16}", adapter.get_info().name));
    Profile { name, gpu: Gpu::with_device(device, queue), f16 }
}
