//! A crowd in Bevy that attends to itself. The attention is recorded into Bevy's frame, on Bevy's
//! device.

pub mod crowd;
mod draw;
pub mod headless;
pub mod measure;
pub mod plugin;
