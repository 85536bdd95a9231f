// The codes of tokens, in bucket order: the position, and for each round the bucket and chunk. They
// tell which rounds contain a pair. A round contains it if the key's code equals one of the two
// codes of the query.
//
// buckets, order, ranks [batch, heads, rounds, length]   lengths [batch or 1, 1, 1, 1]
// codes [batch, heads · rounds, ahead + length, 1 + 2 · rounds], dense
//
// A row of codes is the position, then two codes for each round. The first is the code as a key,
// which is bucket and chunk. The second is the code for the previous chunk. Before the sorted
// tokens there are `ahead` rows: copies of the last chunk, which the first chunk sees.
//
// In their round, these copies and the second code of the first chunk have a separate chunk number,
// LOOK_BACK. No other token then sees the copies. A row that is not a token has only NOTHING.
//
// Constants: WORKGROUP; HAS_LENGTHS
//
// Bindings (declared by the host): buckets, order, ranks; lengths if HAS_LENGTHS; codes. The kernel
// reads and writes 2 · rounds + 1 numbers for each row.

const NOTHING: u32 = 0xffffffffu;
const LOOK_BACK: u32 = 0xffffu;

fn code_of(bucket: u32, chunk: u32) -> u32 {
    return (bucket << 16u) | chunk;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let h = group.y / p.rounds;
    let round = group.y % p.rounds;
    let rows = p.ahead + p.length;
    let row = group.x * WORKGROUP + lane;
    if row >= rows {
        return;
    }
    let width = 1u + 2u * p.rounds;
    let to = ((b * p.heads * p.rounds + group.y) * rows + row) * width;
    let tokens = min(length_of(b), p.length);
    let last = (max(tokens, 1u) - 1u) / p.chunk;
    // The place in bucket order. A row ahead has a place in the last chunk, if there are several
    // chunks.
    let copied = row < p.ahead;
    let place = select(row - p.ahead, last * p.chunk + row, copied);
    if place >= tokens || (copied && last == 0u) {
        for (var n = 0u; n < width; n++) {
            codes_store(to + n, NOTHING);
        }
        return;
    }
    let position = order_at(view_at(p.order, b, h, round, place));
    codes_store(to, position);
    for (var n = 0u; n < p.rounds; n++) {
        let bucket = buckets_at(view_at(p.buckets, b, h, n, position));
        let chunk = ranks_at(view_at(p.ranks, b, h, n, position)) / p.chunk;
        var own = chunk;
        var before = select(chunk - 1u, last, chunk == 0u);
        if n == round && p.ahead > 0u && last > 0u {
            own = select(chunk, LOOK_BACK, copied);
            before = select(chunk - 1u, LOOK_BACK, chunk == 0u);
        }
        codes_store(to + 1u + 2u * n, code_of(bucket, own));
        codes_store(to + 2u + 2u * n, code_of(bucket, before));
    }
}
