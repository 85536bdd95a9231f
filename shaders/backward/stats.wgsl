// What the backward pass keeps of a query: lse, dot, total (row_stats.wgsl, row_totals.wgsl).
//
// Needs: p.heads, p.mask; row_stats_at.
// Gives: stats_of.

fn stats_of(b: u32, h: u32, i: u32) -> vec3<f32> {
    let o = ((b * p.heads + h) * p.mask.q_len + i) * 3u;
    return vec3<f32>(row_stats_at(o), row_stats_at(o + 1u), row_stats_at(o + 2u));
}
