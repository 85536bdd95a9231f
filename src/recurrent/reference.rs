//! Recurrent attention, computed token by token.

use crate::tensor::{Error, Real, Shape, check_sizes, eps_in_f32, expect_length};

/// The options of the reference of recurrent attention.
#[derive(Clone, Debug)]
pub struct RecurrentOptions {
    /// The factor of queries.
    pub scale: f64,
    /// True for a delta rule.
    pub delta: bool,
    /// The number added to the squared length of rows of q and k, if they are divided by it.
    pub unit_eps: Option<f64>,
    /// The batch entry of each sequence, its first token and the token after its last. Each
    /// sequence has a state.
    pub sequences: Vec<[usize; 3]>,
}

/// The inputs of the reference. `decay` is empty, `[batch, value_heads, length]`, or has head_dim
/// channels. `beta` is empty or `[batch, value_heads, length]`. `initial` is empty or `[sequences,
/// value_heads, head_dim, value_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentInputs<'a, R> {
    /// `[batch, heads, length, head_dim]`.
    pub q: &'a [R],
    /// `[batch, heads, length, head_dim]`.
    pub k: &'a [R],
    /// `[batch, value_heads, length, value_dim]`.
    pub v: &'a [R],
    /// The natural logarithms of the decays.
    pub decay: &'a [R],
    /// The rates of a delta rule.
    pub beta: &'a [R],
    /// The states before the call.
    pub initial: &'a [R],
}

/// The results of recurrent attention.
#[derive(Clone, Debug)]
pub struct RecurrentAttended<R> {
    /// `[batch, value_heads, length, value_dim]`.
    pub out: Vec<R>,
    /// `[sequences, value_heads, head_dim, value_dim]`.
    pub last: Vec<R>,
    /// The state after every token, `[batch, length, value_heads, head_dim, value_dim]`, zeros for
    /// tokens of no sequence.
    pub states: Vec<R>,
}

/// The gradients of recurrent attention, in the shapes of the inputs.
#[derive(Clone, Debug)]
pub struct RecurrentGradients<R> {
    /// The gradient of q.
    pub d_q: Vec<R>,
    /// The gradient of k.
    pub d_k: Vec<R>,
    /// The gradient of v.
    pub d_v: Vec<R>,
    /// The gradient of the decays.
    pub d_decay: Vec<R>,
    /// The gradient of β.
    pub d_beta: Vec<R>,
    /// The gradient of the initial states, also if there are none.
    pub d_initial: Vec<R>,
    /// The gradient of the state after every token, in the shape of [`RecurrentAttended::states`].
    pub d_states: Vec<R>,
}

/// The sizes of a call, and the places of its rows. In `Shape`, `heads` are value heads and
/// `kv_heads` are heads of queries and keys.
#[derive(Clone, Copy)]
struct Sizes {
    shape: Shape,
    channels: usize,
}

impl Sizes {
    fn of<R: Real>(
        inputs: &RecurrentInputs<R>,
        shape: Shape,
        options: &RecurrentOptions,
    ) -> Result<Self, Error> {
        shape.check()?;
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        check_sizes("shape", &[("length", q_len)])?;
        expect_length("q", inputs.q, batch * kv_heads * q_len * head_dim)?;
        expect_length("k", inputs.k, batch * kv_heads * kv_len * head_dim)?;
        expect_length("k", inputs.k, inputs.q.len())?;
        expect_length("v", inputs.v, batch * heads * q_len * value_dim)?;
        let tokens = batch * heads * q_len;
        let by_channel = head_dim > 1 && inputs.decay.len() == tokens * head_dim;
        if !inputs.decay.is_empty() && !by_channel {
            expect_length("decay", inputs.decay, tokens)?;
        }
        expect_length("beta", inputs.beta, if options.delta { tokens } else { 0 })?;
        let states = options.sequences.len() * heads * head_dim * value_dim;
        if !inputs.initial.is_empty() {
            expect_length("initial", inputs.initial, states)?;
        }
        for [b, begin, end] in &options.sequences {
            if *b >= batch || begin > end || *end > q_len {
                let (tensor, value) = ("sequences", *end as f64);
                return Err(Error::Option { option: tensor, value, expected: "rows of the batch entry" });
            }
        }
        Ok(Sizes { shape, channels: if by_channel { head_dim } else { 1 } })
    }

    /// The row of a token in tensors with value heads, and with heads of queries and keys.
    fn rows(&self, b: usize, h: usize, t: usize) -> [usize; 2] {
        let Shape { heads, kv_heads, q_len, .. } = self.shape;
        [(b * heads + h) * q_len + t, (b * kv_heads + h / (heads / kv_heads)) * q_len + t]
    }

    fn factor<R: Real>(&self, decay: &[R], row: usize, f: usize) -> R {
        match decay {
            [] => R::one(),
            _ => decay[row * self.channels + f % self.channels].exp(),
        }
    }
}

/// Returns a row of q or k as it is used, and the factor that gave it the length 1.
fn unit<R: Real>(x: &[R], eps: Option<f64>) -> (Vec<R>, R) {
    let Some(eps) = eps else { return (x.to_vec(), R::one()) };
    let square = x.iter().fold(R::zero(), |sum, x| sum + *x * *x);
    let factor = R::one() / (square + R::of(f64::from(eps_in_f32(eps)))).sqrt();
    (x.iter().map(|x| *x * factor).collect(), factor)
}

/// Computes the recurrence of each value head, token by token (Yang et al. 2024, "Gated Delta
/// Networks"):
///
/// ```text
/// S = Diag(exp(decay)) S
/// S = S + k uᵀ          with u = v, or u = β (v − Sᵀ k) for a delta rule
/// out = scale · Sᵀ q
/// ```
///
/// In `shape`, `heads` are value heads and `kv_heads` are heads of queries and keys.
///
/// # Errors
/// Slices whose lengths do not match `shape`. Sequences outside of the batch.
pub fn recurrent_attention<R: Real>(
    inputs: &RecurrentInputs<R>,
    shape: Shape,
    options: &RecurrentOptions,
) -> Result<RecurrentAttended<R>, Error> {
    let sizes = Sizes::of(inputs, shape, options)?;
    let Shape { batch, heads, q_len, head_dim, value_dim, .. } = shape;
    let size = head_dim * value_dim;
    let mut out = vec![R::zero(); batch * heads * q_len * value_dim];
    let mut states = vec![R::zero(); batch * q_len * heads * size];
    let mut last = Vec::new();
    let scale = R::of(options.scale);
    for (n, [b, begin, end]) in options.sequences.iter().copied().enumerate() {
        for h in 0..heads {
            let mut state = match inputs.initial {
                [] => vec![R::zero(); size],
                initial => initial[(n * heads + h) * size..][..size].to_vec(),
            };
            for t in begin..end {
                let [row, key_row] = sizes.rows(b, h, t);
                let (q, _) = unit(&inputs.q[key_row * head_dim..][..head_dim], options.unit_eps);
                let (k, _) = unit(&inputs.k[key_row * head_dim..][..head_dim], options.unit_eps);
                for (f, of_feature) in state.chunks_exact_mut(value_dim).enumerate() {
                    let factor = sizes.factor(inputs.decay, row, f);
                    of_feature.iter_mut().for_each(|s| *s = *s * factor);
                }
                for c in 0..value_dim {
                    let mut update = inputs.v[row * value_dim + c];
                    if options.delta {
                        let known =
                            (0..head_dim).fold(R::zero(), |sum, f| sum + state[f * value_dim + c] * k[f]);
                        update = (update - known) * inputs.beta[row];
                    }
                    let mut sum = R::zero();
                    for f in 0..head_dim {
                        let s = &mut state[f * value_dim + c];
                        *s = *s + k[f] * update;
                        sum = sum + *s * q[f];
                    }
                    out[row * value_dim + c] = sum * scale;
                }
                states[((b * q_len + t) * heads + h) * size..][..size].copy_from_slice(&state);
            }
            last.extend(state);
        }
    }
    Ok(RecurrentAttended { out, last, states })
}

/// Computes the gradients of `Σ out · d_out + Σ last · d_last`. `d_last` may be empty.
///
/// # Errors
/// As [`recurrent_attention`].
pub fn recurrent_attention_backward<R: Real>(
    inputs: &RecurrentInputs<R>,
    shape: Shape,
    options: &RecurrentOptions,
    d_out: &[R],
    d_last: &[R],
) -> Result<RecurrentGradients<R>, Error> {
    let sizes = Sizes::of(inputs, shape, options)?;
    let Shape { batch, heads, q_len, head_dim, value_dim, .. } = shape;
    let size = head_dim * value_dim;
    expect_length("d_out", d_out, batch * heads * q_len * value_dim)?;
    if !d_last.is_empty() {
        expect_length("d_last", d_last, options.sequences.len() * heads * size)?;
    }
    let states = recurrent_attention(inputs, shape, options)?.states;
    let zeros = |n: usize| vec![R::zero(); n];
    let mut all = RecurrentGradients {
        d_q: zeros(inputs.q.len()),
        d_k: zeros(inputs.k.len()),
        d_v: zeros(inputs.v.len()),
        d_decay: zeros(inputs.decay.len()),
        d_beta: zeros(inputs.beta.len()),
        d_initial: zeros(options.sequences.len() * heads * size),
        d_states: zeros(states.len()),
    };
    let scale = R::of(options.scale);
    let dot = |a: &[R], b: &[R]| a.iter().zip(b).fold(R::zero(), |sum, (a, b)| sum + *a * *b);
    for (n, [b, begin, end]) in options.sequences.iter().copied().enumerate() {
        for h in 0..heads {
            // The gradient of the state after a token.
            let mut d_state = match d_last {
                [] => zeros(size),
                d_last => d_last[(n * heads + h) * size..][..size].to_vec(),
            };
            for t in (begin..end).rev() {
                let [row, key_row] = sizes.rows(b, h, t);
                let after = &states[((b * q_len + t) * heads + h) * size..][..size];
                let initial: &[R] = match inputs.initial {
                    [] => &zeros(size),
                    initial => &initial[(n * heads + h) * size..][..size],
                };
                let before = if t == begin {
                    initial
                } else {
                    &states[((b * q_len + t - 1) * heads + h) * size..][..size]
                };
                let factors: Vec<R> = (0..head_dim).map(|f| sizes.factor(inputs.decay, row, f)).collect();
                let decayed: Vec<R> = (0..size).map(|at| before[at] * factors[at / value_dim]).collect();
                let (q, q_factor) = unit(&inputs.q[key_row * head_dim..][..head_dim], options.unit_eps);
                let (k, k_factor) = unit(&inputs.k[key_row * head_dim..][..head_dim], options.unit_eps);
                let d_row = &d_out[row * value_dim..][..value_dim];
                let mut d_q = zeros(head_dim);
                let mut d_k = zeros(head_dim);
                for f in 0..head_dim {
                    d_q[f] = dot(&after[f * value_dim..][..value_dim], d_row) * scale;
                    let of_feature = &mut d_state[f * value_dim..][..value_dim];
                    of_feature.iter_mut().zip(d_row).for_each(|(d, d_out)| *d = *d + q[f] * *d_out * scale);
                }
                all.d_states[((b * q_len + t) * heads + h) * size..][..size].copy_from_slice(&d_state);
                for c in 0..value_dim {
                    let column = |x: &[R], f: usize| x[f * value_dim + c];
                    let d_update = (0..head_dim).fold(R::zero(), |sum, f| sum + k[f] * column(&d_state, f));
                    let value = inputs.v[row * value_dim + c];
                    let known = (0..head_dim).fold(R::zero(), |sum, f| sum + k[f] * column(&decayed, f));
                    let rate = if options.delta { inputs.beta[row] } else { R::one() };
                    let update = if options.delta { (value - known) * rate } else { value };
                    all.d_v[row * value_dim + c] = d_update * rate;
                    if options.delta {
                        all.d_beta[row] = all.d_beta[row] + d_update * (value - known);
                    }
                    for f in 0..head_dim {
                        let at = f * value_dim + c;
                        d_k[f] = d_k[f] + d_state[at] * update;
                        if options.delta {
                            d_k[f] = d_k[f] - decayed[at] * d_update * rate;
                            d_state[at] = d_state[at] - k[f] * d_update * rate;
                        }
                    }
                }
                for at in 0..size {
                    let f = at / value_dim;
                    if !inputs.decay.is_empty() {
                        let to = &mut all.d_decay[row * sizes.channels + f % sizes.channels];
                        *to = *to + d_state[at] * decayed[at];
                    }
                    d_state[at] = d_state[at] * factors[f];
                }
                for (d, x, factor, to) in
                    [(&d_q, &q, q_factor, &mut all.d_q), (&d_k, &k, k_factor, &mut all.d_k)]
                {
                    let along = if options.unit_eps.is_some() { dot(d, x) } else { R::zero() };
                    for f in 0..head_dim {
                        let to = &mut to[key_row * head_dim + f];
                        *to = *to + (d[f] - x[f] * along) * factor;
                    }
                }
            }
            all.d_initial[(n * heads + h) * size..][..size].copy_from_slice(&d_state);
        }
    }
    Ok(all)
}
