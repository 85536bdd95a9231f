//! Ranks that are threads: every schedule and mask, forward and backward, against attention by the
//! reference; the same bits; failures.

mod bits;
mod failures;
mod problem;
mod results;
