//! `recurrent_scores` and `d2l`: the results of Bahdanau's and Luong's attention, and of d2l's
//! additive class.

use wgpu_attention::additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
use wgpu_attention::attention::ScoreStage;
use wgpu_attention::layers::{AttentionalForward, AttentionalVector};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, Config, DType, Forward, KernelOptions, Linear, Projection, Scratch, TensorView,
};

use crate::harness::{FORMS, Vector, full};
use crate::peers::d2l;

pub const FAMILY: &str = "recurrent_scores";
pub const NAMES: &[&str] = &["bahdanau", "bahdanau_bwd", "luong_concat", "luong_dot", "luong_general"];
pub const D2L: &[&str] = &["d2l_additive_book", "d2l_additive_random"];

/// Returns the vectors with additive scores.
fn additive() -> impl Iterator<Item = Vector> {
    let of_scores = NAMES[..3].iter().map(|name| Vector::load(FAMILY, name));
    of_scores.chain(D2L.iter().map(|name| Vector::load(d2l::FAMILY, name)))
}

/// Compares an output with the vector, if the vector has it.
pub fn expect(vector: &Vector, tensor: &str, got: &[f32]) {
    if let Some((want, tolerance)) = vector.expected(tensor) {
        compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{}: {tensor}: {e}", vector.name));
    }
}

/// The tensors of a vector on the device.
pub struct OnDevice<'a> {
    pub vector: &'a Vector,
}

impl OnDevice<'_> {
    pub fn upload(&self, tensor: &str) -> wgpu::Buffer {
        full().gpu.upload(&self.vector.f32(tensor)[..]).expect("an upload")
    }

    /// Returns `valid_lens` as lengths of a mask.
    pub fn lengths(&self) -> Option<wgpu::Buffer> {
        let lens = || self.vector.integers("valid_lens").into_iter().map(|n| n as u32).collect::<Vec<_>>();
        self.vector.has("valid_lens").then(|| full().gpu.upload(&lens()[..]).expect("an upload"))
    }
}

pub fn floats(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape)
}

fn forward(vector: &Vector, form: Target, staged: bool) {
    let gpu = &full().gpu;
    let on = OnDevice { vector };
    let kernel_options = KernelOptions::new().target(form);
    let [_, batch, q_len, q_dim] = vector.shape4("q");
    let [_, _, kv_len, k_dim] = vector.shape4("k");
    let hidden = vector.shape("v_a")[0];
    let [x_q, x_k, w_q, w_k, v_a] = ["q", "k", "w_q", "w_k", "v_a"].map(|t| on.upload(t));
    // If the vector has no values, the keys are the values.
    let (values, value_dim) =
        if vector.has("v") { (on.upload("v"), vector.shape4("v")[3]) } else { (on.upload("k"), k_dim) };
    let bias = vector.has("b_a").then(|| on.upload("b_a"));
    let buffer = |n: usize| gpu.buffer(4 * n).expect("a buffer");
    let (q, k) = (buffer(batch * q_len * hidden), buffer(batch * kv_len * hidden));
    let (q, k) = (floats(&q, [batch, 1, q_len, hidden]), floats(&k, [batch, 1, kv_len, hidden]));
    let project = Projection::with_pipelines(gpu.pipelines()).kernel_options(kernel_options);
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
    let config = AdditiveConfig::new(1, hidden).value_dim(value_dim).kernel_options(kernel_options);
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
    attentional(vector, form, &out, &x_q);
    if staged {
        expect(vector, "weights", &read(&weights, batch * q_len * kv_len));
        expect(vector, "scores", &read(&scores, batch * q_len * kv_len));
    }
}

#[test]
fn every_target_matches_vectors() {
    crate::harness::in_turn!();
    for vector in additive() {
        for form in FORMS {
            forward(&vector, form, false);
            forward(&vector, form, true);
        }
    }
}

/// Compares the attentional vector of a context, if the vector has one.
fn attentional(vector: &Vector, form: Target, context: &wgpu::Buffer, q: &wgpu::Buffer) {
    if !vector.has("h_tilde") {
        return;
    }
    let gpu = &full().gpu;
    let [_, batch, length, h] = vector.shape4("q");
    let [_, _, out, joined] = vector.shape4("w_c");
    let weight = OnDevice { vector }.upload("w_c");
    let linear = Linear { weight: TensorView::matrix(&weight, DType::F32, [out, joined]), bias: None };
    let h_tilde = gpu.buffer(4 * batch * length * out).expect("a buffer");
    let view = |buffer, dim| floats(buffer, [batch, 1, length, dim]);
    let call = AttentionalForward::new(view(context, joined - h), view(q, h), linear, view(&h_tilde, out));
    let operator =
        AttentionalVector::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
    let mut scratch =
        Scratch::new(gpu.device(), operator.scratch_size(&call).expect("it fits")).expect("memory");
    gpu.submit(|e| operator.forward(e, &call, &mut scratch)).expect("it runs");
    expect(vector, "h_tilde", &gpu.download::<f32>(&h_tilde, batch * length * out).expect("a read-back"));
}

/// Luong's dot and general scores, with scale 1. Queries are used directly, or multiplied by `W`.
#[test]
fn dot_and_general_match_vectors() {
    let gpu = &full().gpu;
    for name in ["luong_dot", "luong_general"] {
        let vector = Vector::load(FAMILY, name);
        let on = OnDevice { vector: &vector };
        let [_, batch, q_len, q_dim] = vector.shape4("q");
        let [_, _, kv_len, k_dim] = vector.shape4("k");
        for form in FORMS {
            let kernel_options = KernelOptions::new().target(form);
            let [x_q, k] = ["q", "k"].map(|t| on.upload(t));
            let projected = gpu.buffer(4 * batch * q_len * k_dim).expect("a buffer");
            let mut q = floats(&x_q, [batch, 1, q_len, q_dim]);
            let weight;
            if vector.has("w_a") {
                weight = on.upload("w_a");
                // This uses q · W k = (Wᵀ q) · k.
                let weight = TensorView::matrix(&weight, DType::F32, [q_dim, k_dim]).transposed(2, 3);
                let into = floats(&projected, [batch, 1, q_len, k_dim]);
                let product = ProjectionForward::new(q, Linear { weight, bias: None }, into);
                let project = Projection::with_pipelines(gpu.pipelines()).kernel_options(kernel_options);
                gpu.submit(|e| project.forward(e, &[product])).expect("it runs");
                q = into;
            }
            let k = floats(&k, [batch, 1, kv_len, k_dim]);
            let [out, weights, scores] =
                [k_dim, kv_len, kv_len].map(|n| gpu.buffer(4 * batch * q_len * n).expect("a buffer"));
            let row = |buffer, n| floats(buffer, [batch, 1, q_len, n]);
            let call = Forward::new(q, k, k, row(&out, k_dim))
                .weights(row(&weights, kv_len))
                .scores(row(&scores, kv_len), ScoreStage::Scaled);
            let config = Config::new(1, k_dim).scale(1.0).kernel_options(kernel_options);
            let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("it is made");
            let size = attention.scratch_size(&call).expect("it fits");
            let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
            gpu.submit(|e| attention.forward(e, &call, &mut scratch)).expect("it runs");
            let read = |buffer, n| gpu.download::<f32>(buffer, batch * q_len * n).expect("a read-back");
            expect(&vector, "out", &read(&out, k_dim));
            expect(&vector, "weights", &read(&weights, kv_len));
            expect(&vector, "scores", &read(&scores, kv_len));
            attentional(&vector, form, &out, &x_q);
        }
    }
}

/// The gradients of all inputs of Bahdanau's attention. Projected inputs get theirs through the
/// projections. The keys are the values too, and get the sum of both.
#[test]
fn every_target_matches_gradient_vectors() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    let vector = Vector::load(FAMILY, "bahdanau_bwd");
    let on = OnDevice { vector: &vector };
    let [_, batch, q_len, dim] = vector.shape4("q");
    let kv_len = vector.shape4("k")[2];
    let hidden = vector.shape("v_a")[0];
    let [x_q, x_k, w_q, w_k, v_a, b_a, d_out] =
        ["q", "k", "w_q", "w_k", "v_a", "b_a", "dout"].map(|t| on.upload(t));
    let lengths = on.lengths().expect("it has lengths");
    assert_eq!(batch, 2);
    fn rows(buffer: &wgpu::Buffer, length: usize, n: usize) -> TensorView<'_> {
        floats(buffer, [2, 1, length, n])
    }
    let buffer = |n: usize| gpu.buffer(4 * n).expect("a buffer");
    for form in FORMS {
        let kernel_options = KernelOptions::new().target(form);
        let project = Projection::with_pipelines(gpu.pipelines()).kernel_options(kernel_options);
        let config = AdditiveConfig::new(1, hidden).value_dim(dim).kernel_options(kernel_options);
        let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
        let [q, d_q] = [(); 2].map(|()| buffer(batch * q_len * hidden));
        let [k, d_k] = [(); 2].map(|()| buffer(batch * kv_len * hidden));
        let (q, d_q) = (rows(&q, q_len, hidden), rows(&d_q, q_len, hidden));
        let (k, d_k) = (rows(&k, kv_len, hidden), rows(&d_k, kv_len, hidden));
        let [out, dq] = [(); 2].map(|()| buffer(batch * q_len * dim));
        let (lse, dk) = (buffer(batch * q_len), buffer(batch * kv_len * dim));
        let [dw_q, dw_k] = [(); 2].map(|()| buffer(hidden * dim));
        let [dv_a, db_a] = [(); 2].map(|()| buffer(hidden));
        let matrix = |buffer| TensorView::matrix(buffer, DType::F32, [hidden, dim]);
        let short = |buffer| TensorView::vector(buffer, DType::F32, hidden);
        let (xq, xk) = (rows(&x_q, q_len, dim), rows(&x_k, kv_len, dim));
        let mask = DeviceMask::none().lengths(TensorView::new(&lengths, DType::U32, [batch, 1, 1, 1]));
        let forward = AdditiveForward::new(q, k, xk, short(&v_a), rows(&out, q_len, dim))
            .lse(rows(&lse, q_len, 1))
            .mask(mask);
        let backward = AdditiveBackward::new(forward, rows(&d_out, q_len, dim))
            .d_q(d_q)
            .d_k(d_k)
            .d_v(rows(&dk, kv_len, dim))
            .d_score_vector(short(&dv_a));
        let size = attention.scratch_size(&forward).expect("it fits");
        let size = size.max(attention.backward_scratch_size(&backward).expect("it fits"));
        let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
        gpu.submit(|e| {
            let of_q = Linear { weight: matrix(&w_q), bias: Some(short(&b_a)) };
            let of_q = ProjectionForward::new(xq, of_q, q);
            project.forward(e, &[of_q])?;
            let of_k = ProjectionForward::new(xk, Linear { weight: matrix(&w_k), bias: None }, k);
            project.forward(e, &[of_k])?;
            attention.forward(e, &forward, &mut scratch)?;
            attention.backward(e, &backward, &mut scratch)?;
            let of_q = ProjectionBackward::new(of_q, d_q);
            project.backward(
                e,
                &[of_q.d_x(rows(&dq, q_len, dim)).d_weight(matrix(&dw_q)).d_bias(short(&db_a))],
            )?;
            let of_k = ProjectionBackward::new(of_k, d_k);
            project.backward(e, &[of_k.d_weight(matrix(&dw_k))])?;
            project.backward(e, &[of_k.d_x(rows(&dk, kv_len, dim)).accumulate(true)])
        })
        .expect("it runs");
        for (tensor, buffer) in [
            ("out", &out),
            ("dq", &dq),
            ("dk", &dk),
            ("dw_q", &dw_q),
            ("dw_k", &dw_k),
            ("dv_a", &dv_a),
            ("db_a", &db_a),
        ] {
            let n = vector.shape(tensor).iter().product();
            expect(&vector, tensor, &gpu.download::<f32>(buffer, n).expect("a read-back"));
        }
    }
}
