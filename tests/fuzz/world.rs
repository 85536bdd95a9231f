//! Devices for a thread of the fuzzer, and a call that always works.

use std::sync::{Arc, Mutex};

use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{
    Attention, Config, DType, Error, Forward, Gpu, Scratch, ScratchSize, Shape, TensorView,
};

use crate::arena::{Arena, Window};
use crate::random::noise;

/// The outcome of a case.
#[derive(Debug)]
pub enum Outcome {
    /// The call ran, and the reference judged its results.
    Judged,
    /// The call ran.
    Ran,
    /// The call was accepted. It was too long to run, or was not meant to run.
    Accepted,
    /// The call was refused with this error.
    Refused(String),
}

pub fn refused(error: &Error) -> Outcome {
    Outcome::Refused(error.to_string())
}

/// A device with buffers, and a second device.
pub struct World {
    pub gpu: Gpu,
    pub foreign: Gpu,
    pub arena: Arena,
    errors: Arc<Mutex<Vec<String>>>,
    good: Good,
}

/// A call that works, and its bits.
struct Good {
    attention: Attention,
    buffers: [wgpu::Buffer; 4],
    bits: Vec<u32>,
}

const SHAPE: Shape = Shape::new(1, 2, 5, 4);

impl World {
    pub fn new(adapter: &wgpu::Adapter, full: bool) -> Self {
        let errors = Arc::<Mutex<Vec<String>>>::default();
        let make = |features, limits, registers| {
            let descriptor = wgpu::DeviceDescriptor {
                required_features: features,
                required_limits: limits,
                ..Default::default()
            };
            let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
            let errors = errors.clone();
            device.on_uncaptured_error(Arc::new(move |e| {
                errors.lock().expect("no panic here").push(e.to_string())
            }));
            let pipelines = wgpu_attention::inspect::with_registers(&device, registers);
            Gpu::with_pipelines(queue, pipelines)
        };
        let (features, limits) = if full {
            (adapter.features() - wgpu::Features::all_experimental_mask(), adapter.limits())
        } else {
            (wgpu::Features::empty(), wgpu::Limits::default())
        };
        // The device with low limits gets plans for few registers.
        let gpu = make(features, limits, if full { 255 } else { 64 });
        let foreign = make(wgpu::Features::empty(), wgpu::Limits::default(), 128);
        let arena = Arena::new(&gpu, &foreign);
        let good = Good::new(&gpu);
        World { gpu, foreign, arena, errors, good }
    }

    pub fn device(&self) -> &wgpu::Device {
        self.gpu.device()
    }

    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device().create_command_encoder(&Default::default())
    }

    /// Returns an empty scratch.
    pub fn scratch(&self) -> Scratch {
        Scratch::new(self.device(), ScratchSize::default()).expect("nothing is no memory")
    }

    /// Returns an error if wgpu reported an uncaptured one.
    pub fn uncaptured(&self) -> Result<(), String> {
        let mut errors = self.errors.lock().expect("no panic here");
        if errors.is_empty() {
            Ok(())
        } else {
            Err(format!("not captured: {:?}", std::mem::take(&mut *errors)))
        }
    }

    /// Submits and checks every buffer: only `writes` may have changed.
    pub fn finish(
        &mut self,
        mut encoder: wgpu::CommandEncoder,
        writes: &[Window],
        whole: bool,
    ) -> Result<(), String> {
        let scope = self.device().push_error_scope(wgpu::ErrorFilter::Validation);
        self.arena.record(&mut encoder);
        self.gpu.queue().submit([encoder.finish()]);
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(format!("the submission: {error}"));
        }
        self.arena.compare(&self.gpu, writes, whole)
    }

    /// Submits commands that may fail by a fault of the case's owner, and does not check them.
    pub fn abandon(&mut self, encoder: wgpu::CommandEncoder) -> Result<(), String> {
        let scope = self.device().push_error_scope(wgpu::ErrorFilter::Validation);
        self.gpu.queue().submit([encoder.finish()]);
        drop(pollster::block_on(scope.pop()));
        // Restores the buffers.
        let _ = self.finish(self.encoder(), &[], false);
        self.works(&mut self.scratch())
    }

    /// After a refusal: nothing was recorded, and the encoder and the scratch still work.
    pub fn unharmed(
        &mut self,
        mut encoder: wgpu::CommandEncoder,
        scratch: &mut Scratch,
    ) -> Result<(), String> {
        self.good.record(&mut encoder, scratch).map_err(|e| format!("after a refusal: {e}"))?;
        self.finish(encoder, &[], false).map_err(|e| format!("after a refusal: {e}"))?;
        self.good.check(&self.gpu)
    }

    /// Checks that the good call still gives the same bits.
    pub fn works(&mut self, scratch: &mut Scratch) -> Result<(), String> {
        let encoder = self.encoder();
        self.unharmed(encoder, scratch)
    }
}

impl Good {
    fn new(gpu: &Gpu) -> Self {
        let data = [0.37, 0.73, 1.19].map(|seed| noise(SHAPE.q().iter().product(), seed));
        let upload = |x: &Vec<f32>| gpu.upload(x).expect("an upload");
        let [q, k, v] = data.each_ref().map(upload);
        let out = gpu.buffer(4 * data[0].len()).expect("a buffer");
        let config = Config::new(SHAPE.heads, SHAPE.head_dim);
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let mut good = Good { attention, buffers: [q, k, v, out], bits: Vec::new() };
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
        gpu.submit(|encoder| good.record(encoder, &mut scratch)).expect("the good call");
        good.bits = good.read(gpu).expect("the good call");
        let [q, k, v] = data.each_ref().map(|x| widen::<f64>(x));
        let want = reference::attention(&q, &k, &v, SHAPE, &Options::default()).expect("the good call").out;
        for (got, want) in good.bits.iter().zip(want) {
            assert!((f64::from(f32::from_bits(*got)) - want).abs() < 1e-5, "the good call is not good");
        }
        good
    }

    fn record(&self, encoder: &mut wgpu::CommandEncoder, scratch: &mut Scratch) -> Result<(), Error> {
        let [q, k, v, out] = self.buffers.each_ref().map(|b| TensorView::new(b, DType::F32, SHAPE.q()));
        encoder.clear_buffer(&self.buffers[3], 0, None);
        self.attention.forward(encoder, &Forward::new(q, k, v, out), scratch)
    }

    fn read(&self, gpu: &Gpu) -> Result<Vec<u32>, Error> {
        gpu.download::<u32>(&self.buffers[3], SHAPE.q().iter().product())
    }

    fn check(&self, gpu: &Gpu) -> Result<(), String> {
        let got = self.read(gpu).map_err(|e| format!("the good call: {e}"))?;
        if got == self.bits { Ok(()) } else { Err("the good call gives other bits".into()) }
    }
}
