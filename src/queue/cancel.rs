//! Cancel and explicit retry.

use uuid::Uuid;

use super::connections::Session;
use super::error::{Error, Result};
use super::finish::read_status;
use super::{Channel, Queue};
use crate::job::Status;

/// What became of a request to cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The job waited; it is cancelled.
    CancelledNow,
    /// A worker holds it and has been told; it ends within the lease at the latest.
    PendingOnWorker,
    /// It had ended before.
    AlreadyTerminal,
}

/// What became of an explicit retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryOutcome {
    Queued,
    /// This mark was used before: nothing was done.
    AlreadyUsed,
    /// Another row has taken the job's key meanwhile: refused. The mark counts as used.
    KeyTaken,
}

impl Queue {
    /// Asks for a job to be cancelled: a waiting one is at once, a running one is told. Safe to repeat.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Db`], [`Error::Timeout`].
    pub async fn request_cancel(&self, id: Uuid) -> Result<CancelOutcome> {
        let outcome = self
            .bounded(async {
                let mut tx = self.pool.begin().await?;
                let outcome = cancel_row(&mut tx, &self.settings.install, id).await?;
                tx.commit().await?;
                Ok(outcome)
            })
            .await?;
        self.notify_cancel(outcome);
        Ok(outcome)
    }

    pub(super) fn notify_cancel(&self, outcome: CancelOutcome) {
        match outcome {
            CancelOutcome::CancelledNow => self.notify(Channel::Changed),
            CancelOutcome::PendingOnWorker => self.notify(Channel::Cancel),
            CancelOutcome::AlreadyTerminal => {}
        }
    }

    /// Runs a failed or cancelled job again: attempts from zero, history kept. Each mark (at most 255 characters)
    /// is answered once and written with the answer; a refusal is written too, or whoever shows the mark would
    /// be refused again and again.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::InvalidTransition`] from any other state; [`Error::Db`]; [`Error::Timeout`].
    pub async fn retry(&self, id: Uuid, mark: &str) -> Result<RetryOutcome> {
        if !(1..=255).contains(&mark.chars().count()) || mark.contains('\0') {
            return Err(Error::invalid("retry mark", "is 1 to 255 characters without NUL"));
        }
        self.retry_with(id, Some(mark)).await
    }

    /// The same without a mark, for a person who asks once. The newest mark stays: a resource that still shows it has
    /// been answered.
    ///
    /// # Errors
    /// As [`Queue::retry`].
    pub async fn retry_by_hand(&self, id: Uuid) -> Result<RetryOutcome> {
        self.retry_with(id, None).await
    }

    async fn retry_with(&self, id: Uuid, mark: Option<&str>) -> Result<RetryOutcome> {
        let answer = match self.bounded(self.retry_row(id, mark)).await {
            Err(error) if error.violates("jobs_idempotency_key_uidx") => Ok(RetryOutcome::KeyTaken),
            answer => answer,
        }?;
        match (answer, mark) {
            (RetryOutcome::Queued, _) => {
                self.notify(Channel::Ready);
                self.notify(Channel::Changed);
            }
            (RetryOutcome::KeyTaken, Some(mark)) => self.bounded(self.use_up(id, mark)).await?,
            (RetryOutcome::KeyTaken, None) | (RetryOutcome::AlreadyUsed, _) => {}
        }
        Ok(answer)
    }

    /// A mark that was refused.
    async fn use_up(&self, id: Uuid, mark: &str) -> Result<()> {
        sqlx::query(
            "UPDATE jobs SET last_retry = $2, updated_at = now(), revision = revision + 1, \
                 mirror_due = owner_uid IS NOT NULL \
             WHERE id = $1 AND install = $3 AND status IN ('failed_permanent', 'cancelled') \
               AND last_retry IS DISTINCT FROM $2",
        )
        .bind(id)
        .bind(mark)
        .bind(&self.settings.install)
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    async fn retry_row(&self, id: Uuid, mark: Option<&str>) -> Result<RetryOutcome> {
        let mut tx = self.pool.begin().await?;
        let done: Option<(Option<String>, Option<String>)> = sqlx::query_as(
            "UPDATE jobs SET status = 'queued', attempts = 0, cancel_requested = false, run_at = now(), \
                 suspended = false, claim_token = NULL, handed_back_at = NULL, lost_leases = 0, \
                 last_retry = coalesce($2, last_retry), \
                 finished_at = NULL, updated_at = now(), revision = revision + 1, \
                 mirror_due = owner_uid IS NOT NULL \
             WHERE id = $1 AND install = $3 AND status IN ('failed_permanent', 'cancelled') \
               AND ($2 IS NULL OR last_retry IS DISTINCT FROM $2) RETURNING namespace, idempotency_key",
        )
        .bind(id)
        .bind(mark)
        .bind(&self.settings.install)
        .fetch_optional(&mut *tx)
        .await?;
        if let Some((namespace, key)) = done {
            if kept_key_exists(&mut tx, &self.settings.install, namespace.as_deref(), key.as_deref()).await? {
                return Ok(RetryOutcome::KeyTaken);
            }
            tx.commit().await?;
            return Ok(RetryOutcome::Queued);
        }
        let row: Option<(String, Option<String>)> =
            sqlx::query_as("SELECT status, last_retry FROM jobs WHERE id = $1 AND install = $2")
                .bind(id)
                .bind(&self.settings.install)
                .fetch_optional(&mut *tx)
                .await?;
        match row {
            None => Err(Error::NotFound),
            Some((_, Some(used))) if Some(used.as_str()) == mark => Ok(RetryOutcome::AlreadyUsed),
            Some((status, _)) => Err(Error::InvalidTransition { from: read_status(id, &status)?, wanted: "retried" }),
        }
    }
}

/// Whether retention has removed a succeeded row that held this key.
async fn kept_key_exists(tx: &mut Session, install: &str, namespace: Option<&str>, key: Option<&str>) -> Result<bool> {
    let Some(key) = key else { return Ok(false) };
    let kept: (bool,) = sqlx::query_as(
        "SELECT EXISTS (SELECT FROM job_keys \
         WHERE install = $1 AND namespace = coalesce($2, '') AND idempotency_key = $3)",
    )
    .bind(install)
    .bind(namespace)
    .bind(key)
    .fetch_one(tx)
    .await?;
    Ok(kept.0)
}

/// The cancel itself, inside whatever transaction the caller has.
pub(super) async fn cancel_row(connection: &mut Session, install: &str, id: Uuid) -> Result<CancelOutcome> {
    let told: Option<(String,)> = sqlx::query_as(
        "UPDATE jobs SET cancel_requested = true, updated_at = now(), revision = revision + 1, \
             mirror_due = owner_uid IS NOT NULL, \
             status = CASE WHEN status = 'running' THEN status ELSE 'cancelled' END, \
             finished_at = CASE WHEN status = 'running' THEN finished_at ELSE now() END \
         WHERE id = $1 AND install = $2 AND NOT cancel_requested AND status IN ('queued', 'retrying', 'running') \
         RETURNING status",
    )
    .bind(id)
    .bind(install)
    .fetch_optional(&mut *connection)
    .await?;
    let (status, now) = match told {
        Some((status,)) => (status, true),
        None => {
            let row: Option<(String,)> = sqlx::query_as("SELECT status FROM jobs WHERE id = $1 AND install = $2")
                .bind(id)
                .bind(install)
                .fetch_optional(connection)
                .await?;
            (row.ok_or(Error::NotFound)?.0, false)
        }
    };
    Ok(match read_status(id, &status)? {
        Status::Cancelled if now => CancelOutcome::CancelledNow,
        Status::Running => CancelOutcome::PendingOnWorker,
        _ => CancelOutcome::AlreadyTerminal,
    })
}
