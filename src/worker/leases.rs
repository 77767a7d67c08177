//! Keeps the leases of the attempts under way and learns which were asked to stop.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::admin::Beat;
use crate::queue::Channel;

/// How often the worker looks for cancels unasked: the promise is two seconds.
const LOOK: Duration = Duration::from_secs(1);

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
async fn renew(shared: &Shared) -> bool {
    let leases = shared.running.leases();
    if leases.is_empty() {
        return true;
    }
    let sent = Instant::now();
    match timeout(shared.lease / 4, shared.queue.heartbeat(&leases)).await {
        Ok(answer) => {
            shared.report(&answer);
            answer.is_ok_and(|found| {
                shared.running.tell(&leases, &found, Some(sent + shared.lease));
                true
            })
        }
        Err(_) => {
            shared.postgres.not_ready("no answer to a heartbeat");
            false
        }
    }
}

/// Learns of cancels: at once by notification, and by looking.
pub(super) async fn watch_cancels(shared: Arc<Shared>, end: CancellationToken) {
    loop {
        tokio::select! {
            () = end.cancelled() => return,
            () = shared.woken(Channel::Cancel) => {}
            () = sleep(LOOK) => {}
        }
        let leases = shared.running.leases();
        if leases.is_empty() {
            continue;
        }
        // A failure is the heartbeat's to report.
        if let Some(Ok(found)) = end.run_until_cancelled(shared.queue.look_for_cancels(&leases)).await {
            shared.running.tell(&leases, &found, None);
        }
    }
}
