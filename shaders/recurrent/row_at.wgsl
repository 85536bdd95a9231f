// The place of a chunk's rows in the memory of a span.
//
// Needs: p.chunk_len, p.slots.
// Gives: row_at.

// Returns the first row of a chunk in the arrays of rows.
fn row_at(z: u32, n: u32) -> u32 {
    return (z * p.slots + n) * p.chunk_len;
}
