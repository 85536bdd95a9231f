// The rate of a token.
//
// Needs: HAS_BETA; beta_at, view_at; p.beta.
// Gives: rate_of.

fn rate_of(b: u32, h: u32, i: u32) -> f32 {
    if HAS_BETA {
        return beta_at(view_at(p.beta, b, h, i, 0u));
    } else {
        return 1.0;
    }
}
