//! Tests of the bridge against Burn's own operations and against the reference.

mod attention;
mod caches;
mod devices;
mod gradients;
mod layer;
mod linear_attention;
mod support;
