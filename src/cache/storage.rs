//! The storage of keys and values, and the layout of a sequence's rows.

use crate::device::Family;
use crate::tensor::DType;

/// The format of the stored elements of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StorageKind {
    F32,
    F16,
    BF16,
    Q8,
    E4M3,
    E5M2,
    Q4,
    Gaussian4,
}

impl StorageKind {
    pub const ALL: [StorageKind; 8] = [
        StorageKind::F32,
        StorageKind::F16,
        StorageKind::BF16,
        StorageKind::Q8,
        StorageKind::E4M3,
        StorageKind::E5M2,
        StorageKind::Q4,
        StorageKind::Gaussian4,
    ];

    /// The storage of tensors of a float type.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 => StorageKind::F16,
            DType::BF16 => StorageKind::BF16,
            _ => StorageKind::F32,
        }
    }

    /// Channels of one word.
    pub fn per_word(self) -> usize {
        match self {
            StorageKind::F32 => 1,
            StorageKind::F16 | StorageKind::BF16 => 2,
            StorageKind::Q8 | StorageKind::E4M3 | StorageKind::E5M2 => 4,
            StorageKind::Q4 | StorageKind::Gaussian4 => 8,
        }
    }

    /// The family of the kernels for caches with this storage.
    pub fn family(self) -> Family {
        match self {
            StorageKind::F32 => Family::CacheF32,
            StorageKind::F16 => Family::CacheF16,
            StorageKind::BF16 => Family::CacheBF16,
            StorageKind::Q8 => Family::CacheQ8,
            StorageKind::E4M3 | StorageKind::E5M2 => Family::CacheF8,
            StorageKind::Q4 => Family::CacheQ4,
            StorageKind::Gaussian4 => Family::CacheGaussian4,
        }
    }

    /// True if kernels unpack its numbers plus a bias.
    pub fn is_biased(self) -> bool {
        matches!(self, StorageKind::Q8 | StorageKind::Q4)
    }

    /// True if channels share scales.
    pub fn is_scaled(self) -> bool {
        self as usize >= StorageKind::Q8 as usize
    }
}

/// The layout of a sequence's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LayoutKind {
    Contiguous,
    Ring,
    Paged,
}

impl LayoutKind {
    pub const ALL: [LayoutKind; 3] = [LayoutKind::Contiguous, LayoutKind::Ring, LayoutKind::Paged];
}
