//! The ends of an attempt. Each statement names the row, `running` and the claim's token.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::claimed::{ClaimedJob, Lease};
use super::connections::Connections;
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

/// Where the rows of claims stand, by id and token.
type Hits = HashMap<(Uuid, Uuid), Status>;

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
        self.finish_one(job, AttemptEnd::Failed(failure.clone())).await
    }

    async fn finish_one(&self, job: ClaimedJob, end: AttemptEnd) -> Result<Finish, Box<Unfinished>> {
        let mut answers = self.finish_batch(vec![(job, end)]).await;
        answers.pop().expect("one answer for each end").0
    }

    /// [`Queue::mark_succeeded`] and [`Queue::mark_failed_or_retry`] for many attempts: one statement for those with a
    /// result, one for those without. Answers come in the order of the ends. Rows are taken in the order of their ids,
    /// so that two batches never wait for each other; one that another transaction holds is not waited for. An end
    /// that the database refuses is tried alone once more: it must not cost the others theirs (those may be told
    /// [`Error::RowLocked`], as the server lets go of the refused batch's rows only after it has answered).
    ///
    /// # Errors
    /// [`Unfinished`] for each attempt that the database did not answer for, or whose row was held
    /// ([`Error::RowLocked`]).
    pub async fn finish_many(&self, ends: Vec<(ClaimedJob, AttemptEnd)>) -> Vec<Result<Finish, Box<Unfinished>>> {
        let many = ends.len() > 1;
        let mut answers = Vec::with_capacity(ends.len());
        for (answer, end) in self.finish_batch(ends).await {
            answers.push(match answer {
                Err(refused) if many && !refused.error.is_passing() => self.finish_one(refused.job, end).await,
                answer => answer,
            });
        }
        answers
    }

    async fn finish_batch(
        &self,
        ends: Vec<(ClaimedJob, AttemptEnd)>,
    ) -> Vec<(Result<Finish, Box<Unfinished>>, AttemptEnd)> {
        let (mut succeeded, mut failed) = (Succeeded::default(), Failed::default());
        for (job, end) in &ends {
            match end {
                AttemptEnd::Succeeded(result) => succeeded.push(job.lease, result),
                AttemptEnd::Failed(failure) => {
                    let next = decide(job.facts(false), failure.cause, &self.settings.retry, rand::random());
                    failed.push(job.lease, failure, next);
                }
            }
        }
        let (succeeded, failed) =
            tokio::join!(self.bounded(succeeded.apply(&self.pool)), self.bounded(failed.apply(&self.pool)));
        self.notify(Channel::Changed);
        let leases = ends.iter().map(|(job, end)| (job.lease, matches!(end, AttemptEnd::Succeeded(_))));
        let mut missing = Vec::new();
        let hits: Vec<Result<Option<Status>>> = leases
            .map(|(lease, with_result)| {
                let hit = if with_result { &succeeded } else { &failed };
                let hit = hit.as_ref().map(|hits| hits.get(&(lease.id, lease.token)).copied());
                if let Ok(None) = hit {
                    missing.push(lease);
                }
                hit.map_err(Error::again)
            })
            .collect();
        let why = if missing.is_empty() { Ok(HashMap::new()) } else { self.bounded(self.why_missing(&missing)).await };
        ends.into_iter()
            .zip(hits)
            .map(|((job, end), hit)| {
                let answer = match (hit, &why) {
                    (Ok(Some(status)), _) => Ok(Finish::Done(status)),
                    (Ok(None), Ok(why)) => match why.get(&(job.lease.id, job.lease.token)) {
                        None => Ok(Finish::Lost),
                        Some(Status::Running) => Err(Error::RowLocked),
                        Some(ended) => Ok(Finish::Done(*ended)),
                    },
                    (Ok(None), Err(error)) => Err(error.again()),
                    (Err(error), _) => Err(error),
                };
                (answer.map_err(|error| Box::new(Unfinished { job, error })), end)
            })
            .collect()
    }

    /// Where the rows of these leases stand, if their token is still the lease's: running when somebody held the row,
    /// else what an earlier try of the finish made of it. A lease that is not in the answer is lost.
    async fn why_missing(&self, leases: &[Lease]) -> Result<Hits> {
        let (ids, tokens): (Vec<Uuid>, Vec<Uuid>) = leases.iter().map(|lease| (lease.id, lease.token)).unzip();
        let rows = sqlx::query_as(
            "SELECT j.id, j.claim_token, j.status FROM jobs j \
             JOIN unnest($1::uuid[], $2::uuid[]) AS e(id, token) ON j.id = e.id AND j.claim_token = e.token",
        )
        .bind(ids)
        .bind(tokens)
        .fetch_all(&self.pool)
        .await?;
        read_statuses(rows)
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

/// Attempts that ended with a result, as columns.
#[derive(Default)]
struct Succeeded {
    ids: Vec<Uuid>,
    tokens: Vec<Uuid>,
    results: Vec<Value>,
}

impl Succeeded {
    fn push(&mut self, lease: Lease, result: &Value) {
        self.ids.push(lease.id);
        self.tokens.push(lease.token);
        self.results.push(storable_json(result));
    }

    async fn apply(self, pool: &Connections) -> Result<Hits> {
        if self.ids.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = sqlx::query_as(
            "WITH ends AS (SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::jsonb[]) AS e(id, token, result)), \
             mine AS ( \
                 SELECT e.* FROM jobs j JOIN ends e ON j.id = e.id AND j.claim_token = e.token \
                 WHERE j.status = 'running' ORDER BY j.id FOR UPDATE OF j SKIP LOCKED) \
             UPDATE jobs j SET status = 'succeeded', result = e.result, finished_at = now(), updated_at = now(), \
                 worker = locked_by, locked_by = NULL, locked_at = NULL, progress = NULL, handed_back_at = NULL, \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             FROM mine e WHERE j.id = e.id RETURNING j.id, j.claim_token, j.status",
        )
        .bind(self.ids)
        .bind(self.tokens)
        .bind(self.results)
        .fetch_all(pool)
        .await?;
        read_statuses(rows)
    }
}

/// Attempts that ended without a result, as columns.
#[derive(Default)]
struct Failed {
    ids: Vec<Uuid>,
    tokens: Vec<Uuid>,
    statuses: Vec<&'static str>,
    delays: Vec<f64>,
    free: Vec<bool>,
    errors: Vec<Option<String>>,
    progress: Vec<Option<Value>>,
    outcomes: Vec<&'static str>,
}

impl Failed {
    fn push(&mut self, lease: Lease, failure: &AttemptFailure, next: Next) {
        let AttemptFailure { cause, error, progress } = failure;
        let (status, after, free) = match next {
            Next::Wait { status, after, free } => (status, after, free),
            Next::FailedPermanent => (Status::FailedPermanent, Duration::ZERO, false),
            Next::Cancelled => (Status::Cancelled, Duration::ZERO, false),
        };
        self.ids.push(lease.id);
        self.tokens.push(lease.token);
        self.statuses.push(status.as_str());
        self.delays.push(after.as_secs_f64());
        self.free.push(free);
        self.errors.push(error.as_deref().map(|text| storable(text, ERROR_MAX_BYTES)));
        self.progress.push(progress.as_ref().map(storable_json));
        self.outcomes.push(outcome_of(*cause).as_str());
    }

    /// The cancel flag is the row's own, read under its lock, so the decision for a cancelled row is applied here:
    /// such a row never waits again.
    async fn apply(self, pool: &Connections) -> Result<Hits> {
        if self.ids.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = sqlx::query_as(
            "WITH ends AS ( \
                 SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::float8[], $5::bool[], $6::text[], \
                     $7::jsonb[], $8::text[]) AS e(id, token, status, delay, free, error, progress, outcome)), \
             mine AS ( \
                 SELECT e.* FROM jobs j JOIN ends e ON j.id = e.id AND j.claim_token = e.token \
                 WHERE j.status = 'running' ORDER BY j.id FOR UPDATE OF j SKIP LOCKED) \
             UPDATE jobs j SET status = CASE WHEN cancel_requested THEN 'cancelled' ELSE e.status END, \
                 attempts = CASE WHEN e.free AND NOT cancel_requested THEN attempts - 1 ELSE attempts END, \
                 run_at = CASE WHEN e.status IN ('queued', 'retrying') AND NOT cancel_requested \
                     THEN now() + make_interval(secs => e.delay) ELSE run_at END, \
                 handed_back_at = CASE WHEN e.free THEN coalesce(handed_back_at, now()) END, \
                 last_error = coalesce(e.error, last_error), progress = coalesce(e.progress, j.progress), \
                 history = (CASE WHEN jsonb_array_length(history) < 20 THEN history ELSE history - 0 END) \
                     || jsonb_strip_nulls(jsonb_build_object('number', attempts, 'worker', locked_by, \
                            'from', started_at, 'to', now(), 'error', e.error, \
                            'outcome', CASE WHEN cancel_requested THEN 'cancelled' ELSE e.outcome END)), \
                 finished_at = now(), updated_at = now(), worker = locked_by, locked_by = NULL, locked_at = NULL, \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             FROM mine e WHERE j.id = e.id RETURNING j.id, j.claim_token, j.status",
        )
        .bind(self.ids)
        .bind(self.tokens)
        .bind(self.statuses)
        .bind(self.delays)
        .bind(self.free)
        .bind(self.errors)
        .bind(self.progress)
        .bind(self.outcomes)
        .fetch_all(pool)
        .await?;
        read_statuses(rows)
    }
}

fn read_statuses(rows: Vec<(Uuid, Uuid, String)>) -> Result<Hits> {
    rows.into_iter().map(|(id, token, status)| Ok(((id, token), read_status(id, &status)?))).collect()
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
