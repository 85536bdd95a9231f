//! Masks over the points of a grid, of one, two or three axes.

use super::MaskPreset;
use super::masks::places;
use super::preset::{divisor, size};
use crate::tensor::{Error, LONGEST_AXIS};

/// A number for each of three axes. Absent axes come first and are 1.
type Axes = [u32; 3];

/// Returns `of` with ones in front. No number may be 0.
fn axes<const N: usize>(option: &'static str, of: [usize; N]) -> Result<Axes, Error> {
    if !(1..=3).contains(&N) {
        return Err(Error::Option { option: "axes of a grid", value: N as f64, expected: "1, 2 or 3" });
    }
    let mut all = [1; 3];
    for (to, n) in all[3 - N..].iter_mut().zip(of) {
        *to = divisor(option, n)?;
    }
    Ok(all)
}

fn points(axes: Axes) -> i64 {
    axes.iter().map(|n| i64::from(*n)).product()
}

fn check_points(axes: Axes) -> Result<(), Error> {
    // At most 2^87, which f64 holds.
    let all: f64 = axes.iter().map(|n| f64::from(*n)).product();
    if all > LONGEST_AXIS as f64 {
        return Err(Error::Option { option: "points of the canvas", value: all, expected: "below 2^29" });
    }
    Ok(())
}

/// Packs the numbers as a `vec3` of uniforms, and the number that fits behind it.
fn words(axes: Axes, behind: u32) -> [u32; 4] {
    [axes[0], axes[1], axes[2], behind]
}

/// Returns the `n`-th point, row by row.
fn point(n: i64, canvas: Axes) -> [i64; 3] {
    let [_, y, z] = canvas.map(i64::from);
    [n / (y * z), n / z % y, n % z]
}

/// Returns the first point of a window of `kernel` points around `q`, on an axis of `len` points.
/// The window moves inward at the edges.
fn window(q: i64, len: i64, kernel: i64) -> i64 {
    (q - kernel / 2).clamp(0, len - kernel)
}

/// The WGSL of `window`, `within` and `point`.
macro_rules! window {
    () => {
        "
fn window(q: vec3<u32>, len: vec3<u32>, kernel: vec3<u32>) -> vec3<i32> {
    return clamp(vec3<i32>(q) - vec3<i32>(kernel / 2u), vec3<i32>(0), vec3<i32>(len) - vec3<i32>(kernel));
}
fn within(k: vec3<u32>, first: vec3<i32>, kernel: vec3<u32>) -> bool {
    let along = vec3<i32>(k) - first;
    return all(along >= vec3<i32>(0)) && all(along < vec3<i32>(kernel));
}
fn point(n: u32, canvas: vec3<u32>) -> vec3<u32> {
    return vec3<u32>(n / (canvas.y * canvas.z), n / canvas.z % canvas.y, n % canvas.z);
}"
    };
}

/// The text of a neighbourhood. `order` declares the order of tokens:
/// `fn ordered(n: u32, canvas: vec3<u32>) -> vec3<u32>`.
macro_rules! natten {
    ($order:literal) => {
        concat!(
            "
struct Uniforms { canvas: vec3<u32>, kernel: vec3<u32>, dilation: vec3<u32>, tile: vec3<u32> }",
            window!(),
            $order,
            "
fn mask_mod(at: At) -> bool {
    let canvas = uniforms().canvas;
    let points = canvas.x * canvas.y * canvas.z;
    let own = u32(at.position) - at.sequence_start;
    let other = at.key - at.sequence_start;
    if own >= points || other >= points { return false; }
    let q = ordered(own, canvas);
    let k = ordered(other, canvas);
    let kernel = uniforms().kernel;
    let dilation = uniforms().dilation;
    // The divisions cost most, so the common case avoids them.
    if all(dilation == vec3<u32>(1u)) { return within(k, window(q, canvas, kernel), kernel); }
    // The number of points along each axis at multiples of the dilation from the query.
    let len = (canvas - q % dilation + dilation - 1u) / dilation;
    return all(q % dilation == k % dilation)
        && within(k / dilation, window(q / dilation, len, kernel), kernel);
}"
        )
    };
}

/// Makes neighbourhoods on a canvas, with tokens in the order of `ordered`.
fn neighbours(
    name: &'static str,
    text: &'static str,
    [canvas, kernel, dilation, tile]: [Axes; 4],
    ordered: impl Fn(i64) -> [i64; 3] + Send + Sync + 'static,
) -> Result<MaskPreset, Error> {
    check_points(canvas)?;
    for (len, (kernel, dilation)) in canvas.iter().zip(kernel.iter().zip(dilation)) {
        if f64::from(*kernel) * f64::from(dilation) > f64::from(*len) {
            let expected = "small enough that `kernel * dilation` is at most `canvas` along each axis";
            return Err(Error::Option { option: "kernel", value: f64::from(*kernel), expected });
        }
    }
    let uniforms = [canvas, kernel, dilation, tile].map(|axes| words(axes, 0)).concat();
    MaskPreset::new(name, text, &uniforms, vec![], move |at| {
        let places = places(at);
        if !places.iter().all(|place| (0..points(canvas)).contains(place)) {
            return false;
        }
        let [q, k] = places.map(&ordered);
        (0..3).all(|n| {
            let [len, kernel, dilation] = [canvas[n], kernel[n], dilation[n]].map(i64::from);
            let group = (len - q[n] % dilation + dilation - 1) / dilation;
            let first = window(q[n] / dilation, group, kernel);
            q[n] % dilation == k[n] % dilation && (first..first + kernel).contains(&(k[n] / dilation))
        })
    })
}

/// Neighbourhoods: along each axis a query sees the `kernel` points around its point, in steps of
/// `dilation`. At the edges the neighbourhood moves inward, so that every query sees equally many
/// points. Sources: Hassani et al. 2023, "Neighborhood attention transformer", and, with dilation,
/// Hassani and Shi 2022, "DiNAT".
///
/// Tokens are the points of a canvas of one, two or three axes, row by row. In an even kernel, the
/// query is the first point of the second half. `kernel · dilation` is at most the canvas.
///
/// # Errors
/// - numbers of 0
/// - a kernel that does not fit
/// - a canvas of 2^29 points or more
/// - fewer than 1 or more than 3 axes
pub fn natten<const N: usize>(
    canvas: [usize; N],
    kernel: [usize; N],
    dilation: [usize; N],
) -> Result<MaskPreset, Error> {
    const TEXT: &str = natten!(
        "
fn ordered(n: u32, canvas: vec3<u32>) -> vec3<u32> { return point(n, canvas); }"
    );
    let canvas = axes("canvas", canvas)?;
    let numbers = [canvas, axes("kernel", kernel)?, axes("dilation", dilation)?, [1; 3]];
    neighbours("natten", TEXT, numbers, move |n| point(n, canvas))
}

/// The neighbourhoods of [`natten`], with tokens tile by tile, and row by row in each tile. Blocks
/// of consecutive tokens see the same blocks (`tiled_natten` in attention-gym).
///
/// # Errors
/// As [`natten`], and a canvas that is not made of whole tiles.
pub fn tiled_natten<const N: usize>(
    canvas: [usize; N],
    kernel: [usize; N],
    tile: [usize; N],
) -> Result<MaskPreset, Error> {
    const TEXT: &str = natten!(
        "
fn ordered(n: u32, canvas: vec3<u32>) -> vec3<u32> {
    let tile = uniforms().tile;
    let size = tile.x * tile.y * tile.z;
    return point(n / size, canvas / tile) * tile + point(n % size, tile);
}"
    );
    let (canvas, kernel, tile) = (axes("canvas", canvas)?, axes("kernel", kernel)?, axes("tile", tile)?);
    let tiles = whole_tiles("canvas", canvas, tile)?;
    neighbours("tiled_natten", TEXT, [canvas, kernel, [1; 3], tile], move |n| {
        let (outer, inner) = (point(n / points(tile), tiles), point(n % points(tile), tile));
        std::array::from_fn(|axis| outer[axis] * i64::from(tile[axis]) + inner[axis])
    })
}

/// Returns the number of tiles along each axis.
fn whole_tiles(what: &'static str, canvas: Axes, tile: Axes) -> Result<Axes, Error> {
    for (len, tile) in canvas.iter().zip(tile) {
        if len % tile != 0 {
            let (value, divisor) = (*len as usize, tile as usize);
            return Err(Error::NotDivisible { what, value, by: "tile", divisor });
        }
    }
    Ok(std::array::from_fn(|n| canvas[n] / tile[n]))
}

/// The neighbourhoods of [`natten`] on a square canvas in Morton order (the Z curve). The bits of a
/// token's number alternate between the bits of its column and row. So tokens that are near each
/// other on the canvas are near in memory (`morton_natten` in attention-gym).
///
/// # Errors
/// A side that is no power of two, or a kernel that does not fit.
pub fn morton_natten(side: usize, kernel: [usize; 2]) -> Result<MaskPreset, Error> {
    const TEXT: &str = natten!(
        "
// Every other bit.
fn gathered(n: u32) -> u32 {
    var x = n & 0x55555555u;
    x = (x | (x >> 1u)) & 0x33333333u;
    x = (x | (x >> 2u)) & 0x0f0f0f0fu;
    x = (x | (x >> 4u)) & 0x00ff00ffu;
    return (x | (x >> 8u)) & 0x0000ffffu;
}
fn ordered(n: u32, canvas: vec3<u32>) -> vec3<u32> { return vec3<u32>(0u, gathered(n >> 1u), gathered(n)); }"
    );
    if !side.is_power_of_two() {
        return Err(Error::Option { option: "side", value: side as f64, expected: "a power of two" });
    }
    let canvas = axes("side", [side; 2])?;
    let numbers = [canvas, axes("kernel", kernel)?, [1; 3], [1; 3]];
    neighbours("morton_natten", TEXT, numbers, |n| {
        let gathered = |n: i64| (0..16).map(|bit| (n >> (2 * bit) & 1) << bit).sum();
        [0, gathered(n >> 1), gathered(n)]
    })
}

/// Shifted windows: a token sees the tokens of its `window` on the same side of the seam. At the
/// seam a canvas that was rolled by `shift` meets its other end. Sources: Liu et al. 2021, "Swin
/// transformer", 3.2, and, with three axes, Liu et al. 2022, "Video Swin transformer".
///
/// Tokens are the points of the rolled canvas (`torch.roll(x, -shift)`), window by window, and row
/// by row in each window. This is the order of Swin's `window_partition`, with the windows in one
/// sequence instead of in a batch. A shift of 0 along an axis has no seam.
///
/// Combine the mask with [`Pattern::Local`](crate::mask::Pattern::Local) of a window's tokens, so
/// that kernels skip other windows. Without any shift, that pattern alone has the same meaning.
///
/// # Errors
/// - a canvas or a window of 0
/// - a canvas that is not made of whole windows
/// - a shift that is not below the window
/// - 2^29 points or more
pub fn shifted_windows<const N: usize>(
    canvas: [usize; N],
    window: [usize; N],
    shift: [usize; N],
) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { tiles: vec3<u32>, size: u32, tile: vec3<u32>, seam: vec3<u32> }
fn point(n: u32, canvas: vec3<u32>) -> vec3<u32> {
    return vec3<u32>(n / (canvas.y * canvas.z), n / canvas.z % canvas.y, n % canvas.z);
}
fn mask_mod(at: At) -> bool {
    let tiles = uniforms().tiles;
    let tile = uniforms().tile;
    let size = uniforms().size;
    let q = u32(at.position) - at.sequence_start;
    let k = at.key - at.sequence_start;
    if q / size != k / size || q / size >= tiles.x * tiles.y * tiles.z { return false; }
    let first = point(q / size, tiles) * tile;
    let seam = uniforms().seam;
    let a = first + point(q % size, tile);
    let b = first + point(k % size, tile);
    return all((a >= seam) == (b >= seam));
}";
    if let Some((value, _)) =
        shift.into_iter().zip(window).find(|(shift, window)| *shift > 0 && shift >= window)
    {
        let expected = "below `window` along each axis";
        return Err(Error::Option { option: "shift", value: value as f64, expected });
    }
    let (canvas, window) = (axes("canvas", canvas)?, axes("window", window)?);
    check_points(canvas)?;
    let tiles = whole_tiles("canvas", canvas, window)?;
    let mut seam = canvas;
    for (to, shift) in seam[3 - N..].iter_mut().zip(shift) {
        *to -= shift as u32;
    }
    let size = points(window);
    let uniforms = [words(tiles, size as u32), words(window, 0), words(seam, 0)].concat();
    MaskPreset::new("shifted_windows", TEXT, &uniforms, vec![], move |at| {
        let seen = places(at);
        if !seen.iter().all(|place| (0..points(canvas)).contains(place)) || seen[0] / size != seen[1] / size {
            return false;
        }
        let first = point(seen[0] / size, tiles);
        let [q, k] = seen.map(|place| point(place % size, window));
        (0..3).all(|n| {
            let past = |of: i64| first[n] * i64::from(window[n]) + of >= i64::from(seam[n]);
            past(q[n]) == past(k[n])
        })
    })
}

/// Sliding tiles: a tile of a picture or a video sees the tiles of the `kernel` around it. At the
/// edges the kernel moves inward. A query sees whole tiles. So a block with as many tokens as a
/// tile is hidden or full, never seen in part. Source: Zhang et al. 2025, "Fast video generation
/// with sliding tile attention".
///
/// Tokens come tile by tile, on a canvas of one, two or three axes. The lengths of the canvas and
/// of `kernel` are in tokens, and multiples of the tile. `text` tokens follow, which see all tokens
/// and which all tokens see.
///
/// # Errors
/// - numbers of 0
/// - a canvas or kernel that is not made of whole tiles
/// - a kernel that does not fit
/// - 2^29 tokens or more
pub fn sliding_tiles<const N: usize>(
    canvas: [usize; N],
    kernel: [usize; N],
    tile: [usize; N],
    text: usize,
) -> Result<MaskPreset, Error> {
    const TEXT: &str = concat!(
        "
struct Uniforms { tiles: vec3<u32>, text: u32, kernel: vec3<u32>, size: u32 }",
        window!(),
        "
fn mask_mod(at: At) -> bool {
    let tiles = uniforms().tiles;
    let points = tiles.x * tiles.y * tiles.z * uniforms().size;
    let q = u32(at.position) - at.sequence_start;
    let k = at.key - at.sequence_start;
    if max(q, k) >= points + uniforms().text { return false; }
    if max(q, k) >= points { return true; }
    let kernel = uniforms().kernel;
    return within(point(k / uniforms().size, tiles), window(point(q / uniforms().size, tiles), tiles, kernel), kernel);
}"
    );
    let (canvas, kernel, tile) = (axes("canvas", canvas)?, axes("kernel", kernel)?, axes("tile", tile)?);
    check_points(canvas)?;
    let (tiles, kernel) = (whole_tiles("canvas", canvas, tile)?, whole_tiles("kernel", kernel, tile)?);
    if let Some(n) = (0..3).find(|n| kernel[*n] > tiles[*n]) {
        let value = f64::from(kernel[n]);
        return Err(Error::Option {
            option: "tiles of the kernel",
            value,
            expected: "at most the number of tiles of the canvas",
        });
    }
    let text = size("text", text)?;
    let uniforms = [words(tiles, text), words(kernel, points(tile) as u32)].concat();
    MaskPreset::new("sliding_tiles", TEXT, &uniforms, vec![], move |at| {
        let (seen, image) = (places(at), points(canvas));
        let last = seen[0].max(seen[1]);
        if seen.iter().any(|place| *place < 0) || last >= image {
            return seen.iter().all(|place| *place >= 0) && last < image + i64::from(text);
        }
        let [q, k] = seen.map(|place| point(place / points(tile), tiles));
        (0..3).all(|n| {
            let first = window(q[n], tiles[n].into(), kernel[n].into());
            (first..first + i64::from(kernel[n])).contains(&k[n])
        })
    })
}
