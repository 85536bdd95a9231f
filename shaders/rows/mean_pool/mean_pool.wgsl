// out = the mean of a sequence's rows, with L2 divided by its length (sentence embeddings: Reimers
// and Gurevych 2019). The mean of no rows is zero.
//
// x [batch, 1, length, features]   keep [batch, 1, 1, length]   out [sequences, 1, 1, features]
// numbers: lengths [batch, 1, 1, 1] or cu_seqlens [1, 1, 1, sequences + 1]
//
// ROW_LANES invocations share a sequence, as they share a row in norm.wgsl.
//
// Bindings (declared by the host): x, numbers if LENGTHS or PACKED, keep if KEEP, out. `IN_FOURS`:
// x and out are accessed as vec4.
// Bytes: x once from memory, with L2 a second time from caches; out once.

fn store4(s: u32, d: u32, value: vec4<f32>) {
    let o = view_at(p.out, s, 0u, 0u, d);
    if IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.features - d); c++) {
            out_store(o + c * p.out.strides.w, component(value, c));
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = lane_of(index);
    for (var s = first_row(group.x, index); s < p.sequences; s += p.step) {
        let sequence = sequence_of(s);
        var scale = 1.0;
        var exponent = 0u;
        if L2 {
            var squares = vec4<f32>();
            var far_squares = vec4<f32>();
            for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
                let mean = mean4(sequence, d);
                squares += mean * mean;
                let far_mean = lowered(mean, FAR_EXPONENT);
                far_squares += far_mean * far_mean;
            }
            let near = row_sum(squares, lane);
            let far = row_sum(far_squares, lane);
            exponent = far_exponent(near);
            scale = 1.0 / max(sqrt(select(far, near, exponent == 0u)), lowered(vec4<f32>(p.eps), exponent).x);
        }
        for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
            store4(s, d, lowered(mean4(sequence, d), exponent) * scale);
        }
    }
}
