fn score_softcap(score: f32, s: Site) -> f32 {
    // tanh overflows to NaN in some drivers; beyond ±15 it is ±1 in f32.
    return p.mask.softcap * tanh(clamp(score / p.mask.softcap, -15.0, 15.0));
}
