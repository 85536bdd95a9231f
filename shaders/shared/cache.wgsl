// What is common to every kernel that looks into a cache: how long its sequences are and where their rows lie.
//
// The book has WORDS words per sequence, then the page tables. A row is one token's key (or value) of one head; rows
// lie as [page, kv_head, slot], a sequence without a page table is one page. Of a ring only some tokens are
// left: kernels count those (t), masks speak of positions (j).
//
// LAYOUT: CONTIGUOUS, RING or PAGED. Bindings: book.

const CONTIGUOUS: u32 = 0u;
const RING: u32 = 1u;
const PAGED: u32 = 2u;

const WORDS: u32 = 8u;
const START: u32 = 0u;    // length before the last advance
const LENGTH: u32 = 1u;
const HIGH: u32 = 2u;     // longest it has been since it was empty: what a ring has overwritten
const LIMIT: u32 = 3u;    // tokens there is room for
const REFUSED: u32 = 4u;  // moves that found none, or nothing to go back to
const COUNT: u32 = 5u;    // what the host says to move by

fn cached_len(b: u32) -> u32 {
    return book_at(b * WORDS + LENGTH);
}

// Queries of a sequence.
fn cached_queries(b: u32, q_len: u32) -> u32 {
    if p.cache.ragged == 0u {
        return q_len;
    }
    return min(cached_len(b) - book_at(b * WORDS + START), q_len);
}

// Positions that a ring has overwritten after its sinks.
fn cached_shift(b: u32) -> u32 {
    if LAYOUT != RING {
        return 0u;
    }
    let kept = p.cache.sinks + p.cache.window;
    return max(book_at(b * WORDS + HIGH), kept) - kept;
}

// The number of the first token left at position j or after.
fn cached_index(j: u32, shift: u32) -> u32 {
    if LAYOUT != RING {
        return j;
    }
    return select(max(j, p.cache.sinks + shift) - shift, j, j <= p.cache.sinks);
}

// The position of the t-th token left.
fn cached_key(t: u32, shift: u32) -> u32 {
    if LAYOUT != RING {
        return t;
    }
    return t + select(0u, shift, t >= p.cache.sinks);
}

// The row of position j, for a head.
fn cached_row(b: u32, kv_head: u32, j: u32) -> u32 {
    var page = b;
    var slot = j;
    if LAYOUT == RING {
        if j >= p.cache.sinks {
            slot = p.cache.sinks + (j - p.cache.sinks) % p.cache.window;
        }
    }
    if LAYOUT == PAGED {
        page = book_at(p.cache.table + b * p.cache.pages_each + (j >> p.cache.page_bits));
        slot = j & (p.cache.page_len - 1u);
    }
    return (page * p.cache.kv_heads + kv_head) * p.cache.page_len + slot;
}
