//! Kernel variants, typed and type-erased.

use std::any::Any;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::Kernel;
use crate::device::{Families, Family};
use crate::tensor::DType;

/// A variant of one kernel: everything that changes its text.
pub(crate) trait Variant: fmt::Debug + Eq + Hash + Send + Sync + 'static {
    /// The label of its pipelines: `attention.` and the stem of its shader.
    const LABEL: &'static str;

    /// The families of all variants, if these are the same. A test in `kernel_list.rs` requires a
    /// family for every variant.
    const FAMILIES: Families = Families::NONE;

    /// Returns the kernel of this variant: its text, and its properties for the host. Called for
    /// each new pipeline, and for new bindings that use a buffer twice.
    fn describe(&self) -> Kernel;

    /// The families of this variant.
    fn families(&self) -> Families {
        Self::FAMILIES
    }

    /// Variants that cover each value of each axis, for tools and tests. They are not the product
    /// of all axes.
    #[cfg_attr(not(feature = "inspect"), allow(dead_code))]
    fn all() -> impl IntoIterator<Item = Self>
    where
        Self: Sized;
}

/// Returns these families. If `dtypes` contains F16 or BF16, the family of kernels with such
/// tensors is added.
pub(crate) fn families(families: &[Option<Family>], dtypes: &[DType]) -> Families {
    let tensors = [(DType::F16, Family::F16Tensors), (DType::BF16, Family::BF16Tensors)];
    let used = tensors.map(|(dtype, family)| dtypes.contains(&dtype).then_some(family));
    families.iter().chain(&used).flatten().copied().collect()
}

/// A variant of any kernel. It is the key of its pipeline.
#[derive(Clone)]
pub(crate) struct KernelVariant(Arc<dyn Erased>);

/// A [`Variant`] of unknown type.
trait Erased: Any + fmt::Debug + Send + Sync {
    fn label(&self) -> &'static str;
    fn describe(&self) -> Kernel;
    fn families(&self) -> Families;
    fn equals(&self, other: &dyn Any) -> bool;
    fn hash(&self, state: &mut dyn Hasher);
}

impl<V: Variant> Erased for V {
    fn label(&self) -> &'static str {
        V::LABEL
    }

    fn describe(&self) -> Kernel {
        Variant::describe(self)
    }

    fn families(&self) -> Families {
        Variant::families(self)
    }

    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<V>() == Some(self)
    }

    fn hash(&self, mut state: &mut dyn Hasher) {
        Hash::hash(self, &mut state);
    }
}

impl KernelVariant {
    pub fn new(variant: impl Variant) -> Self {
        KernelVariant(Arc::new(variant))
    }

    /// The label of its pipeline.
    pub fn label(&self) -> &'static str {
        self.0.label()
    }

    /// Returns the kernel of this variant.
    pub fn describe(&self) -> Kernel {
        self.0.describe()
    }

    /// The families of this variant.
    pub fn families(&self) -> Families {
        self.0.families()
    }
}

impl PartialEq for KernelVariant {
    fn eq(&self, other: &Self) -> bool {
        let other: &dyn Any = &*other.0;
        self.0.equals(other)
    }
}

impl Eq for KernelVariant {}

impl Hash for KernelVariant {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.label().hash(state);
        self.0.hash(state);
    }
}

impl fmt::Debug for KernelVariant {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(f)
    }
}
