//! How much of the product of cases, devices, layouts and types runs.
//!
//! A software driver compiles a kernel for as long as a second, one for matrix units for minutes,
//! and then runs it in a millisecond. So by default some minutes of tests run, which meet every
//! kernel, but not every option in every type, and the rest is left to `WGPU_ATTENTION_TEST_ALL`:
//!
//! - unset: no more than that; on a GPU, whose driver compiles fast, everything;
//! - `1`: everything;
//! - `3/8`, on a GPU too: with what runs by default on a software driver the third of eight shares of all else. CI takes one
//!   of 256, by the commit's hash.
//!
//! There are three kinds of what is left:
//!
//! - tests that take long (`in_turn!`): one in sixteen runs in a share, none by default;
//! - pieces of what is usual ([`due`]): one in eight by default, and another eighth in a share;
//! - pieces of the rest ([`rest`]): those of a share.
//!
//! All shares together are everything: what a test in turn leaves out is divided among the shares
//! that run the test.
//!
//! What is usual: every rule of a mask alone on every form of the fused kernel (`cpu`, `gpu`, those
//! for few queries of tensors and of caches, matrix units in fragments of 8 × 8) and on the staged
//! path; every set of rules that the tests of masks have in one form with many queries and in the
//! other with few; every vector of another library on both paths in both forms; every storage of a
//! cache in every layout, in one of the forms each; every size of everything. What the rest
//! adds: the other form, type, layout and device of each of these, fragments of 16 × 16 wherever
//! those of 8 × 8 are, kernels for matrix units that take minutes, further draws.

use std::cell::Cell;
use std::sync::LazyLock;

use super::random::Rng;

/// A test that takes long runs in one of so many shares.
const TURNS: u64 = 16;
/// Of what is usual one of so many parts runs by default.
const PARTS: u64 = 8;

/// A part of what is left.
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

    /// Whether a test that takes long is in it.
    pub fn holds_test(self, name: &str) -> bool {
        match self {
            Share::None => false,
            Share::All => true,
            Share::One(share, of) => {
                let turns = of.min(TURNS);
                (Rng::named(name).word() >> 48) % turns == (share - 1) % turns
            }
        }
    }

    /// Whether a part of the rest is, of a test that takes long or of another.
    pub fn holds(self, name: &str, in_turn: bool) -> bool {
        let hash = Rng::named(name).word();
        match self {
            Share::None => false,
            Share::All => true,
            Share::One(share, of) if in_turn => {
                let (nth, of) = Self::nth_of_turn(share, of);
                hash % of == nth % of
            }
            Share::One(share, of) => hash % of == share - 1,
        }
    }

    /// Whether a part of what is usual is.
    pub fn holds_usual(self, name: &str) -> bool {
        let hash = Rng::named(name).word() >> 32;
        match self {
            Share::None => hash.is_multiple_of(PARTS),
            Share::All => true,
            Share::One(share, of) => {
                let (nth, of) = Self::nth_of_turn(share, of);
                let of = of.min(PARTS);
                hash.is_multiple_of(PARTS) || hash % of == nth % of
            }
        }
    }

    /// Of the shares that run a test that takes long: which it is, and of how many.
    fn nth_of_turn(share: u64, of: u64) -> (u64, u64) {
        let turns = of.min(TURNS);
        ((share - 1) / turns, of / turns)
    }
}

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread runs a test that takes long.
    static IN_TURN: Cell<bool> = const { Cell::new(false) };
}

static SHARE: LazyLock<Share> = LazyLock::new(|| {
    let text = std::env::var("WGPU_ATTENTION_TEST_ALL").ok();
    Share::of(text.as_deref()).unwrap_or_else(|why| panic!("{why}"))
});

/// Whether a part of the rest runs this time; what has the same name does so together.
pub fn rest(name: &str) -> bool {
    counted(SHARE.holds(name, IN_TURN.get()))
}

/// Whether a part of what is usual runs this time; what shares kernels should have the same name.
pub fn due(name: &str) -> bool {
    counted(SHARE.holds_usual(name))
}

/// Whether a test, or a large part of one, runs that takes long on a software driver.
pub fn runs_in_turn(name: &str) -> bool {
    IN_TURN.set(true);
    counted(SHARE.holds_test(name))
}

fn counted(held: bool) -> bool {
    let runs = held || *SHARE == Share::None && !super::device::is_software();
    if !runs {
        LEFT.set(LEFT.get() + 1);
    }
    runs
}

/// How many parts this thread has left out since it last asked.
pub fn left() -> usize {
    LEFT.take()
}
