fn score_bias(score: f32, s: Site) -> f32 {
    return score + bias_at(view_at(p.mask.bias, s.b, s.h, s.i, s.j));
}
