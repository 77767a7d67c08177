//! The rules under test: each operation on the row with its guards, any of which can be taken away, and what it must
//! not do.

use std::time::Duration;

use jobrequest::job::{Cause, Facts, Next, RetryPolicy, Status, decide};

use crate::state::{Claim, ClaimId, End, Handed, Message, Row, Snapshot, State, Worker};

/// A condition that keeps the job from harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    ClaimNeedsWaiting,
    ClaimNeedsDue,
    FinishNeedsRunning,
    FinishNamesToken,
    FinishHeedsCancel,
    FinalizeNeedsRequest,
    BeatNeedsRunning,
    BeatNamesToken,
    RescueNeedsRunning,
    RescueNeedsLeaseOver,
    RescueHoldsRow,
    RescueClearsToken,
    RescueHeedsCancel,
    RescueHeedsLimit,
    LostLeaseCosts,
    FailureHeedsLimit,
    FailureWaits,
    HandBacksEnd,
    CancelEndsWaiting,
    CancelLeavesEnded,
    EditNeedsWaiting,
    EditLeavesOneAttempt,
    RetryNeedsEnd,
    RetryLeavesSucceeded,
    RetryOncePerMark,
    RetryStartsFromZero,
    RetryLiftsCancel,
    PurgeNeedsEnd,
    PurgeNeedsShown,
    WorkerStopsBeforeItsLeaseEnds,
    LeaseCountsFromSending,
    StartNeedsLease,
    StartHeedsCancel,
    HandBackBeforeNoReturn,
}

impl Guard {
    pub const ALL: [Self; 34] = [
        Self::ClaimNeedsWaiting,
        Self::ClaimNeedsDue,
        Self::FinishNeedsRunning,
        Self::FinishNamesToken,
        Self::FinishHeedsCancel,
        Self::FinalizeNeedsRequest,
        Self::BeatNeedsRunning,
        Self::BeatNamesToken,
        Self::RescueNeedsRunning,
        Self::RescueNeedsLeaseOver,
        Self::RescueHoldsRow,
        Self::RescueClearsToken,
        Self::RescueHeedsCancel,
        Self::RescueHeedsLimit,
        Self::LostLeaseCosts,
        Self::FailureHeedsLimit,
        Self::FailureWaits,
        Self::HandBacksEnd,
        Self::CancelEndsWaiting,
        Self::CancelLeavesEnded,
        Self::EditNeedsWaiting,
        Self::EditLeavesOneAttempt,
        Self::RetryNeedsEnd,
        Self::RetryLeavesSucceeded,
        Self::RetryOncePerMark,
        Self::RetryStartsFromZero,
        Self::RetryLiftsCancel,
        Self::PurgeNeedsEnd,
        Self::PurgeNeedsShown,
        Self::WorkerStopsBeforeItsLeaseEnds,
        Self::LeaseCountsFromSending,
        Self::StartNeedsLease,
        Self::StartHeedsCancel,
        Self::HandBackBeforeNoReturn,
    ];
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tokens {
    NameClaims,
    AreAttempts,
    AreWorkers,
}

/// A set of rules.
#[derive(Debug)]
pub struct Rules {
    without: u64,
    tokens: Tokens,
    claim_leaves_out_cancelled: bool,
}

/// What went wrong.
pub type Wrong = &'static str;

/// What a worker hears of its finish.
pub enum Answer {
    Done,
    Lost,
    Refused,
}

impl Rules {
    pub fn real() -> Self {
        Self::without(&[])
    }

    pub fn without(guards: &[Guard]) -> Self {
        let without = guards.iter().fold(0, |set, guard| set | (1 << *guard as u64));
        Self { without, tokens: Tokens::NameClaims, claim_leaves_out_cancelled: false }
    }

    pub fn token_is_the_attempt(self) -> Self {
        Self { tokens: Tokens::AreAttempts, ..self }
    }

    pub fn token_is_the_worker(self) -> Self {
        Self { tokens: Tokens::AreWorkers, ..self }
    }

    pub fn claim_leaves_out_cancelled(self) -> Self {
        Self { claim_leaves_out_cancelled: true, ..self }
    }

    pub fn tokens_name_claims(&self) -> bool {
        self.tokens == Tokens::NameClaims
    }

    pub fn has(&self, guard: Guard) -> bool {
        self.without & (1 << guard as u64) == 0
    }

    /// `fetch_next`: none if the row is not for the taking.
    pub fn claim(&self, state: &State, row: Row, who: usize) -> Option<Result<(Row, Claim), Wrong>> {
        if (!row.status.is_waiting() && self.has(Guard::ClaimNeedsWaiting))
            || (!row.due && self.has(Guard::ClaimNeedsDue))
            || (row.cancel_requested && self.claim_leaves_out_cancelled)
        {
            return None;
        }
        let id = state.fresh_id();
        let attempts = row.attempts + 1;
        let token = match self.tokens {
            Tokens::NameClaims => id,
            Tokens::AreAttempts => attempts,
            Tokens::AreWorkers => small(who as u32 + 1),
        };
        let claimed = Row {
            status: Status::Running,
            attempts,
            token,
            lease: true,
            due: true,
            holder: id,
            paid: row.paid + 1,
            shown: false,
            ..row
        };
        let claim = Claim { id, token, attempts, max: row.max, handed: row.handed, lease: true, told: false };
        Some(if row.status.is_terminal() {
            Err(ENDED_CHANGES)
        } else if row.cancel_requested {
            Err("a row that was asked to stop is claimed")
        } else if row.status.is_waiting() && !row.due {
            Err("a row is claimed before it is due")
        } else if attempts > row.max {
            Err("attempts over maxAttempts")
        } else {
            Ok((claimed, claim))
        })
    }

    /// A finish arrives: the state after it, and the answer. Whoever sends this finish is marked when it takes effect.
    pub fn deliver(&self, state: &State, message: Message) -> Result<(State, Answer), Wrong> {
        let Some(row) = state.row else { return Ok((*state, Answer::Lost)) };
        let running = row.status == Status::Running;
        let hit = (running || !self.has(Guard::FinishNeedsRunning))
            && (row.token == message.token || !self.has(Guard::FinishNamesToken));
        let refused = message.end == End::Finalize && !row.cancel_requested && self.has(Guard::FinalizeNeedsRequest);
        if !hit || refused {
            let answer = match (row.token == message.token, running) {
                (true, true) => Answer::Refused,
                (true, false) => Answer::Done,
                (false, _) => Answer::Lost,
            };
            return Ok((*state, answer));
        }
        if row.holder != message.id || !running {
            return Err(LOST_WRITES);
        }
        let ended =
            |status| Row { status, lease: false, due: false, handed: Handed::No, holder: 0, shown: false, ..row };
        let heeds_cancel = row.cancel_requested && self.has(Guard::FinishHeedsCancel);
        let row = match message.end {
            End::Succeeded => ended(Status::Succeeded),
            End::Finalize | End::Cancelled => ended(Status::Cancelled),
            End::Waits { .. } | End::Failed if heeds_cancel => ended(Status::Cancelled),
            End::Failed => ended(Status::FailedPermanent),
            End::Waits { free: true, .. } if message.committed => {
                return Err("an attempt past its point of no return is handed back free");
            }
            End::Waits { free: false, due: true, .. } => return Err("a failed attempt is tried again at once"),
            End::Waits { status, due, free } => {
                let off = u8::from(free);
                let handed = if free { row.handed.max(Handed::Recently) } else { Handed::No };
                Row { due, handed, attempts: row.attempts - off, paid: row.paid - off, ..ended(status) }
            }
        };
        if row.status == Status::Cancelled && !row.cancel_requested {
            return Err("a job is cancelled that nobody asked to stop");
        }
        let mut next = State { row: Some(row), ..*state };
        for worker in &mut next.workers {
            if let Worker::Finishing { message: theirs, done } = worker
                && theirs.id == message.id
            {
                *done = true;
            }
        }
        Ok((next, Answer::Done))
    }

    /// `heartbeat`: the row if it was this claim's.
    pub fn beat(&self, row: Option<Row>, id: ClaimId, token: u8) -> Result<Option<Row>, Wrong> {
        let hit = row.filter(|row| {
            (row.status == Status::Running || !self.has(Guard::BeatNeedsRunning))
                && (row.token == token || !self.has(Guard::BeatNamesToken))
        });
        match hit {
            Some(row) if row.holder != id || row.status != Status::Running => Err(LOST_WRITES),
            Some(row) => Ok(Some(Row { lease: true, ..row })),
            None => Ok(None),
        }
    }

    /// `recover_stale`, once it has this row.
    pub fn rescue(&self, row: Row, seen: Snapshot) -> Result<Row, Wrong> {
        if row.status != Status::Running || row.lease {
            return Err("the rescue changes a row that is not its to change");
        }
        let facts = Facts {
            attempts: seen.attempts.into(),
            max_attempts: if self.has(Guard::RescueHeedsLimit) { seen.max.into() } else { u32::MAX },
            cancel_requested: seen.cancel_requested && self.has(Guard::RescueHeedsCancel),
            handed_back_for: Duration::ZERO,
        };
        let (status, due) = match self.decide(facts, Cause::LeaseLost) {
            End::Waits { status, due, free: _ } => (status, due),
            End::Failed => (Status::FailedPermanent, false),
            End::Cancelled | End::Succeeded | End::Finalize => (Status::Cancelled, false),
        };
        if row.cancel_requested && !status.is_terminal() {
            return Err("a job that was asked to stop waits again after its rescue");
        }
        if due {
            return Err("a failed attempt is tried again at once");
        }
        Ok(Row {
            status,
            due,
            attempts: row.attempts - u8::from(!self.has(Guard::LostLeaseCosts)),
            token: if self.has(Guard::RescueClearsToken) { 0 } else { row.token },
            handed: Handed::No,
            holder: 0,
            shown: false,
            ..row
        })
    }

    /// `request_cancel`; none if nothing changes.
    pub fn cancel(&self, row: Row) -> Option<Result<Row, Wrong>> {
        let told = Row { cancel_requested: true, ..row };
        let cancelled = Row { status: Status::Cancelled, due: false, handed: Handed::No, shown: false, ..told };
        if row.status.is_terminal() {
            return (!self.has(Guard::CancelLeavesEnded)).then_some(Err(ENDED_CHANGES));
        }
        if row.cancel_requested {
            return None;
        }
        let ends = row.status.is_waiting() && self.has(Guard::CancelEndsWaiting);
        Some(Ok(if ends { cancelled } else { told }))
    }

    /// `retry` with the newest mark.
    pub fn retry(&self, row: Row) -> Result<Row, Wrong> {
        let may = match row.status {
            Status::FailedPermanent | Status::Cancelled => true,
            Status::Succeeded => !self.has(Guard::RetryLeavesSucceeded),
            Status::Queued | Status::Running | Status::Retrying => !self.has(Guard::RetryNeedsEnd),
        };
        if !may || (row.mark_used && self.has(Guard::RetryOncePerMark)) {
            return Ok(row);
        }
        match row.status {
            Status::FailedPermanent | Status::Cancelled if row.mark_used => Err("a mark works twice"),
            Status::FailedPermanent | Status::Cancelled => Ok(Row {
                status: Status::Queued,
                attempts: if self.has(Guard::RetryStartsFromZero) { 0 } else { row.attempts },
                cancel_requested: row.cancel_requested && !self.has(Guard::RetryLiftsCancel),
                token: 0,
                due: true,
                handed: Handed::No,
                mark_used: true,
                shown: false,
                paid: 0,
                ..row
            }),
            Status::Succeeded => Err(ENDED_CHANGES),
            Status::Queued | Status::Running | Status::Retrying => Err("a retry takes a row that lives"),
        }
    }

    pub fn decide(&self, facts: Facts, cause: Cause) -> End {
        match decide(facts, cause, &RetryPolicy::default(), 0.5) {
            Next::Wait { status, after, free } => {
                let due = after.is_zero() || (!free && !self.has(Guard::FailureWaits));
                End::Waits { status, due, free }
            }
            Next::FailedPermanent => End::Failed,
            Next::Cancelled => End::Cancelled,
        }
    }

    /// What a worker knows. Whether a cancel was asked for is the row's to say, when the finish arrives.
    pub fn facts(&self, claim: Claim) -> Facts {
        Facts {
            attempts: claim.attempts.into(),
            max_attempts: if self.has(Guard::FailureHeedsLimit) { claim.max.into() } else { u32::MAX },
            cancel_requested: false,
            handed_back_for: if self.has(Guard::HandBacksEnd) { claim.handed.time() } else { Duration::ZERO },
        }
    }
}

const LOST_WRITES: Wrong = "a worker whose lease had ended changes the row";
pub const ENDED_CHANGES: Wrong = "a job that has ended changes";

/// What must not be in any state.
pub fn judge(state: &State) -> Result<(), Wrong> {
    let Some(row) = state.row else { return Ok(()) };
    if row.attempts > row.max {
        return Err("attempts over maxAttempts");
    }
    if row.attempts != row.paid {
        return Err("attempts are not the claims that count");
    }
    let mut acting = state.workers.iter().filter_map(Worker::acts_under);
    match (acting.next(), acting.next()) {
        (Some(_), Some(_)) => Err("two workers hold leases that stand"),
        (Some(id), None) if id != row.holder => Err("a worker relies on a lease that is another's"),
        _ => Ok(()),
    }
}

pub fn small(number: u32) -> u8 {
    u8::try_from(number).expect("the model's numbers are small")
}
