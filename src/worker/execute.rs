//! One attempt, from claim to row: prepare, supervise, judge. The finisher writes how it ended.
//!
//! The executor is polled by the runner itself. A panic ends the attempt and nothing else; one that never yields holds
//! its runner and its slot, and the watch in `leases.rs` ends its job. What an attempt may still do is decided by
//! [`what_now`] alone; what its end means for the row by [`judge`] alone. Both are pure.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::complete::{End, Ending};
use super::desk::Freed;
use super::running::{Orders, Run, Started};
use super::{BackOff, Shared, runners};
use crate::job::Cause;
use crate::kinds::{Attempt, Executed, FailureCause};
use crate::queue::{self, ClaimedJob};

/// How long a cancelled job's executor has to end by itself.
const CANCEL_GRACE: Duration = Duration::from_secs(5);
/// How much longer an attempt past its point of no return may take than its time limit says.
const COMMITTED_GRACE: Duration = Duration::from_secs(30);
/// What bounds an attempt, fixed at its start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub timeout: Duration,
    pub deadline: Instant,
    /// An attempt is stopped this long before its lease ends.
    pub margin: Duration,
}

/// Runs a claimed job to its end. What it returns is the slot's.
pub(super) async fn run(shared: &Arc<Shared>, run: &Arc<Run>) -> Freed {
    let mut freed = Freed { kind: run.kind, took: None, alone: run.alone, away: false };
    let Some(job) = run.take_job() else { return freed };
    let end = match prepare(shared, run, job, &mut freed).await {
        Ok(started) => {
            let ended = supervise(shared, run, &started, &mut freed).await;
            let took = started.at.elapsed();
            freed.took = Some(took);
            let ending = judge(ended, &run.orders(), started.attempt.is_committed(), started.limits.timeout);
            // Unless the watch has ended it.
            run.ended().map(|job| End::new(run.clone(), job, ending, Some(took)))
        }
        Err((job, ending)) => Some(End::new(run.clone(), job, ending, None)),
    };
    let Some(end) = end else { return freed };
    if shared.settings.batch == 1 {
        away(shared, &mut freed);
        shared.finisher.write_alone(shared, end).await;
    } else if shared.finisher.push(end) {
        runners::let_others_run().await;
    }
    freed
}

/// The runner is about to wait: somebody else has to see to the next job.
fn away(shared: &Arc<Shared>, freed: &mut Freed) {
    if !std::mem::replace(&mut freed.away, true) && super::lock(&shared.desk).away() {
        runners::call(shared);
    }
}

/// Brings what the attempt needs and starts its clock; or says why it must not start.
async fn prepare(
    shared: &Arc<Shared>,
    run: &Run,
    mut job: ClaimedJob,
    freed: &mut Freed,
) -> Result<Arc<Started>, (ClaimedJob, Ending)> {
    let mut back_off = BackOff::default();
    loop {
        let now = Instant::now();
        let limits = Limits {
            timeout: job.timeout(),
            deadline: now + job.timeout(),
            margin: (shared.lease / 5).min(Duration::from_secs(2)),
        };
        if let Some(ending) = must_not_start(now, &run.orders(), &limits) {
            return Err((job, ending));
        }
        if job.payload().is_some() {
            match begin(shared, run, job, now, limits) {
                Ok(started) => return Ok(started),
                Err(told) => job = *told,
            }
            continue;
        }
        away(shared, freed);
        match shared.queue.load_payload(&mut job).await {
            Ok(()) => {}
            Err(queue::Error::NotFound) => return Err((job, Ending::Left)),
            Err(error) if error.is_passing() => sleep(back_off.next()).await,
            Err(error) => return Err((job, Ending::failed(Cause::Permanent, format!("PayloadInvalid: {error}")))),
        }
    }
}

fn must_not_start(now: Instant, orders: &Orders, limits: &Limits) -> Option<Ending> {
    if orders.cancelled.is_some() && !orders.lost {
        return Some(Ending::Cancelled);
    }
    if orders.hand_back.is_some() && !orders.lost {
        return Some(Ending::hand_back(None));
    }
    match what_now(now, orders, limits, false) {
        Step::Cut(_) => Some(Ending::Left),
        Step::GoOnUntil(_) => None,
    }
}

fn begin(
    shared: &Shared,
    run: &Run,
    mut job: ClaimedJob,
    at: Instant,
    limits: Limits,
) -> Result<Arc<Started>, Box<ClaimedJob>> {
    let mut attempt = Attempt::new(
        job.id(),
        job.namespace().map(str::to_owned),
        (job.attempt(), job.max_attempts()),
        job.take_payload().unwrap_or_else(|| RawValue::NULL.to_owned()),
        limits.deadline,
        CancellationToken::new(),
    );
    attempt.progress = job.progress().cloned();
    let waited = job.waited() + at.saturating_duration_since(job.lease().since());
    let started = run.start(job, Started { at, attempt, limits })?;
    shared.kinds[run.kind].metrics.started(waited);
    Ok(started)
}

/// How the executor ended, or was ended.
#[derive(Debug)]
enum Ended {
    Executed(Executed),
    Panicked(String),
    Cut(Cut),
}

/// Why an executor was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    LeaseOver,
    HandBack,
    Cancelled,
    TimedOut,
}

/// Waits for the executor's end and ends it when it must. Timers and orders are looked at only once it waits itself.
async fn supervise(shared: &Arc<Shared>, run: &Run, started: &Started, freed: &mut Freed) -> Ended {
    let Started { at: _, attempt, limits } = started;
    let executor = &shared.kinds[run.kind].executor;
    let work = AssertUnwindSafe(async { executor.execute(attempt).await }).catch_unwind();
    let mut work = std::pin::pin!(Some(work));
    let first = poll_fn(|context| Poll::Ready(poll(work.as_mut(), context))).await;
    if let Poll::Ready(ended) = first {
        return ended;
    }
    away(shared, freed);
    let why = loop {
        let until = match what_now(Instant::now(), &run.orders(), limits, attempt.is_committed()) {
            Step::GoOnUntil(instant) => instant,
            Step::Cut(why) => break why,
        };
        tokio::select! {
            biased;
            ended = poll_fn(|context| poll(work.as_mut(), context)) => return ended,
            () = run.told() => {}
            () = sleep_until(until) => {}
        }
    };
    attempt.stop_token().cancel();
    // What it drops may panic too.
    match catch_unwind(AssertUnwindSafe(|| work.set(None))) {
        Ok(()) => Ended::Cut(why),
        Err(panic) => Ended::Panicked(panic_message(&*panic)),
    }
}

fn poll<F>(work: Pin<&mut Option<F>>, context: &mut Context<'_>) -> Poll<Ended>
where
    F: Future<Output = Result<Executed, Box<dyn Any + Send>>>,
{
    let work = work.as_pin_mut().expect("nothing polls it once it is dropped");
    work.poll(context).map(|ended| match ended {
        Ok(executed) => Ended::Executed(executed),
        Err(panic) => Ended::Panicked(panic_message(&*panic)),
    })
}

/// How an attempt ends whose executor should have been stopped `since` and has not yielded; none if it should not have.
pub(super) fn stuck(since: Instant, orders: &Orders, started: &Started) -> Option<Ending> {
    let committed = started.attempt.is_committed();
    match what_now(since, orders, &started.limits, committed) {
        Step::Cut(why) => Some(judge(Ended::Cut(why), orders, committed, started.limits.timeout)),
        Step::GoOnUntil(_) => None,
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Unless new orders come.
    GoOnUntil(Instant),
    Cut(Cut),
}

/// Whether an attempt may go on, and until when. Of several reasons to stop, the one that came first counts.
///
/// Past its point of no return an attempt is not cut for a lease, a cancel or a hand-back, and has more time: cutting it
/// would not undo its effect. Two things still end it: much more than its time, and a shutdown that lasts too long.
fn what_now(now: Instant, orders: &Orders, limits: &Limits, committed: bool) -> Step {
    let Orders { lease_until, cancelled, lost, hand_back } = *orders;
    let before_its_end = lease_until.checked_sub(limits.margin).unwrap_or(lease_until);
    let lease = if lost { now } else { before_its_end };
    let ends = if committed {
        [
            (None, Cut::LeaseOver),
            (None, Cut::Cancelled),
            (hand_back.map(|order| order.give_up_at), Cut::HandBack),
            (Some(limits.deadline + COMMITTED_GRACE), Cut::TimedOut),
        ]
    } else {
        [
            (Some(lease), Cut::LeaseOver),
            (cancelled.map(|since| since + CANCEL_GRACE), Cut::Cancelled),
            (hand_back.map(|order| order.cut_at), Cut::HandBack),
            (Some(limits.deadline), Cut::TimedOut),
        ]
    };
    let first = ends.into_iter().filter_map(|(at, cut)| at.map(|at| (at, cut))).min_by_key(|(at, _)| *at);
    match first {
        Some((at, cut)) if at <= now => Step::Cut(cut),
        Some((at, _)) => Step::GoOnUntil(at),
        None => Step::GoOnUntil(limits.deadline),
    }
}

/// What the attempt's end means for its row.
fn judge(ended: Ended, orders: &Orders, committed: bool, limit: Duration) -> Ending {
    let uncertain = "Interrupted: the worker shut down while the effect was under way; it may have happened";
    match ended {
        Ended::Executed(Ok(result)) => Ending::Succeeded(result),
        Ended::Executed(Err(failure)) => {
            let cause = match failure.cause {
                FailureCause::Permanent => Cause::Permanent,
                FailureCause::Passing => Cause::Passing,
                FailureCause::RetryAfter(delay) => Cause::RetryAfter(delay),
                FailureCause::Cancelled if orders.cancelled.is_some() => return Ending::Cancelled,
                FailureCause::Cancelled if orders.lost => return Ending::Left,
                FailureCause::Cancelled if orders.hand_back.is_some() && !committed => {
                    return Ending::hand_back(failure.progress);
                }
                FailureCause::Cancelled => Cause::Cancelled,
            };
            let error = Some(format!("{}: {}", failure.reason, failure.message));
            Ending::Failed(crate::queue::AttemptFailure { cause, error, progress: failure.progress })
        }
        Ended::Panicked(message) => Ending::failed(Cause::Passing, message),
        Ended::Cut(Cut::LeaseOver) => Ending::Left,
        Ended::Cut(Cut::Cancelled) => Ending::Cancelled,
        Ended::Cut(Cut::HandBack) if committed => Ending::failed(Cause::Passing, uncertain.to_owned()),
        Ended::Cut(Cut::HandBack) => Ending::hand_back(None),
        Ended::Cut(Cut::TimedOut) => Ending::failed(
            Cause::Passing,
            format!("Timeout: the attempt took longer than its time limit of {} s", limit.as_secs()),
        ),
    }
}

/// A panic's text for the row. Only one that was written down in the source is shown: a formatted one may hold a part
/// of the payload.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    match panic.downcast_ref::<&'static str>() {
        Some(text) => format!("the executor panicked: {}", crate::text::cut(text, 256)),
        None => "the executor panicked: the message may hold data, the worker's log says where it happened".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kinds::Failure;
    use crate::worker::running::HandBack;

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);

    fn orders(now: Instant) -> Orders {
        Orders { lease_until: now + 10 * SECOND, cancelled: None, lost: false, hand_back: None }
    }

    fn limits(now: Instant) -> Limits {
        Limits { timeout: HOUR, deadline: now + HOUR, margin: 2 * SECOND }
    }

    #[tokio::test]
    async fn an_attempt_goes_on_until_shortly_before_its_lease_ends() {
        let now = Instant::now();
        let orders = orders(now);
        assert_eq!(what_now(now, &orders, &limits(now), false), Step::GoOnUntil(now + 8 * SECOND));
        assert_eq!(what_now(now + 8 * SECOND, &orders, &limits(now), false), Step::Cut(Cut::LeaseOver));
    }

    #[tokio::test]
    async fn a_lost_lease_ends_an_attempt_at_once_unless_it_is_past_its_point_of_no_return() {
        let now = Instant::now();
        let lost = Orders { lost: true, ..orders(now) };
        assert_eq!(what_now(now, &lost, &limits(now), false), Step::Cut(Cut::LeaseOver));
        let grace = now + HOUR + COMMITTED_GRACE;
        assert_eq!(what_now(now, &lost, &limits(now), true), Step::GoOnUntil(grace));
        assert_eq!(what_now(grace, &lost, &limits(now), true), Step::Cut(Cut::TimedOut));
    }

    #[tokio::test]
    async fn a_cancelled_attempt_has_a_few_seconds_and_a_committed_one_is_let_be() {
        let now = Instant::now();
        let cancelled = Orders { cancelled: Some(now), ..orders(now) };
        assert_eq!(what_now(now, &cancelled, &limits(now), false), Step::GoOnUntil(now + CANCEL_GRACE));
        assert_eq!(what_now(now + CANCEL_GRACE, &cancelled, &limits(now), false), Step::Cut(Cut::Cancelled));
        assert!(matches!(what_now(now + CANCEL_GRACE, &cancelled, &limits(now), true), Step::GoOnUntil(_)));
    }

    #[tokio::test]
    async fn a_shutdown_cuts_what_can_be_handed_back_and_gives_up_on_the_rest_later() {
        let now = Instant::now();
        let order = HandBack { cut_at: now + SECOND, give_up_at: now + 9 * SECOND };
        let told = Orders { hand_back: Some(order), ..orders(now) };
        assert_eq!(what_now(now, &told, &limits(now), false), Step::GoOnUntil(now + SECOND));
        assert_eq!(what_now(now + SECOND, &told, &limits(now), false), Step::Cut(Cut::HandBack));
        assert_eq!(what_now(now + SECOND, &told, &limits(now), true), Step::GoOnUntil(now + 9 * SECOND));
        assert_eq!(what_now(now + 9 * SECOND, &told, &limits(now), true), Step::Cut(Cut::HandBack));
        let cut = |committed| judge(Ended::Cut(Cut::HandBack), &told, committed, HOUR);
        assert_eq!(cut(false), Ending::hand_back(None));
        assert_eq!(cause(&cut(true)), Some(Cause::Passing), "its effect may have happened: not free");
    }

    #[tokio::test]
    async fn an_attempt_ends_at_its_time_limit() {
        let now = Instant::now();
        let limits = Limits { deadline: now + SECOND, ..limits(now) };
        assert_eq!(what_now(now, &orders(now), &limits, false), Step::GoOnUntil(now + SECOND));
        assert_eq!(what_now(now + SECOND, &orders(now), &limits, false), Step::Cut(Cut::TimedOut));
    }

    fn cause(ending: &Ending) -> Option<Cause> {
        match ending {
            Ending::Failed(failure) => Some(failure.cause),
            Ending::Succeeded(_) | Ending::Cancelled | Ending::Left => None,
        }
    }

    #[tokio::test]
    async fn an_executor_that_stopped_as_told_is_judged_by_what_it_was_told() {
        let now = Instant::now();
        let order = HandBack { cut_at: now, give_up_at: now };
        let plain = orders(now);
        let cancelled = Orders { cancelled: Some(now), ..plain };
        let (lost, shutdown) = (Orders { lost: true, ..plain }, Orders { hand_back: Some(order), ..plain });
        let judge = |orders, committed| judge(Ended::Executed(Err(Failure::cancelled())), orders, committed, HOUR);
        assert_eq!(judge(&cancelled, false), Ending::Cancelled);
        assert_eq!(judge(&lost, false), Ending::Left);
        assert_eq!(judge(&shutdown, false), Ending::hand_back(None));
        assert_eq!(cause(&judge(&shutdown, true)), Some(Cause::Cancelled), "the effect may have happened: not free");
        assert_eq!(cause(&judge(&plain, false)), Some(Cause::Cancelled), "nobody told it to stop");
    }

    #[tokio::test]
    async fn an_error_reads_reason_then_message_and_a_result_outweighs_a_cancel() {
        let now = Instant::now();
        let cancelled = Orders { cancelled: Some(now), ..orders(now) };
        let failure = Failure::retry_after(SECOND, "Busy", "the receiver answered 429").with_progress(json!(1));
        let Ending::Failed(failure) = judge(Ended::Executed(Err(failure)), &orders(now), false, HOUR) else {
            panic!("a failure");
        };
        assert_eq!(failure.error.as_deref(), Some("Busy: the receiver answered 429"));
        assert_eq!((failure.cause, failure.progress), (Cause::RetryAfter(SECOND), Some(json!(1))));
        assert_eq!(
            judge(Ended::Executed(Ok(json!(2))), &cancelled, false, HOUR),
            Ending::Succeeded(json!(2)),
            "the work is done"
        );
    }

    #[test]
    fn a_panics_text_is_shown_when_it_was_written_down_and_hidden_when_it_was_made() {
        let panicking = |work: fn()| panic_message(&*std::panic::catch_unwind(work).expect_err("it panics"));
        assert_eq!(panicking(|| panic!("boom")), "the executor panicked: boom");
        let secret = panicking(|| panic!("can't read {}", "hunter2".to_owned()));
        assert!(!secret.contains("hunter2"), "{secret}");
    }
}
