//! Shows attention weights in a window. egui draws it, and one wgpu device serves egui and
//! attention. The weights stay on the device.
//!
//! `cargo run --release -p viewer -- --preset natten --preset alibi`
//! `cargo run --release -p viewer -- --sentence "A cat sits on the mat."`

mod app;
mod arguments;
mod choices;
mod heat;
mod masked;
mod masks_tab;
mod meter;
mod minilm_tab;
mod picture;
mod plot;
mod screenshot;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use app::App;
use arguments::Arguments;
use eframe::egui::ViewportBuilder;
use eframe::egui_wgpu::{WgpuConfiguration, WgpuSetup, WgpuSetupCreateNew};
use screenshot::Outcome;
use wgpu_attention::Config;

fn main() -> ExitCode {
    match Arguments::read(std::env::args_os()).and_then(|arguments| arguments.map_or(Ok(()), run)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let wants_screenshot = arguments.screenshot.is_some();
    let setup = WgpuSetupCreateNew {
        device_descriptor: Arc::new(device),
        ..WgpuSetupCreateNew::without_display_handle()
    };
    let options = eframe::NativeOptions {
        viewport: ViewportBuilder::default().with_inner_size([1180.0, 800.0]),
        wgpu_options: WgpuConfiguration { wgpu_setup: WgpuSetup::CreateNew(setup), ..Default::default() },
        ..Default::default()
    };
    let outcome = Outcome::default();
    let of_app = outcome.clone();
    let create: eframe::AppCreator<'_> =
        Box::new(|context| Ok(Box::new(App::new(context, arguments, of_app)?)));
    eframe::run_native("wgpu-attention viewer", options, create)?;
    let written = outcome.lock().map(|mut outcome| outcome.take()).unwrap_or_default();
    match written {
        Some(written) => Ok(written?),
        None if wants_screenshot => Err("the window closed before its screenshot".into()),
        None => Ok(()),
    }
}

/// Describes the device with the features and limits that attention requires. They are never below
/// wgpu's defaults, which are enough for egui.
fn device(adapter: &wgpu::Adapter) -> wgpu::DeviceDescriptor<'static> {
    // The requirements do not depend on the sizes.
    let (features, limits) = Config::new(1, 64).required(adapter);
    wgpu::DeviceDescriptor {
        label: Some("egui and attention"),
        required_features: features | (adapter.features() & wgpu::Features::TIMESTAMP_QUERY),
        // Old adapters may have less than the defaults.
        required_limits: limits.or_worse_values_from(&adapter.limits()),
        ..Default::default()
    }
}
