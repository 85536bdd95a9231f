//! Kernels that are right or wrong together on a device.

use std::fmt;

/// Kernels that have a way of working in common, and that plans can do without where a device gets it wrong.
///
/// See [`Pipelines::check`](crate::Pipelines::check).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Family {
    /// Attention on matrix units. Without it: the fused kernels.
    MatrixAttention,
    /// Projections on matrix units. Without it: the products.
    MatrixProducts,
    /// Gradients of attention on matrix units. Without it: the other forms.
    MatrixGradients,
    /// Sums by subgroup shuffles, where few queries meet many keys. Without it: sums through workgroup memory.
    SubgroupReductions,
    /// Keys shared out among workgroups, and the merge of what those found. Without it: one workgroup for all keys of a tile.
    SplitKeys,
    /// Attention of few queries, in the form for GPUs. Without it: the fused kernels.
    DecodeGpu,
    /// Attention of few queries over packed keys, in the form for software drivers. Without it: the fused kernels.
    DecodeCpu,
    /// Caches of F32. Without it: refused, as are the other four.
    CacheF32,
    /// Caches of F16.
    CacheF16,
    /// Caches of BF16.
    CacheBF16,
    /// Caches of 8 bits.
    CacheQ8,
    /// Caches of 4 bits.
    CacheQ4,
    /// Tensors of F16. Without it: refused.
    F16Tensors,
    /// Tensors of BF16. Without it: refused.
    BF16Tensors,
    /// Attention in one pass, in the form for GPUs. Without it: the other form, then the stages.
    FusedGpu,
    /// Attention in one pass, in the form for software drivers. Without it: the other form, then the stages.
    FusedCpu,
    /// Scores, softmax and weighted sum, in the form for GPUs. Without it: the other form, then the fused kernels.
    StagedGpu,
    /// Scores, softmax and weighted sum, in the form for software drivers. Without it: the other form, then the fused kernels.
    StagedCpu,
    /// Projections, in the form for GPUs. Without it: the other form.
    ProductsGpu,
    /// Projections, in the form for software drivers. Without it: the other form.
    ProductsCpu,
    /// Gradients of keys and of values in one dispatch. Without it: a dispatch each.
    JointGradients,
    /// Gradients of queries, keys and values, in the form for GPUs. Without it: the other form.
    GradientsGpu,
    /// Gradients of queries, keys and values, in the form for software drivers. Without it: the other form.
    GradientsCpu,
    /// Gradients of biases, slopes, relative tables and sinks. Without it: refused.
    ScoreGradients,
    /// What all gradients of attention take of each query. Without it: refused, as is all that is made of it.
    RowStats,
    /// Gradients of projections' inputs and weights, in the form for GPUs. Without it: the other form.
    ProductGradientsGpu,
    /// Gradients of projections' inputs and weights, in the form for software drivers. Without it: the other form.
    ProductGradientsCpu,
    /// Gradients that are sums over rows: of projections' biases and of learned positions. Without it: refused.
    RowSums,
}

impl Family {
    /// All of them, those that build on others first.
    pub const ALL: [Family; 28] = [
        Family::MatrixAttention,
        Family::MatrixProducts,
        Family::MatrixGradients,
        Family::SubgroupReductions,
        Family::SplitKeys,
        Family::DecodeGpu,
        Family::DecodeCpu,
        Family::CacheF32,
        Family::CacheF16,
        Family::CacheBF16,
        Family::CacheQ8,
        Family::CacheQ4,
        Family::F16Tensors,
        Family::BF16Tensors,
        Family::FusedGpu,
        Family::FusedCpu,
        Family::StagedGpu,
        Family::StagedCpu,
        Family::ProductsGpu,
        Family::ProductsCpu,
        Family::JointGradients,
        Family::GradientsGpu,
        Family::GradientsCpu,
        Family::ScoreGradients,
        Family::RowStats,
        Family::ProductGradientsGpu,
        Family::ProductGradientsCpu,
        Family::RowSums,
    ];

    /// True if a call can be computed without the family.
    pub(crate) fn is_replaced(self) -> bool {
        use Family::*;
        !matches!(
            self,
            CacheF32
                | CacheF16
                | CacheBF16
                | CacheQ8
                | CacheQ4
                | F16Tensors
                | BF16Tensors
                | ScoreGradients
                | RowStats
                | RowSums
        )
    }

    fn name(self) -> &'static str {
        match self {
            Family::MatrixAttention => "attention on matrix units",
            Family::MatrixProducts => "projections on matrix units",
            Family::MatrixGradients => "gradients on matrix units",
            Family::SubgroupReductions => "subgroup reductions",
            Family::SplitKeys => "split keys",
            Family::DecodeGpu => "decode, GPU form",
            Family::DecodeCpu => "decode, CPU form",
            Family::CacheF32 => "caches of F32",
            Family::CacheF16 => "caches of F16",
            Family::CacheBF16 => "caches of BF16",
            Family::CacheQ8 => "caches of Q8",
            Family::CacheQ4 => "caches of Q4",
            Family::F16Tensors => "tensors of F16",
            Family::BF16Tensors => "tensors of BF16",
            Family::FusedGpu => "fused, GPU form",
            Family::FusedCpu => "fused, CPU form",
            Family::StagedGpu => "staged, GPU form",
            Family::StagedCpu => "staged, CPU form",
            Family::ProductsGpu => "projections, GPU form",
            Family::ProductsCpu => "projections, CPU form",
            Family::JointGradients => "gradients of keys and values at once",
            Family::GradientsGpu => "gradients, GPU form",
            Family::GradientsCpu => "gradients, CPU form",
            Family::ScoreGradients => "gradients of masks",
            Family::RowStats => "gradients, totals of queries",
            Family::ProductGradientsGpu => "gradients of projections, GPU form",
            Family::ProductGradientsCpu => "gradients of projections, CPU form",
            Family::RowSums => "gradients, sums over rows",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Kernels that there are in two forms: for GPUs, then for software drivers.
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
pub(crate) struct Families(u32);

impl Families {
    pub const NONE: Families = Families(0);

    pub const fn from_bits(bits: u32) -> Self {
        Families(bits)
    }

    pub const fn bits(self) -> u32 {
        self.0
    }

    pub const fn with(self, family: Family) -> Self {
        Families(self.0 | 1 << family as u32)
    }

    pub const fn without(self, family: Family) -> Self {
        Families(self.0 & !(1 << family as u32))
    }

    pub const fn contains(self, family: Family) -> bool {
        self.0 & 1 << family as u32 != 0
    }

    /// Those that build on others first.
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
        assert_eq!(all.bits().count_ones() as usize, Family::ALL.len());
        for family in Family::ALL {
            let others = all.without(family);
            assert!(!others.contains(family) && others.with(family) == all, "{family}");
            assert_eq!(others.iter().count(), Family::ALL.len() - 1);
        }
        assert!(Family::ALL.is_sorted());
    }
}
