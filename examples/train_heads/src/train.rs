//! The training loop.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use training::{Random, scheduled};
use wgpu_attention::Error;

use crate::model::{Model, SLOTS, Score};
use crate::task::{Batch, Series};

const RATE: f64 = 0.005;
/// Steps in which the rate rises. Over the last third of the steps it falls.
const WARMUP: usize = 20;

/// Returns batches that the model is not trained on.
pub fn held_out(batches: usize, seed: u64) -> Vec<Batch> {
    let mut random = Random::new(seed, Series::HeldOut as usize);
    (0..batches).map(|_| Batch::new(&mut random)).collect()
}

/// Trains for `steps` steps, each on a new batch. Returns the score of each batch before its step.
pub fn train(
    model: &mut Model,
    steps: usize,
    seed: u64,
    mut progress: Option<&mut Progress>,
) -> Result<Vec<Score>, Error> {
    let mut random = Random::new(seed, Series::Training as usize);
    let mut scores = Vec::with_capacity(steps);
    let mut known = Vec::new();
    for step in 0..steps {
        let batch = Batch::new(&mut random);
        model.train(&batch, scheduled(RATE, WARMUP, step, steps), known.len())?;
        known.push(batch.known());
        if known.len() == SLOTS || step + 1 == steps {
            scores.extend(model.totals(&known)?);
            known.clear();
            if let Some(progress) = &mut progress {
                progress.show(&scores, steps);
            }
        }
    }
    Ok(scores)
}

pub fn score(model: &mut Model, batches: &[Batch]) -> Result<Score, Error> {
    let (mut loss, mut hits, mut known) = (0.0, 0.0, 0.0);
    for batch in batches {
        let (score, n) = (model.score(batch)?, batch.known() as f64);
        loss += score.loss * n;
        hits += score.accuracy * n;
        known += n;
    }
    Ok(Score { loss: loss / known, accuracy: hits / known })
}

/// Shows progress: a bar on a terminal, otherwise ten lines.
pub struct Progress {
    started: Instant,
    terminal: bool,
    lines: usize,
}

impl Progress {
    pub fn new() -> Self {
        Progress { started: Instant::now(), terminal: std::io::stderr().is_terminal(), lines: 0 }
    }

    fn show(&mut self, scores: &[Score], steps: usize) {
        const WIDTH: usize = 30;
        let (done, Some(Score { loss, accuracy })) = (scores.len(), scores.last()) else { return };
        let full = WIDTH * done / steps;
        let text = format!(
            "[{}{}] step {done:>4} of {steps}   loss {loss:.3}   {:5.1} % right   {:.1} s",
            "#".repeat(full),
            "-".repeat(WIDTH - full),
            100.0 * accuracy,
            self.started.elapsed().as_secs_f64()
        );
        // Training continues if the output fails.
        let _ = if self.terminal {
            let end = if done == steps { "\n" } else { "" };
            write!(std::io::stderr(), "\r{text}{end}")
        } else if 10 * done / steps > self.lines {
            self.lines = 10 * done / steps;
            writeln!(std::io::stderr(), "{text}")
        } else {
            Ok(())
        };
    }
}
