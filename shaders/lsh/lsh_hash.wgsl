// The bucket of each token in each round of hashing: argmax([x R; −x R]), the lowest of equals.
// (Andoni et al. 2015; Kitaev et al. 2020, "Reformer".) Tokens past the length of their sequence
// are in a separate bucket, the last.
//
// qk [batch, heads, length, head_dim]   rotations [1, rounds, head_dim, n_buckets / 2]
// buckets [batch, heads, rounds, length]   lengths [batch or 1, 1, 1, 1]
//
// An invocation computes a token and a round. The invocations of a workgroup share the round, and
// its loads of the rotation.
//
// Constants: WORKGROUP; HAS_LENGTHS
//
// Bindings (declared by the host): qk, rotations; lengths if HAS_LENGTHS; buckets.
// Work: 2 · tokens · rounds · head_dim · n_buckets / 2. Bytes: qk once for each round and 8
// columns, at best from a cache.

// The largest number and the first column that has it.
struct Best {
    value: f32,
    column: u32,
}

fn better(best: Best, value: f32, column: u32) -> Best {
    if value > best.value {
        return Best(value, column);
    } else {
        return best;
    }
}

// Returns the best of four columns, without columns past the last.
fn better4(before: Best, values: vec4<f32>, column: u32) -> Best {
    var best = before;
    for (var c = 0u; c < min(4u, p.half - column); c++) {
        best = better(best, component(values, c), column + c);
    }
    return best;
}

// The lowest finite number; only −∞ is lower.
const LOWEST: f32 = -0x1.fffffep+127f;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let h = group.y / p.rounds;
    let round = group.y % p.rounds;
    let i = group.x * WORKGROUP + lane;
    if i >= p.length {
        return;
    }
    let x = view_at(p.qk, b, h, i, 0u);
    var positive = Best(LOWEST, 0u);
    var negative = Best(LOWEST, 0u);
    for (var column = 0u; column < p.half; column += 8u) {
        let r = view_at(p.rotations, 0u, round, 0u, column);
        let step = p.rotations.strides.w;
        var first = vec4<f32>();
        var second = vec4<f32>();
        for (var d = 0u; d < p.head_dim; d++) {
            let value = qk_at(x + d * p.qk.strides.w);
            let o = r + d * p.rotations.strides.z;
            first += value * rotations_at4(o, step, p.half - column);
            if column + 4u < p.half {
                second += value * rotations_at4(o + 4u * step, step, p.half - column - 4u);
            }
        }
        positive = better4(positive, first, column);
        negative = better4(negative, -first, column);
        if column + 4u < p.half {
            positive = better4(positive, second, column + 4u);
            negative = better4(negative, -second, column + 4u);
        }
    }
    var bucket = positive.column;
    if negative.value > positive.value {
        bucket = p.half + negative.column;
    }
    if i >= length_of(b) {
        bucket = 2u * p.half;
    }
    buckets_store(view_at(p.buckets, b, h, round, i), bucket);
}
