//! The claim: which job is next, for whom, and that nobody else gets it.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use jobrequest::queue::{NewJob, Queue, Settings};
use sqlx::Connection;
use tokio::sync::Barrier;
use uuid::Uuid;

use support::db::{Database, claim, claim_as, claimed, job};
use support::proxy::Proxy;

#[tokio::test]
async fn jobs_start_by_priority_and_then_by_the_time_they_are_due() {
    let db = Database::new().await;
    let queue = db.queue();
    let mut wanted = Vec::new();
    for (priority, age) in [(5, 0), (0, 30), (0, 10), (-5, 60)] {
        let run_at = Some(Utc::now() - TimeDelta::seconds(age));
        wanted.push(queue.enqueue(&NewJob { priority, run_at, ..job() }).await.expect("accepted").id());
    }
    // Not in the order in which they came.
    db.run("UPDATE jobs SET updated_at = now() WHERE priority <> 0").await;
    let mut seen = Vec::new();
    while let Some(next) = queue.fetch_next("w1", &["test_kind"]).await.expect("answered") {
        seen.push(next.id());
    }
    assert_eq!(seen, wanted);
}

#[tokio::test]
async fn a_suspended_job_and_one_due_later_are_held() {
    let db = Database::new().await;
    let queue = db.queue();
    queue.enqueue(&NewJob { suspended: true, ..job() }).await.expect("accepted");
    let later = Some(Utc::now() + TimeDelta::hours(1));
    let future = queue.enqueue(&NewJob { run_at: later, priority: 1000, ..job() }).await.expect("accepted").id();
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
    db.make_due(future).await;
    assert_eq!(claim(&queue).await.id(), future);
    db.run("UPDATE jobs SET suspended = false WHERE suspended").await;
    let lifted = claim(&queue).await;
    assert_eq!(lifted.attempt(), 1);
}

#[tokio::test]
async fn a_job_of_a_kind_the_worker_does_not_know_stays_for_others() {
    let db = Database::new().await;
    let queue = db.queue();
    let unknown = queue.enqueue(&NewJob::new("future_kind", job().payload)).await.expect("accepted").id();
    let before = db.row(unknown).await;
    let known = claimed_after_unknown(&queue).await;
    assert_ne!(known, unknown);
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
    assert!(queue.fetch_next("w1", &[]).await.expect("answered").is_none());
    assert_eq!(db.row(unknown).await, before);
    let new_worker = queue.fetch_next("w2", &["test_kind", "future_kind"]).await.expect("answered").expect("due");
    assert_eq!((new_worker.id(), new_worker.kind()), (unknown, "future_kind"));
}

async fn claimed_after_unknown(queue: &Queue) -> Uuid {
    claimed(queue, &job()).await.id()
}

#[tokio::test]
async fn a_job_belongs_to_its_install() {
    let db = Database::new().await;
    let ours = db.queue();
    let theirs = db.queue_with(|settings| settings.install = "theirs".to_owned());
    let id = theirs.enqueue(&job()).await.expect("accepted").id();
    assert!(ours.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
    assert!(ours.get(id).await.is_err());
    assert!(ours.list(&Default::default()).await.expect("listed").is_empty());
    let lease = claim(&theirs).await;
    db.end_lease(lease.id()).await;
    assert_eq!(ours.recover_stale().await.expect("answered").total(), 0);
    assert_eq!(theirs.recover_stale().await.expect("answered").total(), 1);
}

#[tokio::test]
async fn a_claim_starts_a_lease_and_counts_the_attempt() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.lease = Duration::from_secs(7));
    let job = claimed(&queue, &NewJob { max_attempts: 9, timeout_seconds: 11, ..job() }).await;
    assert_eq!((job.attempt(), job.max_attempts(), job.timeout()), (1, 9, Duration::from_secs(11)));
    let row: (String, i32, String, i32, bool, bool) = db
        .one(
            "SELECT status, attempts, locked_by, lease_seconds, claim_token IS NOT NULL, \
             locked_at = started_at AND now() - locked_at < interval '1 min' FROM jobs",
        )
        .await;
    assert_eq!(row, ("running".to_owned(), 1, "w1".to_owned(), 7, true, true));
}

#[tokio::test]
async fn a_row_that_somebody_holds_is_skipped_and_not_waited_for() {
    let db = Database::new().await;
    let queue = db.queue();
    let held = queue.enqueue(&NewJob { priority: 9, ..job() }).await.expect("accepted").id();
    let free = queue.enqueue(&job()).await.expect("accepted").id();
    let mut other = db.connect().await;
    let mut tx = other.begin().await.expect("begun");
    sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(held).execute(&mut *tx).await.expect("locked");
    assert_eq!(claim(&queue).await.id(), free);
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
    tx.rollback().await.expect("rolled back");
    assert_eq!(claim(&queue).await.id(), held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_jobs_are_claimed_once_each_by_twenty_claimers_at_once() {
    let db = Database::new().await;
    db.run("INSERT INTO jobs (kind, payload) SELECT 'test_kind', '{}' FROM generate_series(1, 500)").await;
    let queue = db.queue_with(|settings| settings.max_connections = 20);
    let start = Arc::new(Barrier::new(20));
    let claimers: Vec<_> = (0..20)
        .map(|n| {
            let (queue, start) = (queue.clone(), Arc::clone(&start));
            tokio::spawn(async move {
                let mut mine = Vec::new();
                start.wait().await;
                while let Some(job) = queue.fetch_next(&format!("w{n}"), &["test_kind"]).await.expect("answered") {
                    assert_eq!(job.attempt(), 1);
                    mine.push(job.id());
                }
                mine
            })
        })
        .collect();
    let mut all = Vec::new();
    for claimer in claimers {
        all.extend(claimer.await.expect("no claimer panics"));
    }
    assert_eq!(all.len(), 500);
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 500);
    let tokens: i64 = db.value("SELECT count(DISTINCT claim_token) FROM jobs WHERE attempts = 1").await;
    assert_eq!(tokens, 500);
}

#[tokio::test]
async fn a_claim_whose_reply_was_lost_is_taken_up_again_by_its_token() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    db.run("INSERT INTO jobs (kind, payload) VALUES ('test_kind', '{}')").await;
    proxy.lose_the_reply_to(b"test_kind");
    let lost = queue.fetch_next("w1", &["test_kind"]).await.expect_err("nobody heard the answer");
    assert!(proxy.has_seen_it() && lost.error.is_passing());
    let job = queue.take_up(lost.ticket).await.expect("answered").pop().expect("it was done");
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none(), "and once");
    assert_eq!(job.attempt(), 1);
    assert_eq!(db.value::<i32>("SELECT attempts FROM jobs").await, 1);
    queue.mark_succeeded(job, &serde_json::json!(1)).await.map(drop).expect("it holds the claim's token");
    assert_eq!(db.value::<String>("SELECT status FROM jobs").await, "succeeded");
}

#[tokio::test]
async fn rows_that_nobody_can_read_end_as_failed_and_the_one_behind_them_is_claimed() {
    let db = Database::new().await;
    let queue = db.queue();
    db.run(
        "ALTER DOMAIN job_timeout DROP CONSTRAINT jobs_timeout_range; \
         INSERT INTO jobs (kind, payload, priority, timeout_seconds) VALUES ('test_kind', '[1, 2]', 9, -1); \
         INSERT INTO jobs (kind, payload, priority, progress) \
         VALUES ('test_kind', '{}', 8, (repeat('[', 500) || repeat(']', 500))::jsonb)",
    )
    .await;
    let good = queue.enqueue(&job()).await.expect("accepted").id();
    assert_eq!(claim(&queue).await.id(), good);
    let bad: Vec<(String, String)> =
        sqlx::query_as("SELECT status, coalesce(last_error, '') FROM jobs WHERE priority > 0 ORDER BY priority DESC")
            .fetch_all(db.pool())
            .await
            .expect("read");
    for ((status, error), column) in bad.iter().zip(["timeout_seconds", "progress"]) {
        assert_eq!(status, "failed_permanent");
        assert!(error.contains(column), "{error}");
    }
    assert_eq!(bad.len(), 2);
}

#[tokio::test]
async fn a_payload_of_any_depth_reaches_its_executor_as_it_was_stored() {
    let db = Database::new().await;
    db.run(
        "INSERT INTO jobs (kind, payload) \
         VALUES ('test_kind', (repeat('[', 3000) || repeat(']', 3000))::jsonb)",
    )
    .await;
    assert_eq!(claim(&db.queue()).await.payload().expect("it came along").get().len(), 6000);
}

#[tokio::test]
async fn a_heartbeat_prolongs_the_leases_it_names_and_no_other() {
    let db = Database::new().await;
    let queue = db.queue();
    let (mine, other) = (claimed(&queue, &job()).await, claimed(&queue, &job()).await);
    db.run("UPDATE jobs SET locked_at = now() - interval '20 s'").await;
    let answer = queue.heartbeat(&[mine.lease()]).await.expect("answered");
    assert_eq!(answer.len(), 1);
    assert!(answer[0].id == mine.id() && answer[0].renewed && !answer[0].cancel_requested);
    let age = async |id: Uuid| -> f64 {
        db.value(&format!("SELECT extract(epoch FROM now() - locked_at)::float8 FROM jobs WHERE id = '{id}'")).await
    };
    assert!(age(mine.id()).await < 10.0);
    assert!(age(other.id()).await >= 20.0);
    assert!(queue.heartbeat(&[]).await.expect("answered").is_empty());
}

#[tokio::test]
async fn a_row_that_somebody_holds_does_not_end_the_other_leases() {
    let db = Database::new().await;
    let queue = db.queue();
    let (held, free) = (claimed(&queue, &job()).await, claimed(&queue, &job()).await);
    let mut other = db.connect().await;
    let mut tx = other.begin().await.expect("begun");
    sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(held.id()).execute(&mut *tx).await.expect("locked");
    let answer = queue.heartbeat(&[held.lease(), free.lease()]).await.expect("answered without waiting");
    let renewed = |id| answer.iter().find(|beat| beat.id == id).map(|beat| beat.renewed);
    assert_eq!((renewed(held.id()), renewed(free.id())), (Some(false), Some(true)));
}

#[tokio::test]
async fn a_heartbeat_of_a_lost_lease_changes_nothing_and_says_nothing_of_it() {
    let db = Database::new().await;
    let queue = db.queue();
    let old = claimed(&queue, &job()).await;
    db.end_lease(old.id()).await;
    assert_eq!(queue.recover_stale().await.expect("answered").retried, 1);
    db.make_due(old.id()).await;
    let new = claim_as(&queue, "w1").await;
    assert_eq!(new.id(), old.id(), "under the old worker's name");
    let before = db.row(new.id()).await;
    assert!(queue.heartbeat(&[old.lease()]).await.expect("answered").is_empty());
    assert!(queue.look_for_cancels(&[old.lease()]).await.expect("answered").is_empty());
    assert_eq!(db.row(new.id()).await, before);
}

#[tokio::test]
async fn a_worker_learns_of_a_cancel_by_a_look_and_by_a_heartbeat() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    queue.request_cancel(job.id()).await.expect("answered");
    let before = db.row(job.id()).await;
    let look = queue.look_for_cancels(&[job.lease()]).await.expect("answered");
    assert!(look[0].cancel_requested && !look[0].renewed);
    assert_eq!(db.row(job.id()).await, before, "a look prolongs nothing");
    let beat = queue.heartbeat(&[job.lease()]).await.expect("answered");
    assert!(beat[0].cancel_requested && beat[0].renewed, "it is still the worker's to end");
}

#[tokio::test]
async fn a_claim_that_is_printed_tells_nothing_of_its_payload() {
    let db = Database::new().await;
    let secret = NewJob::new("test_kind", serde_json::json!({"to": "someone"}));
    let printed = format!("{:?}", claimed(&db.queue(), &secret).await);
    assert!(printed.contains("test_kind") && !printed.contains("someone"), "{printed}");
}
