//! Everything that is learned, in one buffer: so gradients have the same places in another, and
//! AdamW is one dispatch.

use wgpu_attention::{DType, TensorView, wgpu};

use crate::task::{Random, Series, VOCABULARY};

pub const LAYERS: usize = 2;
pub const HEADS: usize = 4;
pub const HEAD_DIM: usize = 16;
pub const WIDTH: usize = HEADS * HEAD_DIM;
/// Distances that have a bias of their own; all that are further share one.
pub const REACH: usize = 8;

/// Tensors begin where every device can bind.
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

/// What a layer learns, as places or as views.
#[derive(Clone, Copy)]
pub struct LayerOf<T> {
    /// `[WIDTH, WIDTH]`, as are the next three: `[out, in]`.
    pub query: T,
    pub key: T,
    pub value: T,
    pub out: T,
    /// `[1, HEADS, 1, 2 · REACH + 1]`: added to scores, by distance.
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

/// Where each tensor lies.
pub struct Places {
    /// `[VOCABULARY, WIDTH]`: what a letter puts into the stream.
    pub embed: Place,
    /// `[VOCABULARY, WIDTH]`: what of the stream speaks for a letter.
    pub unembed: Place,
    /// The biases of all layers come last.
    pub layers: [LayerOf<Place>; LAYERS],
    /// Of the buffer, with the gaps.
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

    /// How many numbers are learned.
    pub fn learned(&self) -> usize {
        self.all().iter().map(Place::len).sum()
    }

    /// Where the biases begin.
    pub fn biases(&self) -> usize {
        self.layers[0].relative.first
    }

    /// Random, but for the biases by distance: these are 0.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, Series::Weights);
        let mut values = vec![0.0; self.len];
        for place in self.all() {
            let deviation = match place.name {
                "embed" => 1.0,
                "relative" => 0.0,
                // Attention begins nearly even.
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
