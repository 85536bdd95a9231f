//! The tensors of a call: inputs, outputs, and their checks.

use std::fmt;

use wgpu_attention::reference::Real;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::{DType, Error, Scratch, ScratchSize, TensorView};

use crate::arena::{BYTES, Buf, Window, view};
use crate::call::{Memory, faults, judge, judge_within, largest, refused_alike, scratch_for, settle};
use crate::case::widened;
use crate::choices::Choices;
use crate::gradients::at;
use crate::world::{Outcome, World};

/// The number of a window's elements up to which a call is run.
const MOST: usize = 4000;

/// A tensor, if the case has it.
pub type Wanted = (bool, DType, [usize; 4]);

/// Records a call in the encoder's pass or in the caller's.
macro_rules! record {
    ($operator:expr, $forward:ident, $call:expr) => {
        |encoder: &mut wgpu::CommandEncoder, scratch: &mut wgpu_attention::Scratch, pass: bool| match pass {
            true => $operator.$forward(&mut encoder.begin_compute_pass(&Default::default()), $call, scratch),
            false => $operator.$forward(encoder, $call, scratch),
        }
    };
}

/// The same for an operator without scratch.
macro_rules! record_plain {
    ($operator:expr, $forward:ident, $call:expr) => {
        |encoder: &mut wgpu::CommandEncoder, pass: bool| match pass {
            true => $operator.$forward(&mut encoder.begin_compute_pass(&Default::default()), $call),
            false => $operator.$forward(encoder, $call),
        }
    };
}

pub(crate) use {record, record_plain};

/// Windows in the order of the request.
pub struct Operands {
    reads: Vec<Option<Window>>,
    writes: Vec<Option<Window>>,
    accumulates: bool,
    buffers: Vec<wgpu::Buffer>,
}

impl fmt::Debug for Operands {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Operands { reads, writes, accumulates, .. } = self;
        write!(f, "{reads:?} to {writes:?}, accumulates {accumulates}")
    }
}

/// The places of outputs, each with half a buffer.
const PLACES: [(Buf, usize); 6] = [
    (Buf::OutA, 0),
    (Buf::OutB, 0),
    (Buf::OutC, 0),
    (Buf::OutB, BYTES / 2),
    (Buf::OutC, BYTES / 2),
    (Buf::OutA, BYTES / 2),
];

impl Operands {
    /// Places inputs anywhere, and outputs apart from each other.
    pub fn new(world: &World, c: &mut Choices, reads: &[Wanted], writes: &[Wanted]) -> Self {
        let input = |c: &mut Choices, dtype, shape| Window::input(c, dtype, shape, false);
        let output = |c: &mut Choices, n: usize, dtype, shape| at(c, PLACES[n], dtype, shape, false);
        Self::placed(world, c, reads, writes, (false, input, output))
    }

    /// Like [`new`](Self::new), for a call that may add to its outputs. With `accumulates`, F32
    /// outputs are placed over numbers.
    pub fn gradients(
        world: &World,
        c: &mut Choices,
        accumulates: bool,
        reads: &[Wanted],
        writes: &[Wanted],
    ) -> Self {
        if !accumulates {
            return Self::new(world, c, reads, writes);
        }
        let input = |c: &mut Choices, dtype, shape| {
            let mut window = Window::input(c, dtype, shape, false);
            if window.buf == Buf::FloatsB {
                window.buf = Buf::FloatsA;
            }
            window
        };
        let each = BYTES / writes.len().max(1) / 256 * 256;
        let output = |c: &mut Choices, n: usize, dtype, shape| match dtype {
            DType::F32 => at(c, (Buf::FloatsB, n * each), dtype, shape, false),
            _ => at(c, PLACES[n], dtype, shape, false),
        };
        Self::placed(world, c, reads, writes, (true, input, output))
    }

    fn placed(
        world: &World,
        c: &mut Choices,
        reads: &[Wanted],
        writes: &[Wanted],
        (accumulates, input, output): (
            bool,
            impl Fn(&mut Choices, DType, [usize; 4]) -> Window,
            impl Fn(&mut Choices, usize, DType, [usize; 4]) -> Window,
        ),
    ) -> Self {
        let reads =
            reads.iter().map(|(wanted, dtype, shape)| wanted.then(|| input(c, *dtype, *shape))).collect();
        let writes = writes.iter().enumerate();
        let writes =
            writes.map(|(n, (wanted, dtype, shape))| wanted.then(|| output(c, n, *dtype, *shape))).collect();
        Operands { reads, writes, accumulates, buffers: world.arena.buffers.clone() }
    }

    /// Spoils some of the windows, or none.
    pub fn spoil(&mut self, c: &mut Choices) {
        for _ in 0..faults(c) {
            let mut all: Vec<_> = self.reads.iter_mut().chain(&mut self.writes).flatten().collect();
            let n = c.below(all.len());
            all[n].spoil(c);
        }
    }

    /// Input `n`, if there is one.
    pub fn given(&self, n: usize) -> Option<TensorView<'_>> {
        self.reads[n].as_ref().map(|w| view(&self.buffers, w))
    }

    /// Returns input `n`, which must exist.
    pub fn read(&self, n: usize) -> TensorView<'_> {
        view(&self.buffers, self.input(n))
    }

    pub fn input(&self, n: usize) -> &Window {
        self.reads[n].as_ref().expect("an input of every case")
    }

    pub fn input_mut(&mut self, n: usize) -> &mut Window {
        self.reads[n].as_mut().expect("an input of every case")
    }

    pub fn output(&self, n: usize) -> &Window {
        self.writes[n].as_ref().expect("an output of every case")
    }

    /// Output `n`, if there is one.
    pub fn asked(&self, n: usize) -> Option<TensorView<'_>> {
        self.writes[n].as_ref().map(|w| view(&self.buffers, w))
    }

    /// Returns output `n`, which must exist.
    pub fn written(&self, n: usize) -> TensorView<'_> {
        view(&self.buffers, self.output(n))
    }

    /// Returns the elements of input `n`.
    pub fn wide<R: Real>(&self, world: &World, n: usize) -> Vec<R> {
        self.input(n).wide(&world.arena.before)
    }

    /// Returns the elements of input `n`, if there is one.
    pub fn wide_if<R: Real>(&self, world: &World, n: usize) -> Option<Vec<R>> {
        self.reads[n].map(|w| w.wide(&world.arena.before))
    }

    /// Returns the largest absolute value of input `n`, or 0 without elements.
    pub fn most(&self, world: &World, n: usize) -> f64 {
        self.wide_if::<f64>(world, n).map_or(0.0, |x| largest(&x))
    }

    /// True if results can be judged.
    fn is_tame(&self) -> bool {
        let numbers = |w: &Window| !self.accumulates || w.is_tame();
        self.reads.iter().flatten().all(Window::is_tame)
            && self.writes.iter().flatten().all(|w| w.is_watched() && numbers(w))
    }

    fn all(&self) -> Vec<Window> {
        self.reads.iter().chain(&self.writes).flatten().copied().collect()
    }

    /// Makes the scratch for a call, which also reads `others`, records the call and handles its
    /// outcome. `judged` tells if its results are judged, provided that its tensors permit it.
    pub fn recorded(
        &self,
        world: &mut World,
        c: &mut Choices,
        size: Result<ScratchSize, Error>,
        (judged, others): (bool, &[Window]),
        record: impl FnOnce(&mut wgpu::CommandEncoder, &mut Scratch, bool) -> Result<(), Error>,
    ) -> Result<Outcome, String> {
        let (mut all, writes) = (self.all(), self.writes.iter().flatten().copied().collect::<Vec<_>>());
        all.extend(others);
        recorded(world, c, size, (&all, &writes, judged && self.is_tame()), record)
    }

    /// Like [`recorded`](Self::recorded), for a call without scratch.
    pub fn recorded_plain(
        &self,
        world: &mut World,
        c: &mut Choices,
        (judged, others): (bool, &[Window]),
        record: impl FnOnce(&mut wgpu::CommandEncoder, bool) -> Result<(), Error>,
    ) -> Result<Outcome, String> {
        let (mut all, writes) = (self.all(), self.writes.iter().flatten().copied().collect::<Vec<_>>());
        all.extend(others);
        let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
        let result = record(&mut encoder, c.one_in(3));
        let tame = judged && self.is_tame();
        settle(world, result, encoder, &mut scratch, &all, &writes, [small(&all), tame])
    }

    /// Compares output `n` with the exact result, by twice a naive error and the floor.
    pub fn judge(
        &self,
        what: &str,
        world: &World,
        n: usize,
        (naive, want): (&[f32], &[f64]),
        magnitude: f64,
    ) -> Result<(), String> {
        judge(what, world, self.output(n), naive, want, magnitude)
    }

    /// Compares a wanted gradient by three times a naive error and the floor of terms of
    /// `magnitude`. The call may have added it to earlier contents.
    pub fn judge_gradient(
        &self,
        what: &str,
        world: &World,
        n: usize,
        (naive, want): (&[f32], &[f64]),
        magnitude: f64,
    ) -> Result<(), String> {
        let Some(window) = &self.writes[n] else { return Ok(()) };
        let before = match self.accumulates {
            true => window.floats(&world.arena.before),
            false => vec![0.0; want.len()],
        };
        let most = before.iter().fold(0f32, |most, x| most.max(x.abs()));
        let naive: Vec<f32> = naive.iter().zip(&before).map(|(x, b)| x + b).collect();
        let want: Vec<f64> = want.iter().zip(&before).map(|(x, b)| x + f64::from(*b)).collect();
        let naive = widened(&naive, window.dtype);
        let tolerance = Tolerance::gradient(&naive, &want, magnitude + f64::from(most), EPSILON_F32);
        judge_within(what, world, window, &want, tolerance)
    }
}

/// Returns the error text: no call may accept inputs that the reference refuses.
pub fn refuses(e: Error) -> String {
    format!("the reference refuses it: {e}")
}

/// True if the call is small enough to run.
pub fn small(all: &[Window]) -> bool {
    all.iter().all(|w| w.count() < MOST)
}

/// Makes the scratch for a call, records it and handles its outcome.
pub fn recorded(
    world: &mut World,
    c: &mut Choices,
    size: Result<ScratchSize, Error>,
    (all, writes, tame): (&[Window], &[Window], bool),
    record: impl FnOnce(&mut wgpu::CommandEncoder, &mut Scratch, bool) -> Result<(), Error>,
) -> Result<Outcome, String> {
    let pass = c.one_in(3);
    let (memory, mut scratch) = scratch_for(world, Memory::new(c), &size)?;
    let mut encoder = world.encoder();
    let result = record(&mut encoder, &mut scratch, pass);
    refused_alike(&size, &result)?;
    if memory == Memory::Foreign && result.is_ok() {
        world.abandon(encoder)?;
        return Ok(Outcome::Accepted);
    }
    if memory == Memory::Foreign && result.is_err() {
        scratch = world.scratch();
    }
    settle(world, result, encoder, &mut scratch, all, writes, [small(all), tame])
}
