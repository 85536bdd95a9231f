// Partial sums for the gradients of a causal convolution's weight and bias. With e = d_out ·
// f'(sum), they are sums of e · x[i − WIDTH + 1 + j] and of e over p.tile rows. Then
// column_sums.wgsl adds the parts in order.
//
// x, d_out [batch, 1, length, channels]   weight [1, 1, channels, WIDTH]   bias [1, 1, 1, channels]
// initial [sequences, 1, WIDTH − 1, channels]   numbers as in causal_conv.wgsl
// parts [units, channels · WIDTH + channels]
//
// A unit of work is p.tile rows of all batch entries. LANES invocations have neighbouring channels,
// as in causal_conv.wgsl.
//
// Bindings (declared by the host): x. Then weight if ACTIVATED, bias if ACTIVATED and present,
// numbers and initial if present, d_out, parts. `IN_FOURS`: x, initial and d_out are accessed as
// vec4.
// Bytes: x and d_out once.

var<private> sums: array<vec4<f32>, WIDTH>;
var<private> total4: vec4<f32>;

fn add_rows(q: Sequence, begin: u32, stop: u32, d: u32) {
    fill(q, begin + KEPT - q.first, d);
    for (var i = begin; i < stop; i++) {
        push(row4(q, i + KEPT - q.first, d));
        var e = d_out_at4(view_at(p.d_out, q.b, 0u, i, d), p.d_out.strides.w, p.channels - d);
        if ACTIVATED {
            e *= slope4(sum4());
        }
        /* unrolled */ for (var j = 0u; j < WIDTH; j++) {
            sums[j] = fma(e, window[j], sums[j]);
        }
        total4 += e;
    }
}

fn part(u: u32, d: u32) {
    /* unrolled */ for (var j = 0u; j < WIDTH; j++) {
        sums[j] = vec4<f32>();
    }
    total4 = vec4<f32>();
    var row = u * p.tile;
    let stop = min(row + p.tile, p.rows);
    while row < stop {
        let b = row / p.length;
        let i = row - b * p.length;
        let q = sequence_at(b, i);
        let next = next_row(q, i, min(stop - b * p.length, p.length));
        if i >= q.first && i < q.end {
            add_rows(q, i, next, d);
        }
        row += next - i;
    }
    let o = u * p.channels * (WIDTH + 1u);
    for (var c = 0u; c < min(4u, p.channels - d); c++) {
        /* unrolled */ for (var j = 0u; j < WIDTH; j++) {
            parts_store(o + (d + c) * WIDTH + j, component(sums[j], c));
        }
        parts_store(o + p.channels * WIDTH + d + c, component(total4, c));
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.y * (WORKGROUP / LANES) + index / LANES;
    for (var d = (group.x * LANES + index % LANES) * 4u; d < p.channels; d += p.across) {
        if ACTIVATED {
            load_filter(d);
        }
        for (var u = first; u < p.units; u += p.step) {
            part(u, d);
        }
    }
}
