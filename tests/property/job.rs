//! One job by the rules.

use std::time::Duration;

use chrono::TimeDelta;
use jobrequest::job::{Cause, Facts, JobState, Next, Outcome, PastAttempt, RetryPolicy, Status, decide};
use jobrequest::queue::Lane;
use proptest::prelude::prop_assert;
use proptest::test_runner::TestCaseError;
use serde_json::Value;
use uuid::Uuid;

use crate::database::{INSTALLS, Row, Seen, Time, settings};

pub type Check<T = ()> = Result<T, TestCaseError>;

/// A row, and what only the rules know of it.
pub struct Job {
    pub row: Row,
    /// The claim whose token the row bears.
    pub token: Option<u32>,
    /// Since when it has been handed back, again and again.
    pub handed_since: Option<Time>,
    /// What the attempt before has left for the next one.
    pub progress: Option<Value>,
    /// Since the job began, or was asked to run again.
    pub lost_leases: u16,
    pub changed: bool,
}

/// What a worker holds. One claim may take many jobs.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    pub id: Uuid,
    pub token: u32,
    /// For how long the job had been handed back when it was claimed, at least and at most.
    pub handed_for: [Duration; 2],
}

/// Too long a time counts as the longest that there is.
pub fn later(time: Time, by: Duration) -> Time {
    TimeDelta::from_std(by).ok().and_then(|by| time.checked_add_signed(by)).unwrap_or(Time::MAX_UTC)
}

pub fn fail<T>(why: impl Into<String>) -> Check<T> {
    Err(TestCaseError::fail(why.into()))
}

impl Claim {
    pub fn is(&self, other: &Self) -> bool {
        (self.id, self.token) == (other.id, other.token)
    }
}

impl Job {
    pub fn change(&mut self) {
        self.changed = true;
        self.row.mirror_due = self.row.owner_uid.is_some();
    }

    pub fn holds_its_key(&self) -> bool {
        !matches!(self.row.status, Status::FailedPermanent | Status::Cancelled)
    }

    pub fn may_be_claimed(&self, install: usize, kinds: &[&str], now: Time) -> bool {
        let Row { status, suspended, run_at, .. } = &self.row;
        self.row.install == INSTALLS[install]
            && kinds.contains(&self.row.kind.as_str())
            && status.is_waiting()
            && !suspended
            && *run_at <= now
    }

    /// Priority is promised within a namespace and kind; then who has been due for longest.
    pub fn goes_before(&self, other: &Self) -> bool {
        let rank = |job: &Self| (std::cmp::Reverse(job.row.priority), job.row.run_at);
        (&self.row.namespace, &self.row.kind) == (&other.row.namespace, &other.row.kind) && rank(self) < rank(other)
    }

    pub fn lane(&self) -> Lane {
        let Row { kind, namespace, attempts, max_attempts, priority, .. } = &self.row;
        Lane {
            kind: kind.clone(),
            namespace: namespace.clone().unwrap_or_default(),
            careful: attempts + 1 >= *max_attempts || self.lost_leases >= 2,
            priority: *priority,
        }
    }

    pub fn lease_is_over(&self, now: Time) -> bool {
        let lease = INSTALLS.iter().position(|name| *name == self.row.install).map(|at| settings(at).lease);
        self.row.locked_at.is_some_and(|at| later(at, lease.expect("an install of ours")) < now)
    }

    pub fn purgeable(&self, install: usize, now: Time) -> bool {
        self.row.install == INSTALLS[install]
            && self.row.status.is_terminal()
            && !self.row.mirror_due
            && self.row.finished_at.is_some_and(|at| later(at, settings(install).retention) < now)
    }

    /// The attempt is over; `new` is the row as it is now.
    pub fn end_attempt(&mut self, new: &Row, seen: &Seen, outcome: Outcome, error: Option<String>) -> Check<Time> {
        let Some(now) = new.finished_at else { return fail("an attempt has ended without a time") };
        prop_assert!(seen.during(now), "an attempt's end at a time that was not");
        let row = &mut self.row;
        let past = PastAttempt {
            number: row.attempts,
            worker: row.locked_by.clone(),
            from: row.started_at,
            to: now,
            outcome,
            error: error.clone(),
        };
        // A success is told by the row itself.
        if outcome != Outcome::Succeeded {
            row.history.push(past);
            let over = row.history.len().saturating_sub(20);
            row.history.drain(..over);
        }
        row.last_error = error.or(row.last_error.take());
        row.finished_at = Some(now);
        row.worker = row.locked_by.take();
        row.locked_at = None;
        self.change();
        Ok(now)
    }

    /// What [`decide`] says, within the bounds of the jitter and of what is known of the time. That doesn't decide
    /// between states: clocks move by whole seconds, so both bounds are on one side of the limit of hand-backs.
    pub fn follow(&mut self, cause: Cause, handed_for: [Duration; 2], new: &Row, now: Time) -> Check {
        let Row { attempts, max_attempts, cancel_requested, .. } = self.row;
        let facts = handed_for.map(|time| Facts { attempts, max_attempts, cancel_requested, handed_back_for: time });
        let policy = RetryPolicy::default();
        let nexts = facts.map(|facts| [0.0, 1.0].map(|jitter| decide(facts, cause, &policy, jitter)));
        let handed_since = self.handed_since.take();
        // Postgres keeps microseconds.
        let slack = TimeDelta::microseconds(1);
        let (mut early, mut late) = (false, false);
        for next in nexts.concat() {
            match next {
                Next::FailedPermanent => self.row.status = Status::FailedPermanent,
                Next::Cancelled => self.row.status = Status::Cancelled,
                Next::Wait { status, after, free } => {
                    self.row.status = status;
                    self.row.run_at = new.run_at;
                    self.row.attempts = attempts - u32::from(free);
                    self.handed_since = if free { handed_since.or(Some(now)) } else { None };
                    early |= new.run_at >= later(now, after) - slack;
                    late |= new.run_at <= later(now, after) + slack;
                }
            }
        }
        let within = !self.row.status.is_waiting() || (early && late);
        prop_assert!(within, "the back-off ends at {}, which is not one of {nexts:?}", new.run_at);
        Ok(())
    }

    pub fn handed_for(&self, now: Time) -> Duration {
        self.handed_since.and_then(|since| (now - since).to_std().ok()).unwrap_or_default()
    }
}

/// The job that this row is. When the row was last touched, without a change that anyone is shown, is not promised.
pub fn read(row: &Row, answer: Option<&jobrequest::job::Job>) -> jobrequest::job::Job {
    let Row { status, run_at, started_at, finished_at, .. } = *row;
    let at = finished_at.unwrap_or_default();
    let error = || row.last_error.clone().unwrap_or_default();
    let worker = if status == Status::Running { row.locked_by.clone() } else { row.worker.clone() };
    let mut history = row.history.clone();
    let state = match status {
        Status::Queued => JobState::Queued { run_at },
        Status::Retrying => JobState::Retrying { run_at, error: error() },
        Status::Running => JobState::Running {
            worker: worker.clone().unwrap_or_default(),
            since: started_at.unwrap_or_default(),
            cancel_requested: row.cancel_requested,
        },
        Status::Succeeded => {
            let (number, outcome) = (row.attempts, Outcome::Succeeded);
            let (worker, from, error) = (worker.clone(), started_at, None);
            history.push(PastAttempt { number, worker, from, to: at, outcome, error });
            JobState::Succeeded { at, result: row.result.clone().unwrap_or_default() }
        }
        Status::FailedPermanent => JobState::FailedPermanent { at, error: error() },
        Status::Cancelled => JobState::Cancelled { at },
    };
    jobrequest::job::Job {
        id: row.id,
        kind: row.kind.clone(),
        state,
        attempts: row.attempts,
        max_attempts: row.max_attempts,
        priority: row.priority,
        suspended: row.suspended,
        timeout_seconds: row.timeout_seconds,
        idempotency_key: row.idempotency_key.clone(),
        namespace: row.namespace.clone(),
        install: row.install.clone(),
        last_error: row.last_error.clone(),
        run_at,
        wanted_run_at: row.wanted_run_at,
        started_at,
        finished_at,
        worker,
        created_at: row.created_at,
        updated_at: answer.map_or(row.created_at, |answer| answer.updated_at),
        revision: row.revision,
        last_retry: row.last_retry.clone(),
        history,
    }
}
