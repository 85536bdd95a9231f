//! Causal convolutions, compared with the reference and with test vectors, forward and backward.

use std::fmt;

use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{self, CausalConvInputs, Real, widen};
use wgpu_attention::rows::{CausalConv, CausalConvBackward, CausalConvForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Scratch, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::memory::Place;
use crate::harness::run::{Layout, Placed};
use crate::harness::{
    FLOATS, FORMS, Judged, Profile, Report, Rng, Values, Vector, defaults, full, rest, stored,
};

pub const FAMILY: &str = "conv";
pub const NAMES: &[&str] = &[
    "conv_decode",
    "conv_f16",
    "conv_packed",
    "conv_short_state",
    "conv_w2_bias",
    "conv_w3_silu",
    "conv_w4",
    "conv_w4_bias_silu_state",
    "conv_w5_state",
    "conv_w8_silu_state",
];

/// The rows of sequences, on the host.
#[derive(Clone, Debug)]
enum Which {
    All,
    Lengths(Vec<u32>),
    Packed(Vec<u32>),
}

/// The states of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    None,
    Initial,
    Final,
    Both,
    InPlace,
    Slots,
}

#[derive(Clone, Debug)]
struct Problem {
    batch: usize,
    length: usize,
    channels: usize,
    width: usize,
    activation: Option<Activation>,
    which: Which,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    initial: Option<Vec<f32>>,
    d_out: Vec<f32>,
    d_final: Option<Vec<f32>>,
}

#[derive(Clone, Debug)]
struct Setup {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    kept: Kept,
    /// The types of x and weight, of the bias, and of everything else.
    dtypes: [DType; 3],
    accumulates: bool,
    seed: u64,
}

struct Case {
    problem: Problem,
    setup: Setup,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Problem { batch, length, channels, width, activation, which, bias, .. } = &self.problem;
        let Setup { profile, form, layout, kept, dtypes, accumulates, .. } = &self.setup;
        let which = format!("{which:?}").chars().take(40).collect::<String>();
        write!(
            f,
            "{}, {form:?}, {layout:?}, {batch} × {length} × {channels}, width {width}, {activation:?}, \
             {which}, bias {}, {kept:?}, {dtypes:?}, accumulates {accumulates}",
            profile.name,
            bias.is_some()
        )
    }
}

/// The outputs of a forward call. The state has all slots.
#[derive(Clone, Debug, PartialEq)]
struct Got {
    out: Vec<f64>,
    state: Option<Vec<f64>>,
}

/// The index of no state.
const NOWHERE: u32 = u32::MAX;

impl Problem {
    fn sequences(&self) -> usize {
        if let Which::Packed(starts) = &self.which { starts.len() - 1 } else { self.batch }
    }

    /// Returns the first row and the number of rows of each sequence.
    fn rows(&self) -> Vec<[usize; 2]> {
        let length = self.length;
        match &self.which {
            Which::All => (0..self.batch).map(|b| [b * length, length]).collect(),
            Which::Lengths(n) => {
                n.iter().enumerate().map(|(b, n)| [b * length, (*n as usize).min(length)]).collect()
            }
            Which::Packed(starts) => {
                let at = |n: u32| (n as usize).min(length);
                starts.windows(2).map(|w| [at(w[0]), at(w[1]) - at(w[0])]).collect()
            }
        }
    }

    fn shape(&self) -> [usize; 4] {
        [self.batch, 1, self.length, self.channels]
    }

    fn state_shape(&self) -> [usize; 4] {
        [self.sequences(), 1, self.width - 1, self.channels]
    }

    /// The elements of a state.
    fn kept(&self) -> usize {
        (self.width - 1) * self.channels
    }

    /// Returns the rows before each sequence.
    fn initial(&self) -> Vec<Vec<f32>> {
        let of = |n: usize| match &self.initial {
            Some(initial) => initial[n * self.kept()..(n + 1) * self.kept()].to_vec(),
            None => vec![0.0; self.kept()],
        };
        (0..self.sequences()).map(of).collect()
    }

    /// Calls `run` with the inputs of each sequence, its number and its elements of x.
    fn each<R: Real>(&self, mut run: impl FnMut(&CausalConvInputs<R>, usize, std::ops::Range<usize>)) {
        let [x, weight] = [&self.x, &self.weight].map(|t| widen::<R>(t));
        let bias = self.bias.as_ref().map(|t| widen::<R>(t));
        let initial = self.initial();
        for (n, [first, rows]) in self.rows().into_iter().enumerate() {
            let range = first * self.channels..(first + rows) * self.channels;
            let initial = widen::<R>(&initial[n]);
            let inputs = CausalConvInputs {
                x: &x[range.clone()],
                weight: &weight,
                bias: bias.as_deref(),
                initial_state: Some(&initial),
                activation: self.activation,
                channels: self.channels,
            };
            run(&inputs, n, range);
        }
    }

    /// Returns the output, and the state of each sequence.
    fn forward<R: Real>(&self) -> (Vec<R>, Vec<Vec<R>>) {
        let (mut out, mut states) = (vec![R::zero(); self.x.len()], Vec::new());
        self.each::<R>(|inputs, _, range| {
            let got = reference::causal_conv(inputs).expect("it fits");
            out[range].copy_from_slice(&got.out);
            states.push(got.final_state);
        });
        (out, states)
    }

    /// Returns the gradients of x, weight, bias and initial state.
    fn backward<R: Real>(&self) -> [Vec<R>; 4] {
        let d_out = widen::<R>(&self.d_out);
        let mut d_x = vec![R::zero(); self.x.len()];
        let [mut d_weight, mut d_bias] = [self.weight.len(), self.channels].map(|n| vec![R::zero(); n]);
        let mut d_initial = Vec::new();
        let add = |to: &mut Vec<R>, from: &[R]| to.iter_mut().zip(from).for_each(|(to, x)| *to = *to + *x);
        self.each::<R>(|inputs, n, range| {
            let at = n * self.kept()..(n + 1) * self.kept();
            let d_final = self.d_final.as_ref().map(|d| widen::<R>(&d[at]));
            let got = reference::causal_conv_backward(inputs, &d_out[range.clone()], d_final.as_deref());
            let got = got.expect("it fits");
            d_x[range].copy_from_slice(&got.d_x);
            add(&mut d_weight, &got.d_weight);
            add(&mut d_bias, &got.d_bias);
            d_initial.extend(got.d_initial_state);
        });
        [d_x, d_weight, d_bias, d_initial]
    }

    /// The same call with the absolute values of all numbers, and without an activation.
    fn absolute(&self) -> Self {
        let mut all = self.clone();
        all.activation = None;
        let Problem { x, weight, bias, initial, d_out, d_final, .. } = &mut all;
        let lists = [Some(x), Some(weight), bias.as_mut(), initial.as_mut(), Some(d_out), d_final.as_mut()];
        lists.into_iter().flatten().flatten().for_each(|x| *x = x.abs());
        all
    }

    /// Returns the largest sum of absolute terms before the activation.
    fn magnitude(&self) -> f64 {
        largest(self.absolute().forward::<f64>().0)
    }

    /// Returns the largest sums of absolute terms in the gradients.
    fn magnitudes(&self) -> [f64; 4] {
        // A slope is at most 1.1. It changes by at most half of the error of the sum.
        let slope = if self.activation.is_some() { 1.1 + 0.5 * self.magnitude() } else { 1.0 };
        self.absolute().backward::<f64>().map(|terms| largest(terms) * slope)
    }
}

impl Setup {
    fn operator(&self) -> CausalConv {
        let kernel_options = KernelOptions::new().target(self.form);
        CausalConv::with_pipelines(self.profile.gpu.pipelines()).kernel_options(kernel_options)
    }

    /// Returns the slot of each sequence, some of them out of range, and the number of states.
    fn slots(&self, sequences: usize) -> (Vec<u32>, usize) {
        let states = sequences + 2;
        let mut all: Vec<u32> = (0..states as u32).collect();
        let rng = &mut Rng::new(self.seed ^ 0x0510_7500);
        (0..states).rev().for_each(|n| all.swap(n, rng.below(n + 1)));
        let outside = [NOWHERE, states as u32];
        let slots = all.into_iter().take(sequences);
        (slots.map(|slot| if rng.chance(0.2) { rng.pick(&outside) } else { slot }).collect(), states)
    }

    fn place(&self, shape: [usize; 4], salt: u64) -> Place {
        let layout = match self.layout {
            Layout::Window(seed) => Layout::Window(seed ^ (salt << 8)),
            layout => layout,
        };
        let [place] = layout.places([shape]);
        place
    }

    /// Places the inputs of a call, and calls `run` with it.
    fn placed<T>(&self, problem: &Problem, out: &Placed, run: impl FnOnce(CausalConvForward) -> T) -> T {
        let profile = self.profile;
        let Problem { channels, width, activation, ref which, .. } = *problem;
        let [own, of_bias, other] = self.dtypes;
        let input = |x: &[f32], dtype, shape, salt| {
            Placed::input(profile, Values::Floats(x), dtype, self.place(shape, salt))
        };
        let x = input(&problem.x, own, problem.shape(), 1);
        let weight = input(&problem.weight, own, [1, 1, channels, width], 2);
        let bias = problem.bias.as_ref().map(|b| input(b, of_bias, [1, 1, 1, channels], 3));
        let reads = matches!(self.kept, Kept::Initial | Kept::Both);
        let initial = problem.initial.as_ref().filter(|_| reads);
        let initial = initial.map(|t| input(t, other, problem.state_shape(), 4));
        let numbers = |n: &[u32], shape| {
            Some(Placed::input(profile, Values::Numbers(n), DType::U32, self.place(shape, 5)))
        };
        let [lengths, packed] = match which {
            Which::All => [None, None],
            Which::Lengths(n) => [numbers(n, [n.len(), 1, 1, 1]), None],
            Which::Packed(n) => [None, numbers(n, [1, 1, 1, n.len()])],
        };
        let call = CausalConvForward::new(x.view(), weight.view(), out.view())
            .bias(bias.as_ref().map(Placed::view))
            .activation(activation)
            .initial_state(initial.as_ref().map(Placed::view))
            .lengths(lengths.as_ref().map(Placed::view))
            .packed(packed.as_ref().map(Placed::view));
        run(call)
    }

    fn forward(&self, problem: &Problem) -> Result<Got, String> {
        let profile = self.profile;
        profile.tidy();
        let [.., other] = self.dtypes;
        let sequences = problem.sequences();
        let out = Placed::output(profile, other, self.place(problem.shape(), 6));
        let mut shape = problem.state_shape();
        let (slots, states) = self.slots(sequences);
        let state = match self.kept {
            Kept::None | Kept::Initial => None,
            Kept::Final | Kept::Both => Some(Placed::output(profile, other, self.place(shape, 7))),
            Kept::InPlace => {
                let initial = problem.initial.as_ref().expect("a state");
                Some(Placed::holding(profile, initial, other, self.place(shape, 7)))
            }
            Kept::Slots => {
                shape[0] = states;
                Some(Placed::holding(profile, &self.all_states(problem), other, self.place(shape, 7)))
            }
        };
        let slots = (self.kept == Kept::Slots).then(|| {
            let place = self.place([sequences, 1, 1, 1], 8);
            Placed::input(profile, Values::Numbers(&slots), DType::U32, place)
        });
        self.placed(problem, &out, |call| {
            let state = state.as_ref().map(Placed::view);
            let call = match self.kept {
                Kept::InPlace | Kept::Slots => call.state(state),
                _ => call.final_state(state),
            };
            let call = call.slots(slots.as_ref().map(Placed::view));
            let operator = self.operator();
            profile.gpu.submit(|e| operator.forward(e, &call)).map_err(|e| e.to_string())
        })?;
        let read = |t: &Placed| pollster::block_on(t.download_async("a result", profile));
        Ok(Got { out: read(&out)?, state: state.as_ref().map(read).transpose()? })
    }

    /// Returns the contents of all slots: the initial state of each sequence, and other numbers.
    fn all_states(&self, problem: &Problem) -> Vec<f32> {
        let (slots, states) = self.slots(problem.sequences());
        let kept = problem.kept();
        let [.., other] = self.dtypes;
        let mut all = stored(&Rng::new(self.seed ^ 0x57a7).normals(states * kept), other);
        for (slot, initial) in slots.iter().zip(problem.initial()) {
            if (*slot as usize) < states {
                all[*slot as usize * kept..][..kept].copy_from_slice(&initial);
            }
        }
        all
    }

    /// Returns the problem as the call sees it: sequences without a slot begin with zeros.
    fn seen(&self, problem: &Problem) -> Problem {
        let mut seen = problem.clone();
        let kept = problem.kept();
        match self.kept {
            Kept::None | Kept::Final => seen.initial = None,
            Kept::Slots => {
                let (slots, states) = self.slots(problem.sequences());
                let initial = seen.initial.as_mut().expect("a state");
                for (n, _) in slots.iter().enumerate().filter(|(_, slot)| **slot as usize >= states) {
                    initial[n * kept..(n + 1) * kept].fill(0.0);
                }
            }
            _ => {}
        }
        seen
    }

    /// Returns the states that the call leaves, from the final state of each sequence.
    fn left(&self, problem: &Problem, finals: Vec<Vec<f32>>) -> Vec<f64> {
        let [.., other] = self.dtypes;
        if self.kept != Kept::Slots {
            return widened(&finals.concat(), other);
        }
        let (slots, _) = self.slots(problem.sequences());
        let (mut all, kept) = (self.all_states(problem), problem.kept());
        for (slot, state) in slots.iter().zip(finals) {
            if let Some(at) = all.get_mut((*slot as usize).saturating_mul(kept)..) {
                at.iter_mut().zip(state).for_each(|(to, x)| *to = x);
            }
        }
        widened(&all, other)
    }

    /// Returns the gradients of x, weight, bias and initial state.
    fn backward(&self, problem: &Problem, before: &[f32]) -> Result<[Option<Vec<f64>>; 4], String> {
        let profile = self.profile;
        profile.tidy();
        let [.., other] = self.dtypes;
        let Problem { channels, width, .. } = *problem;
        let unused = Placed::output(profile, other, self.place(problem.shape(), 6));
        let input = |x: &[f32], shape, salt| {
            Placed::input(profile, Values::Floats(x), other, self.place(shape, salt))
        };
        let d_out = input(&problem.d_out, problem.shape(), 9);
        let d_final = problem.d_final.as_ref().map(|d| input(d, problem.state_shape(), 10));
        let gradient = |wanted: bool, shape: [usize; 4], salt| {
            let before = before.get(..shape.iter().product()).unwrap_or_default();
            let place = self.place(shape, salt);
            wanted.then(|| Placed::gradient(profile, before, (other, place), self.accumulates))
        };
        let has_initial = problem.initial.is_some() && matches!(self.kept, Kept::Initial | Kept::Both);
        let targets = [
            gradient(true, problem.shape(), 11),
            gradient(true, [1, 1, channels, width], 12),
            gradient(problem.bias.is_some(), [1, 1, 1, channels], 13),
            gradient(has_initial, problem.state_shape(), 14),
        ];
        self.placed(problem, &unused, |call| {
            let [d_x, d_weight, d_bias, d_initial] = targets.each_ref().map(|t| t.as_ref().map(Placed::view));
            let call = CausalConvBackward::new(call, d_out.view())
                .d_final_state(d_final.as_ref().map(Placed::view))
                .d_x(d_x)
                .d_weight(d_weight)
                .d_bias(d_bias)
                .d_initial_state(d_initial)
                .accumulate(self.accumulates);
            let operator = self.operator();
            let refused = |e: wgpu_attention::Error| e.to_string();
            let size = operator.backward_scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
            profile.gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)
        })?;
        let read = |t: &Placed| pollster::block_on(t.download_async("a gradient", profile));
        let [d_x, d_weight, d_bias, d_initial] = targets.each_ref().map(|t| t.as_ref().map(read));
        Ok([d_x.transpose()?, d_weight.transpose()?, d_bias.transpose()?, d_initial.transpose()?])
    }
}

impl Case {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0xca05_a1c0);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let first = if rng.chance(0.5) { DType::F32 } else { rng.pick(FLOATS) };
        let other = if rng.chance(0.6) { first } else { rng.pick(FLOATS) };
        let width = if rng.chance(0.5) { 4 } else { rng.between(1, 8) };
        // Tiles have 16 or 64 rows. A call of up to 16 rows writes the state in one dispatch.
        let length = rng.pick(&[1, 2, 7, 15, 16, 17, 33, 64, 65, 150]);
        let packed = seed.is_multiple_of(3);
        let batch = if packed { 1 } else { rng.pick(&[1, 2, 5]) };
        let which = match seed % 3 {
            0 => {
                // The first sequence may start after row 0, the last may end past the last row.
                let mut starts: Vec<u32> =
                    (0..rng.between(2, 9)).map(|_| rng.below(length + 4) as u32).collect();
                starts.sort_unstable();
                Which::Packed(starts)
            }
            1 => Which::Lengths((0..batch).map(|_| rng.below(length + 3) as u32).collect()),
            _ => Which::All,
        };
        let window = Layout::Window(rng.word());
        let all = [Kept::None, Kept::Initial, Kept::Final, Kept::Both, Kept::InPlace, Kept::Slots];
        let setup = Setup {
            profile,
            form,
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window]),
            kept: if width == 1 { Kept::None } else { rng.pick(&all) },
            dtypes: [first, rng.pick(FLOATS), other],
            accumulates: rng.chance(0.4),
            seed,
        };
        let activations = [None, Some(Activation::Silu), Some(Activation::Silu), Some(Activation::Gelu)];
        let (activation, bias) = (rng.pick(&activations), rng.chance(0.5));
        let channels = rng.pick(&[1, 3, 8, 21, 36, 64, 260]);
        let mut problem = Problem {
            batch,
            length,
            channels,
            width,
            activation,
            which,
            x: Vec::new(),
            weight: Vec::new(),
            bias: None,
            initial: None,
            d_out: Vec::new(),
            d_final: None,
        };
        let [own, of_bias, other] = setup.dtypes;
        let rng = &mut Rng::new(seed ^ 0xda7a);
        let n = batch * length * channels;
        problem.x = stored(&rng.normals(n), own);
        problem.weight = stored(&rng.normals(channels * width), own);
        problem.bias = bias.then(|| stored(&rng.normals(channels), of_bias));
        problem.d_out = stored(&rng.normals(n), other);
        if width > 1 {
            let states = problem.sequences() * problem.kept();
            problem.initial = Some(stored(&rng.normals(states), other));
            problem.d_final = rng.chance(0.6).then(|| stored(&rng.normals(states), other));
        }
        Case { problem, setup }
    }

    fn forward(&self) -> Result<f64, String> {
        let Case { problem, setup } = self;
        let got = setup.forward(problem)?;
        let seen = setup.seen(problem);
        let ((exact, _), (naive, finals)) = (seen.forward::<f64>(), seen.forward::<f32>());
        // States are copies.
        if let Some(state) = &got.state {
            let want = setup.left(problem, finals);
            if *state != want {
                let at = state.iter().zip(&want).position(|(a, b)| a != b);
                return Err(format!("the states differ first at {at:?}"));
            }
        }
        let judged = Judged::new(&widened(&naive, setup.dtypes[2]), exact, seen.magnitude());
        judged.judge(&got.out)
    }

    fn backward(&self) -> Result<f64, String> {
        let Case { problem, setup } = self;
        // The backward pass refuses a state in place.
        let kept = match setup.kept {
            Kept::InPlace => Kept::Initial,
            Kept::Slots => Kept::Both,
            kept => kept,
        };
        let setup = &Setup { kept, ..setup.clone() };
        let other = setup.dtypes[2];
        let most = problem.x.len().max(problem.weight.len()).max(problem.sequences() * problem.kept());
        let before = stored(&Rng::new(setup.seed ^ 0xbef0).normals(most), other);
        let got = setup.backward(problem, &before)?;
        if got != setup.backward(problem, &before)? {
            return Err("other numbers the second time".into());
        }
        let seen = setup.seen(problem);
        let (exact, naive, most) = (seen.backward::<f64>(), seen.backward::<f32>(), seen.magnitudes());
        let mut worst: f64 = 0.0;
        let truths = exact.into_iter().zip(naive).zip(most);
        for (n, (got, ((exact, naive), most))) in got.into_iter().zip(truths).enumerate() {
            let Some(got) = got else { continue };
            let before = setup.accumulates.then_some(&before[..exact.len()]);
            let judged = Judged::gradient([exact, widen(&naive)], before, other, most + 4.0);
            worst = worst.max(judged.judge(&got).map_err(|e| format!("gradient {n}: {e}"))?);
        }
        Ok(worst)
    }
}

/// Returns the problem of a vector.
fn vector(name: &str) -> (Problem, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [_, batch, length, channels] = vector.shape4("x");
    let activation = match vector.attrs["activation"].as_str() {
        Some("silu") => Some(Activation::Silu),
        _ => None,
    };
    let optional = |tensor: &str| vector.has(tensor).then(|| vector.f32(tensor));
    let which = match vector.has("cu_seqlens") {
        true => Which::Packed(vector.integers("cu_seqlens").into_iter().map(|n| n as u32).collect()),
        false => Which::All,
    };
    let problem = Problem {
        batch,
        length,
        channels,
        width: vector.size("width"),
        activation,
        which,
        x: vector.f32("x"),
        weight: vector.f32("w"),
        bias: optional("b"),
        initial: optional("initial_state"),
        d_out: optional("dout").unwrap_or_default(),
        d_final: optional("dfinal_state"),
    };
    (problem, vector)
}

#[test]
fn reference_matches_the_vectors() {
    for name in NAMES {
        let (problem, vector) = vector(name);
        let (out, states) = problem.forward::<f64>();
        let check = |tensor: &str, got: &[f64]| {
            let Some((want, tolerance)) = vector.expected(tensor) else { return };
            compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {tensor}: {e}"));
        };
        check("out", &out);
        check("final_state", &states.concat());
        if vector.has("dout") {
            let [d_x, d_weight, d_bias, d_initial] = problem.backward::<f64>();
            let all = [("dx", d_x), ("dw", d_weight), ("db", d_bias), ("dinitial_state", d_initial)];
            all.iter().for_each(|(tensor, got)| check(tensor, got));
        }
    }
}

/// The layouts of tests with vectors: dense, aligned windows, and windows that are not aligned.
const LAYOUTS: [Layout; 4] = [Layout::Dense, Layout::Blhd, Layout::Window(6), Layout::Window(7)];

#[test]
fn devices_match_the_vectors() {
    for name in NAMES {
        let (problem, vector) = vector(name);
        let own = if vector.is_f16("x") { DType::F16 } else { DType::F32 };
        for form in FORMS {
            for layout in LAYOUTS {
                let kept = if problem.initial.is_some() { Kept::Both } else { Kept::Final };
                let dtypes = [own, DType::F32, DType::F32];
                let setup =
                    Setup { profile: full(), form, layout, kept, dtypes, accumulates: false, seed: 1 };
                let check = |tensor: &str, got: &[f64]| {
                    let (want, tolerance) = vector.expected(tensor).expect("an output");
                    compare(got, &want, tolerance)
                        .unwrap_or_else(|e| panic!("{name}, {form:?}, {layout:?}: {tensor}: {e}"));
                };
                let got = setup.forward(&problem).expect("a call");
                check("out", &got.out);
                check("final_state", got.state.as_ref().expect("a state"));
                if problem.initial.is_some() {
                    let in_place = Setup { kept: Kept::InPlace, ..setup.clone() };
                    assert_eq!(in_place.forward(&problem).expect("a call"), got, "{name}: in place");
                }
                if vector.has("dout") {
                    let gradients = setup.backward(&problem, &[]).expect("a call");
                    for (tensor, got) in ["dx", "dw", "db", "dinitial_state"].into_iter().zip(gradients) {
                        assert_eq!(got.is_some(), vector.has(tensor), "{name}: {tensor}");
                        got.iter().for_each(|got| check(tensor, got));
                    }
                }
            }
        }
    }
}

/// The inputs of the vectors in every type, compared with the reference of the rounded inputs.
#[test]
fn vectors_in_types_match_reference() {
    let mut report = Report::new("causal convolutions, vectors in other types");
    for (n, name) in NAMES.iter().enumerate() {
        let all = FORMS.into_iter().flat_map(|form| FLOATS.iter().map(move |own| (form, *own)));
        for (m, (form, own)) in all.enumerate() {
            // One type on each target.
            if m % 3 != (n + m / 3) % 3 && !rest(&format!("causal convolution, {name}, {form:?}, {own:?}")) {
                continue;
            }
            let (mut problem, vector) = vector(name);
            let round = |x: &mut Vec<f32>| *x = stored(x, own);
            let Problem { x, weight, bias, initial, d_out, d_final, .. } = &mut problem;
            [x, weight, d_out].into_iter().for_each(round);
            [bias, initial, d_final].into_iter().flatten().for_each(round);
            let kept = if problem.initial.is_some() { Kept::Both } else { Kept::Final };
            let layout = LAYOUTS[n % 4];
            let setup = Setup {
                profile: defaults(),
                form,
                layout,
                kept,
                dtypes: [own; 3],
                accumulates: false,
                seed: 1,
            };
            let case = Case { problem, setup };
            report.record("forward", &case, case.forward());
            if vector.has("dout") {
                report.record("backward", &case, case.backward());
            }
        }
    }
    report.finish();
}

#[test]
fn results_equal_the_reference() {
    Report::draws("causal convolution", 16, Case::random, Case::forward);
}

#[test]
fn gradients_equal_the_reference() {
    Report::draws("causal convolution backward", 3, Case::random, Case::backward);
}

/// Central differences check the reference's gradients.
#[test]
fn reference_gradients_match_finite_differences() {
    let (rows, channels, width) = (6, 3, 4);
    let rng = &mut Rng::new(5);
    let mut draw = |n: usize| widen::<f64>(&rng.normals(n));
    let kept = (width - 1) * channels;
    for rows in [rows, 2, 0] {
        for activation in [None, Some(Activation::Silu)] {
            let all = [rows * channels, width * channels, channels, kept].map(&mut draw);
            let (d_out, d_final) = (draw(rows * channels), draw(kept));
            fn inputs(all: &[Vec<f64>; 4], activation: Option<Activation>) -> CausalConvInputs<'_, f64> {
                let [x, weight, bias, initial] = all.each_ref().map(|t| &t[..]);
                let (bias, initial_state) = (Some(bias), Some(initial));
                CausalConvInputs { x, weight, bias, initial_state, activation, channels: 3 }
            }
            let loss = |all: &[Vec<f64>; 4]| -> f64 {
                let got = reference::causal_conv(&inputs(all, activation)).expect("it fits");
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                dot(&got.out, &d_out) + dot(&got.final_state, &d_final)
            };
            let got = reference::causal_conv_backward(&inputs(&all, activation), &d_out, Some(&d_final));
            let got = got.expect("it fits");
            for (t, got) in [got.d_x, got.d_weight, got.d_bias, got.d_initial_state].iter().enumerate() {
                for n in 0..got.len() {
                    let at = |by: f64| {
                        let mut moved = all.clone();
                        moved[t][n] += by;
                        loss(&moved)
                    };
                    let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                    assert!(
                        (got[n] - slope).abs() < 1e-8,
                        "{t}, {n}, {activation:?}: {} and {slope}",
                        got[n]
                    );
                }
            }
        }
    }
}

/// A random problem of one batch entry without other options.
fn plain(length: usize, channels: usize, width: usize) -> Problem {
    let rng = &mut Rng::new(17);
    let mut draw = |n: usize| rng.normals(n);
    let (n, kept) = (length * channels, (width - 1) * channels);
    Problem {
        batch: 1,
        length,
        channels,
        width,
        activation: Some(Activation::Silu),
        which: Which::All,
        x: draw(n),
        weight: draw(channels * width),
        bias: Some(draw(channels)),
        initial: Some(draw(kept)),
        d_out: draw(n),
        d_final: Some(draw(kept)),
    }
}

/// A setup with the layout of most callers.
fn dense(form: Target, kept: Kept) -> Setup {
    let dtypes = [DType::F32; 3];
    Setup { profile: full(), form, layout: Layout::Dense, kept, dtypes, accumulates: false, seed: 1 }
}

/// Any cut of a sequence into calls with a state gives the bits of one call.
#[test]
fn steps_equal_one_call() {
    let (length, channels) = (90, 20);
    let rng = &mut Rng::new(23);
    for (form, width) in FORMS.into_iter().flat_map(|form| [2, 4, 8].map(|width| (form, width))) {
        let problem = plain(length, channels, width);
        let whole = dense(form, Kept::Both).forward(&problem).expect("a call");
        let (mut out, mut state, mut at) = (Vec::new(), problem.initial.clone().expect("a state"), 0);
        while at < length {
            let rows = rng.pick(&[1, 1, 2, 3, 16, 17, 30]).min(length - at);
            let mut step = problem.clone();
            step.length = rows;
            step.x = problem.x[at * channels..(at + rows) * channels].to_vec();
            step.initial = Some(state);
            let kept = rng.pick(&[Kept::Both, Kept::InPlace]);
            let got = dense(form, kept).forward(&step).expect("a call");
            out.extend(got.out);
            state = got.state.expect("a state").into_iter().map(|x| x as f32).collect();
            at += rows;
        }
        assert_eq!(out, whole.out, "{form:?}, width {width}");
        assert_eq!(widen::<f64>(&state), whole.state.expect("a state"), "{form:?}, width {width}");
    }
}

/// Packed sequences give the bits of the same sequences alone.
#[test]
fn packed_sequences_equal_single_ones() {
    let channels = 12;
    let starts = [0, 3, 3, 40, 41, 110];
    for form in FORMS {
        let mut packed = plain(110, channels, 4);
        packed.which = Which::Packed(starts.to_vec());
        packed.initial = Some(Rng::new(3).normals(5 * packed.kept()));
        packed.d_final = Some(Rng::new(4).normals(5 * packed.kept()));
        let setup = dense(form, Kept::Both);
        let got = setup.forward(&packed).expect("a call");
        let gradients = setup.backward(&packed, &[]).expect("a call");
        let (states, kept) = (got.state.expect("states"), packed.kept());
        for (n, [first, rows]) in packed.rows().into_iter().enumerate() {
            let (range, state) = (first * channels..(first + rows) * channels, n * kept..(n + 1) * kept);
            let initial = packed.initial.as_ref().expect("states")[state.clone()].to_vec();
            if rows == 0 {
                assert_eq!(states[state], widen::<f64>(&initial), "{form:?}, sequence {n}");
                continue;
            }
            let mut alone = plain(rows, channels, 4);
            (alone.weight, alone.bias) = (packed.weight.clone(), packed.bias.clone());
            (alone.x, alone.initial) = (packed.x[range.clone()].to_vec(), Some(initial));
            alone.d_out = packed.d_out[range.clone()].to_vec();
            alone.d_final = packed.d_final.as_ref().map(|d| d[state.clone()].to_vec());
            let one = setup.forward(&alone).expect("a call");
            assert_eq!(got.out[range.clone()], one.out, "{form:?}, sequence {n}");
            assert_eq!(states[state.clone()], one.state.expect("a state"), "{form:?}, sequence {n}");
            let of = |n: usize, range: std::ops::Range<usize>| {
                gradients[n].as_ref().expect("a gradient")[range].to_vec()
            };
            let [d_x, _, _, d_initial] = setup.backward(&alone, &[]).expect("a call");
            assert_eq!(of(0, range), d_x.expect("a gradient"), "{form:?}, sequence {n}");
            assert_eq!(of(3, state), d_initial.expect("a gradient"), "{form:?}, sequence {n}");
        }
    }
}

#[test]
fn twenty_runs_give_equal_bits() {
    for form in FORMS {
        let (problem, setup) = (plain(300, 40, 4), dense(form, Kept::Both));
        let run = || {
            let gradients = setup.backward(&problem, &[]).expect("a call");
            (setup.forward(&problem).expect("a call"), gradients)
        };
        let first = run();
        (1..20).for_each(|n| assert!(run() == first, "{form:?}, run {n}"));
    }
}

/// More sequences than a dispatch has workgroups.
#[test]
fn many_sequences_have_states() {
    let sequences = 70_000;
    for form in FORMS {
        let mut problem = plain(1, 2, 2);
        problem.batch = sequences;
        problem.x = Rng::new(1).normals(2 * sequences);
        problem.initial = Some(Rng::new(2).normals(2 * sequences));
        let case = Case { problem, setup: dense(form, Kept::InPlace) };
        case.forward().unwrap_or_else(|e| panic!("{case}: {e}"));
    }
}

/// Starts that decrease give no error, and nothing outside the tensors changes.
#[test]
fn decreasing_starts_stay_in_bounds() {
    for (form, kept) in FORMS.into_iter().flat_map(|form| [Kept::Both, Kept::Slots].map(|k| (form, k))) {
        for length in [9, 40] {
            let mut problem = plain(length, 5, 4);
            problem.which = Which::Packed(vec![u32::MAX, 7, 2, 30, 0]);
            problem.initial = Some(Rng::new(3).normals(4 * problem.kept()));
            problem.d_final = None;
            let setup = Setup { layout: Layout::Window(7), ..dense(form, kept) };
            // The read-back checks the elements around the tensors. Rows may have no sequence.
            for result in [setup.forward(&problem).map(drop), setup.backward(&problem, &[]).map(drop)] {
                let unwritten = |e: &String| e.contains("never written");
                assert!(result.as_ref().err().is_none_or(unwritten), "{form:?}: {result:?}");
            }
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..12).map(|_| gpu.buffer(1024).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let f32 = |n: usize, shape| typed(n, DType::F32, shape);
    let (rows, filter, states) = ([2, 1, 3, 8], [1, 1, 8, 4], [2, 1, 3, 8]);
    let (x, weight, out) = (f32(0, rows), f32(1, filter), f32(2, rows));
    let operator = CausalConv::with_pipelines(gpu.pipelines());
    let refused = |call: CausalConvForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call).is_err() && operator.prepare(&call).is_err());
    };
    let good = CausalConvForward::new(x, weight, out);
    let u32 = |n: usize, shape| typed(n, DType::U32, shape);
    refused(CausalConvForward::new(x, weight, x), &["`out`", "`x`"]);
    refused(CausalConvForward::new(x, weight, f32(2, [2, 1, 4, 8])), &["`out`", "length must be 3"]);
    refused(CausalConvForward::new(f32(0, [2, 2, 3, 4]), weight, out), &["`x`", "heads must be 1"]);
    refused(CausalConvForward::new(x, f32(1, [1, 1, 7, 4]), out), &["`weight`", "must be 8"]);
    refused(CausalConvForward::new(x, f32(1, [1, 1, 8, 9]), out), &["width", "9", "from 1 to 8"]);
    refused(good.bias(f32(3, [1, 1, 1, 9])), &["`bias`", "must be 8"]);
    refused(good.initial_state(f32(3, [2, 1, 4, 8])), &["`initial_state`", "must be 3"]);
    refused(good.final_state(f32(3, [1, 1, 3, 8])), &["`final_state`", "batch must be 2"]);
    refused(good.final_state(out), &["`out`", "`final_state`", "overlap"]);
    refused(good.initial_state(f32(3, states)).final_state(f32(3, states)), &["`final_state`"]);
    refused(good.state(f32(3, states)).final_state(f32(4, states)), &["`state`", "`final_state`", "omit"]);
    refused(good.state(f32(3, states)).initial_state(f32(4, states)), &["`state`", "`initial_state`"]);
    refused(good.slots(u32(4, [2, 1, 1, 1])), &["`slots`", "`state`"]);
    let cached = good.state(f32(3, [4, 1, 3, 8]));
    refused(cached, &["`state`", "batch must be 2"]);
    refused(cached.slots(u32(4, [3, 1, 1, 1])), &["`slots`", "batch must be 2"]);
    refused(cached.slots(f32(4, [2, 1, 1, 1])), &["`slots`", "U32"]);
    refused(good.lengths(u32(4, [1, 1, 1, 1])), &["`lengths`", "batch must be 2"]);
    refused(good.packed(u32(4, [1, 1, 1, 3])), &["`x`", "batch must be 1"]);
    refused(good.packed(u32(4, [1, 1, 1, 3])).lengths(u32(5, [2, 1, 1, 1])), &["`lengths`", "`packed`"]);
    let one = CausalConvForward::new(f32(0, [1, 1, 6, 8]), weight, f32(2, [1, 1, 6, 8]));
    refused(one.packed(u32(4, [1, 1, 1, 1])), &["`cu_seqlens`", "dim must be 2"]);
    let narrow = CausalConvForward::new(x, f32(1, [1, 1, 8, 1]), out);
    refused(narrow.state(f32(3, states)), &["state", "one column"]);
    let refused = |call: CausalConvBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = operator.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut scratch).is_err());
    };
    let full = good.bias(f32(3, [1, 1, 1, 8])).initial_state(f32(4, states));
    let call = CausalConvBackward::new(full, f32(5, rows));
    refused(call, &["no gradient is requested"]);
    refused(call.d_x(f32(5, rows)), &["`d_x`", "`d_out`"]);
    refused(call.d_x(f32(6, [2, 1, 2, 8])), &["`d_x`", "length must be 3"]);
    refused(call.d_weight(f32(6, [1, 1, 8, 3])), &["`d_weight`", "must be 4"]);
    refused(call.d_bias(f32(6, [1, 1, 1, 4])), &["`d_bias`", "must be 8"]);
    refused(call.d_initial_state(f32(6, [1, 1, 3, 8])), &["`d_initial_state`", "batch must be 2"]);
    refused(call.d_x(f32(6, rows)).d_final_state(f32(7, [2, 1, 2, 8])), &["`d_final_state`", "must be 3"]);
    refused(call.d_weight(f32(6, filter)), &["scratch", "partials"]);
    let plain = CausalConvBackward::new(good, f32(5, rows));
    refused(plain.d_bias(f32(6, [1, 1, 1, 8])), &["d_bias"]);
    refused(plain.d_initial_state(f32(6, states)), &["d_initial_state"]);
    let in_place = good.state(f32(4, states));
    refused(CausalConvBackward::new(in_place, f32(5, rows)).d_x(f32(6, rows)), &["`state`", "overwrites"]);
}
