//! From a resource's spec to what the queue takes. Pure.

use chrono::{DateTime, Utc};
use kube::ResourceExt;

use super::patch;
use super::reason::Reason;
use super::validate::validate;
use crate::api::{JobRequest, RETRY_ANNOTATION};
use crate::queue::{NewJob, SpecEdit};

/// The job that a resource asks for, or why there can be none.
pub(super) fn to_job(object: &JobRequest) -> Result<NewJob, (Reason, String)> {
    let spec = &object.spec;
    validate(spec).map_err(|rejection| (rejection.reason, rejection.message))?;
    let invalid = |field: &str, problem: &str| (Reason::SpecInvalid, format!("spec.{field} {problem}"));
    let payload = match &spec.payload {
        Some(json) => json.to_value().map_err(|_| invalid("payload", "can't be read as JSON"))?,
        None => return Err(invalid("payload", "is missing")),
    };
    let edit = to_edit(object).map_err(|problem| invalid("runAt", problem))?;
    let owner = patch::reference(object).map_err(|_| invalid("uid", "is missing"))?;
    Ok(NewJob {
        kind: spec.kind.clone(),
        payload,
        max_attempts: edit.max_attempts,
        idempotency_key: spec.idempotency_key.clone(),
        run_at: edit.run_at,
        priority: edit.priority,
        timeout_seconds: edit.timeout_seconds,
        suspended: edit.suspended,
        owner: Some(owner),
        // A value present at the start asks for nothing.
        last_retry: retry_mark(object),
    })
}

/// The value of the retry annotation as a row keeps it: annotations may be longer than a mark. None for an empty one.
pub(super) fn retry_mark(object: &JobRequest) -> Option<String> {
    let asked = object.annotations().get(RETRY_ANNOTATION)?;
    let mark: String = asked.replace('\0', " ").chars().take(255).collect();
    (!mark.is_empty()).then_some(mark)
}

/// The parts of the spec that may change, within the queue's bounds whatever an older schema let in.
pub(super) fn to_edit(object: &JobRequest) -> Result<SpecEdit, &'static str> {
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
