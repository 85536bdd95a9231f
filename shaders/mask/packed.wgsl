// Packed sequences: several side by side, a query sees keys of its own only.
//
// Needs: p.mask; key_starts_at, query_starts_at, view_at.
// Gives: packed_keys.

fn packed_query(b: u32, s: u32) -> u32 {
    return min(query_starts_at(view_at(p.mask.query_starts, b, 0u, 0u, s)), p.mask.q_len);
}

fn packed_key(b: u32, s: u32) -> u32 {
    return min(key_starts_at(view_at(p.mask.key_starts, b, 0u, 0u, s)), p.mask.masked_len);
}

// First and past-the-last key of query i's sequence, and the key at which the query stands.
fn packed_keys(b: u32, i: u32) -> vec3<i32> {
    // The last sequence that begins at i or before.
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
    // Before the first sequence, or after the last: no keys, where those of the neighbours begin or
    // end.
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
