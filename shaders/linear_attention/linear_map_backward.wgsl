// The gradients of the products of rows with the directions, from the gradients of random features.
// If features depend on the length of the row, the kernel also computes the gradient of the row
// through it.
//
// rows [batch, heads, length, head_dim]   features [batch, heads, length, features]
// directions [1, 1 or kv_heads, directions, head_dim]
// d_features [batch, heads, length, features + 4]: read and written
//
// The kernel replaces the first elements of d_features by the gradients of products. The two
// elements after the features are factors for linear_d_rows.wgsl. The first is for the sum of
// gradients times directions, and the second is for the row.
//
// Bindings (declared by the host): rows, row_features, directions for rows of length 1, d_features.
// Floors: the kernel reads features and gradients twice and rows once. Rows of length 1 need
// head_dim · directions multiply-adds a row. An invocation computes a row.

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
    let feature = view_at(p.row_features, b, h, i, 0u);
    let gradient = view_at(p.d_features, b, h, i, 0u);
    var total = 0.0;
    if HAS_LENGTH {
        for (var n = 0u; n < p.features; n++) {
            total += row_features_at(feature + n) * d_features_at(gradient + n);
        }
    }
    var along = 0.0;
    for (var n = 0u; n < p.direction_count; n++) {
        let product = product_gradient(feature, gradient, n);
        d_features_store(gradient + n, product);
        along += product * angle_of(b, h, i, n);
    }
    d_features_store(gradient + p.features, factor);
    d_features_store(gradient + p.features + 1u, (LENGTH_SIGN * total - along * factor) * factor * factor);
}
