//! Custom score and mask functions, in WGSL and as closures.

use std::fmt;
use std::sync::Arc;

use wgpu_attention::mask::{At, Captured};
use wgpu_attention::presets::{MaskPreset, ScorePreset, Table, TableData};
use wgpu_attention::reference::Real;
use wgpu_attention::{DType, Shape};

use super::case::HostData;

/// A tensor that a mod captures.
#[derive(Clone, Debug)]
pub enum Capture {
    /// Floats stored as this type.
    Float(HostData<f32>, DType),
    Number(HostData<u32>),
    Bool(HostData<bool>),
}

/// A mod's WGSL and its captures, in the order of their names.
#[derive(Clone, Debug, Default)]
pub struct Text {
    pub wgsl: String,
    pub captured: Vec<(&'static str, Capture)>,
    /// The words of its `Uniforms`.
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

/// Maps a score and its pair to the new score.
pub type ScoreFn = dyn Fn(f64, &At) -> f64 + Send + Sync;

/// Takes a score and its pair. Reports the elements that the function reads of a tensor, and the
/// derivatives by them.
pub type ReadFn = dyn Fn(f64, &At, &mut dyn FnMut(usize, f64)) + Send + Sync;

/// A custom score function.
#[derive(Clone)]
pub struct OwnScore {
    pub text: Text,
    pub host: Arc<ScoreFn>,
    pub slope: Option<Arc<ScoreFn>>,
    /// The elements it reads of its first tensor, if that has a gradient.
    pub reads: Option<Arc<ReadFn>>,
}

impl OwnScore {
    pub fn reads(self, of: impl Fn(f64, &At, &mut dyn FnMut(usize, f64)) + Send + Sync + 'static) -> Self {
        OwnScore { reads: Some(Arc::new(of)), ..self }
    }

    /// Returns the shape of the tensor that has a gradient.
    pub fn gradient_shape(&self) -> Option<[usize; 4]> {
        self.reads.as_ref()?;
        match self.text.captured.first()? {
            (_, Capture::Float(t, _)) => Some(t.shape),
            _ => None,
        }
    }

    /// Returns the gradient of that tensor, or the magnitudes of its terms, from the gradient of
    /// the function's result. Queries are aligned to the end of the keys before the appended ones.
    pub fn gradient<R: Real>(
        &self,
        shape: Shape,
        appended: usize,
        scores: &[f64],
        d_score: &[R],
        magnitudes: bool,
    ) -> Option<Vec<R>> {
        let reads = self.reads.as_ref()?;
        let mut sums = vec![R::of(0.0); self.gradient_shape()?.iter().product()];
        let Shape { heads, kv_heads, q_len, kv_len, .. } = shape;
        let keys = kv_len - appended;
        for (n, (score, d)) in scores.iter().zip(d_score).enumerate().filter(|(_, (_, d))| d.f64() != 0.0) {
            let (row, key) = (n / kv_len, n % kv_len);
            let (head, query) = (row / q_len % heads, row % q_len);
            let mut at = At::default();
            at.batch = (row / q_len / heads) as u32;
            at.head = head as u32;
            at.kv_head = (head / (heads / kv_heads)) as u32;
            at.query = query as u32;
            at.key = key as u32;
            at.position = (query + keys) as i32 - q_len as i32;
            (at.q_len, at.kv_len) = (q_len as u32, keys as u32);
            reads(*score, &at, &mut |element, slope| {
                let slope = if magnitudes { slope.abs() } else { slope };
                sums[element] = sums[element] + *d * R::of(slope);
            });
        }
        Some(sums)
    }
}

/// A custom mask function.
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

pub fn score(text: Text, host: impl Fn(f64, &At) -> f64 + Send + Sync + 'static) -> OwnScore {
    OwnScore { text, host: Arc::new(host), slope: None, reads: None }
}

pub fn pairs(text: Text, host: impl Fn(&At) -> bool + Send + Sync + 'static) -> OwnMask {
    OwnMask { text, host: Arc::new(host) }
}

/// Returns the WGSL, tables and uniforms that a preset places on a device.
fn preset_text(wgsl: &str, tables: &[Table], uniforms: &[u8]) -> Text {
    let capture = |table: &Table| {
        let capture = match table.data() {
            TableData::Floats(data) => {
                Capture::Float(HostData::new(data.to_vec(), table.shape()), DType::F32)
            }
            TableData::Numbers(data) => Capture::Number(HostData::new(data.to_vec(), table.shape())),
            TableData::Bools(data) => Capture::Bool(HostData::new(data.to_vec(), table.shape())),
            other => panic!("no table holds {other:?}"),
        };
        (table.name(), capture)
    };
    Text {
        wgsl: wgsl.to_string(),
        captured: tables.iter().map(capture).collect(),
        uniforms: bytemuck::pod_collect_to_vec(uniforms),
    }
}

impl From<MaskPreset> for OwnMask {
    fn from(preset: MaskPreset) -> Self {
        let text = preset_text(preset.wgsl(), preset.tables(), preset.uniforms());
        pairs(text, move |at| preset.sees(at))
    }
}

impl From<ScorePreset> for OwnScore {
    fn from(preset: ScorePreset) -> Self {
        let text = preset_text(preset.wgsl(), preset.tables(), preset.uniforms());
        let slope = preset.clone();
        let own = score(text, move |score, at| preset.score(score, at));
        OwnScore { slope: Some(Arc::new(move |score, at| slope.slope(score, at))), ..own }
    }
}

/// A score function with a loop, a branch, an array, a struct and a uniform.
pub fn winding() -> OwnScore {
    let text = "
        struct Uniforms { bend: f32, rounds: u32, shift: vec2<f32> }
        struct Pair { low: f32, high: f32 }
        const HALF = 0.5;
        fn bent(x: f32, by: f32) -> Pair {
            if x > 0.0 { return Pair(x * HALF, tanh(x * by)); }
            return Pair(-x, x);
        }
        fn score_mod(score: f32, at: At) -> f32 {
            var sums = array<f32, 3>();
            for (var n = 0u; n < uniforms().rounds; n++) {
                let pair = bent(score + uniforms().shift[n % 2u], uniforms().bend);
                sums[(n + at.key) % 3u] += pair.low - pair.high * 0.25;
            }
            switch at.head {
                case 0u: { return sums[0] + score; }
                case 1u, 2u: { return sums[1]; }
                default: { return max(sums[0], sums[2]); }
            }
        }";
    let (bend, rounds, shift) = (0.75f32, 5u32, [0.5f32, -0.25]);
    let words = [bend.to_bits(), rounds, shift[0].to_bits(), shift[1].to_bits()];
    score(Text::new(text).uniforms(&words), move |x, at| {
        let mut sums = [0.0; 3];
        for n in 0..rounds {
            let y = x + f64::from(shift[n as usize % 2]);
            let [low, high] = if y > 0.0 { [y * 0.5, (y * f64::from(bend)).tanh()] } else { [-y, y] };
            sums[((n + at.key) % 3) as usize] += low - high * 0.25;
        }
        match at.head {
            0 => sums[0] + x,
            1 | 2 => sums[1],
            _ => f64::max(sums[0], sums[2]),
        }
    })
}

/// A score function that reads 28 numbers, for four heads. It reads in a loop, in a branch, in a
/// nested function, and for a factor of the score.
pub fn readings(table: Vec<f32>) -> OwnScore {
    let table = HostData::new(table, [4, 1, 7, 1]);
    let text = "
        fn entry(at: At, n: u32) -> f32 { return table_at(at.head, 0u, n % 7u, 0u); }
        fn bent(at: At, x: f32) -> f32 { return tanh(x * entry(at, at.key)); }
        fn score_mod(score: f32, at: At) -> f32 {
            var sum = bent(at, score);
            for (var n = 0u; n < at.query % 4u; n++) { sum += 0.5 * entry(at, at.key + n) * entry(at, n); }
            if at.key % 3u == 0u { return sum * table_at(0u, 0u, 6u, 0u); }
            return sum;
        }";
    let own = Text::new(text).captures("table", Capture::Float(table.clone(), DType::F32));
    let of = move |at: &At, n: u32| {
        let element = at.head as usize * 7 + (n % 7) as usize;
        (element, f64::from(table.data[element]))
    };
    let last = of(&At::default(), 6);
    let at_of = of.clone();
    let sum = move |x: f64, at: &At| {
        let terms = (0..at.query % 4).map(|n| 0.5 * at_of(at, at.key + n).1 * at_of(at, n).1);
        (x * at_of(at, at.key).1).tanh() + terms.sum::<f64>()
    };
    let sums = sum.clone();
    let factor = move |at: &At| if at.key.is_multiple_of(3) { last.1 } else { 1.0 };
    score(own, move |x, at| sum(x, at) * factor(at)).reads(move |x, at, read| {
        let (element, value) = of(at, at.key);
        read(element, factor(at) * x * (1.0 - (x * value).tanh().powi(2)));
        for n in 0..at.query % 4 {
            let [(a, x), (b, y)] = [of(at, at.key + n), of(at, n)];
            read(a, factor(at) * 0.5 * y);
            read(b, factor(at) * 0.5 * x);
        }
        if at.key.is_multiple_of(3) {
            read(last.0, sums(x, at));
        }
    })
}
