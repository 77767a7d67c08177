//! What the database holds, and how the test moves its clock: the only SQL of this test.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use jobrequest::job::{PastAttempt, Status};
use jobrequest::queue::{Queue, Settings};
use serde::Deserialize;
use serde_json::Value;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgConnectOptions, PgTypeInfo};
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, Executor, SqlSafeStr};
use uuid::Uuid;

use crate::support::db::Database;
use crate::support::proxy::Proxy;
use crate::teeth::{Guard, Saboteur};

pub type Time = DateTime<Utc>;

/// A row of `jobs`, as far as it is promised to anyone.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Row {
    pub id: Uuid,
    pub install: String,
    pub namespace: Option<String>,
    pub kind: String,
    pub payload: Value,
    pub idempotency_key: Option<String>,
    pub status: Status,
    pub attempts: u32,
    pub max_attempts: u32,
    pub cancel_requested: bool,
    pub priority: i16,
    pub suspended: bool,
    pub timeout_seconds: u32,
    pub run_at: Time,
    pub wanted_run_at: Option<Time>,
    pub locked_at: Option<Time>,
    pub locked_by: Option<String>,
    pub started_at: Option<Time>,
    pub finished_at: Option<Time>,
    /// Who ran the newest attempt that has ended.
    pub worker: Option<String>,
    pub last_error: Option<String>,
    pub result: Option<Value>,
    pub history: Vec<PastAttempt>,
    pub last_retry: Option<String>,
    pub owner_uid: Option<Uuid>,
    pub revision: i64,
    pub mirror_due: bool,
    pub created_at: Time,
}

/// The key of a succeeded job whose row was purged.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct KeptKey {
    pub install: String,
    pub namespace: String,
    pub idempotency_key: String,
    pub job_id: Uuid,
    pub kind: String,
    pub attempts: u32,
    pub finished_at: Time,
}

/// All rows after a step, which happened between two times by the database's clock.
#[derive(Debug)]
pub struct Seen {
    pub before: Time,
    pub after: Time,
    pub rows: Vec<Row>,
    pub keys: Vec<KeptKey>,
}

/// One thread's database, with two installs in it.
pub struct Lab {
    db: Database,
    pub queues: [Queue; 2],
    pub proxy: Proxy,
    /// The same by way of the proxy.
    pub deaf: [Queue; 2],
    saboteur: Option<Saboteur>,
}

/// How long a transaction may stay open that nobody uses any more.
const PATIENCE: Duration = Duration::from_secs(20);

pub const INSTALLS: [&str; 2] = ["first", "second"];

/// Short retentions, so that purges meet rows; the rest as in production.
pub fn settings(install: usize) -> Settings {
    Settings {
        install: INSTALLS[install].to_owned(),
        lease: Duration::from_secs([30, 90][install]),
        retention: Duration::from_secs(2 * 60 * 60),
        key_retention: [None, Some(Duration::from_secs(12 * 60 * 60))][install],
        ..Settings::default()
    }
}

/// Straight, and by way of the proxy.
fn queues(way: &PgConnectOptions, proxy: &Proxy) -> ([Queue; 2], [Queue; 2]) {
    let by = |way: PgConnectOptions| [0, 1].map(|install| Queue::new(way.clone(), settings(install)));
    (by(way.clone()), by(proxy.options(way.clone())))
}

impl Lab {
    pub async fn new() -> Self {
        let db = Database::new().await;
        // What survives a crash of the server is not this test's question.
        db.run(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$",
        )
        .await;
        Self::by(db.options(), db, None).await
    }

    /// With somebody in the way who can take guards out of the queues' statements.
    pub async fn with_saboteur() -> Self {
        let Self { db, .. } = Self::new().await;
        let saboteur = Saboteur::before(&db.options()).await;
        Self::by(saboteur.options(), db, Some(saboteur)).await
    }

    async fn by(way: PgConnectOptions, db: Database, saboteur: Option<Saboteur>) -> Self {
        let proxy = Proxy::before(&way).await;
        let (queues, deaf) = queues(&way, &proxy);
        Self { db, queues, proxy, deaf, saboteur }
    }

    pub fn saboteur(&self) -> &Saboteur {
        self.saboteur.as_ref().expect("made with one")
    }

    /// From now on the queues' statements lack this and nothing else.
    pub fn take_out(&mut self, guard: Guard) {
        self.saboteur().take_out(guard);
        // Statements are prepared once for each connection.
        (self.queues, self.deaf) = queues(&self.saboteur().options(), &self.proxy);
    }

    /// Postgres reads this statement, with arguments of these types, and finds nothing wrong.
    pub async fn prepares(&self, sql: &str, types: &[Oid]) -> Result<(), sqlx::Error> {
        let types: Vec<PgTypeInfo> = types.iter().copied().map(PgTypeInfo::with_oid).collect();
        let mut connection = self.db.connect().await;
        connection.prepare_with(AssertSqlSafe(sql).into_sql_str(), &types).await.map(drop)
    }

    /// Forgets the case before. The time it is now.
    pub async fn clear(&self) -> Time {
        self.db
            .run("DELETE FROM jobs; DELETE FROM job_resources; DELETE FROM job_keys; DELETE FROM job_releases")
            .await;
        self.queues[0].now().await.expect("the test's database answers")
    }

    pub async fn vacuum(&self) {
        self.db.run("VACUUM jobs").await;
    }

    /// An operation that refuses rolls back behind its answer; until then it holds rows, and others pass them over.
    pub async fn until_all_has_ended(&self) {
        let started = Instant::now();
        let open = "SELECT EXISTS (SELECT FROM pg_stat_activity \
                    WHERE datname = current_database() AND state LIKE 'idle in transaction%')";
        while self.db.value::<bool>(open).await {
            assert!(started.elapsed() < PATIENCE, "a transaction stays open");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub async fn look(&self, before: Time) -> Seen {
        let (after, Json(rows), Json(keys)) = self
            .db
            .one(
                "SELECT clock_timestamp(), \
                     (SELECT coalesce(jsonb_agg(to_jsonb(j) ORDER BY id), '[]') FROM jobs j), \
                     (SELECT coalesce(jsonb_agg(to_jsonb(k) ORDER BY job_id), '[]') FROM job_keys k)",
            )
            .await;
        Seen { before, after, rows, keys }
    }

    /// A row as a person or another program inserts it.
    pub async fn insert(&self, install: usize, kind: &str) {
        let install = INSTALLS[install];
        self.db.run(&format!("INSERT INTO jobs (kind, payload, install) VALUES ('{kind}', '0', '{install}')")).await;
    }

    /// Time passes (or is set back): all that was written moves into the past.
    pub async fn pass(&self, seconds: i64) {
        let by = format!("make_interval(secs => {seconds})");
        self.db
            .run(&format!(
                "UPDATE jobs SET run_at = run_at - {by}, wanted_run_at = wanted_run_at - {by}, \
                     locked_at = locked_at - {by}, started_at = started_at - {by}, finished_at = finished_at - {by}, \
                     handed_back_at = handed_back_at - {by}, created_at = created_at - {by}, \
                     updated_at = updated_at - {by}; \
                 UPDATE job_keys SET finished_at = finished_at - {by}; \
                 UPDATE job_releases SET released_at = released_at - {by}"
            ))
            .await;
    }

    /// The holder of this row has not been heard of for so long.
    pub async fn age_lease(&self, id: Uuid, seconds: i64) {
        self.db
            .run(&format!("UPDATE jobs SET locked_at = locked_at - make_interval(secs => {seconds}) WHERE id = '{id}'"))
            .await;
    }
}

impl Seen {
    pub fn row(&self, id: Uuid) -> Option<&Row> {
        self.rows.iter().find(|row| row.id == id)
    }

    /// Whether a time was taken during the step.
    pub fn during(&self, time: Time) -> bool {
        self.before <= time && time <= self.after
    }
}
