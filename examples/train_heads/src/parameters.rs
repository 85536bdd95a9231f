//! All parameters in one buffer. Gradients have the same layout in a second buffer, so AdamW is one
//! dispatch.

use training::Random;
use wgpu_attention::{DType, TensorView, wgpu};

use crate::task::{Series, VOCABULARY};

pub const LAYERS: usize = 2;
pub const HEADS: usize = 4;
pub const HEAD_DIM: usize = 16;
pub const WIDTH: usize = HEADS * HEAD_DIM;
/// The largest distance with a separate bias; all larger distances share one.
pub const REACH: usize = 8;

/// The alignment of tensors in elements, so that every device can bind them.
const ALIGNMENT: usize = 64;

/// A dense tensor within the buffer.
#[derive(Clone, Copy)]
pub struct Place {
    pub name: &'static str,
    pub first: usize,
    pub shape: [usize; 4],
}

impl Place {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn view<'a>(&self, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        TensorView::new(buffer, DType::F32, self.shape).with_offset(self.first)
    }
}

/// A layer's parameters, as places or as views.
#[derive(Clone, Copy)]
pub struct LayerOf<T> {
    /// `[WIDTH, WIDTH]` as `[out, in]`, and the same for the next three.
    pub query: T,
    pub key: T,
    pub value: T,
    pub out: T,
    /// `[1, HEADS, 1, 2 · REACH + 1]`: the biases that are added to scores, by distance.
    pub relative: T,
}

impl LayerOf<Place> {
    pub fn views<'a>(&self, buffer: &'a wgpu::Buffer) -> LayerOf<TensorView<'a>> {
        LayerOf {
            query: self.query.view(buffer),
            key: self.key.view(buffer),
            value: self.value.view(buffer),
            out: self.out.view(buffer),
            relative: self.relative.view(buffer),
        }
    }

    fn all(&self) -> [Place; 5] {
        [self.query, self.key, self.value, self.out, self.relative]
    }
}

/// The place of each tensor in the buffer.
pub struct Places {
    /// `[VOCABULARY, WIDTH]`: each letter's embedding.
    pub embed: Place,
    /// `[VOCABULARY, WIDTH]`: the weights of each letter's logit.
    pub unembed: Place,
    /// The biases of all layers come last.
    pub layers: [LayerOf<Place>; LAYERS],
    /// The length of the buffer, with gaps.
    pub len: usize,
}

impl Places {
    pub fn new() -> Self {
        let mut len = 0;
        let mut place = |name, shape: [usize; 4]| {
            let first = len;
            len += shape.iter().product::<usize>().next_multiple_of(ALIGNMENT);
            Place { name, first, shape }
        };
        let embed = place("embed", [1, 1, VOCABULARY, WIDTH]);
        let unembed = place("unembed", [1, 1, VOCABULARY, WIDTH]);
        let matrices = [(); LAYERS]
            .map(|()| ["query", "key", "value", "out"].map(|name| place(name, [1, 1, WIDTH, WIDTH])));
        let layers = matrices.map(|[query, key, value, out]| {
            let relative = place("relative", [1, HEADS, 1, 2 * REACH + 1]);
            LayerOf { query, key, value, out, relative }
        });
        Places { embed, unembed, layers, len }
    }

    pub fn all(&self) -> Vec<Place> {
        let layers = self.layers.iter().flat_map(LayerOf::all);
        [self.embed, self.unembed].into_iter().chain(layers).collect()
    }

    /// The number of parameters, without gaps.
    pub fn learned(&self) -> usize {
        self.all().iter().map(Place::len).sum()
    }

    /// The first element of the biases.
    pub fn biases(&self) -> usize {
        self.layers[0].relative.first
    }

    /// The initial parameters: random, except for the biases by distance, which are 0.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, Series::Weights as usize);
        let mut values = vec![0.0; self.len];
        for place in self.all() {
            let deviation = match place.name {
                "embed" => 1.0,
                "relative" => 0.0,
                // Small weights, so that attention starts almost uniform.
                "query" | "key" => 0.5 / (WIDTH as f32).sqrt(),
                _ => 1.0 / (WIDTH as f32).sqrt(),
            };
            for value in &mut values[place.first..][..place.len()] {
                *value = 3f32.sqrt() * deviation * random.signed();
            }
        }
        values
    }
}
