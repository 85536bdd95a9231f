//! Which of several candidates is the fastest, by times that are not exact.

/// Rounds in which all that are left are timed.
const ROUNDS: usize = 15;
/// Fewer are no evidence.
const LEAST_ROUNDS: usize = 5;
/// How much slower than the best a candidate may be, by its first time, to be timed again.
const HOPELESS: f64 = 1.5;
/// Rounds of the first and the winner alone: among many that are timed, the luckiest is not the
/// fastest.
const LAST_ROUNDS: usize = 9;
/// How much faster than the first a winner is, and in which share of the rounds it is faster at
/// all.
const MARGIN: f64 = 0.05;
const SHARE: f64 = 0.75;

/// How it came out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Standing {
    pub winner: usize,
    /// Medians of the first and of the winner; the winner's twice where the first failed.
    pub first: f64,
    pub best: f64,
    /// How many were timed.
    pub timed: usize,
}

/// What times candidates. No closure, whose futures would not be known to be `Send`.
pub(super) trait Race {
    /// Whether time is up.
    fn is_late(&self) -> bool;

    /// Seconds of a candidate; nothing where it fails.
    async fn time(&mut self, n: usize) -> Option<f64>;
}

/// Times candidates `0..count`, of which the first is the one to beat. A candidate that fails is
/// out. Once `is_late`, no candidate is begun, and only the first and the best so far go on.
/// Nothing if all failed.
///
/// The first of the times of each is for what happens once: it is not counted. Who is ahead in the
/// end meets the first once more.
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
        // Whoever comes first in a round meets another machine than who comes last.
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

/// The winner by the times of those that are left, in which the rounds agree.
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

    /// Competitions of times that are there at once.
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

    /// Of twelve that are all the same, the first stays, whatever the noise: 10 % of it, and one
    /// time in ten twice as long.
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
    fn who_fails_is_out() {
        // At once, at the second time, and in the third round.
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
        // The first too.
        let standing = run(3, || false, |n| (n == 2).then_some(1.0)).expect("times");
        assert_eq!((standing.winner, standing.first, standing.best), (2, 1.0, 1.0));
        assert_eq!(run(3, || false, |_| None), None);
        assert_eq!(run(0, || false, |_| Some(1.0)), None);
    }

    #[test]
    fn what_happens_once_does_not_count() {
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

    /// Late at once, only the first is begun; late after three candidates, the others never are;
    /// and rounds end.
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
