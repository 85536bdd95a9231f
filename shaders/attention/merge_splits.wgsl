// Computes out and lse from the results of the splits of a row's keys: means by their weights.
//
// partial: per (batch, kv_head, packed row, split) value_dim means, padded to vectors. From stats
// on, the maximum of scores and the total of weights, in the first two numbers of a vector.
// out [batch, heads, q_len, value_dim]   lse [batch, heads, q_len, 1]
//
// Bindings (declared by the host): partial, out; lse and the sinks if used.
//
// Lower bound: ROW_LANES neighbouring invocations read every mean once. There are few rows, so
// latency counts. A load from global memory takes as long as hundreds of operations. The lanes load
// totals in parallel, and AT_ONCE means at a time.

const ROW_LANES: u32 = 32u;
const ROWS: u32 = 2u;
// The most splits of a row (src/attention/plan/fused.rs).
const MOST_SPLITS: u32 = 128u;
// The number of means that a lane loads at once.
const AT_ONCE: u32 = 8u;

// The total of each lane's splits, and the share of each split in its row.
var<workgroup> lane_totals: array<vec2<f32>, ROWS * ROW_LANES>;
var<workgroup> shares: array<f32, ROWS * MOST_SPLITS>;

fn total_at(o: u32) -> vec2<f32> {
    return partial_at4(p.stats + o * 4u, 1u, 4u).xy;
}

// Four channels of the mean of all splits / 2 to the power of `exponent`. `at` is their offset in
// the first split, `width` the distance between splits.
fn mean_of(at: u32, width: u32, own_shares: u32, exponent: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    for (var s = 0u; s < p.splits; s += AT_ONCE) {
        var part: array<f32, AT_ONCE>;
        var any_share = 0u;
        /* unrolled */ for (var n = 0u; n < AT_ONCE; n++) {
            part[n] = select(0.0, shares[own_shares + min(s + n, p.splits - 1u)], s + n < p.splits);
            any_share |= bitcast<u32>(part[n]);
        }
        // A split that saw no key, or only zero weights, has no share, whatever it holds.
        if any_share != 0u {
            var means: array<vec4<f32>, AT_ONCE>;
            /* unrolled */ for (var n = 0u; n < AT_ONCE; n++) {
                means[n] = lowered(partial_at4(at + min(s + n, p.splits - 1u) * width, 1u, 4u), exponent);
            }
            /* unrolled */ for (var n = 0u; n < AT_ONCE; n++) {
                sum += select(vec4<f32>(), part[n] * means[n], bitcast<u32>(part[n]) != 0u);
            }
        }
    }
    return sum;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let row_index = index / ROW_LANES;
    let lane = index % ROW_LANES;
    // Invocations past the last row compute it too and store nothing, because barriers need all of
    // them.
    let is_row = (group.x + p.first) * ROWS + row_index < p.rows;
    let row = min((group.x + p.first) * ROWS + row_index, p.rows - 1u);
    let first_split = row * p.splits;
    let packed = p.mask.q_len * p.group;
    let z = row / packed;
    let b = z / p.kv_heads;
    let h = z % p.kv_heads * p.group + row % packed % p.group;
    let i = row % packed / p.group;
    let neg_inf = p.mask.neg_inf;

    var own = vec2<f32>(neg_inf, 0.0);
    for (var first = 0u; first < p.splits; first += ROW_LANES) {
        if first + lane < p.splits {
            own = merged(own, total_at(first_split + first + lane), neg_inf);
        }
    }
    lane_totals[index] = own;
    workgroupBarrier();
    var total = vec2<f32>(neg_inf, 0.0);
    for (var n = 0u; n < min(p.splits, ROW_LANES); n++) {
        total = merged(total, lane_totals[row_index * ROW_LANES + n], neg_inf);
    }
    total = with_sink(total, b, h);
    let seen = is_seen(total, neg_inf);
    let own_shares = row_index * MOST_SPLITS;
    for (var first = 0u; first < p.splits; first += ROW_LANES) {
        let s = first + lane;
        if s < p.splits {
            let state = total_at(first_split + s);
            let share = select(0.0, share_of(state.x, total, neg_inf) * state.y, seen);
            // The only split with keys has the bits of a call without splits.
            shares[own_shares + s] = select(share, 1.0, seen && all(state == total));
        }
    }
    workgroupBarrier();

    let width = (p.value_dim + 3u) / 4u * 4u;
    for (var d = lane * 4u; d < p.value_dim; d += ROW_LANES * 4u) {
        var sum = mean_of(first_split * width + d, width, own_shares, 0u);
        if !all_finite(sum) {
            sum = mean_of_half(mean_of(first_split * width + d, width, own_shares, 1u));
        }
        if is_row {
            store_out(b, h, i, d, sum);
        }
    }
    if HAS_LSE {
        if lane == 0u && is_row {
            lse_store(view_at(p.lse, b, h, i, 0u), lse_of(total, neg_inf));
        }
    }
}
