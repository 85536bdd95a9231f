// Others that tensors of the mask hide from every own row: they are neither loaded nor scored. As
// fused/hidden_keys.wgsl says of keys, answers err towards seen.
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

// The least and the largest document of own rows first, first + step ..
fn own_documents(work: WorkTile, h: u32, first: u32, step: u32) -> vec2<u32> {
    var documents = no_documents();
    for (var own = work.own0 + first; own <= work.last_own; own += step) {
        documents = with_documents(documents, documents_of(work, h, own, OF_KEYS));
    }
    return documents;
}

// True if an own row may be seen with another of the run from `first` on, by tensors that are the
// same for all queries.
fn run_may_be_seen(work: WorkTile, h: u32, documents: vec2<u32>, first: u32, end: u32) -> bool {
    var seen = 0u;
    for (var n = 0u; n < RUN; n++) {
        seen += select(0u, 1u, may_share(documents_of(work, h, min(first + n, end - 1u), !OF_KEYS), documents));
    }
    return seen != 0u;
}

// The first of the first run of from .. end that has another which an own row may be seen with, or
// end.
fn first_seen_run(work: WorkTile, h: u32, documents: vec2<u32>, from_other: u32, end: u32) -> u32 {
    var other = from_other;
    while other < end && !run_may_be_seen(work, h, documents, other, end) {
        other += RUN;
    }
    return min(other, end);
}

// True if an own row may be seen with another.
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
