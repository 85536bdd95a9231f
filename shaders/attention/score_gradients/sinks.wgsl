// Gradients of sinks: −exp(sink − lse) · dot of each query.
//
// Needs: p.mask; LOG2_E; sink_logits_at, stats_of, view_at.
// Gives: row_sum.

// A query that sees nothing, not even the sink, contributes nothing.
fn row_sum(b: u32, h: u32, i: u32, n: u32, key_lane: u32) -> f32 {
    let stats = stats_of(b, h, i);
    let sink = sink_logits_at(view_at(p.mask.sink_logits, b, h, 0u, 0u));
    let share = select(exp2((sink - stats.x) * LOG2_E) * stats.z, 0.0, (stats.x == p.mask.neg_inf) | (sink == p.mask.neg_inf));
    return select(-share * stats.y, 0.0, (bitcast<u32>(share) & 0x7fffffffu) == 0u);
}
