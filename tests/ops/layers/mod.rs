//! Layers and stacks.

pub mod attentional;
pub mod gated_delta_net;
pub mod layer_backward;
pub mod layer_rotary;
pub mod mha;
pub mod output_gate;
pub mod qk_norm;
pub mod stacks;
