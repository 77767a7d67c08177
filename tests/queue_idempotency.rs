//! Idempotency: one row per resource and per live or succeeded key, and nothing refused by the database that could
//! have been refused before.

mod support;

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use jobrequest::job::{Cause, Status};
use jobrequest::queue::{EnqueueOutcome, Error, Held, NewJob, Owner, Queue, RetryOutcome};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};
use tokio::sync::Barrier;
use uuid::Uuid;

use support::db::{Database, claim, claimed, failure, job};

fn keyed(key: &str) -> NewJob {
    NewJob { idempotency_key: Some(key.to_owned()), ..job() }
}

fn in_namespace(namespace: &str, new: NewJob) -> NewJob {
    let owner = Owner { uid: Uuid::new_v4(), namespace: namespace.to_owned(), name: "a".to_owned() };
    NewJob { owner: Some(owner), ..new }
}

async fn created(queue: &Queue, new: &NewJob) -> Uuid {
    match queue.enqueue(new).await.expect("accepted") {
        EnqueueOutcome::Created(id) => id,
        EnqueueOutcome::Existing(id) => panic!("it shares {id}"),
    }
}

/// Enqueues this and lets it succeed.
async fn succeeded(queue: &Queue, new: &NewJob) -> Uuid {
    let job = claimed(queue, new).await;
    let id = job.id();
    queue.mark_succeeded(job, &json!(1)).await.map(drop).expect("answered");
    id
}

async fn count(db: &Database) -> i64 {
    db.value("SELECT count(*) FROM jobs").await
}

#[tokio::test]
async fn the_same_key_kind_and_payload_share_a_row_while_it_lives_and_after_it_succeeded() {
    let db = Database::new().await;
    let queue = db.queue();
    let new = NewJob { payload: json!({"a": 1, "b": {"y": 1, "x": [1.5]}}), ..keyed("k") };
    let other_order = NewJob { payload: json!({"b": {"x": [1.5], "y": 1}, "a": 1}), priority: 7, ..keyed("k") };
    let id = created(&queue, &new).await;
    assert_eq!(queue.enqueue(&other_order).await.expect("accepted"), EnqueueOutcome::Existing(id));
    let job = claim(&queue).await;
    assert_eq!(queue.enqueue(&new).await.expect("accepted"), EnqueueOutcome::Existing(id));
    queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.map(drop).expect("answered");
    assert_eq!(queue.enqueue(&new).await.expect("accepted"), EnqueueOutcome::Existing(id));
    db.make_due(id).await;
    queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
    assert_eq!(queue.enqueue(&new).await.expect("accepted"), EnqueueOutcome::Existing(id));
    assert_eq!(count(&db).await, 1);
}

#[tokio::test]
async fn the_same_key_with_another_kind_or_payload_is_a_conflict() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = created(&queue, &keyed("k")).await;
    let before = db.row(id).await;
    let others = [
        NewJob { payload: json!({"n": 2}), ..keyed("k") },
        NewJob { payload: json!({"n": "1"}), ..keyed("k") },
        NewJob { kind: "other_kind".to_owned(), ..keyed("k") },
    ];
    for other in &others {
        let answer = queue.enqueue(other).await;
        assert!(matches!(answer, Err(Error::IdempotencyConflict { holder }) if holder == id), "{answer:?}");
    }
    assert_eq!(db.row(id).await, before);
    queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
    for other in &others {
        assert!(matches!(queue.enqueue(other).await, Err(Error::IdempotencyConflict { .. })), "it succeeded");
    }
}

#[tokio::test]
async fn a_key_belongs_to_one_namespace_of_one_install() {
    let db = Database::new().await;
    let queue = db.queue();
    let theirs = db.queue_with(|settings| settings.install = "theirs".to_owned());
    let without = created(&queue, &keyed("k")).await;
    let shop = created(&queue, &in_namespace("shop", keyed("k"))).await;
    let blog = created(&queue, &in_namespace("blog", keyed("k"))).await;
    let install = created(&theirs, &in_namespace("shop", keyed("k"))).await;
    let mut ids = vec![without, shop, blog, install];
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    let again = queue.enqueue(&in_namespace("shop", keyed("k"))).await.expect("accepted");
    assert_eq!(again, EnqueueOutcome::Existing(shop));
}

#[tokio::test]
async fn jobs_without_a_key_are_each_their_own() {
    let db = Database::new().await;
    let queue = db.queue();
    assert_ne!(created(&queue, &job()).await, created(&queue, &job()).await);
}

#[tokio::test]
async fn a_failed_or_cancelled_job_frees_its_key_and_stays() {
    let db = Database::new().await;
    let queue = db.queue();
    let failed = claimed(&queue, &keyed("k")).await;
    let failed_id = failed.id();
    queue.mark_failed_or_retry(failed, &failure(Cause::Permanent)).await.map(drop).expect("answered");
    let cancelled = created(&queue, &NewJob { payload: json!({"n": 2}), ..keyed("k") }).await;
    queue.request_cancel(cancelled).await.expect("answered");
    let third = created(&queue, &keyed("k")).await;
    assert_eq!(claim(&queue).await.id(), third);
    let statuses = [db.status(failed_id).await, db.status(cancelled).await];
    assert_eq!(statuses, ["failed_permanent", "cancelled"]);
}

#[tokio::test]
async fn a_key_whose_job_is_being_cancelled_is_neither_shared_nor_refused_for_ever() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &keyed("k")).await;
    let id = job.id();
    queue.request_cancel(id).await.expect("answered");
    let answer = queue.enqueue(&keyed("k")).await.expect_err("it has to wait");
    assert!(matches!(answer, Error::KeyBeingFreed { holder } if holder == id) && answer.is_passing());
    queue.finalize_cancelled(job).await.map(drop).expect("answered");
    assert_ne!(created(&queue, &keyed("k")).await, id);
}

#[tokio::test]
async fn a_succeeded_jobs_key_outlives_its_row() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::ZERO);
    let new = in_namespace("shop", keyed("k"));
    let id = succeeded(&queue, &new).await;
    queue.acknowledge(new.owner.as_ref().expect("it has one").uid, i64::from(i32::MAX)).await.expect("answered");
    db.run("UPDATE jobs SET finished_at = now() - interval '1 h', mirror_due = false").await;
    let purged = queue.purge().await.expect("answered");
    assert_eq!((purged.jobs, purged.keys, count(&db).await), (1, 0, 0));
    let again = in_namespace("shop", keyed("k"));
    assert_eq!(queue.enqueue(&again).await.expect("accepted"), EnqueueOutcome::Existing(id));
    let held = queue.held(again.owner.expect("it has one").uid).await.expect("answered");
    assert!(matches!(held, Held::KeptKey { job_id, attempts: 1, .. } if job_id == id), "{held:?}");
    let other = in_namespace("shop", NewJob { payload: json!({"n": 2}), ..keyed("k") });
    assert!(matches!(queue.enqueue(&other).await, Err(Error::IdempotencyConflict { holder }) if holder == id));
    created(&queue, &in_namespace("blog", keyed("k"))).await;
    assert_eq!(count(&db).await, 1);
}

#[tokio::test]
async fn plain_sql_may_not_take_a_key_that_outlives_its_row() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::ZERO);
    succeeded(&queue, &keyed("k")).await;
    db.run("UPDATE jobs SET finished_at = now() - interval '1 h'").await;
    assert_eq!(queue.purge().await.expect("answered").jobs, 1);
    let insert = |install: &str| {
        format!(
            "INSERT INTO jobs (kind, payload, idempotency_key, install) VALUES ('test_kind', '{{}}', 'k', '{install}')"
        )
    };
    let mut connection = db.connect().await;
    let refused =
        sqlx::raw_sql(AssertSqlSafe(insert("default"))).execute(&mut connection).await.expect_err("it is held");
    let refused = refused.into_database_error().expect("by the database");
    assert!(refused.is_unique_violation() && refused.constraint() == Some("jobs_idempotency_key_uidx"), "{refused:?}");
    db.run(&insert("other")).await;
    assert_eq!(count(&db).await, 1);
}

#[tokio::test]
async fn the_purge_finds_what_has_ended_wherever_it_stands() {
    let db = Database::new().await;
    let queue = db.queue();
    // Live, made long ago; live, made just now; and ids that are no times at all.
    db.run(
        "INSERT INTO jobs (id, kind, payload) \
         SELECT overlay(jobs_new_id()::text PLACING '018f0000-0000' FROM 1 FOR 13)::uuid, 'test_kind', '{}' \
         FROM generate_series(1, 12000); \
         INSERT INTO jobs (kind, payload) SELECT 'test_kind', '{}' FROM generate_series(1, 12000); \
         INSERT INTO jobs (id, kind, payload) SELECT gen_random_uuid(), 'test_kind', '{}' FROM generate_series(1, 500); \
         UPDATE jobs SET status = 'succeeded', attempts = 1, finished_at = now() - interval '8 days' \
         WHERE right(id::text, 1) IN ('0', '1')",
    )
    .await;
    let (ended,): (i64,) = db.one("SELECT count(*) FROM jobs WHERE status = 'succeeded'").await;
    let mut removed = 0;
    loop {
        let purged = queue.purge().await.expect("answered").jobs;
        assert!(purged <= 500);
        if purged == 0 {
            break;
        }
        removed += purged;
    }
    assert_eq!(removed, u64::try_from(ended).expect("a count"));
    assert_eq!(count(&db).await, 24_500 - ended);
}

#[tokio::test]
async fn a_failed_or_cancelled_jobs_key_does_not_outlive_its_row() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::ZERO);
    let id = created(&queue, &keyed("k")).await;
    queue.request_cancel(id).await.expect("answered");
    db.run("UPDATE jobs SET finished_at = now() - interval '1 h'").await;
    assert_eq!(queue.purge().await.expect("answered").jobs, 1);
    assert_ne!(created(&queue, &NewJob { payload: json!({"n": 2}), ..keyed("k") }).await, id);
}

#[tokio::test]
async fn a_kept_key_goes_when_its_own_time_is_over() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| {
        settings.retention = Duration::ZERO;
        settings.key_retention = Some(Duration::from_secs(7200));
    });
    succeeded(&queue, &keyed("k")).await;
    db.run("UPDATE jobs SET finished_at = now() - interval '1 h'").await;
    assert_eq!(queue.purge().await.expect("answered").jobs, 1);
    assert!(matches!(queue.enqueue(&keyed("k")).await, Ok(EnqueueOutcome::Existing(_))));
    db.run("UPDATE job_keys SET finished_at = now() - interval '3 h'").await;
    assert_eq!(queue.purge().await.expect("answered").keys, 1);
    created(&queue, &keyed("k")).await;
}

#[tokio::test]
async fn a_purge_between_two_looks_of_an_enqueue_does_not_run_succeeded_work_again() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::ZERO);
    let id = succeeded(&queue, &keyed("k")).await;
    db.run("UPDATE jobs SET finished_at = now() - interval '1 h'").await;
    // The purge has deleted the row and written the key, and has not committed; the enqueue waits for it.
    db.run(
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$; \
         CREATE TRIGGER hold AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION hold()",
    )
    .await;
    let mut connection = db.connect().await;
    let mut gate = connection.begin().await.expect("begun");
    sqlx::query("SELECT pg_advisory_xact_lock(1)").execute(&mut *gate).await.expect("locked");
    let purge = tokio::spawn({
        let queue = queue.clone();
        async move { queue.purge().await.expect("answered") }
    });
    db.until_blocked(1).await;
    let enqueue = tokio::spawn({
        let queue = queue.clone();
        async move { queue.enqueue(&keyed("k")).await.expect("accepted") }
    });
    db.until_blocked(2).await;
    gate.rollback().await.expect("released");
    assert_eq!(purge.await.expect("no panic").jobs, 1);
    assert_eq!(enqueue.await.expect("no panic"), EnqueueOutcome::Existing(id));
    assert_eq!(count(&db).await, 0);
}

#[tokio::test]
async fn a_retry_is_refused_when_another_job_has_taken_the_key_even_if_its_row_is_gone() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::from_secs(1800));
    let failed = created(&queue, &keyed("k")).await;
    queue.request_cancel(failed).await.expect("answered");
    let heir = created(&queue, &keyed("k")).await;
    assert_eq!(queue.retry(failed, "1").await.expect("answered"), RetryOutcome::KeyTaken);
    assert_eq!(queue.retry(failed, "1").await.expect("answered"), RetryOutcome::AlreadyUsed, "it has its answer");
    let before = db.row(failed).await;
    assert_eq!(queue.retry_by_hand(failed).await.expect("answered"), RetryOutcome::KeyTaken);
    assert_eq!(db.row(failed).await, before);
    queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
    assert_eq!(queue.retry(failed, "2").await.expect("answered"), RetryOutcome::KeyTaken);
    db.run(&format!("UPDATE jobs SET finished_at = now() - interval '1 h' WHERE id = '{heir}'")).await;
    assert_eq!(queue.purge().await.expect("answered").jobs, 1);
    assert_eq!(queue.retry(failed, "3").await.expect("answered"), RetryOutcome::KeyTaken);
    let job = queue.get(failed).await.expect("it is there");
    assert_eq!((job.state.status(), job.last_retry.as_deref()), (Status::Cancelled, Some("3")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_enqueues_of_one_key_at_once_one_makes_the_row() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.max_connections = 16);
    let start = Arc::new(Barrier::new(16));
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let (queue, start) = (queue.clone(), Arc::clone(&start));
            tokio::spawn(async move {
                start.wait().await;
                queue.enqueue(&in_namespace("shop", keyed("k"))).await.expect("accepted")
            })
        })
        .collect();
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.expect("no panic"));
    }
    let made = outcomes.iter().filter(|outcome| matches!(outcome, EnqueueOutcome::Created(_))).count();
    assert_eq!((made, count(&db).await), (1, 1));
    assert!(outcomes.iter().all(|outcome| outcome.id() == outcomes[0].id()));
    assert_eq!(db.value::<i64>("SELECT count(*) FROM job_resources").await, 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resource_that_is_enqueued_again_or_many_times_at_once_has_one_row() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.max_connections = 8);
    let new = in_namespace("shop", job());
    let start = Arc::new(Barrier::new(8));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (queue, start, new) = (queue.clone(), Arc::clone(&start), new.clone());
            tokio::spawn(async move {
                start.wait().await;
                queue.enqueue(&new).await.expect("accepted").id()
            })
        })
        .collect();
    let mut ids = Vec::new();
    for task in tasks {
        ids.push(task.await.expect("no panic"));
    }
    ids.dedup();
    assert_eq!((ids.len(), count(&db).await), (1, 1));
    queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
    assert_eq!(queue.enqueue(&new).await.expect("accepted"), EnqueueOutcome::Existing(ids[0]));
}

#[tokio::test]
async fn an_enqueue_that_meets_the_holders_cancel_makes_a_row_of_its_own() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = created(&queue, &keyed("k")).await;
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    let sql = "UPDATE jobs SET status = 'cancelled', finished_at = now() WHERE id = $1";
    sqlx::query(sql).bind(id).execute(&mut *tx).await.expect("cancelled");
    let enqueue = tokio::spawn({
        let queue = queue.clone();
        async move { queue.enqueue(&keyed("k")).await.expect("accepted") }
    });
    db.until_blocked(1).await;
    tx.commit().await.expect("committed");
    assert!(matches!(enqueue.await.expect("no panic"), EnqueueOutcome::Created(other) if other != id));
}

#[tokio::test]
async fn what_the_database_would_refuse_is_refused_before_it_is_asked() {
    // Nobody listens there: whoever asks gets an error of the database.
    let nowhere = sqlx::postgres::PgConnectOptions::new().host("127.0.0.1").port(1);
    let queue = Queue::new(nowhere, Default::default());
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let hex: String = (0..375).map(|_| Uuid::new_v4().simple().to_string()).collect();
    let at = |text: &str| Some(text.parse::<DateTime<Utc>>().expect("a time"));
    let with = |payload: Value| NewJob { payload, ..job() };
    let refused: Vec<(&str, NewJob)> = vec![
        ("payload.subject", with(json!({"subject": "a\0b"}))),
        ("payload", with(json!({"a\0b": 1}))),
        ("payload.list[1]", with(json!({"list": ["a", "\0"]}))),
        ("payload.body", with(json!({"body": deep}))),
        ("payload", with(json!("x".repeat(1024 * 1024)))),
        ("idempotencyKey", keyed("")),
        ("idempotencyKey", keyed(&hex[..6000])),
        ("idempotencyKey", keyed(&"é".repeat(256))),
        ("idempotencyKey", keyed("a\0b")),
        ("kind", NewJob::new("Not a name", json!({}))),
        ("maxAttempts", NewJob { max_attempts: 0, ..job() }),
        ("maxAttempts", NewJob { max_attempts: 101, ..job() }),
        ("priority", NewJob { priority: 1001, ..job() }),
        ("timeoutSeconds", NewJob { timeout_seconds: 0, ..job() }),
        ("timeoutSeconds", NewJob { timeout_seconds: 86_401, ..job() }),
        ("runAt", NewJob { run_at: Some(DateTime::<Utc>::MIN_UTC), ..job() }),
        ("runAt", NewJob { run_at: Some(DateTime::<Utc>::MAX_UTC), ..job() }),
        ("runAt", NewJob { run_at: at("+10000-01-01T00:00:00Z"), ..job() }),
        ("lastRetry", NewJob { last_retry: Some("x".repeat(256)), ..job() }),
    ];
    for (name, new) in refused {
        match queue.enqueue(&new).await {
            Err(Error::PayloadInvalid { field, problem }) => {
                assert!(field.starts_with(name), "{field}, not {name}");
                assert!(problem.len() < 200 && !problem.contains('\0'), "{problem}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn the_longest_key_and_the_deepest_payload_are_taken() {
    let db = Database::new().await;
    let queue = db.queue();
    // Four bytes a character and nothing for compression to gain by.
    let key: String =
        (0..255).map(|_| char::from_u32(0x2_0000 + (rand::random::<u32>() % 0xa000)).expect("a character")).collect();
    let deep = (0..98).fold(json!(1), |inner, _| json!([inner]));
    let new = in_namespace(&"n".repeat(63), NewJob { payload: json!({"body": deep}), ..keyed(&key) });
    let id = created(&queue, &new).await;
    assert_eq!(claim(&queue).await.id(), id);
    assert_eq!(queue.get(id).await.expect("it is there").idempotency_key.as_deref(), Some(key.as_str()));
}
