//! Tiles of the CPU variant of the fused kernel.

use crate::device::tuned::Pick;

/// Bytes of code of the kernel's loop, counted in a driver's AVX2 code. Each vec4 of k and v takes
/// 27 bytes to load, and 12 per query to use. Each vector of out takes 84 bytes per query to scale.
fn cpu_code_bytes(queries: u32, keys: u32, head_vectors: usize, value_vectors: usize) -> usize {
    let (queries, keys) = (queries as usize, keys as usize);
    4 * keys * (head_vectors + value_vectors) * (27 + 12 * queries) + 84 * queries * value_vectors
}

/// The block that an invocation computes at a time: `queries` against `keys`, and `value_vectors`
/// of out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuBlock {
    pub queries: u32,
    pub keys: u32,
    pub value_vectors: u32,
}

/// Queries and keys of a block, and the largest number of bytes of code.
type Choice = (u32, u32, usize);

/// Returns the blocks for vectors of `lanes` lanes, the best first. The best blocks reuse loaded
/// data most often, while their code leaves room in an instruction cache of 32 KiB. The second list
/// is for calls whose rows do not exceed the lanes: blocks of one query.
fn choices(lanes: u32) -> (&'static [Choice], &'static [Choice]) {
    match lanes {
        // The same code does twice the work, with twice as many registers. Two keys of a block are
        // worth the space.
        16 => (
            &[(4, 2, 22_000), (3, 2, 34_000), (2, 2, 50_000), (2, 1, 40_000)],
            &[(1, 2, 25_000), (1, 1, 34_000)],
        ),
        // Measured for 8 lanes. Beyond about 25 KB the code runs at half the speed. The first two
        // blocks sometimes run slowly at a size at which other blocks run well.
        _ => (
            &[(4, 4, 22_000), (4, 2, 22_000), (3, 2, 25_000), (2, 2, 25_000), (3, 1, 25_000), (2, 1, 25_000)],
            &[(1, 2, 20_000), (1, 1, 25_000)],
        ),
    }
}

/// Returns the block with the most queries per invocation for which the code fits.
pub(super) fn cpu_block(lanes: u32, rows: usize, head_vectors: usize, value_vectors: usize) -> CpuBlock {
    let (many, one) = choices(lanes);
    let full = lanes as usize;
    let fitting = |slice: usize| {
        let fits =
            |(queries, keys, room): &Choice| cpu_code_bytes(*queries, *keys, head_vectors, slice) <= *room;
        // No query of an invocation may be past the last row of the call.
        let mut wanted = many.iter().filter(|(queries, ..)| rows > full * (*queries as usize - 1));
        if rows > full { wanted.find(|choice| fits(choice)) } else { one.iter().find(|choice| fits(choice)) }
    };
    // Every slice scores all keys again, so there are at most two slices. If two do not fit, one
    // slice computes all channels at any speed.
    let halves = value_vectors.div_ceil(2);
    let (slice, &(queries, keys, _)) = fitting(value_vectors)
        .map(|choice| (value_vectors, choice))
        .or_else(|| fitting(halves).map(|choice| (halves, choice)))
        .unwrap_or((value_vectors, &(1, 1, 0)));
    CpuBlock { queries, keys, value_vectors: slice as u32 }
}

/// The bytes of code beyond which no block is worth measuring. Such a block would run at half the
/// speed, and compile for seconds.
fn most_code(lanes: u32) -> usize {
    if lanes == 16 { 60_000 } else { 30_000 }
}

/// Returns the block of `pick`, if `pick` names one that a call with so many rows can have.
pub(super) fn picked_cpu_block(
    pick: &Pick,
    lanes: u32,
    rows: usize,
    head_vectors: usize,
    value_vectors: usize,
) -> Option<CpuBlock> {
    let Pick { rows: picked, keys, .. } = *pick;
    let queries = picked / lanes;
    let named = picked.is_multiple_of(lanes) && (1..=4).contains(&queries) && [1, 2, 4].contains(&keys);
    // No query of an invocation may be past the last row of the call.
    if !named || (queries - 1) as usize * lanes as usize >= rows {
        return None;
    }
    let fits = |slice: &usize| cpu_code_bytes(queries, keys, head_vectors, *slice) <= most_code(lanes);
    let slice = [value_vectors, value_vectors.div_ceil(2)].into_iter().find(fits)?;
    Some(CpuBlock { queries, keys, value_vectors: slice as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_room_for_their_code() {
        // Lanes, rows, channels; then queries, keys, vectors of out.
        let expected = [
            ([4, 512, 64], [3, 2, 16]),
            ([8, 512, 32], [4, 4, 8]),
            ([8, 512, 48], [4, 2, 12]),
            ([8, 512, 64], [3, 2, 16]),
            ([8, 512, 128], [3, 1, 32]),
            ([8, 512, 256], [2, 1, 32]),
            ([16, 512, 32], [4, 2, 8]),
            ([16, 512, 64], [3, 2, 16]),
            ([16, 512, 128], [2, 2, 32]),
            ([16, 512, 192], [2, 2, 48]),
            ([16, 512, 256], [2, 1, 64]),
            // Few rows: as few idle lanes as possible.
            ([8, 1, 1], [1, 2, 1]),
            ([8, 1, 64], [1, 2, 16]),
            ([4, 4, 128], [1, 1, 32]),
            ([8, 4, 128], [1, 1, 32]),
            ([16, 4, 128], [1, 2, 32]),
            ([4, 9, 64], [3, 2, 16]),
            ([8, 9, 64], [2, 2, 16]),
            ([16, 9, 64], [1, 2, 16]),
        ];
        for ([lanes, rows, channels], [queries, keys, value_vectors]) in expected {
            let vectors = (channels as usize).div_ceil(4);
            let found = cpu_block(lanes, rows as usize, vectors, vectors);
            assert_eq!(found, CpuBlock { queries, keys, value_vectors }, "{lanes} {rows} {channels}");
        }
    }

    #[test]
    fn no_block_is_larger_than_its_room_or_its_call() {
        for (lanes, most) in [(4, 25_000), (8, 25_000), (16, 50_000)] {
            for rows in [1, 4, 5, 8, 9, 16, 17, 100] {
                for (head, value) in (1..160).flat_map(|head| (1..160).map(move |value| (head, value))) {
                    let block = cpu_block(lanes, rows, head, value);
                    let CpuBlock { queries, keys, value_vectors } = block;
                    let slice = value_vectors as usize;
                    assert!(((queries - 1) * lanes) < rows as u32, "{rows} {block:?}");
                    assert!(slice == value || slice == value.div_ceil(2), "{value} {block:?}");
                    let bytes = cpu_code_bytes(queries, keys, head, slice);
                    assert!(bytes <= most || (queries, keys) == (1, 1), "{head} {value} {bytes} {block:?}");
                }
            }
        }
    }
}
