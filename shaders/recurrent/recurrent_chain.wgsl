// The states of the chunks, one after the other. In a chunk, the rows of `errors` first lose what
// the state already gives for their keys. Then the state decays, and gains suffix_keys · errors.
// The backward pass goes from the last chunk to the first. It has the gradients of errors and
// states, with prefix_keys, and adds prefix_queries · d_out.
//
// memory, states [value heads, slots, features, values] at p.states: before each chunk, or backward
// after each.
//
// memory, rows [values] at p.right, which change by the products of rows [features] at p.left.
//
// carry [sequences, value_heads, features, values]: the states of sequences, read and written.
//
// checkpoints [value heads, features, values]: the state before the first chunk.
//
// Bindings (declared by the host): chunks, checkpoints if there are any, carry, memory. Floors: 2 ·
// features · values multiply-adds a row, 1 without products, 3 in the backward pass. Reads and
// writes states and rows once. A workgroup computes some columns of all states of a head.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.y;
    let lane = lane_of(group.x, index);
    let column = lane.column;
    let is_mine = column < p.values;
    let size = p.features * p.values;
    for (var step = 0u; step < p.slots; step++) {
        var n = step;
        if IS_REVERSE {
            n = p.slots - 1u - step;
        }
        let chunk = chunk_of(z, n);
        // All invocations reach each barrier.
        let is_here = is_mine && chunk.count > 0u;
        let row = row_at(z, n);
        let state = p.states + (z * p.slots + n) * size + column;
        let of_sequence = (chunk.sequence * p.value_heads + z % p.value_heads) * size + column;
        let starts = select(chunk.begins, chunk.ends, IS_REVERSE);
        if is_here && (starts || step == 0u) {
            for (var f = lane.row; f < p.features; f += STEP) {
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    let at = (f + r) * p.values;
                    var value = vec4<f32>();
                    if READS_CHECKPOINTS && !starts {
                        value = checkpoints_at4(z * size + column + at, 1u, 4u);
                    } else {
                        value = carry_at4(of_sequence + at, 1u, 4u);
                    }
                    if WRITES_CHECKPOINTS && step == 0u {
                        checkpoints_store4(z * size + column + at, value);
                    }
                    memory_store4(state + at, value);
                }
            }
        }
        synchronise();
        if HAS_PRODUCTS && is_here {
            for (var t = lane.row; t < p.chunk_len; t += STEP) {
                clear_sums();
                add_rows(p.left + (row + t) * p.features, p.features, state, p.values, p.features);
                let at = p.right + (row + t) * p.values + column;
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    let o = at + r * p.values;
                    memory_store4(o, at4(o) + SIGN * sums[r]);
                }
            }
        }
        synchronise();
        if is_here {
            let ends = select(chunk.ends, chunk.begins, IS_REVERSE);
            let last = step + 1u == p.slots;
            var next = state + size;
            if IS_REVERSE {
                next = state - size;
            }
            for (var f = lane.row; f < p.features; f += STEP) {
                clear_sums();
                if IS_REVERSE {
                    if IS_DELTA {
                        add_columns(
                            p.prefix_keys + row * p.features + f,
                            p.features,
                            p.right + row * p.values + column,
                            p.values,
                            0u,
                            p.chunk_len,
                        );
                        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                            sums[r] = -sums[r];
                        }
                    }
                    add_columns(
                        p.prefix_queries + row * p.features + f,
                        p.features,
                        p.d_out + row * p.values + column,
                        p.values,
                        0u,
                        p.chunk_len,
                    );
                } else {
                    add_columns(
                        p.suffix_keys + row * p.features + f,
                        p.features,
                        p.right + row * p.values + column,
                        p.values,
                        0u,
                        p.chunk_len,
                    );
                }
                let decays = p.ends + (z * p.slots + n) * p.features + f;
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    let at = (f + r) * p.values;
                    let value = sums[r] + memory_at(decays + r) * at4(state + at);
                    if ends || last {
                        carry_store4(of_sequence + at, value);
                    }
                    if !ends && !last {
                        memory_store4(next + at, value);
                    }
                }
            }
        }
        synchronise();
    }
}
