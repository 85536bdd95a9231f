// The table of chunks in memory, eight words each. The first four are the chunk. The next three are
// the largest logarithmic weights of keys: in the chunk, before it, and up to its end.
//
// Needs: Chunk; chunks_at, p.all_slots, p.kv_heads.
// Gives: chunk_of, entry_of, log_after, log_before, log_within.

fn entry_of(b: u32, kv: u32, slot: u32) -> u32 {
    return 8u * ((b * p.kv_heads + kv) * p.all_slots + slot);
}

fn chunk_of(b: u32, kv: u32, slot: u32) -> Chunk {
    let at = entry_of(b, kv, slot);
    return Chunk(chunks_at(at), chunks_at(at + 1u), chunks_at(at + 2u), chunks_at(at + 3u));
}

fn log_within(b: u32, kv: u32, slot: u32) -> f32 {
    return bitcast<f32>(chunks_at(entry_of(b, kv, slot) + 4u));
}

fn log_before(b: u32, kv: u32, slot: u32) -> f32 {
    return bitcast<f32>(chunks_at(entry_of(b, kv, slot) + 5u));
}

fn log_after(b: u32, kv: u32, slot: u32) -> f32 {
    return bitcast<f32>(chunks_at(entry_of(b, kv, slot) + 6u));
}
