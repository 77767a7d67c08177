//! Reading: one job, a page of jobs, how deep the queue is.

use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::Queue;
use super::error::{Error, Result};
use super::row::{JobRow, job_columns};
use crate::job::{Job, Status};

/// Which jobs to list: newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListFilter {
    pub status: Option<Status>,
    pub kind: Option<String>,
    pub namespace: Option<String>,
    /// Default 50, clamped to 1..=200.
    pub limit: Option<i64>,
    /// At least 0.
    pub offset: i64,
}

/// How many jobs of a kind are in a state that is not terminal, and for how long the oldest ready one has been due.
#[derive(Debug, Clone, PartialEq)]
pub struct KindDepth {
    pub kind: String,
    pub status: Status,
    pub jobs: u64,
    pub oldest_ready: Duration,
}

impl Queue {
    /// The database's time: the only clock by which anything is decided.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`].
    pub async fn now(&self) -> Result<DateTime<Utc>> {
        self.bounded(async { Ok(sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&self.pool).await?) }).await
    }

    /// One job of this install.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::RowInvalid`], [`Error::Db`], [`Error::Timeout`].
    pub async fn get(&self, id: Uuid) -> Result<Job> {
        let row: Option<JobRow> = self
            .bounded(async {
                let sql = concat!("SELECT ", job_columns!(), " FROM jobs WHERE id = $1 AND install = $2");
                Ok(sqlx::query_as(sql).bind(id).bind(&self.settings.install).fetch_optional(&self.pool).await?)
            })
            .await?;
        row.ok_or(Error::NotFound)?.try_into()
    }

    /// A page of this install's jobs, newest first.
    ///
    /// # Errors
    /// [`Error::RowInvalid`], [`Error::Db`], [`Error::Timeout`].
    pub async fn list(&self, filter: &ListFilter) -> Result<Vec<Job>> {
        let ListFilter { status, kind, namespace, limit, offset } = filter;
        let rows: Vec<JobRow> = self
            .bounded(async {
                let sql = concat!(
                    "SELECT ",
                    job_columns!(),
                    " FROM jobs WHERE install = $1 AND ($2::text IS NULL OR status = $2) \
                       AND ($3::text IS NULL OR kind = $3) AND ($4::text IS NULL OR namespace = $4) \
                     ORDER BY created_at DESC, id DESC LIMIT $5 OFFSET $6"
                );
                let rows = sqlx::query_as(sql)
                    .bind(&self.settings.install)
                    .bind(status.map(Status::as_str))
                    .bind(kind)
                    .bind(namespace)
                    .bind(limit.unwrap_or(50).clamp(1, 200))
                    .bind((*offset).max(0))
                    .fetch_all(&self.pool)
                    .await?;
                Ok(rows)
            })
            .await?;
        rows.into_iter().map(Job::try_from).collect()
    }

    /// The depth of the queue by kind and live state.
    ///
    /// # Errors
    /// [`Error::RowInvalid`], [`Error::Db`], [`Error::Timeout`].
    pub async fn depth(&self) -> Result<Vec<KindDepth>> {
        let rows: Vec<(String, String, i64, f64)> = self
            .bounded(async {
                let rows = sqlx::query_as(
                    "SELECT kind, status, count(*), coalesce(extract(epoch FROM now() - min(run_at) FILTER ( \
                         WHERE status <> 'running' AND NOT suspended AND run_at <= now())), 0)::float8 \
                     FROM jobs WHERE install = $1 AND status IN ('queued', 'retrying', 'running') GROUP BY 1, 2",
                )
                .bind(&self.settings.install)
                .fetch_all(&self.pool)
                .await?;
                Ok(rows)
            })
            .await?;
        rows.into_iter()
            .map(|(kind, status, jobs, oldest)| {
                Ok(KindDepth {
                    status: super::finish::read_status(Uuid::nil(), &status)?,
                    kind,
                    jobs: u64::try_from(jobs).unwrap_or_default(),
                    oldest_ready: Duration::try_from_secs_f64(oldest).unwrap_or_default(),
                })
            })
            .collect()
    }
}
