//! The operator: rotary, sinusoidal and learned positions.

mod backward;
pub(crate) mod kernels;
pub(crate) mod reference;
mod rope;
mod rotary;
mod table;

pub use backward::TableBackward;
use kernels::rotation_table::{DIGITS, LEVELS, RotationParams};
use kernels::row_positions::PositionParams;
use kernels::{add_positions, rotate};
pub use rope::{RopeConfig, RopeOrder, RopeScaling};
pub(crate) use rope::{check_base, check_channels, sinusoid_frequencies};
pub(crate) use rotary::Rotary;
pub use table::{Rope, Sinusoid};

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, Pipelines, Prepared, Recorder, Source, View};
use crate::tensor::{Access, CallTensors, DType, Element, Error, TensorView, axes, expect};

/// Last position of rotary and sinusoidal encodings, 2²⁴ − 1.
pub const MAX_POSITION: u32 = (DIGITS.pow(LEVELS as u32) - 1) as u32;

/// Which position each row has. On a device `T` is a [`TensorView`], for the reference a
/// [`HostTensor`](crate::HostTensor).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RowPositions<T> {
    /// Row `i` of every sequence stands at `start + i`.
    Start(u32),
    /// U32, `[batch or 1, 1, length or 1, 1]`: the position of each row. Of length 1, where there
    /// are more rows, it holds the first position of each sequence, and row `i` stands `i` further.
    /// Positions past the last one there is are taken for that.
    Tensor(T),
}

/// The rotation of each position: computed, or given.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)]
pub enum Rotation<'a> {
    /// By `position · frequency`, for every position up to [`MAX_POSITION`].
    Rope(&'a Rope),
    /// By cosines and sines that the caller made: of ONNX's RotaryEmbedding, of `transformers`'
    /// rotary modules, of kinds of scaling that [`RopeScaling`] does not have. Row `p` is for
    /// position `p`; tables with a row for each row of `x` are taken with
    /// [`RowPositions::Start`]`(0)`. Of pair `(a, b)` come `a cos − b sin` and `a sin + b cos`.
    CosSin {
        /// `[batch or 1, 1, rows, pairs]`, F32, F16 or BF16. The first `2 · pairs` channels are
        /// rotated: of tables that hold each angle twice, as in `transformers`, give one half
        /// ([`TensorView::slice`]).
        cos: TensorView<'a>,
        /// Shaped as `cos`, of its dtype.
        sin: TensorView<'a>,
        /// Which channels are pairs.
        order: RopeOrder,
    },
}

/// What [`Positions::add`] adds. On a device `S` is a [`&Sinusoid`](Sinusoid) and `T` a
/// [`TensorView`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PositionTable<S, T> {
    /// The sinusoidal encoding (Vaswani et al. 2017), as wide as `x`.
    Sinusoid(S),
    /// A learned table, `[1, 1, rows, dim]`, F32, F16 or BF16: a row for each position.
    Learned(T),
}

/// One rotation of queries or keys by their positions.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Rotate<'a> {
    /// `[batch, heads, length, dim]`, F32, F16 or BF16. The first `rotary_dim`, or `2 · pairs`,
    /// channels are rotated.
    pub(crate) x: TensorView<'a>,
    /// Shaped as `x`, F32, F16 or BF16; channels that are not rotated are copied. `None` rotates
    /// `x` in place.
    pub(crate) out: Option<TensorView<'a>>,
    /// Which channels are rotated, and by how much.
    pub(crate) rotation: Rotation<'a>,
    /// Where the rows stand.
    pub(crate) at: RowPositions<TensorView<'a>>,
}

/// One sum of activations and their positions' encoding: `scale · x + table[position]`.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AddPositions<'a> {
    /// `[batch, heads, length, dim]`, F32, F16 or BF16; activations are `[batch, 1, length,
    /// features]`.
    pub(crate) x: TensorView<'a>,
    /// Shaped as `x`, F32, F16 or BF16. `None` adds to `x` in place.
    pub(crate) out: Option<TensorView<'a>>,
    /// What is added.
    pub(crate) table: PositionTable<&'a Sinusoid, TensorView<'a>>,
    /// Where the rows stand.
    pub(crate) at: RowPositions<TensorView<'a>>,
    /// Factor of `x`: `√dim` for the embeddings of Vaswani et al., else 1.
    pub(crate) scale: f64,
}

impl<'a> From<&'a Rope> for Rotation<'a> {
    fn from(rope: &'a Rope) -> Self {
        Rotation::Rope(rope)
    }
}

impl<'a> Rotate<'a> {
    /// Rotates `x`, `[batch, heads, length, dim]`, F32, F16 or BF16, in place; its first
    /// `rotary_dim`, or `2 · pairs`, channels. `rotation` may be a [`&Rope`](Rope).
    pub fn new(
        x: TensorView<'a>,
        rotation: impl Into<Rotation<'a>>,
        at: RowPositions<TensorView<'a>>,
    ) -> Self {
        Rotate { x, out: None, rotation: rotation.into(), at }
    }

    /// Writes there, shaped as `x`, F32, F16 or BF16, and leaves `x`; channels that are not rotated
    /// are copied.
    pub fn out(mut self, out: impl Into<Option<TensorView<'a>>>) -> Self {
        self.out = out.into();
        self
    }
}

impl<'a> AddPositions<'a> {
    /// Adds `table` to `x`, `[batch, heads, length, dim]`, F32, F16 or BF16, in place; activations
    /// are `[batch, 1, length, features]`.
    pub fn new(
        x: TensorView<'a>,
        table: PositionTable<&'a Sinusoid, TensorView<'a>>,
        at: RowPositions<TensorView<'a>>,
    ) -> Self {
        AddPositions { x, out: None, table, at, scale: 1.0 }
    }

    /// Writes there, shaped as `x`, F32, F16 or BF16, and leaves `x`.
    pub fn out(mut self, out: impl Into<Option<TensorView<'a>>>) -> Self {
        self.out = out.into();
        self
    }

    /// Factor of `x`: `√dim` for the embeddings of Vaswani et al.; 1 unless set. Rounded to f32.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }
}

/// Gives queries and keys, or the activations before them, their positions: rotary embedding of any
/// kind that
/// [`RopeConfig`] says, sinusoidal encoding, learned tables. One dispatch each.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, q: wgpu_attention::TensorView)
/// # -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::position::{Positions, Rope, RopeConfig, Rotate, Rotation, RowPositions};
///
/// let rope = Rope::new(device, RopeConfig::new(64).base(500_000.0))?;
/// let call = Rotate::new(q, Rotation::Rope(&rope), RowPositions::Start(0));
/// Positions::new(device).rotate(encoder, &call)?;
/// # Ok(()) }
/// ```
///
/// The rotations of a [`Rope`] come from a table in place of the device's own sin and cos, which
/// WGSL allows to be wrong in the fourth digit; arithmetic is f32.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep
/// some buffers alive: see
/// [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct Positions {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl Positions {
    /// Positions with pipelines of their own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Positions that share pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Positions { pipelines: pipelines.clone(), bindings: Arc::default() }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of its calls, and with them the references to their buffers. Clones share
    /// them.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until
    /// then, the buffers that only they keep alive have at most twice the bytes of the last call's,
    /// or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Records a rotation into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that differ, more rotated channels than `x` has, a start from which the rows reach past [`MAX_POSITION`]
    /// or past the rows of `cos`, a written tensor that shares a buffer, and everything else that [`Error`] lists for tensors; then
    /// nothing has been recorded.
    pub fn rotate(&self, into: &mut impl Recorder, call: &Rotate) -> Result<(), Error> {
        self.prepare_rotate(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate).
    pub fn prepare_rotate(&self, call: &Rotate) -> Result<Prepared, Error> {
        let call = rotation(call, 1.0, &self.pipelines.facts())?;
        self.pipelines.bind("rotate", &[call], &self.bindings)
    }

    /// Records a sum into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that differ, a scale that is not finite, a start from which the rows reach past the table or past
    /// [`MAX_POSITION`], a written tensor that shares a buffer, and everything else that [`Error`] lists for tensors;
    /// then nothing has been recorded.
    pub fn add(&self, into: &mut impl Recorder, call: &AddPositions) -> Result<(), Error> {
        self.prepare_add(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn prepare_add(&self, call: &AddPositions) -> Result<Prepared, Error> {
        let call = sum(call, &self.pipelines.facts())?;
        self.pipelines.bind("add positions", &[call], &self.bindings)
    }
}

impl<'a> RowPositions<TensorView<'a>> {
    pub(crate) fn tensor(&self) -> Option<TensorView<'a>> {
        match self {
            RowPositions::Start(_) => None,
            RowPositions::Tensor(t) => Some(*t),
        }
    }

    /// Checks the tensor for rows of `shape`. A start is for [`check_start`].
    pub(crate) fn check(
        &self,
        [batch, _, length, _]: [usize; 4],
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<(), Error> {
        tensors.read_broadcast("positions", self.tensor(), DType::U32, [batch, 1, length, 1])
    }

    /// What a kernel takes as a parameter, for rows of `length` and positions up to `last`.
    /// Dispatch after `check`.
    pub(crate) fn params(&self, length: usize, last: u32, device: &DeviceFacts) -> PositionParams {
        let (view, start, by_row) = match self {
            RowPositions::Start(start) => (View::default(), *start, true),
            RowPositions::Tensor(t) => {
                let by_row = t.shape()[2] != length;
                (View::repeating(*t, device), 0, by_row)
            }
        };
        PositionParams { view, start, by_row: by_row.into(), last, pad: 0 }
    }
}

/// The position after the last of `length` rows; a host's slice may claim any length.
fn past(start: u32, length: usize) -> u64 {
    u64::from(start).saturating_add(length as u64)
}

/// Refuses rows that reach past the last position.
pub(crate) fn check_start<T>(at: &RowPositions<T>, length: usize) -> Result<(), Error> {
    match at {
        RowPositions::Start(start) if past(*start, length) > u64::from(MAX_POSITION) + 1 => {
            let expected = "small enough that start + length is at most 2^24";
            Err(Error::Option { option: "start", value: f64::from(*start), expected })
        }
        _ => Ok(()),
    }
}

/// Refuses rows that reach past the end of a table with a row for each position.
pub(crate) fn check_rows<T>(
    at: &RowPositions<T>,
    length: usize,
    tensor: &'static str,
    shape: [usize; 4],
) -> Result<(), Error> {
    match at {
        RowPositions::Start(start) if past(*start, length) > shape[2] as u64 => Err(Error::Shape {
            tensor,
            axis: axes(tensor)[2],
            expected: format!("at least {}, start + length", past(*start, length)),
            got: shape[2],
            shape,
            wanted: None,
        }),
        _ => Ok(()),
    }
}

/// Checks `x` and `out`, or `x` alone where it is written in place, and the positions of its rows.
fn check_tensors<'a, 'd>(
    x: TensorView<'a>,
    out: Option<TensorView<'a>>,
    at: &RowPositions<TensorView<'a>>,
    device: &'d DeviceFacts,
) -> Result<CallTensors<'a, 'd>, Error> {
    let mut tensors = CallTensors::new(device);
    let access = if out.is_some() { Access::Read } else { Access::Write };
    tensors.add(access, "x", x, Element::Float, x.shape())?;
    tensors.write("out", out, Element::Float, x.shape())?;
    at.check(x.shape(), &mut tensors)?;
    Ok(tensors)
}

/// Workgroups along the rows, at most, each doing the work of several: in any number of them no
/// index overflows.
const MOST_GROUPS: usize = 65535;

/// Workgroups of `workgroup` invocations for `work` items, and how many items they take at once.
fn share(work: usize, workgroup: usize, device: &DeviceFacts) -> (usize, u32) {
    let groups = work.div_ceil(workgroup).min(MOST_GROUPS).min(device.max_workgroups as usize);
    (groups, (groups * workgroup) as u32)
}

/// Checks what rotates `x`, and the greatest position there is a rotation for.
fn check_rotation<'a>(
    rotation: &Rotation<'a>,
    x: [usize; 4],
    at: &RowPositions<TensorView>,
    tensors: &mut CallTensors<'a, '_>,
) -> Result<u32, Error> {
    let [batch, _, length, dim] = x;
    let Rotation::CosSin { cos, sin, .. } = rotation else {
        check_start(at, length)?;
        return Ok(MAX_POSITION);
    };
    let shape = cos.shape();
    let [_, _, rows, pairs] = shape;
    tensors.read_broadcast("cos", *cos, Element::Float, [batch, 1, rows, pairs])?;
    check_rows(at, length, "cos", shape)?;
    if pairs > dim / 2 {
        let expected = format!("at most {}, half of x's {dim} channels", dim / 2);
        return Err(Error::Shape {
            tensor: "cos",
            axis: axes("cos")[3],
            expected,
            got: pairs,
            shape,
            wanted: None,
        });
    }
    tensors.read("sin", *sin, cos.dtype(), shape)?;
    // A checked tensor's rows are fewer than 2³².
    Ok((rows - 1) as u32)
}

/// The dispatch of a rotation, by the angles times `turn`, which is 1 or −1.
fn rotation<'a>(call: &Rotate<'a>, turn: f32, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
    let Rotate { x, out, rotation, at } = call;
    let [batch, heads, length, dim] = x.shape();
    let (rope, cos_sin, order) = match rotation {
        Rotation::Rope(rope) => (Some(*rope), None, rope.config().order),
        Rotation::CosSin { cos, sin, order } => (None, Some([*cos, *sin]), *order),
    };
    let [cos, sin] = [0, 1].map(|n| cos_sin.map(|tables| tables[n]));
    let mut tensors = check_tensors(*x, *out, at, device)?;
    let last = check_rotation(rotation, x.shape(), at, &mut tensors)?;
    tensors.finish()?;
    let rotation = match (rope, cos) {
        (Some(rope), _) => {
            rope.check_width("x", x.shape())?;
            rope.rotation_params()
        }
        (None, cos) => {
            let pairs = cos.map_or(0, |t| t.shape()[3]) as u32;
            RotationParams { pairs, amplitude: 1.0, rotary_dim: 2 * pairs, order: order as u32 }
        }
    };
    let (pairs, rotary_dim) = (rotation.pairs as usize, rotation.rotary_dim as usize);
    let items = if out.is_some() { pairs + (dim - rotary_dim) } else { pairs };
    let work = length * items;
    let (groups, step) = share(work, rotate::WORKGROUP, device);
    let call = rotate::RotateCall {
        x: Source { tensor: *x, in_place: out.is_none() },
        out: out.unwrap_or(*x),
        rotation_table: rope.map(Rope::view),
        cos_table: cos,
        sin_table: sin,
        positions: at.tensor(),
        at: at.params(length, last, device),
        rotation,
        items: items as u32,
        work: work as u32,
        step,
        turn,
    };
    Ok(call.dispatch([groups, heads, batch], device))
}

fn sum<'a>(call: &AddPositions<'a>, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
    let AddPositions { x, out, table, at, scale } = call;
    let [batch, heads, length, dim] = x.shape();
    let learned = match table {
        PositionTable::Sinusoid(_) => None,
        PositionTable::Learned(t) => Some(*t),
    };
    let mut tensors = check_tensors(*x, *out, at, device)?;
    let factor = *scale as f32;
    if !factor.is_finite() {
        return Err(Error::Option { option: "scale", value: *scale, expected: "finite in f32" });
    }
    let (rotation, last, rotation_table) = match table {
        PositionTable::Sinusoid(sinusoid) => {
            expect("x", x.shape(), 3, sinusoid.dim())?;
            check_start(at, length)?;
            (sinusoid.rotation_params(), MAX_POSITION, Some(sinusoid.view()))
        }
        PositionTable::Learned(t) => {
            tensors.read("table", *t, Element::Float, [1, 1, t.shape()[2], dim])?;
            check_rows(at, length, "table", t.shape())?;
            (bytemuck::Zeroable::zeroed(), (t.shape()[2] - 1) as u32, None)
        }
    };
    tensors.finish()?;
    let work = length * dim;
    let (groups, step) = share(work, add_positions::WORKGROUP, device);
    let call = add_positions::AddPositionsCall {
        x: Source { tensor: *x, in_place: out.is_none() },
        out: out.unwrap_or(*x),
        table: learned,
        rotation_table,
        positions: at.tensor(),
        at: at.params(length, last, device),
        rotation,
        dim: dim as u32,
        work: work as u32,
        step,
        scale: factor,
    };
    Ok(call.dispatch([groups, heads, batch], device))
}
