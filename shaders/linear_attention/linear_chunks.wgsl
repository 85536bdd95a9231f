// Writes the table of chunks and the logarithmic weights of keys. Calls need it for packed
// sequences and for keys with logarithmic weights. The weight of a key is −∞ if a mask hides the
// key. If features were divided by their largest, it is the logarithm of the divisor, else 0.
//
// key_mask [batch, kv_heads, 1, kv_len] bool   lengths [batch, kv_heads, 1, 1]
// starts [1, 1, 1, sequences − 1]   logs [batch, kv_heads, kv_len]: read and written
// chunks [batch, kv_heads, slots, 8]: see linear_attention/table.wgsl
//
// Bindings (declared by the host): key_mask, lengths, starts and logs if there are any, chunks. The
// kernel reads and writes every element once, and starts once a chunk. An invocation computes a
// chunk.

// Returns a chunk of packed rows: the rows before the first sequence, the sequences, the rows after
// the last. No sequence begins before the end of the previous one, whatever the tensor holds.
fn chunk_at(b: u32, slot: u32) -> Chunk {
    if !IS_PACKED {
        return plain_chunk(b, slot, p.kv_len);
    } else {
        var found = Chunk(0u, 0u, 0u, HIDDEN);
        var is_found = false;
        var left = slot;
        var begin = 0u;
        for (var s = 0u; s < p.sequences && !is_found; s++) {
            var end = p.kv_len;
            if s + 1u < p.sequences {
                end = clamp(start_of(s), begin, p.kv_len);
            }
            let chunks_here = (end - begin + p.chunk_len - 1u) / p.chunk_len;
            if left < chunks_here {
                let first = begin + left * p.chunk_len;
                let hidden = s == 0u || s + 1u == p.sequences;
                found = Chunk(first, min(p.chunk_len, end - first), s, select(left, HIDDEN, hidden));
                is_found = true;
            }
            left -= chunks_here;
            begin = end;
        }
        return found;
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.y;
    let b = group.z;
    let slot = group.x * WORKGROUP + index;
    if slot >= p.all_slots {
        return;
    }
    let chunk = chunk_at(b, slot);
    let at = 8u * ((b * p.kv_heads + kv) * p.all_slots + slot);
    chunks_store(at, chunk.first);
    chunks_store(at + 1u, chunk.count);
    chunks_store(at + 2u, chunk.sequence);
    chunks_store(at + 3u, chunk.ordinal);
    chunks_store(at + 4u, bitcast<u32>(weigh_keys(b, kv, chunk)));
}
