// The gradients of decays, one for each row of a head. The gradient is the sum of the products that
// have the decay as a factor. There are four kinds:
//
// - the row or a later row with an earlier key;
// - the row or a later row with the state before the chunk;
// - an earlier key with the gradient of the state after the chunk;
// - both states.
//
// Nothing is subtracted, so gradients of strong decays keep their digits.
//
// d_decay [batch, value_heads, length, 1]
//
// memory, rows of [features]: prefix_queries, prefix_keys, suffix_keys. Then d_queries, d_keys and
// d_suffix_keys, through the states only. d_ends [features] of a chunk.
//
// memory, rows of [chunk_len] at p.scores: scores times their gradients. Delta rules have a second
// array behind it. In the first, each becomes the sum of the pairs before it.
//
// Bindings (declared by the host): chunks, memory, d_decay. Floors: 3 · features + chunk_len
// multiply-adds a row; 24 · features + 12 · chunk_len bytes read or written. A workgroup computes a
// chunk.

var<workgroup> ends: array<f32, WORKGROUP>;
// The products of each row with the state before the chunk.
var<workgroup> entered: array<f32, WORKGROUP>;
// The products of each key with the gradient of the state after the chunk.
var<workgroup> left: array<f32, WORKGROUP>;

fn row_dot(a: u32, b: u32) -> f32 {
    var sum = vec4<f32>();
    for (var f = 0u; f < p.features; f += 4u) {
        sum += at4(a + f) * at4(b + f);
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let chunk = chunk_of(z, group.y);
    let row = row_at(z, group.y);
    var sum = 0.0;
    if chunk.count > 0u {
        for (var f = index; f < p.features; f += WORKGROUP) {
            sum += memory_at(p.d_ends + (z * p.slots + group.y) * p.features + f);
        }
    }
    ends[index] = sum;
    if index < p.chunk_len {
        let at = (row + index) * p.features;
        sum = row_dot(p.prefix_queries + at, p.d_queries + at);
        if IS_DELTA {
            sum += row_dot(p.prefix_keys + at, p.d_keys + at);
        }
        entered[index] = sum;
        left[index] = row_dot(p.suffix_keys + at, p.d_suffix_keys + at);
        let pairs = p.scores + (row + index) * p.chunk_len;
        sum = 0.0;
        for (var s = 0u; s <= index; s++) {
            var pair = memory_at(pairs + s);
            if IS_DELTA {
                pair += memory_at(pairs + p.second_result + s);
            }
            memory_store(pairs + s, sum);
            sum += pair;
        }
    }
    workgroupBarrier();
    storageBarrier();
    if index >= chunk.rows {
        return;
    }
    sum = 0.0;
    for (var n = 0u; n < WORKGROUP; n++) {
        sum += ends[n];
    }
    for (var s = 0u; s < index; s++) {
        sum += left[s];
    }
    for (var t = index; t < p.chunk_len; t++) {
        sum += entered[t] + memory_at(p.scores + (row + t) * p.chunk_len + index);
    }
    let to = view_at(p.d_decay, z / p.value_heads, z % p.value_heads, chunk.first + index, 0u);
    var gradient = select(0.0, sum, index < chunk.count);
    if p.accumulates != 0u {
        gradient += d_decay_at(to);
    }
    d_decay_store(to, gradient);
}
