//! `ttlSecondsAfterFinished`: a finished resource goes after its time, unless Git or Helm would bring it back and so
//! run its work again.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::events::News;
use super::reason::Reason;
use super::{Context, Result, patch};
use crate::api::{JobRequest, JobRequestStatus};

/// Labels and annotations by which Argo CD, Flux and Helm mark what they keep in place.
const LABELS: [&str; 3] =
    ["kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name", "argocd.argoproj.io/instance"];
const ANNOTATIONS: [&str; 2] = ["argocd.argoproj.io/tracking-id", "meta.helm.sh/release-name"];

/// Deletes the resource if its time is over by the database's clock; how long to wait if it is not yet.
/// `is_news` is whether its end was just shown.
pub(super) async fn expire(object: &JobRequest, is_news: bool, context: &Context) -> Result<Option<Duration>> {
    let Some(ttl) = of(object, context.default_ttl) else { return Ok(None) };
    let Some(finished) = object.status.as_ref().and_then(ended_at) else { return Ok(None) };
    if is_kept_by_gitops(object) {
        if is_news {
            let note = "stays in spite of its TTL: Argo CD, Flux or Helm would bring it back, and so run its job again";
            context.events.about(object, News::normal(Reason::TTLHeldBack, "Expire", note));
        }
        return Ok(None);
    }
    let now = context.queue.now().await?;
    let age = now.timestamp().saturating_sub(finished.0.as_second());
    let age = Duration::from_secs(u64::try_from(age).unwrap_or_default());
    if age < ttl {
        // The status shows whole seconds, so the end may have been a second later.
        return Ok(Some((ttl - age).max(Duration::from_secs(1)).min(Duration::from_secs(3600))));
    }
    patch::delete(&context.client, object).await?;
    Ok(None)
}

/// When it ended. Where no row says so (it was rejected, or its row is lost), since when it shows that.
fn ended_at(status: &JobRequestStatus) -> Option<&Time> {
    status.finished_at.as_ref().or_else(|| status.condition("Failed").map(|failed| &failed.last_transition_time))
}

/// How long the resource stays after its end; none for ever.
pub(super) fn of(object: &JobRequest, default: Option<Duration>) -> Option<Duration> {
    match object.spec.ttl_seconds_after_finished {
        Some(seconds) => u64::try_from(seconds).ok().map(Duration::from_secs),
        None => default,
    }
}

fn is_kept_by_gitops(object: &JobRequest) -> bool {
    LABELS.iter().any(|label| object.labels().contains_key(*label))
        || ANNOTATIONS.iter().any(|annotation| object.annotations().contains_key(*annotation))
}
