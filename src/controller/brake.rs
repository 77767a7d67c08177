//! A wrong kubeconfig, or a restore that is not complete, must not cancel a company's work. Pure.

use std::time::{Duration, Instant};

/// Up to so many live rows, any number may be orphans: few resources are soon deleted all at once.
const MANY: usize = 100;

/// Holds up a sweep that would end more than half of many live rows.
#[derive(Debug)]
pub(super) struct Brake {
    wait: Duration,
    /// Since when there are too many orphans.
    since: Option<Instant>,
}

/// What a sweep may do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Go,
    /// Nothing yet; `first` at the first look of a wait, of which this is left.
    Hold {
        first: bool,
        left: Duration,
    },
}

impl Brake {
    /// `wait` is how long a sweep is held up, by the process's monotonic clock.
    pub(super) fn new(wait: Duration) -> Self {
        Self { wait, since: None }
    }

    /// Of so many live rows, so many have no resource. The wait begins anew when it was less bad in between.
    pub(super) fn judge(&mut self, live: usize, orphans: usize, now: Instant) -> Verdict {
        if live <= MANY || orphans <= live / 2 {
            self.since = None;
            return Verdict::Go;
        }
        let first = self.since.is_none();
        let since = *self.since.get_or_insert(now);
        match self.wait.checked_sub(now.saturating_duration_since(since)) {
            None | Some(Duration::ZERO) => Verdict::Go,
            Some(left) => Verdict::Hold { first, left },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn more_than_half_of_more_than_a_hundred_waits() {
        let now = Instant::now();
        let held = |live, orphans| Brake::new(MINUTE).judge(live, orphans, now) != Verdict::Go;
        for (live, orphans) in [(0, 0), (100, 100), (101, 50), (102, 51), (10_000, 5000)] {
            assert!(!held(live, orphans), "{orphans} of {live}");
        }
        for (live, orphans) in [(101, 51), (101, 101), (102, 52), (10_000, 5001)] {
            assert!(held(live, orphans), "{orphans} of {live}");
        }
    }

    #[test]
    fn the_wait_is_over_after_its_time_and_begins_anew_after_a_better_look() {
        let start = Instant::now();
        let mut brake = Brake::new(10 * MINUTE);
        assert_eq!(brake.judge(200, 200, start), Verdict::Hold { first: true, left: 10 * MINUTE });
        assert_eq!(brake.judge(200, 199, start + 9 * MINUTE), Verdict::Hold { first: false, left: MINUTE });
        assert_eq!(brake.judge(200, 200, start + 10 * MINUTE), Verdict::Go);
        assert_eq!(brake.judge(150, 150, start + 11 * MINUTE), Verdict::Go, "what is left of them needs no other wait");
        assert_eq!(brake.judge(150, 10, start + 12 * MINUTE), Verdict::Go);
        assert_eq!(brake.judge(200, 200, start + 13 * MINUTE), Verdict::Hold { first: true, left: 10 * MINUTE });
    }
}
