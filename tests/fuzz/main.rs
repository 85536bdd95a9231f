//! Hostile input: random calls of the whole public API, valid ones and ones with up to three
//! faults.
//!
//! No case may panic, let an error of wgpu escape, write outside its outputs, or affect the next
//! call. Accepted calls whose results can be judged must agree with the reference. Cases depend on
//! their seed alone:
//!
//! - `WGPU_ATTENTION_FUZZ_CASES`: the number of cases. By default, those among [`FIRST`] whose
//!   kernels belong to a third of the families. `WGPU_ATTENTION_TEST_ALL` may select all (see
//!   `tests/harness/rest.rs`);
//! - `WGPU_ATTENTION_FUZZ_FIRST`: the first seed, by default 0;
//! - `WGPU_ATTENTION_FUZZ_SEED`: runs only this seed, and prints its case;
//! - `WGPU_ATTENTION_FUZZ_SUBJECT`: runs only cases whose subject contains this text, such as
//!   `local`;
//! - `WGPU_ATTENTION_FUZZ_GROUP`: `k/n` runs only cases of families with remainder `k` of `n`.
//!   Then no other part compiles their kernels (`scripts/hostile`);
//! - `WGPU_ATTENTION_FUZZ_SNAPSHOT`: a file that gets a line for each case. The line has its seed,
//!   subject and outcome, and its dispatches with their grids. It ends with a hash of the buffers
//!   after it (`scripts/snapshot`);
//! - `WGPU_ATTENTION_FUZZ_THREADS`: the number of threads, each with separate devices. By default
//!   the number of processors, at most 4.
//!
//! Every case belongs to one of [`FAMILIES`] families, which decide its kernels, because
//! compilation dominates the time. Every [`BLOCK`] seeds bring other families. After a crash of the
//! driver, `target/tmp/fuzz` holds the seeds that were running.

mod additive;
mod arena;
mod attention;
mod caches;
mod call;
mod choices;
mod gradients;
mod host;
mod indexer;
mod layers;
mod low_rank;
mod masks;
mod native;
mod operands;
mod positions;
mod products;
mod recurrent;
mod rows;
mod selected;
mod stacks;
mod world;

#[path = "../harness/case.rs"]
#[allow(dead_code)]
mod case;
#[path = "../harness/layer_options.rs"]
mod layer_options;
#[path = "../harness/memory.rs"]
#[allow(dead_code)]
mod memory;
#[path = "../harness/mods.rs"]
#[allow(dead_code)]
mod mods;
#[path = "../harness/process.rs"]
mod process;
#[path = "../harness/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../harness/rest.rs"]
#[allow(dead_code)]
mod rest;

mod device {
    /// True if the adapter is a software driver.
    pub fn is_software() -> bool {
        crate::adapter().get_info().device_type == wgpu::DeviceType::Cpu
    }
}

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use choices::Choices;
use process::resident;
use world::{Outcome, World};

/// The sum of the subjects' families.
const FAMILIES: u64 = {
    let (mut sum, mut n) = (0, 0);
    while n < SUBJECTS.len() {
        sum += SUBJECTS[n].1;
        n += 1;
    }
    sum
};
const BLOCK: u64 = 1_000_000;
/// The number of cases of which some run by default.
const FIRST: u64 = 10_000;
/// The number of failures after which more would not help.
const ENOUGH: usize = 10;
/// The time after which a case counts as stuck. A case takes a few milliseconds, and a few seconds
/// if it compiles.
const STUCK: Duration = Duration::from_secs(240);

type Subject = fn(&mut World, &mut Choices, &mut Choices, &mut String) -> Result<Outcome, String>;

/// The subjects of calls, and their numbers of families.
const SUBJECTS: [(&str, u64, Subject); 45] = [
    ("forward", 24, attention::forward),
    ("classify", 4, attention::classify),
    ("project", 4, products::project),
    ("merge", 4, products::merge),
    ("layer", 5, layers::layer),
    ("cache", 9, caches::cache),
    ("rotate", 3, positions::rotate),
    ("add", 3, positions::add),
    ("backward", 10, gradients::attention),
    ("layer backward", 4, layers::backward),
    ("project backward", 3, gradients::project),
    ("merge backward", 2, gradients::merge),
    ("table backward", 1, positions::table),
    ("attend", 3, host::attend),
    ("multi_head", 2, host::layer),
    ("linformer", 3, low_rank::linformer),
    ("lsh attention", 4, low_rank::lsh),
    ("radix sort", 1, low_rank::sort),
    ("additive attention", 4, additive::additive),
    ("attentional vector", 2, additive::attentional),
    ("linear attention", 5, additive::linear),
    ("recurrent attention", 5, recurrent::recurrent),
    ("selected attention", 5, selected::selected),
    ("native sparse attention", 4, native::native),
    ("local attention", 5, additive::local),
    ("predicted positions", 1, additive::predictor),
    ("weight norm", 1, additive::weight_norm),
    ("quantized projection", 4, products::quantized),
    ("quantized rows", 1, products::quantized_rows),
    ("norm", 4, rows::norm),
    ("elementwise", 4, rows::elementwise),
    ("embedding", 3, rows::embedding),
    ("mean pool", 2, rows::mean_pool),
    ("gated norm", 3, rows::gated_norm),
    ("causal convolution", 4, rows::causal_conv),
    ("log-softmax", 2, rows::log_softmax),
    ("top-k", 1, rows::top_k),
    ("top-k with a large k", 2, indexer::large_k),
    ("indexer", 3, indexer::indexer),
    ("encoder", 3, stacks::encoder),
    ("encoder backward", 3, stacks::encoder_backward),
    ("decoder", 3, stacks::decoder),
    ("decoder steps", 2, stacks::decoder_steps),
    // These compile nothing.
    ("reference", 2, host::stages),
    ("views", 1, host::views),
];

thread_local! {
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Returns the subject that the cases of a family call.
fn subject_of(family: u64) -> &'static (&'static str, u64, Subject) {
    let mut n = family % FAMILIES;
    let found = SUBJECTS.iter().find(|(_, count, _)| {
        let found = n < *count;
        n = n.wrapping_sub(*count);
        found
    });
    found.expect("as many as there are families")
}

/// Runs one case on its world. `family` decides the kernels, `c` the rest.
fn run(
    worlds: &mut [World; 2],
    family: u64,
    in_one_buffer: bool,
    c: &mut Choices,
    said: &mut String,
) -> (&'static str, Result<Outcome, String>) {
    let (name, _, subject) = subject_of(family);
    let f = &mut Choices::seeded(family);
    let world = &mut worlds[f.pick(&[0, 0, 1])];
    world.arena.place(in_one_buffer);
    PANICS.take();
    let result = catch_unwind(AssertUnwindSafe(|| subject(world, f, c, said)));
    let panics = PANICS.take();
    let result = match result {
        Ok(result) if panics.is_empty() => result.and_then(|outcome| world.uncaptured().map(|()| outcome)),
        _ => Err(format!("panic: {}", panics.join("; "))),
    };
    (name, result)
}

/// True if the cases of a family run by default: one family in three, and all that compile nothing.
fn runs(family: u64) -> bool {
    let n = family % FAMILIES;
    let name = format!("family {n}");
    n >= FAMILIES - 3 || n.is_multiple_of(3) && rest::due(&name) || rest::rest(&name)
}

/// Returns the family of a seed.
fn family(seed: u64) -> u64 {
    seed / BLOCK * FAMILIES + seed % FAMILIES
}

/// True if all tensors of a case are in one buffer. A quarter of the families have such cases.
/// Their kernels depend on which tensors overlap, so nearly every case compiles some. After
/// [`FIRST`], one case in sixteen is left.
fn in_one_buffer(seed: u64) -> bool {
    family(seed) % 4 == 3 && (seed < FIRST || (seed / FAMILIES).is_multiple_of(16))
}

fn worlds(adapter: &wgpu::Adapter) -> [World; 2] {
    [true, false].map(|full| World::new(adapter, full))
}

fn adapter() -> wgpu::Adapter {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
        .expect("tests need an adapter: run them as `scripts/gpu cargo test --release`")
}

/// Writes to standard error directly. The test runner does not hide that.
fn say(line: &str) {
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

fn listen() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.with_borrow_mut(|panics| panics.push(info.to_string()));
        // A panic of a thread that runs no case.
        if std::thread::current().name().is_some_and(|name| !name.starts_with("case")) {
            before(info);
        }
    }));
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(format!("WGPU_ATTENTION_FUZZ_{name}")).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("WGPU_ATTENTION_FUZZ_{name} is {text}, no number")))
}

/// Returns the asked group of families and the number of groups, or the group of all.
fn group() -> (u64, u64) {
    let Ok(text) = std::env::var("WGPU_ATTENTION_FUZZ_GROUP") else { return (0, 1) };
    let numbers = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    numbers.filter(|(k, n)| k < n).unwrap_or_else(|| panic!("WGPU_ATTENTION_FUZZ_GROUP is {text}, not k/n"))
}

/// Returns the file in which a thread records its current seed.
fn trace(thread: u64) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    folder.join(format!("running-{}-{thread}", group().0))
}

#[derive(Default)]
struct Tally {
    outcomes: BTreeMap<String, usize>,
    subjects: BTreeMap<&'static str, [usize; 3]>,
    failures: Vec<String>,
    compiled: BTreeMap<&'static str, usize>,
    snapshot: Vec<(u64, String)>,
    /// The memory of the process in MiB after a tenth of the cases.
    early_memory: Option<u64>,
}

impl Tally {
    fn count(&mut self, subject: &'static str, outcome: &Outcome) {
        let (name, n) = match outcome {
            Outcome::Judged => ("judged".to_string(), 0),
            Outcome::Ran => ("run".to_string(), 0),
            Outcome::Accepted => ("accepted, not run".to_string(), 1),
            Outcome::Refused(error) => (error.split(' ').take(3).collect::<Vec<_>>().join(" "), 2),
        };
        *self.outcomes.entry(name).or_default() += 1;
        self.subjects.entry(subject).or_default()[n] += 1;
    }
}

#[test]
fn hostile_input() {
    listen();
    let only = variable("SEED");
    let first = only.or(variable("FIRST")).unwrap_or(0);
    let wanted = if only.is_some() { Some(1) } else { variable("CASES") };
    let cases = wanted.unwrap_or(FIRST);
    let subject = std::env::var("WGPU_ATTENTION_FUZZ_SUBJECT").ok();
    let snapshot = std::env::var_os("WGPU_ATTENTION_FUZZ_SNAPSHOT");
    let asked = |n: u64| subject.as_ref().is_none_or(|subject| subject_of(n).0.contains(subject));
    let (remainder, groups) = group();
    let in_group = |n: u64| n % groups == remainder || only.is_some();
    let families: Vec<bool> =
        (0..FAMILIES).map(|n| asked(n) && in_group(n) && (wanted.is_some() || runs(n))).collect();
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get().min(4) as u64);
    // Each family belongs to one thread.
    let threads = variable("THREADS").unwrap_or(processors).clamp(1, cases.max(1));
    let started = Instant::now();
    let tally = Mutex::new(Tally::default());
    let [done, failed] = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let since: Vec<_> = (0..threads).map(|_| AtomicU64::new(0)).collect();
    let work = |thread: u64| {
        let mut trace = std::fs::File::create(trace(thread)).expect("the target folder can be written");
        let adapter = adapter();
        let mut all = worlds(&adapter);
        let mut block = None;
        let own = |seed: &u64| {
            let n = seed % FAMILIES;
            families[n as usize] && (n / groups % threads == thread || cases == 1)
        };
        for seed in (first..first + cases).filter(own) {
            if failed.load(Relaxed) >= ENOUGH {
                break;
            }
            if block.replace(seed / BLOCK).is_some_and(|block| block != seed / BLOCK) {
                all.iter().for_each(|world| world.gpu.pipelines().clear());
            }
            use std::io::Seek;
            let _ = trace.rewind().and_then(|()| writeln!(trace, "{seed:20}"));
            since[thread as usize].store(started.elapsed().as_secs() + 1, Relaxed);
            let mut said = String::new();
            let compiled = |all: &[World; 2]| all.iter().map(|w| w.gpu.pipelines().compiled()).sum::<usize>();
            let before = compiled(&all);
            let ((subject, result), bound) = wgpu_attention::inspect::bound(|| {
                run(&mut all, family(seed), in_one_buffer(seed), &mut Choices::seeded(seed), &mut said)
            });
            let line = snapshot.as_ref().map(|_| {
                let bits = all.iter_mut().fold(0, |bits, world| bits ^ world.arena.take_hash());
                format!("{seed} {subject}: {result:?}, {bound:?}, {bits:016x}")
            });
            let compiled = compiled(&all) - before;
            if only.is_some() {
                say(&format!("{subject}: {said}: {result:?}"));
            }
            let mut tally = tally.lock().expect("no panic here");
            *tally.compiled.entry(subject).or_default() += compiled;
            tally.snapshot.extend(line.map(|line| (seed, line)));
            if seed < first + cases / 10 {
                tally.early_memory = resident();
            }
            match result {
                Ok(outcome) => tally.count(subject, &outcome),
                Err(why) => {
                    failed.fetch_add(1, Relaxed);
                    let text = format!("WGPU_ATTENTION_FUZZ_SEED={seed} ({subject}): {why}\n    {said}");
                    say(&format!("  {text}"));
                    tally.failures.push(text);
                    drop(tally);
                    all = worlds(&adapter);
                }
            }
            let n = done.fetch_add(1, Relaxed) + 1;
            if n.is_multiple_of(1000) {
                say(&format!("hostile input: {n} cases in {} s", started.elapsed().as_secs()));
            }
        }
        since[thread as usize].store(u64::MAX, Relaxed);
    };
    std::thread::scope(|scope| {
        let work = &work;
        for thread in 0..threads {
            let named = std::thread::Builder::new().name(format!("case {thread}"));
            named.spawn_scoped(scope, move || work(thread)).expect("a thread");
        }
        // A case that hangs would hang the test.
        while since.iter().any(|since| since.load(Relaxed) != u64::MAX) {
            std::thread::sleep(Duration::from_millis(50));
            let now = started.elapsed().as_secs();
            for (thread, since) in since.iter().map(|s| s.load(Relaxed)).enumerate() {
                if since != u64::MAX && since != 0 && now > since + STUCK.as_secs() {
                    let seed = std::fs::read_to_string(trace(thread as u64)).unwrap_or_default();
                    say(&format!("hostile input: WGPU_ATTENTION_FUZZ_SEED={} does not end", seed.trim()));
                    std::process::abort();
                }
            }
        }
    });
    let Tally { outcomes, subjects, failures, compiled, snapshot: mut lines, early_memory } =
        tally.into_inner().expect("no panic here");
    let ran = done.into_inner();
    if let Some(file) = snapshot {
        lines.sort_unstable();
        let text: String = lines.into_iter().map(|(_, line)| line + "\n").collect();
        std::fs::write(file, text).expect("the file of the snapshot can be written");
    }
    say(&format!(
        "hostile input: {ran} cases from {first} on in {} s on {threads} threads",
        started.elapsed().as_secs()
    ));
    let total = |n: usize| subjects.values().map(|counts| counts[n]).sum::<usize>();
    let mib = |memory: Option<u64>| memory.map_or("unknown".into(), |mib| mib.to_string());
    say(&format!(
        "  {} faults, {} run, {} accepted otherwise, {} refused; memory {} MiB after a tenth, {} MiB at the end",
        failures.len(),
        total(0),
        total(1),
        total(2),
        mib(early_memory),
        mib(resident())
    ));
    say(&format!("  by outcome: {outcomes:?}"));
    say(&format!("  run, accepted otherwise, refused: {subjects:?}"));
    say(&format!("  kernels compiled: {compiled:?}"));
    assert!(failures.is_empty(), "{} of {ran} cases failed:\n  {}", failures.len(), failures.join("\n  "));
    if ran >= 3000 && subject.is_none() && groups == 1 {
        let judged = outcomes.get("judged").copied().unwrap_or(0);
        assert!(
            judged * 5 > ran,
            "too few cases are judged for the rest to mean anything: {judged} of {ran}"
        );
    }
}

/// The generator also accepts any number of a fuzzer's bytes, or none.
#[test]
fn cases_from_bytes() {
    listen();
    let mut all = worlds(&adapter());
    let work = |all: &mut [World; 2]| {
        for n in 0..40u64 {
            let bytes: Vec<u8> = (0..n * n).map(|k| (k * k * 31 + n * 17) as u8).collect();
            let mut c = Choices::bytes(&bytes);
            let family = c.word() % FAMILIES;
            let mut said = String::new();
            let (subject, result) = run(all, family, family % 4 == 3, &mut c, &mut said);
            result.unwrap_or_else(|why| panic!("{n} bytes ({subject}): {why}\n{said}"));
        }
    };
    let named = std::thread::Builder::new().name("case of bytes".into());
    std::thread::scope(|scope| named.spawn_scoped(scope, || work(&mut all)).expect("a thread").join())
        .expect("no failure");
}
