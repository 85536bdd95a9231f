// The gradients of keys or values: sums of the terms of all queries that have a key in their lists.
//
// bitmap [queries, list heads, words, 2], as in selected_keys.wgsl
//
// terms [queries, call heads, capacity, channels]. The values have fewer channels, and are
// added to the first ones.
//
// sums, out [batch, kv_heads, kv_len, channels]. The sums are over earlier queries.
//
// A workgroup sums CHANNEL_LANES · 4 channels of 32 keys. An invocation has every KEY_LANES-th of
// the keys. It goes over the queries in order, so every run gives the same bits.
//
// Constants: CHANNEL_LANES, KEY_LANES   invocations of a workgroup, by channels and by keys
//
// Bindings (declared by the host): bitmap, terms, values if there are any. Then sums unless these
// queries are all queries, and out for the last queries. Bytes: terms, values and sums once, and
// two words of each query for 32 keys.

const KEYS: u32 = 32u;
const EACH: u32 = KEYS / KEY_LANES;

// Sums of the invocation's keys.
var<workgroup> sums_of_keys: array<vec4<f32>, KEYS * CHANNEL_LANES>;

// The keys of an invocation, as bits.
fn own_keys(key_lane: u32) -> u32 {
    return (0xffffffffu >> (32u - EACH)) << (key_lane * EACH);
}

@compute @workgroup_size(CHANNEL_LANES, KEY_LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) id: vec3<u32>) {
    let b = group.z / p.kv_heads;
    let kv_head = group.z % p.kv_heads;
    let d = (group.y * CHANNEL_LANES + id.x) * 4u;
    let own = own_keys(id.y);
    if d < p.channels {
        for (var n = id.y * EACH; n < (id.y + 1u) * EACH; n++) {
            sums_of_keys[n * CHANNEL_LANES + id.x] = vec4<f32>();
        }
        for (var i = 0u; i < p.queries; i++) {
            for (var s = 0u; s < p.share; s++) {
                let query = b * p.queries + i;
                let h = kv_head * p.share + s;
                let o = ((query * p.list_heads + select(h, 0u, p.list_heads == 1u)) * p.bitmap_words + group.x) * 2u;
                let word = bitmap_at(o);
                let mine = word & own;
                if mine != 0u {
                    var slot = bitmap_at(o + 1u) + countOneBits(word & ((1u << (id.y * EACH)) - 1u));
                    slot += (query * p.call_heads + h) * p.capacity;
                    for (var rest = mine; rest != 0u; rest &= rest - 1u) {
                        var x = terms_at4(slot * p.channels_each + d, 1u, 4u);
                        if HAS_VALUES && d < p.values_each {
                            x += values_at4(slot * p.values_each + d, 1u, 4u);
                        }
                        sums_of_keys[firstTrailingBit(rest) * CHANNEL_LANES + id.x] += x;
                        slot += 1u;
                    }
                }
            }
        }
        for (var n = id.y * EACH; n < (id.y + 1u) * EACH; n++) {
            let j = group.x * KEYS + n;
            if j < p.kv_len {
                let o = ((b + p.batch) * p.kv_heads + kv_head) * p.kv_len + j;
                store(vec4<u32>(b + p.batch, kv_head, j, d), o * p.channels_each + d, sums_of_keys[n * CHANNEL_LANES + id.x]);
            }
        }
    }
}

// Adds the sums of earlier queries, and stores the result.
fn store(place: vec4<u32>, o: u32, sum: vec4<f32>) {
    var x = sum;
    if HAS_SUMS && (p.adds != 0u) {
        x += sums_at4(o, 1u, 4u);
    }
    if HAS_OUT {
        for (var c = 0u; c < min(4u, p.channels - place.w); c++) {
            let to = view_at(p.out, place.x, place.y, place.z, place.w + c);
            var y = component(x, c);
            if p.accumulates != 0u {
                y += out_at(to);
            }
            out_store(to, y);
        }
    } else {
        sums_store4(o, x);
    }
}
