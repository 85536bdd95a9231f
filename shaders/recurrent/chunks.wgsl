// The table of chunks. All rows of a chunk belong to one sequence.
//
// Needs: chunks_at; p.all_slots, p.first_slot, p.value_heads.
// Gives: CHUNK_WORDS; Chunk; chunk_of.

struct Chunk {
    first: u32,           // row
    rows: u32,            // in the tensors
    count: u32,           // of rows that belong to the sequence, 0 if none does
    sequence: u32,
    begins: bool,         // the first chunk of its sequence
    ends: bool,           // the last one
}

const CHUNK_WORDS: u32 = 8u;

// Returns the n-th chunk of the span, of a value head of all batch entries.
fn chunk_of(z: u32, n: u32) -> Chunk {
    let at = CHUNK_WORDS * (z / p.value_heads * p.all_slots + p.first_slot + n);
    return Chunk(
        chunks_at(at),
        chunks_at(at + 1u),
        chunks_at(at + 2u),
        chunks_at(at + 3u),
        chunks_at(at + 4u) != 0u,
        chunks_at(at + 5u) != 0u,
    );
}
