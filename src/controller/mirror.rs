//! Row changes to reconciles, and the loops that look after rows without being asked: rescue, orphans.
//!
//! Level-triggered: a row stays due in the database until the status of its newest revision is written, so a lost
//! notification costs one poll and a crash nothing. The pass over due rows also finds out whether the database lives.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::watch::Watch;
use super::{Context, Error, Result};
use crate::admin::{Beat, Part};
use crate::queue::{Channel, Listener, Queue, ResourceRef, SchemaState};

/// How often the pass runs without a notification.
const POLL: Duration = Duration::from_secs(2);
/// The shortest time between two passes: many changes make one pass.
const GAP: Duration = Duration::from_millis(10);
/// And so many times what the last one took, at most as long as without a notification: a pass over a hundred thousand
/// rows whose statuses have yet to be written must not follow on the last.
const REST: u32 = 4;
const PAGE: i64 = 500;
/// A rescue that found this many may have left some: the next one comes at once.
const RESCUE_MANY: u64 = 100;
const RESCUE_PAUSE: Duration = Duration::from_millis(50);

/// Which resources' rows are known to be newer than what they show: a hint that saves others a look at the database.
#[derive(Default)]
pub(super) struct Due(Mutex<HashSet<Uuid>>);

impl Due {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashSet<Uuid>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn take(&self, uid: Uuid) -> bool {
        self.entries().remove(&uid)
    }

    fn put(&self, uid: Uuid) {
        self.entries().insert(uid);
    }
}

/// Sends resources to the controller's queue, which keeps one entry for each.
#[derive(Clone)]
pub(super) struct Trigger {
    pub(super) watches: Arc<Vec<Watch>>,
}

impl Trigger {
    pub(super) fn watch_over(&self, resource: &ResourceRef) -> Option<&Watch> {
        self.watches.iter().find(|watch| watch.covers(&resource.namespace))
    }

    /// Only resources that the cache knows under this uid: one that is gone is the orphan sweep's.
    pub(super) fn send(&self, resource: &ResourceRef, due: &Due) {
        let Some(watch) = self.watch_over(resource) else { return };
        if watch.knows(resource) {
            due.put(resource.uid);
            watch.trigger(resource);
        }
    }
}

/// How often a standby looks.
const STANDBY: Duration = Duration::from_secs(5);

/// For a standby: whether the database answers and has this version's schema. Until dropped.
pub(super) async fn look(queue: &Queue, part: &Part) -> Infallible {
    loop {
        match check(queue).await {
            Ok(()) => part.ready(),
            Err(error) => part.not_ready(error.to_string()),
        }
        tokio::time::sleep(STANDBY).await;
    }
}

async fn check(queue: &Queue) -> Result<()> {
    match queue.schema_state().await? {
        SchemaState::Current => Ok(()),
        SchemaState::Behind(missing) => Err(Error::Schema { missing }),
    }
}

/// Passes over due rows until dropped, or until the rows prove to be another cluster's.
pub(super) async fn run(context: Arc<Context>, trigger: Trigger, listener: Listener, part: Part, beat: Beat) -> Error {
    let mut pause = POLL;
    let mut answered = vec![false; trigger.watches.len()];
    loop {
        let started = Instant::now();
        // A pass that failed is followed by its pause alone: how long it took is the outage's doing.
        let mut rest = GAP;
        match pass(&context, &trigger, &beat).await {
            Ok(()) => {
                rest = (started.elapsed() * REST).clamp(GAP, POLL);
                pause = POLL;
                part.ready();
                context.gate.open().iter().for_each(|resource| trigger.send(resource, &context.due));
            }
            Err(error @ Error::OtherCluster { .. }) => return error,
            Err(error) => {
                part.not_ready(error.to_string());
                context.gate.close().iter().for_each(|resource| trigger.send(resource, &context.due));
                // Everybody else waits for this loop, so it is the only one to ask.
                pause = (pause * 2).min(Duration::from_secs(5));
            }
        }
        beat.beat();
        tokio::time::sleep(rest).await;
        tokio::select! {
            () = listener.woken(Channel::Changed) => {}
            () = tokio::time::sleep(pause) => {}
        }
        for (watch, before) in trigger.watches.iter().zip(&mut answered) {
            let now = watch.answers();
            if now && !std::mem::replace(before, now) {
                let released = context.back_off.release(|resource| watch.covers(&resource.namespace));
                released.iter().for_each(|resource| trigger.send(resource, &context.due));
            }
            *before = now;
        }
    }
}

async fn pass(context: &Context, trigger: &Trigger, beat: &Beat) -> Result<()> {
    if !context.gate.is_open() {
        check(&context.queue).await?;
        context.cluster.bind(&context.queue).await?;
    }
    let mut after = None;
    loop {
        beat.beat();
        let (resources, next) = context.queue.due(after, PAGE).await?;
        // Without an API server a try is in vain; one that failed has its own time for the next.
        let answers = |resource: &&ResourceRef| trigger.watch_over(resource).is_some_and(Watch::answers);
        let due = resources.iter().filter(answers).filter(|resource| !context.back_off.is_waiting(resource.uid));
        due.for_each(|resource| trigger.send(resource, &context.due));
        match next {
            Some(_) => after = next,
            None => return Ok(()),
        }
    }
}

/// Ends leases that have run out, for all kinds: a worker pool at zero must not leave rows and finalizers hanging.
pub(super) async fn rescue(queue: Queue, context: Arc<Context>, every: Duration, beat: Beat) -> Infallible {
    loop {
        beat.beat();
        let mut pause = every;
        if context.gate.is_open() {
            match queue.recover_stale().await {
                Ok(rescued) if rescued.total() > 0 => {
                    tracing::info!(?rescued, "leases had run out");
                    if rescued.total() >= RESCUE_MANY {
                        pause = RESCUE_PAUSE;
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(error = %error, "no rescue this time"),
            }
        }
        tokio::time::sleep(pause.min(every)).await;
    }
}
