//! Cancel: a waiting job ends at once, a running one when its worker hears of it, fails, or is gone.

mod support;

use std::sync::Arc;

use chrono::{TimeDelta, Utc};
use jobrequest::job::{Cause, Outcome, Status};
use jobrequest::queue::{CancelOutcome, Error, Finish, NewJob};
use serde_json::json;
use sqlx::Connection;
use tokio::sync::Barrier;
use uuid::Uuid;

use support::db::{Database, claim, claimed, failure, job};

#[tokio::test]
async fn a_waiting_job_is_cancelled_at_once_whatever_it_waits_for() {
    let db = Database::new().await;
    let queue = db.queue();
    let later = Some(Utc::now() + TimeDelta::hours(1));
    let mut waiting = Vec::new();
    for new in [job(), NewJob { run_at: later, ..job() }, NewJob { suspended: true, ..job() }] {
        waiting.push(queue.enqueue(&new).await.expect("accepted").id());
    }
    let retrying = claim(&queue).await;
    waiting.push(retrying.id());
    queue.mark_failed_or_retry(retrying, &failure(Cause::Passing)).await.map(drop).expect("answered");
    waiting.sort();
    waiting.dedup();
    for id in waiting {
        assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::CancelledNow);
        assert_eq!(db.status(id).await, "cancelled");
        db.make_due(id).await;
        let before = db.row(id).await;
        assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::AlreadyTerminal);
        assert_eq!(db.row(id).await, before);
    }
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
}

#[tokio::test]
async fn a_running_job_is_told_and_ends_when_its_worker_says_so() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::PendingOnWorker);
    let before = db.row(id).await;
    assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::PendingOnWorker);
    assert_eq!(db.row(id).await, before, "a second request adds nothing");
    assert_eq!(queue.finalize_cancelled(job).await.expect("answered"), Finish::Done(Status::Cancelled));
    let job = queue.get(id).await.expect("it is there");
    assert_eq!((job.attempts, job.history.len(), job.history[0].outcome), (1, 1, Outcome::Cancelled));
}

#[tokio::test]
async fn a_cancelled_job_whose_attempt_ends_otherwise_is_cancelled_and_never_waits_again() {
    let db = Database::new().await;
    let queue = db.queue();
    for cause in [
        Cause::Passing,
        Cause::Permanent,
        Cause::HandBack,
        Cause::RetryAfter(std::time::Duration::from_secs(1)),
        Cause::Cancelled,
    ] {
        let job = claimed(&queue, &job()).await;
        let id = job.id();
        queue.request_cancel(id).await.expect("answered");
        let answer = queue.mark_failed_or_retry(job, &failure(cause)).await.expect("answered");
        assert_eq!(answer, Finish::Done(Status::Cancelled), "{cause:?}");
        let attempts = queue.get(id).await.expect("it is there").attempts;
        assert_eq!(attempts, 1, "{cause:?}: it was started, and nothing waits for the count");
    }
}

#[tokio::test]
async fn a_job_that_succeeds_before_it_hears_of_its_cancel_has_succeeded() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    queue.request_cancel(id).await.expect("answered");
    assert_eq!(queue.mark_succeeded(job, &json!(1)).await.expect("answered"), Finish::Done(Status::Succeeded));
    assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::AlreadyTerminal);
}

#[tokio::test]
async fn a_cancelled_job_whose_worker_died_is_cancelled_by_the_rescue_with_attempts_left_or_without() {
    let db = Database::new().await;
    let queue = db.queue();
    for max_attempts in [1, 3] {
        let id = claimed(&queue, &NewJob { max_attempts, ..job() }).await.id();
        queue.request_cancel(id).await.expect("answered");
        assert_eq!(queue.recover_stale().await.expect("answered").total(), 0, "its lease stands");
        db.end_lease(id).await;
        let rescued = queue.recover_stale().await.expect("answered");
        assert_eq!((rescued.cancelled, rescued.total()), (1, 1));
        assert_eq!(db.status(id).await, "cancelled");
    }
}

#[tokio::test]
async fn a_job_that_nobody_asked_to_stop_is_not_finalized_and_its_claim_comes_back() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let before = db.row(job.id()).await;
    let unfinished = queue.finalize_cancelled(job).await.expect_err("it is refused");
    assert!(matches!(unfinished.error, Error::InvalidTransition { from: Status::Running, .. }));
    assert_eq!(db.row(unfinished.job.id()).await, before);
    assert_eq!(
        queue.mark_succeeded(unfinished.job, &json!(1)).await.expect("answered"),
        Finish::Done(Status::Succeeded)
    );
}

#[tokio::test]
async fn a_job_that_is_not_there_or_belongs_to_another_install_can_not_be_cancelled() {
    let db = Database::new().await;
    let queue = db.queue();
    assert!(matches!(queue.request_cancel(Uuid::now_v7()).await, Err(Error::NotFound)));
    let theirs = db.queue_with(|settings| settings.install = "theirs".to_owned());
    let id = theirs.enqueue(&job()).await.expect("accepted").id();
    assert!(matches!(queue.request_cancel(id).await, Err(Error::NotFound)));
    assert_eq!(db.status(id).await, "queued");
}

#[tokio::test]
async fn a_cancel_that_meets_a_claim_tells_its_worker() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&job()).await.expect("accepted").id();
    // The claim has the row's lock and the cancel waits for it.
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query(
        "UPDATE jobs SET status = 'running', attempts = 1, claim_token = gen_random_uuid(), locked_at = now(), \
             locked_by = 'w1' WHERE id = $1",
    )
    .bind(id)
    .execute(&mut *tx)
    .await
    .expect("claimed");
    let cancel = tokio::spawn({
        let queue = queue.clone();
        async move { queue.request_cancel(id).await.expect("answered") }
    });
    db.until_blocked(1).await;
    tx.commit().await.expect("committed");
    assert_eq!(cancel.await.expect("no panic"), CancelOutcome::PendingOnWorker);
    let row: (String, bool) = db.one("SELECT status, cancel_requested FROM jobs").await;
    assert_eq!(row, ("running".to_owned(), true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_claims_and_cancels_at_once_each_job_sees_one_order() {
    let db = Database::new().await;
    db.run("INSERT INTO jobs (kind, payload) SELECT 'test_kind', '{}' FROM generate_series(1, 100)").await;
    let ids: Vec<(Uuid,)> = sqlx::query_as("SELECT id FROM jobs").fetch_all(db.pool()).await.expect("read");
    let queue = db.queue_with(|settings| settings.max_connections = 10);
    let start = Arc::new(Barrier::new(10));
    let claimers: Vec<_> = (0..5)
        .map(|_| {
            let (queue, start) = (queue.clone(), Arc::clone(&start));
            tokio::spawn(async move {
                let mut claimed = Vec::new();
                start.wait().await;
                while let Some(job) = queue.fetch_next("w", &["test_kind"]).await.expect("answered") {
                    claimed.push(job.id());
                }
                claimed
            })
        })
        .collect();
    let cancellers: Vec<_> = ids
        .chunks(20)
        .map(|mine| {
            let (queue, start, mine) = (queue.clone(), Arc::clone(&start), mine.to_vec());
            tokio::spawn(async move {
                let mut outcomes = Vec::new();
                start.wait().await;
                for (id,) in mine {
                    outcomes.push((id, queue.request_cancel(id).await.expect("answered")));
                }
                outcomes
            })
        })
        .collect();
    let mut running = Vec::new();
    for claimer in claimers {
        running.extend(claimer.await.expect("no panic"));
    }
    for canceller in cancellers {
        for (id, outcome) in canceller.await.expect("no panic") {
            let row: (String, bool, i32) =
                db.one(&format!("SELECT status, cancel_requested, attempts FROM jobs WHERE id = '{id}'")).await;
            match outcome {
                CancelOutcome::CancelledNow => {
                    assert_eq!(row, ("cancelled".to_owned(), true, 0));
                    assert!(!running.contains(&id));
                }
                CancelOutcome::PendingOnWorker => {
                    assert_eq!(row, ("running".to_owned(), true, 1));
                    assert!(running.contains(&id));
                }
                CancelOutcome::AlreadyTerminal => panic!("nobody ended {id}"),
            }
        }
    }
}
