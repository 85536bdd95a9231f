// Random features of rows, of their products with the directions; exponentials are divided by their
// largest, whose logarithm keys keep.
//
// rows [batch, heads, length, head_dim]   features [batch, heads, length, features]: products, read and written
// logs [batch, heads, length]
//
// Bindings (declared by the host): rows, row_features, logs of exponentials of keys. Floors: an
// exponential, or a sine and a cosine, a product; rows once, features twice read and once written.
// An invocation has a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let i = group.x * WORKGROUP + index;
    let h = group.y;
    let b = group.z;
    if i >= p.q_len {
        return;
    }
    let square = square_of(b, h, i);
    let factor = factor_of(square);
    let first = view_at(p.row_features, b, h, i, 0u);
    let log = largest_log(first, factor);
    keep_log(b, h, i, log + HALF_SQUARE * square * factor * factor);
    for (var n = 0u; n < p.direction_count; n++) {
        make_features(first, n, row_features_at(first + n) * factor, log);
    }
}
