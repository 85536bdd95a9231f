// The gradients of q, or of k and v, in one pass, without a score matrix. (Dao 2023,
// "FlashAttention-2", section 3.1.)
//
// q, d_q [batch, heads, q_len, head_dim]         d_out [batch, heads, q_len, value_dim]
// k, d_k [batch, kv_heads, kv_len, head_dim]     v, d_v [batch, kv_heads, kv_len, value_dim]
// row_stats [batch, heads, q_len, 4]: lse, dot = d_out · out − d_lse, total, sink
// (row_stats.wgsl, row_totals.wgsl)
//
//   weight    = total · exp(score − lse), where total = 1 / (Σⱼ exp(score − lse) + sink)
//   d_score   = weight · (dropout(d_out · v) − dot), times the derivative of the softcap
//   d_q[i]    = scale · Σⱼ d_score[i, j] · k[j]
//   d_k[j]    = scale · Σᵢ d_score[i, j] · q[i]     over the queries of all heads of the group
//   d_v[j]    = Σᵢ dropout(weight)[i, j] · d_out[i]
//
// Output rows (own, OWNS) are the rows whose gradients a workgroup computes. They are queries of a
// head or, with OF_KEYS, keys of a key/value head. The workgroup visits the opposite rows (other,
// OTHERS). They are keys, or the queries of each head of the group in turn. A workgroup sums over
// opposite rows in order. Every run thus gives the same bits, without atomics. A hidden pair gives
// and receives nothing, whatever its tensors hold.
//
// The factor total is 1 except for rounding. The value of lse is one f32; at 731 its error is 3e-5.
// The forward pass also rounds scores differently. Without total, weights would have the same
// error. The kernel of queries sums their weights and divides d_q by the sum at the end. It stores
// the total for the kernels that follow, which compute scores by the same operations in the same
// order. If d_q is not wanted, it computes only the totals. If out and lse cover more keys than
// this call (p.partial), the sum is not usable, and total is 1.
//
// Constants: OF_KEYS      true if the gradients are of keys, false if of queries
//            NORMALISES   true if the kernel computes totals
//            OWNS         queries or keys of a workgroup
//            OF_SCORES, OF_VALUES   true if d_q or d_k, or d_v are wanted
// The loops are in fused_backward/*.wgsl; this file is the part that all variants share. The
// formulas of a pair are in backward/pair.wgsl.
//
// Bindings (declared by the host): q, k, v, d_out, row_stats; d_q, or d_k and d_v. The mask and
// dropout add theirs. For totals alone: q, k, row_stats and the mask's.

// The work of a workgroup: output rows own0 ..= last_own of a head, channels from col0 on. The head
// is of queries, or of keys and values.
struct WorkTile {
    b: u32,
    head: u32,
    kv_head: u32,
    own0: u32,
    last_own: u32,
    col0: u32,
}

fn work_tile(id: vec3<u32>) -> WorkTile {
    let at = id + p.first.xyz;
    let heads = select(p.heads, p.kv_heads, OF_KEYS);
    let head = at.z % heads;
    let own0 = at.x * OWNS;
    let own_len = select(p.mask.q_len, p.mask.kv_len, OF_KEYS);
    return WorkTile(at.z / heads, head, select(head / p.group, head, OF_KEYS), own0, min(own0 + OWNS, own_len) - 1u, at.y * SLICE);
}

// The number of query heads that the workgroup visits.
fn head_count() -> u32 {
    return select(1u, p.group, OF_KEYS);
}

fn query_head(work: WorkTile, n: u32) -> u32 {
    return select(work.head, work.kv_head * p.group + n, OF_KEYS);
}

// Rows and vectors by side: the inputs of scores, then the inputs of gradients of weights.

fn own_rows(work: WorkTile, own: u32) -> vec2<u32> {
    if OF_KEYS {
        return vec2<u32>(k_row(work.b, work.kv_head, own), v_row(work.b, work.kv_head, own));
    } else {
        return vec2<u32>(q_row(work.b, work.head, own), d_out_row(work.b, work.head, own));
    }
}

fn other_rows(work: WorkTile, h: u32, other: u32) -> vec2<u32> {
    if OF_KEYS {
        return vec2<u32>(q_row(work.b, h, other), d_out_row(work.b, h, other));
    } else {
        return vec2<u32>(k_row(work.b, work.kv_head, other), v_row(work.b, work.kv_head, other));
    }
}

fn own_score_vector(row: u32, d: u32) -> vec4<f32> {
    if OF_KEYS {
        return k_vector(row, d);
    } else {
        return q_vector(row, d);
    }
}

fn other_score_vector(row: u32, d: u32) -> vec4<f32> {
    if OF_KEYS {
        return q_vector(row, d);
    } else {
        return k_vector(row, d);
    }
}

fn own_value_vector(row: u32, d: u32) -> vec4<f32> {
    if OF_KEYS {
        return v_vector(row, d);
    } else {
        return d_out_vector(row, d);
    }
}

fn other_value_vector(row: u32, d: u32) -> vec4<f32> {
    if OF_KEYS {
        return d_out_vector(row, d);
    } else {
        return v_vector(row, d);
    }
}

// A query's statistics for the loop. A kernel that computes totals does not read the old total.
fn loop_stats(b: u32, h: u32, i: u32) -> vec3<f32> {
    if NORMALISES {
        let o = stats_offset(b, h, i);
        return vec3<f32>(row_stats_at(o), row_stats_at(o + 1u), 1.0);
    } else {
        return stats_of(b, h, i);
    }
}

// The factor of the sums of a query's weights, relative to its lse.
fn total_of(work: WorkTile, i: u32, sum: f32) -> f32 {
    let all = sum + row_stats_at(stats_offset(work.b, work.head, i) + 3u);
    return select(1.0 / all, 1.0, (p.partial != 0u) | (all == 0.0));
}

fn store_total(work: WorkTile, i: u32, total: f32) {
    row_stats_store(stats_offset(work.b, work.head, i) + 2u, total);
}

// Queries per step of the search for queries that see a tile's keys.
const SEARCH: u32 = 64u;

// True if the queries from SEARCH · n on may see a key of the tile.
fn search_finds(work: WorkTile, h: u32, n: u32) -> bool {
    let first = n * SEARCH;
    let keys = key_range(work.b, h, first, min(first + SEARCH, p.mask.q_len) - 1u);
    return keys.x <= work.last_own && keys.y > work.own0;
}

// Computes four channels of a gradient again, after a result was not finite. A hidden pair must
// give nothing, but 0 · NaN and 0 · ∞ are NaN. Here terms are multiplied by the scale before they
// are summed, so the sum may stay within f32's range. This is slow, but costs nothing if all values
// are finite.
fn repaired(work: WorkTile, own: u32, col: u32, of_values: bool) -> vec4<f32> {
    var sum = vec4<f32>();
    var weights = 0.0;
    for (var n = 0u; n < head_count(); n++) {
        let h = query_head(work, n);
        let others = select(key_range(work.b, h, own, own), vec2<u32>(0u, p.mask.q_len), OF_KEYS);
        for (var other = others.x; other < others.y; other++) {
            let i = select(own, other, OF_KEYS);
            let j = select(other, own, OF_KEYS);
            let q = query_of(work.b, h, i);
            if j < q.first || j >= q.end {
                continue;
            }
            let theirs = other_rows(work, h, other);
            let pair = pair_at(q, j, loop_stats(work.b, h, i));
            weights += pair.probability;
            let factor = select(pair.d_score * p.scale, pair.weight, of_values);
            if (bitcast<u32>(factor) & 0x7fffffffu) == 0u {
                continue;
            }
            if of_values {
                sum += factor * other_value_vector(theirs.y, col);
            } else {
                sum += factor * other_score_vector(theirs.x, col);
            }
        }
    }
    if NORMALISES {
        sum *= total_of(work, own, weights);
    }
    return sum;
}

// Stores four channels of d_q or d_k.
fn store_of_scores(work: WorkTile, own: u32, col: u32, sum: vec4<f32>) {
    var x = sum;
    let of_q = view_at(p.d_q, work.b, work.head, own, col);
    let of_k = view_at(p.d_k, work.b, work.head, own, col);
    let o = select(of_q, of_k, OF_KEYS);
    if STORE_IN_FOURS {
        if p.accumulates != 0u {
            x += d_scored_at4(o, 1u, 4u);
        }
        d_scored_store4(o, x);
    } else {
        let unit = select(p.d_q.strides.w, p.d_k.strides.w, OF_KEYS);
        for (var c = 0u; c < min(4u, p.head_dim - col); c++) {
            var y = component(x, c);
            if p.accumulates != 0u {
                y += d_scored_at(o + c * unit);
            }
            d_scored_store(o + c * unit, y);
        }
    }
}

// Stores four channels of d_v.
fn store_of_values(work: WorkTile, own: u32, col: u32, sum: vec4<f32>) {
    var x = sum;
    let o = view_at(p.d_v, work.b, work.head, own, col);
    if STORE_IN_FOURS {
        if p.accumulates != 0u {
            x += d_v_at4(o, 1u, 4u);
        }
        d_v_store4(o, x);
    } else {
        for (var c = 0u; c < min(4u, p.value_dim - col); c++) {
            var y = component(x, c);
            if p.accumulates != 0u {
                y += d_v_at(o + c * p.d_v.strides.w);
            }
            d_v_store(o + c * p.d_v.strides.w, y);
        }
    }
}

// Computes channels first, first + step .. before end of an output row again, and stores them.
fn store_repaired(work: WorkTile, own: u32, first: u32, step: u32, end: u32) {
    for (var kind = 0u; kind < 2u; kind++) {
        let of_values = kind == 1u;
        if (of_values && !OF_VALUES) || (!of_values && !OF_SCORES) {
            continue;
        }
        for (var col = first; col < min(end, select(p.head_dim, p.value_dim, of_values)); col += step) {
            let x = repaired(work, own, col, of_values);
            if of_values {
                store_of_values(work, own, col, x);
            } else {
                store_of_scores(work, own, col, x);
            }
        }
    }
}
