// A block map of a mask: HIDDEN, 1 or FULL per block of pairs (block_map.rs).
//
// map [batch or 1, heads or 1, ⌈q_len / size.x⌉, ⌈kv_len / size.y⌉]; an axis of 1 stands for all.
// Bindings (declared by the host): map, the mask's.
//
// Each workgroup computes a block. It reads each query's interval and each key's tensors once. If
// these do not decide the block, it evaluates pairs until one is seen and another is hidden.

const SEEN: u32 = 1u;     // some pair is seen
const UNSEEN: u32 = 2u;   // some pair is not
const BIASED: u32 = 4u;   // some pair that is seen has a bias

const LANES: u32 = 64u;
const EIGHTHS: u32 = 8u;

// A summary of the queries and keys of a block.
// - any_row: the range of keys that some query may see
// - every_row: the range of keys that all queries see, as far as intervals decide
// - of_queries: the least and largest document of the queries
// - of_keys: the least and largest document of the queries that may see the keys
// - keys: SEEN, UNSEEN and BIASED for the keys
struct Summary {
    any_row: vec2<u32>,
    every_row: vec2<u32>,
    of_queries: vec2<u32>,
    of_keys: vec2<u32>,
    keys: u32,
}

var<workgroup> found: array<u32, LANES>;
var<workgroup> summaries: array<Summary, LANES>;
var<workgroup> eighths: array<Summary, EIGHTHS>;

fn empty_summary() -> Summary {
    return Summary(no_documents(), vec2<u32>(0u, 0xffffffffu), no_documents(), no_documents(), 0u);
}

fn with_summary(a: Summary, b: Summary) -> Summary {
    return Summary(
        with_documents(a.any_row, b.any_row),
        vec2<u32>(max(a.every_row.x, b.every_row.x), min(a.every_row.y, b.every_row.y)),
        with_documents(a.of_queries, b.of_queries),
        with_documents(a.of_keys, b.of_keys),
        a.keys | b.keys,
    );
}

fn with_query(summary: Summary, b: u32, h: u32, i: u32) -> Summary {
    let q = query_of(b, h, i);
    let sees = q.first < q.end;
    let interval = vec2<u32>(q.first, q.end);
    let document = vec2<u32>(document_of_query(b, h, i));
    return with_summary(summary, Summary(select(no_documents(), interval, sees),
        select(vec2<u32>(0u), interval, sees), document, no_documents(), 0u));
}

// The test reads the bits, because a NaN is a bias too.
fn is_biased(bias: f32) -> bool {
    return (bitcast<u32>(bias) & 0x7fffffffu) != 0u;
}

// Adds a key, whose tensors are the same for all queries. q: any query of the block.
fn with_key(summary: Summary, q: Query, j: u32) -> Summary {
    let documents = documents_of_key(q.b, q.h, j);
    var is = UNSEEN;
    if documents.x <= documents.y {
        is = select(SEEN, SEEN | BIASED, is_biased(bias_of(q, j)));
    }
    return with_summary(summary, Summary(no_documents(), vec2<u32>(0u, 0xffffffffu), no_documents(), documents, is));
}

// Returns the summary of the block, from the summaries of all invocations.
fn summary_of_all(mine: Summary, lane: u32) -> Summary {
    summaries[lane] = mine;
    workgroupBarrier();
    var summary = mine;
    if lane < EIGHTHS {
        for (var n = lane + EIGHTHS; n < LANES; n += EIGHTHS) {
            summary = with_summary(summary, summaries[n]);
        }
        eighths[lane] = summary;
    }
    workgroupBarrier();
    summary = eighths[0];
    for (var n = 1u; n < EIGHTHS; n++) {
        summary = with_summary(summary, eighths[n]);
    }
    workgroupBarrier();
    return summary;
}

// Returns the state of the pairs of keys first .. end if the summary decides it, or 0.
fn answer(summary: Summary, first: u32, end: u32) -> u32 {
    let a = summary.of_queries;
    let b = summary.of_keys;
    let meets = summary.any_row.x < end && summary.any_row.y > first && a.x <= b.y && b.x <= a.y;
    let covers = summary.every_row.x <= first && summary.every_row.y >= end;
    if !meets {
        return UNSEEN;
    } else if ANSWERED_BY_KEY && !hides_by_query() && covers && a.x == a.y && all(a == b) {
        return summary.keys;
    } else {
        return 0u;
    }
}

fn found_at(q: Query, j: u32) -> u32 {
    if j < q.first || j >= q.end {
        return UNSEEN;
    } else if !PER_PAIR_MASK {
        return SEEN;
    } else if !mask_mod(q, j) {
        return UNSEEN;
    } else {
        let bias = bias_of(q, j);
        return select(select(SEEN, SEEN | BIASED, is_biased(bias)), UNSEEN, bias == p.mask.neg_inf);
    }
}

// True if no further pair can change the block's state.
fn is_settled(found_so_far: u32) -> bool {
    return (found_so_far & SEEN) != 0u && found_so_far != SEEN;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let map_b = group.z / p.map_heads;
    let map_h = group.z % p.map_heads;
    let first = group.yx * p.size;
    let end = min(first + p.size, vec2<u32>(p.mask.q_len, p.mask.kv_len));
    var mine = 0u;
    for (var b = map_b * p.batches; b < (map_b + 1u) * p.batches; b++) {
        for (var h = map_h * p.heads; h < (map_h + 1u) * p.heads; h++) {
            var summary = empty_summary();
            for (var i = first.x + lane; i < end.x; i += LANES) {
                summary = with_query(summary, b, h, i);
            }
            let q = query_of(b, h, first.x);
            for (var j = first.y + lane; j < end.y; j += LANES) {
                summary = with_key(summary, q, j);
            }
            let known = answer(summary_of_all(summary, lane), first.y, end.y);
            mine |= known;
            if known == 0u {
                for (var i = first.x; i < end.x && !is_settled(mine); i++) {
                    let query = query_of(b, h, i);
                    for (var j = first.y + lane; j < end.y; j += LANES) {
                        mine |= found_at(query, j);
                    }
                }
            }
        }
    }
    found[lane] = mine;
    workgroupBarrier();
    if lane == 0u {
        for (var n = 1u; n < LANES; n++) {
            mine |= found[n];
        }
        var state = 1u;
        if (mine & SEEN) == 0u {
            state = 0u;
        } else if mine == SEEN {
            state = 2u;
        }
        map_store(view_at(p.map, map_b, map_h, group.y, group.x), state);
    }
}
