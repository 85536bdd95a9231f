//! Tests of ranks that die, differ or have invalid arguments. Every rank must return an error
//! within seconds, with the rank at fault and the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use wgpu_attention::{Config, DType, TensorView, wgpu};
use wgpu_attention_mpi::Schedule::{self, Contiguous, Ulysses};
use wgpu_attention_mpi::{Done, Error, RingAttention, RingForward, SequenceMask, ThreadWire, Wire};

use super::problem::GPU;

const LIMIT: Duration = Duration::from_secs(20);

/// A wire that dies after some messages of keys, or sends a wrong version.
struct Faulty {
    wire: ThreadWire,
    /// The number of messages of keys that the wire sends before it dies.
    dies_after: Option<usize>,
    lies: bool,
    sent: Arc<AtomicUsize>,
}

const HEADER: u8 = 1;
const KEYS: u8 = 2;

impl Faulty {
    fn dead(&self) -> bool {
        self.dies_after.is_some_and(|most| self.sent.load(Ordering::Relaxed) > most)
    }
}

impl Wire for Faulty {
    fn rank(&self) -> usize {
        self.wire.rank()
    }
    fn ranks(&self) -> usize {
        self.wire.ranks()
    }
    fn send(&mut self, id: u64, to: usize, tag: u8, mut bytes: Vec<u8>) -> Result<(), String> {
        if tag == KEYS {
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
        if self.lies && tag == HEADER {
            bytes[16] ^= 1;
        }
        if self.dead() { Ok(()) } else { self.wire.send(id, to, tag, bytes) }
    }
    fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        self.wire.receive(id, from, tag, bytes)
    }
    fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        if self.dead() { Ok(()) } else { self.wire.progress(done) }
    }
    fn close(&mut self) {
        self.wire.close();
    }
}

/// A rank's arguments and faults.
#[derive(Clone, Copy)]
struct Given {
    heads: usize,
    length: usize,
    tokens: usize,
    dtype: DType,
    causal: bool,
    scale: f64,
    dies_after: Option<usize>,
    lies: bool,
}

const GIVEN: Given = Given {
    heads: 2,
    length: 24,
    tokens: 8,
    dtype: DType::F32,
    causal: true,
    scale: 0.5,
    dies_after: None,
    lies: false,
};

type Change = fn(&mut Given);

/// The errors of three ranks.
fn errors(schedule: Schedule, given: [Given; 3]) -> [Result<(), Error>; 3] {
    let start = Instant::now();
    let of_rank = |(wire, given): (ThreadWire, Given)| {
        thread::spawn(move || {
            let Given { heads, length, tokens, dtype, causal, scale, dies_after, lies } = given;
            let wire = Faulty { wire, dies_after, lies, sent: Arc::default() };
            let config = Config::new(heads, 8).scale(scale);
            let mut ring =
                RingAttention::with_pipelines(GPU.pipelines(), GPU.queue(), config, schedule, wire)?;
            let buffers: [wgpu::Buffer; 4] =
                std::array::from_fn(|_| GPU.buffer(4 * heads * tokens * 8).expect("memory"));
            let view = |n: usize| TensorView::new(&buffers[n], dtype, [1, heads, tokens, 8]);
            let out = TensorView::new(&buffers[3], DType::F32, [1, heads, tokens, 8]);
            let mask = if causal { SequenceMask::causal() } else { SequenceMask::none() };
            let call = RingForward::new(view(0), view(1), view(2), out, length).mask(&mask);
            let result = ring.forward(&call);
            if let Err(error) = &result {
                // The next call must end as well, with the same error.
                if !matches!(error, Error::Mismatch { .. } | Error::Refused { .. } | Error::Device(_)) {
                    assert_eq!(ring.forward(&call).as_ref(), Err(error));
                }
            }
            result
        })
    };
    let threads: Vec<_> = ThreadWire::all(3).into_iter().zip(given).map(of_rank).collect();
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect();
    assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
    results.try_into().expect("three ranks")
}

/// Returns the error messages of all ranks after a change of the last rank's arguments.
fn last(change: impl FnOnce(&mut Given)) -> [String; 3] {
    let mut given = [GIVEN; 3];
    change(&mut given[2]);
    errors(Contiguous, given).map(|result| result.expect_err("an error").to_string())
}

#[test]
fn equal_calls_have_no_error() {
    for result in errors(Contiguous, [GIVEN; 3]) {
        result.expect("no rank fails");
    }
}

#[test]
fn ranks_that_differ_are_named_on_all() {
    let cases: [(Change, &str); 6] = [
        (|given| given.heads = 4, "rank 2: heads is 4, but on rank 0 it is 2"),
        (|given| given.dtype = DType::F16, "rank 2: the dtype"),
        (|given| given.causal = false, "rank 2: causal is 0, but on rank 0 it is 1"),
        (|given| given.length = 25, "rank 2: "),
        (|given| given.scale = 0.25, "rank 2: the configuration"),
        (|given| given.lies = true, "rank 2: the version of wgpu-attention-mpi"),
    ];
    for (change, words) in cases {
        let errors = last(change);
        for error in &errors[..2] {
            assert!(error.contains(words), "{error}");
        }
        // Rank 2 may report its invalid arguments. If it sent a wrong version, the other ranks end
        // the call, and rank 2 reports that they left.
        let words = [words, "`q`: shape", "it has ended, but this rank waits for it"];
        assert!(words.iter().any(|words| errors[2].contains(words)), "{}", errors[2]);
    }
}

#[test]
fn refusals_reach_all_ranks() {
    let errors = last(|given| given.tokens = 7);
    for error in &errors[..2] {
        assert!(error.contains("rank 2: `q`: shape must be [1, 2, 8, 8], got [1, 2, 7, 8]"), "{error}");
    }
    // A number of key heads that is not a multiple of the number of ranks.
    for (rank, result) in self::errors(Ulysses, [GIVEN; 3]).into_iter().enumerate() {
        let error = result.expect_err("an error").to_string();
        assert!(error.contains("it must be a multiple of 3 ranks"), "{rank}: {error}");
    }
}

#[test]
fn a_rank_that_dies_is_named_in_seconds() {
    let mut given = [Given { causal: false, ..GIVEN }; 3];
    // The block of rank 1 is never sent.
    given[1].dies_after = Some(0);
    let errors = errors(Contiguous, given);
    for rank in [0, 2] {
        let error = errors[rank].as_ref().expect_err("an error").to_string();
        assert!(error.contains("rank 1: no message for"), "{error}");
    }
    // Rank 1 receives no messages from the other ranks.
    assert!(matches!(errors[1], Err(Error::Lost { .. })), "{:?}", errors[1]);
}
