//! Whose turn it is: kinds, namespaces and priorities beside floods, and jobs that are claimed before their slots are free.

mod support;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use jobrequest::kinds::{Attempt, Executed, Executor, Registry};
use jobrequest::queue::{CancelOutcome, NewJob};
use serde_json::json;
use support::db::{Database, job};
use support::stage::{Act, PATIENCE, Running, Stage};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

/// An executor of `test_kind` that notes what it starts. Each attempt takes `takes`, and waits while the door is shut.
#[derive(Clone)]
struct Clerk(Arc<Inner>);

struct Inner {
    takes: Duration,
    door: Semaphore,
    starts: Mutex<Vec<(Uuid, Option<String>)>>,
    /// A start in the namespace `other`.
    other: Semaphore,
}

/// More than any test lets through.
const OPEN: usize = 1_000_000;

impl Clerk {
    fn new(takes: Duration) -> Self {
        let (starts, door, other) = (Mutex::default(), Semaphore::new(OPEN), Semaphore::new(0));
        Self(Arc::new(Inner { takes, door, starts, other }))
    }

    fn registry(&self) -> Registry {
        Registry::new().with(self.clone())
    }

    fn shut(&self) {
        self.0.door.forget_permits(OPEN);
    }

    fn open(&self) {
        self.0.door.add_permits(OPEN);
    }

    fn starts(&self) -> Vec<(Uuid, Option<String>)> {
        self.0.starts.lock().expect("not poisoned").clone()
    }

    fn count(&self) -> usize {
        self.0.starts.lock().expect("not poisoned").len()
    }

    async fn until_started(&self, count: usize) {
        until(|| async { self.count() >= count }, "enough attempts have started").await;
    }

    /// Until a job in the namespace `other` starts.
    async fn until_other(&self) {
        timeout(PATIENCE, self.0.other.acquire()).await.expect("it starts").expect("never closed").forget();
    }
}

impl Executor for Clerk {
    fn kind(&self) -> &'static str {
        "test_kind"
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            let inner = &*self.0;
            let namespace = attempt.namespace.clone();
            let is_other = namespace.as_deref() == Some("other");
            inner.starts.lock().expect("not poisoned").push((attempt.job_id, namespace));
            if is_other {
                inner.other.add_permits(1);
            }
            let _through = inner.door.acquire().await.expect("never closed");
            if !inner.takes.is_zero() {
                sleep(inner.takes).await;
            }
            Ok(json!(null))
        })
    }
}

async fn until(look: impl AsyncFn() -> bool, what: &str) {
    let started = Instant::now();
    while !look().await {
        assert!(started.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain until {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Enqueues in SQL: nobody is notified.
async fn insert(db: &Database, jobs: usize, columns: &str, values: &str) {
    db.run(&format!(
        "INSERT INTO jobs (kind, payload, {columns}) SELECT 'test_kind', '{{}}', {values} FROM generate_series(1, {jobs}) n"
    ))
    .await;
}

async fn count(db: &Database, which: &str) -> i64 {
    db.value(&format!("SELECT count(*) FROM jobs WHERE {which}")).await
}

async fn until_none(db: &Database, which: &str) {
    until(async || count(db, which).await == 0, which).await;
}

/// A worker that knows its kind to be fast, and whose door is shut.
async fn shut_after_fast_jobs(db: &Database, clerk: &Clerk, slots: usize) -> Running {
    let worker = Running::start(&db.queue(), clerk.registry(), |b| b.concurrency(slots));
    insert(db, 20, "namespace", "'first'").await;
    until_none(db, "status <> 'succeeded'").await;
    clerk.shut();
    worker
}

/// With slots of 20 ms of work each, all busy, another namespace's job is inserted.
async fn beside_a_flood(namespaces: usize) {
    let db = Database::new().await;
    insert(&db, 100_000, "namespace", &format!("'ns-' || n % {namespaces}")).await;
    db.run("ANALYZE jobs").await;
    let clerk = Clerk::new(Duration::from_millis(20));
    let worker = Running::start(&db.queue(), clerk.registry(), |b| b.poll(2 * SECOND).concurrency(32));
    clerk.until_started(500).await;
    for _ in 0..3 {
        let before = clerk.count();
        insert(&db, 1, "namespace", "'other'").await;
        clerk.until_other().await;
        // Counted in jobs, not in time: the slots start at most 1,600 a second, and a busy machine is slower.
        let first = clerk.count() - before;
        assert!(first < 3200, "{first} others went first, beside {namespaces} namespaces");
    }
    worker.end().await;
    assert!(count(&db, "status = 'queued'").await > 50_000, "there was a flood all along");
    assert_eq!(count(&db, "status = 'running'").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_starts_within_a_second_beside_a_hundred_thousand_of_another_namespace() {
    beside_a_flood(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_starts_within_a_second_beside_a_thousand_namespaces_with_a_hundred_each() {
    beside_a_flood(1000).await;
}

#[tokio::test]
async fn a_flood_of_slow_jobs_leaves_other_kinds_a_slot() {
    let db = Database::new().await;
    let (slow, quick) = (Stage::new(Act::Ignore), Stage::of_kind("quick_kind", Act::Succeed));
    quick.let_go(10);
    insert(&db, 200, "namespace", "'flood'").await;
    let worker = Running::start(&db.queue(), slow.registry().with(quick.clone()), |b| b.concurrency(4));
    for _ in 0..3 {
        slow.until_started().await;
    }
    for _ in 0..10 {
        db.queue().enqueue(&NewJob::new("quick_kind", json!({}))).await.expect("accepted");
        quick.until_started().await;
    }
    assert_eq!(slow.runs(), 3, "as many as a kind may take of four slots beside one other");
    slow.let_go(200);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_higher_priority_starts_soon_although_lower_ones_are_prefetched_by_the_thousand() {
    let db = Database::new().await;
    insert(&db, 100_000, "namespace", "'flood'").await;
    db.run("ANALYZE jobs").await;
    let clerk = Clerk::new(Duration::ZERO);
    let worker = Running::start(&db.queue(), clerk.registry(), |b| b.concurrency(4));
    until(async || count(&db, "status = 'running'").await > 1000, "jobs are prefetched").await;
    let new = NewJob { priority: 10, ..job() };
    let before = clerk.count();
    let id = db.queue().enqueue(&new).await.expect("accepted").id();
    until(async || clerk.starts().iter().any(|(started, _)| *started == id), "it starts").await;
    let first = clerk.starts()[before..].iter().position(|(started, _)| *started == id).expect("it has started");
    assert!(first < 20_000, "{first} of a hundred thousand others went first");
    worker.end().await;
}

#[tokio::test]
async fn a_job_on_its_last_attempt_is_never_prefetched() {
    let db = Database::new().await;
    let clerk = Clerk::new(Duration::ZERO);
    let worker = shut_after_fast_jobs(&db, &clerk, 2).await;
    insert(&db, 50, "max_attempts", "1").await;
    insert(&db, 50, "max_attempts", "3").await;
    let last = "status = 'running' AND max_attempts = 1";
    until(async || count(&db, "status = 'running' AND max_attempts = 3").await > 10, "others are prefetched").await;
    let claimed = count(&db, last).await;
    assert!(claimed <= 2, "{claimed} for 2 slots");
    clerk.open();
    until_none(&db, "status <> 'succeeded' OR attempts <> 1").await;
    worker.end().await;
    assert_eq!(clerk.count(), 120);
}

#[tokio::test]
async fn while_a_job_that_lost_two_leases_runs_nothing_is_prefetched() {
    let db = Database::new().await;
    let clerk = Clerk::new(Duration::ZERO);
    let worker = shut_after_fast_jobs(&db, &clerk, 4).await;
    insert(&db, 1, "namespace, lost_leases", "'other', 2").await;
    clerk.until_other().await;
    insert(&db, 50, "namespace", "'flood'").await;
    clerk.until_started(24).await;
    assert_eq!(count(&db, "status = 'running'").await, 4);
    clerk.open();
    until_none(&db, "status <> 'succeeded'").await;
    worker.end().await;
    assert_eq!(clerk.count(), 71);
}

#[tokio::test]
async fn a_shutdown_gives_prefetched_jobs_back_at_no_cost() {
    let db = Database::new().await;
    let clerk = Clerk::new(Duration::ZERO);
    let worker = shut_after_fast_jobs(&db, &clerk, 2).await;
    insert(&db, 100, "namespace", "'flood'").await;
    until(async || count(&db, "status = 'running'").await > 20, "jobs are prefetched").await;
    worker.ask();
    until(async || count(&db, "status = 'running'").await == 2, "all but those under way are given back").await;
    clerk.open();
    worker.end().await;
    assert_eq!((count(&db, "status = 'succeeded'").await, clerk.count()), (22, 22));
    assert_eq!(count(&db, "status = 'queued' AND attempts = 0").await, 98);
}

#[tokio::test]
async fn what_was_prefetched_in_vain_is_given_back_within_seconds_at_no_cost() {
    let db = Database::new().await;
    let clerk = Clerk::new(Duration::ZERO);
    let worker = shut_after_fast_jobs(&db, &clerk, 2).await;
    insert(&db, 100, "namespace", "'flood'").await;
    until(async || count(&db, "status = 'running'").await > 20, "jobs are prefetched").await;
    until(async || count(&db, "status = 'running'").await == 2, "they are given back").await;
    assert_eq!(count(&db, "status = 'queued' AND attempts = 0").await, 98);
    clerk.open();
    until_none(&db, "status <> 'succeeded' OR attempts <> 1").await;
    worker.end().await;
    assert_eq!(clerk.count(), 120);
}

#[tokio::test]
async fn a_prefetched_job_that_is_cancelled_never_starts() {
    let db = Database::new().await;
    let clerk = Clerk::new(Duration::ZERO);
    let worker = shut_after_fast_jobs(&db, &clerk, 2).await;
    insert(&db, 100, "namespace", "'flood'").await;
    until(async || count(&db, "status = 'running'").await > 20, "jobs are prefetched").await;
    clerk.until_started(22).await;
    let started: Vec<String> = clerk.starts().iter().map(|(id, _)| format!("'{id}'")).collect();
    let prefetched =
        format!("SELECT id FROM jobs WHERE status = 'running' AND id NOT IN ({}) LIMIT 1", started.join(","));
    let id: Uuid = db.value(&prefetched).await;
    assert_eq!(db.queue().request_cancel(id).await.expect("answered"), CancelOutcome::PendingOnWorker);
    until(async || db.status(id).await == "cancelled", "it is cancelled").await;
    clerk.open();
    until_none(&db, "status NOT IN ('succeeded', 'cancelled')").await;
    worker.end().await;
    assert_eq!((clerk.count(), clerk.starts().iter().any(|(other, _)| *other == id)), (119, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_five_thousand_jobs_each_runs_once_and_ends_once_whatever_its_lane() {
    let db = Database::new().await;
    insert(
        &db,
        5000,
        "namespace, priority, max_attempts, lost_leases",
        "'ns-' || n % 7, n % 5, 1 + n % 3, CASE n % 1000 WHEN 0 THEN 2 ELSE 0 END",
    )
    .await;
    let clerk = Clerk::new(Duration::ZERO);
    let workers = [1, 2].map(|_| Running::start(&db.queue(), clerk.registry(), |b| b.concurrency(8)));
    until_none(&db, "status <> 'succeeded'").await;
    for worker in workers {
        worker.end().await;
    }
    let mut runs = HashMap::<Uuid, usize>::new();
    clerk.starts().into_iter().for_each(|(id, _)| *runs.entry(id).or_default() += 1);
    assert_eq!((runs.len(), clerk.count()), (5000, 5000));
    assert_eq!(count(&db, "attempts = 1 AND jsonb_array_length(history) = 0").await, 5000);
}

#[tokio::test]
async fn one_by_one_each_job_is_claimed_into_a_free_slot() {
    let db = Database::new().await;
    let clerk = Clerk::new(Duration::ZERO);
    insert(&db, 300, "namespace", "'ns-' || n % 7").await;
    let worker = Running::start(&db.queue(), clerk.registry(), |b| b.concurrency(4).batch(1));
    until_none(&db, "status <> 'succeeded'").await;
    clerk.shut();
    insert(&db, 50, "namespace", "'flood'").await;
    clerk.until_started(304).await;
    assert_eq!(count(&db, "status = 'running'").await, 4);
    clerk.open();
    until_none(&db, "status <> 'succeeded'").await;
    worker.end().await;
    assert_eq!((clerk.count(), count(&db, "attempts = 1").await), (350, 350));
}

#[tokio::test]
async fn panics_and_time_limits_give_their_slots_back() {
    let db = Database::new().await;
    let (panics, hangs) = (Stage::new(Act::Panic), Stage::of_kind("hanging_kind", Act::Ignore));
    let good = Stage::of_kind("good_kind", Act::Succeed);
    good.let_go(1);
    insert(&db, 20, "max_attempts", "1").await;
    db.run(
        "INSERT INTO jobs (kind, payload, max_attempts, timeout_seconds) \
         SELECT 'hanging_kind', '{}', 1, 1 FROM generate_series(1, 4)",
    )
    .await;
    let registry = panics.registry().with(hangs.clone()).with(good.clone());
    let worker = Running::start(&db.queue(), registry, |b| b.concurrency(4));
    until_none(&db, "status <> 'failed_permanent'").await;
    assert_eq!((panics.runs(), hangs.runs()), (20, 4));
    db.queue().enqueue(&NewJob::new("good_kind", json!({}))).await.expect("accepted");
    good.until_started().await;
    worker.end().await;
}
