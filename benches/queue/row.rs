//! Many jobs in a row, enqueued and drained at once while retention runs: what gets worse with time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use jobrequest::queue::{NewJob, Queue, Settings};
use sqlx::{Connection, PgConnection};
use tokio::time::{Instant, sleep};

use crate::child::Child;
use crate::contenders::OURS;
use crate::database::{Server, assert_kept};
use crate::drain::assert_synchronous;
use crate::load::Load;
use crate::ours::{LEASE, new_job, queue_settings};
use crate::{Outcome, percentile, quotient};

const FIFTHS: u64 = 5;
const BATCH: u64 = 1000;
/// So many jobs wait at most.
const BACKLOG: u64 = 20_000;
const LIMIT: Duration = Duration::from_secs(900);
/// A worker's purge pauses for as long as its last batch took, within these bounds.
const PURGE_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// How things stand after a fifth of the jobs.
#[derive(Clone, Copy)]
pub struct Stand {
    pub dead_and_free_mib: f64,
    pub table_mib: f64,
    pub indexes_mib: f64,
    /// Of the claims during this fifth.
    pub claim_p99_ms: f64,
}

pub struct Row {
    pub jobs_per_second: f64,
    pub purged: u64,
    pub fifths: [Stand; 5],
}

pub async fn row(server: &Server, jobs: u64, retention: Duration) -> Outcome<Row> {
    let database = server.fresh(&OURS, Load::Empty).await?;
    let url = server.url(&database);
    let mut watcher = server.connect(&database).await?;
    sqlx::raw_sql("CREATE EXTENSION pgstattuple").execute(&mut watcher).await?;
    let queue = |settings: Settings| -> Outcome<Queue> { Ok(Queue::new(url.parse()?, settings)) };
    let mut child = Child::start(&OURS, &["row"], &url)?;
    child.ready()?;
    let start = Instant::now();
    child.go()?;
    let ended = Arc::new(AtomicBool::new(false));
    let enqueuing =
        enqueue(queue(Settings { max_connections: 1, ..queue_settings() })?, jobs, child.counter(), ended.clone());
    let mut enqueuing = Some(tokio::spawn(enqueuing));
    let keep = Settings { max_connections: 1, retention, ..queue_settings() };
    let purging = tokio::spawn(purge(queue(keep)?, ended.clone()));
    let mut fifths = Vec::new();
    for fifth in 1..=FIFTHS {
        while child.done() * FIFTHS < jobs * fifth {
            child.check_alive()?;
            if let Some(finished) = enqueuing.take_if(|task| task.is_finished()) {
                finished.await??;
            }
            if start.elapsed() > LIMIT {
                return Err(
                    format!("only {} of {jobs} jobs were run within {} s", child.done(), LIMIT.as_secs()).into()
                );
            }
            sleep(Duration::from_millis(5)).await;
        }
        fifths.push(look(&mut watcher, child.heard("claim_us ")).await?);
    }
    let end = loop {
        let sent = Instant::now();
        let (left,): (bool,) = sqlx::query_as(OURS.left).fetch_one(&mut watcher).await?;
        if !left {
            break sent;
        }
        sleep(Duration::from_millis(5)).await;
    };
    ended.store(true, Ordering::Release);
    if let Some(task) = enqueuing {
        task.await??;
    }
    let purged = purging.await??;
    child.tell_to_end();
    assert_synchronous(std::slice::from_ref(&child))?;
    // Retention removes nothing but what has ended; what is left shows how.
    assert_kept(&mut watcher, jobs - purged, LEASE.as_secs()).await?;
    drop(child);
    watcher.close().await?;
    server.drop(&database).await?;
    let fifths = fifths.try_into().map_err(|_| "not all fifths were measured")?;
    Ok(Row { jobs_per_second: quotient(jobs, (end - start).as_secs_f64()), purged, fifths })
}

async fn enqueue(queue: Queue, jobs: u64, done: Arc<AtomicU64>, ended: Arc<AtomicBool>) -> Outcome<()> {
    let batch: Vec<NewJob> = (0..BATCH).map(|_| new_job(0)).collect();
    let mut enqueued = 0;
    while enqueued < jobs && !ended.load(Ordering::Acquire) {
        if enqueued.saturating_sub(done.load(Ordering::Acquire)) >= BACKLOG {
            sleep(Duration::from_millis(1)).await;
            continue;
        }
        for outcome in queue.enqueue_many(&batch[..usize::try_from((jobs - enqueued).min(BATCH))?]).await {
            outcome?;
        }
        enqueued += BATCH;
    }
    Ok(())
}

/// Removes ended jobs all the time, as fast as a worker would; says how many.
async fn purge(queue: Queue, ended: Arc<AtomicBool>) -> Outcome<u64> {
    let mut removed = 0;
    while !ended.load(Ordering::Acquire) {
        let began = Instant::now();
        removed += queue.purge().await?.jobs;
        sleep(began.elapsed().clamp(PURGE_PAUSE.0, PURGE_PAUSE.1)).await;
    }
    Ok(removed)
}

async fn look(watcher: &mut PgConnection, mut claims_us: Vec<f64>) -> Outcome<Stand> {
    const MIB: f64 = 1024.0 * 1024.0;
    let (dead_and_free, table, indexes): (i64, i64, i64) = sqlx::query_as(
        "SELECT dead_tuple_len + approx_free_space, table_len, pg_relation_size('jobs_ready_idx') \
             + pg_relation_size('jobs_running_idx') + pg_relation_size('jobs_pkey') \
         FROM pgstattuple_approx('jobs')",
    )
    .fetch_one(watcher)
    .await?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
    let mib = |bytes: i64| bytes as f64 / MIB;
    let claim_p99_ms = percentile(&mut claims_us, 99).ok_or("no claim was heard of")? / 1000.0;
    Ok(Stand { dead_and_free_mib: mib(dead_and_free), table_mib: mib(table), indexes_mib: mib(indexes), claim_p99_ms })
}
