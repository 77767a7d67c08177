//! Takes the next due jobs whenever slots are free, and no more than those: a claimed job starts at once.

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
    // A claim whose reply was lost: the jobs may be ours already.
    let mut open: Option<ClaimTicket> = None;
    while let Some(mut free) = free_slots(shutdown, slots, beat).await {
        let wanted = free.num_permits();
        let answer = next_jobs(shared, &mut open, wanted).await;
        beat.beat();
        shared.report(&answer);
        match answer {
            Ok(claims) => {
                back_off.reset();
                let more_may_be_due = claims.len() == wanted;
                for claim in claims {
                    match free.split(1) {
                        Some(slot) if !shutdown.is_cancelled() => {
                            shared.metrics.job_started(claim.job.kind(), claim.job.waited());
                            attempts.spawn(execute::run(shared.clone(), claim, slot));
                        }
                        // Beside the drain, whose end bounds how long it is tried.
                        _ => drop(attempts.spawn(hand_back_unstarted(shared.clone(), claim))),
                    }
                }
                drop(free);
                if !more_may_be_due {
                    // Never longer than the setting says, and never in step with other workers.
                    let pause = shared.settings.poll.mul_f64(rand::random_range(0.5..=1.0));
                    tokio::select! {
                        () = shared.woken(Channel::Ready) => {}
                        () = sleep(pause) => {}
                        () = shutdown.cancelled() => {}
                    }
                }
            }
            Err(_reported) => {
                drop(free);
                tokio::select! {
                    () = sleep(back_off.next()) => {}
                    () = shutdown.cancelled() => {}
                }
            }
        }
    }
}

/// The most jobs one claim takes.
const BATCH: usize = 500;

/// A claimed job and until when its lease holds.
pub(super) struct Claim {
    pub job: ClaimedJob,
    pub lease_until: Instant,
}

/// All slots that are free, at least one and at most a batch; none at the shutdown.
async fn free_slots(shutdown: &CancellationToken, slots: &Arc<Semaphore>, beat: &Beat) -> Option<OwnedSemaphorePermit> {
    loop {
        beat.beat();
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return None,
            slot = timeout(SLOT_TICK, slots.clone().acquire_owned()) => match slot {
                Ok(slot) => {
                    // The semaphore is never closed.
                    let mut free = slot.ok()?;
                    let more = slots.available_permits().min(BATCH - 1);
                    // This loop alone takes slots, so what is available stays so.
                    if let Some(more) = u32::try_from(more).ok().and_then(|n| slots.clone().try_acquire_many_owned(n).ok()) {
                        free.merge(more);
                    }
                    return Some(free);
                }
                Err(_full) => {}
            },
        }
    }
}

/// The next due jobs. This is not raced against the shutdown: a claim cut short may have taken jobs.
async fn next_jobs(shared: &Shared, open: &mut Option<ClaimTicket>, wanted: usize) -> queue::Result<Vec<Claim>> {
    let Shared { queue, settings, kinds, lease, .. } = shared;
    if let Some(ticket) = *open {
        let found = queue.take_up(ticket).await?;
        if !found.is_empty() {
            tracing::info!(jobs = found.len(), "took up a claim whose reply was lost");
            let found = renewed(shared, found).await?;
            *open = None;
            return Ok(found);
        }
        *open = None;
    }
    match queue.fetch_many(&settings.name, kinds, wanted).await {
        Ok(jobs) => Ok(jobs.into_iter().map(|job| Claim { lease_until: job.lease().since() + *lease, job }).collect()),
        Err(ClaimError { error, ticket }) => {
            *open = Some(ticket);
            Err(error)
        }
    }
}

/// Claims taken up late start with a fresh lease, or not at all: then the rescue has them.
async fn renewed(shared: &Shared, jobs: Vec<ClaimedJob>) -> queue::Result<Vec<Claim>> {
    let sent = Instant::now();
    let leases: Vec<_> = jobs.iter().map(ClaimedJob::lease).collect();
    let found = shared.queue.heartbeat(&leases).await?;
    let is_renewed = |job: &ClaimedJob| found.iter().any(|found| found.id == job.id() && found.renewed);
    let lease_until = sent + shared.lease;
    Ok(jobs.into_iter().filter(is_renewed).map(|job| Claim { job, lease_until }).collect())
}

async fn hand_back_unstarted(shared: Arc<Shared>, Claim { job, lease_until }: Claim) {
    complete::finish(&shared, job, complete::Ending::hand_back(None), || lease_until).await;
}
