//! Our own queue as a process to be measured: the product's worker with an executor that does nothing, and its enqueue.
//!
//! One set of settings for every bar.

mod claims;
mod operations;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use jobrequest::kinds::{Attempt, Executed, Executor, Failure, Registry};
use jobrequest::queue::{self, NewJob, Queue};
use jobrequest::worker::Worker;
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::postgres::PgConnectOptions;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{Outcome, protocol};

pub const CONCURRENCY: usize = 1000;
pub const LEASE: Duration = Duration::from_secs(3);
/// The kinds that its worker runs; all of them do nothing.
pub const KINDS: [&str; 4] = ["no_op", "no_op_b", "no_op_c", "no_op_d"];
/// The connections of a batch without a worker.
const BARE_CONNECTIONS: u32 = 2;
const BARE_BATCH: usize = 1000;
const AT_A_TIME: usize = 16;
const BATCH: usize = 1000;
/// Above what a backlog has.
const HIGH_PRIORITY: i16 = 10;
/// Where a bar asks for another number of slots than all the others.
pub const FEW_SLOTS: usize = 32;

/// As the report prints them.
pub fn settings() -> Value {
    let queue::Settings { max_connections, .. } = queue_settings();
    json!({
        "concurrency": CONCURRENCY, "batch": BATCH, "lease_seconds": LEASE.as_secs(), "listen": true,
        "max_connections": max_connections, "kinds": KINDS.len(),
        "all others": "as by default",
        "where a bar says so": format!("concurrency {FEW_SLOTS}; batch 1 at concurrency {AT_A_TIME}"),
    })
}

pub fn queue_settings() -> queue::Settings {
    queue::Settings { lease: LEASE, ..queue::Settings::default() }
}

/// How many executors run just now.
static BUSY: AtomicU64 = AtomicU64::new(0);

struct NoOp(&'static str);

#[derive(Deserialize)]
struct Payload {
    sent: u64,
    /// How long the job takes; a no-op takes no time.
    #[serde(default)]
    millis: u64,
    #[serde(default)]
    fail_first: bool,
}

impl Executor for NoOp {
    fn kind(&self) -> &'static str {
        self.0
    }

    /// Jobs are counted at their first attempt.
    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            let Payload { sent, millis, fail_first } = attempt.payload()?;
            protocol::started(sent);
            if millis > 0 {
                BUSY.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(millis)).await;
                BUSY.fetch_sub(1, Ordering::Relaxed);
            }
            if attempt.number == 1 {
                protocol::count_one();
                if fail_first {
                    return Err(Failure::passing("AsAsked", "the first attempt was to fail"));
                }
            }
            Ok(Value::Null)
        })
    }
}

/// setup | drain [SLOTS] | row | one | bare | enqueue N TASKS | bulk N BATCH | insert N BATCH | latency N EVERY_MS |
/// behind N EVERY_MS SLOTS, on the database at $DATABASE_URL.
pub async fn run(arguments: &[String]) -> Outcome<()> {
    let database: PgConnectOptions = std::env::var("DATABASE_URL")?.parse()?;
    let number = |at: usize| -> Outcome<u64> { Ok(arguments.get(at).ok_or("a number is missing")?.parse()?) };
    match arguments.first().map(String::as_str) {
        Some("setup") => queue::migrate(&database).await?,
        // Reporting wakes the process a hundred times a second: that is not the worker's.
        Some("idle") => drain(database, CONCURRENCY, BATCH).await?,
        Some("drain") => {
            protocol::report_done();
            let slots = if arguments.len() > 1 { usize::try_from(number(1)?)? } else { CONCURRENCY };
            drain(database, slots, BATCH).await?;
        }
        Some("row") => {
            protocol::report_done();
            claims::report()?;
            drain(database, CONCURRENCY, BATCH).await?;
        }
        Some("one") => {
            protocol::report_done();
            drain(database, AT_A_TIME, 1).await?;
        }
        Some("bare") => operations::bare(&with_connections(database, BARE_CONNECTIONS)).await?,
        Some("enqueue") => {
            let queue = with_connections(database, u32::try_from(number(2)?)?);
            let enqueue = move || {
                let queue = queue.clone();
                async move {
                    queue.enqueue(&new_job(0)).await.expect("it takes a job");
                }
            };
            protocol::one_by_one(number(1)?, number(2)?, enqueue).await;
        }
        Some("bulk") => operations::bulk(&with_connections(database, 1), number(1)?, number(2)?).await?,
        Some("insert") => operations::insert(database, number(1)?, number(2)?).await?,
        Some("latency") => latency(database, number(1)?, number(2)?, 0, CONCURRENCY).await?,
        Some("behind") => {
            protocol::report_done();
            tokio::spawn(say_busy());
            latency(database, number(1)?, number(2)?, HIGH_PRIORITY, usize::try_from(number(3)?)?).await?;
        }
        _ => return Err("no such command".into()),
    }
    Ok(())
}

async fn drain(database: PgConnectOptions, slots: usize, batch: usize) -> Outcome<()> {
    protocol::ready();
    let (queue, worker) = worker(database, slots, batch)?;
    let shutdown = CancellationToken::new();
    let worker = tokio::spawn(worker.run(shutdown.clone()));
    protocol::told_to_end().await;
    say_durable(&queue).await?;
    shutdown.cancel();
    Ok(worker.await?)
}

async fn latency(database: PgConnectOptions, jobs: u64, every: u64, priority: i16, slots: usize) -> Outcome<()> {
    let (queue, worker) = worker(database, slots, BATCH)?;
    tokio::spawn(worker.run(CancellationToken::new()));
    let enqueue = async |sent| {
        let new = NewJob { priority, ..new_job(sent) };
        queue.enqueue(&new).await.expect("it takes a job");
    };
    protocol::start_latency(jobs, Duration::from_millis(every), enqueue).await;
    // The worker is not waited for: what counts has been said.
    std::process::exit(0);
}

/// How many slots are taken, every tenth of a second.
async fn say_busy() {
    loop {
        sleep(Duration::from_millis(100)).await;
        protocol::say(&format!("busy {}", BUSY.load(Ordering::Relaxed)));
    }
}

pub fn new_job(sent: u64) -> NewJob {
    NewJob::new(KINDS[0], json!({ "sent": sent }))
}

fn with_connections(database: PgConnectOptions, max_connections: u32) -> Queue {
    Queue::new(database, queue::Settings { max_connections, ..queue_settings() })
}

fn worker(database: PgConnectOptions, slots: usize, batch: usize) -> Outcome<(Queue, Worker)> {
    let queue = match batch {
        // As many connections as the peer that takes one at a time has in its own program.
        1 => with_connections(database.clone(), u32::try_from(slots)? + 2),
        _ => Queue::new(database.clone(), queue_settings()),
    };
    let registry = KINDS.into_iter().fold(Registry::new(), |registry, kind| registry.with(NoOp(kind)));
    let worker = Worker::builder(queue.clone(), registry).concurrency(slots).batch(batch).listen(database).build()?;
    Ok((queue, worker))
}

/// Asks every session of the worker's pool whether its commits wait for the disk.
async fn say_durable(queue: &Queue) -> Outcome<()> {
    let mut sessions = Vec::new();
    // All that are idle; a session in use gets its turn with the next drain.
    while let Some(mut session) = queue.pool().try_acquire() {
        let (setting,): (String,) =
            sqlx::query_as("SELECT current_setting('synchronous_commit')").fetch_one(&mut *session).await?;
        if setting != "on" {
            return Err(format!("a session of the worker has synchronous_commit {setting}").into());
        }
        sessions.push(session);
    }
    protocol::say(&format!("synchronous {}", sessions.len()));
    Ok(())
}
