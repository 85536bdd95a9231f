// Weights from logarithms.
//
// Needs: p.neg_inf.
// Gives: hidden_or_exp, is_hidden.

fn is_hidden(log: f32) -> bool {
    return bitcast<u32>(log) == bitcast<u32>(p.neg_inf);
}

// Returns exp(log − origin), or 0 if the row has no weight, for any `origin`.
fn hidden_or_exp(log: f32, origin: f32) -> f32 {
    return select(exp(log - origin), 0.0, is_hidden(log));
}
