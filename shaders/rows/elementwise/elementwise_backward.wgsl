// The gradients of f(x) and of f(x) · other: d_x = d_out · f'(x) [· other], d_other = d_out · f(x).
//
// x, other, d_out, d_x, d_other [batch, heads, length, dim]
//
// An invocation computes four channels of a row at a time. X_REPEATS: x and d_x have one channel,
// which is repeated over all channels of a row. Then an invocation computes a row, and d_x is a sum
// over it.
//
// Bindings (declared by the host): x, other if HAS_OTHER, d_out, d_x if HAS_D_X, d_other if
// HAS_D_OTHER.
// `IN_FOURS`: all of them are accessed as vec4, except x and d_x if X_REPEATS.
// ACCUMULATES: the gradients are added to the outputs.
// Bytes: reads and writes everything once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        if X_REPEATS {
            var sum = vec4<f32>();
            for (var c = 0u; c < p.dim; c += 4u) {
                sum += gradients(b, h, i, c);
            }
            if HAS_D_X {
                store_d_x(view_at(p.d_x, b, h, i, 0u), vec4<f32>(sum.x + sum.y + sum.z + sum.w), 1u);
            }
        } else {
            let d_x = gradients(b, h, i, d);
            if HAS_D_X {
                store_d_x(view_at(p.d_x, b, h, i, d), d_x, p.dim - d);
            }
        }
    }
}

// Stores the gradient of other and returns the gradient of x, for four channels.
fn gradients(b: u32, h: u32, i: u32, d: u32) -> vec4<f32> {
    let within = p.dim - d;
    let x = x_at4(view_at(p.x, b, h, i, d), p.x.strides.w, within);
    let d_out = d_out_at4(view_at(p.d_out, b, h, i, d), p.d_out.strides.w, within);
    if HAS_D_OTHER {
        store_d_other(view_at(p.d_other, b, h, i, d), d_out * activate4(x), within);
    }
    var d_x = d_out * slope4(x);
    if HAS_OTHER {
        d_x *= other_at4(view_at(p.other, b, h, i, d), p.other.strides.w, within);
    }
    return d_x;
}

fn store_d_x(o: u32, gradient: vec4<f32>, within: u32) {
    let step = p.d_x.strides.w;
    var sum = gradient;
    if ACCUMULATES {
        sum += d_x_at4(o, step, within);
    }
    if IN_FOURS && !X_REPEATS {
        d_x_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, within); c++) {
            d_x_store(o + c * step, component(sum, c));
        }
    }
}

fn store_d_other(o: u32, gradient: vec4<f32>, within: u32) {
    let step = p.d_other.strides.w;
    var sum = gradient;
    if ACCUMULATES {
        sum += d_other_at4(o, step, within);
    }
    if IN_FOURS {
        d_other_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, within); c++) {
            d_other_store(o + c * step, component(sum, c));
        }
    }
}
