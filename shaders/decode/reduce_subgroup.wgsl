// The sums of KEY_LANES lanes, by shuffles: subgroups have at least KEY_LANES invocations. In every step a
// lane keeps half of its vectors and gives the other half away; who has one left adds it up with the others
// who have it. Vector j of group g becomes lane g * KEY_LANES + j % KEY_LANES's.

const PARTIAL_SIZE: u32 = 0u;

fn owned_first(lane: u32) -> u32 {
    return lane % KEY_LANES;
}

fn owned_group(lane: u32) -> u32 {
    return lane / KEY_LANES;
}

fn reduce(lane: u32, s: ptr<function, array<vec4<f32>, SUMS>>, own: ptr<function, array<vec4<f32>, OWN>>) {
    var left = SUMS;
    for (var step = 1u; step < KEY_LANES; step *= 2u) {
        let odd = (lane & step) != 0u;
        if left > 1u {
            left /= 2u;
            for (var n = 0u; n < SUMS / 2u; n++) {
                if n < left {
                    let a = (*s)[2u * n];
                    let c = (*s)[2u * n + 1u];
                    (*s)[n] = select(a, c, odd) + subgroupShuffleXor(select(c, a, odd), step);
                }
            }
        } else {
            (*s)[0] += subgroupShuffleXor((*s)[0], step);
        }
    }
    for (var n = 0u; n < OWN; n++) {
        (*own)[n] = (*s)[n];
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32, @builtin(subgroup_invocation_id) invocation: u32) {
    decode(id, subgroup * subgroup_size + invocation);
}
