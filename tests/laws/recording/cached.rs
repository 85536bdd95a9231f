//! Generation that is recorded far ahead. Every step is the same recording, at the same cost, after
//! any earlier steps.

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::tuning::Target;
use wgpu_attention::{Cache, CacheConfig, Forward, KernelOptions};

use wgpu_attention::reference::Real;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};

use super::*;

const HEADS: usize = 2;
const DIM: usize = 8;
const STEPS: usize = 1000;

/// The buffers of a generation: queries, keys and values of all steps, and the buffers of one step.
struct Generation {
    own: Own,
    cache: Cache,
    attention: Attention,
    all: [wgpu::Buffer; 4],
    step: [wgpu::Buffer; 4],
    data: [Vec<f32>; 3],
}

impl Generation {
    fn new(layout: CacheLayout, storage: CacheStorage, capacity: usize, form: Target) -> Self {
        let own = Own::new();
        let gpu = &own.gpu;
        let config = CacheConfig::new(1, DIM, capacity).storage(storage).layout(layout);
        let cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let config =
            Config::new(HEADS, DIM).kv_heads(1).kernel_options(KernelOptions::new().target(form).splits(3));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        // Whole levels of 1/16, with the largest level in each row: every storage holds them
        // exactly.
        let level =
            |n: usize| if n.is_multiple_of(DIM) { 127.0 } else { (n * 37 % 255) as f32 - 127.0 } / 16.0;
        let keys = |seed: usize| (0..STEPS * DIM).map(|n| level(n + seed * DIM * 7)).collect::<Vec<_>>();
        let data = [noise(STEPS * HEADS * DIM, 0.7).iter().map(|x| x * 0.2).collect(), keys(1), keys(2)];
        let [q, k, v] = data.each_ref().map(|x: &Vec<f32>| gpu.upload(x).expect("an upload"));
        let out = gpu.upload(&vec![POISON; STEPS * HEADS * DIM]).expect("an upload");
        let step = [HEADS, 1, 1, HEADS].map(|heads| gpu.buffer(4 * heads * DIM).expect("a buffer"));
        Generation { cache, attention, all: [q, k, v, out], step, data, own }
    }

    fn view(&self, n: usize, heads: usize) -> TensorView<'_> {
        TensorView::new(&self.step[n], DType::F32, [1, heads, 1, DIM])
    }

    fn scratch(&self) -> Scratch {
        let call = Forward::with_cache(self.view(0, HEADS), &self.cache, self.view(3, HEADS)).at_end();
        let size = self.attention.scratch_size(&call.mask(Mask::causal())).expect("a size");
        Scratch::new(self.own.gpu.device(), size).expect("scratch")
    }

    /// Copies the inputs of step `n` to the step's buffers, records the step, and copies its
    /// output.
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, n: usize, scratch: &mut Scratch) {
        let bytes = |heads: usize| 4 * (heads * DIM) as u64;
        for (side, heads) in [HEADS, 1, 1].into_iter().enumerate() {
            let from = n as u64 * bytes(heads);
            encoder.copy_buffer_to_buffer(&self.all[side], from, &self.step[side], 0, bytes(heads));
        }
        self.generate(encoder, scratch);
        let to = n as u64 * bytes(HEADS);
        encoder.copy_buffer_to_buffer(&self.step[3], 0, &self.all[3], to, bytes(HEADS));
    }

    /// Records the step alone.
    fn generate(&mut self, encoder: &mut wgpu::CommandEncoder, scratch: &mut Scratch) {
        self.cache.advance(encoder, Tokens::All(1)).expect("room");
        let append = Append::new(self.view(1, 1), self.view(2, 1));
        self.cache.append(encoder, 0, &append).expect("a recording");
        let call = Forward::with_cache(self.view(0, HEADS), &self.cache, self.view(3, HEADS));
        self.attention.forward(encoder, &call.mask(Mask::causal()), scratch).expect("a recording");
    }

    /// Computes one causal call over all tokens, or over the tokens that the ring retains.
    fn truth<R: Real>(&self, ring: Option<[usize; 2]>) -> Vec<f64> {
        let shape = Shape { kv_heads: 1, ..Shape::new(1, HEADS, STEPS, DIM) };
        // Queries are stored step after step, the reference needs them head after head.
        let q: Vec<R> = (0..HEADS * STEPS * DIM)
            .map(|n| {
                let (h, i, d) = (n / (STEPS * DIM), n / DIM % STEPS, n % DIM);
                R::of(f64::from(self.data[0][(i * HEADS + h) * DIM + d]))
            })
            .collect();
        let keep: Vec<bool> = (0..STEPS * STEPS)
            .map(|n| {
                let (i, j) = (n / STEPS, n % STEPS);
                ring.is_none_or(|[sinks, kept]| j < sinks || j + kept > i + sinks)
            })
            .collect();
        let keep = wgpu_attention::HostTensor::new(&keep, [1, 1, STEPS, STEPS]);
        let options = Options::new().mask(Mask::causal().attn_mask(keep));
        let [k, v] = [1, 2].map(|n: usize| widen::<R>(&self.data[n]));
        let out = reference::attention::<R>(&q, &k, &v, shape, &options).expect("a truth").out;
        (0..STEPS * HEADS * DIM)
            .map(|n| {
                let (i, h, d) = (n / (HEADS * DIM), n / DIM % HEADS, n % DIM);
                out[(h * STEPS + i) * DIM + d].f64()
            })
            .collect()
    }
}

/// A thousand tokens are recorded in four encoders without a read-back. After the first step
/// nothing is created.
#[test]
fn a_thousand_steps_are_recorded_ahead() {
    crate::harness::in_turn!();
    let paged = CacheLayout::Paged { page: 64, pages: 16 };
    for (layout, storage, capacity, form) in [
        (CacheLayout::Contiguous, CacheStorage::F32, STEPS, Target::Software),
        (CacheLayout::Ring { sink_tokens: 4 }, CacheStorage::Q8(ScaleGroup::Row), 50, Target::Gpu),
        (paged, CacheStorage::F16, STEPS, Target::Software),
    ] {
        let mut generation = Generation::new(layout, storage, capacity, form);
        let gpu = generation.own.gpu.clone();
        let mut scratch = generation.scratch();
        if let CacheLayout::Paged { .. } = layout {
            // Steps upload new pages. Pages that exist already cost nothing.
            generation.cache.reserve(0, STEPS).expect("all pages");
        }
        let mut created = None;
        let mut n = 0;
        for encoder_n in 0..4 {
            let mut encoder = encoder(&gpu);
            while n < (encoder_n + 1) * STEPS / 4 {
                generation.record(&mut encoder, n, &mut scratch);
                n += 1;
                // Counts begin after the first step, which compiles and binds.
                let alive = generation.own.alive().expect("wgpu counts resources on this backend");
                let now = (gpu.pipelines().compiled(), alive);
                if n > 1 {
                    assert_eq!(*created.get_or_insert(now), now, "{layout:?}: step {n} created something");
                }
            }
            gpu.queue().submit([encoder.finish()]);
        }
        let lengths = generation.cache.lengths();
        let table = gpu.download::<u32>(lengths.buffer(), lengths.offset() + 1).expect("a read-back");
        assert_eq!(table[lengths.offset()], STEPS as u32, "{layout:?}");
        assert_eq!(generation.cache.len(0), Some(STEPS));
        let got: Vec<f64> =
            widen(&gpu.download::<f32>(&generation.all[3], STEPS * HEADS * DIM).expect("a read-back"));
        let ring = if let CacheLayout::Ring { sink_tokens: sinks } = layout {
            Some([sinks, capacity])
        } else {
            None
        };
        let want = generation.truth::<f64>(ring);
        // No value exceeds 127 / 16.
        let tolerance = Tolerance::from_naive(&generation.truth::<f32>(ring), &want, 8.0, EPSILON_F32);
        let difference = compare(&got, &want, tolerance).unwrap_or_else(|e| panic!("{layout:?}: {e}"));
        say(&format!(
            "{STEPS} steps of {layout:?}: off by {:e} of {:e}",
            difference.absolute, tolerance.absolute
        ));
    }
}

/// Counts the live buffers after many steps: no step leaves one behind.
#[test]
fn steps_leave_no_buffers() {
    let mut generation = Generation::new(CacheLayout::Contiguous, CacheStorage::F32, STEPS, Target::Software);
    let gpu = generation.own.gpu.clone();
    let mut scratch = generation.scratch();
    let mut after = |steps: usize| {
        let mut encoder = encoder(&gpu);
        (0..steps).for_each(|_| generation.generate(&mut encoder, &mut scratch));
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        generation.own.alive().expect("wgpu counts resources on this backend")
    };
    let first = after(1);
    assert_eq!(after(100), first);
    assert_eq!(after(100), first);
}

/// Recording a step allocates as often and takes as long at any length.
#[test]
fn a_step_costs_the_same_at_any_length() {
    let capacity = 1 << 20;
    let mut caches = [1, capacity - 1000].map(|len| {
        let storage = CacheStorage::Q8(ScaleGroup::Row);
        let mut generation = Generation::new(CacheLayout::Contiguous, storage, capacity, Target::Software);
        let mut scratch = generation.scratch();
        let mut encoder = encoder(&generation.own.gpu);
        // For the recording, the tokens exist.
        generation.cache.advance(&mut encoder, Tokens::All(len)).expect("room");
        generation.generate(&mut encoder, &mut scratch);
        (generation, encoder, scratch)
    });
    // The test takes the minimum of each, because lists grow now and then and other threads take
    // time. It alternates, so that a slow machine slows both.
    let mut counts = [usize::MAX; 2];
    let mut times = [Duration::MAX; 2];
    for _ in 0..200 {
        for (n, (generation, encoder, scratch)) in caches.iter_mut().enumerate() {
            let start = Instant::now();
            let count = allocations(|| generation.generate(encoder, scratch));
            times[n] = times[n].min(start.elapsed());
            counts[n] = counts[n].min(count);
        }
    }
    say(&format!("recording a step: {counts:?} allocations, {times:?}, at the beginning and at a million"));
    assert_eq!(counts[0], counts[1], "allocations");
    assert!(counts[0] < 500, "{} allocations", counts[0]);
    // A host that visited every token would take thousands of times as long.
    assert!(times[1] < 10 * times[0], "{times:?}");
    assert!(times[1] < Duration::from_millis(3), "{times:?}");
}

/// The splits bound the temporary memory, at any capacity. It is the same at every length.
#[test]
fn scratch_does_not_grow_with_capacity() {
    let own = Own::new();
    let gpu = &own.gpu;
    for form in [Target::Gpu, Target::Software] {
        let attention = Attention::with_pipelines(
            gpu.pipelines(),
            Config::new(8, 64).kv_heads(2).kernel_options(KernelOptions::new().target(form)),
        )
        .expect("an operator");
        let [q, out] = [0, 1].map(|_| gpu.buffer(4 * 8 * 64).expect("a buffer"));
        let view = |b| TensorView::new(b, DType::F32, [1, 8, 1, 64]);
        let mut sizes = Vec::new();
        for capacity in [1, 64, 1000, 10_000, 40_000, 100_000] {
            let config = CacheConfig::new(2, 64, capacity).storage(CacheStorage::Q4(ScaleGroup::Of(32)));
            let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
            let size = |cache: &Cache| {
                let call = Forward::with_cache(view(&q), cache, view(&out)).at_end();
                attention.scratch_size(&call).expect("a size").total()
            };
            let empty = size(&cache);
            gpu.submit(|e| cache.advance(e, Tokens::All(capacity))).expect("room");
            assert_eq!(size(&cache), empty, "{form:?}: a full cache of {capacity}");
            sizes.push(empty);
        }
        // 128 splits of 8 rows, each 64 sums and a vector of totals.
        assert!(sizes.is_sorted() && sizes[0] == 0, "{form:?}: {sizes:?}");
        assert!(sizes.iter().all(|size| *size <= 128 * 8 * 4 * (64 + 4)), "{form:?}: {sizes:?}");
        assert!(sizes[4] == sizes[5] && sizes[4] > 0, "{form:?}: {sizes:?}");
    }
}
