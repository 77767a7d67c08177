//! The resource: JobRequest's spec and status, and the rules by which the API server takes or refuses a manifest.
//!
//! [`crd`] is made from these types; `crds/jobrequests.yaml` is its text. What a schema or CEL can say about a spec is
//! said here, so that a bad manifest is refused at `kubectl apply`; what they can't is in `controller::validate`.
//! This module knows nothing of the rest of the crate.

mod crd;
mod json;
mod payload;
mod status;

pub use crd::{crd, crd_yaml};
pub use json::Json;
pub use status::{AttemptRecord, HISTORY_LIMIT, JobRequestStatus, Phase};

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// The operator's finalizer: there as long as the job is live, so that deleting the resource cancels it.
pub const FINALIZER: &str = "jobrequest.dev/cancel";
/// Each new value of this annotation runs a failed or cancelled job again.
pub const RETRY_ANNOTATION: &str = "jobrequest.dev/retry";
/// With the value `true` on a resource that is being deleted: let it go although the database is away, and its job may
/// go on until the database is back.
pub const ABANDON_ANNOTATION: &str = "jobrequest.dev/abandon";

/// The job to be done.
// Every field can be read whatever another version of the CRD let in; `payload` may be dropped from a cached object.
#[expect(clippy::duplicated_attributes, reason = "columns and fields have settings in common")]
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "jobrequest.dev",
    version = "v1alpha1",
    kind = "JobRequest",
    plural = "jobrequests",
    shortname = "jr",
    namespaced,
    status = "JobRequestStatus",
    derive = "PartialEq",
    doc = "A background job: applying it enqueues the job, its status shows what becomes of it, deleting it cancels it.",
    selectable = ".spec.kind",
    selectable = ".status.phase",
    printcolumn(name = "Kind", type_ = "string", json_path = ".spec.kind"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Attempts", type_ = "integer", json_path = ".status.attempts"),
    printcolumn(name = "Run-At", type_ = "string", json_path = ".status.runAt"),
    printcolumn(name = "Job-ID", type_ = "string", json_path = ".status.jobId", priority = 1),
    printcolumn(name = "Worker", type_ = "string", json_path = ".status.worker", priority = 1),
    printcolumn(name = "Last-Error", type_ = "string", json_path = ".status.lastError", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.idempotencyKey) == has(oldSelf.idempotencyKey) && (!has(self.idempotencyKey) || self.idempotencyKey == oldSelf.idempotencyKey)")
    .message("is immutable: leave it as it was, or create another JobRequest")
    .field_path(".idempotencyKey")
    .reason(Reason::FieldValueForbidden))]
pub struct JobRequestSpec {
    /// What is to be done. Immutable.
    #[schemars(schema_with = "crd::kind_schema")]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("is immutable: leave it as it was, or create another JobRequest")
        .reason(Reason::FieldValueForbidden))]
    pub kind: String,

    /// The job's input; which fields it takes depends on `kind`. At most 1 MiB in all, nested at most 100 levels deep.
    /// Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "payload::PayloadFields")]
    #[x_kube(
        merge_strategy = MapMerge::Atomic,
        validation = Rule::new("self == oldSelf")
            .message("is immutable: leave it as it was, or create another JobRequest")
            .reason(Reason::FieldValueForbidden),
    )]
    pub payload: Option<Json>,

    /// How often the job is tried before it counts as failed, 1 to 100. The default is 3.
    #[serde(default = "default_max_attempts")]
    #[schemars(range(min = 1, max = 100))]
    pub max_attempts: i32,

    /// Of requests of this namespace with the same key, kind and payload only one runs; the same key with another
    /// payload is refused. 1 to 255 characters. Without it each request runs. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 255))]
    pub idempotency_key: Option<String>,

    /// The earliest time to start, RFC 3339 with an offset, such as 2026-12-24T08:00:00Z or 2026-12-24T09:00:00+01:00;
    /// years 1000 to 2999. Without it the job starts as soon as a worker is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 100))]
    #[x_kube(validation = Rule::new("self.matches('^[12][0-9]{3}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$') && !format.datetime().validate(self).hasValue()")
        .message("must be a time with date and offset as in RFC 3339, such as 2026-12-24T08:00:00Z or 2026-12-24T09:00:00+01:00"))]
    pub run_at: Option<String>,

    /// Of jobs that may start, those with a higher priority start first. -1000 to 1000, the default is 0.
    #[serde(default)]
    #[schemars(range(min = -1000, max = 1000))]
    pub priority: i32,

    /// An attempt's time limit in seconds, 1 to 86400 (a day), the default is 300. An attempt over it has failed and is
    /// tried again.
    #[serde(default = "default_timeout_seconds")]
    #[schemars(range(min = 1, max = 86400))]
    pub timeout_seconds: i32,

    /// Holds a job that hasn't started, until it is set to false. The default is false.
    #[serde(default)]
    pub suspend: bool,

    /// How long the resource stays after the job has ended, in seconds, 0 to 315360000 (ten years). Without it the
    /// resource stays, unless the operator has a default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 315_360_000))]
    pub ttl_seconds_after_finished: Option<i32>,
}

impl JobRequestSpec {
    /// A request with nothing but defaults beside its kind and payload.
    pub fn new(kind: impl Into<String>, payload: impl Into<Json>) -> Self {
        Self {
            kind: kind.into(),
            payload: Some(payload.into()),
            max_attempts: default_max_attempts(),
            idempotency_key: None,
            run_at: None,
            priority: 0,
            timeout_seconds: default_timeout_seconds(),
            suspend: false,
            ttl_seconds_after_finished: None,
        }
    }
}

fn default_max_attempts() -> i32 {
    3
}

fn default_timeout_seconds() -> i32 {
    300
}

#[cfg(test)]
mod tests {
    use kube::core::{ObjectList, WatchEvent};
    use serde_json::json;

    use super::*;

    fn event(spec: &str, status: &str) -> String {
        format!(
            r#"{{"type":"ADDED","object":{{"apiVersion":"jobrequest.dev/v1alpha1","kind":"JobRequest",
            "metadata":{{"name":"a"}},"spec":{spec},"status":{status}}}}}"#
        )
    }

    fn read(spec: &str, status: &str) -> JobRequest {
        match serde_json::from_str(&event(spec, status)).unwrap() {
            WatchEvent::Added(object) => object,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_payload_keeps_its_text_whatever_its_depth_and_numbers() {
        let deep = format!(
            r#"{{"url":"https://example.org","body":[1.10,1e3,12345678901234567890,{}{}]}}"#,
            "[".repeat(5000),
            "]".repeat(5000)
        );
        let spec = format!(r#"{{"kind":"webhook_delivery","payload":{deep}}}"#);
        assert_eq!(read(&spec, "{}").spec.payload.unwrap().text(), deep);

        let list = format!(r#"{{"kind":"JobRequestList","items":[{{"metadata":{{"name":"a"}},"spec":{spec}}}]}}"#);
        let list: ObjectList<JobRequest> = serde_json::from_str(&list).unwrap();
        assert_eq!(list.items[0].spec.payload.as_ref().unwrap().text(), deep);
    }

    #[test]
    fn an_object_is_written_as_it_was_read() {
        let spec = json!({
            "kind": "summarize_text", "payload": {"text": "Hello."}, "maxAttempts": 5, "idempotencyKey": "k",
            "runAt": "2030-03-31T02:30:00+02:00", "priority": -1, "timeoutSeconds": 10, "suspend": true,
            "ttlSecondsAfterFinished": 0,
        });
        let status = json!({
            "phase": "Retrying", "jobId": "0193", "attempts": 1, "lastError": "e", "result": {"a": [null]},
            "history": [{"number": 1, "worker": "w", "startedAt": "2030-03-31T00:30:00Z",
                         "finishedAt": "2030-03-31T00:30:01Z", "outcome": "Failed", "error": "e"}],
            "runAt": "2030-03-31T00:30:00Z", "startedAt": "2030-03-31T00:30:00Z", "finishedAt": "2030-03-31T00:30:01Z",
            "worker": "w", "observedGeneration": 1, "lastRetry": "1",
            "conditions": [{"type": "Ready", "status": "False", "reason": "Retrying", "message": "m",
                            "lastTransitionTime": "2030-03-31T00:30:00Z", "observedGeneration": 1}],
        });
        let object = read(&spec.to_string(), &status.to_string());
        assert_eq!(serde_json::to_value(&object.spec).unwrap(), spec);
        assert_eq!(serde_json::to_value(&object.status).unwrap(), status);
        let through_a_tree: JobRequest = serde_json::from_value(serde_json::to_value(&object).unwrap()).unwrap();
        assert_eq!(through_a_tree, object);
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        let object = read(r#"{"kind":"summarize_text","payload":{"text":"Hello."}}"#, "{}");
        assert_eq!(object.spec, JobRequestSpec::new("summarize_text", json!({"text": "Hello."})));
        assert_eq!(object.status, Some(JobRequestStatus::default()));
    }

    #[test]
    fn an_object_of_another_version_can_be_read() {
        let status = r#"{"phase":"Hibernating","attempts":"many","history":{"a":1},"result":null,"startedAt":"soon",
            "finishedAt":5,"observedGeneration":2,"conditions":[{"type":"New"}],"lastError":["e"],"unheardOf":1}"#;
        let status = read(r#"{"kind":"pack_parcel","unheardOf":1}"#, status).status.unwrap();
        assert_eq!(status.phase, Some(Phase::Unknown));
        assert_eq!(status.observed_generation, Some(2));
        let rest = JobRequestStatus { phase: None, observed_generation: None, ..status };
        assert_eq!(rest, JobRequestStatus::default());
    }

    #[test]
    fn a_dropped_payload_stays_away() {
        let mut object = read(r#"{"kind":"summarize_text","payload":{"text":"Hello."}}"#, "{}");
        object.spec.payload = None;
        assert!(!serde_json::to_string(&object).unwrap().contains("payload"));
    }

    #[test]
    fn a_payload_is_not_printed() {
        let spec = JobRequestSpec::new("summarize_text", json!({"text": "secret"}));
        assert!(!format!("{spec:?}").contains("secret"));
    }
}
