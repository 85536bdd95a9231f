// Chunks of rows, each of one sequence. Slot s of a batch entry has chunk s of a table. Without a
// table its rows begin at s · chunk_len.
//
// Needs: p.chunk_len.
// Gives: Chunk; HIDDEN, plain_chunk.

struct Chunk {
    first: u32,           // row
    count: u32,           // of rows, 0 where there is none
    sequence: u32,
    ordinal: u32,         // in the sequence; HIDDEN of rows of no sequence
}

const HIDDEN: u32 = 0xffffffffu;

fn plain_chunk(b: u32, slot: u32, length: u32) -> Chunk {
    let first = slot * p.chunk_len;
    return Chunk(first, min(p.chunk_len, max(length, first) - first), b, slot);
}
