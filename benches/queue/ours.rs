//! Our own queue as a process to be measured: the product's worker with an executor that does nothing, and its enqueue.
//!
//! One set of settings for every bar.

use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use jobrequest::job::Status;
use jobrequest::kinds::{Attempt, Executed, Executor, Registry};
use jobrequest::queue::{self, AttemptEnd, ClaimedJob, Finish, NewJob, Queue};
use jobrequest::worker::Worker;
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::postgres::PgConnectOptions;
use sqlx::types::Json;
use sqlx::{Connection, PgConnection};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{Failed, Outcome, protocol};

pub const CONCURRENCY: usize = 1000;
pub const LEASE: Duration = Duration::from_secs(3);
/// The kinds that its worker runs; all of them do nothing.
pub const KINDS: [&str; 4] = ["no_op", "no_op_b", "no_op_c", "no_op_d"];
/// The connections of a batch without a worker.
const BARE_CONNECTIONS: u32 = 2;
const BARE_BATCH: usize = 1000;
const AT_A_TIME: u32 = 16;

/// As the report prints them.
pub fn settings() -> Value {
    let queue::Settings { max_connections, .. } = queue_settings();
    json!({
        "concurrency": CONCURRENCY, "lease_seconds": LEASE.as_secs(), "listen": true,
        "max_connections": max_connections, "kinds": KINDS.len(),
        "all others": "as by default",
    })
}

fn queue_settings() -> queue::Settings {
    queue::Settings { lease: LEASE, ..queue::Settings::default() }
}

struct NoOp(&'static str);

#[derive(Deserialize)]
struct Payload {
    sent: u64,
}

impl Executor for NoOp {
    fn kind(&self) -> &'static str {
        self.0
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            let Payload { sent } = attempt.payload()?;
            protocol::started(sent);
            protocol::count_one();
            Ok(Value::Null)
        })
    }
}

/// setup | drain | bare | one | enqueue N TASKS | bulk N BATCH | insert N BATCH | latency N EVERY_MS, on the database at $DATABASE_URL.
pub async fn run(arguments: &[String]) -> Outcome<()> {
    let database: PgConnectOptions = std::env::var("DATABASE_URL")?.parse()?;
    let number = |at: usize| -> Outcome<u64> { Ok(arguments.get(at).ok_or("a number is missing")?.parse()?) };
    match arguments.first().map(String::as_str) {
        Some("setup") => queue::migrate(&database).await?,
        Some("drain") => {
            protocol::ready();
            protocol::report_done();
            let queue = Queue::new(database.clone(), queue_settings());
            let shutdown = CancellationToken::new();
            let worker = tokio::spawn(worker(queue.clone(), database)?.run(shutdown.clone()));
            protocol::told_to_end().await;
            say_durable(&queue).await?;
            shutdown.cancel();
            worker.await?;
        }
        Some("bare") => bare(&with_connections(database, BARE_CONNECTIONS)).await?,
        Some("one") => one_at_a_time(&with_connections(database, AT_A_TIME)).await?,
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
        Some("bulk") => {
            let queue = with_connections(database, 1);
            let jobs: Vec<NewJob> = (0..number(2)?).map(|_| new_job(0)).collect();
            let enqueue = async || -> Outcome<()> {
                for outcome in queue.enqueue_many(&jobs).await {
                    outcome?;
                }
                Ok(())
            };
            in_batches(number(1)? / number(2)?, enqueue).await?;
        }
        Some("insert") => insert(database, number(1)?, number(2)?).await?,
        Some("latency") => {
            let queue = Queue::new(database.clone(), queue_settings());
            tokio::spawn(worker(queue.clone(), database)?.run(CancellationToken::new()));
            let enqueue = async |sent| {
                queue.enqueue(&new_job(sent)).await.expect("it takes a job");
            };
            protocol::start_latency(number(1)?, Duration::from_millis(number(2)?), enqueue).await;
            // The worker is not waited for: what counts has been said.
            std::process::exit(0);
        }
        _ => return Err("no such command".into()),
    }
    Ok(())
}

fn new_job(sent: u64) -> NewJob {
    NewJob::new(KINDS[0], json!({ "sent": sent }))
}

/// So many, one after the other, and prints `seconds`.
async fn in_batches(batches: u64, mut batch: impl AsyncFnMut() -> Outcome<()>) -> Outcome<()> {
    for _ in 0..5 {
        batch().await?;
    }
    protocol::ready();
    let start = Instant::now();
    for _ in 0..batches {
        batch().await?;
    }
    protocol::say(&format!("seconds {}", start.elapsed().as_secs_f64()));
    Ok(())
}

/// The same rows without the queue, in as little as the table takes: what `enqueue_many` is measured against.
async fn insert(database: PgConnectOptions, jobs: u64, batch: u64) -> Outcome<()> {
    let mut connection = PgConnection::connect_with(&database).await?;
    let jobs_of_a_batch: Vec<NewJob> = (0..batch).map(|_| new_job(0)).collect();
    let insert = async || -> Outcome<()> {
        let columns = jobs_of_a_batch.iter().map(|job| (Uuid::now_v7(), job.kind.as_str(), Json(&job.payload)));
        let (ids, (kinds, payloads)): (Vec<_>, (Vec<_>, Vec<_>)) =
            columns.map(|(id, kind, payload)| (id, (kind, payload))).unzip();
        sqlx::query("INSERT INTO jobs (id, kind, payload) SELECT * FROM unnest($1::uuid[], $2::text[], $3::jsonb[])")
            .bind(ids)
            .bind(kinds)
            .bind(payloads)
            .execute(&mut connection)
            .await?;
        Ok(())
    };
    in_batches(jobs / batch, insert).await
}

fn with_connections(database: PgConnectOptions, max_connections: u32) -> Queue {
    Queue::new(database, queue::Settings { max_connections, ..queue_settings() })
}

fn worker(queue: Queue, database: PgConnectOptions) -> Outcome<Worker> {
    let registry = KINDS.into_iter().fold(Registry::new(), |registry, kind| registry.with(NoOp(kind)));
    Ok(Worker::builder(queue, registry).concurrency(CONCURRENCY).listen(database).build()?)
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

/// The queue's claim and finish in batches, without a worker: how much the worker costs.
async fn bare(queue: &Queue) -> Outcome<()> {
    protocol::ready();
    protocol::report_done();
    let to_end = |job| (job, AttemptEnd::Succeeded(Value::Null));
    let drain = async |queue: &Queue| -> Outcome<()> {
        loop {
            let jobs = queue.fetch_many("bare", &KINDS, BARE_BATCH).await?;
            if jobs.is_empty() {
                return Ok(());
            }
            protocol::count(jobs.len() as u64);
            let mut ends: Vec<_> = jobs.into_iter().map(to_end).collect();
            while !ends.is_empty() {
                let answers = queue.finish_many(std::mem::take(&mut ends)).await;
                for answer in answers {
                    match answer {
                        Ok(finish) => expect_success(finish)?,
                        // The other connection's claim looked at the row just now.
                        Err(unfinished) if unfinished.error.is_passing() => ends.push(to_end(unfinished.job)),
                        Err(unfinished) => return Err(unfinished.error.into()),
                    }
                }
            }
        }
    };
    tokio::try_join!(drain(queue), drain(queue))?;
    protocol::told_to_end().await;
    Ok(())
}

/// The queue's operations for one job, in as many loops as there may be jobs in flight.
async fn one_at_a_time(queue: &Queue) -> Outcome<()> {
    protocol::ready();
    protocol::report_done();
    let each = async |queue: Queue| -> Outcome<()> {
        while let Some(job) = queue.fetch_next("one", &KINDS).await? {
            protocol::count_one();
            succeed(&queue, job).await?;
        }
        Ok(())
    };
    let tasks: Vec<_> = (0..AT_A_TIME).map(|_| tokio::spawn(each(queue.clone()))).collect();
    for task in tasks {
        task.await??;
    }
    protocol::told_to_end().await;
    Ok(())
}

async fn succeed(queue: &Queue, mut job: ClaimedJob) -> Outcome<()> {
    loop {
        match queue.mark_succeeded(job, &Value::Null).await {
            Ok(finish) => return expect_success(finish),
            Err(unfinished) if unfinished.error.is_passing() => job = unfinished.job,
            Err(unfinished) => return Err(unfinished.error.into()),
        }
    }
}

fn expect_success(finish: Finish) -> Outcome<()> {
    match finish {
        Finish::Done(Status::Succeeded) => Ok(()),
        other => Err(Failed::from(format!("a finish came to {other:?}"))),
    }
}
