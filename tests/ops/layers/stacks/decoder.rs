//! `TransformerDecoder`, with all rows at once and step by step.

use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{DecoderForward, DecoderMemory, MultiHeadConfig, TransformerLayerConfig};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::reference::compare::{Tolerance, compare, max_error};
use wgpu_attention::{Cache, CacheConfig, DType, Error, KernelOptions, Scratch, TensorView};

use super::decoder_data::{NAMES, Stack, Weights, drawn, vector};
use super::encoder::Setup;
use super::judge::epsilon;
use super::steps::{cache_of, steps_of};
use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed, PlacedRules};
use crate::harness::{FORMS, Judged, Report, Rng, Values, defaults, due, full, rest};

impl Stack {
    /// Runs it all at once, or in steps of these lengths with a cache. Returns the output, and with
    /// `keeps` the layers' outputs.
    fn run(&self, setup: &Setup, steps: Option<&[usize]>, keeps: bool) -> Result<[Vec<f64>; 2], String> {
        self.run_with(setup, KernelOptions::new().target(setup.form), steps, keeps)
    }

    fn run_with(
        &self,
        setup: &Setup,
        kernel_options: KernelOptions,
        steps: Option<&[usize]>,
        keeps: bool,
    ) -> Result<[Vec<f64>; 2], String> {
        let Setup { profile, dtypes: [dtype, weight], layout, .. } = *setup;
        profile.tidy();
        let refused = |e: Error| e.to_string();
        let placed = Weights::new(self, profile, weight);
        let decoder = placed.decoder_of(profile, &self.configs(dtype)).map_err(refused)?;
        let decoder = decoder.kernel_options(kernel_options);
        let Stack { batch, length, memory_len, kv_heads, features, .. } = *self;
        let dim = features / self.heads;
        let rows = [batch, 1, length, features];
        let kept = [self.layers.len() * batch, kv_heads, memory_len + self.appended(), dim];
        let many = [self.kept().max(1) * batch, 1, length, features];
        let [x_at, out_at, memory_at, hidden_at] =
            layout.places([rows, rows, [batch, 1, memory_len, features], many]);
        let [keys_at, values_at] = layout.places([kept; 2]);
        let input = |data: &[f32], at| Placed::input(profile, Values::Floats(data), dtype, at);
        let (x, memory) = (input(&self.x, x_at), input(&self.memory, memory_at));
        let [out, keys, values] = [out_at, keys_at, values_at].map(|at| Placed::output(profile, dtype, at));
        let hidden = (keeps && self.kept() > 0).then(|| Placed::output(profile, dtype, hidden_at));
        let projected = DecoderMemory { keys: keys.view(), values: values.view() };
        let rules = self.rules.each_ref().map(|r| PlacedRules::new(profile, r, DType::F32, layout));
        let rotary = self.rotary.as_ref().map(|rotary| rotary.place(profile));
        let each: Vec<_> = self.each.iter().map(|layer| layer.place(profile, layout)).collect();
        let sizes = [batch, kv_heads, dim, length];
        let mut cache = cache_of(profile, self.layers_with_keys(), sizes, dtype, false).map_err(refused)?;
        let whole = [length];
        let mut first = 0;
        for rows in steps.unwrap_or(&whole) {
            let [x, out] = [x.view(), out.view()].map(|t| t.slice(2, first, *rows));
            if steps.is_some() {
                profile.gpu.submit(|e| cache.advance(e, Tokens::All(*rows))).map_err(refused)?;
            }
            let starts = steps.map(|_| cache.starts());
            let calls: Vec<_> = each.iter().map(|layer| layer.call(starts)).collect();
            let mut call = DecoderForward::new(x, projected, out)
                .memory_mask(rules[1].mask())
                .cache(steps.map(|_| &cache))
                .hidden(hidden.as_ref().map(|t| t.view().slice(2, first, *rows)));
            call = if calls.is_empty() { call.mask(rules[0].mask()) } else { call.layer_calls(&calls[..]) };
            if let Some(rotary) = rotary.as_ref().filter(|_| calls.is_empty()) {
                call = call.rotary(rotary.rotation(), starts.map_or(rotary.at(), RowPositions::Tensor));
            }
            let size = decoder.scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
            let recorded = profile.gpu.submit(|e| {
                if first == 0 {
                    decoder.project_memory(e, memory.view(), &projected, &mut scratch)?;
                }
                decoder.forward(e, &call, &mut scratch)
            });
            recorded.map_err(refused)?;
            first += rows;
        }
        let read = |t: &Placed| pollster::block_on(t.download_async("a result", profile));
        Ok([read(&out)?, hidden.as_ref().map(read).transpose()?.unwrap_or_default()])
    }

    pub fn outcome(&self, setup: &Setup, steps: Option<&[usize]>, keeps: bool) -> Result<f64, String> {
        let [dtype, weight] = setup.dtypes;
        let own = self.stored(dtype, weight);
        let [got, hidden] = own.run(setup, steps, keeps)?;
        let exact = own.reference::<f64>();
        let naive = own.reference::<f32>();
        // Intermediates are rounded too, so a stack may be off by several spacings of their type.
        let magnitude = largest(exact.out.iter().chain(exact.hidden.iter().flatten()).copied());
        let judge = |what: &str, got: &[f64], naive: &[f32], want: Vec<f64>| {
            let naive = widened(naive, dtype);
            let tolerance = Tolerance::from_naive(&naive, &want, magnitude, epsilon(dtype));
            Judged { want, tolerance }.judge(got).map_err(|e| format!("{what}: {e}"))
        };
        let worst = judge("out", &got, &naive.out, exact.out)?;
        let kept = |all: usize| if keeps { all } else { 0 };
        if hidden.len() != kept(self.kept() * self.x.len()) {
            return Err(format!("{} elements of hidden", hidden.len()));
        }
        if hidden.is_empty() {
            return Ok(worst);
        }
        let (naive, mut exact) = (naive.hidden.concat(), exact.hidden.concat());
        exact.truncate(hidden.len());
        Ok(worst.max(judge("hidden", &hidden, &naive[..hidden.len()], exact)?))
    }
}

#[test]
fn reference_matches_vectors() {
    for name in NAMES {
        let (stack, vector) = vector(name);
        let got = stack.reference::<f64>();
        for (what, got) in [("out", &got.out), ("h1", &got.hidden[0])] {
            let (want, tolerance) = vector.expected(what).expect(what);
            compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: the reference's {what}: {e}"));
        }
    }
}

#[test]
fn every_target_matches_vectors() {
    let mut report = Report::new("decoder");
    for name in NAMES {
        let (stack, vector) = vector(name);
        for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(5)]) {
            let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout };
            let judged = stack.run(&setup, None, false).and_then(|[got, _]| {
                let (want, tolerance) = vector.expected("out").ok_or("not in the vector")?;
                Judged { want, tolerance }.judge(&got)
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
}

#[test]
fn random_stacks_equal_the_reference_at_once_and_in_steps() {
    crate::harness::in_turn!();
    let mut report = Report::new("random decoders");
    for n in 0..40 {
        if n >= 6 && !rest(&format!("random decoders {n}")) {
            continue;
        }
        let stack = drawn(n, false);
        let rng = &mut Rng::new(n ^ 0x5e70);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let dtype = match n % 4 {
            2 => DType::F16,
            3 => DType::BF16,
            _ => DType::F32,
        };
        let weight = if rng.chance(0.5) { dtype } else { DType::F32 };
        let layout = if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) };
        let setup = Setup { profile, form: FORMS[(n / 2) as usize % 2], dtypes: [dtype, weight], layout };
        report.record(&format!("stack {n}"), &setup, stack.outcome(&setup, None, n % 2 == 1));
        let steps = steps_of(stack.length, rng);
        report.record(
            &format!("stack {n} in {steps:?}"),
            &setup,
            stack.outcome(&setup, Some(&steps), n % 3 == 2),
        );
    }
    report.finish();
}

/// Learned keys and zeros, in self-attention and after the memory's keys. Other options that no
/// cache supports run here, too.
#[test]
fn stacks_that_append_keys_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("decoders that append keys");
    for (n, dtype) in [(1, DType::F32), (4, DType::F32), (5, DType::BF16)] {
        let stack = drawn(n, true);
        assert!(stack.appended() > 0);
        for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(n)]) {
            if form == FORMS[n as usize % 2] || rest(&format!("decoders that append keys {n}")) {
                let setup = Setup { profile: full(), form, dtypes: [dtype; 2], layout };
                report.record(&format!("stack {n}"), &setup, stack.outcome(&setup, None, n % 2 == 0));
            }
        }
    }
    report.finish();
}

/// Steps give the same numbers as all rows at once, except for the order of sums.
#[test]
fn steps_equal_all_rows_at_once() {
    crate::harness::in_turn!();
    let stack = Stack { length: 7, ..drawn(5, false) };
    let stack = Stack::random(&mut Rng::new(8), 2, true, stack);
    for form in FORMS {
        let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout: Layout::Dense };
        let [whole, _] = stack.run(&setup, None, false).expect("a run");
        let [steps, _] = stack.run(&setup, Some(&[1, 3, 1, 2]), false).expect("steps");
        let off = max_error(&steps, &whole);
        assert!(off < 1e-4 * largest(whole.iter().copied()), "{form:?}: {off}");
    }
}

/// With `KernelOptions::batch_invariant`, the bits do not depend on the steps.
#[test]
fn batch_invariant_steps_have_same_bits() {
    let stack = Stack { length: 75, ..drawn(5, false) };
    let stack = Stack::random(&mut Rng::new(8), 2, true, stack);
    for dtype in [DType::F32, DType::F16] {
        if dtype == DType::F16 && !due("batch-invariant decoder of f16") {
            continue;
        }
        let setup = Setup { profile: full(), form: FORMS[0], dtypes: [dtype; 2], layout: Layout::Dense };
        let run =
            |options, steps: &[usize]| stack.run_with(&setup, options, Some(steps), false).expect("a run");
        let on = KernelOptions::new().batch_invariant(true);
        let [whole, _] = run(on, &[75]);
        for steps in [[1, 3, 1, 70].as_slice(), &[20, 33, 5, 17], &[74, 1]] {
            let [steps_out, _] = run(on, steps);
            let differ = steps_out.iter().zip(&whole).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differ, 0, "{dtype:?}, {steps:?}");
        }
        // f16 rounds the difference away.
        let usual = KernelOptions::new();
        let always_equal = run(usual, &[1, 3, 1, 70])[0] == run(usual, &[75])[0];
        assert!(dtype == DType::F16 || !always_equal, "the option changes nothing");
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let mut stack = drawn(0, false);
    (stack.batch, stack.length, stack.memory_len) = (1, 3, 4);
    (stack.heads, stack.kv_heads, stack.features) = (2, 2, 16);
    (stack.rules, stack.rotary) = Default::default();
    let stack = Stack::random(&mut Rng::new(3), 2, false, stack);
    let weights = Weights::new(&stack, full(), DType::F32);
    let decoder = weights.decoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..6).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let rows = |n: usize| typed(n, [1, 1, 3, 16]);
    let memory = DecoderMemory { keys: typed(2, [2, 2, 4, 8]), values: typed(3, [2, 2, 4, 8]) };
    let refused = |call: DecoderForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = decoder.forward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(decoder.forward(&mut pass, &call, &mut scratch).is_err());
    };
    let plain = DecoderForward::new(rows(0), memory, rows(1));
    let call = plain.mask(DeviceMask::causal());
    refused(call, &["scratch"]);
    refused(DecoderForward::new(rows(0), memory, rows(0)), &["`out`", "`x`"]);
    refused(DecoderForward::new(rows(0), memory, rows(2)), &["`out`", "`memory.keys`"]);
    refused(DecoderForward::new(rows(0), memory, typed(1, [1, 1, 2, 16])), &["`out`", "length must be 3"]);
    refused(DecoderForward::new(typed(0, [1, 1, 3, 15]), memory, rows(1)), &["`x`", "dim must be 16"]);
    let few = DecoderMemory { keys: typed(2, [1, 2, 4, 8]), ..memory };
    refused(DecoderForward::new(rows(0), few, rows(1)), &["`memory.keys`", "batch must be 2"]);
    let short = DecoderMemory { values: typed(3, [2, 2, 3, 8]), ..memory };
    refused(DecoderForward::new(rows(0), short, rows(1)), &["`memory.values`", "length must be 4"]);
    let cache = |config| Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let one = cache(CacheConfig::new(2, 8, 9));
    let kept = typed(4, [2, 1, 3, 16]);
    refused(call.hidden(kept), &["`hidden`", "batch must be 1"]);
    refused(call.hidden(rows(1)), &["`out`", "`hidden`"]);
    refused(call.hidden(rows(0)), &["`hidden`", "`x`"]);
    refused(call.cache(&one), &["rows of `x` that differ"]);
    let mut other = cache(CacheConfig::new(2, 8, 9));
    gpu.submit(|e| other.advance(e, Tokens::All(3))).expect("an advance");
    refused(call.cache(&other), &["`cache.layers` is 1"]);
    let mut wide = cache(CacheConfig::new(2, 12, 9).layers(2));
    gpu.submit(|e| wide.advance(e, Tokens::All(3))).expect("an advance");
    refused(call.cache(&wide), &["`cache.head_dim` is 12"]);
    let rope = Rope::new(gpu.device(), RopeConfig::new(8)).expect("a rope");
    let start = RowPositions::Start(0);
    let mut filled = cache(CacheConfig::new(2, 8, 9).layers(2));
    gpu.submit(|e| filled.advance(e, Tokens::All(3))).expect("an advance");
    refused(call.cache(&filled).rotary(&rope, start), &["from a start, with a cache", "cache.starts()"]);
    refused(plain.cache(&filled), &["no causal rule", "and_causal()"]);
    let wide = Rope::new(gpu.device(), RopeConfig::new(10)).expect("a rope");
    refused(call.rotary(&wide, start), &["`q`", "`rotary_dim` of the rope"]);
    refused(call.rotary(&rope, RowPositions::Start(u32::MAX)), &["start", "2^24"]);
    let places =
        |n: usize, rows| RowPositions::Tensor(TensorView::new(&buffers[n], DType::U32, [1, 1, rows, 1]));
    refused(call.rotary(&rope, places(4, 2)), &["`positions`", "length must be 3"]);
    refused(call.rotary(&rope, places(1, 3)), &["`out`", "`positions`"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
    let mut refused = |source, to: &DecoderMemory, words: &[&str]| {
        let error = decoder.project_memory(&mut encoder, source, to, &mut scratch);
        let error = error.expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let source = typed(0, [1, 1, 4, 16]);
    refused(source, &short, &["`memory.values`", "length must be 4"]);
    refused(typed(2, [1, 1, 4, 16]), &memory, &["`memory.keys`", "`memory`"]);
    let same = DecoderMemory { values: memory.keys, ..memory };
    refused(source, &same, &["`memory.keys`", "`memory.values`"]);
    let appends = TransformerLayerConfig::new(MultiHeadConfig::new(16, 2).add_zero_attn(true), stack.hidden)
        .gated(stack.gated);
    let decoder = weights.decoder(full(), appends).expect("a stack");
    let refused = |call: DecoderForward, words: &[&str]| {
        let error = decoder.scratch_size(&call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    refused(call.cache(&filled), &["`add_zero_attn` with a cache"]);
    let none = DecoderMemory { keys: typed(2, [2, 2, 1, 8]), values: typed(3, [2, 2, 1, 8]) };
    refused(DecoderForward::new(rows(0), none, rows(1)), &["`memory.keys`", "more than 1"]);
    assert!(decoder.scratch_size(&call).is_ok(), "three keys and one of zeros");
    let error = decoder.project_memory(&mut encoder, source, &memory, &mut scratch).expect_err("an error");
    assert!(error.to_string().contains("length must be 5"), "{error}");
}
