//! Writes how attempts ended. The rows' next states are the queue's to decide; here are the gathering, and the patience
//! to get it written.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, future};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::running::{Run, lock};
use super::{BackOff, Shared};
use crate::admin::{Beat, JobOutcome};
use crate::job::{Cause, Status};
use crate::queue::{self, AttemptEnd, AttemptFailure, ClaimedJob, Finish, Unfinished};

/// How an attempt ended, as it goes to the row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Ending {
    Succeeded(Value),
    Failed(AttemptFailure),
    /// Its job was asked to stop, and it did.
    Cancelled,
    /// The lease is over or about to be: nothing is written, the rescue takes the row.
    Left,
}

impl Ending {
    pub(super) fn failed(cause: Cause, error: String) -> Self {
        Self::Failed(AttemptFailure { cause, error: Some(error), progress: None })
    }

    /// Given back without cost. The error of an attempt before stays.
    pub(super) fn hand_back(progress: Option<Value>) -> Self {
        Self::Failed(AttemptFailure { cause: Cause::HandBack, error: None, progress })
    }

    /// What to write instead when the row could not hold it. None: nothing.
    fn storable(self, why: &queue::Error) -> Option<Self> {
        match self {
            Self::Succeeded(_) => Some(Self::failed(
                Cause::Permanent,
                format!("Unstorable: what the executor returned can't be stored: {why}"),
            )),
            Self::Failed(AttemptFailure { cause, error, progress: Some(_) }) => {
                Some(Self::Failed(AttemptFailure { cause, error, progress: None }))
            }
            // Nobody asked it to: the queue decides what an executor's own whim costs.
            Self::Cancelled => Some(Self::failed(Cause::Cancelled, "Cancelled: the executor stopped unasked".into())),
            Self::Failed(_) | Self::Left => None,
        }
    }
}

/// The end of one attempt, to be written.
pub(super) struct End {
    run: Arc<Run>,
    job: ClaimedJob,
    ending: Ending,
    /// None for an attempt that did not start.
    took: Option<Duration>,
}

impl End {
    pub(super) fn new(run: Arc<Run>, job: ClaimedJob, ending: Ending, took: Option<Duration>) -> Self {
        Self { run, job, ending, took }
    }
}

/// The most ends one statement writes.
const BATCH: usize = 1000;
/// How many batches are on their way at once, and how long a second one gathers.
const BATCHES: usize = 2;
const GATHER: Duration = Duration::from_millis(5);
/// How long an end waits that did not get through because somebody held its row.
const HELD_ROW: Duration = Duration::from_millis(20);
const TICK: Duration = Duration::from_secs(5);

/// Writes ends in batches. While one is on its way, the next gathers; an end that comes alone is written at once.
#[derive(Default)]
pub(super) struct Finisher {
    ends: Mutex<Vec<End>>,
    wake: Notify,
}

/// What a batch left unwritten, and how it went.
#[derive(Default)]
struct Settled {
    again: Vec<End>,
    /// The database did not take some of them.
    outage: bool,
}

impl Finisher {
    /// True if that woke the task: see [`super::runners::let_others_run`].
    pub(super) fn push(&self, end: End) -> bool {
        let waiting = {
            let mut ends = lock(&self.ends);
            ends.push(end);
            ends.len()
        };
        let wake = waiting == 1 || waiting == BATCH;
        if wake {
            self.wake.notify_one();
        }
        wake
    }

    /// By a statement of its own.
    pub(super) async fn write_alone(&self, shared: &Shared, end: End) {
        let Settled { again, outage: _ } = guarded(shared, vec![end]).await;
        // Not for ever at the cost of a slot.
        for end in again {
            self.push(end);
        }
    }

    /// Writes until the end is asked for and all is written or given up.
    pub(super) async fn run(&self, shared: &Shared, beat: &Beat, end: &CancellationToken) {
        let mut writing = FuturesUnordered::new();
        let mut back_off = BackOff::default();
        // Those that are tried again, and when.
        let (mut again, mut at) = (Vec::new(), Instant::now());
        let mut gathering = None;
        loop {
            beat.beat();
            let now = Instant::now();
            let waiting = {
                let mut ends = lock(&self.ends);
                if at <= now {
                    ends.append(&mut again);
                }
                ends.len()
            };
            let due = *gathering.get_or_insert(now) + GATHER <= now || waiting >= BATCH;
            if waiting == 0 {
                gathering = None;
                if end.is_cancelled() && writing.is_empty() && again.is_empty() {
                    return;
                }
            } else if writing.is_empty() || (writing.len() < BATCHES && due) {
                let batch = lock(&self.ends).drain(..waiting.min(BATCH)).collect();
                writing.push(guarded(shared, batch));
                gathering = None;
            }
            let full = writing.len() == BATCHES;
            let second = gathering.filter(|_| !writing.is_empty() && !full).map(|since| since + GATHER);
            let third = (!again.is_empty()).then_some(at);
            let until = [second, third, Some(now + TICK)].into_iter().flatten().min().unwrap_or(now);
            tokio::select! {
                Some(Settled { again: left, outage }) = writing.next() => {
                    if outage {
                        at = Instant::now() + back_off.next();
                    } else {
                        back_off.reset();
                        at = Instant::now() + HELD_ROW;
                    }
                    again.extend(left);
                    // There is room for more claims.
                    shared.hungry.notify_one();
                }
                () = self.wake.notified(), if !full => {}
                () = sleep_until(until) => {}
                () = end.cancelled(), if !end.is_cancelled() => {}
            }
        }
    }
}

/// Writes a batch. One that panics is left to the rescue, and costs no other anything.
async fn guarded(shared: &Shared, batch: Vec<End>) -> Settled {
    let runs: Vec<Arc<Run>> = batch.iter().map(|end| end.run.clone()).collect();
    AssertUnwindSafe(settle(shared, batch)).catch_unwind().await.unwrap_or_else(|_panic| {
        tracing::error!(jobs = runs.len(), "writing the ends of attempts panicked: the rescue takes their jobs");
        shared.running.leave(runs.iter().map(|run| &**run));
        Settled::default()
    })
}

/// One try for each.
async fn settle(shared: &Shared, batch: Vec<End>) -> Settled {
    let (mut ends, mut kept, mut cancelled, mut left) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for End { run, job, ending, took } in batch {
        match &ending {
            Ending::Succeeded(result) => ends.push((job, AttemptEnd::Succeeded(result.clone()))),
            Ending::Failed(failure) => ends.push((job, AttemptEnd::Failed(failure.clone()))),
            Ending::Cancelled => {
                cancelled.push((run, job, ending, took));
                continue;
            }
            Ending::Left => {
                // The lease ends by itself.
                drop(job);
                left.push((run, ending, took));
                continue;
            }
        }
        kept.push((run, ending, took));
    }
    let cancel = future::join_all(
        cancelled
            .into_iter()
            .map(async |(run, job, ending, took)| (shared.queue.finalize_cancelled(job).await, (run, ending, took))),
    );
    let finish = async { if ends.is_empty() { Vec::new() } else { shared.queue.finish_many(ends).await } };
    let (answers, cancels) = future::join(finish, cancel).await;
    let all = left.into_iter().map(|kept| (Ok(Finish::Lost), kept)).chain(answers.into_iter().zip(kept)).chain(cancels);

    let mut settled = Settled::default();
    let mut gone = Vec::new();
    for (answer, (run, ending, took)) in all {
        let outcome = match answer {
            Ok(finish) => outcome(finish, &ending),
            Err(unfinished) => {
                let Unfinished { job, error } = *unfinished;
                match next_try(shared, &run, &job, ending.clone(), &error) {
                    Some(ending) => {
                        settled.outage |= error.is_passing() && !matches!(error, queue::Error::RowLocked);
                        settled.again.push(End { run, job, ending, took });
                        continue;
                    }
                    None => JobOutcome::Lost,
                }
            }
        };
        record(shared, &run, &ending, outcome, took);
        gone.push(run);
    }
    shared.running.leave(gone.iter().map(|run| &**run));
    settled
}

/// What to write at the next try. It is tried until a lease's length after the lease's end: until the rescue has
/// replaced the claim's token the write stands, and after that it can't hit.
fn next_try(shared: &Shared, run: &Run, job: &ClaimedJob, ending: Ending, error: &queue::Error) -> Option<Ending> {
    if !error.is_passing() {
        let instead = ending.storable(error);
        if instead.is_none() {
            tracing::error!(job = %job.id(), error = %error, "an attempt's end can't be written");
        }
        return instead;
    }
    if Instant::now() > run.orders().lease_until + shared.lease {
        tracing::warn!(job = %job.id(), error = %error, "gave up writing an attempt's end: the lease is long over");
        return None;
    }
    if !matches!(error, queue::Error::RowLocked) {
        shared.postgres.not_ready(error.to_string());
    }
    Some(ending)
}

fn outcome(finish: Finish, ending: &Ending) -> JobOutcome {
    let free = match ending {
        Ending::Failed(failure) => matches!(failure.cause, Cause::HandBack | Cause::RetryAfter(_)),
        Ending::Succeeded(_) | Ending::Cancelled | Ending::Left => false,
    };
    match finish {
        Finish::Lost => JobOutcome::Lost,
        Finish::Done(status) => match status {
            Status::Succeeded => JobOutcome::Succeeded,
            Status::FailedPermanent => JobOutcome::FailedPermanent,
            Status::Cancelled => JobOutcome::Cancelled,
            Status::Queued | Status::Retrying | Status::Running if free => JobOutcome::HandedBack,
            Status::Queued | Status::Retrying | Status::Running => JobOutcome::Retrying,
        },
    }
}

/// Counts an attempt and logs it. One that did not start is neither.
fn record(shared: &Shared, run: &Run, ending: &Ending, outcome: JobOutcome, took: Option<Duration>) {
    let Some(took) = took else { return };
    let kind = &shared.kinds[run.kind];
    kind.metrics.ended(outcome, took);
    let (id, kind, attempt) = (run.lease.id(), kind.name, run.number);
    let (outcome_name, seconds) = (outcome.as_str(), took.as_secs_f64());
    match outcome {
        JobOutcome::Succeeded => {
            tracing::debug!(job = %id, kind, attempt, outcome = outcome_name, seconds, "attempt ended");
        }
        JobOutcome::Retrying
        | JobOutcome::FailedPermanent
        | JobOutcome::Cancelled
        | JobOutcome::HandedBack
        | JobOutcome::Lost => {
            let error = match ending {
                Ending::Failed(failure) => failure.error.as_deref().map(|error| crate::text::cut(error, 256)),
                Ending::Succeeded(_) | Ending::Cancelled | Ending::Left => None,
            };
            tracing::info!(job = %id, kind, attempt, outcome = outcome_name, seconds, error, "attempt ended");
        }
    }
}
