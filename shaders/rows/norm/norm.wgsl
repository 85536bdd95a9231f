// A norm of every row of s = x + residual.
// LayerNorm (Ba et al. 2016): out = (s − mean) / √(variance + eps) · weight + bias.
// RMSNorm (Zhang and Sennrich 2019): out = s / √(mean of s² + eps) · weight.
// HAS_GATE: out is multiplied by f(gate). GATE_FIRST: s is multiplied by it, before the norm.
//
// x, residual, gate, out, sum [batch, heads, length, features]   weight, bias [features]
//
// ROW_LANES invocations share a row: one invocation (row_per_invocation.wgsl) or a workgroup
// (row_per_workgroup.wgsl).
//
// Bindings (declared by the host): x, residual, weight, bias and gate if present, out, sum if s is
// stored. `IN_FOURS`: all of them are accessed as vec4.
// If the norm is in place, x is out. An invocation then only writes elements that no other
// invocation reads, after the sums of the row.
// Bytes: x, residual, gate once from memory and twice from caches; out and sum once.

fn store_sum4(at: Place, d: u32, value: vec4<f32>) {
    let o = view_at(p.sum, at.b, at.h, at.i, d);
    if IN_FOURS {
        sum_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.features - d); c++) {
            sum_store(o + c * p.sum.strides.w, component(value, c));
        }
    }
}

fn store_out4(at: Place, d: u32, value: vec4<f32>) {
    let o = view_at(p.out, at.b, at.h, at.i, d);
    if IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.features - d); c++) {
            out_store(o + c * p.out.strides.w, component(value, c));
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = lane_of(index);
    for (var row = first_row(group.x, index); row < p.rows; row += p.step) {
        let at = place_of(row);
        let s = statistics_of(at, lane);
        for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
            let x = input4(at, d);
            if HAS_SUM {
                store_sum4(at, d, x);
            }
            var y = normalised4(x, s);
            if HAS_WEIGHT {
                y *= weight_at4(p.affine.x + d * p.affine.y, p.affine.y, p.features - d);
            }
            if HAS_BIAS {
                y += bias_at4(p.affine.z + d * p.affine.w, p.affine.w, p.features - d);
            }
            if HAS_GATE && !GATE_FIRST {
                y *= activate4(gate4(at, d));
            }
            store_out4(at, d, y);
        }
    }
}
