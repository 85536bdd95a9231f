//! The presets that the window offers, made for the sizes of a call.

use wgpu_attention::presets::{self, MaskPreset, ScorePreset};
use wgpu_attention::{Error, HostTensor};

/// The sizes of a call with one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub q_len: usize,
    pub kv_len: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Sizes {
    /// The height and width of a canvas with a point for each key, as square as possible.
    fn canvas(&self) -> [usize; 2] {
        let n = self.kv_len;
        let height = (1..=n.isqrt()).rev().find(|height| n.is_multiple_of(*height)).unwrap_or(1);
        [height, n / height]
    }
}

/// A preset by its name.
pub struct Choice<T> {
    pub name: &'static str,
    pub make: fn(Sizes) -> Result<T, Error>,
}

const fn choice<T>(name: &'static str, make: fn(Sizes) -> Result<T, Error>) -> Choice<T> {
    Choice { name, make }
}

pub const MASKS: [Choice<MaskPreset>; 13] = [
    choice("causal", |_| presets::causal()),
    choice("sliding", |s| presets::sliding(s.kv_len / 8)),
    choice("dilated", |s| presets::dilated(s.kv_len / 4, 3)),
    choice("local", |s| presets::local(s.kv_len.div_ceil(4))),
    choice("global_sliding", |s| {
        let globals = by_key(s, |key| key % 16 == 5);
        presets::global_sliding(s.kv_len / 12, HostTensor::new(&globals, [1, 1, 1, s.kv_len]))
    }),
    choice("prefix_lm", |s| presets::prefix_lm(HostTensor::new(&[s.kv_len as u32 / 3], [1; 4]))),
    choice("documents", |s| {
        let documents = by_key(s, |key| [0, 1, 2, 0][4 * key / s.kv_len]);
        presets::documents(HostTensor::new(&documents, [1, 1, 1, s.kv_len]))
    }),
    choice("block_diffusion", |s| presets::block_diffusion(s.kv_len / 2, (s.kv_len / 8).max(1))),
    choice("draft_blocks", |s| presets::draft_blocks(s.kv_len / 3, (s.kv_len / 6).max(1))),
    choice("svg_temporal", |s| presets::svg_temporal(4, (s.kv_len / 4).max(1), 2)),
    choice("natten", |s| {
        let canvas = s.canvas();
        presets::natten(canvas, canvas.map(|n| n.min(5)), [1, 1])
    }),
    choice("morton_natten", |s| presets::morton_natten(s.kv_len.isqrt().next_power_of_two(), [3, 3])),
    choice("shifted_windows", |s| {
        let canvas = s.canvas();
        let window = canvas.map(|n| if n.is_multiple_of(2) { n / 2 } else { n });
        presets::shifted_windows(canvas, window, window.map(|n| n / 2))
    }),
];

pub const SCORES: [Choice<ScorePreset>; 9] = [
    choice("alibi", |s| {
        let slopes = presets::alibi_slopes(s.heads);
        presets::alibi(HostTensor::new(&slopes, [1, s.heads, 1, 1]))
    }),
    choice("relative", |_| {
        let table: Vec<f32> = (-8..=8).map(|far| 3.0 * (far as f32 * 0.7).cos()).collect();
        presets::relative(HostTensor::new(&table, [1, 1, 1, table.len()]))
    }),
    choice("t5", |_| {
        let buckets: Vec<f32> = (0..32).map(|bucket| (bucket % 16) as f32 * -0.4).collect();
        presets::t5(HostTensor::new(&buckets, [1, 1, 1, 32]), 128, true)
    }),
    choice("sandwich", |s| presets::sandwich(s.heads, 128, s.kv_len)),
    choice("softcap", |_| presets::softcap(2.0)),
    choice("relu", |_| presets::relu()),
    choice("squared_relu", |_| presets::squared_relu()),
    choice("sigmoid", |s| presets::sigmoid(-(s.kv_len as f32).ln())),
    choice("gelu", |_| presets::gelu(0.25)),
];

fn by_key<T>(sizes: Sizes, of: impl Fn(usize) -> T) -> Vec<T> {
    (0..sizes.kv_len).map(of).collect()
}

/// All names, for `--help` and errors.
pub fn names() -> impl Iterator<Item = &'static str> {
    MASKS.iter().map(|choice| choice.name).chain(SCORES.iter().map(|choice| choice.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_names_of_choices() -> Result<(), Error> {
        let sizes = Sizes { q_len: 48, kv_len: 64, heads: 3, head_dim: 16 };
        for Choice { name, make } in &MASKS {
            assert_eq!(make(sizes)?.name(), *name);
        }
        for Choice { name, make } in &SCORES {
            assert_eq!(make(sizes)?.name(), *name);
        }
        Ok(())
    }

    #[test]
    fn canvases_have_a_point_for_each_key() {
        let canvas = |kv_len| Sizes { q_len: 1, kv_len, heads: 1, head_dim: 8 }.canvas();
        assert_eq!([48, 64, 7, 1].map(canvas), [[6, 8], [8, 8], [1, 7], [1, 1]]);
    }
}
