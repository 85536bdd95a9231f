// The means of blocks of rows, or the gradient of the rows. Block c begins at row stride · c.
// Blocks overlap if the stride is shorter than their length.
//
// x, out [batch, heads, rows, dim]: rows and blocks, or with BACKWARD blocks and rows
//
// out[c] is Σ x[i] / length, over the rows i of block c. With BACKWARD, out[i] is Σ x[c] / length,
// over the blocks c of row i.
//
// An invocation computes four channels of a row at a time.
//
// Bindings (declared by the host): x, out. `IN_FOURS`: they are accessed as vec4. With BACKWARD the
// result is added to out.
// Bytes: out once; x once from memory, and length / stride times from caches.

// The first of the rows of x that add up, and the row after the last.
fn terms_of(i: u32) -> vec2<u32> {
    if BACKWARD {
        var first = 0u;
        if i >= p.length {
            first = (i - p.length) / p.stride + 1u;
        }
        return vec2<u32>(first, min(i / p.stride + 1u, p.terms));
    } else {
        let first = i * p.stride;
        return vec2<u32>(first, min(first + p.length, p.terms));
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        let within = p.dim - d;
        let terms = terms_of(i);
        var sum = vec4<f32>();
        for (var t = terms.x; t < terms.y; t++) {
            sum += p.scale * x_at4(view_at(p.x, b, h, t, d), p.x.strides.w, within);
        }
        let o = view_at(p.out, b, h, i, d);
        if BACKWARD {
            sum += out_at4(o, p.out.strides.w, within);
        }
        store_four(o, within, sum);
    }
}
