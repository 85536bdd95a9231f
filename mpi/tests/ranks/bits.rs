//! Checks that the same inputs give the same bits with any timing.

use std::time::Duration;

use wgpu_attention::{DType, Shape};
use wgpu_attention_mpi::Schedule::{Contiguous, Ulysses, Zigzag};
use wgpu_attention_mpi::{Done, ThreadWire, Wire};

use super::problem::{Problem, Rules};

/// A wire with a different delay before each message.
struct Slow(ThreadWire, u64);

impl Wire for Slow {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn ranks(&self) -> usize {
        self.0.ranks()
    }
    fn send(&mut self, id: u64, to: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        self.1 = self.1.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros(self.1 >> 53));
        self.0.send(id, to, tag, bytes)
    }
    fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        self.0.receive(id, from, tag, bytes)
    }
    fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        self.0.progress(done)
    }
    fn close(&mut self) {
        self.0.close();
    }
}

#[test]
fn twenty_runs_have_the_same_bits() {
    let rules = Rules { causal: true, window: None, documents: vec![] };
    let shape = Shape { kv_heads: 3, heads: 6, ..Shape::new(1, 6, 29, 8) };
    let problem = Problem::new(shape, rules, DType::F32);
    for schedule in [Contiguous, Zigzag, Ulysses] {
        let mut first = None;
        for run in 0..20 {
            let wires = ThreadWire::all(3).into_iter().enumerate();
            let wires = wires.map(|(rank, wire)| Slow(wire, run * 977 + rank as u64)).collect();
            let results = problem.on(schedule, wires).expect("no rank fails");
            let first = first.get_or_insert_with(|| results.clone());
            assert_eq!(*first, results, "{schedule:?}, run {run}");
        }
    }
}
