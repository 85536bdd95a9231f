//! The sequence table on the device: lengths and page tables of the sequences.

use super::CacheConfig;
use super::kernels::cache::{HIGH, LENGTH, LIMIT, START, WORDS};
use super::sequences::Edits;
use crate::kernel::guard::guarded;
use crate::tensor::Error;

/// Makes the sequence table of an empty cache. Without pages every sequence has all its room at
/// once.
pub(super) fn empty(device: &wgpu::Device, config: &CacheConfig) -> Result<wgpu::Buffer, Error> {
    guarded(device, "a cache", || {
        let mut words = vec![0; config.sequence_table_words()];
        if config.pages_each() == 0 {
            (0..config.batch).for_each(|s| words[s * WORDS + LIMIT] = config.longest() as u32);
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        filled(device, "attention.cache.sequence_table", usage, &words)
    })
}

/// Returns a buffer with the changed words: pairs for `cache_words.wgsl`, then the values.
pub(super) fn upload(device: &wgpu::Device, edits: &Edits) -> Result<wgpu::Buffer, Error> {
    let first = 2 * edits.len();
    let pairs = edits.keys().enumerate().flat_map(|(n, word)| [*word as u32, (first + n) as u32]);
    let words: Vec<u32> = pairs.chain(edits.values().copied()).collect();
    guarded(device, "changes of a cache", || {
        filled(device, "attention.cache.changes", wgpu::BufferUsages::STORAGE, &words)
    })
}

/// Returns a buffer with a list of `most` indices for each sequence. Shorter lists end with zeros,
/// which kernels do not read.
pub(super) fn upload_lists(
    device: &wgpu::Device,
    lists: &[&[usize]],
    most: usize,
) -> Result<wgpu::Buffer, Error> {
    let mut words = vec![0; (lists.len() * most).max(1)];
    for (row, list) in words.chunks_mut(most.max(1)).zip(lists) {
        row.iter_mut().zip(*list).for_each(|(word, index)| *word = *index as u32);
    }
    guarded(device, "changes of a cache", || {
        filled(device, "attention.cache.keep", wgpu::BufferUsages::STORAGE, &words)
    })
}

/// Makes a buffer for the words that [`moves_of_reorder`] moves.
pub(super) fn room_for_copy(device: &wgpu::Device, batch: usize) -> Result<wgpu::Buffer, Error> {
    guarded(device, "a cache", || {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("attention.cache.reordered"),
            size: 4 * (batch * REORDERED.len()) as u64,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        })
    })
}

/// The words of a sequence that change in a reorder, and the word of its parent that each gets.
/// They are the length, the largest earlier length, and the room. No tokens then belong to an
/// advance.
const REORDERED: [(usize, usize); 4] = [(START, LENGTH), (LENGTH, LENGTH), (HIGH, HIGH), (LIMIT, LIMIT)];

/// Returns a buffer of pairs for `cache_words.wgsl`, and half of their number. The first half
/// copies words of parents to another buffer. The second half copies them to the sequences.
pub(super) fn moves_of_reorder(
    device: &wgpu::Device,
    parents: &[usize],
) -> Result<(wgpu::Buffer, usize), Error> {
    let of = |(s, parent): (usize, &usize)| {
        let (to, from) = (s * WORDS, *parent * WORDS);
        REORDERED.map(|(word, of_parent)| [(to + word) as u32, (from + of_parent) as u32])
    };
    let moves: Vec<[u32; 2]> = parents.iter().enumerate().flat_map(of).collect();
    let gather = moves.iter().zip(0..).flat_map(|([_, from], n)| [n, *from]);
    let scatter = moves.iter().zip(0..).flat_map(|([to, _], n)| [*to, n]);
    let words: Vec<u32> = gather.chain(scatter).collect();
    let buffer = guarded(device, "changes of a cache", || {
        filled(device, "attention.cache.changes", wgpu::BufferUsages::STORAGE, &words)
    })?;
    Ok((buffer, moves.len()))
}

/// Makes a buffer that holds `words`.
fn filled(device: &wgpu::Device, label: &str, usage: wgpu::BufferUsages, words: &[u32]) -> wgpu::Buffer {
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size: 4 * words.len() as u64,
        usage,
        mapped_at_creation: true,
    });
    if let Ok(mut mapped) = buffer.slice(..).get_mapped_range_mut() {
        mapped.slice(..).copy_from_slice(bytemuck::cast_slice(words));
    }
    buffer.unmap();
    buffer
}
