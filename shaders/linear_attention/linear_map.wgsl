// Replaces the products of rows with random directions by features. Exponentials are divided by the
// largest one of their row. For keys the kernel stores the logarithm of the divisor.
//
// rows [batch, heads, length, head_dim]   logs [batch, heads, length]
// features [batch, heads, length, features]: products, read and written
//
// Bindings (declared by the host): rows, row_features, logs for exponential features of keys.
// Floors: an exponential, or a sine and a cosine, for each product. The kernel reads rows once and
// features twice, and writes features once. An invocation computes a row.

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
