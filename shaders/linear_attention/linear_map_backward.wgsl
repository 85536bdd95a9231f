// The gradients of products of rows with the directions, of those of random features, and of the
// rows as far as features depend on their length.
//
// rows [batch, heads, length, head_dim]   features [batch, heads, length, features]   directions [1, 1 or kv_heads, directions, head_dim]
// d_features [batch, heads, length, features + 4]: read and written: gradients of products, and after the features by what the sum of
// these times directions and the row itself are to be multiplied
//
// Bindings (declared by the host): rows, row_features, directions of rows of length 1, d_features.
// Floors: features and gradients twice, rows once; of rows of length 1 head_dim · directions
// multiply-adds a row. An invocation has a row.

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
