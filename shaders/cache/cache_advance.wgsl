// Moves the lengths of a cache's sequences, before rows are written or after tokens are removed.
//
// counts [batch, 1, 1, 1], if a tensor has the counts. A sequence without room for all its rows
// gets no rows and counts one refusal.
//
// Bindings (declared by the host): sequence_table; counts if COUNTS is DEVICE.
// COUNTS: ALL, EACH or DEVICE.

const ALL: u32 = 0u;
const EACH: u32 = 1u;
const DEVICE: u32 = 2u;

fn count_of(b: u32) -> u32 {
    if COUNTS == EACH {
        return min(sequence_table_at(b * WORDS + COUNT), p.rows);
    } else if COUNTS == DEVICE {
        return min(counts_at(view_at(p.counts, b, 0u, 0u, 0u)), p.rows);
    } else {
        return p.rows;
    }
}

// True if a ring still has every token that a length of n needs. A ring that has overwritten tokens
// has only the tokens of its longest length. A shorter length needs older tokens, except for the
// spare tokens.
fn can_return_to(n: u32, shift: u32) -> bool {
    let longest = p.cache.sinks + p.cache.window + shift;
    return shift == 0u || n <= p.cache.sinks || n + p.cache.spare >= longest;
}

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    for (var b = lane; b < p.cache.batch; b += 64u) {
        let o = b * WORDS;
        let n = count_of(b);
        let before = cached_len(b);
        let limit = min(sequence_table_at(o + LIMIT), p.cache.longest);
        var start = before;
        var after = before;
        var high = sequence_table_at(o + HIGH);
        var refused = 0u;
        if p.back == 0u {
            if n <= limit - min(before, limit) {
                after = before + n;
                high = max(high, after);
            } else {
                refused = 1u;
            }
        } else {
            let wanted = before - min(n, before);
            let shift = cached_shift(b);
            // The host checks how far a compacted sequence goes back.
            if COMPACTS || can_return_to(wanted, shift) {
                after = wanted;
                if shift == 0u || wanted <= p.cache.sinks {
                    high = wanted;
                }
            } else {
                refused = 1u;
            }
            start = after;
        }
        sequence_table_store(o + START, start);
        sequence_table_store(o + LENGTH, after);
        if !COMPACTS {
            sequence_table_store(o + HIGH, high);
        }
        if refused != 0u {
            sequence_table_store(o + REFUSED, sequence_table_at(o + REFUSED) + 1u);
        }
    }
}
