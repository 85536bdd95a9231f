// Packed sequences: a batch entry holds several, and a query sees only keys of its sequence.
//
// Needs: p.mask; key_starts_at, query_starts_at, view_at.
// Gives: packed_keys.

fn packed_query(b: u32, s: u32) -> u32 {
    return min(query_starts_at(view_at(p.mask.query_starts, b, 0u, 0u, s)), p.mask.q_len);
}

fn packed_key(b: u32, s: u32) -> u32 {
    return min(key_starts_at(view_at(p.mask.key_starts, b, 0u, 0u, s)), p.mask.masked_len);
}

// Returns the first and past-the-last key of query i's sequence, and the query's key position.
fn packed_keys(b: u32, i: u32) -> vec3<i32> {
    // s becomes the last sequence that begins at i or before.
    var s = 0u;
    var past = p.mask.sequences;
    while past - s > 1u {
        let middle = (s + past) / 2u;
        if packed_query(b, middle) <= i {
            s = middle;
        } else {
            past = middle;
        }
    }
    let first = packed_query(b, s);
    let last = packed_query(b, s + 1u);
    let key = i32(packed_key(b, s));
    let end = max(i32(packed_key(b, s + 1u)), key);
    // Queries before the first sequence or after the last see no keys. Their position is where the
    // keys of the neighbouring sequence begin or end.
    if i < first {
        return vec3<i32>(key, key, key);
    } else if i >= last {
        return vec3<i32>(end, end, end);
    } else {
        var position = key + i32(i - first);
        if p.mask.bottom_right != 0u {
            position += (end - key) - i32(last - first);
        }
        return vec3<i32>(key, end, position);
    }
}
