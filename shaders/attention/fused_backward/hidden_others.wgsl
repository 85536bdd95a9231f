// Opposite rows that the mask's tensors hide from every output row. The kernel neither loads nor
// scores them. As in fused/hidden_keys.wgsl, the test may treat hidden rows as seen.
//
// Needs: OF_KEYS, RUN; WorkTile; document_of_query, documents_of_key, hides_by_query, may_share,
// no_documents, pair_hidden, with_documents.
// Gives: first_seen_run, other_may_be_seen, own_documents.

// The least and the largest document of a query, or of the queries that may see a key.
fn documents_of(work: WorkTile, h: u32, n: u32, is_key: bool) -> vec2<u32> {
    if is_key {
        return documents_of_key(work.b, h, n);
    } else {
        return vec2<u32>(document_of_query(work.b, h, n));
    }
}

// The least and the largest document of output rows first, first + step ..
fn own_documents(work: WorkTile, h: u32, first: u32, step: u32) -> vec2<u32> {
    var documents = no_documents();
    for (var own = work.own0 + first; own <= work.last_own; own += step) {
        documents = with_documents(documents, documents_of(work, h, own, OF_KEYS));
    }
    return documents;
}

// True if an output row may be paired with a row of the run from `first` on. The test uses only
// tensors that are the same for all queries.
fn run_may_be_seen(work: WorkTile, h: u32, documents: vec2<u32>, first: u32, end: u32) -> bool {
    var seen = 0u;
    for (var n = 0u; n < RUN; n++) {
        seen += select(0u, 1u, may_share(documents_of(work, h, min(first + n, end - 1u), !OF_KEYS), documents));
    }
    return seen != 0u;
}

// The first row of the first run in from_other .. end that may be paired with an output row, or
// end.
fn first_seen_run(work: WorkTile, h: u32, documents: vec2<u32>, from_other: u32, end: u32) -> u32 {
    var other = from_other;
    while other < end && !run_may_be_seen(work, h, documents, other, end) {
        other += RUN;
    }
    return min(other, end);
}

// True if an output row may be paired with opposite row `other`.
fn other_may_be_seen(work: WorkTile, h: u32, documents: vec2<u32>, other: u32) -> bool {
    var seen = may_share(documents_of(work, h, other, !OF_KEYS), documents);
    if seen && hides_by_query() {
        seen = false;
        for (var own = work.own0; own <= work.last_own && !seen; own++) {
            seen = !pair_hidden(work.b, h, select(own, other, OF_KEYS), select(other, own, OF_KEYS));
        }
    }
    return seen;
}
