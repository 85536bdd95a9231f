// The key tiles of fused.wgsl, for variants that stage them: the range of keys, and loads within
// the tensor.
//
// Constants: ROWS, KEYS, WORKGROUP.
//
// Needs: p.q; FULL, FULL_IS_PLAIN, HAS_BLOCKS, HIDDEN, HIDES_TILES, IN_FOURS, KEYS, ROWS,
// WORKGROUP; Source, WorkTile; documents_of_rows, k_four, key_may_be_seen, no_documents, q_at4,
// query_of_row, split_keys, tile_state, with_documents.
// Gives: NEXT; is_finite, keys_of_rows, load_k, load_q, next_tile, row_keys, zero_past.

// The interval of keys that each row may see.
var<workgroup> row_keys: array<vec2<u32>, ROWS>;
var<workgroup> eighth_bounds: array<vec4<u32>, 8>;
var<workgroup> tile_bounds: vec4<u32>;

const EMPTY_BOUNDS: vec4<u32> = vec4<u32>(0xffffffffu, 0u, 0u, 0xffffffffu);
const NEXT: vec4<u32> = vec4<u32>(0u, 1u, 2u, 3u);

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u;
}

// x = [d..d+4], with zeros from head_dim on.
fn zero_past(x: vec4<f32>, d: u32, head_dim: u32) -> vec4<f32> {
    return select(vec4<f32>(), x, vec4<u32>(d) + NEXT < vec4<u32>(head_dim));
}

// Loads have no branches, and no instruction after them waits for them. They clamp indices into the
// tensor, and staging zeroes the elements outside.

fn load_q(o: u32, d: u32, head_dim: u32) -> vec4<f32> {
    let c = min(d, (head_dim - 1u) & ~3u);
    if IN_FOURS {
        return q_at4(o + c, 1u, 4u);
    } else {
        return q_at4(o + c * p.q.strides.w, p.q.strides.w, head_dim - c);
    }
}

fn load_k(s: Source, row: u32, d: u32, head_dim: u32) -> vec4<f32> {
    return k_four(s, row, min(d, (head_dim - 1u) & ~3u));
}

// Bounds: x is the first key of any row, y the end of all rows. Every row sees the keys in z .. w.
fn merge_bounds(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(min(a.x, b.x), max(a.y, b.y), max(a.z, b.z), min(a.w, b.w));
}

// The first tile from j on that has permitted pairs. Result y is 1, FULL if pairs need no mask
// checks, or 0 if no tile is left. The caller passes z and w as `looked` to its next call, zeros to
// the first.
fn next_tile(work: WorkTile, j: u32, looked: vec2<u32>, end: u32, lane: u32) -> vec4<u32> {
    if HIDES_TILES {
        return next_tile_by_tensors(work, j, looked, end, lane);
    } else if !HAS_BLOCKS {
        return vec4<u32>(j, select(0u, 1u, j < end), 0u, 0u);
    } else {
        var found = vec4<u32>(end, 0u, 0u, 0u);
        for (var at = j; at < end && found.y == 0u; at += KEYS) {
            let state = tile_state(work.b, work.kv_head, work.row0, work.last_row, at, min(at + KEYS, end) - 1u);
            if state != HIDDEN {
                found = vec4<u32>(at, select(1u, FULL, state == FULL && FULL_IS_PLAIN), 0u, 0u);
            }
        }
        return found;
    }
}

// As next_tile, with HIDES_TILES. Each bit of looked.x is 1 if a row may see a key of its tile. Bit
// 0 is the tile that starts at j. looked.y is the first key after these tiles.
fn next_tile_by_tensors(work: WorkTile, j: u32, looked: vec2<u32>, end: u32, lane: u32) -> vec4<u32> {
    var bits = looked.x;
    var past = looked.y;
    var at = select(j, max(j, past), bits == 0u);
    while bits == 0u && at < end {
        bits = tiles_by_tensors(work, at, end, lane);
        past = at + LOOK * KEYS;
        at = select(at, past, bits == 0u);
    }
    if bits == 0u {
        return vec4<u32>(end, 0u, 0u, past);
    } else {
        let n = firstTrailingBit(bits);
        return vec4<u32>(at + n * KEYS, 1u, (bits >> n) >> 1u, past);
    }
}

// Tiles that the invocations check together. eighth_bounds holds their flags, so LOOK is its
// length.
const LOOK: u32 = 8u;

// The tiles that a row may see by the mask's tensors, among LOOK tiles from key `first` on. Each
// tile is a bit.
fn tiles_by_tensors(work: WorkTile, first: u32, end: u32, lane: u32) -> u32 {
    if lane < LOOK {
        let mine = documents_of_rows(work.b, work.kv_head, work.row0 + lane, LOOK, work.last_row + 1u);
        eighth_bounds[lane] = vec4<u32>(mine, 0u, 0u);
    }
    workgroupBarrier();
    var documents = no_documents();
    for (var n = 0u; n < LOOK; n++) {
        documents = with_documents(documents, eighth_bounds[n].xy);
    }
    workgroupBarrier();
    if lane < LOOK {
        eighth_bounds[lane] = vec4<u32>();
    }
    workgroupBarrier();
    for (var n = lane; n < LOOK * KEYS; n += WORKGROUP) {
        if first + n < end && key_may_be_seen(work.b, work.kv_head, work.row0, work.last_row, documents, first + n) {
            // All invocations that store here store the same value.
            eighth_bounds[n / KEYS] = vec4<u32>(1u);
        }
    }
    workgroupBarrier();
    if lane == 0u {
        var bits = 0u;
        for (var n = 0u; n < LOOK; n++) {
            bits |= eighth_bounds[n].x << n;
        }
        tile_bounds = vec4<u32>(bits, 0u, 0u, 0u);
    }
    return workgroupUniformLoad(&tile_bounds).x;
}

// The keys of the split that any row sees, and the keys that every row sees. First an invocation
// handles a row, then an eighth of the rows, then all rows. It also sets row_keys.
fn keys_of_rows(b: u32, kv_head: u32, row0: u32, last_row: u32, split: u32, lane: u32) -> vec4<u32> {
    for (var n = lane; n < ROWS; n += WORKGROUP) {
        let query = query_of_row(b, kv_head, min(row0 + n, last_row));
        row_keys[n] = vec2<u32>(query.first, max(query.first, query.end));
    }
    workgroupBarrier();
    if lane < 8u {
        var bounds = EMPTY_BOUNDS;
        for (var n = lane * (ROWS / 8u); n < (lane + 1u) * (ROWS / 8u); n++) {
            let seen = row_keys[n];
            if seen.x < seen.y {
                bounds = merge_bounds(bounds, vec4<u32>(seen, seen));
            } else {
                bounds.w = 0u;
            }
        }
        eighth_bounds[lane] = bounds;
    }
    workgroupBarrier();
    if lane == 0u {
        var bounds = EMPTY_BOUNDS;
        for (var n = 0u; n < 8u; n++) {
            bounds = merge_bounds(bounds, eighth_bounds[n]);
        }
        tile_bounds = bounds;
    }
    let seen = workgroupUniformLoad(&tile_bounds);
    let share = split_keys(seen.xy, split);
    return vec4<u32>(share, max(seen.z, share.x), min(seen.w, share.y));
}
