//! LinearAttention and CausalConvWithState.

use std::collections::BTreeMap;

use wgpu_attention::matmul::Activation;
use wgpu_attention::recurrent::{Decay, RecurrentAttention, RecurrentConfig, RecurrentForward};
use wgpu_attention::rows::{CausalConv, CausalConvForward};
use wgpu_attention::{DType, Gpu, Scratch, TensorView};

use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};

/// A view of one head of each group of `[batch, length, groups · group · dim]`.
fn of_groups(
    placed: &Placed,
    [batch, length, width]: [usize; 3],
    groups: usize,
    group: usize,
    n: usize,
) -> TensorView<'_> {
    let dim = width / groups / group;
    placed
        .viewed([batch, groups, length, dim])
        .with_strides([length * width, group * dim, width, 1])
        .with_offset(n * dim)
}

pub fn linear_attention(gpu: &Gpu, case: &Case) -> Ran {
    let three = |t: &Tensor| -> Result<[usize; 3], Failed> {
        t.shape.clone().try_into().map_err(|_| Failed("other axes".into()))
    };
    let place = |t: &Tensor| Ok::<_, Failed>(Placed::new(gpu, &t.data, float(t)?, t.four())?);
    let heads = |name| case.integer(name).map(|n| n as usize).ok_or_else(|| Failed(format!("no {name}")));
    let (q_heads, states) = (heads("q_num_heads")?, heads("kv_num_heads")?);
    let group = q_heads / states;
    let [q, k, v] = ["query", "key", "value"].map(|name| case.input(name));
    let (q, k, v) = (q?, k?, v?);
    let dtype = float(q)?;
    let [batch, length, _] = three(q)?;
    let (head_dim, value_dim) = (k.shape[2] / states, v.shape[2] / states);
    let rule = case.text("update_rule").unwrap_or("gated_delta");
    let decay = case.inputs.get("decay");
    let config = RecurrentConfig::new(states, head_dim)
        .value_dim(value_dim)
        .dtype(dtype)
        .delta(rule.ends_with("delta"))
        .decay(match decay {
            None => Decay::None,
            Some(t) if t.shape[2] == states => Decay::PerHead,
            Some(_) => Decay::PerChannel,
        })
        .scale(case.number("scale").filter(|s| *s != 0.0));
    let attention = RecurrentAttention::with_pipelines(gpu.pipelines(), config)?;
    let [k_at, v_at, q_at] = [place(k)?, place(v)?, place(q)?];
    let decay_at = decay.map(place).transpose()?;
    let beta = case.inputs.get("beta");
    let beta_at = beta.map(place).transpose()?;
    let state_shape = [batch, states, head_dim, value_dim];
    // States are f32.
    let past = case.inputs.get("past_state");
    let past = past.map(|t| Placed::new(gpu, &t.data, DType::F32, state_shape)).transpose()?;
    let state = Placed::output(gpu, DType::F32, state_shape)?;
    let out = Placed::output(gpu, dtype, [1, batch, length, q_heads * value_dim])?;
    // Query heads of a group read one state: one call for each of them.
    for n in 0..group {
        let mut call = RecurrentForward::new(
            of_groups(&q_at, three(q)?, states, group, n),
            of_groups(&k_at, three(k)?, states, 1, 0),
            of_groups(&v_at, three(v)?, states, 1, 0),
            of_groups(&out, [batch, length, q_heads * value_dim], states, group, n),
        )
        .initial_state(past.as_ref().map(Placed::view))
        .final_state(state.view());
        if let Some((t, at)) = decay.zip(decay_at.as_ref()) {
            call = call.decay(of_groups(at, three(t)?, states, 1, 0));
        }
        if let Some((t, at)) = beta.zip(beta_at.as_ref()) {
            call = call.beta(of_groups(at, three(t)?, t.shape[2], 1, 0));
        }
        let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
        gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    }
    Ok(Outcome::Computed(BTreeMap::from([
        ("output", out.download(gpu)?),
        ("present_state", state.download(gpu)?),
    ])))
}

/// Rows are columns of the tensors: channels come before the length.
pub fn convolution(gpu: &Gpu, case: &Case) -> Ran {
    let [x, weight] = ["input", "weight"].map(|name| case.input(name));
    let (x, weight) = (x?, weight?);
    let [batch, channels, length] = x.shape[..] else { return Err(Failed("other axes".into())) };
    let width = weight.shape[2];
    let dtype = float(x)?;
    let activation = match case.text("activation").unwrap_or("none") {
        "none" => None,
        "silu" | "swish" => Some(Activation::Silu),
        other => return Err(Failed(format!("the activation {other} is not known"))),
    };
    let columns = |length| [batch, 1, channels, length];
    let x_at = Placed::new(gpu, &x.data, dtype, columns(length))?;
    let weight_at = Placed::new(gpu, &weight.data, float(weight)?, [1, 1, channels, width])?;
    let bias = case.inputs.get("bias");
    let bias = bias.map(|t| Placed::new(gpu, &t.data, dtype, [1, 1, 1, channels])).transpose()?;
    let out = Placed::output(gpu, dtype, columns(length))?;
    let call =
        CausalConvForward::new(x_at.view().transposed(2, 3), weight_at.view(), out.view().transposed(2, 3))
            .bias(bias.as_ref().map(Placed::view))
            .activation(activation);
    // With a filter of one number there is no state.
    let state = |data: &[f64]| Placed::new(gpu, data, dtype, columns(width - 1));
    let past = case.inputs.get("past_state").filter(|_| width > 1);
    let past = past.map(|t| state(&t.data)).transpose()?;
    let last = if width > 1 { Some(state(&vec![f64::NAN; batch * channels * (width - 1)])?) } else { None };
    let call = call
        .initial_state(past.as_ref().map(|state| state.view().transposed(2, 3)))
        .final_state(last.as_ref().map(|state| state.view().transposed(2, 3)));
    let convolution = CausalConv::with_pipelines(gpu.pipelines());
    gpu.submit(|e| convolution.forward(e, &call))?;
    let last = last.map_or(Ok(Vec::new()), |last| last.download(gpu))?;
    Ok(Outcome::Computed(BTreeMap::from([("output", out.download(gpu)?), ("present_state", last)])))
}
