//! The model: an embedding, two attention layers, and an unembedding for the next letter. Each
//! letter has `WIDTH` channels in the residual stream, and the layers add to it. There are no
//! other layers, as in Elhage et al. 2021, "A mathematical framework for transformer circuits".

use training::{ADAMW, Bound, LOSS, Step, TOTAL};
use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
use wgpu_attention::{DType, Error, Gpu, Linear, Projection, TensorView, wgpu};

use crate::kernels::{self, ROWS};
use crate::layer::{Gradients, Layer, Tensors};
use crate::parameters::{HEADS, LAYERS, Places, WIDTH};
use crate::task::{BATCH, Batch, LENGTH, VOCABULARY};

/// The number of steps whose totals the device stores before the host reads them.
pub const SLOTS: usize = 16;

/// The model's buffers and operators.
pub struct Model {
    gpu: Gpu,
    pub places: Places,
    parameters: wgpu::Buffer,
    gradients: wgpu::Buffer,
    tokens: wgpu::Buffer,
    targets: wgpu::Buffer,
    step: wgpu::Buffer,
    /// The residual stream before, between and after the layers.
    stream: Vec<wgpu::Buffer>,
    d_stream: Vec<wgpu::Buffer>,
    /// A layer's output, and the gradient of its input.
    added: wgpu::Buffer,
    d_read: wgpu::Buffer,
    logits: wgpu::Buffer,
    d_logits: wgpu::Buffer,
    /// `[SLOTS, 2]`: sums of losses, and numbers of correct predictions.
    totals: wgpu::Buffer,
    /// `[BATCH, HEADS, LENGTH, LENGTH]`
    maps: wgpu::Buffer,
    projection: Projection,
    layers: Vec<Layer>,
    kernels: Kernels,
    steps: usize,
}

/// The example's kernels, with their buffers bound.
struct Kernels {
    embed: Bound,
    embed_backward: Bound,
    /// One for each layer.
    add: Vec<Bound>,
    add_backward: Vec<Bound>,
    loss: Bound,
    total: Bound,
    adamw: Bound,
}

/// The loss per target, and the share of targets that the model predicted as the likeliest letter.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    pub loss: f64,
    pub accuracy: f64,
}

impl Model {
    pub fn new(gpu: &Gpu, seed: u64) -> Result<Self, Error> {
        let places = Places::new();
        let floats = |n: usize| gpu.buffer(n * size_of::<f32>());
        let zeros = || gpu.upload(&vec![0f32; places.len]);
        let streams = || (0..=LAYERS).map(|_| floats(ROWS * WIDTH)).collect::<Result<Vec<_>, _>>();
        let (parameters, gradients) = (gpu.upload(&places.initial(seed))?, zeros()?);
        let moments = [zeros()?, zeros()?];
        let (tokens, targets, step) = (floats(ROWS)?, floats(ROWS)?, gpu.buffer(size_of::<Step>())?);
        let (stream, d_stream) = (streams()?, streams()?);
        let (added, d_read) = (floats(ROWS * WIDTH)?, floats(ROWS * WIDTH)?);
        let (logits, d_logits) = (floats(ROWS * VOCABULARY)?, floats(ROWS * VOCABULARY)?);
        let (losses, totals) = (floats(2 * ROWS)?, floats(2 * SLOTS)?);
        let maps = floats(BATCH * HEADS * LENGTH * LENGTH)?;

        let device = gpu.device();
        let kernel = |name, wgsl| kernels::kernel(device, name, wgsl, &places);
        let add = kernel("add", include_str!("add.wgsl"));
        let kernels = Kernels {
            embed: kernel("embed", include_str!("embed.wgsl")).bind(
                device,
                &[&tokens, &parameters, &stream[0]],
                ROWS,
            ),
            embed_backward: kernel("embed_backward", include_str!("embed_backward.wgsl")).bind(
                device,
                &[&tokens, &d_stream[0], &gradients],
                VOCABULARY,
            ),
            add: (0..LAYERS).map(|n| add.bind(device, &[&stream[n], &added, &stream[n + 1]], ROWS)).collect(),
            add_backward: (0..LAYERS)
                .map(|n| add.bind(device, &[&d_stream[n + 1], &d_read, &d_stream[n]], ROWS))
                .collect(),
            loss: kernel("loss", LOSS).bind(
                device,
                &[&step, &targets, &logits, &d_logits, &losses],
                ROWS / WIDTH,
            ),
            total: kernel("total", TOTAL).bind(device, &[&step, &losses, &totals], 1),
            adamw: kernel("adamw", ADAMW).bind(
                device,
                &[&step, &gradients, &parameters, &moments[0], &moments[1]],
                places.len / WIDTH,
            ),
        };
        let layers = (0..LAYERS).map(|n| {
            let tensors = tensors_of(&places, n, &parameters, [&stream[n], &added]);
            let gradients = gradients_of(&places, n, &gradients, [&d_stream[n + 1], &d_read]);
            Layer::new(gpu, &tensors, maps_of(&maps), &gradients)
        });
        Ok(Model {
            layers: layers.collect::<Result<_, _>>()?,
            projection: Projection::with_pipelines(gpu.pipelines()),
            gpu: gpu.clone(),
            places,
            parameters,
            gradients,
            tokens,
            targets,
            step,
            stream,
            d_stream,
            added,
            d_read,
            logits,
            d_logits,
            totals,
            maps,
            kernels,
            steps: 0,
        })
    }

    /// Runs a step of training, and writes its totals to `slot`.
    pub fn train(&mut self, batch: &Batch, rate: f64, slot: usize) -> Result<(), Error> {
        self.steps += 1;
        self.write(batch, Step::of(self.steps, batch.known(), rate, slot));
        self.submit(|model, pass| {
            model.forward(pass)?;
            model.backward(pass)?;
            model.kernels.adamw.dispatch(pass);
            Ok(())
        })
    }

    /// Returns the model's score on a batch.
    pub fn score(&mut self, batch: &Batch) -> Result<Score, Error> {
        self.write(batch, Step::still(batch.known()));
        self.submit(Self::forward)?;
        Ok(self.totals(&[batch.known()])?[0])
    }

    /// Returns the gradients of the mean loss, with the layout of the parameters.
    pub fn gradients(&mut self, batch: &Batch) -> Result<Vec<f32>, Error> {
        self.write(batch, Step::still(batch.known()));
        self.submit(|model, pass| {
            model.forward(pass)?;
            model.backward(pass)
        })?;
        self.gpu.download(&self.gradients, self.places.len)
    }

    /// Returns each layer's attention weights, `[BATCH, HEADS, LENGTH, LENGTH]`.
    pub fn maps(&mut self, batch: &Batch) -> Result<Vec<Vec<f32>>, Error> {
        self.write(batch, Step::still(batch.known()));
        self.submit(Self::forward)?;
        let mut all = Vec::new();
        for n in 0..LAYERS {
            self.submit(|model, pass| model.layer(pass, n, true))?;
            all.push(self.gpu.download(&self.maps, BATCH * HEADS * LENGTH * LENGTH)?);
        }
        Ok(all)
    }

    /// Returns the scores of the steps in the first slots. `known` has the number of targets of
    /// each step.
    pub fn totals(&self, known: &[usize]) -> Result<Vec<Score>, Error> {
        let totals: Vec<[f32; 2]> = self.gpu.download(&self.totals, known.len())?;
        let per = |sum: f32, known: usize| f64::from(sum) / known as f64;
        let score = |(total, known): (&[f32; 2], &usize)| Score {
            loss: per(total[0], *known),
            accuracy: per(total[1], *known),
        };
        Ok(totals.iter().zip(known).map(score).collect())
    }

    pub fn parameters(&self) -> Result<Vec<f32>, Error> {
        self.gpu.download(&self.parameters, self.places.len)
    }

    pub fn set_parameters(&self, values: &[f32]) {
        self.gpu.queue().write_buffer(&self.parameters, 0, bytemuck::cast_slice(values));
    }

    fn write(&self, batch: &Batch, step: Step) {
        let queue = self.gpu.queue();
        queue.write_buffer(&self.tokens, 0, bytemuck::cast_slice(&batch.tokens));
        queue.write_buffer(&self.targets, 0, bytemuck::cast_slice(&batch.targets));
        queue.write_buffer(&self.step, 0, bytemuck::bytes_of(&step));
    }

    fn submit(
        &mut self,
        record: impl FnOnce(&mut Self, &mut wgpu::ComputePass) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let gpu = self.gpu.clone();
        gpu.submit(|encoder| {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            record(self, &mut pass)
        })
    }

    fn forward(&mut self, pass: &mut wgpu::ComputePass) -> Result<(), Error> {
        self.kernels.embed.dispatch(pass);
        for n in 0..LAYERS {
            self.layer(pass, n, false)?;
            self.kernels.add[n].dispatch(pass);
        }
        self.projection.forward(pass, &[self.unembedding()])?;
        self.kernels.loss.dispatch(pass);
        self.kernels.total.dispatch(pass);
        Ok(())
    }

    fn unembedding(&self) -> ProjectionForward<'_> {
        let linear = Linear { weight: self.places.unembed.view(&self.parameters), bias: None };
        let (x, logits) = (activations(&self.stream[LAYERS], WIDTH), activations(&self.logits, VOCABULARY));
        ProjectionForward::new(x, linear, logits)
    }

    fn layer(&mut self, pass: &mut wgpu::ComputePass, n: usize, with_maps: bool) -> Result<(), Error> {
        let tensors = tensors_of(&self.places, n, &self.parameters, [&self.stream[n], &self.added]);
        self.layers[n].forward(pass, &tensors, with_maps.then(|| maps_of(&self.maps)))
    }

    fn backward(&mut self, pass: &mut wgpu::ComputePass) -> Result<(), Error> {
        let d_logits = activations(&self.d_logits, VOCABULARY);
        let product = ProjectionBackward::new(self.unembedding(), d_logits)
            .d_x(activations(&self.d_stream[LAYERS], WIDTH))
            .d_weight(self.places.unembed.view(&self.gradients));
        self.projection.backward(pass, &[product])?;
        for n in (0..LAYERS).rev() {
            let tensors = tensors_of(&self.places, n, &self.parameters, [&self.stream[n], &self.added]);
            let to = [&self.d_stream[n + 1], &self.d_read];
            let gradients = gradients_of(&self.places, n, &self.gradients, to);
            self.layers[n].backward(pass, &tensors, &gradients)?;
            self.kernels.add_backward[n].dispatch(pass);
        }
        self.kernels.embed_backward.dispatch(pass);
        Ok(())
    }
}

fn activations(buffer: &wgpu::Buffer, width: usize) -> TensorView<'_> {
    TensorView::sequence(buffer, DType::F32, [BATCH, LENGTH, width])
}

fn tensors_of<'a>(
    places: &Places,
    layer: usize,
    parameters: &'a wgpu::Buffer,
    [x, out]: [&'a wgpu::Buffer; 2],
) -> Tensors<'a> {
    let weights = places.layers[layer].views(parameters);
    Tensors { weights, x: activations(x, WIDTH), out: activations(out, WIDTH) }
}

fn gradients_of<'a>(
    places: &Places,
    layer: usize,
    gradients: &'a wgpu::Buffer,
    [d_out, d_x]: [&'a wgpu::Buffer; 2],
) -> Gradients<'a> {
    let weights = places.layers[layer].views(gradients);
    Gradients { weights, d_out: activations(d_out, WIDTH), d_x: activations(d_x, WIDTH) }
}

fn maps_of(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, [BATCH, HEADS, LENGTH, LENGTH])
}

#[cfg(test)]
mod tests;
