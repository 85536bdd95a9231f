//! Projections, also with quantised weights, and merges.

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::matmul::{
    ProjectionForward, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::reference;
use wgpu_attention::reference::Real;
use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{DType, KernelOptions, Linear, Projection};

use crate::arena::{BYTES, Buf, Window, start, view};
use crate::call::{MOST_WORK, faults, float, judge, largest, outputs, settle};
use crate::choices::Choices;
use crate::operands::{Operands, record_plain};
use crate::world::{Outcome, World};

#[derive(Clone, Copy, Debug)]
struct Product {
    x: Window,
    weight: Window,
    bias: Option<Window>,
    out: Window,
    narrow: bool,
}

/// Returns the weight's shape for `heads` heads of `dim` features. Each head of a narrow one reads
/// `read` features.
pub fn weight_shape(narrow: bool, shared: bool, heads: usize, dim: usize, read: usize) -> [usize; 4] {
    match (narrow, shared) {
        (true, true) => [1, 1, dim, read],
        (true, false) => [1, heads, dim, read],
        (false, _) => [1, 1, heads * dim, read],
    }
}

pub fn project(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 4].map(|_| float(f));
    let (heads, narrow, biased, aligned) = (f.between(1, 3), f.one_in(3), f.one_in(2), f.one_in(2));
    let (dim, read, shared) = (f.pick(&[4, 5]), f.pick(&[4, 8, 3]), f.one_in(2));
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let mut units = MatrixUnits::Auto;
    let (batch, length) = (c.between(1, 2), c.between(1, 9));
    let features = if narrow { heads * read } else { read };
    let count = f.between(1, 3);
    let mut products: Vec<_> = (0..count)
        .map(|n| {
            let weight = weight_shape(narrow, shared, heads, dim, read);
            let mut out = Window::new(c, Buf::OutA, types[3], [batch, heads, length, dim], aligned);
            out.offset = out.offset % 64 + n * (5120 / types[3].bytes());
            Product {
                x: Window::input(c, types[0], [batch, 1, length, features], aligned),
                weight: Window::input(c, types[1], weight, aligned),
                bias: biased.then(|| Window::input(c, types[2], [1, 1, 1, heads * dim], aligned)),
                out,
                narrow,
            }
        })
        .collect();
    let pass = c.one_in(3);
    for _ in 0..faults(c) {
        let n = c.below(products.len());
        let product = &mut products[n];
        match c.below(9) {
            0 | 1 => product.x.spoil(c),
            2 | 3 => product.weight.spoil(c),
            4 => product.bias.iter_mut().for_each(|b| b.spoil(c)),
            5 | 6 => product.out.spoil(c),
            7 => product.narrow = !product.narrow,
            _ => units = MatrixUnits::Always,
        }
    }
    if c.one_in(40) {
        products.clear();
    }
    *said = format!("{products:?}, {form:?}, {units:?}");
    let operator = Projection::with_pipelines(world.gpu.pipelines())
        .kernel_options(KernelOptions::new().target(form).matrix_units(units));
    let buffers = world.arena.buffers.clone();
    let calls: Vec<_> = products
        .iter()
        .map(|p| {
            ProjectionForward::new(
                view(&buffers, &p.x),
                Linear {
                    weight: view(&buffers, &p.weight),
                    bias: p.bias.as_ref().map(|b| view(&buffers, b)),
                },
                view(&buffers, &p.out),
            )
            .narrow(p.narrow)
        })
        .collect();
    let mut scratch = world.scratch();
    let mut encoder = world.encoder();
    let result = if pass {
        operator.forward(&mut encoder.begin_compute_pass(&Default::default()), &calls)
    } else {
        operator.forward(&mut encoder, &calls)
    };
    let work = products.iter().map(|p| p.out.count() as f64 * p.x.shape[3] as f64).sum::<f64>();
    let all: Vec<_> =
        products.iter().flat_map(|p| [Some(p.x), Some(p.weight), p.bias, Some(p.out)]).flatten().collect();
    let writes: Vec<_> = products.iter().map(|p| p.out).collect();
    let reads_tame =
        products.iter().all(|p| p.x.is_tame() && p.weight.is_tame() && p.bias.is_none_or(|b| b.is_tame()));
    let tame = reads_tame && writes.iter().all(Window::is_watched);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [work < MOST_WORK, tame])?;
    if matches!(outcome, Outcome::Judged) {
        for p in &products {
            let bytes = &world.arena.before;
            let want = projected::<f64>(p, bytes);
            let term = [p.x, p.weight].map(|w| largest(&w.wide::<f64>(bytes))).iter().product::<f64>();
            let bias = p.bias.map_or(0.0, |bias| largest(&bias.wide::<f64>(bytes)));
            let magnitude = largest(&want).max(term).max(bias);
            judge("out", world, &p.out, &projected::<f32>(p, bytes), &want, magnitude)?;
        }
    }
    Ok(outcome)
}

/// Runs the reference, head by head.
fn projected<R: Real>(p: &Product, bytes: &[Vec<u8>]) -> Vec<R> {
    let [batch, heads, length, dim] = p.out.shape;
    let features = p.x.shape[3];
    let (x, w) = (p.x.wide::<R>(bytes), p.weight.wide::<R>(bytes));
    let bias = p.bias.map(|b| b.wide::<R>(bytes));
    let read = if p.narrow { features / heads } else { features };
    let mut out = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            let of = if p.narrow && p.weight.shape[1] == 1 { 0 } else { h };
            let weight = &w[of * dim * read..][..dim * read];
            let first = if p.narrow { h * read } else { 0 };
            let rows = x[b * length * features..][..length * features].chunks_exact(features);
            let rows: Vec<R> = rows.flat_map(|row| &row[first..first + read]).copied().collect();
            let bias = bias.as_ref().map(|b| &b[h * dim..][..dim]);
            out.extend(reference::project(&rows, weight, bias, read, dim).expect("it fits"));
        }
    }
    out
}

pub fn merge(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 2].map(|_| float(f));
    let shape = [c.between(1, 2), c.between(1, 3), c.between(1, 20), c.between(1, 9)];
    let [batch, heads, q_len, _] = shape;
    let rows = [batch, heads, q_len, 1];
    let count = f.between(1, 5);
    let mut parts: Vec<_> = (0..count)
        .map(|_| [Window::input(c, types[0], shape, false), Window::input(c, DType::F32, rows, false)])
        .collect();
    let [out, lse, _] = outputs(c, [(types[1], shape), (DType::F32, rows), (DType::F32, [1; 4])], false);
    let mut into = [out, lse];
    let pass = c.one_in(3);
    for _ in 0..faults(c) {
        let n = c.below(2);
        if c.one_in(2) {
            into[n].spoil(c);
        } else {
            let part = c.below(parts.len());
            parts[part][n].spoil(c);
        }
    }
    if c.one_in(40) {
        parts.clear();
    }
    *said = format!("{parts:?} into {into:?}");
    let buffers = world.arena.buffers.clone();
    let partial = |w: &[Window; 2]| Partial { out: view(&buffers, &w[0]), lse: view(&buffers, &w[1]) };
    let calls: Vec<_> = parts.iter().map(partial).collect();
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let call = MergeForward::new(&calls, partial(&into));
    let operator = Merge::with_pipelines(world.gpu.pipelines());
    let result = if pass {
        operator.forward(&mut encoder.begin_compute_pass(&Default::default()), &call)
    } else {
        operator.forward(&mut encoder, &call)
    };
    let all: Vec<_> = parts.iter().flatten().chain(&into).copied().collect();
    let tame = parts.iter().flatten().all(Window::is_tame) && into.iter().all(Window::is_watched);
    let small = into[0].count().saturating_mul(parts.len()) < 1 << 20;
    let outcome = settle(world, result, encoder, &mut scratch, &all, &into, [small, tame])?;
    // A merge in f16 rounds between every three parts.
    if matches!(outcome, Outcome::Judged) && into[0].dtype == DType::F32 {
        let bytes = &world.arena.before;
        let (naive, exact) = (merged::<f32>(&parts, bytes)?, merged::<f64>(&parts, bytes)?);
        let values = parts.iter().map(|[out, _]| largest(&out.wide(bytes))).fold(0.0, f64::max);
        judge("out", world, &into[0], &naive.0, &exact.0, values)?;
        judge("lse", world, &into[1], &naive.1, &exact.1, largest(&exact.1) + 1.0)?;
    }
    Ok(outcome)
}

fn merged<R: Real>(parts: &[[Window; 2]], bytes: &[Vec<u8>]) -> Result<(Vec<R>, Vec<R>), String> {
    let data: Vec<_> = parts.iter().map(|part| part.map(|w| w.wide::<R>(bytes))).collect();
    let slices: Vec<_> = data.iter().map(|[out, lse]| (&out[..], &lse[..])).collect();
    let value_dim = parts.first().map_or(1, |part| part[0].shape[3]);
    reference::merge(&slices, value_dim).map_err(|e| format!("the reference refuses it: {e}"))
}

/// A matrix in blocks. The buffer's f16 numbers are typical scales of weights, and any bits are
/// their steps.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    buf: Buf,
    format: QuantizedFormat,
    rows: usize,
    columns: usize,
    /// The offset in bytes.
    offset: usize,
}

impl Blocks {
    fn new(c: &mut Choices, format: QuantizedFormat, rows: usize, columns: usize) -> Self {
        Blocks { buf: Buf::Halves, format, rows, columns, offset: 4 * c.below(40) }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(6) {
            0 => self.rows = c.size(),
            1 => self.columns = c.size(),
            2 => self.rows = self.rows.wrapping_add(1),
            3 => self.offset = c.size(),
            4 => {
                // To the end of the buffer, or a word further.
                let bytes = self.format.row_bytes(self.columns).unwrap_or(0).saturating_mul(self.rows);
                self.offset = (BYTES / 4 * 4).saturating_sub(bytes) / 4 * 4 + 4 * c.below(2);
            }
            _ => self.buf = c.pick(&Buf::ALL),
        }
    }

    fn matrix<'a>(&self, buffers: &'a [wgpu::Buffer]) -> QuantizedMatrix<'a> {
        let Blocks { buf, format, rows, columns, offset } = *self;
        let bytes = format.row_bytes(columns).unwrap_or(0).saturating_mul(rows);
        let first = start(buffers, buf, offset.saturating_add(bytes));
        QuantizedMatrix::new(&buffers[buf as usize], format, [rows, columns])
            .with_offset(offset.saturating_add(first))
    }

    fn is_tame(&self) -> bool {
        self.buf == Buf::Halves
    }

    /// Returns its elements as bytes of a tensor.
    fn window(&self) -> Window {
        let bytes = self.format.row_bytes(self.columns).unwrap_or(0).saturating_mul(self.rows);
        let shape = [1, 1, 1, bytes / 4];
        Window { buf: self.buf, dtype: DType::U32, shape, strides: [1; 4], offset: self.offset / 4 }
    }

    fn weights<R: Real>(&self, bytes: &[Vec<u8>]) -> Result<Vec<R>, String> {
        let row = self.format.row_bytes(self.columns).map_err(|e| e.to_string())?;
        let blocks = &bytes[self.buf as usize][self.offset..][..self.rows * row];
        reference::dequantize(self.format, blocks).map_err(|e| e.to_string())
    }
}

pub fn quantized(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let format = f.pick(&QuantizedFormat::ALL);
    let (form, many) = (f.pick(&[Target::Software, Target::Gpu]), f.one_in(2));
    let batch = c.between(1, 2);
    let length = if many { c.between(5, 16) } else { c.between(1, 8 / batch) };
    let (heads, dim, features) = (c.between(1, 3), c.pick(&[1, 3, 4, 8, 20]), 32 * c.between(1, 3));
    let shapes = [[batch, 1, length, features], [batch, heads, length, dim]];
    let mut t = Operands::new(world, c, &[(true, own, shapes[0])], &[(true, other, shapes[1])]);
    let mut blocks = Blocks::new(c, format, heads * dim, features);
    if c.one_in(3) {
        blocks.spoil(c);
    }
    t.spoil(c);
    *said = format!("{blocks:?}, {t:?}, {form:?}");
    let buffers = world.arena.buffers.clone();
    let operator = QuantizedProjection::with_pipelines(world.gpu.pipelines())
        .kernel_options(KernelOptions::new().target(form));
    let calls = [QuantizedForward::new(t.read(0), blocks.matrix(&buffers), t.written(0))];
    let record = record_plain!(operator, forward, &calls);
    let outcome = t.recorded_plain(world, c, (blocks.is_tame(), &[blocks.window()]), record)?;
    if matches!(outcome, Outcome::Judged) {
        // A linear layer whose outputs are grouped by heads.
        fn truth<R: Real>(t: &Operands, world: &World, blocks: &Blocks) -> Result<Vec<R>, String> {
            let [_, heads, length, dim] = t.output(0).shape;
            let weights = blocks.weights::<R>(&world.arena.before)?;
            let x = t.wide::<R>(world, 0);
            let got = reference::project(&x, &weights, None, blocks.columns, heads * dim);
            let got = got.map_err(|e| format!("the reference refuses it: {e}"))?;
            reference::split_heads(&got, length, heads, dim).map_err(|e| e.to_string())
        }
        let weights = largest(&blocks.weights::<f64>(&world.arena.before)?);
        let (naive, want) = (truth::<f32>(&t, world, &blocks)?, truth::<f64>(&t, world, &blocks)?);
        t.judge("out", world, 0, (&naive, &want), weights * t.most(world, 0))?;
    }
    Ok(outcome)
}

pub fn quantized_rows(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let other = float(f);
    let format = f.pick(&QuantizedFormat::ALL);
    let (batch, length) = (c.between(1, 2), c.between(1, 9));
    let (count, columns) = (c.between(1, 14), 32 * c.between(1, 3));
    let (ids, picked) = ([batch, 1, length, 1], [batch, 1, length, columns]);
    let mut t = Operands::new(world, c, &[(true, DType::U32, ids)], &[(true, other, picked)]);
    let mut blocks = Blocks::new(c, format, count, columns);
    if c.one_in(3) {
        blocks.spoil(c);
    }
    t.spoil(c);
    *said = format!("{blocks:?}, {t:?}");
    let buffers = world.arena.buffers.clone();
    let operator = QuantizedProjection::with_pipelines(world.gpu.pipelines());
    let call = QuantizedRows::new(blocks.matrix(&buffers), t.read(0), t.written(0));
    let record = record_plain!(operator, rows, &call);
    let outcome = t.recorded_plain(world, c, (blocks.is_tame(), &[blocks.window()]), record)?;
    if matches!(outcome, Outcome::Judged) {
        let weights = blocks.weights::<f32>(&world.arena.before)?;
        let missing = vec![f32::NAN; blocks.columns];
        let row = |id: &u32| weights.chunks(blocks.columns).nth(*id as usize).unwrap_or(&missing);
        let naive: Vec<f32> = t.input(0).numbers(&world.arena.before).iter().flat_map(row).copied().collect();
        let want: Vec<f64> = naive.iter().map(|x| f64::from(*x)).collect();
        // The only error is the rounding to the output's type.
        t.judge("out", world, 0, (&naive, &want), 0.0)?;
    }
    Ok(outcome)
}
