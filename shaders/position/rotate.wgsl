// Rotary position embedding (Su et al. 2021). It rotates pairs of channels by position · frequency,
// or by cosines and sines in tensors. For gradients it rotates by the opposite angles.
//
// x, out [batch, heads, length, dim]; the channels from rotary_dim on are copied.
// Bindings (declared by the host): x, out; only out in place; rotation_table, or cos_table and
// sin_table; positions if HAS_POSITIONS.
// Each element is read and written once. Each invocation processes a pair or a copied channel at a
// time.
//
// Needs: axis_of(pair): the axis of its position; rotation_of(b, pair, position): cos and sin.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * 64u + lane; n < p.work; n = next_item(n, p.work, p.step)) {
        let i = n / p.items;
        let item = n % p.items;
        if item < p.rotation.pairs {
            let c = pair_channels(p.rotation, item);
            let x = vec2<f32>(x_at(view_at(p.x, b, h, i, c.x)), x_at(view_at(p.x, b, h, i, c.y)));
            let t = rotation_of(b, item, position_of(p.at, b, axis_of(item), i));
            let y = rotated(x, vec2<f32>(t.x, t.y * p.turn));
            out_store(view_at(p.out, b, h, i, c.x), y.x);
            out_store(view_at(p.out, b, h, i, c.y), y.y);
        } else {
            let d = item + p.rotation.pairs;
            out_store(view_at(p.out, b, h, i, d), x_at(view_at(p.x, b, h, i, d)));
        }
    }
}
