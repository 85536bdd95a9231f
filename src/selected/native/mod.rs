//! Native sparse attention: compressed, selected and window attention with gates.

mod call;
mod config;
mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use call::{NativeSparseBackward, NativeSparseBranches, NativeSparseForward};
pub use config::NativeSparseConfig;
use dispatch::{BRANCHES, Gradients, NativeSparseProblem};

use crate::attention::Attention;
use crate::attention::dispatch::within;
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, CallTensors, DType, Element, Error, Shape, TensorView, check_apart};

/// Native sparse attention, forward and backward (Yuan et al. 2025, "Native Sparse Attention:
/// Hardware-Aligned and Natively Trainable Sparse Attention"). It is causal.
///
/// ```text
/// compressed = attention of q to one key for each block of keys
/// selected   = attention of q to the keys of its best blocks
/// window     = attention of q to the last keys
/// out        = gate₀ · compressed + gate₁ · selected + gate₂ · window
/// ```
///
/// The score of a block is the sum of the weights of the compressed keys that cover it. A weight
/// counts once for each stride that both have in common. The score is the mean over the query heads
/// of a key/value head, which therefore select the same blocks. Blocks with the same score are
/// selected from the first on.
///
/// The parts are separate operators too: [`Attention`], [`TopK`](crate::rows::TopK) and
/// [`SelectedAttention`](super::SelectedAttention).
///
/// ```no_run
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, [q, k, v, gates, out]:
/// #      [wgpu_attention::TensorView; 5]) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::selected::{NativeSparseAttention, NativeSparseConfig, NativeSparseForward};
/// use wgpu_attention::{Config, Scratch};
///
/// let config = NativeSparseConfig::new(Config::new(64, 192).kv_heads(4).value_dim(128));
/// let attention = NativeSparseAttention::new(device, config)?;
/// let call = NativeSparseForward::new(q, k, v, gates, out);
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
/// attention.forward(encoder, &call, &mut scratch)?;
/// # Ok(()) }
/// ```
///
/// For a learned compression, view the blocks of a dense `k` as rows that overlap. A block is a row
/// of `length · head_dim` numbers. Project the rows with a [`Projection`](crate::Projection), and
/// pass the result to [`compressed`](NativeSparseForward::compressed).
#[doc(alias = "NSA")]
#[doc(alias = "sparse attention")]
#[derive(Clone, Debug)]
pub struct NativeSparseAttention {
    pipelines: Pipelines,
    config: NativeSparseConfig,
}

impl NativeSparseAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: NativeSparseConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: NativeSparseConfig) -> Result<Self, Error> {
        config.check()?;
        // It checks the part of the configuration that is its own.
        Attention::with_pipelines(pipelines, config.attention)?;
        Ok(NativeSparseAttention { pipelines: pipelines.clone(), config })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs. The scores of compressed keys take at most
    /// 64 MiB. So do their mean weights, the scores of blocks, and the lists of selected keys.
    /// Longer calls go over the queries in parts. A single query may need more. Compressed keys,
    /// and the results of branches, take memory unless the caller passes them. The window needs
    /// what [`Attention::scratch_size`] says.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &NativeSparseForward) -> Result<ScratchSize, Error> {
        self.check(call)?.scratch_size(&self.pipelines.facts())
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, options and scratch. [`Error::Option`] if there
    /// are more queries than keys. After an error, nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &NativeSparseForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &NativeSparseForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let (problem, scratch) = (self.check(call)?, &*scratch);
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let dispatches = within(device, |device| problem.forward(call.out, scratch, device))?;
            self.pipelines.bind("native sparse attention", &dispatches, scratch.bindings())
        })
    }

    /// Returns the temporary memory that the gradients of `call` need. It has the gradients of
    /// branches, compressed keys and their gradients, and the memory of the parts. Sums over
    /// branches take memory in F32 if `d_q`, `d_k` or `d_v` is of another type.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &NativeSparseBackward) -> Result<ScratchSize, Error> {
        let (problem, gradients) = self.check_backward(call)?;
        problem.backward_scratch_size(&gradients, &self.pipelines.facts())
    }

    /// Records the gradients of a forward call into an encoder or a pass. Every run gives the same
    /// bits.
    ///
    /// # Errors
    /// As [`forward`](Self::forward). [`Error::Unsupported`] if no gradient is requested, or
    /// if the forward call has no [`branches`](NativeSparseForward::branches). The same for a
    /// gradient of a tensor that the forward call does not have.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &NativeSparseBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &NativeSparseBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let ((problem, gradients), scratch) = (self.check_backward(call)?, &*scratch);
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let dispatches = within(device, |device| problem.backward(&gradients, scratch, device))?;
            self.pipelines.bind("native sparse attention backward", &dispatches, scratch.bindings())
        })
    }

    /// Checks the tensors that both passes have. `out` is the output or its gradient.
    fn check_inputs<'a>(
        &self,
        call: &NativeSparseForward<'a>,
        out: (&'static str, TensorView<'a>, Access),
        branches: Access,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<NativeSparseProblem<'a>, Error> {
        let config = self.config;
        let dtype = config.attention.dtype;
        let NativeSparseForward { q, k, v, gates, compressed, window, .. } = *call;
        let shape = Shape::of(tensors, dtype, config.attention.dims(), [q, k, v], out)?;
        let Shape { batch, heads, kv_heads, q_len, kv_len, value_dim, .. } = shape;
        shape.check_lengths()?;
        if q_len > kv_len {
            let expected = "at most `kv_len`: the last query is at the last key";
            return Err(Error::Option { option: "q_len", value: q_len as f64, expected });
        }
        tensors.read("gates", gates, Element::Float, [batch, heads, q_len, BRANCHES])?;
        let blocks = Shape { kv_len: config.compressed_len(kv_len), ..shape };
        if let Some([k, v]) = compressed {
            tensors.read("compressed k", k, dtype, blocks.k())?;
            tensors.read("compressed v", v, dtype, blocks.v())?;
        }
        if let Some([k, v]) = window {
            tensors.read("window k", k, dtype, shape.k())?;
            tensors.read("window v", v, dtype, shape.v())?;
        }
        if let Some(NativeSparseBranches { out, lse, indices }) = call.branches {
            let rows = BRANCHES * batch;
            tensors.add(branches, "branches.out", out, dtype, [rows, heads, q_len, value_dim])?;
            tensors.add(branches, "branches.lse", lse, DType::F32, [rows, heads, q_len, 1])?;
            let listed = [batch, kv_heads, q_len, config.count];
            tensors.add(branches, "branches.indices", indices, DType::U32, listed)?;
        }
        Ok(NativeSparseProblem { shape, config, q, k, v, gates, compressed, window, branches: call.branches })
    }

    fn check<'a>(&self, call: &NativeSparseForward<'a>) -> Result<NativeSparseProblem<'a>, Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let out = ("out", call.out, Access::Write);
        let problem = self.check_inputs(call, out, Access::Write, &mut tensors)?;
        tensors.finish()?;
        Ok(problem)
    }

    fn check_backward<'a>(
        &self,
        call: &NativeSparseBackward<'a>,
    ) -> Result<(NativeSparseProblem<'a>, Gradients<'a>), Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let NativeSparseBackward {
            forward,
            d_out,
            d_q,
            d_k,
            d_v,
            d_gates,
            d_compressed,
            d_window,
            accumulates,
        } = *call;
        let unsupported = |what, why| Err(Error::Unsupported { what, why });
        if forward.branches.is_none() {
            let why = "the backward pass reads them; set `NativeSparseForward::branches`";
            return unsupported("the backward pass of a call without `branches`", why);
        }
        let of_out = ("d_out", d_out, Access::Read);
        let problem = self.check_inputs(&forward, of_out, Access::Read, &mut tensors)?;
        let (dtype, shape) = (self.config.attention.dtype, problem.shape);
        tensors.gradient("d_q", d_q, dtype, shape.q())?;
        tensors.gradient("d_k", d_k, dtype, shape.k())?;
        tensors.gradient("d_v", d_v, dtype, shape.v())?;
        tensors.gradient("d_gates", d_gates, forward.gates.dtype, forward.gates.shape())?;
        let own = [
            (["d_compressed k", "d_compressed v"], d_compressed, forward.compressed),
            (["d_window k", "d_window v"], d_window, forward.window),
        ];
        for (names, gradients, inputs) in own {
            let Some(gradients) = gradients else { continue };
            let Some(inputs) = inputs else {
                let why = "the forward call does not have these keys; their gradient is in `d_k` and `d_v`";
                return unsupported(names[0], why);
            };
            for n in 0..2 {
                tensors.gradient(names[n], Some(gradients[n]), dtype, inputs[n].shape())?;
            }
        }
        check_apart(tensors.written(), device)?;
        let why = "no gradient is requested; set `d_q`, `d_k`, `d_v`, `d_gates` or those of own keys";
        tensors.require_gradients(why)?;
        tensors.check_aliasing()?;
        let gradients = Gradients { d_out, d_q, d_k, d_v, d_gates, d_compressed, d_window, accumulates };
        Ok((problem, gradients))
    }
}
