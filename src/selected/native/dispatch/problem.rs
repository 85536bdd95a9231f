//! The tensors of a call, and the parts that forward and backward calls share.

use crate::attention::Config;
use crate::attention::dispatch::{self as attention, Extras, Keys};
use crate::device::DeviceFacts;
use crate::kernel::vec4_grid::Vec4Grid;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, ScratchSize, Slot, Width, fits, in_scratch};
use crate::mask::{DeviceMask, MaskMod};
use crate::selected::dispatch::Selection;
use crate::selected::native::call::NativeSparseBranches;
use crate::selected::native::config::NativeSparseConfig;
use crate::selected::native::kernels::block_means::BlockMeansCall;
use crate::selected::plan::SelectedPlan;
use crate::tensor::{DType, Error, Shape, TensorView, count};

/// The branches of a call.
pub(in crate::selected::native) const BRANCHES: usize = 3;
pub(super) const COMPRESSED: usize = 0;
pub(super) const SELECTED: usize = 1;
pub(super) const WINDOW: usize = 2;

/// A query sees the compressed blocks that are complete at its position.
const COMPLETE_BLOCKS: &str = "struct Uniforms { length: u32, stride: u32, past: u32 }
fn mask_mod(at: At) -> bool {
    return at.key * uniforms().stride + uniforms().length <= at.query + uniforms().past;
}";

/// Checked tensors of a call.
#[derive(Clone, Copy)]
pub(in crate::selected::native) struct NativeSparseProblem<'a> {
    pub shape: Shape,
    pub config: NativeSparseConfig,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    pub gates: TensorView<'a>,
    /// The caller's compressed keys and values.
    pub compressed: Option<[TensorView<'a>; 2]>,
    /// The keys and values of the window, if they are not `k` and `v`.
    pub window: Option<[TensorView<'a>; 2]>,
    pub branches: Option<NativeSparseBranches<'a>>,
}

/// The part of a tensor for a branch.
pub(super) fn of_branch(t: TensorView<'_>, branch: usize) -> TensorView<'_> {
    let batch = t.shape()[0] / BRANCHES;
    t.slice(0, branch * batch, batch)
}

pub(super) fn bytes(shape: [usize; 4], dtype: DType, device: &DeviceFacts) -> Result<u64, Error> {
    fits(count(shape) as u64, dtype.bytes() as u64, device)
}

impl<'a> NativeSparseProblem<'a> {
    pub fn attention_config(&self) -> &Config {
        &self.config.attention
    }

    pub fn dtype(&self) -> DType {
        self.config.attention.dtype
    }

    pub fn kernel_options(&self) -> KernelOptions {
        self.config.attention.kernel_options
    }

    /// The position of the first query.
    pub fn first_position(&self) -> usize {
        self.shape.kv_len - self.shape.q_len
    }

    /// The shape of attention to the compressed keys.
    pub fn compressed_shape(&self) -> Shape {
        Shape { kv_len: self.config.compressed_len(self.shape.kv_len), ..self.shape }
    }

    /// The shape of a tensor with rows of `dim` channels for all branches.
    pub fn branch_shape(&self, dim: usize) -> [usize; 4] {
        [BRANCHES * self.shape.batch, self.shape.heads, self.shape.q_len, dim]
    }

    pub fn out_shape(&self) -> [usize; 4] {
        self.branch_shape(self.shape.value_dim)
    }

    pub fn indices_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.kv_heads, self.shape.q_len, self.config.count]
    }

    /// The results of the branches: the caller's tensors, or scratch.
    pub fn results(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> NativeSparseBranches<'a> {
        self.branches.unwrap_or_else(|| NativeSparseBranches {
            out: in_scratch(part(Slot::BranchOutputs), self.dtype(), self.out_shape(), 0),
            lse: in_scratch(part(Slot::BranchLse), DType::F32, self.branch_shape(1), 0),
            indices: in_scratch(part(Slot::BlockIndices), DType::U32, self.indices_shape(), 0),
        })
    }

    /// The compressed keys and values: the caller's tensors, or scratch.
    pub fn compressed(&self, part: &impl Fn(Slot) -> &'a wgpu::Buffer) -> [TensorView<'a>; 2] {
        let shape = self.compressed_shape();
        self.compressed.unwrap_or_else(|| {
            let of = |slot, shape| in_scratch(part(slot), self.dtype(), shape, 0);
            [of(Slot::CompressedKeys, shape.k()), of(Slot::CompressedValues, shape.v())]
        })
    }

    /// Adds the memory of compressed keys and values, unless the caller has them.
    pub fn with_compressed(&self, size: ScratchSize, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        if self.compressed.is_some() {
            return Ok(size);
        }
        let (shape, dtype) = (self.compressed_shape(), self.dtype());
        Ok(size
            .with(Slot::CompressedKeys, bytes(shape.k(), dtype, device)?)
            .with(Slot::CompressedValues, bytes(shape.v(), dtype, device)?))
    }

    /// Writes the compressed keys and values, unless the caller has them.
    pub fn compress(&self, to: [TensorView<'a>; 2], device: &DeviceFacts) -> Dispatches<'a> {
        if self.compressed.is_some() {
            return Dispatches::new();
        }
        [(self.k, to[0]), (self.v, to[1])].map(|(x, out)| self.means(x, out, false, device)).into()
    }

    /// Writes means of blocks to `out`. With `backward` it adds the gradient of the rows instead.
    pub fn means(
        &self,
        x: TensorView<'a>,
        out: TensorView<'a>,
        backward: bool,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let NativeSparseConfig { length, stride, .. } = self.config;
        let grid = Vec4Grid::of(out.shape(), device);
        let call = BlockMeansCall {
            x,
            out,
            terms: x.shape()[2] as u32,
            length: length as u32,
            stride: stride as u32,
            dim: out.shape()[3] as u32,
            fours: grid.in_row,
            work: grid.in_head,
            step: grid.step,
            scale: 1.0 / length as f32,
            backward,
            width: Width::of_rows(&[x, out]),
        };
        call.dispatch(grid.workgroups, device)
    }

    /// The mask of compressed keys for queries from `first` on.
    pub fn complete_blocks(&self, first: usize) -> Result<DeviceMask<'a>, Error> {
        let past = self.first_position() + first + 1;
        let words = [self.config.length, self.config.stride, past].map(|n| n as u32);
        let complete = MaskMod::new(COMPLETE_BLOCKS)?.uniforms(bytemuck::cast_slice(&words));
        Ok(DeviceMask::none().mask_mod(complete))
    }

    pub fn window_mask(&self) -> DeviceMask<'a> {
        DeviceMask::causal().window(self.config.window - 1, 0)
    }

    /// The keys and values of the window.
    pub fn window_keys(&self) -> [TensorView<'a>; 2] {
        self.window.unwrap_or([self.k, self.v])
    }

    pub fn selection(&self, indices: TensorView<'a>, device: &DeviceFacts) -> Selection<'a> {
        let NativeSparseConfig { block, count, .. } = self.config;
        let plan = SelectedPlan::new(self.shape, [self.shape.kv_heads, count], [block, 0], device);
        let cpu = self.kernel_options().target.is_cpu(device);
        Selection { indices, mask: DeviceMask::causal(), layer: None, plan, cpu }
    }

    /// The attention of a branch.
    pub fn attention(
        &self,
        results: &NativeSparseBranches<'a>,
        branch: usize,
        [k, v]: [TensorView<'a>; 2],
        mask: DeviceMask<'a>,
    ) -> attention::Problem<'a> {
        let extras = Extras {
            out: of_branch(results.out, branch),
            mask,
            appended: 0,
            lse: Some(of_branch(results.lse, branch)),
            weights: None,
            scores: None,
            dropout: None,
        };
        self.attention_config().problem(self.shape, self.q, Keys::Tensors { k, v }, extras)
    }
}
