//! A transaction elsewhere that keeps its snapshot open: nothing that the queue leaves behind can be cleaned up.

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::sync::oneshot;

use crate::Outcome;
use crate::contenders::OURS;
use crate::database::Server;
use crate::drain::{Meanwhile, Pace, drain, drain_in};
use crate::load::Load;

pub struct Held {
    /// The rate of the drain's last tenth against its first.
    pub last_to_first: f64,
    /// Jobs a second until each was run once.
    pub free: f64,
    pub held: f64,
    /// How long a job waited that became due in the middle but belongs before what was claimed long ago: one enqueued
    /// with a time that has passed, one whose insert was committed late.
    pub back_dated: Duration,
    pub committed_late: Duration,
}

pub async fn held(server: &Server, jobs: u64) -> Outcome<Held> {
    const NOT_MEASURED: &str = "the drain was too fast to be measured";
    let load = Load::Mixed(jobs);
    let free = drain(server, &OURS, load, &["drain"], 1).await?.pace.average().ok_or(NOT_MEASURED)?;
    let database = server.fresh(&OURS, load).await?;
    let mut holder = server.connect(&database).await?;
    sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class").execute(&mut holder).await?;
    let mut watcher = server.connect(&database).await?;
    let (pid,): (i32,) = sqlx::query_as("SELECT pg_backend_pid()").fetch_one(&mut holder).await?;
    let xmin = assert_held(&mut watcher, pid).await?;
    let (half, at_half) = oneshot::channel();
    let late = tokio::spawn(commit_late(server.connect(&database).await?, server.connect(&database).await?, at_half));
    let meanwhile = Meanwhile { half: Some(half), more: 2 };
    let pace: Pace = drain_in(server, &OURS, &database, load, &["drain"], 1, meanwhile).await?.pace;
    if assert_held(&mut watcher, pid).await? != xmin {
        return Err("the snapshot did not stay open".into());
    }
    let [back_dated, committed_late] = late.await??;
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await?;
    holder.close().await?;
    watcher.close().await?;
    server.drop(&database).await?;
    Ok(Held {
        last_to_first: pace.last_to_first().ok_or(NOT_MEASURED)?,
        free,
        held: pace.average().ok_or(NOT_MEASURED)?,
        back_dated,
        committed_late,
    })
}

/// The snapshot's horizon.
async fn assert_held(watcher: &mut PgConnection, pid: i32) -> Outcome<String> {
    let (xmin,): (Option<String>,) = sqlx::query_as("SELECT backend_xmin::text FROM pg_stat_activity WHERE pid = $1")
        .bind(pid)
        .fetch_one(watcher)
        .await?;
    xmin.ok_or_else(|| "the transaction that was to hold a snapshot holds none".into())
}

/// Both jobs have the highest priority, whose other jobs are done by then. Says how long each waited, by the database's
/// clock, from before its commit.
async fn commit_late(
    mut late: PgConnection,
    mut connection: PgConnection,
    half: oneshot::Receiver<()>,
) -> Outcome<[Duration; 2]> {
    const CLOCK: &str = "SELECT clock_timestamp()::text";
    const PRIORITY: i16 = 2;
    let insert = "INSERT INTO jobs (kind, payload, priority, run_at) VALUES ('no_op', '{\"sent\": 0}', $1, \
        now() - make_interval(secs => $2)) RETURNING id";
    sqlx::raw_sql("BEGIN").execute(&mut late).await?;
    let (late_id,): (uuid::Uuid,) = sqlx::query_as(insert).bind(PRIORITY).bind(0.0).fetch_one(&mut late).await?;
    half.await?;
    let (committed_at,): (String,) = sqlx::query_as(CLOCK).fetch_one(&mut connection).await?;
    sqlx::raw_sql("COMMIT").execute(&mut late).await?;
    let (enqueued_at,): (String,) = sqlx::query_as(CLOCK).fetch_one(&mut connection).await?;
    let (dated_id,): (uuid::Uuid,) =
        sqlx::query_as(insert).bind(PRIORITY).bind(86_400.0).fetch_one(&mut connection).await?;
    let mut waited = [Duration::ZERO; 2];
    for (waited, (id, since)) in waited.iter_mut().zip([(dated_id, enqueued_at), (late_id, committed_at)]) {
        let seconds = loop {
            let (seconds,): (Option<f64>,) = sqlx::query_as(
                "SELECT extract(epoch FROM started_at - $2::timestamptz)::float8 FROM jobs WHERE id = $1",
            )
            .bind(id)
            .bind(&since)
            .fetch_one(&mut connection)
            .await?;
            match seconds {
                Some(seconds) => break seconds,
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        *waited = Duration::try_from_secs_f64(seconds.max(0.0))?;
    }
    late.close().await?;
    connection.close().await?;
    Ok(waited)
}
