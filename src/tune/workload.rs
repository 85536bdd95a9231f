//! The workloads to tune for.

use std::fmt;

use crate::cache::CacheStorage;
#[cfg(feature = "layers")]
use crate::layers::multi_head::config::{MultiHeadConfig, Side};
use crate::tensor::{DType, Shape};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Attention { shape: Shape, cache: Option<CacheStorage>, masked: bool },
    Products { count: usize, rows: usize, features: usize, dim: usize },
}

/// Calls of one kind, for [`Pipelines::tune`](crate::Pipelines::tune). A workload stands for calls
/// with the same numbers of channels. Their lengths and numbers of heads round up to the same
/// powers of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    pub(super) f16_operands: bool,
}

impl Workload {
    fn new(kind: Kind, dtype: DType) -> Self {
        Workload { kind, dtype, f16_operands: false }
    }

    /// Attention over dense tensors of `dtype` without a mask. [`Shape`] describes their layout.
    pub fn attention(shape: Shape, dtype: DType) -> Self {
        Self::new(Kind::Attention { shape, cache: None, masked: false }, dtype)
    }

    /// Attention of `shape.q_len` queries of `dtype` over a full cache. The cache has `shape.batch`
    /// sequences of `shape.kv_len` tokens.
    pub fn cached(shape: Shape, dtype: DType, storage: CacheStorage) -> Self {
        Self::new(Kind::Attention { shape, cache: Some(storage), masked: false }, dtype)
    }

    /// A linear layer: `rows` of `features`, times a weight of `[dim, features]`, all of `dtype`.
    pub fn product([rows, features, dim]: [usize; 3], dtype: DType) -> Self {
        Self::new(Kind::Products { count: 1, rows, features, dim }, dtype)
    }

    /// The workloads of a self-attention layer over `batch` sequences of `length`. They are the
    /// projections to queries, keys and values, the attention, and the projection of its result.
    #[cfg(feature = "layers")]
    pub fn layer(config: &MultiHeadConfig, batch: usize, length: usize) -> [Self; 3] {
        let rows = batch.saturating_mul(length);
        let [query, key, value] = [Side::Query, Side::Key, Side::Value].map(|side| config.side(side));
        // The three projections together take as long as three of the widest.
        let dim = [&query, &key, &value].map(|side| side.heads * side.dim).into_iter().max().unwrap_or(1);
        let together = Kind::Products { count: 3, rows, features: query.features, dim };
        let width = config.heads.saturating_mul(config.value_dim);
        [
            Self::new(together, config.dtype),
            Self::attention(config.shape(batch, length, length, 0), config.dtype),
            Self::product([rows, width, config.out_features], config.dtype),
        ]
    }

    /// Attention with a mask. It is measured as causal, and the result serves any mask.
    pub fn masked(mut self) -> Self {
        if let Kind::Attention { masked, .. } = &mut self.kind {
            *masked = true;
        }
        self
    }

    /// Permits operands that are rounded to f16: see
    /// [`KernelOptions::f16_operands`](crate::KernelOptions::f16_operands).
    pub fn f16_operands(mut self, allowed: bool) -> Self {
        self.f16_operands = allowed;
        self
    }

    /// Bytes of each tensor of the workload.
    pub(super) fn bytes(&self) -> Vec<u64> {
        let product = |numbers: &[usize]| numbers.iter().fold(1u64, |n, m| n.saturating_mul(*m as u64));
        let of = |elements: u64| elements.saturating_mul(self.dtype.bytes() as u64);
        match self.kind {
            Kind::Attention { shape, cache, .. } => {
                let [q, k, v, out] =
                    [shape.q(), shape.k(), shape.v(), shape.out()].map(|shape| product(&shape));
                let mut all = vec![of(q), of(k), of(v), of(out)];
                if cache.is_some() {
                    // The cache, counted as f32, and the rows that are read back.
                    all.extend([k, v, k, v].map(|n| n.saturating_mul(4)));
                }
                all
            }
            Kind::Products { count, rows, features, dim } => {
                [&[rows, features][..], &[count, dim, features], &[count, rows, dim]]
                    .map(|shape| of(product(shape)))
                    .to_vec()
            }
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.kind {
            Kind::Attention { shape, cache, masked } => {
                let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
                write!(f, "attention {batch}x{heads}({kv_heads})x{q_len}x{kv_len}x{head_dim}({value_dim})")?;
                write!(f, "{}", if masked { " masked" } else { "" })?;
                cache.map_or(Ok(()), |storage| write!(f, " cache {storage:?}"))?;
            }
            Kind::Products { count, rows, features, dim } => {
                write!(f, "{count} of {rows}x{features} by {features}x{dim}")?;
            }
        }
        write!(f, " {:?}{}", self.dtype, if self.f16_operands { " f16 operands" } else { "" })
    }
}
