// Linear attention token by token, with the state of each head in memory. Calls use it for few
// tokens, and for update rules that are not sums.
//
// q [batch, heads, q_len, features]   k [batch, kv_heads, q_len, features]
// v [batch, kv_heads, q_len, value_dim]   out [batch, heads, q_len, value_dim]
// decay [batch, kv_heads, q_len, 1 or features]   beta [batch, kv_heads, q_len, 1]
// state [batch, kv_heads, features, value_dim]   norm [batch, kv_heads, features, 1]
//
// Bindings (declared by the host): q, k, v, decay and beta if the rule has them. Then state, norm
// if results are normalised, and `written`, which is out.
// Floors: (2 + heads of a group) · features · value_dim multiply-adds a token. For each token the
// kernel reads the state twice and writes it once. It reads the other tensors once. A workgroup
// computes a head.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.y;
    let b = group.z;
    begin_norm(b, kv, index);
    for (var t = 0u; t < p.q_len; t++) {
        let is_first = t == 0u && p.has_state == 0u;
        add_to_norm(b, kv, t, index);
        for (var c = index; c < p.value_dim; c += WORKGROUP) {
            let value = v_at(view_at(p.v, b, kv, t, c));
            var update = value * rate(b, kv, t);
            if IS_DELTA {
                // The update is the difference from the value that the state already gives for the
                // key.
                var known = 0.0;
                if !is_first {
                    for (var f = 0u; f < p.features; f++) {
                        known += state_at(view_at(p.state, b, kv, f, c)) * kept(b, kv, t, f) * key(b, kv, t, f);
                    }
                }
                update = (value - known) * rate(b, kv, t);
            }
            for (var f = 0u; f < p.features; f++) {
                let o = view_at(p.state, b, kv, f, c);
                var before = 0.0;
                if !is_first {
                    before = state_at(o) * kept(b, kv, t, f);
                }
                state_store(o, before + key(b, kv, t, f) * update);
            }
        }
        // Each invocation reads only elements that it wrote, so no barrier is needed.
        for (var n = 0u; n < p.group; n++) {
            let h = kv * p.group + n;
            let factor = result_factor(b, h, t);
            for (var c = index; c < p.value_dim; c += WORKGROUP) {
                var sum = 0.0;
                for (var f = 0u; f < p.features; f++) {
                    sum += query(b, h, t, f) * state_at(view_at(p.state, b, kv, f, c));
                }
                written_store(view_at(p.written, b, h, t, c), sum * factor);
            }
        }
        end_token();
    }
    end_norm(b, kv, index);
}

fn query(b: u32, h: u32, i: u32, f: u32) -> f32 {
    return phi4(vec4<f32>(q_at(view_at(p.q, b, h, i, f)))).x;
}

fn key(b: u32, kv: u32, j: u32, f: u32) -> f32 {
    return phi4(vec4<f32>(k_at(view_at(p.k, b, kv, j, f)))).x;
}
