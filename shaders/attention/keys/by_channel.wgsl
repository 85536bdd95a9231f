// Keys and values in tensors for software drivers, if four channels do not load as one vector. The
// indices need no check for negative values.
//
// Constants: CONTIGUOUS   true if k and v are contiguous along their channels
//
// Needs: INDEX, CONTIGUOUS; Source; k_at, v_at.
// Gives: k_last, k_whole, v_last, v_whole.

// Indices of four channels from d on. From the n-th on, they are the index of the last channel.
fn channels(s: Source, row: u32, d: u32, n: u32) -> vec4<u32> {
    let c = d + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(n - 1u));
    if CONTIGUOUS {
        return row + c;
    } else {
        return (row + c * s.unit) & vec4<u32>(INDEX);
    }
}

// Four channels that are all valid.
fn k_whole(s: Source, row: u32, d: u32) -> vec4<f32> {
    let o = channels(s, row, d, 4u);
    return vec4<f32>(k_at(o.x), k_at(o.y), k_at(o.z), k_at(o.w));
}

fn v_whole(s: Source, row: u32, d: u32) -> vec4<f32> {
    let o = channels(s, row, d, 4u);
    return vec4<f32>(v_at(o.x), v_at(o.y), v_at(o.z), v_at(o.w));
}

// The n valid channels of four, then zeros.
fn k_last(s: Source, row: u32, d: u32, n: u32, exist: vec4<bool>) -> vec4<f32> {
    let o = channels(s, row, d, n);
    let x = vec4<f32>(k_at(o.x), k_at(o.y), k_at(o.z), k_at(o.w));
    return select(vec4<f32>(), x, exist);
}

fn v_last(s: Source, row: u32, d: u32, n: u32, exist: vec4<bool>) -> vec4<f32> {
    let o = channels(s, row, d, n);
    let x = vec4<f32>(v_at(o.x), v_at(o.y), v_at(o.z), v_at(o.w));
    return select(vec4<f32>(), x, exist);
}
