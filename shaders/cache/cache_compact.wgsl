// Removes tokens of a cache: the rows that a head keeps move together, in their order.
//
// keep [batch, kv_heads or 1, 1, most]: the tokens that a head keeps, as rising indices among its
// stored tokens. A sequence has as many as its word COUNT says.
//
// A row moves to an earlier place, or stays. So an invocation needs no barrier. It moves COLUMNS
// words of all rows of a head, BLOCK rows at a time. Words are vectors for channels, and single
// words for scales and positions. An index that is out of order or out of range stands for a later
// stored token.
//
// Floor: every word of a row that moves is read once and written once. Each workgroup reads the
// list.
//
// Constants: LANES, BLOCK, COLUMNS. Software drivers are fastest with one lane and many columns.
// Bindings (declared by the host): rows, the keys or the values; sequence_table; keep.

// The token that moves to place n, of `stored` tokens.
fn token_for(b: u32, h: u32, n: u32, stored: u32) -> u32 {
    return min(max(keep_at(view_at(p.keep, b, h, 0u, n)), n), max(stored, n + 1u) - 1u);
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let h = group.y;
    // With one lane, all indices are uniform, and software drivers load without branches.
    let first = select(group.x * LANES + lane, group.x, LANES == 1u) * COLUMNS;
    if first >= p.words {
        return;
    }
    let r = rows_of(b, h);
    let stored = sequence_table_at(b * WORDS + STORED);
    let count = min(sequence_table_at(b * WORDS + COUNT), p.most);
    for (var t = 0u; t < count; t += BLOCK) {
        let last = min(t + BLOCK, count) - 1u;
        if token_for(b, h, last, stored) != last {
            var x: array<Word, BLOCK * COLUMNS>;
            /* unrolled */ for (var i = 0u; i < BLOCK; i++) {
                let source = p.start + row_of_token(r, token_for(b, h, min(t + i, last), stored)) * p.words;
                /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
                    x[i * COLUMNS + c] = rows[source + min(first + c, p.words - 1u)];
                }
            }
            // The last row and the last word may be stored repeatedly.
            /* unrolled */ for (var i = 0u; i < BLOCK; i++) {
                let to = p.start + row_of_token(r, min(t + i, last)) * p.words;
                /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
                    rows[to + min(first + c, p.words - 1u)] = x[i * COLUMNS + c];
                }
            }
        }
    }
}
