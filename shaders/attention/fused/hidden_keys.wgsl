// Keys that the mask's tensors hide from every row of a tile. The kernel neither loads nor scores
// them.
//
// A row's document is the number of its query, or 0 without the rule. A key is hidden if its number
// differs from every row's number, or if a tensor hides the pair. The first test uses only the
// least and the largest number of the rows. It may treat hidden keys as seen.
//
// Needs: p.group; RUN; document_of_query, documents_of_key, head_query_of, hides_by_head,
// hides_by_query, may_share, no_documents, pair_hidden, with_documents.
// Gives: documents_of_rows, first_seen_run, key_may_be_seen.

// The least and the largest document of rows first, first + step .. before end.
fn documents_of_rows(b: u32, kv_head: u32, first: u32, step: u32, end: u32) -> vec2<u32> {
    var documents = no_documents();
    for (var row = first; row < end; row += step) {
        let place = head_query_of(kv_head, row);
        documents = with_documents(documents, vec2<u32>(document_of_query(b, place.x, place.y)));
    }
    return documents;
}

// Checks a run of keys with tensors that are the same for all queries. Result x is 1 if at least
// one row may see at least one key. Result y is 1 if every row sees every key.
fn run_seen(b: u32, kv_head: u32, documents: vec2<u32>, first: u32, end: u32) -> vec2<u32> {
    let heads = select(1u, p.group, hides_by_head());
    var any_key = 0u;
    var every_key = 1u;
    for (var h = kv_head * p.group; h < kv_head * p.group + heads; h++) {
        for (var n = 0u; n < RUN; n++) {
            let key = documents_of_key(b, h, min(first + n, end - 1u));
            any_key |= select(0u, 1u, may_share(key, documents));
            every_key &= select(0u, 1u, (key.x <= documents.x) & (key.y >= documents.y));
        }
    }
    return vec2<u32>(any_key, every_key);
}

// Result x is the first key of the first run in from_key .. end that may have a visible key. It is
// end if there is no such run. Result y is 1 if every row sees all keys of the run.
fn first_seen_run(b: u32, kv_head: u32, documents: vec2<u32>, from_key: u32, end: u32) -> vec2<u32> {
    var j = from_key;
    var seen = vec2<u32>();
    while j < end && seen.x == 0u {
        seen = run_seen(b, kv_head, documents, j, end);
        j += RUN;
    }
    return vec2<u32>(select(end, j - RUN, seen.x != 0u), seen.y);
}

// True if a row of row0 ..= last_row may see key j.
fn key_may_be_seen(b: u32, kv_head: u32, row0: u32, last_row: u32, documents: vec2<u32>, j: u32) -> bool {
    let heads = select(1u, p.group, hides_by_head());
    let rows = select(min(heads, last_row + 1u - row0), last_row + 1u - row0, hides_by_query());
    var seen = false;
    for (var n = 0u; n < rows && !seen; n++) {
        let place = head_query_of(kv_head, row0 + n);
        seen = may_share(documents_of_key(b, place.x, j), documents) && !pair_hidden(b, place.x, place.y, j);
    }
    return seen;
}
