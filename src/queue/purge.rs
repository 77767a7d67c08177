//! Retention: rows and keys that have been kept long enough.
//!
//! No index leads to what has ended long ago; it would cost every finish an entry. The purge walks the primary key, whose
//! order is that of creation: at first from the oldest row to the youngest that can have ended long enough ago, where
//! nearly all rows are due to go, and then a stretch of the rest, from where the last call stopped.

use uuid::Uuid;

use super::Queue;
use super::error::Result;

/// How many rows, and how many keys, one purge removes at most.
const BATCH: i64 = 500;
/// How many rows are looked at in one statement.
const WINDOW: i64 = 5000;
/// How many such stretches one purge looks at, at most, of the rows that may be old and of the rest.
const WINDOWS: u32 = 20;

/// What a purge removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    pub jobs: u64,
    pub keys: u64,
}

/// Behind which rows the purge goes on.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Places {
    old: Uuid,
    rest: Uuid,
}

/// What is in a window.
#[derive(sqlx::FromRow)]
struct Window {
    rows: i64,
    last: Option<Uuid>,
    /// May be removed; in the order of the walk.
    ids: Vec<Uuid>,
}

impl Queue {
    /// Removes terminal rows older than the retention whose resources show their end, and keys older than theirs, at
    /// most 500 each a call. A succeeded row's key is written down before the row goes.
    ///
    /// A call looks at 200,000 rows at most, and the next goes on where it stopped; when it has removed nothing, some
    /// rows may still be there that a later call finds.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout); no row is half removed.
    pub async fn purge(&self) -> Result<Purged> {
        self.bounded(async {
            let mut jobs = self.purge_walk(true).await?;
            if jobs == 0 {
                jobs = self.purge_walk(false).await?;
            }
            Ok(Purged { jobs, keys: self.purge_keys().await? })
        })
        .await
    }

    /// Among the rows that may have ended long enough ago by the time in their ids, or among all.
    async fn purge_walk(&self, old: bool) -> Result<u64> {
        for _ in 0..WINDOWS {
            let from = {
                let places = self.purged_to.lock().expect("no panic while held");
                if old { places.old } else { places.rest }
            };
            let window = self.purge_window(from, old).await?;
            let removed = if window.ids.is_empty() { 0 } else { self.remove(&window.ids).await? };
            let is_full = i64::try_from(window.ids.len()).is_ok_and(|len| len == BATCH);
            let is_end = window.rows < WINDOW && !is_full;
            let last = if is_full { window.ids.last().copied() } else { window.last };
            {
                let mut places = self.purged_to.lock().expect("no panic while held");
                *(if old { &mut places.old } else { &mut places.rest }) =
                    if is_end { Uuid::nil() } else { last.unwrap_or_default() };
            }
            // What was before the place that this call started from is the next call's.
            if removed > 0 || (is_end && from.is_nil()) {
                return Ok(removed);
            }
        }
        Ok(0)
    }

    async fn purge_window(&self, from: Uuid, old: bool) -> Result<Window> {
        let window = sqlx::query_as(
            "WITH seen AS MATERIALIZED ( \
                 SELECT id, install = $1 AND status IN ('succeeded', 'failed_permanent', 'cancelled') \
                     AND finished_at < now() - make_interval(secs => $2) AND NOT mirror_due AS may_go \
                 FROM jobs WHERE id > $3 AND (NOT $4 OR id < jobs_first_id(now() - make_interval(secs => $2))) \
                 ORDER BY id LIMIT $5) \
             SELECT (SELECT count(*) FROM seen) AS rows, (SELECT id FROM seen ORDER BY id DESC LIMIT 1) AS last, \
                 ARRAY(SELECT id FROM seen WHERE may_go ORDER BY id LIMIT $6) AS ids",
        )
        .bind(&self.settings.install)
        .bind(self.settings.retention.as_secs_f64())
        .bind(from)
        .bind(old)
        .bind(WINDOW)
        .bind(BATCH)
        .fetch_one(&self.pool)
        .await?;
        Ok(window)
    }

    async fn remove(&self, ids: &[Uuid]) -> Result<u64> {
        let mut tx = self.pool.begin().await?;
        let ids: Vec<(Uuid,)> = sqlx::query_as(
            "SELECT id FROM jobs WHERE id = ANY($3) AND install = $1 \
               AND status IN ('succeeded', 'failed_permanent', 'cancelled') \
               AND finished_at < now() - make_interval(secs => $2) AND NOT mirror_due \
             ORDER BY id FOR UPDATE SKIP LOCKED",
        )
        .bind(&self.settings.install)
        .bind(self.settings.retention.as_secs_f64())
        .bind(ids)
        .fetch_all(&mut *tx)
        .await?;
        let ids: Vec<Uuid> = ids.into_iter().map(|(id,)| id).collect();
        sqlx::query(
            "INSERT INTO job_keys (install, namespace, idempotency_key, job_id, kind, payload_sha256, attempts, \
                 finished_at) \
             SELECT install, coalesce(namespace, ''), idempotency_key, id, kind, \
                 sha256(convert_to(payload::text, 'UTF8')), attempts, finished_at \
             FROM jobs WHERE id = ANY($1) AND status = 'succeeded' AND idempotency_key IS NOT NULL \
             ON CONFLICT DO NOTHING",
        )
        .bind(&ids)
        .execute(&mut *tx)
        .await?;
        sqlx::query("DELETE FROM job_resources WHERE job_id = ANY($1)").bind(&ids).execute(&mut *tx).await?;
        let removed = sqlx::query("DELETE FROM jobs WHERE id = ANY($1)").bind(&ids).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(removed.rows_affected())
    }

    async fn purge_keys(&self) -> Result<u64> {
        let Some(retention) = self.settings.key_retention else { return Ok(0) };
        let removed = sqlx::query(
            "DELETE FROM job_keys WHERE (install, namespace, idempotency_key) IN ( \
                 SELECT install, namespace, idempotency_key FROM job_keys \
                 WHERE install = $1 AND finished_at < now() - make_interval(secs => $2) LIMIT $3)",
        )
        .bind(&self.settings.install)
        .bind(retention.as_secs_f64())
        .bind(BATCH)
        .execute(&self.pool)
        .await?;
        Ok(removed.rows_affected())
    }
}
