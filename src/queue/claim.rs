//! Claim and heartbeat: how a lease begins and how it is kept.

use sqlx::AssertSqlSafe;
use tokio::time::Instant;
use uuid::Uuid;

use super::claimed::{ClaimedJob, ClaimedRow, Lease};
use super::error::{Error, Result};
use super::{Channel, Queue};
use crate::text::storable;

/// What the heartbeat found of one lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    pub id: Uuid,
    pub token: Uuid,
    /// False when another transaction holds the row just now: the lease stands, but was not prolonged.
    pub renewed: bool,
    pub cancel_requested: bool,
}

/// Names a claim that was tried, whether it took effect or not.
#[derive(Debug, Clone, Copy)]
pub struct ClaimTicket {
    pub(super) token: Uuid,
    since: Instant,
}

impl ClaimTicket {
    pub(super) fn new() -> Self {
        Self { token: Uuid::new_v4(), since: Instant::now() }
    }
}

/// A claim without an answer: it may have taken effect.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ClaimError {
    pub error: Error,
    pub ticket: ClaimTicket,
}

/// What a claim found.
pub(super) struct Found {
    pub(super) jobs: Vec<ClaimedJob>,
    /// Rows that can't be read; they have been ended.
    unreadable: usize,
}

/// How many claims in a row may find nothing but rows that can't be read.
const UNREADABLE_AT_ONCE: usize = 100;

/// What is read as text can't fail to decode: a row that no one can read must not take the claim's reply with it.
pub(super) const CLAIMED: &str = "j.id, j.kind, j.namespace, j.priority, j.run_at, j.lost_leases, j.attempts, j.max_attempts, j.timeout_seconds, \
    coalesce(extract(epoch FROM now() - j.handed_back_at), 0)::float8 AS handed_back_seconds, \
    greatest(extract(epoch FROM now() - j.run_at), 0)::float8 AS waited_seconds, \
    j.progress::text AS progress";
const PAYLOAD: &str = "j.payload::text AS payload";

impl Queue {
    /// Claims the next due job of these kinds, if there is one: [`Queue::fetch_many`] of one.
    ///
    /// # Errors
    /// As [`Queue::fetch_many`].
    pub async fn fetch_next(&self, worker: &str, kinds: &[&str]) -> Result<Option<ClaimedJob>, ClaimError> {
        Ok(self.fetch_many(worker, kinds, 1).await?.pop())
    }

    /// Claims the next due jobs of these kinds in one statement, at most `limit`: highest priority first, then longest
    /// due.
    ///
    /// Guard: waiting, due by the database's clock, not suspended, of a given kind (a kind unknown to this worker
    /// stays for others), of this install; rows locked by others are skipped. The claim adds one to `attempts` and
    /// starts a lease under a token of its own: with the row's id it is unique per claim.
    ///
    /// # Errors
    /// [`ClaimError`] with the ticket by which [`Queue::take_up`] finds the claim, should it have taken effect. Rows
    /// that can't be read are ended as failed and the next ones tried.
    pub async fn fetch_many(&self, worker: &str, kinds: &[&str], limit: usize) -> Result<Vec<ClaimedJob>, ClaimError> {
        for _ in 0..UNREADABLE_AT_ONCE {
            let ticket = ClaimTicket::new();
            let claim = self.bounded(self.claim(worker, kinds, limit, ticket)).await;
            let Found { jobs, unreadable } = claim.map_err(|error| ClaimError { error, ticket })?;
            if !jobs.is_empty() || unreadable == 0 {
                return Ok(jobs);
            }
        }
        Ok(Vec::new())
    }

    async fn claim(&self, worker: &str, kinds: &[&str], limit: usize, ticket: ClaimTicket) -> Result<Found> {
        let sql = format!(
            "WITH next AS ( \
                 SELECT id FROM jobs \
                 WHERE install = $1 AND status IN ('queued', 'retrying') AND NOT suspended AND run_at <= now() \
                   AND kind = ANY($2) \
                 ORDER BY priority DESC, run_at, id LIMIT $6 FOR UPDATE SKIP LOCKED) \
             UPDATE jobs j SET status = 'running', attempts = attempts + 1, claim_token = $3, locked_by = $4, \
                 locked_at = now(), lease_seconds = $5, started_at = now(), finished_at = NULL, updated_at = now(), \
                 revision = revision + 1, mirror_due = owner_uid IS NOT NULL \
             FROM next WHERE j.id = next.id RETURNING {CLAIMED}, {PAYLOAD}"
        );
        let rows: Vec<ClaimedRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(&self.settings.install)
            .bind(kinds)
            .bind(ticket.token)
            .bind(storable(worker, 255))
            .bind(self.lease_seconds())
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.pool)
            .await?;
        self.read_claim(rows, ticket).await
    }

    /// The claims made under this ticket that took effect: for one whose reply was lost. Their leases count from
    /// before the claim was sent, so they may be nearly over: [`Queue::heartbeat`] tells. Safe to repeat.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`].
    pub async fn take_up(&self, ticket: ClaimTicket) -> Result<Vec<ClaimedJob>> {
        let sql = format!(
            "SELECT {CLAIMED}, {PAYLOAD} FROM jobs j WHERE j.install = $1 AND j.status = 'running' AND j.claim_token = $2"
        );
        let query = sqlx::query_as(AssertSqlSafe(sql)).bind(&self.settings.install).bind(ticket.token);
        let rows: Vec<ClaimedRow> = self.bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        Ok(self.read_claim(rows, ticket).await?.jobs)
    }

    pub(super) async fn read_claim(&self, rows: Vec<ClaimedRow>, ticket: ClaimTicket) -> Result<Found> {
        let ClaimTicket { token, since } = ticket;
        let mut found = Found { jobs: Vec::with_capacity(rows.len()), unreadable: 0 };
        for row in rows {
            let id = row.id;
            match row.into_job(token, since) {
                Ok(job) => found.jobs.push(job),
                Err(error) => {
                    tracing::warn!(job = %id, error = %error, "a row that can't be read ends as failed");
                    self.fail_unreadable(id, token, &error.to_string()).await?;
                    found.unreadable += 1;
                }
            }
        }
        if !found.jobs.is_empty() || found.unreadable > 0 {
            self.notify(Channel::Changed);
        }
        Ok(found)
    }

    /// Prolongs these leases in one statement and learns of cancels.
    ///
    /// Guard: running, under the claim's token. A lease that is missing from the answer is lost. Rows locked by
    /// another transaction are skipped, not waited for: one stuck row must not end the other leases.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`]: nothing is known of any lease.
    pub async fn heartbeat(&self, leases: &[Lease]) -> Result<Vec<Heartbeat>> {
        self.look(
            leases,
            "WITH mine AS (SELECT * FROM unnest($1::uuid[], $2::uuid[]) AS m(id, token)), \
             free AS ( \
                 SELECT j.id FROM jobs j JOIN mine m ON j.id = m.id AND j.claim_token = m.token \
                 WHERE j.status = 'running' ORDER BY j.id FOR UPDATE OF j SKIP LOCKED), \
             renewed AS ( \
                 UPDATE jobs j SET locked_at = now(), lease_seconds = $3, updated_at = now() FROM free \
                 WHERE j.id = free.id RETURNING j.id) \
             SELECT m.id, m.token, r.id IS NOT NULL, j.cancel_requested \
             FROM mine m JOIN jobs j ON j.id = m.id AND j.claim_token = m.token AND j.status = 'running' \
             LEFT JOIN renewed r ON r.id = m.id",
        )
        .await
    }

    /// Which of these leases stand and which were asked to stop; prolongs nothing.
    ///
    /// # Errors
    /// As [`Queue::heartbeat`].
    pub async fn look_for_cancels(&self, leases: &[Lease]) -> Result<Vec<Heartbeat>> {
        self.look(
            leases,
            "SELECT m.id, m.token, false, j.cancel_requested FROM unnest($1::uuid[], $2::uuid[]) AS m(id, token) \
             JOIN jobs j ON j.id = m.id AND j.claim_token = m.token AND j.status = 'running' AND $3 > 0",
        )
        .await
    }

    async fn look(&self, leases: &[Lease], sql: &'static str) -> Result<Vec<Heartbeat>> {
        let ids: Vec<Uuid> = leases.iter().map(|lease| lease.id).collect();
        let tokens: Vec<Uuid> = leases.iter().map(|lease| lease.token).collect();
        let query = sqlx::query_as(sql).bind(ids).bind(tokens).bind(self.lease_seconds());
        let rows: Vec<(Uuid, Uuid, bool, bool)> =
            self.bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        let to_answer = |(id, token, renewed, cancel_requested)| Heartbeat { id, token, renewed, cancel_requested };
        Ok(rows.into_iter().map(to_answer).collect())
    }
}
