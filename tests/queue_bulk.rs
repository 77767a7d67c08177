//! Enqueue in bulk promises what the single one does, item by item, and is not paid for item by item.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use jobrequest::job::Cause;
use jobrequest::queue::{ENQUEUE_CHUNK, EnqueueOutcome, Error, NewJob, Queue, Settings};
use serde_json::json;
use sqlx::Connection;
use tokio::sync::Barrier;
use uuid::Uuid;

use support::db::{Database, claim, claimed, failure, job, job_of};
use support::proxy::{Proxy, Way};

fn keyed(key: &str, n: i32) -> NewJob {
    NewJob { idempotency_key: Some(key.to_owned()), ..NewJob::new("test_kind", json!({ "n": n })) }
}

fn plain(jobs: usize) -> Vec<NewJob> {
    (0..jobs).map(|n| NewJob::new("test_kind", json!({ "n": n }))).collect()
}

/// The answers in one word each: `new`, `old 3` for sharing the row that item 3 made, `conflict 3`, `refused field`.
async fn enqueue(queue: &Queue, new: &[NewJob]) -> (Vec<String>, Vec<Uuid>) {
    let answers = queue.enqueue_many(new).await;
    assert_eq!(answers.len(), new.len());
    let mut made = Vec::new();
    for answer in &answers {
        made.push(match answer {
            Ok(EnqueueOutcome::Created(id)) => *id,
            _ => Uuid::nil(),
        });
    }
    let by =
        |id: &Uuid| made.iter().position(|made| made == id).map_or_else(|| "before".to_owned(), |at| at.to_string());
    let word = |answer: &Result<EnqueueOutcome, Error>| match answer {
        Ok(EnqueueOutcome::Created(_)) => "new".to_owned(),
        Ok(EnqueueOutcome::Existing(id)) => format!("old {}", by(id)),
        Err(Error::IdempotencyConflict { holder }) => format!("conflict {}", by(holder)),
        Err(Error::KeyBeingFreed { holder }) => format!("freed {}", by(holder)),
        Err(Error::PayloadInvalid { field, .. }) => format!("refused {field}"),
        Err(other) => other.to_string(),
    };
    (answers.iter().map(word).collect(), made)
}

async fn count(db: &Database) -> i64 {
    db.value("SELECT count(*) FROM jobs").await
}

#[tokio::test]
async fn ten_thousand_jobs_are_enqueued_each_once_and_run_in_the_order_in_which_they_came() {
    let db = Database::new().await;
    let queue = db.queue();
    let (answers, ids) = enqueue(&queue, &plain(10_000)).await;
    assert!(answers.iter().all(|answer| answer == "new"));
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 10_000);
    assert!(ids.is_sorted(), "ids are in the order of the jobs");
    let sql = "SELECT array_agg((payload ->> 'n')::int ORDER BY id) FROM jobs";
    assert_eq!(db.value::<Vec<i32>>(sql).await, (0..10_000).collect::<Vec<i32>>());
    assert!(queue.enqueue_many(&[]).await.is_empty());
}

#[tokio::test]
async fn a_row_made_in_bulk_is_the_row_that_a_single_enqueue_makes() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.install = "theirs".to_owned());
    let run_at: DateTime<Utc> = "2026-12-24T08:00:00.123456789Z".parse().expect("a time");
    let special = NewJob {
        max_attempts: 7,
        run_at: Some(run_at),
        priority: -9,
        timeout_seconds: 86_400,
        suspended: true,
        last_retry: Some("1".to_owned()),
        ..NewJob::new("other_kind", json!({"é": [1.5, null, "\u{1}\\"], "": {}}))
    };
    for (new, other_key) in [(job(), None), (special.clone(), None), (keyed("k", 1), Some("l".to_owned()))] {
        let row = async |id: Uuid| -> String {
            let own = "'id', 'created_at', 'updated_at', 'run_at', 'idempotency_key'";
            let sql = format!(
                "SELECT (to_jsonb(j) - ARRAY[{own}] || jsonb_build_object('waits', run_at - created_at))::text \
                 FROM jobs j WHERE id = '{id}'"
            );
            db.value(&sql).await
        };
        let single = queue.enqueue(&new).await.expect("accepted").id();
        let (_, alone) = enqueue(&queue, &[NewJob { idempotency_key: other_key.clone(), ..new.clone() }]).await;
        let other_key = other_key.map(|key| key + "2");
        let (_, with) = enqueue(&queue, &[NewJob { idempotency_key: other_key, ..new.clone() }, special.clone()]).await;
        if new.run_at.is_none() {
            assert_eq!((row(single).await, row(single).await), (row(alone[0]).await, row(with[0]).await));
        }
        for id in [single, alone[0], with[0]] {
            let job = queue.get(id).await.expect("it is there");
            assert_eq!((job.install.as_str(), job.kind.as_str(), job.priority), ("theirs", &*new.kind, new.priority));
            assert_eq!((job.max_attempts, job.timeout_seconds), (new.max_attempts, new.timeout_seconds));
            assert_eq!((job.suspended, &job.last_retry), (new.suspended, &new.last_retry));
            assert_eq!(job.wanted_run_at.map(|at| at.timestamp_micros()), new.run_at.map(|at| at.timestamp_micros()));
        }
    }
}

#[tokio::test]
async fn a_bad_item_is_refused_by_its_field_and_costs_the_others_nothing() {
    let db = Database::new().await;
    let queue = db.queue();
    let (owned, _) = job_of("a");
    let batch = [
        job(),
        NewJob::new("test_kind", json!({"subject": "a\0b"})),
        keyed("k", 1),
        NewJob { priority: 1001, ..job() },
        NewJob { idempotency_key: Some(String::new()), ..job() },
        owned,
        NewJob::new("No Kind", json!({})),
        job(),
    ];
    let (answers, _) = enqueue(&queue, &batch).await;
    let refused =
        ["refused payload.subject", "refused priority", "refused idempotencyKey", "refused owner", "refused kind"];
    assert_eq!(answers, ["new", refused[0], "new", refused[1], refused[2], refused[3], refused[4], "new"]);
    assert_eq!(count(&db).await, 3);
    assert_eq!(enqueue(&queue, &batch[1..2]).await.0, [refused[0]]);
}

#[tokio::test]
async fn an_item_that_only_the_database_can_refuse_costs_the_others_nothing() {
    let db = Database::new().await;
    let queue = db.queue();
    db.run("ALTER TABLE jobs ADD CONSTRAINT stricter CHECK (payload ->> 'n' IS DISTINCT FROM '3')").await;
    let (answers, _) = enqueue(&queue, &plain(6)).await;
    let said = "database: refused by constraint stricter";
    assert_eq!(answers, ["new", "new", "new", said, "new", "new"]);
    assert_eq!(count(&db).await, 5);
    let batch = [keyed("a", 1), keyed("b", 3), keyed("a", 1), keyed("c", 1)];
    assert_eq!(enqueue(&queue, &batch).await.0, ["new", said, "old 0", "new"]);
}

#[tokio::test]
async fn of_items_with_one_key_the_first_makes_the_row_and_the_others_share_it_or_conflict() {
    let db = Database::new().await;
    let queue = db.queue();
    let other_kind = NewJob { kind: "other_kind".to_owned(), ..keyed("b", 1) };
    let batch = [keyed("b", 1), job(), keyed("a", 1), keyed("b", 1), keyed("b", 2), keyed("a", 1), other_kind, job()];
    let (answers, _) = enqueue(&queue, &batch).await;
    assert_eq!(answers, ["new", "new", "new", "old 0", "conflict 0", "old 2", "conflict 0", "new"]);
    assert_eq!(count(&db).await, 4);
    let (answers, _) = enqueue(&queue, &batch).await;
    let again =
        ["old before", "new", "old before", "old before", "conflict before", "old before", "conflict before", "new"];
    assert_eq!(answers, again);
}

#[tokio::test]
async fn a_key_is_asked_of_the_row_that_holds_it_in_whatever_state_and_of_the_kept_key_after_it() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::from_secs(1800));
    let succeeded = claimed(&queue, &keyed("succeeded", 1)).await;
    queue.mark_succeeded(succeeded, &json!(1)).await.map(drop).expect("answered");
    let purged = claimed(&queue, &keyed("purged", 1)).await;
    let id = purged.id();
    queue.mark_succeeded(purged, &json!(1)).await.map(drop).expect("answered");
    db.run(&format!("UPDATE jobs SET finished_at = now() - interval '1 h' WHERE id = '{id}'")).await;
    assert_eq!(queue.purge().await.expect("answered").jobs, 1);
    let failed = claimed(&queue, &keyed("failed", 1)).await;
    queue.mark_failed_or_retry(failed, &failure(Cause::Permanent)).await.map(drop).expect("answered");
    let ending = claimed(&queue, &keyed("ending", 1)).await;
    queue.request_cancel(ending.id()).await.expect("answered");
    let keys = ["succeeded", "purged", "failed", "ending"];
    let same: Vec<NewJob> = keys.iter().map(|key| keyed(key, 1)).collect();
    assert_eq!(enqueue(&queue, &same).await.0, ["old before", "old before", "new", "freed before"]);
    let other: Vec<NewJob> = keys.iter().map(|key| keyed(key, 2)).collect();
    let conflicts = ["conflict before", "conflict before", "conflict before", "freed before"];
    assert_eq!(enqueue(&queue, &other).await.0, conflicts);
    assert!(matches!(&queue.enqueue_many(&same[1..2]).await[0], Ok(EnqueueOutcome::Existing(holder)) if *holder == id));
    queue.finalize_cancelled(ending).await.map(drop).expect("answered");
    assert_eq!(enqueue(&queue, &other[3..]).await.0, ["new"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_with_the_same_keys_in_different_orders_wait_for_each_other_and_make_one_row_a_key() {
    let db = Database::new().await;
    // Each insert takes its time, so that the batches meet.
    db.run(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.001); RETURN NEW; END $$; \
         CREATE TRIGGER slow BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION slow()",
    )
    .await;
    let queue = db.queue_with(|settings| settings.max_connections = 4);
    let mut batch: Vec<NewJob> = (0..300).map(|n| keyed(&format!("k{n}"), n)).collect();
    let start = Arc::new(Barrier::new(4));
    let mut tasks = Vec::new();
    for _ in 0..4 {
        batch.rotate_left(77);
        batch.reverse();
        let (queue, start, batch) = (queue.clone(), Arc::clone(&start), batch.clone());
        tasks.push(tokio::spawn(async move {
            start.wait().await;
            queue.enqueue_many(&batch).await
        }));
    }
    let mut created = 0;
    for task in tasks {
        for answer in task.await.expect("no panic") {
            created += usize::from(matches!(answer.expect("no deadlock"), EnqueueOutcome::Created(_)));
        }
    }
    assert_eq!((created, count(&db).await), (300, 300));
}

#[tokio::test]
async fn a_purge_that_has_not_committed_hides_no_key_from_a_batch() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.retention = Duration::ZERO);
    let job = claimed(&queue, &keyed("k", 1)).await;
    let id = job.id();
    queue.mark_succeeded(job, &json!(1)).await.map(drop).expect("answered");
    db.run("UPDATE jobs SET finished_at = now() - interval '1 h'").await;
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
    let during = queue.enqueue_many(&[keyed("k", 1), keyed("l", 1)]).await;
    assert!(
        matches!(&during[..], [Ok(EnqueueOutcome::Existing(holder)), Ok(EnqueueOutcome::Created(_))] if *holder == id)
    );
    gate.rollback().await.expect("released");
    assert_eq!(purge.await.expect("no panic").jobs, 1);
    assert!(
        matches!(&queue.enqueue_many(&[keyed("k", 1)]).await[0], Ok(EnqueueOutcome::Existing(holder)) if *holder == id)
    );
    assert_eq!(count(&db).await, 1);
}

#[tokio::test]
async fn a_row_that_somebody_holds_does_not_delay_a_batch_that_asks_for_its_key() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&keyed("k", 1)).await.expect("accepted").id();
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(id).execute(&mut *tx).await.expect("held");
    assert_eq!(enqueue(&queue, &[keyed("k", 1), keyed("l", 1)]).await.0, ["old before", "new"]);
    tx.rollback().await.expect("released");
}

#[tokio::test]
async fn a_thousand_jobs_cost_one_statement_and_one_more_when_keys_are_held() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings { max_connections: 1, ..Settings::default() });
    let keyed: Vec<NewJob> = (0..1000).map(|n| keyed(&format!("k{n}"), n)).collect();
    // The connection is there, and its statements are prepared.
    queue.enqueue_many(&plain(1)).await;
    queue.enqueue_many(&keyed[..1]).await;
    queue.enqueue_many(&keyed[..1]).await;
    for (what, batch, statements) in [
        ("plain", plain(1000), 1),
        ("keys that are free", keyed[1..].to_vec(), 1),
        ("keys that are held", keyed.clone(), 2),
        ("ten thousand", plain(10 * ENQUEUE_CHUNK), 10),
    ] {
        proxy.take_requests();
        assert!(queue.enqueue_many(&batch).await.iter().all(Result::is_ok), "{what}");
        assert_eq!(proxy.take_requests(), statements, "{what}");
    }
}

#[tokio::test]
async fn one_job_costs_one_round_trip_with_a_key_too_and_four_for_a_resource() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings { max_connections: 1, ..Settings::default() });
    for prepared in [job(), keyed("k", 1), job_of("a").0] {
        queue.enqueue(&prepared).await.expect("accepted");
    }
    for (what, new, round_trips) in
        [("plain", job(), 1), ("with a key", keyed("l", 1), 1), ("begin, insert, no release, commit", job_of("b").0, 4)]
    {
        proxy.take_requests();
        assert!(matches!(queue.enqueue(&new).await, Ok(EnqueueOutcome::Created(_))), "{what}");
        assert_eq!(proxy.take_requests(), round_trips, "{what}");
    }
}

#[tokio::test]
async fn a_key_that_the_table_itself_refuses_is_looked_for_again() {
    let db = Database::new().await;
    let queue = db.queue();
    // As it does for a key that retention kept between the statement's look and its insert.
    db.run(
        "CREATE SEQUENCE refusals; \
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF nextval('refusals') % 2 = 1 THEN \
                 RAISE unique_violation USING CONSTRAINT = 'jobs_idempotency_key_uidx'; END IF; \
             RETURN NEW; END $$; \
         CREATE TRIGGER refuse BEFORE INSERT ON jobs FOR EACH ROW \
             WHEN (NEW.idempotency_key = 'late') EXECUTE FUNCTION refuse()",
    )
    .await;
    assert!(matches!(queue.enqueue(&keyed("late", 1)).await, Ok(EnqueueOutcome::Created(_))));
    assert_eq!(db.value::<i64>("SELECT last_value FROM refusals").await, 2, "refused, then taken");
    db.run("DELETE FROM jobs").await;
    let batch = [job(), keyed("late", 1), keyed("k", 1), keyed("late", 1), keyed("late", 2)];
    assert_eq!(enqueue(&queue, &batch).await.0, ["new", "new", "new", "old 1", "conflict 1"]);
    assert_eq!(db.value::<i64>("SELECT last_value FROM refusals").await, 4, "refused, then taken");
    assert_eq!(count(&db).await, 3);
}

#[tokio::test]
async fn an_enqueue_whose_connection_breaks_is_sent_again_and_makes_no_second_row() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    let marked = |key: Option<&str>| NewJob {
        payload: json!({"mark": "lost-reply"}),
        idempotency_key: key.map(str::to_owned),
        ..job()
    };
    for (rows, key) in [(1, None), (2, Some("k"))] {
        proxy.lose_the_reply_to(b"lost-reply");
        let answer = queue.enqueue(&marked(key)).await;
        assert!(proxy.has_seen_it() && matches!(answer, Ok(EnqueueOutcome::Created(_))), "{answer:?}");
        assert_eq!(count(&db).await, rows);
    }
    for (rows, key) in [(12, None), (13, Some("l"))] {
        proxy.lose_the_reply_to(b"lost-reply");
        let (answers, _) = enqueue(&queue, &vec![marked(key); 10]).await;
        assert!(proxy.has_seen_it() && answers[0] == "new", "{answers:?}");
        assert!(answers[1..].iter().all(|answer| answer == if key.is_none() { "new" } else { "old 0" }), "{answers:?}");
        assert_eq!(count(&db).await, rows);
    }
}

#[tokio::test]
async fn after_a_chunk_that_the_database_did_not_take_the_rest_is_answered_and_not_tried() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let limits = Settings { time_limit: Duration::from_millis(500), ..Settings::default() };
    let queue = Queue::new(proxy.options(db.options()), limits);
    queue.enqueue_many(&plain(1)).await;
    proxy.set(Way::Silent);
    let mut batch = plain(3 * ENQUEUE_CHUNK);
    batch[2].priority = -2000;
    let started = std::time::Instant::now();
    let answers = queue.enqueue_many(&batch).await;
    assert!(started.elapsed() < Duration::from_secs(3), "one time limit, not three");
    assert_eq!(answers.len(), batch.len());
    assert!(matches!(answers[2], Err(Error::PayloadInvalid { .. })));
    let passing = answers.iter().filter(|answer| answer.as_ref().is_err_and(Error::is_passing)).count();
    assert_eq!(passing, batch.len() - 1);
    proxy.set(Way::Open);
    drop(claim(&db.queue()).await);
}

#[tokio::test]
async fn many_large_payloads_go_in_statements_of_bounded_size() {
    let db = Database::new().await;
    let queue = db.queue();
    let large = NewJob::new("test_kind", json!({"text": "x".repeat(1_000_000)}));
    let (answers, _) = enqueue(&queue, &vec![large; 40]).await;
    assert!(answers.iter().all(|answer| answer == "new"));
    assert_eq!(db.value::<i64>("SELECT count(DISTINCT xmin::text) FROM jobs").await, 3, "16 MiB each");
}
