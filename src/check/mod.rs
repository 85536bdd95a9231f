//! Whether this device computes what it should: small problems, compared with the reference.

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
    /// Computes a small problem with each family of kernels that plans for this device use, and
    /// compares it with the
    /// [`mod@reference`](crate::reference). A family that is wrong or does not compile is put aside: from then on plans of everything made
    /// with these pipelines do without it, as [`Family`] says, and [`report`](Self::report) says why. Calls that nothing is left
    /// for are refused with [`Error::PutAside`].
    ///
    /// `queue` is the device's. Blocks, mostly while kernels are compiled, on as many threads as
    /// the machine has cores: on Mesa 26's software driver for four to fifteen seconds, and for at
    /// most three once it has the kernels in its cache.
    /// A [`Scratch`](crate::Scratch) whose size was asked before may be too small afterwards, if
    /// something was put aside.
    ///
    /// The problems are small: tiles for large ones have other sizes, in the same text. What
    /// crashes a driver cannot be found out so; the families that are known to are
    /// [barred](Verdict::Barred), and not tried.
    ///
    /// # Errors
    /// A device that is lost or without memory. Then nothing is put aside.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check(&self, queue: &wgpu::Queue) -> Result<Report, Error> {
        let mut check = Check::new(self, queue);
        check.first = attempt::first_attempts(self, queue, check.aside());
        pollster::block_on(check.run())
    }

    /// `check`, not blocking, and on the thread that polls it.
    ///
    /// # Errors
    /// As `check`.
    pub async fn check_async(&self, queue: &wgpu::Queue) -> Result<Report, Error> {
        Check::new(self, queue).run().await
    }
}

struct Check<'a> {
    pipelines: &'a Pipelines,
    queue: &'a wgpu::Queue,
    verdicts: BTreeMap<Family, Verdict>,
    /// Made before, with nothing put aside but what no check asks about: by their place in
    /// [`Problem::all`].
    first: BTreeMap<usize, (Families, Attempt)>,
}

impl<'a> Check<'a> {
    fn new(pipelines: &'a Pipelines, queue: &'a wgpu::Queue) -> Self {
        let said = |verdict: &Verdict| matches!(verdict, Verdict::Barred { .. } | Verdict::Avoided);
        let aside = pipelines.report().findings.into_iter().filter(|(_, verdict)| said(verdict));
        Check { pipelines, queue, verdicts: aside.collect(), first: BTreeMap::new() }
    }

    async fn run(mut self) -> Result<Report, Error> {
        for (n, problem) in Problem::all().enumerate() {
            if problem.concerns(&self.pipelines.facts()) {
                // A plan is the same without what it did not use.
                let first =
                    self.first.remove(&n).filter(|(used, _)| used.and(self.aside()) == Families::NONE);
                self.judge(problem, first).await?;
            }
        }
        for family in Family::ALL {
            self.verdicts.entry(family).or_insert(Verdict::Unused);
        }
        self.pipelines.settle(self.verdicts);
        Ok(self.pipelines.report())
    }

    fn aside(&self) -> Families {
        self.verdicts.iter().filter(|(_, verdict)| verdict.is_aside()).map(|(family, _)| *family).collect()
    }

    async fn attempt(&self, problem: Problem, aside: Families) -> Result<(Families, Attempt), Error> {
        attempt(self.pipelines, self.queue, problem, aside).await
    }

    /// Puts aside what makes `problem` go wrong, until it is right or refused. `first` is what
    /// became of it, if it was tried before.
    async fn judge(&mut self, problem: Problem, mut first: Option<(Families, Attempt)>) -> Result<(), Error> {
        loop {
            let (used, attempt) = match first.take() {
                Some(tried) => tried,
                None => self.attempt(problem, self.aside()).await?,
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
            let aside = self.aside();
            if guilty.iter().all(|family| aside.contains(family)) {
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

    /// Of the families that went wrong together, the one without which all is right; else the one
    /// without which there is no such call; else all of them.
    async fn guilty(&self, problem: Problem, used: Families) -> Result<Families, Error> {
        let aside = self.aside();
        let trusted = |family: &Family| matches!(self.verdicts.get(family), Some(Verdict::Right { .. }));
        let mut suspects: Families = used.iter().filter(|family| !trusted(family)).collect();
        if suspects == Families::NONE {
            suspects = used;
        }
        let mut irreplaceable = Families::NONE;
        for family in suspects.iter() {
            match self.attempt(problem, aside.with(family)).await?.1 {
                Attempt::Right(_) => return Ok(Families::NONE.with(family)),
                Attempt::Refused => irreplaceable = irreplaceable.with(family),
                Attempt::Wrong(_) => {}
            }
        }
        Ok(if irreplaceable == Families::NONE { suspects } else { irreplaceable })
    }
}
