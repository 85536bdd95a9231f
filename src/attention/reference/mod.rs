//! The reference implementation of attention.

pub(crate) mod additive;
pub(crate) mod attention;
pub(crate) mod backward;
pub(crate) mod block_sums;
pub(crate) mod heads;
pub(crate) mod mask;
pub(crate) mod options;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod weighted_sum;
