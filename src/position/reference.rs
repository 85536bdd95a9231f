//! Rotary, sinusoidal and learned positions on the host, with sin and cos of every angle.

use super::rows::expect_axes;
use super::{
    MAX_POSITION, PositionTable, RopeConfig, RopeOrder, RowPositions, check_base, check_channels, check_rows,
    check_start, sinusoid_frequencies,
};
use crate::tensor::{Error, HostTensor, Real, axes as axis_names, check_sizes, count, expect_length};

/// Returns the position of row `i` of sequence `b` on an axis. Positions past `last` count as
/// `last`. A tensor with one axis has the same position on all axes.
fn position(at: &RowPositions<HostTensor<u32>>, [b, axis, i]: [usize; 3], length: usize, last: u32) -> usize {
    let position = match at {
        RowPositions::Start(start) => u64::from(*start) + i as u64,
        RowPositions::Tensor(t) => {
            let further = if t.shape[2] == length { 0 } else { i as u64 };
            u64::from(t.at([b, axis, i, 0]).unwrap_or(0)) + further
        }
    };
    position.min(u64::from(last)) as usize
}

/// Checks a tensor of positions on one axis or on `axes`.
pub(crate) fn check_positions(
    t: &HostTensor<u32>,
    [batch, length]: [usize; 2],
    axes: usize,
) -> Result<(), Error> {
    t.check("positions", [batch, t.shape[1], length, 1])?;
    expect_axes(t.shape, axes)
}

/// Checks rows and their positions, which are on one axis or on `axes`.
fn check<T>(
    x: &[T],
    shape: [usize; 4],
    at: &RowPositions<HostTensor<u32>>,
    axes: usize,
) -> Result<(), Error> {
    if let Some(axis) = shape.iter().position(|n| *n == 0) {
        return Err(Error::ZeroSize { tensor: "x", axis: axis_names("x")[axis] });
    }
    expect_length("x", x, count(shape))?;
    let RowPositions::Tensor(t) = at else { return Ok(()) };
    check_positions(t, [shape[0], shape[2]], axes)
}

/// Rotary position embedding (Su et al. 2021) of `x`, `[batch, heads, length, dim]`.
///
/// It rotates the first `rotary_dim` channels in pairs and copies the rest. It rotates pair `n` of
/// a row at position `p` by the angle `p · frequency[n]`, times the amplitude. With
/// [`RopeConfig::sections`], `p` is the row's position on the axis of the pair.
///
/// # Errors
/// - the errors of [`RopeConfig::check`]
/// - slices that do not fit `shape`
/// - a `rotary_dim` above dim
/// - a start from which the rows reach past [`MAX_POSITION`]
pub fn rotate<R: Real>(
    x: &[R],
    shape: [usize; 4],
    rope: &RopeConfig,
    at: RowPositions<HostTensor<u32>>,
) -> Result<Vec<R>, Error> {
    let [cos, sin] = turns(x, shape, rope, &at)?;
    rotate_by(x, shape, rope.order, &cos, &sin)
}

/// Returns cosines and sines of the rows' angles, `[batch, length, pairs]`, times the amplitude.
fn turns<R: Real>(
    x: &[R],
    shape: [usize; 4],
    rope: &RopeConfig,
    at: &RowPositions<HostTensor<u32>>,
) -> Result<[Vec<R>; 2], Error> {
    rope.check()?;
    check(x, shape, at, rope.axes())?;
    check_start(at, shape[2])?;
    let [batch, _, length, _] = shape;
    let frequencies = rope.frequencies();
    let rows = (0..batch).flat_map(|b| (0..length).map(move |i| (b, i)));
    let angles: Vec<f64> = rows
        .flat_map(|(b, i)| {
            frequencies.iter().enumerate().map(move |(n, frequency)| {
                let axis = rope.sections.map_or(0, |sections| sections.axis(n));
                position(at, [b, axis, i], length, MAX_POSITION) as f64 * frequency
            })
        })
        .collect();
    let amplitude = R::of(f64::from(rope.amplitude() as f32));
    Ok([f64::cos, f64::sin].map(|f| angles.iter().map(|a| amplitude * R::of(f(*a))).collect()))
}

/// The gradient of `Σ out · d_out` with respect to the `x` of [`rotate`]. It is `d_out` rotated by
/// the opposite angles, times the amplitude.
///
/// # Errors
/// As [`rotate`].
pub fn rotate_backward<R: Real>(
    d_out: &[R],
    shape: [usize; 4],
    rope: &RopeConfig,
    at: RowPositions<HostTensor<u32>>,
) -> Result<Vec<R>, Error> {
    let [cos, sin] = turns(d_out, shape, rope, &at)?;
    rotate_by_backward(d_out, shape, rope.order, &cos, &sin)
}

/// The gradient of `Σ out · d_out` with respect to the `x` of [`rotate_by`]. For pair `(a, b)` of
/// channels it is `d_a = d_a′ cos + d_b′ sin`, `d_b = d_b′ cos − d_a′ sin`.
///
/// # Errors
/// As [`rotate_by`].
pub fn rotate_by_backward<R: Real>(
    d_out: &[R],
    shape: [usize; 4],
    order: RopeOrder,
    cos: &[R],
    sin: &[R],
) -> Result<Vec<R>, Error> {
    let back: Vec<R> = sin.iter().map(|s| -*s).collect();
    rotate_by(d_out, shape, order, cos, &back)
}

/// [`rotate`] with the caller's cosines and sines, `[batch, length, pairs]`. Pair `(a, b)` of
/// channels becomes `a′ = a cos − b sin`, `b′ = a sin + b cos`.
///
/// # Errors
/// Slices that do not fit `shape`, or more pairs than `dim / 2`.
pub fn rotate_by<R: Real>(
    x: &[R],
    shape: [usize; 4],
    order: RopeOrder,
    cos: &[R],
    sin: &[R],
) -> Result<Vec<R>, Error> {
    check(x, shape, &RowPositions::Start(0), 1)?;
    let [batch, heads, length, dim] = shape;
    let rows = batch * length;
    let pairs = cos.len() / rows;
    expect_length("cos", cos, rows * pairs)?;
    expect_length("sin", sin, rows * pairs)?;
    if 2 * pairs > dim {
        let expected = format!("at least {} (`rotary_dim` of the rope)", 2 * pairs);
        return Err(Error::Shape {
            tensor: "x",
            axis: axis_names("x")[3],
            expected,
            got: dim,
            shape,
            wanted: None,
        });
    }
    let mut out = x.to_vec();
    for (n, row) in out.chunks_exact_mut(dim).enumerate() {
        let [b, i] = [n / length / heads, n % length];
        for pair in 0..pairs {
            let [first, second] = order.channels(pair, pairs);
            let (c, s) = (cos[(b * length + i) * pairs + pair], sin[(b * length + i) * pairs + pair]);
            let (x, y) = (row[first], row[second]);
            (row[first], row[second]) = (x * c - y * s, x * s + y * c);
        }
    }
    Ok(out)
}

/// The sinusoidal encoding (Vaswani et al. 2017) of `length` positions from `start` on,
/// `[length, dim]`.
///
/// Channel `2n` is `sin(position · base^(−2n / dim))`, channel `2n + 1` the cosine.
///
/// # Errors
/// - a width of 0 or above 65536
/// - a base that is not finite and above 1
/// - positions past [`MAX_POSITION`]
pub fn sinusoid<R: Real>(dim: usize, base: f64, start: u32, length: usize) -> Result<Vec<R>, Error> {
    check_channels("sinusoid dim", dim)?;
    check_base("sinusoid base", base)?;
    if length == 0 {
        return Ok(Vec::new());
    }
    check_start(&RowPositions::<()>::Start(start), length)?;
    Ok((0..length).flat_map(|i| encoding(dim, base, start as usize + i)).collect())
}

fn encoding<R: Real>(dim: usize, base: f64, position: usize) -> Vec<R> {
    let angles = sinusoid_frequencies(dim, base).map(|frequency| position as f64 * frequency);
    let mut row: Vec<R> = angles.flat_map(|a| [R::of(a.sin()), R::of(a.cos())]).collect();
    row.truncate(dim);
    row
}

/// Returns `scale · x + table[position]` for `x` `[batch, heads, length, dim]`.
///
/// The scale is rounded to f32, as on a device. The table is the base of the sinusoidal encoding,
/// or a learned table `[rows, dim]`.
///
/// # Errors
/// - slices that do not fit `shape`
/// - a start from which the rows reach past the table or past [`MAX_POSITION`]
/// - the errors of [`sinusoid`]
pub fn add_positions<R: Real>(
    x: &[R],
    shape: [usize; 4],
    table: PositionTable<f64, &[R]>,
    at: RowPositions<HostTensor<u32>>,
    scale: f64,
) -> Result<Vec<R>, Error> {
    check(x, shape, &at, 1)?;
    let [_, heads, length, dim] = shape;
    let last = match table {
        PositionTable::Sinusoid(base) => {
            check_channels("sinusoid dim", dim)?;
            check_base("sinusoid base", base)?;
            check_start(&at, length)?;
            MAX_POSITION
        }
        PositionTable::Learned(table) => {
            let rows = table.len() / dim;
            expect_length("table", table, rows.max(1) * dim)?;
            last_row(&at, shape, rows)?
        }
    };
    let scale = R::of(f64::from(scale as f32));
    let mut out = x.to_vec();
    for (n, row) in out.chunks_exact_mut(dim).enumerate() {
        let position = position(&at, [n / length / heads, 0, n % length], length, last);
        let added = match table {
            PositionTable::Sinusoid(base) => encoding(dim, base, position),
            PositionTable::Learned(table) => table[position * dim..][..dim].to_vec(),
        };
        row.iter_mut().zip(added).for_each(|(x, t)| *x = scale * *x + t);
    }
    Ok(out)
}

/// Returns the last position of a learned table. Later positions count as the last.
fn last_row(at: &RowPositions<HostTensor<u32>>, shape: [usize; 4], rows: usize) -> Result<u32, Error> {
    check_rows(at, shape[2], "table", [1, 1, rows, shape[3]])?;
    Ok(u32::try_from(rows - 1).unwrap_or(u32::MAX))
}

/// The gradients of [`add_positions_backward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PositionGradients<R> {
    /// `[batch, heads, length, dim]`.
    pub d_x: Vec<R>,
    /// `[rows, dim]`.
    pub d_table: Vec<R>,
}

/// The gradients of `Σ out · d_out` with respect to the inputs of [`add_positions`] with a learned
/// table of `rows`.
///
/// `d_x` is `scale · d_out`. `d_table`, `[rows, dim]`, holds for each row the sum of the `d_out` of
/// all rows at its position. The sum runs batch entry by batch entry, head by head, row by row. For
/// the sinusoidal encoding use `d_x` alone.
///
/// # Errors
/// As [`add_positions`], and for no rows.
pub fn add_positions_backward<R: Real>(
    d_out: &[R],
    shape: [usize; 4],
    rows: usize,
    at: RowPositions<HostTensor<u32>>,
    scale: f64,
) -> Result<PositionGradients<R>, Error> {
    check(d_out, shape, &at, 1)?;
    check_sizes("table", &[("rows", rows)])?;
    let [_, heads, length, dim] = shape;
    let last = last_row(&at, shape, rows)?;
    let scale = R::of(f64::from(scale as f32));
    let d_x = d_out.iter().map(|d| scale * *d).collect();
    let mut d_table = vec![R::zero(); rows * dim];
    for (n, row) in d_out.chunks_exact(dim).enumerate() {
        let position = position(&at, [n / length / heads, 0, n % length], length, last);
        let sums = &mut d_table[position * dim..][..dim];
        sums.iter_mut().zip(row).for_each(|(sum, d)| *sum = *sum + *d);
    }
    Ok(PositionGradients { d_x, d_table })
}
