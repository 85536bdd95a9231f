//! Differential attention (Ye et al. 2024, "Differential Transformer"), composed of operators. Two
//! calls of attention have every other head. An elementwise product and the norm of a sum follow.

use wgpu_attention::reference::compare::compare;
use wgpu_attention::rows::{
    Elementwise, ElementwiseBackward, ElementwiseForward, Norm, NormBackward, NormConfig, NormForward,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, Backward, Config, DType, Error, Forward, KernelOptions, Mask, Scratch, TensorView,
};

use crate::harness::{FORMS, Vector, full};

pub const FAMILY: &str = "gates";
pub const NAMES: &[&str] =
    &["differential_bwd", "differential_fixed_lambda", "differential_grouped", "differential_plain"];

/// The learned vectors of lambda.
const VECTORS: [&str; 4] = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"];

/// A result of a call, by the name of the vector's tensor.
type Results = Vec<(&'static str, Vec<f64>)>;

struct Lambda {
    vectors: Option<[Vec<f64>; 4]>,
    value: f64,
}

impl Lambda {
    fn of(vector: &Vector) -> Self {
        if let Some(value) = vector.number("lambda") {
            return Lambda { vectors: None, value };
        }
        let vectors = VECTORS.map(|name| vector.f64(name));
        let [one, two] = Self::terms(&vectors);
        let value = one - two + vector.number("lambda_init").expect("a number");
        Lambda { vectors: Some(vectors), value }
    }

    /// `exp(q1 · k1)` and `exp(q2 · k2)`.
    fn terms([q1, k1, q2, k2]: &[Vec<f64>; 4]) -> [f64; 2] {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        [dot(q1, k1).exp(), dot(q2, k2).exp()]
    }

    /// The gradients of the vectors, from that of lambda.
    fn backward(&self, d_lambda: f64) -> Results {
        let Some(vectors) = &self.vectors else { return Vec::new() };
        let [one, two] = Self::terms(vectors);
        let [q1, k1, q2, k2] = vectors;
        let times = |x: &[f64], by: f64| x.iter().map(|x| x * by * d_lambda).collect::<Vec<f64>>();
        vec![
            ("dlambda_q1", times(k1, one)),
            ("dlambda_k1", times(q1, one)),
            ("dlambda_q2", times(k2, -two)),
            ("dlambda_k2", times(q2, -two)),
        ]
    }
}

/// Every other head of a tensor `[1, 2 · heads, length, dim]`, from head `first` on.
fn every_other(t: TensorView, first: usize) -> TensorView {
    let [batch, heads, length, dim] = t.shape();
    let [b, h, l, d] = t.strides();
    let half = t.slice(1, 0, heads / 2).with_strides([b, 2 * h, l, d]).with_offset(t.offset() + first * h);
    assert_eq!(half.shape(), [batch, heads / 2, length, dim]);
    half
}

fn run(vector: &Vector, form: Target) -> Result<Results, Error> {
    let gpu = &full().gpu;
    let floats = |shape: [usize; 4]| gpu.buffer(4 * shape.iter().product::<usize>());
    let [q_shape, k_shape, v_shape] = ["q", "k", "v"].map(|name| vector.shape4(name));
    let (heads, kv_heads) = (vector.size("heads"), vector.size("kv_heads"));
    let out_shape = [q_shape[0], heads, q_shape[2], v_shape[3]];
    let lse_shape = [q_shape[0], heads, q_shape[2], 1];
    let kernel_options = KernelOptions::new().target(form);
    let config = Config::new(heads, q_shape[3]).kv_heads(kv_heads).value_dim(v_shape[3]);
    let config = config.scale(vector.number("scale")).kernel_options(kernel_options);
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let elementwise = Elementwise::with_pipelines(gpu.pipelines());
    let eps = vector.number("norm_eps").expect("a number");
    let norm = Norm::with_pipelines(gpu.pipelines(), NormConfig::rms().eps(eps))?;
    let norm = norm.kernel_options(kernel_options);

    let inputs = ["q", "k", "v"].map(|name| gpu.upload(&vector.f32(name)).expect("a buffer"));
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let [q, k] = [(&inputs[0], q_shape), (&inputs[1], k_shape)].map(|(buffer, shape)| view(buffer, shape));
    let v = view(&inputs[2], v_shape);
    let outs = [(); 4].map(|()| floats(out_shape).expect("a buffer"));
    let [o0, o1, scaled, out] = outs.each_ref().map(|buffer| view(buffer, out_shape));
    let lses = [(); 2].map(|()| floats(lse_shape).expect("a buffer"));
    let calls = [(0, o0), (1, o1)].map(|(n, out)| {
        let call = Forward::new(every_other(q, n), every_other(k, n), v, out);
        call.lse(view(&lses[n], lse_shape)).mask(Mask::causal())
    });
    // One number, which all elements read.
    let lambda = Lambda::of(vector);
    let minus = gpu.upload(&[-lambda.value as f32])?;
    let minus = view(&minus, out_shape).with_strides([0; 4]);
    let product = ElementwiseForward::new(o1, scaled).multiply(minus);
    let has_norm = vector.has("norm");
    let rest = 1.0 - vector.number("lambda_init").expect("a number");
    let weight: Vec<f32> = match has_norm {
        true => vector.f64("norm").into_iter().map(|w| (w * rest) as f32).collect(),
        false => vec![1.0; v_shape[3]],
    };
    let weight = gpu.upload(&weight)?;
    let normed = NormForward::new(scaled, out).residual(o0).weight(TensorView::vector(
        &weight,
        DType::F32,
        v_shape[3],
    ));
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&calls[0])?)?;
    gpu.submit(|encoder| {
        for call in &calls {
            attention.forward(encoder, call, &mut scratch)?;
        }
        elementwise.forward(encoder, &product)?;
        match has_norm {
            true => norm.forward(encoder, &normed),
            false => elementwise.forward(encoder, &ElementwiseForward::new(scaled, out).residual(o0)),
        }
    })?;
    let read = |buffer, shape: [usize; 4]| -> Result<Vec<f64>, Error> {
        let got = gpu.download::<f32>(buffer, shape.iter().product())?;
        Ok(got.into_iter().map(f64::from).collect())
    };
    let mut results = vec![("out", read(&outs[3], out_shape)?)];
    if !vector.has("dout") {
        return Ok(results);
    }

    let d_out = gpu.upload(&vector.f32("dout"))?;
    let targets = [(); 3].map(|()| floats(out_shape).expect("a buffer"));
    let [d_sum, d_o1, d_minus] = targets.each_ref().map(|buffer| view(buffer, out_shape));
    let d_weight = gpu.buffer(4 * v_shape[3])?;
    let back = NormBackward::new(normed, view(&d_out, out_shape)).d_x(d_sum);
    let back = back.d_weight(TensorView::vector(&d_weight, DType::F32, v_shape[3]));
    let of_product = ElementwiseBackward::new(product, d_sum).d_x(d_o1).d_multiply(d_minus);
    let [d_q, d_k, d_v] = [q_shape, k_shape, v_shape].map(|shape| floats(shape).expect("a buffer"));
    // Both calls add to the gradient of v. The buffers are zero before.
    let backs = [(0, d_sum), (1, d_o1)].map(|(n, d_out)| {
        Backward::new(calls[n], d_out)
            .d_q(every_other(view(&d_q, q_shape), n))
            .d_k(every_other(view(&d_k, k_shape), n))
            .d_v(view(&d_v, v_shape))
            .accumulate(true)
    });
    let size = attention.backward_scratch_size(&backs[0])?.max(norm.backward_scratch_size(&back)?);
    let mut scratch = Scratch::new(gpu.device(), size)?;
    gpu.submit(|encoder| {
        norm.backward(encoder, &back, &mut scratch)?;
        elementwise.backward(encoder, &of_product)?;
        backs.iter().try_for_each(|back| attention.backward(encoder, back, &mut scratch))
    })?;
    results.push(("dq", read(&d_q, q_shape)?));
    results.push(("dk", read(&d_k, k_shape)?));
    results.push(("dv", read(&d_v, v_shape)?));
    let d_weight = read(&d_weight, [1, 1, 1, v_shape[3]])?;
    results.push(("dnorm", d_weight.into_iter().map(|d| d * rest).collect()));
    results.extend(lambda.backward(-read(&targets[2], out_shape)?.iter().sum::<f64>()));
    Ok(results)
}

#[test]
fn composed_operators_match_the_vectors() {
    for name in NAMES {
        let vector = Vector::load(FAMILY, name);
        for form in FORMS {
            let results = run(&vector, form).unwrap_or_else(|e| panic!("{name}, {form:?}: {e}"));
            assert_eq!(results.len(), if vector.has("dout") { 9 } else { 1 });
            for (tensor, got) in results {
                let (want, tolerance) = vector.expected(tensor).expect("an output");
                compare(&got, &want, tolerance).unwrap_or_else(|e| panic!("{name}, {form:?}, {tensor}: {e}"));
            }
        }
    }
}
