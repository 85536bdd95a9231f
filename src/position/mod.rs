//! The operator: rotary, sinusoidal and learned positions.

mod rope;
mod table;

pub use rope::{RopeConfig, RopeOrder, RopeScaling};
pub(crate) use rope::{check_base, check_channels, sinusoid_frequencies};
pub use table::{Rope, Sinusoid};

use crate::device::DeviceFacts;
use crate::error::Error;
use crate::kernel::{Dispatch, View};
use crate::kernels::rotation_table::{DIGITS, LEVELS};
use crate::kernels::row_positions::PositionParams;
use crate::kernels::{KernelVariant, add_positions, rotate};
use crate::path::grid;
use crate::record::{Pipelines, dispatch, pass};
use crate::scratch::{BoundDispatch, Scratch};
use crate::tensor::{
    Access, DType, TensorView, axes, broadcast, check_aliasing, check_float, expect, expect_broadcast,
};

/// Last position of rotary and sinusoidal encodings, 2²⁴ − 1.
pub const MAX_POSITION: u32 = (DIGITS.pow(LEVELS as u32) - 1) as u32;

/// Which position each row has. On a device `T` is a [`TensorView`], for the reference a
/// [`HostTensor`](crate::HostTensor).
#[derive(Clone, Copy, Debug)]
pub enum RowPositions<T> {
    /// Row `i` of every sequence stands at `start + i`.
    Start(u32),
    /// U32, `[batch or 1, 1, length or 1, 1]`: the position of each row. Of length 1, where there are more rows, it
    /// holds the first position of each sequence, and row `i` stands `i` further. Positions past the last one there is
    /// are taken for that.
    Tensor(T),
}

/// What [`Positions::add`] adds. On a device `S` is a [`&Sinusoid`](Sinusoid) and `T` a [`TensorView`].
#[derive(Clone, Copy, Debug)]
pub enum PositionTable<S, T> {
    /// The sinusoidal encoding (Vaswani et al. 2017), as wide as `x`.
    Sinusoid(S),
    /// A learned table, `[1, 1, rows, dim]`, F32 or F16: a row for each position.
    Learned(T),
}

/// One rotation of queries or keys by their positions.
#[derive(Clone, Copy, Debug)]
pub struct Rotate<'a> {
    /// `[batch, heads, length, dim]`, F32 or F16. The first `rotary_dim` channels are rotated.
    pub x: TensorView<'a>,
    /// Shaped as `x`, F32 or F16; channels that are not rotated are copied. `None` rotates `x` in place.
    pub out: Option<TensorView<'a>>,
    /// Which channels are rotated, and by how much.
    pub rope: &'a Rope,
    /// Where the rows stand.
    pub at: RowPositions<TensorView<'a>>,
}

/// One sum of activations and their positions' encoding: `scale · x + table[position]`.
#[derive(Clone, Copy, Debug)]
pub struct AddPositions<'a> {
    /// `[batch, heads, length, dim]`, F32 or F16; activations are `[batch, 1, length, features]`.
    pub x: TensorView<'a>,
    /// Shaped as `x`, F32 or F16. `None` adds to `x` in place.
    pub out: Option<TensorView<'a>>,
    /// What is added.
    pub table: PositionTable<&'a Sinusoid, TensorView<'a>>,
    /// Where the rows stand.
    pub at: RowPositions<TensorView<'a>>,
    /// Factor of `x`: `√dim` for the embeddings of Vaswani et al., else 1.
    pub scale: f32,
}

/// Gives queries and keys, or the activations before them, their positions: rotary embedding of any kind that
/// [`RopeConfig`] says, sinusoidal encoding, learned tables. One dispatch each.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, q: wgpu_attention::TensorView)
/// # -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{RowPositions, Positions, Rope, RopeConfig, Rotate, Scratch, ScratchSize};
///
/// let rope = Rope::new(device, RopeConfig::new(64).base(500_000.0))?;
/// let mut scratch = Scratch::new(device, ScratchSize::default())?;
/// let call = Rotate { x: q, out: None, rope: &rope, at: RowPositions::Start(0) };
/// Positions::new(device).rotate(encoder, &call, &mut scratch)?;
/// # Ok(()) }
/// ```
///
/// Rotations come from a table in place of the device's own sin and cos, which WGSL allows to be wrong in the fourth
/// digit; arithmetic is f32. Batch and heads may reach wgpu's limit of workgroups, 65535 by default, each.
#[derive(Clone, Debug)]
pub struct Positions {
    pipelines: Pipelines,
}

impl Positions {
    /// Positions with pipelines of their own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Positions that share pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Positions { pipelines: pipelines.clone() }
    }

    /// Records a rotation, in a compute pass of its own. `scratch` may be empty.
    ///
    /// # Errors
    /// Shapes that differ, a `rotary_dim` above `x`'s dim, a start from which the rows reach past [`MAX_POSITION`],
    /// a written tensor that shares a buffer, and everything else that [`Error`] lists for tensors; then
    /// nothing has been recorded.
    pub fn rotate(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        call: &Rotate,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let call = rotation(call, self.pipelines.facts())?;
        self.record(call, scratch, |bound| dispatch(&mut pass(encoder, "rotate"), bound))
    }

    /// Records a rotation into a compute pass of the caller's, which is left with another pipeline and bind group 0.
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate).
    pub fn rotate_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        call: &Rotate,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let call = rotation(call, self.pipelines.facts())?;
        self.record(call, scratch, |bound| dispatch(pass, bound))
    }

    /// Records a sum, in a compute pass of its own. `scratch` may be empty.
    ///
    /// # Errors
    /// Shapes that differ, a scale that is not finite, a start from which the rows reach past the table or past
    /// [`MAX_POSITION`], a written tensor that shares a buffer, and everything else that [`Error`] lists for tensors;
    /// then nothing has been recorded.
    pub fn add(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        call: &AddPositions,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let call = sum(call, self.pipelines.facts())?;
        self.record(call, scratch, |bound| dispatch(&mut pass(encoder, "add positions"), bound))
    }

    /// Records a sum into a compute pass of the caller's, which is left with another pipeline and bind group 0.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn add_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        call: &AddPositions,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let call = sum(call, self.pipelines.facts())?;
        self.record(call, scratch, |bound| dispatch(pass, bound))
    }

    fn record(
        &self,
        call: Dispatch<KernelVariant>,
        scratch: &mut Scratch,
        emit: impl FnOnce(&[(BoundDispatch, [u32; 3])]),
    ) -> Result<(), Error> {
        let bound = self.pipelines.bind(&[call], scratch)?;
        emit(&bound);
        Ok(())
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
    pub(crate) fn check(&self, [batch, _, length, _]: [usize; 4], device: &DeviceFacts) -> Result<(), Error> {
        let Some(t) = self.tensor() else { return Ok(()) };
        t.check_as("positions", DType::U32, Access::Read, device)?;
        expect_broadcast("positions", t.shape(), [batch, 1, length, 1])
    }

    /// What a kernel takes as a parameter, for rows of `length` and positions up to `last`. Dispatch after `check`.
    pub(crate) fn params(&self, length: usize, last: u32, device: &DeviceFacts) -> PositionParams {
        let (view, start, by_row) = match self {
            RowPositions::Start(start) => (View::default(), *start, true),
            RowPositions::Tensor(t) => {
                let by_row = t.shape()[2] != length;
                (View::from(broadcast(t.window(device).layout)), 0, by_row)
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

/// Refuses rows that reach past the end of a learned table.
pub(crate) fn check_rows<T>(at: &RowPositions<T>, length: usize, table: [usize; 4]) -> Result<(), Error> {
    match at {
        RowPositions::Start(start) if past(*start, length) > table[2] as u64 => Err(Error::Shape {
            tensor: "table",
            axis: axes("table")[2],
            expected: format!("at least {}, start + length", past(*start, length)),
            got: table[2],
            shape: table,
        }),
        _ => Ok(()),
    }
}

/// Checks what is read and written, and that nothing else lies in the buffer that is written.
fn check_tensors<'a>(
    x: &TensorView<'a>,
    out: Option<&TensorView<'a>>,
    others: &[(&'static str, Option<TensorView<'a>>)],
    device: &DeviceFacts,
) -> Result<(), Error> {
    check_float("x", x)?;
    x.check("x", if out.is_some() { Access::Read } else { Access::Write }, device)?;
    let mut read: Vec<_> = others.iter().filter_map(|(name, t)| Some((*name, (*t)?))).collect();
    let Some(out) = out else { return check_aliasing(&[("x", *x)], &read) };
    check_float("out", out)?;
    out.check("out", Access::Write, device)?;
    (0..4).try_for_each(|axis| expect("out", out.shape(), axis, x.shape()[axis]))?;
    read.push(("x", *x));
    check_aliasing(&[("out", *out)], &read)
}

/// Workgroups along the rows, at most, each doing the work of several: in any number of them no index overflows.
const MOST_GROUPS: usize = 65535;

/// Workgroups of `workgroup` invocations for `work` items, and how many items they take at once.
fn share(work: usize, workgroup: usize, device: &DeviceFacts) -> (usize, u32) {
    let groups = work.div_ceil(workgroup).min(MOST_GROUPS).min(device.max_workgroups as usize);
    (groups, (groups * workgroup) as u32)
}

fn rotation<'a>(call: &Rotate<'a>, device: &DeviceFacts) -> Result<Dispatch<'a, KernelVariant>, Error> {
    let Rotate { x, out, rope, at } = call;
    let [batch, heads, length, dim] = x.shape();
    check_tensors(x, out.as_ref(), &[("positions", at.tensor())], device)?;
    at.check(x.shape(), device)?;
    check_start(at, length)?;
    rope.check_width("x", x.shape())?;
    let rotary_dim = rope.config().rotary_dim;
    let view = |t: &TensorView| View::from(t.window(device).layout);
    let pairs = rotary_dim / 2;
    let items = if out.is_some() { pairs + (dim - rotary_dim) } else { pairs };
    let work = length * items;
    let (groups, step) = share(work, rotate::WORKGROUP, device);
    let params = rotate::Params {
        x: view(x),
        out: view(out.as_ref().unwrap_or(x)),
        at: at.params(length, MAX_POSITION, device),
        rotation: rope.rotation_params(),
        items: items as u32,
        work: work as u32,
        step,
        pad: 0,
    };
    let variant =
        rotate::Rotate { x: x.dtype(), out: out.map(|t| t.dtype()), positions: at.tensor().is_some() };
    let tensors = [Some(*x), *out, Some(rope.view()), at.tensor()];
    Ok(Dispatch {
        variant: KernelVariant::Rotate(variant),
        params: bytemuck::bytes_of(&params).to_vec(),
        tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
        grid: grid([groups, heads, batch]),
    })
}

fn sum<'a>(call: &AddPositions<'a>, device: &DeviceFacts) -> Result<Dispatch<'a, KernelVariant>, Error> {
    let AddPositions { x, out, table, at, scale } = call;
    let [batch, heads, length, dim] = x.shape();
    let learned = match table {
        PositionTable::Sinusoid(_) => None,
        PositionTable::Learned(t) => Some(*t),
    };
    check_tensors(x, out.as_ref(), &[("table", learned), ("positions", at.tensor())], device)?;
    at.check(x.shape(), device)?;
    if !scale.is_finite() {
        return Err(Error::Option { option: "scale", value: f64::from(*scale), expected: "finite" });
    }
    let (rotation, last, bound) = match table {
        PositionTable::Sinusoid(sinusoid) => {
            expect("x", x.shape(), 3, sinusoid.dim())?;
            check_start(at, length)?;
            (sinusoid.rotation_params(), MAX_POSITION, sinusoid.view())
        }
        PositionTable::Learned(t) => {
            check_float("table", t)?;
            t.check("table", Access::Read, device)?;
            for (axis, expected) in [(0, 1), (1, 1), (3, dim)] {
                expect("table", t.shape(), axis, expected)?;
            }
            check_rows(at, length, t.shape())?;
            (bytemuck::Zeroable::zeroed(), (t.shape()[2] - 1) as u32, *t)
        }
    };
    let view = |t: &TensorView| View::from(t.window(device).layout);
    let work = length * dim;
    let (groups, step) = share(work, add_positions::WORKGROUP, device);
    let params = add_positions::Params {
        x: view(x),
        out: view(out.as_ref().unwrap_or(x)),
        table: view(&bound),
        at: at.params(length, last, device),
        rotation,
        dim: dim as u32,
        work: work as u32,
        step,
        scale: *scale,
    };
    let variant = add_positions::AddPositions {
        x: x.dtype(),
        out: out.map(|t| t.dtype()),
        learned: learned.map(|t| t.dtype()),
        positions: at.tensor().is_some(),
    };
    let tensors = [Some(*x), *out, Some(bound), at.tensor()];
    Ok(Dispatch {
        variant: KernelVariant::AddPositions(variant),
        params: bytemuck::bytes_of(&params).to_vec(),
        tensors: tensors.into_iter().flatten().map(|t| t.window(device)).collect(),
        grid: grid([groups, heads, batch]),
    })
}
