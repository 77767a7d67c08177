//! An application's open transaction holds one row's lock, for longer than a lease: that row waits, and no other does.

use std::time::Duration;

use jobrequest::job::{Cause, RetryPolicy, Status};
use jobrequest::queue::{
    AttemptEnd, ClaimedJob, Error, Finish, Lease, NewJob, Payloads, Queue, Settings, SurveyFrom, Unfinished, Want,
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::time::Instant;
use uuid::Uuid;

use crate::db::{Database, claim, failure, job};
use crate::stage::{Act, PATIENCE, Running, Stage};

/// What an application holds a row with: its own change, a reading that must stay true, a reference to it.
const WAYS: [&str; 3] = ["UPDATE", "SHARE", "KEY SHARE"];

/// An operation that waits for the held row ends with an error, long before a test's patience does.
fn impatient(settings: &mut Settings) {
    settings.time_limit = Duration::from_secs(2);
}

/// A transaction that holds the row until it is let go.
struct Held(PgConnection);

impl Held {
    async fn of(db: &Database, id: Uuid, way: &str) -> Self {
        let mut connection = db.connect().await;
        let sql = format!("BEGIN; SELECT 1 FROM jobs WHERE id = '{id}' FOR {way}");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.expect("nobody else holds it");
        Self(connection)
    }

    async fn let_go(mut self) {
        sqlx::raw_sql("ROLLBACK").execute(&mut self.0).await.expect("let go");
        self.0.close().await.expect("closed");
    }
}

async fn enqueue(queue: &Queue, jobs: usize) -> Vec<Uuid> {
    let mut ids = Vec::new();
    for _ in 0..jobs {
        ids.push(queue.enqueue(&job()).await.expect("accepted").id());
    }
    ids
}

/// So many running jobs of one worker, the first one's row held.
async fn running(db: &Database, queue: &Queue, jobs: usize, way: &str) -> (Vec<ClaimedJob>, Held) {
    enqueue(queue, jobs).await;
    let claims = queue.fetch_many("w1", &["test_kind"], jobs).await.expect("answered");
    assert_eq!(claims.len(), jobs);
    let held = Held::of(db, claims[0].id(), way).await;
    (claims, held)
}

fn leases(claims: &[ClaimedJob]) -> Vec<Lease> {
    claims.iter().map(ClaimedJob::lease).collect()
}

/// How long a job may take whose row nobody holds.
const JOB_PATIENCE: Duration = Duration::from_secs(10);

/// Its job, not finished because its row is held.
fn refused(answer: Result<Finish, Box<Unfinished>>) -> ClaimedJob {
    let Unfinished { job, error } = *answer.expect_err("its row is held");
    assert!(matches!(error, Error::RowLocked) && error.is_passing() && !error.is_outage(), "{error}");
    job
}

#[tokio::test]
async fn a_held_row_that_waits_is_passed_over_by_claims() {
    for way in WAYS {
        let db = Database::new().await;
        let queue = db.queue_with(impatient);
        let ids = enqueue(&queue, 5).await;
        let held = Held::of(&db, ids[0], way).await;
        let two = queue.fetch_many("w1", &["test_kind"], 2).await.expect("nothing is waited for");
        let from = [SurveyFrom { kind: "test_kind".to_owned(), after: None }];
        let heads = queue.survey(&from, 9).await.expect("nothing is waited for");
        let wants: Vec<_> = heads.into_iter().map(|head| Want { lane: head.lane, from: None, limit: 9 }).collect();
        let rest = queue.claim_from("w1", &wants, 9, Payloads::All).await.expect("nothing is waited for");
        let mut claimed: Vec<_> = two.iter().chain(&rest).map(ClaimedJob::id).collect();
        claimed.sort();
        assert_eq!(claimed, ids[1..], "FOR {way}");
        held.let_go().await;
        assert_eq!(claim(&queue).await.id(), ids[0]);
    }
}

#[tokio::test]
async fn a_held_row_that_runs_is_passed_over_by_heartbeats_and_others_are_renewed() {
    for way in WAYS {
        let db = Database::new().await;
        let queue = db.queue_with(impatient);
        let (claims, held) = running(&db, &queue, 4, way).await;
        let found = queue.heartbeat(&leases(&claims)).await.expect("nothing is waited for");
        for claim in &claims {
            let beat = found.iter().find(|beat| beat.token == claim.lease().token() && beat.id == claim.id());
            let renewed = beat.expect("no lease is lost").renewed;
            assert_eq!(renewed, claim.id() != claims[0].id(), "FOR {way}");
        }
        held.let_go().await;
        let found = queue.heartbeat(&leases(&claims)).await.expect("answered");
        assert!(found.len() == 4 && found.iter().all(|beat| beat.renewed));
    }
}

#[tokio::test]
async fn a_held_row_that_runs_is_passed_over_by_a_batch_finish_which_says_so() {
    for way in WAYS {
        let db = Database::new().await;
        let queue = db.queue_with(impatient);
        // One of them with a result, one without.
        let (claims, first) = running(&db, &queue, 6, way).await;
        let (one, another) = (claims[0].id(), claims[5].id());
        let second = Held::of(&db, another, way).await;
        let ends = claims.into_iter().enumerate().map(|(n, job)| match n < 3 {
            true => (job, AttemptEnd::Succeeded(json!(n))),
            false => (job, AttemptEnd::Failed(failure(Cause::Permanent))),
        });
        let mut back = Vec::new();
        for (n, answer) in queue.finish_many(ends.collect()).await.into_iter().enumerate() {
            match n {
                0 | 5 => back.push(refused(answer)),
                1 | 2 => assert_eq!(answer.expect("not held"), Finish::Done(Status::Succeeded)),
                _ => assert_eq!(answer.expect("not held"), Finish::Done(Status::FailedPermanent)),
            }
        }
        assert_eq!([back[0].id(), back[1].id()], [one, another]);
        // Alone it fares the same.
        let again = refused(queue.mark_failed_or_retry(back.pop().expect("two"), &failure(Cause::Permanent)).await);
        let alone = refused(queue.mark_succeeded(back.pop().expect("one"), &json!(0)).await);
        first.let_go().await;
        second.let_go().await;
        let done = queue.finish_many(vec![
            (alone, AttemptEnd::Succeeded(json!(0))),
            (again, AttemptEnd::Failed(failure(Cause::Permanent))),
        ]);
        let done: Vec<_> = done.await.into_iter().map(|answer| answer.expect("let go")).collect();
        assert_eq!(done, [Finish::Done(Status::Succeeded), Finish::Done(Status::FailedPermanent)], "FOR {way}");
        assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE attempts = 1").await, 6);
    }
}

#[tokio::test]
async fn a_held_row_past_its_lease_is_passed_over_by_the_rescue_and_a_finish_before_the_rescue_stands() {
    for way in WAYS {
        let db = Database::new().await;
        let queue = db.queue_with(impatient);
        let (mut claims, held) = running(&db, &queue, 3, way).await;
        held.let_go().await;
        for claim in &claims {
            db.end_lease(claim.id()).await;
        }
        let held = [Held::of(&db, claims[0].id(), way).await, Held::of(&db, claims[1].id(), way).await];
        assert_eq!(queue.recover_stale().await.expect("nothing is waited for").retried, 1, "FOR {way}");
        let finished = refused(queue.mark_succeeded(claims.remove(0), &json!(0)).await);
        for held in held {
            held.let_go().await;
        }
        // Its lease is long over, and nobody has ended it.
        assert_eq!(queue.mark_succeeded(finished, &json!(0)).await.expect("let go"), Finish::Done(Status::Succeeded));
        assert_eq!(queue.recover_stale().await.expect("answered").retried, 1);
        for claim in claims {
            assert_eq!(queue.mark_succeeded(claim, &json!(0)).await.expect("answered"), Finish::Lost);
        }
    }
}

#[tokio::test]
async fn a_held_row_that_has_ended_is_passed_over_by_the_purge() {
    for way in WAYS {
        let db = Database::new().await;
        let queue = db.queue_with(impatient);
        let ids = enqueue(&queue, 3).await;
        db.run("UPDATE jobs SET status = 'cancelled', finished_at = now() - interval '30 d'").await;
        let held = Held::of(&db, ids[1], way).await;
        assert_eq!(queue.purge().await.expect("nothing is waited for").jobs, 2, "FOR {way}");
        held.let_go().await;
        assert_eq!(queue.purge().await.expect("answered").jobs, 1);
    }
}

/// One slot for the held job, one for others. The lease is short, and so is the back-off.
fn start(db: &Database, stage: &Stage, other: &Stage) -> (Queue, Running) {
    let queue = db.queue_with(|settings| {
        settings.lease = Duration::from_secs(1);
        settings.retry = RetryPolicy::new(Duration::from_millis(1), Duration::from_millis(2));
    });
    let registry = stage.registry().with(other.clone());
    let worker = Running::start(&queue, registry, |b: jobrequest::worker::Builder| b.concurrency(8));
    (queue, worker)
}

/// While the row is held, and until its lease is long over, other jobs start and end.
async fn others_go_on(db: &Database, queue: &Queue, other: &Stage, id: Uuid) {
    let started = Instant::now();
    let over = format!("SELECT locked_at < clock_timestamp() - interval '3 s' FROM jobs WHERE id = '{id}'");
    let mut others = 0;
    while !db.value::<bool>(&over).await {
        let new = NewJob::new("other_kind", json!({}));
        let one = queue.enqueue(&new).await.expect("accepted").id();
        other.let_go(1);
        db.until_status(one, "succeeded", JOB_PATIENCE).await;
        others += 1;
        assert!(started.elapsed() < PATIENCE, "the lease is renewed though the row is held");
    }
    assert!(others > 10, "{others}");
    let once = "SELECT count(*) FROM jobs WHERE kind = 'other_kind' AND status = 'succeeded' AND attempts = 1";
    assert_eq!(db.value::<i64>(once).await, others);
}

#[tokio::test]
async fn a_worker_that_cannot_renew_a_held_rows_lease_stops_that_job_alone_and_it_runs_again_when_let_go() {
    let db = Database::new().await;
    let (stage, other) = (Stage::new(Act::Succeed), Stage::of_kind("other_kind", Act::Succeed));
    let (queue, worker) = start(&db, &stage, &other);
    let id = enqueue(&queue, 1).await[0];
    stage.until_started().await;
    let held = Held::of(&db, id, "UPDATE").await;
    others_go_on(&db, &queue, &other, id).await;
    stage.until_gone().await;
    assert_eq!((stage.runs(), db.status(id).await.as_str()), (1, "running"), "stopped, and not rescued");
    held.let_go().await;
    stage.until_started().await;
    stage.let_go(1);
    db.until_status(id, "succeeded", JOB_PATIENCE).await;
    worker.end().await;
    assert_eq!((stage.runs(), db.attempts(id).await), (2, 2));
}

#[tokio::test]
async fn a_job_that_ends_while_its_row_is_held_has_ended_once_and_delays_no_other_end() {
    let db = Database::new().await;
    let (stage, other) = (Stage::new(Act::Succeed), Stage::of_kind("other_kind", Act::Succeed));
    let (queue, worker) = start(&db, &stage, &other);
    let id = enqueue(&queue, 1).await[0];
    stage.until_started().await;
    let held = Held::of(&db, id, "UPDATE").await;
    stage.let_go(1);
    stage.until_gone().await;
    others_go_on(&db, &queue, &other, id).await;
    held.let_go().await;
    // Its end or the rescue comes first: the lease is over.
    stage.let_go(1);
    db.until_status(id, "succeeded", JOB_PATIENCE).await;
    worker.end().await;
    assert_eq!(i32::try_from(stage.runs()).expect("few"), db.attempts(id).await);
    assert!(stage.runs() <= 2);
}
