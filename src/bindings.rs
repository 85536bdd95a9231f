//! Dispatches that are bound already.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kernels::KernelVariant;

/// A dispatch that has been validated and bound once: the same call records it again as it is.
#[derive(Clone, Debug)]
pub(crate) struct BoundDispatch {
    pub pipeline: wgpu::ComputePipeline,
    pub bind_group: wgpu::BindGroup,
}

/// What identifies a dispatch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BindingKey {
    pub variant: KernelVariant,
    pub params: Vec<u8>,
    /// Buffer, first byte, bytes.
    pub tensors: Vec<(wgpu::Buffer, u64, u64)>,
}

/// Bindings kept before all are dropped: enough for the layers of a large model. A call of many dispatches may
/// keep twice its own.
const KEPT: usize = 1024;

/// The bindings of recent calls, which keep their buffers alive. They are where the call's memory is: in the
/// [`Scratch`](crate::Scratch) of a call that takes one, so that dropping it frees its buffers, else in the operator.
///
/// Threads may share one; the lock is held to look and to keep, not while something is bound.
#[derive(Debug, Default)]
pub(crate) struct BindingCache(Mutex<HashMap<BindingKey, BoundDispatch>>);

impl BindingCache {
    /// Usable if another thread panicked with it: there is nothing half done under the lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<BindingKey, BoundDispatch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before a call of `dispatches`: what it keeps must last until it is recorded again.
    pub fn make_room(&self, dispatches: usize) {
        let mut kept = self.lock();
        if kept.len().saturating_add(dispatches) > KEPT.max(dispatches.saturating_mul(2)) {
            kept.clear();
        }
    }

    pub fn get(&self, key: &BindingKey) -> Option<BoundDispatch> {
        self.lock().get(key).cloned()
    }

    pub fn keep(&self, key: BindingKey, bound: BoundDispatch) {
        self.lock().insert(key, bound);
    }

    pub fn clear(&self) {
        self.lock().clear();
    }
}
