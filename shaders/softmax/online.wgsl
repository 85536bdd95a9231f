// The running softmax of a row: x the maximum, y the sum of exp(score − maximum).
//
// Needs: any_nan.
// Gives: exp_of, is_seen, lse_of, merged, share_of.

// exp, and 0 at −∞, which WGSL does not promise.
fn exp_of(x: vec4<f32>, neg_inf: f32) -> vec4<f32> {
    return select(exp(x), vec4<f32>(), x == vec4<f32>(neg_inf));
}

// Of two disjoint sets of keys. A sum that is NaN stays so.
fn merged(a: vec2<f32>, b: vec2<f32>, neg_inf: f32) -> vec2<f32> {
    if b.x == neg_inf {
        return vec2<f32>(a.x, a.y + b.y);
    }
    if a.x == neg_inf {
        return vec2<f32>(b.x, a.y + b.y);
    }
    let m = max(a.x, b.x);
    return vec2<f32>(m, a.y * exp(a.x - m) + b.y * exp(b.x - m));
}

// Whether any key was seen.
fn is_seen(total: vec2<f32>, neg_inf: f32) -> bool {
    return !(total.x == neg_inf && total.y == 0.0);
}

// What sums relative to one of two sets are multiplied by to be relative to both, and normalised.
fn share_of(own: f32, total: vec2<f32>, neg_inf: f32) -> f32 {
    return exp_of(vec4<f32>(own - total.x), neg_inf).x / total.y;
}

// ln Σ exp(score). By the bits: some drivers' log loses NaN.
fn lse_of(total: vec2<f32>, neg_inf: f32) -> f32 {
    if !is_seen(total, neg_inf) {
        return neg_inf;
    }
    return select(total.x + log(total.y), total.y, any_nan(vec4<f32>(total.y)));
}
