//! The programs behind `scripts/`.

fn main() {}
