//! Masks whose tensors are handles of Burn.

use std::convert::Infallible;

use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::mask::DeviceMask;

use crate::error::Result;
use crate::tensor::{Bound, Float, bool, int};

/// A mask on handles. Float tensors are numbered as in the call.
pub(crate) type HandleMask = wgpu_attention::Mask<CubeTensor, CubeTensor, usize>;

/// A mask on buffers.
pub(crate) type BoundMask = wgpu_attention::Mask<Bound, Bound, usize>;

/// Takes the handles of a mask. Float tensors are appended to `floats`.
pub(crate) fn handles(mask: crate::Mask, floats: &mut Vec<(&'static str, Float)>) -> Result<HandleMask> {
    mask.try_map(int, bool, |name, t| {
        floats.push((name, Float::new(name, t)?));
        Ok(floats.len() - 1)
    })
}

/// Returns the tensors of a mask that are not floats, with their names.
pub(crate) fn tensors(mask: &HandleMask) -> Vec<(&'static str, &CubeTensor)> {
    let (mut numbers, mut bools) = (Vec::new(), Vec::new());
    let visited: std::result::Result<wgpu_attention::Mask<(), (), ()>, Infallible> = mask.as_ref().try_map(
        |name, t| {
            numbers.push((name, t));
            Ok(())
        },
        |name, t| {
            bools.push((name, t));
            Ok(())
        },
        |_, _| Ok(()),
    );
    let Ok(_) = visited;
    numbers.extend(bools);
    numbers
}

/// Finds the buffers of a mask.
pub(crate) fn bind(mask: &HandleMask) -> Result<BoundMask> {
    mask.as_ref().try_map(Bound::new, Bound::new, |_, n| Ok(*n))
}

/// Returns the library's mask.
pub(crate) fn view<'a>(mask: &'a BoundMask, floats: &'a [Bound]) -> DeviceMask<'a> {
    let view = |_: &'static str, t: &'a Bound| Ok(t.view());
    let mask: std::result::Result<DeviceMask, Infallible> =
        mask.as_ref().try_map(view, view, |_, n| Ok(floats[*n].view()));
    let Ok(mask) = mask;
    mask
}
