// A few tokens, one after the other, in one dispatch. The state stays in memory. The state after
// each token can be kept.
//
// q, k [batch, heads, length, head_dim]   v, out [batch, value_heads, length, value_dim]
// decay [batch, value_heads, length, 1 or head_dim]   beta [batch, value_heads, length, 1]
// state [states, value_heads, head_dim, value_dim]
//
// Bindings (declared by the host): q, k, v. Then decay, beta and chunks if there are any, state,
// and `written`, which is out. A batch entry uses state b · p.left, or the slot that the table
// names. The state after token t is p.right · t later. Floors: 3 · head_dim · value_dim
// multiply-adds a token; 8 bytes an element of the state. A workgroup computes some columns of a
// head.

var<workgroup> parts: array<vec4<f32>, PARTS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let b = group.z;
    let hv = group.y;
    let h = hv / p.group;
    let lane = lane_of(group.x, index);
    let c = lane.column;
    let is_mine = c < p.value_dim;
    var base = b * p.left;
    var count = p.length;
    var is_there = is_mine;
    if HAS_CHUNKS {
        let at = CHUNK_WORDS * b;
        count = chunks_at(at + 2u);
        is_there = is_mine && chunks_at(at + 7u) != 0u;
        if HAS_INDICES {
            base = chunks_at(at + 6u);
        }
    }
    if !HAS_INITIAL && is_there && count == 0u {
        for (var f = lane.row; f < p.head_dim; f += STEP) {
            state_write(view_at(p.state, base, hv, f, c), c, vec4<f32>());
        }
    }
    for (var t = 0u; t < p.length; t++) {
        let is_seen = t < count && is_there;
        let reads = t > 0u || HAS_INITIAL;
        let before = view_at(p.state, base + p.right * (max(t, 1u) - 1u), hv, 0u, c);
        let after = view_at(p.state, base + p.right * t, hv, 0u, c);
        let step = p.state.strides.z;
        var norms = vec4<f32>(1.0);
        if IS_UNIT {
            var squares = vec4<f32>();
            for (var f = lane.row; f < p.head_dim; f += STEP) {
                let x = vec4<f32>(q_at(view_at(p.q, b, h, t, f)), k_at(view_at(p.k, b, h, t, f)), 0.0, 0.0);
                squares += x * x;
            }
            norms = 1.0 / sqrt(total(index, squares) + p.eps);
        }
        var known = vec4<f32>();
        if IS_DELTA {
            if is_seen && reads {
                for (var f = lane.row; f < p.head_dim; f += STEP) {
                    let key = factor_of(b, hv, t, f) * k_at(view_at(p.k, b, h, t, f)) * norms.y;
                    known += state_read(before + f * step, c) * key;
                }
            }
            known = total(index, known);
        }
        var sum = vec4<f32>();
        if is_seen {
            let update = (v_read(view_at(p.v, b, hv, t, c), c) - known) * rate_of(b, hv, t);
            for (var f = lane.row; f < p.head_dim; f += STEP) {
                var value = k_at(view_at(p.k, b, h, t, f)) * norms.y * update;
                if reads {
                    value += state_read(before + f * step, c) * factor_of(b, hv, t, f);
                }
                state_write(after + f * step, c, value);
                sum += value * (q_at(view_at(p.q, b, h, t, f)) * norms.x * p.scale);
            }
        } else if p.right > 0u && t > 0u && is_there {
            for (var f = lane.row; f < p.head_dim; f += STEP) {
                state_write(after + f * step, c, state_read(before + f * step, c));
            }
        }
        sum = total(index, sum);
        if lane.row == 0u && is_mine {
            written_write(view_at(p.written, b, hv, t, c), c, sum);
        }
    }
}

fn factor_of(b: u32, h: u32, i: u32, f: u32) -> f32 {
    if HAS_DECAY {
        return decay_factor4(vec4<f32>(decay_at(view_at(p.decay, b, h, i, select(0u, f, IS_BY_CHANNEL))))).x;
    } else {
        return 1.0;
    }
}

// The sum of the invocations with the same column.
fn total(index: u32, x: vec4<f32>) -> vec4<f32> {
    if WORKGROUP == COLUMN_LANES {
        return x;
    } else {
        parts[index] = x;
        workgroupBarrier();
        var sum = vec4<f32>();
        for (var n = index % COLUMN_LANES; n < WORKGROUP; n += COLUMN_LANES) {
            sum += parts[n];
        }
        workgroupBarrier();
        return sum;
    }
}
