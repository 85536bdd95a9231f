//! Layers: multi-head attention, blocks, encoders and decoders, the attentional vector.

pub(crate) mod attentional;
pub(crate) mod block;
pub(crate) mod decoder;
pub(crate) mod encoder;
pub(crate) mod multi_head;
