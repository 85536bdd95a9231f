//! The dispatches of a call, from checked tensors.

mod backward;
mod forward;
mod problem;

pub(super) use backward::Gradients;
pub(super) use problem::{BRANCHES, NativeSparseProblem};
