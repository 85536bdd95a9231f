//! Frames without a window: the camera draws into an image, and the program calls each update.

use std::error::Error;
use std::path::Path;

use bevy::camera::RenderTarget;
use bevy::prelude::*;
use bevy::render::render_resource::{PollType, TextureFormat};
use bevy::render::renderer::RenderDevice;
use bevy::render::settings::RenderCreation;
use bevy::render::view::screenshot::{Screenshot, ScreenshotCaptured};
use bevy::render::{RenderApp, RenderPlugin};
use bevy::window::ExitCondition;

use crate::plugin::{AttentionPlugin, Failure, RenderCrowd};

/// Updates that a screenshot may need until it arrives.
const SCREENSHOT_UPDATES: usize = 20;

/// The image that the camera draws into.
#[derive(Resource)]
struct Target(Handle<Image>);

/// The picture that was taken.
#[derive(Resource)]
struct Picture(Image);

/// Makes an application that draws a crowd into an image of `size` × `size` pixels.
pub fn app(plugin: AttentionPlugin, render_creation: RenderCreation, size: u32) -> App {
    let window =
        WindowPlugin { primary_window: None, exit_condition: ExitCondition::DontExit, ..Default::default() };
    let render = RenderPlugin { render_creation, ..Default::default() };
    let plugins = DefaultPlugins.set(window).set(render);
    #[cfg(feature = "window")]
    let plugins = plugins.disable::<bevy::winit::WinitPlugin>();
    let mut app = App::new();
    app.add_plugins((plugins, plugin));
    let image = Image::new_target_texture(size, size, TextureFormat::Rgba8UnormSrgb, None);
    let image = app.world_mut().resource_mut::<Assets<Image>>().add(image);
    app.world_mut().spawn((Camera2d, RenderTarget::from(image.clone())));
    app.insert_resource(Target(image)).insert_resource(ClearColor(Color::srgb(0.03, 0.03, 0.05)));
    app.finish();
    app.cleanup();
    app
}

/// Runs one frame, and waits until the device has drawn it.
///
/// # Errors
/// The failure of the plugin, or a failure of the renderer, which Bevy has logged.
pub fn frame(app: &mut App) -> Result<(), Box<dyn Error>> {
    app.update();
    if let Some(Failure(why)) = app.world().get_resource() {
        return Err(why.as_str().into());
    }
    if app.should_exit().is_some() {
        return Err("Bevy stopped: the log says why".into());
    }
    let device = app.world().get_resource::<RenderDevice>().ok_or("Bevy has no device")?;
    device.wgpu_device().poll(PollType::wait_indefinitely())?;
    Ok(())
}

/// Returns the crowd.
///
/// # Errors
/// There is none before the first frame, and while Bevy replaces a lost device.
pub fn crowd(app: &App) -> Result<&RenderCrowd, Box<dyn Error>> {
    let render_app = app.get_sub_app(RenderApp).ok_or("Bevy has no renderer")?;
    Ok(render_app.world().get_resource().ok_or("there is no crowd")?)
}

/// Requests a picture of the next frame.
pub fn request_picture(app: &mut App) {
    let Some(target) = app.world().get_resource::<Target>() else { return };
    let screenshot = Screenshot::image(target.0.clone());
    app.world_mut().spawn(screenshot).observe(|captured: On<ScreenshotCaptured>, mut commands: Commands| {
        commands.insert_resource(Picture(captured.image.clone()));
    });
}

/// Saves the requested picture. The format follows the ending of `path`.
///
/// # Errors
/// The picture does not arrive, or the file cannot be written.
pub fn save_picture(app: &mut App, path: &Path) -> Result<(), Box<dyn Error>> {
    for _ in 0..SCREENSHOT_UPDATES {
        if let Some(Picture(image)) = app.world_mut().remove_resource() {
            let image = image.try_into_dynamic()?.to_rgb8();
            return image.save(path).map_err(|e| format!("{}: {e}", path.display()).into());
        }
        frame(app)?;
    }
    Err("Bevy took no picture".into())
}
