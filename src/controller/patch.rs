//! The only writes to the API server: `.status`, our finalizer, the deletion by TTL. Each carries the uid and
//! resourceVersion it was decided on, so none can land on a namesake or overtake a newer one.

use std::time::Duration;

use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Context, Error, Result};
use crate::api::{FINALIZER, JobRequest, JobRequestStatus};
use crate::queue::ResourceRef;

/// Under which name the API server notes what was written.
pub(super) const FIELD_MANAGER: &str = "jobrequest-controller";
/// Limit of one call to the API server. The client repeats calls that were turned away; this bounds all of it.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(10);

/// What became of a write.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub(super) enum Written {
    /// It took effect; this is the resource now.
    Done(Box<JobRequest>),
    /// The resource has changed since it was read: read it again and decide anew.
    Stale,
    /// The resource is gone.
    Gone,
}

/// A call with its time limit.
pub(super) async fn bounded<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T> {
    match tokio::time::timeout(CALL_LIMIT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Error::ApiTimeout { seconds: CALL_LIMIT.as_secs() }),
    }
}

fn api(client: &Client, object: &JobRequest) -> Api<JobRequest> {
    Api::namespaced(client.clone(), object.namespace().as_deref().unwrap_or("default"))
}

/// The resource's uid; every object from an API server has one.
pub(super) fn uid(object: &JobRequest) -> Result<Uuid> {
    object.meta().uid.as_deref().and_then(|uid| uid.parse().ok()).ok_or(Error::NoUid)
}

/// The resource by name and uid.
pub(super) fn reference(object: &JobRequest) -> Result<ResourceRef> {
    let namespace = object.namespace().unwrap_or_default();
    Ok(ResourceRef { uid: uid(object)?, namespace, name: object.name_any() })
}

/// The resource as it is now, if it is still the same one.
pub(super) async fn fresh(client: &Client, object: &JobRequest) -> Result<Option<JobRequest>> {
    let now = bounded(api(client, object).get_opt(&object.name_any())).await?;
    Ok(now.filter(|now| now.meta().uid == object.meta().uid))
}

pub(super) async fn set_status(context: &Context, object: &JobRequest, status: &JobRequestStatus) -> Result<Written> {
    let patch = guarded(object, vec![json!({"op": "add", "path": "/status", "value": status})])?;
    let answer = bounded(api(&context.client, object).patch_status(&object.name_any(), &params(), &patch)).await;
    written(context, object, answer).await
}

pub(super) async fn add_finalizer(context: &Context, object: &JobRequest) -> Result<Written> {
    let mut finalizers = object.finalizers().to_vec();
    finalizers.push(FINALIZER.to_owned());
    set_finalizers(context, object, finalizers).await
}

pub(super) async fn remove_finalizer(context: &Context, object: &JobRequest) -> Result<Written> {
    let others = object.finalizers().iter().filter(|name| *name != FINALIZER).cloned().collect();
    set_finalizers(context, object, others).await
}

async fn set_finalizers(context: &Context, object: &JobRequest, finalizers: Vec<String>) -> Result<Written> {
    let operation = json!({"op": "add", "path": "/metadata/finalizers", "value": finalizers});
    let patch = guarded(object, vec![operation])?;
    let answer = bounded(api(&context.client, object).patch(&object.name_any(), &params(), &patch)).await;
    written(context, object, answer).await
}

/// Deletes the resource as it was read.
pub(super) async fn delete(client: &Client, object: &JobRequest) -> Result<()> {
    let as_read =
        Preconditions { uid: object.meta().uid.clone(), resource_version: object.meta().resource_version.clone() };
    let params = DeleteParams { preconditions: Some(as_read), ..Default::default() };
    match bounded(api(client, object).delete(&object.name_any(), &params)).await {
        Ok(_) => Ok(()),
        // Gone, or changed: the change brings the next look.
        Err(Error::Api(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..Default::default() }
}

/// A merge patch takes a wrong uid without a word; a JSON patch tests it.
fn guarded(object: &JobRequest, operations: Vec<Value>) -> Result<Patch<()>> {
    let meta = object.meta();
    let mut all = vec![
        json!({"op": "test", "path": "/metadata/uid", "value": meta.uid}),
        json!({"op": "test", "path": "/metadata/resourceVersion", "value": meta.resource_version}),
    ];
    all.extend(operations);
    Ok(Patch::Json(serde_json::from_value(Value::Array(all)).map_err(Error::Patch)?))
}

/// A failed test and an invalid object both answer 422: only a second look tells them apart.
async fn written(context: &Context, object: &JobRequest, answer: Result<JobRequest>) -> Result<Written> {
    let stale = || {
        context.metrics.conflict();
        Ok(Written::Stale)
    };
    match answer {
        Ok(now) => Ok(Written::Done(Box::new(now))),
        Err(Error::Api(kube::Error::Api(status))) if status.code == 404 => Ok(Written::Gone),
        Err(Error::Api(kube::Error::Api(status))) if status.code == 409 => stale(),
        Err(Error::Api(kube::Error::Api(status))) if status.code == 422 => {
            match fresh(&context.client, object).await? {
                None => Ok(Written::Gone),
                Some(now) if now.resource_version() != object.resource_version() => stale(),
                Some(_) => Err(Error::Api(kube::Error::Api(status))),
            }
        }
        Err(error) => Err(error),
    }
}
