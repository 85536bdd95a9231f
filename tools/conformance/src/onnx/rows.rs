//! Operators on rows: softmax, norms, activations, rotary positions.

use std::collections::BTreeMap;

use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::{Positions, RopeOrder, Rotate, Rotation, RowPositions};
use wgpu_attention::rows::{Elementwise, ElementwiseForward, Norm, NormConfig, NormForward};
use wgpu_attention::{Attention, Config, DType, Forward, Gpu, Shape};

use crate::calls;
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};

/// Returns an axis of a tensor, which may count from the end.
fn axis(case: &Case, tensor: &Tensor) -> usize {
    let axis = case.integer("axis").unwrap_or(-1);
    if axis < 0 { (tensor.shape.len() as i64 + axis) as usize } else { axis as usize }
}

/// The softmax of a tensor is the attention weights of scores that are 0, with the tensor as bias.
pub fn softmax(gpu: &Gpu, case: &Case) -> Ran {
    let x = case.input("x")?;
    let axis = axis(case, x);
    let columns = x.shape[axis];
    let (before, after): (usize, usize) =
        (x.shape[..axis].iter().product(), x.shape[axis + 1..].iter().product());
    let bias = Placed::new(gpu, &x.data, float(x)?, [before, 1, columns, after])?;
    let rows = [before, 1, after, columns];
    let shape = Shape {
        batch: before,
        heads: 1,
        kv_heads: 1,
        q_len: after,
        kv_len: columns,
        head_dim: 1,
        value_dim: 1,
    };
    let zeros = |shape: [usize; 4]| Placed::new(gpu, &vec![0.0; shape.iter().product()], DType::F32, shape);
    let (q, k, v) = (zeros(shape.q())?, zeros(shape.k())?, zeros(shape.v())?);
    let out = Placed::output(gpu, DType::F32, shape.out())?;
    let weights = Placed::output(gpu, float(x)?, rows)?;
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape))?;
    // Rows and columns change places: the axis is the last one of the weights.
    let call = Forward::new(q.view(), k.view(), v.view(), out.view())
        .mask(DeviceMask::none().bias(bias.view().transposed(2, 3)))
        .weights(weights.viewed([before, 1, columns, after]).transposed(2, 3));
    calls::forward(gpu, &attention, &call)?;
    Ok(Outcome::Computed(BTreeMap::from([("y", weights.download(gpu)?)])))
}

/// The norm of all axes from one on: a row has all their elements.
pub fn norm(gpu: &Gpu, case: &Case) -> Ran {
    let x = case.input("X")?;
    let axis = axis(case, x);
    let rows: [usize; 2] = [x.shape[..axis].iter().product(), x.shape[axis..].iter().product()];
    let shape = [1, 1, rows[0], rows[1]];
    let config = if case.operator == "LayerNormalization" { NormConfig::layer() } else { NormConfig::rms() };
    let norm = Norm::with_pipelines(gpu.pipelines(), config.eps(case.number("epsilon").unwrap_or(1e-5)))?;
    let placed = Placed::new(gpu, &x.data, float(x)?, shape)?;
    let vector = |name: &str| {
        let place = |t: &Tensor| Ok::<_, Failed>(Placed::new(gpu, &t.data, float(t)?, [1, 1, 1, rows[1]])?);
        case.inputs.get(name).map(place).transpose()
    };
    let (weight, bias) = (vector("W")?, vector("B")?);
    let out = Placed::output(gpu, float(x)?, shape)?;
    let call = NormForward::new(placed.view(), out.view())
        .weight(weight.as_ref().map(Placed::view))
        .bias(bias.as_ref().map(Placed::view));
    gpu.submit(|e| norm.forward(e, &call))?;
    Ok(Outcome::Computed(BTreeMap::from([("Y", out.download(gpu)?)])))
}

pub fn activation(gpu: &Gpu, case: &Case) -> Ran {
    let activation = match (case.operator.as_str(), case.text("approximate")) {
        ("Gelu", Some("tanh")) => Activation::GeluTanh,
        ("Gelu", _) => Activation::Gelu,
        _ if case.number("alpha").is_some_and(|alpha| alpha != 1.0) => {
            return Ok(Outcome::Refused("`Silu` has no factor"));
        }
        _ => Activation::Silu,
    };
    let x = case.input("x")?;
    let placed = Placed::new(gpu, &x.data, float(x)?, x.four())?;
    let out = Placed::output(gpu, float(x)?, x.four())?;
    let call = ElementwiseForward::new(placed.view(), out.view()).activation(activation);
    gpu.submit(|e| Elementwise::with_pipelines(gpu.pipelines()).forward(e, &call))?;
    Ok(Outcome::Computed(BTreeMap::from([("y", out.download(gpu)?)])))
}

pub fn rotary(gpu: &Gpu, case: &Case) -> Ran {
    let x = case.input("input")?;
    let placed = Placed::new(gpu, &x.data, float(x)?, x.four())?;
    let out = Placed::output(gpu, float(x)?, x.four())?;
    let (x_view, out_view) = match x.shape[..] {
        [batch, length, width] => {
            let heads =
                case.integer("num_heads").ok_or_else(|| Failed("no number of heads".into()))? as usize;
            let shape = [batch, heads, length, width / heads];
            (placed.blhd(shape), out.blhd(shape))
        }
        _ => (placed.view(), out.view()),
    };
    let table = |name: &str| {
        let t = case.input(name)?;
        let shape = match t.shape[..] {
            // A row for each position, or for each row.
            [rows, pairs] => [1, 1, rows, pairs],
            [batch, length, pairs] => [batch, 1, length, pairs],
            _ => return Err(Failed("tables of other axes".into())),
        };
        Ok::<_, Failed>(Placed::new(gpu, &t.data, float(t)?, shape)?)
    };
    let (cos, sin) = (table("cos_cache")?, table("sin_cache")?);
    let positions = case
        .inputs
        .get("position_ids")
        .map(|t| Placed::new(gpu, &t.data, DType::U32, [t.shape[0], 1, t.shape[1], 1]));
    let positions = positions.transpose()?;
    let at = positions.as_ref().map_or(RowPositions::Start(0), |p| RowPositions::Tensor(p.view()));
    let order = if case.integer("interleaved") == Some(1) { RopeOrder::Interleaved } else { RopeOrder::Half };
    let rotation = Rotation::CosSin { cos: cos.view(), sin: sin.view(), order };
    let call = Rotate::new(x_view, rotation, at).out(out_view);
    gpu.submit(|e| Positions::with_pipelines(gpu.pipelines()).rotate(e, &call))?;
    Ok(Outcome::Computed(BTreeMap::from([("output", out.download(gpu)?)])))
}
