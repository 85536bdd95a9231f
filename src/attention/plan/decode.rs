//! Tiles of the decode kernels: one or a few rows, in generation.

use std::fmt;

use crate::cache::storage::StorageKind;
use crate::device::registers::Registers;
use crate::device::{DeviceFacts, Family};
use crate::tensor::{DType, Shape};

/// The loads of keys and values, in vectors of four words.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Loads {
    /// Vectors of four channels in one load of a key, and of a value.
    pub vectors: [u32; 2],
    /// Loads of a key, and of a value.
    pub k: u32,
    pub v: u32,
    /// True if channels of keys or of values share scales.
    pub scaled: bool,
    /// True if unpacked keys have a bias.
    pub biased: bool,
}

/// Tiles of `decode/gpu.wgsl`, which describes them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DecodeGpu {
    pub loads: Loads,
    pub rows: u32,
    pub lane_rows: u32,
    pub workgroup: u32,
    pub key_lanes: u32,
    pub key_fours: u32,
    pub v_split: u32,
    pub round: u32,
    pub shared: bool,
    pub subgroups: bool,
    pub registers: Registers,
}

impl DecodeGpu {
    fn lanes(&self) -> u32 {
        self.workgroup / (self.rows / self.lane_rows)
    }

    /// Groups of four keys in a tile.
    fn units(&self) -> u32 {
        self.lanes() / self.key_lanes * self.key_fours
    }

    pub fn keys(&self) -> u32 {
        4 * self.units()
    }

    /// Columns of a value's words that a workgroup computes.
    fn columns(&self) -> u32 {
        (self.loads.v * self.v_split).min(self.lanes())
    }

    pub fn slices(&self) -> u32 {
        (self.loads.v * self.v_split).div_ceil(self.columns())
    }

    /// Bytes of workgroup memory, as the shader declares it.
    pub fn memory(&self) -> u32 {
        let DecodeGpu { loads, rows, lane_rows, workgroup, key_lanes, key_fours, round, .. } = *self;
        let words = rows * loads.k.div_ceil(key_lanes) * key_lanes;
        let none = self.subgroups || key_lanes == 1;
        let partial = round * key_lanes * (workgroup / key_lanes + (8 / key_lanes).max(1));
        let partial = if none { 0 } else { partial };
        let weights = self.units() * (rows | 1) + if self.shared { 0 } else { partial };
        let subsets = (self.lanes() / self.columns()).min(self.units());
        let zeros = if self.units().is_multiple_of(subsets) { 0 } else { rows };
        let tile = (weights.max(partial) + zeros).max(workgroup);
        let fold = key_lanes.min(lane_rows * key_fours) * (lane_rows / key_lanes).max(1) * workgroup
            / key_lanes
            / rows;
        let biases = if loads.biased { words } else { 1 };
        16 * (words * loads.vectors[0] + tile)
            + [rows * fold, rows, rows, rows, rows, 2 * rows, 1, biases]
                .map(words_in_vectors)
                .iter()
                .sum::<u32>()
    }
}

// Kernel names contain these, so they must be short.

impl fmt::Debug for Loads {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Loads { vectors: [k_vectors, v_vectors], k, v, scaled, biased } = self;
        write!(f, "{k_vectors}x{k}x")?;
        if k_vectors != v_vectors {
            write!(f, "{v_vectors}x")?;
        }
        let biased = if *scaled && !*biased { "u" } else { "" };
        write!(f, "{v}{}{biased}", if *scaled { "s" } else { "" })
    }
}

impl fmt::Debug for DecodeGpu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let DecodeGpu { loads, rows, lane_rows, workgroup, key_lanes, key_fours, v_split, round, .. } = self;
        write!(
            f,
            "{loads:?} rows={rows}x{lane_rows} lanes={workgroup}x{key_lanes} each={key_fours}x{v_split}x{round}"
        )?;
        write!(
            f,
            "{}{} registers={:?}",
            if self.shared { " shared" } else { "" },
            if self.subgroups { " subgroups" } else { "" },
            self.registers
        )
    }
}

impl fmt::Debug for DecodeCpu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let DecodeCpu { loads, lanes, rows, keys, step, chunk, gather } = self;
        write!(f, "{loads:?} rows={rows}x{lanes} keys={keys}x{step}x{chunk}")?;
        f.write_str(if *gather { " gather" } else { "" })
    }
}

/// Bytes of a variable of `words` words, aligned to a vector.
fn words_in_vectors(words: u32) -> u32 {
    (4 * words).next_multiple_of(16)
}

/// Tiles of `decode/cpu.wgsl`, which describes them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DecodeCpu {
    pub loads: Loads,
    /// Invocations of a workgroup.
    pub lanes: u32,
    pub rows: u32,
    pub keys: u32,
    pub step: u32,
    pub chunk: u32,
    /// True if each lane loads its words separately.
    pub gather: bool,
}

impl DecodeCpu {
    /// Bytes of workgroup memory, as the shader declares it.
    pub fn memory(&self) -> u32 {
        let DecodeCpu { loads, lanes, rows, chunk, .. } = *self;
        let [k_vectors, v_vectors] = loads.vectors;
        let spread = if lanes / loads.v > 1 { lanes * v_vectors } else { 1 };
        16 * (loads.k * k_vectors * rows + spread)
            + [chunk * rows, 2 * rows * lanes, 1].map(words_in_vectors).iter().sum::<u32>()
    }
}

/// The facts that tiles depend on besides dimensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeySource {
    /// The storage of keys, and of values.
    pub storages: [StorageKind; 2],
    /// True if they load as vectors of four words. This is so in a cache, and in aligned tensors.
    pub words: bool,
    /// True if the decode kernels can compute the call. They do not support block maps or dropout.
    pub simple: bool,
    /// F16 if queries, keys and values are all F16. BF16 if queries are BF16.
    pub operands: DType,
}

impl KeySource {
    /// Returns the loads of rows with the dimensions of `shape`.
    fn loads(&self, shape: &Shape) -> Loads {
        // Tensors are loaded as vectors of four channels.
        let vectors = self.storages.map(|storage| if self.words { storage.per_word() as u32 } else { 1 });
        let of = |dim: usize, vectors: u32| dim.div_ceil(4 * vectors as usize) as u32;
        Loads {
            vectors,
            k: of(shape.head_dim, vectors[0]),
            v: of(shape.value_dim, vectors[1]),
            scaled: self.words && self.storages.iter().any(|storage| storage.is_scaled()),
            biased: self.words && self.storages[0].is_biased(),
        }
    }
}

/// Returns tiles for few rows on GPUs. q, weights and sums of lanes must fit in workgroup memory.
/// Each row of an invocation must have 32 invocations. This excludes more than 8 rows of packed
/// numbers on [`Registers::Narrow`]. On [`Registers::Middle`] it excludes more than 8 rows of
/// numbers without a bias.
pub(super) fn decode_gpu(
    rows: usize,
    shape: &Shape,
    keys: &KeySource,
    device: &DeviceFacts,
) -> Option<DecodeGpu> {
    if rows > 16 || !keys.simple || device.lacks(Family::DecodeGpu) {
        return None;
    }
    let loads = keys.loads(shape);
    let rows = rows.next_power_of_two() as u32;
    // More rows' sums, or more channels of a word, need more registers than GPUs give without loss.
    let [most_rows, most_sums] = match (device.registers, loads.scaled) {
        (Registers::Wide, false) => [8, 8],
        (Registers::Wide, true) => [4, 8],
        (Registers::Middle, false) => [4, 8],
        (Registers::Middle, true) if loads.biased => [2, 4],
        // Numbers without a bias take more registers to unpack.
        (Registers::Middle, true) => [1, 2],
        (Registers::Narrow, false) => [2, 4],
        (Registers::Narrow, true) => [1, 2],
    };
    let lane_rows = rows.min(most_rows);
    // Lanes of a key: as few idle lanes as possible, then as many lanes as possible.
    let waste = |lanes: u32| loads.k.div_ceil(lanes) * lanes;
    let [narrowest, widest] = device.reducing_subgroups();
    let allowed = |lanes: u32| narrowest == 0 || lanes <= narrowest;
    let mut key_lanes =
        [8, 4, 2, 1].into_iter().filter(|n| *n >= loads.k.min(4)).min_by_key(|n| waste(*n)).unwrap_or(8);
    if loads.scaled && loads.k.is_multiple_of(16) && allowed(16) {
        key_lanes = 16;
    }
    let mut v_split = 1;
    let v_vectors = loads.vectors[1];
    while v_split < v_vectors && (v_vectors / v_split * lane_rows > most_sums || loads.v * v_split < 8) {
        v_split *= 2;
    }
    let halves = rows / lane_rows;
    let fours: &[u32] = if device.registers == Registers::Wide && lane_rows <= 2 { &[2, 1] } else { &[1] };
    let limit = device.workgroup_memory.min(16384);
    for workgroup in [128 * halves, 64 * halves, 32 * halves].into_iter().filter(|n| *n <= 256) {
        // Subgroups that are not full may number their invocations differently.
        let full = widest > 0 && workgroup.is_multiple_of(widest);
        let subgroups = full && narrowest >= key_lanes;
        for key_fours in fours {
            for round in [2, 1].into_iter().filter(|n| *n <= lane_rows * key_fours) {
                for shared in [false, true] {
                    let decode = DecodeGpu {
                        loads,
                        rows,
                        lane_rows,
                        workgroup,
                        key_lanes,
                        key_fours: *key_fours,
                        v_split,
                        round,
                        shared,
                        subgroups,
                        registers: device.registers,
                    };
                    if decode.memory() <= limit {
                        return Some(decode);
                    }
                }
            }
        }
    }
    None
}

/// Returns tiles for few rows of packed keys on software drivers. The keys of a block, of a step
/// and between barriers are measured with lavapipe 26 and 8 lanes. Returns `None` where no tiles
/// are faster than `fused_cpu`. Rows of more than 256 channels have tiles only alone. If each lane
/// loads its words separately, blocks are smaller. They need half the code, at the same speed
/// (lavapipe 25).
pub(super) fn decode_cpu(
    lanes: u32,
    gather: bool,
    rows: usize,
    shape: &Shape,
    keys: &KeySource,
) -> Option<DecodeCpu> {
    let narrow = shape.head_dim <= 64;
    let too_wide = shape.head_dim.max(shape.value_dim) > if rows == 1 { 576 } else { 256 };
    // The loop over the side with more channels in a word is the longer code.
    let [k, v] = keys.storages;
    let storage = if v.per_word() > k.per_word() { v } else { k };
    let (keys_each, step, chunk) = match (storage.per_word(), rows) {
        _ if !keys.words || !keys.simple || too_wide => return None,
        (2, 1..=4) if !narrow => (16, if shape.value_dim <= 128 { 4 } else { 2 }, 512),
        (4, 1) => (32, 4, 1024),
        (4, 2..=4) if shape.head_dim > 128 => (16, 2, 512),
        (4, 2..=4) => (32, if narrow { 4 } else { 2 }, 512),
        (8, 1) => (16, 4, 1024),
        (8, 2..=4) => (if narrow { 32 } else { 16 }, 2, 512),
        (8, 5..=8) => (16, 2, 256),
        _ => return None,
    };
    let (keys_each, step) = if gather { (keys_each.min(16), step.min(2)) } else { (keys_each, step) };
    let decode = DecodeCpu {
        loads: keys.loads(shape),
        lanes,
        rows: rows.next_power_of_two() as u32,
        keys: keys_each,
        step,
        chunk,
        gather,
    };
    // Eight rows of 256 channels do not fit.
    (decode.memory() <= 16384).then_some(decode)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the shaders' assertions about their constants, for every plan.
    #[test]
    fn tiles_are_what_their_shaders_take() {
        let dims =
            [1, 3, 4, 13, 16, 20, 32, 40, 64, 65, 80, 96, 100, 128, 160, 192, 256, 320, 512, 576, 2048];
        let mut planned = 0;
        for (words, storage) in [
            (false, StorageKind::F32),
            (true, StorageKind::F32),
            (true, StorageKind::F16),
            (true, StorageKind::BF16),
            (true, StorageKind::Q8),
            (true, StorageKind::Q4),
            (true, StorageKind::E4M3),
            (true, StorageKind::Gaussian4),
        ] {
            let keys = KeySource { storages: [storage; 2], words, simple: true, operands: DType::F32 };
            for (head_dim, value_dim) in dims.into_iter().flat_map(|d| dims.map(|v| (d, v))) {
                let shape = Shape { value_dim, ..Shape::new(1, 1, 1, head_dim) };
                let subgroups = [0, 4, 8, 16, 32, 64];
                let devices = subgroups.into_iter().flat_map(|s| Registers::ALL.map(|r| (s, r)));
                for (rows, (subgroup_min, registers)) in
                    (1..=17).flat_map(|r| devices.clone().map(move |d| (r, d)))
                {
                    let subgroup_max = 2 * subgroup_min;
                    let device = DeviceFacts { subgroup_min, subgroup_max, registers, ..DeviceFacts::LEAST };
                    let decode = decode_gpu(rows, &shape, &keys, &device);
                    let one_row = match registers {
                        Registers::Wide => false,
                        Registers::Middle => !storage.is_biased(),
                        Registers::Narrow => true,
                    };
                    let many = rows > 16 || (rows > 8 && storage.is_scaled() && one_row);
                    let wide = head_dim.max(value_dim) > 128;
                    assert!(
                        decode.is_some() || many || (wide && rows > 1) || head_dim > 512,
                        "{storage:?} {head_dim} {value_dim}"
                    );
                    if let Some(decode) = decode {
                        asserted(&decode, rows, subgroup_min);
                        planned += 1;
                    }
                    let all = [(4, false), (8, false), (8, true), (16, false), (16, true)]
                        .map(|(lanes, gather)| decode_cpu(lanes, gather, rows, &shape, &keys));
                    for decode in all.into_iter().flatten() {
                        let DecodeCpu { lanes, keys, step, chunk, rows: packed, .. } = decode;
                        assert!(
                            packed as usize >= rows && decode.memory() <= 16384 && keys.is_multiple_of(lanes)
                        );
                        assert!(
                            keys.is_multiple_of(step) && chunk.is_multiple_of(keys) && chunk * packed <= 2048
                        );
                    }
                }
            }
        }
        assert!(planned > 10_000);
    }

    /// Latent keys have 576 channels. Sums of several such rows do not fit in registers.
    #[test]
    fn one_wide_row_has_software_tiles() {
        let shape = Shape { value_dim: 512, ..Shape::new(1, 1, 1, 576) };
        for storage in [StorageKind::F16, StorageKind::Q8, StorageKind::Q4] {
            let keys = KeySource { storages: [storage; 2], words: true, simple: true, operands: DType::F32 };
            let of = |rows, shape: &Shape| decode_cpu(8, false, rows, shape, &keys).is_some();
            assert!(of(1, &shape) && !of(2, &shape), "{storage:?}");
            assert!(!of(1, &Shape::new(1, 1, 1, 577)), "{storage:?}");
        }
    }

    /// Compares a driver that loads once for all lanes with one that loads for each lane.
    #[test]
    fn blocks_are_smaller_where_lanes_load_their_own() {
        let shape = Shape::new(1, 1, 1, 128);
        let blocks = |storage, gather| {
            let keys = KeySource { storages: [storage; 2], words: true, simple: true, operands: DType::F32 };
            decode_cpu(8, gather, 1, &shape, &keys).map(|d| (d.keys, d.step, d.chunk, d.gather))
        };
        for (storage, once, each) in [
            (StorageKind::F16, (16, 4, 512, false), (16, 2, 512, true)),
            (StorageKind::Q8, (32, 4, 1024, false), (16, 2, 1024, true)),
            (StorageKind::Q4, (16, 4, 1024, false), (16, 2, 1024, true)),
        ] {
            assert_eq!(
                [blocks(storage, false), blocks(storage, true)],
                [Some(once), Some(each)],
                "{storage:?}"
            );
        }
    }

    fn asserted(decode: &DecodeGpu, wanted: usize, subgroup_min: u32) {
        let DecodeGpu { loads, rows, lane_rows, workgroup, key_lanes, key_fours, v_split, round, .. } =
            *decode;
        let (lanes, sums) = (decode.lanes(), lane_rows * key_fours);
        assert!(rows as usize >= wanted && rows.is_multiple_of(lane_rows) && rows <= workgroup, "{decode:?}");
        assert!(workgroup.is_multiple_of(key_lanes) && lanes.is_multiple_of(key_lanes), "{decode:?}");
        assert!(sums <= key_lanes || sums.is_multiple_of(key_lanes), "{decode:?}");
        assert!(
            sums.is_multiple_of(round)
                && (round.is_multiple_of(key_lanes) || key_lanes.is_multiple_of(round))
        );
        assert!(loads.vectors[1].is_multiple_of(v_split), "{decode:?}");
        let fold = key_lanes.min(sums) * (lane_rows / key_lanes).max(1) * workgroup / key_lanes / rows;
        assert!(fold > 0 && rows * (fold / 16).max(1) <= workgroup, "{decode:?}");
        assert!(decode.memory() <= 16384 && workgroup <= 256, "{decode:?}");
        assert!(!decode.subgroups || key_lanes <= subgroup_min, "{decode:?}");
    }
}
