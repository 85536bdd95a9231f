// A causal convolution of each channel along the rows: out[i, c] = f(bias[c] + Σ weight[c, j] ·
// x[i − WIDTH + 1 + j, c]). Rows before x are the rows of a state (Mamba: Gu and Dao 2023).
//
// x, out [batch, 1, length, channels]   weight [1, 1, channels, WIDTH]   bias [1, 1, 1, channels]
// numbers: lengths [batch, 1, 1, 1] or cu_seqlens [1, 1, 1, sequences + 1]
// slots [sequences, 1, 1, 1]   initial, state [states, 1, WIDTH − 1, channels]
//
// LANES invocations of a workgroup have neighbouring channels, four each. Without BY_SEQUENCE a
// unit of work is p.tile rows of a batch entry. With BY_SEQUENCE it is a sequence: the invocation
// then also writes the state, after it has read all of it.
//
// Bindings (declared by the host): x and weight. Then bias, numbers, slots and initial, each if
// present. Then out, and state if BY_SEQUENCE. IN_PLACE: the state is also the initial state.
// `IN_FOURS`: x, initial, out and state are accessed as vec4.
// Bytes: x and out once, WIDTH − 1 more rows of x for each unit.

fn store_out4(b: u32, i: u32, d: u32, value: vec4<f32>) {
    let o = view_at(p.out, b, 0u, i, d);
    if IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.channels - d); c++) {
            out_store(o + c * p.out.strides.w, component(value, c));
        }
    }
}

fn convolve(q: Sequence, begin: u32, stop: u32, d: u32) {
    fill(q, begin + KEPT - q.first, d);
    for (var i = begin; i < stop; i++) {
        push(row4(q, i + KEPT - q.first, d));
        store_out4(q.b, i, d, activate4(sum4()));
    }
}

fn clear(b: u32, begin: u32, stop: u32, d: u32) {
    for (var i = begin; i < stop; i++) {
        store_out4(b, i, d, vec4<f32>());
    }
}

// The rows of a sequence, and the rows outside all sequences.
fn whole_sequence(s: u32, d: u32) {
    let q = sequence_of(s);
    if s == 0u || !PACKED {
        clear(q.b, 0u, q.first, d);
    }
    // The state of an empty sequence does not change.
    fill(q, KEPT, d);
    for (var i = q.first; i < q.end; i++) {
        push(row4(q, i + KEPT - q.first, d));
        store_out4(q.b, i, d, activate4(sum4()));
    }
    if s + 1u == p.sequences || !PACKED {
        clear(q.b, q.end, p.length, d);
    }
    let slot = slot_of(s);
    if slot < p.states {
        /* unrolled */ for (var j = 1u; j < WIDTH; j++) {
            store_state4(slot, j - 1u, d, window[j]);
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
            convolve(q, i, next, d);
        } else {
            clear(b, i, next, d);
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
            if BY_SEQUENCE {
                whole_sequence(u, d);
            } else {
                tile(u, d);
            }
        }
    }
}
