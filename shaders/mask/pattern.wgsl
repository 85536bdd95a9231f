// Regular sparse patterns (pattern.rs): near keys, far keys, both, or one kind by head.
//
// Needs: p.mask; Query; key_distance.
// Gives: pattern_key_range, pattern_mask_mod.

const SAME_BLOCK: u32 = 0xffffffffu;
const NEAR: u32 = 0u;
const FAR: u32 = 1u;
const BOTH: u32 = 2u;

// Narrows r to the near keys, if the query sees only near keys. origin: the sequence's first key.
fn pattern_key_range(r: vec2<i32>, origin: i32, position: i32, h: u32) -> vec2<i32> {
    let part = p.mask.pattern.w;
    if part == FAR || part == BOTH || (part > BOTH && h % 2u != 0u) {
        return r;
    } else if p.mask.pattern.y != SAME_BLOCK {
        let reach = i32(p.mask.pattern.y);
        return vec2<i32>(max(r.x, position - reach), min(r.y, position + reach + 1));
    } else if position < origin {
        return vec2<i32>(r.x, r.x);
    } else {
        let stride = i32(p.mask.pattern.x);
        let first = origin + (position - origin) / stride * stride;
        return vec2<i32>(max(r.x, first), min(r.y, first + stride));
    }
}

// True if the pattern permits the pair. Positions count from the sequence's first key.
fn pattern_mask_mod(q: Query, j: u32) -> bool {
    let stride = p.mask.pattern.x;
    let key = j - q.origin;
    let position = q.position - i32(q.origin);
    let apart = u32(abs(key_distance(q, j)));
    var near = apart <= p.mask.pattern.y;
    if p.mask.pattern.y == SAME_BLOCK {
        near = position >= 0 && u32(position) / stride == key / stride;
    }
    var far = apart % stride == 0u;
    if p.mask.pattern.z != 0u {
        far = key % stride >= stride - p.mask.pattern.z;
    }
    switch p.mask.pattern.w {
        case NEAR: { return near; }
        case FAR: { return far; }
        case BOTH: { return near || far; }
        default: { return select(far, near, q.h % 2u == 0u); }
    }
}
