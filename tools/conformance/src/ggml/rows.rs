//! Norms and rotary positions.

use std::collections::BTreeMap;

use wgpu_attention::position::{
    Positions, Rope, RopeConfig, RopeOrder, RopeScaling, RopeSections, Rotate, Rotation, RowPositions,
};
use wgpu_attention::rows::{Norm, NormConfig, NormForward};
use wgpu_attention::{DType, Gpu};

use super::{is, optional, place_heads};
use crate::calls::place;
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::Placed;

pub fn norm(gpu: &Gpu, case: &Case) -> Ran {
    let x = case.input("x")?;
    let config = if case.operator == "NORM" { NormConfig::layer() } else { NormConfig::rms() };
    let eps = case.number("eps").ok_or_else(|| Failed("no eps".into()))?;
    let norm = Norm::with_pipelines(gpu.pipelines(), config.eps(eps))?;
    let vector = |name| optional(gpu, case, name, [1, 1, 1, x.four()[3]]);
    let (placed, weight, bias) = (place(gpu, x)?, vector("weight")?, vector("bias")?);
    let out = Placed::output(gpu, DType::F32, x.four())?;
    let call = NormForward::new(placed.view(), out.view())
        .weight(weight.as_ref().map(Placed::view))
        .bias(bias.as_ref().map(Placed::view));
    gpu.submit(|e| norm.forward(e, &call))?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?)])))
}

/// Returns the rotation of a case without tables.
fn rope(case: &Case) -> Result<RopeConfig, Failed> {
    let rotary = case.integer("rotary").ok_or_else(|| Failed("no rotary".into()))? as usize;
    let (pairs, third) = (rotary / 2, rotary / 3);
    let every_third = |first| (first..pairs).step_by(3).count();
    let config = RopeConfig::new(rotary);
    let config = match case.text("mode") {
        Some("normal") => config.order(RopeOrder::Interleaved),
        // ggml's sections reach past the last pair.
        Some("mrope") => config.sections(RopeSections::Contiguous([third, pairs - third, 0])),
        Some("imrope") => config.sections(RopeSections::Interleaved([0, 1, 2].map(every_third))),
        _ => config,
    };
    Ok(match case.text("scaling") {
        Some("linear") => config.scaling(RopeScaling::Linear { factor: 4.0 }),
        Some("yarn") => config.scaling(RopeScaling::Yarn {
            factor: 4.0,
            original_len: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        }),
        _ => config,
    })
}

pub fn rotation(gpu: &Gpu, case: &Case) -> Ran {
    let (x, positions) = (case.input("x")?, case.input("positions")?);
    let dtype = float(x)?;
    let placed = place_heads(gpu, case, "x", true)?;
    let out = Placed::output(gpu, dtype, x.four())?;
    let [axes, tokens] = positions.shape[..] else { return Err(Failed("other axes".into())) };
    let positions = Placed::new(gpu, &positions.data, DType::U32, [1, axes, tokens, 1])?;
    let made;
    let pairs = case.inputs.get("cos").map_or(0, |cos| cos.shape[1]);
    let [cos, sin] = ["cos", "sin"].map(|name| optional(gpu, case, name, [1, 1, tokens, pairs]));
    let (cos, sin) = (cos?, sin?);
    let (rotation, at) = match (&cos, &sin) {
        (Some(cos), Some(sin)) => {
            let order =
                if case.text("mode") == Some("normal") { RopeOrder::Interleaved } else { RopeOrder::Half };
            (Rotation::CosSin { cos: cos.view(), sin: sin.view(), order }, RowPositions::Start(0))
        }
        _ => {
            made = Rope::new(gpu.device(), rope(case)?)?;
            (Rotation::Rope(&made), RowPositions::Tensor(positions.view()))
        }
    };
    let call = Rotate::new(placed.view(), rotation, at).out(out.blhd(placed.shape));
    let operator = Positions::with_pipelines(gpu.pipelines());
    gpu.submit(|e| {
        if is(case, "back") { operator.rotate_backward(e, &call) } else { operator.rotate(e, &call) }
    })?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?)])))
}
