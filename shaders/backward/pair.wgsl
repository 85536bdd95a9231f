// What a pair of query and key gives to gradients, and the rows it is made of.
//
//   weight  = total · exp(score − lse)
//   d_added = weight · (dropout(d_out · v) − dot)     the gradient of the score as softcap and bias have left it
//   d_score = d_added times the derivative of the softcap, the gradient of scale · q · k
//
// A pair that is not seen gives zeros, whatever its tensors hold.
//
// Constants: HAS_DROPOUT, IN_FOURS, PER_PAIR_MASK
//            WIDE   whether element indices reach 2^28
//
// Needs: p.d_out, p.group, p.head_dim, p.k, p.mask, p.q, p.scale, p.v, p.value_dim; HAS_DROPOUT, IN_FOURS, PER_PAIR_MASK, WIDE;
// Query; apply_dropout, d_out_at4, k_at4, mask_mod, q_at4, score_mod, score_slope, v_at4, view_at.
// Gives: Pair; d_out_row, d_out_vector, d_weight_at, dot_at, k_row, k_vector, pair_at, pair_of, q_row, q_vector, v_row, v_vector.

const LOG2_E: f32 = 1.4426950408889634;

// Says to the compiler that an index is not negative as an i32 (and, in fours, aligned), which saves a
// check per load.
const INDEX: u32 = select(0xffffffffu, select(0x0fffffffu, 0x0ffffffcu, IN_FOURS), !WIDE);

// Rows of the tensors, from their first channel on.

fn q_row(b: u32, h: u32, i: u32) -> u32 {
    return view_at(p.q, b, h, i, 0u) & INDEX;
}

fn d_out_row(b: u32, h: u32, i: u32) -> u32 {
    return view_at(p.d_out, b, h, i, 0u) & INDEX;
}

fn k_row(b: u32, kv_head: u32, j: u32) -> u32 {
    return view_at(p.k, b, kv_head, j, 0u) & INDEX;
}

fn v_row(b: u32, kv_head: u32, j: u32) -> u32 {
    return view_at(p.v, b, kv_head, j, 0u) & INDEX;
}

// Channels d .. d + 4 of a row, zeros past the last.

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

struct Pair {
    weight: f32,   // as dropout leaves it: what d_out is multiplied by for d_v
    d_added: f32,
    d_score: f32,
}

fn pair_of(q: Query, j: u32, dot: f32, d_weight: f32, stats: vec3<f32>) -> Pair {
    var seen = (j >= q.first) & (j < q.end);
    let scaled = dot * p.scale;
    var score = scaled;
    if PER_PAIR_MASK {
        // Past the range, any key: rules read tensors at it.
        let key = min(j, p.mask.kv_len - 1u);
        seen &= mask_mod(q, key);
        score = score_mod(scaled, q, key);
    }
    let weight = select(exp2((score - stats.x) * LOG2_E) * stats.z, 0.0, !seen | (score == p.mask.neg_inf));
    let nothing = (bitcast<u32>(weight) & 0x7fffffffu) == 0u;
    var kept = weight;
    var d_kept = d_weight;
    if HAS_DROPOUT {
        let keep = apply_dropout(1.0, q.b, q.h, q.i, j);
        kept = select(weight * keep, 0.0, keep == 0.0);
        d_kept = select(d_weight * keep, 0.0, keep == 0.0);
    }
    let d_added = weight * (d_kept - stats.y);
    let slope = score_slope(scaled, q, min(j, p.mask.kv_len - 1u));
    return Pair(kept, select(d_added, 0.0, nothing), select(d_added * slope, 0.0, nothing));
}

// q · k.
fn dot_at(q: Query, j: u32) -> f32 {
    let query = q_row(q.b, q.h, q.i);
    let key = k_row(q.b, q.h / p.group, j);
    var dot = 0.0;
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let x = q_vector(query, d) * k_vector(key, d);
        dot += (x.x + x.y) + (x.z + x.w);
    }
    return dot;
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

// The same from memory, of a key of q's interval.
fn pair_at(q: Query, j: u32, stats: vec3<f32>) -> Pair {
    return pair_of(q, j, dot_at(q, j), d_weight_at(q, j), stats);
}
