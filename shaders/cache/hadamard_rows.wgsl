// out = x times a Walsh-Hadamard matrix, for each block of channels of a row. Attention to a cache
// that stores such products multiplies its queries and its outputs.
//
// x, out [batch, heads, length, dim]. p.block channels are a block.
//
// An invocation computes four channels of a row at a time.
//
// Bindings (declared by the host): x, out. `IN_FOURS`: they are accessed as vec4.
// Bytes: out once; x once from memory, and block / 4 times from caches.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        let start = d - d % p.block;
        var sum = vec4<f32>();
        for (var e = 0u; e < p.block; e += 4u) {
            let x = x_at4(view_at(p.x, b, h, i, start + e), p.x.strides.w, 4u);
            sum += hadamard_sign(d - start, e) * x;
        }
        let y = hadamard_four(sum) * p.scale;
        let o = view_at(p.out, b, h, i, d);
        store_four(o, 4u, y);
    }
}
