// The rates and decays of a gated DeltaNet layer: beta = sigmoid(b), and
// decay = −exp(a_log) · softplus(a + dt_bias).
//
// logits [batch, 1, length, 2 · heads]: b, then a   a_log, dt_bias [1, 1, 1, heads]
// beta, decay [batch, 1, length, heads]
//
// Bindings (declared by the host): logits, a_log, dt_bias, beta, decay. An invocation computes the
// rate and the decay of a token and a head.
// Bytes: 16 for each token and head.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    for (var n = group.x * WORKGROUP + index; n < p.count; n += p.step) {
        let h = n % p.heads;
        let t = n / p.heads % p.length;
        let s = n / p.heads / p.length;
        let b = logits_at(view_at(p.logits, s, 0u, t, h));
        let a = logits_at(view_at(p.logits, s, 0u, t, p.heads + h));
        let bias = dt_bias_at(view_at(p.dt_bias, 0u, 0u, 0u, h));
        let factor = -exp(a_log_at(view_at(p.a_log, 0u, 0u, 0u, h)));
        beta_store(view_at(p.beta, s, 0u, t, h), sigmoid(b));
        decay_store(view_at(p.decay, s, 0u, t, h), factor * softplus(a + bias));
    }
}
