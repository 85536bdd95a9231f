//! The sequence table on the device: lengths and page tables of the sequences.

use super::CacheConfig;
use super::kernels::cache::{LENGTH, LIMIT, START, WORDS};
use super::sequences::{Edits, runs};
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

/// Returns a buffer with the changed words, from which the table is updated.
pub(super) fn upload(device: &wgpu::Device, edits: &Edits) -> Result<Option<wgpu::Buffer>, Error> {
    if edits.is_empty() {
        return Ok(None);
    }
    let words: Vec<u32> = edits.values().copied().collect();
    guarded(device, "changes of a cache", || {
        Some(filled(device, "attention.cache.changes", wgpu::BufferUsages::COPY_SRC, &words))
    })
}

/// Records the copy of `upload`, with the words of `edits`, into the sequence table.
pub(super) fn change(
    encoder: &mut wgpu::CommandEncoder,
    sequence_table: &wgpu::Buffer,
    upload: &wgpu::Buffer,
    edits: &Edits,
) {
    let mut from = 0;
    for (word, count) in runs(edits) {
        encoder.copy_buffer_to_buffer(upload, 4 * from, sequence_table, 4 * word as u64, 4 * count as u64);
        from += count as u64;
    }
}

/// Makes a buffer for a copy of the sequence table without the page tables.
pub(super) fn room_for_copy(device: &wgpu::Device, batch: usize) -> Result<wgpu::Buffer, Error> {
    guarded(device, "a cache", || {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("attention.cache.reordered"),
            size: 4 * (batch * WORDS) as u64,
            usage: wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })
}

/// Records that each sequence gets the lengths and the room of its parent, through `copy`.
/// Afterwards no tokens belong to a last advance.
pub(super) fn reorder(
    encoder: &mut wgpu::CommandEncoder,
    sequence_table: &wgpu::Buffer,
    copy: &wgpu::Buffer,
    parents: &[usize],
) {
    let word = |sequence: usize, word: usize| 4 * (sequence * WORDS + word) as u64;
    encoder.copy_buffer_to_buffer(sequence_table, 0, copy, 0, copy.size());
    for (s, parent) in parents.iter().enumerate() {
        encoder.copy_buffer_to_buffer(copy, word(*parent, LENGTH), sequence_table, word(s, START), 4);
        if *parent != s {
            // The length, the largest earlier length, and the room.
            let size = word(0, LIMIT + 1) - word(0, LENGTH);
            encoder.copy_buffer_to_buffer(copy, word(*parent, LENGTH), sequence_table, word(s, LENGTH), size);
        }
    }
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
