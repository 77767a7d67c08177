//! The batch forms of claim and finish promise what the single ones do, row by row.

mod support;

use std::collections::HashSet;
use std::sync::Arc;

use jobrequest::job::{Cause, Status};
use jobrequest::queue::{AttemptEnd, ClaimedJob, Error, Finish, NewJob, Queue, Settings};
use serde_json::{Value, json};
use sqlx::Connection;
use tokio::sync::Barrier;
use uuid::Uuid;

use support::db::{Database, failure, job};
use support::proxy::Proxy;

async fn fetch(queue: &Queue, limit: usize) -> Vec<ClaimedJob> {
    queue.fetch_many("w1", &["test_kind"], limit).await.expect("answered")
}

async fn enqueue(queue: &Queue, jobs: usize) {
    for _ in 0..jobs {
        queue.enqueue(&job()).await.expect("accepted");
    }
}

fn success(number: i32) -> AttemptEnd {
    AttemptEnd::Succeeded(json!(number))
}

fn failed(cause: Cause) -> AttemptEnd {
    AttemptEnd::Failed(failure(cause))
}

async fn statuses(db: &Database, ids: &[Uuid]) -> Vec<String> {
    let mut statuses = Vec::new();
    for id in ids {
        statuses.push(db.status(*id).await);
    }
    statuses
}

#[tokio::test]
async fn a_batch_takes_at_most_its_limit_and_the_most_urgent_first() {
    let db = Database::new().await;
    let queue = db.queue();
    let mut urgent = Vec::new();
    for priority in [0, 9, 0, 7, 0] {
        let id = queue.enqueue(&NewJob { priority, ..job() }).await.expect("accepted").id();
        if priority > 0 {
            urgent.push(id);
        }
    }
    let first: HashSet<Uuid> = fetch(&queue, 2).await.iter().map(ClaimedJob::id).collect();
    assert_eq!(first, urgent.into_iter().collect());
    assert_eq!((fetch(&queue, 100).await.len(), fetch(&queue, 100).await.len()), (3, 0));
    assert!(fetch(&queue, 0).await.is_empty());
    assert_eq!(db.value::<i64>("SELECT sum(attempts) FROM jobs").await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_claimed_at_once_share_no_job() {
    let db = Database::new().await;
    db.run("INSERT INTO jobs (kind, payload) SELECT 'test_kind', '{}' FROM generate_series(1, 1000)").await;
    let queue = db.queue_with(|settings| settings.max_connections = 8);
    let start = Arc::new(Barrier::new(8));
    let claimers: Vec<_> = (1..=8)
        .map(|n| {
            let (queue, start) = (queue.clone(), Arc::clone(&start));
            tokio::spawn(async move {
                let mut mine = Vec::new();
                start.wait().await;
                loop {
                    let batch = fetch(&queue, n * 5).await;
                    if batch.is_empty() {
                        return mine;
                    }
                    mine.extend(batch.iter().map(ClaimedJob::id));
                }
            })
        })
        .collect();
    let mut all = Vec::new();
    for claimer in claimers {
        all.extend(claimer.await.expect("no panic"));
    }
    assert_eq!((all.len(), all.iter().collect::<HashSet<_>>().len()), (1000, 1000));
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE attempts = 1").await, 1000);
}

#[tokio::test]
async fn a_batch_whose_reply_was_lost_is_taken_up_whole() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    enqueue(&queue, 3).await;
    proxy.lose_the_reply_to(b"test_kind");
    let lost = queue.fetch_many("w1", &["test_kind"], 2).await.expect_err("nobody heard the answer");
    let taken = queue.take_up(lost.ticket).await.expect("answered");
    assert_eq!((taken.len(), fetch(&queue, 9).await.len()), (2, 1));
    let ends = taken.into_iter().map(|job| (job, success(1))).collect();
    for answer in queue.finish_many(ends).await {
        assert_eq!(answer.expect("answered"), Finish::Done(Status::Succeeded));
    }
}

#[tokio::test]
async fn a_row_that_can_not_be_read_costs_the_rest_of_its_batch_nothing() {
    let db = Database::new().await;
    let queue = db.queue();
    enqueue(&queue, 3).await;
    db.run(
        "ALTER DOMAIN job_timeout DROP CONSTRAINT jobs_timeout_range; \
         UPDATE jobs SET timeout_seconds = -1 WHERE id = (SELECT id FROM jobs ORDER BY id OFFSET 1 LIMIT 1)",
    )
    .await;
    assert_eq!(fetch(&queue, 10).await.len(), 2);
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'failed_permanent'").await, 1);
}

#[tokio::test]
async fn each_end_of_a_batch_is_its_own() {
    let db = Database::new().await;
    let queue = db.queue();
    enqueue(&queue, 8).await;
    let jobs = fetch(&queue, 8).await;
    let ids: Vec<Uuid> = jobs.iter().map(ClaimedJob::id).collect();
    // The sixth is asked to stop, the seventh too but succeeds, the eighth loses its lease and is claimed again.
    for id in &ids[5..7] {
        queue.request_cancel(*id).await.expect("answered");
    }
    db.end_lease(ids[7]).await;
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
    db.make_due(ids[7]).await;
    assert_eq!(fetch(&queue, 1).await.len(), 1);
    let untouched = db.row(ids[7]).await;
    let ends = [
        success(0),
        failed(Cause::Passing),
        failed(Cause::Permanent),
        failed(Cause::HandBack),
        success(4),
        failed(Cause::Passing),
        success(6),
        success(7),
    ];
    let answers = queue.finish_many(jobs.into_iter().zip(ends).collect()).await;
    let answers: Vec<Finish> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
    let wanted = [
        Finish::Done(Status::Succeeded),
        Finish::Done(Status::Retrying),
        Finish::Done(Status::FailedPermanent),
        Finish::Done(Status::Queued),
        Finish::Done(Status::Succeeded),
        Finish::Done(Status::Cancelled),
        Finish::Done(Status::Succeeded),
        Finish::Lost,
    ];
    assert_eq!(answers, wanted);
    assert_eq!(db.row(ids[7]).await, untouched);
    for n in [0, 4, 6] {
        let result: Value = db.value(&format!("SELECT result FROM jobs WHERE id = '{}'", ids[n])).await;
        assert_eq!(result, json!(n));
    }
    let attempts: Vec<i32> = db
        .value(&format!("SELECT array_agg(attempts ORDER BY id) FROM jobs WHERE id IN ('{}', '{}')", ids[1], ids[3]))
        .await;
    assert_eq!(attempts.iter().sum::<i32>(), 1, "the hand-back is free, the failure isn't");
    assert!(queue.finish_many(Vec::new()).await.is_empty());
}

#[tokio::test]
async fn a_row_that_somebody_holds_does_not_delay_the_rest_of_its_batch() {
    let db = Database::new().await;
    let queue = db.queue();
    enqueue(&queue, 3).await;
    let jobs = fetch(&queue, 3).await;
    let ids: Vec<Uuid> = jobs.iter().map(ClaimedJob::id).collect();
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(ids[1]).execute(&mut *tx).await.expect("locked");
    let mut answers = queue.finish_many(jobs.into_iter().map(|job| (job, success(1))).collect()).await;
    assert_eq!(statuses(&db, &ids).await, ["succeeded", "running", "succeeded"]);
    let held = answers.remove(1).expect_err("somebody holds it");
    assert!(matches!(held.error, Error::RowLocked) && held.error.is_passing());
    for answer in answers {
        assert_eq!(answer.expect("answered"), Finish::Done(Status::Succeeded));
    }
    tx.rollback().await.expect("released");
    let again = queue.finish_many(vec![(held.job, success(1))]).await.pop().expect("one").expect("answered");
    assert_eq!(again, Finish::Done(Status::Succeeded));
}

#[tokio::test]
async fn a_row_that_an_application_holds_does_not_delay_large_batches_either() {
    let db = Database::new().await;
    let queue = db.queue();
    enqueue(&queue, 200).await;
    let mut jobs = fetch(&queue, 200).await;
    let held = jobs[70].id();
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(held).execute(&mut *tx).await.expect("locked");
    let second = jobs.split_off(100);
    for batch in [jobs, second] {
        let ids: Vec<Uuid> = batch.iter().map(ClaimedJob::id).collect();
        let answers = queue.finish_many(batch.into_iter().map(|job| (job, success(1))).collect()).await;
        for (id, answer) in ids.into_iter().zip(answers) {
            match answer {
                Ok(finish) => assert_eq!(finish, Finish::Done(Status::Succeeded)),
                Err(unfinished) => {
                    assert_eq!((id, matches!(unfinished.error, Error::RowLocked)), (held, true), "{unfinished}");
                }
            }
        }
    }
    tx.rollback().await.expect("released");
    let (left,): (i64,) = db.one("SELECT count(*) FROM jobs WHERE status = 'running'").await;
    assert_eq!(left, 1);
}

#[tokio::test]
async fn an_end_that_the_database_refuses_costs_the_others_nothing() {
    let db = Database::new().await;
    let queue = db.queue();
    db.run("ALTER TABLE jobs ADD CONSTRAINT no_two CHECK (result IS NULL OR result <> '2')").await;
    enqueue(&queue, 4).await;
    let jobs = fetch(&queue, 4).await;
    let ids: Vec<Uuid> = jobs.iter().map(ClaimedJob::id).collect();
    let answers = queue.finish_many(jobs.into_iter().zip((0..).map(success)).collect()).await;
    for (n, mut answer) in (0..).zip(answers) {
        // The server tells of the refusal before it lets go of the batch's rows: a passing error, as for the worker.
        let refused = loop {
            match answer {
                Ok(finish) => {
                    assert_eq!(finish, Finish::Done(Status::Succeeded));
                    break false;
                }
                Err(held) if matches!(held.error, Error::RowLocked) => {
                    answer = queue.finish_many(vec![(held.job, success(n))]).await.pop().expect("one");
                }
                Err(refused) => {
                    assert!(refused.error.to_string().contains("no_two"), "{n}: {refused}");
                    break true;
                }
            }
        };
        assert_eq!(refused, n == 2);
    }
    assert_eq!(statuses(&db, &ids).await, ["succeeded", "succeeded", "running", "succeeded"]);
}

#[tokio::test]
async fn a_batch_whose_reply_was_lost_is_known_when_it_is_sent_again() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    enqueue(&queue, 3).await;
    let jobs = fetch(&queue, 3).await;
    proxy.lose_the_reply_to(jobs[1].id().as_bytes());
    let ends = jobs.into_iter().map(|job| (job, failed(Cause::HandBack))).collect();
    let unheard = queue.finish_many(ends).await;
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'queued'").await, 3, "but it was done");
    let again: Vec<_> = unheard
        .into_iter()
        .map(|answer| (answer.expect_err("nobody heard the answer").job, failed(Cause::HandBack)))
        .collect();
    assert_eq!(again.len(), 3);
    for answer in queue.finish_many(again).await {
        assert_eq!(answer.expect("answered"), Finish::Done(Status::Queued));
    }
    assert_eq!(db.value::<i64>("SELECT sum(attempts) FROM jobs").await, 0, "and once");
}
