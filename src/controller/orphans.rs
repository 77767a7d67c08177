//! Rows whose resource is gone, resources whose row is gone.
//!
//! A finalizer taken off by hand, a deletion while no controller ran and the finalizer was not on yet: the row lives
//! and nobody will ever cancel it. The sweep is slow to judge: after a complete list, absent at two looks in a row, and
//! not found by a GET by name and uid. Of many, it holds back for a while before it ends most of them (`brake.rs`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Api, ResourceExt};
use uuid::Uuid;

use super::brake::{Brake, Verdict};
use super::events::News;
use super::reason::Reason;
use super::{Context, Error, Result, mirror::Trigger, patch, watch::Watch};
use crate::admin::Beat;
use crate::api::JobRequest;
use crate::queue::ResourceRef;

/// Time between two looks.
pub(super) const PERIOD: Duration = Duration::from_secs(15);
const PAGE: i64 = 500;
/// How many orphans are ended at once.
const AT_ONCE: usize = 8;

/// What one look leaves for the next.
struct Sweep {
    context: Arc<Context>,
    trigger: Trigger,
    /// Missing at the last look.
    missing: HashSet<Uuid>,
    brake: Brake,
    /// The install's Lease, the one object that is its own: Events are about it.
    lease: ObjectReference,
    beat: Beat,
}

/// Sweeps until dropped, or until the rows prove to be another cluster's. `wait` is the brake's.
pub(super) async fn run(
    context: Arc<Context>,
    trigger: Trigger,
    wait: Duration,
    lease: ObjectReference,
    beat: Beat,
) -> Error {
    let (missing, brake) = (HashSet::new(), Brake::new(wait));
    let mut sweep = Sweep { context, trigger, missing, brake, lease, beat };
    loop {
        sweep.beat.beat();
        tokio::time::sleep(PERIOD).await;
        if !sweep.context.gate.is_open() {
            sweep.missing.clear();
            continue;
        }
        match sweep.look().await {
            Ok(now) => sweep.missing = now,
            Err(error @ Error::OtherCluster { .. }) => return error,
            Err(error) => {
                tracing::debug!(error = %error, "no look for orphans this time");
                sweep.missing.clear();
            }
        }
    }
}

impl Sweep {
    /// One look: ends what was missing before too, and returns what is missing now.
    async fn look(&mut self) -> Result<HashSet<Uuid>> {
        let context = self.context.clone();
        context.cluster.confirm(&context.queue).await?;
        context.queue.forget_releases().await?;
        let (mut missing, mut orphans, mut live) = (HashSet::new(), Vec::new(), 0);
        let mut after = Uuid::nil();
        loop {
            self.beat.beat();
            let page = context.queue.holders_of_live_rows(after, PAGE).await?;
            let next = next_page(&page);
            for resource in page {
                let Some(watch) = trusted(&self.trigger, &resource) else { continue };
                live += 1;
                if watch.knows(&resource) {
                    continue;
                }
                missing.insert(resource.uid);
                if self.missing.contains(&resource.uid) {
                    orphans.push(resource);
                }
            }
            match next {
                Some(last) => after = last,
                None => break,
            }
        }
        self.end(orphans, live).await?;
        self.vanished(&mut missing).await?;
        Ok(missing)
    }

    /// Ends the holds of resources that are gone, if they are not too many of the live ones.
    async fn end(&mut self, orphans: Vec<ResourceRef>, live: usize) -> Result<()> {
        let (context, count) = (self.context.clone(), orphans.len());
        let verdict = self.brake.judge(live, count, Instant::now());
        context.metrics.orphans_held_back(if verdict == Verdict::Go { 0 } else { count });
        if let Verdict::Hold { first, left } = verdict {
            if first {
                let note = format!(
                    "{count} of {live} live jobs have no JobRequest any more: they are cancelled in {} seconds, unless \
                     their JobRequests are back by then; stop the controller if this is the wrong cluster",
                    left.as_secs()
                );
                tracing::warn!(orphans = count, live, wait_seconds = left.as_secs(), "too many orphans: held back");
                context.events.tell(self.lease.clone(), News::warning(Reason::OrphansHeldBack, "Sweep", note));
            }
            return Ok(());
        }
        if orphans.is_empty() {
            return Ok(());
        }
        context.cluster.confirm_server(&context.client, &context.queue).await?;
        let (context, beat) = (&context, &self.beat);
        let ended = stream::iter(orphans).map(|resource| async move {
            beat.beat();
            if is_gone(context, &resource).await? {
                let ResourceRef { uid, namespace, name } = &resource;
                tracing::warn!(%uid, namespace, name, "the resource is gone without a cancel: its hold on the row ends");
                context.queue.release(*uid).await?;
                context.metrics.orphan_ended();
            }
            Ok(())
        });
        ended.buffer_unordered(AT_ONCE).try_collect::<()>().await
    }

    /// Resources whose row is gone.
    async fn vanished(&self, missing: &mut HashSet<Uuid>) -> Result<()> {
        let (context, trigger) = (&self.context, &self.trigger);
        let mut after = Uuid::nil();
        loop {
            self.beat.beat();
            let page = context.queue.holders_of_vanished_rows(after, PAGE).await?;
            for resource in &page {
                let Some(watch) = trusted(trigger, resource) else { continue };
                if watch.knows(resource) {
                    trigger.send(resource, &context.due);
                } else if self.missing.contains(&resource.uid) {
                    // Neither a resource nor a row: nothing is lost with it.
                    context.queue.forget_vanished(resource.uid).await?;
                } else {
                    missing.insert(resource.uid);
                }
            }
            match next_page(&page) {
                Some(last) => after = last,
                None => return Ok(()),
            }
        }
    }
}

/// The watch over this resource, if it can say that it is missing: only after a complete list, and while it lasts.
fn trusted<'a>(trigger: &'a Trigger, resource: &ResourceRef) -> Option<&'a Watch> {
    trigger.watch_over(resource).filter(|watch| watch.is_complete() && watch.answers())
}

/// Where the next page begins, if this one was full.
fn next_page(page: &[ResourceRef]) -> Option<Uuid> {
    page.last().filter(|_| page.len() >= usize::try_from(PAGE).unwrap_or(usize::MAX)).map(|last| last.uid)
}

async fn is_gone(context: &Context, resource: &ResourceRef) -> Result<bool> {
    let api: Api<JobRequest> = Api::namespaced(context.client.clone(), &resource.namespace);
    let now = patch::bounded(api.get_opt(&resource.name)).await?;
    Ok(now.is_none_or(|now| now.uid().as_deref() != Some(resource.uid.to_string().as_str())))
}
