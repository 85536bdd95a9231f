//! A decoder-only model like GPT-2: learned positions, pre-norm layers, causal self-attention, and
//! logits from the embedding table. It is small, and its weights are random. Two prompts of
//! different lengths, padded on the left, form one batch.
//!
//! `scripts/gpu cargo run --release --example gpt`

use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{
    EncoderForward, EncoderLayerWeights, FeedForwardWeights, MultiHeadConfig, MultiHeadWeights, NormOrder,
    TransformerLayerConfig,
};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::{Activation, ProjectionForward};
use wgpu_attention::rows::{Embedding, EmbeddingForward, NormWeights, TopK, TopKForward};
use wgpu_attention::{
    Cache, CacheConfig, DType, Error, Gpu, Linear, Projection, Scratch, ScratchSize, TensorView,
    TransformerEncoder, wgpu,
};

const VOCABULARY: usize = 96;
/// The number of learned positions, and the capacity of the cache in tokens.
const ROOM: usize = 32;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;
/// Tokens to generate.
const NEW: usize = 12;

struct Model {
    gpu: Gpu,
    /// The embeddings of tokens, then of positions.
    tables: [wgpu::Buffer; 2],
    stack: TransformerEncoder,
}

impl Model {
    fn new(gpu: Gpu) -> Result<Self, Error> {
        let mut state = 1u32;
        let mut random = |n: usize, around: f32, size: f32| {
            let next = |_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                around + size * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
            };
            gpu.upload(&(0..n).map(next).collect::<Vec<f32>>())
        };
        let tables = [random(VOCABULARY * WIDTH, 0.0, 0.5)?, random(ROOM * WIDTH, 0.0, 1.5)?];
        // Rows and columns of the matrices: query, key, value, output, and the two of the
        // feed-forward layer.
        let shapes = [[WIDTH; 2], [WIDTH; 2], [WIDTH; 2], [WIDTH; 2], [4 * WIDTH, WIDTH], [WIDTH, 4 * WIDTH]];
        let mut matrix =
            |[rows, columns]: [usize; 2]| Ok([random(rows * columns, 0.0, 0.3)?, random(rows, 0.0, 0.1)?]);
        let all = (0..LAYERS).map(|_| shapes.into_iter().map(&mut matrix).collect());
        let all = all.collect::<Result<Vec<Vec<[wgpu::Buffer; 2]>>, Error>>()?;
        let [scale, shift] = [random(WIDTH, 1.0, 0.1)?, random(WIDTH, 0.0, 0.1)?];

        let vector = |buffer, n| Some(TensorView::vector(buffer, DType::F32, n));
        let norm = NormWeights { weight: vector(&scale, WIDTH), bias: vector(&shift, WIDTH) };
        let layers: Vec<_> = all
            .iter()
            .map(|layer| {
                let linear = |n: usize| Linear {
                    weight: TensorView::matrix(&layer[n][0], DType::F32, shapes[n]),
                    bias: vector(&layer[n][1], shapes[n][0]),
                };
                let [query, key, value, out, up, down] = std::array::from_fn(linear);
                let attention =
                    MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None };
                let feed_forward = FeedForwardWeights { up, gate: None, down };
                EncoderLayerWeights { attention, feed_forward, norms: [norm; 2] }
            })
            .collect();
        let config = TransformerLayerConfig::new(MultiHeadConfig::new(WIDTH, HEADS), 4 * WIDTH)
            .activation(Activation::GeluTanh)
            .order(NormOrder::Pre);
        let stack = TransformerEncoder::with_pipelines(gpu.pipelines(), config, &layers, Some(norm))?;
        Ok(Model { gpu, tables, stack })
    }

    /// Generates the `NEW` likeliest tokens after each prompt. With a cache, each step computes
    /// only the new tokens; without one, all tokens.
    fn generate(&self, prompts: &[&[u32]], cached: bool) -> Result<Vec<Vec<u32>>, Error> {
        let Model { gpu, tables, stack } = self;
        let (pipelines, batch) = (gpu.pipelines(), prompts.len());
        let (embedding, projection) =
            (Embedding::with_pipelines(pipelines), Projection::with_pipelines(pipelines));
        let top = TopK::with_pipelines(pipelines);
        let config = CacheConfig::new(HEADS, WIDTH / HEADS, ROOM).batch(batch).layers(LAYERS);
        let mut cache = Cache::with_pipelines(pipelines, config)?;
        let mut scratch = Scratch::new(gpu.device(), ScratchSize::default())?;
        let [token_table, position_table] = [(0, VOCABULARY), (1, ROOM)]
            .map(|(n, rows)| TensorView::matrix(&tables[n], DType::F32, [rows, WIDTH]));

        // Pad on the left, so that all prompts end at the same row.
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
        let padding: Vec<usize> = prompts.iter().map(|prompt| longest - prompt.len()).collect();
        let padded = |(prompt, padding): (&&[u32], &usize)| [&vec![0; *padding], *prompt].concat();
        let mut texts: Vec<Vec<u32>> = prompts.iter().zip(&padding).map(padded).collect();

        for step in 0..NEW {
            let length = longest + step;
            let first = if cached && step > 0 { length - 1 } else { 0 };
            let rows = length - first;
            // The mask has an element for each slot of the cache, or for each row without a cache.
            let keys = if cached { ROOM } else { length };
            let seen: Vec<bool> =
                padding.iter().flat_map(|padding| (0..keys).map(move |key| key >= *padding)).collect();
            let ids: Vec<u32> = texts.iter().flat_map(|text| &text[first..]).copied().collect();
            // Positions count from a sequence's first token.
            let position = |padding: &usize| {
                (first..length).map(|row| row.saturating_sub(*padding) as u32).collect::<Vec<_>>()
            };
            let positions: Vec<u32> = padding.iter().flat_map(position).collect();

            let (seen, ids, positions) =
                (gpu.upload_bools(&seen)?, gpu.upload(&ids)?, gpu.upload(&positions)?);
            let [x, y] = [gpu.buffer(4 * batch * rows * WIDTH)?, gpu.buffer(4 * batch * rows * WIDTH)?];
            let [logits, chosen] = [gpu.buffer(4 * batch * VOCABULARY)?, gpu.buffer(4 * batch)?];
            let sequence =
                |buffer, rows, width| TensorView::sequence(buffer, DType::F32, [batch, rows, width]);
            let numbers = |buffer, rows| TensorView::sequence(buffer, DType::U32, [batch, rows, 1]);
            let (x, y) = (sequence(&x, rows, WIDTH), sequence(&y, rows, WIDTH));
            let (logits, tied) =
                (sequence(&logits, 1, VOCABULARY), Linear { weight: token_table, bias: None });
            let seen = TensorView::new(&seen, DType::Bool, [batch, 1, 1, keys]);
            gpu.submit(|encoder| {
                embedding.forward(encoder, &EmbeddingForward::new(numbers(&ids, rows), token_table, x))?;
                let at = EmbeddingForward::new(numbers(&positions, rows), position_table, x);
                embedding.forward(encoder, &at.accumulate(true))?;
                if cached {
                    cache.advance(encoder, Tokens::All(rows))?;
                }
                let call = EncoderForward::new(x, y).mask(DeviceMask::causal().key_padding_mask(seen));
                let call = call.cache(cached.then_some(&cache));
                scratch.ensure(gpu.device(), stack.scratch_size(&call)?)?;
                stack.forward(encoder, &call, &mut scratch)?;
                projection
                    .forward(encoder, &[ProjectionForward::new(y.slice(2, rows - 1, 1), tied, logits)])?;
                top.forward(encoder, &TopKForward::new(logits, numbers(&chosen, 1)))
            })?;
            let chosen: Vec<u32> = gpu.download(&chosen, batch)?;
            texts.iter_mut().zip(chosen).for_each(|(text, token)| text.push(token));
        }
        Ok(texts.iter().map(|text| text[longest..].to_vec()).collect())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::new(Gpu::new()?)?;
    println!("{}", model.gpu.device().adapter_info().name);
    let prompts: [&[u32]; 2] = [&[17, 4, 80, 33, 9, 62, 51], &[5, 71, 26]];
    let together = model.generate(&prompts, true)?;
    for (prompt, tokens) in prompts.iter().zip(&together) {
        println!("after {prompt:?}: {tokens:?}");
    }
    if model.generate(&prompts, false)? != together {
        return Err("without a cache other tokens come out".into());
    }
    for (prompt, tokens) in prompts.into_iter().zip(&together) {
        if model.generate(&[prompt], true)? != [tokens.clone()] {
            return Err(format!("alone, other tokens come out after {prompt:?}").into());
        }
    }
    println!("the same tokens without a cache, and for each prompt alone");
    Ok(())
}
