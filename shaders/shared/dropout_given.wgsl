fn dropped(weight: f32, q: Query, j: u32) -> f32 {
    return select(0.0, weight * p.dropout_scale, dropout_at(view_at(p.dropout, q.b, q.h, q.i, j)));
}
