//! The operator: `softmax(v · tanh(q + k), masked) · values`.

mod backward;
mod call;
mod config;
pub(crate) mod dispatch_backward;
pub(crate) mod kernels;

pub use backward::AdditiveBackward;
pub use call::AdditiveForward;
pub use config::AdditiveConfig;

use crate::attention::dispatch::{self, Extras, Keys, Problem};
use crate::attention::{Config, Forward, check_extras};
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{Access, CallTensors, Element, Error, Shape, TensorView, expect_broadcast};

/// Additive attention on one device (Bahdanau et al. 2014, "Neural machine translation by jointly
/// learning to align and translate"). The score of a query and a key is
/// `score_vector · tanh(q + k)`. Queries and keys are first projected to the same number of hidden
/// units. Luong's `concat` (2015) is the same, because `W_a [q; k]` is `W_q q + W_k k`.
///
/// The kernel makes one pass over the keys with a running softmax. It stores neither the hidden
/// units of pairs nor scores, unless the call requests attention weights or scores. Masks, lengths,
/// dropout, packed sequences, grouped heads and the caller's functions work as for
/// [`Attention`](crate::Attention). A [`Projection`](crate::Projection) computes q and k; its bias
/// is Bahdanau's b.
///
/// For normalised attention, `g · v / |v| · tanh(q + k)`, a [`WeightNorm`](crate::rows::WeightNorm)
/// computes the score vector.
///
/// The crate has a tanh with an error of at most six units in the last place. For large arguments
/// it is 1 or −1 on every driver.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, q: &wgpu::Buffer, k: &wgpu::Buffer, v: &wgpu::Buffer,
/// #      v_a: &wgpu::Buffer, out: &wgpu::Buffer) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{DType, Scratch, TensorView};
/// use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
///
/// let attention = AdditiveAttention::new(device, AdditiveConfig::new(1, 128).value_dim(256))?;
/// let view = |buffer, length, dim| TensorView::new(buffer, DType::F32, [8, 1, length, dim]);
/// let (q, k, v) = (view(q, 1, 128), view(k, 50, 128), view(v, 50, 256));
/// let call = AdditiveForward::new(q, k, v, TensorView::vector(v_a, DType::F32, 128), view(out, 1, 256));
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
///
/// let mut encoder = device.create_command_encoder(&Default::default());
/// attention.forward(&mut encoder, &call, &mut scratch)?; // records only
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
#[doc(alias = "bahdanau")]
#[doc(alias = "concat_attention")]
#[derive(Clone, Debug)]
pub struct AdditiveAttention {
    pipelines: Pipelines,
    config: Config,
}

impl AdditiveAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: AdditiveConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: AdditiveConfig) -> Result<Self, Error> {
        config.0.check(&pipelines.facts())?;
        Ok(AdditiveAttention { pipelines: pipelines.clone(), config: config.0 })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs, as
    /// [`Attention::scratch_size`](crate::Attention::scratch_size) does.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &AdditiveForward) -> Result<ScratchSize, Error> {
        let problem = self.check(call)?;
        Ok(dispatch::choose(&problem.outline(), &self.pipelines.facts())?.scratch_size())
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, masks, options and scratch. The encoder is then
    /// unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &AdditiveForward,
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
    pub fn prepare(&self, call: &AdditiveForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = self.check(call)?;
        let chosen = dispatch::choose_within(&problem.outline(), device, scratch)?;
        let memory = chosen.memory(scratch)?;
        let dispatches = dispatch::dispatches(&problem, chosen, memory, device);
        self.pipelines.bind("additive attention", &dispatches, scratch.bindings())
    }

    /// Checks a call, before its pipelines are compiled.
    fn check<'a>(&self, call: &AdditiveForward<'a>) -> Result<Problem<'a>, Error> {
        let device = &self.pipelines.facts();
        let config = &self.config;
        let AdditiveForward { call, k, v, score_vector } = *call;
        let Forward { q, out, mask, lse, weights, scores, dropout, .. } = call;
        let mut tensors = CallTensors::new(device);
        let out_view = ("out", out, Access::Write);
        let shape = Shape::of(&mut tensors, config.dtype, config.dims(), [q, k, v], out_view)?;
        check_score_vector(score_vector, &shape, &mut tensors)?;
        let extras = Extras { out, mask, appended: 0, lse, weights, scores, dropout };
        check_extras(&extras, &shape, &mut tensors)?;
        tensors.finish()?;
        Ok(Problem {
            shape,
            q,
            keys: Keys::Tensors { k, v },
            extras,
            scale: 1.0,
            softcap: None,
            score_vector: Some(score_vector),
            lists: None,
            kernel_options: config.kernel_options,
        })
    }
}

fn check_score_vector<'a>(
    vector: TensorView<'a>,
    shape: &Shape,
    tensors: &mut CallTensors<'a, '_>,
) -> Result<(), Error> {
    let [_, heads, rows, _] = vector.shape();
    tensors.read("score_vector", vector, Element::Float, [1, heads, rows, shape.head_dim])?;
    expect_broadcast("score_vector", vector.shape(), [1, shape.heads, 1, shape.head_dim])
}
