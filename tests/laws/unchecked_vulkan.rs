//! A Vulkan device without robust access gives the same results, and everything else is refused.

#![cfg(any(windows, target_os = "linux"))]

use wgpu_attention::tuning::Algorithm;
use wgpu_attention::unchecked_vulkan::{RequestError, request_device};
use wgpu_attention::{DType, Gpu, Shape};

use crate::harness::device::adapter;
use crate::harness::{Case, FORMS, Layout, Profile, Report, Rules, Setup, say};

/// Requests a device without robust access, with these features and limits.
fn request(
    adapter: &wgpu::Adapter,
    required_features: wgpu::Features,
    required_limits: wgpu::Limits,
) -> Result<Gpu, RequestError> {
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    // SAFETY: only kernels of the crate run on the device.
    let (device, queue) = unsafe { request_device(adapter, &descriptor) }?;
    Ok(Gpu::with_device(device, queue))
}

/// Returns the adapter, unless it belongs to another backend.
fn vulkan(test: &str) -> Option<wgpu::Adapter> {
    let adapter = adapter();
    let backend = adapter.get_info().backend;
    if backend != wgpu::Backend::Vulkan {
        say(&format!("unchecked_vulkan, {test}: skipped, the backend is {backend}"));
        return None;
    }
    Some(adapter)
}

#[test]
fn results_match_without_robust_access() {
    let Some(adapter) = vulkan("results") else { return };
    let features = adapter.features() - wgpu::Features::all_experimental_mask();
    let mut report = Report::new("unchecked_vulkan");
    for (name, features, limits) in [
        ("unchecked", features, adapter.limits()),
        ("unchecked defaults", wgpu::Features::empty(), wgpu::Limits::default()),
    ] {
        let gpu = request(&adapter, features, limits).expect("a device");
        let profile: &Profile = Box::leak(Box::new(Profile { name, gpu, matrix: false }));
        // Neither lengths nor channels fill tiles or vectors.
        let shape = Shape { kv_heads: 2, kv_len: 37, value_dim: 7, ..Shape::new(2, 4, 35, 9) };
        let rules = Rules { causal: true, ..Default::default() };
        for (q_len, rules) in [(35, rules), (1, Rules::default())] {
            let case = Case::random(format!("{name}, {q_len} queries"), Shape { q_len, ..shape });
            let case = case.with(|case| case.rules = rules);
            for form in FORMS {
                let dense = Setup::plain(profile, form, Algorithm::Fused);
                let window = Setup { dtype: DType::F16, layout: Layout::Window(7), ..dense };
                for setup in [dense, window, Setup { path: Algorithm::Staged, ..dense }] {
                    report.check_in(&case, &setup, &mut Default::default());
                }
            }
        }
    }
    report.finish();
}

/// An adapter of OpenGL is one if the suite runs on Mesa's OpenGL.
#[test]
fn other_backends_are_refused() {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let others: Vec<_> =
        adapters.iter().filter(|adapter| adapter.get_info().backend != wgpu::Backend::Vulkan).collect();
    for other in &others {
        let backend = other.get_info().backend;
        let error = request(other, wgpu::Features::empty(), wgpu::Limits::downlevel_defaults()).err();
        assert!(matches!(error, Some(RequestError::NotVulkan(named)) if named == backend), "{error:?}");
        let text = error.expect("an error").to_string();
        assert!(text.contains(backend.to_str()) && text.contains("Backends::VULKAN"), "{text}");
    }
    if others.is_empty() {
        say("unchecked_vulkan, other backends: skipped, every adapter is of Vulkan");
    }
}

#[test]
fn refused_descriptors_are_errors() {
    let Some(adapter) = vulkan("refused descriptors") else { return };
    let limits = wgpu::Limits { max_bind_groups: u32::MAX, ..wgpu::Limits::default() };
    let missing = wgpu::Features::all() - adapter.features() - wgpu::Features::all_experimental_mask();
    let experimental = adapter.features() & wgpu::Features::all_experimental_mask();
    for (features, limits) in [
        (wgpu::Features::empty(), limits),
        (missing, wgpu::Limits::default()),
        (experimental, wgpu::Limits::default()),
    ] {
        if features.is_empty() && limits == wgpu::Limits::default() {
            continue;
        }
        let error = request(&adapter, features, limits).err();
        assert!(matches!(error, Some(RequestError::Refused(_))), "{features:?}: {error:?}");
    }
}
