// The rows that the gradient of a state sums: queries, with the gradients of their results.
//
// Needs: d_out4, query_feature4, stats_of; p.group.
// Gives: item_feature4, item_head, item_heads, item_value4, origin_of.

fn item_heads() -> u32 {
    return p.group;
}

fn item_head(kv: u32, n: u32) -> u32 {
    return kv * p.group + n;
}

fn origin_of(b: u32, kv: u32, slot: u32) -> f32 {
    return 0.0;
}

fn item_feature4(b: u32, h: u32, i: u32, f: u32) -> vec4<f32> {
    return query_feature4(b, h, i, f);
}

fn item_value4(b: u32, h: u32, i: u32, c: u32, is_norm: bool, origin: f32) -> vec4<f32> {
    let stats = stats_of(b, h, i);
    if is_norm {
        return vec4<f32>(stats.y * stats.w, 0.0, 0.0, 0.0);
    } else {
        return d_out4(b, h, i, c) * (stats.x * stats.w);
    }
}
