// Writes the keys and values that a layer appends to every sequence: a learned key, then a zero
// key.
//
// k [batch, kv_heads, from + appended, head_dim] and v [.., value_dim] in one buffer. The kernel
// writes the rows from `from` on. If a buffer has only one of the two, the other's dim is 0.
//
// bias_k [kv_heads · head_dim], bias_v [kv_heads · value_dim]
//
// Bindings (declared by the host): kv; bias_k, bias_v if learned.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let d = group.x * 64u + lane;
    let b = group.z / p.kv_heads;
    let h = group.z % p.kv_heads;
    let row = p.start + group.y;
    let learned = HAS_BIAS_K && group.y == 0u;
    if d < p.head_dim {
        var x = 0.0;
        if learned {
            x = bias_k_at(p.bias_k_at.x + (h * p.head_dim + d) * p.bias_k_at.y);
        }
        kv_store(view_at(p.k, b, h, row, d), x);
    }
    if d < p.value_dim {
        var x = 0.0;
        if learned {
            x = bias_v_at(p.bias_v_at.x + (h * p.value_dim + d) * p.bias_v_at.y);
        }
        kv_store(view_at(p.v, b, h, row, d), x);
    }
}
