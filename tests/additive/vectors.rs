//! `recurrent_scores` and `d2l`: what Bahdanau's and Luong's attention gives, and d2l's additive class.

use wgpu_attention::reference::compare::compare;
use wgpu_attention::{
    AdditiveAttention, AdditiveConfig, AdditiveForward, DType, DeviceMask, KernelForm, Linear, Projection,
    ProjectionForward, ScoreStage, Scratch, TensorView, Tuning,
};

use crate::d2l;
use crate::harness::{FORMS, Vector, full};

pub const FAMILY: &str = "recurrent_scores";
pub const NAMES: &[&str] =
    &["bahdanau", "bahdanau_bwd", "luong_concat", "luong_dot", "luong_general", "luong_local_p"];
pub const D2L: &[&str] = &["d2l_additive_book", "d2l_additive_random"];

/// Those whose scores are additive.
fn additive() -> impl Iterator<Item = Vector> {
    let of_scores = NAMES[..3].iter().map(|name| Vector::load(FAMILY, name));
    of_scores.chain(D2L.iter().map(|name| Vector::load(d2l::FAMILY, name)))
}

/// Compares what came of an output with the vector, if that has it.
pub fn expect(vector: &Vector, tensor: &str, got: &[f32]) {
    if let Some((want, tolerance)) = vector.expected(tensor) {
        compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{}: {tensor}: {e}", vector.name));
    }
}

/// A vector's tensors on the device.
pub struct OnDevice<'a> {
    pub vector: &'a Vector,
}

impl OnDevice<'_> {
    pub fn upload(&self, tensor: &str) -> wgpu::Buffer {
        full().gpu.upload(&self.vector.f32(tensor)[..]).expect("an upload")
    }

    /// `valid_lens`, as lengths of a mask.
    pub fn lengths(&self) -> Option<wgpu::Buffer> {
        let lens = || self.vector.integers("valid_lens").into_iter().map(|n| n as u32).collect::<Vec<_>>();
        self.vector.has("valid_lens").then(|| full().gpu.upload(&lens()[..]).expect("an upload"))
    }
}

pub fn floats(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape)
}

fn forward(vector: &Vector, form: KernelForm, staged: bool) {
    let gpu = &full().gpu;
    let on = OnDevice { vector };
    let tuning = Tuning::new().form(form);
    let [_, batch, q_len, q_dim] = vector.shape4("q");
    let [_, _, kv_len, k_dim] = vector.shape4("k");
    let hidden = vector.shape("v_a")[0];
    let [x_q, x_k, w_q, w_k, v_a] = ["q", "k", "w_q", "w_k", "v_a"].map(|t| on.upload(t));
    // Without values of their own, keys are the values.
    let (values, value_dim) =
        if vector.has("v") { (on.upload("v"), vector.shape4("v")[3]) } else { (on.upload("k"), k_dim) };
    let bias = vector.has("b_a").then(|| on.upload("b_a"));
    let buffer = |n: usize| gpu.buffer(4 * n).expect("a buffer");
    let (q, k) = (buffer(batch * q_len * hidden), buffer(batch * kv_len * hidden));
    let (q, k) = (floats(&q, [batch, 1, q_len, hidden]), floats(&k, [batch, 1, kv_len, hidden]));
    let project = Projection::with_pipelines(gpu.pipelines()).tuning(tuning);
    let linear = |weight, dim| TensorView::matrix(weight, DType::F32, [hidden, dim]);
    let bias = bias.as_ref().map(|b| TensorView::vector(b, DType::F32, hidden));
    let queries = Linear { weight: linear(&w_q, q_dim), bias };
    let keys = Linear { weight: linear(&w_k, k_dim), bias: None };
    let of_q = ProjectionForward::new(floats(&x_q, [batch, 1, q_len, q_dim]), queries, q);
    let of_k = ProjectionForward::new(floats(&x_k, [batch, 1, kv_len, k_dim]), keys, k);

    let [out, weights, scores] =
        [batch * q_len * value_dim, batch * q_len * kv_len, batch * q_len * kv_len].map(buffer);
    let pairs = [batch, 1, q_len, kv_len];
    let lengths = on.lengths();
    let mut mask = DeviceMask::none();
    if let Some(lengths) = &lengths {
        mask = mask.lengths(TensorView::new(lengths, DType::U32, [batch, 1, 1, 1]));
    }
    let config = AdditiveConfig::new(1, hidden).value_dim(value_dim).tuning(tuning);
    let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
    let v = floats(&values, [batch, 1, kv_len, value_dim]);
    let mut call = AdditiveForward::new(
        q,
        k,
        v,
        TensorView::vector(&v_a, DType::F32, hidden),
        floats(&out, [batch, 1, q_len, value_dim]),
    )
    .mask(mask);
    if staged {
        call = call.weights(floats(&weights, pairs)).scores(floats(&scores, pairs), ScoreStage::Scaled);
    }
    let size = attention.scratch_size(&call).expect("it fits");
    let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
    gpu.submit(|e| {
        project.forward(e, &[of_q])?;
        project.forward(e, &[of_k])?;
        attention.forward(e, &call, &mut scratch)
    })
    .expect("it runs");
    let read = |buffer, n| gpu.download::<f32>(buffer, n).expect("a read-back");
    expect(vector, "out", &read(&out, batch * q_len * value_dim));
    if staged {
        expect(vector, "weights", &read(&weights, batch * q_len * kv_len));
        expect(vector, "scores", &read(&scores, batch * q_len * kv_len));
    }
}

#[test]
fn every_form_gives_the_vectors() {
    for vector in additive() {
        for form in FORMS {
            forward(&vector, form, false);
            forward(&vector, form, true);
        }
    }
}
