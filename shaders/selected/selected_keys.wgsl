// The keys of every query: sorted lists without repetitions.
//
// indices [batch, list heads, queries, count]: keys, or blocks of p.block keys. A number past the
// last key or block names no key; so does −1.
//
// A list has the keys that indices name and the last p.window keys up to the query's position. The
// mask hides some of them. The order is rising, so equal sets are equal lists.
//
// lists [queries, row]: p.list_heads · p.heads_each lengths, then p.capacity keys for each list
// head.
//
// bitmap [queries, list heads, words, 2], if present. A pair of words is for 32 keys. It has the
// list's keys as bits, and the number of the list's keys before them.
//
// Constants: LANES   invocations of a workgroup, which writes one list
//
// Bindings (declared by the host): indices, lists, bitmap and sequence_table if there are any; the
// mask's. Bytes: indices, and each list once. A workgroup passes over the bits of all keys, 65536
// at a time. It has a few operations for each 32 keys and for each index.

const RANGE_WORDS: u32 = 2048u;
const RANGE: u32 = 32u * RANGE_WORDS;

var<workgroup> bits: array<atomic<u32>, RANGE_WORDS>;
var<workgroup> counts: array<u32, LANES>;
var<workgroup> bounds: vec4<u32>;

// Bits first .. end of a word, where both are at most 32.
fn bits_from(first: u32, end: u32) -> u32 {
    let low = select(0xffffffffu << (first & 31u), 0u, first >= 32u);
    let high = select(0xffffffffu << (end & 31u), 0u, end >= 32u);
    return select(low & ~high, 0u, first >= end);
}

// Bits of the keys first .. end in the word whose first key is `base`.
fn bits_at(base: u32, first: u32, end: u32) -> u32 {
    return bits_from(clamp(first, base, base + 32u) - base, clamp(end, base, base + 32u) - base);
}

// The keys of a block, from low to high.
fn keys_of(index: u32, low: u32, high: u32) -> vec2<u32> {
    if index > high / p.block {
        return vec2<u32>(0u, 0u);
    } else {
        return vec2<u32>(max(index * p.block, low), min((index + 1u) * p.block, high));
    }
}

// Permitted keys of a word.
fn seen(query: Query, base: u32, word: u32) -> u32 {
    var left = word;
    if PER_PAIR_MASK {
        for (var rest = word; rest != 0u; rest &= rest - 1u) {
            let n = firstTrailingBit(rest);
            if !mask_mod(query, base + n) {
                left &= ~(1u << n);
            }
        }
    }
    return left;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let g = group.y;
    let b = p.batch + group.z;
    let i = p.query + group.x;
    let query = query_of(b, g * p.heads_each, i);
    if lane == 0u {
        let last = u32(max(query.position, -1) + 1);
        let first = max(last, p.window) - p.window;
        let near = vec2<u32>(first, select(0u, min(last, query.end), p.window > 0u));
        bounds = vec4<u32>(min(query.first, query.end), query.end, max(near, vec2<u32>(query.first)));
    }
    let range = workgroupUniformLoad(&bounds);
    let row = (group.z * p.queries + group.x) * p.row;
    let list = row + p.list_heads * p.heads_each + g * p.capacity;
    let bitmap_row = ((group.z * p.queries + group.x) * p.list_heads + g) * p.bitmap_words * 2u;
    let first_key = select(range.x / RANGE * RANGE, 0u, HAS_BITMAP);
    let last_key = select(range.y, p.bitmap_words * 32u, HAS_BITMAP);
    var total = 0u;
    for (var from_key = first_key; from_key < last_key; from_key += RANGE) {
        let words = min((last_key - from_key + 31u) / 32u, RANGE_WORDS);
        for (var n = lane; n < words; n += LANES) {
            atomicStore(&bits[n], bits_at(from_key + 32u * n, range.z, range.w));
        }
        workgroupBarrier();
        let low = max(from_key, range.x);
        let high = min(from_key + RANGE, range.y);
        for (var n = lane; n < p.count; n += LANES) {
            let keys = keys_of(indices_at(view_at(p.indices, b, g, i, n)), low, high);
            var j = keys.x;
            while j < keys.y {
                let word = (j - from_key) / 32u;
                atomicOr(&bits[word], bits_at(from_key + 32u * word, j, keys.y));
                j = from_key + 32u * word + 32u;
            }
        }
        workgroupBarrier();
        let each = (words + LANES - 1u) / LANES;
        let mine = vec2<u32>(min(lane * each, words), min(lane * each + each, words));
        var count = 0u;
        for (var n = mine.x; n < mine.y; n++) {
            let word = seen(query, from_key + 32u * n, atomicLoad(&bits[n]));
            if PER_PAIR_MASK {
                atomicStore(&bits[n], word);
            }
            count += countOneBits(word);
        }
        counts[lane] = count;
        workgroupBarrier();
        var slot = total;
        for (var l = 0u; l < LANES; l++) {
            slot += select(0u, counts[l], l < lane);
            total += counts[l];
        }
        for (var n = mine.x; n < mine.y; n++) {
            let word = atomicLoad(&bits[n]);
            if HAS_BITMAP {
                let o = bitmap_row + (from_key / 32u + n) * 2u;
                bitmap_store(o, word);
                bitmap_store(o + 1u, slot);
            }
            for (var rest = word; rest != 0u; rest &= rest - 1u) {
                lists_store(list + slot, from_key + 32u * n + firstTrailingBit(rest));
                slot += 1u;
            }
        }
        workgroupBarrier();
    }
    for (var h = lane; h < p.heads_each; h += LANES) {
        lists_store(row + g * p.heads_each + h, total);
    }
}
