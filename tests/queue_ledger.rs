//! 20,000 jobs, two processes that enqueue them and two workers, and every half second one of the four is killed and
//! started anew, until all is done. A ledger, written by the jobs themselves and timed by the database's clock, shows
//! what ran when. That nothing wrong is found in it means something because a second test puts each wrong into a ledger.

#[path = "support/db.rs"]
#[allow(dead_code, reason = "shared")]
mod db;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use db::Database;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use jobrequest::job::RetryPolicy;
use jobrequest::kinds::{Attempt, Executed, Executor, Failure, Registry};
use jobrequest::queue::{EnqueueOutcome, NewJob, Queue, Settings};
use jobrequest::worker::Worker;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};
use tokio::runtime::Handle;
use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const TEST: &str = "jobs_of_processes_that_are_killed_all_the_time_are_each_done_and_never_twice_at_once";
/// What a process of the test's own is, and which one.
const ROLE: &str = "JOBREQUEST_TEST_LEDGER_ROLE";
const PROCESS: &str = "JOBREQUEST_TEST_LEDGER_PROCESS";
/// The database that they share.
const STORE: &str = "JOBREQUEST_TEST_LEDGER_STORE";
/// Who is killed when; when is not repeated.
const SEED: &str = "JOBREQUEST_TEST_LEDGER_SEED";

const WORKER: &str = "worker";

const JOBS: i32 = 20_000;
const MAX_ATTEMPTS: u32 = 100;
const LEASE: Duration = Duration::from_secs(1);
const KILL_EVERY: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(300);

/// `planned` is what the enqueuers are to enqueue, and what they have heard of it. `runs` says until when nobody else
/// may start: a run that was stopped may be followed when it has stopped, any other not before its lease is over.
const TABLES: &str = "
    CREATE TABLE planned (n integer PRIMARY KEY, job_id uuid, existed boolean);
    CREATE TABLE processes (process uuid PRIMARY KEY, killed_at timestamptz NOT NULL);
    CREATE TABLE ledger (run uuid PRIMARY KEY, job_id uuid NOT NULL, attempt integer NOT NULL, process uuid NOT NULL,
        started_at timestamptz, row_status text, row_attempts integer, lease_until timestamptz,
        ended_at timestamptz, stopped_after interval);
    CREATE VIEW runs AS
        SELECT l.*, coalesce(started_at + stopped_after,
            greatest(lease_until, coalesce(ended_at, killed_at, 'infinity'))) AS live_until
        FROM ledger l LEFT JOIN processes USING (process) WHERE started_at IS NOT NULL;";

/// What must never happen, and the rows that tell of it.
const NEVER: [(&str, &str); 8] = [
    (
        "a planned job has no row of its own",
        "SELECT p.* FROM planned p LEFT JOIN jobs j ON j.id = p.job_id AND j.idempotency_key = 'job ' || p.n \
         WHERE j.id IS NULL",
    ),
    (
        "a job has a second row",
        "SELECT j.id, j.idempotency_key FROM jobs j LEFT JOIN planned p ON p.job_id = j.id WHERE p.n IS NULL",
    ),
    (
        "a job is not done",
        "SELECT id, status FROM jobs WHERE status <> 'succeeded' OR locked_at IS NOT NULL OR finished_at IS NULL",
    ),
    (
        "a job has succeeded without a run to its end",
        "SELECT j.id, j.result FROM jobs j \
         LEFT JOIN runs r ON r.run = (j.result ->> 'run')::uuid AND r.job_id = j.id AND r.ended_at IS NOT NULL \
         WHERE j.status = 'succeeded' AND r.run IS NULL",
    ),
    (
        "a run started while another's lease was live",
        "SELECT * FROM (SELECT r.*, max(live_until) OVER (PARTITION BY job_id ORDER BY started_at \
             ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS busy_until FROM runs r) r \
         WHERE started_at < busy_until",
    ),
    (
        "a run started under another's claim or under none",
        "SELECT * FROM runs WHERE row_status <> 'running' OR row_attempts <> attempt",
    ),
    (
        "a run started after its job's end",
        "SELECT r.*, j.finished_at FROM runs r JOIN jobs j ON j.id = r.job_id WHERE r.started_at > j.finished_at",
    ),
    (
        "an attempt was not counted, or over the limit",
        "SELECT j.id, j.attempts, count(*), max(r.attempt) FROM jobs j JOIN runs r ON r.job_id = j.id GROUP BY j.id \
         HAVING count(*) > j.attempts OR max(r.attempt) > j.attempts OR j.attempts > j.max_attempts \
             OR count(DISTINCT r.attempt) < count(*)",
    ),
];

/// Which of it has happened, how often, and the first instance.
async fn wrongs(connection: &mut PgConnection) -> Vec<(&'static str, i64, String)> {
    let mut wrongs = Vec::new();
    for (what, rows) in NEVER {
        let sql = AssertSqlSafe(format!("SELECT count(*), min(r::text) FROM ({rows}) r"));
        let (count, first): (i64, Option<String>) =
            sqlx::query_as(sql).fetch_one(&mut *connection).await.unwrap_or_else(|e| panic!("{what}: {e}"));
        wrongs.extend(first.map(|first| (what, count, first)));
    }
    wrongs
}

/// How a process reaches the database.
fn store() -> PgConnectOptions {
    std::env::var(STORE).expect("its parent says").parse().expect("a URL")
}

fn queue() -> Queue {
    let retry = RetryPolicy::new(Duration::from_millis(20), Duration::from_millis(200));
    Queue::new(store(), Settings { lease: LEASE, retry, ..Settings::default() })
}

fn ledger_pool() -> PgPool {
    // Nothing of it is lost when a client dies.
    let store = store().options([("synchronous_commit", "off")]);
    PgPoolOptions::new().max_connections(8).connect_lazy_with(store)
}

// --- The processes

#[derive(Deserialize)]
struct Task {
    milliseconds: u64,
}

/// An executor that writes down when it starts and when it ends.
struct Ledger {
    pool: PgPool,
    process: Uuid,
}

impl Executor for Ledger {
    fn kind(&self) -> &'static str {
        "ledger"
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            let Task { milliseconds } = attempt.payload()?;
            let mut run = Run::new(self, attempt);
            run.start().await.map_err(unwritten)?;
            sleep(Duration::from_millis(milliseconds)).await;
            run.end().await.map_err(unwritten)
        })
    }
}

fn unwritten(error: sqlx::Error) -> Failure {
    Failure::passing("Unwritten", error.to_string())
}

struct Run {
    pool: PgPool,
    id: Uuid,
    job: Uuid,
    attempt: i32,
    process: Uuid,
    /// When it heard that its start is written down.
    started: Option<Instant>,
    ended: bool,
}

impl Run {
    fn new(Ledger { pool, process }: &Ledger, attempt: &Attempt) -> Self {
        Self {
            pool: pool.clone(),
            id: Uuid::new_v4(),
            job: attempt.job_id,
            attempt: attempt.number.cast_signed(),
            process: *process,
            started: None,
            ended: false,
        }
    }

    async fn start(&mut self) -> sqlx::Result<()> {
        let sql = "INSERT INTO ledger \
                (run, job_id, attempt, process, started_at, row_status, row_attempts, lease_until) \
            SELECT $1, $2, $3, $4, clock_timestamp(), status, attempts, \
                locked_at + make_interval(secs => lease_seconds) \
            FROM jobs WHERE id = $2 ON CONFLICT (run) DO NOTHING";
        let insert = sqlx::query(sql).bind(self.id).bind(self.job).bind(self.attempt).bind(self.process);
        insert.execute(&self.pool).await?;
        self.started = Some(Instant::now());
        Ok(())
    }

    async fn end(mut self) -> sqlx::Result<Value> {
        let sql = "UPDATE ledger SET ended_at = clock_timestamp() WHERE run = $1";
        sqlx::query(sql).bind(self.id).execute(&self.pool).await?;
        self.ended = true;
        Ok(json!({ "run": self.id }))
    }
}

impl Drop for Run {
    /// Stopped by its worker before its end.
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let (pool, run, job, attempt, process) = (self.pool.clone(), self.id, self.job, self.attempt, self.process);
        let seconds = self.started.map_or(0.0, |started| started.elapsed().as_secs_f64());
        Handle::current().spawn(async move {
            // Its start may not have come through yet, or never.
            let sql = "INSERT INTO ledger (run, job_id, attempt, process) VALUES ($1, $2, $3, $4) \
                ON CONFLICT (run) DO UPDATE SET stopped_after = make_interval(secs => $5)";
            sqlx::query(sql).bind(run).bind(job).bind(attempt).bind(process).bind(seconds).execute(&pool).await
        });
    }
}

async fn work() {
    let process: Uuid = std::env::var(PROCESS).expect("said").parse().expect("a UUID");
    let registry = Registry::new().with(Ledger { pool: ledger_pool(), process });
    let worker = Worker::builder(queue(), registry).concurrency(32).listen(store()).name(process.to_string());
    worker.build().expect("it can be built").run(CancellationToken::new()).await;
}

/// Long enough in all that the killing goes on for a while, and one of a thousand longer than a lease.
fn planned_job(n: i32) -> NewJob {
    let milliseconds = if n % 1000 == 0 { 1300 } else { n % 100 };
    NewJob {
        idempotency_key: Some(format!("job {n}")),
        max_attempts: MAX_ATTEMPTS,
        ..NewJob::new("ledger", json!({ "milliseconds": milliseconds, "n": n }))
    }
}

/// How many an enqueuer sends at once, and how many one by one, before it notes what it has heard.
const MANY: usize = 200;
const FEW: usize = 20;
/// It waits while so many jobs do: there are enqueuers to be killed for as long as there are workers.
const WAITING: i64 = 2000;

/// Goes on a little before where the one before it has heard of no answer.
async fn enqueue(half: i32) {
    let (queue, pool) = (&queue(), &ledger_pool());
    let sql = "SELECT n FROM planned WHERE n % 2 = $1 AND n >= coalesce( \
            (SELECT min(n) FROM planned WHERE n % 2 = $1 AND job_id IS NULL), $2) - 50 ORDER BY n";
    let left: Vec<(i32,)> = sqlx::query_as(sql).bind(half).bind(JOBS).fetch_all(pool).await.expect("answered");
    let left: Vec<i32> = left.into_iter().map(|(n,)| n).collect();
    let (mut rest, mut together) = (&left[..], true);
    while !rest.is_empty() {
        let waiting = sqlx::query_scalar("SELECT count(*) FROM jobs WHERE status = 'queued'");
        let waiting: i64 = waiting.fetch_one(pool).await.expect("answered");
        if waiting > WAITING {
            sleep(Duration::from_millis(50)).await;
            continue;
        }
        // In turn: many at once, and one by one.
        let part =
            rest.split_off(..rest.len().min(if together { MANY } else { FEW })).expect("not more than there are");
        let jobs: Vec<_> = part.iter().map(|n| planned_job(*n)).collect();
        let answers = match together {
            true => queue.enqueue_many(&jobs).await,
            false => stream::iter(&jobs).map(|job| queue.enqueue(job)).buffered(4).collect().await,
        };
        together = !together;
        let answers: Vec<_> = answers.into_iter().map(|answer| answer.expect("accepted")).collect();
        let existed: Vec<_> = answers.iter().map(|answer| matches!(answer, EnqueueOutcome::Existing(_))).collect();
        let ids: Vec<_> = answers.iter().map(|answer| answer.id()).collect();
        let sql = "UPDATE planned p SET job_id = a.id, existed = a.existed \
            FROM unnest($1::int[], $2::uuid[], $3::bool[]) AS a(n, id, existed) WHERE p.n = a.n";
        sqlx::query(sql).bind(part).bind(ids).bind(existed).execute(pool).await.expect("noted");
    }
}

/// A process plays its part. It does not outlive its parent.
fn play(role: &str) {
    std::thread::spawn(|| {
        _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("built");
    match role.strip_prefix("enqueuer ") {
        Some(half) => runtime.block_on(enqueue(half.parse().expect("0 or 1"))),
        None => runtime.block_on(work()),
    }
}

// --- Their parent

/// Killed when dropped.
struct Process {
    role: &'static str,
    id: Uuid,
    child: Child,
}

impl Process {
    fn start(db: &Database, role: &'static str) -> Self {
        let id = Uuid::new_v4();
        let child = Command::new(std::env::current_exe().expect("known"))
            .args([TEST, "--exact", "--nocapture"])
            .env(ROLE, role)
            .env(PROCESS, id.to_string())
            .env(STORE, db.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        Self { role, id, child }
    }

    /// Whether it has done all it had to do.
    fn has_ended(&mut self) -> bool {
        match self.child.try_wait().expect("ours") {
            None => false,
            Some(status) => {
                assert!(status.success() && self.role != WORKER, "the {} ended: {status}", self.role);
                true
            }
        }
    }

    /// What it does until it is dead, it does after the time that is written down.
    async fn kill(&mut self, db: &Database) {
        db.run(&format!("INSERT INTO processes VALUES ('{}', clock_timestamp())", self.id)).await;
        self.child.kill().expect("ours");
        self.child.wait().expect("ours");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Kills one of the four every half second until all is done; how many workers and enqueuers were killed.
async fn kill_until_done(db: &Database, random: &mut StdRng) -> (usize, usize) {
    let roles = [WORKER, WORKER, "enqueuer 0", "enqueuer 1"];
    let mut processes = roles.map(|role| Process::start(db, role));
    let (mut workers, mut enqueuers) = (0, 0);
    let started = Instant::now();
    let mut ticks = interval(KILL_EVERY);
    ticks.tick().await;
    let done = "SELECT NOT EXISTS (SELECT 1 FROM planned WHERE job_id IS NULL) \
        AND NOT EXISTS (SELECT 1 FROM jobs WHERE status IN ('queued', 'running', 'retrying'))";
    while !db.value::<bool>(done).await {
        ticks.tick().await;
        let victim = &mut processes[random.random_range(0..processes.len())];
        if !victim.has_ended() {
            victim.kill(db).await;
            *if victim.role == WORKER { &mut workers } else { &mut enqueuers } += 1;
            *victim = Process::start(db, victim.role);
        }
        if started.elapsed() > PATIENCE {
            let states = "SELECT string_agg(n || ' ' || status, ', ') FROM \
                (SELECT status, count(*) AS n FROM jobs GROUP BY status) s";
            panic!("not done after {PATIENCE:?}: {}", db.value::<String>(states).await);
        }
    }
    for process in &mut processes {
        if !process.has_ended() {
            process.kill(db).await;
        }
    }
    (workers, enqueuers)
}

#[test]
fn jobs_of_processes_that_are_killed_all_the_time_are_each_done_and_never_twice_at_once() {
    match std::env::var(ROLE) {
        Ok(role) => play(&role),
        Err(_) => tokio::runtime::Runtime::new().expect("built").block_on(watch()),
    }
}

async fn watch() {
    let seed = std::env::var(SEED).map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("{SEED}={seed}");
    let db = Database::new().await;
    db.run(TABLES).await;
    db.run(&format!("INSERT INTO planned (n) SELECT generate_series(1, {JOBS})")).await;
    let started = Instant::now();
    let (workers, enqueuers) = kill_until_done(&db, &mut StdRng::seed_from_u64(seed)).await;
    let took = started.elapsed();

    let wrongs = wrongs(&mut db.connect().await).await;
    assert!(wrongs.is_empty(), "{wrongs:#?}");
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs").await, i64::from(JOBS));

    // And the test was one.
    let (runs, again, most): (i64, i64, i32) = db
        .one("SELECT (SELECT count(*) FROM runs), count(*) FILTER (WHERE attempts > 1), max(attempts) FROM jobs")
        .await;
    let existed: i64 = db.value("SELECT count(*) FROM planned WHERE existed").await;
    let long: i64 = db.value("SELECT count(*) FROM runs WHERE ended_at - started_at > interval '1.2 s'").await;
    println!(
        "{JOBS} jobs in {took:.0?}, {workers} workers and {enqueuers} enqueuers killed: {runs} runs, {again} jobs had \
         more than one attempt (the most {most}), {existed} were enqueued twice, {long} outlasted a lease"
    );
    assert!(workers >= 5 && enqueuers >= 5 && again >= 50 && existed > 0 && long > 0, "too little happened");
}

/// One job, whose first run died with its process. Its lease was over a second later, and then it ran to its end.
const GOOD: &str = "
    INSERT INTO jobs (id, kind, payload, status, attempts, max_attempts, idempotency_key, result, finished_at)
    VALUES (uuid(1), 'ledger', '{}', 'succeeded', 2, 3, 'job 1', jsonb_build_object('run', uuid(12)), t(5));
    INSERT INTO planned VALUES (1, uuid(1), false);
    INSERT INTO processes VALUES (uuid(21), t(1)), (uuid(22), t(6));
    INSERT INTO ledger VALUES
        (uuid(11), uuid(1), 1, uuid(21), t(0), 'running', 1, t(2), NULL, NULL),
        (uuid(12), uuid(1), 2, uuid(22), t(3), 'running', 2, t(5), t(4), NULL);";
const FUNCTIONS: &str = "
    CREATE FUNCTION uuid(n integer) RETURNS uuid LANGUAGE sql AS $$ SELECT lpad(n::text, 32, '0')::uuid $$;
    CREATE FUNCTION t(seconds float8) RETURNS timestamptz LANGUAGE sql AS $$ SELECT to_timestamp(1e9 + seconds) $$;";

#[tokio::test]
async fn each_wrong_in_a_ledger_is_found() {
    let db = Database::new().await;
    for sql in [TABLES, FUNCTIONS, GOOD] {
        db.run(sql).await;
    }
    let mut connection = db.connect().await;
    assert_eq!(wrongs(&mut connection).await, []);
    let [no_row, second_row, not_done, no_end, live, claim, after, count] = NEVER.map(|(what, _)| what);
    for (change, wrong) in [
        ("UPDATE planned SET job_id = NULL; DELETE FROM ledger; DELETE FROM jobs", no_row),
        ("UPDATE jobs SET idempotency_key = 'job 2'", no_row),
        (
            "INSERT INTO jobs (kind, payload, status, attempts, result, finished_at) \
             SELECT kind, payload, status, 0, NULL, finished_at FROM jobs",
            second_row,
        ),
        ("UPDATE jobs SET status = 'queued', result = NULL, finished_at = NULL", not_done),
        ("UPDATE jobs SET status = 'cancelled', result = NULL", not_done),
        ("UPDATE jobs SET result = 'null'", no_end),
        ("UPDATE ledger SET ended_at = NULL WHERE attempt = 2", no_end),
        ("UPDATE ledger SET started_at = t(1.9) WHERE attempt = 2", live),
        ("UPDATE ledger SET started_at = t(1.9), stopped_after = '2 s' WHERE attempt = 1", live),
        ("UPDATE ledger SET ended_at = t(3.1) WHERE attempt = 1", live),
        ("UPDATE processes SET killed_at = t(3.1) WHERE process = uuid(21)", live),
        ("DELETE FROM processes WHERE process = uuid(21)", live),
        ("UPDATE ledger SET row_attempts = 2 WHERE attempt = 1", claim),
        ("UPDATE ledger SET row_status = 'retrying' WHERE attempt = 2", claim),
        ("UPDATE jobs SET finished_at = t(2.9)", after),
        ("UPDATE ledger SET attempt = 1, row_attempts = 1", count),
        ("UPDATE ledger SET attempt = 3, row_attempts = 3 WHERE attempt = 2", count),
        ("UPDATE jobs SET attempts = 1", count),
    ] {
        sqlx::raw_sql(AssertSqlSafe(format!("BEGIN; {change}"))).execute(&mut connection).await.expect(change);
        let found: Vec<_> = wrongs(&mut connection).await.into_iter().map(|(what, _, _)| what).collect();
        assert!(found.contains(&wrong), "{change}: {found:?}");
        sqlx::raw_sql("ROLLBACK").execute(&mut connection).await.expect("undone");
    }
    assert_eq!(wrongs(&mut connection).await, []);
}
