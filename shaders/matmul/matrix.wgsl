// C = A · B by tiles, on matrix units: a workgroup of four subgroups computes TILE × TILE of C,
// in quarters. A subgroup computes one quarter in fragments of FRAGMENT × FRAGMENT. Tiles of A and
// B are staged in workgroup memory, in f16. Sums are f32.
//
// Constants: FRAGMENT (8 or 16), TILE, TILE_K, WORKGROUP, LEAVING, B_ALONG_N. Ranges of the inner
// axis and repairs are not supported: matrix units propagate NaN.
// The stage gives: tile_of, tile_a4, tile_b4, tile_store4 (see matmul/cpu.wgsl). Here `tile_a4` and
// `tile_b4` return vectors in the stored types A_ELEMENT and B_ELEMENT.
// Memory for fragments: matmul/memory_vectors.wgsl, matmul/memory_scalars.wgsl.
//
// Minimum of workgroup memory accesses: a step has TILE_K / FRAGMENT parts. In each part a subgroup
// loads BLOCK_FRAGMENTS fragments of A and of B, and computes BLOCK_FRAGMENTS² fragment products.
// With fragments of either size this is 8 / TILE bytes per multiply-add. It is 1/8 byte for a tile
// of 64 and 1/16 byte for a tile of 128. Staging adds half of that. There are two barriers.
// Multiplications per step and subgroup, TILE_K = 32:
// - tile of 64, fragments of 16: 8 of 4096 multiply-adds;
// - tile of 128, fragments of 16: 32 of 4096 multiply-adds;
// - tile of 64, fragments of 8: 64 of 512 multiply-adds.
//
// Minimum of global memory accesses: 2 / TILE elements per multiply-add.
//
// Needs: A_ELEMENT, B_ALONG_N, B_ELEMENT, FRAGMENT, LEAVING, TILE, TILE_K, WORKGROUP; Left, Right,
// Sums, Tile; acc_store, f16_store4, f32_at4, left_at, right_at, right_transposed_at, tile_a4,
// tile_b4, tile_of, tile_store4.
// Gives: F16_LEN, F32_LEN; main.

const_assert TILE_K % FRAGMENT == 0u && TILE * TILE_K / 4u % WORKGROUP == 0u && WORKGROUP % (TILE / 4u) == 0u;

const BLOCKS: u32 = 4u;
const BLOCK: u32 = TILE / 2u;            // of C, rows and columns of one subgroup
const BLOCK_FRAGMENTS: u32 = BLOCK / FRAGMENT;      // the same in fragments
const LOADS: u32 = TILE * TILE_K / 4u / WORKGROUP;
const VECTORS_K: u32 = TILE_K / 4u;
const VECTORS_N: u32 = TILE / 4u;
// Rows in workgroup memory have 16 bytes of padding, so that the rows of a fragment lie in
// different banks.
const STEP_K: u32 = TILE_K + 8u;
const STEP_N: u32 = TILE + 8u;
// The length of the staged tile of A; the tile of B follows.
const B_FROM: u32 = TILE * STEP_K;
const F16_LEN: u32 = 2u * B_FROM;
// LEAVING adjacent fragments of every block are stored through workgroup memory at once.
const RESULT_COLS: u32 = LEAVING * FRAGMENT;
const RESULT_ROW: u32 = RESULT_COLS + 4u;
const F32_LEN: u32 = BLOCKS * FRAGMENT * RESULT_ROW;
const RESULT_VECTORS: u32 = FRAGMENT * RESULT_COLS / 4u;

const_assert !B_ALONG_N || TILE_K * STEP_N <= B_FROM;

// Loads stay inside the matrices by clamped indices. Rows and columns outside C may have any value,
// because they are not stored. Elements past the inner axis become zero when they are staged.

fn load_a(t: Tile, row: u32, k: u32, last: u32) -> vec4<A_ELEMENT> {
    return tile_a4(t, min(row, t.rows - 1u), min(k, last & ~3u));
}

fn load_b(t: Tile, k: u32, col: u32, last: u32) -> vec4<B_ELEMENT> {
    if B_ALONG_N {
        return tile_b4(t, min(k, last), min(col, (t.cols - 1u) & ~3u));
    } else {
        return tile_b4(t, min(k, last & ~3u), min(col, t.cols - 1u));
    }
}

// True for each of the four k from k on that lies in the matrix.
fn k_inside(k: u32, inner: u32) -> vec4<bool> {
    return vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(inner);
}

// The fragment of B with rows from k on and columns from col on.
fn b_fragment(k: u32, col: u32) -> Right {
    if B_ALONG_N {
        return right_at(B_FROM + k * STEP_N + col, STEP_N);
    } else {
        return right_transposed_at(B_FROM + col * STEP_K + k, STEP_K);
    }
}

// The vectors that an invocation stages: `lane`, `lane + WORKGROUP`, … of the tiles.
var<private> next_a: array<vec4<A_ELEMENT>, LOADS>;
var<private> next_b: array<vec4<B_ELEMENT>, LOADS>;
// The sums of a subgroup's block.
var<private> acc: array<Sums, BLOCK_FRAGMENTS * BLOCK_FRAGMENTS>;

// The row and the channel of the n-th vector in the tile of A. For the tile of B, the place along
// its memory.
fn place_a(lane: u32, n: u32) -> vec2<u32> {
    return vec2<u32>(lane / VECTORS_K + n * (WORKGROUP / VECTORS_K), lane % VECTORS_K * 4u);
}

fn place_b(lane: u32, n: u32) -> vec2<u32> {
    const VECTORS: u32 = select(VECTORS_K, VECTORS_N, B_ALONG_N);
    return vec2<u32>(lane / VECTORS + n * (WORKGROUP / VECTORS), lane % VECTORS * 4u);
}

fn load_tiles(t: Tile, row0: u32, col0: u32, k0: u32, lane: u32) {
    let last = t.inner - 1u;
    /* unrolled */ for (var n = 0u; n < LOADS; n++) {
        let a = place_a(lane, n);
        let b = place_b(lane, n);
        next_a[n] = load_a(t, row0 + a.x, k0 + a.y, last);
        if B_ALONG_N {
            next_b[n] = load_b(t, k0 + b.x, col0 + b.y, last);
        } else {
            next_b[n] = load_b(t, k0 + b.y, col0 + b.x, last);
        }
    }
}

// Sets elements past the inner axis to zero.
fn zero_past_inner(t: Tile, k0: u32, lane: u32) {
    /* unrolled */ for (var n = 0u; n < LOADS; n++) {
        let b = place_b(lane, n);
        next_a[n] = select(vec4<A_ELEMENT>(), next_a[n], k_inside(k0 + place_a(lane, n).y, t.inner));
        if B_ALONG_N {
            next_b[n] = select(vec4<B_ELEMENT>(), next_b[n], k0 + b.x < t.inner);
        } else {
            next_b[n] = select(vec4<B_ELEMENT>(), next_b[n], k_inside(k0 + b.y, t.inner));
        }
    }
}

fn store_tiles(lane: u32) {
    const STEP: u32 = select(STEP_K, STEP_N, B_ALONG_N);
    /* unrolled */ for (var n = 0u; n < LOADS; n++) {
        let a = place_a(lane, n);
        let b = place_b(lane, n);
        f16_store4(a.x * STEP_K + a.y, vec4<f16>(next_a[n]));
        f16_store4(B_FROM + b.x * STEP + b.y, vec4<f16>(next_b[n]));
    }
}

// acc += the product of the staged tiles.
fn multiply(block_row: u32, block_col: u32) {
    for (var k = 0u; k < TILE_K; k += FRAGMENT) {
        var a: array<Left, BLOCK_FRAGMENTS>;
        /* unrolled */ for (var m = 0u; m < BLOCK_FRAGMENTS; m++) {
            a[m] = left_at((block_row + m * FRAGMENT) * STEP_K + k, STEP_K);
        }
        /* unrolled */ for (var n = 0u; n < BLOCK_FRAGMENTS; n++) {
            let b = b_fragment(k, block_col + n * FRAGMENT);
            /* unrolled */ for (var m = 0u; m < BLOCK_FRAGMENTS; m++) {
                acc[m * BLOCK_FRAGMENTS + n] = coopMultiplyAdd(a[m], b, acc[m * BLOCK_FRAGMENTS + n]);
            }
        }
    }
}

// Stores LEAVING fragments of every block into workgroup memory, then to C.
fn store_results(t: Tile, row0: u32, col0: u32, block: u32, lane: u32) {
    for (var pass_index = 0u; pass_index < BLOCK_FRAGMENTS * BLOCK_FRAGMENTS / LEAVING; pass_index++) {
        /* unrolled */ for (var s = 0u; s < BLOCK_FRAGMENTS * BLOCK_FRAGMENTS; s++) {
            if s / LEAVING == pass_index {
                acc_store(block * FRAGMENT * RESULT_ROW + s % LEAVING * FRAGMENT, RESULT_ROW, acc[s]);
            }
        }
        workgroupBarrier();
        let pass_row = row0 + pass_index * LEAVING / BLOCK_FRAGMENTS * FRAGMENT;
        let pass_col = col0 + pass_index * LEAVING % BLOCK_FRAGMENTS * FRAGMENT;
        for (var v = lane; v < BLOCKS * RESULT_VECTORS; v += WORKGROUP) {
            let region = v / RESULT_VECTORS;
            let r = v % RESULT_VECTORS / (RESULT_COLS / 4u);
            let c = v % (RESULT_COLS / 4u) * 4u;
            let row = pass_row + region / 2u * BLOCK + r;
            let col = pass_col + region % 2u * BLOCK + c;
            if row < t.rows && col < t.cols {
                tile_store4(t, row, col, f32_at4((region * FRAGMENT + r) * RESULT_ROW + c));
            }
        }
        workgroupBarrier();
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = tile_of(group.z);
    let row0 = group.x * TILE;
    let col0 = group.y * TILE;
    if row0 >= t.rows || col0 >= t.cols {
        return;
    }
    // The block of a quarter of the invocations (see fused/matrix.wgsl).
    let block = lane / (WORKGROUP / BLOCKS);
    /* unrolled */ for (var s = 0u; s < BLOCK_FRAGMENTS * BLOCK_FRAGMENTS; s++) {
        acc[s] = Sums();
    }
    load_tiles(t, row0, col0, 0u, lane);
    for (var k0 = 0u; k0 < t.inner; k0 += TILE_K) {
        if k0 + TILE_K > t.inner {
            zero_past_inner(t, k0, lane);
        }
        store_tiles(lane);
        workgroupBarrier();
        // The loads of the next step overlap with this step's arithmetic. After the last step they
        // repeat its end.
        load_tiles(t, row0, col0, k0 + TILE_K, lane);
        multiply(block / 2u * BLOCK, block % 2u * BLOCK);
        workgroupBarrier();
    }
    store_results(t, row0, col0, block, lane);
}
