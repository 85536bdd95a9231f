// Least and largest document numbers of queries, or of the queries that may see a key: x > y of
// none.
//
// Needs: nothing.
// Gives: RUN; may_share, no_documents, with_documents.

// Keys or queries that an invocation looks at together where each looks at all: without branches.
const RUN: u32 = 8u;

fn no_documents() -> vec2<u32> {
    return vec2<u32>(0xffffffffu, 0u);
}

fn with_documents(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(min(a.x, b.x), max(a.y, b.y));
}

// True if both may have a number in common.
fn may_share(a: vec2<u32>, b: vec2<u32>) -> bool {
    return (a.x <= b.y) & (a.y >= b.x);
}
