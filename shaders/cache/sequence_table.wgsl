// The common part of kernels that read a cache: the lengths of sequences and the places of rows.
//
// The sequence table has WORDS words per sequence, then the page tables. A row is one token's key
// (or value) of one head. Rows lie as [page, kv_head, slot]; a sequence without a page table is one
// page. A ring holds only some tokens: kernels count the stored tokens (t), masks use positions
// (j).
//
// LAYOUT_KIND: CONTIGUOUS, RING or PAGED. COMPACTS: tokens can be removed. Bindings:
// sequence_table.
//
// Needs: p.cache; COMPACTS, LAYOUT_KIND; sequence_table_at.
// Gives: COUNT, EXCHANGE, HIGH, LENGTH, LIMIT, MOVE_FROM, MOVE_TO, REFUSED, RING, START, STORED,
// WORDS; Rows; are_neighbours, cached_index, cached_key, cached_len, cached_queries, cached_shift,
// cached_start, row_of_position, row_of_token, rows_of.

const CONTIGUOUS: u32 = 0u;
const RING: u32 = 1u;
const PAGED: u32 = 2u;

const WORDS: u32 = 8u;
const START: u32 = 0u;    // length before the last advance
const LENGTH: u32 = 1u;
const HIGH: u32 = 2u;     // longest it has been since it was empty: what a ring has overwritten
const REMOVED: u32 = 2u;  // replaces HIGH if tokens can be removed: the number of removed tokens
const LIMIT: u32 = 3u;    // tokens there is room for
const REFUSED: u32 = 4u;  // moves that found none, or nothing to go back to
const COUNT: u32 = 5u;    // what the host says to move by
const MOVE_TO: u32 = 6u;  // of the table's n-th move of rows, not of a sequence: where they go
const MOVE_FROM: u32 = 7u;
const STORED: u32 = 7u;   // replaces MOVE_FROM in a compaction: stored tokens before it
const EXCHANGE: u32 = 0x80000000u; // in MOVE_FROM: rows go both ways

// Values from the sequence table are clamped to valid ranges: another kernel may write to the
// table.
fn cached_len(b: u32) -> u32 {
    return min(sequence_table_at(b * WORDS + LENGTH), p.cache.longest);
}

// Length before the last advance.
fn cached_start(b: u32) -> u32 {
    return min(sequence_table_at(b * WORDS + START), cached_len(b));
}

// The number of a sequence's queries.
fn cached_queries(b: u32, q_len: u32) -> u32 {
    if p.cache.ragged == 0u {
        return q_len;
    } else {
        return min(cached_len(b) - cached_start(b), q_len);
    }
}

// The number of positions after the sinks that a ring has overwritten, or the number of removed
// tokens.
fn cached_shift(b: u32) -> u32 {
    if COMPACTS {
        return min(sequence_table_at(b * WORDS + REMOVED), cached_len(b));
    } else if LAYOUT_KIND != RING {
        return 0u;
    } else {
        let kept = p.cache.sinks + p.cache.window;
        return max(max(sequence_table_at(b * WORDS + HIGH), cached_len(b)), kept) - kept;
    }
}

// The index of the first stored token at position j or after.
fn cached_index(j: u32, shift: u32) -> u32 {
    if LAYOUT_KIND != RING {
        return j;
    } else {
        return select(max(j, p.cache.sinks + shift) - shift, j, j <= p.cache.sinks);
    }
}

// The position of the t-th stored token.
fn cached_key(t: u32, shift: u32) -> u32 {
    if LAYOUT_KIND != RING {
        return t;
    } else {
        return t + select(0u, shift, t >= p.cache.sinks);
    }
}

// The place of the rows of a sequence and head. It is read once: drivers would load the uniforms
// again in every iteration of a loop.
struct Rows {
    first: u32,     // row of slot 0, of the page 0 if paged
    stride: u32,    // rows from page to page
    bits: u32,      // log2 of a page's slots
    table: u32,
    last_page: u32,
    sinks: u32,
    window: u32,
    shift: u32,     // positions overwritten after the sinks, or tokens removed
    wrapped: u32,    // by how many slots that has moved the token after the sinks
}

fn rows_of(b: u32, kv_head: u32) -> Rows {
    let len = p.cache.page_len;
    let shift = cached_shift(b);
    var first = kv_head * len;
    if LAYOUT_KIND != PAGED {
        first += b * p.cache.kv_heads * len;
    }
    let table = p.cache.table + b * p.cache.pages_each;
    return Rows(first, p.cache.kv_heads * len, p.cache.page_bits, table, p.cache.pages - 1u, p.cache.sinks,
        p.cache.window, shift, shift % p.cache.window);
}

// The row of the t-th stored token.
fn row_of_token(r: Rows, t: u32) -> u32 {
    if LAYOUT_KIND == PAGED {
        let page = min(sequence_table_at(r.table + (t >> r.bits)), r.last_page);
        return page * r.stride + r.first + (t & ((1u << r.bits) - 1u));
    } else if LAYOUT_KIND == RING {
        let n = t - r.sinks + r.wrapped;
        let slot = r.sinks + n - select(0u, r.window, n >= r.window);
        return r.first + select(slot, t, t < r.sinks);
    } else {
        return r.first + t;
    }
}

// True if the rows of tokens a ..= b follow each other.
fn are_neighbours(r: Rows, a: u32, b: u32) -> bool {
    if LAYOUT_KIND == PAGED {
        return a >> r.bits == b >> r.bits;
    } else if LAYOUT_KIND == RING {
        let wrap = r.sinks + r.window - r.wrapped;
        return b < r.sinks || (a >= r.sinks && (a >= wrap || b < wrap));
    } else {
        return true;
    }
}

// The row of a new token at position j.
fn row_of_position(r: Rows, j: u32) -> u32 {
    if LAYOUT_KIND == RING {
        return r.first + select(r.sinks + (j - r.sinks) % r.window, j, j < r.sinks);
    } else if COMPACTS {
        return row_of_token(r, j - r.shift);
    } else {
        return row_of_token(r, j);
    }
}
