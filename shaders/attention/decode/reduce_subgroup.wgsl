// Adds the sums of KEY_LANES lanes by shuffles. Subgroups have at least KEY_LANES invocations. In
// each step a lane retains half of its vectors and passes on the other half. A lane with one vector
// left adds it to the same vector of the other lanes. Lane g * KEY_LANES + j % KEY_LANES owns
// vector j of group g.
//
// Needs: KEY_LANES, OWN, SCORES, WORKGROUP; decode, own_scores, scores.
// Gives: REDUCE_SIZE; main, owned_first, owned_group, reduce.

const REDUCE_SIZE: u32 = 0u;
// KEY_LANES = 2 to the power of LEVELS.
const LEVELS: u32 = select(0u, select(1u, select(2u, select(3u, 4u, KEY_LANES > 8u), KEY_LANES > 4u), KEY_LANES > 2u), KEY_LANES > 1u);

const_assert KEY_LANES == 1u << LEVELS;

fn owned_first(lane: u32) -> u32 {
    return lane % KEY_LANES;
}

fn owned_group(lane: u32) -> u32 {
    return lane / KEY_LANES;
}

fn reduce(lane: u32) {
    /* unrolled */ for (var level = 0u; level < LEVELS; level++) {
        let odd = (lane & (1u << level)) != 0u;
        if (SCORES >> level) > 1u {
            /* unrolled */ for (var n = 0u; n < (SCORES >> (level + 1u)); n++) {
                let a = scores[2u * n];
                let c = scores[2u * n + 1u];
                scores[n] = select(a, c, odd) + subgroupShuffleXor(select(c, a, odd), 1u << level);
            }
        } else {
            scores[0] += subgroupShuffleXor(scores[0], 1u << level);
        }
    }
    /* unrolled */ for (var n = 0u; n < OWN; n++) {
        own_scores[n] = scores[n];
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_size: u32, @builtin(subgroup_invocation_id) invocation: u32) {
    decode(id, subgroup * subgroup_size + invocation);
}
