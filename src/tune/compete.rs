//! Finds the fastest of several candidates, from times with noise.

/// Rounds in which all remaining candidates are timed.
const ROUNDS: usize = 15;
/// The fewest rounds that are evidence.
const LEAST_ROUNDS: usize = 5;
/// A candidate whose first time is longer than the best one by this factor is not timed again.
const HOPELESS: f64 = 1.5;
/// Rounds with only the first candidate and the winner. Among many candidates, the best time may be
/// luck.
const LAST_ROUNDS: usize = 9;
/// A winner must be faster than the first by this margin, and faster in this share of the rounds.
const MARGIN: f64 = 0.05;
const SHARE: f64 = 0.75;

/// The result of a competition.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Standing {
    pub winner: usize,
    /// Medians of the first candidate and of the winner. If the first failed, both are the
    /// winner's.
    pub first: f64,
    pub best: f64,
    /// The number of candidates that were timed.
    pub timed: usize,
}

/// Times candidates. It is no closure, because a closure's futures would not be known to be `Send`.
pub(super) trait Race {
    /// True if the time is up.
    fn is_late(&self) -> bool;

    /// Returns the seconds of a candidate, or `None` if it fails.
    async fn time(&mut self, n: usize) -> Option<f64>;
}

/// Times candidates `0..count`. The first is the one to beat. A candidate that fails drops out.
/// Once `is_late` is true, no candidate is started, and only the first and the current best go on.
/// Returns `None` if all fail.
///
/// The first time of each candidate includes one-time work and does not count. At the end the
/// leader competes with the first again.
pub(super) async fn compete(count: usize, race: &mut impl Race) -> Option<Standing> {
    let mut left: Vec<(usize, Vec<f64>)> = Vec::new();
    for n in 0..count {
        if n > 0 && race.is_late() {
            break;
        }
        if race.time(n).await.is_some()
            && let Some(first) = race.time(n).await
        {
            left.push((n, vec![first]));
        }
    }
    let timed = left.len();
    let first_time = |entry: &(usize, Vec<f64>)| entry.1.first().copied().unwrap_or(f64::INFINITY);
    let best = left.iter().map(first_time).fold(f64::INFINITY, f64::min);
    left.retain(|entry| entry.0 == 0 || first_time(entry) <= HOPELESS * best);
    for round in 0..ROUNDS {
        if race.is_late() {
            let fastest =
                left.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1))).map(|entry| entry.0);
            left.retain(|entry| entry.0 == 0 || Some(entry.0) == fastest);
            if round >= LEAST_ROUNDS || left.len() == 1 {
                break;
            }
        }
        let mut failed = Vec::new();
        // The order changes each round, because the first in a round meets other conditions than
        // the last.
        let (turn, all) = (round, left.len());
        for at in (0..all).map(|at| (at + turn) % all) {
            let (n, times) = &mut left[at];
            match race.time(*n).await {
                Some(seconds) => times.push(seconds),
                None => failed.push(*n),
            }
        }
        left.retain(|entry| !failed.contains(&entry.0));
    }
    let standing = decide(&left, timed)?;
    let challenger = standing.winner;
    left.retain(|entry| entry.0 == 0 || entry.0 == challenger);
    if challenger == 0 || left.len() < 2 {
        return Some(standing);
    }
    left.iter_mut().for_each(|entry| entry.1.clear());
    for round in 0..LAST_ROUNDS {
        for at in [round % 2, (round + 1) % 2] {
            let (n, times) = &mut left[at];
            match race.time(*n).await {
                Some(seconds) => times.push(seconds),
                None => times.push(f64::INFINITY),
            }
        }
    }
    decide(&left, timed)
}

/// Returns the winner, from the times of the remaining candidates. Most rounds must agree.
fn decide(left: &[(usize, Vec<f64>)], timed: usize) -> Option<Standing> {
    let (fastest, times) = left.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)))?;
    let best = median(times);
    let Some((_, to_beat)) = left.iter().find(|(n, _)| *n == 0) else {
        return Some(Standing { winner: *fastest, first: best, best, timed });
    };
    let first = median(to_beat);
    let won = times.iter().zip(to_beat).filter(|(a, b)| a < b).count();
    let clear = best <= (1.0 - MARGIN) * first && won as f64 >= SHARE * times.len() as f64;
    if clear {
        Some(Standing { winner: *fastest, first, best, timed })
    } else {
        Some(Standing { winner: 0, first, best: first, timed })
    }
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::task::{Context, Poll, Waker};

    struct Ready<L, T>(L, T);

    impl<L: Fn() -> bool, T: FnMut(usize) -> Option<f64>> Race for Ready<L, T> {
        fn is_late(&self) -> bool {
            self.0()
        }

        async fn time(&mut self, n: usize) -> Option<f64> {
            self.1(n)
        }
    }

    /// Runs a competition with times that are known at once.
    fn run(
        count: usize,
        is_late: impl Fn() -> bool,
        time: impl FnMut(usize) -> Option<f64>,
    ) -> Option<Standing> {
        let mut race = Ready(is_late, time);
        let competition = std::pin::pin!(compete(count, &mut race));
        match competition.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(standing) => standing,
            Poll::Pending => unreachable!("nothing waits"),
        }
    }

    /// Noise in [0, 1).
    fn noise() -> impl FnMut() -> f64 {
        let mut state = 1u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    #[test]
    fn the_fastest_wins() {
        let mut noise = noise();
        for winner in 0..4 {
            let standing =
                run(4, || false, |n| Some(1.0 + 0.03 * noise() - if n == winner { 0.2 } else { 0.0 }));
            assert_eq!(standing.expect("times").winner, winner);
        }
    }

    /// Among twelve equal candidates the first stays, whatever the noise. The noise is 10 %, and
    /// one time in ten is doubled.
    #[test]
    fn noise_flips_nothing() {
        let mut noise = noise();
        let mut kept = 0;
        for _ in 0..200 {
            let mut time = |_| Some((1.0 + 0.1 * noise()) * if noise() < 0.1 { 2.0 } else { 1.0 });
            kept += usize::from(run(12, || false, &mut time).expect("times").winner == 0);
        }
        assert!(kept >= 198, "{kept} of 200");
    }

    #[test]
    fn failing_plans_are_dropped() {
        // Fails at once, at the second time, and in the third round.
        for survived in [0, 1, 4] {
            let times = Cell::new(0);
            let standing = run(
                3,
                || false,
                |n| {
                    times.set(times.get() + usize::from(n == 1));
                    if n == 1 { (times.get() <= survived).then_some(0.7) } else { Some(1.0 - 0.1 * n as f64) }
                },
            );
            let standing = standing.expect("times");
            assert_eq!((standing.winner, standing.timed), (2, if survived > 1 { 3 } else { 2 }));
        }
        // The first candidate fails too.
        let standing = run(3, || false, |n| (n == 2).then_some(1.0)).expect("times");
        assert_eq!((standing.winner, standing.first, standing.best), (2, 1.0, 1.0));
        assert_eq!(run(3, || false, |_| None), None);
        assert_eq!(run(0, || false, |_| Some(1.0)), None);
    }

    #[test]
    fn single_outliers_are_ignored() {
        let seen = RefCell::new([0; 2]);
        let standing = run(
            2,
            || false,
            |n| {
                seen.borrow_mut()[n] += 1;
                Some(if n == 1 && seen.borrow()[n] == 1 { 100.0 } else { 1.0 - 0.2 * n as f64 })
            },
        );
        assert_eq!(standing.expect("times").winner, 1);
    }

    /// If it is late at once, only the first candidate starts. If it is late after three
    /// candidates, the others never start. Rounds end too.
    #[test]
    fn time_is_bounded() {
        let count = Cell::new(0);
        let mut time = |n| {
            count.set(count.get() + 1);
            Some(1.0 - 0.1 * n as f64)
        };
        let standing = run(9, || true, &mut time).expect("times");
        assert_eq!((standing.winner, standing.timed, count.replace(0)), (0, 1, 2));
        let begun = Cell::new(0);
        let late = || {
            begun.set(begun.get() + 1);
            begun.get() > 2
        };
        let standing = run(9, late, &mut time).expect("times");
        assert_eq!((standing.winner, standing.timed), (2, 3));
        assert_eq!(count.get(), 2 * 3 + 2 * LEAST_ROUNDS + 2 * LAST_ROUNDS);
    }
}
