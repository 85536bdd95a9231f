//! Tests with ranks that are threads. They compare every schedule and mask, forward and backward,
//! with the reference. They also check that results are reproducible and that errors are reported.

mod bits;
mod failures;
mod problem;
mod results;
