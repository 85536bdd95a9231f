//! The type of a preset: a mod's text, its numbers and tables, and the same function on the host.

use std::fmt;
use std::sync::Arc;

use crate::mask::mods::{At, BoundMaskMod, BoundScoreMod, Captured, MaskMod, ScoreMod};
use crate::tensor::{DType, Error, HostTensor, LONGEST_AXIS, TensorView, expect_shape};

/// Elements of a table, with the indexing of mods. On an axis of 1 every index reads the one
/// element. An index past the end reads the last element.
#[derive(Clone, Debug)]
pub(super) struct Elements<T> {
    data: Arc<[T]>,
    shape: [usize; 4],
}

impl<T: Copy> Elements<T> {
    pub fn at(&self, index: [u32; 4]) -> T {
        let flat =
            index.iter().zip(self.shape).fold(0, |flat, (n, len)| flat * len + (*n as usize).min(len - 1));
        self.data[flat]
    }
}

/// A tensor that a preset reads on a device: dense, row-major. Upload tables with
/// [`Gpu::upload_tables`](crate::Gpu::upload_tables).
#[derive(Clone, Debug)]
pub struct Table {
    name: &'static str,
    values: Values,
}

#[derive(Clone, Debug)]
enum Values {
    Floats(Elements<f32>),
    Numbers(Elements<u32>),
    Bools(Elements<bool>),
}

/// The elements of a [`Table`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum TableData<'a> {
    /// Elements of [`DType::F32`]. A mod also reads F16 and BF16.
    Floats(&'a [f32]),
    /// Elements of [`DType::U32`].
    Numbers(&'a [u32]),
    /// Elements of [`DType::Bool`], a byte each.
    Bools(&'a [bool]),
}

impl Table {
    /// Returns its name in the preset's text and in errors.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the shape that a view of it must have.
    pub fn shape(&self) -> [usize; 4] {
        match &self.values {
            Values::Floats(t) => t.shape,
            Values::Numbers(t) => t.shape,
            Values::Bools(t) => t.shape,
        }
    }

    /// Returns the dtype in which its elements are uploaded, if nothing converts them.
    pub fn dtype(&self) -> DType {
        match &self.values {
            Values::Floats(_) => DType::F32,
            Values::Numbers(_) => DType::U32,
            Values::Bools(_) => DType::Bool,
        }
    }

    /// Returns its elements.
    pub fn data(&self) -> TableData<'_> {
        match &self.values {
            Values::Floats(t) => TableData::Floats(&t.data),
            Values::Numbers(t) => TableData::Numbers(&t.data),
            Values::Bools(t) => TableData::Bools(&t.data),
        }
    }

    /// Returns a view of a buffer that holds it.
    pub fn view<'a>(&self, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        TensorView::new(buffer, self.dtype(), self.shape())
    }

    fn captured(&self) -> Captured {
        match &self.values {
            Values::Floats(_) => Captured::float(self.name),
            Values::Numbers(_) => Captured::number(self.name),
            Values::Bools(_) => Captured::bool(self.name),
        }
    }
}

/// Copies a tensor. Axes may have any length, except where `wanted` has a length.
fn elements<T: Copy>(
    name: &'static str,
    tensor: HostTensor<T>,
    wanted: [Option<usize>; 4],
) -> Result<Elements<T>, Error> {
    let shape = tensor.shape;
    if shape.contains(&0) {
        return Err(Error::ZeroSize { tensor: name, axis: "an axis" });
    }
    expect_shape(name, shape, std::array::from_fn(|n| wanted[n].unwrap_or(shape[n])))?;
    tensor.check(name, shape)?;
    Ok(Elements { data: tensor.data.into(), shape })
}

/// Lengths of an axis: any, and one element.
pub(super) const ANY: Option<usize> = None;
pub(super) const ONE: Option<usize> = Some(1);

pub(super) fn floats(
    name: &'static str,
    tensor: HostTensor<f32>,
    wanted: [Option<usize>; 4],
) -> Result<(Elements<f32>, Table), Error> {
    let own = elements(name, tensor, wanted)?;
    Ok((own.clone(), Table { name, values: Values::Floats(own) }))
}

pub(super) fn numbers(
    name: &'static str,
    tensor: HostTensor<u32>,
    wanted: [Option<usize>; 4],
) -> Result<(Elements<u32>, Table), Error> {
    let own = elements(name, tensor, wanted)?;
    Ok((own.clone(), Table { name, values: Values::Numbers(own) }))
}

pub(super) fn bools(
    name: &'static str,
    tensor: HostTensor<bool>,
    wanted: [Option<usize>; 4],
) -> Result<(Elements<bool>, Table), Error> {
    let own = elements(name, tensor, wanted)?;
    Ok((own.clone(), Table { name, values: Values::Bools(own) }))
}

/// Checks a number of tokens, so that sums fit in an i32.
pub(super) fn size(option: &'static str, value: usize) -> Result<u32, Error> {
    if value > LONGEST_AXIS {
        return Err(Error::Option { option, value: value as f64, expected: "below 2^29" });
    }
    Ok(value as u32)
}

/// Checks a number that is a divisor.
pub(super) fn divisor(option: &'static str, value: usize) -> Result<u32, Error> {
    if !(1..=LONGEST_AXIS).contains(&value) {
        return Err(Error::Option { option, value: value as f64, expected: "at least 1 and below 2^29" });
    }
    Ok(value as u32)
}

/// A function of a score and its pair.
type ScoreFn = dyn Fn(f64, &At) -> f64 + Send + Sync;

/// A mask as a preset, for a device and for the host.
#[derive(Clone)]
pub struct MaskPreset {
    name: &'static str,
    wgsl: &'static str,
    own: MaskMod,
    uniforms: Vec<u32>,
    tables: Vec<Table>,
    sees: Arc<dyn Fn(&At) -> bool + Send + Sync>,
}

/// A score function as a preset, for a device and for the host.
#[derive(Clone)]
pub struct ScorePreset {
    name: &'static str,
    wgsl: &'static str,
    own: ScoreMod,
    uniforms: Vec<u32>,
    tables: Vec<Table>,
    score: Arc<ScoreFn>,
    slope: Arc<ScoreFn>,
}

macro_rules! preset {
    ($name:ident, $own:ident, $bound:ident, $method:ident) => {
        impl $name {
            /// Returns the name of the function that makes it.
            pub fn name(&self) -> &'static str {
                self.name
            }

            /// Returns its text, which does not depend on its numbers.
            pub fn wgsl(&self) -> &'static str {
                self.wgsl
            }

            /// Returns the mod of its text.
            pub fn $method(&self) -> $own {
                self.own
            }

            /// Returns the bytes of the text's `Uniforms`; empty if it has none.
            pub fn uniforms(&self) -> &[u8] {
                bytemuck::cast_slice(&self.uniforms)
            }

            /// Returns the tables that the device needs, in the order of [`with`](Self::with).
            pub fn tables(&self) -> &[Table] {
                &self.tables
            }

            /// Returns the mod for a call, with views of its tables on the device. A preset without
            /// tables takes no views; pass `&preset` instead.
            pub fn with<'a>(&self, tables: &[TensorView<'a>]) -> $bound<'a> {
                self.own.with(tables).uniforms(self.uniforms())
            }

            /// Returns the mod for a call, with buffers from
            /// [`Gpu::upload_tables`](crate::Gpu::upload_tables) for its tables.
            pub fn bound<'a>(&self, buffers: &'a [wgpu::Buffer]) -> $bound<'a> {
                let views: Vec<_> =
                    self.tables.iter().zip(buffers).map(|(table, buffer)| table.view(buffer)).collect();
                self.with(&views)
            }
        }

        impl From<&$name> for $bound<'_> {
            /// Binds a preset that has no tables.
            fn from(preset: &$name) -> Self {
                preset.with(&[])
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                let mut shown = f.debug_struct(self.name);
                shown.field("uniforms", &self.uniforms).field("tables", &self.tables).finish()
            }
        }
    };
}

preset!(MaskPreset, MaskMod, BoundMaskMod, mask_mod);
preset!(ScorePreset, ScoreMod, BoundScoreMod, score_mod);

impl MaskPreset {
    /// Makes a preset of a text, its numbers and tables, and the function on the host.
    pub(super) fn new(
        name: &'static str,
        wgsl: &'static str,
        uniforms: &[u32],
        tables: Vec<Table>,
        sees: impl Fn(&At) -> bool + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let captured: Vec<_> = tables.iter().map(Table::captured).collect();
        let own = MaskMod::capturing(wgsl, &captured)?;
        Ok(MaskPreset { name, wgsl, own, uniforms: uniforms.to_vec(), tables, sees: Arc::new(sees) })
    }

    /// True if the pair is seen.
    pub fn sees(&self, at: &At) -> bool {
        (self.sees)(at)
    }

    /// Returns the same function, for [`Mask::mask_fn`](crate::Mask::mask_fn).
    pub fn mask_fn(&self) -> &(dyn Fn(&At) -> bool + Send + Sync) {
        &*self.sees
    }
}

impl ScorePreset {
    /// Makes a preset of a text, its numbers and tables, the function on the host and its
    /// derivative.
    pub(super) fn new(
        name: &'static str,
        wgsl: &'static str,
        uniforms: &[u32],
        tables: Vec<Table>,
        score: impl Fn(f64, &At) -> f64 + Send + Sync + 'static,
        slope: impl Fn(f64, &At) -> f64 + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let captured: Vec<_> = tables.iter().map(Table::captured).collect();
        let own = ScoreMod::capturing(wgsl, &captured)?;
        let uniforms = uniforms.to_vec();
        Ok(ScorePreset { name, wgsl, own, uniforms, tables, score: Arc::new(score), slope: Arc::new(slope) })
    }

    /// Makes a preset that adds to the score.
    pub(super) fn adding(
        name: &'static str,
        wgsl: &'static str,
        uniforms: &[u32],
        tables: Vec<Table>,
        bias: impl Fn(&At) -> f64 + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::new(name, wgsl, uniforms, tables, move |score, at| score + bias(at), |_, _| 1.0)
    }

    /// Returns the new score of the pair.
    pub fn score(&self, score: f64, at: &At) -> f64 {
        (self.score)(score, at)
    }

    /// Returns the derivative of the new score by the score.
    pub fn slope(&self, score: f64, at: &At) -> f64 {
        (self.slope)(score, at)
    }

    /// Returns the score as a function, for [`Mask::score_fn`](crate::Mask::score_fn).
    pub fn score_fn(&self) -> &(dyn Fn(f64, &At) -> f64 + Send + Sync) {
        &*self.score
    }

    /// Returns the derivative as a function, for
    /// [`Mask::score_fn_slope`](crate::Mask::score_fn_slope).
    pub fn slope_fn(&self) -> &(dyn Fn(f64, &At) -> f64 + Send + Sync) {
        &*self.slope
    }
}
