//! What a resource shows: pure, from the resource, its row and nothing else.
//!
//! Conditions follow the API conventions and kstatus: `Ready` says whether the work is done, `Complete` and `Failed`
//! appear when the job has ended, `Stalled` when it won't go on by itself, `Accepted` whether it got into the queue.

use chrono::{DateTime, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::reason::Reason;
use crate::api::{AttemptRecord, HISTORY_LIMIT, JobRequestStatus, Json, Phase};
use crate::job::{Job, JobState, Outcome, PastAttempt};
use crate::text::cut;

/// The longest error or message in a status, in bytes.
const TEXT_MAX_BYTES: usize = 1024;
/// The longest error of an attempt in the history: five of them and the rest stay below 4 KiB beside the result.
const HISTORY_TEXT_MAX_BYTES: usize = 256;
/// The largest result shown, in bytes as JSON.
const RESULT_MAX_BYTES: usize = 4096;

/// Where a resource stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Standing<'a> {
    /// Never a row: the manifest holds what no schema can see, or the key is another job's.
    Rejected { reason: Reason, message: String },
    /// It has a row; `shared` when the row was made for another resource with the same key.
    Row { job: &'a Job, shared: bool },
    /// It shares a succeeded job whose row is gone, of which only the key is left.
    KeptKey { job_id: uuid::Uuid, attempts: u32, finished_at: DateTime<Utc> },
    /// It ran and its row is gone: what became of it is unknown, and running it again is not for us to decide.
    RowLost,
    /// The database is away and something of this resource waits for it.
    DatabaseUnavailable,
}

/// The standing's place in the conditions.
struct Verdict {
    accepted: Option<(&'static str, Reason, String)>,
    ready: &'static str,
    reason: Reason,
    message: String,
}

/// The whole status that the resource should show. `old` gives the times of conditions that have not changed, and
/// what a standing without a row leaves as it was.
pub fn render(
    old: &JobRequestStatus,
    generation: Option<i64>,
    deleting: bool,
    standing: &Standing<'_>,
    now: Timestamp,
) -> JobRequestStatus {
    let mut status = match standing {
        Standing::Row { job, .. } => of_row(job),
        Standing::Rejected { .. } => JobRequestStatus { phase: Some(Phase::Rejected), ..Default::default() },
        Standing::KeptKey { job_id, attempts, finished_at } => JobRequestStatus {
            phase: Some(Phase::Succeeded),
            job_id: Some(job_id.to_string()),
            attempts: i32::try_from(*attempts).ok(),
            finished_at: Some(time(*finished_at)),
            ..Default::default()
        },
        Standing::RowLost => JobRequestStatus { phase: Some(Phase::FailedPermanent), ..old.clone() },
        Standing::DatabaseUnavailable => old.clone(),
    };
    let verdict = verdict(standing, deleting);
    status.observed_generation = generation.or(old.observed_generation);
    status.conditions = conditions(old, &verdict, status.phase, generation, now);
    status
}

fn of_row(job: &Job) -> JobRequestStatus {
    let Job {
        id,
        kind: _,
        state,
        attempts,
        max_attempts: _,
        priority: _,
        suspended: _,
        timeout_seconds: _,
        idempotency_key: _,
        namespace: _,
        install: _,
        last_error,
        run_at,
        wanted_run_at: _,
        started_at,
        finished_at: _,
        worker,
        created_at: _,
        updated_at: _,
        revision: _,
        last_retry,
        history,
    } = job;
    let (phase, ended, result) = match state {
        JobState::Queued { .. } => (Phase::Queued, None, None),
        JobState::Running { .. } => (Phase::Running, None, None),
        JobState::Retrying { .. } => (Phase::Retrying, None, None),
        JobState::Succeeded { at, result } => (Phase::Succeeded, Some(*at), shown(result)),
        JobState::FailedPermanent { at, .. } => (Phase::FailedPermanent, Some(*at), None),
        JobState::Cancelled { at } => (Phase::Cancelled, Some(*at), None),
    };
    JobRequestStatus {
        phase: Some(phase),
        job_id: Some(id.to_string()),
        attempts: i32::try_from(*attempts).ok(),
        last_error: last_error.as_deref().map(|text| cut(text, TEXT_MAX_BYTES).to_owned()),
        history: history.iter().skip(history.len().saturating_sub(HISTORY_LIMIT)).map(record).collect(),
        result,
        run_at: Some(time(*run_at)),
        started_at: started_at.map(time),
        finished_at: ended.map(time),
        worker: worker.clone(),
        observed_generation: None,
        last_retry: last_retry.clone(),
        conditions: Vec::new(),
    }
}

fn record(attempt: &PastAttempt) -> AttemptRecord {
    let PastAttempt { number, worker, from, to, outcome, error } = attempt;
    let outcome = match outcome {
        Outcome::Succeeded => "Succeeded",
        Outcome::Failed => "Failed",
        Outcome::HandedBack => "HandedBack",
        Outcome::Cancelled => "Cancelled",
        Outcome::LeaseLost => "LeaseLost",
    };
    AttemptRecord {
        number: i32::try_from(*number).ok(),
        worker: worker.clone(),
        started_at: from.map(time),
        finished_at: Some(time(*to)),
        outcome: Some(outcome.to_owned()),
        error: error.as_deref().map(|text| cut(text, HISTORY_TEXT_MAX_BYTES).to_owned()),
    }
}

/// A result too large for a status stays in the row alone. The schema has an object here; what a library's executor
/// returns otherwise is wrapped.
fn shown(result: &Value) -> Option<Json> {
    let fits = !result.is_null() && result.to_string().len() <= RESULT_MAX_BYTES;
    fits.then(|| if result.is_object() { Json::from(result) } else { Json::from(json!({ "value": result })) })
}

fn verdict(standing: &Standing<'_>, deleting: bool) -> Verdict {
    let text = str::to_owned;
    match standing {
        Standing::Rejected { reason, message } => Verdict {
            accepted: Some(("False", *reason, message.clone())),
            ready: "False",
            reason: *reason,
            message: message.clone(),
        },
        Standing::Row { job, shared } => {
            let accepted = if *shared {
                ("True", Reason::Existing, text("a job with the same key, kind and payload stands for this one too"))
            } else {
                ("True", Reason::Enqueued, text("the job is in the queue"))
            };
            let (ready, reason, message) = of_state(job, deleting);
            Verdict { accepted: Some(accepted), ready, reason, message }
        }
        Standing::KeptKey { .. } => Verdict {
            accepted: Some((
                "True",
                Reason::Existing,
                text("a job with the same key, kind and payload has succeeded before"),
            )),
            ready: "True",
            reason: Reason::Succeeded,
            message: text("the job has succeeded; its row has been removed by retention"),
        },
        Standing::RowLost => Verdict {
            accepted: None,
            ready: "False",
            reason: Reason::RowLost,
            message: text("the job ran and its row is gone from the database: it may have been done or not"),
        },
        Standing::DatabaseUnavailable => Verdict {
            accepted: None,
            ready: "False",
            reason: Reason::DatabaseUnavailable,
            message: text(if deleting {
                "the database does not answer: the job is cancelled, and the resource goes, when it is back"
            } else {
                "the database does not answer: the job is enqueued when it is back"
            }),
        },
    }
}

fn of_state(job: &Job, deleting: bool) -> (&'static str, Reason, String) {
    let last_error = || match job.last_error.as_deref() {
        Some(error) => cut(error, TEXT_MAX_BYTES).to_owned(),
        None => "no error was recorded".to_owned(),
    };
    match &job.state {
        JobState::Queued { .. } if job.suspended => ("False", Reason::Suspended, "held by spec.suspend".to_owned()),
        JobState::Queued { .. } => ("False", Reason::Queued, "waits for a worker".to_owned()),
        JobState::Running { cancel_requested: true, .. } => {
            ("False", Reason::Cancelling, "the worker has been told to stop".to_owned())
        }
        JobState::Running { .. } if deleting => ("False", Reason::Cancelling, "is about to be cancelled".to_owned()),
        JobState::Running { .. } => ("False", Reason::Running, "a worker runs it".to_owned()),
        JobState::Retrying { .. } if job.suspended => ("False", Reason::Suspended, "held by spec.suspend".to_owned()),
        JobState::Retrying { .. } => ("False", Reason::Retrying, last_error()),
        JobState::Succeeded { .. } => ("True", Reason::Succeeded, "the job has succeeded".to_owned()),
        JobState::FailedPermanent { .. } => ("False", Reason::FailedPermanent, last_error()),
        JobState::Cancelled { .. } => ("False", Reason::Cancelled, "the job was cancelled".to_owned()),
    }
}

/// Conditions that are not true are left out, `Accepted` and `Ready` aside: a tool that looks for `Stalled` or
/// `Failed` must not find a word of it on a healthy job.
fn conditions(
    old: &JobRequestStatus,
    verdict: &Verdict,
    phase: Option<Phase>,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let Verdict { accepted, ready, reason, message } = verdict;
    let reason = reason.as_str();
    let make = |type_: &str, status: &str, reason: &str, message: &str| {
        let unchanged = old.conditions.iter().find(|c| c.type_ == type_ && c.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: cut(message, TEXT_MAX_BYTES).to_owned(),
            observed_generation: generation,
            last_transition_time: unchanged.map_or(Time(now), |c| c.last_transition_time.clone()),
        }
    };
    let mut all = Vec::new();
    match accepted {
        Some((status, reason, message)) => all.push(make("Accepted", status, reason.as_str(), message)),
        None => match old.conditions.iter().find(|c| c.type_ == "Accepted" && c.status != "Unknown") {
            Some(known) => all.push(make("Accepted", &known.status, &known.reason, &known.message)),
            None => all.push(make("Accepted", "Unknown", reason, message)),
        },
    }
    all.push(make("Ready", ready, reason, message));
    match phase {
        // How it ended is not the database's to say now.
        _ if verdict.reason == Reason::DatabaseUnavailable => {
            let ends = old.conditions.iter().filter(|c| ["Complete", "Failed", "Stalled"].contains(&c.type_.as_str()));
            all.extend(ends.map(|c| make(&c.type_, &c.status, &c.reason, &c.message)));
        }
        Some(Phase::Succeeded) => all.push(make("Complete", "True", reason, message)),
        Some(Phase::FailedPermanent | Phase::Cancelled | Phase::Rejected) => {
            all.push(make("Failed", "True", reason, message));
            all.push(make("Stalled", "True", reason, message));
        }
        Some(Phase::Queued | Phase::Running | Phase::Retrying | Phase::Unknown) | None => {}
    }
    all
}

/// chrono's instant as the API's, in whole seconds as that keeps them: what is shown must equal what is read back, or
/// it would be written again and again. Outside of jiff's years it is the nearest one inside.
pub(super) fn time(at: DateTime<Utc>) -> Time {
    let nearest = if at.timestamp() < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Time(Timestamp::from_second(at.timestamp()).unwrap_or(nearest))
}

#[cfg(test)]
mod tests;
