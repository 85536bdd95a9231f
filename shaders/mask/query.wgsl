// What every mask needs. The host adds the functions of the rules that a call has (mask/*.wgsl,
// mask/rules.rs) and composes from them (kernels/mask/compose.rs), so that what a call does not use
// costs nothing:
//   MaskParams       a view of every rule's tensors, and numbers (kernels/mask/params.rs)
//   Query            a query: where it stands, the interval of keys it may see, what rules keep of it
//   query_in(b, h, i, alone) -> Query    with an interval that holds every key it may see; unless alone, the interval
//                                        only bounds those of its neighbours
//   mask_mod(q, j) -> bool               whether a query sees a key of its interval; keys of a cache are those left
//   score_mod(score, q, j) -> f32        the score after softcap and bias
//   bias_of(q, j) -> f32                 the bias alone
// and, for kernels that skip tiles which tensors hide, if HIDES_TILES:
//   document_of_query(b, h, i) -> u32    its number, 0 without documents
//   documents_of_key(b, h, j) -> vec2<u32>   the least and the largest number of queries that may see the key, in the wrong order
//                                        if no query sees it by tensors that are the same for all queries
//   pair_hidden(b, h, i, j) -> bool      true if another tensor, which has a row for each query, hides the pair
//   hides_by_head() -> bool              true if these tensors differ by head
//   hides_by_query() -> bool             true if one of them has a row for each query
// ANSWERED_BY_KEY: no rule but these tensors is asked for single pairs
// SEEN_IS_PLAIN: beside that, no rule changes the scores of pairs that are seen
//
// Needs: Query; query_in.
// Gives: key_distance, key_range, query_of.

fn query_of(b: u32, h: u32, i: u32) -> Query {
    return query_in(b, h, i, true);
}

// An interval that holds every key which a query of first ..= last may see: bounds never fall from
// one query to the next, except those that stand in a tensor.
fn key_range(b: u32, h: u32, first: u32, last: u32) -> vec2<u32> {
    return vec2<u32>(query_in(b, h, first, first == last).first, query_in(b, h, last, first == last).end);
}

// How far the key lies after the query's own position.
fn key_distance(q: Query, j: u32) -> i32 {
    return i32(j) - q.position;
}
