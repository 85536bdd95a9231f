fn dropped(weight: f32, s: Site) -> f32 {
    return select(0.0, weight * p.dropout_scale, dropout_at(view_at(p.dropout, s.b, s.h, s.i, s.j)));
}
