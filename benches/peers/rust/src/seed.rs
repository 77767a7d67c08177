//! rust-job-queue-api-worker-system: one job at a time per worker, 16 workers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rust_job_queue_api_worker_system::worker::executor::ExecutionContext;
use rust_job_queue_api_worker_system::worker::{ExecutionOutcome, Executor, WorkerRuntime};
use rust_job_queue_api_worker_system::{Job, JobKind, NewJob, PoolConfig, connect, migrate, queue};
use tokio_util::sync::CancellationToken;

use crate::{number, protocol};

const WORKERS: u32 = 16;

struct NoOp;

#[async_trait]
impl Executor for NoOp {
    async fn execute(&self, _: &ExecutionContext, job: &Job) -> ExecutionOutcome {
        let sent = job.payload["body"].as_str().and_then(|sent| sent.parse().ok());
        protocol::started(sent.unwrap_or_default());
        protocol::count_one();
        ExecutionOutcome::Succeeded
    }
}

pub async fn run(database: &str, arguments: &[String]) {
    // Its own program's size of the pool.
    let config = PoolConfig::from_url(database).with_max_connections(WORKERS + 2);
    let pool = connect(&config).await.expect("the database answers");
    let runtime = WorkerRuntime::new(pool.clone(), Arc::new(NoOp)).with_concurrency(WORKERS as usize);
    let enqueue = move |sent: u64| {
        let pool = pool.clone();
        async move {
            let payload = serde_json::json!({"to": "a@example.com", "subject": "s", "body": sent.to_string()});
            let new = NewJob { kind: JobKind::SendEmail, payload, max_attempts: Some(3), idempotency_key: None };
            queue::enqueue(&pool, new).await.expect("it takes a job");
        }
    };
    match arguments[0].as_str() {
        "setup" => migrate(&connect(&config).await.expect("the database answers")).await.expect("it migrates"),
        "preload" => {
            // It has no enqueue in bulk; 16 connections make it bearable.
            let jobs = number(arguments, 1);
            let fill = |enqueue: Box<dyn Fn(u64) -> _ + Send + Sync>| {
                tokio::spawn(async move {
                    for _ in 0..jobs / u64::from(WORKERS) {
                        enqueue(0).await;
                    }
                })
            };
            let tasks: Vec<_> = (0..WORKERS).map(|_| fill(Box::new(enqueue.clone()))).collect();
            for task in tasks {
                task.await.expect("it takes jobs");
            }
        }
        "drain" => {
            protocol::ready();
            protocol::report_done();
            tokio::spawn(runtime.run(CancellationToken::new()));
            protocol::told_to_end().await;
        }
        "enqueue" => {
            protocol::one_by_one(number(arguments, 1), number(arguments, 2), move || enqueue(0)).await;
        }
        "latency" => {
            tokio::spawn(runtime.run(CancellationToken::new()));
            protocol::start_latency(number(arguments, 1), Duration::from_millis(number(arguments, 2)), enqueue).await;
        }
        other => panic!("no such command: {other}"),
    }
}
