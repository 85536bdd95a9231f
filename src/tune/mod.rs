//! Finds the fastest plans on this device, by measurement.

mod clock;
mod compete;
mod trial;
mod workload;

use clock::Clock;
use compete::{Race, Standing, compete};
use trial::{Runner, Trial};
pub use workload::Workload;

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;
use web_time::Instant;

use crate::device::tuned::{Class, Pick};
use crate::gpu::Gpu;
use crate::kernel::Pipelines;
use crate::kernel::guard::Watch;
use crate::tensor::Error;

/// Limits on the time and memory of tuning.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct TuningBudget {
    time: Duration,
    bytes: u64,
}

impl Default for TuningBudget {
    fn default() -> Self {
        Self::new()
    }
}

impl TuningBudget {
    /// Returns the default budget: half a second for a workload, and 256 MiB.
    pub const fn new() -> Self {
        TuningBudget { time: Duration::from_millis(500), bytes: 256 << 20 }
    }

    /// Sets the time for each workload. It starts when the rules' plan has run once. Work that has
    /// started is finished: a driver that compiles for seconds exceeds the time by as much.
    pub const fn time(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }

    /// Sets the bytes for workload tensors. The temporary memory may take as many.
    pub const fn memory(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }
}

/// The result of [`Pipelines::tune`] for a workload.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// The workload that was measured.
    pub workload: Workload,
    /// Time of a call with the plan by the rules; `None` if that plan failed.
    pub by_rules: Option<Duration>,
    /// Time of a call with the plan that is used from now on.
    pub tuned: Duration,
    /// True if that plan is not the plan by the rules.
    pub changed: bool,
    /// The number of plans that were timed.
    pub timed: usize,
    /// Plans that were wrong or refused, with the reason. They are not used.
    pub failed: Vec<String>,
    /// The deviations of the plan from the rules, in words.
    pub plan: String,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(f, "{}: {:.3} ms, ", self.workload, ms(self.tuned))?;
        match self.by_rules {
            _ if !self.changed => write!(f, "by the rules")?,
            Some(ruled) => write!(f, "{}, instead of {:.3} ms by the rules", self.plan, ms(ruled))?,
            None => write!(f, "{}, because the rules' plan failed", self.plan)?,
        }
        write!(f, "; {} plans timed, {} failed", self.timed, self.failed.len())
    }
}

impl Pipelines {
    /// Measures several plans for each of `workloads`: other tiles, kernels, and splits of the
    /// keys. Every operator of these pipelines, made before or after, then uses the fastest plan
    /// for similar calls. The plan by the rules always competes, and stays unless another is
    /// clearly faster. Plans with wrong results are dropped. Workloads that were measured before,
    /// or came from [`use_tuned`](Self::use_tuned), are not measured again. A
    /// [`KernelOptions`](crate::KernelOptions) that chooses a plan, such as
    /// [`KernelOptions::fixed`](crate::KernelOptions::fixed), ignores the measurements.
    ///
    /// `queue` is the device's. The function blocks, submits and compiles. Run it at an
    /// application's start or in a separate thread, while the device is otherwise idle. The host's
    /// clock times devices without timestamp queries. Store the result:
    ///
    /// ```no_run
    /// # fn f(pipelines: &wgpu_attention::Pipelines, queue: &wgpu::Queue) -> Result<(), Box<dyn std::error::Error>> {
    /// use wgpu_attention::{DType, Shape};
    /// use wgpu_attention::tuning::{TuningBudget, TuningCache, Workload};
    ///
    /// pipelines.use_tuned(&TuningCache::read("attention.tuned"));
    /// let prompt = Workload::attention(Shape::new(1, 8, 512, 64), DType::F32).masked();
    /// for measured in pipelines.tune(queue, &[prompt], TuningBudget::new())? {
    ///     println!("{measured}"); // nothing the second time
    /// }
    /// pipelines.tuned().write("attention.tuned")?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A workload that is larger than `limits` or that the device cannot compute, or a lost device.
    /// The results of earlier workloads remain in use.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn tune(
        &self,
        queue: &wgpu::Queue,
        workloads: &[Workload],
        limits: TuningBudget,
    ) -> Result<Vec<Measured>, Error> {
        pollster::block_on(self.tune_async(queue, workloads, limits))
    }

    /// The async variant of `tune`.
    ///
    /// # Errors
    /// The errors of `tune`.
    pub async fn tune_async(
        &self,
        queue: &wgpu::Queue,
        workloads: &[Workload],
        limits: TuningBudget,
    ) -> Result<Vec<Measured>, Error> {
        let gpu = Gpu::with_pipelines(queue.clone(), self.clone());
        let mut all = Vec::new();
        for workload in workloads {
            all.extend(tune_one(&gpu, *workload, limits).await?);
        }
        Ok(all)
    }
}

/// Tunes one workload, unless it was tuned before.
async fn tune_one(gpu: &Gpu, workload: Workload, limits: TuningBudget) -> Result<Option<Measured>, Error> {
    let device = gpu.pipelines().facts();
    let bytes = workload.bytes();
    let needed = bytes.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
    if needed > limits.bytes {
        let (what, limit) = ("bytes for a workload", limits.bytes);
        return Err(Error::Limit { what, needed, limit, name: "TuningBudget::memory" });
    }
    let (largest, limit) = (bytes.into_iter().max().unwrap_or(0), device.max_binding_bytes);
    if largest > limit {
        return Err(Error::BindingLimit { tensor: "workload", bytes: largest, limit });
    }
    let mut trial = Trial::new(gpu, workload)?;
    let planned = trial.planned(gpu.pipelines())?;
    let Some(class) = planned.class() else { return Ok(None) };
    if device.pick(class).is_some() {
        return Ok(None);
    }
    trial.fill().await?;
    let contest = Contest::new(gpu, &trial, class, limits)?;
    let Some(first) = contest.among(gpu.pipelines(), &planned.candidates(&device)?).await? else {
        let description = contest.failures().pop().map(|(_, why)| why).unwrap_or_default();
        return Err(Error::Refused { what: "every plan of a workload", description });
    };
    // The winner competes with other splits of the keys, and stays unless one is clearly faster.
    let refined = planned.refined(first.pick, &device)?;
    let second = if refined.len() > 1 { contest.among(&first.pipelines, &refined).await? } else { None };
    let winner = second.as_ref().unwrap_or(&first);
    // The times of two competitions are not comparable; ratios are.
    let gain = second.as_ref().map_or(1.0, |second| second.standing.best / second.standing.first);
    gpu.pipelines().adopt(class, winner.pick, &winner.pipelines);
    let failed = contest.failures();
    let rules_failed = failed.iter().any(|(pick, _)| *pick == Pick::default());
    Ok(Some(Measured {
        workload,
        by_rules: (!rules_failed).then(|| Duration::from_secs_f64(first.standing.first)),
        tuned: Duration::from_secs_f64(first.standing.best * gain),
        changed: winner.pick != Pick::default(),
        timed: first.standing.timed + second.as_ref().map_or(0, |second| second.standing.timed - 1),
        failed: failed.into_iter().map(|(pick, why)| format!("{pick}: {why}")).collect(),
        plan: winner.pick.to_string(),
    }))
}

/// The shortest sample. In shorter ones the cost of a submission dominates, and browsers round
/// times to 0.1 ms.
const SAMPLE: f64 = 0.002;
const MOST_REPEATS: f64 = 64.0;

/// A contest of plans for one workload.
struct Contest<'a> {
    gpu: &'a Gpu,
    trial: &'a Trial<'a>,
    class: Class,
    limits: TuningBudget,
    clock: Clock<'a>,
    /// Calls of a sample, once a call has been timed.
    repeats: OnceLock<usize>,
    /// The start of the measured time.
    start: OnceLock<Instant>,
    failed: Mutex<Vec<(Pick, String)>>,
}

/// A plan that won, with its compiled kernels.
struct Winner {
    pick: Pick,
    pipelines: Pipelines,
    standing: Standing,
}

/// The plans of a contest, with their pipelines and runners.
struct Plans<'a> {
    contest: &'a Contest<'a>,
    picks: &'a [Pick],
    pipelines: &'a [Pipelines],
    runners: Vec<Option<Runner<'a>>>,
    lost: Option<Error>,
}

impl Race for Plans<'_> {
    fn is_late(&self) -> bool {
        let Contest { start, limits, .. } = self.contest;
        start.get().is_some_and(|start| start.elapsed() > limits.time)
    }

    async fn time(&mut self, n: usize) -> Option<f64> {
        let timed = match &mut self.runners[n] {
            Some(runner) => self.contest.sample(runner).await,
            none => self.contest.begin(&self.pipelines[n], none).await,
        };
        match timed {
            Ok(seconds) => return Some(seconds),
            Err(e @ Error::DeviceLost(_)) => self.lost = Some(e),
            Err(e) => self.contest.fail(self.picks[n], &e),
        }
        None
    }
}

impl<'a> Contest<'a> {
    fn new(gpu: &'a Gpu, trial: &'a Trial<'a>, class: Class, limits: TuningBudget) -> Result<Self, Error> {
        let clock = Clock::new(gpu)?;
        let (repeats, start, failed) = (OnceLock::new(), OnceLock::new(), Mutex::default());
        Ok(Contest { gpu, trial, class, limits, clock, repeats, start, failed })
    }

    /// Returns the fastest of `picks`. The first pick shares the compiled kernels of `base`, as do
    /// picks that differ from it only in splits.
    async fn among(&self, base: &Pipelines, picks: &[Pick]) -> Result<Option<Winner>, Error> {
        let shares = |pick: &Pick| Pick { splits: 0, ..*pick } == Pick { splits: 0, ..picks[0] };
        let pipelines: Vec<_> =
            picks.iter().map(|pick| base.with_pick(self.class, *pick, shares(pick))).collect();
        let runners = picks.iter().map(|_| None).collect();
        let mut race = Plans { contest: self, picks, pipelines: &pipelines, runners, lost: None };
        let standing = compete(picks.len(), &mut race).await;
        if let Some(lost) = race.lost {
            return Err(lost);
        }
        Ok(standing.map(|standing| Winner {
            pick: picks[standing.winner],
            pipelines: pipelines[standing.winner].clone(),
            standing,
        }))
    }

    fn fail(&self, pick: Pick, error: &Error) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).push((pick, error.to_string()));
    }

    /// Returns the plans that failed so far, and forgets them.
    fn failures(&self) -> Vec<(Pick, String)> {
        std::mem::take(&mut *self.failed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the first call of a plan: compiles and runs it, and compares the result with the
    /// reference.
    async fn begin<'r>(
        &'r self,
        pipelines: &Pipelines,
        runner: &mut Option<Runner<'r>>,
    ) -> Result<f64, Error> {
        let watch = Watch::begin(self.gpu.device());
        self.trial.forget_output()?;
        let mut begun = self.trial.runner(pipelines, self.limits.bytes)?;
        let seconds = self.clock.time(|pass| begun.record(pass, 1)).await?;
        watch.end("a plan that was tried").await?;
        if let Err(wrong) = self.trial.judge().await? {
            return Err(Error::Refused { what: "a plan's result", description: wrong.to_string() });
        }
        self.start.get_or_init(Instant::now);
        *runner = Some(begun);
        Ok(seconds)
    }

    /// Returns the seconds of a call.
    async fn sample(&self, runner: &mut Runner<'_>) -> Result<f64, Error> {
        let repeats = self.repeats.get().copied().unwrap_or(1);
        let seconds = self.clock.time(|pass| runner.record(pass, repeats)).await? / repeats as f64;
        self.repeats.get_or_init(|| (SAMPLE / seconds).ceil().clamp(1.0, MOST_REPEATS) as usize);
        Ok(seconds)
    }
}
