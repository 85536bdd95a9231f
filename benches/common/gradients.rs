//! A backward call with its buffers, and the comparison of one head's gradients with the reference.

use wgpu_attention::reference::compare::{Difference, Mismatch, Tolerance, compare};
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{
    Attention, Backward, Config, DType, Forward, Gpu, Mask, Scratch, Shape, TensorView, wgpu,
};

use super::problem::{blank, epsilon, read, rounded, upload};
use super::share::Work;
use super::timer::noise;

/// The gradients that a call computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// d_q.
    Queries,
    /// d_k and d_v.
    KeysAndValues,
    All,
}

impl Wanted {
    pub fn name(self) -> &'static str {
        match self {
            Wanted::Queries => "backward of q",
            Wanted::KeysAndValues => "backward of k, v",
            Wanted::All => "backward",
        }
    }
}

/// A forward call that has run, and buffers for its gradients.
pub struct Gradients {
    shape: Shape,
    causal: bool,
    dtype: DType,
    /// q, k, v and d_out, rounded as on the device.
    data: [Vec<f32>; 4],
    inputs: [wgpu::Buffer; 4],
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
    gradients: [wgpu::Buffer; 3],
}

fn count(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

impl Gradients {
    /// Makes a call on pseudo-random numbers.
    pub fn new(gpu: &Gpu, shape: Shape, causal: bool, dtype: DType) -> Self {
        let shapes = [shape.q(), shape.k(), shape.v(), shape.out()];
        let data = [0, 1, 2, 3].map(|n| noise(count(shapes[n]), n as u32 + 1));
        Gradients::of(gpu, shape, causal, data, dtype)
    }

    /// Makes a call on q, k, v and d_out.
    pub fn of(gpu: &Gpu, shape: Shape, causal: bool, data: [Vec<f32>; 4], dtype: DType) -> Self {
        let data = data.map(|x| rounded(x, dtype));
        let inputs = data.each_ref().map(|x| upload(gpu, x, dtype).expect("room"));
        let blank = |shape, dtype| blank(gpu, count(shape), dtype).expect("room");
        let of = Gradients {
            shape,
            causal,
            dtype,
            data,
            inputs,
            out: blank(shape.out(), dtype),
            lse: blank(shape.lse(), DType::F32),
            gradients: [shape.q(), shape.k(), shape.v()].map(|shape| blank(shape, DType::F32)),
        };
        let attention = of.operator(gpu);
        let forward = of.forward();
        let size = attention.scratch_size(&forward).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("room");
        gpu.submit(|encoder| attention.forward(encoder, &forward, &mut scratch)).expect("a forward call");
        of
    }

    fn view<'a>(&self, buffer: &'a wgpu::Buffer, shape: [usize; 4]) -> TensorView<'a> {
        TensorView::new(buffer, self.dtype, shape)
    }

    fn lse_view(&self) -> TensorView<'_> {
        TensorView::new(&self.lse, DType::F32, self.shape.lse())
    }

    fn qkv(&self) -> [TensorView<'_>; 3] {
        let [q, k, v, _] = &self.inputs;
        let shape = self.shape;
        [self.view(q, shape.q()), self.view(k, shape.k()), self.view(v, shape.v())]
    }

    pub fn operator(&self, gpu: &Gpu) -> Attention {
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        let config = Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).dtype(self.dtype);
        Attention::with_pipelines(gpu.pipelines(), config).expect("an operator")
    }

    fn forward(&self) -> Forward<'_> {
        let [q, k, v] = self.qkv();
        let mask = if self.causal { Mask::causal() } else { Mask::none() };
        Forward::new(q, k, v, self.view(&self.out, self.shape.out())).lse(self.lse_view()).mask(mask)
    }

    pub fn call(&self, wanted: Wanted) -> Backward<'_> {
        let shape = self.shape;
        let call = Backward::new(self.forward(), self.view(&self.inputs[3], shape.out()));
        let [d_q, d_k, d_v] = &self.gradients;
        let place = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        let call = if wanted == Wanted::KeysAndValues { call } else { call.d_q(place(d_q, shape.q())) };
        if wanted == Wanted::Queries {
            return call;
        }
        call.d_k(place(d_k, shape.k())).d_v(place(d_v, shape.v()))
    }

    /// Returns d_q, d_k or d_v by number: a buffer of f32, and its number of elements.
    pub fn result(&self, n: usize) -> (&wgpu::Buffer, usize) {
        let shape = [self.shape.q(), self.shape.k(), self.shape.v()][n];
        (&self.gradients[n], count(shape))
    }

    /// Returns the least work: the products of each visible pair once, and each tensor once.
    pub fn least(shape: Shape, causal: bool, dtype: DType, wanted: Wanted) -> Work {
        let Shape { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = shape;
        let pairs = if causal { q_len * kv_len - q_len * (q_len - 1) / 2 } else { q_len * kv_len };
        let channels = match wanted {
            Wanted::Queries => 2 * head_dim + value_dim,
            Wanted::KeysAndValues => 2 * (head_dim + value_dim),
            // The score and the gradient of the weight count once.
            Wanted::All => 3 * head_dim + 2 * value_dim,
        };
        let tensors = [shape.q(), shape.k(), shape.v(), shape.out()].map(count).iter().sum::<usize>();
        Work {
            flops: 2.0 * (batch * heads * pairs * channels) as f64,
            bytes: (2 * tensors * dtype.bytes()) as f64,
        }
    }

    /// Compares the first head's gradients. The call must have as many heads of keys as of queries.
    pub fn judge(&self, gpu: &Gpu, wanted: Wanted) -> Result<Difference, Mismatch> {
        let one = Shape { batch: 1, heads: 1, kv_heads: 1, ..self.shape };
        let shapes = [one.q(), one.k(), one.v(), one.out()];
        let [q, k, v, d_out] = [0, 1, 2, 3].map(|n| &self.data[n][..count(shapes[n])]);
        let mask = if self.causal { Mask::causal() } else { Mask::none() };
        let options = Options::new().mask(mask);
        let exact = reference::attention_backward::<f64>(
            &widen(q),
            &widen(k),
            &widen(v),
            &widen(d_out),
            None,
            one,
            &options,
        )
        .expect("it fits");
        let naive = reference::attention_backward(q, k, v, d_out, None, one, &options).expect("it fits");
        let most =
            reference::attention_backward_magnitudes(q, k, v, d_out, None, one, &options).expect("it fits");
        let all = [
            (exact.d_q, naive.d_q, most.d_q),
            (exact.d_k, naive.d_k, most.d_k),
            (exact.d_v, naive.d_v, most.d_v),
        ];
        let wanted = match wanted {
            Wanted::Queries => 0..1,
            Wanted::KeysAndValues => 1..3,
            Wanted::All => 0..3,
        };
        let mut worst = Difference::default();
        for (n, (exact, naive, most)) in all.into_iter().enumerate().filter(|(n, _)| wanted.contains(n)) {
            let got = read(gpu, &self.gradients[n], exact.len(), DType::F32);
            let magnitude = most.iter().fold(0.0f64, |most, x| most.max(f64::from(*x)));
            // The gradient of the weights uses values that are stored in the tensors' type.
            let tolerance = Tolerance::gradient(&widen(&naive), &exact, magnitude, epsilon(self.dtype));
            let difference = compare(&got, &exact, tolerance)?;
            if difference.absolute > worst.absolute {
                worst = difference;
            }
        }
        Ok(worst)
    }
}
