// The functions that every mask has. The host adds the functions of a call's rules (mask/*.wgsl,
// mask/rules.rs) and composes these functions from them (mask/kernels/compose.rs). Rules that a
// call lacks cost nothing.
//
// - MaskParams: views of every rule's tensors, and numbers (mask/kernels/params.rs)
// - Query: the position of a query, its interval of keys, and values that rules store
// - query_in(b, h, i, alone) -> Query: a query with an interval that holds every key it may see.
//   Unless alone, its ends only bound the intervals of neighbouring queries (key_range).
// - mask_mod(q, j) -> bool: true if a query sees a key of its interval. For a cache, j is an index
//   among the keys left.
// - score_mod(score, q, j) -> f32: the score after softcap and bias
// - bias_of(q, j) -> f32: the bias alone
//
// Kernels that skip hidden tiles, if HIDES_TILES, also use:
//
// - document_of_query(b, h, i) -> u32: the number of a query's document, 0 without documents
// - documents_of_key(b, h, j) -> vec2<u32>: the least and largest document number of the queries
//   that may see the key. The least is above the largest if a tensor that is the same for all
//   queries hides the key.
// - pair_hidden(b, h, i, j) -> bool: true if another tensor, with a row for each query, hides the
//   pair
// - hides_by_head() -> bool: true if these tensors differ by head
// - hides_by_query() -> bool: true if one of them has a row for each query
//
// ANSWERED_BY_KEY: the interval and these tensors decide every pair.
// SEEN_IS_PLAIN: ANSWERED_BY_KEY, and no rule changes the scores of pairs that are seen.
//
// Needs: Query; query_in.
// Gives: key_distance, key_range, query_of.

fn query_of(b: u32, h: u32, i: u32) -> Query {
    return query_in(b, h, i, true);
}

// Returns an interval that holds every key that a query of first ..= last may see. Bounds never
// fall from one query to the next, except for bounds in a tensor.
fn key_range(b: u32, h: u32, first: u32, last: u32) -> vec2<u32> {
    return vec2<u32>(query_in(b, h, first, first == last).first, query_in(b, h, last, first == last).end);
}

// Returns the distance of the key after the query's position.
fn key_distance(q: Query, j: u32) -> i32 {
    return i32(j) - q.position;
}
