// The opposite rows that a workgroup of fused_backward.wgsl visits, for the variants for GPUs.
//
// Constants: WORKGROUP.
//
// Needs: p.mask; HAS_BLOCKS, HIDDEN, HIDES_TILES, OF_KEYS, OTHERS, SEARCH, WORKGROUP; WorkTile;
// blocks_state, key_range, no_documents, other_may_be_seen, own_documents, search_finds,
// with_documents.
// Gives: found, found_all, others_of, tile_seen, tiles_by_tensors.

// One or two numbers of each invocation, and their total. The size is a multiple of 16 bytes (see
// fused/matrix.wgsl).
var<workgroup> found: array<vec2<u32>, WORKGROUP>;
var<workgroup> found_all: vec4<u32>;

// The opposite rows of a query head that an output row may be paired with.
fn others_of(work: WorkTile, h: u32, lane: u32) -> vec2<u32> {
    if !OF_KEYS {
        return key_range(work.b, h, work.own0, work.last_own);
    } else {
        var range = vec2<u32>(p.mask.q_len, 0u);
        for (var first = 0u; first * SEARCH < p.mask.q_len; first += WORKGROUP) {
            let n = first + lane;
            if n * SEARCH < p.mask.q_len && search_finds(work, h, n) {
                range = vec2<u32>(min(range.x, n * SEARCH), min((n + 1u) * SEARCH, p.mask.q_len));
            }
        }
        found[lane] = range;
        workgroupBarrier();
        if lane == 0u {
            for (var n = 1u; n < WORKGROUP; n++) {
                range = vec2<u32>(min(range.x, found[n].x), max(range.y, found[n].y));
            }
            found_all = vec4<u32>(range, 0u, 0u);
        }
        return workgroupUniformLoad(&found_all).xy;
    }
}

// Tiles that the invocations check together.
const LOOK: u32 = 8u;

// Bit 0 is 1 if the mask's tensors may show a pair of the tile from other0 on. Further bits are for
// further tiles. The caller passes the result as `looked` for the next tile.
fn tiles_by_tensors(work: WorkTile, h: u32, range: vec2<u32>, other0: u32, looked: u32, lane: u32) -> u32 {
    if !HIDES_TILES {
        return 1u;
    } else if (other0 - range.x) / OTHERS % LOOK != 0u {
        return looked >> 1u;
    } else {
        if lane < LOOK {
            found[lane] = own_documents(work, h, lane, LOOK);
        }
        workgroupBarrier();
        var documents = no_documents();
        for (var n = 0u; n < LOOK; n++) {
            documents = with_documents(documents, found[n]);
        }
        workgroupBarrier();
        if lane < LOOK {
            found[lane] = vec2<u32>();
        }
        workgroupBarrier();
        for (var n = lane; n < LOOK * OTHERS; n += WORKGROUP) {
            if other0 + n < range.y && other_may_be_seen(work, h, documents, other0 + n) {
                // All invocations that store here store the same value.
                found[n / OTHERS] = vec2<u32>(1u);
            }
        }
        workgroupBarrier();
        if lane == 0u {
            var bits = 0u;
            for (var n = 0u; n < LOOK; n++) {
                bits |= found[n].x << n;
            }
            found_all = vec4<u32>(bits, 0u, 0u, 0u);
        }
        return workgroupUniformLoad(&found_all).x;
    }
}

// True if a pair of the tile may be visible.
fn tile_seen(work: WorkTile, h: u32, first: u32, last: u32) -> bool {
    var seen = true;
    if OF_KEYS {
        let keys = key_range(work.b, h, first, last);
        seen = keys.x <= work.last_own && keys.y > work.own0;
    }
    // Appended keys are not in the map.
    if HAS_BLOCKS && seen && select(last, work.last_own, OF_KEYS) < p.mask.masked_len {
        let queries = select(vec2<u32>(work.own0, work.last_own), vec2<u32>(first, last), OF_KEYS);
        let keys = select(vec2<u32>(first, last), vec2<u32>(work.own0, work.last_own), OF_KEYS);
        seen = blocks_state(work.b, h, queries.x, queries.y, keys.x, keys.y) != HIDDEN;
    }
    return seen;
}
