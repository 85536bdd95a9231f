//! The kinds of attention, each called as in an application.

use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearConfig, LinearForward, RandomFeatures, random_features,
};
use wgpu_attention::linformer::{Linformer, LinformerForward};
use wgpu_attention::lsh::{LshAttention, LshConfig, LshForward};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::rows::{MeanPool, MeanPoolForward, PoolMask};
use wgpu_attention::selected::{
    Indexer, IndexerForward, NativeSparseAttention, NativeSparseConfig, NativeSparseForward,
    SelectedAttention, SelectedConfig, SelectedForward,
};
use wgpu_attention::{
    Attention, Config, DType, Error, Forward, Gpu, Mask, Scratch, ScratchSize, TensorView, wgpu,
};

use crate::data::{DIM, Rng, Sequence};

/// Keys on each side of a query.
const WINDOW: usize = 128;
/// The number of keys after Linformer's projection.
const RANK: usize = 256;
/// Random directions of Performer.
const DIRECTIONS: usize = 256;
const ROUNDS: usize = 4;
const CHUNK: usize = 64;
/// Keys that a query selects, channels of the indexer, and keys of a block.
const SELECTED: usize = 512;
const INDEX_DIM: usize = 16;
const BLOCK: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Full,
    FullCausal,
    Window,
    Linformer,
    Performer,
    Linear,
    LinearCausal,
    Lsh,
    Additive,
    Selected,
    SelectedBlocks,
    Native,
}

impl Kind {
    pub const ALL: [Kind; 12] = [
        Kind::Full,
        Kind::FullCausal,
        Kind::Additive,
        Kind::Window,
        Kind::Selected,
        Kind::SelectedBlocks,
        Kind::Native,
        Kind::Lsh,
        Kind::Linformer,
        Kind::Performer,
        Kind::Linear,
        Kind::LinearCausal,
    ];

    pub fn name(self) -> String {
        match self {
            Kind::Full => "full (softmax)".into(),
            Kind::FullCausal => "full, causal".into(),
            Kind::Window => format!("window of {}", 2 * WINDOW + 1),
            Kind::Linformer => format!("Linformer, rank {RANK}"),
            Kind::Performer => format!("Performer, {DIRECTIONS} features"),
            Kind::Linear => "linear, elu + 1".into(),
            Kind::LinearCausal => "linear, causal".into(),
            Kind::Lsh => format!("LSH, {ROUNDS} rounds"),
            Kind::Additive => "additive".into(),
            Kind::Selected => format!("{SELECTED} selected keys"),
            Kind::Native => "native sparse, causal".into(),
            Kind::SelectedBlocks => format!("{} selected blocks of {BLOCK}", SELECTED / BLOCK),
        }
    }

    /// True if the kind approximates attention to all keys, so that it has an error.
    pub fn approximates(self) -> bool {
        matches!(
            self,
            Kind::Window
                | Kind::Lsh
                | Kind::Linformer
                | Kind::Performer
                | Kind::Selected
                | Kind::SelectedBlocks
        )
    }
}

/// A sequence on the device, and a buffer for results.
pub struct Tensors {
    pub length: usize,
    qk: wgpu::Buffer,
    v: wgpu::Buffer,
    out: wgpu::Buffer,
}

impl Tensors {
    pub fn new(gpu: &Gpu, length: usize, seed: u64) -> Result<Self, Error> {
        let Sequence { qk, v } = Sequence::new(length, seed);
        Ok(Tensors { length, qk: gpu.upload(&qk)?, v: gpu.upload(&v)?, out: gpu.buffer(4 * v.len())? })
    }

    pub fn result(&self, gpu: &Gpu) -> Result<Vec<f32>, Error> {
        gpu.download(&self.out, self.length * DIM)
    }

    fn view<'a>(&self, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        TensorView::new(buffer, DType::F32, [1, 1, self.length, DIM])
    }
}

/// A compiled kind of attention, with its scratch memory.
pub struct Ready {
    operator: Operator,
    scratch: Scratch,
}

enum Operator {
    Attention(Attention, Box<DeviceMask<'static>>),
    Additive(AdditiveAttention, wgpu::Buffer),
    Linear(LinearAttention, Option<wgpu::Buffer>),
    Linformer(Linformer, wgpu::Buffer),
    Lsh { attention: LshAttention, rotations: Option<wgpu::Buffer>, buckets: wgpu::Buffer },
    Selected(Box<Selected>),
    Native(Box<NativeSparseAttention>, wgpu::Buffer),
}

impl Ready {
    pub fn new(gpu: &Gpu, kind: Kind, tensors: &Tensors, seed: u64) -> Result<Self, Error> {
        let pipelines = gpu.pipelines();
        let length = tensors.length;
        let mut rng = Rng(seed ^ 0xA77E);
        let operator = match kind {
            Kind::Full | Kind::FullCausal | Kind::Window => {
                let mask = match kind {
                    Kind::Window => Mask::none().window(WINDOW, WINDOW),
                    Kind::FullCausal => Mask::causal(),
                    _ => Mask::none(),
                };
                Operator::Attention(Attention::with_pipelines(pipelines, Config::new(1, DIM))?, mask.into())
            }
            Kind::Additive => {
                let vector: Vec<f32> = (0..DIM).map(|_| rng.normal()).collect();
                let attention = AdditiveAttention::with_pipelines(pipelines, AdditiveConfig::new(1, DIM))?;
                Operator::Additive(attention, gpu.upload(&vector)?)
            }
            Kind::Linear | Kind::LinearCausal => {
                let config = LinearConfig::new(1, DIM).causal(kind == Kind::LinearCausal);
                Operator::Linear(LinearAttention::with_pipelines(pipelines, config)?, None)
            }
            Kind::Performer => {
                let map = FeatureMap::Random { kind: RandomFeatures::Positive, directions: DIRECTIONS };
                let config = LinearConfig::new(1, DIM).feature_map(map);
                let directions = gpu.upload(&random_features(seed, DIRECTIONS, DIM)?)?;
                Operator::Linear(LinearAttention::with_pipelines(pipelines, config)?, Some(directions))
            }
            Kind::Linformer => {
                let linformer = Linformer::with_pipelines(pipelines, Config::new(1, DIM), RANK.min(length))?;
                Operator::Linformer(linformer, gpu.upload(&means(RANK.min(length), length))?)
            }
            Kind::Selected | Kind::SelectedBlocks => {
                let block = if kind == Kind::Selected { 1 } else { BLOCK };
                Operator::Selected(Selected::new(gpu, block, length)?.into())
            }
            Kind::Native => {
                let config = NativeSparseConfig::new(Config::new(1, DIM));
                let attention = NativeSparseAttention::with_pipelines(pipelines, config)?;
                Operator::Native(attention.into(), gpu.upload(&vec![1f32 / 3.0; 3 * length])?)
            }
            Kind::Lsh => {
                let config = lsh(length, ROUNDS, CHUNK);
                let rotations = gpu.upload(&config.rotations(seed))?;
                Operator::lsh(gpu, config, Some(rotations), length)?
            }
        };
        Self::with(gpu, operator, tensors)
    }

    /// The exact attention that `kind` approximates.
    pub fn exact(gpu: &Gpu, kind: Kind, tensors: &Tensors, seed: u64) -> Result<Self, Error> {
        if kind != Kind::Lsh {
            return Self::new(gpu, Kind::Full, tensors, seed);
        }
        // Put all tokens in one bucket and one chunk.
        let length = tensors.length;
        let operator = Operator::lsh(gpu, lsh(length, 1, length), None, length)?;
        Self::with(gpu, operator, tensors)
    }

    fn with(gpu: &Gpu, operator: Operator, tensors: &Tensors) -> Result<Self, Error> {
        let scratch = Scratch::new(gpu.device(), operator.scratch_size(tensors)?)?;
        Ok(Ready { operator, scratch })
    }

    /// Bytes of temporary memory.
    pub fn bytes(&self) -> u64 {
        self.scratch.size().total()
    }

    pub fn record(&mut self, encoder: &mut wgpu::CommandEncoder, tensors: &Tensors) -> Result<(), Error> {
        let scratch = &mut self.scratch;
        match &self.operator {
            Operator::Attention(attention, mask) => {
                attention.forward(encoder, &plain(tensors, **mask), scratch)
            }
            Operator::Additive(attention, vector) => {
                attention.forward(encoder, &additive(tensors, vector), scratch)
            }
            Operator::Linear(attention, directions) => {
                attention.forward(encoder, &linear(tensors, directions), scratch)
            }
            Operator::Linformer(attention, means) => {
                attention.forward(encoder, &low_rank(tensors, means), scratch)
            }
            Operator::Lsh { attention, rotations, buckets } => {
                let call = hashed(tensors, rotations.as_ref(), buckets);
                attention.forward(encoder, &call, scratch)
            }
            Operator::Selected(selected) => selected.record(encoder, tensors, scratch),
            Operator::Native(attention, gates) => {
                attention.forward(encoder, &native(tensors, gates), scratch)
            }
        }
    }
}

impl Operator {
    fn lsh(
        gpu: &Gpu,
        config: LshConfig,
        rotations: Option<wgpu::Buffer>,
        length: usize,
    ) -> Result<Self, Error> {
        let attention = LshAttention::with_pipelines(gpu.pipelines(), config)?;
        let rounds = if rotations.is_some() { ROUNDS } else { 1 };
        let buckets = gpu.upload(&vec![0u32; rounds * length])?;
        Ok(Operator::Lsh { attention, rotations, buckets })
    }

    fn scratch_size(&self, tensors: &Tensors) -> Result<ScratchSize, Error> {
        match self {
            Operator::Attention(attention, mask) => attention.scratch_size(&plain(tensors, **mask)),
            Operator::Additive(attention, vector) => attention.scratch_size(&additive(tensors, vector)),
            Operator::Linear(attention, directions) => attention.scratch_size(&linear(tensors, directions)),
            Operator::Linformer(attention, means) => attention.scratch_size(&low_rank(tensors, means)),
            Operator::Lsh { attention, rotations, buckets } => {
                attention.scratch_size(&hashed(tensors, rotations.as_ref(), buckets))
            }
            Operator::Selected(selected) => selected.scratch_size(tensors),
            Operator::Native(attention, gates) => attention.scratch_size(&native(tensors, gates)),
        }
    }
}

/// An indexer that selects keys by their first channels, or blocks by the mean of their keys.
struct Selected {
    indexer: Indexer,
    attention: SelectedAttention,
    pool: MeanPool,
    block: usize,
    count: usize,
    /// The weight of the indexer's head for each query, and the length of each block.
    ones: wgpu::Buffer,
    lengths: wgpu::Buffer,
    means: wgpu::Buffer,
    indices: wgpu::Buffer,
}

impl Selected {
    fn new(gpu: &Gpu, block: usize, length: usize) -> Result<Self, Error> {
        let pipelines = gpu.pipelines();
        let blocks = length.div_ceil(block);
        let count = (SELECTED / block).min(blocks);
        let config = SelectedConfig::new(Config::new(1, DIM)).block(block);
        Ok(Selected {
            indexer: Indexer::with_pipelines(pipelines),
            attention: SelectedAttention::with_pipelines(pipelines, config)?,
            pool: MeanPool::with_pipelines(pipelines),
            block,
            count,
            ones: gpu.upload(&vec![1f32; length])?,
            lengths: gpu.upload(&vec![block as u32; blocks])?,
            means: gpu.buffer(4 * blocks * DIM)?,
            indices: gpu.buffer(4 * length * count)?,
        })
    }

    /// The means of the blocks' keys, `[blocks, 1, 1, DIM]`.
    fn means(&self, length: usize) -> TensorView<'_> {
        TensorView::new(&self.means, DType::F32, [length / self.block, 1, 1, DIM])
    }

    fn select<'a>(&'a self, tensors: &'a Tensors) -> IndexerForward<'a> {
        let (length, q) = (tensors.length, tensors.view(&tensors.qk));
        let blocks = length / self.block;
        let (q, k) = if self.block == 1 {
            let few = q.slice(3, 0, INDEX_DIM);
            (few, few)
        } else {
            (q, TensorView::new(&self.means, DType::F32, [1, 1, blocks, DIM]))
        };
        let w = TensorView::new(&self.ones, DType::F32, [1, 1, length, 1]);
        IndexerForward::new(q, k, w).indices(self.indices(length))
    }

    fn indices(&self, length: usize) -> TensorView<'_> {
        TensorView::new(&self.indices, DType::U32, [1, 1, length, self.count])
    }

    fn attend<'a>(&'a self, tensors: &'a Tensors) -> SelectedForward<'a> {
        SelectedForward::new(plain(tensors, DeviceMask::none()), self.indices(tensors.length))
    }

    fn scratch_size(&self, tensors: &Tensors) -> Result<ScratchSize, Error> {
        let size = self.indexer.scratch_size(&self.select(tensors))?;
        Ok(size.max(self.attention.scratch_size(&self.attend(tensors))?))
    }

    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        tensors: &Tensors,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        if self.block > 1 {
            let blocks = tensors.length / self.block;
            let keys = TensorView::new(&tensors.qk, DType::F32, [blocks, 1, self.block, DIM]);
            let lengths = TensorView::new(&self.lengths, DType::U32, [blocks, 1, 1, 1]);
            let call = MeanPoolForward::new(keys, PoolMask::Lengths(lengths), self.means(tensors.length));
            self.pool.forward(encoder, &call)?;
        }
        self.indexer.forward(encoder, &self.select(tensors), scratch)?;
        self.attention.forward(encoder, &self.attend(tensors), scratch)
    }
}

/// Native sparse attention with the paper's numbers, and the mean of its branches.
fn native<'a>(tensors: &'a Tensors, gates: &'a wgpu::Buffer) -> NativeSparseForward<'a> {
    let [qk, v, out] = [&tensors.qk, &tensors.v, &tensors.out].map(|buffer| tensors.view(buffer));
    let gates = TensorView::new(gates, DType::F32, [1, 1, tensors.length, 3]);
    NativeSparseForward::new(qk, qk, v, gates, out)
}

fn plain<'a>(tensors: &'a Tensors, mask: DeviceMask<'a>) -> Forward<'a> {
    let [qk, v, out] = [&tensors.qk, &tensors.v, &tensors.out].map(|buffer| tensors.view(buffer));
    Forward::new(qk, qk, v, out).mask(mask)
}

fn additive<'a>(tensors: &'a Tensors, vector: &'a wgpu::Buffer) -> AdditiveForward<'a> {
    let [qk, v, out] = [&tensors.qk, &tensors.v, &tensors.out].map(|buffer| tensors.view(buffer));
    AdditiveForward::new(qk, qk, v, TensorView::vector(vector, DType::F32, DIM), out)
}

fn linear<'a>(tensors: &'a Tensors, directions: &'a Option<wgpu::Buffer>) -> LinearForward<'a> {
    let [qk, v, out] = [&tensors.qk, &tensors.v, &tensors.out].map(|buffer| tensors.view(buffer));
    let matrix = |buffer| TensorView::matrix(buffer, DType::F32, [DIRECTIONS, DIM]);
    LinearForward::new(qk, qk, v, out).directions(directions.as_ref().map(matrix))
}

fn low_rank<'a>(tensors: &'a Tensors, means: &'a wgpu::Buffer) -> LinformerForward<'a> {
    let [qk, v, out] = [&tensors.qk, &tensors.v, &tensors.out].map(|buffer| tensors.view(buffer));
    let rank = RANK.min(tensors.length);
    LinformerForward::new(qk, qk, v, TensorView::matrix(means, DType::F32, [rank, tensors.length]), out)
}

fn hashed<'a>(
    tensors: &'a Tensors,
    rotations: Option<&'a wgpu::Buffer>,
    buckets: &'a wgpu::Buffer,
) -> LshForward<'a> {
    let [qk, v, out] = [&tensors.qk, &tensors.v, &tensors.out].map(|buffer| tensors.view(buffer));
    let to = |rounds| TensorView::new(buckets, DType::U32, [1, 1, rounds, tensors.length]);
    match rotations {
        Some(rotations) => {
            let shape = [1, ROUNDS, DIM, n_buckets(tensors.length) / 2];
            LshForward::new(qk, v, TensorView::new(rotations, DType::F32, shape), to(ROUNDS), out)
        }
        None => LshForward::with_buckets(qk, v, to(1), out),
    }
}

/// The number of buckets, for about two chunks of tokens in each.
fn n_buckets(length: usize) -> usize {
    (length / (4 * CHUNK)).max(1) * 2
}

fn lsh(length: usize, rounds: usize, chunk: usize) -> LshConfig {
    // LSH normalises keys: this scale gives scores like those of the other kinds.
    LshConfig::new(1, DIM, rounds, n_buckets(length), chunk)
        .scale(crate::data::LENGTH_OF_KEYS / (DIM as f64).sqrt())
}

/// The matrices E and F: each row takes the mean of neighbouring tokens.
fn means(rank: usize, length: usize) -> Vec<f32> {
    let mut matrix = vec![0.0; rank * length];
    for j in 0..length {
        let row = j * rank / length;
        let (first, past) = ((row * length).div_ceil(rank), ((row + 1) * length).div_ceil(rank));
        matrix[row * length + j] = 1.0 / (past - first) as f32;
    }
    matrix
}
