//! What the queue goes through where it is operated: a transaction elsewhere that holds an old snapshot, an upgrade with
//! rows in the tables, a listener whose connection is dead and does not say so.

mod support;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use jobrequest::job::Cause;
use jobrequest::kinds::{Attempt, Executed, Executor, Registry};
use jobrequest::queue::{
    AttemptEnd, AttemptFailure, Channel, ClaimedJob, EnqueueOutcome, Error, Finish, ListFilter, Listener, NewJob,
    Queue, SchemaState, Settings, migrate,
};
use serde_json::{Value, json};
use sqlx::migrate::{Migration, Migrator};
use sqlx::{ConnectOptions, Connection};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use support::db::{Database, claim, job};
use support::proxy::{Proxy, Way};
use support::stage::{Act, PATIENCE, Running, Stage};

/// Succeeds at once, and notes when.
#[derive(Clone, Default)]
struct Noting(Arc<Mutex<Vec<Instant>>>);

impl Executor for Noting {
    fn kind(&self) -> &'static str {
        "test_kind"
    }

    fn execute<'a>(&'a self, _: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            self.0.lock().expect("not poisoned").push(Instant::now());
            Ok(Value::Null)
        })
    }
}

#[tokio::test]
async fn an_old_snapshot_held_elsewhere_does_not_slow_the_drain_down() {
    const JOBS: usize = 20_000;
    const PART: usize = 1_000;
    let db = Database::new().await;
    let queue = db.queue();
    for _ in 0..JOBS / PART {
        let jobs = vec![job(); PART];
        assert!(queue.enqueue_many(&jobs).await.iter().all(Result::is_ok));
    }
    let mut elsewhere = db.connect().await;
    sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM jobs")
        .execute(&mut elsewhere)
        .await
        .expect("it has a snapshot");
    let held = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
        AND state = 'idle in transaction' AND backend_xmin IS NOT NULL";
    assert_eq!(db.value::<i64>(held).await, 1, "nothing that ends from now on can be cleaned up");
    let noting = Noting::default();
    let worker = Running::start(&queue, Registry::new().with(noting.clone()), |b| b.concurrency(32));
    let started = Instant::now();
    while noting.0.lock().expect("not poisoned").len() < JOBS {
        assert!(started.elapsed() < 6 * PATIENCE, "{} jobs ran", noting.0.lock().expect("not poisoned").len());
        sleep(Duration::from_millis(20)).await;
    }
    worker.end().await;
    assert_eq!(db.value::<i64>(held).await, 1);
    let started = noting.0.lock().expect("not poisoned").clone();
    let (first, last) = (started[PART] - started[0], started[JOBS - 1] - started[JOBS - 1 - PART]);
    assert!(last < 5 * first, "the last thousand took {last:?}, the first {first:?}");
    // Once the snapshot is gone, it is cleaned up after soon, however large the table.
    let options: Vec<String> = db.value("SELECT reloptions FROM pg_class WHERE oid = 'jobs'::regclass").await;
    for wanted in ["autovacuum_vacuum_scale_factor", "autovacuum_vacuum_cost_delay"] {
        assert!(options.iter().any(|option| option.starts_with(wanted)), "{options:?}");
    }
}

#[tokio::test]
async fn statistics_that_know_of_no_running_job_make_no_statement_by_id_walk_the_table() {
    const JOBS: usize = 20_000;
    const HELD: usize = 500;
    let db = Database::new().await;
    // One session, whose statistics can be asked for.
    let queue = Queue::new(db.options(), Settings { max_connections: 1, ..Settings::default() });
    for _ in 0..JOBS / 1000 {
        let jobs = vec![job(); 1000];
        assert!(queue.enqueue_many(&jobs).await.iter().all(Result::is_ok));
    }
    db.run("ANALYZE jobs").await;
    let claimed = queue.fetch_many("worker", &["test_kind"], HELD).await.expect("claimed");
    let entries = async || {
        sqlx::query("SELECT pg_stat_force_next_flush()").execute(queue.pool()).await.expect("flushed");
        db.value::<i64>("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'jobs_pkey'").await
    };
    let mut before = entries().await;
    let mut by_id = async |what: &str| {
        let after = entries().await;
        let read = usize::try_from(after - before).expect("it grows");
        before = after;
        // Each row once or twice, and some of its older versions.
        assert!((HELD..HELD * 10).contains(&read), "{what} read {read} entries");
    };

    let leases: Vec<_> = claimed.iter().map(ClaimedJob::lease).collect();
    assert_eq!(queue.look_for_cancels(&leases).await.expect("answered").len(), HELD);
    by_id("the look for cancels").await;
    assert_eq!(queue.heartbeat(&leases).await.expect("answered").len(), HELD);
    by_id("the heartbeat").await;
    let end = |(n, job): (usize, ClaimedJob)| {
        let failure = AttemptFailure { cause: Cause::Passing, error: None, progress: None };
        (job, if n % 2 == 0 { AttemptEnd::Succeeded(Value::Null) } else { AttemptEnd::Failed(failure) })
    };
    let ends = claimed.into_iter().enumerate().map(end).collect();
    assert!(queue.finish_many(ends).await.iter().all(|end| matches!(end, Ok(Finish::Done(_)))));
    by_id("the ends").await;
}

#[tokio::test]
async fn a_listener_on_a_dead_connection_is_replaced_within_a_minute_and_polling_goes_on_meanwhile() {
    let db = Database::new().await;
    let queue = db.queue();
    let proxy = Proxy::before(&db.options()).await;
    let stage = Stage::new(Act::Succeed);
    stage.let_go(3);
    let (poll, listen) = (Duration::from_secs(2), proxy.options(db.options()));
    let worker = Running::start(&queue, stage.registry(), |b| b.poll(poll).listen(listen));
    queue.enqueue(&job()).await.expect("accepted");
    stage.until_started().await;
    let listens = "SELECT count(*) FROM pg_stat_activity \
        WHERE datname = current_database() AND state = 'idle' AND query LIKE 'LISTEN %'";
    let started = Instant::now();
    while db.value::<i64>(listens).await == 0 {
        assert!(started.elapsed() < PATIENCE, "nobody listens");
        sleep(Duration::from_millis(10)).await;
    }
    // Only the listener is cut off, and its connection stays: nobody tells it.
    proxy.set(Way::Silent);
    let (silent, connections) = (Instant::now(), proxy.connections());
    queue.enqueue(&job()).await.expect("accepted");
    stage.until_started().await;
    assert!(silent.elapsed() < 2 * poll, "the poll finds it: {:?}", silent.elapsed());
    while proxy.connections() == connections {
        assert!(silent.elapsed() < Duration::from_secs(60), "the listener believes in its connection");
        sleep(Duration::from_millis(50)).await;
    }
    proxy.set(Way::Open);
    queue.enqueue(&job()).await.expect("accepted");
    stage.until_started().await;
    worker.end().await;
}

#[tokio::test]
async fn a_listener_whose_first_request_is_not_answered_tries_again() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    proxy.swallow(b"LISTEN ");
    let listener = Listener::spawn(proxy.options(db.options()), &[Channel::Ready]);
    timeout(PATIENCE, listener.woken(Channel::Ready)).await.expect("it listens on another connection");
    assert!(proxy.has_seen_it() && proxy.connections() == 2);
}

/// The migrations, in the order in which they came: a database may have the first of them and none of the later ones.
const CAME: [i64; 3] = [1, 3, 2];

/// A database whose schema is made of these migrations alone.
async fn database_of(migrations: &[&Migration]) -> Database {
    let db = Database::empty().await;
    let mut migrator = Migrator::with_migrations(migrations.iter().map(|migration| (*migration).clone()).collect());
    migrator.dangerous_set_table_name("jobrequest_migrations");
    let mut connection = db.options().connect().await.expect("the server answers");
    migrator.run_direct(None, &mut connection, false).await.expect("each state of the schema was a released one");
    connection.close().await.expect("closed");
    db
}

/// Rows in every state, as the first schema holds them: with owner, sharer, key, kept key, lease, history, cancel.
const POPULATION: &str = "
    INSERT INTO jobs (id, kind, payload, status, attempts, run_at, idempotency_key, namespace, owner_uid, priority,
        locked_at, locked_by, claim_token, cancel_requested, finished_at, result, last_error, history)
    SELECT jobs_new_id(), 'test_kind', jsonb_build_object('n', n), status, attempts, now() + due, 'k' || n,
        CASE WHEN n % 2 = 0 THEN 'shop' END, CASE WHEN n % 2 = 0 THEN gen_random_uuid() END, n,
        CASE WHEN status = 'running' THEN now() - lease END, CASE WHEN status = 'running' THEN 'old' END,
        CASE WHEN status <> 'queued' THEN gen_random_uuid() END, n = 5,
        CASE WHEN status IN ('succeeded', 'failed_permanent', 'cancelled') THEN now() END,
        CASE WHEN status = 'succeeded' THEN jsonb '7' END, CASE WHEN status = 'retrying' THEN 'not yet' END, '[]'
    FROM (VALUES (1, 'queued', 0, interval '0', NULL::interval), (2, 'queued', 0, '1 h', NULL), (3, 'retrying', 1, '0', NULL),
        (4, 'running', 1, '0', '0'), (5, 'running', 2, '0', '1 h'), (6, 'running', 3, '0', '1 h'),
        (7, 'succeeded', 1, '0', NULL), (8, 'failed_permanent', 3, '0', NULL), (9, 'cancelled', 0, '0', NULL))
        AS s(n, status, attempts, due, lease);
    UPDATE jobs SET suspended = true WHERE priority = 2;
    INSERT INTO job_resources (uid, job_id, install, namespace, name)
    SELECT owner_uid, id, install, namespace, 'r' || priority FROM jobs WHERE owner_uid IS NOT NULL;
    INSERT INTO job_keys (install, namespace, idempotency_key, job_id, kind, payload_sha256, attempts, finished_at)
    VALUES ('default', '', 'kept', gen_random_uuid(), 'test_kind',
        sha256(convert_to(jsonb_build_object('n', 0)::text, 'UTF8')), 1, now())";

/// What the contract names of each row, in their order.
const CONTRACT: &str = "
    SELECT array_agg((SELECT jsonb_object_agg(key, value) FROM jsonb_each(to_jsonb(j)) WHERE key = ANY (
        '{id,kind,payload,status,attempts,max_attempts,last_error,run_at,locked_at,locked_by,cancel_requested,
          idempotency_key,created_at,updated_at,priority,suspended,namespace,owner_uid,result}'))::text ORDER BY priority)
    FROM jobs j";

#[tokio::test]
async fn a_populated_database_of_each_earlier_schema_is_migrated_with_its_rows_and_goes_on() {
    let newest = Migrator::new(std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations"))).await;
    let newest = newest.expect("they can be read");
    let numbers: BTreeSet<i64> = newest.iter().map(|migration| migration.version).collect();
    assert_eq!(numbers, BTreeSet::from(CAME), "each new migration is named as the last that came");
    let all: Vec<&Migration> =
        CAME.iter().map(|n| newest.iter().find(|migration| migration.version == *n).expect("asserted")).collect();
    for known in 1..all.len() {
        let db = database_of(&all[..known]).await;
        db.run(POPULATION).await;
        let before: Vec<String> = db.value(CONTRACT).await;
        let queue = db.queue();
        assert!(matches!(queue.schema_state().await, Ok(SchemaState::Behind(n)) if n == all.len() - known));
        migrate(&db.options()).await.expect("it applies to a populated database");
        assert!(matches!(queue.schema_state().await, Ok(SchemaState::Current)));
        assert_eq!(db.value::<Vec<String>>(CONTRACT).await, before, "after migration {known}");
        assert_eq!(queue.list(&ListFilter::default()).await.expect("all are readable").len(), 9);
        // Dead leases are ended, a living one stands, and what is due is claimed, highest priority first.
        assert_eq!(queue.recover_stale().await.expect("answered").total(), 2);
        assert_eq!([claim(&queue).await.attempt(), claim(&queue).await.attempt()], [2, 1]);
        let states: Vec<String> = db.value("SELECT array_agg(status ORDER BY priority) FROM jobs").await;
        let [running, failed] = ["running", "failed_permanent"];
        assert_eq!(
            states,
            [running, "queued", running, running, "cancelled", failed, "succeeded", failed, "cancelled"],
            "after migration {known}"
        );
        let keyed = |key: &str, n: i32| NewJob {
            idempotency_key: Some(key.to_owned()),
            ..NewJob::new("test_kind", json!({ "n": n }))
        };
        assert!(matches!(queue.enqueue(&keyed("k7", 7)).await, Ok(EnqueueOutcome::Existing(_))), "it succeeded");
        assert!(matches!(queue.enqueue(&keyed("k9", 9)).await, Ok(EnqueueOutcome::Created(_))), "it was cancelled");
        assert!(matches!(queue.enqueue(&keyed("kept", 0)).await, Ok(EnqueueOutcome::Existing(_))), "its row is gone");
        assert!(matches!(queue.enqueue(&keyed("kept", 1)).await, Err(Error::IdempotencyConflict { .. })));
        let owner: Uuid = db.value("SELECT owner_uid FROM jobs WHERE priority = 2").await;
        timeout(PATIENCE, queue.release(owner)).await.expect("it does not wait").expect("answered");
        assert_eq!(db.value::<String>("SELECT status FROM jobs WHERE priority = 2").await, "cancelled");
    }
}
