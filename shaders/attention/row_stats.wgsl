// The statistics of a query for the backward pass: lse, and dot = Σ_c d_out[c] · out[c] − d_lse.
// The value of dot equals Σⱼ weight[j] · d_weight[j]. (Dao et al. 2022, "FlashAttention", appendix
// B.) An invocation computes one query.
//
// out, d_out [batch, heads, q_len, value_dim]   lse, d_lse [batch, heads, q_len, 1]
// row_stats [batch, heads, q_len, 4], dense: lse, dot, 1, 0
//
// The kernels of row_totals.wgsl and fused_backward.wgsl may replace some of them.
//
// A query that saw no key has dot 0, whatever its tensors hold. If its head has a sink, lse is the
// sink, and dot is −d_lse.
//
// Constants: WORKGROUP; HAS_D_LSE (true if there is a gradient of lse)

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = (workgroup.x + p.first) * WORKGROUP + lane;
    if row >= p.rows {
        return;
    }
    let i = row % p.q_len;
    let h = row / p.q_len % p.heads;
    let b = row / p.q_len / p.heads;
    let lse = lse_at(view_at(p.lse, b, h, i, 0u));
    let o = view_at(p.out, b, h, i, 0u);
    let d_o = view_at(p.d_out, b, h, i, 0u);
    var sums = vec4<f32>();
    var nothing = true;
    for (var d = 0u; d < p.value_dim; d += 4u) {
        let x = out_at4(o + d * p.out.strides.w, p.out.strides.w, p.value_dim - d);
        nothing = nothing && all(x == vec4<f32>());
        sums += x * d_out_at4(d_o + d * p.d_out.strides.w, p.d_out.strides.w, p.value_dim - d);
    }
    // If out is zero, d_out may be NaN.
    var dot = select((sums.x + sums.y) + (sums.z + sums.w), 0.0, nothing);
    if HAS_D_LSE {
        dot -= d_lse_at(view_at(p.d_lse, b, h, i, 0u));
    }
    row_stats_store(row * 4u, lse);
    row_stats_store(row * 4u + 1u, select(dot, 0.0, lse == p.neg_inf));
    row_stats_store(row * 4u + 2u, 1.0);
    row_stats_store(row * 4u + 3u, 0.0);
}
