//! Functions of the caller's own, in WGSL and as closures.

use std::fmt;
use std::sync::Arc;

use wgpu_attention::{At, Captured, DType};

use super::case::HostData;

/// What a mod captures.
#[derive(Clone, Debug)]
pub enum Capture {
    /// Stored as this type.
    Float(HostData<f32>, DType),
    Number(HostData<u32>),
    Bool(HostData<bool>),
}

/// A mod's text and what it captures, by the order of names.
#[derive(Clone, Debug, Default)]
pub struct Text {
    pub wgsl: String,
    pub captured: Vec<(&'static str, Capture)>,
    /// Words of its `Uniforms`.
    pub uniforms: Vec<u32>,
}

impl Text {
    pub fn new(wgsl: impl Into<String>) -> Self {
        Text { wgsl: wgsl.into(), ..Text::default() }
    }

    pub fn captures(mut self, name: &'static str, capture: Capture) -> Self {
        self.captured.push((name, capture));
        self
    }

    pub fn uniforms(self, words: &[u32]) -> Self {
        Text { uniforms: words.to_vec(), ..self }
    }

    pub fn declared(&self) -> Vec<Captured> {
        let declared = |(name, capture): &(&'static str, Capture)| match capture {
            Capture::Float(..) => Captured::float(*name),
            Capture::Number(_) => Captured::number(*name),
            Capture::Bool(_) => Captured::bool(*name),
        };
        self.captured.iter().map(declared).collect()
    }
}

/// Of a score and its pair.
pub type ScoreFn = dyn Fn(f64, &At) -> f64 + Send + Sync;

/// A score function.
#[derive(Clone)]
pub struct OwnScore {
    pub text: Text,
    pub host: Arc<ScoreFn>,
    pub slope: Option<Arc<ScoreFn>>,
}

/// A mask.
#[derive(Clone)]
pub struct OwnMask {
    pub text: Text,
    pub host: Arc<dyn Fn(&At) -> bool + Send + Sync>,
}

impl fmt::Debug for OwnScore {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl fmt::Debug for OwnMask {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.text.fmt(f)
    }
}
