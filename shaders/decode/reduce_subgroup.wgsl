// The sums of KEY_LANES lanes, by shuffles: subgroups have at least KEY_LANES invocations. In every step a
// lane keeps half of its vectors and gives the other half away; who has one left adds it up with the others
// who have it. Vector j of group g becomes lane g * KEY_LANES + j % KEY_LANES's.
//
// Needs: KEY_LANES, OWN, SCORES, WORKGROUP; decode.
// Gives: REDUCE_SIZE; main, owned_first, owned_group, reduce.

const REDUCE_SIZE: u32 = 0u;

fn owned_first(lane: u32) -> u32 {
    return lane % KEY_LANES;
}

fn owned_group(lane: u32) -> u32 {
    return lane / KEY_LANES;
}

fn reduce(lane: u32, scores: ptr<function, array<vec4<f32>, SCORES>>, own_scores: ptr<function, array<vec4<f32>, OWN>>) {
    var left = SCORES;
    for (var step = 1u; step < KEY_LANES; step *= 2u) {
        let odd = (lane & step) != 0u;
        if left > 1u {
            left /= 2u;
            for (var n = 0u; n < SCORES / 2u; n++) {
                if n < left {
                    let a = (*scores)[2u * n];
                    let c = (*scores)[2u * n + 1u];
                    (*scores)[n] = select(a, c, odd) + subgroupShuffleXor(select(c, a, odd), step);
                }
            }
        } else {
            (*scores)[0] += subgroupShuffleXor((*scores)[0], step);
        }
    }
    for (var n = 0u; n < OWN; n++) {
        (*own_scores)[n] = (*scores)[n];
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32, @builtin(subgroup_invocation_id) invocation: u32) {
    decode(id, subgroup * subgroup_size + invocation);
}
