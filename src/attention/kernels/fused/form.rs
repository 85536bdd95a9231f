//! The parts of the fused kernel that depend on its variant: text and constants of the tiles.

use crate::attention::plan::{DecodeCpu, DecodeGpu, FusedMatrix, FusedTiles};
use crate::kernel::{Constant, memory_of, shader};

/// The text, the constants and the workgroup size of one variant.
pub(super) struct Form {
    pub constants: Vec<Constant>,
    pub text: Vec<&'static str>,
    pub invocations: u32,
}

impl Form {
    pub fn of(tiles: &FusedTiles) -> Self {
        match *tiles {
            FusedTiles::Gpu { rows, workgroup, lanes, slice, keys, v_keys, registers } => Form {
                constants: vec![
                    Constant::U32("ROWS", rows),
                    Constant::U32("KEYS", keys),
                    Constant::U32("CHUNK", FusedTiles::CHUNK),
                    Constant::U32("WORKGROUP", workgroup),
                    Constant::U32("LANES_X", lanes),
                    Constant::U32("SLICE", slice),
                    Constant::U32("V_KEYS", v_keys),
                    Constant::U32("P_KEYS", FusedTiles::P_KEYS),
                    Constant::Bool("AHEAD", registers.load_ahead()),
                ],
                text: vec![
                    shader!("attention/fused/gpu"),
                    shader!("attention/fused/tiles"),
                    shader!("attention/fused/hidden_keys"),
                    shader!("mask/document_range"),
                ],
                invocations: workgroup,
            },
            FusedTiles::Cpu { lanes, rows, keys, head_vectors, value_vectors } => Form {
                constants: vec![
                    Constant::U32("ROWS", rows),
                    Constant::U32("LANES", lanes),
                    Constant::U32("KEYS", keys),
                    Constant::U32("HEAD_VECTORS", head_vectors),
                    Constant::U32("VALUE_VECTORS", value_vectors),
                ],
                text: vec![
                    shader!("attention/fused/cpu"),
                    shader!("attention/fused/hidden_keys"),
                    shader!("mask/document_range"),
                ],
                invocations: lanes,
            },
            FusedTiles::DecodeGpu(decode) => Form::decode_gpu(&decode),
            FusedTiles::DecodeCpu(decode) => Form::decode_cpu(&decode),
            FusedTiles::Matrix(tiles) => Form::matrix(&tiles),
            FusedTiles::AdditiveGpu { rows, keys, slice } => Form {
                constants: vec![
                    Constant::U32("ROWS", rows),
                    Constant::U32("KEYS", keys),
                    Constant::U32("WORKGROUP", rows * keys / 4),
                    Constant::U32("SLICE", slice),
                ],
                text: vec![shader!("additive/gpu")],
                invocations: rows * keys / 4,
            },
            FusedTiles::AdditiveCpu { lanes, key_lanes, keys, value_vectors } => Form {
                constants: vec![
                    Constant::U32("LANES", lanes),
                    Constant::U32("KEY_LANES", key_lanes),
                    Constant::U32("ROWS", lanes / key_lanes),
                    Constant::U32("KEYS", keys),
                    Constant::U32("VALUE_VECTORS", value_vectors),
                ],
                text: vec![shader!("additive/cpu")],
                invocations: lanes,
            },
        }
    }

    fn decode_gpu(decode: &DecodeGpu) -> Self {
        let reduce = if decode.subgroups {
            shader!("attention/decode/reduce_subgroup")
        } else {
            shader!("attention/decode/reduce_workgroup")
        };
        Form {
            constants: vec![
                Constant::U32("ROWS", decode.rows),
                Constant::U32("LANE_ROWS", decode.lane_rows),
                Constant::U32("WORKGROUP", decode.workgroup),
                Constant::U32("KEY_LANES", decode.key_lanes),
                Constant::U32("KEY_FOURS", decode.key_fours),
                Constant::U32("V_SPLIT", decode.v_split),
                Constant::U32("ROUND", decode.round),
                Constant::Bool("SHARED", decode.shared),
                Constant::Bool("AHEAD", decode.registers.load_ahead()),
                Constant::U32("K_BLOCKS", decode.loads.k),
                Constant::U32("V_BLOCKS", decode.loads.v),
            ],
            text: vec![shader!("attention/decode/gpu"), reduce],
            invocations: decode.workgroup,
        }
    }

    fn decode_cpu(decode: &DecodeCpu) -> Self {
        Form {
            constants: vec![
                Constant::U32("ROWS", decode.rows),
                Constant::U32("LANES", decode.lanes),
                Constant::U32("KEYS", decode.keys),
                Constant::U32("STEP", decode.step),
                Constant::U32("CHUNK", decode.chunk),
                Constant::Bool("GATHER", decode.gather),
                Constant::U32("K_BLOCKS", decode.loads.k),
                Constant::U32("V_BLOCKS", decode.loads.v),
            ],
            text: vec![shader!("attention/decode/cpu")],
            invocations: decode.lanes,
        }
    }

    fn matrix(tiles: &FusedMatrix) -> Self {
        Form {
            constants: vec![
                Constant::Fragments(tiles.fragment),
                Constant::U32("SUB_ROWS", tiles.sub_rows),
                Constant::U32("SUBGROUPS", tiles.subgroups),
                Constant::U32("KEYS", tiles.keys),
                Constant::U32("WORKGROUP", tiles.workgroup()),
                Constant::U32("HEAD", tiles.head),
                Constant::U32("VALUE", tiles.value),
                Constant::Bool("EXACT", tiles.exact),
                Constant::Bool("Q_IN_MEMORY", tiles.q_in_memory),
            ],
            text: vec![
                shader!("attention/fused/matrix"),
                shader!("attention/fused/tiles"),
                shader!("attention/fused/hidden_keys"),
                shader!("mask/document_range"),
                memory_of(tiles.fragment),
            ],
            invocations: tiles.workgroup(),
        }
    }
}
