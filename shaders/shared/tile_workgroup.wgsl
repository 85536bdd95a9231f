// C = A · B by tiles, for GPUs: a workgroup of 16 × 16 invocations computes TILE_M × TILE_N of C, its
// tiles of A and B staged in workgroup memory, each invocation holding REG_M × REG_N sums.
//
// Constants: TILE_M, TILE_N (multiples of 64), TILE_K (multiple of 4), B_ALONG_N.
// The stage gives: tile_of, tile_needed, tile_inner, tile_a4, tile_b4, tile_put4 (see tile_uniform.wgsl).
//
// Floors per TILE_K step and invocation: REG_M · REG_N · TILE_K multiply-adds against
// (REG_M + REG_N) · TILE_K / 4 vector loads from workgroup memory.

const REG_M: u32 = TILE_M / 16u;
const REG_N: u32 = TILE_N / 16u;
// Rows are padded by one vector, so that the transposing stores spread over the banks.
const PITCH_M: u32 = TILE_M / 4u + 1u;
const PITCH_N: u32 = TILE_N / 4u + 1u;
const VECTORS_K: u32 = TILE_K / 4u;
const LOADS_M: u32 = TILE_M * VECTORS_K / 256u;
const LOADS_N: u32 = TILE_N * VECTORS_K / 256u;

var<workgroup> tile_a: array<vec4<f32>, TILE_K * PITCH_M>;
var<workgroup> tile_b: array<vec4<f32>, TILE_K * PITCH_N>;

// Elements at or past `end` are zero, whatever the memory holds there.
fn below(v: vec4<f32>, index: u32, start: u32, end: u32) -> vec4<f32> {
    let k = vec4<u32>(index) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<f32>(), v, (k < vec4<u32>(end)) & (k >= vec4<u32>(start)));
}

fn load_a(t: Tile, row0: u32, k0: u32, inner: vec2<u32>, e: u32) -> vec4<f32> {
    let row = row0 + e / VECTORS_K;
    let k = k0 + (e % VECTORS_K) * 4u;
    var v = vec4<f32>();
    if row < t.rows && k < inner.y {
        v = below(tile_a4(t, row, k), k, inner.x, inner.y);
    }
    return v;
}

fn load_b(t: Tile, col0: u32, k0: u32, inner: vec2<u32>, e: u32) -> vec4<f32> {
    var v = vec4<f32>();
    if B_ALONG_N {
        let col = col0 + (e % (TILE_N / 4u)) * 4u;
        let k = k0 + e / (TILE_N / 4u);
        if col < t.cols && k >= inner.x && k < inner.y {
            v = tile_b4(t, k, col);
        }
    } else {
        let col = col0 + e / VECTORS_K;
        let k = k0 + (e % VECTORS_K) * 4u;
        if col < t.cols && k < inner.y {
            v = below(tile_b4(t, k, col), k, inner.x, inner.y);
        }
    }
    return v;
}

fn stage_a(e: u32, v: vec4<f32>) {
    let row = e / VECTORS_K;
    let k = (e % VECTORS_K) * 4u;
    for (var c = 0u; c < 4u; c++) {
        tile_a[(k + c) * PITCH_M + row / 4u][row % 4u] = v[c];
    }
}

fn stage_b(e: u32, v: vec4<f32>) {
    if B_ALONG_N {
        tile_b[(e / (TILE_N / 4u)) * PITCH_N + e % (TILE_N / 4u)] = v;
    } else {
        let col = e / VECTORS_K;
        let k = (e % VECTORS_K) * 4u;
        for (var c = 0u; c < 4u; c++) {
            tile_b[(k + c) * PITCH_N + col / 4u][col % 4u] = v[c];
        }
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = tile_of(group.z);
    let row0 = group.x * TILE_M;
    let col0 = group.y * TILE_N;
    if row0 >= t.rows || col0 >= t.cols {
        return;
    }
    let rows = min(TILE_M, t.rows - row0);
    if !tile_needed(t, row0, rows, col0, min(TILE_N, t.cols - col0)) {
        return;
    }
    let inner = tile_inner(t, row0, rows);
    let x = lane % 16u;
    let y = lane / 16u;

    var sums: array<vec4<f32>, REG_M * REG_N / 4u>;
    for (var s = 0u; s < REG_M * REG_N / 4u; s++) {
        sums[s] = vec4<f32>();
    }
    var next_a: array<vec4<f32>, LOADS_M>;
    var next_b: array<vec4<f32>, LOADS_N>;
    let first = inner.x & ~3u;
    for (var n = 0u; n < LOADS_M; n++) {
        next_a[n] = load_a(t, row0, first, inner, lane + n * 256u);
    }
    for (var n = 0u; n < LOADS_N; n++) {
        next_b[n] = load_b(t, col0, first, inner, lane + n * 256u);
    }
    for (var k0 = first; k0 < inner.y; k0 += TILE_K) {
        for (var n = 0u; n < LOADS_M; n++) {
            stage_a(lane + n * 256u, next_a[n]);
        }
        for (var n = 0u; n < LOADS_N; n++) {
            stage_b(lane + n * 256u, next_b[n]);
        }
        workgroupBarrier();
        // The next step's loads travel while this one computes.
        for (var n = 0u; n < LOADS_M; n++) {
            next_a[n] = load_a(t, row0, k0 + TILE_K, inner, lane + n * 256u);
        }
        for (var n = 0u; n < LOADS_N; n++) {
            next_b[n] = load_b(t, col0, k0 + TILE_K, inner, lane + n * 256u);
        }
        for (var k = 0u; k < TILE_K; k++) {
            for (var m = 0u; m < REG_M / 4u; m++) {
                let a = tile_a[k * PITCH_M + m * 16u + y];
                for (var n = 0u; n < REG_N / 4u; n++) {
                    let b = tile_b[k * PITCH_N + n * 16u + x];
                    let s = (m * (REG_N / 4u) + n) * 4u;
                    sums[s] = fma(vec4<f32>(a.x), b, sums[s]);
                    sums[s + 1u] = fma(vec4<f32>(a.y), b, sums[s + 1u]);
                    sums[s + 2u] = fma(vec4<f32>(a.z), b, sums[s + 2u]);
                    sums[s + 3u] = fma(vec4<f32>(a.w), b, sums[s + 3u]);
                }
            }
        }
        workgroupBarrier();
    }
    for (var m = 0u; m < REG_M / 4u; m++) {
        for (var n = 0u; n < REG_N / 4u; n++) {
            let col = col0 + (n * 16u + x) * 4u;
            for (var c = 0u; c < 4u; c++) {
                let row = row0 + (m * 16u + y) * 4u + c;
                if row < t.rows && col < t.cols {
                    tile_put4(t, row, col, sums[(m * (REG_N / 4u) + n) * 4u + c]);
                }
            }
        }
    }
}
