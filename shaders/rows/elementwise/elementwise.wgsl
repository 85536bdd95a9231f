// out = f(x), f(x) · other or f(x) + other: activations, gated activations, residual sums.
//
// x, other, out [batch, heads, length, dim]
//
// An invocation computes four channels of a row at a time.
//
// Bindings (declared by the host): x, other if TIMES or PLUS, out. `IN_FOURS`: all of them are
// accessed as vec4, except an x with one channel, whose stride is 0.
// Bytes: reads and writes everything once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        let within = p.dim - d;
        var y = activate4(x_at4(view_at(p.x, b, h, i, d), p.x.strides.w, within));
        if TIMES {
            y *= other_at4(view_at(p.other, b, h, i, d), p.other.strides.w, within);
        }
        if PLUS {
            y += other_at4(view_at(p.other, b, h, i, d), p.other.strides.w, within);
        }
        let o = view_at(p.out, b, h, i, d);
        store_four(o, within, y);
    }
}
