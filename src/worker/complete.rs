//! Writes how an attempt ended. The row's next state is the queue's to decide; here is the patience to get it written.

use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};

use super::{BackOff, Shared};
use crate::admin::JobOutcome;
use crate::job::{Cause, Status};
use crate::queue::{AttemptEnd, AttemptFailure, ClaimedJob, Finish, Queue, Unfinished};

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

    /// Says it without whatever the row could not hold.
    fn unstorable(why: &str) -> Self {
        Self::failed(Cause::Permanent, format!("Unstorable: what the executor returned can't be stored: {why}"))
    }
}

/// Writes the attempt's end, again and again until the database has answered. It stops trying a lease's length after
/// the lease's end: until the rescue has replaced the claim's token the write stands, and after that it can't hit.
pub(super) async fn finish(
    shared: &Shared,
    mut job: ClaimedJob,
    mut ending: Ending,
    lease_until: impl Fn() -> Instant,
) -> JobOutcome {
    let mut back_off = BackOff::default();
    loop {
        let Unfinished { job: unfinished, error } = match write(shared, job, &ending).await {
            Ok(finish) => return outcome(finish, &ending),
            Err(unfinished) => *unfinished,
        };
        job = unfinished;
        if !error.is_passing() {
            ending = match ending {
                Ending::Succeeded(_) => Ending::unstorable(&error.to_string()),
                Ending::Failed(AttemptFailure { cause, error: text, progress: Some(_) }) => {
                    Ending::Failed(AttemptFailure { cause, error: text, progress: None })
                }
                // Nobody asked it to: the queue decides what an executor's own whim costs.
                Ending::Cancelled => Ending::failed(Cause::Cancelled, "Cancelled: the executor stopped unasked".into()),
                Ending::Failed(_) | Ending::Left => {
                    tracing::error!(job = %job.id(), error = %error, "an attempt's end can't be written");
                    return JobOutcome::Lost;
                }
            };
            continue;
        }
        if Instant::now() > lease_until() + shared.lease {
            tracing::warn!(job = %job.id(), error = %error, "gave up writing an attempt's end: the lease is long over");
            return JobOutcome::Lost;
        }
        shared.postgres.not_ready(error.to_string());
        sleep(back_off.next()).await;
    }
}

/// One try.
async fn write(shared: &Shared, job: ClaimedJob, ending: &Ending) -> Result<Finish, Box<Unfinished>> {
    match ending {
        Ending::Succeeded(result) => shared.finisher.finish(job, AttemptEnd::Succeeded(result.clone())).await,
        Ending::Failed(failure) => shared.finisher.finish(job, AttemptEnd::Failed(failure.clone())).await,
        Ending::Cancelled => shared.queue.finalize_cancelled(job).await,
        Ending::Left => {
            // The lease ends by itself.
            _ = job;
            Ok(Finish::Lost)
        }
    }
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

/// The most ends one statement writes.
const BATCH: usize = 1000;

struct Request {
    job: ClaimedJob,
    end: AttemptEnd,
    answer: oneshot::Sender<Result<Finish, Box<Unfinished>>>,
}

/// Writes ends in batches that make themselves: while one batch is on its way, the next one gathers. An end that comes
/// alone is written at once.
pub(super) struct Finisher {
    requests: mpsc::UnboundedSender<Request>,
}

impl Finisher {
    /// Runs until dropped; what was asked of it before is still written.
    pub(super) fn spawn(queue: Queue) -> Self {
        // As many requests as there are slots at most.
        let (requests, mut gathered) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while gathered.recv_many(&mut batch, BATCH).await > 0 {
                let (ends, answers): (Vec<_>, Vec<_>) =
                    batch.drain(..).map(|Request { job, end, answer }| ((job, end), answer)).unzip();
                for (finish, answer) in queue.finish_many(ends).await.into_iter().zip(answers) {
                    // Nobody waits any more if the worker gave up.
                    drop(answer.send(finish));
                }
            }
        });
        Self { requests }
    }

    async fn finish(&self, job: ClaimedJob, end: AttemptEnd) -> Result<Finish, Box<Unfinished>> {
        let (answer, finish) = oneshot::channel();
        // The task ends when this is dropped, and answers everything it has taken.
        drop(self.requests.send(Request { job, end, answer }));
        finish.await.expect("the finisher answers as long as it is asked")
    }
}
