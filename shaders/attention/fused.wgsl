// out = softmax(scale · q kᵀ, masked) · v in one pass: a running softmax without a score matrix.
// (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention".)
//
// q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]
// v [batch, kv_heads, kv_len, value_dim]
// out [batch, heads, q_len, value_dim]   lse [batch, heads, q_len, 1]
//
// A workgroup computes SLICE channels of out for one key/value head and a tile of packed rows. Row
// r is query r / group of head r % group in the group. The heads of a group thus share the loads of
// keys and values. The loops are in fused/*.wgsl; this file is the part that all variants share.
//
// Keys and values come from tensors or from a cache (keys/*.wgsl). If few rows meet many keys, the
// keys are split among workgroups. Each split writes its means to `partial`, with the maximum and
// the sum of its weights. The kernel of merge_splits.wgsl merges them (Dao et al. 2023,
// "Flash-decoding").
//
// fused/dot.wgsl computes the score of a pair. In additive attention the score is v · tanh(q + k)
// (additive/score.wgsl), and the loops are in additive/*.wgsl.
//
// Bindings (declared by the host): q, the tensors or cache of k and v, out (and lse) or partial.
// Additive attention adds score_vector. The mask and dropout add theirs.

// The work of a workgroup: packed rows row0 .. last_row of key/value head z, and a split of their
// keys. The workgroup computes a slice of out's channels. If row0 > last_row, there are no rows.
struct WorkTile {
    z: u32,
    b: u32,
    kv_head: u32,
    row0: u32,
    last_row: u32,
    split: u32,
    slice: u32,
}

fn work_tile(id: vec3<u32>) -> WorkTile {
    let x = id.x + p.first.x;
    let z = id.z + p.first.z;
    let row0 = select(x, x / p.splits, SPLITS) * ROWS;
    let last_row = min(row0 + ROWS, p.mask.q_len * p.group) - 1u;
    return WorkTile(z, z / p.kv_heads, z % p.kv_heads, row0, last_row, select(0u, x % p.splits, SPLITS), id.y + p.first.y);
}

// The head and the query of a packed row.
fn head_query_of(kv_head: u32, row: u32) -> vec2<u32> {
    return vec2<u32>(kv_head * p.group + row % p.group, row / p.group);
}

fn query_of_row(b: u32, kv_head: u32, row: u32) -> Query {
    let place = head_query_of(kv_head, row);
    return query_of(b, place.x, place.y);
}

// The keys of a split, from the keys r.x .. r.y.
fn split_keys(r: vec2<u32>, split: u32) -> vec2<u32> {
    if !SPLITS || r.x >= r.y {
        return r;
    } else if p.fixed_split != 0u {
        let first = split * p.fixed_split;
        return clamp(vec2<u32>(first, first + p.fixed_split), vec2<u32>(r.x), vec2<u32>(r.y));
    } else {
        let share = max((r.y - r.x + p.splits - 1u) / p.splits, SPLIT_LEAST);
        let len = (share + SPLIT_STEP - 1u) / SPLIT_STEP * SPLIT_STEP;
        let first = min(r.x + split * len, r.y);
        return vec2<u32>(first, min(first + len, r.y));
    }
}

// The offset of a split's means of a row.
fn partial_offset(z: u32, row: u32, split: u32) -> u32 {
    return ((z * p.mask.q_len * p.group + row) * p.splits + split) * ((p.value_dim + 3u) / 4u * 4u);
}

fn store_stats(z: u32, row: u32, split: u32, total: vec2<f32>) {
    let o = p.stats + ((z * p.mask.q_len * p.group + row) * p.splits + split) * 4u;
    partial_store4(o, vec4<f32>(total, 0.0, 0.0));
}

// Finishes a row, from its maximum and the sum of its weights. Returns the factor of its sums, and
// the state that the results are relative to. One invocation stores lse or the split's statistics.
fn finish_row(state: vec2<f32>, z: u32, row: u32, split: u32, stores: bool) -> vec3<f32> {
    if SPLITS {
        if stores {
            store_stats(z, row, split, state);
        }
        return vec3<f32>(select(1.0 / state.y, 0.0, state.y == 0.0), state);
    } else {
        let neg_inf = p.mask.neg_inf;
        let b = z / p.kv_heads;
        let place = head_query_of(z % p.kv_heads, row);
        let total = with_sink(state, b, place.x);
        if HAS_LSE && stores {
            lse_store(view_at(p.lse, b, place.x, place.y, 0u), lse_of(total, neg_inf));
        }
        // A sink may have raised the maximum.
        var share = share_of(state.x, total, neg_inf);
        if p.fixed_split != 0u && all(total == state) {
            // The same operation as with splits, for the same bits.
            share = 1.0 / state.y;
        }
        return vec3<f32>(select(0.0, share, is_seen(state, neg_inf)), total);
    }
}

// As finish_row, but computes the state again if the loop's state is not usable. A loop holds q ·
// (scale · UNIT) and sums of its products with k. They can exceed f32's range although scores do
// not; the row then has NaN or sees no key. The sums of such a row become NaN, so that they are
// computed again too. This is slow, but costs nothing if all values are finite.
fn finish_checked(state: vec2<f32>, z: u32, row: u32, split: u32, keys: vec2<u32>, stores: bool) -> vec3<f32> {
    let is_broken = !folds_scale() || !all_finite(vec4<f32>(state.y)) || (state.y == 0.0 && !PER_PAIR_MASK);
    var sure = state;
    if is_broken {
        sure = state_of(query_of_row(z / p.kv_heads, z % p.kv_heads, row), keys);
    }
    let end = finish_row(sure, z, row, split, stores);
    return vec3<f32>(select(end.x, bitcast<f32>(0x7fc00000u | p.splits), is_broken && sure.y != 0.0), end.yz);
}

// The state of a row over some keys, computed key by key.
fn state_of(q: Query, keys: vec2<u32>) -> vec2<f32> {
    let neg_inf = p.mask.neg_inf;
    var total = vec2<f32>(neg_inf, 0.0);
    var query = q;
    for (var j = max(q.first, keys.x); j < min(q.end, keys.y); j++) {
        query.block = block_of_key(q, j);
        let score = score_of(query, j);
        if any_nan(vec4<f32>(score)) {
            total.y = score;
        } else {
            total = merged(total, vec2<f32>(score, select(1.0, 0.0, score == neg_inf)), neg_inf);
        }
    }
    return total;
}

// The state of the block of a query and a key. A kernel that visits the map by columns leaves
// query.block at its last column.
fn block_of_key(q: Query, j: u32) -> u32 {
    if HAS_BLOCKS {
        return block_of_row(q, map_row(q.i), min(j, p.mask.masked_len - 1u) / p.mask.block.y);
    } else {
        return q.block;
    }
}

// Stores four channels of a row.
fn store_row(z: u32, row: u32, split: u32, col: u32, x: vec4<f32>) {
    if SPLITS {
        partial_store4(partial_offset(z, row, split) + col, x);
    } else {
        let place = head_query_of(z % p.kv_heads, row);
        store_out(z / p.kv_heads, place.x, place.y, col, x);
    }
}

// The score of a pair as an input of the softmax, −∞ if the query does not see the key.
fn score_of(q: Query, j: u32) -> f32 {
    var seen = j >= q.first && j < q.end;
    if PER_PAIR_MASK {
        seen = seen && mask_mod(q, j);
    }
    if !seen {
        return p.mask.neg_inf;
    } else if PER_PAIR_MASK {
        return score_mod(pair_score(q, j), q, j);
    } else {
        return pair_score(q, j);
    }
}

// Computes four channels of a row again, after a result was not finite. A weight of zero must
// contribute nothing for any value, but 0 · NaN and 0 · ∞ are NaN. A mean of finite values is
// finite, but a sum of values times weights up to 2^8 may not be. Here the weights are normalised
// first. This is slow, but costs nothing if all values are finite.
fn repaired(q: Query, col: u32, total: vec2<f32>, keys: vec2<u32>) -> vec4<f32> {
    var sum = vec4<f32>();
    let v = v_source(q.b, q.h / p.group, col);
    var query = q;
    for (var j = max(q.first, keys.x); j < min(q.end, keys.y); j++) {
        query.block = block_of_key(q, j);
        let score = score_of(query, j);
        let weight = apply_dropout(share_of(score, total, p.mask.neg_inf), q.b, q.h, q.i, j);
        // By the bits: a NaN must count, and `!=` is false for NaN in SPIR-V's ordered comparison.
        if bitcast<u32>(score) != bitcast<u32>(p.mask.neg_inf) && (bitcast<u32>(weight) & 0x7fffffffu) != 0u {
            sum += weight * lowered(v_four(v, key_row(v, j), 0u), 1u);
        }
    }
    return mean_of_half(sum);
}

// Returns x, or repaired channels if x is not finite.
fn row_repaired(z: u32, row: u32, col: u32, x: vec4<f32>, end: vec3<f32>, keys: vec2<u32>) -> vec4<f32> {
    if all_finite(x) {
        return x;
    } else {
        return repaired(query_of_row(z / p.kv_heads, z % p.kv_heads, row), col, end.yz, keys);
    }
}

// Some of the rows' queries see keys in any_row.x .. any_row.y. Every query sees the keys in
// every_row.x .. every_row.y. Only the rules with intervals count.
struct KeyRange {
    any_row: vec2<u32>,
    every_row: vec2<u32>,
}

fn rows_key_range(b: u32, kv_head: u32, row: u32, rows: u32) -> KeyRange {
    var r = KeyRange(vec2<u32>(0xffffffffu, 0u), vec2<u32>(0u, 0xffffffffu));
    for (var n = row; n < row + rows; n++) {
        let query = query_of_row(b, kv_head, n);
        if query.first < query.end {
            r.any_row = vec2<u32>(min(r.any_row.x, query.first), max(r.any_row.y, query.end));
        }
        r.every_row = vec2<u32>(max(r.every_row.x, query.first), min(r.every_row.y, query.end));
    }
    r.any_row.x = min(r.any_row.x, r.any_row.y);
    return r;
}
