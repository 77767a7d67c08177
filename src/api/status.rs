//! `.status`: what the controller reports. Only it writes here.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use super::json::Json;

/// How many of the newest attempts `.status.history` keeps.
pub const HISTORY_LIMIT: usize = 5;

/// What became of the job.
// Anything may be missing or of another shape here (written by another version, or by hand): such a field reads as
// absent. An object that can't be read would stop the watch for all others.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct JobRequestStatus {
    /// Where the job is: Queued, Running or Retrying while it lasts; Succeeded, FailedPermanent or Cancelled when it
    /// has ended; Rejected if it was never accepted and so never ran. Other values may be added.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    #[schemars(with = "Option<String>")]
    pub phase: Option<Phase>,

    /// The job's id in the database, a version 7 UUID. Webhook deliveries and mails carry it too.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub job_id: Option<String>,

    /// How many attempts have been started, the present one included.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub attempts: Option<i32>,

    /// Why the newest failed attempt failed, at most 1 KiB. Never holds payload or secrets.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub last_error: Option<String>,

    /// The newest attempts, at most 5, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "tolerant")]
    #[schemars(schema_with = "super::crd::history_schema")]
    pub history: Vec<AttemptRecord>,

    /// What the job returned, if that takes at most 4 KiB; the database has it whole.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    #[schemars(schema_with = "super::crd::result_schema")]
    pub result: Option<Json>,

    /// When the next attempt starts, or the newest one was due.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub run_at: Option<Time>,

    /// When the newest attempt started.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub started_at: Option<Time>,

    /// When the job ended. `spec.ttlSecondsAfterFinished` counts from here; without it (rejected, or the row was lost)
    /// from the `lastTransitionTime` of the condition `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub finished_at: Option<Time>,

    /// The worker that runs the job, or ran its newest attempt.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub worker: Option<String>,

    /// The `metadata.generation` that this status is about; -1 as long as there is none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub observed_generation: Option<i64>,

    /// The newest value of the annotation `jobrequest.dev/retry` that was acted upon.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub last_retry: Option<String>,

    /// Accepted: the job is in the queue (or why not). Ready: it succeeded. Complete and Failed: it ended, well or
    /// badly. Stalled: it won't go on without somebody's help.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "tolerant")]
    #[schemars(schema_with = "super::crd::conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl JobRequestStatus {
    /// The condition of this type, if it is there.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == type_)
    }
}

/// One attempt.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AttemptRecord {
    /// 1 for the first.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub number: Option<i32>,
    /// The worker that ran it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub worker: Option<String>,
    /// When it started.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub started_at: Option<Time>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub finished_at: Option<Time>,
    /// How it ended, in one CamelCase word.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub outcome: Option<String>,
    /// Why it failed, at most 1 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tolerant")]
    pub error: Option<String>,
}

/// `.status.phase`.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Queued,
    Running,
    Retrying,
    Succeeded,
    FailedPermanent,
    Cancelled,
    /// The manifest was refused after all: there never was a row.
    Rejected,
    /// A word of another version.
    #[serde(other)]
    Unknown,
}

impl Phase {
    /// The job has ended, or never began: nothing more happens unless somebody asks for it.
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Succeeded | Self::FailedPermanent | Self::Cancelled | Self::Rejected => true,
            Self::Queued | Self::Running | Self::Retrying | Self::Unknown => false,
        }
    }
}

/// Reads a value of any shape: what is not a `T` is `T`'s default, here always "absent".
fn tolerant<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(deserializer: D) -> Result<T, D::Error> {
    let raw = Box::<RawValue>::deserialize(deserializer)?;
    Ok(serde_json::from_str(raw.get()).unwrap_or_default())
}
