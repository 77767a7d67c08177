//! What every worker does beside its jobs, for all of them: ends dead workers' leases, removes old rows, measures the
//! queue. Any number may do it at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::admin::Beat;

const PURGE_EVERY: Duration = Duration::from_secs(60);
/// While there is something to remove, a purge pauses as long as its last batch took, within these bounds.
const PURGE_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
const MEASURE_EVERY: Duration = Duration::from_secs(15);
/// Measuring takes at most this share of the time.
const MEASURE_SHARE: u32 = 20;
/// A rescue that found this many may have left some, and the pause before the next.
const RESCUE_MANY: u64 = 100;
const RESCUE_PAUSE: Duration = Duration::from_millis(50);
/// One that found nothing is followed by a pause of at least so many times what it took, though never by more than a
/// lease: while a transaction elsewhere holds an old snapshot, it walks the entries of all jobs that have ended since.
const RESCUE_REST: u32 = 20;

/// Every third of a lease, at once after the start, again at once while there is much to do; less often, but once in a
/// lease, when a look takes long.
pub(super) async fn rescue(shared: Arc<Shared>, beat: Beat, end: CancellationToken) {
    loop {
        beat.beat();
        let (started, regular) = (Instant::now(), shared.lease / 3);
        let pause = match end.run_until_cancelled(shared.queue.recover_stale()).await {
            None => return,
            Some(Ok(rescued)) if rescued.total() > 0 => {
                let crate::queue::Rescued { retried, failed, cancelled } = rescued;
                tracing::info!(retried, failed, cancelled, "ended leases whose workers are gone");
                if rescued.total() >= RESCUE_MANY { RESCUE_PAUSE } else { spread(regular) }
            }
            Some(Ok(_)) => spread(regular.max((started.elapsed() * RESCUE_REST).min(shared.lease))),
            Some(Err(error)) => {
                // That the database is away is the claim loop's to report.
                tracing::debug!(error = %error, "the rescue will try again");
                spread(regular)
            }
        };
        if end.run_until_cancelled(sleep(pause)).await.is_none() {
            return;
        }
    }
}

/// Every minute, in batches for as long as they remove something: at most half of the time of one connection.
pub(super) async fn purge(shared: Arc<Shared>, end: CancellationToken) {
    let mut pause = spread(PURGE_EVERY);
    while end.run_until_cancelled(sleep(pause)).await.is_some() {
        let started = Instant::now();
        pause = match end.run_until_cancelled(shared.queue.purge()).await {
            None => return,
            Some(Ok(purged)) if purged.jobs + purged.keys > 0 => {
                tracing::debug!(jobs = purged.jobs, keys = purged.keys, "removed what retention allows");
                started.elapsed().clamp(PURGE_PAUSE.0, PURGE_PAUSE.1)
            }
            Some(Ok(_)) => spread(PURGE_EVERY),
            Some(Err(error)) => {
                tracing::debug!(error = %error, "the purge will try again");
                spread(PURGE_EVERY)
            }
        };
    }
}

/// Every quarter of a minute, less often when a deep queue makes counting slow.
pub(super) async fn measure(shared: Arc<Shared>, end: CancellationToken) {
    loop {
        let started = Instant::now();
        match end.run_until_cancelled(shared.queue.depth()).await {
            None => return,
            Some(Ok(depth)) => shared.metrics.queue_depth(&depth),
            Some(Err(error)) => tracing::debug!(error = %error, "the queue's depth is unknown for now"),
        }
        let pause = spread(MEASURE_EVERY.max(started.elapsed() * MEASURE_SHARE));
        if end.run_until_cancelled(sleep(pause)).await.is_none() {
            return;
        }
    }
}

/// Workers that started together don't stay in step. Never longer than asked for.
fn spread(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.75..=1.0))
}
