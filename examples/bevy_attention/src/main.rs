//! A crowd that flocks because its agents attend to each other, in Bevy.
//!
//! `cargo run --release -- --headless --frames 300 --out crowd.png`

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use bevy::prelude::*;
use bevy::render::renderer::RenderAdapterInfo;
use bevy::render::settings::RenderCreation;
use bevy_attention::crowd::{MOST_AGENTS, seed};
use bevy_attention::headless::{self, crowd, frame, request_picture, save_picture};
use bevy_attention::measure::{Order, order};
use bevy_attention::plugin::AttentionPlugin;

const HELP: &str = "\
A crowd that flocks because its agents attend to each other, in Bevy.

usage: bevy_attention [OPTIONS]

options:
  --agents N   the number of agents, at most 131072 [default: 4096]
  --blind      agents do not attend
  --headless   without a window; prints times and saves a picture
  --frames N   the number of frames, with --headless [default: 300]
  --out PATH   the picture to write, with --headless [default: bevy_attention.png]
  -h, --help   print this text

environment:
  WGPU_BACKEND, WGPU_ADAPTER_NAME  the device, as for every Bevy program";

/// The width and height of the picture and of the window.
const SIZE: u32 = 1024;

struct Arguments {
    plugin: AttentionPlugin,
    headless: bool,
    frames: usize,
    out: PathBuf,
}

fn main() -> ExitCode {
    let run = |arguments: Arguments| match arguments.headless {
        true => run_headless(&arguments),
        false => run_window(&arguments),
    };
    match Arguments::read().and_then(|arguments| arguments.map_or(Ok(()), run)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "window")]
fn run_window(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let window = Window {
        title: format!("{} agents that attend to each other", arguments.plugin.agents),
        resolution: (SIZE, SIZE).into(),
        ..Default::default()
    };
    let window = WindowPlugin { primary_window: Some(window), ..Default::default() };
    let exit = App::new()
        .add_plugins((DefaultPlugins.set(window), arguments.plugin))
        .insert_resource(ClearColor(Color::srgb(0.03, 0.03, 0.05)))
        .add_systems(Startup, |mut commands: Commands| {
            commands.spawn(Camera2d);
        })
        .run();
    if exit.is_error() { Err("the application stopped: the log says why".into()) } else { Ok(()) }
}

#[cfg(not(feature = "window"))]
fn run_window(_: &Arguments) -> Result<(), Box<dyn Error>> {
    Err("this program was compiled without the feature `window`: add --headless".into())
}

fn run_headless(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let Arguments { plugin, frames, out, .. } = arguments;
    let mut app = headless::app(*plugin, RenderCreation::default(), SIZE);
    let mut times = Vec::with_capacity(*frames);
    for index in 0..*frames {
        if index + 1 == *frames {
            request_picture(&mut app);
        }
        let started = Instant::now();
        frame(&mut app)?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    let info = app.world().get_resource::<RenderAdapterInfo>().ok_or("Bevy has no adapter")?;
    println!("adapter      {} ({})", info.name, info.backend);
    println!("agents       {}", plugin.agents);
    println!("frames       {frames}");
    println!("first frame  {:.1} ms, with the compilation of kernels", times[0]);
    times.sort_by(f64::total_cmp);
    println!("frame        {:.1} ms, the median", times[times.len() / 2]);

    let crowd = crowd(&app)?;
    match crowd.read_time()? {
        Some(time) => println!("attention    {time:.1} ms by timestamps, in the last frame"),
        None => println!("attention    no time: it was not recorded, or the device has no timestamps"),
    }
    let agents = crowd.read_agents()?;
    println!("read back    0 bytes per frame; {} bytes after the last", size_of_val(&agents[..]));
    println!("\n             alignment   own group among neighbours");
    print("start", order(&seed(plugin.agents)));
    print("end", order(&agents));
    save_picture(&mut app, out)?;
    println!("\npicture      {}", std::path::absolute(out)?.display());
    Ok(())
}

fn print(when: &str, Order { alignment, kin }: Order) {
    println!("{when:<12} {alignment:<11.3} {kin:.3}");
}

impl Arguments {
    /// Reads the command line. `None` if it asks for help.
    fn read() -> Result<Option<Self>, Box<dyn Error>> {
        use lexopt::prelude::*;
        let mut arguments = Arguments {
            plugin: AttentionPlugin { agents: 4096, attends: true },
            headless: false,
            frames: 300,
            out: "bevy_attention.png".into(),
        };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("agents") => arguments.plugin.agents = parser.value()?.parse()?,
                Long("blind") => arguments.plugin.attends = false,
                Long("headless") => arguments.headless = true,
                Long("frames") => arguments.frames = parser.value()?.parse()?,
                Long("out") => arguments.out = parser.value()?.into(),
                Short('h') | Long("help") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                _ => return Err(argument.unexpected().into()),
            }
        }
        if !(1..=MOST_AGENTS).contains(&arguments.plugin.agents) {
            return Err(format!("--agents {}: from 1 to {MOST_AGENTS}", arguments.plugin.agents).into());
        }
        if arguments.frames == 0 {
            return Err("--frames 0: at least 1".into());
        }
        Ok(Some(arguments))
    }
}
