//! The gradients of a merge.

use super::kernels::merge_backward::{self, MergeBackwardCall};
use super::{Merge, MergeForward, Partial};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Recorder};
use crate::tensor::{CallTensors, DType, Element, Error, TensorView, check_apart};

/// The tensors that receive the gradients of a part.
#[derive(Clone, Copy, Debug)]
pub struct PartGradients<'a> {
    /// `[batch, heads, q_len, value_dim]`, F32, F16 or BF16.
    pub d_out: TensorView<'a>,
    /// `[batch, heads, q_len, 1]`, F32.
    pub d_lse: TensorView<'a>,
}

/// The gradients of one merge with respect to its parts.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MergeBackward<'a> {
    forward: MergeForward<'a>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    gradients: &'a [PartGradients<'a>],
}

impl<'a> MergeBackward<'a> {
    /// Takes the merge, unchanged, and the gradient of its output. The call reads the parts and the
    /// results of the merge. `d_out` is `[batch, heads, q_len, value_dim]`, F32, F16 or BF16.
    /// `gradients` has the tensors for the gradients of each part. The `d_lse` of parts is computed
    /// from the merged output, which F16 or BF16 rounds; use F32 to avoid that.
    pub fn new(forward: MergeForward<'a>, d_out: TensorView<'a>, gradients: &'a [PartGradients<'a>]) -> Self {
        MergeBackward { forward, d_out, d_lse: None, gradients }
    }

    /// The gradient with respect to the merged log-sum-exp, `[batch, heads, q_len, 1]`, F32. The
    /// default is zero.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let MergeBackward { forward: MergeForward { parts, into: merged }, d_out, d_lse, gradients } = self;
        if parts.is_empty() {
            return Err(Error::ZeroSize { tensor: "parts", axis: "number" });
        }
        if gradients.len() != parts.len() {
            return Err(Error::Length { tensor: "gradients", expected: parts.len(), got: gradients.len() });
        }
        let mut tensors = CallTensors::new(device);
        let wide = merged.out.shape();
        let of_rows = [wide[0], wide[1], wide[2], 1];
        tensors.read("out", merged.out, Element::Float, wide)?;
        tensors.read("lse", merged.lse, DType::F32, of_rows)?;
        tensors.read("d_out", *d_out, Element::Float, wide)?;
        tensors.read("d_lse", *d_lse, DType::F32, of_rows)?;
        for part in *parts {
            tensors.read("parts.out", part.out, Element::Float, wide)?;
            tensors.read("parts.lse", part.lse, DType::F32, of_rows)?;
        }
        for part in *gradients {
            tensors.write("gradients.d_out", part.d_out, Element::Float, wide)?;
            tensors.write("gradients.d_lse", part.d_lse, DType::F32, of_rows)?;
        }
        tensors.check_aliasing()?;
        // One dispatch writes the gradients of one part.
        tensors.written().chunks(2).try_for_each(|part| check_apart(part, device))
    }

    fn dispatches(&self, device: &DeviceFacts) -> Dispatches<'a> {
        let MergeForward { parts, into: Partial { out, lse } } = self.forward;
        let [batch, heads, q_len, value_dim] = out.shape();
        let call = |(part, gradients): (&Partial<'a>, &PartGradients<'a>)| {
            let call = MergeBackwardCall {
                part_out: part.out,
                part_lse: part.lse,
                out,
                lse,
                d_out: self.d_out,
                d_lse: self.d_lse,
                d_part_out: gradients.d_out,
                d_part_lse: gradients.d_lse,
                q_len: q_len as u32,
                value_dim: value_dim as u32,
                neg_inf: f32::NEG_INFINITY,
            };
            call.dispatch([q_len.div_ceil(merge_backward::ROWS), heads, batch], device)
        };
        parts.iter().zip(self.gradients).map(call).collect()
    }
}

impl Merge {
    /// Records the gradients of a merge into an encoder or a pass. They are the gradients with
    /// respect to the output and the log-sum-exp of each part. With `share = exp(lseₙ − lse)`:
    /// `d_outₙ = share · d_out` and `d_lseₙ = share · (d_out · (outₙ − out) + d_lse)`. A row that
    /// saw no key in a part has gradients of 0 in that part.
    ///
    /// ```no_run
    /// # use wgpu_attention::{Error, TensorView, wgpu};
    /// # use wgpu_attention::attention::{Merge, MergeBackward, MergeForward, PartGradients, Partial};
    /// # fn f(merge: &Merge, encoder: &mut wgpu::CommandEncoder, parts: [Partial; 2], into: Partial, d_out: TensorView,
    /// #     gradients: [PartGradients; 2]) -> Result<(), Error> {
    /// let forward = MergeForward::new(&parts, into);
    /// merge.forward(encoder, &forward)?;
    /// // … what gives d_out …
    /// merge.backward(encoder, &MergeBackward::new(forward, d_out, &gradients))
    /// # }
    /// ```
    ///
    /// Each part is a separate dispatch, so the number of parts has no limit.
    ///
    /// # Errors
    /// Returns an error if:
    ///
    /// - there are no parts,
    /// - the number of gradients is not the number of parts,
    /// - shapes differ,
    /// - gradients overlap an input.
    ///
    /// It also returns the other errors that [`Error`] lists for tensors. After an error, nothing
    /// has been recorded.
    pub fn backward(&self, into: &mut impl Recorder, call: &MergeBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, and compiles and binds its kernels. [`Prepared::record`] then records it any
    /// number of times.
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &MergeBackward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        self.pipelines.bind("merge backward", &call.dispatches(device), &self.bindings)
    }
}
