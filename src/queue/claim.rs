//! Claim and heartbeat: how a lease begins and how it is kept.

use std::collections::HashSet;

use sqlx::AssertSqlSafe;
use tokio::time::Instant;
use uuid::Uuid;

use super::claimed::{ClaimedJob, ClaimedRow, Lease};
use super::connections::BY_ID;
use super::error::{Error, Result};
use super::lanes::{BEFORE_ALL, CAREFUL, LANES, NAMESPACE, WAITING};
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
    coalesce(date_part('epoch', now() - j.handed_back_at), 0) AS handed_back_seconds, \
    greatest(date_part('epoch', now() - j.run_at), 0) AS waited_seconds, \
    j.progress::text AS progress, j.owner_uid IS NOT NULL AS owned";
/// What a claim writes, beside the lease's token, holder and length.
pub(super) const START: &str = "status = 'running', attempts = attempts + 1, locked_at = now(), started_at = now(), \
    finished_at = NULL, updated_at = now(), revision = revision + 1, mirror_due = owner_uid IS NOT NULL";
/// How many jobs others may hold at a lane's head without a claim of one coming away empty.
const SPARE: u32 = 100;
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
    /// due, whatever their kind and namespace. Costs an index descent for each lane ([`Lane`](super::Lane)) of the
    /// kinds; a worker that claims all the time goes by [`Queue::survey`] and [`Queue::claim_from`] instead.
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

    /// Of each lane so many of its first jobs as may be needed when others hold some; of these the first that nobody
    /// holds. A job is looked at again once it is locked: it may have been claimed since.
    async fn claim(&self, worker: &str, kinds: &[&str], limit: usize, ticket: ClaimTicket) -> Result<Found> {
        let sql = format!(
            "WITH next AS ( \
                 SELECT j.id FROM ( \
                     SELECT kind, '' AS namespace, false AS careful, ({BEFORE_ALL})::int2 AS priority \
                     FROM unnest($2::text[]) AS kinds(kind)) k \
                 {lanes}) l \
                 CROSS JOIN LATERAL ( \
                     SELECT id FROM jobs WHERE install = $1 AND {WAITING} AND kind = k.kind \
                       AND {NAMESPACE} = l.namespace AND {CAREFUL} = l.careful AND priority = l.priority \
                       AND run_at <= now() \
                     ORDER BY run_at, id LIMIT $6::int8 + {SPARE}) first \
                 JOIN jobs j ON j.id = first.id \
                 WHERE l.run_at <= now() AND {WAITING} AND j.run_at <= now() AND j.kind = k.kind \
                 ORDER BY j.priority DESC, j.run_at, j.id LIMIT $6::int8 FOR UPDATE OF j SKIP LOCKED) \
             UPDATE jobs j SET {START}, claim_token = $3, locked_by = $4, lease_seconds = $5 \
             FROM next WHERE j.id = next.id RETURNING {CLAIMED}, {PAYLOAD}",
            lanes = *LANES
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
            "SELECT {CLAIMED}, {PAYLOAD} FROM jobs j WHERE j.install = $1 AND starts_with(j.status, 'running') AND j.claim_token = $2"
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
        if found.unreadable > 0 {
            self.notify(Channel::Changed);
        }
        self.notify_changed(&found.jobs);
        Ok(found)
    }

    /// Prolongs these leases in one statement and learns of cancels.
    ///
    /// Guard: running, under the claim's token. A lease that is missing from the answer is lost. Rows locked by
    /// another transaction are skipped, not waited for (one stuck row must not end the other leases), and looked at in
    /// a second statement.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`]: nothing is known of any lease.
    pub async fn heartbeat(&self, leases: &[Lease]) -> Result<Vec<Heartbeat>> {
        self.bounded(self.renew(leases)).await
    }

    async fn renew(&self, leases: &[Lease]) -> Result<Vec<Heartbeat>> {
        let mut leases = leases.to_vec();
        leases.sort_unstable_by_key(|lease| lease.id);
        let (ids, tokens) = columns(&leases);
        let mut tx = self.pool.begin_with(BY_ID).await?;
        let rows: Vec<(Uuid, Uuid, bool)> = sqlx::query_as(
            "UPDATE jobs j SET locked_at = now(), lease_seconds = $3, updated_at = now() \
             FROM unnest($1::uuid[], $2::uuid[]) AS m(id, token) \
             CROSS JOIN LATERAL ( \
                 SELECT id FROM jobs WHERE id = m.id AND claim_token = m.token AND status = 'running' \
                 FOR UPDATE SKIP LOCKED) free \
             WHERE j.id = free.id RETURNING j.id, j.claim_token, j.cancel_requested",
        )
        .bind(ids)
        .bind(tokens)
        .bind(self.lease_seconds())
        .fetch_all(&mut *tx)
        .await?;
        tx.commit().await?;
        let mut found: Vec<Heartbeat> = rows
            .into_iter()
            .map(|(id, token, cancel_requested)| Heartbeat { id, token, renewed: true, cancel_requested })
            .collect();
        let renewed: HashSet<(Uuid, Uuid)> = found.iter().map(|beat| (beat.id, beat.token)).collect();
        leases.retain(|lease| !renewed.contains(&(lease.id, lease.token)));
        if !leases.is_empty() {
            found.extend(self.look(&leases).await?);
        }
        Ok(found)
    }

    /// Which of these leases stand and which were asked to stop; prolongs nothing.
    ///
    /// # Errors
    /// As [`Queue::heartbeat`].
    pub async fn look_for_cancels(&self, leases: &[Lease]) -> Result<Vec<Heartbeat>> {
        self.bounded(self.look(leases)).await
    }

    async fn look(&self, leases: &[Lease]) -> Result<Vec<Heartbeat>> {
        let (ids, tokens) = columns(leases);
        let mut tx = self.pool.begin_with(BY_ID).await?;
        let rows: Vec<(Uuid, Uuid, bool)> = sqlx::query_as(
            "SELECT m.id, m.token, j.cancel_requested FROM unnest($1::uuid[], $2::uuid[]) AS m(id, token) \
             JOIN jobs j ON j.id = m.id AND CASE WHEN j.status = 'running' THEN j.claim_token = m.token END",
        )
        .bind(ids)
        .bind(tokens)
        .fetch_all(&mut *tx)
        .await?;
        tx.commit().await?;
        let to_answer = |(id, token, cancel_requested)| Heartbeat { id, token, renewed: false, cancel_requested };
        Ok(rows.into_iter().map(to_answer).collect())
    }
}

/// As columns of ids and tokens.
pub(super) fn columns(leases: &[Lease]) -> (Vec<Uuid>, Vec<Uuid>) {
    leases.iter().map(|lease| (lease.id, lease.token)).unzip()
}
