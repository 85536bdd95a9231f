//! Positions: the operator for rotary, sinusoidal and learned positions.

mod backward;
pub(crate) mod kernels;
pub(crate) mod reference;
mod rope;
mod rotary;
mod rows;
mod table;

pub use backward::TableBackward;
use kernels::rotation_table::RotationParams;
use kernels::{add_positions, rotate};
pub use rope::{RopeConfig, RopeOrder, RopeScaling, RopeSections};
pub(crate) use rope::{check_base, check_channels, sinusoid_frequencies};
pub(crate) use rotary::Rotary;
pub use rows::{MAX_POSITION, RowPositions};
use rows::{check_rows, check_start};
pub use table::{Rope, Sinusoid};

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, Pipelines, Prepared, Recorder, Source};
use crate::tensor::{Access, CallTensors, Element, Error, TensorView, axes, expect};

/// The rotation of each position: computed, or from the caller's tables.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)]
pub enum Rotation<'a> {
    /// Rotation by `position · frequency`, for every position up to [`MAX_POSITION`].
    Rope(&'a Rope),
    /// Rotation by the caller's cosines and sines. Use it for ONNX's RotaryEmbedding, for
    /// `transformers`' rotary modules, and for scaling that [`RopeScaling`] lacks.
    ///
    /// Row `p` of the tables is for position `p`. For tables with a row for each row of `x`, use
    /// [`RowPositions::Start`]`(0)`. Pair `(a, b)` becomes `a cos − b sin` and `a sin + b cos`.
    CosSin {
        /// `[batch or 1, 1, rows, pairs]`, F32, F16 or BF16. The first `2 · pairs` channels are
        /// rotated. Tables of `transformers` hold each angle twice: pass the first half of them
        /// ([`TensorView::slice`]).
        cos: TensorView<'a>,
        /// Shaped as `cos`, of the same dtype.
        sin: TensorView<'a>,
        /// The channels of a pair.
        order: RopeOrder,
    },
}

/// The term that [`Positions::add`] adds. On a device `S` is a [`&Sinusoid`](Sinusoid) and `T` a
/// [`TensorView`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PositionTable<S, T> {
    /// The sinusoidal encoding (Vaswani et al. 2017), as wide as `x`.
    Sinusoid(S),
    /// A learned table, `[1, 1, rows, dim]`, F32, F16 or BF16: a row for each position.
    Learned(T),
}

/// A rotation of queries or keys by their positions.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Rotate<'a> {
    /// `[batch, heads, length, dim]`, F32, F16 or BF16. The kernel rotates the first `rotary_dim`,
    /// or `2 · pairs`, channels.
    pub(crate) x: TensorView<'a>,
    /// Shaped as `x`, F32, F16 or BF16. The kernel copies channels that it does not rotate. `None`
    /// rotates `x` in place.
    pub(crate) out: Option<TensorView<'a>>,
    /// The channels to rotate, and their angles.
    pub(crate) rotation: Rotation<'a>,
    /// The position of each row.
    pub(crate) at: RowPositions<TensorView<'a>>,
}

/// A sum of activations and the encoding of their positions: `scale · x + table[position]`.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct AddPositions<'a> {
    /// `[batch, heads, length, dim]`, F32, F16 or BF16. For activations it is
    /// `[batch, 1, length, features]`.
    pub(crate) x: TensorView<'a>,
    /// Shaped as `x`, F32, F16 or BF16. `None` adds to `x` in place.
    pub(crate) out: Option<TensorView<'a>>,
    /// The encoding.
    pub(crate) table: PositionTable<&'a Sinusoid, TensorView<'a>>,
    /// The position of each row.
    pub(crate) at: RowPositions<TensorView<'a>>,
    /// The factor of `x`: `√dim` for the embeddings of Vaswani et al., else 1.
    pub(crate) scale: f64,
}

impl<'a> From<&'a Rope> for Rotation<'a> {
    fn from(rope: &'a Rope) -> Self {
        Rotation::Rope(rope)
    }
}

impl Rotation<'_> {
    /// Returns the number of axes that a tensor of positions may have.
    pub(crate) fn axes(&self) -> usize {
        match self {
            Rotation::Rope(rope) => rope.config().axes(),
            Rotation::CosSin { .. } => 1,
        }
    }
}

impl<'a> Rotate<'a> {
    /// Rotates the first `rotary_dim`, or `2 · pairs`, channels of `x` in place. `x` is
    /// `[batch, heads, length, dim]`, F32, F16 or BF16. `rotation` may be a [`&Rope`](Rope).
    pub fn new(
        x: TensorView<'a>,
        rotation: impl Into<Rotation<'a>>,
        at: RowPositions<TensorView<'a>>,
    ) -> Self {
        Rotate { x, out: None, rotation: rotation.into(), at }
    }

    /// Writes the result to `out` instead of `x`. `out` is shaped as `x`, F32, F16 or BF16. The
    /// kernel copies channels that it does not rotate.
    pub fn out(mut self, out: impl Into<Option<TensorView<'a>>>) -> Self {
        self.out = out.into();
        self
    }
}

impl<'a> AddPositions<'a> {
    /// Adds `table` to `x` in place. `x` is `[batch, heads, length, dim]`, F32, F16 or BF16. For
    /// activations it is `[batch, 1, length, features]`.
    pub fn new(
        x: TensorView<'a>,
        table: PositionTable<&'a Sinusoid, TensorView<'a>>,
        at: RowPositions<TensorView<'a>>,
    ) -> Self {
        AddPositions { x, out: None, table, at, scale: 1.0 }
    }

    /// Writes the result to `out` instead of `x`. `out` is shaped as `x`, F32, F16 or BF16.
    pub fn out(mut self, out: impl Into<Option<TensorView<'a>>>) -> Self {
        self.out = out.into();
        self
    }

    /// Sets the factor of `x`: `√dim` for the embeddings of Vaswani et al., by default 1. The host
    /// rounds it to f32.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }
}

/// The operator that encodes positions: rotary embeddings ([`RopeConfig`]), sinusoidal encoding and
/// learned tables. Use it on queries and keys, or on the activations before them. Each call is one
/// dispatch.
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
/// The rotations of a [`Rope`] come from a table instead of the device's sin and cos. WGSL allows
/// these functions to be wrong in the fourth digit. Arithmetic is f32.
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[doc(alias = "RotaryEmbedding")]
#[doc(alias = "apply_rotary_emb")]
#[derive(Clone, Debug)]
pub struct Positions {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl Positions {
    /// Makes an operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Makes an operator that shares pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Positions { pipelines: pipelines.clone(), bindings: Arc::default() }
    }

    /// Returns the pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of its calls, and with them the references to their buffers. Clones share
    /// the bindings.
    ///
    /// Without this call, unused bindings go after a few calls, at most 64. Until then they keep
    /// buffers alive. These buffers have at most twice the bytes of the last call's, or 8 MiB if
    /// that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Records a rotation into an encoder or a pass.
    ///
    /// # Errors
    /// A call with an error records nothing. Errors are the tensor errors of [`Error`], and:
    ///
    /// - shapes that differ
    /// - more rotated channels than `x` has
    /// - positions on three axes, without a rope with sections
    /// - a start from which the rows reach past [`MAX_POSITION`] or past the rows of `cos`
    /// - a written tensor that overlaps another tensor
    pub fn rotate(&self, into: &mut impl Recorder, call: &Rotate) -> Result<(), Error> {
        self.prepare_rotate(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernel. [`Prepared::record`] records it any
    /// number of times.
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate).
    pub fn prepare_rotate(&self, call: &Rotate) -> Result<Prepared, Error> {
        let call = rotation(call, 1.0, &self.pipelines.facts())?;
        self.pipelines.bind("rotate", &[call], &self.bindings)
    }

    /// Records a sum with positions into an encoder or a pass.
    ///
    /// # Errors
    /// A call with an error records nothing. Errors are the tensor errors of [`Error`], and:
    ///
    /// - shapes that differ
    /// - a scale that is not finite
    /// - a start from which the rows reach past the table or past [`MAX_POSITION`]
    /// - a written tensor that overlaps another tensor
    pub fn add(&self, into: &mut impl Recorder, call: &AddPositions) -> Result<(), Error> {
        self.prepare_add(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernel. [`Prepared::record`] records it any
    /// number of times.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn prepare_add(&self, call: &AddPositions) -> Result<Prepared, Error> {
        let call = sum(call, &self.pipelines.facts())?;
        self.pipelines.bind("add positions", &[call], &self.bindings)
    }
}

/// Checks `x` and `out`, or `x` alone if it is written in place, and the positions of its rows. A
/// tensor of positions may have 1 or `axes` axes.
fn check_tensors<'a, 'd>(
    x: TensorView<'a>,
    out: Option<TensorView<'a>>,
    (at, axes): (&RowPositions<TensorView<'a>>, usize),
    device: &'d DeviceFacts,
) -> Result<CallTensors<'a, 'd>, Error> {
    let mut tensors = CallTensors::new(device);
    let access = if out.is_some() { Access::Read } else { Access::Write };
    tensors.add(access, "x", x, Element::Float, x.shape())?;
    tensors.write("out", out, Element::Float, x.shape())?;
    at.check_axes(x.shape(), axes, &mut tensors)?;
    Ok(tensors)
}

/// The most workgroups along the rows. Each does the work of several, and no index overflows for
/// any number of workgroups.
const MOST_GROUPS: usize = 65535;

/// Returns the number of workgroups of `workgroup` invocations for `work` items, and their number
/// of invocations.
fn share(work: usize, workgroup: usize, device: &DeviceFacts) -> (usize, u32) {
    let groups = work.div_ceil(workgroup).min(MOST_GROUPS).min(device.max_workgroups as usize);
    (groups, (groups * workgroup) as u32)
}

/// Checks the tables of a rotation of `x`. Returns the last position that they hold.
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
        let expected = format!("at most {} (half of the {dim} channels of `x`)", dim / 2);
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

/// Returns the dispatch of a rotation by the angles times `turn`, which is 1 or −1.
fn rotation<'a>(call: &Rotate<'a>, turn: f32, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
    let Rotate { x, out, rotation, at } = call;
    let [batch, heads, length, dim] = x.shape();
    let (rope, cos_sin, order) = match rotation {
        Rotation::Rope(rope) => (Some(*rope), None, rope.config().order),
        Rotation::CosSin { cos, sin, order } => (None, Some([*cos, *sin]), *order),
    };
    let [cos, sin] = [0, 1].map(|n| cos_sin.map(|tables| tables[n]));
    let mut tensors = check_tensors(*x, *out, (at, rotation.axes()), device)?;
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
    let sections = rope.and_then(|rope| rope.config().sections).filter(|_| at.has_axes());
    let [height, width] = sections.map_or([0; 2], RopeSections::bounds);
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
        height: height as u32,
        width: width as u32,
        interleaved: matches!(sections, Some(RopeSections::Interleaved(_))).into(),
        axes: sections.is_some(),
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
    let mut tensors = check_tensors(*x, *out, (at, 1), device)?;
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
