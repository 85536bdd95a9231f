//! Scores as an output: at every stage, on every device and target, together with the usual
//! outputs.

use wgpu_attention::attention::ScoreStage;
use wgpu_attention::mask::Pattern;
use wgpu_attention::reference::{self, Real, widen};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{Alignment, Attention, Config, DType, Forward, KernelOptions, Scratch, Shape};

use crate::harness::case::widened;
use crate::harness::run::{Placed, PlacedRules};
use crate::harness::{
    Case, FORMS, HostData, Judged, Layout, Profile, Report, Rules, Values, Weights, profiles, stored,
};

const STAGES: [ScoreStage; 3] = [ScoreStage::Scaled, ScoreStage::Softcapped, ScoreStage::Biased];

/// The options of a call that returns scores.
#[derive(Clone, Copy, Debug)]
struct Asked {
    form: Target,
    /// The types of q, k and v, and of the scores.
    dtypes: [DType; 2],
    layout: Layout,
    stage: ScoreStage,
    /// True if the call returns weights too. Then the caller provides the score matrix.
    weights: bool,
}

fn scores<R: Real>(case: &Case, stage: ScoreStage) -> Vec<R> {
    let [q, k] = [&case.q, &case.k].map(|x| widen::<R>(x));
    reference::scores_at(&q, &k, case.shape, &case.options(), stage).expect("the case fits")
}

/// Returns the largest error over tolerance of the scores and of the output.
fn run(profile: &Profile, case: &Case, asked: &Asked) -> Result<f64, String> {
    profile.tidy();
    let Asked { form, dtypes: [dtype, of_scores], layout, stage, weights } = *asked;
    let case = case.stored(dtype, DType::F32);
    let shape = case.shape;
    let [q_at, k_at, v_at, out_at, scores_at, weights_at] =
        layout.places([shape.q(), shape.k(), shape.v(), shape.out(), shape.weights(), shape.weights()]);
    let input = |x, place| Placed::input(profile, Values::Floats(x), dtype, place);
    let [q, k, v] = [(&case.q, q_at), (&case.k, k_at), (&case.v, v_at)].map(|(x, place)| input(x, place));
    let out = Placed::output(profile, dtype, out_at);
    let scores_out = Placed::output(profile, of_scores, scores_at);
    let weights_out = Placed::output(profile, DType::F32, weights_at);
    let rules = PlacedRules::new(profile, &case.rules, DType::F32, layout);
    let config = Config::of(&shape)
        .dtype(dtype)
        .scale(case.scale)
        .softcap(case.softcap)
        .kernel_options(KernelOptions::new().target(form));
    let mut call = Forward::new(q.view(), k.view(), v.view(), out.view())
        .mask(rules.mask())
        .scores(scores_out.view(), stage);
    if weights {
        call = call.weights(weights_out.view());
    }
    let gpu = &profile.gpu;
    let refused = |e: wgpu_attention::Error| format!("refused: {e}");
    let attention = Attention::with_pipelines(gpu.pipelines(), config).map_err(refused)?;
    let size = attention.scratch_size(&call).map_err(refused)?;
    let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch)).map_err(refused)?;

    let read = |placed: &Placed, what| pollster::block_on(placed.download_async(what, profile));
    let naive = widened(&scores::<f32>(&case, stage), of_scores);
    let want = scores::<f64>(&case, stage);
    let largest = case.largest_score();
    let judged = Judged::new(&naive, want, largest).judge(&read(&scores_out, "scores")?);
    let worst = judged.map_err(|e| format!("scores: {e}"))?;
    let truth = case.truth(dtype, Weights::PerHead(DType::F32));
    let of_out = truth.out.judge(&read(&out, "out")?).map_err(|e| format!("out: {e}"))?;
    let of_weights = match truth.weights.filter(|_| weights) {
        Some(truth) => truth.judge(&read(&weights_out, "weights")?).map_err(|e| format!("weights: {e}"))?,
        None => 0.0,
    };
    Ok(worst.max(of_out).max(of_weights))
}

fn cases() -> Vec<Case> {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 71, head_dim: 20, value_dim: 12 };
    let case =
        |name: &str, rules: Rules| Case::random(format!("scores, {name}"), shape).with(|c| c.rules = rules);
    let [b, h, i, j] = shape.weights();
    let bias = |[b, h, i, j]: [usize; 4]| match (i + 2 * j + b) % 7 {
        0 => f32::NEG_INFINITY,
        n => n as f32 - 2.0 + h as f32,
    };
    let bias = HostData::of([b, h, i, j], bias);
    let keep = HostData::of([1, h, i, j], |[_, h, i, j]| (i * j + h) % 3 != 0 && i != 5);
    vec![
        case("plain", Rules::default()),
        // The scores of tiles that no query may see are wanted as well.
        case("causal", Rules { causal: true, alignment: Alignment::TopLeft, ..Default::default() }),
        case("a window", Rules { causal: true, window: Some([9, 0]), ..Default::default() }),
        case(
            "lengths",
            Rules { lengths: Some(HostData::new(vec![0, 40], [2, 1, 1, 1])), ..Default::default() },
        ),
        case(
            "everything",
            Rules {
                causal: true,
                bias: Some(bias.clone()),
                attn_mask: Some(keep),
                sinks: Some(HostData::new(vec![0.5, -1.0, 2.0, 0.0], [1, 4, 1, 1])),
                ..Default::default()
            },
        )
        .with(|c| (c.softcap, c.scale) = (Some(1.5), Some(0.7))),
        case("capped", Rules::default()).with(|c| c.softcap = Some(0.8)),
        case(
            "pairs",
            Rules {
                exclude_self: true,
                pattern: Some(Pattern::Local { block: 16 }),
                slopes: Some(HostData::new(vec![0.5, 0.25, 0.125, 1.0], [1, 4, 1, 1])),
                bias: Some(bias),
                ..Default::default()
            },
        ),
    ]
}

#[test]
fn scores_match_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("scores");
    for (n, case) in cases().iter().enumerate() {
        for profile in profiles() {
            for (t, form) in FORMS.into_iter().enumerate() {
                for (s, stage) in STAGES.into_iter().enumerate() {
                    let half = if n % 2 == 0 { DType::F16 } else { DType::BF16 };
                    let dtypes = [s, t].map(|m| [DType::F32, half][(n + m) % 2]);
                    let layout = [Layout::Dense, Layout::Window(n as u64 + 1), Layout::Blhd][(n + s + t) % 3];
                    let asked = Asked { form, dtypes, layout, stage, weights: (n + s + t) % 2 == 0 };
                    let setup = format!("{}, {asked:?}", profile.name);
                    report.record(&case.name, &setup, run(profile, case, &asked));
                }
            }
        }
    }
    report.finish();
}

/// The results of the reference, written out.
#[test]
fn reference_has_every_score_stage() {
    let shape = Shape::new(1, 1, 2, 1);
    let mask =
        wgpu_attention::Mask::causal().bias(wgpu_attention::HostTensor::new(&[0.5, 1.0], [1, 1, 1, 2]));
    let options = reference::Options::new().scale(2.0).softcap(4.0).mask(mask);
    let at =
        |stage| reference::scores_at::<f64>(&[1.0, -3.0], &[1.0, 2.0], shape, &options, stage).expect("fits");
    let capped = [2.0, 4.0, -6.0, -12.0].map(|x: f64| 4.0 * (x / 4.0).tanh());
    assert_eq!(at(ScoreStage::Scaled), [2.0, 4.0, -6.0, -12.0]);
    assert_eq!(at(ScoreStage::Softcapped), capped);
    assert_eq!(
        at(ScoreStage::Biased),
        [capped[0] + 0.5, f64::NEG_INFINITY, capped[2] + 0.5, capped[3] + 1.0]
    );
    let short = reference::scores_at::<f64>(&[1.0], &[1.0, 2.0], shape, &options, ScoreStage::Scaled);
    assert!(short.expect_err("refused").to_string().contains("`q`: 2 elements expected, got 1"));
}

/// The comparison must be able to fail: two stages differ.
#[test]
fn score_stages_differ() {
    let case = &cases()[4];
    let profile = profiles()[0];
    let asked = |stage| Asked {
        form: Target::Software,
        dtypes: [DType::F32; 2],
        layout: Layout::Dense,
        stage,
        weights: false,
    };
    for (stage, next) in [(STAGES[0], STAGES[1]), (STAGES[1], STAGES[2])] {
        let case = case.stored(DType::F32, DType::F32);
        let [mine, other] = [stage, next].map(|stage| scores::<f64>(&case, stage));
        let naive = widened(&scores::<f32>(&case, stage), DType::F32);
        assert!(Judged::new(&naive, mine, case.largest_score()).judge(&other).is_err());
        run(profile, &case, &asked(stage)).expect("its own stage");
    }
}

#[test]
fn staged_path_computes_scores() {
    let case = Case::random("scores, path", Shape::new(1, 2, 8, 4));
    let profile = profiles()[0];
    let x = stored(&case.q, DType::F32);
    let place = crate::harness::Place::dense;
    let q = Placed::input(profile, Values::Floats(&x), DType::F32, place(case.shape.q()));
    let out = Placed::output(profile, DType::F32, place(case.shape.out()));
    let scores = Placed::output(profile, DType::F32, place(case.shape.weights()));
    let call = Forward::new(q.view(), q.view(), q.view(), out.view());
    let attention =
        Attention::with_pipelines(profile.gpu.pipelines(), Config::new(2, 4)).expect("an operator");
    let size = |call: &Forward| attention.scratch_size(call).expect("a size");
    let staged = Config::new(2, 4).kernel_options(KernelOptions::new().algorithm(Algorithm::Staged));
    let staged = Attention::with_pipelines(profile.gpu.pipelines(), staged).expect("an operator");
    let with_scores = size(&call.scores(scores.view(), ScoreStage::Scaled));
    assert_eq!(with_scores, staged.scratch_size(&call).expect("a size"));
    assert_ne!(with_scores, size(&call));
}
