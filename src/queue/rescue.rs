//! What clears up after workers: leases that have ended.

use std::time::Duration;

use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::connections::BY_ID;
use super::error::Result;
use super::row::count;
use super::{Channel, Queue};
use crate::job::{Cause, Facts, Next, Status, decide};

/// How many rows one rescue takes at most.
const BATCH: i64 = 500;
/// Whose lease has run out, by the database's clock.
const STALE: &str = "install = $1 AND starts_with(status, 'running') \
    AND (locked_at IS NULL OR locked_at < now() - make_interval(secs => lease_seconds))";
const LEASE_LOST: &str = "the worker was gone when its lease ended";

/// What a rescue did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rescued {
    /// Wait for another attempt.
    pub retried: u64,
    /// Had no attempt left.
    pub failed: u64,
    /// Had been asked to stop.
    pub cancelled: u64,
}

impl Rescued {
    pub fn total(self) -> u64 {
        self.retried + self.failed + self.cancelled
    }
}

#[derive(sqlx::FromRow)]
struct StaleRow {
    id: Uuid,
    attempts: i32,
    max_attempts: i32,
    cancel_requested: bool,
}

impl Queue {
    /// Ends the leases that have run out, at most 500 a call: running -> retrying, failed_permanent or cancelled, by
    /// [`decide`]. Run by every worker and by the controller, every third of a lease, for all kinds; by a worker less
    /// often, but once in a lease, while a look takes long.
    ///
    /// Guard: running and not renewed for the lease's length by the database's clock (or without a time of lease at
    /// all), judged under the row's lock, which a finish or heartbeat takes too; locked rows are left for next time.
    /// The token is cleared, so that nothing the old worker sends can hit the row any more.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout); nothing is half done.
    pub async fn recover_stale(&self) -> Result<Rescued> {
        let rescued = self.bounded(self.rescue_batch()).await?;
        if rescued.total() > 0 {
            self.notify(Channel::Changed);
        }
        Ok(rescued)
    }

    async fn rescue_batch(&self) -> Result<Rescued> {
        // Nearly always there is none: one statement, and no transaction.
        let any = format!("SELECT EXISTS (SELECT FROM jobs WHERE {STALE})");
        let (any,): (bool,) =
            sqlx::query_as(AssertSqlSafe(any)).bind(&self.settings.install).fetch_one(&self.pool).await?;
        if !any {
            return Ok(Rescued::default());
        }
        let mut tx = self.pool.begin_with(BY_ID).await?;
        let stale = format!(
            "SELECT id, attempts, max_attempts, cancel_requested FROM jobs WHERE {STALE} \
             ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED"
        );
        let stale: Vec<StaleRow> =
            sqlx::query_as(AssertSqlSafe(stale)).bind(&self.settings.install).bind(BATCH).fetch_all(&mut *tx).await?;
        if stale.is_empty() {
            return Ok(Rescued::default());
        }
        let mut rescued = Rescued::default();
        let (mut ids, mut statuses, mut delays) = (Vec::new(), Vec::new(), Vec::new());
        for StaleRow { id, attempts, max_attempts, cancel_requested } in stale {
            let facts = Facts {
                attempts: count(id, "attempts", attempts)?,
                max_attempts: count(id, "max_attempts", max_attempts)?,
                cancel_requested,
                handed_back_for: Duration::ZERO,
            };
            let (status, delay) = match decide(facts, Cause::LeaseLost, &self.settings.retry, rand::random()) {
                Next::Wait { status, after, free: _ } => (status, after),
                Next::FailedPermanent => (Status::FailedPermanent, Duration::ZERO),
                Next::Cancelled => (Status::Cancelled, Duration::ZERO),
            };
            match status {
                Status::FailedPermanent => rescued.failed += 1,
                Status::Cancelled => rescued.cancelled += 1,
                Status::Queued | Status::Retrying | Status::Running | Status::Succeeded => rescued.retried += 1,
            }
            ids.push(id);
            statuses.push(status.as_str());
            delays.push(delay.as_secs_f64());
        }
        sqlx::query(
            "UPDATE jobs j SET status = s.status, claim_token = NULL, worker = locked_by, locked_by = NULL, \
                 locked_at = NULL, finished_at = now(), updated_at = now(), handed_back_at = NULL, \
                 lost_leases = least(lost_leases + 1, 1000), last_error = $4, \
                 run_at = CASE WHEN s.status = 'retrying' THEN now() + make_interval(secs => s.delay) ELSE run_at END, \
                 history = (CASE WHEN jsonb_array_length(history) < 20 THEN history ELSE history - 0 END) \
                     || jsonb_strip_nulls(jsonb_build_object('number', attempts, 'worker', locked_by, \
                            'from', started_at, 'to', now(), 'error', $4::text, 'outcome', 'lease_lost')), \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             FROM unnest($1::uuid[], $2::text[], $3::float8[]) AS s(id, status, delay) WHERE j.id = s.id",
        )
        .bind(ids)
        .bind(statuses)
        .bind(delays)
        .bind(LEASE_LOST)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(rescued)
    }
}
