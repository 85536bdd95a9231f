//! Layers: multi-head attention, blocks, encoders and decoders, the attentional vector.

pub(crate) mod attentional;
pub(crate) mod block;
pub(crate) mod decoder;
pub(crate) mod encoder;
pub(crate) mod multi_head;

pub use attentional::{AttentionalBackward, AttentionalForward, AttentionalVector};
pub use block::config::{NormOrder, TransformerLayerConfig};
pub use block::{FeedForwardGradients, FeedForwardWeights, LayerCall};
pub use decoder::{
    DecoderBackward, DecoderForward, DecoderLayerGradients, DecoderLayerWeights, DecoderMemory,
    TransformerDecoder,
};
pub use encoder::{
    EncoderBackward, EncoderForward, EncoderLayerGradients, EncoderLayerWeights, TransformerEncoder,
};
pub use multi_head::config::{MultiHeadConfig, OutputGate};
pub use multi_head::{
    LinearGradients, MultiHeadAttention, MultiHeadBackward, MultiHeadForward, MultiHeadGradients,
    MultiHeadWeights,
};
