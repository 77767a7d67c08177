//! The worker while the database is wrong: what it has claimed it does not forget, what it has done it does not do
//! again, and it goes on by itself. Leases outlast these tests, so a claim or an end that got lost shows as a job that
//! stays running.

use std::time::Duration;

use jobrequest::admin::{Health, Part};
use jobrequest::queue::Queue;
use jobrequest::worker::Builder;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row};
use tokio::time::{Instant, sleep};

use crate::db::{Database, settings};
use crate::errors::{END_OTHER_SESSIONS, raise_by_trigger, take_no_connections};
use crate::operations::MANY;
use crate::proxy::{Cut, Proxy};
use crate::stage::{Act, PATIENCE, Running, Stage};

const SLOTS: usize = 4;

/// A worker, and somebody beside it whom no fault meets.
struct Site {
    db: Database,
    beside: PgConnection,
    stage: Stage,
    worker: Running,
    postgres: Part,
    enqueued: usize,
}

impl Site {
    async fn new(db: Database, way: PgConnectOptions, change: impl FnOnce(Builder) -> Builder) -> Self {
        let queue = Queue::new(way, settings(|settings| settings.time_limit = Duration::from_secs(2)));
        let (stage, health) = (Stage::new(Act::Succeed), Health::new());
        let postgres = health.part("postgres");
        let worker = Running::start(&queue, stage.registry(), |b| change(b.concurrency(SLOTS).health(health)));
        let beside = db.options().application_name("beside").connect().await.expect("the test's database answers");
        Self { db, beside, stage, worker, postgres, enqueued: 0 }
    }

    async fn run(&mut self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.beside).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    }

    async fn count(&mut self, sql: &str) -> i64 {
        sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(&mut self.beside).await.expect("answered").get(0)
    }

    async fn enqueue(&mut self, jobs: usize) {
        self.enqueued += jobs;
        let insert = "INSERT INTO jobs (id, kind, payload) SELECT gen_random_uuid(), 'test_kind', '{}'";
        self.run(&format!("{insert} FROM generate_series(1, {jobs}); NOTIFY jobrequest_ready")).await;
    }

    /// Each job has run once, in its first attempt, and nothing else has.
    async fn until_all_are_done_once(&mut self, what: &str) {
        let started = Instant::now();
        let left = "SELECT count(*) FROM jobs WHERE status <> 'succeeded'";
        while self.count(left).await > 0 {
            if started.elapsed() > PATIENCE {
                let jobs: String =
                    self.db.value("SELECT string_agg(j::text, E'\\n') FROM jobs j WHERE status <> 'succeeded'").await;
                panic!("{what}: these are not done:\n{jobs}");
            }
            sleep(Duration::from_millis(5)).await;
        }
        let once = self.count("SELECT count(*) FROM jobs WHERE attempts = 1").await;
        assert_eq!((self.stage.runs(), once), (self.enqueued, i64::try_from(self.enqueued).expect("few")), "{what}");
    }
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Whoever changes a row is told this code, by the statement or at the commit.
    Raised {
        at: &'static str,
        code: &'static str,
    },
    /// The server has become a standby.
    ReadOnly,
    NoConnections,
}

impl Fault {
    async fn set(self, site: &mut Site, wanted: bool) {
        let name = site.db.name().to_owned();
        match self {
            Self::Raised { code, .. } if wanted => site.run(&format!("INSERT INTO fault VALUES ('{code}')")).await,
            Self::Raised { .. } => site.run("DELETE FROM fault").await,
            Self::ReadOnly => {
                let alter = format!("ALTER DATABASE {name} SET default_transaction_read_only = {wanted}");
                site.run(&format!("{alter}; {END_OTHER_SESSIONS}")).await;
            }
            Self::NoConnections => take_no_connections(&site.db, &mut site.beside, wanted).await,
        }
    }

    /// The worker has met it again and again.
    async fn is_met(self, site: &mut Site) -> bool {
        match self {
            Self::Raised { .. } => site.count("SELECT last_value FROM met").await > 5,
            Self::ReadOnly | Self::NoConnections => !site.postgres.is_ready(),
        }
    }

    async fn until_met(self, site: &mut Site) {
        let started = Instant::now();
        while !self.is_met(site).await {
            assert!(started.elapsed() < PATIENCE, "{self:?} was not met");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// It strikes where attempts end, and then where jobs are claimed.
    async fn strike(self) {
        let db = Database::new().await;
        if let Self::Raised { at, .. } = self {
            raise_by_trigger(&db, at).await;
        }
        let way = db.queue_options();
        let mut site = Site::new(db, way, |b| b).await;
        site.enqueue(SLOTS).await;
        for _ in 0..SLOTS {
            site.stage.until_started().await;
        }
        self.set(&mut site, true).await;
        site.stage.let_go(SLOTS);
        self.until_met(&mut site).await;
        self.set(&mut site, false).await;
        site.until_all_are_done_once(&format!("{self:?} where attempts end")).await;

        if let Self::Raised { .. } = self {
            site.run("SELECT setval('met', 1)").await;
        }
        self.set(&mut site, true).await;
        site.enqueue(2 * SLOTS).await;
        site.stage.let_go(2 * SLOTS);
        self.until_met(&mut site).await;
        assert_eq!(site.stage.runs(), SLOTS, "{self:?}: nothing starts without a claim");
        self.set(&mut site, false).await;
        site.until_all_are_done_once(&format!("{self:?} where jobs are claimed")).await;
        site.worker.end().await;
    }
}

#[tokio::test]
async fn a_worker_goes_on_when_what_a_statement_was_refused_for_has_passed() {
    let faults = ["40001", "40P01", "53100", "57014"].map(|code| Fault::Raised { at: "statement", code }.strike());
    futures::future::join_all(faults).await;
}

#[tokio::test]
async fn a_worker_goes_on_when_what_a_commit_was_refused_for_has_passed() {
    let faults = ["40001", "53100"].map(|code| Fault::Raised { at: "commit", code }.strike());
    futures::future::join_all(faults).await;
}

#[tokio::test]
async fn a_worker_goes_on_when_its_standby_takes_writes_again() {
    Fault::ReadOnly.strike().await;
}

#[tokio::test]
async fn a_worker_whose_sessions_an_administrator_ends_goes_on_when_it_may_connect_again() {
    Fault::NoConnections.strike().await;
}

/// Cuts the worker's connection at each of the requests that follow a job's arrival, until none of them is left.
async fn cut_at_each_request(cut: Cut) {
    let db = Database::new().await;
    let (proxy, direct) = (Proxy::before(&db.queue_options()).await, db.options());
    let way = proxy.options(db.queue_options());
    // It looks when it hears of jobs.
    let mut site = Site::new(db, way, |b| b.poll(Duration::from_secs(10)).listen(direct)).await;
    for request in 1..MANY {
        proxy.cut(cut, request);
        site.stage.let_go(2);
        site.enqueue(2).await;
        site.until_all_are_done_once(&format!("cut {cut:?} request {request}")).await;
        if !proxy.heal() {
            assert!(request > 2, "a claim and an end at least");
            site.worker.end().await;
            return;
        }
    }
    panic!("more than {MANY} requests for two jobs");
}

#[tokio::test]
async fn a_worker_whose_request_is_lost_anywhere_runs_each_job_once() {
    cut_at_each_request(Cut::Before).await;
}

#[tokio::test]
async fn a_worker_whose_reply_is_lost_anywhere_runs_each_job_once() {
    cut_at_each_request(Cut::After).await;
}
