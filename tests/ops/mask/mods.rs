//! Custom functions, compared with the reference, which has them as closures.

use std::sync::atomic::{AtomicBool, Ordering};

use wgpu_attention::cache::{CacheLayout, CacheStorage};
use wgpu_attention::mask::block_map::state;
use wgpu_attention::mask::{At, BoundMaskMod, BoundScoreMod, Captured, HostMask, MaskMod, ScoreMod};
use wgpu_attention::reference::{MultiHeadShape, classify};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, Error, HostTensor, Mask, Shape, TensorView};

use crate::harness::backward::BackwardSetup;
use crate::harness::classify::classified;
use crate::harness::gradients::{LayerProblem, Problem};
use crate::harness::layer::LayerCase;
use crate::harness::layer_backward::LayerBackwardSetup;
use crate::harness::layer_options::LayerOptions;
use crate::harness::mods::{Capture, OwnMask, OwnScore, Text, pairs, readings, score, winding};
use crate::harness::{
    Ask, Bed, Case, Count, Data, FORMS, HostData, Kind, Layout, Report, Rng, Rules, Setup, Weights, due,
    full, matrices, rest, stored,
};

const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 53, head_dim: 16, value_dim: 12 };

/// A table by head and distance, with clamped distances.
fn table(rng: &mut Rng, dtype: DType) -> OwnScore {
    let table = HostData::new(stored(&rng.normals(4 * 9), dtype), [1, 4, 1, 9]);
    let text = "
        // By distance. The outermost entries are for all that are further.
        fn place(at: At) -> u32 { return u32(clamp(i32(at.key) - at.position, -4, 4) + 4); }
        fn score_mod(score: f32, at: At) -> f32 { return score + table_at(9u, at.head, 7u, place(at)); }";
    let capture = Capture::Float(table.clone(), dtype);
    let element = |at: &At| at.head as usize * 9 + ((at.key as i32 - at.position).clamp(-4, 4) + 4) as usize;
    let own = Text::new(text).captures("table", capture);
    score(own, move |x, at| x + f64::from(table.data[element(at)]))
        .reads(move |_, at, read| read(element(at), 1.0))
}

/// Neighbours in rows of eight, and keys that a tensor of Booleans shows.
fn neighbours(rng: &mut Rng) -> OwnMask {
    let shown = HostData::new((0..2 * 53).map(|_| rng.chance(0.3)).collect(), [2, 1, 1, 53]);
    let text = "
        fn mask_mod(at: At) -> bool {
            let q = vec2<i32>(i32(at.query) / 8, i32(at.query) % 8);
            let k = vec2<i32>(i32(at.key) / 8, i32(at.key) % 8);
            return all(abs(q - k) <= vec2<i32>(1, 2)) || shown_at(at.batch, 0u, 0u, at.key);
        }";
    let capture = Capture::Bool(shown.clone());
    pairs(Text::new(text).captures("shown", capture), move |at| {
        let near = |a: u32, b: u32, most: i32| (a as i32 - b as i32).abs() <= most;
        near(at.query / 8, at.key / 8, 1) && near(at.query % 8, at.key % 8, 2)
            || shown.data[(at.batch * 53 + at.key) as usize]
    })
}

/// Each alone and together, with other parts of masks, on every path and target.
#[test]
fn every_path() {
    let mut report = Report::new("mods");
    let rng = &mut Rng::named("mods");
    let cases = [
        Case::random("a table", SHAPE).with(|c| c.rules.score_mod = Some(table(rng, DType::F32))),
        Case::random("a table of f16, causal", SHAPE).with(|c| {
            c.rules.score_mod = Some(table(rng, DType::F16));
            c.rules.causal = true;
        }),
        Case::random("loops", SHAPE).with(|c| c.rules.score_mod = Some(winding())),
        Case::random("a mask", SHAPE).with(|c| c.rules.mask_mod = Some(neighbours(rng))),
        Case::random("both", SHAPE).with(|c| {
            c.rules.score_mod = Some(winding());
            c.rules.mask_mod = Some(neighbours(rng));
            c.rules.window = Some([20, 9]);
            c.softcap = Some(3.0);
        }),
    ];
    for case in cases {
        for form in FORMS {
            let mut truths = Default::default();
            for path in [Algorithm::Fused, Algorithm::Staged] {
                let key = format!("mods, {}, {form:?}, {path:?}", case.name);
                if !(due(&key) || rest(&key)) {
                    continue;
                }
                let weights =
                    if path == Algorithm::Staged { Weights::PerHead(DType::F32) } else { Weights::None };
                let setup = Setup { layout: Layout::Window(7), weights, ..Setup::plain(full(), form, path) };
                report.check_in(&case, &setup, &mut truths);
            }
        }
    }
    report.finish();
}

/// A WGSL expression of `x`, and the same function on the host.
type Function = (&'static str, fn(f64) -> f64);

/// Returns every function that has a derivative.
fn functions() -> Vec<Function> {
    vec![
        ("abs(x - 0.3)", |x| (x - 0.3).abs()),
        ("min(x, 0.5 * x)", |x| x.min(0.5 * x)),
        ("max(x * x, x)", |x| (x * x).max(x)),
        ("clamp(x, -0.7, 0.4 + 0.1 * x)", |x| if x > 0.4 + 0.1 * x { 0.4 + 0.1 * x } else { x.max(-0.7) }),
        ("saturate(x)", |x| x.clamp(0.0, 1.0)),
        ("cos(x) + sin(2.0 * x)", |x| x.cos() + (2.0 * x).sin()),
        ("cosh(0.5 * x) - sinh(0.5 * x)", |x| (0.5 * x).cosh() - (0.5 * x).sinh()),
        ("tan(0.3 * tanh(x))", |x| (0.3 * x.tanh()).tan()),
        ("acos(0.5 * tanh(x)) + asin(0.5 * tanh(x)) * 2.0", |x| {
            let t = 0.5 * x.tanh();
            t.acos() + t.asin() * 2.0
        }),
        ("atan(x) + atan2(x, 2.0 + x * x)", |x| x.atan() + x.atan2(2.0 + x * x)),
        ("asinh(x) + acosh(2.0 + x * x)", |x| x.asinh() + (2.0 + x * x).acosh()),
        ("atanh(0.5 * tanh(x))", |x| (0.5 * x.tanh()).atanh()),
        ("radians(40.0 * x) + degrees(0.01 * x)", |x| (40.0 * x).to_radians() + (0.01 * x).to_degrees()),
        ("fract(0.25 * x) + floor(x) + ceil(x) + trunc(x) + round(x) + sign(x) + step(0.0, x)", |x| {
            let fract = 0.25 * x - (0.25 * x).floor();
            let step = if x >= 0.0 { 1.0 } else { 0.0 };
            fract + x.floor() + x.ceil() + x.trunc() + x.round_ties_even() + x.signum() + step
        }),
        ("exp(0.5 * x) + exp2(0.3 * x)", |x| (0.5 * x).exp() + (0.3 * x).exp2()),
        ("log(1.0 + x * x) + log2(2.0 + abs(x))", |x| (1.0 + x * x).ln() + (2.0 + x.abs()).log2()),
        ("pow(1.5 + tanh(x), 0.4 * x)", |x| (1.5 + x.tanh()).powf(0.4 * x)),
        ("sqrt(1.0 + x * x) + inverseSqrt(1.0 + x * x)", |x| {
            (1.0 + x * x).sqrt() + 1.0 / (1.0 + x * x).sqrt()
        }),
        ("fma(x, x, 0.5 * x)", |x| x * x + 0.5 * x),
        ("mix(x, 2.0 - x, 0.3 * x)", |x| x * (1.0 - 0.3 * x) + (2.0 - x) * 0.3 * x),
        ("smoothstep(-1.0, 1.5, x)", |x| {
            let u = ((x + 1.0) / 2.5).clamp(0.0, 1.0);
            u * u * (3.0 - 2.0 * u)
        }),
        ("x / (2.0 + x * x) - (-x)", |x| x / (2.0 + x * x) + x),
        ("(3.0 * x) % 1.7", |x| (3.0 * x) % 1.7),
        ("select(x, -2.0 * x, x > 0.2)", |x| if x > 0.2 { -2.0 * x } else { x }),
        ("dot(vec3<f32>(x, 1.0, x * x), vec3<f32>(0.5, x, 0.25))", |x| 1.5 * x + 0.25 * x * x),
        ("length(vec2<f32>(x, 1.0)) + distance(vec2<f32>(x), vec2<f32>(1.0, -1.0))", |x| {
            x.hypot(1.0) + (x - 1.0).hypot(x + 1.0)
        }),
        ("normalize(vec2<f32>(x, 1.0)).x + cross(vec3<f32>(x, 1.0, 0.0), vec3<f32>(0.0, x, 1.0)).z", |x| {
            x / x.hypot(1.0) + x * x
        }),
        ("vec4<f32>(x, 1.0, 2.0, 3.0).wzyx.w * vec2<f32>(x)[1]", |x| x * x),
        ("(vec2<f32>(x, 2.0) * 3.0 + x).y + (1.0 / vec2<f32>(2.0 + x * x, 1.0)).x", |x| {
            6.0 + x + 1.0 / (2.0 + x * x)
        }),
        ("ldexp(x, vec2<i32>(1, 2).x) + length(x) + f32(i32(4.0 * x)) * 0.1", |x| {
            2.0 * x + x.abs() + (4.0 * x).trunc() * 0.1
        }),
    ]
}

fn derivatives() -> OwnScore {
    let functions = functions();
    let cases: String = functions
        .iter()
        .enumerate()
        .map(|(n, (wgsl, _))| format!("case {n}u: {{ return {wgsl}; }}\n"))
        .collect();
    let count = functions.len() as u32;
    let text = format!(
        "fn score_mod(x: f32, at: At) -> f32 {{ switch (at.key + at.query) % {count}u {{ {cases} default: {{ return x; }} }} }}"
    );
    score(Text::new(text), move |x, at| functions[((at.key + at.query) % count) as usize].1(x))
}

/// Derivatives from the text, compared with differences of the closure.
#[test]
fn derivatives_match_finite_differences() {
    crate::harness::in_turn!();
    let mut report = Report::new("derivatives of mods");
    let rng = &mut Rng::named("derivatives of mods");
    let constant =
        score(Text::new("fn score_mod(score: f32, at: At) -> f32 { return f32(at.key % 3u); }"), |_, at| {
            f64::from(at.key % 3)
        });
    let hook = "
        fn score_mod(score: f32, at: At) -> f32 { return bitcast<f32>(bitcast<u32>(2.0 * score)); }
        fn score_mod_slope(score: f32, at: At) -> f32 { return 2.0; }";
    let cases = [
        Case::random("functions", SHAPE).with(|c| c.rules.score_mod = Some(derivatives())),
        Case::random("loops, with softcap and bias", SHAPE).with(|c| {
            c.rules.score_mod = Some(winding());
            c.rules.bias = Some(HostData::new(rng.normals(53), [1, 1, 1, 53]));
            c.softcap = Some(3.0);
        }),
        Case::random("a table and a mask", SHAPE).with(|c| {
            c.rules.score_mod = Some(table(rng, DType::F32));
            c.rules.mask_mod = Some(neighbours(rng));
        }),
        Case::random("what ignores its score", SHAPE).with(|c| c.rules.score_mod = Some(constant)),
        Case::random("a derivative of one's own", SHAPE)
            .with(|c| c.rules.score_mod = Some(score(Text::new(hook), |x, _| 2.0 * x))),
    ];
    for (n, case) in cases.into_iter().enumerate() {
        let added = [case.rules.bias.is_some(), false, false, false, false];
        for form in FORMS.into_iter().skip(usize::from(n > 2)) {
            let key = format!("derivatives of mods, {}, {form:?}", case.name);
            if !(due(&key) || rest(&key)) {
                continue;
            }
            let setup = BackwardSetup { added, ..BackwardSetup::plain(full(), form) };
            report.check_backward(&Problem::new(case.clone(), 0, n == 0), &setup);
        }
    }
    report.finish();
}

/// Gradients of captured tensors. One has more elements than a workgroup, in one all pairs read few
/// elements, and one adds to earlier values.
#[test]
fn captured_gradients() {
    let mut report = Report::new("gradients of what mods capture");
    let rng = &mut Rng::named("gradients of what mods capture");
    let each = stored(&rng.normals(4 * 37 * 53), DType::BF16);
    let each = HostData::new(each, [1, 4, 37, 53]);
    let data = each.data.clone();
    let text = "fn score_mod(score: f32, at: At) -> f32 { return score * table_at(at.batch, at.head, at.query, at.key); }";
    let element = |at: &At| ((at.head * 37 + at.query) * 53 + at.key) as usize;
    let each = Text::new(text).captures("table", Capture::Float(each, DType::BF16));
    let each = score(each, move |x, at| x * f64::from(data[element(at)]))
        .reads(move |x, at, read| read(element(at), x));
    let ignored = Text::new("fn score_mod(score: f32, at: At) -> f32 { return score; }");
    let ignored =
        ignored.captures("table", Capture::Float(HostData::new(vec![1.0; 3], [1, 1, 1, 3]), DType::F32));
    let cases = [
        Case::random("a table", SHAPE).with(|c| c.rules.score_mod = Some(table(rng, DType::F32))),
        Case::random("a table of f16, causal, softcap", SHAPE).with(|c| {
            c.rules.score_mod = Some(table(rng, DType::F16));
            c.rules.causal = true;
            c.softcap = Some(2.0);
        }),
        Case::random("an element a pair", SHAPE).with(|c| c.rules.score_mod = Some(each)),
        Case::random("many readings, and a mask", SHAPE).with(|c| {
            c.rules.score_mod = Some(readings(rng.normals(28)));
            c.rules.mask_mod = Some(neighbours(rng));
        }),
        Case::random("no readings", SHAPE)
            .with(|c| c.rules.score_mod = Some(score(ignored, |x, _| x).reads(|_, _, _| {}))),
    ];
    for (n, case) in cases.into_iter().enumerate() {
        let key = format!("captured gradients, {}", case.name);
        if !(n < 2 || due(&key) || rest(&key)) {
            continue;
        }
        let plain = BackwardSetup::plain(full(), FORMS[n % 2]);
        let added = [false, false, false, false, true];
        let setup = BackwardSetup {
            added,
            wanted: [n == 3; 3],
            accumulates: n % 2 == 1,
            layout: Layout::Window(5),
            ..plain
        };
        report.check_backward(&Problem::new(case, 0, n == 0), &setup);
    }
    report.finish();
}

/// A block map from a mask function. Kernels skip hidden blocks and test pairs only in mixed ones.
#[test]
fn block_maps() {
    crate::harness::in_turn!();
    let mut report = Report::new("block maps of mods");
    let rng = &mut Rng::named("block maps of mods");
    let shape = Shape { q_len: 70, kv_len: 90, ..SHAPE };
    let band = "fn mask_mod(at: At) -> bool { return at.key / 16u == at.query / 16u || (at.key + at.query + at.head) % 40u == 0u; }";
    let band =
        pairs(Text::new(band), |at| at.key / 16 == at.query / 16 || (at.key + at.query + at.head) % 40 == 0);
    let rules = Rules { mask_mod: Some(band), ..Default::default() };
    let size = [16, 16];
    let want = classify(&rules.host(), shape, size, [1, 4]).expect("a map");
    let got = pollster::block_on(classified(full(), &rules, &shape, size, [1, 4])).expect("a map");
    assert_eq!(got, want);
    assert!([state::HIDDEN, state::FULL, state::MIXED].iter().all(|state| want.contains(state)), "{want:?}");
    let map = HostData::new(want, [1, 4, 5, 6]);
    let case = Case::random("a map of a mod", shape).with(|c| {
        c.rules = Rules { blocks: Some((map, size)), score_mod: Some(table(rng, DType::F32)), ..rules };
    });
    for form in FORMS {
        let setup = Setup::plain(full(), form, Algorithm::Fused);
        report.check_in(&case, &setup, &mut Default::default());
    }
    report.finish();
}

/// Keys of a cache, at their positions in the sequence.
#[test]
fn caches() {
    crate::harness::in_turn!();
    let rules = Rules {
        causal: true,
        score_mod: Some(winding()),
        mask_mod: Some(pairs(
            Text::new(
                "fn mask_mod(at: At) -> bool { return at.key % 3u != 1u || i32(at.key) + 4 > at.position || at.key + 2u > at.kv_len; }",
            ),
            |at| at.key % 3 != 1 || at.key as i32 + 4 > at.position || at.key + 2 > at.kv_len,
        )),
        ..Default::default()
    };
    for (layout, capacity) in [(CacheLayout::Contiguous, 64), (CacheLayout::Ring { sink_tokens: 2 }, 24)] {
        for (form, rows) in FORMS.into_iter().zip([1, 5]) {
            let mut bed =
                Bed::new(full(), Kind::new(CacheStorage::F32, layout, capacity), Data::Lossless, 31);
            bed.grow(&Count::All(rows + 20)).expect("room");
            bed.grow(&Count::All(rows)).expect("room");
            bed.ask(&Ask { rows: Some(rows), ..Ask::new(form, &rules) })
                .unwrap_or_else(|e| panic!("{layout:?}, {form:?}: {e}"));
        }
    }
}

/// A layer and its gradients. Appended keys are outside the functions.
#[test]
fn layers() {
    let mut report = Report::new("mods of layers");
    let rng = &mut Rng::named("mods of layers");
    let shape = MultiHeadShape { batch: 2, q_len: 37, kv_len: 53 };
    let mut case = LayerCase::random("mods, appended".into(), LayerOptions::new(24, 4), shape, true);
    case.rules = Rules {
        score_mod: Some(table(rng, DType::F32)),
        mask_mod: Some(neighbours(rng)),
        ..Default::default()
    };
    let problem = LayerProblem {
        case,
        d_out: rng.normals(2 * 37 * 24).iter().map(|x| f64::from(*x)).collect(),
        d_lse: None,
    };
    for (form, keeps) in FORMS.into_iter().zip([true, false]) {
        let key = format!("mods of layers, {form:?}");
        if !(due(&key) || rest(&key)) {
            continue;
        }
        let setup = LayerBackwardSetup { keeps, ..LayerBackwardSetup::plain(full(), form) };
        report.check_layer_backward(&problem, &setup);
    }
    report.finish();
}

/// Functions on matrix units, forward and backward.
#[test]
fn matrix_units() {
    crate::harness::in_turn!();
    let mut report = Report::new("mods on matrix units");
    let shape = Shape { head_dim: 16, value_dim: 16, ..SHAPE };
    for profile in matrices().filter(|p| p.compiles_fast()) {
        let case = Case::random("mods on matrix units", shape).with(|c| c.rules.score_mod = Some(winding()));
        if due("mods on matrix units") || rest("mods on matrix units") {
            report.check_in(&case, &Setup::matrix(profile, Layout::Dense), &mut Default::default());
        }
        if rest("mods on matrix units, gradients") {
            let setup = BackwardSetup { form: Target::Gpu, ..BackwardSetup::matrix(profile) };
            report.check_backward(&Problem::new(case, 0, false), &setup);
        }
    }
    report.finish();
}

/// A function of the score and the pair, as WGSL and as an evaluation on the host.
#[derive(Clone, Debug)]
enum Tree {
    Score,
    Number(f32),
    Key,
    Distance,
    Table(Box<Tree>),
    Unary(&'static str, Box<Tree>),
    Binary(char, Box<Tree>, Box<Tree>),
    /// If the first is less than the second, the third, else the fourth.
    Where(Box<[Tree; 4]>),
    /// A sum that starts with the first and adds the second this many times.
    Repeat(u32, Box<[Tree; 2]>),
}

impl Tree {
    fn random(rng: &mut Rng, depth: usize) -> Tree {
        let one = |rng: &mut Rng| Box::new(Tree::random(rng, depth - 1));
        match rng.below(if depth == 0 { 4 } else { 11 }) {
            0 | 4 => Tree::Score,
            1 => Tree::Number((rng.below(64) as f32 - 32.0) / 16.0),
            2 => Tree::Key,
            3 => Tree::Distance,
            5 => Tree::Table(one(rng)),
            6 | 7 => Tree::Unary(rng.pick(&["tanh", "sin", "abs", "atan"]), one(rng)),
            8 => Tree::Where(Box::new(std::array::from_fn(|_| *one(rng)))),
            9 => Tree::Repeat(1 + rng.below(3) as u32, Box::new([*one(rng), *one(rng)])),
            _ => Tree::Binary(rng.pick(&['+', '-', '*', '<', '>']), one(rng), one(rng)),
        }
    }

    /// Writes statements that leave the value in a variable, and returns the variable's name.
    fn wgsl(&self, text: &mut String, names: &mut usize) -> String {
        let own = match self {
            Tree::Score => "score".to_string(),
            Tree::Number(x) => format!("({x:?})"),
            Tree::Key => "(f32(at.key % 7u) * 0.25)".to_string(),
            Tree::Distance => "(f32(i32(at.key) - at.position) * 0.125)".to_string(),
            Tree::Table(x) => {
                let x = x.wgsl(text, names);
                format!("table_at(0u, at.head, 0u, u32(abs({x}) * 2.0))")
            }
            Tree::Unary(name, x) => format!("{name}({})", x.wgsl(text, names)),
            Tree::Binary(op, a, b) => {
                let (a, b) = (a.wgsl(text, names), b.wgsl(text, names));
                match op {
                    '<' => format!("min({a}, {b})"),
                    '>' => format!("max({a}, {b})"),
                    op => format!("({a} {op} {b})"),
                }
            }
            Tree::Where(parts) => {
                let [a, b] = [&parts[0], &parts[1]].map(|part| part.wgsl(text, names));
                let out = format!("v{names}");
                *names += 1;
                *text += &format!("var {out} = 0.0;\nif {a} < {b} {{\n");
                let then = parts[2].wgsl(text, names);
                *text += &format!("{out} = {then};\n}} else {{\n");
                let other = parts[3].wgsl(text, names);
                *text += &format!("{out} = {other};\n}}\n");
                return out;
            }
            Tree::Repeat(times, parts) => {
                let first = parts[0].wgsl(text, names);
                let (out, n) = (format!("v{names}"), format!("n{names}"));
                *names += 1;
                *text += &format!("var {out} = {first};\nfor (var {n} = 0; {n} < {times}; {n}++) {{\n");
                let step = parts[1].wgsl(text, names);
                *text += &format!("{out} = sin({out}) + {step};\n}}\n");
                return out;
            }
        };
        let name = format!("v{names}");
        *names += 1;
        *text += &format!("let {name} = {own};\n");
        name
    }

    /// Returns the value, and the derivative by the score. `edge` becomes true at a jump or a bend
    /// within f32's rounding.
    fn of(&self, score: f64, at: &At, table: &[f32], edge: &AtomicBool) -> [f64; 2] {
        let of = |tree: &Tree| tree.of(score, at, table, edge);
        let near =
            |apart: f64| edge.store(edge.load(Ordering::Relaxed) || apart.abs() < 1e-4, Ordering::Relaxed);
        match self {
            Tree::Score => [score, 1.0],
            Tree::Number(x) => [f64::from(*x), 0.0],
            Tree::Key => [f64::from(at.key % 7) * 0.25, 0.0],
            Tree::Distance => [f64::from(at.key as i32 - at.position) * 0.125, 0.0],
            Tree::Table(x) => {
                let place = of(x)[0].abs() * 2.0;
                near(place - place.round());
                let place = place as usize;
                [f64::from(table[at.head as usize * 9 + place.min(8)]), 0.0]
            }
            Tree::Unary(name, x) => {
                let [x, d] = of(x);
                match *name {
                    "tanh" => [x.tanh(), d * (1.0 - x.tanh().powi(2))],
                    "sin" => [x.sin(), d * x.cos()],
                    "abs" => {
                        near(x);
                        [x.abs(), d * x.signum()]
                    }
                    _ => [x.atan(), d / (1.0 + x * x)],
                }
            }
            Tree::Binary(op, a, b) => {
                let ([a, da], [b, db]) = (of(a), of(b));
                if "<>".contains(*op) {
                    near(a - b);
                }
                match op {
                    '+' => [a + b, da + db],
                    '-' => [a - b, da - db],
                    '*' => [a * b, da * b + a * db],
                    '<' if a <= b => [a, da],
                    '>' if a >= b => [a, da],
                    _ => [b, db],
                }
            }
            Tree::Where(parts) => {
                let apart = of(&parts[0])[0] - of(&parts[1])[0];
                near(apart);
                of(&parts[if apart < 0.0 { 2 } else { 3 }])
            }
            Tree::Repeat(times, parts) => {
                let [mut x, mut d] = of(&parts[0]);
                let [step, d_step] = of(&parts[1]);
                for _ in 0..*times {
                    [x, d] = [x.sin() + step, x.cos() * d + d_step];
                }
                [x, d]
            }
        }
    }
}

/// Functions of a grammar. The text gives value and derivative, and so does the tree that it was
/// made from.
#[test]
fn random_functions() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    let rng = &mut Rng::named("random mods");
    let shape = Shape::new(2, 4, 37, 16);
    let mut compared = 0;
    for n in 0..200 {
        let (mut tree, mut text) = (Tree::random(rng, 4), String::new());
        while !format!("{tree:?}").contains("Score") {
            tree = Tree::random(rng, 4);
        }
        let out = tree.wgsl(&mut text, &mut 0);
        let text = format!("fn score_mod(score: f32, at: At) -> f32 {{\n{text}return {out};\n}}");
        let table = rng.normals(4 * 9);
        let buffer = gpu.upload(&table).expect("memory");
        let view = TensorView::new(&buffer, DType::F32, [1, 4, 1, 9]);
        let own =
            ScoreMod::capturing(&text, &[Captured::float("table")]).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let device = Mask::causal().score_mod(own.with(&[view]));
        // Pairs are compared in order, up to the first difference.
        let edge = AtomicBool::new(false);
        let value = |x: f64, at: &At| {
            edge.store(false, Ordering::Relaxed);
            tree.of(x, at, &table, &edge)[0]
        };
        let slope = |x: f64, at: &At| tree.of(x, at, &table, &edge)[1];
        let host = Mask::causal().score_fn(&value).score_fn_slope(&slope);
        match gpu.compare_masks(&device, &host, shape, 1e-3) {
            Ok(_) => compared += 1,
            Err(_) if edge.load(Ordering::Relaxed) => {}
            Err(e) => panic!("{n}: {e}\n{text}"),
        }
    }
    assert!(compared > 120, "{compared}");
}

/// Functions made of functions whose names, uniforms and tensors have the same names.
#[test]
fn combinations() {
    let gpu = &full().gpu;
    let shape = Shape { batch: 3, ..SHAPE };
    let text = "
        struct Uniforms { every: u32, lean: vec2<f32> }
        fn sees(at: At) -> bool {
            for (var n = 0u; n < 4u; n++) { if at.key == n * 9u { return true; } }
            return (at.key + at.query) % uniforms().every == 0u;
        }
        fn mask_mod(at: At) -> bool { return sees(at) || shown_at(0u, 0u, 0u, at.key) && uniforms().lean.y > 2.5; }";
    let own = MaskMod::capturing(text, &[Captured::bool("shown")]).unwrap_or_else(|e| panic!("{e}"));
    let rng = &mut Rng::named("combinations");
    let shown: [Vec<bool>; 2] = std::array::from_fn(|_| (0..53).map(|_| rng.chance(0.2)).collect());
    let buffers = shown.each_ref().map(|shown| {
        let mut words = vec![0u8; 56];
        words.iter_mut().zip(shown).for_each(|(byte, shown)| *byte = u8::from(*shown));
        let words: Vec<f32> = bytemuck::pod_collect_to_vec(&words);
        gpu.upload(&words).expect("memory")
    });
    let every = [3u32, 5];
    let bound = |n: usize| {
        let view = TensorView::new(&buffers[n], DType::Bool, [1, 1, 1, 53]);
        let words = [every[n], 0, 2f32.to_bits(), (2.0f32 + n as f32).to_bits()];
        own.with(&[view]).uniforms(bytemuck::cast_slice(&words))
    };
    let sees = |n: usize, at: &At| {
        at.key.is_multiple_of(9) && at.key < 36
            || (at.key + at.query).is_multiple_of(every[n])
            || n == 1 && shown[1][at.key as usize]
    };
    let same = |mask: Result<BoundMaskMod, Error>, host: &(dyn Fn(&At) -> bool + Sync)| {
        let mask = mask.unwrap_or_else(|e| panic!("{e}"));
        gpu.compare_masks(&Mask::none().mask_mod(mask), &Mask::none().mask_fn(host), shape, 0.0)
            .unwrap_or_else(|e| panic!("{e}"));
    };
    same(Ok(bound(0)), &|at| sees(0, at));
    same(bound(0).and(bound(1)), &|at| sees(0, at) && sees(1, at));
    same(bound(0).or(bound(1)), &|at| sees(0, at) || sees(1, at));
    same(bound(1).inverted(), &|at| !sees(1, at));
    same(bound(0).or(bound(1)).and_then(|both| both.inverted()?.and(bound(1).inverted()?)), &|at| {
        !sees(0, at) && !sees(1, at)
    });
    same(BoundMaskMod::per_batch(&[bound(1), bound(0)]), &|at| sees(usize::from(at.batch == 0), at));
    let too_many = BoundMaskMod::per_batch(&[bound(0); 5]).expect_err("80 bytes").to_string();
    assert!(too_many.contains("have 80 bytes, but at most 64"), "{too_many}");
    assert!(BoundMaskMod::per_batch(&[]).is_err());
    // A missing capture gives the same error as in the part alone.
    let without = own.uniforms(&[0; 16]).and(bound(0)).expect("a text");
    let said = gpu.compare_masks(&Mask::none().mask_mod(without), &Mask::none(), shape, 0.0);
    assert!(said.expect_err("a tensor lacks").to_string().contains("1 tensors were passed"));

    let double =
        ScoreMod::new("fn score_mod(score: f32, at: At) -> f32 { return score * score; }").expect("a mod");
    let further =
        ScoreMod::new("fn score_mod(score: f32, at: At) -> f32 { return tanh(score) + f32(at.head); }");
    let both = BoundScoreMod::from(double).then(further.expect("a mod")).unwrap_or_else(|e| panic!("{e}"));
    let host = |x: f64, at: &At| (x * x).tanh() + f64::from(at.head);
    let slope = |x: f64, _: &At| 2.0 * x * (1.0 - (x * x).tanh().powi(2));
    let host = Mask::none().score_fn(&host).score_fn_slope(&slope);
    gpu.compare_masks(&Mask::none().score_mod(both), &host, shape, 1e-5).unwrap_or_else(|e| panic!("{e}"));
    let hook = "fn score_mod(score: f32, at: At) -> f32 { return score; } fn score_mod_slope(score: f32, at: At) -> f32 { return 1.0; }";
    let said = BoundScoreMod::from(double).then(ScoreMod::new(hook).expect("a mod"));
    assert!(said.expect_err("a derivative of one's own").to_string().contains("cannot be combined"));
}

/// A mask of one sequence, in each of several packed ones.
#[test]
fn per_sequence() {
    let text = "fn mask_mod(at: At) -> bool { return at.key <= at.query && (at.key / 4u == at.query / 4u || at.key < 2u); }";
    let own = MaskMod::new(text).expect("a mod");
    let starts: [u32; 4] = [0, 11, 12, 30];
    let shape = Shape::new(1, 2, 30, 8);
    let gpu = &full().gpu;
    let buffer = gpu.upload(&starts.map(f32::from_bits)).expect("memory");
    let starts_at = TensorView::new(&buffer, DType::U32, [1, 1, 1, 4]);
    let device = Mask::none().packed(starts_at, starts_at);
    let device = device.mask_mod(BoundMaskMod::from(own).per_sequence().expect("a text"));
    let sees = |at: &At| {
        let (query, key) = (at.position as u32 - at.sequence_start, at.key - at.sequence_start);
        key <= query && (key / 4 == query / 4 || key < 2)
    };
    let starts = HostTensor::new(&starts, [1, 1, 1, 4]);
    let host = Mask::none().packed(starts, starts).mask_fn(&sees);
    gpu.compare_masks(&device, &host, shape, 0.0).unwrap_or_else(|e| panic!("{e}"));
}

/// A text and a closure with different meanings are found at once.
#[test]
fn wrong_closure_is_found() {
    let gpu = &full().gpu;
    let shape = Shape::new(2, 4, 37, 16);
    let text = "fn score_mod(score: f32, at: At) -> f32 { return score * (1.0 + 0.1 * f32(at.head)); }";
    let device = || Mask::none().score_mod(ScoreMod::new(text).expect("a mod"));
    let compared = |host: &HostMask| gpu.compare_masks(&device(), host, shape, 1e-5);
    let right = |x: f64, at: &At| x * (1.0 + 0.1 * f64::from(at.head));
    let worst = compared(&Mask::none().score_fn(&right)).expect("the same");
    assert!(worst > 0.0 && worst < 1e-6, "{worst}");
    let wrong = |x: f64, at: &At| if at.head == 3 && at.key == 5 { x } else { right(x, at) };
    let said = compared(&Mask::none().score_fn(&wrong)).expect_err("they differ").to_string();
    assert!(said.starts_with("`score_mod`: the score at At { batch: ") && said.contains("head: 3"), "{said}");
    let said = compared(&Mask::none().score_fn(&right).score_fn_slope(&|_, _| 1.0)).expect_err("they differ");
    assert!(said.to_string().contains("its derivative"), "{said}");
    let said = compared(&Mask::none().score_fn(&right).mask_fn(&|at| at.key != 4)).expect_err("they differ");
    assert!(said.to_string().starts_with("`mask_mod`: the visibility of the pair at"), "{said}");
    // Every rule of a mask is compared.
    let said = compared(&Mask::causal().score_fn(&right)).expect_err("they differ");
    assert!(said.to_string().starts_with("`mask_mod`"), "{said}");
}

/// An endless loop ends, and an index far outside reads only the permitted elements.
#[test]
fn hostile_mods_end_and_stay_inside() {
    let gpu = &full().gpu;
    let shape = Shape::new(1, 2, 9, 8);
    // The view has the zeros in the middle of a buffer of ones.
    let buffer = gpu.upload(&[[1f32; 8], [0.0; 8], [1.0; 8]].concat()).expect("memory");
    let view = TensorView::new(&buffer, DType::F32, [1, 1, 1, 8]).with_offset(8);
    let text = "fn score_mod(score: f32, at: At) -> f32 {
            var found = array<f32, 2>();
            var n = at.key * 4000000000u;
            loop {
                n = n * 1664525u + 1013904223u;
                found[n] += table_at(n, n >> 3u, n * 7u, n ^ 77u) + f32(n == n) * 0.0;
                found[i32(n)] -= 0.0;
            }
            return score + found[0] + found[4294967295u - at.query];
        }";
    let own = ScoreMod::capturing(text, &[Captured::float("table")]).unwrap_or_else(|e| panic!("{e}"));
    let device = Mask::none().score_mod(own.with(&[view]));
    let same = |x: f64, _: &At| x;
    let worst =
        gpu.compare_masks(&device, &Mask::none().score_fn(&same).score_fn_slope(&|_, _| 1.0), shape, 0.0);
    assert_eq!(worst.unwrap_or_else(|e| panic!("{e}")), 0.0);
}
