// The online softmax (Milakov and Gimelshein 2018), one contract for all kernels.
//
// A weight is exp(score − row_max), as one exp2. row_max is not always the maximum: it follows when
// a score is more than RESCALE_THRESHOLD above it, and only then are older sums rescaled (as in
// FlashAttention-4). Weights are at most 2^8, or e^8 where scores are natural. It begins at LOWEST,
// so that no difference is ∞ − ∞.
// Sums of weights times values are beyond f32's range where values are larger than its 2^8-th part:
// rows that are not finite in the end are computed once more, of normalised weights. A split's sums
// are divided by its own total before they are stored. A score of −∞ weighs 0: exp2(−∞) is 0 on
// every GPU, but WGSL does not promise it.
// NaN is carried by addition, to where the weights are added up: max, exp and log lose it on some
// drivers. Loops over keys hold scores in units of UNIT: LOG2_E, folded into the scale of q · k, so
// that exp2 takes differences as they are; 1 where score_mod must see the score (1e4 and a bias are
// exact in it), and differences are multiplied. In units of LOG2_E a score may be beyond f32's
// range: a row that is not finite for it gets its state once more, in natural units. What leaves a
// loop is a state (row_max, row_sum) in natural units, (−∞, 0) if it has seen no key: what splits,
// sinks, merged parts and lse share. A row without keys has output 0 and lse −∞.
//
// Needs: NATURAL_SCORES; any_nan.
// Gives: LOWEST, RESCALE_THRESHOLD, UNIT; is_seen, lse_of, merged, rescale_of, row_state, share_of,
// weight_of, weights_of.

const LOG2_E: f32 = 1.4426950408889634;
const LN_2: f32 = 0.6931471805599453;
const RESCALE_THRESHOLD: f32 = 8.0;
// The lowest finite number: below it is only −∞.
const LOWEST: f32 = -0x1.fffffep+127f;

// LOG2_E is part of the scale unless scores are natural.
const UNIT: f32 = select(LOG2_E, 1.0, NATURAL_SCORES);

// exp of a difference of a loop's scores.
fn weight_of(x: f32) -> f32 {
    return exp2(x * (LOG2_E / UNIT));
}

// The same of four scores.
fn weights_of(s: vec4<f32>, row_max: f32, neg_inf: f32) -> vec4<f32> {
    return select(exp2((s - row_max) * (LOG2_E / UNIT)), vec4<f32>(), s == vec4<f32>(neg_inf));
}

// What older sums are multiplied by when row_max becomes new_max. Up to LOWEST nothing was summed.
fn rescale_of(row_max: f32, new_max: f32) -> f32 {
    return select(weight_of(row_max - new_max), 0.0, row_max == LOWEST && new_max != LOWEST);
}

// The state that a loop leaves.
fn row_state(row_max: f32, row_sum: f32, neg_inf: f32) -> vec2<f32> {
    return vec2<f32>(select(row_max * select(LN_2, 1.0, NATURAL_SCORES), neg_inf, row_sum == 0.0), row_sum);
}

// Of two disjoint sets of keys. A sum that is NaN stays so.
fn merged(a: vec2<f32>, b: vec2<f32>, neg_inf: f32) -> vec2<f32> {
    if b.x == neg_inf {
        return vec2<f32>(a.x, a.y + b.y);
    } else if a.x == neg_inf {
        return vec2<f32>(b.x, a.y + b.y);
    } else {
        let m = max(a.x, b.x);
        return vec2<f32>(m, a.y * exp2((a.x - m) * LOG2_E) + b.y * exp2((b.x - m) * LOG2_E));
    }
}

// Whether any key was seen.
fn is_seen(total: vec2<f32>, neg_inf: f32) -> bool {
    return !(total.x == neg_inf && total.y == 0.0);
}

// What sums relative to row_max, of a part of the keys, are multiplied by to be relative to all of
// them, and normalised.
fn share_of(row_max: f32, total: vec2<f32>, neg_inf: f32) -> f32 {
    return select(exp2((row_max - total.x) * LOG2_E), 0.0, row_max == neg_inf) / total.y;
}

// ln Σ exp(score). By the bits: some drivers' log loses NaN.
fn lse_of(total: vec2<f32>, neg_inf: f32) -> f32 {
    if !is_seen(total, neg_inf) {
        return neg_inf;
    } else {
        return select(total.x + log(total.y), total.y, any_nan(vec4<f32>(total.y)));
    }
}
