//! The indexer of sparse attention: scores of keys, and the best keys of each query.

mod call;
mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use call::{IndexerBackward, IndexerForward};
use dispatch::{Gradients, Outputs, Problem};

use crate::kernel::{KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::mask::kernels::MaskVariant;
use crate::tensor::{CallTensors, DType, Element, Error, Shape, expect};

/// The indexer of sparse attention, forward and backward. It scores keys with a few small heads,
/// and selects the best keys of each query:
///
/// ```text
/// score[i, j] = Σ w[i, h] · relu(scale · q[i, h] · k[j])       over heads h
/// ```
///
/// It is the lightning indexer of DeepSeek V3.2 (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"). All heads
/// share the keys. Use its indices to select the keys of an attention.
///
/// ```no_run
/// # use wgpu_attention::{Error, wgpu};
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, buffers: [&wgpu::Buffer; 4]) -> Result<(), Error> {
/// use wgpu_attention::selected::{Indexer, IndexerForward};
/// use wgpu_attention::{DType, Mask, Scratch, TensorView};
///
/// let [q, k, w, indices] = buffers;
/// let q = TensorView::new(q, DType::F16, [1, 64, 512, 128]);
/// let k = TensorView::new(k, DType::F16, [1, 1, 32768, 128]);
/// let w = TensorView::new(w, DType::F32, [1, 1, 512, 64]);
/// let indices = TensorView::new(indices, DType::U32, [1, 1, 512, 2048]);
/// let indexer = Indexer::new(device);
/// let call = IndexerForward::new(q, k, w).mask(Mask::causal()).indices(indices);
/// let mut scratch = Scratch::new(device, indexer.scratch_size(&call)?)?;
///
/// let mut encoder = device.create_command_encoder(&Default::default());
/// indexer.forward(&mut encoder, &call, &mut scratch)?; // records only
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
///
/// Sums are computed in f32. Without [`scores`](IndexerForward::scores) as an output, the scores
/// exist only for a span of queries: 64 MiB, whatever the lengths are. Each span is followed by its
/// selection, which reads the scores three times, as [`TopK`](crate::rows::TopK) does. A key whose
/// score is −∞ counts as not permitted. A key whose score is NaN counts as the best.
///
/// The gradient of relu at 0 is 0. The gradients are computed in a fixed order, without atomics.
/// `d_q` and `d_w` together cost 4 · `head_dim` operations for each head and pair whose gradient is
/// not 0. `d_k` costs as many. With lists of keys, `d_k` needs a matrix of gradients for a span of
/// queries, of at most 64 MiB. It then also loads an element of this matrix for each pair.
#[doc(alias = "lightning indexer")]
#[doc(alias = "DSA")]
#[derive(Clone, Debug)]
pub struct Indexer {
    pipelines: Pipelines,
    kernel_options: KernelOptions,
}

impl Indexer {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Indexer { pipelines: pipelines.clone(), kernel_options: KernelOptions::new() }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Sets the class of kernels. The other [`KernelOptions`] do not apply to this operator.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns the temporary memory that `call` needs. It is at most 64 MiB for scores, and 8 bytes
    /// for each query. If `k` is above 2048, it is at most 64 MiB more. A single query may need
    /// more.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &IndexerForward) -> Result<ScratchSize, Error> {
        let (problem, outputs) = self.check(call)?;
        problem.scratch_size(&outputs, &self.pipelines.facts())
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the call requests no output, or for a mask with other rules than
    /// ranges of keys. Shapes that do not match, and written tensors that overlap other tensors.
    /// Every other [`Error`] of tensors and scratch. After an error nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &IndexerForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &IndexerForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let (problem, outputs) = self.check(call)?;
        let scratch: &Scratch = scratch;
        scratch.check(problem.scratch_size(&outputs, device)?)?;
        let dispatches = problem.forward(&outputs, scratch, device)?;
        self.pipelines.bind("indexer", &dispatches, scratch.bindings())
    }

    /// Returns the temporary memory that the gradients of `call` need: 8 bytes for each query. With
    /// lists of keys, `d_k` needs up to 64 MiB more. If it is not F32, it may also need 4 bytes for
    /// each of its elements.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &IndexerBackward) -> Result<ScratchSize, Error> {
        let (problem, gradients) = self.check_backward(call)?;
        problem.backward_scratch_size(&gradients, &self.pipelines.facts())
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// # Errors
    /// See [`forward`](Self::forward). [`Error::Unsupported`] if the call requests no gradient, or
    /// if the keys are integers.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &IndexerBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &IndexerBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let (problem, gradients) = self.check_backward(call)?;
        let scratch: &Scratch = scratch;
        scratch.check(problem.backward_scratch_size(&gradients, device)?)?;
        let dispatches = problem.backward(&gradients, scratch, device)?;
        self.pipelines.bind("indexer backward", &dispatches, scratch.bindings())
    }

    /// Checks the tensors that forward and backward calls read.
    fn problem<'a>(
        &self,
        call: &IndexerForward<'a>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Problem<'a>, Error> {
        let IndexerForward { q, k, w, k_scales, scale, mask, .. } = *call;
        let [batch, heads, q_len, head_dim] = q.shape();
        let kv_len = k.shape()[2];
        tensors.read("q", q, Element::Float, q.shape())?;
        if let Some(scales) = k_scales {
            if !head_dim.is_multiple_of(4) {
                let by = "channels of a word";
                return Err(Error::NotDivisible { what: "head_dim", value: head_dim, by, divisor: 4 });
            }
            tensors.read("k", k, DType::U32, [batch, 1, kv_len, head_dim / 4])?;
            let groups = scales.shape()[3];
            tensors.read("k_scales", scales, Element::Float, [batch, 1, kv_len, groups])?;
            if !(head_dim / 4).is_multiple_of(groups) {
                let by = "groups with one scale";
                let (value, divisor) = (head_dim / 4, groups);
                return Err(Error::NotDivisible { what: "head_dim / 4", value, by, divisor });
            }
        } else {
            tensors.read("k", k, Element::Float, [batch, 1, kv_len, head_dim])?;
        }
        tensors.read("w", w, Element::Float, [batch, 1, q_len, heads])?;
        let shape = Shape { batch, heads, kv_heads: 1, q_len, kv_len, head_dim, value_dim: head_dim };
        shape.check()?;
        if !scale.is_finite() {
            return Err(Error::Option { option: "scale", value: scale.into(), expected: "finite" });
        }
        mask.check(&Shape { heads: 1, ..shape }, tensors.device)?;
        if !MaskVariant::of(&mask, false, false).is_range() {
            let why = "an indexer has ranges of keys: causal, window, lengths, offsets, packed sequences";
            return Err(Error::Unsupported { what: "a mask with rules for single pairs or scores", why });
        }
        tensors.read_checked(mask.tensors());
        Ok(Problem { shape, q, k, k_scales, w, mask, scale, kernel_options: self.kernel_options })
    }

    fn check<'a>(&self, call: &IndexerForward<'a>) -> Result<(Problem<'a>, Outputs<'a>), Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let problem = self.problem(call, &mut tensors)?;
        let IndexerForward { indices, values, scores, .. } = *call;
        let Shape { batch, q_len, kv_len, .. } = problem.shape;
        let k = indices.map_or(0, |indices| indices.shape()[3]);
        tensors.write("indices", indices, DType::U32, [batch, 1, q_len, k])?;
        if values.is_some() && indices.is_none() {
            let why = "they are the scores at the indices; set `indices` too";
            return Err(Error::Unsupported { what: "`values` without `indices`", why });
        }
        tensors.write("values", values, Element::Float, [batch, 1, q_len, k])?;
        tensors.write("scores", scores, DType::F32, [batch, 1, q_len, kv_len])?;
        if tensors.written().is_empty() {
            let why = "no output is requested; set `indices` or `scores`";
            return Err(Error::Unsupported { what: "a call of an indexer", why });
        }
        tensors.finish()?;
        Ok((problem, Outputs { indices, values, scores }))
    }

    fn check_backward<'a>(&self, call: &IndexerBackward<'a>) -> Result<(Problem<'a>, Gradients<'a>), Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let problem = self.problem(&call.forward, &mut tensors)?;
        if problem.k_scales.is_some() {
            let why = "pass keys of F32, F16 or BF16";
            return Err(Error::Unsupported { what: "the backward pass with keys of 8 bits", why });
        }
        let IndexerBackward { d_scores, indices, d_q, d_k, d_w, .. } = *call;
        let Shape { batch, q_len, kv_len, .. } = problem.shape;
        let listed = indices.map_or(kv_len, |indices| indices.shape()[3]);
        let shape = [batch, 1, q_len, listed];
        tensors.read("indices", indices, DType::U32, shape)?;
        expect("d_scores", d_scores.shape(), 3, listed)?;
        tensors.read("d_scores", d_scores, Element::Float, shape)?;
        tensors.gradient("d_q", d_q, problem.q.dtype(), problem.q.shape())?;
        tensors.gradient("d_k", d_k, problem.k.dtype(), problem.k.shape())?;
        tensors.gradient("d_w", d_w, problem.w.dtype(), problem.w.shape())?;
        tensors.require_gradients("no gradient is requested; set `d_q`, `d_k` or `d_w`")?;
        tensors.finish()?;
        Ok((problem, Gradients { d_scores, indices, d_q, d_k, d_w }))
    }
}
