// The logarithms of the scales of states: before each chunk, and after it. The scale is the largest
// logarithmic weight so far, as in an online softmax. Without causality it is the largest of the
// whole sequence.
//
// chunks [batch, kv_heads, slots, 8]: read and written
// state_log [sequences, kv_heads, 1, 1]: read and written
//
// Bindings (declared by the host): chunks, then state_log if there is one. The kernel reads and
// writes the entry of a chunk once or twice. An invocation computes a head of a batch entry.

fn entry(slot: u32, z: u32) -> u32 {
    return 8u * (z * p.all_slots + slot);
}

@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) group: vec3<u32>) {
    let z = group.z * p.kv_heads + group.y;
    begin_logs(group.z, group.y);
    var slot = 0u;
    // One pass of this loop for each sequence.
    for (var s = 0u; s <= p.sequences; s++) {
        if slot >= p.all_slots {
            break;
        }
        let begin = slot;
        let sequence = chunks_at(entry(slot, z) + 2u);
        let first = first_log(sequence, group.y);
        var total = first;
        for (; slot < p.all_slots; slot++) {
            let at = entry(slot, z);
            if chunks_at(at + 1u) > 0u {
                if chunks_at(at + 2u) != sequence {
                    break;
                }
                chunks_store(at + 5u, bitcast<u32>(total));
                total = max(total, bitcast<f32>(chunks_at(at + 4u)));
                chunks_store(at + 6u, bitcast<u32>(total));
            }
        }
        if !IS_CAUSAL {
            for (var n = begin; n < slot; n++) {
                chunks_store(entry(n, z) + 5u, bitcast<u32>(select(total, first, n == begin)));
                chunks_store(entry(n, z) + 6u, bitcast<u32>(total));
            }
        }
        keep_log(sequence, group.y, total);
    }
}
