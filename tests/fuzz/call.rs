//! The code that all subjects share: it makes a call, handles its outcome, and judges its results.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::{DType, Error, Scratch, ScratchSize};

use crate::arena::{Buf, Window};
use crate::case::widened;
use crate::choices::Choices;
use crate::world::{Outcome, World, refused};

/// The multiply-adds from which on a valid call is not run.
pub const MOST_WORK: f64 = 2e7;

/// Draws a float type.
pub fn float(f: &mut Choices) -> DType {
    if !f.one_in(3) {
        return DType::F32;
    }
    if f.one_in(2) { DType::F16 } else { DType::BF16 }
}

/// Returns three windows for outputs, each in a separate buffer, or all in one.
pub fn outputs(c: &mut Choices, wanted: [(DType, [usize; 4]); 3], aligned: bool) -> [Window; 3] {
    let together = c.one_in(6);
    let mut n = 0;
    wanted.map(|(dtype, shape)| {
        let buf = if together { Buf::OutA } else { Buf::OUTS[n] };
        let mut window = Window::new(c, buf, dtype, shape, aligned);
        if together {
            // Thirds of the buffer, which begin at valid binding offsets.
            window.offset = window.offset % 64 + n * (5120 / dtype.bytes());
        }
        n += 1;
        window
    })
}

/// The way in which a call is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Encoder,
    Pass,
    Prepare,
    /// The encoder is dropped.
    Dropped,
    /// The encoder belongs to another device.
    Foreign,
}

impl How {
    pub fn new(c: &mut Choices) -> Self {
        match c.below(24) {
            0..4 => How::Pass,
            4 | 5 => How::Prepare,
            6 => How::Dropped,
            7 => How::Foreign,
            _ => How::Encoder,
        }
    }
}

/// The scratch that a call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Right,
    None,
    Foreign,
}

impl Memory {
    pub fn new(c: &mut Choices) -> Self {
        match c.below(20) {
            0 => Memory::None,
            1 => Memory::Foreign,
            _ => Memory::Right,
        }
    }

    pub fn scratch(self, world: &World, size: ScratchSize) -> Result<Scratch, Error> {
        match self {
            Memory::Right => Scratch::new(world.device(), size),
            Memory::None => Scratch::new(world.device(), ScratchSize::default()),
            Memory::Foreign => Scratch::new(world.foreign.device(), size),
        }
    }
}

/// Returns the scratch for a call that needs `size`. The scratch is empty if that is too much or
/// the call is refused.
///
/// # Errors
/// The error of the allocation.
pub fn scratch_for(
    world: &World,
    memory: Memory,
    size: &Result<ScratchSize, Error>,
) -> Result<(Memory, Scratch), String> {
    let fits = size.as_ref().is_ok_and(|size| size.total() < 1 << 24);
    let memory = if fits { memory } else { Memory::None };
    let scratch = memory.scratch(world, size.as_ref().copied().unwrap_or_default());
    Ok((memory, scratch.map_err(|e| e.to_string())?))
}

/// If the size of a call is refused, the call must be refused for the same reason.
pub fn refused_alike(size: &Result<ScratchSize, Error>, call: &Result<(), Error>) -> Result<(), String> {
    match (size, call) {
        (Err(size), Err(call)) if size.to_string() != call.to_string() => {
            Err(format!("its scratch size says {size}, the call {call}"))
        }
        (Err(size), Ok(())) => Err(format!("its scratch size says {size}, the call is accepted")),
        _ => Ok(()),
    }
}

/// Draws the number of faults in a call.
pub fn faults(c: &mut Choices) -> usize {
    c.pick(&[0, 0, 0, 1, 1, 1, 2, 3])
}

/// Handles the outcome of a call: submits an accepted one, and checks the state after a refused
/// one.
pub fn settle(
    world: &mut World,
    result: Result<(), Error>,
    encoder: wgpu::CommandEncoder,
    scratch: &mut Scratch,
    all: &[Window],
    writes: &[Window],
    [run, tame]: [bool; 2],
) -> Result<Outcome, String> {
    if let Err(e) = result {
        world.unharmed(encoder, scratch)?;
        return Ok(refused(&e));
    }
    if !run {
        drop(encoder);
        world.works(scratch)?;
        return Ok(Outcome::Accepted);
    }
    if all.iter().any(|w| w.buf.fails()) {
        world.abandon(encoder)?;
        return Ok(Outcome::Accepted);
    }
    world.finish(encoder, writes, tame)?;
    Ok(if tame { Outcome::Judged } else { Outcome::Ran })
}

/// Compares the contents of `window` with the exact result, by twice a naive error and the floor.
pub fn judge(
    what: &str,
    world: &World,
    window: &Window,
    naive: &[f32],
    want: &[f64],
    magnitude: f64,
) -> Result<(), String> {
    let tolerance = Tolerance::from_naive(&widened(naive, window.dtype), want, magnitude, EPSILON_F32);
    judge_within(what, world, window, want, tolerance)
}

/// Compares the contents of `window` with the exact result.
pub fn judge_within(
    what: &str,
    world: &World,
    window: &Window,
    want: &[f64],
    tolerance: Tolerance,
) -> Result<(), String> {
    let got = window.wide::<f64>(&world.arena.after);
    compare(&got, want, tolerance).map_err(|e| format!("{what}: {e}")).map(|_| ())
}

pub fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most, x| x.abs().max(most))
}
