// The gradients of q, or those of k and v, in one pass, without a score matrix. (Dao 2023,
// "FlashAttention-2", section 3.1.)
//
// q, d_q [batch, heads, q_len, head_dim]         d_out [batch, heads, q_len, value_dim]
// k, d_k [batch, kv_heads, kv_len, head_dim]     v, d_v [batch, kv_heads, kv_len, value_dim]
// row_stats [batch, heads, q_len, 4]: lse, dot = d_out · out − d_lse, total, sink (row_stats.wgsl, row_totals.wgsl)
//
//   weight  = total · exp(score − lse), where total = 1 / (Σⱼ exp(score − lse) + sink)
//   d_score = weight · (dropout(d_out · v) − dot), times the derivative of the softcap
//   d_q[i]  = scale · Σⱼ d_score[i, j] · k[j]
//   d_k[j]  = scale · Σᵢ d_score[i, j] · q[i]      over the queries of all heads of the group
//   d_v[j]  = Σᵢ dropout(weight)[i, j] · d_out[i]
//
// A workgroup has OWNS queries of a head or, OF_KEYS, keys of a key/value head, and walks the
// others: keys, or the queries of each head of the group in turn. Sums are in the order of the
// others: the same bits on every run, without atomics. A pair that is not seen gives nothing and
// takes nothing, whatever its tensors hold.
//
// total is 1 but for rounding: lse is one f32, off by 3e-5 at 731, and the forward pass rounds
// scores otherwise than this one. A weight would be off by as much. The kernel of queries sums
// their weights as it goes, divides d_q by the sum in the end, and leaves the total to the kernels
// that follow, which compute scores by the same operations in the same order. Where d_q is not
// wanted, it computes the totals alone. If out and lse are of more keys than these (p.partial), the
// sum says nothing, and total is 1.
//
// Constants: OF_KEYS   whose gradients these are
//            NORMALISES   whether totals are computed
//            OWNS      queries or keys of a workgroup
//            OF_SCORES, OF_VALUES   whether d_q or d_k, and d_v are wanted
// The loop is in fused_backward/*.wgsl; here is what its forms have in common, what pairs give is in backward/pair.wgsl.
//
// Bindings (declared by the host): q, k, v, d_out, row_stats; d_q, or d_k and d_v; the mask's,
// dropout where used. For totals alone q, k, row_stats and the mask's.

// What a workgroup works on: own0 ..= last_own of head (of queries, or of keys and values),
// channels from col0 on.
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

// Query heads that it goes through.
fn head_count() -> u32 {
    return select(1u, p.group, OF_KEYS);
}

fn query_head(work: WorkTile, n: u32) -> u32 {
    return select(work.head, work.kv_head * p.group + n, OF_KEYS);
}

// Rows and vectors by side: what scores are made of, then what gradients of weights are made of.

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

// A query's numbers as the loop has them. Where totals are computed nobody reads what is replaced
// meanwhile.
fn loop_stats(b: u32, h: u32, i: u32) -> vec3<f32> {
    if NORMALISES {
        let o = stats_offset(b, h, i);
        return vec3<f32>(row_stats_at(o), row_stats_at(o + 1u), 1.0);
    } else {
        return stats_of(b, h, i);
    }
}

// What sums of a query's weights, relative to its lse, are multiplied by.
fn total_of(work: WorkTile, i: u32, sum: f32) -> f32 {
    let all = sum + row_stats_at(stats_offset(work.b, work.head, i) + 3u);
    return select(1.0 / all, 1.0, (p.partial != 0u) | (all == 0.0));
}

fn store_total(work: WorkTile, i: u32, total: f32) {
    row_stats_store(stats_offset(work.b, work.head, i) + 2u, total);
}

// Queries in a step of the search for those that see a tile's keys.
const SEARCH: u32 = 64u;

// Whether queries of SEARCH · n .. may see a key of the tile.
fn search_finds(work: WorkTile, h: u32, n: u32) -> bool {
    let first = n * SEARCH;
    let keys = key_range(work.b, h, first, min(first + SEARCH, p.mask.q_len) - 1u);
    return keys.x <= work.last_own && keys.y > work.own0;
}

// Four channels of a gradient of an own row once more, where one is not finite. A pair that is not
// seen gives nothing, but 0 · NaN and 0 · ∞ are NaN; and terms are multiplied by the scale before
// they are summed, which may keep the sum within f32's range. Slow, and costs nothing where
// everything is finite.
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

// Stores channels first, first + step .. before end of an own row, computed once more.
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
