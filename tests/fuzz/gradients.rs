//! Gradients of attention, of projections and of merges.

use wgpu_attention::attention::{Merge, MergeBackward, MergeForward, PartGradients, Partial};
use wgpu_attention::matmul::{Linear, ProjectionBackward, ProjectionForward};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{self, Gradients, Real, widen};
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};
use wgpu_attention::{Attention, Backward, DType, Forward, KernelOptions, Projection, Scratch, Shape};

use crate::arena::{Buf, Window, view};
use crate::attention::{ConfigSpec, DropSpec, shape_of};
use crate::call::{
    How, MOST_WORK, Memory, faults, float, judge, largest, refused_alike, scratch_for, settle,
};
use crate::case::{Case, Expected, widened};
use crate::choices::Choices;
use crate::masks::MaskSpec;
use crate::products::weight_shape;
use crate::world::{Outcome, World, refused};

/// Returns a window of an output, about `first` bytes from the start of its buffer.
pub fn at(
    c: &mut Choices,
    (buf, first): (Buf, usize),
    dtype: DType,
    shape: [usize; 4],
    aligned: bool,
) -> Window {
    let mut window = Window::new(c, buf, dtype, shape, aligned);
    window.offset = window.offset % 64 + first / dtype.bytes();
    window
}

/// Places for the gradients of q, k and v, and of bias, slopes, relative table and sinks.
const PLACES: [(Buf, usize); 3] = [(Buf::OutB, 0), (Buf::OutC, 0), (Buf::OutC, 8192)];
const ADDED_PLACES: [(Buf, usize); 4] =
    [(Buf::OutB, 8192), (Buf::OutC, 14336), (Buf::OutC, 15104), (Buf::OutB, 15360)];

#[derive(Clone, Debug)]
struct BackwardSpec {
    config: ConfigSpec,
    /// The tensors q, k, v, out, lse, d_out.
    tensors: [Window; 6],
    d_lse: Option<Window>,
    /// The gradients of q, k, v.
    gradients: [Option<Window>; 3],
    /// The gradients of bias, slopes, relative table, sinks.
    added: [Option<Window>; 4],
    accumulates: bool,
    mask: MaskSpec,
    dropout: Option<DropSpec>,
}

impl BackwardSpec {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let (mut config, shape) = ConfigSpec::new(f, c);
        config.path = Algorithm::Auto;
        let dtype = config.dtype;
        let aligned = f.one_in(2) && shape.head_dim % 4 == 0 && shape.value_dim % 4 == 0;
        let [q, k, v, d_out] = [shape.q(), shape.k(), shape.v(), shape.out()]
            .map(|shape| Window::input(c, dtype, shape, aligned));
        let out = at(c, (Buf::OutA, 0), dtype, shape.out(), aligned);
        let lse = at(c, (Buf::OutA, 8192), DType::F32, shape.lse(), false);
        let gradient = if f.one_in(2) { DType::F32 } else { dtype };
        let wanted = f.pick(&[[true; 3], [true; 3], [true, false, false], [false, true, false], [false; 3]]);
        let shapes = [shape.q(), shape.k(), shape.v()];
        let gradients = [0, 1, 2].map(|n| wanted[n].then(|| at(c, PLACES[n], gradient, shapes[n], aligned)));
        let mask = MaskSpec::new(f, c, &shape);
        let (of_mask, in_f32) = (f.one_in(2) || wanted == [false; 3], f.one_in(2));
        let own = mask.added();
        let added = [0, 1, 2, 3].map(|n| {
            let own = own[n].filter(|_| of_mask)?;
            let dtype = if in_f32 { DType::F32 } else { own.dtype };
            Some(at(c, ADDED_PLACES[n], dtype, own.shape, false))
        });
        BackwardSpec {
            config,
            tensors: [q, k, v, out, lse, d_out],
            d_lse: f.one_in(2).then(|| Window::input(c, DType::F32, shape.lse(), false)),
            gradients,
            added,
            accumulates: c.one_in(6),
            mask,
            dropout: DropSpec::new(f, c, shape.weights()),
        }
    }

    fn windows(&mut self) -> Vec<&mut Window> {
        let dropout = self.dropout.as_mut().and_then(DropSpec::window);
        let gradients = self.gradients.iter_mut().chain(&mut self.added).flatten();
        let all = self.tensors.iter_mut().chain(&mut self.d_lse).chain(gradients);
        all.chain(self.mask.windows()).chain(dropout).collect()
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(10) {
            0 | 1 => self.config.spoil(c),
            2 => self.mask.spoil(c),
            3 => self.dropout.iter_mut().for_each(|d| d.spoil(c)),
            4 => {
                // One gradient moves to the place of another, or one is missing.
                let (n, m) = (c.below(4), c.below(3));
                self.added[n] = self.gradients[m].take();
            }
            _ => {
                let mut all = self.windows();
                let n = c.below(all.len());
                all[n].spoil(c);
            }
        }
    }

    fn written(&self) -> Vec<Window> {
        self.gradients.iter().chain(&self.added).flatten().copied().collect()
    }

    fn shape(&self) -> Shape {
        let [q, k, v, ..] = self.tensors;
        shape_of([q, k, v])
    }

    /// True if gradients can be judged after the forward pass has run.
    fn is_tame(&self, bytes: &[Vec<u8>]) -> bool {
        let [q, k, v, out, lse, d_out] = self.tensors;
        let read = [Some(q), Some(k), Some(v), Some(d_out), self.d_lse];
        self.config.is_tame()
            && q.dtype == DType::F32
            && !self.accumulates
            && read.iter().flatten().all(Window::is_tame)
            && [out, lse].iter().all(|w| Buf::OUTS.contains(&w.buf))
            && self.written().iter().all(Window::is_watched)
            && self.mask.is_tame(bytes)
            && self.dropout.is_none_or(|d| d.is_tame())
            && self.shape().flops() < 2e6
    }

    fn judge(&self, world: &World) -> Result<(), String> {
        let bytes = &world.arena.before;
        let [q, k, v, _, _, d_out] = self.tensors;
        let case = Case {
            name: String::new(),
            shape: self.shape(),
            q: q.floats(bytes),
            k: k.floats(bytes),
            v: v.floats(bytes),
            scale: self.config.scale,
            softcap: self.config.softcap,
            score_vector: None,
            rules: self.mask.rules(bytes),
            dropout: self.dropout.map(|d| d.host(bytes)),
            expected: Expected::default(),
        };
        let (d_out, d_lse) = (d_out.floats(bytes), self.d_lse.map(|w| w.floats(bytes)));
        fn of<R: Real>(
            case: &Case,
            d_out: &[f32],
            d_lse: Option<&[f32]>,
            magnitudes: bool,
        ) -> Result<[Vec<R>; 7], String> {
            let [q, k, v, d_out] = [&case.q, &case.k, &case.v, d_out].map(widen::<R>);
            let d_lse = d_lse.map(widen::<R>);
            let gradients = if magnitudes {
                reference::attention_backward_magnitudes::<R>
            } else {
                reference::attention_backward::<R>
            };
            let got = gradients(&q, &k, &v, &d_out, d_lse.as_deref(), case.shape, &case.options());
            let got = got.map_err(|e| format!("the reference refuses it: {e}"))?;
            let Gradients { d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks, .. } = got;
            let added = [d_bias, d_slopes, d_relative, d_sinks].map(Option::unwrap_or_default);
            let [d_bias, d_slopes, d_relative, d_sinks] = added;
            Ok([d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks])
        }
        let want = of::<f64>(&case, &d_out, d_lse.as_deref(), false)?;
        let naive = of::<f32>(&case, &d_out, d_lse.as_deref(), false)?;
        let terms = of::<f32>(&case, &d_out, d_lse.as_deref(), true)?;
        // A weight is as far off as its score and lse are.
        let of_scores = 1.0 + case.largest_score() / 4.0;
        for (n, window) in self.gradients.iter().chain(&self.added).enumerate() {
            let Some(window) = window else { continue };
            let naive = widened(&naive[n], window.dtype);
            let magnitude = largest(&widen::<f64>(&terms[n])) * of_scores;
            let mut tolerance = Tolerance::gradient(&naive, &want[n], magnitude, EPSILON_F32);
            // Devices may flush numbers below f32's normal numbers.
            tolerance.absolute += 1024.0 * f64::from(f32::MIN_POSITIVE);
            let got = window.wide::<f64>(&world.arena.after);
            compare(&got, &want[n], tolerance).map_err(|e| format!("gradient {n}: {e}"))?;
        }
        Ok(())
    }
}

/// Runs the forward call, then its gradients.
pub fn attention(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = BackwardSpec::new(f, c);
    let (how, memory) = (How::new(c), Memory::new(c));
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}, {how:?}, {memory:?}");
    let attention = match Attention::with_pipelines(world.gpu.pipelines(), spec.config.config()) {
        Ok(attention) => attention,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let [q, k, v, out, lse, d_out] = spec.tensors.each_ref().map(|w| view(&buffers, w));
    let [d_q, d_k, d_v] = spec.gradients.each_ref().map(|w| w.as_ref().map(|w| view(&buffers, w)));
    let [d_bias, d_slopes, d_relative, d_sinks] =
        spec.added.each_ref().map(|w| w.as_ref().map(|w| view(&buffers, w)));
    let mask = spec.mask.device(&buffers);
    let dropout = spec.dropout.as_ref().map(|d| d.device(&buffers));
    let forward = Forward::new(q, k, v, out).lse(lse).mask(mask).dropout(dropout);
    let call = Backward::new(forward, d_out)
        .d_lse(spec.d_lse.as_ref().map(|w| view(&buffers, w)))
        .d_q(d_q)
        .d_k(d_k)
        .d_v(d_v)
        .d_bias(d_bias)
        .d_slopes(d_slopes)
        .d_relative(d_relative)
        .d_sinks(d_sinks)
        .accumulate(spec.accumulates);

    let size = attention.backward_scratch_size(&call);
    let (memory, mut scratch) = scratch_for(world, memory, &size)?;
    let small = 4.0 * spec.shape().flops() < MOST_WORK;
    let mut encoder = world.encoder();
    let result = match how {
        // Longer calls have many dispatches to bind.
        _ if !small => attention.backward_scratch_size(&call).map(drop),
        How::Prepare => attention.prepare_backward(&call, &mut scratch).map(drop),
        How::Pass => {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            attention.backward(&mut pass, &call, &mut scratch)
        }
        _ => attention.backward(&mut encoder, &call, &mut scratch),
    };
    refused_alike(&size, &result)?;
    if memory == Memory::Foreign && result.is_err() {
        scratch = world.scratch();
    }
    let all: Vec<Window> = spec.clone().windows().into_iter().map(|w| *w).collect();
    let run = small && !matches!(how, How::Prepare | How::Dropped);
    let mut writes = spec.written();
    let mut computed = false;
    if run && result.is_ok() && !all.iter().any(|w| w.buf.fails()) {
        let mut first = world.encoder();
        let size = attention.scratch_size(&forward).ok().filter(|size| size.total() < 1 << 24);
        let mut scratch =
            Scratch::new(world.device(), size.unwrap_or_default()).map_err(|e| e.to_string())?;
        computed = attention.forward(&mut first, &forward, &mut scratch).is_ok();
        world.gpu.queue().submit([first.finish()]);
        writes.extend(spec.tensors[3..5].iter().filter(|_| computed));
    }
    let tame = computed && spec.is_tame(&world.arena.before);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [run, tame])?;
    if matches!(outcome, Outcome::Judged) {
        spec.judge(world)?;
    }
    Ok(outcome)
}

#[derive(Clone, Copy, Debug)]
struct Product {
    x: Window,
    weight: Window,
    d_y: Window,
    /// The gradients of x, the weight, the bias.
    gradients: [Option<Window>; 3],
    narrow: bool,
}

impl Product {
    /// Returns the gradients of x, the weight and the bias, head by head if each head reads other
    /// features. With `absolute`, it uses absolute values.
    fn reference<R: Real>(&self, bytes: &[Vec<u8>], absolute: bool) -> [Vec<R>; 3] {
        let of = |w: &Window| {
            let x = w.wide::<R>(bytes);
            x.into_iter().map(|x| if absolute { x.abs() } else { x }).collect::<Vec<R>>()
        };
        let (x, weight, d_y) = (of(&self.x), of(&self.weight), of(&self.d_y));
        let [batch, heads, length, dim] = self.d_y.shape;
        let features = self.x.shape[3];
        let read = if self.narrow { features / heads } else { features };
        let mut all = [vec![R::zero(); x.len()], vec![R::zero(); weight.len()], vec![R::zero(); heads * dim]];
        for b in 0..batch {
            for h in 0..heads {
                let (first, matrix) = match self.narrow {
                    true => (h * read, if self.weight.shape[1] == 1 { 0 } else { h }),
                    false => (0, h),
                };
                let rows = x[b * length * features..][..length * features].chunks_exact(features);
                let rows: Vec<R> = rows.flat_map(|row| &row[first..first + read]).copied().collect();
                let d_y = &d_y[(b * heads + h) * length * dim..][..length * dim];
                let of_head = &weight[matrix * dim * read..][..dim * read];
                let got = reference::project_backward(&rows, of_head, d_y, read, dim).expect("it fits");
                let mut add = |n: usize, at: usize, x: R| all[n][at] = all[n][at] + x;
                for (n, d_x) in got.d_x.into_iter().enumerate() {
                    add(0, (b * length + n / read) * features + first + n % read, d_x);
                }
                got.d_weight.into_iter().enumerate().for_each(|(n, d)| add(1, matrix * dim * read + n, d));
                got.d_bias.into_iter().enumerate().for_each(|(n, d)| add(2, h * dim + n, d));
            }
        }
        all
    }
}

/// Gradients of projections.
pub fn project(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 4].map(|_| float(f));
    let (heads, narrow, shared, aligned) = (f.between(1, 3), f.one_in(3), f.one_in(2), f.one_in(2));
    let (dim, read) = (f.pick(&[4, 5]), f.pick(&[4, 8, 3]));
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let (batch, length) = (c.between(1, 2), c.between(1, 9));
    let features = if narrow { heads * read } else { read };
    let count = f.between(1, 2);
    let mut products: Vec<_> = (0..count)
        .map(|n| {
            let weight = weight_shape(narrow, shared, heads, dim, read);
            let (x, d_y) = ([batch, 1, length, features], [batch, heads, length, dim]);
            let shapes = [x, weight, [1, 1, 1, heads * dim]];
            let of =
                |m: usize, c: &mut Choices| at(c, (Buf::OUTS[m], n * 8192), types[3], shapes[m], aligned);
            Product {
                x: Window::input(c, types[0], x, aligned),
                weight: Window::input(c, types[1], weight, aligned),
                d_y: Window::input(c, types[2], d_y, aligned),
                gradients: [0, 1, 2].map(|m| (!c.one_in(5)).then(|| of(m, c))),
                narrow,
            }
        })
        .collect();
    let (pass, accumulates) = (c.one_in(3), f.one_in(4));
    let mut units = MatrixUnits::Auto;
    for _ in 0..faults(c) {
        let n = c.below(products.len());
        let product = &mut products[n];
        match c.below(9) {
            0 => product.x.spoil(c),
            1 | 2 => product.weight.spoil(c),
            3 => product.d_y.spoil(c),
            4 => product.narrow = !product.narrow,
            5 => units = MatrixUnits::Always,
            _ => product.gradients.iter_mut().flatten().for_each(|w| w.spoil(c)),
        }
    }
    // The same gradient twice: the second product adds to it.
    if c.one_in(8) {
        let first = products[0];
        products.last_mut().into_iter().for_each(|last| last.gradients = first.gradients);
    }
    if c.one_in(40) {
        products.clear();
    }
    *said = format!("{products:?}, accumulates {accumulates}, {form:?}, {units:?}");
    let buffers = world.arena.buffers.clone();
    let operator = Projection::with_pipelines(world.gpu.pipelines())
        .kernel_options(KernelOptions::new().target(form).matrix_units(units));
    let calls: Vec<_> = products
        .iter()
        .map(|p| {
            let [x, weight, d_y] = [p.x, p.weight, p.d_y].map(|w| view(&buffers, &w));
            let [d_x, d_weight, d_bias] = p.gradients.map(|w| w.map(|w| view(&buffers, &w)));
            let forward = ProjectionForward::new(x, Linear { weight, bias: None }, d_y).narrow(p.narrow);
            ProjectionBackward::new(forward, d_y)
                .d_x(d_x)
                .d_weight(d_weight)
                .d_bias(d_bias)
                .accumulate(accumulates)
        })
        .collect();
    let mut scratch = world.scratch();
    let mut encoder = world.encoder();
    let result = if pass {
        operator.backward(&mut encoder.begin_compute_pass(&Default::default()), &calls)
    } else {
        operator.backward(&mut encoder, &calls)
    };
    let work = products.iter().map(|p| 2.0 * p.d_y.count() as f64 * p.x.shape[3] as f64).sum::<f64>();
    let read: Vec<_> = products.iter().flat_map(|p| [p.x, p.weight, p.d_y]).collect();
    let writes: Vec<_> = products.iter().flat_map(|p| p.gradients).flatten().collect();
    let all: Vec<_> = read.iter().chain(&writes).copied().collect();
    let once = writes.iter().enumerate().all(|(n, w)| !writes[..n].iter().any(|v| v.overlaps(w)));
    let tame =
        !accumulates && once && read.iter().all(Window::is_tame) && writes.iter().all(Window::is_watched);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [work < MOST_WORK, tame])?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        for p in &products {
            let (want, naive) = (p.reference::<f64>(bytes, false), p.reference::<f32>(bytes, false));
            let terms = p.reference::<f64>(bytes, true);
            for (n, window) in p.gradients.iter().enumerate() {
                let Some(window) = window else { continue };
                let name = ["d_x", "d_weight", "d_bias"][n];
                judge(name, world, window, &naive[n], &want[n], largest(&terms[n]))?;
            }
        }
    }
    Ok(outcome)
}

/// Runs a merge, then its gradients.
pub fn merge(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 4].map(|_| float(f));
    let shape = [c.between(1, 2), c.between(1, 3), c.between(1, 12), c.between(1, 9)];
    let rows = [shape[0], shape[1], shape[2], 1];
    let f32s = DType::F32;
    let count = f.between(1, 3);
    let mut parts: Vec<_> = (0..count)
        .map(|_| [Window::input(c, types[0], shape, false), Window::input(c, f32s, rows, false)])
        .collect();
    let mut merged =
        [at(c, (Buf::OutA, 0), types[1], shape, false), at(c, (Buf::OutA, 8192), f32s, rows, false)];
    let mut d_out = Window::input(c, types[2], shape, false);
    let mut d_lse = f.one_in(2).then(|| Window::input(c, f32s, rows, false));
    let mut gradients: Vec<_> = (0..count)
        .map(|n| {
            let first = n * 5120;
            [at(c, (Buf::OutB, first), types[3], shape, false), at(c, (Buf::OutC, first), f32s, rows, false)]
        })
        .collect();
    let pass = c.one_in(3);
    for _ in 0..faults(c) {
        let (n, part) = (c.below(2), c.below(count));
        match c.below(8) {
            0 => merged[n].spoil(c),
            1 => d_out.spoil(c),
            2 => d_lse.iter_mut().for_each(|w| w.spoil(c)),
            3 | 4 => parts[part][n].spoil(c),
            _ => gradients[part][n].spoil(c),
        }
    }
    if c.one_in(40) {
        parts.pop();
    }
    *said = format!("{parts:?} into {merged:?}, {d_out:?} {d_lse:?} to {gradients:?}");
    let buffers = world.arena.buffers.clone();
    let partial = |w: &[Window; 2]| Partial { out: view(&buffers, &w[0]), lse: view(&buffers, &w[1]) };
    let calls: Vec<_> = parts.iter().map(partial).collect();
    let into: Vec<_> = gradients
        .iter()
        .map(|w| PartGradients { d_out: view(&buffers, &w[0]), d_lse: view(&buffers, &w[1]) })
        .collect();
    let forward = MergeForward::new(&calls, partial(&merged));
    let call = MergeBackward::new(forward, view(&buffers, &d_out), &into)
        .d_lse(d_lse.as_ref().map(|w| view(&buffers, w)));
    let operator = Merge::with_pipelines(world.gpu.pipelines());
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let result = if pass {
        operator.backward(&mut encoder.begin_compute_pass(&Default::default()), &call)
    } else {
        operator.backward(&mut encoder, &call)
    };
    let read: Vec<_> = parts.iter().flatten().copied().chain([d_out]).chain(d_lse).collect();
    let mut writes: Vec<_> = gradients.iter().flatten().copied().collect();
    let all: Vec<_> = read.iter().chain(&writes).chain(&merged).copied().collect();
    let small = merged[0].count().saturating_mul(parts.len()) < 1 << 20;
    let mut computed = false;
    if small && result.is_ok() && !all.iter().any(|w| w.buf.fails()) {
        let mut first = world.encoder();
        computed = operator.forward(&mut first, &forward).is_ok();
        world.gpu.queue().submit([first.finish()]);
        writes.extend(merged.iter().filter(|_| computed));
    }
    // The gradients of the lse depend on the output, so a rounded output would add its error.
    let tame = computed
        && merged[0].dtype == f32s
        && merged.iter().all(|w| Buf::OUTS.contains(&w.buf))
        && read.iter().all(Window::is_tame)
        && writes.iter().all(Window::is_watched);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [small, tame])?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let value_dim = merged[0].shape[3];
        fn of<R: Real>(
            parts: &[[Window; 2]],
            value_dim: usize,
            d_out: &Window,
            d_lse: Option<&Window>,
            bytes: &[Vec<u8>],
        ) -> Result<Vec<[Vec<R>; 2]>, String> {
            let data: Vec<_> = parts.iter().map(|part| part.map(|w| w.wide::<R>(bytes))).collect();
            let slices: Vec<_> = data.iter().map(|[out, lse]| (&out[..], &lse[..])).collect();
            let (d_out, d_lse) = (d_out.wide::<R>(bytes), d_lse.map(|w| w.wide::<R>(bytes)));
            let got = reference::merge_backward(&slices, value_dim, &d_out, d_lse.as_deref());
            let got = got.map_err(|e| format!("the reference refuses it: {e}"))?;
            Ok(got.into_iter().map(|part| [part.d_out, part.d_lse]).collect())
        }
        let want = of::<f64>(&parts, value_dim, &d_out, d_lse.as_ref(), bytes)?;
        let naive = of::<f32>(&parts, value_dim, &d_out, d_lse.as_ref(), bytes)?;
        // The gradient multiplies the output's error.
        let row: f64 = value_dim as f64 * largest(&d_out.wide(bytes));
        let values = parts.iter().map(|[out, _]| largest(&out.wide(bytes))).fold(0.0, f64::max);
        let of_lse = d_lse.map_or(0.0, |w| largest(&w.wide(bytes)));
        for (n, part) in gradients.iter().enumerate() {
            judge("d_out", world, &part[0], &naive[n][0], &want[n][0], largest(&d_out.wide(bytes)))?;
            judge("d_lse", world, &part[1], &naive[n][1], &want[n][1], 2.0 * row * values + of_lse)?;
        }
    }
    Ok(outcome)
}
