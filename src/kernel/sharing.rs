//! Buffers that a dispatch reads and writes.
//!
//! WebGPU forbids a buffer that one dispatch binds as read-only and as read-write. If a dispatch
//! writes to a buffer, all its bindings of that buffer are read-write, and their ranges are apart.
//! Two inputs with the same range share one binding.

use super::{Binding, KernelVariant, Pipelines};
use crate::tensor::{Access, Error, Window};

/// The binding of a tensor that is read from a buffer that the dispatch writes as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shares {
    /// A writable binding.
    Buffer,
    /// The binding of an earlier tensor, which has the same range.
    Binding(usize),
}

/// [`Shares`] of each tensor of a dispatch. It is empty if no buffer is read and written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Sharing(Vec<Option<Shares>>);

impl Sharing {
    /// The bindings of `windows`, in the order of the kernel's bindings.
    ///
    /// # Errors
    /// Ranges that meet in a buffer that is read and written.
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
        let same = |n: usize, m: usize| {
            let (a, b) = (&windows[n], &windows[m]);
            a.buffer == b.buffer && (a.start, a.size) == (b.start, b.size)
        };
        let mut sharing = Vec::new();
        for n in 0..windows.len() {
            let first = (0..n).find(|m| is_read(*m) && same(n, *m));
            sharing.push(match first {
                _ if !is_read(n) || !is_shared(n) => None,
                Some(first) => Some(Shares::Binding(first)),
                None => Some(Shares::Buffer),
            });
            let meets = |m: usize| windows[m].meets(&windows[n]) && !(is_read(m) && is_read(n) && same(n, m));
            if let Some(m) = (0..n).filter(|_| is_shared(n)).find(|m| meets(*m)) {
                return Err(overlap(variant.label(), &bindings[m], &bindings[n]));
            }
        }
        if sharing.iter().all(Option::is_none) {
            return Ok(Sharing::default());
        }
        Ok(Sharing(sharing))
    }

    /// The tensors that share a buffer or a binding, by their place among the bindings.
    pub fn bindings(&self) -> impl Iterator<Item = (usize, Shares)> {
        self.0.iter().enumerate().filter_map(|(n, shares)| Some((n, (*shares)?)))
    }

    /// True if the tensor has a separate binding.
    pub fn is_bound(&self, tensor: usize) -> bool {
        !matches!(self.0.get(tensor), Some(Some(Shares::Binding(_))))
    }
}

/// Returns the error of two tensors of a kernel whose ranges overlap.
pub(crate) fn overlap(kernel: &'static str, a: &Binding, b: &Binding) -> Error {
    Error::SharedOverlap { kernel, tensor: a.name.clone(), other: b.name.clone() }
}
