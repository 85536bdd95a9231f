//! Attention within buckets of a locality-sensitive hash (Kitaev et al. 2020, "Reformer").

use crate::attention::scale_in_f32;
use crate::tensor::{Error, Real, check_sizes, count, expect_length};

/// The score of a token with itself. It is so low that a token attends to itself only if it sees no
/// other key.
const SELF_SCORE: f64 = -5e4;
/// The smallest divisor of keys: shorter rows are divided by it.
const SHORTEST: f64 = 1e-12;

/// The dimensions of attention whose queries and keys are one tensor,
/// `[batch, heads, length, head_dim]`. Values are `[batch, heads, length, value_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LshShape {
    /// Independent sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub length: usize,
    /// Channels of queries and keys.
    pub head_dim: usize,
    /// Channels of values and of the output.
    pub value_dim: usize,
}

/// The hashes of tokens, and the options of attention within buckets.
#[derive(Clone, Copy, Debug)]
pub struct LshHashed<'a, R> {
    /// The buckets, `[batch, heads, rounds, length]`, as [`lsh_buckets`] returns them.
    pub buckets: &'a [u32],
    /// Rounds of hashing.
    pub rounds: usize,
    /// The number of tokens in a chunk, after sorting by bucket and position. A token sees the
    /// tokens of its bucket in its chunk and in the previous chunk. The first chunk sees the last.
    /// `None` lets a token see its whole bucket.
    pub chunk: Option<usize>,
    /// True if a token sees no later token.
    pub causal: bool,
    /// The factor of scores, rounded to f32. `None` stands for `1 / √head_dim`.
    pub scale: Option<f64>,
    /// The number of tokens of each sequence, `[batch]`; `None` for all. Further tokens see no
    /// token, and no token sees them.
    pub lengths: Option<&'a [u32]>,
    /// Normalised keys, `[batch, heads, length, head_dim]`, for tests of keys that a kernel
    /// rounded.
    pub keys: Option<&'a [R]>,
}

/// The results of [`lsh_attention`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LshAttended<R> {
    /// `[batch, heads, length, value_dim]`.
    pub out: Vec<R>,
    /// `[batch, heads, length]`.
    pub lse: Vec<R>,
    /// The log-sum-exp of each round, `[batch, heads, rounds, length]`. A pair that several rounds
    /// contain is divided among them.
    pub lse_rounds: Vec<R>,
}

/// The results of [`lsh_attention_backward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LshGradients<R> {
    /// `[batch, heads, length, head_dim]`: the gradient as queries and, through their
    /// normalisation, as keys.
    pub d_qk: Vec<R>,
    /// `[batch, heads, length, value_dim]`.
    pub d_v: Vec<R>,
}

impl LshShape {
    /// `[batch, heads, length, head_dim]`.
    pub const fn qk(&self) -> [usize; 4] {
        [self.batch, self.heads, self.length, self.head_dim]
    }

    /// `[batch, heads, length, value_dim]`.
    pub const fn v(&self) -> [usize; 4] {
        [self.batch, self.heads, self.length, self.value_dim]
    }

    /// `[batch, heads, rounds, length]`.
    pub const fn buckets(&self, rounds: usize) -> [usize; 4] {
        [self.batch, self.heads, rounds, self.length]
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let LshShape { batch, heads, length, head_dim, value_dim } = *self;
        let sizes = [
            ("batch", batch),
            ("heads", heads),
            ("length", length),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
        ];
        check_sizes("shape", &sizes)
    }

    fn tokens(&self, b: usize, lengths: Option<&[u32]>) -> usize {
        lengths.map_or(self.length, |lengths| self.length.min(lengths[b] as usize))
    }
}

/// Returns the bucket of each token in each round, `[batch, heads, rounds, length]`. It is
/// `argmax([x R; −x R])`, the lowest of equals, for `rotations` R
/// `[rounds, head_dim, n_buckets / 2]`. Tokens past `lengths` are in a separate bucket,
/// `n_buckets`.
///
/// # Errors
/// Slices of a wrong length, and a number of buckets that is 0 or odd.
pub fn lsh_buckets<R: Real>(
    qk: &[R],
    rotations: &[R],
    shape: LshShape,
    rounds: usize,
    n_buckets: usize,
    lengths: Option<&[u32]>,
) -> Result<Vec<u32>, Error> {
    shape.check()?;
    expect_length("qk", qk, count(shape.qk()))?;
    check_sizes("shape", &[("rounds", rounds), ("n_buckets", n_buckets)])?;
    if !n_buckets.is_multiple_of(2) {
        let (what, by) = ("n_buckets", "a rotation and its negative");
        return Err(Error::NotDivisible { what, value: n_buckets, by, divisor: 2 });
    }
    let LshShape { batch, heads, length, head_dim, .. } = shape;
    let half = n_buckets / 2;
    expect_length("rotations", rotations, count([1, rounds, head_dim, half]))?;
    lengths.map_or(Ok(()), |lengths| expect_length("lengths", lengths, batch))?;
    let bucket = |n: usize| {
        let (i, round, head) = (n % length, n / length % rounds, n / length / rounds);
        if i >= shape.tokens(head / heads, lengths) {
            return n_buckets as u32;
        }
        let x = &qk[(head * length + i) * head_dim..][..head_dim];
        let along = |c: usize| {
            x.iter()
                .enumerate()
                .fold(R::zero(), |sum, (d, x)| sum + *x * rotations[(round * head_dim + d) * half + c])
        };
        let all = (0..half).map(along).collect::<Vec<_>>();
        let both = all.iter().copied().chain(all.iter().map(|x| -*x));
        both.enumerate().fold((0, R::neg_infinity()), |best, (n, x)| if x > best.1 { (n, x) } else { best }).0
            as u32
    };
    Ok((0..count(shape.buckets(rounds))).map(bucket).collect())
}

/// Returns the pairs that each round contains, `[batch, heads, rounds, length, length]`.
///
/// # Errors
/// Slices of a wrong length, and a chunk of no tokens.
pub fn lsh_pairs<R: Real>(hashed: &LshHashed<R>, shape: LshShape) -> Result<Vec<bool>, Error> {
    hashed.check(&shape)?;
    let LshShape { heads, length, .. } = shape;
    let mut pairs = Vec::with_capacity(hashed.buckets.len() * length);
    for (n, buckets) in hashed.buckets.chunks_exact(length).enumerate() {
        let tokens = shape.tokens(n / hashed.rounds / heads, hashed.lengths);
        let mut order: Vec<usize> = (0..tokens).collect();
        order.sort_by_key(|i| (buckets[*i], *i));
        let mut chunks = vec![0; length];
        let mut last = 0;
        if let Some(chunk) = hashed.chunk {
            order.iter().enumerate().for_each(|(place, i)| chunks[*i] = place / chunk);
            last = tokens.saturating_sub(1) / chunk;
        }
        let near = |i: usize, j: usize| {
            let before = if chunks[i] == 0 { last } else { chunks[i] - 1 };
            chunks[j] == chunks[i] || chunks[j] == before
        };
        for i in 0..length {
            pairs.extend((0..length).map(|j| {
                let there = i < tokens && j < tokens;
                there && buckets[i] == buckets[j] && near(i, j) && !(hashed.causal && j > i)
            }));
        }
    }
    Ok(pairs)
}

/// The pairs of a head: the number of rounds that contain each pair, and its score.
struct Pairs<R> {
    /// `[length, length]`; 0 for pairs that no round contains.
    counts: Vec<usize>,
    scores: Vec<R>,
}

impl<R: Real> LshHashed<'_, R> {
    fn check(&self, shape: &LshShape) -> Result<(), Error> {
        shape.check()?;
        check_sizes("shape", &[("rounds", self.rounds), ("chunk", self.chunk.unwrap_or(1))])?;
        expect_length("buckets", self.buckets, count(shape.buckets(self.rounds)))?;
        self.keys.map_or(Ok(()), |keys| expect_length("keys", keys, count(shape.qk())))?;
        self.lengths.map_or(Ok(()), |lengths| expect_length("lengths", lengths, shape.batch))
    }

    fn scale(&self, shape: &LshShape) -> R {
        R::of(f64::from(scale_in_f32(self.scale, shape.head_dim)))
    }

    fn normalised(&self, qk: &[R], shape: &LshShape) -> Vec<R> {
        let unit = |x: &[R]| {
            let length = length_of(x).max(R::of(SHORTEST));
            x.iter().map(|x| *x / length).collect::<Vec<R>>()
        };
        self.keys.map_or_else(|| qk.chunks_exact(shape.head_dim).flat_map(unit).collect(), <[R]>::to_vec)
    }

    /// Returns the pairs of a head.
    fn of_head(&self, qk: &[R], keys: &[R], pairs: &[bool], head: usize, shape: &LshShape) -> Pairs<R> {
        let LshShape { length, head_dim, .. } = *shape;
        let all = length * length;
        let held = |n: usize| (0..self.rounds).filter(|r| pairs[(head * self.rounds + r) * all + n]).count();
        let row = |x: &'_ [R], i: usize| x[(head * length + i) * head_dim..][..head_dim].to_vec();
        let score = |n: usize| {
            let (i, j) = (n / length, n % length);
            if i == j { R::of(SELF_SCORE) } else { self.scale(shape) * dot(&row(qk, i), &row(keys, j)) }
        };
        Pairs { counts: (0..all).map(held).collect(), scores: (0..all).map(score).collect() }
    }
}

fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).fold(R::zero(), |sum, (a, b)| sum + *a * *b)
}

fn length_of<R: Real>(x: &[R]) -> R {
    dot(x, x).sqrt()
}

/// Returns `ln Σ exp`.
fn log_sum_exp<R: Real>(x: impl Iterator<Item = R> + Clone) -> R {
    let largest = x.clone().fold(R::neg_infinity(), |m, x| if x.is_nan() || x > m { x } else { m });
    if largest == R::neg_infinity() {
        return largest;
    }
    largest + x.fold(R::zero(), |sum, x| sum + (x - largest).exp()).ln()
}

/// Computes attention for each round, then combines the rounds by their weights. The weight of a
/// pair that `n` rounds contain is divided by `n` in each of them. Together this is a softmax over
/// all keys of all rounds. The score is `scale · q · k / |k|` with `q = k = qk`, and −50000 for a
/// token with itself.
///
/// # Errors
/// Slices of a wrong length, and a chunk of no tokens.
pub fn lsh_attention<R: Real>(
    qk: &[R],
    v: &[R],
    hashed: &LshHashed<R>,
    shape: LshShape,
) -> Result<LshAttended<R>, Error> {
    let pairs = lsh_pairs(hashed, shape)?;
    expect_length("qk", qk, count(shape.qk()))?;
    expect_length("v", v, count(shape.v()))?;
    let LshShape { batch, heads, length, value_dim, .. } = shape;
    let keys = hashed.normalised(qk, &shape);
    let mut out = vec![R::zero(); v.len()];
    let mut lse = Vec::with_capacity(batch * heads * length);
    let mut lse_rounds = vec![R::neg_infinity(); hashed.buckets.len()];
    for head in 0..batch * heads {
        let Pairs { counts, scores } = hashed.of_head(qk, &keys, &pairs, head, &shape);
        for i in 0..length {
            let weight = |n: usize| scores[n] - R::of(counts[n] as f64).ln();
            let mut of_rounds = Vec::new();
            for round in 0..hashed.rounds {
                let row = head * hashed.rounds + round;
                let held =
                    (i * length..(i + 1) * length).filter(|n| pairs[row * length * length + n]).map(weight);
                let total = log_sum_exp(held);
                lse_rounds[row * length + i] = total;
                of_rounds.push(total);
            }
            let total = log_sum_exp(of_rounds.into_iter());
            lse.push(total);
            for n in (i * length..(i + 1) * length).filter(|n| counts[*n] > 0) {
                let (share, value) = ((scores[n] - total).exp(), (head * length + n % length) * value_dim);
                for d in 0..value_dim {
                    let o = (head * length + i) * value_dim + d;
                    out[o] = out[o] + share * v[value + d];
                }
            }
        }
    }
    Ok(LshAttended { out, lse, lse_rounds })
}

/// Computes the gradients of `Σ out · d_out + Σ lse · d_lse` with respect to the inputs of
/// [`lsh_attention`]. Buckets, and the score of a token with itself, have no gradient. With the
/// weights `P` and `k = qk / |qk|`:
///
/// ```text
/// d_v[j] = Σᵢ P[i, j] · d_out[i]                       D[i] = Σⱼ P[i, j] · (d_out[i] · v[j]) − d_lse[i]
/// dS[i, j] = P[i, j] · (d_out[i] · v[j] − D[i])        d_q[i] = scale · Σⱼ dS[i, j] · k[j]
/// d_k[j] = scale · Σᵢ dS[i, j] · q[i]                  d_qk = d_q + (d_k − k (k · d_k)) / |qk|
/// ```
///
/// # Errors
/// As [`lsh_attention`].
pub fn lsh_attention_backward<R: Real>(
    qk: &[R],
    v: &[R],
    d_out: &[R],
    d_lse: Option<&[R]>,
    hashed: &LshHashed<R>,
    shape: LshShape,
) -> Result<LshGradients<R>, Error> {
    gradients([qk, v, d_out], d_lse, hashed, shape, false)
}

/// Computes the sums of the absolute values of the terms of [`lsh_attention_backward`], in the same
/// shapes.
///
/// # Errors
/// As [`lsh_attention`].
pub fn lsh_attention_backward_magnitudes<R: Real>(
    qk: &[R],
    v: &[R],
    d_out: &[R],
    d_lse: Option<&[R]>,
    hashed: &LshHashed<R>,
    shape: LshShape,
) -> Result<LshGradients<R>, Error> {
    gradients([qk, v, d_out], d_lse, hashed, shape, true)
}

fn gradients<R: Real>(
    [qk, v, d_out]: [&[R]; 3],
    d_lse: Option<&[R]>,
    hashed: &LshHashed<R>,
    shape: LshShape,
    magnitudes: bool,
) -> Result<LshGradients<R>, Error> {
    let lse = lsh_attention(qk, v, hashed, shape)?.lse;
    let pairs = lsh_pairs(hashed, shape)?;
    expect_length("d_out", d_out, count(shape.v()))?;
    d_lse.map_or(Ok(()), |d_lse| expect_length("d_lse", d_lse, lse.len()))?;
    let LshShape { batch, heads, length, head_dim, value_dim } = shape;
    let term = |x: R| if magnitudes { x.abs() } else { x };
    let terms = |x: &[R]| x.iter().map(|x| term(*x)).collect::<Vec<R>>();
    let minus = if magnitudes { R::one() } else { -R::one() };
    let keys = hashed.normalised(qk, &shape);
    let (of_q, of_k, of_v, d_out) = (terms(qk), terms(&keys), terms(v), terms(d_out));
    let scale = term(hashed.scale(&shape));
    let (mut d_q, mut d_k) = (vec![R::zero(); qk.len()], vec![R::zero(); qk.len()]);
    let mut d_v = vec![R::zero(); v.len()];
    for head in 0..batch * heads {
        let Pairs { counts, scores } = hashed.of_head(qk, &keys, &pairs, head, &shape);
        for i in (0..length).filter(|i| lse[head * length + i] != R::neg_infinity()) {
            let query = head * length + i;
            let d_row = &d_out[query * value_dim..][..value_dim];
            let weight = |j: usize| (scores[i * length + j] - lse[query]).exp();
            let d_weight = |j: usize| dot(d_row, &of_v[(head * length + j) * value_dim..][..value_dim]);
            let seen: Vec<usize> =
                (0..length).filter(|j| counts[i * length + j] > 0 && weight(*j) != R::zero()).collect();
            let sum = seen.iter().fold(R::zero(), |sum, j| sum + weight(*j) * d_weight(*j));
            let mean = d_lse.map_or(sum, |d_lse| sum + minus * term(d_lse[query]));
            for j in seen {
                let key = head * length + j;
                for d in 0..value_dim {
                    d_v[key * value_dim + d] = d_v[key * value_dim + d] + weight(j) * d_row[d];
                }
                if i == j {
                    continue;
                }
                let d_score = scale * weight(j) * (d_weight(j) + minus * mean);
                for d in 0..head_dim {
                    let (a, b) = (query * head_dim + d, key * head_dim + d);
                    d_q[a] = d_q[a] + d_score * of_k[b];
                    d_k[b] = d_k[b] + d_score * of_q[a];
                }
            }
        }
    }
    for (row, x) in qk.chunks_exact(head_dim).enumerate() {
        let at = row * head_dim..(row + 1) * head_dim;
        let (length, shortest) = (length_of(x), R::of(SHORTEST));
        let along = if length > shortest { dot(&of_k[at.clone()], &d_k[at.clone()]) } else { R::zero() };
        for n in at {
            d_q[n] = d_q[n] + (d_k[n] + minus * of_k[n] * along) / length.max(shortest);
        }
    }
    Ok(LshGradients { d_qk: d_q, d_v })
}
