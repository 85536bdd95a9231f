//! Layers: multi-head attention, stacks of them as encoders and decoders, gated DeltaNet,
//! the attentional vector.

pub(crate) mod attentional;
pub(crate) mod decoder;
pub(crate) mod encoder;
#[cfg(feature = "linear-attention")]
pub(crate) mod gated_delta_net;
pub(crate) mod multi_head;
pub(crate) mod stack;

pub use attentional::{AttentionalBackward, AttentionalForward, AttentionalVector};
pub use decoder::{
    DecoderBackward, DecoderForward, DecoderLayerGradients, DecoderLayerWeights, TransformerDecoder,
};
pub use encoder::{
    EncoderBackward, EncoderForward, EncoderLayerGradients, EncoderLayerWeights, TransformerEncoder,
};
#[cfg(feature = "linear-attention")]
pub use gated_delta_net::{
    GatedDeltaNet, GatedDeltaNetBackward, GatedDeltaNetConfig, GatedDeltaNetForward, GatedDeltaNetState,
    GatedDeltaNetWeights,
};
pub use multi_head::config::{MultiHeadConfig, OutputGate};
pub use multi_head::{
    LinearGradients, MultiHeadAttention, MultiHeadBackward, MultiHeadForward, MultiHeadGradients,
    MultiHeadWeights,
};
pub use stack::config::{NormOrder, TransformerLayerConfig};
pub use stack::{DecoderMemory, FeedForwardGradients, FeedForwardWeights, LayerCall};
