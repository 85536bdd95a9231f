//! The model: an embedding, two layers with norms before them, a norm, and logits.

use training::{ADAMW, Bound, Kernel, LOSS, NONE, Random, Sizes, Step, TOTAL};
use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
use wgpu_attention::rows::{
    Embedding, EmbeddingBackward, EmbeddingForward, Norm, NormBackward, NormConfig, NormForward,
};
use wgpu_attention::{DType, Error, Gpu, Linear, Projection, Scratch, TensorView, wgpu};

use crate::mixer::{self, Kind, Mixer, Tensors};
use crate::task::{Batch, VOCABULARY};

pub const LAYERS: usize = 2;
pub const WIDTH: usize = 64;
/// The number of steps whose totals the device stores before the host reads them.
pub const SLOTS: usize = 20;
/// The alignment of tensors in elements, so that every device can bind them.
const ALIGNMENT: usize = 64;

/// The loss of each question, and the share of right answers.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    pub loss: f64,
    pub accuracy: f64,
}

/// The first element and the shape of a tensor in the buffer of parameters. Then its deviation and
/// its mean at the beginning.
type Place = (usize, [usize; 4], [f32; 2]);

/// The place of each parameter.
struct Places {
    embed: Place,
    unembed: Place,
    /// Before each layer, and before the logits.
    norms: Vec<Place>,
    layers: Vec<[Place; 7]>,
    len: usize,
}

impl Places {
    fn new(kind: Kind) -> Self {
        let mut len = 0;
        let mut place = |shape: [usize; 4], start| {
            let first = len;
            len += shape.iter().product::<usize>().next_multiple_of(ALIGNMENT);
            (first, shape, start)
        };
        let matrix = [1, 1, VOCABULARY, WIDTH];
        let embed = place(matrix, [1.0, 0.0]);
        let unembed = place(matrix, [1.0 / (WIDTH as f32).sqrt(), 0.0]);
        let norms = (0..=LAYERS).map(|_| place([1, 1, 1, WIDTH], [0.0, 1.0])).collect();
        let (shapes, starts) = (mixer::shapes(kind), mixer::beginnings(kind));
        let layers = (0..LAYERS).map(|_| std::array::from_fn(|n| place(shapes[n], starts[n]))).collect();
        Places { embed, unembed, norms, layers, len }
    }

    fn all(&self) -> impl Iterator<Item = Place> {
        let layers = self.layers.iter().flatten();
        [self.embed, self.unembed]
            .iter()
            .chain(&self.norms)
            .chain(layers)
            .copied()
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, 0);
        let mut values = vec![0.0; self.len];
        for (first, shape, [deviation, mean]) in self.all() {
            for value in &mut values[first..][..shape.iter().product()] {
                *value = mean + 3f32.sqrt() * deviation * random.signed();
            }
        }
        values
    }
}

fn view(buffer: &wgpu::Buffer, (first, shape, _): Place) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape).with_offset(first)
}

/// A model for batches of one shape.
pub struct Model {
    gpu: Gpu,
    places: Places,
    shape: [usize; 2],
    buffers: Buffers,
    embedding: Embedding,
    norm: Norm,
    projection: Projection,
    scratch: Scratch,
    mixers: Vec<Mixer>,
    loss: Bound,
    total: Bound,
    adamw: Bound,
    steps: usize,
}

struct Buffers {
    parameters: wgpu::Buffer,
    gradients: wgpu::Buffer,
    tokens: wgpu::Buffer,
    targets: wgpu::Buffer,
    step: wgpu::Buffer,
    /// The residual stream before each layer and after the last, its norms, the layers' outputs.
    stream: Vec<wgpu::Buffer>,
    normed: Vec<wgpu::Buffer>,
    mixed: Vec<wgpu::Buffer>,
    d_stream: Vec<wgpu::Buffer>,
    d_normed: wgpu::Buffer,
    logits: wgpu::Buffer,
    d_logits: wgpu::Buffer,
    totals: wgpu::Buffer,
}

impl Model {
    /// Makes a model of batches of `batch` sequences of `pairs` pairs.
    pub fn new(gpu: &Gpu, kind: Kind, [batch, pairs]: [usize; 2], seed: u64) -> Result<Self, Error> {
        let places = Places::new(kind);
        let shape = [batch, 3 * pairs];
        let rows = batch * 3 * pairs;
        let floats = |n: usize| gpu.buffer(4 * n);
        let zeros = || gpu.upload(&vec![0f32; places.len]);
        let many = |n: usize| (0..n).map(|_| floats(rows * WIDTH)).collect::<Result<Vec<_>, _>>();
        let buffers = Buffers {
            parameters: gpu.upload(&places.initial(seed))?,
            gradients: zeros()?,
            tokens: floats(rows)?,
            targets: floats(rows)?,
            step: gpu.buffer(size_of::<Step>())?,
            stream: many(LAYERS + 1)?,
            normed: many(LAYERS + 1)?,
            mixed: many(LAYERS)?,
            d_stream: many(LAYERS + 1)?,
            d_normed: floats(rows * WIDTH)?,
            logits: floats(rows * VOCABULARY)?,
            d_logits: floats(rows * VOCABULARY)?,
            totals: floats(2 * SLOTS)?,
        };
        let (moments, losses) = ([zeros()?, zeros()?], floats(2 * rows)?);
        let sizes = Sizes { rows, width: WIDTH, vocabulary: VOCABULARY, faster: (u32::MAX as usize, 1.0) };
        let device = gpu.device();
        let kernel = |label, wgsl| Kernel::new(device, label, wgsl, &sizes, "");
        let Buffers { parameters, gradients, targets, step, logits, d_logits, totals, .. } = &buffers;
        let loss =
            kernel("loss", LOSS).bind(device, &[step, targets, logits, d_logits, &losses], rows / WIDTH);
        let total = kernel("total", TOTAL).bind(device, &[step, &losses, totals], 1);
        let of_adamw = [step, gradients, parameters, &moments[0], &moments[1]];
        let adamw = kernel("adamw", ADAMW).bind(device, &of_adamw, places.len / WIDTH);
        let mut model = Model {
            gpu: gpu.clone(),
            places,
            shape,
            embedding: Embedding::with_pipelines(gpu.pipelines()),
            norm: Norm::with_pipelines(gpu.pipelines(), NormConfig::rms())?,
            projection: Projection::with_pipelines(gpu.pipelines()),
            scratch: Scratch::new(device, Default::default())?,
            mixers: Vec::new(),
            loss,
            total,
            adamw,
            steps: 0,
            buffers,
        };
        let mut size = model.embedding.backward_scratch_size(&model.embed_backward())?;
        for n in 0..=LAYERS {
            size = size.max(model.norm.backward_scratch_size(&model.norm_backward(n))?);
        }
        model.scratch.ensure(device, size)?;
        let mixers = (0..LAYERS).map(|n| Mixer::new(gpu, kind, &model.tensors(n), &model.gradients(n)));
        model.mixers = mixers.collect::<Result<_, _>>()?;
        Ok(model)
    }

    fn rows<'a>(&self, buffer: &'a wgpu::Buffer, width: usize) -> TensorView<'a> {
        TensorView::sequence(buffer, DType::F32, [self.shape[0], self.shape[1], width])
    }

    fn stream<'a>(&self, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        self.rows(buffer, WIDTH)
    }

    fn embed(&self) -> EmbeddingForward<'_> {
        let [batch, length] = self.shape;
        let ids = TensorView::sequence(&self.buffers.tokens, DType::U32, [batch, length, 1]);
        let table = view(&self.buffers.parameters, self.places.embed);
        EmbeddingForward::new(ids, table, self.stream(&self.buffers.stream[0]))
    }

    fn embed_backward(&self) -> EmbeddingBackward<'_> {
        let d_table = view(&self.buffers.gradients, self.places.embed);
        EmbeddingBackward::new(self.embed(), self.stream(&self.buffers.d_stream[0]), d_table)
    }

    /// The norm before layer `n`, which also adds the output of the layer before.
    fn norm(&self, n: usize) -> NormForward<'_> {
        let Buffers { stream, normed, mixed, parameters, .. } = &self.buffers;
        let (weight, out) = (view(parameters, self.places.norms[n]), self.stream(&normed[n]));
        let before = n.checked_sub(1);
        match before {
            None => NormForward::new(self.stream(&stream[0]), out).weight(weight),
            Some(before) => NormForward::new(self.stream(&mixed[before]), out)
                .residual(self.stream(&stream[before]))
                .sum(self.stream(&stream[n]))
                .weight(weight),
        }
    }

    fn norm_backward(&self, n: usize) -> NormBackward<'_> {
        let Buffers { d_stream, d_normed, gradients, .. } = &self.buffers;
        NormBackward::new(self.norm(n), self.stream(d_normed))
            .d_sum((n < LAYERS).then(|| self.stream(&d_stream[n + 1])))
            .d_x(self.stream(&d_stream[n]))
            .d_weight(view(gradients, self.places.norms[n]))
    }

    fn tensors(&self, n: usize) -> Tensors<'_> {
        let Buffers { parameters, normed, mixed, .. } = &self.buffers;
        let weights = self.places.layers[n].map(|place| view(parameters, place));
        Tensors { weights, x: self.stream(&normed[n]), out: self.stream(&mixed[n]) }
    }

    fn gradients(&self, n: usize) -> Tensors<'_> {
        let Buffers { gradients, d_normed, d_stream, .. } = &self.buffers;
        let weights = self.places.layers[n].map(|place| view(gradients, place));
        Tensors { weights, x: self.stream(d_normed), out: self.stream(&d_stream[n + 1]) }
    }

    fn unembed(&self) -> ProjectionForward<'_> {
        let linear = Linear { weight: view(&self.buffers.parameters, self.places.unembed), bias: None };
        let (x, logits) =
            (self.stream(&self.buffers.normed[LAYERS]), self.rows(&self.buffers.logits, VOCABULARY));
        ProjectionForward::new(x, linear, logits)
    }

    /// Records the forward pass, and with `trains` also the gradients and AdamW.
    fn record(&mut self, pass: &mut wgpu::ComputePass, trains: bool) -> Result<(), Error> {
        // The mixers and the scratch change while the calls borrow the model.
        let mut mixers = std::mem::take(&mut self.mixers);
        let empty = Scratch::new(self.gpu.device(), Default::default())?;
        let mut scratch = std::mem::replace(&mut self.scratch, empty);
        let done = self.record_with(pass, trains, &mut mixers, &mut scratch);
        (self.mixers, self.scratch) = (mixers, scratch);
        done
    }

    fn record_with(
        &self,
        pass: &mut wgpu::ComputePass,
        trains: bool,
        mixers: &mut [Mixer],
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.embedding.forward(pass, &self.embed())?;
        for (n, mixer) in mixers.iter_mut().enumerate() {
            self.norm.forward(pass, &self.norm(n))?;
            mixer.forward(pass, &self.tensors(n))?;
        }
        self.norm.forward(pass, &self.norm(LAYERS))?;
        self.projection.forward(pass, &[self.unembed()])?;
        self.loss.dispatch(pass);
        self.total.dispatch(pass);
        if !trains {
            return Ok(());
        }
        let product = ProjectionBackward::new(self.unembed(), self.rows(&self.buffers.d_logits, VOCABULARY))
            .d_x(self.stream(&self.buffers.d_normed))
            .d_weight(view(&self.buffers.gradients, self.places.unembed));
        self.projection.backward(pass, &[product])?;
        self.norm.backward(pass, &self.norm_backward(LAYERS), scratch)?;
        for (n, mixer) in mixers.iter_mut().enumerate().rev() {
            mixer.backward(pass, &self.tensors(n), &self.gradients(n))?;
            self.norm.backward(pass, &self.norm_backward(n), scratch)?;
        }
        self.embedding.backward(pass, &self.embed_backward(), scratch)?;
        self.adamw.dispatch(pass);
        Ok(())
    }

    fn submit(&mut self, batch: &Batch, step: Step, trains: bool) -> Result<(), Error> {
        let gpu = self.gpu.clone();
        gpu.queue().write_buffer(&self.buffers.tokens, 0, bytemuck::cast_slice(&batch.tokens));
        gpu.queue().write_buffer(&self.buffers.targets, 0, bytemuck::cast_slice(&batch.targets));
        gpu.queue().write_buffer(&self.buffers.step, 0, bytemuck::bytes_of(&step));
        gpu.submit(|encoder| {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            self.record(&mut pass, trains)
        })
    }

    /// The questions of a batch.
    fn questions(&self) -> usize {
        self.shape[0] * self.shape[1] / 3
    }

    /// Runs a step of training, and writes its totals to `slot`.
    pub fn train(&mut self, batch: &Batch, rate: f64, slot: usize) -> Result<(), Error> {
        self.steps += 1;
        let step = Step::of(self.steps, self.questions(), rate, slot);
        self.submit(batch, step, true)
    }

    /// Returns the scores of the steps in the first slots.
    pub fn totals(&self, slots: usize) -> Result<Vec<Score>, Error> {
        let totals: Vec<[f32; 2]> = self.gpu.download(&self.buffers.totals, slots)?;
        let per = |sum: f32| f64::from(sum) / self.questions() as f64;
        Ok(totals.iter().map(|[loss, hits]| Score { loss: per(*loss), accuracy: per(*hits) }).collect())
    }

    /// Returns the model's score on a batch.
    pub fn score(&mut self, batch: &Batch) -> Result<Score, Error> {
        debug_assert!(batch.targets.iter().any(|target| *target != NONE));
        self.submit(batch, Step::still(self.questions()), false)?;
        Ok(self.totals(1)?[0])
    }

    pub fn parameters(&self) -> Result<Vec<f32>, Error> {
        self.gpu.download(&self.buffers.parameters, self.places.len)
    }

    pub fn set_parameters(&self, values: &[f32]) {
        self.gpu.queue().write_buffer(&self.buffers.parameters, 0, bytemuck::cast_slice(values));
    }

    /// The number of parameters, without gaps.
    pub fn learned(&self) -> usize {
        self.places.all().map(|(_, shape, _)| shape.iter().product::<usize>()).filter(|n| *n > 1).sum()
    }
}
