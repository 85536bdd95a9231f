//! Score functions as presets.

use super::ScorePreset;
use super::masks::places;
use super::preset::{ANY, ONE, divisor, floats, numbers, size};
use crate::mask::mods::At;
use crate::tensor::{Error, HostTensor};

/// The distance by which the key follows the query; negative for earlier keys.
fn after(at: &At) -> i64 {
    i64::from(at.key) - i64::from(at.position)
}

/// Checks that a number is finite and more than 0.
fn positive(option: &'static str, value: f32) -> Result<f32, Error> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(Error::Option { option, value: value.into(), expected: "finite and more than 0" })
}

/// ALiBi: `score + slopes[h] · (j − p)` (Press et al. 2022, "Train short, test long").
///
/// `slopes` is `[batch, heads, 1, 1]`, any may be 1. [`alibi_slopes`] returns the paper's.
///
/// Built in: [`Mask::alibi`](crate::Mask::alibi).
///
/// # Errors
/// A table of another shape or length.
pub fn alibi(slopes: HostTensor<f32>) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
fn score_mod(score: f32, at: At) -> f32 {
    return score + slopes_at(at.batch, at.head, 0u, 0u) * f32(i32(at.key) - at.position);
}";
    let (slopes, table) = floats("slopes", slopes, [ANY, ANY, ONE, ONE])?;
    ScorePreset::adding("alibi", TEXT, &[], vec![table], move |at| {
        f64::from(slopes.at([at.batch, at.head, 0, 0])) * after(at) as f64
    })
}

/// Returns ALiBi's slopes, `2^(−8 · (h + 1) / heads)`: the paper's for a power of two of heads.
/// FlexAttention's examples use the formula for any number of heads.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|h| (-8.0 * h as f64 / heads as f64).exp2() as f32).collect()
}

/// Softcap: `cap · tanh(score / cap)` (Gemma 2, Grok-1).
///
/// Built in: [`Config::softcap`](crate::Config::softcap).
///
/// # Errors
/// A cap that is not finite or not more than 0.
pub fn softcap(cap: f32) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { cap: f32 }
fn score_mod(score: f32, at: At) -> f32 { return uniforms().cap * tanh(score / uniforms().cap); }";
    let wide = f64::from(positive("cap", cap)?);
    ScorePreset::new(
        "softcap",
        TEXT,
        &[cap.to_bits()],
        vec![],
        move |score, _| wide * (score / wide).tanh(),
        move |score, _| 1.0 - (score / wide).tanh().powi(2),
    )
}

/// Relative bias: a learned bias for each distance, `score + table[h, clamp(j − p, −r, r) + r]`.
/// Source: Shaw et al. 2018, "Self-attention with relative position representations", as a bias.
///
/// `table` is `[batch, heads, 1, 2·r + 1]`, the first two may be 1. Reverse tables that are indexed
/// by `p − j`, as in FlexAttention's example.
///
/// Built in: [`Mask::relative`](crate::Mask::relative), which also has a gradient.
///
/// # Errors
/// A table of another shape or length, or of an even number of distances.
pub fn relative(table: HostTensor<f32>) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { most: i32 }
fn score_mod(score: f32, at: At) -> f32 {
    let most = uniforms().most;
    let place = clamp(i32(at.key) - at.position, -most, most) + most;
    return score + table_at(at.batch, at.head, 0u, u32(place));
}";
    let (values, table) = floats("table", table, [ANY, ANY, ONE, ANY])?;
    let distances = size("distances", table.shape()[3])?;
    if distances % 2 == 0 {
        let expected = "odd, for distance 0 and equally many on both sides";
        return Err(Error::Option { option: "distances", value: distances.into(), expected });
    }
    let most = distances / 2;
    ScorePreset::adding("relative", TEXT, &[most], vec![table], move |at| {
        let most = i64::from(most);
        values.at([at.batch, at.head, 0, (after(at).clamp(-most, most) + most) as u32]).into()
    })
}

/// Relative bias on a grid: `score + table[h, Δrow + height − 1, Δcolumn + width − 1]`. It is a
/// learned bias for each distance from the query's point to the key's in their window. Source: Liu
/// et al. 2021, "Swin transformer", 3.2.
///
/// `table` is `[batch, heads, 2·height − 1, 2·width − 1]`, the first two may be 1. Tokens are the
/// points of windows of `[height, width]`, row by row in each window. Windows follow one another.
/// For one picture this is one window. For Swin, hide the pairs of different windows with
/// [`shifted_windows`](super::shifted_windows) or [`Pattern::Local`](crate::mask::Pattern::Local).
///
/// Distances are key − query. Swin's `relative_position_bias_table` counts query − key and has the
/// heads last. So reverse its rows and transpose it.
///
/// # Errors
/// A height or width of 0, a window of 2^29 points or more, a table of another shape or length.
pub fn relative_2d(table: HostTensor<f32>, window: [usize; 2]) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { height: i32, width: i32 }
fn score_mod(score: f32, at: At) -> f32 {
    let height = uniforms().height;
    let width = uniforms().width;
    let start = i32(at.sequence_start);
    let q = max(at.position - start, 0) % (height * width);
    let k = max(i32(at.key) - start, 0) % (height * width);
    let row = k / width - q / width + height - 1;
    let column = k % width - q % width + width - 1;
    return score + table_at(at.batch, at.head, u32(row), u32(column));
}";
    let [height, width] = [divisor("height", window[0])?, divisor("width", window[1])?];
    size("points of the window", window[0].saturating_mul(window[1]))?;
    let distances = window.map(|n| Some(2 * n - 1));
    let (values, table) = floats("table", table, [ANY, ANY, distances[0], distances[1]])?;
    ScorePreset::adding("relative_2d", TEXT, &[height, width], vec![table], move |at| {
        let [height, width] = [height, width].map(i64::from);
        let [q, k] = places(at).map(|place| place.max(0) % (height * width));
        let row = k / width - q / width + height - 1;
        let column = k % width - q % width + width - 1;
        values.at([at.batch, at.head, row as u32, column as u32]).into()
    })
}

/// T5's relative bias: `score + table[h, bucket(j − p)]`. Short distances have a learned bias each.
/// Longer distances share a bias in ranges that grow up to `longest`. Source: Raffel et al. 2020,
/// "Exploring the limits of transfer learning", 2.1.
///
/// `table` is `[batch, heads, 1, buckets]`, the first two may be 1. In an encoder (`bidirectional`)
/// the second half of the buckets is for later keys. In a decoder all buckets are for earlier keys.
/// T5 has 32 buckets and a `longest` of 128. It does not scale its scores: set
/// `Config::scale(1.0)`. A second table holds the bucket of each distance.
///
/// # Errors
/// - a table of another shape or length
/// - fewer than 2 buckets, or in an encoder fewer than 4 or an odd number
/// - a longest distance that is among the short ones
pub fn t5(table: HostTensor<f32>, longest: usize, bidirectional: bool) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { longest: i32 }
fn score_mod(score: f32, at: At) -> f32 {
    let most = uniforms().longest;
    let place = clamp(i32(at.key) - at.position, -most, most) + most;
    return score + table_at(at.batch, at.head, 0u, buckets_at(0u, 0u, 0u, u32(place)));
}";
    let (values, table) = floats("table", table, [ANY, ANY, ONE, ANY])?;
    let all = size("buckets", table.shape()[3])?;
    let sides = if bidirectional { 2 } else { 1 };
    let of_side = all / sides;
    if of_side < 2 || all % sides != 0 {
        let expected = if bidirectional { "even, and at least 4" } else { "at least 2" };
        return Err(Error::Option { option: "buckets", value: all.into(), expected });
    }
    let (exact, longest) = (of_side / 2, divisor("longest", longest)?);
    // The table has both directions.
    if !(exact + 1..1 << 24).contains(&longest) {
        let expected = "more than half the buckets of a side, and below 2^24";
        return Err(Error::Option { option: "longest", value: longest.into(), expected });
    }
    let bucket = |distance: i64| {
        let far = if bidirectional { distance.abs() } else { (-distance).max(0) } as u32;
        let later = if bidirectional && distance > 0 { of_side } else { 0 };
        if far < exact {
            return later + far;
        }
        let ratio = |n: u32| (f64::from(n) / f64::from(exact)).ln();
        // If a range begins at an integer distance, rounding must not put it into the range before.
        let range = ratio(far) / ratio(longest) * f64::from(of_side - exact) + 1e-9;
        later + (exact + range as u32).min(of_side - 1)
    };
    let most = i64::from(longest);
    let buckets: Vec<u32> = (-most..=most).map(bucket).collect();
    let tensor = HostTensor::new(&buckets, [1, 1, 1, buckets.len()]);
    let (buckets, second) = numbers("buckets", tensor, [ANY; 4])?;
    ScorePreset::adding("t5", TEXT, &[longest], vec![table, second], move |at| {
        let bucket = buckets.at([0, 0, 0, (after(at).clamp(-most, most) + most) as u32]);
        values.at([at.batch, at.head, 0, bucket]).into()
    })
}

/// Sandwich: `score + heads / (8 · (h + 1)) · Σᵢ cos((p − j) / 10000^(2·i / width))`, with `i`
/// below `width / 2`. The bias is a scaled inner product of sinusoidal positions, without learned
/// numbers. Source: Chi et al. 2023, "Dissecting transformer length extrapolation".
///
/// The table is `[1, heads, 1, longest]`, indexed by `|p − j|`. Distances from `longest` on count
/// as the last. The paper's `width` is 128.
///
/// # Errors
/// Numbers of 0, an odd width, 2^29 or more distances.
pub fn sandwich(heads: usize, width: usize, longest: usize) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
fn score_mod(score: f32, at: At) -> f32 {
    return score + table_at(0u, at.head, 0u, u32(abs(i32(at.key) - at.position)));
}";
    for (option, value) in [("heads", heads), ("width", width), ("longest", longest)] {
        divisor(option, value)?;
    }
    if !width.is_multiple_of(2) {
        return Err(Error::NotDivisible {
            what: "width",
            value: width,
            by: "the channels of a pair",
            divisor: 2,
        });
    }
    size("distances of all heads", heads.saturating_mul(longest))?;
    let frequencies: Vec<f64> =
        (0..width / 2).map(|i| 10000f64.powf(-2.0 * i as f64 / width as f64)).collect();
    let sums: Vec<f64> =
        (0..longest).map(|n| frequencies.iter().map(|f| (n as f64 * f).cos()).sum()).collect();
    let of_head = |h: usize| sums.iter().map(move |sum| (sum * heads as f64 / (8 * (h + 1)) as f64) as f32);
    let table: Vec<f32> = (0..heads).flat_map(of_head).collect();
    let tensor = HostTensor::new(&table, [1, heads, 1, longest]);
    let (values, table) = floats("table", tensor, [ANY; 4])?;
    ScorePreset::adding("sandwich", TEXT, &[], vec![table], move |at| {
        values.at([0, at.head, 0, after(at).unsigned_abs() as u32]).into()
    })
}

/// Graphormer's spatial encoding: `score + table[h, distances[b, i, j]]`. It is a learned bias for
/// each length of the shortest path between two nodes of a graph. Source: Ying et al. 2021, "Do
/// transformers really perform badly for graph representation?".
///
/// `table` is `[1, heads, 1, lengths]`, heads may be 1. `distances` is `[batch, 1, q_len, kv_len]`,
/// batch may be 1; [`shortest_paths`] computes one.
///
/// # Errors
/// Tables of another shape or length.
pub fn graphormer(table: HostTensor<f32>, distances: HostTensor<u32>) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
fn score_mod(score: f32, at: At) -> f32 {
    return score + table_at(0u, at.head, 0u, distances_at(at.batch, 0u, at.query, at.key));
}";
    let (values, table) = floats("table", table, [ONE, ANY, ONE, ANY])?;
    let (distances, second) = numbers("distances", distances, [ANY, ONE, ANY, ANY])?;
    ScorePreset::adding("graphormer", TEXT, &[], vec![table, second], move |at| {
        values.at([0, at.head, 0, distances.at([at.batch, 0, at.query, at.key])]).into()
    })
}

/// The entry of [`graphormer_edges`] past the end of a path.
const NO_EDGE: u32 = u32::MAX;

/// Graphormer's edge encoding: it adds the mean bias of the edges on the shortest path from `i` to
/// `j`. The bias of edge `n` is `table[h, n, type of the edge]`. Source: Ying et al. 2021, "Do
/// transformers really perform badly for graph representation?".
///
/// `table` is `[1, heads, edges, types]`, heads may be 1. `paths` is
/// `[batch, q_len, kv_len, edges]`, batch may be 1. It holds the types of a path's first edges, and
/// `u32::MAX` after its end.
///
/// # Errors
/// Tables of another shape or length, more than 1024 edges.
pub fn graphormer_edges(table: HostTensor<f32>, paths: HostTensor<u32>) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { edges: u32, no_edge: u32 }
fn score_mod(score: f32, at: At) -> f32 {
    var sum = 0.0;
    var n = 0u;
    while n < uniforms().edges {
        let edge = paths_at(at.batch, at.query, at.key, n);
        if edge == uniforms().no_edge { break; }
        sum += table_at(0u, at.head, n, edge);
        n++;
    }
    return score + sum / f32(max(n, 1u));
}";
    let edges = paths.shape[3];
    let (values, table) = floats("table", table, [ONE, ANY, Some(edges), ANY])?;
    let (paths, second) = numbers("paths", paths, [ANY; 4])?;
    if edges > 1024 {
        return Err(Error::Option { option: "edges", value: edges as f64, expected: "at most 1024" });
    }
    let edges = edges as u32;
    ScorePreset::adding("graphormer_edges", TEXT, &[edges, NO_EDGE], vec![table, second], move |at| {
        let path = (0..edges).map(|n| paths.at([at.batch, at.query, at.key, n]));
        let biases = path.take_while(|edge| *edge != NO_EDGE).zip(0..);
        let biases: Vec<f64> = biases.map(|(edge, n)| values.at([0, at.head, n, edge]).into()).collect();
        biases.iter().sum::<f64>() / biases.len().max(1) as f64
    })
}

/// Returns the lengths of the shortest paths between the nodes of a graph, `[nodes, nodes]` for
/// [`graphormer`].
///
/// A path that is longer than `longest`, or does not exist, counts as `longest + 1`. `adjacency` is
/// `[nodes, nodes]`, with `true` for an edge from the row's node to the column's.
///
/// # Errors
/// A matrix of another length.
pub fn shortest_paths(adjacency: &[bool], nodes: usize, longest: u32) -> Result<Vec<u32>, Error> {
    let expected = nodes.saturating_mul(nodes);
    if adjacency.len() != expected {
        return Err(Error::Length { tensor: "adjacency", expected, got: adjacency.len() });
    }
    let mut lengths = vec![longest.saturating_add(1); expected];
    for (from, row) in lengths.chunks_exact_mut(nodes.max(1)).enumerate() {
        row[from] = 0;
        let (mut reached, mut length) = (vec![from], 0);
        while !reached.is_empty() && length < longest {
            length += 1;
            let mut further = Vec::new();
            for node in reached {
                for (to, edge) in adjacency[node * nodes..][..nodes].iter().enumerate() {
                    if *edge && row[to] > length {
                        row[to] = length;
                        further.push(to);
                    }
                }
            }
            reached = further;
        }
    }
    Ok(lengths)
}

/// ReLU instead of the softmax: the score becomes `ln(max(score, 0))`. A score of 0 or below hides
/// the pair. `out · exp(lse)` is `Σⱼ max(score, 0) · v`. Source: Wortsman et al. 2023, "Replacing
/// softmax with ReLU in vision transformers".
///
/// # Errors
/// None.
pub fn relu() -> Result<ScorePreset, Error> {
    const TEXT: &str = "
fn score_mod(score: f32, at: At) -> f32 {
    if score <= 0.0 { return neg_inf(); }
    return log(score);
}";
    ScorePreset::new("relu", TEXT, &[], vec![], |score, _| score.max(0.0).ln(), |score, _| 1.0 / score)
}

/// Squared ReLU instead of the softmax: the score becomes `2 · ln(max(score, 0))`. A score of 0 or
/// below hides the pair. `out · exp(lse)` is `Σⱼ max(score, 0)² · v`. Sources: So et al. 2021,
/// "Primer", and Hua et al. 2022, "Transformer quality in linear time".
///
/// # Errors
/// None.
pub fn squared_relu() -> Result<ScorePreset, Error> {
    const TEXT: &str = "
fn score_mod(score: f32, at: At) -> f32 {
    if score <= 0.0 { return neg_inf(); }
    return 2.0 * log(score);
}";
    let value = |score: f64, _: &At| 2.0 * score.max(0.0).ln();
    ScorePreset::new("squared_relu", TEXT, &[], vec![], value, |score, _| 2.0 / score)
}

/// Sigmoid instead of the softmax: the score becomes `ln σ(score + bias)`. `out · exp(lse)` is
/// `Σⱼ σ(score + bias) · v`. The paper's bias is `−ln(kv_len)`. Source: Ramapuram et al. 2024,
/// "Theory, analysis, and best practices for sigmoid self-attention".
///
/// # Errors
/// A bias that is not finite.
pub fn sigmoid(bias: f32) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { bias: f32 }
fn score_mod(score: f32, at: At) -> f32 {
    let x = score + uniforms().bias;
    return min(x, 0.0) - log(1.0 + exp(-abs(x)));
}";
    if !bias.is_finite() {
        return Err(Error::Option { option: "bias", value: bias.into(), expected: "finite" });
    }
    let wide = f64::from(bias);
    ScorePreset::new(
        "sigmoid",
        TEXT,
        &[bias.to_bits()],
        vec![],
        move |score, _| (score + wide).min(0.0) - (-(score + wide).abs()).exp().ln_1p(),
        move |score, _| 1.0 / (1.0 + (score + wide).exp()),
    )
}

/// GELU instead of the softmax: the score becomes `ln(gelu(score) + offset)`. `gelu(x)` is
/// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))`. `out · exp(lse) − offset · Σⱼ v` is
/// `Σⱼ gelu(score) · v`. Sources: attention-gym's `activation`, and Hendrycks and Gimpel 2016,
/// "Gaussian error linear units".
///
/// `gelu` falls to −0.17, which the offset compensates. If the sum is not above 0, the pair is
/// hidden.
///
/// # Errors
/// An offset that is not finite or not more than 0.
pub fn gelu(offset: f32) -> Result<ScorePreset, Error> {
    const TEXT: &str = "
struct Uniforms { offset: f32, bend: f32, cube: f32 }
fn score_mod(score: f32, at: At) -> f32 {
    let u = uniforms();
    let half = 0.5 * score;
    let activated = half + half * tanh(u.bend * (score + u.cube * score * score * score)) + u.offset;
    if activated <= 0.0 { return neg_inf(); }
    return log(activated);
}";
    let (bend, cube) = ((std::f64::consts::FRAC_2_PI.sqrt()) as f32, 0.044715f32);
    let uniforms = [positive("offset", offset)?, bend, cube].map(f32::to_bits);
    let [offset, bend, cube] = [offset, bend, cube].map(f64::from);
    let tanh = move |x: f64| (bend * (x + cube * x.powi(3))).tanh();
    let activated = move |x: f64| 0.5 * x * (1.0 + tanh(x)) + offset;
    let slope = move |x: f64, _: &At| {
        let (t, inner) = (tanh(x), bend * (1.0 + 3.0 * cube * x * x));
        (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner) / activated(x)
    };
    ScorePreset::new("gelu", TEXT, &uniforms, vec![], move |x, _| activated(x).max(0.0).ln(), slope)
}
