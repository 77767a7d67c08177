//! A resource while the database is away: it says so once and is woken when it is back, or is let go by a person's word.

use kube::ResourceExt;
use kube::runtime::controller::Action;

use super::events::News;
use super::patch::{self, Written};
use super::reason::Reason;
use super::reconcile::{Shown, has_finalizer, show};
use super::status::Standing;
use super::young::YOUNG;
use super::{Context, Result};
use crate::api::{ABANDON_ANNOTATION, JobRequest};

/// Whoever waits for the database says so once and is woken when it is back.
pub(super) async fn wait_for_database(object: &JobRequest, context: &Context) -> Result<Action> {
    if !context.gate.park(patch::reference(object)?) {
        return Ok(Action::requeue(YOUNG));
    }
    let deleting = object.metadata.deletion_timestamp.is_some();
    if deleting && has_finalizer(object) && is_abandoned(object) && context.gate.is_closed() {
        return abandon(object, context).await;
    }
    let accepted = object.status.as_ref().is_some_and(|status| status.job_id.is_some() || status.phase.is_some());
    if context.gate.is_closed() && (deleting || !accepted) {
        // Written at best: a resource that changed meanwhile comes back anyway.
        match show(object, context, &Standing::DatabaseUnavailable).await? {
            Shown::As(_) | Shown::Stale | Shown::Gone => {}
        }
    }
    Ok(Action::await_change())
}

fn is_abandoned(object: &JobRequest) -> bool {
    object.annotations().get(ABANDON_ANNOTATION).is_some_and(|value| value == "true")
}

/// Somebody has given the database up, or needs the namespace gone now. Should it come back, the orphan sweep cancels what
/// the resource leaves there.
async fn abandon(object: &JobRequest, context: &Context) -> Result<Action> {
    match patch::remove_finalizer(context, object).await? {
        Written::Done(_) => {
            let (namespace, name) = (object.namespace(), object.name_any());
            tracing::warn!(namespace, name, "let go without the database, as its annotation says: its job may go on");
            let note =
                "let go while the database is away; its job, if it has one, is cancelled when the database is back";
            context.events.about(object, News::warning(Reason::Abandoned, "Delete", note));
        }
        // Changed since: it comes back with the change.
        Written::Gone | Written::Stale => {}
    }
    Ok(Action::await_change())
}
