//! What a database holds before a run.

use sqlx::PgConnection;

use crate::Outcome;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Load {
    Empty,
    /// This many jobs, all due, each as the queue's own users enqueue it: no keys, one kind, one priority.
    Plain(u64),
    /// This many rows as the controller writes them: resources in 10 namespaces, 4 kinds, 5 priorities.
    Controller(u64),
    /// 4 kinds and 5 priorities; every twentieth job fails at its first attempt.
    Mixed(u64),
    /// Jobs of 20 ms, 4 kinds, one priority.
    Slow(u64),
    /// Payloads of 64 kB.
    Large(u64),
    /// Plain ones that are due, and what no claim should have to look at: ended jobs, jobs of 50 higher priorities that
    /// are due later, jobs of a kind that nobody runs.
    Among {
        ready: u64,
        ended: u64,
        later: u64,
        others: u64,
    },
}

impl Load {
    /// How many of them are due.
    pub fn jobs(self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Plain(jobs) | Self::Controller(jobs) | Self::Mixed(jobs) | Self::Slow(jobs) | Self::Large(jobs) => {
                jobs
            }
            Self::Among { ready, .. } => ready,
        }
    }

    pub fn name(self) -> String {
        match self {
            Self::Empty => "empty".to_owned(),
            Self::Plain(jobs) => format!("plain_{jobs}"),
            Self::Controller(jobs) => format!("controller_{jobs}"),
            Self::Mixed(jobs) => format!("mixed_{jobs}"),
            Self::Slow(jobs) => format!("slow_{jobs}"),
            Self::Large(jobs) => format!("large_{jobs}"),
            Self::Among { ready, ended, .. } => format!("{ready}_among_{ended}"),
        }
    }

    /// Into our own tables, as an application in SQL would, in one statement per thousand.
    pub async fn insert(self, connection: &mut PgConnection) -> Outcome<()> {
        match self {
            Self::Empty => Ok(()),
            Self::Plain(jobs) => rows(connection, jobs, PLAIN).await,
            Self::Controller(jobs) => rows(connection, jobs, CONTROLLER).await,
            Self::Mixed(jobs) => rows(connection, jobs, MIXED).await,
            Self::Slow(jobs) => rows(connection, jobs, SLOW).await,
            Self::Large(jobs) => rows(connection, jobs, LARGE).await,
            Self::Among { ready, ended, later, others } => {
                // Of what is only in the way many at once: nobody measures how it came there.
                const MANY: u64 = 100_000;
                many(connection, ended, MANY, ENDED).await?;
                many(connection, later, MANY, LATER).await?;
                many(connection, others, MANY, OTHERS).await?;
                rows(connection, ready, PLAIN).await
            }
        }
    }
}

const PLAIN: &str = "INSERT INTO jobs (kind, payload) SELECT 'no_op', '{\"sent\": 0}' FROM generate_series(1, $1::int)";
const CONTROLLER: &str = "WITH made AS ( \
        INSERT INTO jobs (kind, payload, priority, install, namespace, owner_uid, mirror_due) \
        SELECT ('{no_op,no_op_b,no_op_c,no_op_d}'::text[])[1 + n % 4], '{\"sent\": 0}', n / 4 % 5 - 2, \
            'default', 'team-' || n % 10, gen_random_uuid(), true \
        FROM generate_series(1, $1::int) AS n RETURNING id, install, namespace, owner_uid) \
    INSERT INTO job_resources (uid, job_id, install, namespace, name) \
    SELECT owner_uid, id, install, namespace, 'job-' || id FROM made";
const MIXED: &str = "INSERT INTO jobs (kind, payload, priority) \
    SELECT ('{no_op,no_op_b,no_op_c,no_op_d}'::text[])[1 + n % 4], \
        CASE WHEN n / 20 % 20 = n % 20 THEN '{\"sent\": 0, \"fail_first\": true}' ELSE '{\"sent\": 0}' END::jsonb, n / 4 % 5 - 2 \
    FROM generate_series(1, $1::int) AS n";
pub const SLOW: &str = "INSERT INTO jobs (kind, payload) \
    SELECT ('{no_op,no_op_b,no_op_c,no_op_d}'::text[])[1 + n % 4], '{\"sent\": 0, \"millis\": 20}' \
    FROM generate_series(1, $1::int) AS n";
const LARGE: &str = "INSERT INTO jobs (kind, payload) \
    SELECT 'no_op', jsonb_build_object('sent', 0, 'text', text) \
    FROM (SELECT repeat('sixty-four thousand characters. ', 2000) AS text) t, generate_series(1, $1::int)";
const ENDED: &str = "INSERT INTO jobs (kind, payload, status, attempts, started_at, finished_at, locked_by, claim_token) \
    SELECT 'no_op', '{\"sent\": 0}', 'succeeded', 1, now(), now(), 'worker', gen_random_uuid() FROM generate_series(1, $1::int)";
const LATER: &str = "INSERT INTO jobs (kind, payload, priority, run_at) \
    SELECT 'no_op', '{\"sent\": 0}', 1 + n % 50, now() + interval '1 day' FROM generate_series(1, $1::int) AS n";
const OTHERS: &str =
    "INSERT INTO jobs (kind, payload) SELECT 'of_nobody', '{\"sent\": 0}' FROM generate_series(1, $1::int)";

/// By statements of a thousand rows.
async fn rows(connection: &mut PgConnection, jobs: u64, sql: &'static str) -> Outcome<()> {
    many(connection, jobs, 1000, sql).await
}

async fn many(connection: &mut PgConnection, jobs: u64, batch: u64, sql: &'static str) -> Outcome<()> {
    for from in (0..jobs).step_by(usize::try_from(batch)?) {
        sqlx::query(sql).bind(i32::try_from((jobs - from).min(batch))?).execute(&mut *connection).await?;
    }
    Ok(())
}
