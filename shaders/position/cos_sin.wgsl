// Rotations by the caller's cosines and sines, with a row for each position.
//
// cos, sin [batch or 1, 1, rows, pairs].
//
// Needs: p.cos_table, p.sin_table; cos_table_at, sin_table_at, view_at.
// Gives: rotation_of.

fn rotation_of(b: u32, pair: u32, position: u32) -> vec2<f32> {
    return vec2<f32>(
        cos_table_at(view_at(p.cos_table, b, 0u, position, pair)),
        sin_table_at(view_at(p.sin_table, b, 0u, position, pair)),
    );
}
