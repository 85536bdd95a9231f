// Writes the table of chunks of a call.
//
// lengths [batch, 1, 1, 1]   starts [1, 1, 1, sequences + 1]
// indices, initial_indices [sequences, 1, 1, 1]   chunks [batch, all_slots, 8]
//
// A chunk has its first row, the number of its rows, and of those in the sequence. Then it has the
// sequence, and flags for the first and the last chunk. The last words are the state of the
// sequence and a flag, 1 if the caller has this state.
//
// Bindings (declared by the host): lengths, starts and both indices if there are any, chunks.
// Floors: 32 bytes written a chunk. Packed rows read all starts for each chunk. An invocation
// writes a chunk.

struct Found {
    first: u32,
    rows: u32,
    count: u32,
    sequence: u32,
    begins: bool,
    ends: bool,
}

// Rows of one sequence from `begin` to `end`, of which those before `seen` count.
fn found(begin: u32, end: u32, seen: u32, sequence: u32, n: u32) -> Found {
    let first = min(begin + n * p.chunk_len, end);
    let rows = min(p.chunk_len, end - first);
    var count = min(rows, max(seen, first) - first);
    // Without a state in the caller's memory a sequence has no rows.
    if sequence < p.sequences && !has_state(sequence) {
        count = 0u;
    }
    return Found(first, rows, count, sequence, n == 0u, first + count == seen);
}

fn has_state(sequence: u32) -> bool {
    var is_there = true;
    if HAS_INDICES {
        is_there = indices_at(view_at(p.indices, sequence, 0u, 0u, 0u)) < p.all_states;
    }
    if HAS_INITIAL_INDICES {
        is_there = is_there && initial_indices_at(view_at(p.initial_indices, sequence, 0u, 0u, 0u)) < p.all_initial;
    }
    return is_there;
}

// Chunks of packed rows: the rows before the first sequence, the sequences, the rows after the
// last. No sequence begins before the end of the previous one, whatever the tensor holds.
fn packed(slot: u32) -> Found {
    var result = Found(0u, 0u, 0u, 0u, false, false);
    var is_found = false;
    var left = slot;
    var begin = 0u;
    for (var s = 0u; s <= p.sequences + 1u && !is_found; s++) {
        var end = p.length;
        if s <= p.sequences {
            end = clamp(starts_at(view_at(p.starts, 0u, 0u, 0u, s)), begin, p.length);
        }
        let chunks_here = (end - begin + p.chunk_len - 1u) / p.chunk_len;
        if left < chunks_here {
            let is_outside = s == 0u || s == p.sequences + 1u;
            result = found(begin, end, select(end, begin, is_outside), max(s, 1u) - 1u, left);
            is_found = true;
        }
        left -= chunks_here;
        begin = end;
    }
    return result;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let slot = group.x * WORKGROUP + index;
    let b = group.y;
    if slot >= p.all_slots {
        return;
    }
    var chunk = Found();
    if HAS_STARTS {
        chunk = packed(slot);
    } else {
        var seen = p.length;
        if HAS_LENGTHS {
            seen = min(seen, lengths_at(view_at(p.lengths, b, 0u, 0u, 0u)));
        }
        chunk = found(0u, p.length, seen, b, slot);
    }
    let at = 8u * (b * p.all_slots + slot);
    chunks_store(at, chunk.first);
    chunks_store(at + 1u, chunk.rows);
    chunks_store(at + 2u, chunk.count);
    chunks_store(at + 3u, chunk.sequence);
    chunks_store(at + 4u, u32(chunk.begins));
    chunks_store(at + 5u, u32(chunk.ends));
    let sequence = min(chunk.sequence, p.sequences - 1u);
    var state = sequence;
    if HAS_INDICES {
        state = indices_at(view_at(p.indices, sequence, 0u, 0u, 0u));
    }
    chunks_store(at + 6u, state);
    chunks_store(at + 7u, u32(has_state(sequence)));
}
