// The rows that a state sums: keys, with their values.
//
// Needs: p.value_exponent; key_feature4, log_after, log_at, log_within, lowered, value4,
// hidden_or_exp, is_hidden; IS_CAUSAL, IS_SCALED.
// Gives: item_feature4, item_head, item_heads, item_value4, origin_of.

fn item_heads() -> u32 {
    return 1u;
}

fn item_head(kv: u32, n: u32) -> u32 {
    return kv;
}

// Returns the logarithm that weights are relative to.
fn origin_of(b: u32, kv: u32, slot: u32) -> f32 {
    if IS_CAUSAL {
        return log_within(b, kv, slot);
    } else {
        return log_after(b, kv, slot);
    }
}

// A hidden key may hold any bits, so its feature is 0.
fn item_feature4(b: u32, kv: u32, j: u32, f: u32) -> vec4<f32> {
    if IS_SCALED {
        return select(key_feature4(b, kv, j, f), vec4<f32>(), is_hidden(log_at(b, kv, j)));
    } else {
        return key_feature4(b, kv, j, f);
    }
}

fn item_value4(b: u32, kv: u32, j: u32, c: u32, is_norm: bool, origin: f32) -> vec4<f32> {
    var value = vec4<f32>(1.0, 0.0, 0.0, 0.0);
    if !is_norm {
        value = lowered(value4(b, kv, j, c), p.value_exponent);
    }
    if IS_SCALED {
        let log = log_at(b, kv, j);
        value = select(value * hidden_or_exp(log, origin), vec4<f32>(), is_hidden(log));
    }
    return value;
}
