// out = x − ln Σ exp(x) of every row, with the row's maximum subtracted first. If x is −∞, out is
// −∞. Rows with NaN or ∞, or with only −∞, are NaN.
//
// x, out [batch, heads, length, columns]
//
// ROW_LANES invocations share a row, as in norm.wgsl.
//
// Bindings (declared by the host): x, out. `IN_FOURS`: both are accessed as vec4.
// Bytes: x once from memory and twice from caches; out once.

fn within(d: u32) -> vec4<bool> {
    return vec4<u32>(d) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.columns);
}

fn store4(o: u32, d: u32, value: vec4<f32>) {
    if IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.columns - d); c++) {
            out_store(o + c * p.out.strides.w, component(value, c));
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = lane_of(index);
    let step = p.x.strides.w;
    let none = vec4<f32>(-p.inf);
    for (var row = first_row(group.x, index); row < p.rows; row += p.step) {
        let plane = row / p.length;
        let i = row - plane * p.length;
        let b = plane / p.heads;
        let h = plane - b * p.heads;
        let at = view_at(p.x, b, h, i, 0u);
        var tops = none;
        for (var d = lane * 4u; d < p.columns; d += ROW_LANES * 4u) {
            let x = x_at4(at + d * step, step, p.columns - d);
            // NaN and ∞ have the same effect on a row. ∞ is used, because max loses NaN on some
            // drivers.
            tops = max(tops, select(none, select(x, -none, are_nan(x)), within(d)));
        }
        let top = row_max(tops, lane);
        var sums = vec4<f32>();
        for (var d = lane * 4u; d < p.columns; d += ROW_LANES * 4u) {
            let x = x_at4(at + d * step, step, p.columns - d);
            sums += select(vec4<f32>(), exp(x - top), within(d) & (x != none));
        }
        let log_sum = log(row_sum(sums, lane));
        let is_finite = (bitcast<u32>(top) & 0x7fffffffu) < 0x7f800000u;
        for (var d = lane * 4u; d < p.columns; d += ROW_LANES * 4u) {
            let x = x_at4(at + d * step, step, p.columns - d);
            let y = select((x - top) - log_sum, none, x == none);
            store4(view_at(p.out, b, h, i, d), d, select(vec4<f32>(p.nan), y, is_finite));
        }
    }
}
