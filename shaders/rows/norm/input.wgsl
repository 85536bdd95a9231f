// The input of a norm: rows of s = x + residual, multiplied by the gate first if GATE_FIRST.
//
// Needs: p.x, p.residual, p.gate, p.features, p.rows; GATE_FIRST, HAS_RESIDUAL; activate4, view_at,
// x_at4, residual_at4, gate_at4.
// Gives: Place; bare4, gate4, input4, place_of, rounded4.

// The place of a row.
struct Place {
    b: u32,
    h: u32,
    i: u32,
    x: u32,            // first elements
    residual: u32,
}

fn place_of(row: u32) -> Place {
    let plane = row / p.length;
    let i = row - plane * p.length;
    let b = plane / p.heads;
    let h = plane - b * p.heads;
    return Place(b, h, i, view_at(p.x, b, h, i, 0u), view_at(p.residual, b, h, i, 0u));
}

// A product that no compiler contracts with a difference to a fused multiply-add. `p.rows >> 31u`
// is 0, but no compiler knows this.
fn rounded4(product: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(product) | vec4<u32>(p.rows >> 31u));
}

// Four channels of the gate, before its activation.
fn gate4(at: Place, d: u32) -> vec4<f32> {
    return gate_at4(view_at(p.gate, at.b, at.h, at.i, d), p.gate.strides.w, p.features - d);
}

// Four channels of the norm's input, from d on; zero past the last channel.
fn input4(at: Place, d: u32) -> vec4<f32> {
    if GATE_FIRST {
        return rounded4(bare4(at, d) * activate4(gate4(at, d)));
    } else {
        return bare4(at, d);
    }
}

// The same without the gate.
fn bare4(at: Place, d: u32) -> vec4<f32> {
    let step = p.x.strides.w;
    var x = x_at4(at.x + d * step, step, p.features - d);
    if HAS_RESIDUAL {
        let step = p.residual.strides.w;
        x += residual_at4(at.residual + d * step, step, p.features - d);
    }
    return x;
}
