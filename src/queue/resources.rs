//! The resources behind jobs: who holds a row, which statuses are due, what a deletion means. Called by the
//! controller alone.

use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::cancel::cancel_row;
use super::enqueue::{Owner, check_run_at, storable_time};
use super::error::Result;
use super::row::{JobRow, job_columns};
use super::{CancelOutcome, Channel, Queue};
use crate::job::{Job, clamp_max_attempts};

/// What the queue knows of a resource.
#[derive(Debug, Clone, PartialEq)]
pub enum Held {
    /// It has a row; `owner` says whether its edits reach it.
    Row { job: Box<Job>, owner: bool, mirrored_revision: i64 },
    /// It shares a succeeded job whose row retention has removed; the key was kept.
    KeptKey { job_id: Uuid, attempts: u32, finished_at: DateTime<Utc> },
    /// It had a row that is there no more, and retention did not remove it.
    Vanished { job_id: Uuid },
    /// It never had one.
    Nothing,
}

/// A resource by name and uid.
pub type ResourceRef = Owner;

/// For how long a release is remembered, in seconds: longer than any controller goes on that leads no more.
pub(super) const RELEASE_KEPT_SECONDS: i32 = 600;

/// What became of a resource's hold on its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Other resources share the row: it goes on, and the resource may go.
    Shared,
    /// The row is terminal (now, or was before), or there is none: the resource may go.
    Ended,
    /// A worker has it and was told to stop: the resource stays until the row has ended.
    PendingOnWorker,
}

/// The parts of a spec that reach a row that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpecEdit {
    pub priority: i16,
    pub suspended: bool,
    pub max_attempts: u32,
    pub timeout_seconds: u32,
    /// As written in the spec; none = as soon as possible.
    pub run_at: Option<DateTime<Utc>>,
}

impl SpecEdit {
    /// Whether the row shows something else. A lower limit than the attempts made counts as one more attempt; times
    /// are compared as Postgres keeps them, in microseconds.
    pub fn changes(&self, job: &Job) -> bool {
        let Self { priority, suspended, max_attempts, timeout_seconds, run_at } = *self;
        priority != job.priority
            || suspended != job.suspended
            || clamp_max_attempts(max_attempts, job.attempts) != job.max_attempts
            || timeout_seconds != job.timeout_seconds
            || run_at.map(storable_time) != job.wanted_run_at
    }
}

impl Queue {
    /// What the queue knows of this resource.
    ///
    /// # Errors
    /// [`Error::RowInvalid`](super::Error::RowInvalid), [`Error::Db`](super::Error::Db),
    /// [`Error::Timeout`](super::Error::Timeout).
    pub async fn held(&self, uid: Uuid) -> Result<Held> {
        self.bounded(self.held_by(uid)).await
    }

    async fn held_by(&self, uid: Uuid) -> Result<Held> {
        let row = self.row_held_by(uid).await?;
        type Hold = (Uuid, i64, Option<i32>, Option<DateTime<Utc>>);
        let held: Option<Hold> = sqlx::query_as(
            "SELECT r.job_id, r.mirrored_revision, k.attempts, k.finished_at FROM job_resources r \
             LEFT JOIN job_keys k ON k.install = r.install AND k.namespace = r.namespace AND k.job_id = r.job_id \
             WHERE r.uid = $1",
        )
        .bind(uid)
        .fetch_optional(&self.pool)
        .await?;
        // An enqueue may have committed between the two looks: only a row that is missing once more has vanished.
        let row = match row {
            None if held.is_some() => self.row_held_by(uid).await?,
            row => row,
        };
        Ok(match (row, held) {
            (_, None) => Held::Nothing,
            (Some(row), Some((_, mirrored_revision, ..))) => {
                let owner = row.owner_uid == Some(uid);
                Held::Row { job: Box::new(row.try_into()?), owner, mirrored_revision }
            }
            (None, Some((job_id, _, Some(attempts), Some(finished_at)))) => {
                Held::KeptKey { job_id, attempts: u32::try_from(attempts).unwrap_or_default(), finished_at }
            }
            (None, Some((job_id, ..))) => Held::Vanished { job_id },
        })
    }

    async fn row_held_by(&self, uid: Uuid) -> Result<Option<JobRow>> {
        let sql = concat!(
            "SELECT ",
            job_columns!(),
            " FROM jobs WHERE id = (SELECT job_id FROM job_resources WHERE uid = $1)"
        );
        Ok(sqlx::query_as(sql).bind(uid).fetch_optional(&self.pool).await?)
    }

    /// Resources whose status does not show their row's newest revision, in order of job id after `after`; with the
    /// id to go on from, none when this was the last page.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn due(&self, after: Option<Uuid>, limit: i64) -> Result<(Vec<ResourceRef>, Option<Uuid>)> {
        type Row = (Uuid, Option<Uuid>, Option<String>, Option<String>);
        let rows: Vec<Row> = self
            .bounded(async {
                let rows = sqlx::query_as(
                    "SELECT j.id, r.uid, r.namespace, r.name FROM ( \
                         SELECT id, revision FROM jobs WHERE install = $1 AND mirror_due AND id > $2 \
                         ORDER BY id LIMIT $3) j \
                     LEFT JOIN job_resources r ON r.job_id = j.id AND r.mirrored_revision < j.revision ORDER BY j.id",
                )
                .bind(&self.settings.install)
                .bind(after.unwrap_or(Uuid::nil()))
                .bind(limit)
                .fetch_all(&self.pool)
                .await?;
                Ok(rows)
            })
            .await?;
        let last = rows.last().map(|(id, ..)| *id);
        let whole_page = rows.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
        // Two acknowledgements at once can each have seen the other's resource as behind.
        let settled: Vec<Uuid> = rows.iter().filter(|(_, uid, ..)| uid.is_none()).map(|(id, ..)| *id).collect();
        if !settled.is_empty() {
            self.bounded(self.settle(&settled)).await?;
        }
        let to_ref =
            |(_, uid, namespace, name): Row| Some(ResourceRef { uid: uid?, namespace: namespace?, name: name? });
        Ok((rows.into_iter().filter_map(to_ref).collect(), last.filter(|_| whole_page)))
    }

    async fn settle(&self, ids: &[Uuid]) -> Result<()> {
        sqlx::query(
            // A row that another transaction holds is left for the next time: the pass must not wait for one row.
            "WITH free AS (SELECT id FROM jobs WHERE id = ANY($1) AND mirror_due ORDER BY id FOR UPDATE SKIP LOCKED) \
             UPDATE jobs j SET mirror_due = false FROM free WHERE j.id = free.id AND NOT EXISTS ( \
                 SELECT FROM job_resources r WHERE r.job_id = j.id AND r.mirrored_revision < j.revision)",
        )
        .bind(ids)
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The status of this resource shows this revision of its row. An older revision than one told before, or than
    /// the row's own, leaves the row due. Returns how long the row had been changed, when no other status of it is due.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn acknowledge(&self, uid: Uuid, revision: i64) -> Result<Option<Duration>> {
        let lag: Option<(f64,)> = self
            .bounded(async {
                let lag = sqlx::query_as(
                    // The job's lock first, as everyone else takes them. Who raises the revision meanwhile, or brings
                    // a new holder (which raises it too), leaves the row due.
                    "WITH job AS ( \
                         SELECT j.id FROM jobs j JOIN job_resources r ON r.job_id = j.id WHERE r.uid = $1 \
                         FOR UPDATE OF j), \
                     seen AS ( \
                         UPDATE job_resources r SET mirrored_revision = $2 FROM job \
                         WHERE r.uid = $1 AND r.job_id = job.id AND r.mirrored_revision < $2 RETURNING r.job_id) \
                     UPDATE jobs j SET mirror_due = false FROM seen \
                     WHERE j.id = seen.job_id AND j.revision = $2 AND j.mirror_due AND NOT EXISTS ( \
                         SELECT FROM job_resources r \
                         WHERE r.job_id = j.id AND r.uid <> $1 AND r.mirrored_revision < $2) \
                     RETURNING extract(epoch FROM now() - j.updated_at)::float8",
                )
                .bind(uid)
                .bind(revision)
                .fetch_optional(&self.pool)
                .await?;
                Ok(lag)
            })
            .await?;
        Ok(lag.and_then(|(seconds,)| Duration::try_from_secs_f64(seconds).ok()))
    }

    /// The resource is going: its hold ends, and with the last hold the job is cancelled. Safe to repeat; while the
    /// answer is [`Release::PendingOnWorker`] the hold stays, so that the end of the row is made known. From any other
    /// answer on, for ten minutes, [`Queue::enqueue`] refuses the resource.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout); nothing is half done.
    pub async fn release(&self, uid: Uuid) -> Result<Release> {
        let (release, cancel) = self
            .bounded(async {
                loop {
                    // Each further round follows an enqueue, of which there is at most one.
                    if let Some(done) = self.release_hold(uid).await? {
                        return Ok(done);
                    }
                }
            })
            .await?;
        if let Some(outcome) = cancel {
            self.notify_cancel(outcome);
        }
        if release == Release::Shared {
            self.notify(Channel::Changed);
        }
        Ok(release)
    }

    /// None when the resource got a row just now.
    async fn release_hold(&self, uid: Uuid) -> Result<Option<(Release, Option<CancelOutcome>)>> {
        let mut tx = self.pool.begin().await?;
        let held: Option<(Uuid,)> = sqlx::query_as("SELECT job_id FROM job_resources WHERE uid = $1")
            .bind(uid)
            .fetch_optional(&mut *tx)
            .await?;
        let Some((job,)) = held else {
            // A controller that leads no more may be enqueueing it. The key of job_resources is where they meet: an
            // enqueue that was first is waited for here, one that comes later finds the release.
            let noted = sqlx::query(
                "WITH place AS ( \
                     INSERT INTO job_resources (uid, job_id, install, namespace, name) VALUES ($1, $2, $3, '', '') \
                     ON CONFLICT (uid) DO NOTHING RETURNING uid) \
                 INSERT INTO job_releases (uid) SELECT uid FROM place \
                 ON CONFLICT (uid) DO UPDATE SET released_at = now()",
            )
            .bind(uid)
            .bind(Uuid::nil())
            .bind(&self.settings.install)
            .execute(&mut *tx)
            .await?
            .rows_affected();
            if noted == 0 {
                return Ok(None);
            }
            sqlx::query("DELETE FROM job_resources WHERE uid = $1").bind(uid).execute(&mut *tx).await?;
            tx.commit().await?;
            return Ok(Some((Release::Ended, None)));
        };
        // The job before its resources, as the purge and the enqueue of a sharer take them.
        let row: Option<(Option<Uuid>,)> = sqlx::query_as("SELECT owner_uid FROM jobs WHERE id = $1 FOR UPDATE")
            .bind(job)
            .fetch_optional(&mut *tx)
            .await?;
        let heir: Option<(Uuid,)> = sqlx::query_as(
            "SELECT uid FROM job_resources WHERE job_id = $1 AND uid <> $2 AND NOT released \
             ORDER BY created_at, uid LIMIT 1",
        )
        .bind(job)
        .bind(uid)
        .fetch_optional(&mut *tx)
        .await?;
        let cancel = match (row, heir) {
            (None, _) | (_, Some(_)) => None,
            (Some(_), None) => Some(cancel_row(&mut tx, &self.settings.install, job).await?),
        };
        let release = match cancel {
            Some(CancelOutcome::PendingOnWorker) => {
                sqlx::query("UPDATE job_resources SET released = true WHERE uid = $1")
                    .bind(uid)
                    .execute(&mut *tx)
                    .await?;
                Release::PendingOnWorker
            }
            Some(CancelOutcome::CancelledNow | CancelOutcome::AlreadyTerminal) | None => {
                sqlx::query(
                    "WITH gone AS (DELETE FROM job_resources WHERE uid = $1 RETURNING uid) \
                     INSERT INTO job_releases (uid) SELECT uid FROM gone \
                     ON CONFLICT (uid) DO UPDATE SET released_at = now()",
                )
                .bind(uid)
                .execute(&mut *tx)
                .await?;
                // The next holder owns the row; a row without one is nobody's, and nobody's status is due. The heir's
                // spec is to reach a row that lives, so it must look.
                sqlx::query(
                    "WITH passed AS ( \
                         SELECT id, owner_uid = $2 AND $3 IS NOT NULL \
                             AND status IN ('queued', 'retrying', 'running') AS on FROM jobs WHERE id = $1) \
                     UPDATE jobs j SET owner_uid = CASE WHEN owner_uid = $2 THEN $3 ELSE owner_uid END, \
                         mirror_due = $3 IS NOT NULL AND (mirror_due OR p.on), \
                         revision = revision + CASE WHEN p.on THEN 1 ELSE 0 END, \
                         updated_at = CASE WHEN p.on THEN now() ELSE updated_at END \
                     FROM passed p WHERE j.id = p.id",
                )
                .bind(job)
                .bind(uid)
                .bind(heir.map(|(heir,)| heir))
                .execute(&mut *tx)
                .await?;
                if heir.is_some() { Release::Shared } else { Release::Ended }
            }
        };
        tx.commit().await?;
        Ok(Some((release, cancel)))
    }

    /// Forgets that the resource had a row, if that is there no more; a row that was made meanwhile stays its own.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn forget_vanished(&self, uid: Uuid) -> Result<()> {
        self.bounded(async {
            sqlx::query(
                "DELETE FROM job_resources r \
                 WHERE uid = $1 AND NOT EXISTS (SELECT FROM jobs j WHERE j.id = r.job_id)",
            )
            .bind(uid)
            .execute(&self.pool)
            .await?;
            Ok(())
        })
        .await
    }

    /// Brings an edited spec to a row that waits; only its owner's. True when the row took it, false when it runs,
    /// has ended or belongs to another resource.
    ///
    /// # Errors
    /// [`Error::PayloadInvalid`](super::Error::PayloadInvalid) for a time out of range;
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn edit_waiting(&self, uid: Uuid, edit: SpecEdit) -> Result<bool> {
        let SpecEdit { priority, suspended, max_attempts, timeout_seconds, run_at } = edit;
        run_at.map_or(Ok(()), check_run_at)?;
        let edited = self
            .bounded(async {
                let done = sqlx::query(
                    "UPDATE jobs SET priority = $2, suspended = $3, timeout_seconds = $5, \
                         max_attempts = greatest($4, attempts + 1), \
                         run_at = CASE WHEN wanted_run_at IS DISTINCT FROM $6 THEN coalesce($6, now()) ELSE run_at END, \
                         wanted_run_at = $6, updated_at = now(), revision = revision + 1, mirror_due = true \
                     WHERE owner_uid = $1 AND status IN ('queued', 'retrying') \
                       AND id = (SELECT job_id FROM job_resources WHERE uid = $1)",
                )
                .bind(uid)
                .bind(priority)
                .bind(suspended)
                .bind(i32::try_from(max_attempts).unwrap_or(100))
                .bind(i32::try_from(timeout_seconds).unwrap_or(86_400))
                .bind(run_at.map(storable_time))
                .execute(&self.pool)
                .await?;
                Ok(done.rows_affected() > 0)
            })
            .await?;
        if edited {
            self.notify(Channel::Ready);
            self.notify(Channel::Changed);
        }
        Ok(edited)
    }
}
