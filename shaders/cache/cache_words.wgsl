// Copies single words into the sequence table of a cache, or from it.
//
// moves: pairs of a word in `to` and a word in `source`.
//
// Bindings (declared by the host): to, source, moves.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = group.x * 64u + lane;
    if n < p.count {
        let pair = 2u * (p.first + n);
        to_store(min(moves_at(pair), p.to_last), source_at(min(moves_at(pair + 1u), p.source_last)));
    }
}
