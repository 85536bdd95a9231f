//! Families of kernels: the kernels of a family are right or wrong together on a device.

use std::fmt;

/// The families: variant, name, and true if other kernels replace the family.
macro_rules! families {
    ($($(#[$doc:meta])* $family:ident: $name:literal, $replaced:literal;)*) => {
        /// Kernels that are disabled together on a device that computes them wrongly. Every kernel
        /// belongs to a family.
        ///
        /// Plans avoid a disabled family if other kernels replace it. Nothing replaces the families
        /// of operators, from [`RadixSort`](Self::RadixSort) on: calls that need them are refused.
        /// See [`Pipelines::check`](crate::Pipelines::check).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Family {
            $($(#[$doc])* $family,)*
        }

        impl Family {
            /// All families. A family comes before the families that it uses.
            pub const ALL: [Family; [$($name),*].len()] = [$(Family::$family),*];

            /// True if a call can be computed without the family.
            pub(crate) const fn is_replaced(self) -> bool {
                match self {
                    $(Family::$family => $replaced,)*
                }
            }

            fn name(self) -> &'static str {
                match self {
                    $(Family::$family => $name,)*
                }
            }
        }
    };
}

families! {
    /// Attention on matrix units. Without it: the fused kernels.
    MatrixAttention: "attention on matrix units", true;
    /// Projections on matrix units. Without it: the products.
    MatrixProducts: "projections on matrix units", true;
    /// Gradients of attention on matrix units. Without it: the other variants.
    MatrixGradients: "gradients on matrix units", true;
    /// Sums by subgroup shuffles, where few queries meet many keys. Without it: sums through
    /// workgroup memory.
    SubgroupReductions: "subgroup reductions", true;
    /// Keys split among workgroups, and the merge of their results. Without it: one workgroup for
    /// all keys of a tile.
    SplitKeys: "split keys", true;
    /// Attention of few queries, GPU variant. Without it: the fused kernels.
    DecodeGpu: "decode, GPU variant", true;
    /// Attention of few queries over packed keys, the variant for software drivers. Without it: the
    /// fused kernels.
    DecodeCpu: "decode, CPU variant", true;
    /// Caches of F32. Without it: refused, as for the other storages.
    CacheF32: "F32 caches", false;
    /// Caches of F16.
    CacheF16: "F16 caches", false;
    /// Caches of BF16.
    CacheBF16: "BF16 caches", false;
    /// Caches of 8 bits.
    CacheQ8: "Q8 caches", false;
    /// Caches of 4 bits.
    CacheQ4: "Q4 caches", false;
    /// Caches of E4M3 and E5M2.
    CacheF8: "8-bit float caches", false;
    /// Caches of Gaussian4.
    CacheGaussian4: "Gaussian4 caches", false;
    /// Tensors of F16. Without it: refused.
    F16Tensors: "F16 tensors", false;
    /// Tensors of BF16. Without it: refused.
    BF16Tensors: "BF16 tensors", false;
    /// Attention in one pass, GPU variant. Without it: the other variant, then the staged kernels.
    FusedGpu: "fused attention, GPU variant", true;
    /// Attention in one pass, the variant for software drivers. Without it: the other variant, then
    /// the staged kernels.
    FusedCpu: "fused attention, CPU variant", true;
    /// Scores, softmax and weighted sum, GPU variant. Without it: the other variant, then the fused
    /// kernels.
    StagedGpu: "staged attention, GPU variant", true;
    /// Scores, softmax and weighted sum, the variant for software drivers. Without it: the other
    /// variant, then the fused kernels.
    StagedCpu: "staged attention, CPU variant", true;
    /// Projections, GPU variant. Without it: the other variant.
    ProductsGpu: "projections, GPU variant", true;
    /// Projections, the variant for software drivers. Without it: the other variant.
    ProductsCpu: "projections, CPU variant", true;
    /// Projections of few rows, GPU variant. Without it: the products.
    FewRowProducts: "projections of few rows", true;
    /// Gradients of keys and values in one dispatch. Without it: one dispatch each.
    JointGradients: "joint gradients of keys and values", true;
    /// Gradients of queries, keys and values, GPU variant. Without it: the other variant.
    GradientsGpu: "gradients, GPU variant", true;
    /// Gradients of queries, keys and values, the variant for software drivers. Without it: the
    /// other variant.
    GradientsCpu: "gradients, CPU variant", true;
    /// Gradients of biases, slopes, relative tables and sinks. Without it: refused.
    ScoreGradients: "gradients of masks", false;
    /// The per-query totals that all gradients of attention read. Without it: refused, as are all
    /// gradients that use it.
    RowStats: "gradients, totals per query", false;
    /// Gradients of projections' inputs and weights, GPU variant. Without it: the other variant.
    ProductGradientsGpu: "gradients of projections, GPU variant", true;
    /// Gradients of projections' inputs and weights, the variant for software drivers. Without it:
    /// the other variant.
    ProductGradientsCpu: "gradients of projections, CPU variant", true;
    /// Gradients that are sums over rows: projections' biases and learned positions. Without it:
    /// refused.
    RowSums: "gradients, sums over rows", false;
    /// Sorting. Gradients of embeddings and LSH attention need it too.
    RadixSort: "sorting", false;
    /// Indices of the largest elements of rows.
    TopK: "top-k", false;
    /// Logarithms of softmaxes.
    LogSoftmax: "log-softmax", false;
    /// Gradients of log-softmax.
    LogSoftmaxGradients: "gradients of log-softmax", false;
    /// LayerNorm and RMSNorm.
    Norms: "norms", false;
    /// Gradients of norms.
    NormGradients: "gradients of norms", false;
    /// Activations, gates and residual sums.
    Elementwise: "elementwise", false;
    /// Gradients of elementwise calls.
    ElementwiseGradients: "elementwise gradients", false;
    /// Look-ups in tables of embeddings.
    Embeddings: "embeddings", false;
    /// Gradients of embedding tables.
    EmbeddingGradients: "gradients of embeddings", false;
    /// Means of rows.
    MeanPools: "mean pools", false;
    /// Gradients of means of rows.
    MeanPoolGradients: "gradients of mean pools", false;
    /// Causal convolutions.
    CausalConvs: "causal convolutions", false;
    /// Gradients of causal convolutions.
    CausalConvGradients: "gradients of causal convolutions", false;
    /// Lists of the keys of queries, and the weights of indices.
    SelectedKeys: "selected keys", false;
    /// Sums of the gradients of keys over the queries that select them.
    SelectedGradients: "gradients of selected keys", false;
    /// Means and scores of blocks, and gated sums, of native sparse attention.
    NativeSparse: "native sparse attention", false;
    /// Weight norms.
    WeightNorms: "weight norms", false;
    /// Gradients of weight norms.
    WeightNormGradients: "gradients of weight norms", false;
    /// Rotary embedding, and its gradient.
    Rotations: "rotations", false;
    /// Sums with the encoding of positions.
    Positions: "sums with positions", false;
    /// Products with quantized weights, and look-ups in them.
    QuantizedProducts: "quantized products", false;
    /// Block maps, and the comparison of a device mask with a host mask.
    Masks: "masks", false;
    /// Lengths of a cache's sequences, for any storage.
    CacheLengths: "cache lengths", false;
    /// Copies of a cache's pages, and exchanges of sequences.
    CacheCopies: "cache copies", false;
    /// Products of rows with Walsh–Hadamard matrices, for caches that store such products.
    Hadamard: "Walsh–Hadamard products", false;
    /// Scores and mean weights as outputs.
    ScoreOutputs: "score outputs", false;
    /// Keys and values that a layer appends.
    AppendedKeys: "appended keys", false;
    /// Merges of attention over disjoint keys.
    Merges: "merges", false;
    /// Gradients of merges.
    MergeGradients: "gradients of merges", false;
    /// Linear attention in chunks of tokens.
    LinearAttention: "linear attention", false;
    /// Linear attention token by token.
    LinearRecurrence: "linear attention, token by token", false;
    /// Gradients of linear attention.
    LinearGradients: "gradients of linear attention", false;
    /// Recurrent attention: linear attention with decays, and the delta rules.
    Recurrence: "recurrent attention", false;
    /// Gradients of recurrent attention.
    RecurrenceGradients: "gradients of recurrent attention", false;
    /// Scores of indexers, which select keys.
    Indexers: "indexers", false;
    /// Gradients of indexers.
    IndexerGradients: "gradients of indexers", false;
    /// Local attention, and predicted positions.
    LocalAttention: "local attention", false;
    /// Gradients of local attention, and of predicted positions.
    LocalGradients: "gradients of local attention", false;
    /// Linformer with a key mask.
    AbsentRows: "Linformer with a key mask", false;
    /// Attention to tokens with equal hashes.
    Lsh: "LSH attention", false;
    /// Gradients of LSH attention.
    LshGradients: "gradients of LSH attention", false;
    /// Attentional vectors.
    Attentional: "attentional vectors", false;
    /// Gradients of attentional vectors.
    AttentionalGradients: "gradients of attentional vectors", false;
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Families with two variants: for GPUs, then for software drivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TwoForms {
    pub gpu: Family,
    pub cpu: Family,
}

pub(crate) const FUSED: TwoForms = TwoForms { gpu: Family::FusedGpu, cpu: Family::FusedCpu };
pub(crate) const STAGED: TwoForms = TwoForms { gpu: Family::StagedGpu, cpu: Family::StagedCpu };
pub(crate) const PRODUCTS: TwoForms = TwoForms { gpu: Family::ProductsGpu, cpu: Family::ProductsCpu };
pub(crate) const GRADIENTS: TwoForms = TwoForms { gpu: Family::GradientsGpu, cpu: Family::GradientsCpu };
pub(crate) const PRODUCT_GRADIENTS: TwoForms =
    TwoForms { gpu: Family::ProductGradientsGpu, cpu: Family::ProductGradientsCpu };

impl TwoForms {
    pub fn of(self, cpu: bool) -> Family {
        if cpu { self.cpu } else { self.gpu }
    }
}

/// A set of families.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Families(u128);

impl Families {
    pub const NONE: Families = Families(0);

    /// The families that nothing replaces.
    pub const IRREPLACEABLE: Families = {
        let (mut all, mut n) = (Families::NONE, 0);
        while n < Family::ALL.len() {
            if !Family::ALL[n].is_replaced() {
                all = all.with(Family::ALL[n]);
            }
            n += 1;
        }
        all
    };

    pub const fn of(family: Family) -> Self {
        Families::NONE.with(family)
    }

    pub fn from_words(words: [u64; 2]) -> Self {
        Families(u128::from(words[0]) | u128::from(words[1]) << 64)
    }

    pub fn words(self) -> [u64; 2] {
        [self.0 as u64, (self.0 >> 64) as u64]
    }

    pub const fn with(self, family: Family) -> Self {
        Families(self.0 | 1 << family as u128)
    }

    pub const fn without(self, family: Family) -> Self {
        Families(self.0 & !(1 << family as u128))
    }

    pub const fn contains(self, family: Family) -> bool {
        self.0 & 1 << family as u128 != 0
    }

    /// The families that are in both sets.
    pub const fn and(self, other: Families) -> Self {
        Families(self.0 & other.0)
    }

    /// Iterates over the families. A family comes before the families that it uses.
    pub fn iter(self) -> impl Iterator<Item = Family> {
        Family::ALL.into_iter().filter(move |family| self.contains(*family))
    }
}

impl FromIterator<Family> for Families {
    fn from_iter<I: IntoIterator<Item = Family>>(families: I) -> Self {
        families.into_iter().fold(Families::NONE, Families::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_each_family_once() {
        let all: Families = Family::ALL.into_iter().collect();
        assert_eq!(all.iter().collect::<Vec<_>>(), Family::ALL);
        assert_eq!(all.0.count_ones() as usize, Family::ALL.len());
        for family in Family::ALL {
            let others = all.without(family);
            assert!(!others.contains(family) && others.with(family) == all, "{family}");
            assert_eq!(others.iter().count(), Family::ALL.len() - 1);
        }
        assert!(Family::ALL.is_sorted());
    }
}
