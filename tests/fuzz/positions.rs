//! Rotations and sums of positions.

use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, RopeOrder, RopeScaling, RopeSections, Rotate,
    Rotation, RowPositions, Sinusoid, TableBackward,
};
use wgpu_attention::reference;
use wgpu_attention::reference::Real;
use wgpu_attention::{DType, HostTensor, TensorView};

use crate::arena::{Buf, Window, view};
use crate::call::{faults, float, judge, largest, settle};
use crate::choices::Choices;
use crate::world::{Outcome, World, refused};

fn number(c: &mut Choices) -> f64 {
    if c.one_in(2) {
        f64::from(c.float())
    } else {
        c.pick(&[1.0, 1.5, 8.0, 1e300, f64::NAN, f64::INFINITY, -1.0, 1e-300])
    }
}

fn scaling(c: &mut Choices) -> RopeScaling {
    let factor = c.pick(&[1.0, 2.0, 8.0]);
    match c.below(5) {
        0 => RopeScaling::Linear { factor },
        1 => RopeScaling::NtkAware { factor },
        2 => RopeScaling::Yarn {
            factor,
            original_len: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        },
        3 => RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 64 },
        _ => RopeScaling::None,
    }
}

/// Returns numbers that make no rotation, or a strange one.
pub fn strange(c: &mut Choices) -> RopeScaling {
    let factor = number(c);
    match c.below(4) {
        0 => RopeScaling::Linear { factor },
        1 => RopeScaling::NtkAware { factor },
        2 => RopeScaling::Yarn {
            factor,
            original_len: c.size(),
            beta_fast: number(c),
            beta_slow: number(c),
            attention_factor: c.one_in(2).then(|| number(c)),
        },
        _ => RopeScaling::Llama3 {
            factor,
            low_freq_factor: number(c),
            high_freq_factor: number(c),
            original_len: c.size(),
        },
    }
}

/// Returns sections of pairs, in any order of sizes.
fn sections(c: &mut Choices, pairs: usize) -> RopeSections {
    if c.one_in(2) {
        let height = c.between(0, pairs);
        let width = c.between(0, pairs - height);
        RopeSections::Contiguous([pairs - height - width, height, width])
    } else {
        let [height, width] = [(pairs + 1) / 3, pairs / 3].map(|most| c.between(0, most));
        RopeSections::Interleaved([pairs - height - width, height, width])
    }
}

/// Returns sections that may fit no pairs.
pub fn strange_sections(c: &mut Choices) -> RopeSections {
    let sections = [c.size(), c.size(), c.size()];
    if c.one_in(2) { RopeSections::Contiguous(sections) } else { RopeSections::Interleaved(sections) }
}

/// Returns widths whose table takes no longer to make than to refuse.
pub fn width(c: &mut Choices) -> usize {
    let n = c.size();
    if (257..=65536).contains(&n) { 65537 } else { n }
}

/// Draws the positions of rows: a start, or a tensor. With `axes` above 1, it is a tensor.
fn places(
    f: &mut Choices,
    c: &mut Choices,
    [batch, _, length, _]: [usize; 4],
    axes: usize,
) -> (Option<Window>, u32) {
    let mut shape = [batch, axes, length, 1];
    [0, 2].iter().filter(|_| c.one_in(2)).for_each(|axis| shape[*axis] = 1);
    let tensor = (f.one_in(2) || axes > 1).then(|| Window::input(c, DType::U32, shape, false));
    (tensor, c.pick(&[0, 1, 5, 1000, (1 << 24) - 30]))
}

fn at<'a>(places: &(Option<Window>, u32), buffers: &'a [wgpu::Buffer]) -> RowPositions<TensorView<'a>> {
    match &places.0 {
        Some(tensor) => RowPositions::Tensor(view(buffers, tensor)),
        None => RowPositions::Start(places.1),
    }
}

fn host<'a>(places: &(Option<Window>, u32), numbers: &'a [u32]) -> RowPositions<HostTensor<'a, u32>> {
    match &places.0 {
        Some(tensor) => RowPositions::Tensor(HostTensor::new(numbers, tensor.shape)),
        None => RowPositions::Start(places.1),
    }
}

pub fn rotate(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [from, to] = [0; 2].map(|_| float(f));
    let in_place = f.one_in(3);
    let shape = [c.between(1, 2), c.between(1, 3), c.between(1, 12), c.pick(&[2, 4, 6, 9])];
    let mut config = RopeConfig::new(2 * c.between(1, shape[3] / 2));
    if c.one_in(2) {
        config = config.order(RopeOrder::Interleaved);
    }
    config = config.base(c.pick(&[10000.0, 500_000.0, 2.0])).scaling(scaling(c));
    let axes = if f.one_in(3) { 3 } else { 1 };
    if axes > 1 || c.one_in(8) {
        config = config.sections(sections(c, config.frequencies().len()));
    }
    let mut x = Window::input(c, from, shape, false);
    if in_place {
        x = Window::new(c, x.buf, from, shape, false);
    }
    let mut out = (!in_place).then(|| Window::new(c, Buf::OutA, to, shape, false));
    let mut places = places(f, c, shape, axes);
    let (pass, backward) = (c.one_in(3), c.one_in(3));
    for _ in 0..faults(c) {
        match c.below(9) {
            0 => config = RopeConfig::new(width(c)),
            1 => config = config.base(number(c)),
            2 => config = config.scaling(strange(c)),
            3 => places.1 = c.size() as u32,
            4 => places.0.iter_mut().for_each(|w| w.spoil(c)),
            5 => out.iter_mut().for_each(|w| w.spoil(c)),
            6 => config = config.sections(strange_sections(c)),
            _ => x.spoil(c),
        }
    }
    *said = format!("{config:?}, {x:?} to {out:?}, at {places:?}, backward {backward}");
    let rope = match Rope::new(world.device(), config) {
        Ok(rope) => rope,
        Err(e) => {
            if !config.frequencies().is_empty() && config.check().is_err() {
                return Err("frequencies of what is refused".into());
            }
            return world.works(&mut world.scratch()).map(|()| refused(&e));
        }
    };
    let buffers = world.arena.buffers.clone();
    let call = Rotate::new(view(&buffers, &x), Rotation::Rope(&rope), at(&places, &buffers))
        .out(out.as_ref().map(|w| view(&buffers, w)));
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let operator = Positions::with_pipelines(world.gpu.pipelines());
    let result = match (pass, backward) {
        (false, false) => operator.rotate(&mut encoder, &call),
        (false, true) => operator.rotate_backward(&mut encoder, &call),
        (true, _) => {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            if backward {
                operator.rotate_backward(&mut pass, &call)
            } else {
                operator.rotate(&mut pass, &call)
            }
        }
    };
    let all: Vec<_> = [Some(x), out, places.0].into_iter().flatten().collect();
    let write = out.unwrap_or(x);
    // In place, unrotated elements stay unchanged, so no check can tell if they were written.
    let tame = out.is_some() && x.is_tame() && write.is_watched() && places.0.is_none_or(|w| w.is_tame());
    let outcome = settle(world, result, encoder, &mut scratch, &all, &[write], [x.count() < 1 << 20, tame])?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let numbers = places.0.map_or(Vec::new(), |w| w.numbers(bytes));
        fn rotated<R: Real>(
            x: &Window,
            config: &RopeConfig,
            at: RowPositions<HostTensor<u32>>,
            backward: bool,
            bytes: &[Vec<u8>],
        ) -> Result<Vec<R>, String> {
            let rotate = if backward { reference::rotate_backward::<R> } else { reference::rotate::<R> };
            let done = rotate(&x.wide::<R>(bytes), x.shape, config, at);
            done.map_err(|e| format!("the reference refuses it: {e}"))
        }
        let naive = rotated::<f32>(&x, &config, host(&places, &numbers), backward, bytes)?;
        let want = rotated::<f64>(&x, &config, host(&places, &numbers), backward, bytes)?;
        judge("out", world, &write, &naive, &want, largest(&want) + config.amplitude())?;
    }
    Ok(outcome)
}

pub fn add(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [from, to, of] = [0; 3].map(|_| float(f));
    let (in_place, learned) = (f.one_in(3), f.one_in(2));
    let shape = [c.between(1, 2), c.between(1, 3), c.between(1, 12), c.between(1, 8)];
    let mut x = Window::input(c, from, shape, false);
    if in_place {
        x = Window::new(c, x.buf, from, shape, false);
    }
    let mut out = (!in_place).then(|| Window::new(c, Buf::OutA, to, shape, false));
    let mut places = places(f, c, shape, 1);
    let rows = if c.one_in(2) { 40 } else { shape[2] + 1 };
    let mut table = Window::input(c, of, [1, 1, rows, shape[3]], false);
    if learned {
        places.1 = places.1.min(1);
    }
    let (mut dim, mut base, mut scale) = (shape[3], 10000.0, c.pick(&[1.0, 2.5, 0.0]));
    let pass = c.one_in(3);
    for _ in 0..faults(c) {
        match c.below(9) {
            0 => dim = width(c),
            1 => base = number(c),
            2 => scale = c.float().into(),
            3 => places.1 = c.size() as u32,
            4 => places.0.iter_mut().for_each(|w| w.spoil(c)),
            5 => out.iter_mut().for_each(|w| w.spoil(c)),
            6 => table.spoil(c),
            _ => x.spoil(c),
        }
    }
    *said = format!("{x:?} to {out:?}, at {places:?}, {dim} {base} {scale}, {learned} {table:?}");
    let sinusoid = match Sinusoid::new(world.device(), dim, base) {
        Ok(sinusoid) => sinusoid,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of_table = if learned {
        PositionTable::Learned(view(&buffers, &table))
    } else {
        PositionTable::Sinusoid(&sinusoid)
    };
    let call = AddPositions::new(view(&buffers, &x), of_table, at(&places, &buffers))
        .out(out.as_ref().map(|w| view(&buffers, w)))
        .scale(scale);
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let operator = Positions::with_pipelines(world.gpu.pipelines());
    let result = if pass {
        operator.add(&mut encoder.begin_compute_pass(&Default::default()), &call)
    } else {
        operator.add(&mut encoder, &call)
    };
    let all: Vec<_> = [Some(x), out, places.0, learned.then_some(table)].into_iter().flatten().collect();
    let write = out.unwrap_or(x);
    let read =
        out.is_some() && x.is_tame() && (!learned || table.is_tame()) && places.0.is_none_or(|w| w.is_tame());
    let tame = read && write.is_watched() && scale.abs() < 10.0;
    let outcome = settle(world, result, encoder, &mut scratch, &all, &[write], [x.count() < 1 << 20, tame])?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let numbers = places.0.map_or(Vec::new(), |w| w.numbers(bytes));
        fn sum<R: Real>(
            [x, table]: [&Window; 2],
            learned: bool,
            base: f64,
            at: RowPositions<HostTensor<u32>>,
            scale: f64,
            bytes: &[Vec<u8>],
        ) -> Result<Vec<R>, String> {
            let rows = table.wide::<R>(bytes);
            let of = if learned { PositionTable::Learned(&rows[..]) } else { PositionTable::Sinusoid(base) };
            let done = reference::add_positions(&x.wide::<R>(bytes), x.shape, of, at, scale);
            done.map_err(|e| format!("the reference refuses it: {e}"))
        }
        let table = if learned { table } else { x };
        let naive = sum::<f32>([&x, &table], learned, base, host(&places, &numbers), scale, bytes)?;
        let want = sum::<f64>([&x, &table], learned, base, host(&places, &numbers), scale, bytes)?;
        judge("out", world, &write, &naive, &want, largest(&want) + 1.0)?;
    }
    Ok(outcome)
}

/// The gradient of a learned table.
pub fn table(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [from, to] = [0; 2].map(|_| float(f));
    let shape = [c.between(1, 2), c.between(1, 3), c.between(1, 12), c.between(1, 8)];
    let mut d_out = Window::input(c, from, shape, false);
    let mut places = places(f, c, shape, 1);
    places.1 = places.1.min(1);
    let rows = if c.one_in(2) { 40 } else { shape[2] + 1 };
    let mut d_table = Window::new(c, Buf::OutA, to, [1, 1, rows, shape[3]], false);
    let (pass, accumulates) = (c.one_in(3), f.one_in(4));
    for _ in 0..faults(c) {
        match c.below(6) {
            0 => places.1 = c.size() as u32,
            1 => places.0.iter_mut().for_each(|w| w.spoil(c)),
            2 | 3 => d_out.spoil(c),
            _ => d_table.spoil(c),
        }
    }
    *said = format!("{d_out:?} to {d_table:?}, at {places:?}, accumulates {accumulates}");
    let buffers = world.arena.buffers.clone();
    let [d_out_view, table] = [&d_out, &d_table].map(|window| view(&buffers, window));
    let forward = AddPositions::new(d_out_view, PositionTable::Learned(table), at(&places, &buffers));
    let call = TableBackward::new(forward, d_out_view, table).accumulate(accumulates);
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let operator = Positions::with_pipelines(world.gpu.pipelines());
    let result = if pass {
        operator.table_backward(&mut encoder.begin_compute_pass(&Default::default()), &call)
    } else {
        operator.table_backward(&mut encoder, &call)
    };
    let all: Vec<_> = [Some(d_out), Some(d_table), places.0].into_iter().flatten().collect();
    // Every table row searches for the rows at its position.
    let work = d_table.count().saturating_mul(d_out.count());
    let tame =
        !accumulates && d_out.is_tame() && d_table.is_watched() && places.0.is_none_or(|w| w.is_tame());
    let outcome = settle(world, result, encoder, &mut scratch, &all, &[d_table], [work < 1 << 24, tame])?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let numbers = places.0.map_or(Vec::new(), |w| w.numbers(bytes));
        let rows = d_table.shape[2];
        let of = |e: wgpu_attention::Error| format!("the reference refuses it: {e}");
        let (x, wide) = (d_out.wide::<f32>(bytes), d_out.wide::<f64>(bytes));
        let at = || host(&places, &numbers);
        let naive = reference::add_positions_backward(&x, d_out.shape, rows, at(), 1.0).map_err(of)?;
        let want = reference::add_positions_backward(&wide, d_out.shape, rows, at(), 1.0).map_err(of)?;
        let terms: Vec<f64> = wide.iter().map(|x| x.abs()).collect();
        let terms = reference::add_positions_backward(&terms, d_out.shape, rows, at(), 1.0).map_err(of)?;
        judge("d_table", world, &d_table, &naive.d_table, &want.d_table, largest(&terms.d_table))?;
    }
    Ok(outcome)
}
