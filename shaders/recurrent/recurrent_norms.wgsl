// The factors that give the rows of q and k the length 1: 1 / √(Σ x² + eps).
//
// q, k [batch, heads, length, head_dim]   memory: norms [rows, 4], for q and for k
//
// Bindings (declared by the host): q, k, chunks, memory. Floors: 2 · head_dim multiply-adds a row.
// The kernel reads q and k once for each value head. An invocation computes a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let t = group.x * WORKGROUP + index;
    let chunk = chunk_of(z, group.y);
    if t >= chunk.count {
        return;
    }
    let b = z / p.value_heads;
    let h = z % p.value_heads / p.group;
    var squares = vec2<f32>();
    for (var f = 0u; f < p.head_dim; f++) {
        let x = vec2<f32>(
            q_at(view_at(p.q, b, h, chunk.first + t, f)),
            k_at(view_at(p.k, b, h, chunk.first + t, f)),
        );
        squares += x * x;
    }
    let factors = 1.0 / sqrt(squares + p.eps);
    memory_store4(p.norms + 4u * (row_at(z, group.y) + t), vec4<f32>(factors, 0.0, 0.0));
}
