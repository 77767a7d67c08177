//! Rows whose resource is gone, resources whose row is gone.
//!
//! A finalizer taken off by hand, a deletion while no controller ran and the finalizer was not on yet: the row lives
//! and nobody will ever cancel it. The sweep is slow to judge: after a complete list, absent at two looks in a row, and
//! not found by a GET by name and uid.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kube::{Api, ResourceExt};
use uuid::Uuid;

use super::{Context, Error, Result, mirror::Trigger, patch, watch::Watch};
use crate::api::JobRequest;
use crate::queue::ResourceRef;

/// Time between two looks.
pub(super) const PERIOD: Duration = Duration::from_secs(15);
const PAGE: i64 = 500;

/// Sweeps until dropped, or until the rows prove to be another cluster's.
pub(super) async fn run(context: Arc<Context>, trigger: Trigger) -> Error {
    let mut missing = HashSet::new();
    loop {
        tokio::time::sleep(PERIOD).await;
        if !context.gate.is_open() {
            missing.clear();
            continue;
        }
        match look(&context, &trigger, &missing).await {
            Ok(now) => missing = now,
            Err(error @ Error::OtherCluster { .. }) => return error,
            Err(error) => {
                tracing::debug!(error = %error, "no look for orphans this time");
                missing.clear();
            }
        }
    }
}

/// One look: cancels what was missing before too, and returns what is missing now.
async fn look(context: &Context, trigger: &Trigger, before: &HashSet<Uuid>) -> Result<HashSet<Uuid>> {
    context.cluster.confirm(&context.queue).await?;
    context.queue.forget_releases().await?;
    let mut missing = HashSet::new();
    let mut after = Uuid::nil();
    loop {
        let page = context.queue.holders_of_live_rows(after, PAGE).await?;
        for resource in &page {
            let Some(watch) = trusted(trigger, resource) else { continue };
            if watch.knows(resource) {
                continue;
            }
            if !before.contains(&resource.uid) {
                missing.insert(resource.uid);
            } else if is_gone(context, resource).await? {
                context.cluster.confirm_server(&context.client, &context.queue).await?;
                let ResourceRef { uid, namespace, name } = resource;
                tracing::warn!(%uid, namespace, name, "the resource is gone without a cancel: its hold on the row ends");
                context.queue.release(*uid).await?;
            }
        }
        match next_page(&page) {
            Some(last) => after = last,
            None => break,
        }
    }
    let mut after = Uuid::nil();
    loop {
        let page = context.queue.holders_of_vanished_rows(after, PAGE).await?;
        for resource in &page {
            let Some(watch) = trusted(trigger, resource) else { continue };
            if watch.knows(resource) {
                trigger.send(resource, &context.due);
            } else if before.contains(&resource.uid) {
                // Neither a resource nor a row: nothing is lost with it.
                context.queue.forget_vanished(resource.uid).await?;
            } else {
                missing.insert(resource.uid);
            }
        }
        match next_page(&page) {
            Some(last) => after = last,
            None => return Ok(missing),
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
