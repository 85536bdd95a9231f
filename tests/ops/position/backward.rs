//! The gradients of rotations and of learned tables, compared with the reference.

use wgpu_attention::position::{
    AddPositions, MAX_POSITION, PositionTable, Positions, RopeConfig, RopeOrder, RowPositions, Sinusoid,
    TableBackward,
};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{Real, add_positions_backward, widen};
use wgpu_attention::{DType, TensorView};

use super::says;
use crate::harness::case::{HostData, largest, widened};
use crate::harness::positions::{Setup, host, normals, place_positions, placed_positions, places};
use crate::harness::run::{Layout, Placed};
use crate::harness::{Judged, Profile, Report, Rng, Values, defaults, full, stored};

#[test]
fn rotation_gradients_rotate_back() {
    let mut report = Report::new("positions, rotate backward");
    let x = normals("rotate backward", [2, 3, 5, 14]);
    for setup in Setup::all() {
        let setup = Setup { back: true, ..setup };
        for (order, rotary_dim) in [(RopeOrder::Half, 14), (RopeOrder::Interleaved, 6)] {
            let config = RopeConfig::new(rotary_dim).order(order);
            for (n, at) in places(MAX_POSITION).iter().enumerate() {
                let name = format!("{order:?} {rotary_dim} at {n}");
                report.record(&name, &setup.named(), setup.rotate(&x, config, at));
            }
            let [cos, sin] = ["cos", "sin"].map(|name| normals(name, [2, 1, 9, rotary_dim / 2]));
            for (n, at) in places(8).iter().enumerate().skip(2) {
                let judged = setup.rotate_by(&x, order, ([&cos, &sin], DType::F32), at);
                report.record(&format!("{order:?} given, at {n}"), &setup.named(), judged);
            }
        }
    }
    report.finish();
}

/// The gradient of a table: its inputs and its storage.
struct Table<'a> {
    profile: &'static Profile,
    layout: Layout,
    /// The types of d_out and of the table's gradient.
    dtypes: [DType; 2],
    accumulates: bool,
    rows: usize,
    at: &'a RowPositions<HostData<u32>>,
}

impl Table<'_> {
    fn truth<R: Real>(&self, d_out: &[R], shape: [usize; 4], before: &[R]) -> Vec<R> {
        let got = add_positions_backward(d_out, shape, self.rows, host(self.at), 1.0).expect("it fits");
        let sums = got.d_table.into_iter().zip(before);
        sums.map(|(sum, before)| if self.accumulates { sum + *before } else { sum }).collect()
    }

    /// Returns the largest error over tolerance. All `times` runs must agree.
    fn outcome(&self, d_out: &HostData<f32>, times: usize) -> Result<f64, String> {
        let Table { profile, layout, dtypes, accumulates, rows, at } = *self;
        let shape = [1, 1, rows, d_out.shape[3]];
        let x = stored(&d_out.data, dtypes[0]);
        let before = stored(&normals("before", shape).data, dtypes[1]);
        let want = self.truth::<f64>(&widen(&x), d_out.shape, &widen(&before));
        let naive = widened(&self.truth::<f32>(&x, d_out.shape, &before), dtypes[1]);
        let size = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).collect::<Vec<_>>();
        let magnitude = largest(self.truth::<f64>(&size(&x), d_out.shape, &size(&before)));
        let tolerance = Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32);
        let judged = Judged { want, tolerance };

        profile.tidy();
        let [x_at, table_at] = layout.places([d_out.shape, shape]);
        let placed = Placed::input(profile, Values::Floats(&x), dtypes[0], x_at);
        let tensor = place_positions(profile, at);
        let positions = Positions::with_pipelines(profile.gpu.pipelines());
        let mut first: Option<Vec<f64>> = None;
        for _ in 0..times {
            let table = match accumulates {
                true => Placed::holding(profile, &before, dtypes[1], table_at),
                false => Placed::output(profile, dtypes[1], table_at),
            };
            let at = placed_positions(at, tensor.as_ref());
            let forward = AddPositions::new(placed.view(), PositionTable::Learned(table.view()), at);
            let call = TableBackward::new(forward, placed.view(), table.view()).accumulate(accumulates);
            profile.gpu.submit(|e| positions.table_backward(e, &call)).map_err(|e| e.to_string())?;
            let got = pollster::block_on(table.download_async("d_table", profile))?;
            if first.as_ref().is_some_and(|first| *first != got) {
                return Err("other numbers the second time".into());
            }
            first = Some(got);
        }
        judged.judge(&first.ok_or("never run")?)
    }
}

#[test]
fn gradients_of_tables_equal_the_reference() {
    let mut report = Report::new("positions, table backward");
    let d_out = normals("table backward", [2, 3, 5, 7]);
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    // Every kernel takes a software driver seconds to compile.
    for (profile, dtypes, accumulates) in [
        (full(), [f32, f32], false),
        (full(), [f16, f16], true),
        (full(), [f16, f32], false),
        (full(), [bf16, f32], true),
        (defaults(), [f32, bf16], true),
        (defaults(), [bf16, bf16], false),
    ] {
        for layout in [Layout::Dense, Layout::Blhd, Layout::Window(7)] {
            for (n, at) in places(8).iter().enumerate() {
                let table = Table { profile, layout, dtypes, accumulates, rows: 9, at };
                let setup = format!("{}, {layout:?}, {dtypes:?}, {accumulates}, at {n}", profile.name);
                report.record("a table", &setup, table.outcome(&d_out, 1));
            }
        }
    }
    report.finish();
}

/// More rows than a kernel handles together, more channels than a workgroup has, and positions that
/// many rows share. Also a table with several rows per workgroup.
#[test]
fn long_sequences_and_tables_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("positions, table backward, long");
    let rng = &mut Rng::named("long tables");
    for (length, rows, dim) in [(600, 70, 65), (257, 3, 130), (1, 300, 64), (63, 90_000, 3)] {
        let d_out = normals("long", [2, 2, length, dim]);
        let named = (0..2 * length).map(|_| rng.below(rows + 2) as u32).collect();
        let named = RowPositions::Tensor(HostData::new(named, [2, 1, length, 1]));
        let firsts = RowPositions::Tensor(HostData::new(vec![0, (rows / 2) as u32], [2, 1, 1, 1]));
        let start = RowPositions::Start(rows.saturating_sub(length) as u32);
        for (n, at) in [named, firsts, start].iter().enumerate() {
            if n == 2 && length > rows {
                continue;
            }
            for accumulates in [false, true] {
                let (profile, layout, dtypes) = (full(), Layout::Blhd, [DType::F32; 2]);
                let table = Table { profile, layout, dtypes, accumulates, rows, at };
                let times = if rows < 100 { 20 } else { 1 };
                report.record(
                    "a table",
                    &format!("{length}, {rows}, {dim}, {n}"),
                    table.outcome(&d_out, times),
                );
            }
        }
    }
    report.finish();
}

#[test]
fn bad_table_gradients_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..3).map(|_| gpu.buffer(1 << 12).expect("a buffer")).collect();
    let view = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let [f32, u32] = [DType::F32, DType::U32];
    let (d_out, d_table) = (view(0, f32, [2, 3, 5, 8]), view(1, f32, [1, 1, 9, 8]));
    let start = RowPositions::Start(4);
    let positions = Positions::with_pipelines(gpu.pipelines());
    let of = |d_out, at, d_table| {
        TableBackward::new(AddPositions::new(d_out, PositionTable::Learned(d_table), at), d_out, d_table)
    };
    let refused = |d_out, at, d_table, words: &[&str]| {
        let call = of(d_out, at, d_table);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        says(positions.table_backward(&mut encoder, &call).expect_err("refused"), words);
        let mut pass = encoder.begin_compute_pass(&Default::default());
        says(positions.table_backward(&mut pass, &call).expect_err("refused"), words);
    };
    let at = |shape| RowPositions::Tensor(view(2, u32, shape));
    refused(view(0, u32, [2, 3, 5, 8]), start, d_table, &["`d_out`", "F32, F16 or BF16", "U32"]);
    refused(view(0, f32, [2, 0, 5, 8]), start, d_table, &["`d_out`", "heads is 0"]);
    refused(d_out.with_offset(1 << 12), start, d_table, &["`d_out`", "ends at byte"]);
    refused(d_out, start, view(1, f32, [1, 1, 9, 7]), &["`d_table`", "dim must be 8", "got 7"]);
    refused(d_out, start, view(1, f32, [1, 3, 9, 8]), &["`d_table`", "heads must be 1", "got 3"]);
    refused(d_out, start, view(1, DType::Bool, [1, 1, 9, 8]), &["`d_table`", "F32, F16 or BF16"]);
    refused(d_out, start, d_table.with_strides([0, 0, 0, 1]), &["`d_table`", "share memory"]);
    refused(d_out, start, view(0, f32, [1, 1, 9, 8]), &["`d_table`", "`d_out`"]);
    refused(d_out, RowPositions::Start(5), d_table, &["`d_table`", "at least 10", "got 9"]);
    refused(d_out, at([2, 1, 4, 1]), d_table, &["`positions`", "length must be 5 or 1", "got 4"]);
    refused(d_out, RowPositions::Tensor(d_table), d_table, &["`positions`", "U32", "F32"]);
    let aliased = RowPositions::Tensor(view(1, u32, [2, 1, 5, 1]));
    refused(d_out, aliased, d_table, &["`d_table`", "`positions`"]);
    let sinusoid = Sinusoid::new(gpu.device(), 8, 10000.0).expect("a table");
    let computed = AddPositions::new(d_out, PositionTable::Sinusoid(&sinusoid), start);
    let learned = AddPositions::new(d_out, PositionTable::Learned(view(2, f32, [1, 1, 12, 8])), start);
    for (forward, words) in
        [(computed, ["sinusoid", "`PositionTable::Learned`"]), (learned, ["`d_table`", "length must be 12"])]
    {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let call = TableBackward::new(forward, d_out, d_table);
        says(positions.table_backward(&mut encoder, &call).expect_err("refused"), &words);
    }
    let call = of(d_out, at([2, 1, 5, 1]), d_table);
    gpu.submit(|e| positions.table_backward(e, &call)).expect("a gradient");
}
