// The gradients of a causal convolution's rows and of its initial state. Let e be d_out · f'(sum),
// zero outside the sequence. The gradient of row k is Σ weight[c, j] · e[k + WIDTH − 1 − j]. The
// gradient of the final state is added to its rows.
//
// x, d_out [batch, 1, length, channels]   weight [1, 1, channels, WIDTH]   bias [1, 1, 1, channels]
// initial, d_final [sequences, 1, WIDTH − 1, channels]   numbers as in causal_conv.wgsl
// d_rows: the gradient of x or, with OF_STATE, of initial
//
// A unit of work is p.tile rows of a batch entry or, with OF_STATE, the state of a sequence. LANES
// invocations have neighbouring channels, as in causal_conv.wgsl.
//
// Bindings (declared by the host): x, bias and initial if ACTIVATED and present. Then weight,
// numbers if present, d_out, d_final if present, d_rows. `IN_FOURS`: all of them except weight,
// bias and numbers are accessed as vec4. ACCUMULATES: the gradient is added to d_rows.
// Bytes: x, d_out and d_rows once. Each unit reads up to 2 WIDTH − 2 more rows of x and d_out.

// e of the rows k + WIDTH − 1 − j.
var<private> errors: array<vec4<f32>, WIDTH>;

fn push_error(e: vec4<f32>) {
    /* unrolled */ for (var j = 1u; j < WIDTH; j++) {
        errors[WIDTH - j] = errors[KEPT - j];
    }
    errors[0] = e;
}

fn d_rows_view(q: Sequence, k: u32, d: u32) -> u32 {
    if OF_STATE {
        return view_at(p.d_rows, q.s, 0u, k, d);
    } else {
        return view_at(p.d_rows, q.b, 0u, q.first + k - KEPT, d);
    }
}

fn store_rows4(o: u32, d: u32, gradient: vec4<f32>) {
    let step = p.d_rows.strides.w;
    var sum = gradient;
    if ACCUMULATES {
        sum += d_rows_at4(o, step, p.channels - d);
    }
    if IN_FOURS {
        d_rows_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, p.channels - d); c++) {
            d_rows_store(o + c * step, component(sum, c));
        }
    }
}

// The gradients of rows begin to stop − 1 of a sequence.
fn gradients(q: Sequence, begin: u32, stop: u32, d: u32) {
    // e is zero in the rows of the state and after the last row.
    let total = q.end - q.first + KEPT;
    let first = max(begin, KEPT);
    if ACTIVATED {
        fill(q, first, d);
    }
    for (var t = begin; t < stop + KEPT; t++) {
        var e = vec4<f32>();
        if t >= first && t < total {
            let i = q.first + t - KEPT;
            e = d_out_at4(view_at(p.d_out, q.b, 0u, i, d), p.d_out.strides.w, p.channels - d);
            if ACTIVATED {
                push(row4(q, t, d));
                e *= slope4(sum4());
            }
        }
        push_error(e);
        if t >= begin + KEPT {
            let k = t - KEPT;
            var gradient = vec4<f32>();
            /* unrolled */ for (var j = 0u; j < WIDTH; j++) {
                gradient = fma(weights[j], errors[j], gradient);
            }
            if HAS_D_FINAL {
                // The final state begins KEPT rows before the end.
                if k >= total - KEPT {
                    let o = view_at(p.d_final, q.s, 0u, k - (total - KEPT), d);
                    gradient += d_final_at4(o, p.d_final.strides.w, p.channels - d);
                }
            }
            store_rows4(d_rows_view(q, k, d), d, gradient);
        }
    }
}

fn tile(u: u32, d: u32) {
    let b = u / p.tiles;
    let first = (u - b * p.tiles) * p.tile;
    let stop = min(first + p.tile, p.length);
    var i = first;
    while i < stop {
        let q = sequence_at(b, i);
        let next = next_row(q, i, stop);
        if i >= q.first && i < q.end {
            gradients(q, i - q.first + KEPT, next - q.first + KEPT, d);
        } else if !ACCUMULATES {
            for (var n = i; n < next; n++) {
                store_rows4(view_at(p.d_rows, b, 0u, n, d), d, vec4<f32>());
            }
        }
        i = next;
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.y * (WORKGROUP / LANES) + index / LANES;
    for (var d = (group.x * LANES + index % LANES) * 4u; d < p.channels; d += p.across) {
        load_filter(d);
        for (var u = first; u < p.units; u += p.step) {
            if OF_STATE {
                gradients(sequence_of(u), 0u, KEPT, d);
            } else {
                tile(u, d);
            }
        }
    }
}
