//! Attention masks and score functions with names: on the device and on the host. They are compared
//! with rules of the builder, and with their meaning, written here a second time.

use std::sync::Arc;

use wgpu_attention::mask::{At, DeviceMask, HostMask, Pattern};
use wgpu_attention::presets::{self, MaskPreset, ScorePreset};
use wgpu_attention::reference;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::widen;
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{Alignment, DType, Error, HostTensor, Shape};

use crate::harness::backward::{BackwardSetup, NAMES, run_backward_async};
use crate::harness::gradients::Problem;
use crate::harness::{
    Case, FORMS, HostData, Layout, Report, Rng, Rules, Setup, Vector, Weights, due, full, rest, run,
};
use crate::ops::mask::flex;
use crate::peers::sdpa;

/// Fewer queries than keys, aligned to the last keys.
const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 53, head_dim: 16, value_dim: 12 };
/// Equally many.
const SQUARE: Shape = Shape { q_len: 53, ..SHAPE };
/// Longer than a canvas of 64 points.
const LONG: Shape = Shape { q_len: 70, kv_len: 70, ..SHAPE };

/// A mask, and a builder rule with the same meaning.
struct Named {
    name: String,
    shape: Shape,
    preset: MaskPreset,
    alignment: Alignment,
    rule: Option<Rules>,
}

impl Named {
    fn new(shape: Shape, preset: Result<MaskPreset, Error>) -> Self {
        let preset = preset.unwrap_or_else(|e| panic!("{e}"));
        let name = preset.name().to_string();
        Named { name, shape, preset, alignment: Alignment::default(), rule: None }
    }

    fn is(self, rules: Rules) -> Self {
        Named { rule: Some(rules), ..self }
    }

    fn top_left(self) -> Self {
        Named { alignment: Alignment::TopLeft, ..self }
    }

    fn case(&self) -> Case {
        self.with(Rules { mask_mod: Some(self.preset.clone().into()), ..Rules::default() })
    }

    fn ruled(&self) -> Option<Case> {
        self.rule.clone().map(|rules| self.with(rules))
    }

    fn with(&self, rules: Rules) -> Case {
        Case::random(&self.name, self.shape).with(|c| c.rules = Rules { alignment: self.alignment, ..rules })
    }
}

/// Returns parents of random trees.
fn trees(rng: &mut Rng, batch: usize, nodes: usize) -> Vec<Option<u32>> {
    let parent = |n: usize, rng: &mut Rng| (n > 0 && !rng.chance(0.1)).then(|| rng.below(n) as u32);
    (0..batch).flat_map(|_| (0..nodes).map(|n| parent(n, rng)).collect::<Vec<_>>()).collect()
}

/// True if `above` is `node` or one of its ancestors.
fn is_above(parents: &[Option<u32>], node: usize, above: usize) -> bool {
    node == above || parents[node].is_some_and(|parent| is_above(parents, parent as usize, above))
}

/// Returns every mask, some with other numbers.
fn masks() -> Vec<Named> {
    let rng = &mut Rng::named("presets");
    let named = Named::new;
    let ruled = |rules: Rules| rules;
    let causal = Rules { causal: true, ..Default::default() };
    let globals = HostData::new(rng.bools(2 * 4 * 53, 0.08), [2, 4, 1, 53]);
    let prefix = HostData::new(vec![20, 41], [2, 1, 1, 1]);
    let each = HostData::of([2, 4, 37, 1], |[b, h, i, _]| (7 * b + 3 * h + 2 * i) as u32 % 60);
    // Documents whose tokens are not adjacent.
    let ids = HostData::of([2, 1, 1, 53], |[b, _, _, j]| (j as u32 * (3 + b as u32) / 16) % 5);
    let prompts = HostData::of([2, 1, 1, 53], |[b, _, _, j]| ids.data[b * 53 + j] / 2 * 2);
    let of_queries = HostData::of([2, 1, 37, 1], |[b, _, i, _]| ids.data[b * 53 + i + 16]);
    let parents = trees(rng, 2, 37);
    let tree = HostData::of([2, 1, 37, 37], |[b, _, i, j]| is_above(&parents[37 * b..][..37], i, j));
    let intervals = HostData::of([2, 1, 5, 2], |[b, _, n, end]| (n * 6 + b + end * (9 + n)) as u32);
    let selected = HostData::new(rng.bools(2 * 4 * 7 * 7, 0.4), [2, 4, 7, 7]);
    let map = HostData::of(selected.shape, |[b, h, i, j]| {
        2 * u32::from(selected.data[((b * 4 + h) * 7 + i) * 7 + j])
    });
    let mut all = vec![
        named(SHAPE, presets::causal()).is(causal.clone()),
        named(SHAPE, presets::causal()).is(causal.clone()).top_left(),
        named(SHAPE, presets::sliding(9)).is(Rules { window: Some([9, 0]), ..causal.clone() }),
        named(SHAPE, presets::sliding(0)).is(Rules { window: Some([0, 0]), ..causal.clone() }),
        named(SHAPE, presets::dilated(12, 3)).is(Rules {
            window: Some([12, 12]),
            pattern: Some(Pattern::Dilated { dilation: 3 }),
            ..Default::default()
        }),
        named(SHAPE, presets::local(8))
            .is(Rules { pattern: Some(Pattern::Local { block: 8 }), ..Default::default() }),
        named(SHAPE, presets::global_sliding(4, globals.host())).is(Rules {
            window: Some([4, 4]),
            globals: Some(globals.clone()),
            ..Default::default()
        }),
        named(SHAPE, presets::prefix_lm(prefix.host()))
            .is(Rules { prefix: Some(prefix.clone()), ..causal.clone() }),
        named(SHAPE, presets::prefix_lm(each.host()))
            .is(ruled(Rules { prefix: Some(each), ..causal.clone() })),
        named(SHAPE, presets::documents(ids.host()))
            .is(Rules { documents: Some([of_queries, ids.clone()]), ..Default::default() }),
        named(SQUARE, presets::shared_prefix(ids.host(), prompts.host())),
        named(SQUARE, presets::block_diffusion(26, 4)),
        named(SHAPE, presets::block_diffusion(20, 7)),
        named(SHAPE, presets::tree(&parents, 2)).is(Rules { tree: Some(tree), ..Default::default() }),
        named(SHAPE, presets::draft_blocks(16, 5)),
        named(SHAPE, presets::flamingo(intervals.host(), 10)),
        named(SQUARE, presets::selected_tiles(selected.host(), 8))
            .is(Rules { blocks: Some((map, [8, 8])), ..Default::default() }),
        named(SQUARE, presets::svg_spatial(5, 12, 8, true)),
        named(SHAPE, presets::svg_spatial(20, 7, 3, false)),
        named(SQUARE, presets::svg_temporal(5, 12, 3)),
        named(SQUARE, presets::natten([53], [7], [1])),
        named(SHAPE, presets::natten([50], [4], [3])),
        named(SQUARE, presets::natten([6, 8], [3, 5], [1, 1])),
        named(SQUARE, presets::natten([7, 7], [3, 3], [2, 1])),
        named(SQUARE, presets::natten([3, 4, 4], [3, 2, 3], [1, 2, 1])),
        named(SQUARE, presets::tiled_natten([8, 6], [5, 3], [4, 3])),
        named(SQUARE, presets::tiled_natten([2, 4, 6], [2, 3, 3], [1, 2, 2])),
        named(LONG, presets::morton_natten(8, [3, 5])),
        named(SQUARE, presets::shifted_windows([6, 8], [3, 4], [1, 2])),
        named(SQUARE, presets::shifted_windows([2, 4, 6], [1, 2, 6], [0, 1, 5])),
        // Without a shift it is a pattern, of the points of the canvas.
        named(Shape { q_len: 48, kv_len: 48, ..SHAPE }, presets::shifted_windows([6, 8], [3, 4], [0, 0]))
            .is(Rules { pattern: Some(Pattern::Local { block: 12 }), ..Default::default() }),
        named(SQUARE, presets::sliding_tiles([6, 8], [4, 6], [2, 2], 4)),
        named(SQUARE, presets::sliding_tiles([2, 4, 6], [1, 2, 6], [1, 2, 2], 0)),
    ];
    for n in 0..all.len() {
        let same = all[..n].iter().filter(|other| other.preset.name() == all[n].preset.name()).count();
        if same > 0 {
            all[n].name += &format!(", {}", same + 1);
        }
    }
    all
}

type Change = Box<dyn Fn(&mut Case)>;

/// A score function, and an equivalent change without one.
struct NamedScore {
    name: String,
    /// True for the first preset with its text.
    first: bool,
    preset: ScorePreset,
    same: Option<Change>,
}

fn scores() -> Vec<NamedScore> {
    let rng = &mut Rng::named("presets of scores");
    let named = |preset: Result<ScorePreset, Error>| {
        let preset = preset.unwrap_or_else(|e| panic!("{e}"));
        NamedScore { name: preset.name().to_string(), first: true, preset, same: None }
    };
    fn is(named: NamedScore, change: impl Fn(&mut Case) + 'static) -> NamedScore {
        NamedScore { same: Some(Box::new(change)), ..named }
    }
    let slopes = HostData::new(presets::alibi_slopes(4), [1, 4, 1, 1]);
    let table = HostData::new(rng.normals(2 * 4 * 9), [2, 4, 1, 9]);
    let grid = HostData::new(rng.normals(4 * 9 * 11), [1, 4, 9, 11]);
    let buckets = HostData::new(rng.normals(4 * 16), [1, 4, 1, 16]);
    let lengths = HostData::new(rng.normals(4 * 6), [1, 4, 1, 6]);
    let graph: Vec<bool> = (0..53 * 53).map(|n| n % 53 != n / 53 && rng.chance(0.04)).collect();
    let paths = presets::shortest_paths(&graph, 53, 4).expect("a graph");
    // The queries are the first nodes.
    let distances = HostData::of([1, 1, 37, 53], |[_, _, i, j]| paths[53 * i + j]);
    let types = HostData::new(rng.normals(4 * 3 * 5), [1, 4, 3, 5]);
    let edges = HostData::of([2, 37, 53, 3], |[b, i, j, n]| {
        if (i + j + b) % 4 <= n { u32::MAX } else { (i * 7 + j * 3 + n + b) as u32 % 5 }
    });
    let relative = |of: &dyn Fn(usize, i64) -> f32| {
        HostData::of([1, 4, 1, 2 * 60 + 1], |[_, h, _, n]| of(h, n as i64 - 60))
    };
    let encoder = relative(&|h, far| buckets.data[16 * h + bucket(far, 16, 20, true)]);
    let decoder = relative(&|h, far| buckets.data[16 * h + bucket(far, 16, 24, false)]);
    let sandwich = relative(&|h, far| {
        // The product of the sinusoids of two positions.
        let wave = |p: f64| {
            (0..16).flat_map(move |i| {
                let x = p / 10000f64.powf(f64::from(i) / 16.0);
                [x.sin(), x.cos()]
            })
        };
        let product: f64 = wave(100.0).zip(wave(100.0 + far as f64)).map(|(a, b)| a * b).sum();
        (product / (8.0 * (h + 1) as f64 / 4.0)) as f32
    });
    let of_paths = HostData::of([1, 4, 37, 53], |[_, h, i, j]| {
        lengths.data[6 * h + distances.data[53 * i + j] as usize]
    });
    // Queries are aligned to the last keys of windows of 5 × 6.
    let of_grid = HostData::of([1, 4, 37, 53], |[_, h, i, j]| {
        let [q, k] = [i + 16, j].map(|n| [n % 30 / 6, n % 6]);
        let [row, column] = [4 + k[0] - q[0], 5 + k[1] - q[1]];
        grid.data[(9 * h + row) * 11 + column]
    });
    let reversed = table.clone();
    let capped = 2.5;
    vec![
        is(named(presets::alibi(slopes.host())), move |c| c.rules.slopes = Some(slopes.clone())),
        is(named(presets::softcap(capped)), move |c| c.softcap = Some(capped.into())),
        is(named(presets::relative(table.host())), move |c| c.rules.relative = Some(reversed.clone())),
        is(named(presets::relative_2d(grid.host(), [5, 6])), move |c| c.rules.bias = Some(of_grid.clone())),
        is(named(presets::t5(buckets.host(), 20, true)), move |c| c.rules.relative = Some(encoder.clone())),
        NamedScore {
            name: "t5 of a decoder".to_string(),
            first: false,
            ..is(named(presets::t5(buckets.host(), 24, false)), move |c| {
                c.rules.relative = Some(decoder.clone())
            })
        },
        is(named(presets::sandwich(4, 32, 60)), move |c| c.rules.relative = Some(sandwich.clone())),
        is(named(presets::graphormer(lengths.host(), distances.host())), move |c| {
            c.rules.bias = Some(of_paths.clone());
        }),
        named(presets::graphormer_edges(types.host(), edges.host())),
        named(presets::relu()),
        named(presets::squared_relu()),
        named(presets::sigmoid(-1.5)),
        named(presets::gelu(0.5)),
    ]
}

impl NamedScore {
    fn case(&self) -> Case {
        Case::random(&self.name, SHAPE).with(|c| c.rules.score_mod = Some(self.preset.clone().into()))
    }

    fn same(&self) -> Option<Case> {
        self.same.as_ref().map(|change| Case::random(&self.name, SHAPE).with(change))
    }
}

/// Returns the bucket as in T5's code, in f32.
fn bucket(distance: i64, buckets: usize, longest: usize, bidirectional: bool) -> usize {
    let mut buckets = buckets;
    let (mut first, mut far) = (0, (-distance).max(0));
    if bidirectional {
        buckets /= 2;
        first = if distance > 0 { buckets } else { 0 };
        far = distance.abs();
    }
    let exact = buckets / 2;
    if far < exact as i64 {
        return first + far as usize;
    }
    let ratio = (far as f32 / exact as f32).ln() / (longest as f32 / exact as f32).ln();
    first + (exact + (ratio * (buckets - exact) as f32) as usize).min(buckets - 1)
}

fn setup(form: Target, path: Algorithm) -> Setup {
    let weights = if path == Algorithm::Staged { Weights::PerHead(DType::F32) } else { Weights::None };
    Setup {
        profile: full(),
        form,
        path,
        dtype: DType::F32,
        bias: DType::F32,
        layout: Layout::Window(9),
        lse: true,
        weights,
    }
}

/// Runs the first preset of a text: the fused path on one target, the staged path on the other.
/// Shares run the others.
fn on_paths(report: &mut Report, n: usize, first: bool, case: &Case) {
    let mut truths = Default::default();
    for (form, path) in
        FORMS.into_iter().flat_map(|form| [(form, Algorithm::Fused), (form, Algorithm::Staged)])
    {
        let usual = first && (form == FORMS[n % 2]) == (path == Algorithm::Fused);
        let key = format!("presets, {}, {form:?}, {path:?}", case.name);
        if usual && due(&key) || rest(&key) {
            report.check_in(case, &setup(form, path), &mut truths);
        }
    }
}

#[test]
fn masks_on_every_path() {
    let mut report = Report::new("presets of masks");
    masks().iter().enumerate().for_each(|(n, named)| {
        on_paths(&mut report, n, named.name == named.preset.name(), &named.case());
    });
    report.finish();
}

#[test]
fn scores_on_every_path() {
    crate::harness::in_turn!();
    let mut report = Report::new("presets of scores");
    for (n, named) in scores().iter().enumerate() {
        on_paths(&mut report, n, named.first, &named.case());
    }
    report.finish();
}

/// Gradients of q, k and v, by the derivative of the text and by the preset's closure.
#[test]
fn scores_backward() {
    let mut report = Report::new("gradients of presets");
    for (n, named) in scores().into_iter().enumerate() {
        for (m, form) in FORMS.into_iter().enumerate() {
            let key = format!("gradients of presets, {}, {form:?}", named.name);
            if named.first && n % 2 == m && due(&key) || rest(&key) {
                let problem = Problem::new(named.case(), 0, true);
                report.check_backward(&problem, &BackwardSetup::plain(full(), form));
            }
        }
    }
    report.finish();
}

/// Compares a preset with the builder's rule on a device. The bits are the same if both have the
/// same plan. Otherwise the results are equally exact. The causal rule has separate kernels. The
/// builder's softcap multiplies where the preset divides.
fn against_rules(case: &Case, ruled: &Case, n: usize) {
    for (form, path) in
        FORMS.into_iter().flat_map(|form| [(form, Algorithm::Fused), (form, Algorithm::Staged)])
    {
        let key = format!("presets as rules, {}, {form:?}, {path:?}", case.name);
        let usual = path == Algorithm::Fused && form == FORMS[n % 2];
        if !(usual && due(&key) || rest(&key)) {
            continue;
        }
        let setup = setup(form, path);
        let [got, want] = [case, ruled].map(|case| run(case, &setup).expect(&case.name));
        if ruled.rules.causal || ruled.softcap.is_some() {
            let truth = case.truth(DType::F32, Weights::None);
            for (judged, of) in [(&truth.out, &want.out), (&truth.lse, want.lse.as_ref().expect("asked for"))]
            {
                judged.judge(of).unwrap_or_else(|e| panic!("{}, {setup}: {e}", case.name));
            }
        } else {
            assert!(got.bits() == want.bits(), "{}, {setup}", case.name);
        }
    }
}

/// On the host the visible pairs equal those of the builder's rule.
#[test]
fn masks_equal_builder_rules() {
    let mut compared = 0;
    for named in masks() {
        let Some(ruled) = named.ruled() else { continue };
        let case = named.case();
        let (got, want) = (case.reference::<f64>(), ruled.reference::<f64>());
        assert!(got.out == want.out && got.lse == want.lse && got.weights == want.weights, "{}", named.name);
        against_rules(&case, &ruled, compared);
        compared += 1;
    }
    assert_eq!(compared, 13);
}

/// Score functions that equal a rule without a function.
#[test]
fn scores_equal_builder_rules() {
    let mut compared = 0;
    for named in scores() {
        let Some(same) = named.same() else { continue };
        let (got, want) = (named.case().reference::<f64>(), same.reference::<f64>());
        for (got, want) in [(&got.out, &want.out), (&got.lse, &want.lse)] {
            let largest = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            // Tables are f32.
            assert!(largest < 1e-6, "{}: {largest}", named.name);
        }
        against_rules(&named.case(), &same, compared);
        compared += 1;
    }
    assert_eq!(compared, 8);
}

/// By the public API: tables uploaded, bound, compared at random pairs.
#[test]
fn device_and_host_agree_at_random_pairs() {
    let gpu = &full().gpu;
    for Named { name, shape, preset, alignment, .. } in masks() {
        let tables = gpu.upload_tables(preset.tables()).expect("memory");
        let mut device = DeviceMask::none().aligned(alignment).mask_mod(preset.bound(&tables));
        if tables.is_empty() {
            device = DeviceMask::none().aligned(alignment).mask_mod(&preset);
        }
        let host = HostMask::none().aligned(alignment).mask_fn(preset.mask_fn());
        gpu.compare_masks(&device, &host, shape, 0.0).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    for NamedScore { name, preset, .. } in scores() {
        let tables = gpu.upload_tables(preset.tables()).expect("memory");
        let device = DeviceMask::none().score_mod(preset.bound(&tables));
        let host = HostMask::none().score_fn(preset.score_fn()).score_fn_slope(preset.slope_fn());
        gpu.compare_masks(&device, &host, SHAPE, 1e-5).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// Packed sequences: grids and prompts begin again in each sequence.
#[test]
fn positions_restart_in_each_sequence() {
    let gpu = &full().gpu;
    let starts = [0u32, 9, 35, 53];
    let buffer = gpu.upload(&starts).expect("memory");
    let packed = wgpu_attention::TensorView::vector(&buffer, DType::U32, 4);
    let on_host = HostTensor::new(&starts, [1, 1, 1, 4]);
    let prefix = [4u32];
    let all = [
        presets::natten([2, 4], [1, 3], [1, 1]),
        presets::tiled_natten([4, 4], [3, 3], [2, 2]),
        presets::sliding_tiles([4, 4], [2, 4], [2, 2], 3),
        presets::shifted_windows([4, 4], [2, 2], [1, 1]),
        presets::block_diffusion(8, 3),
        presets::prefix_lm(HostTensor::new(&prefix, [1; 4])),
        presets::local(4),
        presets::svg_spatial(3, 4, 2, true),
        presets::svg_temporal(3, 4, 2),
        presets::draft_blocks(3, 4),
    ];
    for preset in all {
        let preset = preset.expect("a preset");
        let tables = gpu.upload_tables(preset.tables()).expect("memory");
        let device = DeviceMask::none().packed(packed, packed).mask_mod(preset.bound(&tables));
        let host = HostMask::none().packed(on_host, on_host).mask_fn(preset.mask_fn());
        gpu.compare_masks(&device, &host, SQUARE, 0.0).unwrap_or_else(|e| panic!("{preset:?}: {e}"));
        let at = |start: u32, [q, k]: [u32; 2]| {
            let mut at = At::default();
            (at.position, at.key, at.sequence_start) = ((start + q) as i32, start + k, start);
            (at.query, at.q_len, at.kv_len) = (start + q, 53, 53);
            at
        };
        for (q, k) in (0..18).flat_map(|q| (0..18).map(move |k| (q, k))) {
            assert_eq!(preset.sees(&at(0, [q, k])), preset.sees(&at(35, [q, k])), "{preset:?} {q} {k}");
        }
    }
}

/// Returns a pair of self-attention.
fn pair(q: usize, k: usize, len: usize) -> At {
    let mut at = At::default();
    (at.query, at.position, at.key) = (q as u32, q as i32, k as u32);
    (at.q_len, at.kv_len) = (len as u32, len as u32);
    at
}

/// Compares a mask with its meaning at every pair of `len` tokens.
fn means(preset: Result<MaskPreset, Error>, len: usize, sees: impl Fn(usize, usize) -> bool) {
    let preset = preset.unwrap_or_else(|e| panic!("{e}"));
    let mut seen = 0;
    for (q, k) in (0..len).flat_map(|q| (0..len).map(move |k| (q, k))) {
        let want = sees(q, k);
        assert_eq!(preset.sees(&pair(q, k, len)), want, "{preset:?}: {q} {k}");
        seen += usize::from(want);
    }
    assert!(seen > 0 && seen < len * len, "{preset:?} shows {seen} of {len}²");
}

/// Returns the `kernel` points nearest to `q` among those with its residue. The window slides until
/// it meets an edge.
fn neighbours(q: usize, len: usize, kernel: usize, dilation: usize) -> Vec<usize> {
    let group: Vec<usize> = (0..len).filter(|n| n % dilation == q % dilation).collect();
    let own = group.iter().position(|n| *n == q).expect("its own");
    let windows = group.windows(kernel);
    // The window whose middle is nearest.
    let middle = |first: usize| (first + kernel / 2).abs_diff(own);
    let best = (0..windows.len()).min_by_key(|first| middle(*first)).expect("the kernel fits");
    group[best..best + kernel].to_vec()
}

#[test]
fn neighbourhoods_mean_the_nearest_points() {
    let canvas = [5, 7, 6];
    let point = |n: usize| [n / 42, n / 6 % 7, n % 6];
    for (kernel, dilation) in [([3, 3, 3], [1, 1, 1]), ([2, 3, 1], [2, 2, 3]), ([5, 2, 3], [1, 3, 2])] {
        means(presets::natten(canvas, kernel, dilation), 215, |q, k| {
            let inside = q < 210 && k < 210;
            let near =
                |n: usize| neighbours(point(q)[n], canvas[n], kernel[n], dilation[n]).contains(&point(k)[n]);
            inside && (0..3).all(near)
        });
    }
    // NATTEN's start of a window, with dilation 1 and odd kernels.
    means(presets::natten([23], [7], [1]), 23, |q, k| {
        let first = q.saturating_sub(3).min(23 - 7);
        (first..first + 7).contains(&k)
    });
}

/// In another order of tokens, the neighbourhoods are the same.
#[test]
fn orders_of_tokens_permute_neighbourhoods() {
    let rows = presets::natten([8, 8], [3, 5], [1, 1]).expect("a preset");
    // The code alternates bits of column and row.
    let morton = |n: usize| {
        let code = |of: usize| (0..3).map(|bit| (of >> bit & 1) << (2 * bit)).sum::<usize>();
        code(n % 8) + 2 * code(n / 8)
    };
    let tiled = |n: usize| {
        let (y, x) = (n / 8, n % 8);
        ((y / 2) * 2 + x / 4) * 8 + y % 2 * 4 + x % 4
    };
    let all = [
        (presets::morton_natten(8, [3, 5]), Box::new(morton) as Box<dyn Fn(usize) -> usize>),
        (presets::tiled_natten([8, 8], [3, 5], [2, 4]), Box::new(tiled)),
    ];
    for (other, order) in all {
        let other = other.expect("a preset");
        for (q, k) in (0..64).flat_map(|q| (0..64).map(move |k| (q, k))) {
            let there = pair(order(q), order(k), 64);
            assert_eq!(rows.sees(&pair(q, k, 64)), other.sees(&there), "{other:?}: {q} {k}");
        }
    }
}

#[test]
fn sliding_tiles_are_neighbourhoods_of_tiles() {
    // There are 3 × 4 tiles of 2 × 3 tokens.
    let (canvas, tile, kernel) = ([6, 12], [2, 3], [4, 9]);
    means(presets::sliding_tiles(canvas, kernel, tile, 5), 80, |q, k| {
        if q.max(k) >= 77 {
            return false;
        }
        let near = |q: usize, k: usize, len, kernel| neighbours(q, len, kernel, 1).contains(&k);
        let [a, b] = [q / 6, k / 6];
        q.max(k) >= 72 || near(a / 4, b / 4, 3, 2) && near(a % 4, b % 4, 4, 3)
    });
}

/// The mask of Swin's code. It numbers regions of the rolled canvas and cuts them into windows.
/// Tokens with equal numbers see each other.
#[test]
fn shifted_windows_match_swin() {
    let (canvas, window, shift) = ([6, 12], [3, 4], [1, 3]);
    let region = |at: usize, n: usize| match at {
        at if at < canvas[n] - window[n] => 0,
        at if at < canvas[n] - shift[n] => 1,
        _ => 2,
    };
    // Window and region of each token, window by window.
    let mut tokens = Vec::new();
    for (top, left) in [0, 3].into_iter().flat_map(|top| [0, 4, 8].map(|left| (top, left))) {
        for (y, x) in (0..3).flat_map(|y| (0..4).map(move |x| (top + y, left + x))) {
            tokens.push((top, left, region(y, 0), region(x, 1)));
        }
    }
    means(presets::shifted_windows(canvas, window, shift), 75, |q, k| {
        tokens.get(q).is_some_and(|q| tokens.get(k) == Some(q))
    });
}

/// The index `relative_position_index` of Swin's code, into a table by query − key with the heads
/// last.
#[test]
fn relative_2d_matches_swin() {
    let ([height, width], heads) = ([3, 4], 2);
    let rows = (2 * height - 1) * (2 * width - 1);
    let swin: Vec<f32> = (0..rows * heads).map(|n| n as f32).collect();
    let table: Vec<f32> = (0..heads)
        .flat_map(|h| (0..rows).rev().map(|row| swin[row * heads + h]).collect::<Vec<_>>())
        .collect();
    let table = HostTensor::new(&table, [1, heads, 2 * height - 1, 2 * width - 1]);
    let preset = presets::relative_2d(table, [height, width]).expect("a preset");
    // Two windows.
    let tokens = height * width;
    for (window, q, k) in
        (0..2 * tokens * tokens).map(|n| (n / tokens / tokens, n / tokens % tokens, n % tokens))
    {
        let row = height - 1 + q / width - k / width;
        let column = width - 1 + q % width - k % width;
        let index = row * (2 * width - 1) + column;
        for h in 0..heads {
            let mut at = pair(window * tokens + q, window * tokens + k, 2 * tokens);
            at.head = h as u32;
            assert_eq!(preset.score(0.0, &at), f64::from(swin[index * heads + h]), "{window}: {q} {k}");
        }
    }
}

#[test]
fn block_diffusion_has_three_parts() {
    means(presets::block_diffusion(14, 4), 30, |q, k| {
        if q.max(k) >= 28 {
            return false;
        }
        let (noised_q, noised_k) = (q < 14, k < 14);
        let [a, b] = [q % 14 / 4, k % 14 / 4];
        let diagonal = a == b && noised_q == noised_k;
        let offset = a > b && noised_q && !noised_k;
        let causal = a >= b && !noised_q && !noised_k;
        diagonal || offset || causal
    });
}

#[test]
fn trees_mean_their_branches() {
    let rng = &mut Rng::named("trees");
    for nodes in [1, 2, 9, 40] {
        let parents = trees(rng, 3, nodes);
        let preset = presets::tree(&parents, 3).expect("trees");
        for (b, tree) in parents.chunks_exact(nodes).enumerate() {
            for (q, k) in (0..nodes).flat_map(|q| (0..nodes + 5).map(move |k| (q, k))) {
                let mut at = pair(q + 5, k, nodes + 5);
                (at.batch, at.query, at.q_len) = (b as u32, q as u32, nodes as u32);
                assert_eq!(preset.sees(&at), k < 5 || is_above(tree, q, k - 5), "{tree:?}: {q} {k}");
            }
        }
    }
}

#[test]
fn text_sees_the_pictures_of_the_last_marker() {
    // Two pictures at 3 and 4 belong together.
    let markers = [3, 4, 9, 15];
    let intervals = presets::picture_intervals(&markers, 20).expect("markers");
    let preset = presets::flamingo(HostTensor::new(&intervals, [1, 1, 4, 2]), 2).expect("a preset");
    let mut last: Vec<usize> = Vec::new();
    for i in 0..20 {
        if let Some(n) = markers.iter().position(|marker| *marker == i) {
            if n == 0 || markers[n - 1] + 1 != i {
                last.clear();
            }
            last.push(n);
        }
        for key in 0..10 {
            let sees = preset.sees(&pair(i as usize, key, 20));
            assert_eq!(sees, last.contains(&(key / 2)), "token {i}, key {key}");
        }
    }
}

/// Each response sees the prompt, and no other response.
#[test]
fn responses_share_a_prompt() {
    let lengths = [3, 2, 4, 5, 1, 2];
    let prompts_of = [0, 0, 0, 3, 3, 3u32];
    let tokens: Vec<usize> = (0..6).flat_map(|n| vec![n; lengths[n]]).collect();
    let ids: Vec<u32> = tokens.iter().map(|n| *n as u32).collect();
    let prompts: Vec<u32> = tokens.iter().map(|n| prompts_of[*n]).collect();
    let [ids, prompts] = [&ids, &prompts].map(|data| HostTensor::new(data, [1, 1, 1, 17]));
    means(presets::shared_prefix(ids, prompts), 17, |q, k| {
        let own: Vec<usize> = (0..17)
            .filter(|n| tokens[*n] == tokens[q] || tokens[*n] == prompts_of[tokens[q]] as usize)
            .collect();
        own.contains(&k) && k <= q
    });
}

/// T5's buckets as in its code, with T5's numbers.
#[test]
fn buckets_match_t5() {
    for (buckets, longest, bidirectional) in [(32, 128, true), (32, 128, false), (8, 20, true), (2, 9, false)]
    {
        let table: Vec<f32> = (0..buckets).map(|n| n as f32).collect();
        let table = HostTensor::new(&table, [1, 1, 1, buckets]);
        let preset = presets::t5(table, longest, bidirectional).expect("a preset");
        for distance in -300..=300i64 {
            let mut at = At::default();
            (at.position, at.key) = (300, (300 + distance) as u32);
            let want = bucket(distance, buckets, longest, bidirectional);
            assert_eq!(preset.score(0.0, &at), want as f64, "{distance} of {buckets}, {longest}");
        }
    }
}

#[test]
fn shortest_paths_match_floyd_warshall() {
    let rng = &mut Rng::named("graphs");
    for nodes in [0, 1, 7, 20] {
        let graph = rng.bools(nodes * nodes, 0.12);
        let mut want: Vec<u32> = (0..nodes * nodes)
            .map(|n| if n / nodes == n % nodes { 0 } else { 2000 - u32::from(graph[n]) * 1999 })
            .collect();
        for (k, i, j) in (0..nodes).flat_map(|k| (0..nodes * nodes).map(move |n| (k, n / nodes, n % nodes))) {
            want[i * nodes + j] = want[i * nodes + j].min(want[i * nodes + k] + want[k * nodes + j]);
        }
        for longest in [1, 3, 100] {
            let got = presets::shortest_paths(&graph, nodes, longest).expect("a graph");
            let want: Vec<u32> = want.iter().map(|n| (*n).min(longest + 1)).collect();
            assert_eq!(got, want, "{nodes} nodes, up to {longest}");
        }
    }
}

/// `out · exp(lse)` is a sum of values by the activation, without a softmax.
#[test]
fn activations_undo_the_softmax() {
    type Function = fn(f64) -> f64;
    let all: [(Result<ScorePreset, Error>, f64, Function); 4] = [
        (presets::relu(), 0.0, |x| x.max(0.0)),
        (presets::squared_relu(), 0.0, |x| x.max(0.0).powi(2)),
        (presets::sigmoid(-2.0), 0.0, |x| 1.0 / (1.0 + (2.0 - x).exp())),
        (presets::gelu(0.25), 0.25, |x| {
            x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }),
    ];
    for (preset, offset, activation) in all {
        let preset = preset.expect("a preset");
        let case =
            Case::random(preset.name(), SHAPE).with(|c| c.rules.score_mod = Some(preset.clone().into()));
        let got = case.reference::<f64>();
        let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| widen::<f64>(x));
        let scores = reference::scores::<f64>(&q, &k, SHAPE, case.scale_value()).expect("it fits");
        let Shape { heads, kv_heads, q_len, kv_len, value_dim, .. } = SHAPE;
        for (row, scores) in scores.chunks_exact(kv_len).enumerate() {
            let head = row / q_len;
            let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
            for d in 0..value_dim {
                let value = |j: usize| v[(kv_head * kv_len + j) * value_dim + d];
                let want: f64 = scores.iter().enumerate().map(|(j, x)| activation(*x) * value(j)).sum();
                let all: f64 = (0..kv_len).map(value).sum();
                let of = got.out[row * value_dim + d] * got.lse[row].exp() - offset * all;
                assert!((of - want).abs() < 1e-5, "{preset:?}: {of} for {want}");
            }
        }
    }
}

/// PyTorch's flex attention, with presets alone.
#[test]
fn flex_vectors() {
    let mut report = Report::new("flex by presets");
    for (n, name) in flex::NAMES.iter().enumerate() {
        let vector = Vector::load(flex::FAMILY, name);
        let mut case = sdpa::plain(&vector);
        case.name += ", by presets";
        let Shape { batch, heads, kv_len, .. } = case.shape;
        let numbers = |tensor| vector.integers(tensor).into_iter().map(|n| n as u32).collect::<Vec<_>>();
        let of_tokens = [batch, 1, 1, kv_len];
        let kind = vector.attrs["kind"].as_str().expect("kind");
        let mut mask = kind.ends_with("causal").then(presets::causal);
        let mut score = None;
        match kind.trim_end_matches("_causal") {
            "noop" | "causal" => {}
            "softcap" => score = Some(presets::softcap(vector.number("cap").expect("a cap") as f32)),
            "sliding" => mask = Some(presets::sliding(vector.size("window"))),
            "alibi" => score = Some(presets::alibi(HostTensor::new(&vector.f32("slopes"), [1, heads, 1, 1]))),
            "rel_bias" => {
                let distances = 2 * vector.size("max_dist") + 1;
                let table = vector.f32("table");
                let rows = table.chunks_exact(distances);
                // The vector counts distances from the key.
                let table: Vec<f32> = rows.flat_map(|row| row.iter().rev().copied()).collect();
                score = Some(presets::relative(HostTensor::new(&table, [1, heads, 1, distances])));
            }
            "document" => {
                let ids = numbers("doc_id");
                let ids = HostTensor::new(&ids, of_tokens);
                // Each document is a separate prompt: causal within it.
                mask = Some(match mask {
                    Some(_) => presets::shared_prefix(ids, ids),
                    None => presets::documents(ids),
                });
            }
            "prefix_lm" => {
                mask = Some(presets::prefix_lm(HostTensor::new(&numbers("prefix"), [batch, 1, 1, 1])));
            }
            "dilated" => {
                let dilation = vector.size("dilation");
                mask = Some(presets::dilated(vector.size("window") * dilation, dilation));
            }
            other => panic!("{name}: kind {other}"),
        }
        case.rules.alignment = Alignment::TopLeft;
        case.rules.mask_mod = mask.map(|preset| preset.expect(name).into());
        case.rules.score_mod = score.map(|preset| preset.expect(name).into());
        sdpa::check_reference(&case);
        on_paths(&mut report, n, true, &case);
        if vector.has("dout") && (due("gradients of flex by presets") || rest("gradients of flex by presets"))
        {
            let problem = Problem { case, appended: 0, d_out: vector.f64("dout"), d_lse: None };
            let setup = BackwardSetup::plain(full(), FORMS[n % 2]);
            report.check_backward(&problem, &setup);
            let got =
                pollster::block_on(run_backward_async(&problem, &setup, |kernel_options| kernel_options))
                    .expect("it ran");
            for ((got, name), of) in got.iter().zip(NAMES).zip(["dq", "dk", "dv"]) {
                let (want, tolerance) = vector.expected(of).expect("a gradient");
                compare(got.as_ref().expect("wanted"), &want, tolerance)
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
            }
        }
    }
    report.finish();
}

/// Other numbers and other tables compile nothing.
#[test]
fn texts_are_constant() {
    let (a, b) = (presets::natten([4, 4], [3, 3], [1, 1]), presets::natten([90], [7], [2]));
    assert_eq!(a.expect("a preset").mask_mod(), b.expect("a preset").mask_mod());
    let of = |slopes: &[f32]| presets::alibi(HostTensor::new(slopes, [1, slopes.len(), 1, 1]));
    assert_eq!(of(&[1.0]).expect("a preset").score_mod(), of(&[1.0, 2.0]).expect("a preset").score_mod());
}

/// Inputs that do not fit are clear errors.
#[test]
fn refusals() {
    let tensor = |data: &'static [u32], shape| HostTensor::new(data, shape);
    let floats = |data: &'static [f32], shape| HostTensor::new(data, shape);
    let masks = [
        (presets::sliding(usize::MAX), "window"),
        (presets::dilated(4, 0), "`dilation` is 0"),
        (presets::local(0), "`block` is 0"),
        (
            presets::global_sliding(1, HostTensor::new(&[true], [1, 1, 2, 1])),
            "`globals`: length must be 1, got 2",
        ),
        (presets::prefix_lm(tensor(&[1, 2], [3, 1, 1, 1])), "`prefix`: 3 elements expected, got 2"),
        (presets::documents(tensor(&[], [1, 1, 1, 0])), "`ids`: an axis is 0"),
        (presets::documents(tensor(&[1], [1, 1, 1, usize::MAX])), "`ids`"),
        (presets::documents(tensor(&[1], [usize::MAX; 4])), "`ids`"),
        (presets::block_diffusion(0, 4), "`len` is 0"),
        (presets::tree(&[None, Some(1)], 1), "the parent of a node is 1"),
        (presets::tree(&[None, Some(7)], 1), "the parent of a node is 7"),
        (presets::tree(&[None; 3], 2), "the length of `parents` is 3; it must be a multiple of 2 (`batch`)"),
        (presets::tree(&[], 1), "nodes is 0"),
        (presets::tree(&[None], 0), "batch is 0"),
        (presets::flamingo(tensor(&[1, 2, 3], [1, 1, 1, 3]), 4), "`intervals`: dim must be 2, got 3"),
        (presets::flamingo(tensor(&[1, 2], [1, 1, 1, 2]), 0), "`picture` is 0"),
        (presets::natten([4, 4], [5, 3], [1, 1]), "`kernel` is 5"),
        (presets::natten([4, 4], [3, 3], [1, 2]), "`kernel` is 3"),
        (presets::natten([4, 0], [3, 3], [1, 2]), "`canvas` is 0"),
        (presets::natten([1 << 20, 1 << 20], [3, 3], [1, 2]), "points of the canvas"),
        (presets::natten([1 << 28; 3], [1 << 28; 3], [1; 3]), "points of the canvas"),
        (presets::natten([], [], []), "axes of a grid is 0"),
        (presets::natten([2; 4], [2; 4], [1; 4]), "axes of a grid is 4"),
        (presets::tiled_natten([6], [3], [4]), "`canvas` is 6; it must be a multiple of 4 (`tile`)"),
        (presets::tiled_natten([1 << 28; 3], [3; 3], [1 << 28; 3]), "points of the canvas"),
        (presets::morton_natten(6, [3, 3]), "a power of two"),
        (presets::shifted_windows([6], [4], [1]), "`canvas` is 6; it must be a multiple of 4 (`tile`)"),
        (presets::shifted_windows([8], [4], [4]), "`shift` is 4"),
        (presets::shifted_windows([8], [0], [0]), "`window` is 0"),
        (presets::sliding_tiles([8], [12], [4], 0), "tiles of the kernel is 3"),
        (presets::sliding_tiles([8], [6], [4], 0), "`kernel` is 6; it must be a multiple of 4 (`tile`)"),
    ];
    for (got, want) in masks {
        let said = got.expect_err(want).to_string();
        assert!(said.contains(want), "{said}, not {want}");
    }
    let scores = [
        (presets::alibi(floats(&[1.0; 2], [1, 2, 1, 2])), "`slopes`: dim must be 1, got 2"),
        (presets::softcap(0.0), "`cap` is 0"),
        (presets::softcap(f32::NAN), "`cap` is NaN"),
        (presets::relative(floats(&[1.0; 4], [1, 1, 1, 4])), "`distances` is 4"),
        (presets::relative_2d(floats(&[1.0; 9], [1, 1, 3, 3]), [2, 0]), "`width` is 0"),
        (presets::relative_2d(floats(&[1.0; 9], [1, 1, 3, 3]), [2, 3]), "`table`: dim must be 5, got 3"),
        (presets::t5(floats(&[1.0; 3], [1, 1, 1, 3]), 9, true), "`buckets` is 3"),
        (presets::t5(floats(&[1.0; 8], [1, 1, 1, 8]), 4, false), "`longest` is 4"),
        (presets::t5(floats(&[1.0; 8], [1, 1, 1, 8]), 1 << 28, false), "longest"),
        (presets::sandwich(4, 7, 9), "`width` is 7; it must be a multiple of 2"),
        (presets::sandwich(0, 8, 9), "`heads` is 0"),
        (presets::sandwich(1 << 20, 8, 1 << 20), "distances of all heads"),
        (presets::graphormer(floats(&[1.0], [1; 4]), tensor(&[1, 2], [1, 2, 1, 1])), "`distances`"),
        (
            presets::graphormer_edges(floats(&[1.0; 2], [1, 1, 2, 1]), tensor(&[1], [1; 4])),
            "`table`: length must be 1, got 2",
        ),
        (presets::sigmoid(f32::INFINITY), "`bias` is inf"),
        (presets::gelu(-0.5), "`offset` is -0.5"),
    ];
    for (got, want) in scores {
        let said = got.expect_err(want).to_string();
        assert!(said.contains(want), "{said}, not {want}");
    }
    let said = presets::picture_intervals(&[3, 3], 9).expect_err("they do not ascend").to_string();
    assert!(said.contains("marker is 3"), "{said}");
    let said = presets::picture_intervals(&[9], 9).expect_err("past the text").to_string();
    assert!(said.contains("marker is 9"), "{said}");
    let said = presets::shortest_paths(&[true; 3], 2, 1).expect_err("another length").to_string();
    assert!(said.contains("`adjacency`: 4 elements expected, got 3"), "{said}");
    // A preset with tables that are not bound gives an error at its use.
    let documents = presets::documents(tensor(&[1, 2], [1, 1, 1, 2])).expect("a preset");
    let shape = Shape::new(1, 1, 2, 8);
    let device = DeviceMask::none().mask_mod(&documents);
    let said =
        full().gpu.compare_masks(&device, &HostMask::none(), shape, 0.0).expect_err("no table").to_string();
    assert!(said.contains("the function captures ids, but 0 tensors were passed"), "{said}");
}

/// Presets can move between threads.
#[test]
fn presets_are_sent_and_shared() {
    fn shared<T: Send + Sync + Clone + 'static>(_: Arc<T>) {}
    shared(Arc::new(presets::causal().expect("a preset")));
    shared(Arc::new(presets::relu().expect("a preset")));
}
