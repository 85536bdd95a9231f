// Where tokens stand in every round, beside the tokens of a round in the order of their buckets, so
// that a pair can be asked in which rounds it is held: if the key's code is one of the query's two.
//
// buckets, order, ranks [batch, heads, rounds, length]   lengths [batch or 1, 1, 1, 1]
// codes [batch, heads · rounds, ahead + length, 1 + 2 · rounds], dense: position; of each round the code as a key, which is bucket and chunk, and
// that of the chunk before. Before the tokens in order stand `ahead` rows: those of the last chunk once more, which the first looks back to.
//
// In their own round these and the first chunk's look back have a chunk's number of their own,
// LOOK_BACK, so that nobody else sees them. What is no token has NOTHING throughout.
//
// Constants: WORKGROUP; HAS_LENGTHS
//
// Bindings (declared by the host): buckets, order, ranks; lengths if HAS_LENGTHS; codes.
// Reads 2 · rounds + 1 numbers for each row and writes 2 · rounds + 1.

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
    // The place in order, of a row ahead that in the last chunk, if there are several.
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
