//! Compares the model with other programs' results for the same file (tests/vectors/smollm2).
//! Without the model's file, each test prints that it was skipped. `cargo run --release -p chat --
//! hello` downloads the file.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use tokenizers::Tokenizer;
use wgpu_attention::Gpu;
use wgpu_attention::cache::{CacheStorage, ScaleGroup};
use wgpu_attention_models::Gguf;

use crate::model::{Layout, Logits, Model, Session};
use crate::sample::likeliest;
use crate::{Arguments, Chat, Ended, Times, common, tokens, weights};

const CASES: [&str; 3] = ["smollm2_plain_short", "smollm2_chat", "smollm2_plain_long"];
/// The tolerance of logits with f32 keys and values. It is ten times the error of f32 code (see the
/// vectors' README).
const F32: f64 = 5e-4;
/// The tolerance of logits with f16 keys and values.
const F16: f64 = 0.05;

struct Bed {
    tokenizer: Tokenizer,
    model: Model,
}

/// Loads the model. Without the file, prints a line and returns `None`.
fn bed(test: &str) -> Option<Bed> {
    let Some(path) = weights::kept().expect("the right file") else {
        eprintln!(
            "{test}: skipped, the weights are not there; `cargo run --release -p chat -- hello` fetches them"
        );
        return None;
    };
    let file = Gguf::open(path).expect("a GGUF file");
    let gpu = Gpu::new().expect("a device: run the tests as `scripts/gpu cargo test --release -p chat`");
    let tokenizer = tokens::tokenizer(&file).expect("a tokenizer");
    Some(Bed { tokenizer, model: Model::new(&gpu, &file).expect("a model") })
}

impl Bed {
    fn session(&self, batch: usize, capacity: usize, storage: CacheStorage) -> Session<'_> {
        let layout = Layout { batch, capacity, shared: 0, rows: 512, kind: storage.into() };
        Session::new(&self.model, layout).expect("a session")
    }
}

/// The stored results of a case.
struct Truth {
    bytes: Vec<u8>,
    attrs: serde_json::Value,
}

impl Truth {
    fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/smollm2");
        let path = folder.join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, head) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let attrs = head.metadata().as_ref().expect("metadata")["attrs"].clone();
        Truth { attrs: serde_json::from_str(&attrs).expect("attrs"), bytes }
    }

    fn numbers(&self, tensor: &str) -> Vec<f64> {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let view = tensors.tensor(tensor).expect(tensor);
        match view.dtype() {
            Dtype::F32 => view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
            Dtype::I64 => view.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            other => panic!("{tensor} is {other:?}"),
        }
    }

    fn ids(&self, tensor: &str) -> Vec<u32> {
        self.numbers(tensor).into_iter().map(|id| id as u32).collect()
    }

    fn text(&self, attr: &str) -> &str {
        self.attrs[attr].as_str().expect(attr)
    }
}

/// The log-sum-exp of all logits.
fn lse(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(most) + logits.iter().map(|x| f64::from(x - most).exp()).sum::<f64>().ln()
}

/// The largest difference so far; infinite after a NaN.
#[derive(Default)]
struct Worst(f64);

impl Worst {
    fn see(&mut self, got: f64, want: f64) {
        let off = (got - want).abs();
        self.0 = if off.is_nan() { f64::INFINITY } else { self.0.max(off) };
    }

    /// Compares the logits at stored ids.
    fn see_at(&mut self, logits: &[f32], ids: &[u32], want: &[f64]) {
        assert_eq!(ids.len(), want.len());
        ids.iter().zip(want).for_each(|(id, want)| self.see(logits[*id as usize].into(), *want));
    }
}

/// Feeds the stored tokens and compares the logits of every step. Returns the largest difference.
fn off(bed: &Bed, truth: &Truth, storage: CacheStorage) -> f64 {
    let vocabulary = bed.model.sizes.vocabulary;
    let (prompt, greedy) = (truth.ids("input_ids"), truth.ids("greedy_ids"));
    let mut session = bed.session(1, prompt.len() + greedy.len(), storage);
    let mut worst = Worst::default();

    // Feed the prompt in one step. Compare each token's probability, and the last logits.
    let (all, _) = session.step(&[&prompt], Logits::All).expect("a step");
    let rows: Vec<&[f32]> = all.chunks(vocabulary).collect();
    assert_eq!(rows.len(), prompt.len());
    for (n, want) in truth.numbers("prompt_logprob").into_iter().enumerate() {
        worst.see(f64::from(rows[n][prompt[n + 1] as usize]) - lse(rows[n]), want);
    }
    let mut logits = rows[prompt.len() - 1].to_vec();
    worst.see_at(&logits, &truth.ids("top_ids"), &truth.numbers("top_logits"));

    // Feed the stored answer token by token.
    let (ids, top, sums) =
        (truth.ids("greedy_top_ids"), truth.numbers("greedy_top_logits"), truth.numbers("greedy_lse"));
    for (step, token) in greedy.iter().enumerate() {
        let five = 5 * step..5 * step + 5;
        worst.see_at(&logits, &ids[five.clone()], &top[five.clone()]);
        worst.see(lse(&logits), sums[step]);
        let [best, second] = [top[five.start], top[five.start + 1]];
        // Each logit has at most this error. So the right token wins if the gap is more than twice
        // the error.
        if best - second > 2.0 * worst.0 {
            assert_eq!(likeliest(&logits), Some(*token), "step {step}");
        }
        logits = session.feed(&[&[*token]]).expect("a step").remove(0);
    }
    worst.0
}

#[test]
fn logits_equal_the_truth() {
    let Some(bed) = bed("logits_equal_the_truth") else { return };
    for name in CASES {
        let truth = Truth::load(name);
        let kinds = [
            ("f32", CacheStorage::F32, F32),
            ("f16", CacheStorage::F16, F16),
            // No stored limit exists; llama.cpp with 8-bit activations has an error of 1.04.
            ("q8, groups of 32", CacheStorage::Q8(ScaleGroup::Of(32)), 1.04),
        ];
        for (kind, storage, limit) in kinds {
            let off = off(&bed, &truth, storage);
            eprintln!("{name}, keys and values in {kind}: logits off by {off:.1e} at most");
            assert!(off <= limit, "{name}, {kind}: off by {off:e}, more than {limit:e}");
        }
    }
}

/// Compares the residual stream and every logit of the vocabulary.
#[test]
fn every_logit_and_the_last_layer_equal_the_truth() {
    let Some(bed) = bed("every_logit_and_the_last_layer_equal_the_truth") else { return };
    let truth = Truth::load(CASES[0]);
    let prompt = truth.ids("input_ids");
    let mut session = bed.session(1, 64, CacheStorage::F32);
    let logits = session.feed(&[&prompt]).expect("a step").remove(0);
    let mut worst = Worst::default();
    let every: Vec<u32> = (0..logits.len() as u32).collect();
    worst.see_at(&logits, &every, &truth.numbers("logits"));
    eprintln!("every logit: off by {:.1e} at most", worst.0);
    assert!(worst.0 <= F32, "off by {:e}", worst.0);
    let rows = session.last_rows(prompt.len()).expect("rows");
    for (name, got) in ["hidden30", "hidden_norm"].into_iter().zip(rows) {
        let want = truth.numbers(name);
        let most = want.iter().fold(0f64, |most, x| most.max(x.abs()));
        let mut worst = Worst::default();
        assert_eq!(got.len(), want.len());
        got.iter().zip(&want).for_each(|(got, want)| worst.see((*got).into(), *want));
        eprintln!("{name}: off by {:.1e} of its largest value", worst.0 / most);
        assert!(worst.0 <= 1e-5 * most, "{name} is off by {:e} of {most}", worst.0);
    }
}

/// Generates freely and compares with the stored tokens. A different token is allowed only if the
/// gap between the two best logits is within the tolerance.
#[test]
fn greedy_tokens_equal_the_truth() {
    let Some(bed) = bed("greedy_tokens_equal_the_truth") else { return };
    for name in CASES {
        let truth = Truth::load(name);
        let (prompt, greedy) = (truth.ids("input_ids"), truth.ids("greedy_ids"));
        let top = truth.numbers("greedy_top_logits");
        for (storage, limit) in [(CacheStorage::F32, F32), (CacheStorage::F16, F16)] {
            let mut session = bed.session(1, prompt.len() + greedy.len(), storage);
            let mut logits = session.feed(&[&prompt]).expect("a step").remove(0);
            let mut said = 0;
            for (step, want) in greedy.iter().enumerate() {
                let token = likeliest(&logits).expect("finite logits");
                if token != *want {
                    let gap = top[5 * step] - top[5 * step + 1];
                    assert!(
                        gap <= 2.0 * limit,
                        "{name}, {storage:?}: step {step} chose {token}, not {want}, by {gap}"
                    );
                    break;
                }
                said += 1;
                logits = session.feed(&[&[token]]).expect("a step").remove(0);
            }
            eprintln!("{name}, {storage:?}: {said} of {} tokens the same", greedy.len());
            assert!(said > 0);
        }
        let text = bed.tokenizer.decode(&greedy, false).expect("text");
        assert_eq!(text, truth.text("greedy_text"));
    }
}

/// Runs several conversations at once with a shared prefix, in steps shorter than a prompt. The
/// results must equal those of each conversation alone.
#[test]
fn conversations_that_share_a_prefix_are_as_alone() {
    let Some(bed) = bed("conversations_that_share_a_prefix_are_as_alone") else { return };
    let truth = Truth::load("smollm2_chat");
    let own = truth.ids("input_ids");
    let others = ["Why?", "Name three rivers of France, and say where each of them meets the sea."];
    let prompt = |question| {
        tokens::encode(&bed.tokenizer, &(tokens::system(None) + &tokens::question(question))).expect("tokens")
    };
    let mut prompts: Vec<Vec<u32>> = others.map(prompt).into();
    prompts.insert(1, own);
    let shared = common(&prompts);
    assert!(shared > 16, "{shared}");
    for prompt in [0, 2] {
        assert_ne!(prompts[prompt][shared..], prompts[1][shared..]);
    }

    let alone: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let mut session = bed.session(1, 128, CacheStorage::F32);
            let first = session.feed(&[prompt]).expect("a step").remove(0);
            let next = session.feed(&[&[500]]).expect("a step").remove(0);
            [first, next]
        })
        .collect();

    let layout = Layout { batch: 3, capacity: 128, shared, rows: 7, kind: CacheStorage::F32.into() };
    let mut session = Session::new(&bed.model, layout).expect("a session");
    session.feed(&[&prompts[0][..shared], &[], &[]]).expect("a prefix");
    session.share_first().expect("a fork");
    let rest: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[shared..]).collect();
    let first = session.feed(&rest).expect("steps");
    // One of the conversations has ended.
    let next = session.feed(&[&[500], &[500], &[]]).expect("a step");
    assert!(next[2].is_empty());
    let last = session.feed(&[&[], &[], &[500]]).expect("a step");
    assert!(last[0].is_empty() && last[1].is_empty());
    for (s, alone) in alone.iter().enumerate() {
        assert_eq!(session.len(s), prompts[s].len() + 1);
        for (got, want) in [(&first[s], &alone[0]), (if s == 2 { &last[s] } else { &next[s] }, &alone[1])] {
            assert_eq!(got.len(), want.len());
            let mut worst = Worst::default();
            got.iter().zip(want).for_each(|(got, want)| worst.see((*got).into(), (*want).into()));
            eprintln!("conversation {s}: off by {:.1e} from alone", worst.0);
            assert!(worst.0 <= F32, "conversation {s} is off by {:e} from alone", worst.0);
        }
    }
    let mut worst = Worst::default();
    worst.see_at(&first[1], &truth.ids("top_ids"), &truth.numbers("top_logits"));
    assert!(worst.0 <= F32, "off by {:e}", worst.0);
}

#[test]
fn texts_become_the_stored_tokens() {
    let Some(bed) = bed("texts_become_the_stored_tokens") else { return };
    let encode = |text: &str| tokens::encode(&bed.tokenizer, text).expect("tokens");
    for name in CASES {
        let truth = Truth::load(name);
        assert_eq!(encode(truth.text("prompt")), truth.ids("input_ids"), "{name}");
    }
    // Blanks before a digit are one token, and every numeric character is a separate token.
    assert_eq!(encode("a  2"), [81, 256, 34]);
    assert_eq!(encode("½ x² １２ ٣"), [16738, 1792, 19133, 216, 8083, 235, 8083, 236, 216, 164, 113]);
    assert_eq!(encode("<|im_end|>"), [2]);
    assert!(encode("").is_empty());
    // Encode and decode token by token, with characters of several bytes.
    let text = "Grüße, 東京 — 🦀 42!\n";
    let mut stream = bed.tokenizer.decode_stream(true);
    let parts: Vec<_> = encode(text).into_iter().map(|id| stream.step(id).expect("text")).collect();
    assert_eq!(parts.into_iter().flatten().collect::<String>(), text);
}

#[test]
fn conversations_have_the_models_form() {
    let truth = Truth::load("smollm2_chat");
    let question = truth.attrs["messages"][0]["content"].as_str().expect("a question");
    assert_eq!(tokens::system(None) + &tokens::question(question), truth.text("prompt"));
    assert!(tokens::system(Some("Be brief.")).contains("system\nBe brief.<|im_end|>"));
}

#[test]
fn shared_prefix_leaves_one_token() {
    assert_eq!(common(&[]), 0);
    assert_eq!(common(&[vec![1, 2, 3]]), 2);
    assert_eq!(common(&[vec![1, 2, 3], vec![1, 2, 4, 5]]), 2);
    assert_eq!(common(&[vec![1, 2, 3], vec![1, 2]]), 1);
    assert_eq!(common(&[vec![1], vec![2, 1]]), 0);
    assert_eq!(common(&[vec![1], vec![]]), 0);
}

#[test]
fn bad_steps_are_refused() {
    let Some(bed) = bed("bad_steps_are_refused") else { return };
    let mut session = bed.session(2, 64, CacheStorage::F16);
    let refused = |session: &mut Session, tokens: &[&[u32]], words: &str| {
        let error = session.step(tokens, Logits::Last).expect_err("an error").to_string();
        assert!(error.contains(words), "{words}: {error}");
    };
    refused(&mut session, &[&[1]], "for 2 of 512");
    refused(&mut session, &[&[], &[]], "up to 0");
    refused(&mut session, &[&[1], &[49152]], "no token 49152");
    refused(&mut session, &[&[1; 65], &[1]], "capacity");
    assert_eq!((session.len(0), session.len(1)), (0, 0));
}

/// An answer that fills the context ends with whole characters. A further question is an error.
#[test]
fn answers_end_where_the_context_does() {
    let Some(Bed { tokenizer, model }) = bed("answers_end_where_the_context_does") else { return };
    let truth = Truth::load("smollm2_chat");
    let (prompt, greedy) = (truth.ids("input_ids"), truth.ids("greedy_ids"));
    for (more, max_tokens, ended) in [(1, 256, Ended::Full), (9, 256, Ended::Full), (9, 4, Ended::Long)] {
        let arguments = Arguments { context: prompt.len() + more, max_tokens, ..Default::default() };
        let chat = Chat { tokenizer: tokenizer.clone(), end: 2, arguments: &arguments };
        let layout = Layout {
            batch: 1,
            capacity: arguments.context,
            shared: 0,
            rows: 64.min(arguments.context),
            kind: CacheStorage::F32.into(),
        };
        let mut session = Session::new(&model, layout).expect("a session");
        let (mut times, mut out) = (Times::default(), Vec::new());
        let mut answer = |session: &mut Session, prompt: &[u32], out: &mut Vec<u8>| {
            chat.answer(session, prompt, &mut chat.sampler(0), &mut times, out)
        };
        let (last, got) = answer(&mut session, &prompt, &mut out).expect("an answer");
        let count = more.min(max_tokens);
        assert_eq!((last, got), (Some(greedy[count - 1]), ended));
        let want = tokenizer.decode(&greedy[..count], true).expect("text");
        assert_eq!(String::from_utf8(out).expect("whole characters"), want);
        assert_eq!(session.len(0), prompt.len() + count - 1);
        if ended == Ended::Full {
            let mut out = Vec::new();
            let error =
                answer(&mut session, &[greedy[count - 1], 2], &mut out).expect_err("no room").to_string();
            assert!(error.starts_with("the conversation's ") && error.contains("see --context"), "{error}");
            assert!(out.is_empty());
        }
    }
}
