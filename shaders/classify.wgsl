// A block map of a mask: HIDDEN, 1 or FULL per block of pairs (block_map.rs).
//
// map [batch or 1, heads or 1, ⌈q_len / size.x⌉, ⌈kv_len / size.y⌉]; an axis of 1 stands for all.
// Bindings (declared by the host): map, the mask's. A workgroup per block; every pair is asked once.

struct Params {
    map: View,
    mask: MaskParams,
    size: vec2<u32>,
    map_heads: u32,    // heads of the map
    batches: u32,      // that one entry of the map stands for
    heads: u32,        // likewise
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> p: Params;

const SEEN: u32 = 1u;     // some pair is seen
const UNSEEN: u32 = 2u;   // some pair is not
const BIASED: u32 = 4u;   // some pair that is seen has a bias

var<workgroup> found: array<u32, 64>;

fn found_at(q: Query, j: u32) -> u32 {
    if j < q.first || j >= q.end {
        return UNSEEN;
    } else if !PER_PAIR_MASK {
        return SEEN;
    } else if !mask_mod(q, j) {
        return UNSEEN;
    } else {
        let bias = bias_of(q, j);
        // By the bits: a NaN is a bias too.
        let is_biased = (bitcast<u32>(bias) & 0x7fffffffu) != 0u;
        return select(select(SEEN, SEEN | BIASED, is_biased), UNSEEN, bias == p.mask.neg_inf);
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let map_b = group.z / p.map_heads;
    let map_h = group.z % p.map_heads;
    let last_i = min((group.y + 1u) * p.size.x, p.mask.q_len);
    let last_j = min((group.x + 1u) * p.size.y, p.mask.kv_len);
    var mine = 0u;
    for (var b = map_b * p.batches; b < (map_b + 1u) * p.batches; b++) {
        for (var h = map_h * p.heads; h < (map_h + 1u) * p.heads; h++) {
            for (var i = group.y * p.size.x; i < last_i; i++) {
                let q = query_of(b, h, i);
                for (var j = group.x * p.size.y + lane; j < last_j; j += 64u) {
                    mine |= found_at(q, j);
                }
            }
        }
    }
    found[lane] = mine;
    workgroupBarrier();
    if lane == 0u {
        for (var n = 1u; n < 64u; n++) {
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
