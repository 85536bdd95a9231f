// Dropout by a tensor that is true for weights that stay.
//
// Needs: p.dropout, p.dropout_scale, p.mask; dropout_at, view_at.
// Gives: apply_dropout.

// Kernels call this function for whole blocks of keys. Keys past the end have weight 0, and the
// tensor has no element for them.
fn apply_dropout(weight: f32, b: u32, h: u32, i: u32, j: u32) -> f32 {
    return select(0.0, weight * p.dropout_scale, dropout_at(view_at(p.dropout, b, h, i, min(j, p.mask.kv_len - 1u))));
}
