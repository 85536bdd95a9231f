@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let z = group.z + p.first.z;
    let row = (group.x + p.first.x) * LANES + lane;
    if row >= p.mask.q_len * p.group {
        return;
    }
    let q = query_of_row(z / p.kv_heads, z % p.kv_heads, row);
    let none = p.mask.none;
    let col0 = (group.y + p.first.y) * SLICE;
    var out: array<vec4<f32>, SLICE / 4u>;
    for (var c = 0u; c < SLICE / 4u; c++) {
        out[c] = vec4<f32>();
    }
    var total = vec2<f32>(none, 0.0);
    for (var j = q.first; j < q.end; j++) {
        let s = score_of(q, j);
        if any_nan(vec4<f32>(s)) {
            total.y += s;
        }
        if s == none {
            continue;
        }
        let top = max(total.x, s);
        let fade = exp_of(vec4<f32>(total.x - top), none).x;
        let weight = exp(s - top);
        total = vec2<f32>(top, total.y * fade + weight);
        let kept = dropped(weight, q, j);
        for (var c = 0u; c < SLICE / 4u; c++) {
            let col = min(col0 + c * 4u, (p.value_dim - 1u) & ~3u);
            let v = v_at4(view_at(p.v, q.b, q.h / p.group, j, col), p.v.strides.w, p.value_dim - col);
            out[c] = out[c] * fade + v * kept;
        }
    }
    let top = total.x;
    total = with_sink(total, q.b, q.h);
    let seen = is_seen(total, none);
    // A sink may have raised the maximum.
    let factor = select(0.0, exp_of(vec4<f32>(top - total.x), none).x / total.y, seen);
    for (var c = 0u; c < SLICE / 4u; c++) {
        let col = col0 + c * 4u;
        if col < p.value_dim {
            var x = out[c] * factor;
            if any_nan(x) {
                x = repaired(q, col, total);
            }
            put_out(q, col, x);
        }
    }
    if group.y + p.first.y == 0u {
        put_lse(q, total);
    }
}
