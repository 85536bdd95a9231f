// The largest logarithmic weight that each row of a tile sees.
//
// Needs: Chunk; ROWS; log_at, log_before.
// Gives: begin_rows, row_logs.

var<private> row_logs: array<f32, ROWS>;

fn begin_rows(b: u32, kv: u32, slot: u32, chunk: Chunk, row: u32) {
    var largest = log_before(b, kv, slot);
    for (var t = 0u; t < row; t++) {
        largest = max(largest, log_at(b, kv, chunk.first + t));
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if row + r < chunk.count {
            largest = max(largest, log_at(b, kv, chunk.first + row + r));
        }
        row_logs[r] = largest;
    }
}
