//! A host that is dead, slow or busy holds up its own namespace's jobs for it and nothing else, on a real worker.

use std::time::Duration;

use jobrequest::kinds::Registry;
use jobrequest::queue::{NewJob, Owner};
use serde_json::json;
use tokio::net::TcpSocket;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::loopback;
use super::sink::Sink;
use super::support::db::Database;
use super::support::stage::Running;

const PATIENCE: Duration = Duration::from_secs(60);
/// Fewer slots than jobs for the bad host.
const SLOTS: usize = 16;
const MANY: usize = 60;

fn worker(db: &Database) -> Running {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let registry = Registry::builtin(&loopback()).unwrap();
    Running::start(&db.queue(), registry, |builder| builder.concurrency(SLOTS).kinds(["webhook_delivery"]))
}

async fn enqueue(db: &Database, namespace: &str, url: String) -> Uuid {
    let uid = Uuid::new_v4();
    let owner = Owner { uid, namespace: namespace.to_owned(), name: format!("job-{uid}") };
    let job = NewJob::new("webhook_delivery", json!({"url": url, "body": {}}));
    db.queue().enqueue(&NewJob { owner: Some(owner), max_attempts: 100, ..job }).await.unwrap().id()
}

async fn until(db: &Database, sql: &str) {
    let started = Instant::now();
    while !db.value::<bool>(sql).await {
        assert!(started.elapsed() < PATIENCE, "not in {PATIENCE:?}: {sql}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// What waits for this reason, and how many attempts that has cost.
async fn waiting(db: &Database, reason: &str) -> (i64, i64) {
    let sql = format!(
        "SELECT count(*), coalesce(sum(attempts), 0)::int8 FROM jobs \
         WHERE status IN ('queued', 'retrying') AND last_error LIKE '{reason}: %'"
    );
    db.one(&sql).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_never_answers_takes_eight_slots_of_its_namespace_and_no_more() {
    let db = Database::new().await;
    let (dead, well) = (Sink::start().await, Sink::start().await);
    for _ in 0..MANY {
        enqueue(&db, "shop", dead.url("/hold")).await;
    }
    let worker = worker(&db);
    until(&db, &format!("SELECT count(*) = {} FROM jobs WHERE last_error LIKE 'OriginBusy: %'", MANY - 8)).await;
    let own = enqueue(&db, "shop", well.url("/ok")).await;
    let others = enqueue(&db, "blog", dead.url("/ok")).await;
    db.until_status(own, "succeeded", PATIENCE).await;
    db.until_status(others, "succeeded", PATIENCE).await;
    assert_eq!(dead.count("/hold"), 8);
    let calling = "SELECT count(*) FROM jobs WHERE status = 'running' AND last_error IS NULL AND attempts = 1";
    assert_eq!(db.value::<i64>(calling).await, 8);
    let (busy, attempts) = waiting(&db, "OriginBusy").await;
    assert!(busy > 0 && attempts == 0, "{busy} wait, at the cost of {attempts} attempts");
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_host_refuses_connections_few_attempts_are_spent_on_it_and_all_is_delivered_once_it_is_back() {
    let db = Database::new().await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    for _ in 0..MANY {
        enqueue(&db, "shop", format!("http://{address}/ok")).await;
    }
    let worker = worker(&db);
    until(&db, "SELECT count(*) > 30 FROM jobs WHERE last_error LIKE 'OriginResting: %' AND attempts = 0").await;
    let spent = db.value::<i64>("SELECT sum(attempts) FROM jobs").await;
    assert!(spent < 30, "{spent} attempts");
    let back = Sink::on(socket.listen(1024).unwrap(), Vec::new());
    until(&db, "SELECT bool_and(status = 'succeeded') FROM jobs").await;
    assert_eq!(back.count("/ok"), MANY);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_a_host_asks_for_holds_for_its_namespaces_other_jobs_too() {
    let db = Database::new().await;
    let sink = Sink::start().await;
    enqueue(&db, "shop", sink.url("/code/429?ra=600")).await;
    let worker = worker(&db);
    until(&db, "SELECT count(*) = 1 FROM jobs WHERE last_error LIKE 'ServerBusy: %'").await;
    for _ in 0..MANY {
        enqueue(&db, "shop", sink.url("/ok")).await;
    }
    let others = enqueue(&db, "blog", sink.url("/ok")).await;
    db.until_status(others, "succeeded", PATIENCE).await;
    until(&db, &format!("SELECT count(*) = {MANY} FROM jobs WHERE last_error LIKE 'OriginResting: %'")).await;
    assert_eq!(waiting(&db, "OriginResting").await, (MANY as i64, 0));
    assert!(
        db.value::<bool>("SELECT min(run_at) > now() + interval '9 minutes' FROM jobs WHERE status = 'retrying'").await
    );
    assert_eq!(sink.count("/ok"), 1);
    worker.end().await;
}
