// Attention sinks: a logit per head that takes weight and has no value.
//
// Needs: p.mask; any_nan, merged, sink_logits_at, view_at.
// Gives: with_sink.

// The sink is a key without a value that every query sees. A NaN goes into the sum, because max and
// exp may lose it.
fn with_sink(total: vec2<f32>, b: u32, h: u32) -> vec2<f32> {
    let sink = sink_logits_at(view_at(p.mask.sink_logits, b, h, 0u, 0u));
    if any_nan(vec4<f32>(sink)) {
        return vec2<f32>(total.x, sink);
    } else {
        return merged(total, vec2<f32>(sink, select(1.0, 0.0, sink == p.mask.neg_inf)), p.mask.neg_inf);
    }
}
