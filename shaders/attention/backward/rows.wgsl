// The rows of a pair of query and key, and the pair computed from memory.
//
// Constants: IN_FOURS    true if the tensors load as vec4
//            WIDE        true if element indices reach 2^28
//            IN_CHAINS   true if products are summed in the order of fused_backward/cpu.wgsl, bit
//                        by bit, else of fused_backward/gpu.wgsl
//
// Needs: p.d_out, p.group, p.head_dim, p.k, p.q, p.v, p.value_dim; IN_CHAINS, IN_FOURS, WIDE; Pair,
// Query; d_out_at4, k_at4, key_batch, key_head, list_of, listed, pair_of, q_at4, v_at4, view_at.
// Gives: d_out_row, d_out_vector, d_weight_at, dot_at, k_row, k_vector, pair_at, q_row, q_vector,
// v_row, v_vector.

// Tells the compiler that an index is not negative as an i32, which saves a check per load. With
// vec4 loads, it also tells that the index is aligned.
const INDEX: u32 = select(0xffffffffu, select(0x0fffffffu, 0x0ffffffcu, IN_FOURS), !WIDE);

// Rows of the tensors, from their first channel on.

fn q_row(b: u32, h: u32, i: u32) -> u32 {
    return view_at(p.q, b, h, i, 0u) & INDEX;
}

fn d_out_row(b: u32, h: u32, i: u32) -> u32 {
    return view_at(p.d_out, b, h, i, 0u) & INDEX;
}

fn k_row(b: u32, kv_head: u32, j: u32) -> u32 {
    return view_at(p.k, key_batch(b), key_head(kv_head), listed(list_of(b, kv_head), j), 0u) & INDEX;
}

fn v_row(b: u32, kv_head: u32, j: u32) -> u32 {
    return view_at(p.v, key_batch(b), key_head(kv_head), listed(list_of(b, kv_head), j), 0u) & INDEX;
}

// Channels d .. d + 4 of a row, with zeros past the last channel.

fn q_vector(row: u32, d: u32) -> vec4<f32> {
    let unit = select(p.q.strides.w, 1u, IN_FOURS);
    return q_at4(row + d * unit, unit, p.head_dim - d);
}

fn k_vector(row: u32, d: u32) -> vec4<f32> {
    let unit = select(p.k.strides.w, 1u, IN_FOURS);
    return k_at4(row + d * unit, unit, p.head_dim - d);
}

fn v_vector(row: u32, d: u32) -> vec4<f32> {
    let unit = select(p.v.strides.w, 1u, IN_FOURS);
    return v_at4(row + d * unit, unit, p.value_dim - d);
}

fn d_out_vector(row: u32, d: u32) -> vec4<f32> {
    let unit = select(p.d_out.strides.w, 1u, IN_FOURS);
    return d_out_at4(row + d * unit, unit, p.value_dim - d);
}

// q · k.
fn dot_at(q: Query, j: u32) -> f32 {
    let query = q_row(q.b, q.h, q.i);
    let key = k_row(q.b, q.h / p.group, j);
    var chains = vec4<f32>();
    var dot = 0.0;
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let x = q_vector(query, d);
        let y = k_vector(key, d);
        if IN_CHAINS {
            chains += y * x;
        } else {
            dot = fma(x.x, y.x, dot);
            dot = fma(x.y, y.y, dot);
            dot = fma(x.z, y.z, dot);
            dot = fma(x.w, y.w, dot);
        }
    }
    return select(dot, ((chains.x + chains.y) + chains.z) + chains.w, IN_CHAINS);
}

// d_out · v.
fn d_weight_at(q: Query, j: u32) -> f32 {
    let d_out = d_out_row(q.b, q.h, q.i);
    let value = v_row(q.b, q.h / p.group, j);
    var d_weight = 0.0;
    for (var d = 0u; d < p.value_dim; d += 4u) {
        let x = d_out_vector(d_out, d) * v_vector(value, d);
        d_weight += (x.x + x.y) + (x.z + x.w);
    }
    return d_weight;
}

// The pair, computed from memory, for a key of q's interval.
fn pair_at(q: Query, j: u32, stats: vec3<f32>) -> Pair {
    return pair_of(q, j, dot_at(q, j), d_weight_at(q, j), stats);
}
