//! The dispatches of a call: chunk by chunk, or token by token.

mod backward;
mod builder;
mod forward;
mod problem;
mod step;

use builder::Builder;
pub(crate) use problem::{FEW, Gradients, Problem};

use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch};
use crate::tensor::Error;

/// Returns the dispatches of a call.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    scratch: &'a Scratch,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    scratch.check(problem.scratch_size(device)?)?;
    let mut all = Dispatches::new();
    for group in problem.groups() {
        let part = problem.part(group);
        let mut builder = Builder::new(&part, scratch, device)?;
        match part.gradients {
            _ if part.is_step() => builder.step(),
            Some(gradients) => builder.backward(&gradients),
            None => builder.forward(),
        }
        all.extend(builder.all);
    }
    Ok(all)
}
