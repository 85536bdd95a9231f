// The parameters of a cache (cache/sequence_table.wgsl). Kernels do not use them if keys and values
// are tensors.
//
// Needs: nothing.
// Gives: CacheParams.

struct CacheParams {
    batch: u32,
    kv_heads: u32,
    page_len: u32,     // slots of a page
    page_bits: u32,    // log2 of that, if paged
    table: u32,        // where the page tables begin
    pages_each: u32,   // entries of one
    sinks: u32,        // first tokens that a ring keeps
    window: u32,       // tokens that it keeps besides
    ragged: u32,       // queries are the tokens last advanced by, however many of q_len those are
    k_words: u32,      // of a row: whole vectors
    v_words: u32,
    k_groups: u32,     // scales of a row, and its token's position if tokens can be removed
    v_groups: u32,
    k_scales: u32,     // where scales begin, in words
    v_scales: u32,
    longest: u32,      // tokens a sequence may have
    pages: u32,
    spare: u32,        // tokens that a full ring can go back by
    pad0: u32,
    pad1: u32,
}
