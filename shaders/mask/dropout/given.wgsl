// Dropout by a tensor that says which weights are kept.
//
// Needs: p.dropout, p.dropout_scale, p.mask; dropout_at, view_at.
// Gives: apply_dropout.

// Kernels ask for whole blocks of keys: those past the end have weight 0, and no element here.
fn apply_dropout(weight: f32, b: u32, h: u32, i: u32, j: u32) -> f32 {
    return select(0.0, weight * p.dropout_scale, dropout_at(view_at(p.dropout, b, h, i, min(j, p.mask.kv_len - 1u))));
}
