// Moves the rows of whole sequences within a cache, each to the sequences that go on from it.
//
// The sequence table lists the moves in an order in which no move overwrites a row that a later one
// reads: copies, and exchanges where sequences take each other's place in a circle. An invocation
// takes a word of one row through all moves, so the order needs no barrier.
// Floor: every word that moves is read once and written once, twice if exchanged.
//
// Bindings (declared by the host): rows, the keys or the values; sequence_table.

// Takes the word at o of a sequence's share, sequences apart by stride, through all moves.
fn move_word(o: u32, stride: u32) {
    for (var n = 0u; n < p.cache.batch; n++) {
        let to = sequence_table_at(n * WORDS + MOVE_TO);
        let source = sequence_table_at(n * WORDS + MOVE_FROM);
        let origin = source & ~EXCHANGE;
        // The last move is followed by one that goes nowhere.
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
    // One slot of one head a workgroup, of all sequences.
    let row = group.y * p.cache.page_len + group.x;
    let rows = p.cache.kv_heads * p.cache.page_len;
    for (var n = lane; n < p.words; n += 64u) {
        move_word(row * p.words + n, rows * p.words);
    }
    for (var n = lane; n < p.groups; n += 64u) {
        move_word(p.scales + row * p.groups + n, rows * p.groups);
    }
}
