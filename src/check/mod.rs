//! Checks that this device computes correct results: small problems, compared with the reference.

mod attempt;
mod bench;
pub(crate) mod data;
mod gradients;
mod operators;
mod problems;

use attempt::{Attempt, attempt};
use problems::Problem;

use std::collections::BTreeMap;

use crate::device::{Families, Family, Report, Verdict};
use crate::kernel::Pipelines;
use crate::tensor::Error;

impl Pipelines {
    /// Computes a small problem with each family of kernels that plans for this device use. It
    /// compares the results with the [`mod@reference`](crate::reference). A family that is wrong or
    /// does not compile is disabled. Later plans of these pipelines avoid it, as [`Family`]
    /// describes, and [`report`](Self::report) gives the reason. Calls that no remaining kernel can
    /// compute are refused with [`Error::Disabled`].
    ///
    /// `queue` is the device's. The check blocks, mostly while it compiles kernels, on as many
    /// threads as the machine has cores. On Mesa 26's software driver it takes four to fifteen
    /// seconds, and at most three with a warm kernel cache. If a family was disabled, a
    /// [`Scratch`](crate::Scratch) of an earlier size may be too small.
    ///
    /// The problems are small. Large problems use tiles of other sizes from the same text. A check
    /// cannot find kernels that crash a driver. The families that are known to crash are
    /// [barred](Verdict::Barred), and are not tried.
    ///
    /// # Errors
    /// The device is lost or has not enough memory. Then nothing is disabled.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check(&self, queue: &wgpu::Queue) -> Result<Report, Error> {
        let mut check = Check::new(self, queue);
        check.first = attempt::first_attempts(self, queue, check.disabled());
        pollster::block_on(check.run())
    }

    /// The async variant of `check`. It runs on the thread that polls it.
    ///
    /// # Errors
    /// The errors of `check`.
    pub async fn check_async(&self, queue: &wgpu::Queue) -> Result<Report, Error> {
        Check::new(self, queue).run().await
    }
}

struct Check<'a> {
    pipelines: &'a Pipelines,
    queue: &'a wgpu::Queue,
    verdicts: BTreeMap<Family, Verdict>,
    /// First attempts, by their place in [`Problem::all`]. They ran with no family disabled, except
    /// families that no check tries.
    first: BTreeMap<usize, (Families, Attempt)>,
}

impl<'a> Check<'a> {
    fn new(pipelines: &'a Pipelines, queue: &'a wgpu::Queue) -> Self {
        let said = |verdict: &Verdict| matches!(verdict, Verdict::Barred { .. } | Verdict::Avoided);
        let disabled = pipelines.report().findings.into_iter().filter(|(_, verdict)| said(verdict));
        Check { pipelines, queue, verdicts: disabled.collect(), first: BTreeMap::new() }
    }

    async fn run(mut self) -> Result<Report, Error> {
        for (n, problem) in Problem::all().enumerate() {
            if problem.concerns(&self.pipelines.facts()) {
                // A plan does not change if only families that it did not use are disabled.
                let first =
                    self.first.remove(&n).filter(|(used, _)| used.and(self.disabled()) == Families::NONE);
                self.judge(problem, first).await?;
            }
        }
        for family in Family::ALL {
            self.verdicts.entry(family).or_insert(Verdict::Unused);
        }
        self.pipelines.settle(self.verdicts);
        Ok(self.pipelines.report())
    }

    fn disabled(&self) -> Families {
        self.verdicts.iter().filter(|(_, verdict)| verdict.is_disabled()).map(|(family, _)| *family).collect()
    }

    async fn attempt(&self, problem: Problem, disabled: Families) -> Result<(Families, Attempt), Error> {
        attempt(self.pipelines, self.queue, problem, disabled).await
    }

    /// Disables the families that make `problem` wrong, until it is right or refused. `first` is
    /// the result of an earlier attempt.
    async fn judge(&mut self, problem: Problem, mut first: Option<(Families, Attempt)>) -> Result<(), Error> {
        loop {
            let (used, attempt) = match first.take() {
                Some(tried) => tried,
                None => self.attempt(problem, self.disabled()).await?,
            };
            let why = match attempt {
                Attempt::Right(share) => {
                    self.is_right(used, share);
                    return Ok(());
                }
                Attempt::Refused => return Ok(()),
                Attempt::Wrong(why) => why,
            };
            let guilty = self.guilty(problem, used).await?;
            let disabled = self.disabled();
            if guilty.iter().all(|family| disabled.contains(family)) {
                return Ok(());
            }
            self.verdicts.extend(guilty.iter().map(|family| (family, Verdict::Wrong { why: why.clone() })));
        }
    }

    fn is_right(&mut self, used: Families, share: f64) {
        for family in used.iter() {
            let verdict = self.verdicts.entry(family).or_insert(Verdict::Right { share });
            if let Verdict::Right { share: worst } = verdict {
                *worst = worst.max(share);
            }
        }
    }

    /// Returns the guilty families among those that went wrong together. It returns the family
    /// without which the problem is right. Else it returns the families without which the call is
    /// refused. Else it returns all of them.
    async fn guilty(&self, problem: Problem, used: Families) -> Result<Families, Error> {
        let disabled = self.disabled();
        let trusted = |family: &Family| matches!(self.verdicts.get(family), Some(Verdict::Right { .. }));
        let mut suspects: Families = used.iter().filter(|family| !trusted(family)).collect();
        if suspects == Families::NONE {
            suspects = used;
        }
        let mut irreplaceable = Families::NONE;
        for family in suspects.iter() {
            match self.attempt(problem, disabled.with(family)).await?.1 {
                Attempt::Right(_) => return Ok(Families::NONE.with(family)),
                Attempt::Refused => irreplaceable = irreplaceable.with(family),
                Attempt::Wrong(_) => {}
            }
        }
        Ok(if irreplaceable == Families::NONE { suspects } else { irreplaceable })
    }
}
