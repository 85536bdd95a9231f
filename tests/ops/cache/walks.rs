//! Long random walks of a cache that grows, forks, truncates, reorders and compacts, compared with
//! lists on the host. `WGPU_ATTENTION_WALK_STEPS` sets the steps of the longest.

use wgpu_attention::Error;
use wgpu_attention::cache::{CacheLayout, CacheStorage};

use super::as_gpu;
use super::compaction::{LAYOUTS, check, lists};
use crate::harness::{Ask, Bed, Count, Data, FORMS, Kind, Profile, Report, Rng, Rules, full, resident, say};
use crate::laws::property::seed;

/// The number of sequences.
const BATCH: usize = 3;

/// A cache with its model, and the choices of the walk.
struct Walk {
    bed: Bed,
    rng: Rng,
    refused: usize,
    compactions: usize,
}

impl Walk {
    fn new(profile: &'static Profile, layout: usize, storage: CacheStorage, seed: u64) -> Self {
        let (layout, capacity) = LAYOUTS[layout];
        let kind = Kind { batch: BATCH, layers: 2, compacts: true, ..Kind::new(storage, layout, capacity) };
        let bed = Bed::new(profile, kind, Data::Lossless, seed);
        Walk { bed, rng: Rng::new(seed + 77), refused: 0, compactions: 0 }
    }

    /// Makes one random call. `trail` gets its description.
    fn call(&mut self, sequence: usize, trail: &mut String) -> Result<(), Error> {
        let Walk { bed, rng, compactions, .. } = self;
        let stored: Vec<_> = bed.sequences.iter().map(|s| s.len() - s.removed).collect();
        match rng.below(20) {
            0..9 => {
                let counts: Vec<_> = (0..BATCH).map(|_| rng.below(9)).collect();
                *trail = format!("grow {counts:?}");
                if counts.iter().all(|n| *n == 0) { Ok(()) } else { bed.grow(&Count::Each(counts)) }
            }
            9..14 => {
                let on_device = rng.chance(0.5);
                let least = stored.iter().copied().min().unwrap_or(0);
                let counts: Vec<_> = match on_device {
                    true if least == 0 => return Ok(()),
                    true => vec![rng.between(1, least); BATCH],
                    false => stored.iter().map(|n| rng.below(n + 1)).collect(),
                };
                *trail = format!("compact {counts:?} of {stored:?}, on the device: {on_device}");
                *compactions += 1;
                let lists = lists(bed, &counts);
                bed.compact(&lists, on_device)
            }
            14..16 => {
                let parents: Vec<_> = (0..BATCH).map(|_| rng.below(BATCH)).collect();
                *trail = format!("reorder {parents:?}");
                bed.reorder(&parents)
            }
            16 => {
                *trail = format!("clear {sequence}");
                self.clear(sequence)
            }
            17 if matches!(bed.kind.layout, CacheLayout::Paged { .. }) => {
                let to = rng.below(BATCH);
                *trail = format!("fork {sequence} to {to}");
                bed.fork(sequence, to)
            }
            _ => {
                let len = bed.cache.len(sequence).unwrap_or(0);
                let to = len.saturating_sub(rng.below(4));
                *trail = format!("truncate {sequence} to {to}");
                bed.cache.truncate(sequence, to)?;
                let lost = &bed.sequences[sequence].lost;
                assert!(lost.iter().all(|[_, _, position]| *position < to), "a removed token is to go");
                bed.sequences[sequence].return_to(&bed.kind, to);
                Ok(())
            }
        }
    }

    fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.bed.sequences[sequence].return_to(&self.bed.kind, 0);
        self.bed.cache.clear(sequence)
    }

    /// Makes one random call, and compares attention with the model. A sequence without room is
    /// cleared. With `reads`, compares all stored rows too.
    fn step(&mut self, step: usize, reads: bool, trail: &mut String) -> Result<f64, String> {
        let sequence = self.rng.below(BATCH);
        match self.call(sequence, trail) {
            // Removed tokens cannot return.
            Ok(()) | Err(Error::Option { option: "len", .. }) => {}
            Err(Error::OutOfPages { .. } | Error::CacheFull { .. }) => {
                self.refused += 1;
                self.clear(sequence).map_err(|e| e.to_string())?;
            }
            Err(e) => return Err(format!("refused: {e}")),
        }
        self.bed.flush();
        let rules = match step % 3 {
            0 => Rules { causal: true, ..Default::default() },
            1 => Rules { causal: true, window: Some([self.rng.below(12), 0]), ..Default::default() },
            _ => Rules::default(),
        };
        let (layer, rows) = (step % 2, Some(1 + step % 3));
        let ask = Ask { layer, rows, ..Ask::new(FORMS[step / 7 % 2], &rules) };
        if reads { check(&mut self.bed, &ask) } else { self.bed.ask(&ask) }
    }

    /// Clears all sequences. All pages must be free then.
    fn finish(mut self) {
        (0..BATCH).for_each(|s| self.clear(s).expect("a sequence"));
        if let CacheLayout::Paged { pages, .. } = self.bed.kind.layout {
            assert_eq!(self.bed.cache.free_pages(), pages);
        }
    }
}

#[test]
fn random_calls_match_lists() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, random compaction");
    // Fewer may not fill a cache.
    let steps = 1000;
    let runs =
        [(full(), 0, CacheStorage::Q8_0), (full(), 1, CacheStorage::F32), (as_gpu(), 1, CacheStorage::Q4_0)];
    for (n, (profile, layout, storage)) in runs.into_iter().enumerate() {
        let mut walk = Walk::new(profile, layout, storage, seed() + n as u64);
        for step in 0..steps {
            let mut trail = String::new();
            let outcome = walk.step(step, step % 5 == 0, &mut trail);
            let failed = outcome.is_err();
            report.record(&format!("{:?}, step {step}: {trail}", LAYOUTS[layout].0), &profile.name, outcome);
            if failed {
                break;
            }
        }
        let Walk { compactions, refused, .. } = walk;
        assert!(compactions > steps / 8 && refused > 0, "{layout}: {compactions}, {refused}");
        walk.finish();
    }
    report.finish();
}

/// Generation for a day, in short. The memory of the process must not grow.
#[test]
fn long_walk_has_flat_memory() {
    let text = std::env::var("WGPU_ATTENTION_WALK_STEPS").ok();
    let steps: usize = text.map_or(300, |text| text.parse().expect("WGPU_ATTENTION_WALK_STEPS is a number"));
    let mut walk = Walk::new(full(), 1, CacheStorage::F32, seed());
    let (mut worst, mut early) = (0f64, None);
    for step in 0..steps {
        let mut trail = String::new();
        let outcome = walk.step(step, step % 50 == 0, &mut trail);
        worst = worst.max(outcome.unwrap_or_else(|why| panic!("step {step}: {trail}: {why}")));
        // The drivers' caches are filled by then.
        if step == steps / 10 {
            early = resident();
        }
        if (step + 1).is_multiple_of(10_000) {
            say(&format!("caches, a long walk: {} steps, {:?} MiB", step + 1, resident()));
        }
    }
    let (Walk { compactions, refused, .. }, late) = (&walk, resident());
    say(&format!(
        "caches, a long walk: {steps} steps, {compactions} compactions, {refused} refusals, worst {worst:.2} of the \
         tolerance, {early:?} MiB after a tenth, {late:?} MiB at the end"
    ));
    assert!(worst <= 1.0, "{worst}");
    // Other tests run at the same time in a short walk.
    if let ([Some(early), Some(late)], 10_000..) = ([early, late], steps) {
        assert!(late <= early + early / 20, "{early} MiB after a tenth, {late} MiB at the end");
    }
    walk.finish();
}
