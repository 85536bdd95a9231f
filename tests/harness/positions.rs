//! Runs of a rotation or of a sum on a device, and the tolerance of their results.

use wgpu_attention::position::{
    AddPositions, MAX_POSITION, PositionTable, Positions, Rope, RopeConfig, RopeOrder, Rotate, Rotation,
    RowPositions, Sinusoid,
};
use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::wgpu;
use wgpu_attention::{DType, Error, HostTensor, TensorView};

use super::case::HostData;
use super::device::{Profile, profiles};
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed, window};

/// In WGSL a sum or a product may be either neighbour of the exact value.
const ROUNDING: f64 = 1.0 / (1 << 23) as f64;
/// Returns the relative and the absolute error of a store to f16 or bf16. A store to f16 may give
/// either neighbour. Below the normal numbers the error is absolute.
pub fn rounding(dtype: DType) -> [f64; 2] {
    match dtype {
        DType::F16 => [1.0 / 1024.0, 1.0 / (1 << 24) as f64],
        DType::BF16 => [1.0 / 256.0, f64::from(f32::MIN_POSITIVE)],
        _ => [0.0; 2],
    }
}

/// Roundings in the rotation at a position, relative to the pair's length. The three entries of the
/// table have one each. The two products, like complex products, have √8 each (Higham 2002,
/// "Accuracy and stability of numerical algorithms", lemma 3.5). One tenth covers the error of the
/// f64 angles, 2⁻²⁹ at 2²⁴ radians.
const TURN: f64 = 3.0 + 2.0 * 2.8285 + 0.1;
/// Adds the rounding of the amplitude and of its product, and the product with x.
const ROTATION: f64 = TURN + 2.0 + 2.8285;

fn stored_error(want: f64, dtype: DType) -> f64 {
    let [relative, least] = rounding(dtype);
    want.abs() * relative + least
}

/// The device, places and types of a run.
pub struct Setup {
    pub profile: &'static Profile,
    pub layout: Layout,
    pub x: DType,
    /// The output's type. `None`: in place.
    pub out: Option<DType>,
    /// True for rotations of gradients.
    pub back: bool,
}

impl Setup {
    pub fn all() -> Vec<Self> {
        let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
        let types = [
            (f32, Some(f32)),
            (f32, None),
            (f16, Some(f16)),
            (f16, None),
            (f16, Some(f32)),
            (f32, Some(f16)),
            (bf16, Some(bf16)),
            (bf16, None),
            (f32, Some(bf16)),
        ];
        let mut all = Vec::new();
        for profile in profiles() {
            for (x, out) in types {
                for layout in [Layout::Dense, Layout::Blhd, Layout::Window(7)] {
                    all.push(Setup { profile, layout, x, out, back: false });
                }
            }
        }
        all
    }

    pub fn plain(profile: &'static Profile) -> Self {
        Setup { profile, layout: Layout::Dense, x: DType::F32, out: Some(DType::F32), back: false }
    }

    pub fn named(&self) -> String {
        format!("{}, {:?}, {:?} to {:?}", self.profile.name, self.layout, self.x, self.out)
    }

    fn out(&self) -> DType {
        self.out.unwrap_or(self.x)
    }

    fn record_rotation(
        &self,
        positions: &Positions,
        encoder: &mut wgpu::CommandEncoder,
        call: &Rotate,
    ) -> Result<(), Error> {
        if self.back { positions.rotate_backward(encoder, call) } else { positions.rotate(encoder, call) }
    }

    /// Runs the calls that `record` records on x, out and positions. Compares the result with the
    /// expected values, within an error for each element.
    pub async fn judge(
        &self,
        x: &HostData<f32>,
        at: &RowPositions<HostData<u32>>,
        want: &[f64],
        error: impl Fn(usize) -> f64,
        record: impl FnOnce(
            &Positions,
            &mut wgpu::CommandEncoder,
            (TensorView, Option<TensorView>, RowPositions<TensorView>),
        ) -> Result<(), Error>,
    ) -> Result<f64, String> {
        let Setup { profile, layout, .. } = *self;
        profile.tidy();
        let [x_at, out_at] = layout.places([x.shape; 2]);
        let placed = Placed::input(profile, Values::Floats(&x.data), self.x, x_at);
        let out = self.out.map(|dtype| Placed::output(profile, dtype, out_at));
        let tensor = place_positions(profile, at);
        let at = placed_positions(at, tensor.as_ref());
        let positions = Positions::with_pipelines(profile.gpu.pipelines());
        let call = (placed.view(), out.as_ref().map(Placed::view), at);
        profile.gpu.submit(|e| record(&positions, e, call)).map_err(|e| e.to_string())?;
        let got = out.as_ref().unwrap_or(&placed).download_async("out", profile).await?;
        assert_eq!(got.len(), want.len());
        let mut worst: f64 = 0.0;
        for (n, (got, want)) in got.iter().zip(want).enumerate() {
            let allowed = error(n) + stored_error(*want, self.out());
            let off = (got - want).abs();
            if off > allowed || off.is_nan() {
                return Err(format!("element {n} is {got}, not {want}: off by {off:e}, {allowed:e} allowed"));
            }
            worst = worst.max(off / allowed.max(f64::MIN_POSITIVE));
        }
        Ok(worst)
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub fn rotate(
        &self,
        x: &HostData<f32>,
        config: RopeConfig,
        at: &RowPositions<HostData<u32>>,
    ) -> Result<f64, String> {
        pollster::block_on(self.rotate_async(x, config, at))
    }

    pub async fn rotate_async(
        &self,
        x: &HostData<f32>,
        config: RopeConfig,
        at: &RowPositions<HostData<u32>>,
    ) -> Result<f64, String> {
        let x = HostData::new(stored(&x.data, self.x), x.shape);
        let wide = widen::<f64>(&x.data);
        let truth = if self.back { reference::rotate_backward } else { reference::rotate };
        let want = truth(&wide, x.shape, &config, host(at)).map_err(|e| e.to_string())?;
        let dim = x.shape[3];
        let pairs = config.frequencies().len();
        let amplitude = config.amplitude();
        let error = |n: usize| {
            let (row, d) = (n / dim * dim, n % dim);
            if d >= 2 * pairs {
                return 0.0;
            }
            // The index of the pair's other element. In half order the two are `pairs` apart,
            // otherwise they are neighbours.
            let half = config == config.order(RopeOrder::Half);
            let other = if half { (d + pairs) % (2 * pairs) } else { d ^ 1 };
            ROTATION * ROUNDING * amplitude * wide[row + d].hypot(wide[row + other])
        };
        let rope = Rope::new(self.profile.gpu.device(), config).map_err(|e| e.to_string())?;
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at)| {
            self.record_rotation(positions, encoder, &Rotate::new(x, Rotation::Rope(&rope), at).out(out))
        })
        .await
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub fn rotate_by(
        &self,
        x: &HostData<f32>,
        order: RopeOrder,
        tables: ([&HostData<f32>; 2], DType),
        at: &RowPositions<HostData<u32>>,
    ) -> Result<f64, String> {
        pollster::block_on(self.rotate_by_async(x, order, tables, at))
    }

    pub async fn rotate_by_async(
        &self,
        x: &HostData<f32>,
        order: RopeOrder,
        tables: ([&HostData<f32>; 2], DType),
        at: &RowPositions<HostData<u32>>,
    ) -> Result<f64, String> {
        let x = HostData::new(stored(&x.data, self.x), x.shape);
        let [batch, heads, length, dim] = x.shape;
        let (tables, dtype) = tables;
        let [of, _, rows, pairs] = tables[0].shape;
        let given = tables.map(|t| stored(&t.data, dtype));
        // The reference needs one table row for each row of x.
        let row =
            |b: usize, i: usize| b % of * rows + position_of(at, b, i, length).min(rows as u64 - 1) as usize;
        let each = (0..batch).flat_map(|b| (0..length).map(move |i| (b, i)));
        let starts: Vec<usize> = each.map(|(b, i)| row(b, i) * pairs).collect();
        let [cos, sin] = given
            .each_ref()
            .map(|t| starts.iter().flat_map(|n| widen::<f64>(&t[*n..][..pairs])).collect::<Vec<_>>());
        let wide = widen::<f64>(&x.data);
        let truth = if self.back { reference::rotate_by_backward } else { reference::rotate_by };
        let want = truth(&wide, x.shape, order, &cos, &sin).map_err(|e| e.to_string())?;
        let magnitude = |t: &[f64]| t.iter().map(|x| x.abs()).collect::<Vec<_>>();
        let [x_magnitude, c, s] = [&wide, &cos, &sin].map(|t| magnitude(t));
        // The error of two products and their sum.
        let error = |n: usize| {
            let (row, d) = (n / dim, n % dim);
            if d >= 2 * pairs {
                return 0.0;
            }
            let (pair, other) = match order {
                RopeOrder::Half => (d % pairs, (d + pairs) % (2 * pairs)),
                RopeOrder::Interleaved => (d / 2, d ^ 1),
                _ => unreachable!("{order:?} is new"),
            };
            let at = (row / length / heads * length + row % length) * pairs + pair;
            let sum = x_magnitude[n] * c[at] + x_magnitude[row * dim + other] * s[at];
            sum * ((1.0 + ROUNDING) * (1.0 + ROUNDING) - 1.0)
        };
        let places = self.layout.places([[1; 4], tables[0].shape]);
        let place = |n: usize| Placed::input(self.profile, Values::Floats(&given[n]), dtype, places[1]);
        let placed = [place(0), place(1)];
        let [cos, sin] = placed.each_ref().map(Placed::view);
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at)| {
            let rotation = Rotation::CosSin { cos, sin, order };
            self.record_rotation(positions, encoder, &Rotate::new(x, rotation, at).out(out))
        })
        .await
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub fn add_sinusoid(
        &self,
        x: &HostData<f32>,
        base: f64,
        at: &RowPositions<HostData<u32>>,
        scale: f64,
    ) -> Result<f64, String> {
        pollster::block_on(self.add_sinusoid_async(x, base, at, scale))
    }

    pub async fn add_sinusoid_async(
        &self,
        x: &HostData<f32>,
        base: f64,
        at: &RowPositions<HostData<u32>>,
        scale: f64,
    ) -> Result<f64, String> {
        let x = HostData::new(stored(&x.data, self.x), x.shape);
        let wide = widen::<f64>(&x.data);
        let table = PositionTable::Sinusoid(base);
        let want =
            reference::add_positions(&wide, x.shape, table, host(at), scale).map_err(|e| e.to_string())?;
        // The error of the rotation, the product and the sum.
        let error = |n: usize| ROUNDING * (TURN + (wide[n] * scale).abs() + want[n].abs().max(1.0));
        let sinusoid =
            Sinusoid::new(self.profile.gpu.device(), x.shape[3], base).map_err(|e| e.to_string())?;
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at)| {
            let table = PositionTable::Sinusoid(&sinusoid);
            positions.add(encoder, &AddPositions::new(x, table, at).out(out).scale(scale))
        })
        .await
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub fn add_learned(
        &self,
        x: &HostData<f32>,
        table: (&HostData<f32>, DType),
        at: &RowPositions<HostData<u32>>,
        scale: f64,
    ) -> Result<f64, String> {
        pollster::block_on(self.add_learned_async(x, table, at, scale))
    }

    pub async fn add_learned_async(
        &self,
        x: &HostData<f32>,
        table: (&HostData<f32>, DType),
        at: &RowPositions<HostData<u32>>,
        scale: f64,
    ) -> Result<f64, String> {
        let x = HostData::new(stored(&x.data, self.x), x.shape);
        let (table, dtype) = table;
        let rows = stored(&table.data, dtype);
        let (wide, wide_rows) = (widen::<f64>(&x.data), widen::<f64>(&rows));
        let host_table = PositionTable::Learned(&wide_rows[..]);
        let want = reference::add_positions(&wide, x.shape, host_table, host(at), scale)
            .map_err(|e| e.to_string())?;
        let error = |n: usize| ROUNDING * ((wide[n] * scale).abs() + want[n].abs());
        let place = self.layout.places([[1; 4], table.shape])[1];
        let placed = Placed::input(self.profile, Values::Floats(&rows), dtype, place);
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at)| {
            let table = PositionTable::Learned(placed.view());
            positions.add(encoder, &AddPositions::new(x, table, at).out(out).scale(scale))
        })
        .await
    }
}

/// Returns the position of row `i` of `length` rows.
pub fn position_of(at: &RowPositions<HostData<u32>>, b: usize, i: usize, length: usize) -> u64 {
    match at {
        RowPositions::Start(start) => u64::from(*start) + i as u64,
        RowPositions::Tensor(t) => {
            let [n, _, l, _] = t.shape;
            let first = u64::from(t.data[b % n * l + i % l]);
            if l == length { first } else { first + i as u64 }
        }
        _ => unreachable!("new"),
    }
}

/// Places the tensor of positions, if there is one.
pub fn place_positions(profile: &Profile, at: &RowPositions<HostData<u32>>) -> Option<Placed> {
    let RowPositions::Tensor(t) = at else { return None };
    let place = window(t.shape, &mut Rng::named("positions"), 1);
    Some(Placed::input(profile, Values::Numbers(&t.data), DType::U32, place))
}

/// Returns positions on the device. `tensor` holds the positions that are in a tensor.
pub fn placed_positions<'a>(
    at: &RowPositions<HostData<u32>>,
    tensor: Option<&'a Placed>,
) -> RowPositions<TensorView<'a>> {
    match (at, tensor) {
        (RowPositions::Start(start), _) => RowPositions::Start(*start),
        (_, Some(t)) => RowPositions::Tensor(t.view()),
        _ => unreachable!("no tensor was placed"),
    }
}

pub fn host(at: &RowPositions<HostData<u32>>) -> RowPositions<HostTensor<'_, u32>> {
    match at {
        RowPositions::Start(start) => RowPositions::Start(*start),
        RowPositions::Tensor(part) => RowPositions::Tensor(part.host()),
        _ => unreachable!("new"),
    }
}

pub fn normals(name: &str, shape: [usize; 4]) -> HostData<f32> {
    HostData::new(Rng::named(name).normals(shape.iter().product()), shape)
}

/// Positions on three axes, or on one, that all differ: small, far, and past the last.
pub fn axes_places(shape: [usize; 4]) -> HostData<u32> {
    let place = |[b, axis, i, _]: [usize; 4]| match i {
        3 => [4000, 65_536 + b, 16_777_215][axis],
        4 => [u32::MAX as usize, 300 + b, 1 << 24][axis],
        _ => 31 * b + [5 * i, 2 + i, 900 + i][axis],
    };
    HostData::of(shape, |at| place(at) as u32)
}

/// Every kind of row positions, for two sequences of five rows.
pub fn places(last: u32) -> Vec<RowPositions<HostData<u32>>> {
    let of = |shape, f: fn([usize; 4]) -> u32| RowPositions::Tensor(HostData::of(shape, f));
    vec![
        RowPositions::Start(0),
        RowPositions::Start(last - 4),
        of([2, 1, 5, 1], |[b, _, i, _]| [[3, 0, 300, 65_536, 70_000], [255, 256, 1, 9, 511]][b][i]),
        of([1, 1, 5, 1], |[_, _, i, _]| [16_777_215, 16_777_214, 16_776_960, 16_711_680, 65_535][i]),
        // Positions past the last, by the rows' offset or directly.
        of([2, 1, 1, 1], |[b, ..]| [MAX_POSITION - 2, 77][b]),
        of([1, 1, 1, 1], |_| u32::MAX - 1),
        of([2, 1, 5, 1], |[b, _, i, _]| [u32::MAX, 1 << 24, (1 << 24) + 1][(b + i) % 3]),
    ]
}
