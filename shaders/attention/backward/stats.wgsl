// The statistics of a query for the backward pass: lse, dot, total, and the sink's weight
// (row_stats.wgsl, row_totals.wgsl, fused_backward.wgsl).
//
// Needs: p.heads, p.mask; row_stats_at.
// Gives: stats_of, stats_offset.

fn stats_offset(b: u32, h: u32, i: u32) -> u32 {
    return ((b * p.heads + h) * p.mask.q_len + i) * 4u;
}

fn stats_of(b: u32, h: u32, i: u32) -> vec3<f32> {
    let o = stats_offset(b, h, i);
    return vec3<f32>(row_stats_at(o), row_stats_at(o + 1u), row_stats_at(o + 2u));
}
