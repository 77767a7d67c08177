//! One resource against its row: gather, decide, apply. Ignorant of why it was called; never decides from `.status`,
//! except for what only the resource knows: that it ended, or once ran.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use uuid::Uuid;

use super::events::{self, News};
use super::patch::{self, Written};
use super::reason::Reason;
use super::spec::{retry_mark, to_edit, to_job};
use super::status::{Standing, render, time};
use super::young::YOUNG;
use super::{Context, Error, Result, outage, ttl};
use crate::api::{FINALIZER, JobRequest, JobRequestStatus, Phase};
use crate::job::{Job, Status};
use crate::queue::{self, Held, Release, RetryOutcome};

/// How often a write that found the resource changed is decided anew before the back-off takes over.
const REREADS: usize = 4;

/// What to do next.
enum Step {
    /// Nothing until the resource or its row changes.
    Rest,
    /// Look again after this time.
    After(Duration),
    /// The resource has changed since it was read.
    Reread,
}

pub(super) async fn reconcile(object: Arc<JobRequest>, context: Arc<Context>) -> Result<Action> {
    let due = context.due.take(patch::uid(&object)?);
    if !due && is_settled(&object, context.default_ttl) {
        return Ok(Action::await_change());
    }
    if !context.gate.is_open() {
        return outage::wait_for_database(&object, &context).await;
    }
    let mut current = (*object).clone();
    for _ in 0..REREADS {
        match step(&current, &context).await {
            Ok(Step::Rest) => return Ok(Action::await_change()),
            Ok(Step::After(delay)) => return Ok(Action::requeue(delay)),
            Ok(Step::Reread) => match patch::fresh(&context.client, &object).await? {
                Some(fresh) => current = fresh,
                None => return Ok(Action::await_change()),
            },
            Err(Error::Queue(error)) if error.is_outage() => {
                // Nobody is parked while it is open.
                drop(context.gate.close());
                return outage::wait_for_database(&current, &context).await;
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::Contended)
}

/// Shows its end, holds nothing and asks for nothing: decided without a look at the database, so that a cold start
/// with thousands of finished resources costs nothing.
fn is_settled(object: &JobRequest, default_ttl: Option<Duration>) -> bool {
    if object.metadata.deletion_timestamp.is_some() {
        return !has_finalizer(object);
    }
    let Some(status) = &object.status else { return false };
    phase(object).is_some_and(Phase::is_terminal)
        && !has_finalizer(object)
        && status.observed_generation == object.metadata.generation
        && !asks_for_retry(object)
        && ttl::of(object, default_ttl).is_none()
}

fn phase(object: &JobRequest) -> Option<Phase> {
    object.status.as_ref()?.phase
}

/// Whether a retry is asked for that the status does not show as done.
fn asks_for_retry(object: &JobRequest) -> bool {
    let done = object.status.as_ref().and_then(|status| status.last_retry.as_ref());
    let may = matches!(phase(object), Some(Phase::FailedPermanent | Phase::Cancelled));
    may && retry_mark(object).is_some_and(|mark| Some(&mark) != done)
}

pub(super) fn has_finalizer(object: &JobRequest) -> bool {
    object.finalizers().iter().any(|name| name == FINALIZER)
}

async fn step(object: &JobRequest, context: &Context) -> Result<Step> {
    if object.metadata.deletion_timestamp.is_some() {
        return if has_finalizer(object) { release(object, context).await } else { Ok(Step::Rest) };
    }
    let uid = patch::uid(object)?;
    match context.queue.held(uid).await? {
        Held::Row { job, owner, mirrored_revision } => {
            if job.state.status().is_terminal() {
                ended(object, context, &job, owner, mirrored_revision).await
            } else {
                live(object, context, &job, owner, mirrored_revision).await
            }
        }
        Held::KeptKey { job_id, attempts, finished_at } => {
            settle(object, context, &Standing::KeptKey { job_id, attempts, finished_at }).await
        }
        Held::Vanished { .. } => {
            // Then it is as if the resource had never had one.
            context.queue.forget_vanished(uid).await?;
            without_row(object, context).await
        }
        Held::Nothing => without_row(object, context).await,
    }
}

/// There is no row: what the resource itself shows says whether there should be one.
async fn without_row(object: &JobRequest, context: &Context) -> Result<Step> {
    if phase(object).is_some_and(Phase::is_terminal) {
        if asks_for_retry(object) { accept(object, context).await } else { rest_without_row(object, context).await }
    } else if once_ran(object) {
        settle(object, context, &Standing::RowLost).await
    } else {
        accept(object, context).await
    }
}

fn once_ran(object: &JobRequest) -> bool {
    phase(object) == Some(Phase::Running) || object.status.as_ref().is_some_and(|status| status.started_at.is_some())
}

/// A resource that has no row: checked, given the finalizer, enqueued.
async fn accept(object: &JobRequest, context: &Context) -> Result<Step> {
    // The cache has no payload, and may be late: a row is made from the resource as it is now.
    let Some(object) = patch::fresh(&context.client, object).await? else { return Ok(Step::Rest) };
    if object.metadata.deletion_timestamp.is_some() {
        return Ok(Step::Reread);
    }
    let new = match to_job(&object) {
        Ok(new) => new,
        Err((reason, message)) => return settle(&object, context, &Standing::Rejected { reason, message }).await,
    };
    let object = if has_finalizer(&object) {
        object
    } else {
        match patch::add_finalizer(context, &object).await? {
            Written::Done(now) => *now,
            Written::Stale => return Ok(Step::Reread),
            Written::Gone => return Ok(Step::Rest),
        }
    };
    match context.queue.enqueue(&new).await {
        Ok(outcome) => {
            tracing::debug!(namespace = object.namespace(), name = object.name_any(), job = %outcome.id(), "enqueued");
            context.young.born(patch::uid(&object)?);
            Ok(Step::After(YOUNG))
        }
        Err(queue::Error::IdempotencyConflict { holder }) => {
            let message =
                format!("spec.idempotencyKey belongs to job {holder}, whose kind or payload differs: use another key");
            settle(&object, context, &Standing::Rejected { reason: Reason::IdempotencyConflict, message }).await
        }
        Err(error @ queue::Error::PayloadInvalid { .. }) => {
            let standing = Standing::Rejected { reason: Reason::PayloadInvalid, message: format!("spec.{error}") };
            settle(&object, context, &standing).await
        }
        // Deleted since it was read, and let go by another controller.
        Err(queue::Error::Released) => Ok(Step::Reread),
        Err(error) => Err(error.into()),
    }
}

/// The row is live: keep the finalizer on, bring edits to the row, show its state.
async fn live(object: &JobRequest, context: &Context, job: &Job, owner: bool, mirrored: i64) -> Result<Step> {
    let uid = patch::uid(object)?;
    if !has_finalizer(object) {
        return Ok(match patch::add_finalizer(context, object).await? {
            Written::Done(_) | Written::Stale => Step::Reread,
            Written::Gone => Step::Rest,
        });
    }
    if owner
        && job.state.status().is_waiting()
        && let Ok(edit) = to_edit(object)
        && edit.changes(job)
    {
        // The cache may be behind an edit that the row has already.
        if !is_current(object, context).await? || context.queue.edit_waiting(uid, edit).await? {
            return Ok(Step::Reread);
        }
    }
    if let Some(left) = context.young.left(uid) {
        return Ok(Step::After(left));
    }
    let standing = Standing::Row { job, shared: !owner };
    match show(object, context, &standing).await? {
        Shown::As(_) => {}
        Shown::Stale => return Ok(Step::Reread),
        Shown::Gone => return Ok(Step::Rest),
    }
    acknowledge(context, uid, job, mirrored).await?;
    Ok(Step::Rest)
}

/// The row has ended: show it, say so to the queue, let go of the resource.
async fn ended(object: &JobRequest, context: &Context, job: &Job, owner: bool, mirrored: i64) -> Result<Step> {
    let uid = patch::uid(object)?;
    context.young.forget(uid);
    let retryable = owner && job.state.status() != Status::Succeeded;
    if retryable
        && let Some(mark) = retry_mark(object)
        && job.last_retry.as_ref() != Some(&mark)
    {
        if !has_finalizer(object) {
            return Ok(match patch::add_finalizer(context, object).await? {
                Written::Done(_) | Written::Stale => Step::Reread,
                Written::Gone => Step::Rest,
            });
        }
        // The cache may be behind a mark that was used already.
        if !is_current(object, context).await? {
            return Ok(Step::Reread);
        }
        match context.queue.retry(job.id, &mark).await? {
            RetryOutcome::Queued => {
                tracing::info!(job = %job.id, namespace = object.namespace(), name = object.name_any(), "retried by a person");
                return Ok(Step::Reread);
            }
            RetryOutcome::AlreadyUsed => return Ok(Step::Reread),
            RetryOutcome::KeyTaken => {
                tracing::warn!(job = %job.id, namespace = object.namespace(), name = object.name_any(),
                    "not retried: another job has taken the key");
                let note = "not run again: another job has taken its idempotency key";
                context.events.about(object, News::warning(Reason::RetryRefused, "Retry", note));
                return Ok(Step::Reread);
            }
        }
    }
    let shown = match show(object, context, &Standing::Row { job, shared: !owner }).await? {
        Shown::As(now) => now,
        Shown::Stale => return Ok(Step::Reread),
        Shown::Gone => return Ok(Step::Rest),
    };
    acknowledge(context, uid, job, mirrored).await?;
    let_go(object, shown, context).await
}

/// Whether the resource is still as it was read: what it asks of the row must not be out of date.
async fn is_current(object: &JobRequest, context: &Context) -> Result<bool> {
    let now = patch::fresh(&context.client, object).await?;
    Ok(now.is_some_and(|now| now.resource_version() == object.resource_version()))
}

async fn acknowledge(context: &Context, uid: Uuid, job: &Job, mirrored: i64) -> Result<()> {
    if mirrored < job.revision
        && let Some(lag) = context.queue.acknowledge(uid, job.revision).await?
    {
        context.metrics.status_written(lag);
    }
    Ok(())
}

/// A resource that has come to its end without a live row: shown, and let go.
async fn settle(object: &JobRequest, context: &Context, standing: &Standing<'_>) -> Result<Step> {
    match show(object, context, standing).await? {
        Shown::As(now) => let_go(object, now, context).await,
        Shown::Stale => Ok(Step::Reread),
        Shown::Gone => Ok(Step::Rest),
    }
}

/// It shows its end and its row is gone, as it should be one day: nothing but the generation is brought up to date.
async fn rest_without_row(object: &JobRequest, context: &Context) -> Result<Step> {
    let stale = object.status.as_ref().and_then(|status| status.observed_generation) != object.metadata.generation;
    if stale && let Some(old) = &object.status {
        let mut status = old.clone();
        status.observed_generation = object.metadata.generation;
        for condition in &mut status.conditions {
            condition.observed_generation = object.metadata.generation;
        }
        return match patch::set_status(context, object, &status).await? {
            Written::Done(now) => let_go(object, now, context).await,
            Written::Stale => Ok(Step::Reread),
            Written::Gone => Ok(Step::Rest),
        };
    }
    let_go(object, Box::new(object.clone()), context).await
}

/// Finished resources hold nothing up: the finalizer goes, and by TTL the resource. `read` is the resource before what
/// was written of it, and `now` after.
async fn let_go(read: &JobRequest, mut now: Box<JobRequest>, context: &Context) -> Result<Step> {
    if has_finalizer(&now) {
        match patch::remove_finalizer(context, &now).await? {
            Written::Done(without) => now = without,
            Written::Stale => return Ok(Step::Reread),
            Written::Gone => return Ok(Step::Rest),
        }
    }
    let is_news = now.resource_version() != read.resource_version();
    ttl::expire(&now, is_news, context).await.map(after)
}

fn after(wait: Option<Duration>) -> Step {
    wait.map_or(Step::Rest, Step::After)
}

/// The resource is being deleted: the job is cancelled with its last holder, and the finalizer goes when it has ended.
async fn release(object: &JobRequest, context: &Context) -> Result<Step> {
    let uid = patch::uid(object)?;
    match context.queue.release(uid).await? {
        Release::Ended | Release::Shared => {
            context.young.forget(uid);
            Ok(match patch::remove_finalizer(context, object).await? {
                Written::Done(_) | Written::Gone => Step::Rest,
                Written::Stale => Step::Reread,
            })
        }
        Release::PendingOnWorker => {
            if let Held::Row { job, owner, mirrored_revision } = context.queue.held(uid).await? {
                match show(object, context, &Standing::Row { job: &job, shared: !owner }).await? {
                    Shown::As(_) => acknowledge(context, uid, &job, mirrored_revision).await?,
                    Shown::Stale => return Ok(Step::Reread),
                    Shown::Gone => return Ok(Step::Rest),
                }
            }
            // The mirror brings the row's end; this is for a notification lost together with a restart.
            Ok(Step::After(Duration::from_secs(60)))
        }
    }
}

pub(super) enum Shown {
    As(Box<JobRequest>),
    Stale,
    Gone,
}

/// Writes the status if it differs from what is shown.
pub(super) async fn show(object: &JobRequest, context: &Context, standing: &Standing<'_>) -> Result<Shown> {
    let none = JobRequestStatus::default();
    let old = object.status.as_ref().unwrap_or(&none);
    let deleting = object.metadata.deletion_timestamp.is_some();
    let now = match standing {
        // No row says when these ended, and a TTL may count from it: by the database's clock.
        Standing::Rejected { .. } | Standing::RowLost => time(context.queue.now().await?).0,
        Standing::Row { .. } | Standing::KeptKey { .. } | Standing::DatabaseUnavailable => Timestamp::now(),
    };
    let status = render(old, object.metadata.generation, deleting, standing, now);
    if status == *old {
        return Ok(Shown::As(Box::new(object.clone())));
    }
    context.young.forget(patch::uid(object)?);
    Ok(match patch::set_status(context, object, &status).await? {
        Written::Done(now) => {
            events::of_change(old, &status, deleting).into_iter().for_each(|news| context.events.about(object, news));
            Shown::As(now)
        }
        Written::Stale => Shown::Stale,
        Written::Gone => Shown::Gone,
    })
}
