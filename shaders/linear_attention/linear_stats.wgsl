// The statistics of each query that the backward pass reads. The first two are 1 / norm and −d_out
// · out / norm, or the configured scale and 0 without normalisation. The third is the logarithm of
// the scale of both. The fourth is the scale of the state before the chunk, relative to that scale,
// as a factor.
//
// q [batch, heads, q_len, features]   out, d_out [batch, heads, q_len, value_dim]
// stats [batch, heads, q_len, 4]
//
// Bindings (declared by the host): q, d_out, out and states if results are normalised. If they are
// also causal, scores. Then logs and chunks if there are any, and stats.
// Floors: features + value_dim + chunk_len / 2 multiply-adds a row. The kernel reads and writes
// each tensor once. An invocation computes a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.z % p.heads;
    let b = group.z / p.heads;
    let kv = h / p.group;
    let slot = p.first_slot + group.y;
    let chunk = chunk_of(b, kv, slot);
    let row = group.x * WORKGROUP + index;
    if row >= chunk.count {
        return;
    }
    var stats = vec4<f32>(0.0, 0.0, 0.0, 1.0);
    if chunk.ordinal != HIDDEN {
        if IS_CAUSAL && IS_SCALED {
            var largest = log_before(b, kv, slot);
            for (var t = 0u; t <= row; t++) {
                largest = max(largest, log_at(b, kv, chunk.first + t));
            }
            stats.z = largest;
            stats.w = hidden_or_exp(log_before(b, kv, slot), largest);
        }
        stats = norm_stats(b, h, kv, group.y, chunk, row, stats);
    }
    stats_store4(((b * p.heads + h) * p.q_len + chunk.first + row) * 4u, stats);
}
