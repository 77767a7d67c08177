//! The worker against a real Postgres: what it promises when executors fail, hang, panic or are told to stop, when the
//! database goes away, and when it is asked to end itself.

mod support;

use std::time::Duration;

use jobrequest::admin::Health;
use jobrequest::job::RetryPolicy;
use jobrequest::kinds::Registry;
use jobrequest::queue::{CancelOutcome, NewJob, Queue, Settings};
use jobrequest::worker::{BuildError, Worker};
use serde_json::json;
use support::db::{Database, claim, claim_as, job};
use support::proxy::{Proxy, Way};
use support::stage::{Act, PATIENCE, Running, Stage};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

/// Leases of two seconds, which a busy machine can still renew, and back-offs that hardly wait.
fn quick(settings: &mut Settings) {
    settings.lease = 2 * SECOND;
    settings.retry = RetryPolicy::new(Duration::from_millis(1), Duration::from_millis(2));
}

async fn enqueue(queue: &Queue, new: NewJob) -> Uuid {
    queue.enqueue(&new).await.expect("it is enqueued").id()
}

async fn last_error(db: &Database, id: Uuid) -> String {
    db.value::<Option<String>>(&format!("SELECT last_error FROM jobs WHERE id = '{id}'")).await.unwrap_or_default()
}

#[tokio::test]
async fn a_job_that_is_cancelled_and_then_fails_is_cancelled_and_never_runs_again() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let stage = Stage::new(Act::FailWhenStopped);
    let worker = Running::start(&queue, stage.registry(), |b| b);
    let id = enqueue(&queue, job()).await;
    stage.until_started().await;
    assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::PendingOnWorker);
    db.until_status(id, "cancelled", PATIENCE).await;
    worker.end().await;
    assert_eq!((stage.runs(), db.attempts(id).await), (1, 1));
}

#[tokio::test]
async fn a_job_longer_than_its_lease_runs_once_while_its_lease_is_renewed() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let stage = Stage::new(Act::Succeed);
    let one = Running::start(&queue, stage.registry(), |b| b.name("w1"));
    let two = Running::start(&queue, stage.registry(), |b| b.name("w2"));
    let id = enqueue(&queue, job()).await;
    stage.until_started().await;
    // Two leases and a half: without renewal the rescue would have had it.
    let held = format!("SELECT locked_at - started_at > interval '5 s' FROM jobs WHERE id = '{id}'");
    let started = Instant::now();
    while !db.value::<bool>(&held).await {
        assert!(started.elapsed() < PATIENCE, "the lease is not renewed");
        let fresh: bool = db
            .value(&format!("SELECT clock_timestamp() - locked_at < interval '1.5 s' FROM jobs WHERE id = '{id}'"))
            .await;
        assert!(fresh, "renewed every third of the lease, or a little later");
        sleep(Duration::from_millis(20)).await;
    }
    stage.let_go(1);
    db.until_status(id, "succeeded", PATIENCE).await;
    one.end().await;
    two.end().await;
    assert_eq!((stage.runs(), db.attempts(id).await), (1, 1));
}

#[tokio::test]
async fn a_worker_that_was_there_all_along_takes_what_another_left_behind() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let stage = Stage::new(Act::Succeed);
    stage.let_go(2);
    let (gone, nameless) = (enqueue(&queue, job()).await, enqueue(&queue, job()).await);
    for _ in 0..2 {
        drop(claim_as(&queue, "dead").await);
    }
    let worker = Running::start(&queue, stage.registry(), |b| b);
    // Found at the worker's start would be no news: these end after it.
    db.end_lease(gone).await;
    db.run(&format!("UPDATE jobs SET locked_at = NULL WHERE id = '{nameless}'")).await;
    for id in [gone, nameless] {
        db.until_status(id, "succeeded", PATIENCE).await;
        assert_eq!(db.attempts(id).await, 2);
    }
    worker.end().await;
}

#[tokio::test]
async fn a_worker_with_a_dead_ones_name_does_not_mistake_its_job_for_its_own() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let stage = Stage::new(Act::Succeed);
    stage.let_go(1);
    let id = enqueue(&queue, job()).await;
    drop(claim_as(&queue, "pod-0").await);
    let worker = Running::start(&queue, stage.registry(), |b| b.name("pod-0"));
    // Nobody renews the lease, so it ends by itself.
    db.until_status(id, "succeeded", PATIENCE).await;
    assert_eq!((stage.runs(), db.attempts(id).await), (1, 2));
    worker.end().await;
}

#[tokio::test]
async fn a_job_whose_worker_died_on_its_last_attempt_never_runs_again() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let stage = Stage::new(Act::Succeed);
    let id = enqueue(&queue, NewJob { max_attempts: 1, ..job() }).await;
    drop(claim_as(&queue, "dead").await);
    let worker = Running::start(&queue, stage.registry(), |b| b);
    db.until_status(id, "failed_permanent", PATIENCE).await;
    worker.end().await;
    assert_eq!((stage.runs(), db.attempts(id).await), (0, 1));
}

#[tokio::test]
async fn a_rescued_job_waits_its_back_off_like_a_failed_one() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| {
        settings.lease = SECOND;
        settings.retry = RetryPolicy::new(Duration::from_secs(30), Duration::from_secs(60));
    });
    let stage = Stage::new(Act::Succeed);
    let id = enqueue(&queue, job()).await;
    drop(claim(&queue).await);
    let worker = Running::start(&queue, stage.registry(), |b| b);
    db.until_status(id, "retrying", PATIENCE).await;
    let wait: f64 =
        db.value(&format!("SELECT extract(epoch FROM run_at - updated_at)::float8 FROM jobs WHERE id = '{id}'")).await;
    assert!((30.0..=60.0).contains(&wait), "{wait} s");
    worker.end().await;
    assert_eq!(stage.runs(), 0);
}

#[tokio::test]
async fn a_panic_is_a_failed_attempt_and_the_worker_goes_on() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let (bad, good) = (Stage::of_kind("bad_kind", Act::Panic), Stage::new(Act::Succeed));
    good.let_go(5);
    let registry = good.registry().with(bad.clone());
    let worker = Running::start(&queue, registry, |b| b.concurrency(1));
    let panics = enqueue(&queue, NewJob { max_attempts: 2, ..NewJob::new("bad_kind", json!(1)) }).await;
    db.until_status(panics, "failed_permanent", PATIENCE).await;
    assert_eq!(last_error(&db, panics).await, "the executor panicked: the test's own panic");
    for _ in 0..5 {
        let id = enqueue(&queue, job()).await;
        db.until_status(id, "succeeded", PATIENCE).await;
    }
    worker.end().await;
    assert_eq!((bad.runs(), good.runs()), (2, 5));
}

#[tokio::test]
async fn a_payload_that_the_executor_cannot_read_ends_its_job_and_delays_no_other() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    db.run("INSERT INTO jobs (kind, payload) VALUES ('summarize_text', '[1, 2]')").await;
    db.run("INSERT INTO jobs (kind, payload) VALUES ('summarize_text', '{\"text\": \"One sentence.\"}')").await;
    let id = |payload: &str| format!("SELECT id FROM jobs WHERE payload {payload}");
    let bad: Uuid = db.value(&id("= '[1, 2]'")).await;
    let good: Uuid = db.value(&id("<> '[1, 2]'")).await;
    let registry = Registry::new().with(jobrequest::kinds::summary::SummarizeText::default());
    let worker = Running::start(&queue, registry, |b| b.concurrency(1));
    db.until_status(good, "succeeded", PATIENCE).await;
    db.until_status(bad, "failed_permanent", PATIENCE).await;
    assert!(last_error(&db, bad).await.starts_with("PayloadInvalid: "), "{}", last_error(&db, bad).await);
    worker.end().await;
}

#[tokio::test]
async fn a_kind_that_this_worker_does_not_know_stays_for_others() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let (stage, other) = (Stage::new(Act::Succeed), Stage::of_kind("other_kind", Act::Succeed));
    stage.let_go(1);
    let unknown = enqueue(&queue, NewJob::new("future_kind", json!({}))).await;
    let unwanted = enqueue(&queue, NewJob::new("other_kind", json!({}))).await;
    let known = enqueue(&queue, job()).await;
    let worker = Running::start(&queue, stage.registry().with(other), |b| b.kinds(["test_kind"]));
    db.until_status(known, "succeeded", PATIENCE).await;
    worker.end().await;
    for id in [unknown, unwanted] {
        assert_eq!((db.status(id).await.as_str(), db.attempts(id).await), ("queued", 0));
    }
}

#[tokio::test]
async fn a_worker_is_not_built_for_kinds_without_an_executor() {
    let db = Database::new().await;
    let build = |registry, kinds: &[&str]| Worker::builder(db.queue(), registry).kinds(kinds.to_vec()).build().err();
    let unknown = build(Stage::new(Act::Fail).registry(), &["test_kind", "send_mail"]);
    assert_eq!(unknown, Some(BuildError::UnknownKind { kind: "send_mail".to_owned(), known: vec!["test_kind"] }));
    assert_eq!(build(Registry::new(), &[]), Some(BuildError::NoExecutor));
}

#[tokio::test]
async fn the_seventieth_failure_waits_no_longer_than_the_cap() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.lease = SECOND);
    let stage = Stage::new(Act::Fail);
    stage.let_go(1);
    let id = enqueue(&queue, NewJob { max_attempts: 100, ..job() }).await;
    db.run(&format!("UPDATE jobs SET attempts = 70 WHERE id = '{id}'")).await;
    let worker = Running::start(&queue, stage.registry(), |b| b);
    db.until_status(id, "retrying", PATIENCE).await;
    let wait: f64 =
        db.value(&format!("SELECT extract(epoch FROM run_at - finished_at)::float8 FROM jobs WHERE id = '{id}'")).await;
    assert!((1.0..=60.0).contains(&wait), "{wait} s");
    assert_eq!(last_error(&db, id).await, "TestFailure: as the test wanted");
    worker.end().await;
}

#[tokio::test]
async fn an_attempt_that_outlives_its_time_limit_is_dropped_and_fails() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let stage = Stage::new(Act::Ignore);
    let worker = Running::start(&queue, stage.registry(), |b| b);
    let began = Instant::now();
    let id = enqueue(&queue, NewJob { timeout_seconds: 1, max_attempts: 1, ..job() }).await;
    let gone = stage.until_gone().await - began;
    assert!(gone >= Duration::from_millis(900) && gone < 4 * SECOND, "{gone:?}");
    db.until_status(id, "failed_permanent", PATIENCE).await;
    assert_eq!(last_error(&db, id).await, "Timeout: the attempt took longer than its time limit of 1 s");
    worker.end().await;
    assert_eq!(stage.runs(), 1);
}

#[tokio::test]
async fn a_worker_runs_as_many_jobs_at_once_as_it_has_slots_and_claims_no_more() {
    let db = Database::new().await;
    let queue = db.queue_with(|_| {});
    let stage = Stage::new(Act::Succeed);
    let worker = Running::start(&queue, stage.registry(), |b| b.concurrency(3));
    for _ in 0..5 {
        enqueue(&queue, job()).await;
    }
    for _ in 0..3 {
        stage.until_started().await;
    }
    let count = "SELECT count(*) FROM jobs WHERE status = 'running'";
    assert_eq!(db.value::<i64>(count).await, 3);
    stage.let_go(1);
    stage.until_started().await;
    // A slot is free once its attempt has ended; that the end be written is not waited for.
    let started = Instant::now();
    while db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'succeeded'").await == 0 {
        assert!(started.elapsed() < PATIENCE, "the end of the first attempt is not written");
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!((db.value::<i64>(count).await, stage.runs()), (3, 4));
    stage.let_go(4);
    stage.until_started().await;
    worker.end().await;
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'succeeded'").await, 5);
}

#[tokio::test]
async fn a_listening_worker_starts_a_job_and_hears_of_its_cancel_without_polling() {
    let db = Database::new().await;
    let queue = db.queue_with(|_| {});
    let stage = Stage::new(Act::Stop);
    let slow = |b: jobrequest::worker::Builder| b.poll(Duration::from_secs(3600)).listen(db.options());
    let worker = Running::start(&queue, stage.registry(), slow);
    let id = enqueue(&queue, job()).await;
    stage.until_started().await;
    let asked = Instant::now();
    queue.request_cancel(id).await.expect("answered");
    stage.until_stopped().await;
    assert!(asked.elapsed() < 2 * SECOND, "{:?}", asked.elapsed());
    db.until_status(id, "cancelled", PATIENCE).await;
    worker.end().await;
}

#[tokio::test]
async fn a_worker_that_hears_nothing_learns_of_a_cancel_within_two_seconds() {
    let db = Database::new().await;
    let queue = db.queue_with(|_| {});
    let stage = Stage::new(Act::Stop);
    let worker = Running::start(&queue, stage.registry(), |b| b);
    let id = enqueue(&queue, job()).await;
    stage.until_started().await;
    let asked = Instant::now();
    // As from psql: no notification.
    db.run(&format!("UPDATE jobs SET cancel_requested = true WHERE id = '{id}'")).await;
    stage.until_stopped().await;
    assert!(asked.elapsed() < 2 * SECOND, "{:?}", asked.elapsed());
    db.until_status(id, "cancelled", PATIENCE).await;
    worker.end().await;
}

#[tokio::test]
async fn an_executor_deaf_to_a_cancel_is_dropped_unless_it_is_past_its_point_of_no_return() {
    let db = Database::new().await;
    let queue = db.queue_with(|_| {});
    let (deaf, committed) = (Stage::new(Act::Ignore), Stage::of_kind("committed_kind", Act::Commit));
    let worker = Running::start(&queue, deaf.registry().with(committed.clone()), |b| b);
    let dropped = enqueue(&queue, job()).await;
    let let_be = enqueue(&queue, NewJob::new("committed_kind", json!({}))).await;
    deaf.until_started().await;
    committed.until_started().await;
    for id in [dropped, let_be] {
        assert_eq!(queue.request_cancel(id).await.expect("answered"), CancelOutcome::PendingOnWorker);
    }
    committed.until_stopped().await;
    db.until_status(dropped, "cancelled", PATIENCE).await;
    assert_eq!(db.status(let_be).await, "running", "the deaf one has had its grace, and so would this one");
    committed.let_go(1);
    db.until_status(let_be, "succeeded", PATIENCE).await;
    worker.end().await;
}

#[tokio::test]
async fn a_lost_lease_stops_the_executor_and_nothing_of_it_is_written() {
    let db = Database::new().await;
    let queue = db.queue_with(|settings| settings.lease = SECOND);
    let stage = Stage::new(Act::Ignore);
    let worker = Running::start(&queue, stage.registry(), |b| b.concurrency(1));
    let id = enqueue(&queue, job()).await;
    stage.until_started().await;
    // As if the rescue had replaced the claim and another worker had it.
    db.run(&format!("UPDATE jobs SET claim_token = gen_random_uuid(), locked_by = 'w2', locked_at = now() + interval '1 h' WHERE id = '{id}'"))
        .await;
    let row = db.row(id).await;
    stage.until_gone().await;
    worker.end().await;
    assert_eq!(db.row(id).await, row);
}

#[tokio::test]
async fn a_shutdown_lets_jobs_end_and_hands_the_rest_back_free_of_cost() {
    let db = Database::new().await;
    let queue = db.queue_with(|_| {});
    let (short, long) = (Stage::new(Act::Succeed), Stage::of_kind("long_kind", Act::Ignore));
    let committed = Stage::of_kind("committed_kind", Act::Commit);
    let registry = short.registry().with(long.clone()).with(committed.clone());
    let worker = Running::start(&queue, registry, |b| b.shutdown_grace(2 * SECOND));
    let ends = enqueue(&queue, job()).await;
    let handed_back = enqueue(&queue, NewJob::new("long_kind", json!({}))).await;
    let past_return = enqueue(&queue, NewJob::new("committed_kind", json!({}))).await;
    for stage in [&short, &long, &committed] {
        stage.until_started().await;
    }
    worker.ask();
    let unclaimed = enqueue(&queue, job()).await;
    short.let_go(1);
    db.until_status(ends, "succeeded", PATIENCE).await;
    committed.until_stopped().await;
    committed.let_go(1);
    db.until_status(past_return, "succeeded", PATIENCE).await;
    let took = worker.end().await;
    assert!(took < 2 * SECOND, "{took:?} more than was left of the grace");
    assert_eq!((db.status(handed_back).await.as_str(), db.attempts(handed_back).await), ("queued", 0));
    assert_eq!((db.status(unclaimed).await.as_str(), db.attempts(unclaimed).await), ("queued", 0));
    assert_eq!(short.runs(), 1, "a worker that ends claims nothing");
}

#[tokio::test]
async fn a_shutdown_waits_no_longer_than_its_pod_for_what_can_not_be_taken_back_and_says_that_it_may_have_happened() {
    let db = Database::new().await;
    let queue = db.queue_with(|_| {});
    let stage = Stage::new(Act::Commit);
    let worker = Running::start(&queue, stage.registry(), |b| b.shutdown_grace(SECOND));
    let id = enqueue(&queue, job()).await;
    stage.until_started().await;
    worker.ask();
    let took = worker.end().await;
    assert!(took < 15 * SECOND, "{took:?} is more than the chart gives a Pod beyond the grace");
    assert_eq!((db.status(id).await.as_str(), db.attempts(id).await), ("retrying", 1));
    assert!(last_error(&db, id).await.starts_with("Interrupted: "), "{}", last_error(&db, id).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn an_executor_that_never_yields_keeps_its_slot_and_holds_up_nothing_else() {
    let db = Database::new().await;
    let queue = db.queue_with(quick);
    let (blocking, good) = (Stage::of_kind("blocking_kind", Act::Block), Stage::new(Act::Succeed));
    good.let_go(1);
    let worker = Running::start(&queue, good.registry().with(blocking.clone()), |b| b.concurrency(2));
    let new = NewJob { timeout_seconds: 1, max_attempts: 1, ..NewJob::new("blocking_kind", json!({})) };
    let stuck = enqueue(&queue, new).await;
    blocking.until_started().await;
    let id = enqueue(&queue, job()).await;
    db.until_status(id, "succeeded", PATIENCE).await;
    db.until_status(stuck, "failed_permanent", PATIENCE).await;
    blocking.let_go(1);
    worker.end().await;
}

#[tokio::test]
async fn a_claim_whose_reply_was_lost_is_taken_up_and_costs_no_attempt() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    let stage = Stage::new(Act::Succeed);
    stage.let_go(1);
    let id = enqueue(&db.queue(), job()).await;
    proxy.lose_the_reply_to(b"test_kind");
    let worker = Running::start(&queue, stage.registry(), |b| b);
    db.until_status(id, "succeeded", PATIENCE).await;
    assert!(proxy.has_seen_it());
    worker.end().await;
    assert_eq!((stage.runs(), db.attempts(id).await), (1, 1));
}

#[tokio::test]
async fn a_claim_whose_reply_was_lost_just_before_a_shutdown_is_given_back_at_no_cost() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    let stage = Stage::new(Act::Ignore);
    let id = enqueue(&db.queue(), NewJob { max_attempts: 1, ..job() }).await;
    proxy.lose_the_reply_to(b"WITH ORDINALITY");
    let worker = Running::start(&queue, stage.registry(), |b| b);
    db.until_status(id, "running", PATIENCE).await;
    worker.ask();
    worker.end().await;
    assert!(proxy.has_seen_it());
    assert_eq!((db.status(id).await.as_str(), db.attempts(id).await), ("queued", 0));
}

#[tokio::test]
async fn a_job_that_ends_while_the_database_is_away_is_written_when_it_is_back() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    let (stage, health) = (Stage::new(Act::Succeed), Health::new());
    let worker = Running::start(&queue, stage.registry(), |b| b.health(health.clone()));
    let id = enqueue(&db.queue(), job()).await;
    stage.until_started().await;
    proxy.set(Way::Refused);
    stage.let_go(1);
    stage.until_gone().await;
    let started = Instant::now();
    while health.readiness().is_ok() {
        assert!(started.elapsed() < PATIENCE, "the worker does not say that its database is away");
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(health.liveness(), Ok(()), "a restart would not help");
    assert_eq!(db.status(id).await, "running");
    proxy.set(Way::Open);
    db.until_status(id, "succeeded", PATIENCE).await;
    worker.end().await;
    assert_eq!((stage.runs(), db.attempts(id).await), (1, 1));
}

#[tokio::test]
async fn a_worker_cut_off_from_the_database_stops_its_executor_before_the_lease_ends() {
    for way in [Way::Refused, Way::Silent] {
        let db = Database::new().await;
        let proxy = Proxy::before(&db.options()).await;
        let mut settings = Settings::default();
        quick(&mut settings);
        settings.lease = 3 * SECOND;
        let cut_off = Queue::new(proxy.options(db.options()), settings.clone());
        let (stage, other) = (Stage::new(Act::Ignore), Stage::new(Act::Succeed));
        other.let_go(1);
        let worker = Running::start(&cut_off, stage.registry(), |b| b.name("cut-off"));
        let queue = Queue::new(db.options(), settings);
        let id = enqueue(&queue, job()).await;
        stage.until_started().await;
        proxy.set(way);
        let cut = Instant::now();
        let held = stage.until_gone().await - cut;
        assert!(held < 3 * SECOND, "{way:?}: it went on for {held:?}");
        let lease: f64 = db
            .value(&format!("SELECT extract(epoch FROM locked_at + make_interval(secs => lease_seconds) - clock_timestamp())::float8 FROM jobs WHERE id = '{id}'"))
            .await;
        assert!(lease > 0.0, "{way:?}: the executor outlived its lease by {} s", -lease);
        let rescuer = Running::start(&queue, other.registry(), |b| b.name("rescuer"));
        db.until_status(id, "succeeded", PATIENCE).await;
        let row = db.row(id).await;
        proxy.set(Way::Open);
        worker.end().await;
        rescuer.end().await;
        assert_eq!(db.row(id).await, row, "{way:?}: the worker that was cut off changes nothing");
        assert_eq!((stage.runs(), other.runs(), db.attempts(id).await), (1, 1, 2));
    }
}

#[tokio::test]
async fn a_worker_whose_database_is_away_asks_seldom_and_goes_on_by_itself() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    let stage = Stage::new(Act::Succeed);
    stage.let_go(1);
    proxy.set(Way::Refused);
    let listen = proxy.options(db.options());
    let worker = Running::start(&queue, stage.registry(), |b| b.listen(listen));
    // A rate takes time to measure.
    sleep(5 * SECOND).await;
    let tried = proxy.connections();
    assert!(tried > 1 && tried < 50, "{tried} connections in 5 s");
    proxy.set(Way::Open);
    let id = enqueue(&db.queue(), job()).await;
    db.until_status(id, "succeeded", PATIENCE).await;
    worker.end().await;
}
