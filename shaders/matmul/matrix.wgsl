// C = A · B by tiles, on matrix units: a workgroup of four subgroups computes TILE × TILE of C, each a quarter in
// fragments of FRAGMENT × FRAGMENT; its tiles of A and B are staged in workgroup memory, in f16. Sums are f32.
//
// Constants: FRAGMENT (8 or 16), TILE, TILE_K, WORKGROUP, LEAVING, B_ALONG_N. No ranges of the inner axis and no repairs:
// a product lets NaN through by itself.
// The stage gives: tile_of, tile_a4, tile_b4, tile_store4 (see matmul/cpu.wgsl); tile_a4 and tile_b4 give the vectors
// as memory has them, of A_ELEMENT and B_ELEMENT.
// Memory for fragments: matrix/memory_vectors.wgsl, matrix/memory_scalars.wgsl.
//
// Floor in workgroup memory, per step: a subgroup loads BLOCK_FRAGMENTS fragments of A and BLOCK_FRAGMENTS of B for SIDE² multiplications,
// TILE_K / FRAGMENT times, which is 8 / TILE bytes per multiply-add: 1/8 for a tile of 64, 1/16 for one of 128, whatever the
// fragments. To stage them takes half of that once more. Two barriers.
// Multiplications per step and subgroup, TILE_K = 32: 8 of 4096 multiply-adds for a tile of 64 in fragments of 16, 32 for
// one of 128; 64 of 512 for a tile of 64 in fragments of 8.
// Floor in global memory: 2 / TILE elements per multiply-add.
//
// Needs: A_ELEMENT, B_ALONG_N, B_ELEMENT, FRAGMENT, LEAVING, TILE, TILE_K, WORKGROUP; Left, Right, Sums, Tile;
// acc_store, f16_store4, f32_at4, left_at, right_at, right_transposed_at, tile_a4, tile_b4, tile_of, tile_store4.
// Gives: F16_LEN, F32_LEN; main.

const_assert TILE_K % FRAGMENT == 0u && TILE * TILE_K / 4u % WORKGROUP == 0u && WORKGROUP % (TILE / 4u) == 0u;

const BLOCKS: u32 = 4u;
const BLOCK: u32 = TILE / 2u;            // of C, rows and columns of one subgroup
const BLOCK_FRAGMENTS: u32 = BLOCK / FRAGMENT;      // the same in fragments
const LOADS: u32 = TILE * TILE_K / 4u / WORKGROUP;
const VECTORS_K: u32 = TILE_K / 4u;
const VECTORS_N: u32 = TILE / 4u;
// Rows in workgroup memory, 16 bytes longer than they must be: those of a fragment then lie in different banks.
const STEP_K: u32 = TILE_K + 8u;
const STEP_N: u32 = TILE + 8u;
// Of A; B follows.
const B_FROM: u32 = TILE * STEP_K;
const F16_LEN: u32 = 2u * B_FROM;
// LEAVING fragments side by side of every block go through `floats` at once.
const RESULT_COLS: u32 = LEAVING * FRAGMENT;
const RESULT_ROW: u32 = RESULT_COLS + 4u;
const F32_LEN: u32 = BLOCKS * FRAGMENT * RESULT_ROW;
const RESULT_VECTORS: u32 = FRAGMENT * RESULT_COLS / 4u;

const_assert !B_ALONG_N || TILE_K * STEP_N <= B_FROM;

// Loads stay inside the matrices by clamped indices: rows and columns outside of C may hold anything, they are not stored;
// what lies past the inner axis becomes zero when it is staged.

fn load_a(t: Tile, row: u32, k: u32, last: u32) -> vec4<A_ELEMENT> {
    return tile_a4(t, min(row, t.rows - 1u), min(k, last & ~3u));
}

fn load_b(t: Tile, k: u32, col: u32, last: u32) -> vec4<B_ELEMENT> {
    if B_ALONG_N {
        return tile_b4(t, min(k, last), min(col, (t.cols - 1u) & ~3u));
    }
    return tile_b4(t, min(k, last & ~3u), min(col, t.cols - 1u));
}

// Which of four k from k on lie in the matrix.
fn k_inside(k: u32, inner: u32) -> vec4<bool> {
    return vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(inner);
}

// Of B, rows from k on and columns from col on.
fn b_fragment(k: u32, col: u32) -> Right {
    if B_ALONG_N {
        return right_at(B_FROM + k * STEP_N + col, STEP_N);
    }
    return right_transposed_at(B_FROM + col * STEP_K + k, STEP_K);
}

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let t = tile_of(group.z);
    let row0 = group.x * TILE;
    let col0 = group.y * TILE;
    if row0 >= t.rows || col0 >= t.cols {
        return;
    }
    let last = t.inner - 1u;

    // What this invocation stages: vectors `lane`, `lane + WORKGROUP`, … of the tiles.
    let a_row = lane / VECTORS_K;
    let a_k = lane % VECTORS_K * 4u;
    let b_row = lane / select(VECTORS_K, VECTORS_N, B_ALONG_N);
    let b_at = lane % select(VECTORS_K, VECTORS_N, B_ALONG_N) * 4u;

    // Subgroups as wide as planned go through this once. Were they wider, fewer would take turns; were they narrower, those
    // too many repeat the last block and do not store it.
    for (var first = 0u; first < BLOCKS; first += subgroups) {
        let block = min(first + subgroup, BLOCKS - 1u);
        let block_row = block / 2u * BLOCK;
        let block_col = block % 2u * BLOCK;
        var acc: array<Sums, BLOCK_FRAGMENTS * BLOCK_FRAGMENTS>;
        for (var s = 0u; s < BLOCK_FRAGMENTS * BLOCK_FRAGMENTS; s++) {
            acc[s] = Sums();
        }

        var next_a: array<vec4<A_ELEMENT>, LOADS>;
        var next_b: array<vec4<B_ELEMENT>, LOADS>;
        for (var n = 0u; n < LOADS; n++) {
            next_a[n] = load_a(t, row0 + a_row + n * (WORKGROUP / VECTORS_K), a_k, last);
            if B_ALONG_N {
                next_b[n] = load_b(t, b_row + n * (WORKGROUP / VECTORS_N), col0 + b_at, last);
            } else {
                next_b[n] = load_b(t, b_at, col0 + b_row + n * (WORKGROUP / VECTORS_K), last);
            }
        }
        for (var k0 = 0u; k0 < t.inner; k0 += TILE_K) {
            if k0 + TILE_K > t.inner {
                let a_inside = k_inside(k0 + a_k, t.inner);
                for (var n = 0u; n < LOADS; n++) {
                    next_a[n] = select(vec4<A_ELEMENT>(), next_a[n], a_inside);
                    if B_ALONG_N {
                        let k = k0 + b_row + n * (WORKGROUP / VECTORS_N);
                        next_b[n] = select(vec4<B_ELEMENT>(), next_b[n], k < t.inner);
                    } else {
                        next_b[n] = select(vec4<B_ELEMENT>(), next_b[n], k_inside(k0 + b_at, t.inner));
                    }
                }
            }
            for (var n = 0u; n < LOADS; n++) {
                f16_store4((a_row + n * (WORKGROUP / VECTORS_K)) * STEP_K + a_k, vec4<f16>(next_a[n]));
                if B_ALONG_N {
                    f16_store4(B_FROM + (b_row + n * (WORKGROUP / VECTORS_N)) * STEP_N + b_at, vec4<f16>(next_b[n]));
                } else {
                    f16_store4(B_FROM + (b_row + n * (WORKGROUP / VECTORS_K)) * STEP_K + b_at, vec4<f16>(next_b[n]));
                }
            }
            workgroupBarrier();
            // The next step's loads travel while this one computes. After the last step they repeat its end.
            let k1 = k0 + TILE_K;
            for (var n = 0u; n < LOADS; n++) {
                next_a[n] = load_a(t, row0 + a_row + n * (WORKGROUP / VECTORS_K), k1 + a_k, last);
                if B_ALONG_N {
                    next_b[n] = load_b(t, k1 + b_row + n * (WORKGROUP / VECTORS_N), col0 + b_at, last);
                } else {
                    next_b[n] = load_b(t, k1 + b_at, col0 + b_row + n * (WORKGROUP / VECTORS_K), last);
                }
            }
            for (var k = 0u; k < TILE_K; k += FRAGMENT) {
                var a: array<Left, BLOCK_FRAGMENTS>;
                for (var m = 0u; m < BLOCK_FRAGMENTS; m++) {
                    a[m] = left_at((block_row + m * FRAGMENT) * STEP_K + k, STEP_K);
                }
                for (var n = 0u; n < BLOCK_FRAGMENTS; n++) {
                    let b = b_fragment(k, block_col + n * FRAGMENT);
                    for (var m = 0u; m < BLOCK_FRAGMENTS; m++) {
                        acc[m * BLOCK_FRAGMENTS + n] = coopMultiplyAdd(a[m], b, acc[m * BLOCK_FRAGMENTS + n]);
                    }
                }
            }
            workgroupBarrier();
        }

        for (var pass_index = 0u; pass_index < BLOCK_FRAGMENTS * BLOCK_FRAGMENTS / LEAVING; pass_index++) {
            for (var s = 0u; s < BLOCK_FRAGMENTS * BLOCK_FRAGMENTS; s++) {
                // Which sum it is must be known to the compiler: registers have no indices.
                if s / LEAVING == pass_index && first + subgroup < BLOCKS {
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
                if region >= first && region - first < subgroups && row < t.rows && col < t.cols {
                    tile_store4(t, row, col, f32_at4((region * FRAGMENT + r) * RESULT_ROW + c));
                }
            }
            workgroupBarrier();
        }
    }
}
