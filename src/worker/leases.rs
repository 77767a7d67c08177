//! Keeps the leases of all jobs that the worker holds, learns which were asked to stop, and ends attempts that no longer
//! answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::complete::{End, Ending};
use super::running::{Run, Running};
use super::{Shared, claim, execute, lock, runners};
use crate::admin::Beat;
use crate::queue::{Channel, Lease};

/// How often the worker looks for cancels unasked: the promise is two seconds.
const LOOK: Duration = Duration::from_secs(1);
/// A claim sees the cancels before it, so one that is younger than this can wait for the next look.
const YOUNG: Duration = Duration::from_millis(300);
/// How long an executor has to be gone after it was stopped; one that never yields is left behind.
const STOPPING: Duration = Duration::from_secs(1);
/// How long a prefetched job may wait for its slot. What waits longer was claimed by mistake: the attempts before it
/// take longer than those of their kind used to.
const AHEAD: Duration = Duration::from_secs(2);

/// Renews all leases every third of their length, in one statement. After a failure it tries again sooner, so that a
/// lease survives any outage that is a good deal shorter than itself.
pub(super) async fn keep(shared: Arc<Shared>, beat: Beat, end: CancellationToken) {
    let lease = shared.lease;
    let mut pause = lease / 3;
    while end.run_until_cancelled(sleep(pause)).await.is_some() {
        beat.beat();
        pause = match end.run_until_cancelled(renew(&shared)).await {
            None => return,
            Some(true) => lease / 3,
            Some(false) => (lease / 12).min(Duration::from_secs(2)),
        };
    }
}

/// True unless the database did not answer in time.
async fn renew(shared: &Arc<Shared>) -> bool {
    // One that began a moment ago lasts until the next time.
    let runs = held(shared, shared.lease / 6);
    if runs.is_empty() {
        return true;
    }
    let sent = Instant::now();
    match timeout(shared.lease / 4, shared.queue.heartbeat(&leases(&runs))).await {
        Ok(answer) => {
            shared.report(&answer);
            answer.is_ok_and(|found| {
                let stopped = Running::tell(&runs, &found, Some(sent + shared.lease));
                end_unstarted(shared, stopped);
                true
            })
        }
        Err(_) => {
            shared.postgres.not_ready("no answer to a heartbeat");
            false
        }
    }
}

/// Looks after the held jobs every second: cancels (at once by notification, too), executors that don't yield, jobs
/// that were prefetched in vain.
pub(super) async fn watch(shared: Arc<Shared>, end: CancellationToken) {
    loop {
        let runs = tokio::select! {
            () = end.cancelled() => return,
            () = shared.woken(Channel::Cancel) => held(&shared, Duration::ZERO),
            () = sleep(LOOK) => held(&shared, YOUNG),
        };
        if runs.is_empty() {
            continue;
        }
        end_stuck(&shared, &runs);
        give_back_waiting(&shared);
        // A failure is the heartbeat's to report.
        if let Some(Ok(found)) = end.run_until_cancelled(shared.queue.look_for_cancels(&leases(&runs))).await {
            let stopped = Running::tell(&runs, &found, None);
            end_unstarted(&shared, stopped);
        }
    }
}

/// The jobs whose leases began at least so long ago.
fn held(shared: &Shared, age: Duration) -> Vec<Arc<Run>> {
    let mut runs = shared.running.all();
    runs.retain(|run| run.lease.since().elapsed() >= age);
    runs
}

fn leases(runs: &[Arc<Run>]) -> Vec<Lease> {
    runs.iter().map(|run| run.lease).collect()
}

/// Prefetched jobs that must not start any more don't wait for a slot to end.
fn end_unstarted(shared: &Arc<Shared>, any: bool) {
    if !any {
        return;
    }
    let stopped = lock(&shared.desk).withdraw(|run| run.orders().stop());
    runners::call_if_needed(shared);
    for run in stopped {
        let ending = if run.orders().lost { Ending::Left } else { Ending::Cancelled };
        if let Some(job) = run.take_job() {
            shared.finisher.push(End::new(run, job, ending, None));
        }
    }
}

/// Ends the jobs of executors that should have been gone for a while. They keep their slots.
fn end_stuck(shared: &Shared, runs: &[Arc<Run>]) {
    let now = Instant::now();
    let since = now.checked_sub(STOPPING).unwrap_or(now);
    for run in runs {
        let Some(started) = run.started() else { continue };
        let Some(ending) = execute::stuck(since, &run.orders(), &started) else { continue };
        if let Some(job) = run.ended() {
            started.attempt.stop_token().cancel();
            tracing::warn!(job = %job.id(), "an executor does not yield: it keeps its slot until it does");
            shared.finisher.push(End::new(run.clone(), job, ending, Some(started.at.elapsed())));
        }
    }
}

fn give_back_waiting(shared: &Arc<Shared>) {
    let waiting = {
        let mut desk = lock(&shared.desk);
        let waiting = desk.withdraw(|run| run.lease.since().elapsed() > AHEAD);
        waiting.iter().for_each(|run| desk.forget_pace(run.kind));
        waiting
    };
    runners::call_if_needed(shared);
    claim::hand_back(shared, waiting);
}
