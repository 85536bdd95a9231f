// The range of document numbers of queries, or of the queries that may see a key. Its ends are the
// least and the largest number. x > y means none.
//
// Needs: nothing.
// Gives: RUN; may_share, no_documents, with_documents.

// The number of keys or queries that an invocation processes together, without branches.
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
