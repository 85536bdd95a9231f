use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{EncoderForward, MultiHeadConfig, NormOrder, TransformerLayerConfig};
use wgpu_attention::matmul::{Activation, ProjectionForward};
use wgpu_attention::position::{AddPositions, PositionTable, Positions, RowPositions};
use wgpu_attention::rows::{Embedding, EmbeddingForward};
use wgpu_attention::{Cache, Error, Gpu, Linear, Mask, Projection, Scratch, TensorView, TransformerEncoder};

/// The layers of GPT-2. Their stack ends with a norm: `final_norm` of `TransformerEncoder::new`.
pub fn layers(width: usize, heads: usize) -> TransformerLayerConfig {
    TransformerLayerConfig::new(MultiHeadConfig::new(width, heads), 4 * width)
        .activation(Activation::GeluTanh)
        .order(NormOrder::Pre)
}

pub struct Gpt2<'a> {
    pub gpu: Gpu,
    pub embedding: Embedding,
    pub positions: Positions,
    pub stack: TransformerEncoder,
    pub projection: Projection,
    /// The tables of tokens and of positions, `[1, 1, rows, width]`.
    pub tables: [TensorView<'a>; 2],
}

impl Gpt2<'_> {
    /// Runs the next rows of every sequence: a prompt or one token each. Writes the logits of the
    /// last row. `ids` is U32 `[batch, 1, rows, 1]`, `x` and `y` are `[batch, 1, rows, width]`,
    /// `logits` is `[batch, 1, 1, vocabulary]`.
    pub fn step(
        &self,
        cache: &mut Cache,
        scratch: &mut Scratch,
        ids: TensorView,
        [x, y]: [TensorView; 2],
        logits: TensorView,
    ) -> Result<(), Error> {
        let [_, _, rows, _] = ids.shape();
        let [tokens, learned] = self.tables;
        self.gpu.submit(|encoder| {
            self.embedding.forward(encoder, &EmbeddingForward::new(ids, tokens, x))?;
            cache.advance(encoder, Tokens::All(rows))?;
            let at = RowPositions::Tensor(cache.starts());
            self.positions.add(encoder, &AddPositions::new(x, PositionTable::Learned(learned), at))?;
            let call = EncoderForward::new(x, y).mask(Mask::causal()).cache(&*cache);
            scratch.ensure(self.gpu.device(), self.stack.scratch_size(&call)?)?;
            self.stack.forward(encoder, &call, scratch)?;
            let last = y.slice(2, rows - 1, 1);
            let tied = Linear { weight: tokens, bias: None };
            self.projection.forward(encoder, &[ProjectionForward::new(last, tied, logits)])
        })
    }
}
