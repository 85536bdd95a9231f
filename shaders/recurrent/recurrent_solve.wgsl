// Solves (1 + A) X = R for the rows X of a chunk. A has the products of its keys, and zeros on and
// above the diagonal. R are the prefix_keys, and the values. The backward pass solves the
// transposed equation, for the suffix_keys and the gradients of the errors.
//
// memory: R and X, rows [features] at p.left and p.result. Others, rows [values], are at
// p.second_left and p.second_result, which may be the same. A: rows [chunk_len] at p.right.
//
// Bindings (declared by the host): memory. Floors: chunk_len / 2 · (features + values)
// multiply-adds a row; 4 · (2 · (features + values) + chunk_len) bytes read or written. An
// invocation solves four columns, in tiles of rows.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let column = (group.x * WORKGROUP + index) * 4u;
    if column >= p.features + p.values {
        return;
    }
    let row = row_at(group.z, group.y);
    let is_key = column < p.features;
    let width = select(p.values, p.features, is_key);
    let c = select(column - p.features, column, is_key) + row * width;
    let given = select(p.second_left, p.left, is_key) + c;
    let solved = select(p.second_result, p.result, is_key) + c;
    let products = p.right + row * p.chunk_len;
    for (var n = 0u; n < p.chunk_len; n += ROWS) {
        var first = n;
        if IS_TRANSPOSED {
            first = p.chunk_len - ROWS - n;
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] = at4(given + (first + r) * width);
        }
        if IS_TRANSPOSED {
            for (var t = first + ROWS; t < p.chunk_len; t++) {
                let later = at4(solved + t * width);
                /* unrolled */ for (var r = 0u; r < ROWS; r += 4u) {
                    let factors = at4(products + t * p.chunk_len + first + r);
                    sums[r] -= factors.x * later;
                    sums[r + 1u] -= factors.y * later;
                    sums[r + 2u] -= factors.z * later;
                    sums[r + 3u] -= factors.w * later;
                }
            }
            /* unrolled */ for (var u = 0u; u < ROWS; u++) {
                let at = products + (first + ROWS - 1u - u) * p.chunk_len + first;
                /* unrolled */ for (var r = 0u; r < ROWS - 1u - u; r++) {
                    sums[r] -= memory_at(at + r) * sums[ROWS - 1u - u];
                }
            }
        } else {
            for (var s = 0u; s < first; s += 4u) {
                let o = solved + s * width;
                let earlier = mat4x4<f32>(at4(o), at4(o + width), at4(o + 2u * width), at4(o + 3u * width));
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    sums[r] -= earlier * at4(products + (first + r) * p.chunk_len + s);
                }
            }
            /* unrolled */ for (var u = 0u; u < ROWS; u++) {
                let at = products + first * p.chunk_len + first + u;
                /* unrolled */ for (var r = u + 1u; r < ROWS; r++) {
                    sums[r] -= memory_at(at + r * p.chunk_len) * sums[u];
                }
            }
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            memory_store4(solved + (first + r) * width, sums[r]);
        }
    }
}
