// C = A · B by tiles, for GPUs: a workgroup of 16 × 16 invocations computes TILE × TILE of C, its
// tile. Tiles of A and B are staged in workgroup memory. Each invocation holds LANE_TILE ×
// LANE_TILE sums.
//
// Constants: TILE (a multiple of 64), TILE_K, A_ALONG_M, B_ALONG_N, REPAIRS. TILE · TILE_K = 1024,
// so that every invocation stages one vector of A and one of B per step.
// The stage gives: tile_of, tile_needed, tile_inner, tile_a4, tile_b4, tile_store4,
// tile_repair (see matmul/cpu.wgsl); tile_a4 gives A[row..row+4, k] if A_ALONG_M.
//
// Minimum of workgroup memory accesses, per k and invocation: LANE_TILE² multiply-adds and
// LANE_TILE / 2 vector loads. These are 16 and 2 for a tile of 64, 64 and 4 for a tile of 128.
// Minimum of global memory accesses: 2 / TILE elements per multiply-add. In f32 these are 1/8 byte
// for a tile of 64 and 1/16 byte for a tile of 128. In f16 they are half as many.
//
// Needs: A_ALONG_M, B_ALONG_N, REPAIRS, TILE, TILE_K; Tile; all_finite, tile_a4, tile_b4,
// tile_inner, tile_needed, tile_of, tile_repair, tile_store4.
// Gives: main.

const_assert TILE * TILE_K == 1024u && TILE % 64u == 0u;

const LANE_TILE: u32 = TILE / 16u;
const ACC_VECTORS: u32 = LANE_TILE * LANE_TILE / 4u;
const VECTORS: u32 = TILE / 4u;     // of a staged row
const VECTORS_K: u32 = TILE_K / 4u;
// A transposing store of 32 neighbours covers VECTORS_K rows, four apart, and 8 / VECTORS_K vectors
// of each row. Shifting every fourth row by this number of vectors spreads the stores over all 32
// banks.
const SHIFT: u32 = 8u / VECTORS_K;

// Arrays of scalars, because neighbours store to parts of one vector. Such stores race if a
// compiler loads, changes and stores the whole vector (Metal and D3D do).
var<workgroup> tile_a: array<f32, (TILE_K * VECTORS + 8u) * 4u>;
var<workgroup> tile_b: array<f32, (TILE_K * VECTORS + 8u) * 4u>;

fn a_four(v: u32) -> vec4<f32> {
    return vec4<f32>(tile_a[v * 4u], tile_a[v * 4u + 1u], tile_a[v * 4u + 2u], tile_a[v * 4u + 3u]);
}

fn b_four(v: u32) -> vec4<f32> {
    return vec4<f32>(tile_b[v * 4u], tile_b[v * 4u + 1u], tile_b[v * 4u + 2u], tile_b[v * 4u + 3u]);
}

// The first vector of row k of a staged tile.
fn tile_row(k: u32) -> u32 {
    return k * VECTORS + k / 4u * SHIFT;
}

// Loads have no branches, and no dependent operation that would wait for them. Indices are clamped
// into the matrix, and staging clears elements outside the range of k. Rows and columns outside C
// may have any value, because they are not stored.

fn load_a(t: Tile, row: u32, k: u32, last: u32) -> vec4<f32> {
    if A_ALONG_M {
        return tile_a4(t, min(row, (t.rows - 1u) & ~3u), min(k, last));
    } else {
        return tile_a4(t, min(row, t.rows - 1u), min(k, last & ~3u));
    }
}

fn load_b(t: Tile, k: u32, col: u32, last: u32) -> vec4<f32> {
    if B_ALONG_N {
        return tile_b4(t, min(k, last), min(col, (t.cols - 1u) & ~3u));
    } else {
        return tile_b4(t, min(k, last & ~3u), min(col, t.cols - 1u));
    }
}

// v = [k..k+4] with zeros outside the range, whatever value the memory holds.
fn zero_outside(v: vec4<f32>, k: u32, range: vec2<u32>) -> vec4<f32> {
    let ks = vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<f32>(), v, (ks >= vec4<u32>(range.x)) & (ks < vec4<u32>(range.y)));
}

// The sums of an invocation. Only constants may index this array, so loops over it are marked as
// unrolled (src/kernel/unroll.rs).
var<private> acc: array<vec4<f32>, ACC_VECTORS>;

// x, y: the first vector of C of this invocation, across and down.
fn store_sums(t: Tile, row0: u32, col0: u32, x: u32, y: u32) {
    var broken = false;
    /* unrolled */ for (var m = 0u; m < LANE_TILE / 4u; m++) {
        /* unrolled */ for (var n = 0u; n < LANE_TILE / 4u; n++) {
            let col = col0 + (n * 16u + x) * 4u;
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                let row = row0 + (m * 16u + y) * 4u + c;
                let sum = acc[m * LANE_TILE + n * 4u + c];
                if row < t.rows && col < t.cols {
                    tile_store4(t, row, col, sum);
                    broken = broken || !all_finite(sum);
                }
            }
        }
    }
    if REPAIRS && broken {
        /* unrolled */ for (var s = 0u; s < ACC_VECTORS; s++) {
            let row = row0 + (s / LANE_TILE * 16u + y) * 4u + s % 4u;
            let col = col0 + (s % LANE_TILE / 4u * 16u + x) * 4u;
            if row < t.rows && col < t.cols {
                tile_repair(t, row, col);
            }
        }
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = tile_of(group.z);
    let row0 = group.x * TILE;
    let col0 = group.y * TILE;
    if row0 >= t.rows || col0 >= t.cols {
        return;
    }
    let rows = min(TILE, t.rows - row0);
    if !tile_needed(t, row0, rows, col0, min(TILE, t.cols - col0)) {
        return;
    }
    let inner = tile_inner(t, row0, rows);
    let first = inner.x & ~3u;
    let last = max(inner.y, 1u) - 1u;

    // The elements that this invocation stages. Across the inner axis: four k of one row of A, or
    // of one column of B. Along the inner axis: four rows of A, or four columns of B.
    let across = lane / VECTORS_K;
    let across_k = lane % VECTORS_K * 4u;
    let to_across = tile_row(across_k) + across / 4u;
    let across_c = across % 4u;
    let along = lane % VECTORS * 4u;
    let along_k = lane / VECTORS;
    let to_along = tile_row(along_k) + lane % VECTORS;
    let a_row = row0 + select(across, along, A_ALONG_M);
    let a_k = select(across_k, along_k, A_ALONG_M);
    let b_col = col0 + select(across, along, B_ALONG_N);
    let b_k = select(across_k, along_k, B_ALONG_N);

    // The vectors of C that it computes. 32 neighbours have 4 × 8 vectors, which minimises the
    // number of different loads.
    let x = lane % 8u + lane / 32u % 2u * 8u;
    let y = lane / 8u % 4u + lane / 64u * 4u;
    /* unrolled */ for (var s = 0u; s < ACC_VECTORS; s++) {
        acc[s] = vec4<f32>();
    }

    var next_a = load_a(t, a_row, first + a_k, last);
    var next_b = load_b(t, first + b_k, b_col, last);
    for (var k0 = first; k0 < inner.y; k0 += TILE_K) {
        var a = next_a;
        var b = next_b;
        if k0 < inner.x || k0 + TILE_K > inner.y {
            if A_ALONG_M {
                a = select(vec4<f32>(), a, k0 + a_k >= inner.x && k0 + a_k < inner.y);
            } else {
                a = zero_outside(a, k0 + a_k, inner);
            }
            if B_ALONG_N {
                b = select(vec4<f32>(), b, k0 + b_k >= inner.x && k0 + b_k < inner.y);
            } else {
                b = zero_outside(b, k0 + b_k, inner);
            }
        }
        if A_ALONG_M {
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                tile_a[to_along * 4u + c] = a[c];
            }
        } else {
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                tile_a[(to_across + c * VECTORS) * 4u + across_c] = a[c];
            }
        }
        if B_ALONG_N {
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                tile_b[to_along * 4u + c] = b[c];
            }
        } else {
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                tile_b[(to_across + c * VECTORS) * 4u + across_c] = b[c];
            }
        }
        workgroupBarrier();
        // The loads of the next step overlap with this step's arithmetic. After the last step they
        // repeat its end.
        next_a = load_a(t, a_row, k0 + TILE_K + a_k, last);
        next_b = load_b(t, k0 + TILE_K + b_k, b_col, last);
        // The loops over k are not marked as unrolled. Drivers would then load ahead, into more
        // registers. RADV does so even if these steps are in a separate function.
        for (var k4 = 0u; k4 < VECTORS_K; k4++) {
            for (var k = 0u; k < 4u; k++) {
                let o = k4 * (4u * VECTORS + SHIFT) + k * VECTORS;
                /* unrolled */ for (var m = 0u; m < LANE_TILE / 4u; m++) {
                    let a = a_four(o + m * 16u + y);
                    /* unrolled */ for (var n = 0u; n < LANE_TILE / 4u; n++) {
                        let b = b_four(o + n * 16u + x);
                        let s = m * LANE_TILE + n * 4u;
                        acc[s] = fma(vec4<f32>(a.x), b, acc[s]);
                        acc[s + 1u] = fma(vec4<f32>(a.y), b, acc[s + 1u]);
                        acc[s + 2u] = fma(vec4<f32>(a.z), b, acc[s + 2u]);
                        acc[s + 3u] = fma(vec4<f32>(a.w), b, acc[s + 3u]);
                    }
                }
            }
        }
        workgroupBarrier();
    }
    store_sums(t, row0, col0, x, y);
}
