//! PgBouncer in transaction mode before Postgres, as installed: four servers per database, shared by all clients, and no
//! settings beyond the mode. `make test` runs the queue's and the worker's own tests through it too.

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use jobrequest::queue::{Error, NewJob, Queue, SchemaState, Settings};
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Row};
use tokio::time::{Instant, sleep};

use support::db::{Database, job};
use support::program::{Program, output};
use support::stage::{Act, PATIENCE, Running, Stage};

const SERVERS: usize = 4;

fn pooler(db: &Database) -> PgConnectOptions {
    db.pooler().expect("JOBREQUEST_TEST_POOLER_URL is not set: run make test")
}

fn pooler_url(db: &Database) -> String {
    let (pooler, mut url) = (pooler(db), url::Url::parse(&db.url()).expect("a URL"));
    url.set_port(Some(pooler.get_port())).expect("a URL with a host");
    url.into()
}

fn through_pooler(db: &Database) -> Queue {
    Queue::new(pooler(db), Settings { transaction_pooler: true, ..Settings::default() })
}

async fn until_all_succeeded(db: &Database) {
    let started = Instant::now();
    loop {
        let left: i64 = db.value("SELECT count(*) FROM jobs WHERE status <> 'succeeded'").await;
        if left == 0 {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{left} jobs have not succeeded");
        sleep(Duration::from_millis(20)).await;
    }
}

/// What is left on each of the pooler's servers: one transaction on each, all at once. The four settings the pooler itself
/// carries from client to server.
async fn left_on_servers(db: &Database) -> BTreeMap<i32, i64> {
    let ask = async |pooler: PgConnectOptions| {
        let mut connection = pooler.extra_float_digits(None).connect().await.expect("the pooler answers");
        sqlx::raw_sql("BEGIN").execute(&mut connection).await.expect("begun");
        let row = sqlx::raw_sql(
            "SELECT pg_backend_pid(), (SELECT count(*) FROM pg_prepared_statements) \
                 + (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) \
                 + (SELECT count(*) FROM pg_listening_channels()) \
                 + (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()) \
                 + (SELECT count(*) FROM pg_settings WHERE source = 'session' AND name NOT IN \
                     ('application_name', 'client_encoding', 'DateStyle', 'TimeZone'))",
        )
        .fetch_one(&mut connection)
        .await
        .expect("answered");
        ((row.get::<i32, _>(0), row.get::<i64, _>(1)), connection)
    };
    // The transactions stay open until all have been asked.
    let asked = join_all((0..SERVERS).map(|_| ask(pooler(db)))).await;
    asked.into_iter().map(|(found, _)| found).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_workers_do_five_hundred_jobs_through_a_pooler_and_leave_nothing_on_its_servers() {
    let db = Database::new().await;
    let stage = Stage::new(Act::Succeed);
    stage.let_go(500);
    let queues: Vec<_> = (0..3).map(|_| through_pooler(&db)).collect();
    let workers: Vec<_> =
        queues.iter().map(|queue| Running::start(queue, stage.registry(), |b| b.listen(db.options()))).collect();
    join_all((0..500).map(async |n| {
        let queue = &queues[n % queues.len()];
        let new = NewJob { idempotency_key: Some(format!("job-{n}")), ..job() };
        queue.enqueue(&new).await.unwrap_or_else(|error| panic!("job {n}: {error}"))
    }))
    .await;
    until_all_succeeded(&db).await;
    for worker in workers {
        worker.end().await;
    }
    assert_eq!(stage.runs(), 500);
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE attempts = 1").await, 500);
    let left = left_on_servers(&db).await;
    assert!(left.values().all(|things| *things == 0), "{left:?}");
}

#[tokio::test]
async fn a_pooler_that_the_settings_do_not_name_is_refused_with_what_to_set() {
    let db = Database::new().await;
    // As it is installed: it refuses a setting that drivers send.
    let unnamed = Queue::new(pooler(&db), Settings::default());
    let refused = unnamed.schema_state().await.expect_err("refused").to_string();
    assert!(refused.contains("JOBREQUEST_DATABASE_DIRECT_URL"), "{refused}");

    // As many set it up: it lets the setting pass, and then mixes up the statements of its clients.
    let lenient =
        || Queue::new(pooler(&db).extra_float_digits(None), Settings { max_connections: 1, ..Settings::default() });
    let first = lenient();
    assert_eq!(first.schema_state().await.expect("nothing shows yet"), SchemaState::Current);
    first.depth().await.expect("it has the server for itself");
    let second = lenient();
    let mixed_up = second.now().await.expect_err("the statement's name is taken");
    assert!(mixed_up.is_passing() && mixed_up.to_string().contains("JOBREQUEST_DATABASE_DIRECT_URL"), "{mixed_up}");
    // The pooler may have opened another server meanwhile, which has no past until somebody has asked there.
    let started = Instant::now();
    while !matches!(lenient().schema_state().await, Err(Error::UnknownPooler)) {
        assert!(started.elapsed() < PATIENCE, "the pooler goes unnoticed");
    }
    assert_eq!(through_pooler(&db).schema_state().await.expect("answered"), SchemaState::Current);
}

#[tokio::test]
async fn the_programs_use_the_direct_url_for_migrations_and_listen_and_the_pooler_for_the_rest() {
    let db = Database::empty().await;
    let (pooled, direct) = (pooler_url(&db), db.url());
    let variables = [
        ("DATABASE_URL", pooled.as_str()),
        ("JOBREQUEST_DATABASE_DIRECT_URL", direct.as_str()),
        ("JOBREQUEST_POLL_SECONDS", "60"),
    ];
    // Were it not for the direct URL, this would fail.
    let (code, _, log) = output(&["migrate"], &[("DATABASE_URL", "postgres://127.0.0.1:1/none"), variables[1]]);
    assert_eq!(code, Some(0), "{log}");

    let mut worker = Program::start(&["worker"], &variables);
    worker.until("/readyz", 200).await;
    let listens = "SELECT count(*) = 1 FROM pg_stat_activity \
        WHERE datname = current_database() AND query LIKE 'LISTEN%' AND client_port <> 0";
    let started = Instant::now();
    while !db.value::<bool>(listens).await {
        assert!(started.elapsed() < PATIENCE, "nobody listens");
        sleep(Duration::from_millis(10)).await;
    }
    // Its own look is a minute away.
    let queue = through_pooler(&db);
    let id = queue.enqueue(&NewJob::new("summarize_text", json!({"text": "One sentence."}))).await;
    let id = id.expect("accepted").id();
    until_all_succeeded(&db).await;
    let (code, listed, log) = output(&["jobs", "get", &id.to_string()], &variables[..2]);
    assert!(code == Some(0) && listed.contains("succeeded"), "{listed}{log}");
    let left = left_on_servers(&db).await;
    assert!(left.values().all(|things| *things == 0), "{left:?}");
    worker.signal("TERM");
    assert_eq!(worker.exit().await.code(), Some(0), "{}", worker.log());
}

#[tokio::test]
async fn a_worker_that_meets_a_pooler_unprepared_waits_and_says_what_to_set() {
    let db = Database::new().await;
    let pooled = pooler_url(&db);
    let worker = Program::start(&["worker"], &[("DATABASE_URL", pooled.as_str())]);
    let started = Instant::now();
    while !worker.get("/readyz").await.1.contains("JOBREQUEST_DATABASE_DIRECT_URL") {
        assert!(started.elapsed() < PATIENCE, "{}", worker.until("/readyz", 503).await);
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(worker.get("/readyz").await.0, 503);
}

#[tokio::test]
async fn what_runs_while_the_poolers_servers_are_lost_ends_well() {
    let db = Database::new().await;
    let queue = through_pooler(&db);
    let stage = Stage::new(Act::Succeed);
    let worker = Running::start(&queue, stage.registry(), |b| b);
    for _ in 0..20 {
        queue.enqueue(&job()).await.expect("accepted");
    }
    for _ in 0..20 {
        stage.until_started().await;
    }
    // The pooler's servers, not the test's own connection.
    db.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
    )
    .await;
    stage.let_go(20);
    until_all_succeeded(&db).await;
    worker.end().await;
    assert_eq!(stage.runs(), 20, "no lease was lost");
}
