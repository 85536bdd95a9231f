// scores = v · tanh(q + k). Tiles that no query may see are not written. (Bahdanau et al. 2014,
// "Neural machine translation by jointly learning to align and translate". It is "concat" in Luong
// et al. 2015.)
//
// q [batch, heads, q_len, hidden]   k [batch, kv_heads, kv_len, hidden]
// score_vector [1, heads or 1, 1, hidden]
// scores [batch, heads, q_len, kv_len], f32
//
// KEY_LANES invocations share a query. Each has KEYS keys, KEY_LANES apart.
//
// Constants: WORKGROUP; KEY_LANES; KEYS
//
// Bindings (declared by the host): q, k, score_vector, scores, and the mask tensors that bound the
// range of keys.
// Work: hidden tanh and multiply-adds per score. Bytes: 4 per score written.

const ROWS: u32 = WORKGROUP / KEY_LANES;

// The registers of an invocation: its scores, and the starts of its keys.
var<private> sums: array<f32, KEYS>;
var<private> k_rows: array<u32, KEYS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = p.first.x + group.z / p.heads;
    let h = group.z % p.heads;
    let row0 = p.first.y + group.y * ROWS;
    let block = p.first.z + group.x * KEYS * KEY_LANES;
    let keys = key_range(b, h, row0, min(row0 + ROWS, p.end.y) - 1u);
    let i = row0 + lane / KEY_LANES;
    if i >= p.end.y || block >= keys.y || block + KEYS * KEY_LANES <= keys.x {
        return;
    }
    let j0 = block + lane % KEY_LANES;
    let q = view_at(p.q, b, h, i, 0u);
    let v = view_at(p.score_vector, 0u, h, 0u, 0u);
    /* unrolled */ for (var c = 0u; c < KEYS; c++) {
        sums[c] = 0.0;
        k_rows[c] = view_at(p.k, b, h / p.group, min(j0 + c * KEY_LANES, p.end.z - 1u), 0u);
    }
    for (var d = 0u; d < p.hidden; d += 4u) {
        let x = q_at4(q + d * p.q.strides.w, p.q.strides.w, p.hidden - d);
        let w = score_vector_at4(v + d * p.score_vector.strides.w, p.score_vector.strides.w, p.hidden - d);
        /* unrolled */ for (var c = 0u; c < KEYS; c++) {
            sums[c] += dot_tanh(w, x + k_at4(k_rows[c] + d * p.k.strides.w, p.k.strides.w, p.hidden - d));
        }
    }
    /* unrolled */ for (var c = 0u; c < KEYS; c++) {
        let j = j0 + c * KEY_LANES;
        if j < p.end.z {
            scores_store(view_at(p.scores, b, h, i, j), sums[c]);
        }
    }
}
