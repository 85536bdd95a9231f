//! The first frame's attention in Bevy, compared with the library's reference. No test opens a
//! window.

use std::error::Error;

use bevy::app::App;
use bevy::render::error_handler::{RenderErrorHandler, RenderErrorPolicy};
use bevy::render::renderer::{RenderAdapter, RenderAdapterInfo, RenderDevice, RenderInstance, RenderQueue};
use bevy::render::settings::RenderCreation;
use bevy_attention::crowd::{Agent, GROUPS, HEAD_DIM, HEADS, VALUE_DIM, config, seed};
use bevy_attention::headless::{app, crowd, frame};
use bevy_attention::plugin::AttentionPlugin;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{Options, attention, widen};
use wgpu_attention::{Shape, wgpu};

type Outcome = Result<(), Box<dyn Error>>;

const AGENTS: usize = 200;
const CROWD: AttentionPlugin = AttentionPlugin { agents: AGENTS, attends: true };
/// The error that WGSL permits for `cos` and `sin`.
const COSINE: f64 = 1.0 / 2048.0;

#[test]
fn frame_matches_reference() -> Outcome {
    check_first_frame(&mut app(CROWD, RenderCreation::default(), 64))
}

#[test]
fn device_with_required_limits_suffices() -> Outcome {
    check_first_frame(&mut app(CROWD, manual()?, 64))
}

#[test]
fn lost_device_is_replaced() -> Outcome {
    let mut app = app(CROWD, RenderCreation::default(), 64);
    app.insert_resource(RenderErrorHandler(|_, _, _| RenderErrorPolicy::Recover(Default::default())));
    frame(&mut app)?;
    let lost = app.world().resource::<RenderDevice>().clone();
    lost.wgpu_device().destroy();
    lost.wgpu_device().poll(wgpu::PollType::wait_indefinitely())?;
    assert!(crowd(&app)?.read_agents().is_err(), "the crowd's device is lost");
    for _ in 0..4 {
        frame(&mut app)?;
    }
    check_agents(&crowd(&app)?.read_agents()?);
    Ok(())
}

#[test]
fn attention_steers_in_its_frame() -> Outcome {
    let [mut blind, mut attending] =
        [false, true].map(|attends| app(AttentionPlugin { attends, ..CROWD }, RenderCreation::default(), 64));
    frame(&mut blind)?;
    frame(&mut attending)?;
    assert!(crowd(&blind)?.read_tensors()?[3].iter().all(|x| *x == 0.0));
    let agents = [crowd(&blind)?.read_agents()?, crowd(&attending)?.read_agents()?];
    for (blind, attending) in agents[0].iter().zip(&agents[1]) {
        assert_ne!(blind.heading, attending.heading);
    }
    Ok(())
}

#[test]
fn empty_crowd_is_an_error() {
    let mut app = app(AttentionPlugin { agents: 0, ..CROWD }, RenderCreation::default(), 64);
    let error = frame(&mut app).expect_err("a failure of the plugin");
    assert!(error.to_string().contains("0 agents"), "{error}");
}

/// Makes a device with the features and limits of `Config::required`, and gives it to Bevy.
fn manual() -> Result<RenderCreation, Box<dyn Error>> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = bevy::tasks::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))?;
    let (required_features, required_limits) = config().required(&adapter);
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    let (device, queue) = bevy::tasks::block_on(adapter.request_device(&descriptor))?;
    Ok(RenderCreation::manual(
        RenderDevice::from(device),
        RenderQueue::new(queue),
        RenderAdapterInfo::new(adapter.get_info()),
        RenderAdapter::new(adapter),
        RenderInstance::new(instance),
    ))
}

/// Runs a frame. Compares the inputs of the attention with the seed, and the result with the
/// reference of those inputs.
fn check_first_frame(app: &mut App) -> Outcome {
    frame(app)?;
    let crowd = crowd(app)?;
    let tensors = crowd.read_tensors()?;
    let [q, k, v, out] = &tensors[..] else { return Err("four tensors".into()) };

    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (i, agent) in seed(AGENTS).iter().enumerate() {
        let place = agent.position.map(f64::from).map(|angle| [angle.cos(), angle.sin()]);
        keys.extend(place.as_flattened());
        keys.extend((0..GROUPS).map(|group| f64::from(u8::from(i % GROUPS == group))));
        values.extend(place.as_flattened());
        values.extend(agent.heading.map(f64::from));
    }
    compare(k, &keys, Tolerance { absolute: COSINE })?;
    compare(v, &values, Tolerance { absolute: COSINE })?;

    let shape = Shape { kv_heads: 1, value_dim: VALUE_DIM, ..Shape::new(1, HEADS, AGENTS, HEAD_DIM) };
    let options = Options::new().scale(1.0);
    let want = attention::<f64>(&widen(q), &widen(k), &widen(v), shape, &options)?;
    let naive = attention::<f32>(q, k, v, shape, &options)?;
    compare(out, &want.out, Tolerance::from_naive(&widen(&naive.out), &want.out, 1.0, EPSILON_F32))?;
    check_agents(&crowd.read_agents()?);
    Ok(())
}

/// Agents have moved, and have headings of length 1.
fn check_agents(agents: &[Agent]) {
    assert_eq!(agents.len(), AGENTS);
    for (agent, before) in agents.iter().zip(seed(AGENTS)) {
        assert_ne!(agent.position, before.position);
        let [x, y] = agent.heading;
        assert!((x.hypot(y) - 1.0).abs() < 1e-4, "{agent:?}");
    }
}
