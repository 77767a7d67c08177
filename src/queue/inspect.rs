//! Reading: one job, a page of jobs, how deep the queue is.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

use super::Queue;
use super::error::{Error, Result};
use super::row::{job_columns, read_job};
use crate::job::{Job, Status};

/// How many more jobs than asked for a page is chosen from: that far may a job's id and its `created_at` disagree.
const PAGE_SLACK: i64 = 1000;

/// Between these are the ids that tell a time: from 2025, before which there was no job, to tomorrow, as a client's clock
/// may be ahead. A UUID of version 7 begins with 48 bits of milliseconds.
const OLDEST_ID: &str = "'01941f29-7c00-0000-0000-000000000000'";
const NEWEST_ID: &str =
    "(lpad(to_hex((extract(epoch FROM now() + interval '1 d') * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid";

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

/// Some jobs of an install, newest first.
#[derive(Debug, Default)]
pub struct Page {
    pub jobs: Vec<Job>,
    /// One [`Error::RowInvalid`] for each row of the page that can't be read.
    pub unreadable: Vec<Error>,
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
        let row = self
            .bounded(async {
                let sql = concat!("SELECT ", job_columns!(), " FROM jobs WHERE id = $1 AND install = $2");
                Ok(sqlx::query(sql).bind(id).bind(&self.settings.install).fetch_optional(&self.pool).await?)
            })
            .await?;
        read_job(&row.ok_or(Error::NotFound)?)
    }

    /// A page of this install's jobs, newest first. A row that can't be read is left out and said in the log:
    /// [`Queue::list_page`] tells of it.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`].
    pub async fn list(&self, filter: &ListFilter) -> Result<Vec<Job>> {
        let Page { jobs, unreadable } = self.list_page(filter).await?;
        for error in &unreadable {
            tracing::warn!(error = %error, "a job that can't be read is left out of a list");
        }
        Ok(jobs)
    }

    /// A page of this install's jobs, newest first, and which rows of it can't be read.
    ///
    /// Newest by `created_at`, then by id. No index is in that order (it would cost every enqueue and finish); the
    /// primary key nearly is. The ids that the queue and the table's default make are UUIDs of version 7, which begin
    /// with the time: of those the `offset` + `limit` + 1,000 newest are looked at, found by walking the key backwards.
    /// Ids that begin with no time since 2025, as random ones do but for one in some thousands, were given by whoever
    /// inserted the row in SQL: such rows are all looked at. So only a row whose id tells one time and whose
    /// `created_at` another may be missing.
    ///
    /// It costs in proportion to the rows walked: a page without a filter milliseconds whatever the table's size; rows
    /// with ids of their own, and a filter that few rows match, up to a walk of the whole table, a second or so for
    /// each million rows.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`].
    pub async fn list_page(&self, filter: &ListFilter) -> Result<Page> {
        let ListFilter { status, kind, namespace, limit, offset } = filter;
        let (limit, offset) = (limit.unwrap_or(50).clamp(1, 200), (*offset).max(0));
        let last = offset.saturating_add(limit);
        let mut sql =
            QueryBuilder::<Postgres>::new(concat!("SELECT ", job_columns!(), " FROM jobs JOIN (SELECT id FROM ("));
        for (n, (ids, order, rows)) in [
            (format!("id BETWEEN {OLDEST_ID} AND {NEWEST_ID}"), "id DESC", last.saturating_add(PAGE_SLACK)),
            (format!("id > {NEWEST_ID}"), "created_at DESC, id DESC", last),
            (format!("id < {OLDEST_ID}"), "created_at DESC, id DESC", last),
        ]
        .into_iter()
        .enumerate()
        {
            sql.push(if n == 0 { "(" } else { " UNION ALL (" });
            sql.push("SELECT id, created_at FROM jobs WHERE ").push(ids);
            sql.push(" AND install = ").push_bind(&self.settings.install);
            // Only the conditions that are asked for, so that the planner sees which index serves them.
            for (condition, value) in [
                (" AND status = ", status.map(Status::as_str)),
                (" AND kind = ", kind.as_deref()),
                (" AND namespace = ", namespace.as_deref()),
            ] {
                if let Some(value) = value {
                    sql.push(condition).push_bind(value);
                }
            }
            sql.push(" ORDER BY ").push(order).push(" LIMIT ").push_bind(rows).push(")");
        }
        sql.push(") newest ORDER BY created_at DESC, id DESC LIMIT ").push_bind(limit);
        sql.push(" OFFSET ").push_bind(offset).push(") page USING (id) ORDER BY created_at DESC, id DESC");
        // Planned for these values each time.
        let query = sql.build().persistent(false);
        let rows = self.bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        let mut page = Page::default();
        for row in &rows {
            match read_job(row) {
                Ok(job) => page.jobs.push(job),
                Err(error) => page.unreadable.push(error),
            }
        }
        Ok(page)
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
