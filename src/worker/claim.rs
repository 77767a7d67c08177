//! Takes the next due job whenever a slot is free, and only then: a claimed job starts at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{BackOff, Shared, complete, execute};
use crate::admin::Beat;
use crate::queue::{self, Channel, ClaimError, ClaimTicket, ClaimedJob};

/// How often a worker without a free slot shows that it lives.
const SLOT_TICK: Duration = Duration::from_secs(5);

/// Claims until the shutdown.
///
/// Notifications are kept while nobody waits for them, so one that arrives between a look that found nothing and the
/// wait ends that wait at once.
pub(super) async fn claim_until(
    shutdown: &CancellationToken,
    shared: &Arc<Shared>,
    slots: &Arc<Semaphore>,
    attempts: &TaskTracker,
    beat: &Beat,
) {
    let mut back_off = BackOff::default();
    // A claim whose reply was lost: the job may be ours already.
    let mut open: Option<ClaimTicket> = None;
    while let Some(slot) = free_slot(shutdown, slots, beat).await {
        let answer = next_job(shared, &mut open).await;
        beat.beat();
        shared.report(&answer);
        match answer {
            Ok(Some(claim)) => {
                back_off.reset();
                if shutdown.is_cancelled() {
                    hand_back_unstarted(shared, claim).await;
                } else {
                    shared.metrics.job_started(claim.job.kind(), claim.job.waited());
                    attempts.spawn(execute::run(shared.clone(), claim, slot));
                }
            }
            Ok(None) => {
                back_off.reset();
                drop(slot);
                // Never longer than the setting says, and never in step with other workers.
                let pause = shared.settings.poll.mul_f64(rand::random_range(0.5..=1.0));
                tokio::select! {
                    () = shared.woken(Channel::Ready) => {}
                    () = sleep(pause) => {}
                    () = shutdown.cancelled() => {}
                }
            }
            Err(_reported) => {
                drop(slot);
                tokio::select! {
                    () = sleep(back_off.next()) => {}
                    () = shutdown.cancelled() => {}
                }
            }
        }
    }
}

/// A claimed job and until when its lease holds.
pub(super) struct Claim {
    pub job: ClaimedJob,
    pub lease_until: Instant,
}

/// None at the shutdown.
async fn free_slot(shutdown: &CancellationToken, slots: &Arc<Semaphore>, beat: &Beat) -> Option<OwnedSemaphorePermit> {
    loop {
        beat.beat();
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return None,
            slot = timeout(SLOT_TICK, slots.clone().acquire_owned()) => match slot {
                // The semaphore is never closed.
                Ok(slot) => return slot.ok(),
                Err(_full) => {}
            },
        }
    }
}

/// The next due job. This is not raced against the shutdown: a claim cut short may have taken a job.
async fn next_job(shared: &Shared, open: &mut Option<ClaimTicket>) -> queue::Result<Option<Claim>> {
    let Shared { queue, settings, kinds, lease, .. } = shared;
    if let Some(ticket) = *open {
        let found = queue.take_up(ticket).await?;
        *open = None;
        if let Some(job) = found {
            tracing::info!(job = %job.id(), "took up a claim whose reply was lost");
            return renewed(shared, job).await;
        }
    }
    match queue.fetch_next(&settings.name, kinds).await {
        Ok(job) => Ok(job.map(|job| Claim { lease_until: job.lease().since() + *lease, job })),
        Err(ClaimError { error, ticket }) => {
            *open = Some(ticket);
            Err(error)
        }
    }
}

/// A claim taken up late starts with a fresh lease, or not at all: then the rescue has it.
async fn renewed(shared: &Shared, job: ClaimedJob) -> queue::Result<Option<Claim>> {
    let sent = Instant::now();
    let found = shared.queue.heartbeat(&[job.lease()]).await?;
    Ok(found.iter().any(|found| found.renewed).then(|| Claim { job, lease_until: sent + shared.lease }))
}

async fn hand_back_unstarted(shared: &Shared, Claim { job, lease_until }: Claim) {
    complete::finish(shared, job, complete::Ending::hand_back(None), || lease_until).await;
}
