//! A fresh database per test, on the server at `$DATABASE_URL`, dropped at the end of the test even if it panics.

use std::time::{Duration, Instant};

use jobrequest::job::Cause;
use jobrequest::queue::{AttemptFailure, ClaimedJob, NewJob, Owner, Queue, Settings, migrate};
use serde_json::json;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, FromRow, PgConnection, PgPool};
use uuid::Uuid;

/// How long a test waits for what must happen at once.
const PATIENCE: Duration = Duration::from_secs(20);

/// A database of this test alone, with the schema in place.
pub struct Database {
    url: String,
    server: PgConnectOptions,
    name: String,
    pool: PgPool,
}

impl Database {
    /// With all migrations applied.
    pub async fn new() -> Self {
        let database = Self::empty().await;
        migrate(&database.options()).await.expect("the migrations apply to an empty database");
        database
    }

    /// Without any table.
    pub async fn empty() -> Self {
        Self::empty_on(std::env::var("DATABASE_URL").expect("DATABASE_URL is not set: run make test")).await
    }

    /// The same on the server at another URL.
    pub async fn empty_on(url: String) -> Self {
        let server: PgConnectOptions = url.parse().expect("a URL of Postgres");
        let name = format!("jobrequest_test_{}", Uuid::new_v4().simple());
        let mut connection = server.connect().await.expect("the server at DATABASE_URL answers");
        execute(&mut connection, &format!("CREATE DATABASE {name}")).await;
        drop(connection.close().await);
        let pool = PgPoolOptions::new().max_connections(5).connect_lazy_with(server.clone().database(&name));
        Self { url, server, name, pool }
    }

    pub fn options(&self) -> PgConnectOptions {
        self.server.clone().database(&self.name)
    }

    /// How the tests' queues get there: straight, or through PgBouncer in the second run of `make test`.
    pub fn queue_options(&self) -> PgConnectOptions {
        match (goes_through_pooler(), self.pooler()) {
            (false, _) => self.options(),
            (true, Some(pooler)) => pooler,
            (true, None) => panic!("JOBREQUEST_TEST_POOLER_URL is not set: run make test"),
        }
    }

    /// The same database by way of PgBouncer.
    pub fn pooler(&self) -> Option<PgConnectOptions> {
        Some(pooler_url()?.parse::<PgConnectOptions>().expect("a URL of PgBouncer").database(&self.name))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// For a program's environment.
    pub fn url(&self) -> String {
        let mut url = url::Url::parse(&self.url).expect("a URL");
        url.set_path(&self.name);
        url.into()
    }

    /// Connections of the test's own, beside the queue's.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    pub async fn connect(&self) -> PgConnection {
        self.options().connect().await.expect("the test's database answers")
    }

    /// A queue with short leases; a lease still outlasts any test that does not move the clock of its row.
    pub fn queue(&self) -> Queue {
        self.queue_with(|_| {})
    }

    pub fn queue_with(&self, change: impl FnOnce(&mut Settings)) -> Queue {
        Queue::new(self.queue_options(), settings(change))
    }

    /// Runs statements; the test fails if one does.
    pub async fn run(&self, sql: &str) {
        let mut connection = self.pool.acquire().await.expect("the test's database answers");
        execute(&mut connection, sql).await;
    }

    /// Runs a statement that the database must refuse; its message.
    pub async fn refuses(&self, sql: &str) -> String {
        match sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await {
            Ok(_) => panic!("accepted: {sql}"),
            Err(error) => error.to_string(),
        }
    }

    /// One row.
    pub async fn one<T>(&self, sql: &str) -> T
    where
        T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&self.pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    /// One value.
    pub async fn value<T>(&self, sql: &str) -> T
    where
        (T,): for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        self.one::<(T,)>(sql).await.0
    }

    /// A whole row of `jobs` as text, to show that it did not change.
    pub async fn row(&self, id: Uuid) -> String {
        self.value(&format!("SELECT j::text FROM jobs j WHERE id = '{id}'")).await
    }

    pub async fn status(&self, id: Uuid) -> String {
        self.value(&format!("SELECT status FROM jobs WHERE id = '{id}'")).await
    }

    pub async fn attempts(&self, id: Uuid) -> i32 {
        self.value(&format!("SELECT attempts FROM jobs WHERE id = '{id}'")).await
    }

    /// Waits at most for `limit`.
    pub async fn until_status(&self, id: Uuid, wanted: &str, limit: Duration) {
        let started = Instant::now();
        loop {
            let status = self.status(id).await;
            if status == wanted {
                return;
            }
            assert!(started.elapsed() < limit, "the job is {status}, not {wanted}: {}", self.row(id).await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends this row's lease: its worker has not been heard of for longer than that.
    pub async fn end_lease(&self, id: Uuid) {
        self.run(&format!(
            "UPDATE jobs SET locked_at = now() - make_interval(secs => lease_seconds + 1) WHERE id = '{id}'"
        ))
        .await;
    }

    /// Ends a waiting row's back-off.
    pub async fn make_due(&self, id: Uuid) {
        self.run(&format!("UPDATE jobs SET run_at = now() - interval '1 s' WHERE id = '{id}'")).await;
    }

    /// Resolves when this many sessions of this database wait for a lock. Sessions wait in the order in which they
    /// came, so calling this after each start fixes the order in which they go on.
    pub async fn until_blocked(&self, sessions: i64) {
        let sql =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let started = Instant::now();
        loop {
            let blocked: i64 = self.value(sql).await;
            if blocked == sessions {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{blocked} sessions wait for a lock, not {sessions}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        // A thread of its own: a test's runtime can't be waited for from within.
        let dropper = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut connection = server.connect().await?;
                let sql = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
                connection.close().await?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
        });
        match dropper.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("the database {} stays behind: {error}", self.name),
            Err(_) => eprintln!("the database {} stays behind", self.name),
        }
    }
}

fn pooler_url() -> Option<String> {
    std::env::var("JOBREQUEST_TEST_POOLER_URL").ok()
}

pub fn goes_through_pooler() -> bool {
    std::env::var_os("JOBREQUEST_TEST_THROUGH_POOLER").is_some()
}

/// A queue's settings, on the way that this run of the tests goes.
pub fn settings(change: impl FnOnce(&mut Settings)) -> Settings {
    let mut settings = Settings { transaction_pooler: goes_through_pooler(), ..Settings::default() };
    change(&mut settings);
    settings
}

async fn execute(connection: &mut PgConnection, sql: &str) {
    if let Err(error) = sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await {
        panic!("{sql}: {error}");
    }
}

/// A job of a kind that no rule knows.
pub fn job() -> NewJob {
    NewJob::new("test_kind", json!({"n": 1}))
}

/// The same, for a resource of this name in the namespace `shop`, with a uid of its own.
pub fn job_of(name: &str) -> (NewJob, Uuid) {
    let uid = Uuid::new_v4();
    let owner = Owner { uid, namespace: "shop".to_owned(), name: name.to_owned() };
    (NewJob { owner: Some(owner), ..job() }, uid)
}

/// The claim of the one job that is due.
pub async fn claim(queue: &Queue) -> ClaimedJob {
    claim_as(queue, "w1").await
}

pub async fn claim_as(queue: &Queue, worker: &str) -> ClaimedJob {
    queue.fetch_next(worker, &["test_kind"]).await.expect("the claim is answered").expect("a job is due")
}

/// Enqueues a job and claims it.
pub async fn claimed(queue: &Queue, new: &NewJob) -> ClaimedJob {
    let id = queue.enqueue(new).await.expect("the job is accepted").id();
    let claimed = claim(queue).await;
    assert_eq!(claimed.id(), id, "no other job is due");
    claimed
}

/// The end of an attempt for this cause.
pub fn failure(cause: Cause) -> AttemptFailure {
    AttemptFailure { cause, error: Some("it did not work".to_owned()), progress: None }
}
