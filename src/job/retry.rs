//! What follows when an attempt ends without a result.

use std::time::Duration;

use super::state::Status;

/// For how long in all a job may be handed back without cost before a hand-back counts as a failed attempt.
pub const HAND_BACK_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// Bounds of the back-off: uniform in [base, min(cap, base x 3^attempt)].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    base: Duration,
    cap: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { base: Duration::from_secs(1), cap: Duration::from_secs(60) }
    }
}

impl RetryPolicy {
    /// A cap below the base is raised to it.
    pub fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap: cap.max(base) }
    }

    /// The longest wait after this attempt (1 for the first). Saturates instead of wrapping: 3^41 passes 2^64.
    pub fn ceiling(&self, attempt: u32) -> Duration {
        let factor = 3_u32.checked_pow(attempt).unwrap_or(u32::MAX);
        self.base.saturating_mul(factor).min(self.cap)
    }

    /// The wait after this attempt; `jitter` in [0, 1] chooses within the bounds.
    pub fn delay(&self, attempt: u32, jitter: f64) -> Duration {
        let span = self.ceiling(attempt).saturating_sub(self.base);
        self.base + span.mul_f64(jitter.clamp(0.0, 1.0))
    }
}

/// What the decision needs to know of the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Claims so far, this one included.
    pub attempts: u32,
    pub max_attempts: u32,
    pub cancel_requested: bool,
    /// Time since the first of an unbroken run of hand-backs; zero when the last attempt ended otherwise.
    pub handed_back_for: Duration,
}

/// Why the attempt has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The executor says that trying again can't help.
    Permanent,
    /// The executor failed, panicked or ran out of time.
    Passing,
    /// The other side named the time before which it wants no call; kept within [`HAND_BACK_LIMIT`].
    RetryAfter(Duration),
    /// The worker gives the claim back: it shuts down, or never started it.
    HandBack,
    /// The executor stopped because it was told to.
    Cancelled,
    /// The worker was gone when its lease ended.
    LeaseLost,
}

/// The state that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Waits again, as queued or retrying. `free` takes the claim off `attempts`.
    Wait {
        status: Status,
        after: Duration,
        free: bool,
    },
    FailedPermanent,
    Cancelled,
}

/// What follows an attempt without a result: total, pure, the only such rule.
pub fn decide(facts: Facts, cause: Cause, policy: &RetryPolicy, jitter: f64) -> Next {
    if facts.cancel_requested {
        return Next::Cancelled;
    }
    let back_off = policy.delay(facts.attempts, jitter);
    let spent = || {
        if facts.attempts < facts.max_attempts {
            Next::Wait { status: Status::Retrying, after: back_off, free: false }
        } else {
            Next::FailedPermanent
        }
    };
    let may_be_free = facts.handed_back_for < HAND_BACK_LIMIT;
    match cause {
        Cause::Permanent => Next::FailedPermanent,
        // An executor can't cancel a job that nobody asked to cancel.
        Cause::Passing | Cause::LeaseLost | Cause::Cancelled => spent(),
        Cause::RetryAfter(delay) if may_be_free => {
            let left = HAND_BACK_LIMIT.saturating_sub(facts.handed_back_for);
            Next::Wait { status: Status::Retrying, after: delay.min(left).max(back_off), free: true }
        }
        // As if it had not been claimed: a job whose first claim comes back is queued, not retrying.
        Cause::HandBack if may_be_free => {
            let status = if facts.attempts > 1 { Status::Retrying } else { Status::Queued };
            Next::Wait { status, after: Duration::ZERO, free: true }
        }
        Cause::RetryAfter(_) | Cause::HandBack => spent(),
    }
}

/// A lowered limit never makes a waiting job unclaimable: one more attempt stays possible.
pub fn clamp_max_attempts(wanted: u32, attempts: u32) -> u32 {
    wanted.max(attempts.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RetryPolicy = RetryPolicy { base: Duration::from_secs(1), cap: Duration::from_secs(60) };

    fn facts(attempts: u32, max_attempts: u32) -> Facts {
        Facts { attempts, max_attempts, cancel_requested: false, handed_back_for: Duration::ZERO }
    }

    #[test]
    fn the_back_off_stays_within_its_bounds_for_every_attempt() {
        for attempt in 0..=1000 {
            let ceiling = POLICY.ceiling(attempt);
            assert!(ceiling >= POLICY.base && ceiling <= POLICY.cap, "attempt {attempt}: {ceiling:?}");
            assert_eq!(POLICY.delay(attempt, 0.0), POLICY.base);
            assert_eq!(POLICY.delay(attempt, 1.0), ceiling);
        }
        assert_eq!([1, 2, 3, 4, 70].map(|a| POLICY.ceiling(a).as_secs()), [3, 9, 27, 60, 60]);
    }

    #[test]
    fn a_huge_base_does_not_overflow() {
        let policy = RetryPolicy::new(Duration::MAX / 2, Duration::MAX);
        assert_eq!(policy.ceiling(100), Duration::MAX);
    }

    #[test]
    fn a_cap_below_the_base_is_raised() {
        let policy = RetryPolicy::new(Duration::from_secs(5), Duration::from_secs(1));
        assert_eq!(policy.delay(3, 1.0), Duration::from_secs(5));
    }

    #[test]
    fn a_cancelled_job_never_waits_again_whatever_ended_its_attempt() {
        let cancelled = Facts { cancel_requested: true, ..facts(1, 3) };
        for cause in [
            Cause::Permanent,
            Cause::Passing,
            Cause::RetryAfter(Duration::from_secs(9)),
            Cause::HandBack,
            Cause::Cancelled,
            Cause::LeaseLost,
        ] {
            assert_eq!(decide(cancelled, cause, &POLICY, 0.5), Next::Cancelled, "{cause:?}");
        }
    }

    #[test]
    fn an_executor_that_says_cancelled_unasked_has_failed() {
        assert_eq!(decide(facts(3, 3), Cause::Cancelled, &POLICY, 0.0), Next::FailedPermanent);
    }

    #[test]
    fn the_last_attempt_ends_the_job_when_it_fails_or_its_worker_dies() {
        for cause in [Cause::Passing, Cause::LeaseLost] {
            assert_eq!(decide(facts(3, 3), cause, &POLICY, 0.0), Next::FailedPermanent);
            assert_eq!(
                decide(facts(2, 3), cause, &POLICY, 0.0),
                Next::Wait { status: Status::Retrying, after: Duration::from_secs(1), free: false }
            );
        }
    }

    #[test]
    fn a_hand_back_is_free_until_a_day_of_them_has_passed() {
        let free = decide(facts(3, 3), Cause::HandBack, &POLICY, 0.0);
        assert_eq!(free, Next::Wait { status: Status::Retrying, after: Duration::ZERO, free: true });
        let first = decide(facts(1, 3), Cause::HandBack, &POLICY, 0.0);
        assert_eq!(first, Next::Wait { status: Status::Queued, after: Duration::ZERO, free: true });
        let long = Facts { handed_back_for: HAND_BACK_LIMIT, ..facts(3, 3) };
        assert_eq!(decide(long, Cause::HandBack, &POLICY, 0.0), Next::FailedPermanent);
        assert_eq!(decide(long, Cause::RetryAfter(Duration::ZERO), &POLICY, 0.0), Next::FailedPermanent);
    }

    #[test]
    fn a_named_time_is_never_sooner_than_the_ordinary_back_off() {
        let named = |secs| decide(facts(1, 3), Cause::RetryAfter(Duration::from_secs(secs)), &POLICY, 1.0);
        assert_eq!(named(0), Next::Wait { status: Status::Retrying, after: Duration::from_secs(3), free: true });
        assert_eq!(named(7), Next::Wait { status: Status::Retrying, after: Duration::from_secs(7), free: true });
    }

    #[test]
    fn a_named_time_is_never_later_than_the_hand_backs_may_last() {
        let late = Facts { handed_back_for: HAND_BACK_LIMIT - Duration::from_secs(90), ..facts(1, 3) };
        let next = decide(late, Cause::RetryAfter(Duration::MAX), &POLICY, 0.0);
        assert_eq!(next, Next::Wait { status: Status::Retrying, after: Duration::from_secs(90), free: true });
    }

    #[test]
    fn a_lowered_limit_leaves_one_attempt() {
        assert_eq!(clamp_max_attempts(1, 4), 5);
        assert_eq!(clamp_max_attempts(9, 4), 9);
    }
}
