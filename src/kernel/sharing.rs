//! Buffers that a dispatch reads and writes.
//!
//! WebGPU forbids a buffer that one dispatch binds as read-only and as read-write. If a dispatch
//! writes to a buffer, all its bindings of that buffer are read-write, and their ranges are apart.
//! Inputs whose ranges overlap share one binding.

use super::{Binding, KernelVariant, MOST_SHIFTS, Pipelines};
use crate::tensor::{Access, Error, Window};

/// The binding of a tensor that is read from a buffer that the dispatch writes as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shares {
    /// A writable binding.
    Buffer,
    /// The binding of the tensor `owner`, whose range overlaps. It is the first of these tensors in
    /// the buffer.
    Binding {
        owner: usize,
        /// True if this tensor begins behind the owner.
        shifted: bool,
    },
}

/// [`Shares`] of each tensor of a dispatch. It is empty if no buffer is read and written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Sharing(Vec<Option<Shares>>);

impl Sharing {
    /// The bindings of `windows`, in the order of the kernel's bindings.
    ///
    /// # Errors
    /// A written range meets another range in its buffer. Ranges that overlap are together larger
    /// than a binding may be.
    pub fn of(windows: &[Window], variant: &KernelVariant, pipelines: &Pipelines) -> Result<Self, Error> {
        let repeats = |(n, window): (usize, &Window)| windows[..n].iter().any(|w| w.buffer == window.buffer);
        if !windows.iter().enumerate().any(repeats) {
            return Ok(Sharing::default());
        }
        let bindings = pipelines.bindings_of(variant);
        let is_read = |n: usize| bindings[n].access == Access::Read;
        let is_shared = |n: usize| {
            let with = |read: bool| {
                (0..windows.len()).any(|m| windows[m].buffer == windows[n].buffer && is_read(m) == read)
            };
            with(true) && with(false)
        };
        let owners = owners(windows, |n| is_read(n) && is_shared(n));
        let mut sharing = Vec::new();
        for (n, owner) in owners.into_iter().enumerate() {
            sharing.push(match owner {
                Some(owner) if owner == n => Some(Shares::Buffer),
                Some(owner) => {
                    let bytes = windows[n].start + windows[n].size - windows[owner].start;
                    if bytes > pipelines.facts().max_binding_bytes {
                        return Err(overlap(variant.label(), &bindings[owner], &bindings[n]));
                    }
                    Some(Shares::Binding { owner, shifted: windows[n].start > windows[owner].start })
                }
                None => None,
            });
            let meets = |m: usize| windows[m].meets(&windows[n]) && !(is_read(m) && is_read(n));
            if let Some(m) = (0..n).filter(|_| is_shared(n)).find(|m| meets(*m)) {
                return Err(overlap(variant.label(), &bindings[m], &bindings[n]));
            }
        }
        if sharing.iter().all(Option::is_none) {
            return Ok(Sharing::default());
        }
        Ok(Sharing(sharing))
    }

    /// The bindings, with the places of their tensors. A binding covers the ranges of all tensors
    /// that share it.
    pub fn bound<'a>(&self, windows: &[Window<'a>]) -> Vec<(usize, Window<'a>)> {
        let has_own = |n: usize| !matches!(self.0.get(n), Some(Some(Shares::Binding { .. })));
        let mut bound: Vec<_> = windows.iter().copied().enumerate().filter(|(n, _)| has_own(*n)).collect();
        for (n, shares) in self.bindings() {
            let Shares::Binding { owner, .. } = shares else { continue };
            for (_, window) in bound.iter_mut().filter(|(m, _)| *m == owner) {
                window.size = window.size.max(windows[n].start + windows[n].size - window.start);
            }
        }
        bound
    }

    /// The shifts of tensors in the bindings that they share, in elements of the binding's array.
    /// The kernel's uniform has them in this order. The result is empty if no tensor is shifted.
    pub fn shifts(&self, windows: &[Window], variant: &KernelVariant, pipelines: &Pipelines) -> Vec<u32> {
        let mut shifts = Vec::new();
        let has_f16 = pipelines.facts().f16;
        for (n, shares) in self.bindings() {
            if let Shares::Binding { owner, shifted: true } = shares {
                let bytes = pipelines.bindings_of(variant)[n].element_bytes(has_f16);
                shifts.push(((windows[n].start - windows[owner].start) / bytes) as u32);
            }
        }
        if !shifts.is_empty() {
            shifts.resize(MOST_SHIFTS, 0);
        }
        shifts
    }

    /// The tensors that share a buffer or a binding, by their place among the bindings.
    pub fn bindings(&self) -> impl Iterator<Item = (usize, Shares)> {
        self.0.iter().enumerate().filter_map(|(n, shares)| Some((n, (*shares)?)))
    }
}

/// Returns the tensor whose binding each tensor uses, if it is `shared`. Tensors whose ranges
/// overlap, directly or by others, use the binding of the one that begins first.
fn owners(windows: &[Window], shared: impl Fn(usize) -> bool) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..windows.len()).filter(|n| shared(*n)).collect();
    order.sort_by_key(|n| windows[*n].start);
    let mut owners = vec![None; windows.len()];
    for (place, n) in order.iter().enumerate() {
        let meets = |m: &&usize| windows[**m].meets(&windows[*n]);
        let earlier = order[..place].iter().find(meets);
        owners[*n] = Some(earlier.and_then(|m| owners[*m]).unwrap_or(*n));
    }
    owners
}

/// Returns the error of two tensors of a kernel whose ranges overlap.
pub(crate) fn overlap(kernel: &'static str, a: &Binding, b: &Binding) -> Error {
    Error::SharedOverlap { kernel, tensor: a.name.clone(), other: b.name.clone() }
}
