//! Whether this device computes what it should: small problems, compared with the reference.

pub(crate) mod data;
mod gradients;
mod problems;

use std::collections::BTreeMap;

use self::problems::Problem;
use crate::error::Error;
use crate::family::{Families, Family};
use crate::gpu::Gpu;
use crate::pipelines::Pipelines;
use crate::report::{Report, Verdict};

impl Pipelines {
    /// Computes a small problem with each family of kernels that plans for this device use, and compares it with the
    /// [`mod@reference`](crate::reference). A family that is wrong or does not compile is put aside: from then on plans of everything made
    /// with these pipelines do without it, as [`Family`] says, and [`report`](Self::report) says why. Calls that nothing is left
    /// for are refused with [`Error::PutAside`].
    ///
    /// `queue` is the device's. Blocks, mostly while kernels are compiled: on Mesa 26's software driver for some ten seconds, and one
    /// second once it has them in its cache; on that of Mesa 25 for twenty. A [`Scratch`](crate::Scratch) whose size was asked before may
    /// be too small afterwards, if something was
    /// put aside.
    ///
    /// The problems are small: tiles for large ones have other sizes, in the same text. What crashes a driver cannot be found
    /// out so; the families that are known to are [barred](Verdict::Barred), and not tried.
    ///
    /// # Errors
    /// A device that is lost or without memory. Then nothing is put aside.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check(&self, queue: &wgpu::Queue) -> Result<Report, Error> {
        pollster::block_on(self.check_async(queue))
    }

    /// `check`, not blocking.
    ///
    /// # Errors
    /// As `check`.
    pub async fn check_async(&self, queue: &wgpu::Queue) -> Result<Report, Error> {
        let said = |verdict: &Verdict| matches!(verdict, Verdict::Barred { .. } | Verdict::Avoided);
        let aside = self.report().findings.into_iter().filter(|(_, verdict)| said(verdict));
        let mut check = Check { pipelines: self, queue, verdicts: aside.collect() };
        for problem in Problem::ALL {
            if problem.concerns(&self.facts()) {
                check.judge(problem).await?;
            }
        }
        let mut verdicts = check.verdicts;
        for family in Family::ALL {
            verdicts.entry(family).or_insert(Verdict::Unused);
        }
        self.settle(verdicts);
        Ok(self.report())
    }
}

struct Check<'a> {
    pipelines: &'a Pipelines,
    queue: &'a wgpu::Queue,
    verdicts: BTreeMap<Family, Verdict>,
}

/// What became of a problem.
enum Attempt {
    Right(f64),
    Wrong(String),
    /// Plans have no kernels for it.
    Refused,
}

impl Check<'_> {
    fn aside(&self) -> Families {
        self.verdicts.iter().filter(|(_, verdict)| verdict.is_aside()).map(|(family, _)| *family).collect()
    }

    /// Solves `problem` by plans without `aside`, and says which families they used.
    async fn attempt(&self, problem: Problem, aside: Families) -> Result<(Families, Attempt), Error> {
        let pipelines = self.pipelines.without(aside);
        let gpu = Gpu::with_pipelines(self.queue.clone(), pipelines);
        let attempt = match problem.run(&gpu).await {
            Ok(Ok(share)) => Attempt::Right(share),
            Ok(Err(mismatch)) => Attempt::Wrong(mismatch.to_string()),
            Err(e @ (Error::DeviceLost(_) | Error::OutOfMemory { .. })) => return Err(e),
            Err(e @ Error::Refused { .. }) => Attempt::Wrong(e.to_string()),
            Err(_) => Attempt::Refused,
        };
        Ok((gpu.pipelines().used(), attempt))
    }

    /// Puts aside what makes `problem` go wrong, until it is right or refused.
    async fn judge(&mut self, problem: Problem) -> Result<(), Error> {
        loop {
            let (used, attempt) = self.attempt(problem, self.aside()).await?;
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

    /// Of the families that went wrong together, the one without which all is right; else the one without which there is no
    /// such call; else all of them.
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
