// Moves the rows of whole sequences within a cache, from each parent to the sequences that continue
// from it.
//
// The sequence table lists copies, and exchanges for sequences that form a circle. In its order no
// move overwrites a row that a later move reads. An invocation moves a word of one row through all
// moves, so the order needs no barrier.
// Floor: every moved word is read once and written once, or twice if exchanged.
//
// Bindings (declared by the host): rows, the keys or the values; sequence_table.

// Moves the word at o of a sequence through all moves. stride: words from one sequence to the next.
fn move_word(o: u32, stride: u32) {
    for (var n = 0u; n < p.cache.batch; n++) {
        let to = sequence_table_at(n * WORDS + MOVE_TO);
        let source = sequence_table_at(n * WORDS + MOVE_FROM);
        let origin = source & ~EXCHANGE;
        // A move that goes nowhere follows the last move.
        if to == origin || max(to, origin) >= p.cache.batch {
            return;
        }
        let x = rows_at(origin * stride + o);
        if (source & EXCHANGE) != 0u {
            rows_store(origin * stride + o, rows_at(to * stride + o));
        }
        rows_store(to * stride + o, x);
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // A workgroup moves one slot of one head, in all sequences.
    let row = group.y * p.cache.page_len + group.x;
    let rows = p.cache.kv_heads * p.cache.page_len;
    for (var n = lane; n < p.words; n += 64u) {
        move_word(row * p.words + n, rows * p.words);
    }
    for (var n = lane; n < p.groups; n += 64u) {
        move_word(p.scales + row * p.groups + n, rows * p.groups);
    }
}
