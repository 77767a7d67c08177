//! graphile_worker, at the settings of its own benchmark.

use std::sync::Arc;
use std::time::Duration;

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, LocalQueueConfig, RawJobSpec, TaskHandler, Worker, WorkerContext, WorkerOptions,
    WorkerUtils,
};
use serde::{Deserialize, Serialize};

use crate::{number, protocol};

#[derive(Serialize, Deserialize)]
struct NoOp {
    sent: u64,
}

impl TaskHandler for NoOp {
    const IDENTIFIER: &'static str = "no_op";

    async fn run(self, _: WorkerContext) -> impl IntoTaskHandlerResult {
        protocol::started(self.sent);
        protocol::count_one();
        Ok::<(), String>(())
    }
}

pub async fn run(database: &str, arguments: &[String]) {
    match arguments[0].as_str() {
        "setup" => utils(database, 1).await.migrate().await.expect("it migrates"),
        "preload" => preload(database, number(arguments, 1)).await,
        "drain" => {
            protocol::ready();
            protocol::report_done();
            let worker = worker(database).await;
            tokio::spawn(async move { worker.run().await.expect("it works") });
            protocol::told_to_end().await;
        }
        "enqueue" => {
            let tasks = number(arguments, 2);
            let utils = utils(database, tasks as u32).await;
            let enqueue = move || {
                let utils = utils.clone();
                async move {
                    utils.add_job(NoOp { sent: 0 }, JobSpec::default()).await.expect("it takes a job");
                }
            };
            protocol::one_by_one(number(arguments, 1), tasks, enqueue).await;
        }
        "latency" => {
            let worker = worker(database).await;
            tokio::spawn(async move { worker.run().await.expect("it works") });
            let utils = &utils(database, 2).await;
            let enqueue = |sent| async move {
                utils.add_job(NoOp { sent }, JobSpec::default()).await.expect("it takes a job");
            };
            protocol::start_latency(number(arguments, 1), Duration::from_millis(number(arguments, 2)), enqueue).await;
        }
        other => panic!("no such command: {other}"),
    }
}

async fn pool(database: &str, connections: u32) -> sqlx::PgPool {
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(connections);
    pool.connect(database).await.expect("the database answers")
}

async fn utils(database: &str, connections: u32) -> WorkerUtils {
    WorkerUtils::new(pool(database, connections).await, "graphile_worker")
}

async fn preload(database: &str, jobs: u64) {
    let utils = utils(database, 1).await;
    let job = |_| RawJobSpec {
        identifier: NoOp::IDENTIFIER.to_owned(),
        payload: serde_json::json!({"sent": 0}),
        spec: JobSpec::default(),
    };
    for from in (0..jobs).step_by(10_000) {
        let batch: Vec<_> = (from..jobs.min(from + 10_000)).map(job).collect();
        utils.add_raw_jobs(&batch).await.expect("it takes jobs");
    }
}

async fn worker(database: &str) -> Arc<Worker> {
    let options = WorkerOptions::default().pg_pool(pool(database, 100).await).define_job::<NoOp>();
    let setting = std::env::var("LOCAL_QUEUE").expect("LOCAL_QUEUE");
    let options = if setting == "default" {
        options
    } else {
        let (count, size) = setting.split_once('x').unwrap_or(("1", &setting));
        let (count, size) = (count.parse().expect("a count"), size.parse().expect("a size"));
        options
            .concurrency(500)
            .poll_interval(Duration::from_millis(5))
            .complete_job_batch_delay(Duration::from_millis(5))
            .local_queue(LocalQueueConfig::default().with_size(size).with_queue_count(count))
    };
    Arc::new(options.init().await.expect("it starts"))
}
