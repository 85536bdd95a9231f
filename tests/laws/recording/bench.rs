//! Calls of operators on a separate device: how a call is made, and the claims that it must meet.

use std::cell::RefCell;

use wgpu_attention::tuning::Family;
use wgpu_attention::{Error, Prepared, inspect};

use super::*;
use crate::harness::faults::OPERATORS;

/// The way in which a call is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How {
    /// Into an encoder.
    Own,
    /// Into the caller's pass.
    Pass,
    /// With an output that is also an input.
    Refused,
    RefusedInPass,
    /// Prepared, but not recorded.
    Prepared,
    /// Recorded with no workgroups.
    WarmUp,
    /// Prepared, then recorded into an encoder or a pass.
    PreparedOwn,
    PreparedPass,
}

/// Makes a call, or a similar one that is refused, with or without scratch.
macro_rules! call {
    ($operator:expr, [$forward:ident, $prepare:ident], $call:expr, $wrong:expr $(, $scratch:expr)?) => {
        &mut |encoder: &mut wgpu::CommandEncoder, how: How| -> Result<(), Error> {
            match how {
                How::Own => $operator.$forward(encoder, $call $(, $scratch)?)?,
                How::Refused => $operator.$forward(encoder, $wrong $(, $scratch)?)?,
                How::Prepared => within_defaults(&$operator.$prepare($call $(, $scratch)?)?),
                How::PreparedOwn => $operator.$prepare($call $(, $scratch)?)?.record(encoder),
                How::WarmUp => $operator.$forward(&mut WarmUp(encoder), $call $(, $scratch)?)?,
                How::Pass | How::RefusedInPass | How::PreparedPass => {
                    let pass = &mut encoder.begin_compute_pass(&Default::default());
                    match how {
                        How::Pass => $operator.$forward(pass, $call $(, $scratch)?)?,
                        How::RefusedInPass => $operator.$forward(pass, $wrong $(, $scratch)?)?,
                        _ => $operator.$prepare($call $(, $scratch)?)?.record(pass),
                    }
                }
            }
            Ok(())
        }
    };
}

pub(super) use call;

/// Checks that a call on a device without features needs no features and at most default limits.
pub(super) fn within_defaults(prepared: &Prepared) {
    let needs = prepared.requirements();
    assert_eq!((needs.features, needs.usages), (wgpu::Features::empty(), TensorView::USAGES));
    let above = |name, needed, limit| panic!("{name}: {needed} of {limit}");
    needs.limits.check_limits_with_fail_fn(&wgpu::Limits::default(), true, above);
    assert!(needs.limits.max_compute_invocations_per_workgroup > 0 && needs.limits.max_buffer_size > 0);
}

/// A device, tensors that are read, and tensors that are written.
pub(super) struct Bench {
    own: Own,
    /// Numbers of a sine.
    pub(super) floats: [wgpu::Buffer; 5],
    /// The numbers 0 to 11, repeated.
    ids: wgpu::Buffer,
    outs: [wgpu::Buffer; 5],
    arena: Option<Arena>,
    /// The outputs of each call, by its name.
    results: RefCell<Vec<(String, Vec<Vec<u32>>)>>,
}

/// One buffer for all tensors. Outputs have its first regions; then each input has one region.
pub(super) struct Arena {
    buffer: wgpu::Buffer,
    /// The buffer that each input's region was copied from.
    inputs: RefCell<Vec<wgpu::Buffer>>,
}

/// Elements of a tensor's buffer or region.
const REGION: usize = 2048;
const REGIONS: usize = 64;

/// Runs a test with a buffer for each tensor, then with one buffer for all tensors. The outputs
/// have the same bits.
pub(super) fn with_separate_buffers_and_one(test: impl Fn(&Bench)) {
    let [separate, one] = [false, true].map(|is_one| {
        let bench = Bench::new(is_one);
        test(&bench);
        bench.assert_inputs_unchanged();
        bench.results.take()
    });
    assert_eq!(separate.len(), one.len());
    for ((name, separate), (_, one)) in separate.iter().zip(&one) {
        assert!(separate == one, "{name}: other bits with all tensors in one buffer");
    }
}

impl Bench {
    fn new(is_one: bool) -> Self {
        let own = Own::new();
        let floats =
            [0.3, 0.5, 0.7, 0.9, 1.1].map(|seed| own.gpu.upload(&noise(REGION, seed)).expect("an upload"));
        let ids: Vec<u32> = (0..REGION as u32).map(|n| n * 7 % 12).collect();
        let ids = own.gpu.upload(&ids).expect("an upload");
        let outs = [(); 5].map(|()| own.gpu.buffer(4 * REGION).expect("a buffer"));
        let arena = is_one.then(|| Arena {
            buffer: own.gpu.buffer(4 * REGION * REGIONS).expect("a buffer"),
            inputs: RefCell::default(),
        });
        Bench { own, floats, ids, outs, arena, results: RefCell::default() }
    }

    /// Returns the buffer of an input and its first element. An arena gets a copy of `buffer`.
    pub(super) fn input<'a>(&'a self, buffer: &'a wgpu::Buffer) -> (&'a wgpu::Buffer, usize) {
        let Some(Arena { buffer: arena, inputs }) = &self.arena else { return (buffer, 0) };
        inputs.borrow_mut().push(buffer.clone());
        let first = (self.outs.len() + inputs.borrow().len() - 1) * REGION;
        let mut encoder = encoder(self.gpu());
        encoder.copy_buffer_to_buffer(buffer, 0, arena, 4 * first as u64, 4 * REGION as u64);
        self.gpu().queue().submit([encoder.finish()]);
        (arena, first)
    }

    /// Returns the buffer of an output and its first element.
    fn output(&self, n: usize) -> (&wgpu::Buffer, usize) {
        self.arena.as_ref().map_or((&self.outs[n], 0), |arena| (&arena.buffer, n * REGION))
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.own.gpu
    }

    pub(super) fn read(&self, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        let (buffer, first) = self.input(&self.floats[n]);
        TensorView::new(buffer, DType::F32, shape).with_offset(first)
    }

    pub(super) fn numbers(&self, shape: [usize; 4]) -> TensorView<'_> {
        let (buffer, first) = self.input(&self.ids);
        TensorView::new(buffer, DType::U32, shape).with_offset(first)
    }

    pub(super) fn written(&self, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        self.written_as(DType::F32, n, shape)
    }

    pub(super) fn written_as(&self, dtype: DType, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        let (buffer, first) = self.output(n);
        TensorView::new(buffer, dtype, shape).with_offset(first)
    }

    pub(super) fn scratch(&self, size: Result<ScratchSize, Error>) -> Scratch {
        Scratch::new(self.gpu().device(), size.expect("a size")).expect("scratch")
    }

    fn alive(&self) -> (usize, Alive) {
        self.gpu().device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        let alive = self.own.alive().expect("wgpu counts resources on this backend");
        (self.gpu().pipelines().compiled(), alive)
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        let Some(Arena { buffer, .. }) = &self.arena else {
            return self
                .outs
                .iter()
                .map(|out| self.gpu().download(out, REGION).expect("a read-back"))
                .collect();
        };
        let all = self.gpu().download::<u32>(buffer, REGION * self.outs.len()).expect("a read-back");
        all.chunks(REGION).map(<[u32]>::to_vec).collect()
    }

    /// Checks that no call wrote to the region of an input.
    fn assert_inputs_unchanged(&self) {
        let Some(Arena { buffer, inputs }) = &self.arena else { return };
        let all = self.gpu().download::<u32>(buffer, REGION * REGIONS).expect("a read-back");
        for (n, input) in inputs.borrow().iter().enumerate() {
            let data = self.gpu().download::<u32>(input, REGION).expect("a read-back");
            assert!(all[(self.outs.len() + n) * REGION..][..REGION] == data, "input {n} was written");
        }
    }

    /// Fills the outputs with a number that no call computes.
    fn poison(&self) {
        let poison = vec![POISON; REGION];
        for n in 0..self.outs.len() {
            let (buffer, first) = self.output(n);
            self.gpu().queue().write_buffer(buffer, 4 * first as u64, bytemuck::cast_slice(&poison));
        }
    }

    /// Returns the contents of the outputs after `record` into an encoder, and the number of
    /// allocations.
    fn ran(&self, name: &str, record: &mut Record, how: How) -> (Vec<Vec<u32>>, usize) {
        self.poison();
        let mut encoder = encoder(self.gpu());
        let mut result = Ok(());
        let allocated = allocations(|| result = record(&mut encoder, how));
        self.gpu().queue().submit([encoder.finish()]);
        let refused = matches!(how, How::Refused | How::RefusedInPass);
        assert_eq!(result.is_err(), refused, "{name}, {how:?}: {result:?}");
        (self.bits(), allocated)
    }

    /// Checks every claim of this file for one call of an operator that writes outputs. `needs`:
    /// its families without a replacement.
    pub(super) fn check(&self, name: &str, needs: &[Family], record: &mut Record) {
        let poisoned = vec![vec![POISON.to_bits(); 2048]; 5];
        let before = self.alive();
        record(&mut encoder(self.gpu()), How::Prepared).expect("a preparation");
        let prepared = self.alive();
        let (warm, passes) = inspect::passes(|| self.ran(name, record, How::WarmUp).0);
        assert!(warm == poisoned, "{name}: a warm-up wrote something");
        assert!(passes > 0, "{name}: a warm-up records nothing");
        assert_eq!(self.alive(), prepared, "{name}, a warm-up creates something");
        let (bits, _) = self.ran(name, record, How::Own);
        let first = self.alive();
        self.results.borrow_mut().push((name.to_string(), bits.clone()));
        assert!(bits != poisoned, "{name} writes nothing");
        assert!(first.1.bind_groups > before.1.bind_groups, "{name} binds nothing");
        assert_eq!(first, prepared, "{name} was prepared");
        let (again, allocated) = self.ran(name, record, How::Own);
        assert!(again == bits, "{name}: other bits the second time");
        for how in [How::Own, How::Pass, How::PreparedOwn, How::PreparedPass] {
            let (again, now) = self.ran(name, record, how);
            assert!(again == bits, "{name}, {how:?}: other bits");
            // The caller's pass has no label to copy.
            assert!(now <= allocated + 8, "{name}, {how:?}: {now} allocations, {allocated} before");
            assert_eq!(self.alive(), first, "{name}, {how:?} creates something");
        }
        for how in [How::Refused, How::RefusedInPass] {
            assert!(self.ran(name, record, how).0 == poisoned, "{name}, {how:?}: something was recorded");
            assert_eq!(self.alive(), first, "{name}, {how:?} creates something");
        }
        // A refusal has no later effect.
        assert!(self.ran(name, record, How::Own).0 == bits, "{name}: other bits after a refusal");
        let families = OPERATORS.into_iter().map(|(family, _)| family);
        let of_gradients = [Family::ScoreGradients, Family::RowStats, Family::RowSums];
        let needed = families.chain(of_gradients).filter(|family| self.is_refused(name, record, *family));
        assert_eq!(needed.collect::<Vec<_>>(), needs, "{name}");
    }

    /// True if the call is refused without `family`. Then nothing is recorded.
    fn is_refused(&self, name: &str, record: &mut Record, family: Family) -> bool {
        self.poison();
        let mut encoder = encoder(self.gpu());
        self.gpu().pipelines().avoid(family);
        let result = record(&mut encoder, How::Own);
        self.gpu().pipelines().allow(family);
        match result {
            Ok(()) => return false,
            Err(Error::Disabled { family: refused }) => assert_eq!(refused, family, "{name}"),
            Err(e) => panic!("{name} without {family}: {e}"),
        }
        self.gpu().queue().submit([encoder.finish()]);
        let poisoned = vec![vec![POISON.to_bits(); 2048]; 5];
        assert!(self.bits() == poisoned, "{name} without {family}: something was recorded");
        true
    }
}

pub(super) type Record<'a> = dyn FnMut(&mut wgpu::CommandEncoder, How) -> Result<(), Error> + 'a;

/// Another view of the memory of `t`.
pub(super) fn reshaped(t: TensorView, shape: [usize; 4]) -> TensorView {
    TensorView::new(t.buffer(), t.dtype(), shape).with_offset(t.offset())
}
