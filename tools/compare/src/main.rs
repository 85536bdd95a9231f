//! This crate's side of `scripts/compare`. The first line on standard output is the work that all
//! programs do, as JSON. Each line of standard input, `smollm` or `minilm`, asks for a round. The
//! answer is one line of JSON.

// The model of the chat example, which is a program without a library.
#[allow(dead_code)]
#[path = "../../../examples/chat/src/caches.rs"]
mod caches;
#[allow(dead_code)]
#[path = "../../../examples/chat/src/model.rs"]
mod model;
#[path = "../../../examples/chat/src/tokens.rs"]
mod tokens;
#[allow(dead_code)]
#[path = "../../../examples/chat/src/weights.rs"]
mod weights;

use std::error::Error;
use std::io::{BufRead, Write};
use std::time::Instant;

use minilm::{Files, LONGEST};
use model::{Layout, Model, Session};
use serde_json::{Value, json};
use wgpu_attention::Gpu;
use wgpu_attention::cache::CacheStorage;
use wgpu_attention_models::Gguf;

type Fallible<T> = Result<T, Box<dyn Error>>;

/// The text of the long prompt, and its number of tokens.
const TEXT: &str = include_str!("../../../LICENSE-APACHE");
const LONG: usize = 400;
/// The question of the short prompt.
const QUESTION: &str = "Describe a sunrise at sea in three sentences.";
/// The number of steps after the short prompt.
const STEPS: usize = 32;
/// Tokens that fit in the cache of keys and values.
const CONTEXT: usize = 512;
/// The sentences are joined in groups of these sizes, for a mix of lengths.
const SENTENCES: &str = include_str!("../../../examples/embed/data/sentences.txt");
const JOINED: [usize; 8] = [1, 1, 1, 2, 2, 3, 5, 8];
const COUNT: usize = 64;

fn main() -> Fallible<()> {
    let path = weights::file()?;
    let file = Gguf::open(&path)?;
    let tokenizer = tokens::tokenizer(&file)?;
    let mut long = tokens::encode(&tokenizer, TEXT.trim_start())?;
    long.truncate(LONG);
    let short = tokens::encode(&tokenizer, &(tokens::system(None) + &tokens::question(QUESTION)))?;

    let files = Files::cached()?;
    let mut lines = SENTENCES.lines().cycle();
    let texts: Vec<String> = (0..COUNT)
        .map(|n| lines.by_ref().take(JOINED[n % JOINED.len()]).collect::<Vec<_>>().join(" "))
        .collect();
    let sentences = minilm::Tokenizer::new(&files.tokenizer)?.truncated(LONGEST)?.tokens(&texts)?;

    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    let work = json!({
        "device": info.name,
        "driver": format!("{} ({})", info.driver_info, info.backend),
        "gguf": path,
        "minilm": files.folder,
        "long": long,
        "short": short,
        "steps": STEPS,
        "context": CONTEXT,
        "sentences": sentences.iter().map(|s| &s.ids).collect::<Vec<_>>(),
    });
    print(&work)?;

    let smollm = Model::new(&gpu, &file)?;
    let layout =
        Layout { batch: 1, capacity: CONTEXT, shared: 0, rows: CONTEXT, kind: CacheStorage::F16.into() };
    let mut session = Session::new(&smollm, layout)?;
    session.warm_up()?;
    let mut minilm = minilm::Model::new(&gpu, &files.weights, &sentences)?;
    for line in std::io::stdin().lock().lines() {
        let round = match line?.as_str() {
            "smollm" => answer(&mut session, &long, &short)?,
            "minilm" => {
                let started = Instant::now();
                let vectors = minilm.embed(&sentences, |_| {})?;
                json!({ "embed": started.elapsed().as_secs_f64(), "vectors": vectors })
            }
            other => return Err(format!("no model {other}").into()),
        };
        print(&round)?;
    }
    Ok(())
}

/// Prints a line of JSON.
fn print(value: &Value) -> Fallible<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

/// Runs the long prompt, then the short one with the likeliest tokens after it.
fn answer(session: &mut Session, long: &[u32], short: &[u32]) -> Fallible<Value> {
    session.clear()?;
    let started = Instant::now();
    let logits = session.feed(&[long])?.remove(0);
    let forward = started.elapsed().as_secs_f64();

    session.clear()?;
    let started = Instant::now();
    let mut token = likeliest(&session.feed(&[short])?[0]);
    let first = started.elapsed().as_secs_f64();
    let mut tokens = vec![token];
    let started = Instant::now();
    for _ in 0..STEPS {
        token = likeliest(&session.feed(&[&[token]])?[0]);
        tokens.push(token);
    }
    let generate = started.elapsed().as_secs_f64();
    Ok(
        json!({ "forward": forward, "first": first, "generate": generate, "logits": logits, "tokens": tokens }),
    )
}

/// Returns the token with the largest logit, and the first of equals.
fn likeliest(logits: &[f32]) -> u32 {
    let best = (0..).zip(logits).reduce(|a, b| if b.1 > a.1 { b } else { a });
    best.map_or(0, |(token, _)| token)
}
