//! One resource against its row: gather, decide, apply. Ignorant of why it was called; never decides from `.status`,
//! except for what only the resource knows: that it ended, or once ran.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use uuid::Uuid;

use super::patch::{self, Written};
use super::status::{Standing, render};
use super::validate::validate;
use super::{Context, Error, Result, ttl};
use crate::api::{FINALIZER, JobRequest, JobRequestStatus, Phase, RETRY_ANNOTATION};
use crate::job::{Job, Status};
use crate::queue::{self, Held, NewJob, Owner, Release, RetryOutcome, SpecEdit};

/// A job that ends within this time shows its end only: two writes saved for each small job.
const YOUNG: Duration = Duration::from_millis(100);
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
    if !due && is_settled(&object) {
        return Ok(Action::await_change());
    }
    if !context.gate.is_open() {
        return wait_for_database(&object, &context).await;
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
            Err(Error::Queue(error)) if error.is_passing() && !matches!(error, queue::Error::KeyBeingFreed { .. }) => {
                // Nobody is parked while it is open.
                drop(context.gate.close());
                return wait_for_database(&current, &context).await;
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::Contended)
}

/// Shows its end, holds nothing and asks for nothing: decided without a look at the database, so that a cold start
/// with thousands of finished resources costs nothing.
fn is_settled(object: &JobRequest) -> bool {
    let Some(status) = &object.status else { return false };
    let ours = object.finalizers().iter().any(|name| name == FINALIZER);
    if object.metadata.deletion_timestamp.is_some() {
        return !ours;
    }
    let ended = status.phase.is_some_and(Phase::is_terminal);
    ended
        && !ours
        && status.observed_generation == object.metadata.generation
        && retry_asked(object, status).is_none()
        && object.spec.ttl_seconds_after_finished.is_none()
}

/// The value of the retry annotation, if it asks for something that the status does not show as done.
fn retry_asked<'a>(object: &'a JobRequest, status: &JobRequestStatus) -> Option<&'a str> {
    let asked = object.annotations().get(RETRY_ANNOTATION)?;
    let may = matches!(status.phase, Some(Phase::FailedPermanent | Phase::Cancelled));
    (may && status.last_retry.as_ref() != Some(asked)).then_some(asked.as_str())
}

fn has_finalizer(object: &JobRequest) -> bool {
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
        Held::Vanished { .. } if once_ran(object) => {
            context.queue.release(uid).await?;
            settle(object, context, &Standing::RowLost).await
        }
        Held::Vanished { .. } => {
            // Forgets the row that is gone; then it is as if the resource had never had one.
            context.queue.release(uid).await?;
            accept(object, context).await
        }
        Held::Nothing => match object.status.as_ref().and_then(|status| status.phase) {
            Some(Phase::FailedPermanent | Phase::Cancelled) if asked(object).is_some() => accept(object, context).await,
            Some(phase) if phase.is_terminal() => rest_without_row(object, context).await,
            _ if once_ran(object) => settle(object, context, &Standing::RowLost).await,
            _ => accept(object, context).await,
        },
    }
}

fn asked(object: &JobRequest) -> Option<&str> {
    retry_asked(object, object.status.as_ref()?)
}

fn once_ran(object: &JobRequest) -> bool {
    object.status.as_ref().is_some_and(|status| status.started_at.is_some() || status.phase == Some(Phase::Running))
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
        match patch::add_finalizer(&context.client, &object).await? {
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
            settle(&object, context, &Standing::Rejected { reason: "IdempotencyConflict", message }).await
        }
        Err(error @ queue::Error::PayloadInvalid { .. }) => {
            let standing = Standing::Rejected { reason: "PayloadInvalid", message: format!("spec.{error}") };
            settle(&object, context, &standing).await
        }
        Err(error) => Err(error.into()),
    }
}

/// The job that a resource asks for, or why there can be none.
fn to_job(object: &JobRequest) -> Result<NewJob, (&'static str, String)> {
    let spec = &object.spec;
    validate(spec).map_err(|rejection| (rejection.reason, rejection.message))?;
    let invalid = |field: &str, problem: &str| ("SpecInvalid", format!("spec.{field} {problem}"));
    let payload = match &spec.payload {
        Some(json) => json.to_value().map_err(|_| invalid("payload", "can't be read as JSON"))?,
        None => return Err(invalid("payload", "is missing")),
    };
    let edit = to_edit(object).map_err(|problem| invalid("runAt", problem))?;
    let uid = patch::uid(object).map_err(|_| invalid("uid", "is missing"))?;
    Ok(NewJob {
        kind: spec.kind.clone(),
        payload,
        max_attempts: edit.max_attempts,
        idempotency_key: spec.idempotency_key.clone(),
        run_at: edit.run_at,
        priority: edit.priority,
        timeout_seconds: edit.timeout_seconds,
        suspended: edit.suspended,
        owner: Some(Owner { uid, namespace: object.namespace().unwrap_or_default(), name: object.name_any() }),
        // A value present at the start asks for nothing. One that an admission let in over-long is cut like any text.
        last_retry: object.annotations().get(RETRY_ANNOTATION).map(|mark| mark_of(mark)),
    })
}

/// A retry's mark as the row keeps it: annotations may be longer than a mark.
fn mark_of(annotation: &str) -> String {
    annotation.replace('\0', " ").chars().take(255).collect()
}

/// The parts of the spec that may change, within the queue's bounds whatever an older schema let in.
fn to_edit(object: &JobRequest) -> Result<SpecEdit, &'static str> {
    let spec = &object.spec;
    let run_at = match &spec.run_at {
        None => None,
        Some(text) => Some(
            DateTime::parse_from_rfc3339(text)
                .map_err(|_| "is not a time with an offset as in RFC 3339, such as 2026-12-24T08:00:00Z")?
                .with_timezone(&Utc),
        ),
    };
    Ok(SpecEdit {
        priority: i16::try_from(spec.priority.clamp(-1000, 1000)).unwrap_or_default(),
        suspended: spec.suspend,
        max_attempts: u32::try_from(spec.max_attempts.clamp(1, 100)).unwrap_or(3),
        timeout_seconds: u32::try_from(spec.timeout_seconds.clamp(1, 86_400)).unwrap_or(300),
        run_at,
    })
}

/// The row is live: keep the finalizer on, bring edits to the row, show its state.
async fn live(object: &JobRequest, context: &Context, job: &Job, owner: bool, mirrored: i64) -> Result<Step> {
    let uid = patch::uid(object)?;
    if !has_finalizer(object) {
        return Ok(match patch::add_finalizer(&context.client, object).await? {
            Written::Done(_) | Written::Stale => Step::Reread,
            Written::Gone => Step::Rest,
        });
    }
    if owner
        && job.state.status().is_waiting()
        && let Ok(edit) = to_edit(object)
        && edit.changes(job)
        && context.queue.edit_waiting(uid, edit).await?
    {
        return Ok(Step::Reread);
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
        && let Some(mark) = object.annotations().get(RETRY_ANNOTATION)
        && job.last_retry.as_deref() != Some(mark_of(mark).as_str())
    {
        if !has_finalizer(object) {
            return Ok(match patch::add_finalizer(&context.client, object).await? {
                Written::Done(_) | Written::Stale => Step::Reread,
                Written::Gone => Step::Rest,
            });
        }
        match context.queue.retry(job.id, &mark_of(mark)).await? {
            RetryOutcome::Queued => {
                tracing::info!(job = %job.id, namespace = object.namespace(), name = object.name_any(), "retried by a person");
                return Ok(Step::Reread);
            }
            RetryOutcome::AlreadyUsed => return Ok(Step::Reread),
            RetryOutcome::KeyTaken => {
                tracing::warn!(job = %job.id, namespace = object.namespace(), name = object.name_any(),
                    "not retried: another job has taken the key");
            }
        }
    }
    let shown = match show(object, context, &Standing::Row { job, shared: !owner }).await? {
        Shown::As(now) => now,
        Shown::Stale => return Ok(Step::Reread),
        Shown::Gone => return Ok(Step::Rest),
    };
    acknowledge(context, uid, job, mirrored).await?;
    let_go(&shown, context).await
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
        Shown::As(now) => let_go(&now, context).await,
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
        return match patch::set_status(&context.client, object, &status).await? {
            Written::Done(now) => let_go(&now, context).await,
            Written::Stale => Ok(Step::Reread),
            Written::Gone => Ok(Step::Rest),
        };
    }
    let_go(object, context).await
}

/// Finished resources hold nothing up: the finalizer goes, and by TTL the resource.
async fn let_go(object: &JobRequest, context: &Context) -> Result<Step> {
    if has_finalizer(object) {
        match patch::remove_finalizer(&context.client, object).await? {
            Written::Done(now) => return ttl::expire(&now, context).await.map(after),
            Written::Stale => return Ok(Step::Reread),
            Written::Gone => return Ok(Step::Rest),
        }
    }
    ttl::expire(object, context).await.map(after)
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
            Ok(match patch::remove_finalizer(&context.client, object).await? {
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

enum Shown {
    As(Box<JobRequest>),
    Stale,
    Gone,
}

/// Writes the status if it differs from what is shown.
async fn show(object: &JobRequest, context: &Context, standing: &Standing<'_>) -> Result<Shown> {
    let none = JobRequestStatus::default();
    let old = object.status.as_ref().unwrap_or(&none);
    let deleting = object.metadata.deletion_timestamp.is_some();
    let status = render(old, object.metadata.generation, deleting, standing, Timestamp::now());
    if status == *old {
        return Ok(Shown::As(Box::new(object.clone())));
    }
    context.young.forget(patch::uid(object)?);
    Ok(match patch::set_status(&context.client, object, &status).await? {
        Written::Done(now) => Shown::As(now),
        Written::Stale => Shown::Stale,
        Written::Gone => Shown::Gone,
    })
}

/// The database is away: whoever waits for it says so once and is woken when it is back.
async fn wait_for_database(object: &JobRequest, context: &Context) -> Result<Action> {
    let uid = patch::uid(object)?;
    let resource = Owner { uid, namespace: object.namespace().unwrap_or_default(), name: object.name_any() };
    if !context.gate.park(resource) {
        return Ok(Action::requeue(YOUNG));
    }
    let deleting = object.metadata.deletion_timestamp.is_some();
    let accepted = object.status.as_ref().is_some_and(|status| status.job_id.is_some() || status.phase.is_some());
    if context.gate.is_closed() && (deleting || !accepted) {
        // Written at best: a resource that changed meanwhile comes back anyway.
        match show(object, context, &Standing::DatabaseUnavailable).await? {
            Shown::As(_) | Shown::Stale | Shown::Gone => {}
        }
    }
    Ok(Action::await_change())
}

/// When resources were enqueued, for as long as it matters.
#[derive(Default)]
pub(super) struct Young(std::sync::Mutex<std::collections::HashMap<Uuid, Instant>>);

impl Young {
    fn entries(&self) -> std::sync::MutexGuard<'_, std::collections::HashMap<Uuid, Instant>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn born(&self, uid: Uuid) {
        self.entries().insert(uid, Instant::now());
    }

    fn forget(&self, uid: Uuid) {
        self.entries().remove(&uid);
    }

    /// What is left of its youth.
    fn left(&self, uid: Uuid) -> Option<Duration> {
        let mut entries = self.entries();
        let left = YOUNG.checked_sub(entries.get(&uid)?.elapsed()).filter(|left| !left.is_zero());
        if left.is_none() {
            entries.remove(&uid);
        }
        left
    }
}
