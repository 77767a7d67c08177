//! When to look where jobs are. A survey costs a descent of the index for each lane, so there is a pause after each that
//! is a multiple of what it took; it is needed when something may be due that no claim would find. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// The most lanes of each kind that one statement of a survey returns.
pub(super) const PER_KIND: usize = 500;
/// A pause is at least so many times what the survey took.
const PAUSE: u32 = 5;
/// And at least this while jobs are being claimed anyway.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// While a worker is busy it looks this often, unasked, for what other namespaces and priorities have.
const BUSY: Duration = Duration::from_millis(250);

/// The rounds of surveys; one round sees every lane.
#[derive(Debug)]
pub(super) struct Surveys {
    poll: Duration,
    /// A statement of it is on its way.
    pub under_way: bool,
    /// Something may be due that the last round did not see.
    wanted: bool,
    /// The last round is over.
    complete: bool,
    /// How long the round has taken so far.
    took: Duration,
    ended: Option<Instant>,
    /// Jobs were claimed since the last round began.
    claimed: bool,
    /// The regular pause after this round; drawn anew, so that workers don't stay in step.
    regular: Duration,
}

impl Surveys {
    pub(super) fn new(poll: Duration) -> Self {
        let (wanted, complete, claimed) = (true, true, false);
        Self {
            poll,
            under_way: false,
            wanted,
            complete,
            took: Duration::ZERO,
            ended: None,
            claimed,
            regular: Duration::ZERO,
        }
    }

    /// When the next one is due; none while one is under way.
    pub(super) fn next(&self, now: Instant, busy: bool) -> Option<Instant> {
        if self.under_way {
            return None;
        }
        let Some(ended) = self.ended.filter(|_| self.complete) else { return Some(now) };
        let least = (self.took * PAUSE).max(if busy { BUSY_PAUSE } else { Duration::ZERO });
        let regular = if busy { self.regular.min(BUSY) } else { self.regular };
        Some(ended + if self.wanted { least } else { least.max(regular) })
    }

    /// Something may be due somewhere.
    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    pub(super) fn jobs_claimed(&mut self) {
        self.claimed = true;
    }

    /// All lanes that were known have been emptied.
    pub(super) fn ran_dry(&mut self) {
        self.wanted |= self.claimed;
    }

    pub(super) fn sent(&mut self) {
        self.under_way = true;
        if self.complete {
            (self.complete, self.wanted, self.claimed, self.took) = (false, false, false, Duration::ZERO);
        }
    }

    /// `spread` is at random, 0 to 1.
    pub(super) fn answered(&mut self, complete: bool, took: Duration, now: Instant, spread: f64) {
        self.under_way = false;
        self.complete = complete;
        self.took += took;
        self.ended = Some(now);
        // Never longer than the setting says.
        self.regular = self.poll.mul_f64(0.5 + spread / 2.0);
    }

    /// It got no answer; what it was for is still wanted.
    pub(super) fn failed(&mut self) {
        self.under_way = false;
        self.wanted = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn surveyed(now: Instant, took: Duration) -> Surveys {
        let mut surveys = Surveys::new(2000 * MS);
        assert_eq!(surveys.next(now, false), Some(now), "the first one is due at once");
        surveys.sent();
        assert_eq!(surveys.next(now, false), None);
        surveys.answered(true, took, now, 1.0);
        surveys
    }

    #[test]
    fn an_idle_worker_looks_at_each_poll_and_a_busy_one_four_times_a_second() {
        let now = Instant::now();
        let surveys = surveyed(now, MS);
        assert_eq!(surveys.next(now, false), Some(now + 2000 * MS));
        assert_eq!(surveys.next(now, true), Some(now + BUSY));
    }

    #[test]
    fn what_is_wanted_waits_only_for_a_multiple_of_what_the_last_one_took() {
        let now = Instant::now();
        let mut surveys = surveyed(now, MS);
        surveys.ran_dry();
        assert_eq!(surveys.next(now, false), Some(now + 2000 * MS), "nothing was claimed since");
        surveys.jobs_claimed();
        surveys.ran_dry();
        assert_eq!(surveys.next(now, false), Some(now + 5 * MS));
        assert_eq!(surveys.next(now, true), Some(now + BUSY_PAUSE));
        surveys.sent();
        surveys.answered(true, 400 * MS, now, 0.0);
        surveys.want();
        assert_eq!(surveys.next(now, true), Some(now + 2000 * MS));
    }

    #[test]
    fn a_round_goes_on_at_once_and_its_pause_counts_all_its_statements() {
        let now = Instant::now();
        let mut surveys = Surveys::new(2000 * MS);
        surveys.sent();
        surveys.answered(false, 10 * MS, now, 0.0);
        assert_eq!(surveys.next(now, true), Some(now));
        surveys.sent();
        surveys.want();
        surveys.answered(true, 10 * MS, now, 0.0);
        assert_eq!(surveys.next(now, true), Some(now + 100 * MS), "wanted while it was under way");
        surveys.sent();
        surveys.failed();
        assert_eq!(surveys.next(now, true), Some(now), "it is not over");
    }
}
