//! The ends of an attempt. Each statement names the row, `running` and the claim's token.

use serde_json::Value;
use uuid::Uuid;

use super::claimed::{ClaimedJob, Lease};
use super::error::{Error, Result};
use super::{Channel, Queue};
use crate::job::{Cause, Status};
use crate::text::storable;

/// The longest error kept in a row, in bytes.
pub(super) const ERROR_MAX_BYTES: usize = 4096;

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

/// How an attempt ended, for [`Queue::finish_many`].
#[derive(Debug, Clone, PartialEq)]
pub enum AttemptEnd {
    /// With a result.
    Succeeded(Value),
    Failed(AttemptFailure),
}

impl Queue {
    /// Ends the attempt with a result: running -> succeeded. A cancel that came meanwhile is too late. A NUL in the
    /// result, or nesting over 100, is replaced.
    ///
    /// # Errors
    /// [`Unfinished`] with the claim when the database did not answer.
    pub async fn mark_succeeded(&self, job: ClaimedJob, result: &Value) -> Result<Finish, Box<Unfinished>> {
        self.finish_one(job, AttemptEnd::Succeeded(result.clone())).await
    }

    /// Ends the attempt without a result; what follows is [`decide`](crate::job::decide)'s word: running -> retrying, queued,
    /// failed_permanent, or cancelled when that was asked for.
    ///
    /// # Errors
    /// [`Unfinished`] with the claim when the database did not answer.
    pub async fn mark_failed_or_retry(
        &self,
        job: ClaimedJob,
        failure: &AttemptFailure,
    ) -> Result<Finish, Box<Unfinished>> {
        self.finish_one(job, AttemptEnd::Failed(failure.clone())).await
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
        self.notify_changed([&job]);
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
