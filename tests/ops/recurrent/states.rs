//! States: checkpoints of draft tokens, and the places of sequences among many states.

use wgpu_attention::recurrent::{Decay, RecurrentForward};
use wgpu_attention::reference::compare::{Tolerance, compare};
use wgpu_attention::{DType, Gpu, TensorView};

use super::{FORMS, RecurrentCase, gated, plain};
use crate::harness::full;

/// A case on the device, with all tensors dense.
struct Run<'a> {
    gpu: &'a Gpu,
    case: &'a RecurrentCase,
    buffers: Vec<wgpu::Buffer>,
    out: wgpu::Buffer,
}

impl<'a> Run<'a> {
    fn new(case: &'a RecurrentCase) -> Self {
        let gpu = &full().gpu;
        let upload = |x: &Vec<f32>| gpu.upload(x).expect("an upload");
        let buffers = [&case.q, &case.k, &case.v, &case.decay, &case.beta].map(upload).into();
        let out = gpu.buffer(4 * case.v.len()).expect("a buffer");
        Run { gpu, case, buffers, out }
    }

    /// The call of tokens `first` to `first + count`.
    fn call(&self, first: usize, count: usize) -> RecurrentForward<'_> {
        let shape = self.case.shape;
        let [keys, values] = [(shape.kv_heads, shape.head_dim), (shape.heads, shape.value_dim)];
        let view = |buffer, (heads, channels)| {
            let all = TensorView::new(buffer, DType::F32, [shape.batch, heads, shape.q_len, channels]);
            all.slice(2, first, count)
        };
        let [q, k, v, decay, beta] = std::array::from_fn(|n| &self.buffers[n]);
        RecurrentForward::new(view(q, keys), view(k, keys), view(v, values), view(&self.out, values))
            .decay(view(decay, (shape.heads, 1)))
            .beta(view(beta, (shape.heads, 1)))
    }

    fn out(&self) -> Vec<f64> {
        floats(self.gpu, &self.out, self.case.v.len())
    }
}

fn floats(gpu: &Gpu, buffer: &wgpu::Buffer, count: usize) -> Vec<f64> {
    let got: Vec<f32> = gpu.download(buffer, count).expect("a download");
    got.into_iter().map(f64::from).collect()
}

fn near(got: &[f64], want: &[f64], what: &str) {
    let magnitude = want.iter().fold(0f64, |most, x| most.max(x.abs()));
    let tolerance = Tolerance { absolute: 4e-6 * magnitude };
    compare(got, want, tolerance).unwrap_or_else(|e| panic!("{what}: {e}"));
}

/// After five draft tokens, generation goes on from any of them.
#[test]
fn checkpoints_resume_any_prefix() {
    let case = gated("checkpoints", [2, 4, 2, 9, 12, 20]).with(|c| c.initial.clear());
    let exact = case.reference::<f64>();
    let (draft, heads, size) = (5, 4, 12 * 20);
    for form in FORMS {
        let run = Run::new(&case);
        let buffer = |states: usize| run.gpu.buffer(4 * states * heads * size).expect("a buffer");
        let (kept, last) = (buffer(2 * draft), buffer(2));
        let view = |buffer, count| TensorView::new(buffer, DType::F32, [count, heads, 12, 20]);
        let call = run.call(0, draft).states(view(&kept, 2 * draft)).final_state(view(&last, 2));
        case.submit(&plain(form), &call).expect("a call");
        let got = floats(run.gpu, &kept, 2 * draft * heads * size);
        let each = heads * size;
        let want: Vec<f64> = (0..2 * draft)
            .flat_map(|n| exact.states[(n / draft * 9 + n % draft) * each..][..each].to_vec())
            .collect();
        near(&got, &want, "states");
        let got = floats(run.gpu, &last, 2 * each);
        near(&got, &[&want[4 * each..5 * each], &want[9 * each..]].concat(), "the final state");
        // Sequence 0 accepts two tokens and sequence 1 four, and both go on for as many tokens.
        let accepted = [2u32, 4];
        let slots = [accepted[0] - 1, draft as u32 + accepted[1] - 1];
        let slots = run.gpu.upload(&slots).expect("an upload");
        let call = run
            .call(4, 3)
            .initial_state(view(&kept, 2 * draft))
            .initial_slots(TensorView::new(&slots, DType::U32, [2, 1, 1, 1]))
            .final_state(view(&last, 2));
        case.submit(&plain(form), &call).expect("a call");
        let out = run.out();
        // Sequence 1 sees tokens 0 to 3, then 4 to 6, as in one call.
        for h in 0..heads {
            let at = ((heads + h) * 9 + 4) * 20;
            near(&out[at..][..3 * 20], &exact.out[at..][..3 * 20], "the tokens after the draft");
        }
        // Sequence 0 sees tokens 0 and 1, then 4 to 6.
        let cut = |x: &[f32], rows: usize| -> Vec<f32> {
            let width = x.len() / rows / 9;
            (0..rows)
                .flat_map(|row| [0, 1, 4, 5, 6].map(|t| x[(row * 9 + t) * width..][..width].to_vec()))
                .flatten()
                .collect()
        };
        let mut short = case.clone();
        short.shape.q_len = 5;
        short.shape.kv_len = 5;
        (short.q, short.k) = (cut(&case.q, 4), cut(&case.k, 4));
        (short.v, short.decay, short.beta) = (cut(&case.v, 8), cut(&case.decay, 8), cut(&case.beta, 8));
        let exact = short.reference::<f64>();
        for h in 0..heads {
            let (at, short_at) = ((h * 9 + 4) * 20, (h * 5 + 2) * 20);
            near(&out[at..][..60], &exact.out[short_at..][..60], "the tokens after two of the draft");
        }
    }
}

const LENGTHS: [u32; 2] = [2, 0];

/// Sequences of [`LENGTHS`] tokens of five, without states before them.
fn uneven(name: &str) -> RecurrentCase {
    gated(name, [2, 4, 2, 5, 12, 20]).with(|c| (c.initial, c.lengths) = (Vec::new(), Some(LENGTHS.to_vec())))
}

/// Tokens past the end of a sequence keep its last state.
#[test]
fn checkpoints_repeat_past_lengths() {
    let (case, each) = (uneven("checkpoints and lengths"), 4 * 12 * 20);
    let exact = case.reference::<f64>();
    for form in FORMS {
        let run = Run::new(&case);
        let kept = run.gpu.upload(&vec![7.5f32; 10 * each]).expect("an upload");
        let of = run.gpu.upload(&LENGTHS).expect("an upload");
        let call = run
            .call(0, 5)
            .states(TensorView::new(&kept, DType::F32, [10, 4, 12, 20]))
            .lengths(TensorView::new(&of, DType::U32, [2, 1, 1, 1]));
        case.submit(&plain(form), &call).expect("a call");
        let got = floats(run.gpu, &kept, 10 * each);
        for t in 0..10 {
            let want = match t {
                0..5 => exact.states[t.min(1) * each..][..each].to_vec(),
                _ => vec![0.0; each],
            };
            near(&got[t * each..][..each], &want, &format!("the state after token {t}"));
        }
    }
}

/// The final state of a sequence without tokens is zero if no state was given.
#[test]
fn empty_sequences_end_in_zeros() {
    let (case, each) = (uneven("final states and lengths"), 4 * 12 * 20);
    let exact = case.reference::<f64>();
    for form in FORMS {
        let run = Run::new(&case);
        let last = run.gpu.upload(&vec![7.5f32; 2 * each]).expect("an upload");
        let of = run.gpu.upload(&LENGTHS).expect("an upload");
        let call = run
            .call(0, 5)
            .final_state(TensorView::new(&last, DType::F32, [2, 4, 12, 20]))
            .lengths(TensorView::new(&of, DType::U32, [2, 1, 1, 1]));
        case.submit(&plain(form), &call).expect("a call");
        let got = floats(run.gpu, &last, 2 * each);
        near(&got[..each], &exact.last[..each], "the state after two tokens");
        assert!(got[each..].iter().all(|x| *x == 0.0), "{form:?}");
    }
}

/// Slots select states of many. A slot that does not exist leaves its sequence out.
#[test]
fn slots_select_states() {
    for length in [3, 70] {
        let case = gated("slots", [3, 2, 1, length, 12, 20]);
        let exact = case.reference::<f64>();
        let each = 2 * 12 * 20;
        for form in FORMS {
            let run = Run::new(&case);
            let slots = [4u32, 9, 0];
            let mut cache = vec![7.5f32; 5 * each];
            for (n, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot < 5) {
                cache[*slot as usize * each..][..each].copy_from_slice(&case.initial[n * each..][..each]);
            }
            let states = run.gpu.upload(&cache).expect("an upload");
            let named = run.gpu.upload(&slots).expect("an upload");
            let call = run
                .call(0, length)
                .state(TensorView::new(&states, DType::F32, [5, 2, 12, 20]))
                .slots(TensorView::new(&named, DType::U32, [3, 1, 1, 1]));
            case.submit(&plain(form), &call).expect("a call");
            let (out, after) = (run.out(), floats(run.gpu, &states, 5 * each));
            let rows = 2 * length * 20;
            for n in [0, 2] {
                near(&out[n * rows..][..rows], &exact.out[n * rows..][..rows], "out");
                let slot = slots[n] as usize;
                near(&after[slot * each..][..each], &exact.last[n * each..][..each], "the state");
            }
            assert!(out[rows..2 * rows].iter().all(|x| *x == 0.0), "a sequence without a state");
            assert!(after[each..4 * each].iter().all(|x| *x == 7.5), "states of no sequence");
        }
    }
}

/// The states of a rule without decay and delta are sums, whatever the form.
#[test]
fn plain_rule_sums() {
    let shape = super::shape([1, 1, 1, 20, 3, 2]);
    let case = RecurrentCase::random("sums", shape, Decay::None, false).with(|c| c.d_out.clear());
    let state = case.reference::<f64>().last;
    for f in 0..3 {
        for c in 0..2 {
            let want: f64 =
                (0..20).map(|t| f64::from(case.k[t * 3 + f]) * f64::from(case.v[t * 2 + c])).sum();
            assert!((state[f * 2 + c] - want).abs() < 1e-12);
        }
    }
}
