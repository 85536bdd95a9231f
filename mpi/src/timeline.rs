//! The times of a call, step by step, as measured by the host of each rank.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use wgpu_attention::wgpu;

use crate::schedule::Visit;

/// The times of one block at a rank. `submitted` and `done` are seconds since the call began on
/// that rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// The number of ranks from the block's owner to this rank; 0 for Ulysses.
    pub step: usize,
    /// The rank that owns the keys.
    pub owner: usize,
    /// The number of attention calls.
    pub parts: usize,
    /// Seconds that the host waited for the block.
    pub waited: f64,
    /// Seconds that the host took to copy the block to a staging buffer and to record the step.
    pub staged: f64,
    /// The time when the host submitted the step.
    pub submitted: f64,
    /// The time when the host saw that the device had finished the step.
    pub done: f64,
    /// Bytes that the rank sent during the step.
    pub bytes: u64,
    /// Messages that the rank sent during the step.
    pub messages: u64,
}

/// The times of a call on one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// The steps, in the order of computation.
    pub steps: Vec<Step>,
    /// Seconds from the ranks' agreement to the end.
    pub total: f64,
}

const NUMBERS: usize = 9;

impl Timeline {
    /// Seconds that the device was idle before step `n`. The first step waits for no other rank, so
    /// its idle time is 0.
    pub fn idle(&self, n: usize) -> f64 {
        match n.checked_sub(1).map(|before| [before, n].map(|n| &self.steps[n])) {
            Some([before, step]) => (step.submitted - before.done).max(0.0),
            None => 0.0,
        }
    }

    /// Seconds that the device worked at step `n`.
    pub fn worked(&self, n: usize) -> f64 {
        let before = n.checked_sub(1).map_or(0.0, |before| self.steps[before].done);
        self.steps[n].done - self.steps[n].submitted.max(before)
    }

    /// Bytes and messages of all steps.
    pub fn sent(&self) -> [u64; 2] {
        self.steps
            .iter()
            .fold([0, 0], |[bytes, messages], step| [bytes + step.bytes, messages + step.messages])
    }

    /// Bytes of a message that can hold any timeline in a ring of `ranks`.
    pub(crate) fn bytes(ranks: usize) -> usize {
        8 * (2 + NUMBERS * ranks)
    }

    pub(crate) fn write(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        let of_step = |step: &Step| {
            [
                step.step as f64,
                step.owner as f64,
                step.parts as f64,
                step.waited,
                step.staged,
                step.submitted,
                step.done,
                step.bytes as f64,
                step.messages as f64,
            ]
        };
        let numbers = [self.total, self.steps.len() as f64];
        let numbers = numbers.into_iter().chain(self.steps.iter().flat_map(of_step));
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
    }

    pub(crate) fn read(bytes: &[u8]) -> Self {
        let numbers: Vec<f64> = bytes
            .chunks_exact(8)
            .map(|place| f64::from_le_bytes(place.try_into().unwrap_or_default()))
            .collect();
        let step = |n: &[f64]| Step {
            step: n[0] as usize,
            owner: n[1] as usize,
            parts: n[2] as usize,
            waited: n[3],
            staged: n[4],
            submitted: n[5],
            done: n[6],
            bytes: n[7] as u64,
            messages: n[8] as u64,
        };
        let steps = numbers[2..].chunks_exact(NUMBERS).take(numbers[1] as usize).map(step).collect();
        Timeline { steps, total: numbers[0] }
    }
}

/// Returns a table of a call on all ranks, as text.
pub fn table(timelines: &[Timeline]) -> String {
    let mut text = String::from(
        "rank  step  keys of  parts   wait ms  stage ms   work ms   idle ms    MB sent  messages\n",
    );
    for (rank, timeline) in timelines.iter().enumerate() {
        for (n, step) in timeline.steps.iter().enumerate() {
            let ms = |seconds: f64| 1e3 * seconds;
            let _ = writeln!(
                text,
                "{rank:4}  {:4}  {:7}  {:5}  {:8.2}  {:8.2}  {:8.2}  {:8.2}  {:9.3}  {:8}",
                step.step,
                step.owner,
                step.parts,
                ms(step.waited),
                ms(step.staged),
                ms(timeline.worked(n)),
                ms(timeline.idle(n)),
                step.bytes as f64 / 1e6,
                step.messages,
            );
        }
    }
    for (rank, timeline) in timelines.iter().enumerate() {
        let all = 0..timeline.steps.len();
        let (worked, idle) = (
            all.clone().map(|n| timeline.worked(n)).sum::<f64>(),
            all.map(|n| timeline.idle(n)).sum::<f64>(),
        );
        let [bytes, messages] = timeline.sent();
        let _ = writeln!(
            text,
            "rank {rank}: {:.1} ms, of which the device worked {:.1} and was idle between steps {:.1}; \
             {:.3} MB in {messages} messages",
            1e3 * timeline.total,
            1e3 * worked,
            1e3 * idle,
            bytes as f64 / 1e6,
        );
    }
    text
}

/// Records a timeline during a call.
pub(crate) struct Recorder {
    start: Instant,
    sent: [u64; 2],
    steps: Vec<Step>,
    done: Arc<Mutex<Vec<f64>>>,
}

impl Recorder {
    pub fn new(sent: [u64; 2]) -> Self {
        Recorder { start: Instant::now(), sent, steps: Vec::new(), done: Arc::default() }
    }

    /// Records that the host has just submitted a step.
    pub fn submitted(&mut self, queue: &wgpu::Queue, visit: &Visit, waited: f64, staged: f64) {
        let submitted = self.start.elapsed().as_secs_f64();
        let Visit { step, owner, ref parts, .. } = *visit;
        let step = Step { step, owner, parts: parts.len(), waited, staged, submitted, ..Step::default() };
        self.steps.push(step);
        let (start, done) = (self.start, self.done.clone());
        queue.on_submitted_work_done(move || {
            if let Ok(mut done) = done.lock() {
                done.push(start.elapsed().as_secs_f64());
            }
        });
    }

    /// Records the messages of the step. `sent` counts all bytes and messages of the rank so far.
    pub fn sent(&mut self, sent: [u64; 2]) {
        if let Some(step) = self.steps.last_mut() {
            step.bytes += sent[0] - self.sent[0];
            step.messages += sent[1] - self.sent[1];
            self.sent = sent;
        }
    }

    /// Ends the recording, after the device has finished.
    pub fn end(mut self, sent: [u64; 2]) -> Timeline {
        self.sent(sent);
        let total = self.start.elapsed().as_secs_f64();
        let done = self.done.lock().map(|done| done.clone()).unwrap_or_default();
        for (n, step) in self.steps.iter_mut().enumerate() {
            step.done = done.get(n).copied().unwrap_or(total);
        }
        Timeline { steps: self.steps, total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timelines_travel_whole() {
        let step = |n: usize| Step {
            step: n,
            owner: 3 - n,
            parts: 2,
            waited: 0.25,
            staged: 0.5,
            submitted: n as f64,
            done: n as f64 + 0.75,
            bytes: 1 << 40,
            messages: 7,
        };
        let timeline = Timeline { steps: vec![step(0), step(1)], total: 2.5 };
        let mut bytes = vec![1; Timeline::bytes(4)];
        timeline.write(&mut bytes);
        assert_eq!(Timeline::read(&bytes), timeline);
        assert_eq!([timeline.idle(1), timeline.worked(1)], [0.25, 0.75]);
        assert!(table(&[timeline]).contains("rank 0: 2500.0 ms"));
    }
}
