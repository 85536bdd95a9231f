//! The part of all cases, devices, layouts and types that a test run covers.
//!
//! A software driver compiles a kernel for up to a second, and one for matrix units for minutes.
//! The kernel then runs in a millisecond. So by default the tests run for some minutes. They cover
//! every kernel, but not every option in every type. `WGPU_ATTENTION_TEST_ALL` selects more:
//!
//! - unset: only the default; on a GPU, whose driver compiles fast, everything;
//! - `1`: everything;
//! - `3/8`, on a GPU too: the default of a software driver, and the third of eight shares of all
//!   else. CI runs one share of 512, chosen by the commit's hash.
//!
//! The default leaves out three kinds of runs:
//!
//! - tests that take long (`in_turn!`): a share runs one in 32, the default none;
//! - usual runs ([`due`]): the default runs one in eight, a share its part too;
//! - other runs ([`rest`]): a share runs its part.
//!
//! All shares together run everything. If a long test has usual or other runs, the shares that run
//! the test divide them.
//!
//! The usual runs are:
//!
//! - every rule of a mask alone on the staged path and on every variant of the fused kernel;
//! - every set of rules in the tests of masks, with many queries on one target and few on the
//!   other;
//! - every vector of another library on both paths and both targets;
//! - every storage of a cache in every layout, on one of the targets each;
//! - every size of everything.
//!
//! The other runs add the other target, type, layout and device of each of these. They also add
//! fragments of 16 × 16 to those of 8 × 8, slow kernels for matrix units, and further draws.

use std::cell::Cell;
use std::sync::LazyLock;

use super::random::Rng;

/// A test that takes long runs in one of this many shares.
const TURNS: u64 = 32;
/// By default one of this many parts of the usual runs is tested.
const PARTS: u64 = 8;

/// The part of the runs beyond the default that is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    None,
    All,
    /// This share, counted from 1, of a number of shares.
    One(u64, u64),
}

impl Share {
    /// Parses `WGPU_ATTENTION_TEST_ALL`.
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

    /// True if the share runs a test that takes long.
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

    /// True if the share holds one of the other runs, inside a test that takes long or not.
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

    /// True if the share holds one of the usual runs.
    pub fn holds_usual(self, name: &str) -> bool {
        let hash = Rng::named(name).word() >> 32;
        match self {
            Share::None => hash.is_multiple_of(PARTS),
            Share::All => true,
            Share::One(share, of) => {
                let (nth, of) = Self::nth_of_turn(share, of);
                hash.is_multiple_of(PARTS) || hash % of == nth % of
            }
        }
    }

    /// Returns the index of a share among the shares that run a long test, and their number.
    fn nth_of_turn(share: u64, of: u64) -> (u64, u64) {
        let turns = of.min(TURNS);
        ((share - 1) / turns, of / turns)
    }
}

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(0) };
    /// True if this thread runs a test that takes long.
    static IN_TURN: Cell<bool> = const { Cell::new(false) };
}

static SHARE: LazyLock<Share> = LazyLock::new(|| {
    let text = std::env::var("WGPU_ATTENTION_TEST_ALL").ok();
    Share::of(text.as_deref()).unwrap_or_else(|why| panic!("{why}"))
});

/// True if one of the other runs is tested this time. Runs with the same name run together.
pub fn rest(name: &str) -> bool {
    counted(SHARE.holds(name, IN_TURN.get()))
}

/// True if one of the usual runs is tested this time. Runs that share kernels should have the same
/// name.
pub fn due(name: &str) -> bool {
    counted(SHARE.holds_usual(name))
}

/// True if a test that takes long on a software driver, or a large part of one, runs this time.
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

/// Returns the number of runs that this thread has left out since the last call.
pub fn left() -> usize {
    LEFT.take()
}
