// Moves the rows of whole sequences within a cache, from each parent to the sequences that continue
// from it.
//
// The sequence table lists copies, and exchanges for sequences that form a circle. In its order no
// move overwrites a row that a later move reads. The rows of a head are neighbours. An invocation
// moves the same words of them through all moves, so the order needs no barrier. Words are vectors
// for channels, and single words for scales and positions.
// Floor: every moved word is read once and written once, or twice if exchanged.
//
// Constants: LANES; COLUMNS, the words that an invocation has in registers; STEPS, the number of
// times that it loads them.
// Bindings (declared by the host): rows, the keys or the values; sequence_table.

// Moves the words of an invocation. to, origin: first words of the head in both sequences.
fn move_words(to: u32, origin: u32, first: u32, exchange: bool) {
    for (var s = 0u; s < STEPS; s++) {
        let o = first + s * COLUMNS * LANES;
        if o >= p.run {
            return;
        }
        var x: array<Word, COLUMNS>;
        /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
            x[c] = rows[origin + min(o + c * LANES, p.run - 1u)];
        }
        if exchange {
            /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
                if is_owned(o + c * LANES) {
                    let n = min(o + c * LANES, p.run - 1u);
                    rows[origin + n] = rows[to + n];
                }
            }
        }
        /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
            if is_owned(o + c * LANES) {
                rows[to + min(o + c * LANES, p.run - 1u)] = x[c];
            }
        }
    }
}

// True if this invocation stores word n. One invocation alone stores its last word repeatedly,
// because software drivers are faster without branches.
fn is_owned(n: u32) -> bool {
    return LANES == 1u || n < p.run;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // With one lane, all indices are uniform, and software drivers load without branches.
    let first = group.x * LANES * COLUMNS * STEPS + select(lane, 0u, LANES == 1u);
    for (var n = 0u; n < p.cache.batch; n++) {
        let to = sequence_table_at(n * WORDS + MOVE_TO);
        let source = sequence_table_at(n * WORDS + MOVE_FROM);
        let origin = source & ~EXCHANGE;
        // A move that goes nowhere follows the last move.
        if to == origin || max(to, origin) >= p.cache.batch {
            return;
        }
        let starts = p.start + (vec2<u32>(to, origin) * p.cache.kv_heads + group.y) * p.head;
        move_words(starts.x, starts.y, first, (source & EXCHANGE) != 0u);
    }
}
