//! The steps: who may do what next in a state, and where that leads.

use std::time::Duration;

use jobrequest::job::{Cause, Status, clamp_max_attempts};

use crate::rules::{Answer, ENDED_CHANGES, Guard, Rules, Wrong, small};
use crate::state::{Claim, ClaimId, End, Handed, Message, Row, Snapshot, State, Worker};

/// What an attempt comes to; a step says under which of these it goes on by itself.
pub mod ways {
    pub const NONE: u8 = 0;
    pub const SUCCEED: u8 = 1;
    pub const FAIL: u8 = 2;
    pub const FAIL_FOR_GOOD: u8 = 4;
    pub const COME_LATER: u8 = 8;
    pub const HAND_BACK: u8 = 16;
    pub const DIE: u8 = 32;
    pub const ALL: u8 = 63;
    /// Those under which workers live and are in time for their own reasons alone.
    pub const IN_TIME: u8 = COME_LATER | HAND_BACK;
    pub const NAMES: [&str; 6] = [
        "all succeed",
        "all fail",
        "all fail for good",
        "all are told to come later",
        "all are handed back",
        "all die",
    ];
}

macro_rules! steps {
    ($($step:ident),* $(,)?) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Step { $($step),* }

        impl Step {
            pub const ALL: &'static [Self] = &[$(Self::$step),*];
        }
    };
}

steps! {
    Claim, ClaimUnheard, TakeUp, GiveUp, Start, PassNoReturn, Succeed, Fail, FailForGood, ComeLater, HandBack, SayCancelled,
    Beat, BeatUnheard, OwnLeaseEnds, Die, Finish, FinishUnheard, FinishGoesAstray, FinishGivenUp, FinishSentTwice,
    LateFinish, LateFinishLost, LeaseEnds, Rescue, RescueReads, BackOffEnds, DayPasses, Show, Purge, Cancel, Edit,
    Retry, RetryAgain,
}

/// Where steps go.
pub type Emit<'a> = &'a mut dyn FnMut(Step, usize, u8, Result<State, Wrong>);

impl Rules {
    /// Every step from this state.
    pub fn steps(&self, state: &State, max_attempts: &[u8], emit: Emit) {
        for who in 0..state.workers.len() {
            self.steps_of_worker(state, who, emit);
        }
        if let Some(message) = state.late {
            let without = State { late: None, ..*state };
            emit(Step::LateFinish, 3, ways::NONE, self.deliver(&without, message).map(|(state, _)| state));
            emit(Step::LateFinishLost, 3, ways::NONE, Ok(without));
        }
        if let Some(row) = state.row {
            self.steps_of_time(state, row, emit);
            self.steps_of_people(state, row, max_attempts, emit);
        }
    }

    fn steps_of_worker(&self, state: &State, who: usize, emit: Emit) {
        let with = |worker| {
            let mut next = *state;
            next.workers[who] = worker;
            next
        };
        match state.workers[who] {
            Worker::Absent => {}
            Worker::Idle => {
                let Some(row) = state.row else { return };
                match self.claim(state, row, who) {
                    None => {}
                    Some(Err(wrong)) => emit(Step::Claim, who, ways::ALL, Err(wrong)),
                    Some(Ok((row, claim))) => {
                        let claimed = |worker| State { row: Some(row), ..with(worker) };
                        emit(Step::Claim, who, ways::ALL, Ok(claimed(Worker::Holding(claim))));
                        let asking = Worker::Asking { id: claim.id, token: claim.token, lease: true };
                        emit(Step::ClaimUnheard, who, ways::NONE, Ok(claimed(asking)));
                    }
                }
            }
            Worker::Asking { id, token, lease } => {
                let found = state.row.filter(|row| row.status == Status::Running && row.token == token);
                let taken = found.map_or(Worker::Idle, |row| {
                    Worker::Holding(Claim {
                        id,
                        token,
                        attempts: row.attempts,
                        max: row.max,
                        handed: row.handed,
                        lease: lease || !self.has(Guard::LeaseCountsFromSending),
                        told: false,
                    })
                });
                emit(Step::TakeUp, who, ways::ALL, Ok(with(taken)));
                emit(Step::GiveUp, who, ways::DIE, Ok(with(Worker::Idle)));
                if lease {
                    emit(Step::OwnLeaseEnds, who, ways::NONE, Ok(with(Worker::Asking { id, token, lease: false })));
                }
            }
            Worker::Holding(claim) => {
                if (claim.lease || !self.has(Guard::StartNeedsLease))
                    && (!claim.told || !self.has(Guard::StartHeedsCancel))
                {
                    let ways = ways::SUCCEED | ways::FAIL | ways::FAIL_FOR_GOOD | ways::COME_LATER;
                    emit(Step::Start, who, ways, judge_start(state, claim).map(|()| with(Worker::Working(claim))));
                }
                let ways = if claim.lease { ways::HAND_BACK } else { ways::IN_TIME };
                self.end(state, who, claim, Cause::HandBack, Step::HandBack, ways, emit);
                if !claim.lease {
                    emit(Step::GiveUp, who, !ways::IN_TIME, Ok(with(Worker::Idle)));
                }
                if claim.told {
                    self.finalize(state, who, claim, ways::ALL, emit);
                }
                self.steps_of_lease(state, who, claim, Worker::Holding, Worker::Stopped, emit);
            }
            Worker::Working(claim) => {
                let ways = ways::SUCCEED | ways::FAIL | ways::FAIL_FOR_GOOD;
                let wrong = judge_holder(state, claim.id, "a worker passes its point of no return without the lease");
                emit(Step::PassNoReturn, who, ways, wrong.map(|()| with(Worker::Committed(claim))));
                self.succeed(state, who, claim, false, emit);
                // The executor's failure, its panic and its time limit are one.
                self.end(state, who, claim, Cause::Passing, Step::Fail, ways::FAIL, emit);
                self.end(state, who, claim, Cause::Permanent, Step::FailForGood, ways::FAIL_FOR_GOOD, emit);
                let later = Cause::RetryAfter(Duration::from_secs(60));
                self.end(state, who, claim, later, Step::ComeLater, ways::COME_LATER, emit);
                self.end(state, who, claim, Cause::HandBack, Step::HandBack, ways::HAND_BACK, emit);
                // Told or not: an executor may say anything.
                self.finalize(state, who, claim, if claim.told { ways::ALL } else { ways::NONE }, emit);
                self.end(state, who, claim, Cause::Cancelled, Step::SayCancelled, ways::NONE, emit);
                self.steps_of_lease(state, who, claim, Worker::Working, Worker::Stopped, emit);
            }
            Worker::Committed(claim) => {
                self.succeed(state, who, claim, true, emit);
                let ways = ways::FAIL | ways::COME_LATER | ways::HAND_BACK;
                self.end_committed(state, who, claim, Cause::Passing, Step::Fail, ways, emit);
                self.end_committed(state, who, claim, Cause::Permanent, Step::FailForGood, ways::FAIL_FOR_GOOD, emit);
                if !self.has(Guard::HandBackBeforeNoReturn) {
                    self.end_committed(state, who, claim, Cause::HandBack, Step::HandBack, ways::NONE, emit);
                }
                self.steps_of_lease(state, who, claim, Worker::Committed, Worker::Committed, emit);
            }
            Worker::Stopped(claim) => {
                self.end(state, who, claim, Cause::Passing, Step::Fail, ways::FAIL, emit);
                self.end(state, who, claim, Cause::HandBack, Step::HandBack, ways::IN_TIME, emit);
                if claim.told {
                    self.finalize(state, who, claim, ways::ALL, emit);
                }
                // What can't be ended in time is left to the rescue.
                emit(Step::GiveUp, who, !ways::IN_TIME, Ok(with(Worker::Idle)));
            }
            Worker::Finishing { message, done } => self.steps_of_finish(state, who, message, done, emit),
        }
    }

    /// Heartbeat, the end of the lease by the worker's clock, death.
    fn steps_of_lease(
        &self,
        state: &State,
        who: usize,
        claim: Claim,
        same: fn(Claim) -> Worker,
        after: fn(Claim) -> Worker,
        emit: Emit,
    ) {
        let with = |row, worker| {
            let mut next = State { row, ..*state };
            next.workers[who] = worker;
            next
        };
        match self.beat(state.row, claim.id, claim.token) {
            Err(wrong) => emit(Step::Beat, who, ways::NONE, Err(wrong)),
            Ok(Some(row)) => {
                let renewed = Claim { lease: true, told: row.cancel_requested, ..claim };
                emit(Step::Beat, who, ways::NONE, Ok(with(Some(row), same(renewed))));
                emit(Step::BeatUnheard, who, ways::NONE, Ok(with(Some(row), same(claim))));
            }
            // It learns that the lease is lost; what is past its point of no return may end.
            Ok(None) => {
                let lost = match same(claim) {
                    Worker::Committed(claim) => Worker::Committed(Claim { lease: false, ..claim }),
                    _ => Worker::Idle,
                };
                emit(Step::Beat, who, ways::NONE, Ok(with(state.row, lost)));
            }
        }
        if claim.lease {
            let ended = with(state.row, after(Claim { lease: false, ..claim }));
            emit(Step::OwnLeaseEnds, who, !ways::IN_TIME, Ok(ended));
        }
        emit(Step::Die, who, ways::DIE, Ok(with(state.row, Worker::Idle)));
    }

    fn steps_of_finish(&self, state: &State, who: usize, message: Message, done: bool, emit: Emit) {
        let to = |mut state: State, worker, late| {
            state.workers[who] = worker;
            State { late, ..state }
        };
        match self.deliver(state, message) {
            Err(wrong) => emit(Step::Finish, who, ways::ALL, Err(wrong)),
            Ok((next, answer)) => {
                let done = matches!(next.workers[who], Worker::Finishing { done: true, .. });
                let heard = match answer {
                    Answer::Done if !done => Err("a worker is told of a finish that was not applied"),
                    Answer::Done | Answer::Lost | Answer::Refused => Ok(to(next, Worker::Idle, next.late)),
                };
                emit(Step::Finish, who, ways::ALL, heard);
                emit(Step::FinishUnheard, who, ways::NONE, Ok(next));
            }
        }
        emit(Step::FinishGivenUp, who, ways::DIE, Ok(to(*state, Worker::Idle, state.late)));
        if state.late.is_none() {
            emit(Step::FinishGoesAstray, who, ways::NONE, Ok(to(*state, Worker::Idle, Some(message))));
            let again = Worker::Finishing { message, done };
            emit(Step::FinishSentTwice, who, ways::NONE, Ok(to(*state, again, Some(message))));
        }
        if let Ok(Some(row)) = self.beat(state.row, message.id, message.token) {
            emit(Step::BeatUnheard, who, ways::NONE, Ok(State { row: Some(row), ..*state }));
        } else if let Err(wrong) = self.beat(state.row, message.id, message.token) {
            emit(Step::BeatUnheard, who, ways::NONE, Err(wrong));
        }
    }

    fn steps_of_time(&self, state: &State, row: Row, emit: Emit) {
        let with = |row| State { row: Some(row), ..*state };
        let held = state.workers.iter().any(|worker| worker.acts_under() == Some(row.holder));
        if row.status == Status::Running && row.lease && (!held || !self.has(Guard::WorkerStopsBeforeItsLeaseEnds)) {
            let known = state.workers.iter().any(|worker| worker.claim() == Some(row.holder));
            let ways = if known { !ways::IN_TIME } else { ways::ALL };
            emit(Step::LeaseEnds, 3, ways, Ok(with(Row { lease: false, ..row })));
        }
        if row.status.is_waiting() && !row.due {
            emit(Step::BackOffEnds, 3, ways::ALL, Ok(with(Row { due: true, ..row })));
        }
        if row.handed == Handed::Recently {
            emit(Step::DayPasses, 3, ways::ALL, Ok(with(Row { handed: Handed::ForADay, ..row })));
        }
        let to_rescue = (row.status == Status::Running || !self.has(Guard::RescueNeedsRunning))
            && (!row.lease || !self.has(Guard::RescueNeedsLeaseOver));
        let seen = Snapshot { attempts: row.attempts, max: row.max, cancel_requested: row.cancel_requested };
        if self.has(Guard::RescueHoldsRow) {
            if to_rescue {
                emit(Step::Rescue, 3, ways::ALL, self.rescue(row, seen).map(with));
            }
        } else if let Some(seen) = state.rescuer {
            let written = self.rescue(row, seen).map(|row| State { row: Some(row), rescuer: None, ..*state });
            emit(Step::Rescue, 3, ways::ALL, written);
        } else if to_rescue {
            emit(Step::RescueReads, 3, ways::ALL, Ok(State { rescuer: Some(seen), ..*state }));
        }
        // A live row's state may be shown too, which changes nothing as long as only ended rows are purged.
        if !row.shown && (row.status.is_terminal() || !self.has(Guard::PurgeNeedsEnd)) {
            emit(Step::Show, 3, ways::ALL, Ok(with(Row { shown: true, ..row })));
        }
        if (row.status.is_terminal() || !self.has(Guard::PurgeNeedsEnd))
            && (row.shown || !self.has(Guard::PurgeNeedsShown))
        {
            let purged = match (row.status.is_terminal(), row.shown) {
                (false, _) => Err("an accepted job is lost"),
                (true, false) => Err("a row goes before its end was shown"),
                (true, true) => Ok(State { row: None, ..*state }),
            };
            emit(Step::Purge, 3, ways::ALL, purged);
        }
    }

    fn steps_of_people(&self, state: &State, row: Row, max_attempts: &[u8], emit: Emit) {
        let with = |row| State { row: Some(row), ..*state };
        if let Some(row) = self.cancel(row) {
            emit(Step::Cancel, 3, ways::NONE, row.map(with));
        }
        if row.status.is_waiting() || !self.has(Guard::EditNeedsWaiting) {
            for wanted in max_attempts {
                let max = if self.has(Guard::EditLeavesOneAttempt) {
                    small(clamp_max_attempts((*wanted).into(), row.attempts.into()))
                } else {
                    *wanted
                };
                let edited = if row.status.is_terminal() { Err(ENDED_CHANGES) } else { Ok(with(Row { max, ..row })) };
                if max != row.max {
                    emit(Step::Edit, 3, ways::NONE, edited);
                }
            }
        }
        if state.retries_left > 0 {
            let asked = State { retries_left: state.retries_left - 1, ..*state };
            let row = Row { mark_used: false, ..row };
            emit(Step::Retry, 3, ways::NONE, self.retry(row).map(|row| State { row: Some(row), ..asked }));
        }
        emit(Step::RetryAgain, 3, ways::NONE, self.retry(row).map(with));
    }

    fn succeed(&self, state: &State, who: usize, claim: Claim, committed: bool, emit: Emit) {
        emit(Step::Succeed, who, ways::SUCCEED, Ok(finishing(state, who, claim, End::Succeeded, committed)));
    }

    fn finalize(&self, state: &State, who: usize, claim: Claim, ways: u8, emit: Emit) {
        emit(Step::SayCancelled, who, ways, Ok(finishing(state, who, claim, End::Finalize, false)));
    }

    #[expect(clippy::too_many_arguments)]
    fn end(&self, state: &State, who: usize, claim: Claim, cause: Cause, step: Step, ways: u8, emit: Emit) {
        emit(step, who, ways, Ok(finishing(state, who, claim, self.decide(self.facts(claim), cause), false)));
    }

    #[expect(clippy::too_many_arguments)]
    fn end_committed(&self, state: &State, who: usize, claim: Claim, cause: Cause, step: Step, ways: u8, emit: Emit) {
        emit(step, who, ways, Ok(finishing(state, who, claim, self.decide(self.facts(claim), cause), true)));
    }
}

fn finishing(state: &State, who: usize, claim: Claim, end: End, committed: bool) -> State {
    let message = Message { id: claim.id, token: claim.token, end, committed };
    let mut next = *state;
    next.workers[who] = Worker::Finishing { message, done: false };
    next
}

fn judge_start(state: &State, claim: Claim) -> Result<(), Wrong> {
    if claim.told {
        return Err("a job starts though its worker has heard of the cancel");
    }
    judge_holder(state, claim.id, "a worker starts a job without the lease")
}

fn judge_holder(state: &State, id: ClaimId, wrong: Wrong) -> Result<(), Wrong> {
    if state.row.is_some_and(|row| row.holder == id) { Ok(()) } else { Err(wrong) }
}
