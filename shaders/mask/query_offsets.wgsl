// The positions of queries, by batch entry.
//
// Needs: p.mask; query_offsets_at, view_at.
// Gives: offset_position.

const FURTHEST_OFFSET: u32 = 0x1fffffffu; // LONGEST_AXIS (tensor.rs): positions are signed

fn offset_position(b: u32, i: u32) -> i32 {
    return i32(min(query_offsets_at(view_at(p.mask.query_offsets, b, 0u, 0u, 0u)), FURTHEST_OFFSET)) + i32(i);
}
