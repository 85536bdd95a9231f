//! The dispatches of a backward call. Selected attention writes the gradients to which the window,
//! compressed attention and the means of blocks add.

use super::problem::{BRANCHES, COMPRESSED, NativeSparseProblem, SELECTED, WINDOW, bytes, of_branch};
use crate::attention::dispatch::{BackwardProblem, backward};
use crate::device::DeviceFacts;
use crate::kernel::{Algorithm, Dispatch, Dispatches, Scratch, ScratchSize, Slot, in_scratch};
use crate::mask::DeviceMask;
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::selected::dispatch::SelectedBackwardProblem;
use crate::selected::native::call::NativeSparseBranches;
use crate::tensor::{DType, Error, Shape, TensorView};

/// The tensors of a backward call.
#[derive(Clone, Copy)]
pub(in crate::selected::native) struct Gradients<'a> {
    pub d_out: TensorView<'a>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_v: Option<TensorView<'a>>,
    pub d_gates: Option<TensorView<'a>>,
    pub d_compressed: Option<[TensorView<'a>; 2]>,
    pub d_window: Option<[TensorView<'a>; 2]>,
    pub accumulates: bool,
}

impl<'a> Gradients<'a> {
    /// True if the call needs more than the gradients of the gates.
    fn needs_attention(&self) -> bool {
        let separate = self.d_compressed.is_some() || self.d_window.is_some();
        separate || self.of_inputs().iter().any(|(gradient, _)| gradient.is_some())
    }

    /// The gradients of q, k and v, and the slot of each one's sum in F32.
    fn of_inputs(&self) -> [(Option<TensorView<'a>>, Slot); 3] {
        [(self.d_q, Slot::QuerySums), (self.d_k, Slot::BranchKeySums), (self.d_v, Slot::BranchValueSums)]
    }

    /// Separate gradients of keys and values, which are added as the caller says.
    fn separate(&self, gradients: Option<[TensorView<'a>; 2]>) -> [Option<Written<'a>>; 2] {
        let written = |t| Some(Written { t, adds: self.accumulates });
        gradients.map(|gradients| gradients.map(written)).unwrap_or_default()
    }

    /// The sums of gradients over branches: the caller's tensors, or scratch if these are not F32.
    fn sums(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> [Option<TensorView<'a>>; 3] {
        self.of_inputs().map(|(gradient, slot)| {
            let gradient = gradient?;
            let is_sum = gradient.dtype() == DType::F32;
            Some(if is_sum { gradient } else { in_scratch(part(slot), DType::F32, gradient.shape(), 0) })
        })
    }
}

/// A gradient that a branch writes.
#[derive(Clone, Copy)]
struct Written<'a> {
    t: TensorView<'a>,
    /// True if the gradient is added to the tensor's contents.
    adds: bool,
}

/// The backward passes of the branches.
struct Passes<'a> {
    selected: Option<SelectedBackwardProblem<'a>>,
    others: Vec<BackwardProblem<'a>>,
}

fn copy<'a>(from: TensorView<'a>, to: TensorView<'a>, device: &DeviceFacts) -> Dispatch<'a> {
    ElementwiseOp { activation: None, x: from, multiply: None, residual: None }.forward(to, device)
}

impl<'a> NativeSparseProblem<'a> {
    /// The backward pass of a branch. Gradients that are added, and gradients that are not, are
    /// separate problems.
    fn branch_backward(
        &self,
        (results, d_out): (&NativeSparseBranches<'a>, TensorView<'a>),
        branch: usize,
        [k, v]: [TensorView<'a>; 2],
        mask: DeviceMask<'a>,
        gradients: [Option<Written<'a>>; 3],
    ) -> Vec<BackwardProblem<'a>> {
        let shape = Shape { kv_len: k.shape()[2], ..self.shape };
        let rows = [results.out, results.lse, d_out].map(|t| of_branch(t, branch));
        let problem = self.attention_config().backward_problem(shape, [self.q, k, v], rows);
        let of = |adds: bool| {
            let [d_q, d_k, d_v] = gradients.map(|of| of.filter(|of| of.adds == adds).map(|of| of.t));
            let is_empty = [d_q, d_k, d_v].iter().all(Option::is_none);
            (!is_empty).then_some(BackwardProblem { d_q, d_k, d_v, accumulates: adds, mask, ..problem })
        };
        [of(false), of(true)].into_iter().flatten().collect()
    }

    /// The gradients of compressed keys and values: the caller's tensors, or scratch if they are
    /// means.
    fn d_compressed(
        &self,
        gradients: &Gradients<'a>,
        part: &impl Fn(Slot) -> &'a wgpu::Buffer,
    ) -> [Option<Written<'a>>; 2] {
        if self.compressed.is_some() {
            return gradients.separate(gradients.d_compressed);
        }
        self.d_means(gradients).map(|parts| {
            let (slot, shape) = parts?;
            Some(Written { t: in_scratch(part(slot), DType::F32, shape, 0), adds: false })
        })
    }

    /// The slots and shapes of the gradients of means of keys and values, if the call needs them.
    fn d_means(&self, gradients: &Gradients) -> [Option<(Slot, [usize; 4])>; 2] {
        let shape = self.compressed_shape();
        let parts = [
            (gradients.d_k, Slot::CompressedKeyGradients, shape.k()),
            (gradients.d_v, Slot::CompressedValueGradients, shape.v()),
        ];
        parts.map(|(of, slot, shape)| of.filter(|_| self.compressed.is_none()).map(|_| (slot, shape)))
    }

    fn d_branches(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> TensorView<'a> {
        in_scratch(part(Slot::BranchGradients), self.dtype(), self.out_shape(), 0)
    }

    /// The backward passes of the branches, in their order.
    fn passes(
        &self,
        gradients: &Gradients<'a>,
        results: &NativeSparseBranches<'a>,
        part: &impl Fn(Slot) -> &'a wgpu::Buffer,
        device: &DeviceFacts,
    ) -> Result<Passes<'a>, Error> {
        let rows = (results, self.d_branches(part));
        let sums = gradients.sums(part);
        // Sums in scratch have the previous values too.
        let first = sums.map(|sum| Some(Written { t: sum?, adds: gradients.accumulates }));
        let problem =
            self.branch_backward(rows, SELECTED, [self.k, self.v], DeviceMask::causal(), first).pop();
        let selected = problem.map(|mut problem| {
            problem.kernel_options.algorithm = Algorithm::Fused;
            let selection = self.selection(results.indices, device);
            SelectedBackwardProblem::new(selection, problem, false)
        });
        let [d_q, d_k, d_v] = sums.map(|sum| Some(Written { t: sum?, adds: true }));
        let [of_k, of_v] = match self.window {
            None => [d_k, d_v],
            Some(_) => gradients.separate(gradients.d_window),
        };
        let (keys, mask) = (self.window_keys(), self.window_mask());
        let mut others = self.branch_backward(rows, WINDOW, keys, mask, [d_q, of_k, of_v]);
        let [of_k, of_v] = self.d_compressed(gradients, part);
        let (keys, mask) = (self.compressed(part), self.complete_blocks(0)?);
        others.extend(self.branch_backward(rows, COMPRESSED, keys, mask, [d_q, of_k, of_v]));
        Ok(Passes { selected, others })
    }

    /// The temporary memory of a backward call.
    pub fn backward_scratch_size(
        &self,
        gradients: &Gradients<'a>,
        device: &DeviceFacts,
    ) -> Result<ScratchSize, Error> {
        let mut size = ScratchSize::default();
        if !gradients.needs_attention() {
            return Ok(size);
        }
        let any = |_| self.q.buffer;
        let Passes { selected, others } = self.passes(gradients, &self.results(&any), &any, device)?;
        if let Some(selected) = selected {
            size = size.max(selected.scratch_size(device)?);
        }
        for problem in others {
            size = size.max(backward::plan(&problem, device)?.scratch_size());
        }
        size = size.with(Slot::BranchGradients, bytes(self.out_shape(), self.dtype(), device)?);
        for (gradient, slot) in gradients.of_inputs() {
            if let Some(gradient) = gradient.filter(|t| t.dtype() != DType::F32) {
                size = size.with(slot, bytes(gradient.shape(), DType::F32, device)?);
            }
        }
        for (slot, shape) in self.d_means(gradients).into_iter().flatten() {
            size = size.with(slot, bytes(shape, DType::F32, device)?);
        }
        self.with_compressed(size, device)
    }

    /// Writes the gradients of the gates and of the branches' outputs.
    fn d_gates(
        &self,
        gradients: &Gradients<'a>,
        results: &NativeSparseBranches<'a>,
        d_branches: Option<TensorView<'a>>,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let mut all = Dispatches::new();
        for branch in 0..BRANCHES {
            let gate = |t: TensorView<'a>| t.slice(3, branch, 1);
            let product = ElementwiseOp {
                activation: None,
                x: gate(self.gates),
                multiply: Some(of_branch(results.out, branch)),
                residual: None,
            };
            let d_branch = d_branches.map(|t| of_branch(t, branch));
            let d_gate = gradients.d_gates.map(gate);
            // The gradient of a branch is never added.
            let calls = match gradients.accumulates {
                true => vec![(d_gate, None, true), (None, d_branch, false)],
                false => vec![(d_gate, d_branch, false)],
            };
            for (d_gate, d_branch, adds) in calls {
                if d_gate.is_some() || d_branch.is_some() {
                    all.push(product.backward(gradients.d_out, d_gate, d_branch, adds, device));
                }
            }
        }
        all
    }

    /// The dispatches of a backward call.
    pub fn backward(
        &self,
        gradients: &Gradients<'a>,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        scratch.check(self.backward_scratch_size(gradients, device)?)?;
        let part = |slot| scratch.buffer(slot).unwrap_or(self.q.buffer);
        let results = self.results(&part);
        if !gradients.needs_attention() {
            return Ok(self.d_gates(gradients, &results, None, device));
        }
        let mut all = self.d_gates(gradients, &results, Some(self.d_branches(&part)), device);
        let sums = gradients.sums(&part);
        // Gradients whose sums are in scratch.
        let rounded: Vec<_> = gradients
            .of_inputs()
            .into_iter()
            .zip(sums)
            .filter_map(|((gradient, _), sum)| Some((gradient?, sum?)))
            .filter(|(gradient, _)| gradient.dtype() != DType::F32)
            .collect();
        if gradients.accumulates {
            all.extend(rounded.iter().map(|(gradient, sum)| copy(*gradient, *sum, device)));
        }
        all.extend(self.compress(self.compressed(&part), device));
        let Passes { selected, others } = self.passes(gradients, &results, &part, device)?;
        if let Some(selected) = selected {
            all.extend(selected.dispatches(scratch, device)?);
        }
        for problem in others {
            let plans = backward::plan(&problem, device)?;
            all.extend(backward::dispatches(&problem, &plans, plans.memory(scratch)?, device));
        }
        if self.compressed.is_none() {
            let [_, d_k, d_v] = sums;
            for (means, sum) in self.d_compressed(gradients, &part).into_iter().zip([d_k, d_v]) {
                all.extend(means.zip(sum).map(|(means, sum)| self.means(means.t, sum, true, device)));
            }
        }
        all.extend(rounded.iter().map(|(gradient, sum)| copy(*sum, *gradient, device)));
        Ok(all)
    }
}
