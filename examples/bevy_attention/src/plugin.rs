//! The plugin: the crowd lives in Bevy's render world, and two systems record its frames.

use bevy::core_pipeline::core_2d::main_transparent_pass_2d;
use bevy::core_pipeline::schedule::camera_driver;
use bevy::core_pipeline::{Core2d, Core2dSystems};
use bevy::prelude::*;
use bevy::render::renderer::{
    RenderAdapter, RenderContext, RenderDevice, RenderGraph, RenderGraphSystems, RenderQueue,
};
use bevy::render::{ExtractSchedule, MainWorld, RenderApp, RenderStartup};

use crate::crowd::{self, Crowd, MOST_AGENTS};
use crate::draw::{Drawing, draw};

const NO_RENDERER: &str = "Bevy has no renderer: add RenderPlugin before AttentionPlugin";

/// Adds a crowd to every `Camera2d`. It needs `RenderPlugin` and `CorePipelinePlugin`.
#[derive(Resource, Clone, Copy, Debug)]
pub struct AttentionPlugin {
    /// The number of agents, from 1 to [`MOST_AGENTS`].
    pub agents: usize,
    /// False for a crowd that does not attend, to compare with.
    pub attends: bool,
}

/// The crowd, in the render world.
#[derive(Resource, Deref)]
pub struct RenderCrowd(pub Crowd);

/// The reason why there is no crowd, in both worlds. The application then exits with an error.
#[derive(Resource, Clone, Debug)]
pub struct Failure(pub String);

impl Plugin for AttentionPlugin {
    fn build(&self, app: &mut App) {
        let Some(render_app) = app.get_sub_app_mut(RenderApp) else {
            error!("{NO_RENDERER}");
            app.insert_resource(Failure(NO_RENDERER.into()));
            return;
        };
        render_app
            .insert_resource(*self)
            .add_systems(RenderStartup, start)
            .add_systems(ExtractSchedule, report.run_if(resource_exists::<Failure>))
            .add_systems(
                RenderGraph,
                record
                    .in_set(RenderGraphSystems::Render)
                    .before(camera_driver)
                    .run_if(resource_exists::<RenderCrowd>),
            )
            .add_systems(
                Core2d,
                draw.in_set(Core2dSystems::MainPass)
                    .after(main_transparent_pass_2d)
                    .run_if(resource_exists::<RenderCrowd>),
            );
    }
}

/// Makes the crowd. Bevy runs it at the start, and again with each new device after a lost one.
fn start(
    mut commands: Commands,
    plugin: Res<AttentionPlugin>,
    device: Res<RenderDevice>,
    queue: Res<RenderQueue>,
    adapter: Res<RenderAdapter>,
) {
    commands.remove_resource::<RenderCrowd>();
    if !(1..=MOST_AGENTS).contains(&plugin.agents) {
        let why = format!("{} agents: a crowd has 1 to {MOST_AGENTS}", plugin.agents);
        commands.insert_resource(Failure(why));
        return;
    }
    let gpu = crowd::gpu(device.wgpu_device(), &queue, &adapter);
    match Crowd::new(gpu, plugin.agents, plugin.attends) {
        Ok(crowd) => {
            commands.insert_resource(Drawing::new(device.wgpu_device()));
            commands.insert_resource(RenderCrowd(crowd));
        }
        Err(e) => commands.insert_resource(Failure(format!("attention: {e}"))),
    }
}

/// Logs the failure, and ends the application.
fn report(mut commands: Commands, failure: Res<Failure>, mut main: ResMut<MainWorld>) {
    error!("{}", failure.0);
    main.insert_resource(failure.clone());
    main.write_message(AppExit::error());
    commands.remove_resource::<Failure>();
}

/// Records the crowd's frame before any camera's. Bevy submits both together, in this order.
fn record(crowd: Res<RenderCrowd>, mut context: RenderContext) {
    crowd.record(context.command_encoder());
}
