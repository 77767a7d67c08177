//! The row at the edge: columns by name, parsed into a [`Job`]. A row that breaks the type is an error, never a default.

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{FromRow, Row};
use uuid::Uuid;

use super::error::Error;
use crate::job::{Job, JobState, Outcome, PastAttempt, Status};

/// The columns of [`JobRow`], spelled out: a column added by a later version must not break a prepared statement.
macro_rules! job_columns {
    () => {
        "id, kind, status, attempts, max_attempts, last_error, run_at, locked_at, locked_by, cancel_requested, \
         idempotency_key, created_at, updated_at, priority, suspended, timeout_seconds, started_at, finished_at, \
         worker, result, history, last_retry, install, namespace, revision, \
         wanted_run_at, owner_uid"
    };
}
pub(super) use job_columns;

#[derive(sqlx::FromRow)]
pub(super) struct JobRow {
    id: Uuid,
    kind: String,
    status: String,
    attempts: i32,
    max_attempts: i32,
    last_error: Option<String>,
    run_at: DateTime<Utc>,
    locked_at: Option<DateTime<Utc>>,
    locked_by: Option<String>,
    cancel_requested: bool,
    idempotency_key: Option<String>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    priority: i16,
    suspended: bool,
    timeout_seconds: i32,
    started_at: Option<DateTime<Utc>>,
    finished_at: Option<DateTime<Utc>>,
    worker: Option<String>,
    result: Option<Value>,
    history: Json<Vec<PastAttempt>>,
    last_retry: Option<String>,
    install: String,
    namespace: Option<String>,
    revision: i64,
    wanted_run_at: Option<DateTime<Utc>>,
    pub(super) owner_uid: Option<Uuid>,
}

/// A row of [`job_columns`]; of one that can't be read, the first column that is to blame.
pub(super) fn read_job(row: &PgRow) -> Result<Job, Error> {
    let id: Uuid = row.try_get("id")?;
    let read = JobRow::from_row(row).map_err(|error| {
        let column = match &error {
            sqlx::Error::ColumnDecode { index, .. } => {
                let named = |column: &&str| index.trim_matches('"') == *column;
                job_columns!().split(", ").find(named).unwrap_or("(unknown)")
            }
            _ => "(unknown)",
        };
        Error::RowInvalid { id, column, problem: "is nothing that this version can read" }
    });
    read?.try_into()
}

pub(super) fn count(id: Uuid, column: &'static str, value: i32) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::RowInvalid { id, column, problem: "is negative" })
}

impl TryFrom<JobRow> for Job {
    type Error = Error;

    fn try_from(row: JobRow) -> Result<Self, Error> {
        let JobRow {
            id,
            kind,
            status,
            attempts,
            max_attempts,
            last_error,
            run_at,
            locked_at,
            locked_by,
            cancel_requested,
            idempotency_key,
            created_at,
            updated_at,
            priority,
            suspended,
            timeout_seconds,
            started_at,
            finished_at,
            worker,
            result,
            history: Json(mut history),
            last_retry,
            install,
            namespace,
            revision,
            wanted_run_at,
            owner_uid: _,
        } = row;
        let status: Status = status.parse().map_err(|_| Error::RowInvalid {
            id,
            column: "status",
            problem: "is none of the six states: was it written by a later version?",
        })?;
        let attempts = count(id, "attempts", attempts)?;
        // Rows written by hand may lack the times of a transition; the last change is the nearest truth.
        let ended = finished_at.unwrap_or(updated_at);
        let error = || last_error.clone().unwrap_or_default();
        let state = match status {
            Status::Queued => JobState::Queued { run_at },
            Status::Running => JobState::Running {
                worker: locked_by.clone().unwrap_or_default(),
                since: started_at.or(locked_at).unwrap_or(updated_at),
                cancel_requested,
            },
            Status::Retrying => JobState::Retrying { run_at, error: error() },
            Status::Succeeded => {
                // Failed attempts are appended as they end; the one success is told by the row's own columns.
                history.push(PastAttempt {
                    number: attempts,
                    worker: worker.clone(),
                    from: started_at,
                    to: ended,
                    outcome: Outcome::Succeeded,
                    error: None,
                });
                JobState::Succeeded { at: ended, result: result.unwrap_or(Value::Null) }
            }
            Status::FailedPermanent => JobState::FailedPermanent { at: ended, error: error() },
            Status::Cancelled => JobState::Cancelled { at: ended },
        };
        let worker = if status == Status::Running { locked_by } else { worker };
        Ok(Self {
            id,
            kind,
            state,
            attempts,
            max_attempts: count(id, "max_attempts", max_attempts)?,
            priority,
            suspended,
            timeout_seconds: count(id, "timeout_seconds", timeout_seconds)?,
            idempotency_key,
            namespace,
            install,
            last_error,
            run_at,
            wanted_run_at,
            started_at,
            finished_at,
            worker,
            created_at,
            updated_at,
            revision,
            last_retry,
            history,
        })
    }
}
