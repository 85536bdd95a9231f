//! A cache of validated and bound dispatches.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{KernelVariant, Requirements};
use crate::device::opengl::lock_opengl;
use crate::tensor::Error;

/// A dispatch that has been validated and bound. The same call can record it again without changes.
#[derive(Clone, Debug)]
pub(crate) struct BoundDispatch {
    pub pipeline: wgpu::ComputePipeline,
    pub bind_group: wgpu::BindGroup,
    /// The requirements of the kernel and its bindings.
    pub requirements: Arc<Requirements>,
}

/// The key of a bound dispatch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BindingKey {
    pub variant: KernelVariant,
    pub params: Vec<u8>,
    /// The buffer, the first byte and the number of bytes of each tensor.
    pub tensors: Vec<(wgpu::Buffer, u64, u64)>,
    /// The first workgroup, if the dispatch is a part of a grid.
    pub first: Option<[u32; 3]>,
}

/// The largest number of cached bindings: enough for the layers of a large model. If a call has
/// more than half as many dispatches, the limit is twice its dispatches.
const MOST: usize = 1024;

/// A binding that is idle for more calls than this is dropped. See [`Entry::idle`].
const MOST_IDLE_CALLS: u64 = 64;

/// The largest size of the buffers that only idle bindings keep alive. If the current call's
/// buffers are larger than half of it, the limit is twice their size.
const IDLE_BYTES: u64 = 8 << 20;

/// After this many calls the cache searches for idle bindings, even if no binding is new.
const ROUND: u64 = 16;

/// The largest number of dropped bindings that the cache remembers, without their buffers.
const MOST_GONE: usize = 4096;

/// The bindings of recent calls, which keep their buffers alive. A [`Scratch`](crate::Scratch) has
/// a cache for the calls that use it. Calls without a scratch use the cache of the operator.
///
/// An application may drop its tensors after each call, and wgpu does not report this. Therefore a
/// binding is idle from the call after its last use on. Buffers that only idle bindings hold are
/// limited in age, and in bytes by twice the current call's.
///
/// A binding that is used again after some calls is not idle for as many calls. It belongs to a
/// loop, for example over the layers of a model. The cache remembers the hashes of dropped
/// bindings. So it also detects a loop whose first round exceeded the limit.
///
/// Threads may share a cache. It is locked for lookups and insertions, not while wgpu creates
/// bindings.
#[derive(Debug, Default)]
pub(crate) struct BindingCache {
    bindings: Mutex<Bindings<BindingKey, BoundDispatch>>,
    /// The device, if the cache belongs to a [`Scratch`](crate::Scratch).
    device: Option<wgpu::Device>,
}

impl BindingCache {
    /// Locks the cache, even if another thread panicked with the lock: no update is left
    /// incomplete.
    fn lock(&self) -> MutexGuard<'_, Bindings<BindingKey, BoundDispatch>> {
        self.bindings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty cache for a scratch on `device`.
    pub fn of_scratch(device: &wgpu::Device) -> Self {
        BindingCache { bindings: Mutex::default(), device: Some(device.clone()) }
    }

    /// Refuses a scratch that was made on another device than `device`.
    pub fn check_device(&self, device: &wgpu::Device) -> Result<(), Error> {
        if self.device.as_ref().is_none_or(|own| own == device) {
            return Ok(());
        }
        let why = "create it with `Scratch::new` and the device of the operator's pipelines";
        Err(Error::Unsupported { what: "a scratch on another device", why })
    }

    /// Starts a call and returns its number.
    pub fn begin(&self) -> u64 {
        self.lock().begin()
    }

    pub fn get(&self, key: &BindingKey, call: u64) -> Option<BoundDispatch> {
        self.lock().get(key, call)
    }

    pub fn keep(&self, key: BindingKey, bound: BoundDispatch, call: u64) {
        self.lock().keep(key, bound, call);
    }

    /// Ends a call: drops bindings that were idle for too long, or that exceed a limit.
    pub fn end(&self, call: u64, device: &wgpu::Device) {
        // Buffers are freed after the lock is released.
        let dropped = self.lock().end(call);
        if !dropped.is_empty() {
            let _guard = lock_opengl(device);
            drop(dropped);
        }
    }

    pub fn clear(&self) {
        let dropped = std::mem::take(&mut *self.lock());
        let _guard = self.device.as_ref().and_then(lock_opengl);
        drop(dropped);
    }
}

/// A value that keeps buffers alive.
trait Holds: Clone + Eq + std::hash::Hash {
    type Buffer: Clone + Eq + std::hash::Hash;
    fn buffers(&self) -> impl Iterator<Item = (&Self::Buffer, u64)>;
}

impl Holds for BindingKey {
    type Buffer = wgpu::Buffer;
    fn buffers(&self) -> impl Iterator<Item = (&wgpu::Buffer, u64)> {
        self.tensors.iter().map(|(buffer, ..)| (buffer, buffer.size()))
    }
}

#[derive(Debug)]
struct Entry<T> {
    bound: T,
    /// The last call that used it.
    used: u64,
    /// Calls between two uses; 0 after only one use.
    rhythm: u64,
    /// Bytes of all buffers of the binding.
    bytes: u64,
}

impl<T> Entry<T> {
    /// Calls for which the binding has been idle.
    fn idle(&self, call: u64) -> u64 {
        let expected = if self.rhythm == 0 { 0 } else { self.rhythm + self.rhythm / 4 + 1 };
        call.saturating_sub(self.used).saturating_sub(expected)
    }
}

#[derive(Debug)]
struct Bindings<K, T> {
    kept: HashMap<K, Entry<T>>,
    /// Hashes of dropped keys, with the last call that used each.
    gone: HashMap<u64, u64>,
    hasher: RandomState,
    calls: u64,
    /// True if a binding was added since the last search.
    is_changed: bool,
}

impl<K, T> Default for Bindings<K, T> {
    fn default() -> Self {
        Bindings {
            kept: HashMap::new(),
            gone: HashMap::new(),
            hasher: RandomState::new(),
            calls: 0,
            is_changed: false,
        }
    }
}

impl<K: Holds, T: Clone> Bindings<K, T> {
    fn begin(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    fn get(&mut self, key: &K, call: u64) -> Option<T> {
        let entry = self.kept.get_mut(key)?;
        let interval = call.saturating_sub(entry.used);
        if interval > 0 {
            entry.rhythm = interval.max(entry.rhythm - entry.rhythm / 4);
            entry.used = call;
        }
        Some(entry.bound.clone())
    }

    fn keep(&mut self, key: K, bound: T, call: u64) {
        let gone = self.gone.remove(&self.hasher.hash_one(&key));
        let rhythm = gone.map_or(0, |used| call.saturating_sub(used));
        let bytes = key.buffers().fold(0u64, |all, (_, bytes)| all.saturating_add(bytes));
        self.kept.insert(key, Entry { bound, used: call, rhythm, bytes });
        self.is_changed = true;
    }

    /// Returns the dropped entries.
    fn end(&mut self, call: u64) -> Vec<(K, Entry<T>)> {
        if !self.is_changed && !call.is_multiple_of(ROUND) {
            return Vec::new();
        }
        self.is_changed = false;
        let mut gone: Vec<K> = Vec::new();
        // The idle bindings, the longest unused first.
        let mut idle = Vec::new();
        let (mut own, mut current) = (0usize, 0u64);
        for (key, entry) in &self.kept {
            match entry.idle(call) {
                0 if entry.used == call => (own, current) = (own + 1, current.saturating_add(entry.bytes)),
                0 => {}
                calls if calls > MOST_IDLE_CALLS => gone.push(key.clone()),
                _ => idle.push((entry.used, entry.bytes, key.clone())),
            }
        }
        idle.sort_unstable_by_key(|(used, ..)| *used);
        let sum = idle.iter().fold(0u64, |all, (_, bytes, _)| all.saturating_add(*bytes));
        if sum > IDLE_BYTES {
            gone.extend(self.too_much(&idle, call, current));
        }
        let left = self.kept.len() - gone.len();
        let most = MOST.max(own.saturating_mul(2));
        if left > most {
            let dropped: HashSet<K> = gone.iter().cloned().collect();
            let others = self.kept.iter().filter(|(key, entry)| entry.used != call && !dropped.contains(key));
            let mut others: Vec<(u64, K)> = others.map(|(key, entry)| (entry.used, key.clone())).collect();
            others.sort_unstable_by_key(|(used, _)| *used);
            gone.extend(others.into_iter().take(left - most).map(|(_, key)| key));
        }
        let dropped: Vec<_> = gone.into_iter().filter_map(|key| self.kept.remove_entry(&key)).collect();
        for (key, entry) in &dropped {
            self.gone.insert(self.hasher.hash_one(key), entry.used);
        }
        if self.gone.len() > MOST_GONE {
            let mut calls: Vec<u64> = self.gone.values().copied().collect();
            calls.sort_unstable();
            let middle = calls[calls.len() / 2];
            self.gone.retain(|_, used| *used > middle);
        }
        dropped
    }

    /// Returns the idle bindings to drop, so that buffers of idle bindings alone stay within the
    /// limit. `current` is the sum of bytes over the call's bindings: a buffer counts once per
    /// binding.
    fn too_much(&self, idle: &[(u64, u64, K)], call: u64, current: u64) -> Vec<K> {
        let mut seen = HashSet::new();
        let mut of_call = 0u64;
        if current > IDLE_BYTES / 2 {
            let own = self.kept.iter().filter(|(_, entry)| entry.used == call);
            for (buffer, bytes) in own.flat_map(|(key, _)| key.buffers()) {
                if seen.insert(buffer) {
                    of_call = of_call.saturating_add(bytes);
                }
            }
        }
        let mut left = of_call.saturating_mul(2).max(IDLE_BYTES);
        // Buffers of busy bindings stay alive in any case.
        let busy = self.kept.iter().filter(|(_, entry)| entry.idle(call) == 0);
        seen.extend(busy.flat_map(|(key, _)| key.buffers()).map(|(buffer, _)| buffer));
        let mut gone = Vec::new();
        let mut is_full = false;
        for (.., key) in idle.iter().rev() {
            let mut new: Vec<(&K::Buffer, u64)> =
                key.buffers().filter(|(buffer, _)| !seen.contains(buffer)).collect();
            new.dedup();
            let bytes = new.iter().fold(0u64, |all, (_, bytes)| all.saturating_add(*bytes));
            // The oldest bindings are dropped. A small old binding is dropped too if a newer one
            // was too large.
            is_full |= bytes > left;
            if is_full && bytes > 0 {
                gone.push(key.clone());
            } else {
                left -= bytes.min(left);
                seen.extend(new.into_iter().map(|(buffer, _)| buffer));
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers by number, with their bytes.
    impl Holds for Vec<(u64, u64)> {
        type Buffer = u64;
        fn buffers(&self) -> impl Iterator<Item = (&u64, u64)> {
            self.iter().map(|(buffer, bytes)| (buffer, *bytes))
        }
    }

    type Kept = Bindings<Vec<(u64, u64)>, ()>;

    /// Makes a call of these dispatches. Returns the number of dispatches that were not cached.
    fn call(kept: &mut Kept, dispatches: &[Vec<(u64, u64)>]) -> usize {
        let number = kept.begin();
        let mut made = 0;
        for key in dispatches {
            if kept.get(key, number).is_none() {
                kept.keep(key.clone(), (), number);
                made += 1;
            }
        }
        kept.end(number);
        made
    }

    /// Bytes of all buffers that are held.
    fn held(kept: &Kept) -> u64 {
        let buffers: HashSet<_> = kept.kept.keys().flatten().collect();
        buffers.into_iter().map(|(_, bytes)| bytes).sum()
    }

    #[test]
    fn fresh_tensors_are_let_go() {
        for bytes in [1 << 10, 1 << 20, 32 << 20, 1 << 30] {
            let mut kept = Kept::default();
            for n in 0..3000 {
                // One tensor that stays, and two new tensors of the call.
                assert_eq!(call(&mut kept, &[vec![(0, bytes), (2 * n + 1, bytes), (2 * n + 2, bytes)]]), 1);
                assert!(held(&kept) <= 3 * bytes + (6 * bytes).max(IDLE_BYTES), "{n}: {}", held(&kept));
                assert!(kept.kept.len() as u64 <= MOST_IDLE_CALLS + 1);
            }
        }
    }

    #[test]
    fn tensors_used_in_two_calls_are_let_go() {
        for distance in [1, 2, 5] {
            let (mut kept, bytes) = (Kept::default(), 32 << 20);
            for n in 0..2000u64 {
                call(&mut kept, &[vec![(n, bytes)]]);
                call(&mut kept, &[vec![(n.saturating_sub(distance), bytes)]]);
                assert!(
                    held(&kept) <= (6 * distance + 8) * bytes,
                    "{distance}, {n}: {}",
                    held(&kept) / bytes
                );
            }
        }
    }

    #[test]
    fn loops_over_layers_are_kept() {
        // Calls per round, dispatches per call, bytes of each layer's separate buffer.
        for (layers, dispatches, bytes) in
            [(1, 3, 1 << 30), (2, 1, 1 << 30), (32, 4, 1 << 10), (64, 4, 1 << 10), (64, 4, 1 << 30)]
        {
            let mut kept = Kept::default();
            let round = |kept: &mut Kept| -> usize {
                let of = |layer: u64, n: u64| vec![(0, 1 << 30), (1 + layer, bytes), (1000 + n, 1 << 10)];
                let calls = |layer| (0..dispatches).map(|n| of(layer, n)).collect::<Vec<_>>();
                (0..layers).map(|layer| call(kept, &calls(layer))).sum()
            };
            let all = (layers * dispatches) as usize;
            assert_eq!(round(&mut kept), all);
            if bytes == 1 << 10 || layers <= 2 {
                assert_eq!(round(&mut kept), 0, "{layers} layers");
            } else {
                // Bindings above the limit were dropped, but the cache remembers their hashes.
                assert!(round(&mut kept) <= all);
            }
            (0..100).for_each(|n| assert_eq!(round(&mut kept), 0, "{layers} layers, round {n}"));
        }
        // A long round of calls, with large weights.
        let mut kept = Kept::default();
        let round = |kept: &mut Kept| -> usize {
            (0..450).map(|n| call(kept, &[vec![(0, 1 << 10), (1 + n, 64 << 20)]])).sum()
        };
        round(&mut kept);
        round(&mut kept);
        (0..20).for_each(|n| assert_eq!(round(&mut kept), 0, "round {n}"));
        // After the loop ends, its bindings are dropped.
        for _ in 0..700 {
            call(&mut kept, &[vec![(9999, 1)]]);
        }
        assert_eq!(held(&kept), 1);
    }

    #[test]
    fn long_calls_keep_their_own() {
        let mut kept = Kept::default();
        let long: Vec<_> = (0..3000).map(|n| vec![(0, 1 << 20), (n + 1, 1 << 10)]).collect();
        assert_eq!(call(&mut kept, &long), 3000);
        (0..40).for_each(|_| assert_eq!(call(&mut kept, &long), 0));
        let short = vec![vec![(9999, 1)]];
        call(&mut kept, &short);
        assert_eq!(kept.kept.len(), MOST);
    }
}
