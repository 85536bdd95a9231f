//! Rotary positions inside layers and stacks.

use wgpu_attention::position::{Rope, RopeConfig, RopeOrder, RopeSections, Rotation, RowPositions};
use wgpu_attention::reference::{self, Options, Real, join_heads, split_heads};
use wgpu_attention::{DType, TensorView};

use super::case::HostData;
use super::device::Profile;
use super::memory::Values;
use super::positions::{host, place_positions, placed_positions};
use super::random::Rng;
use super::run::{Layout, Placed};

/// The rotation of projected queries and keys, and the positions of their rows.
#[derive(Clone, Debug)]
pub struct RotaryData {
    pub rope: RopeConfig,
    pub at: RowPositions<HostData<u32>>,
    /// True if a device gets cosines and sines instead of the rope.
    pub tables: bool,
}

/// Drawn positions are below this.
const ROWS: usize = 256;

impl RotaryData {
    /// Rotates some of the channels of heads of `head_dim`, with rows anywhere below [`ROWS`].
    /// Returns `None` if the head has no pair.
    pub fn random(rng: &mut Rng, [batch, length, head_dim]: [usize; 3]) -> Option<Self> {
        let pairs = head_dim / 2;
        if pairs == 0 {
            return None;
        }
        let rotary_dim = 2 * rng.pick(&[pairs, pairs.div_ceil(2)]);
        let order = rng.pick(&[RopeOrder::Half, RopeOrder::Interleaved]);
        let rope = RopeConfig::new(rotary_dim).base(100.0).order(order);
        let last = ROWS - length;
        let sections = sections_of(rotary_dim / 2, rotary_dim == 2 * pairs);
        let on_axes = rope.sections(sections);
        let mut positions = |n: usize| (0..n).map(|_| rng.below(last) as u32).collect::<Vec<u32>>();
        let (rope, at) = match positions(1)[0] % 4 {
            0 => (rope, RowPositions::Start(positions(1)[0])),
            1 => (rope, RowPositions::Tensor(HostData::new(positions(batch), [batch, 1, 1, 1]))),
            2 => (rope, RowPositions::Tensor(HostData::new(positions(length), [1, 1, length, 1]))),
            _ => (on_axes, RowPositions::Tensor(HostData::new(positions(3 * length), [1, 3, length, 1]))),
        };
        // Tables of cosines and sines have no axes.
        Some(RotaryData { rope, at, tables: rng.chance(0.3) && rope != on_axes })
    }

    /// Rotates all channels on three axes: two rows of text, an image of three columns, and text.
    pub fn of_image([batch, length, head_dim]: [usize; 3]) -> Self {
        let position = |[b, axis, i, _]: [usize; 4]| {
            let patch = i.saturating_sub(2);
            let place = match i {
                0 | 1 => i,
                _ if i + 2 < length => 2 + [0, patch / 3, patch % 3][axis],
                _ => 4 + i / 2,
            };
            (7 * b + place) as u32
        };
        let at = RowPositions::Tensor(HostData::of([batch, 3, length, 1], position));
        let rope = RopeConfig::new(head_dim).base(100.0).sections(sections_of(head_dim / 2, true));
        RotaryData { rope, at, tables: false }
    }

    /// Rotates all channels of consecutive rows.
    pub fn in_order(head_dim: usize) -> Self {
        let rope = RopeConfig::new(head_dim).base(100.0);
        RotaryData { rope, at: RowPositions::Start(0), tables: false }
    }

    pub fn options<'a>(&'a self, options: Options<'a>) -> Options<'a> {
        options.rotary(self.rope, host(&self.at))
    }

    /// Rotates joined rows of heads, `[batch, length, heads · dim]`, or rotates a gradient back.
    pub fn turned<R: Real>(&self, x: &[R], [heads, length, dim]: [usize; 3], back: bool) -> Vec<R> {
        let shape = [x.len() / (heads * length * dim), heads, length, dim];
        let split = split_heads(x, length, heads, dim).expect("it fits");
        let turn = if back { reference::rotate_backward } else { reference::rotate };
        let turned = turn(&split, shape, &self.rope, host(&self.at)).expect("it fits");
        join_heads(&turned, length, heads, dim).expect("it fits")
    }

    pub fn place(&self, profile: &Profile) -> PlacedRotary {
        let rope = Rope::new(profile.gpu.device(), self.rope).expect("a rope");
        let frequencies = self.rope.frequencies();
        let tables = self.tables.then(|| {
            [f64::cos, f64::sin].map(|f| {
                let angles = (0..ROWS).flat_map(|row| frequencies.iter().map(move |w| row as f64 * w));
                let table: Vec<f32> = angles.map(|angle| (self.rope.amplitude() * f(angle)) as f32).collect();
                let [at] = Layout::Dense.places([[1, 1, ROWS, frequencies.len()]]);
                Placed::input(profile, Values::Floats(&table), DType::F32, at)
            })
        });
        let order = if self.rope == self.rope.order(RopeOrder::Half) {
            RopeOrder::Half
        } else {
            RopeOrder::Interleaved
        };
        PlacedRotary { rope, order, tables, at: self.at.clone(), tensor: place_positions(profile, &self.at) }
    }
}

/// Divides pairs into sections of about equal size.
pub fn sections_of(pairs: usize, interleaved: bool) -> RopeSections {
    let [height, width] = [(pairs + 1) / 3, pairs / 3];
    let sections = [pairs - height - width, height, width];
    if interleaved { RopeSections::Interleaved(sections) } else { RopeSections::Contiguous(sections) }
}

/// The same rotation on the device.
pub struct PlacedRotary {
    rope: Rope,
    order: RopeOrder,
    tables: Option<[Placed; 2]>,
    at: RowPositions<HostData<u32>>,
    tensor: Option<Placed>,
}

impl PlacedRotary {
    pub fn rotation(&self) -> Rotation<'_> {
        match &self.tables {
            Some([cos, sin]) => Rotation::CosSin { cos: cos.view(), sin: sin.view(), order: self.order },
            None => Rotation::Rope(&self.rope),
        }
    }

    pub fn at(&self) -> RowPositions<TensorView<'_>> {
        placed_positions(&self.at, self.tensor.as_ref())
    }

    /// Returns the positions of a step of `rows` rows from `first` on. With a cache, rows without
    /// three axes are at the cache's `starts`.
    pub fn step<'a>(
        &'a self,
        starts: Option<TensorView<'a>>,
        [first, rows]: [usize; 2],
    ) -> RowPositions<TensorView<'a>> {
        match (self.at(), starts) {
            (at, None) => at,
            (RowPositions::Tensor(t), _) if t.shape()[1] == 3 => {
                RowPositions::Tensor(t.slice(2, first, rows))
            }
            (_, Some(starts)) => RowPositions::Tensor(starts),
        }
    }
}
