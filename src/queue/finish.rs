//! The ends of an attempt. Each statement names the row, `running` and the claim's token.

use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::claimed::{ClaimedJob, Lease};
use super::error::{Error, Result};
use super::{Channel, Queue};
use crate::job::{Cause, Next, Outcome, Status, decide};
use crate::text::{storable, storable_json};

/// The longest error kept in a row, in bytes.
const ERROR_MAX_BYTES: usize = 4096;

/// Whether the attempt was this claim's to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Finish {
    /// The row is in this state now (or was put there by an earlier try of the same finish).
    Done(Status),
    /// The lease was over: the row belongs to somebody else and was not touched.
    Lost,
}

/// The database did not answer: the claim comes back, to be tried again while its lease lasts. A finish that did take
/// effect is recognised by its token.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Unfinished {
    pub job: ClaimedJob,
    pub error: Error,
}

/// Why an attempt has no result, for the row.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptFailure {
    pub cause: Cause,
    /// Shown to users; cut to 4 KiB. None keeps the error of the attempt before.
    pub error: Option<String>,
    /// Left for the next attempt.
    pub progress: Option<Value>,
}

impl Queue {
    /// Ends the attempt with a result: running -> succeeded. A cancel that came meanwhile is too late. A NUL in the
    /// result, or nesting over 100, is replaced.
    ///
    /// # Errors
    /// [`Unfinished`] with the claim when the database did not answer.
    pub async fn mark_succeeded(&self, job: ClaimedJob, result: &Value) -> Result<Finish, Box<Unfinished>> {
        let Lease { id, token, .. } = job.lease;
        let query = sqlx::query_as(
            "UPDATE jobs SET status = 'succeeded', result = $3, finished_at = now(), updated_at = now(), \
                 worker = locked_by, locked_by = NULL, locked_at = NULL, progress = NULL, handed_back_at = NULL, \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             WHERE id = $1 AND status = 'running' AND claim_token = $2 RETURNING status",
        )
        .bind(id)
        .bind(token)
        .bind(storable_json(result));
        let hit = self.bounded(async { Ok(query.fetch_optional(&self.pool).await?) }).await;
        self.finished(job, hit).await
    }

    /// Ends the attempt without a result; what follows is [`decide`]'s word: running -> retrying, queued,
    /// failed_permanent, or cancelled when that was asked for.
    ///
    /// # Errors
    /// [`Unfinished`] with the claim when the database did not answer.
    pub async fn mark_failed_or_retry(
        &self,
        job: ClaimedJob,
        failure: &AttemptFailure,
    ) -> Result<Finish, Box<Unfinished>> {
        let next = decide(job.facts(false), failure.cause, &self.settings.retry, rand::random());
        let hit = self.bounded(self.end_attempt(job.lease, failure, next)).await;
        self.finished(job, hit).await
    }

    /// Ends the attempt of a job that was asked to stop: running -> cancelled.
    ///
    /// # Errors
    /// [`Unfinished`] with the claim when the database did not answer, or, as [`Error::InvalidTransition`], when
    /// nobody asked.
    pub async fn finalize_cancelled(&self, job: ClaimedJob) -> Result<Finish, Box<Unfinished>> {
        let Lease { id, token, .. } = job.lease;
        let query = sqlx::query_as(
            "UPDATE jobs SET status = 'cancelled', finished_at = now(), updated_at = now(), worker = locked_by, \
                 locked_by = NULL, locked_at = NULL, progress = NULL, handed_back_at = NULL, \
                 history = (CASE WHEN jsonb_array_length(history) < 20 THEN history ELSE history - 0 END) \
                     || jsonb_build_object('number', attempts, 'worker', locked_by, 'from', started_at, \
                                           'to', now(), 'outcome', 'cancelled'), \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             WHERE id = $1 AND status = 'running' AND claim_token = $2 AND cancel_requested RETURNING status",
        )
        .bind(id)
        .bind(token);
        let hit = self.bounded(async { Ok(query.fetch_optional(&self.pool).await?) }).await;
        let unasked = |status| Error::InvalidTransition { from: status, wanted: "cancelled unless asked" };
        match self.finished(job, hit).await {
            Err(unfinished) if matches!(unfinished.error, Error::NotFound) => {
                Err(Box::new(Unfinished { error: unasked(Status::Running), ..*unfinished }))
            }
            answer => answer,
        }
    }

    /// One statement for every end without a result. The cancel flag is the row's own, read under its lock, so the
    /// decision for a cancelled row is applied here: such a row never waits again.
    async fn end_attempt(
        &self,
        Lease { id, token, .. }: Lease,
        failure: &AttemptFailure,
        next: Next,
    ) -> Result<Option<(String,)>> {
        let AttemptFailure { cause, error, progress } = failure;
        let (status, after, free) = match next {
            Next::Wait { status, after, free } => (status, after, free),
            Next::FailedPermanent => (Status::FailedPermanent, Duration::ZERO, false),
            Next::Cancelled => (Status::Cancelled, Duration::ZERO, false),
        };
        let error = error.as_deref().map(|text| storable(text, ERROR_MAX_BYTES));
        let progress = progress.as_ref().map(storable_json);
        let row = sqlx::query_as(
            "UPDATE jobs SET status = CASE WHEN cancel_requested THEN 'cancelled' ELSE $3 END, \
                 attempts = CASE WHEN $5 AND NOT cancel_requested THEN attempts - 1 ELSE attempts END, \
                 run_at = CASE WHEN $6 AND NOT cancel_requested THEN now() + make_interval(secs => $4) ELSE run_at END, \
                 handed_back_at = CASE WHEN $5 THEN coalesce(handed_back_at, now()) END, \
                 last_error = coalesce($7, last_error), progress = coalesce($8, progress), \
                 history = (CASE WHEN jsonb_array_length(history) < 20 THEN history ELSE history - 0 END) \
                     || jsonb_strip_nulls(jsonb_build_object('number', attempts, 'worker', locked_by, \
                            'from', started_at, 'to', now(), 'error', $7::text, \
                            'outcome', CASE WHEN cancel_requested THEN 'cancelled' ELSE $9 END)), \
                 finished_at = now(), updated_at = now(), worker = locked_by, locked_by = NULL, locked_at = NULL, \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             WHERE id = $1 AND status = 'running' AND claim_token = $2 RETURNING status",
        )
        .bind(id)
        .bind(token)
        .bind(status.as_str())
        .bind(after.as_secs_f64())
        .bind(free)
        .bind(status.is_waiting())
        .bind(error)
        .bind(progress)
        .bind(outcome_of(*cause).as_str())
        .fetch_optional(&self.pool)
        .await?;
        Ok(row)
    }

    /// A row whose columns can't be read: nobody can run it, so it ends at once instead of coming back for ever.
    pub(super) async fn fail_unreadable(&self, id: Uuid, token: Uuid, why: &str) -> Result<()> {
        sqlx::query(
            "UPDATE jobs SET status = 'failed_permanent', last_error = $3, finished_at = now(), updated_at = now(), \
                 worker = locked_by, locked_by = NULL, locked_at = NULL, revision = revision + 1, \
                 mirror_due = owner_uid IS NOT NULL \
             WHERE id = $1 AND status = 'running' AND claim_token = $2",
        )
        .bind(id)
        .bind(token)
        .bind(storable(why, ERROR_MAX_BYTES))
        .execute(&self.pool)
        .await?;
        self.notify(Channel::Changed);
        Ok(())
    }

    /// No hit means that the lease is lost, or that an earlier try of this finish did its work unheard.
    async fn finished(&self, job: ClaimedJob, hit: Result<Option<(String,)>>) -> Result<Finish, Box<Unfinished>> {
        let lease = job.lease;
        let answer = match hit {
            Ok(Some((status,))) => read_status(lease.id, &status).map(Finish::Done),
            Ok(None) => self.bounded(self.earlier_finish(lease)).await,
            Err(error) => Err(error),
        };
        self.notify(Channel::Changed);
        answer.map_err(|error| Box::new(Unfinished { job, error }))
    }

    async fn earlier_finish(&self, Lease { id, token, .. }: Lease) -> Result<Finish> {
        let row: Option<(String,)> = sqlx::query_as("SELECT status FROM jobs WHERE id = $1 AND claim_token = $2")
            .bind(id)
            .bind(token)
            .fetch_optional(&self.pool)
            .await?;
        let Some((status,)) = row else { return Ok(Finish::Lost) };
        match read_status(id, &status)? {
            Status::Running => Err(Error::NotFound),
            ended => Ok(Finish::Done(ended)),
        }
    }
}

pub(super) fn read_status(id: Uuid, status: &str) -> Result<Status> {
    status.parse().map_err(|_| Error::RowInvalid { id, column: "status", problem: "is none of the six states" })
}

fn outcome_of(cause: Cause) -> Outcome {
    match cause {
        Cause::Permanent | Cause::Passing | Cause::RetryAfter(_) | Cause::Cancelled => Outcome::Failed,
        Cause::HandBack => Outcome::HandedBack,
        Cause::LeaseLost => Outcome::LeaseLost,
    }
}
