//! Ends of many attempts in a few statements.
//!
//! Rows are taken in the order of their ids, so that two batches never wait for each other. A large batch waits for a
//! row that somebody holds, as that is nearly always another worker's claim, which looked at the row a moment too late
//! and holds it until it commits; to lock each row before it is changed would cost a third more. When the wait is too
//! long, the batch is sent again in the form that locks first and skips what it can't have, and so are the next ones for
//! a while: an application's transaction that holds one row delays that row alone.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgArguments, Postgres};
use sqlx::query::QueryAs;
use uuid::Uuid;

use super::Queue;
use super::claim::columns;
use super::claimed::{ClaimedJob, Lease};
use super::connections::{BY_ID, BY_ID_WAITING};
use super::error::{Error, Result};
use super::finish::{AttemptEnd, AttemptFailure, ERROR_MAX_BYTES, Finish, Unfinished, read_status};
use crate::job::{Cause, Next, Outcome, Status, decide};
use crate::text::{storable, storable_json};

/// So few are locked first, in one request.
const FEW: usize = 16;

/// Where the rows of claims stand, by id and token.
type Hits = HashMap<(Uuid, Uuid), Status>;
type Ended = (Uuid, Uuid, String);
type Statement<'q> = QueryAs<'q, Postgres, Ended, PgArguments>;

impl Queue {
    pub(super) async fn finish_one(&self, job: ClaimedJob, end: AttemptEnd) -> Result<Finish, Box<Unfinished>> {
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
        let mut in_order: Vec<_> = ends.iter().collect();
        in_order.sort_unstable_by_key(|(job, _)| job.lease.id);
        for (job, end) in in_order {
            match end {
                AttemptEnd::Succeeded(result) => succeeded.push(job.lease, result),
                AttemptEnd::Failed(failure) => {
                    let next = decide(job.facts(false), failure.cause, &self.settings.retry, rand::random());
                    failed.push(job.lease, failure, next);
                }
            }
        }
        let (succeeded, failed) =
            tokio::join!(self.bounded(self.end_running(&succeeded)), self.bounded(self.end_running(&failed)));
        self.notify_changed(ends.iter().map(|(job, _)| job));
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

    /// The attempts of these columns that are still running under their tokens; the others are not in the answer.
    async fn end_running(&self, ends: &impl Ends) -> Result<Hits> {
        if ends.len() == 0 {
            return Ok(HashMap::new());
        }
        if ends.len() > FEW && !self.ends_wary.is_wary() {
            match self.end_waiting(ends).await {
                // The lock was not to be had in time, or two waited for each other.
                Err(sqlx::Error::Database(error)) if matches!(error.code().as_deref(), Some("55P03" | "40P01")) => {
                    self.ends_wary.waited_too_long();
                }
                answer => return read_statuses(answer?),
            }
        }
        let sql = format!(
            "UPDATE jobs j SET {} FROM {} CROSS JOIN LATERAL ( \
                 SELECT id FROM jobs WHERE id = e.id AND claim_token = e.token AND status = 'running' \
                 FOR UPDATE SKIP LOCKED) mine \
             WHERE j.id = mine.id RETURNING j.id, j.claim_token, j.status",
            ends.set(),
            ends.columns()
        );
        let query = ends.bind(sqlx::query_as(AssertSqlSafe(sql)));
        if ends.len() <= FEW {
            return read_statuses(query.fetch_all(&self.pool).await?);
        }
        let mut tx = self.pool.begin_with(BY_ID).await?;
        let ended = query.fetch_all(&mut *tx).await?;
        tx.commit().await?;
        read_statuses(ended)
    }

    async fn end_waiting(&self, ends: &impl Ends) -> sqlx::Result<Vec<Ended>> {
        let sql = format!(
            "UPDATE jobs j SET {} FROM {} \
             WHERE j.id = e.id AND CASE WHEN j.status = 'running' THEN j.claim_token = e.token END \
             RETURNING j.id, j.claim_token, j.status",
            ends.set(),
            ends.columns()
        );
        let mut tx = self.pool.begin_with(BY_ID_WAITING).await?;
        let ended = ends.bind(sqlx::query_as(AssertSqlSafe(sql))).fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(ended)
    }

    /// Where the rows of these leases stand, if their token is still the lease's: running when somebody held the row,
    /// else what an earlier try of the finish made of it. A lease that is not in the answer is lost.
    async fn why_missing(&self, leases: &[Lease]) -> Result<Hits> {
        let (ids, tokens) = columns(leases);
        let mut tx = self.pool.begin_with(BY_ID).await?;
        let rows = sqlx::query_as(
            "SELECT j.id, j.claim_token, j.status FROM jobs j \
             JOIN unnest($1::uuid[], $2::uuid[]) AS e(id, token) ON j.id = e.id AND j.claim_token = e.token",
        )
        .bind(ids)
        .bind(tokens)
        .fetch_all(&mut *tx)
        .await?;
        tx.commit().await?;
        read_statuses(rows)
    }
}

/// Ends of attempts as columns, in the order of their ids.
trait Ends {
    fn len(&self) -> usize;
    /// What to set in `jobs j`, from a row of the columns, `e`.
    fn set(&self) -> &'static str;
    /// Behind SELECTs, so that the planner does not see them: see `lanes.rs`.
    fn columns(&self) -> &'static str;
    fn bind<'q>(&'q self, statement: Statement<'q>) -> Statement<'q>;
}

/// With a result.
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
}

impl Ends for Succeeded {
    fn len(&self) -> usize {
        self.ids.len()
    }

    fn set(&self) -> &'static str {
        "status = 'succeeded', result = e.result, finished_at = now(), updated_at = now(), worker = locked_by, \
         locked_by = NULL, locked_at = NULL, progress = NULL, handed_back_at = NULL, revision = revision + 1, \
         mirror_due = owner_uid IS NOT NULL"
    }

    fn columns(&self) -> &'static str {
        "unnest((SELECT $1::uuid[]), (SELECT $2::uuid[]), (SELECT $3::jsonb[])) AS e(id, token, result)"
    }

    fn bind<'q>(&'q self, statement: Statement<'q>) -> Statement<'q> {
        statement.bind(&self.ids).bind(&self.tokens).bind(&self.results)
    }
}

/// Without a result.
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
}

impl Ends for Failed {
    fn len(&self) -> usize {
        self.ids.len()
    }

    /// The cancel flag is the row's own, read under its lock, so the decision for a cancelled row is applied here:
    /// such a row never waits again.
    fn set(&self) -> &'static str {
        "status = CASE WHEN cancel_requested THEN 'cancelled' ELSE e.status END, \
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
         revision = revision + 1, mirror_due = owner_uid IS NOT NULL"
    }

    fn columns(&self) -> &'static str {
        "unnest((SELECT $1::uuid[]), (SELECT $2::uuid[]), (SELECT $3::text[]), (SELECT $4::float8[]), \
             (SELECT $5::bool[]), (SELECT $6::text[]), (SELECT $7::jsonb[]), (SELECT $8::text[])) \
         AS e(id, token, status, delay, free, error, progress, outcome)"
    }

    fn bind<'q>(&'q self, statement: Statement<'q>) -> Statement<'q> {
        statement
            .bind(&self.ids)
            .bind(&self.tokens)
            .bind(&self.statuses)
            .bind(&self.delays)
            .bind(&self.free)
            .bind(&self.errors)
            .bind(&self.progress)
            .bind(&self.outcomes)
    }
}

fn read_statuses(rows: Vec<Ended>) -> Result<Hits> {
    rows.into_iter().map(|(id, token, status)| Ok(((id, token), read_status(id, &status)?))).collect()
}

fn outcome_of(cause: Cause) -> Outcome {
    match cause {
        Cause::Permanent | Cause::Passing | Cause::RetryAfter(_) | Cause::Cancelled => Outcome::Failed,
        Cause::HandBack => Outcome::HandedBack,
        Cause::LeaseLost => Outcome::LeaseLost,
    }
}
