// The sum of three branches of attention, each times its gate.
//
// branches [3 · batch, heads, queries, dim]   gates [batch, heads, queries, 3]
// out [batch, heads, queries, dim]
//
// An invocation computes four channels of a row at a time.
//
// Bindings (declared by the host): branches, gates, out. `IN_FOURS`: branches and out are accessed
// as vec4. Bytes: reads and writes everything once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        let within = p.dim - d;
        var sum = vec4<f32>();
        for (var c = 0u; c < 3u; c++) {
            let gate = gates_at(view_at(p.gates, b, h, i, c));
            let branch = view_at(p.branches, b + c * p.batch, h, i, d);
            sum += gate * branches_at4(branch, p.branches.strides.w, within);
        }
        let o = view_at(p.out, b, h, i, d);
        store_four(o, within, sum);
    }
}
