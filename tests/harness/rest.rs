//! How much of the product of cases, devices, layouts and types runs.
//!
//! A software driver compiles for as long as a second, where matrix units are asked for minutes, what it then runs in a
//! millisecond. So a test runs by itself what meets every value of every axis in as few kernels as that takes, and leaves
//! the rest of the product to `WGPU_ATTENTION_TEST_ALL`:
//!
//! - unset: no more; on a GPU, whose driver compiles fast, all;
//! - `1`: all;
//! - `3/8`: of the rest the third of eight shares; and of what is usual, where it takes long, a
//!   sixteenth, by the share's remainder of 16, and of the tests that take longest a quarter, by its
//!   remainder of 4. CI takes one of 64 by the commit's hash.
//!
//! What is usual: every rule of a mask alone on every form of the fused kernel (`cpu`, `gpu`, those for few queries of
//! tensors and of caches, matrix units in fragments of 8 × 8) and on the staged path; every set of rules that the tests of
//! masks have in one form with many queries and in the other with few; every vector of another library on both paths in
//! both forms; every storage of a cache in every layout, in one of the forms each; every size of everything. What the rest
//! adds: the other form, type, layout and device of each of these, fragments of 16 × 16 wherever those of 8 × 8 are,
//! kernels for matrix units that take minutes, further draws.

use std::cell::Cell;
use std::sync::LazyLock;

use super::random::Rng;

/// A part of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    None,
    All,
    /// This one, counted from 1, of so many.
    One(u64, u64),
}

impl Share {
    /// What `WGPU_ATTENTION_TEST_ALL` says.
    pub fn of(text: Option<&str>) -> Result<Self, String> {
        let Some(text) = text else { return Ok(Share::None) };
        if text == "1" {
            return Ok(Share::All);
        }
        let numbers = text.split_once('/').map(|(share, of)| (share.parse(), of.parse()));
        match numbers {
            Some((Ok(share), Ok(of))) if (1..=of).contains(&share) => Ok(Share::One(share, of)),
            _ => Err(format!("WGPU_ATTENTION_TEST_ALL is `{text}`, neither 1 nor a share as 3/8")),
        }
    }

    /// Whether a part of the rest is of it.
    pub fn holds(self, name: &str) -> bool {
        match self {
            Share::None => false,
            Share::All => true,
            Share::One(share, of) => Rng::named(name).word() % of == share - 1,
        }
    }

    /// Whether a test that takes long is.
    pub fn holds_test(self, name: &str) -> bool {
        match self {
            Share::None | Share::All => true,
            Share::One(share, _) => (Rng::named(name).word() >> 48) % 4 == share % 4,
        }
    }

    /// Whether a part of what is usual is.
    pub fn holds_usual(self, name: &str) -> bool {
        match self {
            Share::None | Share::All => true,
            Share::One(share, _) => (Rng::named(name).word() >> 32) % 16 == share % 16,
        }
    }
}

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

static SHARE: LazyLock<Share> = LazyLock::new(|| {
    let text = std::env::var("WGPU_ATTENTION_TEST_ALL").ok();
    Share::of(text.as_deref()).unwrap_or_else(|why| panic!("{why}"))
});

/// Whether a part of the rest runs this time; what has the same name does so together.
pub fn rest(name: &str) -> bool {
    counted(SHARE.holds(name))
}

/// Whether a part of what is usual runs this time; what shares kernels should have the same name.
pub fn due(name: &str) -> bool {
    counted(SHARE.holds_usual(name))
}

/// Whether a test that takes long on a software driver runs this time.
pub fn in_turn(name: &str) -> bool {
    counted(SHARE.holds_test(name))
}

fn counted(held: bool) -> bool {
    let runs = held || !super::device::is_software();
    if !runs {
        LEFT.set(LEFT.get() + 1);
    }
    runs
}

/// Whether what is usual does not all run.
pub fn is_share() -> bool {
    matches!(*SHARE, Share::One(..))
}

/// How many parts this thread has left out since it last asked.
pub fn left() -> usize {
    LEFT.take()
}
