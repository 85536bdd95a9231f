// The gradients of queries and the score vector, of keys, or of values. The kernel reads the pairs
// that additive_pairs.wgsl writes.
//
//   d_q[i] = v ∘ Σⱼ d_score[i, j] · (1 − tanh²(q[i] + k[j]))
//   d_v = Σᵢⱼ d_score[i, j] · tanh(q[i] + k[j])
//   d_k[j] = Σₕ v ∘ Σᵢ d_score[i, j] · (1 − tanh²(q[i] + k[j]))   h: the heads of the group
//   d_value[j] = Σₕ Σᵢ weight[i, j] · d_out[i]   h: the heads of the group
//
// for queries   own, gradient: q, d_q [batch, heads, q_len, hidden]   others: k
// for keys      own, gradient: k, d_k [batch, kv_heads, kv_len, hidden]   others: q
// for values    gradient: d_v   others: d_out [batch, heads, q_len, value_dim]
// pairs [batch, heads, q_len, kv_len]: d_score, or weights   parts [heads or 1, hidden, parts], f32
//
// A part is the sum of d_v over the rows of a workgroup; part_sums.wgsl adds the parts. An
// invocation computes 4 · VECTORS channels of a row of `own`. It reads the rows of `others` in
// order: the same bits on every run. A pair whose factor is 0 adds 0, whatever its tensors hold.
// ROW_LANES invocations of a workgroup have neighbouring rows. The rest of the workgroup has other
// channels of these rows.
//
// Constants: OF_QUERIES, OF_KEYS (neither for values); HAS_GRADIENT if the gradient is wanted,
// HAS_PARTS if d_v is. WORKGROUP, ROW_LANES, VECTORS; `STORE_IN_FOURS`.
//
// Bindings (declared by the host): own and score_vector, except for values. Then others, pairs,
// gradient and parts as wanted. For queries also the mask tensors that bound the range of keys.
// Work: a tanh and three or five multiply-adds for a pair and channel, one for values. Bytes:
// others and pairs once for each 4 · VECTORS channels of a workgroup's rows.

// The registers of an invocation: its channels of the row, and three sums. They are the gradient,
// the part of the vector, and the head's sum before the factor of the vector.
var<private> own_vectors: array<vec4<f32>, VECTORS>;
var<private> sums: array<vec4<f32>, VECTORS>;
var<private> vector_sums: array<vec4<f32>, VECTORS>;
var<private> head_sums: array<vec4<f32>, VECTORS>;

// Each invocation's vec4 of the sums of parts.
var<workgroup> lanes: array<vec4<f32>, WORKGROUP>;

// Adds a pair of query i and another row, for channels from d0 on. `head` is the head of that row.
fn add_pair(b: u32, head: u32, other: u32, d0: u32, factor: f32) {
    let gives = (bitcast<u32>(factor) & 0x7fffffffu) != 0u;
    let row = view_at(p.others, b, head, other, 0u);
    /* unrolled */ for (var n = 0u; n < VECTORS; n++) {
        let d = min(d0 + n * 4u, (p.channels - 1u) & ~3u);
        let x = others_at4(row + d * p.others.strides.w, p.others.strides.w, p.channels - d);
        if OF_QUERIES || OF_KEYS {
            let t = tanh4(own_vectors[n] + x);
            head_sums[n] += select(vec4<f32>(), factor * ((1.0 - t) * (1.0 + t)), gives);
            if HAS_PARTS {
                vector_sums[n] += select(vec4<f32>(), factor * t, gives);
            }
        } else {
            head_sums[n] += select(vec4<f32>(), factor * x, gives);
        }
    }
}

// Adds the sums of head h.
fn end_head(h: u32, d0: u32) {
    /* unrolled */ for (var n = 0u; n < VECTORS; n++) {
        if OF_QUERIES || OF_KEYS {
            let d = min(d0 + n * 4u, (p.channels - 1u) & ~3u);
            let o = view_at(p.score_vector, 0u, h, 0u, d);
            sums[n] += head_sums[n] * score_vector_at4(o, p.score_vector.strides.w, p.channels - d);
        } else {
            sums[n] += head_sums[n];
        }
        head_sums[n] = vec4<f32>();
    }
}

// Stores up to four channels of the gradient of the row.
fn store_own(o: u32, d: u32, sum: vec4<f32>) {
    var x = sum;
    if STORE_IN_FOURS {
        if p.accumulates != 0u {
            x += gradient_at4(o, 1u, 4u);
        }
        gradient_store4(o, x);
    } else {
        for (var c = 0u; c < min(4u, p.channels - d); c++) {
            var y = component(x, c);
            if p.accumulates != 0u {
                y += gradient_at(o + c * p.gradient.strides.w);
            }
            gradient_store(o + c * p.gradient.strides.w, y);
        }
    }
}

// Stores the sum over the workgroup's rows of four channels of the vector, from d on. `part` is the
// index of the part.
fn store_part(head: u32, part: u32, d: u32, row_lane: u32, lane: u32, x: vec4<f32>) {
    lanes[lane] = x;
    workgroupBarrier();
    if row_lane == 0u {
        var sum = vec4<f32>();
        for (var n = 0u; n < ROW_LANES; n++) {
            sum += lanes[lane + n];
        }
        for (var c = 0u; c < 4u; c++) {
            if d + c < p.channels {
                parts_store((head * p.channels + d + c) * p.part_count + part, component(sum, c));
            }
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row_lane = lane % ROW_LANES;
    let own_heads = select(p.kv_heads, p.heads, OF_QUERIES);
    let b = p.first.x + group.z / own_heads;
    let head = group.z % own_heads;
    let first_own = select(p.first.z, p.first.y, OF_QUERIES);
    let end_own = select(p.end.z, p.end.y, OF_QUERIES);
    let row0 = first_own + group.x * ROW_LANES;
    let last_row = min(row0 + ROW_LANES, end_own) - 1u;
    let row = min(row0 + row_lane, last_row);
    let d0 = (group.y * (WORKGROUP / ROW_LANES) + lane / ROW_LANES) * VECTORS * 4u;
    /* unrolled */ for (var n = 0u; n < VECTORS; n++) {
        sums[n] = vec4<f32>();
        vector_sums[n] = vec4<f32>();
        head_sums[n] = vec4<f32>();
        if OF_QUERIES || OF_KEYS {
            let d = min(d0 + n * 4u, (p.channels - 1u) & ~3u);
            own_vectors[n] = own_at4(view_at(p.own, b, head, row, d), p.own.strides.w, p.channels - d);
        }
    }
    if OF_QUERIES {
        let keys = key_range(b, head, row0, last_row);
        let from_row = view_at(p.pairs, b, head, row, 0u);
        for (var j = keys.x; j < keys.y; j++) {
            add_pair(b, head / p.group, j, d0, pairs_at(from_row + j * p.pairs.strides.w));
        }
        end_head(head, d0);
    } else {
        for (var n = 0u; n < p.group; n++) {
            let h = head * p.group + n;
            let from_row = view_at(p.pairs, b, h, 0u, row);
            for (var i = p.first.y; i < p.end.y; i++) {
                add_pair(b, h, i, d0, pairs_at(from_row + i * p.pairs.strides.z));
            }
            end_head(h, d0);
        }
    }
    let used = row0 + row_lane <= last_row;
    if HAS_PARTS {
        let one_vector = p.vector_heads == 1u;
        let tile = row0 / ROW_LANES;
        let tiles = (p.mask.q_len + ROW_LANES - 1u) / ROW_LANES;
        let part = select(b, b * p.heads + head, one_vector) * tiles + tile;
        /* unrolled */ for (var n = 0u; n < VECTORS; n++) {
            store_part(select(head, 0u, one_vector), part, d0 + n * 4u, row_lane, lane, select(vec4<f32>(), vector_sums[n], used));
        }
    }
    if HAS_GRADIENT && used {
        /* unrolled */ for (var n = 0u; n < VECTORS; n++) {
            let d = d0 + n * 4u;
            if d < p.channels {
                store_own(view_at(p.gradient, b, head, row, d), d, sums[n]);
            }
        }
    }
}
