// Combines the rounds of a token: out = Σ exp(lseₙ − lse) outₙ, lse = ln Σ exp(lseₙ). The kernel
// reads the token's row in the bucket order of each round. Rounds have disjoint keys.
//
// part_out [batch, heads · rounds, length, value_dim]   part_lse [batch, heads · rounds, length, 1]
// ranks [batch, heads, rounds, length]   out [batch, heads, length, value_dim]
// lse [batch, heads, length, 1]
//
// A workgroup computes ROWS tokens, with ROW_LANES invocations each.
//
// Bindings (declared by the host): part_out, part_lse, ranks, out; lse if HAS_LSE. The kernel reads
// a part's row once. Each invocation reads its lse once for each channel it computes.

// Returns true if a part has seen a key. Otherwise its share is 0, whatever its output holds. The
// kernel compares bits, so that a NaN counts as seen.
fn has_seen(lse: f32) -> bool {
    return bitcast<u32>(lse) != bitcast<u32>(p.neg_inf);
}

// Adds a part's log-sum-exp to the running one. The sum keeps a NaN, which max and exp may lose.
fn with_part(total: vec2<f32>, lse: f32) -> vec2<f32> {
    if any_nan(vec4<f32>(lse)) {
        return vec2<f32>(total.x, lse);
    } else {
        return merged(total, vec2<f32>(lse, select(1.0, 0.0, lse == p.neg_inf)), p.neg_inf);
    }
}

fn rank_of(b: u32, h: u32, round: u32, i: u32) -> u32 {
    return min(ranks_at(view_at(p.ranks, b, h, round, i)), p.length - 1u);
}

// Returns a channel of the mean of all rounds, divided by 2 to the power of `exponent`.
fn mean_of(b: u32, h: u32, i: u32, d: u32, total: vec2<f32>, exponent: u32) -> f32 {
    var sum = 0.0;
    for (var n = 0u; n < p.rounds; n++) {
        let rank = rank_of(b, h, n, i);
        let lse = part_lse_at(view_at(p.part_lse, b, h * p.rounds + n, rank, 0u));
        if has_seen(lse) {
            let value = part_out_at(view_at(p.part_out, b, h * p.rounds + n, rank, d));
            sum += lowered(vec4<f32>(value), exponent).x * share_of(lse, total, p.neg_inf);
        }
    }
    return sum;
}

@compute @workgroup_size(ROWS * ROW_LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.y;
    let b = group.z;
    let lane = index % ROW_LANES;
    let i = group.x * ROWS + index / ROW_LANES;
    if i >= p.length {
        return;
    }
    var total = vec2<f32>(p.neg_inf, 0.0);
    for (var n = 0u; n < p.rounds; n++) {
        total = with_part(total, part_lse_at(view_at(p.part_lse, b, h * p.rounds + n, rank_of(b, h, n, i), 0u)));
    }
    let seen = is_seen(total, p.neg_inf);
    for (var d = lane; d < p.value_dim; d += ROW_LANES) {
        var sum = 0.0;
        if seen {
            sum = mean_of(b, h, i, d, total, 0u);
            if !all_finite(vec4<f32>(sum)) {
                sum = mean_of_half(vec4<f32>(mean_of(b, h, i, d, total, 1u))).x;
            }
        }
        out_store(view_at(p.out, b, h, i, d), sum);
    }
    if lane == 0u {
        lse_store(view_at(p.lse, b, h, i, 0u), lse_of(total, p.neg_inf));
    }
}
