// Sums of products with later rows. Each row of a tile sums over itself and the later rows of its
// chunk. The weights are products in memory, of all heads of the group.
//
// Needs: Chunk, Tile; ROWS; other4, scores_at, scores_at4, sums; p.chunk_len, p.group, p.slots.
// Gives: add_after.

fn add_after(b: u32, kv: u32, slot: u32, chunk: Chunk, tile: Tile) {
    for (var n = 0u; n < p.group; n++) {
        let h = kv * p.group + n;
        let scores_row = ((b * p.heads + h) * p.slots + slot) * p.chunk_len;
        // Rows that only a part of the tile's rows precedes.
        for (var t = tile.row; t < min(tile.row + ROWS, chunk.count); t++) {
            let other = other4(b, h, chunk.first + t, tile.column);
            /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                if tile.row + r <= t {
                    sums[r] += scores_at((scores_row + t) * p.chunk_len + tile.row + r) * other;
                }
            }
        }
        // Rows that all rows of the tile precede.
        for (var t = tile.row + ROWS; t < chunk.count; t++) {
            let other = other4(b, h, chunk.first + t, tile.column);
            /* unrolled */ for (var r = 0u; r < ROWS; r += 4u) {
                let weights = scores_at4((scores_row + t) * p.chunk_len + tile.row + r, 1u, 4u);
                sums[r] += weights.x * other;
                sums[r + 1u] += weights.y * other;
                sums[r + 2u] += weights.z * other;
                sums[r + 3u] += weights.w * other;
            }
        }
    }
}
