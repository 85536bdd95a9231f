//! The reference's gradients: against other people's numbers, against differences, and at the
//! edges.

mod attention;
mod edges;
mod layers;
mod stages;
mod tolerance;
mod vectors;
