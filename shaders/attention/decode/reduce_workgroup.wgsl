// Adds the sums of KEY_LANES lanes through workgroup memory. Lane j % KEY_LANES * ALL_GROUPS + g
// owns vector j of group g.
//
// Needs: ALL_GROUPS, KEY_LANES, OWN, ROUND, SCORES, WORKGROUP; decode, own_scores, scores, tile.
// Gives: REDUCE_SIZE; main, owned_first, owned_group, reduce.

const ROUNDS: u32 = (SCORES + ROUND - 1u) / ROUND;
// Eight neighbours store to different banks, and load from different banks: they differ in the
// group.
const REDUCE_LANE: u32 = ALL_GROUPS + max(1u, 8u / KEY_LANES);
const REDUCE_STEP: u32 = KEY_LANES * REDUCE_LANE;
const REDUCE_SIZE: u32 = select(ROUND * REDUCE_STEP, 0u, KEY_LANES == 1u);

const_assert SCORES % ROUND == 0u && (ROUND % KEY_LANES == 0u || KEY_LANES % ROUND == 0u);

fn owned_first(lane: u32) -> u32 {
    return lane / ALL_GROUPS;
}

fn owned_group(lane: u32) -> u32 {
    return lane % ALL_GROUPS;
}

fn reduce(lane: u32) {
    if KEY_LANES == 1u {
        /* unrolled */ for (var n = 0u; n < OWN; n++) {
            own_scores[n] = scores[n];
        }
        return;
    }
    let to = lane % KEY_LANES * REDUCE_LANE + lane / KEY_LANES;
    let first = owned_first(lane);
    // Otherwise the last tile's scores would stay alive until here, for lanes that own none.
    /* unrolled */ for (var n = 0u; n < OWN; n++) {
        own_scores[n] = vec4<f32>();
    }
    /* unrolled */ for (var round = 0u; round < ROUNDS; round++) {
        if round != 0u {
            workgroupBarrier();
        }
        /* unrolled */ for (var n = 0u; n < ROUND; n++) {
            tile[n * REDUCE_STEP + to] = scores[round * ROUND + n];
        }
        workgroupBarrier();
        /* unrolled */ for (var n = 0u; n < OWN; n++) {
            let j = n * KEY_LANES + first;
            if j / ROUND == round {
                let at = j % ROUND * REDUCE_STEP + owned_group(lane);
                var sum = tile[at];
                for (var m = 1u; m < KEY_LANES; m++) {
                    sum += tile[at + m * REDUCE_LANE];
                }
                own_scores[n] = sum;
            }
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    decode(id, lane);
}
