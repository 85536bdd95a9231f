// Removes tokens of a cache: the rows that a head keeps move together, in their order.
//
// keep [batch, kv_heads or 1, 1, most]: the tokens that a head keeps, as rising indices among its
// stored tokens. A sequence has as many as its word COUNT says.
//
// A row moves to an earlier place, or stays. So an invocation moves one word of all rows of a head,
// a block at a time, and needs no barrier. An index that is out of order or out of range stands for
// a later stored token.
//
// Floor: every word of a row that moves is read once and written once. Each word reads the list.
//
// Bindings (declared by the host): rows, the keys or the values; sequence_table; keep.

const BLOCK: u32 = 8u;

// The token that moves to place n.
fn token_for(b: u32, h: u32, n: u32) -> u32 {
    let stored = sequence_table_at(b * WORDS + STORED);
    return min(max(keep_at(view_at(p.keep, b, h, 0u, n)), n), max(stored, n + 1u) - 1u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.y;
    let each = p.words + p.groups;
    let n = group.x * 64u + lane;
    let h = n / each;
    if h >= p.cache.kv_heads {
        return;
    }
    let word = n % each;
    let is_channel = word < p.words;
    let stride = select(p.groups, p.words, is_channel);
    let first = select(p.scales + word - p.words, word, is_channel);
    let r = rows_of(b, h);
    let count = min(sequence_table_at(b * WORDS + COUNT), p.most);
    for (var t = 0u; t < count; t += BLOCK) {
        let last = min(t + BLOCK, count) - 1u;
        if token_for(b, h, last) != last {
            var x: array<u32, BLOCK>;
            /* unrolled */ for (var i = 0u; i < BLOCK; i++) {
                x[i] = rows_at(first + row_of_token(r, token_for(b, h, min(t + i, last))) * stride);
            }
            /* unrolled */ for (var i = 0u; i < BLOCK; i++) {
                if t + i <= last {
                    rows_store(first + row_of_token(r, t + i) * stride, x[i]);
                }
            }
        }
    }
}
