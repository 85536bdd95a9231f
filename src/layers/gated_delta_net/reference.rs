//! The reference of the gated DeltaNet layer, composed of the references of its operators.

use half::{bf16, f16};

use super::{GatedDeltaNetConfig, GatedDeltaNetWeights};
use crate::attention::reference::heads::{join_heads, split_heads};
use crate::matmul::Activation;
use crate::matmul::projection::reference::{project, project_backward};
use crate::recurrent::reference::{
    RecurrentInputs, RecurrentOptions, recurrent_attention, recurrent_attention_backward,
};
use crate::rows::NormGate;
use crate::rows::causal_conv::reference::{CausalConvInputs, causal_conv, causal_conv_backward};
use crate::rows::elementwise::reference::activate;
use crate::rows::norm::reference::{gated_norm, gated_norm_backward};
use crate::tensor::{DType, Error, Real, Shape, check_sizes, expect_length};

/// The states of sequences on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostGatedDeltaNetState<R> {
    /// `[batch, conv_width − 1, channels]`.
    pub conv: Vec<R>,
    /// `[batch, value_heads, head_dim, value_dim]`.
    pub recurrent: Vec<R>,
}

/// The gradients that [`gated_delta_net_backward`] returns.
#[derive(Clone, Debug)]
pub struct GatedDeltaNetGradients<R> {
    /// `[batch, length, features]`.
    pub d_x: Vec<R>,
    /// In the shapes and in the order of the weights.
    pub d_weights: GatedDeltaNetWeights<Vec<R>>,
}

/// The sizes of a call.
#[derive(Clone, Copy)]
struct Sizes {
    config: GatedDeltaNetConfig,
    batch: usize,
    length: usize,
}

/// The tensors between the operators, as rows of tokens, or as rows of heads for the recurrence.
struct Between<R> {
    mixed: Vec<R>,
    z: Vec<R>,
    logits: Vec<R>,
    heads: [Vec<R>; 5],
    /// The outputs of heads, as rows of tokens.
    context: Vec<R>,
    state: HostGatedDeltaNetState<R>,
}

impl Sizes {
    fn rows(&self) -> usize {
        self.batch * self.length
    }

    fn shape(&self) -> Shape {
        let GatedDeltaNetConfig { heads, value_heads, head_dim, value_dim, .. } = self.config;
        Shape {
            batch: self.batch,
            heads: value_heads,
            kv_heads: heads,
            q_len: self.length,
            kv_len: self.length,
            head_dim,
            value_dim,
        }
    }

    fn options(&self) -> RecurrentOptions {
        RecurrentOptions {
            scale: self.config.recurrent().factor(),
            delta: true,
            unit_eps: Some(1e-6),
            sequences: (0..self.batch).map(|b| [b, 0, self.length]).collect(),
        }
    }

    /// Changes the order of axes: `[batch, length, heads, dim]` to `[batch, heads, length, dim]`.
    fn to_heads<R: Real>(self, x: &[R], heads: usize) -> Result<Vec<R>, Error> {
        split_heads(x, self.length, heads, x.len() / self.rows() / heads)
    }

    /// Changes the order of axes back.
    fn to_rows<R: Real>(self, x: &[R], heads: usize) -> Result<Vec<R>, Error> {
        join_heads(x, self.length, heads, x.len() / self.rows() / heads)
    }

    fn conv<'a, R>(&self, x: &'a [R], weight: &'a [R], state: Option<&'a [R]>) -> CausalConvInputs<'a, R> {
        let channels = self.config.mixed();
        let activation = Some(Activation::Silu);
        CausalConvInputs { x, weight, bias: None, initial_state: state, activation, channels }
    }
}

/// Rounds elements to the type of stored tensors. F32 stands for the type of the reference. The
/// elements become f32 first, as in kernels: `half` ignores the last bits of f64.
fn stored<R: Real>(x: Vec<R>, dtype: DType) -> Vec<R> {
    let round = |x: R| match dtype {
        DType::F16 => R::of(f16::from_f32(x.f64() as f32).to_f64()),
        DType::BF16 => R::of(bf16::from_f32(x.f64() as f32).to_f64()),
        _ => x,
    };
    x.into_iter().map(round).collect()
}

/// Columns `first` to `first + count` of rows of `width` columns.
fn columns<R: Copy>(x: &[R], width: usize, first: usize, count: usize) -> Vec<R> {
    x.chunks_exact(width).flat_map(|row| &row[first..][..count]).copied().collect()
}

fn sigmoid<R: Real>(x: R) -> R {
    activate(x, Activation::Sigmoid)
}

fn softplus<R: Real>(x: R) -> R {
    x.max(R::zero()) + (-x.abs()).exp().ln_1p()
}

fn between<R: Real>(
    x: &[R],
    sizes: Sizes,
    weights: &GatedDeltaNetWeights<Vec<R>>,
    state: Option<&HostGatedDeltaNetState<R>>,
) -> Result<Between<R>, Error> {
    let Sizes { config, batch, length } = sizes;
    weights.check(&config)?;
    check_sizes("x", &[("batch", batch), ("length", length)])?;
    sizes.shape().check()?;
    let GatedDeltaNetConfig { features, heads, value_heads, .. } = config;
    let (keys, values, mixed, projected) =
        (config.keys(), config.values(), config.mixed(), config.projected());
    expect_length("x", x, sizes.rows() * features)?;
    let kept = mixed * (config.conv_width - 1);
    if let Some(state) = state {
        expect_length("state.conv", &state.conv, batch * kept)?;
    }
    let all = project(x, &weights.in_proj_qkvz, None, features, projected)?;
    let all = stored(all, config.dtype);
    let logits = project(x, &weights.in_proj_ba, None, features, 2 * value_heads)?;
    let (before, z) = (columns(&all, projected, 0, mixed), columns(&all, projected, mixed, values));
    let (mut convolved, mut conv_state) = (Vec::new(), Vec::new());
    for (b, x) in before.chunks_exact(length * mixed).enumerate() {
        let state = state.map(|state| &state.conv[b * kept..][..kept]);
        let got = causal_conv(&sizes.conv(x, &weights.conv1d, state))?;
        convolved.extend(got.out);
        conv_state.extend(got.final_state);
    }
    let convolved = stored(convolved, config.dtype);
    let part = |first, count, heads| sizes.to_heads(&columns(&convolved, mixed, first, count), heads);
    let rates = |first| columns(&logits, 2 * value_heads, first, value_heads);
    let beta: Vec<R> = rates(0).into_iter().map(sigmoid).collect();
    let decay: Vec<R> = rates(value_heads)
        .iter()
        .enumerate()
        .map(|(n, a)| {
            let h = n % value_heads;
            -weights.a_log[h].exp() * softplus(*a + weights.dt_bias[h])
        })
        .collect();
    let of_heads = [
        part(0, keys, heads)?,
        part(keys, keys, heads)?,
        part(2 * keys, values, value_heads)?,
        sizes.to_heads(&decay, value_heads)?,
        sizes.to_heads(&beta, value_heads)?,
    ];
    let initial = state.map_or(&[][..], |state| &state.recurrent);
    let got = recurrent_attention(&inputs(&of_heads, initial), sizes.shape(), &sizes.options())?;
    let context = stored(sizes.to_rows(&got.out, value_heads)?, config.dtype);
    let state = HostGatedDeltaNetState { conv: conv_state, recurrent: got.last };
    Ok(Between { mixed: before, z, logits, heads: of_heads, context, state })
}

fn inputs<'a, R>([q, k, v, decay, beta]: &'a [Vec<R>; 5], initial: &'a [R]) -> RecurrentInputs<'a, R> {
    RecurrentInputs { q, k, v, decay, beta, initial }
}

/// Computes a gated DeltaNet layer for `x`, `[batch, length, features]`, and returns its output and
/// the states after the last token. Without `state`, sequences begin with zeros. See
/// [`GatedDeltaNet`](crate::layers::GatedDeltaNet) for the formula.
///
/// If the configuration has F16 or BF16, tensors between the operators are rounded to it, as the
/// layer stores them.
///
/// # Errors
/// Slices of a wrong length, and a configuration that no layer can have.
pub fn gated_delta_net<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    config: &GatedDeltaNetConfig,
    weights: &GatedDeltaNetWeights<Vec<R>>,
    state: Option<&HostGatedDeltaNetState<R>>,
) -> Result<(Vec<R>, HostGatedDeltaNetState<R>), Error> {
    let sizes = Sizes { config: *config, batch, length };
    let Between { z, context, state, .. } = between(x, sizes, weights, state)?;
    let gate = NormGate::after(&z[..], Activation::Silu);
    let gated = gated_norm(&context, config.value_dim, Some(&weights.norm), None, &config.norm(), gate)?;
    let gated = stored(gated, config.dtype);
    let out = project(&gated, &weights.out_proj, None, config.values(), config.features)?;
    Ok((out, state))
}

/// Returns the gradients of `Σ out · d_out` with respect to the input and the weights of
/// [`gated_delta_net`] without a state.
///
/// # Errors
/// As [`gated_delta_net`].
pub fn gated_delta_net_backward<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    config: &GatedDeltaNetConfig,
    weights: &GatedDeltaNetWeights<Vec<R>>,
    d_out: &[R],
) -> Result<GatedDeltaNetGradients<R>, Error> {
    let sizes = Sizes { config: *config, batch, length };
    let Between { mixed, z, logits, heads, context, .. } = between(x, sizes, weights, None)?;
    let GatedDeltaNetConfig { features, value_heads, value_dim, .. } = *config;
    let (keys, values) = (config.keys(), config.values());
    let norm = Some(&weights.norm[..]);
    let gate = NormGate::after(&z[..], Activation::Silu);
    let gated = gated_norm(&context, value_dim, norm, None, &config.norm(), gate)?;
    let gated = stored(gated, config.dtype);
    let of_out = project_backward(&gated, &weights.out_proj, d_out, values, features)?;
    let d_gated = stored(of_out.d_x, config.dtype);
    let of_norm = gated_norm_backward(&context, value_dim, norm, None, &config.norm(), gate, &d_gated)?;
    let d_context = stored(sizes.to_heads(&of_norm.norm.d_x, value_heads)?, config.dtype);
    let got =
        recurrent_attention_backward(&inputs(&heads, &[]), sizes.shape(), &sizes.options(), &d_context, &[])?;
    let parts = [
        (sizes.to_rows(&got.d_q, config.heads)?, keys),
        (sizes.to_rows(&got.d_k, config.heads)?, keys),
        (sizes.to_rows(&got.d_v, value_heads)?, values),
    ];
    let mut d_convolved = Vec::new();
    for row in 0..sizes.rows() {
        parts.iter().for_each(|(part, width)| d_convolved.extend(&part[row * width..][..*width]));
    }
    let channels = config.mixed();
    let mut d_conv1d = vec![R::zero(); weights.conv1d.len()];
    let mut d_mixed = Vec::new();
    for (x, d) in mixed.chunks_exact(length * channels).zip(d_convolved.chunks_exact(length * channels)) {
        let got = causal_conv_backward(&sizes.conv(x, &weights.conv1d, None), d, None)?;
        d_mixed.extend(got.d_x);
        d_conv1d.iter_mut().zip(got.d_weight).for_each(|(sum, d)| *sum = *sum + d);
    }
    let mut d_all = Vec::new();
    for (mixed, z) in d_mixed.chunks_exact(channels).zip(of_norm.d_gate.chunks_exact(values)) {
        d_all.extend(mixed);
        d_all.extend(z);
    }
    let (d_decay, d_beta) =
        (sizes.to_rows(&got.d_decay, value_heads)?, sizes.to_rows(&got.d_beta, value_heads)?);
    let mut d_logits = vec![R::zero(); logits.len()];
    let [mut d_a_log, mut d_dt_bias] = [(); 2].map(|()| vec![R::zero(); value_heads]);
    for n in 0..sizes.rows() * value_heads {
        let (row, h) = (n / value_heads * 2 * value_heads, n % value_heads);
        let (b, a) = (logits[row + h], logits[row + value_heads + h] + weights.dt_bias[h]);
        let factor = -weights.a_log[h].exp() * d_decay[n];
        d_logits[row + h] = d_beta[n] * sigmoid(b) * sigmoid(-b);
        d_logits[row + value_heads + h] = factor * sigmoid(a);
        d_dt_bias[h] = d_dt_bias[h] + factor * sigmoid(a);
        d_a_log[h] = d_a_log[h] + factor * softplus(a);
    }
    let of_all = project_backward(x, &weights.in_proj_qkvz, &d_all, features, config.projected())?;
    let of_logits = project_backward(x, &weights.in_proj_ba, &d_logits, features, 2 * value_heads)?;
    let d_x = of_all.d_x.iter().zip(&of_logits.d_x).map(|(a, b)| *a + *b).collect();
    let d_weights = GatedDeltaNetWeights {
        in_proj_qkvz: of_all.d_weight,
        in_proj_ba: of_logits.d_weight,
        conv1d: d_conv1d,
        a_log: d_a_log,
        dt_bias: d_dt_bias,
        norm: of_norm.norm.d_weight,
        out_proj: of_out.d_weight,
    };
    Ok(GatedDeltaNetGradients { d_x, d_weights })
}
