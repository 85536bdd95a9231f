//! Attention calls, valid or not.

use wgpu_attention::mask::Blocks;
use wgpu_attention::reference;
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};
use wgpu_attention::{Attention, Config, DType, Dropout, Forward, KernelOptions, Shape, TensorView};

use crate::arena::{Buf, Window, view};
use crate::call::{How, MOST_WORK, Memory, faults, float, outputs, refused_alike, scratch_for, settle};
use crate::case::{Case, DropoutData, Expected, HostData, Weights};
use crate::choices::Choices;
use crate::masks::MaskSpec;
use crate::world::{Outcome, World, refused};

/// Returns the shape of an attention call.
pub fn shape_of([q, k, v]: [Window; 3]) -> Shape {
    Shape {
        batch: q.shape[0],
        heads: q.shape[1],
        kv_heads: k.shape[1],
        q_len: q.shape[2],
        kv_len: k.shape[2],
        head_dim: q.shape[3],
        value_dim: v.shape[3],
    }
}

#[derive(Clone, Copy, Debug)]
pub struct ConfigSpec {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    pub dtype: DType,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    form: Target,
    pub path: Algorithm,
    units: MatrixUnits,
    f16_operands: bool,
    work: Option<u64>,
    splits: Option<usize>,
}

impl ConfigSpec {
    pub fn new(f: &mut Choices, c: &mut Choices) -> (Self, Shape) {
        let kv_heads = c.between(1, 2);
        let heads = kv_heads * f.between(1, 2);
        let config = ConfigSpec {
            heads,
            kv_heads,
            head_dim: f.pick(&[4, 8, 5]),
            value_dim: f.pick(&[4, 8, 3]),
            dtype: float(f),
            scale: c.one_in(3).then(|| c.pick(&[0.0, 0.5, 1.0, -0.25])),
            softcap: f.one_in(4).then(|| c.pick(&[0.5, 5.0, 50.0])),
            form: f.pick(&[Target::Software, Target::Gpu, Target::Auto]),
            path: f.pick(&[Algorithm::Auto, Algorithm::Fused, Algorithm::Staged]),
            units: MatrixUnits::Auto,
            f16_operands: c.one_in(6),
            work: c.one_in(6).then(|| c.pick(&[0, 1, 1000, u64::MAX])),
            splits: None,
        };
        let rows = f.pick(&[[1, 1], [2, 2], [3, 4], [5, 8], [9, 16], [17, 20]]);
        let shape = Shape {
            batch: c.between(1, 2),
            heads,
            kv_heads,
            q_len: c.between(rows[0], rows[1]),
            kv_len: c.between(1, 32),
            head_dim: config.head_dim,
            value_dim: config.value_dim,
        };
        (config, shape)
    }

    pub fn spoil(&mut self, c: &mut Choices) {
        match c.below(13) {
            0 => self.heads = c.size(),
            1 => self.kv_heads = c.size(),
            2 => self.head_dim = c.size(),
            3 => self.value_dim = c.size(),
            4 => self.dtype = c.pick(&[DType::F32, DType::F16, DType::BF16, DType::U32, DType::Bool]),
            5 => self.scale = Some(c.float().into()),
            6 => self.softcap = Some(c.float().into()),
            7 => self.path = c.pick(&[Algorithm::Fused, Algorithm::Staged]),
            8 => self.units = c.pick(&[MatrixUnits::Always, MatrixUnits::Never]),
            9 => self.work = Some(c.size() as u64),
            10 | 11 => self.splits = Some(c.size()),
            _ => self.f16_operands = true,
        }
    }

    pub fn config(&self) -> Config {
        let mut kernel_options = KernelOptions::new()
            .target(self.form)
            .algorithm(self.path)
            .matrix_units(self.units)
            .f16_operands(self.f16_operands);
        if let Some(work) = self.work {
            kernel_options = kernel_options.work_limit(work);
        }
        if let Some(splits) = self.splits {
            kernel_options = kernel_options.splits(splits);
        }
        Config::new(self.heads, self.head_dim)
            .kv_heads(self.kv_heads)
            .value_dim(self.value_dim)
            .dtype(self.dtype)
            .scale(self.scale)
            .softcap(self.softcap)
            .kernel_options(kernel_options)
    }

    pub fn is_tame(&self) -> bool {
        let within = |x: Option<f64>, least: f64, most: f64| x.is_none_or(|x| (least..=most).contains(&x));
        within(self.scale, -2.0, 2.0) && within(self.softcap, 0.1, 100.0)
    }
}

/// Dropout, if any.
#[derive(Clone, Copy, Debug)]
pub struct DropSpec {
    p: f64,
    seed: u64,
    keep: Option<Window>,
}

impl DropSpec {
    pub fn new(f: &mut Choices, c: &mut Choices, mut pairs: [usize; 4]) -> Option<Self> {
        let kind = f.below(8);
        if kind < 6 {
            return None;
        }
        pairs.iter_mut().filter(|_| c.one_in(3)).for_each(|n| *n = 1);
        let keep = (kind == 7).then(|| Window::input(c, DType::Bool, pairs, false));
        Some(DropSpec { p: c.pick(&[0.0, 0.1, 0.5, 0.9]), seed: c.word(), keep })
    }

    pub fn spoil(&mut self, c: &mut Choices) {
        self.p = f64::from(c.float());
    }

    pub fn window(&mut self) -> Option<&mut Window> {
        self.keep.as_mut()
    }

    pub fn device<'a>(&self, buffers: &'a [wgpu::Buffer]) -> Dropout<TensorView<'a>> {
        let DropSpec { p, seed, keep } = *self;
        match keep {
            Some(keep) => Dropout::Given { p, keep: view(buffers, &keep) },
            None => Dropout::Seeded { p, seed },
        }
    }

    pub fn is_tame(&self) -> bool {
        (0.0..=0.9).contains(&self.p) && self.keep.is_none_or(|w| w.is_tame())
    }

    pub fn host(&self, bytes: &[Vec<u8>]) -> DropoutData {
        let DropSpec { p, seed, keep } = *self;
        match keep {
            Some(keep) => DropoutData::Given { p, keep: HostData::new(keep.bools(bytes), keep.shape) },
            None => DropoutData::Seeded { p, seed },
        }
    }
}

#[derive(Clone, Debug)]
struct ForwardSpec {
    config: ConfigSpec,
    /// The tensors q, k, v, out.
    tensors: [Window; 4],
    lse: Option<Window>,
    weights: Option<Window>,
    mask: MaskSpec,
    dropout: Option<DropSpec>,
    how: How,
    memory: Memory,
    foreign_pipelines: bool,
}

impl ForwardSpec {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let (mut config, shape) = ConfigSpec::new(f, c);
        let aligned = f.one_in(2) && config.head_dim % 4 == 0 && config.value_dim % 4 == 0;
        let dtype = config.dtype;
        let wants = f.below(6);
        let weights_type = float(f);
        let mut weights_shape = shape.weights();
        if wants == 5 {
            weights_shape[1] = 1;
        }
        let outs = [(dtype, shape.out()), (DType::F32, shape.lse()), (weights_type, weights_shape)];
        let [out, lse, mut weights] = outputs(c, outs, aligned);
        weights.buf = Buf::OutC;
        if wants > 3 {
            config.path = f.pick(&[Algorithm::Auto, Algorithm::Staged]);
        }
        let [q, k, v] = [shape.q(), shape.k(), shape.v()].map(|s| Window::input(c, dtype, s, aligned));
        ForwardSpec {
            config,
            tensors: [q, k, v, out],
            lse: f.one_in(2).then_some(lse),
            weights: (wants > 3).then_some(weights),
            mask: MaskSpec::new(f, c, &shape),
            dropout: DropSpec::new(f, c, shape.weights()),
            how: How::new(c),
            memory: Memory::new(c),
            foreign_pipelines: c.one_in(60),
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(10) {
            0 | 1 => self.config.spoil(c),
            2 => self.mask.spoil(c),
            3 => self.dropout.iter_mut().for_each(|d| d.spoil(c)),
            _ => {
                let dropout = self.dropout.as_mut().and_then(DropSpec::window);
                let all = self.tensors.iter_mut().chain(&mut self.lse).chain(&mut self.weights);
                let mut all: Vec<_> = all.chain(self.mask.windows()).chain(dropout).collect();
                let n = c.below(all.len());
                all[n].spoil(c);
            }
        }
    }

    fn writes(&self) -> Vec<Window> {
        [Some(self.tensors[3]), self.lse, self.weights].into_iter().flatten().collect()
    }

    fn all(&self) -> Vec<Window> {
        let mut copy = self.clone();
        let dropout = copy.dropout.as_mut().and_then(DropSpec::window).copied();
        copy.mask
            .windows()
            .map(|w| *w)
            .chain(copy.tensors)
            .chain(copy.lse)
            .chain(copy.weights)
            .chain(dropout)
            .collect()
    }

    /// Returns the shape without masks.
    fn shape(&self) -> Shape {
        let [q, k, v, _] = self.tensors;
        shape_of([q, k, v])
    }

    fn is_tame(&self, bytes: &[Vec<u8>]) -> bool {
        let [q, k, v, _] = self.tensors;
        self.config.is_tame()
            && [q, k, v].iter().all(Window::is_tame)
            && self.writes().iter().all(Window::is_watched)
            && self.mask.is_tame(bytes)
            && self.dropout.is_none_or(|d| d.is_tame())
            && self.shape().flops() < 2e6
    }

    fn judge(&self, world: &World) -> Result<(), String> {
        let bytes = &world.arena.before;
        let [q, k, v, out] = self.tensors;
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
        let weights = self.weights.map_or(Weights::None, |w| {
            if w.shape == case.shape.weights() { Weights::PerHead(w.dtype) } else { Weights::Mean(w.dtype) }
        });
        let truth = case.truth(out.dtype, weights);
        let after = &world.arena.after;
        truth.out.judge(&out.wide(after)).map_err(|e| format!("out: {e}"))?;
        if let Some(lse) = self.lse {
            truth.lse.judge(&lse.wide(after)).map_err(|e| format!("lse: {e}"))?;
        }
        if let (Some(w), Some(truth)) = (self.weights, truth.weights) {
            truth.judge(&w.wide(after)).map_err(|e| format!("weights: {e}"))?;
        }
        Ok(())
    }
}

pub fn forward(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = ForwardSpec::new(f, c);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}");
    let pipelines = if spec.foreign_pipelines { world.foreign.pipelines() } else { world.gpu.pipelines() };
    let buffers = world.arena.buffers.clone();
    let attention = match Attention::with_pipelines(pipelines, spec.config.config()) {
        Ok(attention) => attention,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let [q, k, v, out] = spec.tensors.each_ref().map(|w| view(&buffers, w));
    let call = Forward::new(q, k, v, out)
        .mask(spec.mask.device(&buffers))
        .lse(spec.lse.as_ref().map(|w| view(&buffers, w)))
        .weights(spec.weights.as_ref().map(|w| view(&buffers, w)))
        .dropout(spec.dropout.as_ref().map(|d| d.device(&buffers)));
    let size = attention.scratch_size(&call);
    let small = spec.shape().flops() < MOST_WORK;
    let (memory, mut scratch) = scratch_for(world, spec.memory, &size)?;
    let mut encoder = match spec.how {
        How::Foreign => world.foreign.device().create_command_encoder(&Default::default()),
        _ => world.encoder(),
    };
    let result = match spec.how {
        // Longer calls have many dispatches to bind.
        _ if !small => attention.scratch_size(&call).map(|_| ()),
        How::Pass => {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            attention.forward(&mut pass, &call, &mut scratch)
        }
        How::Prepare => attention.prepare(&call, &mut scratch).map(drop),
        _ => attention.forward(&mut encoder, &call, &mut scratch),
    };
    refused_alike(&size, &result)?;
    let own = spec.how != How::Foreign;
    if !own {
        // The other device must refuse the recorded commands.
        let scope = world.foreign.device().push_error_scope(wgpu::ErrorFilter::Validation);
        drop(encoder.finish());
        drop(pollster::block_on(scope.pop()));
        encoder = world.encoder();
    }
    if let Err(e) = result {
        if memory == Memory::Foreign {
            scratch = world.scratch();
        }
        world.unharmed(encoder, &mut scratch)?;
        return Ok(refused(&e));
    }
    if !small || !own || matches!(spec.how, How::Prepare | How::Dropped) {
        drop(encoder);
        world.works(&mut world.scratch())?;
        return Ok(Outcome::Accepted);
    }
    if spec.all().iter().any(|w| w.buf.fails()) || spec.foreign_pipelines {
        world.abandon(encoder)?;
        return Ok(Outcome::Accepted);
    }
    let tame = spec.is_tame(&world.arena.before);
    world.finish(encoder, &spec.writes(), tame)?;
    if !tame {
        return Ok(Outcome::Ran);
    }
    spec.judge(world)?;
    Ok(Outcome::Judged)
}

/// Classifies a mask into a block map.
pub fn classify(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let (mut config, shape) = ConfigSpec::new(f, c);
    let mut mask = MaskSpec::new(f, c, &shape);
    let mut size = [c.between(1, 9), c.between(1, 9)];
    let mut lengths = [shape.batch, shape.q_len, shape.kv_len];
    let of = [c.pick(&[1, shape.batch]), c.pick(&[1, shape.heads])];
    let blocks = [of[0], of[1], shape.q_len.div_ceil(size[0]), shape.kv_len.div_ceil(size[1])];
    let mut map = Window::new(c, Buf::OutA, DType::U32, blocks, false);
    let pass = c.one_in(3);
    for _ in 0..faults(c) {
        match c.below(7) {
            0 => config.spoil(c),
            1 => mask.spoil(c),
            2 => size[c.below(2)] = c.size(),
            3 => lengths[c.below(3)] = c.size(),
            4 => map.spoil(c),
            _ => {
                let mut all: Vec<_> = mask.windows().collect();
                if !all.is_empty() {
                    let n = c.below(all.len());
                    all[n].spoil(c);
                }
            }
        }
    }
    *said = format!("{config:?}, {mask:?}, {lengths:?}, {size:?}, {map:?}");
    let attention = match Attention::with_pipelines(world.gpu.pipelines(), config.config()) {
        Ok(attention) => attention,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let device_mask = mask.device(&buffers);
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let blocks = Blocks::new(view(&buffers, &map), size);
    let result = if pass {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        attention.classify(&mut pass, &device_mask, lengths, &blocks)
    } else {
        attention.classify(&mut encoder, &device_mask, lengths, &blocks)
    };
    let shape =
        Shape { batch: lengths[0], heads: config.heads, q_len: lengths[1], kv_len: lengths[2], ..shape };
    let pairs: f64 = shape.weights().into_iter().map(|n| n as f64).product();
    let all: Vec<_> = mask.windows().map(|w| *w).chain([map]).collect();
    let tame = result.is_ok() && mask.is_tame(&world.arena.before) && map.is_watched();
    let outcome = settle(world, result, encoder, &mut scratch, &all, &[map], [pairs <= 1e6, tame])?;
    if matches!(outcome, Outcome::Judged) {
        let rules = mask.rules(&world.arena.before);
        let want = reference::classify(&rules.host(), shape, size, [map.shape[0], map.shape[1]]);
        let want = want.map_err(|e| format!("the reference refuses it: {e}"))?;
        let got = map.numbers(&world.arena.after);
        if got != want {
            return Err(format!("{got:?}, expected {want:?}"));
        }
    }
    Ok(outcome)
}
