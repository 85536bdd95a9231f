// Weights from logarithms.
//
// Needs: p.neg_inf.
// Gives: hidden_or_exp, is_hidden.

fn is_hidden(log: f32) -> bool {
    return bitcast<u32>(log) == bitcast<u32>(p.neg_inf);
}

// exp(log − origin), and 0 of what has no weight, whatever `origin` is.
fn hidden_or_exp(log: f32, origin: f32) -> f32 {
    return select(exp(log - origin), 0.0, is_hidden(log));
}
