//! A correct call, for tests that spoil one part of it.

use super::*;

/// The attention problem of [`SHAPE`] on a device, ready to be spoiled.
pub(super) struct Bench {
    pub(super) gpu: Gpu,
    pub(super) attention: Attention,
    pub(super) tensors: [wgpu::Buffer; 3],
    pub(super) out: wgpu::Buffer,
    pub(super) scratch: Scratch,
    pub(super) want: Vec<f64>,
    pub(super) seen: BTreeSet<&'static str>,
}

impl Bench {
    pub(super) fn new() -> Self {
        Self::on(&full().gpu, Config::new(SHAPE.heads, SHAPE.head_dim))
    }

    pub(super) fn on(gpu: &Gpu, config: Config) -> Self {
        let gpu = gpu.clone();
        let data = [(SHAPE.q(), 0.37), (SHAPE.k(), 0.73), (SHAPE.v(), 1.19)]
            .map(|(shape, seed)| noise(count(shape), seed));
        let [q, k, v] = [0, 1, 2].map(|n| widen(&data[n]));
        let want = reference::attention::<f64>(&q, &k, &v, SHAPE, &Options::default()).expect("a truth").out;
        let upload =
            |data: &[f32]| gpu.upload(&[data, &[POISON; RESCALE_THRESHOLD]].concat()).expect("an upload");
        let tensors = [0, 1, 2].map(|n| upload(&data[n]));
        let out = upload(&vec![POISON; count(SHAPE.out())]);
        let config = config.kv_heads(SHAPE.kv_heads).value_dim(SHAPE.value_dim);
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let [q, k, v] = &tensors;
        let size = attention.scratch_size(&parts([q, k, v, &out]).forward()).expect("a size");
        let scratch = Scratch::new(gpu.device(), size).expect("scratch");
        Bench { gpu, attention, tensors, out, scratch, want, seen: BTreeSet::new() }
    }

    /// Returns clones of the handles, so that a call can live next to a mutable bench.
    pub(super) fn buffers(&self) -> [wgpu::Buffer; 4] {
        let [q, k, v] = self.tensors.clone();
        [q, k, v, self.out.clone()]
    }

    /// Spoils the correct call with `change`. Its error must contain `words`.
    pub(super) fn refuses(
        &mut self,
        context: &str,
        words: &[&str],
        change: impl for<'a> FnOnce(&mut Parts<'a>, &'a [wgpu::Buffer; 4]),
    ) {
        let buffers = self.buffers();
        let mut call = parts(buffers.each_ref());
        change(&mut call, &buffers);
        let call = call.forward();
        let (attention, device) = (self.attention.clone(), self.gpu.device().clone());
        let size = attention.scratch_size(&parts(buffers.each_ref()).forward()).expect("a size");
        let mut scratch = Scratch::new(&device, size).expect("scratch");
        self.refuses_with(context, words, |encoder| attention.forward(encoder, &call, &mut scratch));
    }

    /// Like [`refuses`](Self::refuses), for any function that records.
    pub(super) fn refuses_with(
        &mut self,
        context: &str,
        words: &[&str],
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) {
        let scope = self.gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let error = record(&mut encoder).expect_err(context);
        self.seen.insert(read(context, &error, words));

        // The encoder still takes commands, and contains only this clear.
        let marker = self.gpu.upload(&[1u32; 4]).expect("an upload");
        encoder.clear_buffer(&marker, 0, None);
        self.gpu.queue().submit([encoder.finish()]);
        assert_eq!(self.gpu.download::<u32>(&marker, 4).expect("a read-back"), [0; 4], "{context}");
        let n = count(SHAPE.out()) + RESCALE_THRESHOLD;
        let out = self.gpu.download::<f32>(&self.out, n).expect("a read-back");
        assert!(out.iter().all(|x| *x == POISON), "{context}: something was recorded");
        let hidden = pollster::block_on(scope.pop());
        assert!(hidden.is_none(), "{context}: {}", hidden.map(|e| e.to_string()).unwrap_or_default());
        self.works(context);
    }

    /// Checks that the correct call gives the right result, then poisons the output again.
    pub(super) fn works(&mut self, context: &str) {
        let buffers = self.buffers();
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let call = parts(buffers.each_ref()).forward();
        self.attention.forward(&mut encoder, &call, &mut self.scratch).expect(context);
        self.gpu.queue().submit([encoder.finish()]);
        let n = count(SHAPE.out());
        let out = self.gpu.download::<f32>(&self.out, n).expect("a read-back");
        let error = max_error(&widen(&out), &self.want);
        assert!(error < 1e-5, "after {context}: off by {error}");
        self.gpu.queue().write_buffer(&self.out, 0, bytemuck::cast_slice(&vec![POISON; n]));
    }
}

/// The parts of a call, to be spoiled one by one.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) q: TensorView<'a>,
    pub(super) k: TensorView<'a>,
    pub(super) v: TensorView<'a>,
    pub(super) out: TensorView<'a>,
    pub(super) mask: DeviceMask<'a>,
    pub(super) lse: Option<TensorView<'a>>,
    pub(super) weights: Option<TensorView<'a>>,
    pub(super) dropout: Option<Dropout<TensorView<'a>>>,
}

impl<'a> Parts<'a> {
    pub(super) fn mask(self, mask: DeviceMask<'a>) -> Self {
        Parts { mask, ..self }
    }

    pub(super) fn forward(&self) -> Forward<'a> {
        let Parts { q, k, v, out, mask, lse, weights, dropout } = *self;
        Forward::new(q, k, v, out).mask(mask).lse(lse).weights(weights).dropout(dropout)
    }
}

pub(super) fn parts(buffers: [&wgpu::Buffer; 4]) -> Parts<'_> {
    let shapes = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.out()];
    let [q, k, v, out] = [0, 1, 2, 3].map(|n| TensorView::new(buffers[n], DType::F32, shapes[n]));
    Parts { q, k, v, out, mask: DeviceMask::none(), lse: None, weights: None, dropout: None }
}

pub(super) const TENSORS: [&str; 4] = ["q", "k", "v", "out"];
pub(super) const AXES: [&str; 4] = ["batch", "heads", "length", "dim"];

pub(super) fn tensor<'c, 'a>(call: &'c mut Parts<'a>, n: usize) -> &'c mut TensorView<'a> {
    [&mut call.q, &mut call.k, &mut call.v, &mut call.out].into_iter().nth(n).expect("one of four")
}

pub(super) fn reshaped<'a>(view: &TensorView<'a>, shape: [usize; 4]) -> TensorView<'a> {
    TensorView::new(view.buffer(), view.dtype(), shape)
}

pub(super) fn buffer(device: &wgpu::Device, bytes: usize, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let size = bytes as u64;
    let label = Some("a test's");
    device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
}
