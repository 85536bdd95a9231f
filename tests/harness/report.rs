//! The runs, skips and failures of a test.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use web_time::Instant;
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, Shape};

use super::case::{Case, Expected, Truth, Weights};
use super::device::{Profile, matrices};
use super::rest::{left, rest};
use super::run::{FORMS, Got, Setup, run_async, setups};

/// The results of a test. [`Report::finish`] fails the test if a case failed.
#[derive(Debug)]
pub struct Report {
    name: &'static str,
    runs: usize,
    skipped: BTreeMap<String, Vec<String>>,
    failures: Vec<String>,
    /// The largest error over tolerance, and its case.
    worst: (f64, String),
    started: Instant,
}

/// The expected results of cases, by use of matrix units, types of tensors and bias, and weights.
pub type Truths = HashMap<(bool, DType, DType, Weights), (Case, Truth)>;

impl Report {
    pub fn new(name: &'static str) -> Self {
        LazyLock::force(&STARTED);
        let worst = (0.0, String::new());
        let started = Instant::now();
        Report { name, runs: 0, skipped: BTreeMap::new(), failures: Vec::new(), worst, started }
    }

    /// Runs random cases: the first `usual` on every target, and up to 60 by share ([`rest`]).
    pub fn draws<C: fmt::Display>(
        name: &'static str,
        usual: u64,
        random: impl Fn(Target, u64) -> C,
        each: impl Fn(&C) -> Result<f64, String>,
    ) {
        let mut report = Report::new(name);
        for form in FORMS {
            for seed in (0..60).filter(|seed| *seed < usual || rest(&format!("{name} {seed} {form:?}"))) {
                let case = random(form, seed + if form == Target::Software { 1000 } else { 0 });
                report.record(name, &case, each(&case));
            }
        }
        report.finish();
    }

    /// Calls `each` with every device that has matrix units. Without such a device the test is
    /// skipped.
    pub fn on_matrix_units(name: &'static str, mut each: impl FnMut(&mut Report, &'static Profile)) {
        let mut report = Report::new(name);
        for profile in matrices() {
            each(&mut report, profile);
        }
        if matrices().next().is_none() {
            return super::say(&format!("{name}: skipped, the adapter has no matrix units"));
        }
        report.finish();
    }

    pub fn runs(&self) -> usize {
        self.runs
    }

    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    /// Returns the number of skipped cases, once for each reason.
    pub fn skips(&self) -> usize {
        self.skipped.values().map(Vec::len).sum()
    }

    /// Runs `case` in every setup.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check(&mut self, case: &Case) {
        let mut truths = HashMap::new();
        for setup in setups(case) {
            self.check_in(case, &setup, &mut truths);
        }
    }

    /// Runs `case` in one setup.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_in(&mut self, case: &Case, setup: &Setup, truths: &mut Truths) {
        pollster::block_on(self.check_async(case, setup, truths, |config| config));
    }

    /// Like [`check_in`](Self::check_in), with the changes of `change`, not blocking.
    pub async fn check_async(
        &mut self,
        case: &Case,
        setup: &Setup,
        truths: &mut Truths,
        change: impl Fn(wgpu_attention::KernelOptions) -> wgpu_attention::KernelOptions,
    ) {
        let Setup { profile, dtype, bias, weights, .. } = *setup;
        let (stored, truth) = truths.entry((profile.matrix, dtype, bias, weights)).or_insert_with(|| {
            let stored = case.stored(dtype, bias);
            let of = if profile.matrix { Case::truth_of_halves } else { Case::truth };
            let truth = of(&stored, dtype, weights);
            (stored, truth)
        });
        let exact = stored.q == case.q && stored.k == case.k && stored.v == case.v;
        let exact = exact && stored.rules.floats().eq(case.rules.floats());
        let mut setup = *setup;
        if setup.too_many_buffers(case) {
            match run_async(stored, &setup, &change).await {
                Err(e) if e.contains("max_storage_buffers_per_shader_stage") => {
                    self.skip(format!("on `{}`, Fused: {e}", profile.name), &case.name);
                }
                other => self.record(&case.name, &setup, Err(format!("too many tensors gave {other:?}"))),
            }
            setup.path = Algorithm::Auto;
        }
        let setup = &setup;
        let got = match run_async(stored, setup, &change).await {
            Err(e) if profile.matrix && e.contains("matrix units for this call") => {
                return self.skip(format!("on `{}`: {e}", profile.name), &case.name);
            }
            got => got,
        };
        let judged = got.and_then(|got| judge_outputs(&case.expected, case.shape, truth, &got, exact));
        self.record(&case.name, setup, judged);
    }

    pub fn record(&mut self, case: &str, setup: &impl fmt::Display, judged: Result<f64, String>) {
        self.runs += 1;
        match judged {
            Ok(ratio) if ratio > self.worst.0 => self.worst = (ratio, format!("{case} ({setup})")),
            Ok(_) => {}
            Err(what) => self.failures.push(format!("{case} ({setup}): {what}")),
        }
    }

    pub fn skip(&mut self, why: String, case: &str) {
        let names = self.skipped.entry(why).or_default();
        if names.last().is_none_or(|last| last != case) {
            names.push(case.to_string());
        }
    }

    /// Returns the outcome of a report of one case: `passed`, `failed` or `skipped`, and details.
    pub fn outcome(&self) -> (&'static str, String) {
        let skipped = self.skipped.keys().cloned().collect::<Vec<_>>().join("; ");
        match (self.failures.is_empty(), self.runs) {
            (false, _) => ("failed", self.failures.join("; ")),
            (true, 0) if skipped.is_empty() => ("failed", "nothing was run".into()),
            (true, 0) => ("skipped", skipped),
            (true, _) => ("passed", format!("worst error {:.2} of the tolerance {skipped}", self.worst.0)),
        }
    }

    fn say_skipped(&self) {
        for (why, cases) in &self.skipped {
            super::say(&format!("{}: skipped {} cases {why}: {}", self.name, cases.len(), cases.join(", ")));
        }
    }

    pub fn finish(self) {
        self.say_skipped();
        let Report { name, runs, skipped, failures, worst, started } = self;
        if runs == 0 && failures.is_empty() && !skipped.is_empty() {
            return super::say(&format!("{name}: skipped, nothing of it runs on this adapter"));
        }
        let seconds = started.elapsed().as_secs();
        let left = left();
        let others = match left {
            0 => String::new(),
            n => format!(", {n} left to WGPU_ATTENTION_TEST_ALL"),
        };
        super::say(&format!(
            "{} {name}: {runs} runs in {seconds} s{others}, worst error {:.2} of the tolerance {}",
            so_far(),
            worst.0,
            worst.1
        ));
        assert!(runs > 0 || left > 0, "{name}: nothing was run");
        let shown = failures.iter().take(12).map(|f| format!("\n  {f}")).collect::<String>();
        assert!(failures.is_empty(), "{name}: {} of {runs} runs failed{shown}", failures.len());
    }
}

/// The start of the first test that reports.
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Returns the time since the start of the suite, and the number of finished reports. Most tests
/// have one or more reports.
fn so_far() -> String {
    static FINISHED: AtomicUsize = AtomicUsize::new(0);
    let seconds = STARTED.elapsed().as_secs();
    format!("[{}:{:02}, {}]", seconds / 60, seconds % 60, FINISHED.fetch_add(1, Relaxed) + 1)
}

/// Returns the largest error over tolerance of all outputs, against the reference. If the run's
/// inputs are exactly the case's, it also compares with the results of other libraries.
pub fn judge_outputs(
    expected: &Expected,
    shape: Shape,
    truth: &Truth,
    got: &Got,
    exact: bool,
) -> Result<f64, String> {
    let named = |what: &'static str| move |e: String| format!("{what}: {e}");
    let mut worst = truth.out.judge(&got.out).map_err(named("out"))?;
    if let Some(lse) = &got.lse {
        worst = worst.max(truth.lse.judge(lse).map_err(named("lse"))?);
    }
    match (&got.weights, &truth.weights) {
        (Some(got), Some(weights)) => worst = worst.max(weights.judge(got).map_err(named("weights"))?),
        (None, None) => {}
        _ => return Err("weights: the truth is of another kind".into()),
    }
    if exact {
        let per_head =
            matches!(&got.weights, Some(w) if w.len() == shape.weights().iter().product::<usize>());
        let (heads, mean) =
            if per_head { (got.weights.as_ref(), None) } else { (None, got.weights.as_ref()) };
        let all = [
            ("out", &expected.out, Some(&got.out)),
            ("lse", &expected.lse, got.lse.as_ref()),
            ("weights", &expected.weights, heads),
            ("mean weights", &expected.mean_weights, mean),
        ];
        for (what, expected, got) in all {
            if let (Some((want, tolerance)), Some(got)) = (expected, got) {
                wgpu_attention::reference::compare::compare(got, want, *tolerance)
                    .map_err(|e| format!("{what}, against the vector: {e}"))?;
            }
        }
    }
    Ok(worst)
}
