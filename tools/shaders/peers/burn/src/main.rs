//! `peer-burn f32|f16 unit|coop2|coop4|coop8 QUERIES KEYS HEAD_DIM`: makes one call of Burn's fused
//! attention, with 8 heads of zeros.
//!
//! The arguments name a strategy, because autotuning would execute kernels that this program only
//! compiles.

use burn_backend::ops::{AttentionModuleOptions, FloatTensorOps};
use burn_backend::{Backend, FloatDType, Shape, TensorData};
use burn_cubecl::kernel::attention::{AttentionStrategy, attention};
use burn_cubecl::{CubeBackend as B, CubeDevice};
use cubek::attention::forward::routines::blackbox_accelerated::BlackboxAcceleratedStrategy;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dtype, strategy, queries, keys, head_dim] = arguments.as_slice() else {
        panic!("f32|f16 unit|coop2|coop4|coop8 QUERIES KEYS HEAD_DIM")
    };
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let (queries, keys, head_dim) = (number(queries), number(keys), number(head_dim));
    let device = CubeDevice::wgpu(Default::default()).expect("a device");
    let tensor = |rows: usize| {
        let zeros = TensorData::zeros::<f32, _>(Shape::from(vec![1, 8, rows, head_dim]));
        let tensor = B::float_from_data(zeros, &device);
        if dtype == "f16" { B::float_cast(tensor, FloatDType::F16) } else { tensor }
    };
    let strategy = match strategy.strip_prefix("coop") {
        None => AttentionStrategy::FlashUnit,
        Some(planes) => AttentionStrategy::FlashBlackboxAccelerated(BlackboxAcceleratedStrategy {
            num_planes: planes.parse().expect("a number"),
            seq_q: 1,
            seq_kv: 1,
        }),
    };
    let (q, k, v) = (tensor(queries), tensor(keys), tensor(keys));
    attention(q, k, v, None, None, AttentionModuleOptions::default(), strategy).expect("attention");
    B::sync(&device).expect("the device to be idle");
}
