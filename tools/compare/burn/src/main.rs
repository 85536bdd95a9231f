//! Burn's side of `scripts/compare`, with Burn's default choices: kernels chosen by measuring, and
//! operations fused. The first line of standard input is the work, as JSON. Each later line asks
//! for a round of a model. The answer is one line of JSON.

use std::any::Any;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::error::Error;
use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use burn::tensor::module::{attention, embedding, layer_norm, linear};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Device, DeviceKind, Int, Tensor, TensorData, activation};
use safetensors::SafeTensors;
use serde_json::{Value, json};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Sentences that run together, sorted and padded.
const BATCH: usize = 8;

fn main() -> Fallible<()> {
    let mut lines = std::io::stdin().lock().lines();
    let work: Value = serde_json::from_str(&lines.next().ok_or("no work")??)?;
    let device = Device::wgpu(DeviceKind::DefaultDevice);
    let mut rounds: BTreeMap<String, Box<dyn FnMut() -> Value>> = BTreeMap::new();
    for line in lines {
        let (line, out) = (line?, &mut std::io::stdout());
        let round = catch_unwind(AssertUnwindSafe(|| {
            let round = match rounds.entry(line) {
                Entry::Occupied(loaded) => loaded.into_mut(),
                Entry::Vacant(place) => {
                    let round = match place.key().as_str() {
                        "smollm" => smollm(&work, &device),
                        "minilm" => minilm(&work, &device),
                        other => Err(format!("no model {other}").into()),
                    };
                    place.insert(round?)
                }
            };
            Ok::<_, Box<dyn Error>>(round())
        }));
        let answer = match round {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => json!({ "error": error.to_string() }),
            Err(panic) => json!({ "error": message(panic.as_ref()) }),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn message(panic: &dyn Any) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_else(|| "a panic".into())
}

/// The tensors of a file, in f32.
struct Weights<'a> {
    file: SafeTensors<'a>,
    device: &'a Device,
}

impl Weights<'_> {
    fn tensor<const D: usize>(&self, name: &str) -> Fallible<Tensor<D>> {
        let view = self.file.tensor(name)?;
        let (words, _) = view.data().as_chunks::<4>();
        let numbers: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        Ok(Tensor::from_data(TensorData::new(numbers, view.shape()), self.device))
    }

    /// The weight, with a column for each output, and the bias.
    fn linear(&self, name: &str) -> Fallible<Linear> {
        Ok((self.tensor(&format!("{name}.weight"))?, Some(self.tensor(&format!("{name}.bias"))?)))
    }
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap_or_default() as usize
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().into_iter().flatten().map(|id| number(id) as i32).collect()
}

/// Splits rows into heads: `[n, s, heads · dim]` into `[n, heads, s, dim]`.
fn split(x: Tensor<3>, dim: usize) -> Tensor<4> {
    let [n, s, width] = x.dims();
    x.reshape([n, s, width / dim, dim]).swap_dims(1, 2)
}

fn join(x: Tensor<4>) -> Tensor<3> {
    let [n, heads, s, dim] = x.dims();
    x.swap_dims(1, 2).reshape([n, s, heads * dim])
}

struct Layer {
    attn_norm: Tensor<1>,
    qkv: Tensor<2>,
    attn_output: Tensor<2>,
    ffn_norm: Tensor<1>,
    gate_up: Tensor<2>,
    ffn_down: Tensor<2>,
    /// Keys and values: `[1, kv_heads, context, dim]`.
    cache: [Tensor<4>; 2],
}

/// SmolLM2. The rows of queries' and keys' weights are in the order of halves, not of pairs.
struct SmolLm {
    device: Device,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    epsilon: f64,
    embedding: Tensor<2>,
    norm: Tensor<1>,
    layers: Vec<Layer>,
    /// Cosines and sines: `[1, 1, context, dim / 2]`.
    turns: [Tensor<4>; 2],
}

impl SmolLm {
    fn new(config: &Value, context: usize, device: &Device) -> Fallible<Self> {
        let bytes = std::fs::read(config["file"].as_str().ok_or("no file of weights")?)?;
        let w = Weights { file: SafeTensors::deserialize(&bytes)?, device };
        let [layers, heads, kv_heads, dim] =
            ["layers", "heads", "kv_heads", "dim"].map(|name| number(&config[name]));
        let float = |name: &str| config[name].as_f64().ok_or("a number is missing");
        let (base, epsilon) = (float("base")?, float("epsilon")?);
        let angles = |of: fn(f64) -> f64| {
            let of = |n: usize, c: usize| of(n as f64 * base.powf(-(2.0 * c as f64) / dim as f64)) as f32;
            let numbers: Vec<f32> = (0..context).flat_map(|n| (0..dim / 2).map(move |c| of(n, c))).collect();
            Tensor::<4>::from_data(TensorData::new(numbers, [1, 1, context, dim / 2]), device)
        };
        let layer = |n: usize| {
            let name = |part: &str| format!("{n}.{part}");
            let empty = || Tensor::zeros([1, kv_heads, context, dim], device);
            Ok::<_, Box<dyn Error>>(Layer {
                attn_norm: w.tensor(&name("attn_norm"))?,
                qkv: w.tensor(&name("qkv"))?,
                attn_output: w.tensor(&name("attn_output"))?,
                ffn_norm: w.tensor(&name("ffn_norm"))?,
                gate_up: w.tensor(&name("gate_up"))?,
                ffn_down: w.tensor(&name("ffn_down"))?,
                cache: [empty(), empty()],
            })
        };
        Ok(SmolLm {
            device: device.clone(),
            heads,
            kv_heads,
            dim,
            epsilon,
            embedding: w.tensor("embedding")?,
            norm: w.tensor("norm")?,
            layers: (0..layers).map(layer).collect::<Result<_, _>>()?,
            turns: [angles(f64::cos), angles(f64::sin)],
        })
    }

    fn normed(&self, x: Tensor<3>, weight: &Tensor<1>) -> Tensor<3> {
        let mean = (x.clone() * x.clone()).mean_dim(2);
        x * (mean + self.epsilon).sqrt().recip() * weight.clone().unsqueeze()
    }

    fn rotated(&self, x: Tensor<4>, had: usize) -> Tensor<4> {
        let (rows, half) = (x.dims()[2], self.dim / 2);
        let [cos, sin] = self.turns.each_ref().map(|turn| turn.clone().narrow(2, had, rows));
        let (a, b) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![first, a * sin + b * cos], 3)
    }

    /// Appends tokens after `had` others, and returns the last one's logits.
    fn feed(&mut self, tokens: &[i32], had: usize) -> Vec<f32> {
        let (rows, group) = (tokens.len(), self.heads / self.kv_heads);
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens.to_vec(), [1, rows]), &self.device);
        let mut x = embedding(self.embedding.clone(), tokens);
        for n in 0..self.layers.len() {
            let layer = &self.layers[n];
            let qkv = linear(self.normed(x.clone(), &layer.attn_norm), layer.qkv.clone(), None);
            let qkv = split(qkv, self.dim);
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            let q = self.rotated(qkv.clone().narrow(1, 0, heads), had);
            let k = self.rotated(qkv.clone().narrow(1, heads, kv_heads), had);
            let v = qkv.narrow(1, heads + kv_heads, kv_heads);
            let new = [k, v];
            let layer = &mut self.layers[n];
            for (cache, new) in layer.cache.iter_mut().zip(new) {
                let place = [0..1, 0..kv_heads, had..had + rows, 0..self.dim];
                // Burn writes in place if nothing else holds the tensor.
                let held = std::mem::replace(cache, Tensor::empty([1, 1, 1, 1], &self.device));
                *cache = held.slice_assign(place, new);
            }
            let layer = &self.layers[n];
            let [k, v] = layer.cache.each_ref().map(|cache| cache.clone().narrow(2, 0, had + rows));
            let attended = if rows == 1 {
                // The heads of a group are rows: no key is repeated.
                let q = q.reshape([1, kv_heads, group, self.dim]);
                attention(q, k, v, None, None, Default::default()).reshape([1, heads, 1, self.dim])
            } else {
                let repeated = |t: Tensor<4>| {
                    let shape = [1, kv_heads, group, had + rows, self.dim];
                    t.unsqueeze_dim::<5>(2).expand(shape).reshape([1, heads, had + rows, self.dim])
                };
                let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
                attention(q, repeated(k), repeated(v), None, None, options)
            };
            x = x + linear(join(attended), layer.attn_output.clone(), None);
            let both = linear(self.normed(x.clone(), &layer.ffn_norm), layer.gate_up.clone(), None);
            let inner = both.dims()[2] / 2;
            let (gate, up) = (both.clone().narrow(2, 0, inner), both.narrow(2, inner, inner));
            x = x + linear(activation::silu(gate) * up, layer.ffn_down.clone(), None);
        }
        let last = self.normed(x.narrow(1, rows - 1, 1), &self.norm);
        let logits = linear(last, self.embedding.clone().transpose(), None);
        floats(logits)
    }
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_to_vec().expect("tensors are f32")
}

/// The token with the largest logit, and the first of equals.
fn likeliest(logits: &[f32]) -> i32 {
    let best = (0..).zip(logits).reduce(|a, b| if b.1 > a.1 { b } else { a });
    best.map_or(0, |(token, _)| token)
}

fn smollm(work: &Value, device: &Device) -> Fallible<Box<dyn FnMut() -> Value>> {
    let mut model = SmolLm::new(&work["smollm_f32"], number(&work["context"]), device)?;
    let (long, short, steps) = (ids(&work["long"]), ids(&work["short"]), number(&work["steps"]));
    Ok(Box::new(move || {
        let started = Instant::now();
        let logits = model.feed(&long, 0);
        let forward = started.elapsed().as_secs_f64();
        let started = Instant::now();
        let mut tokens = vec![likeliest(&model.feed(&short, 0))];
        let first = started.elapsed().as_secs_f64();
        let started = Instant::now();
        for n in 0..steps {
            tokens.push(likeliest(&model.feed(&tokens[n..], short.len() + n)));
        }
        let generate = started.elapsed().as_secs_f64();
        json!({ "forward": forward, "first": first, "generate": generate, "logits": logits, "tokens": tokens })
    }))
}

type Linear = (Tensor<2>, Option<Tensor<1>>);
type Norm = (Tensor<1>, Option<Tensor<1>>);

struct Block {
    qkv: [Linear; 3],
    output: Linear,
    output_norm: Norm,
    up: Linear,
    down: Linear,
    down_norm: Norm,
}

struct MiniLm {
    device: Device,
    heads: usize,
    words: Tensor<2>,
    /// The embeddings of positions, with the first type's added.
    positions: Tensor<2>,
    norm: Norm,
    layers: Vec<Block>,
}

fn normed(x: Tensor<3>, (gamma, beta): &Norm) -> Tensor<3> {
    layer_norm(x, gamma.clone(), beta.clone(), 1e-12)
}

fn projected(x: Tensor<3>, (weight, bias): &Linear) -> Tensor<3> {
    linear(x, weight.clone(), bias.clone())
}

impl MiniLm {
    fn new(config: &Value, device: &Device) -> Fallible<Self> {
        let bytes = std::fs::read(config["file"].as_str().ok_or("no file of weights")?)?;
        let w = Weights { file: SafeTensors::deserialize(&bytes)?, device };
        let norm = |name: &str| {
            let part = |part: &str| w.tensor::<1>(&format!("{name}.LayerNorm.{part}"));
            Ok::<_, Box<dyn Error>>((part("weight")?, Some(part("bias")?)))
        };
        let layer = |n: usize| {
            let part = |part: &str| format!("encoder.layer.{n}.{part}");
            let qkv = |name: &str| w.linear(&part(&format!("attention.self.{name}")));
            Ok::<_, Box<dyn Error>>(Block {
                qkv: [qkv("query")?, qkv("key")?, qkv("value")?],
                output: w.linear(&part("attention.output.dense"))?,
                output_norm: norm(&part("attention.output"))?,
                up: w.linear(&part("intermediate.dense"))?,
                down: w.linear(&part("output.dense"))?,
                down_norm: norm(&part("output"))?,
            })
        };
        let kinds = w.tensor::<2>("embeddings.token_type_embeddings.weight")?.narrow(0, 0, 1);
        Ok(MiniLm {
            device: device.clone(),
            heads: number(&config["heads"]),
            words: w.tensor("embeddings.word_embeddings.weight")?,
            positions: w.tensor::<2>("embeddings.position_embeddings.weight")? + kinds,
            norm: norm("embeddings")?,
            layers: (0..number(&config["layers"])).map(layer).collect::<Result<_, _>>()?,
        })
    }

    /// The unit vectors of sentences, of which the first is the longest.
    fn vectors(&self, sentences: &[&[i32]]) -> Vec<f32> {
        let (n, longest) = (sentences.len(), sentences[0].len());
        let id = |s: usize, at: usize| sentences[s].get(at).copied().unwrap_or(0);
        let tokens: Vec<i32> = (0..n * longest).map(|place| id(place / longest, place % longest)).collect();
        let counts: Vec<i32> = sentences.iter().map(|s| s.len() as i32).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [n, longest]), &self.device);
        let counts = Tensor::<2, Int>::from_data(TensorData::new(counts, [n, 1]), &self.device);
        let places = Tensor::<1, Int>::arange(0..longest as i64, &self.device).unsqueeze::<2>();
        let padding: Tensor<2, Bool> = places.expand([n, longest]).greater_equal(counts.expand([n, longest]));
        let real = padding.clone().bool_not().float().reshape([n, longest, 1]);
        let hidden = padding.reshape([n, 1, 1, longest]).expand([n, self.heads, longest, longest]);

        let table = self.positions.clone().narrow(0, 0, longest).unsqueeze();
        let mut x = normed(embedding(self.words.clone(), tokens) + table, &self.norm);
        let dim = x.dims()[2] / self.heads;
        for layer in &self.layers {
            let [q, k, v] = layer.qkv.each_ref().map(|one| split(projected(x.clone(), one), dim));
            let attended = attention(q, k, v, Some(hidden.clone()), None, Default::default());
            x = normed(x + projected(join(attended), &layer.output), &layer.output_norm);
            let up = activation::gelu(projected(x.clone(), &layer.up));
            x = normed(x + projected(up, &layer.down), &layer.down_norm);
        }
        let sum = (x * real).sum_dim(1);
        let length = (sum.clone() * sum.clone()).sum_dim(2).sqrt();
        floats(sum / length)
    }
}

fn minilm(work: &Value, device: &Device) -> Fallible<Box<dyn FnMut() -> Value>> {
    let model = MiniLm::new(&work["minilm_f32"], device)?;
    let sentences: Vec<Vec<i32>> = work["sentences"].as_array().into_iter().flatten().map(ids).collect();
    Ok(Box::new(move || {
        let started = Instant::now();
        let mut order: Vec<usize> = (0..sentences.len()).collect();
        order.sort_by_key(|n| std::cmp::Reverse(sentences[*n].len()));
        let mut found = vec![Vec::new(); sentences.len()];
        for batch in order.chunks(BATCH) {
            let tokens: Vec<&[i32]> = batch.iter().map(|n| &sentences[*n][..]).collect();
            let vectors = model.vectors(&tokens);
            let width = vectors.len() / batch.len();
            for (n, vector) in batch.iter().zip(vectors.chunks(width)) {
                found[*n] = vector.to_vec();
            }
        }
        json!({ "embed": started.elapsed().as_secs_f64(), "vectors": found.concat() })
    }))
}
