// The gradients of the rates and decays of delta_gates.wgsl: of b and of a. It also writes terms
// whose sum over all tokens is the gradient of a_log. The gradient of dt_bias is the sum of d_a.
//
// logits [batch, 1, length, 2 · heads]: b, then a   a_log, dt_bias [1, 1, 1, heads]
// d_beta, d_decay [batch, 1, length, heads]
// terms [batch, 1, length, 3 · heads]: of b, of a, of a_log
//
// Bindings (declared by the host): logits, a_log, dt_bias, d_beta, d_decay, terms. An invocation
// computes the terms of a token and a head.
// Bytes: 28 for each token and head.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    for (var n = group.x * WORKGROUP + index; n < p.count; n += p.step) {
        let h = n % p.heads;
        let t = n / p.heads % p.length;
        let s = n / p.heads / p.length;
        let b = logits_at(view_at(p.logits, s, 0u, t, h));
        let a = logits_at(view_at(p.logits, s, 0u, t, p.heads + h));
        let x = a + dt_bias_at(view_at(p.dt_bias, 0u, 0u, 0u, h));
        let factor = -exp(a_log_at(view_at(p.a_log, 0u, 0u, 0u, h)));
        let d_beta = d_beta_at(view_at(p.d_beta, s, 0u, t, h));
        let d_decay = d_decay_at(view_at(p.d_decay, s, 0u, t, h)) * factor;
        terms_store(view_at(p.terms, s, 0u, t, h), d_beta * sigmoid(b) * sigmoid(-b));
        terms_store(view_at(p.terms, s, 0u, t, p.heads + h), d_decay * sigmoid(x));
        terms_store(view_at(p.terms, s, 0u, t, 2u * p.heads + h), d_decay * softplus(x));
    }
}
