//! The reference's gradients, compared with other libraries' results and with differences, and at
//! the edges.

mod attention;
mod edges;
mod layers;
mod stages;
mod tolerance;
mod vectors;
