//! The schema: what plain SQL may do, what the database refuses, migrations that race, and a database that changes
//! under a living program.

mod support;

use std::time::Duration;

use chrono::{DateTime, Utc};
use jobrequest::job::Cause;
use jobrequest::queue::{
    AttemptEnd, Channel, ListFilter, NewJob, Payloads, Queue, SchemaState, Settings, SurveyFrom, Want, migrate,
};
use serde_json::json;
use sqlx::Connection;
use sqlx::postgres::PgListener;
use uuid::Uuid;

use support::db::{Database, claim, claimed, failure, job, job_of};

#[tokio::test]
async fn a_job_inserted_from_psql_gets_a_version_7_id_and_runs() {
    let db = Database::new().await;
    db.run("INSERT INTO jobs (kind, payload) VALUES ('test_kind', '{\"n\": 1}')").await;
    let (id, version, variant, age): (Uuid, i32, i32, f64) = db
        .one(
            "SELECT id, get_byte(uuid_send(id), 6) >> 4, get_byte(uuid_send(id), 8) >> 6, \
             abs(extract(epoch FROM now()) * 1000 \
                 - ('x' || encode(substring(uuid_send(id) FOR 6), 'hex'))::bit(48)::bigint)::float8 FROM jobs",
        )
        .await;
    assert_eq!((version, variant), (7, 0b10));
    assert!(age < 60_000.0, "the id holds the time of creation, {age} ms off");
    let claimed = claim(&db.queue()).await;
    assert_eq!((claimed.id(), claimed.attempt(), claimed.max_attempts()), (id, 1, 3));
    assert_eq!(
        (claimed.payload().expect("it came along").get(), claimed.timeout()),
        ("{\"n\": 1}", Duration::from_secs(300))
    );
}

#[tokio::test]
async fn ids_made_in_sql_are_unique_and_in_order_of_time() {
    let db = Database::new().await;
    let ids: Vec<(Uuid,)> =
        sqlx::query_as("SELECT jobs_new_id() FROM generate_series(1, 2000)").fetch_all(db.pool()).await.expect("made");
    let first_of_each = |id: &(Uuid,)| id.0.get_timestamp().expect("version 7").to_unix();
    assert!(ids.windows(2).all(|pair| first_of_each(&pair[0]) <= first_of_each(&pair[1])));
    let unique: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(unique.len(), ids.len());
}

#[tokio::test]
async fn the_database_refuses_what_the_queue_promises_never_to_write() {
    let db = Database::new().await;
    let id = db.queue().enqueue(&NewJob { max_attempts: 2, ..job() }).await.expect("accepted").id();
    let before = db.row(id).await;
    let long = "x".repeat(256);
    let huge = "x".repeat(4097);
    let refused = [
        ("status = 'running', attempts = 3", "jobs_attempts_le_max"),
        ("attempts = -1", "jobs_attempts_nonneg"),
        ("attempts = 2", "jobs_waiting_has_an_attempt_left"),
        ("status = 'retrying', attempts = 2", "jobs_waiting_has_an_attempt_left"),
        ("max_attempts = 0", "jobs_max_attempts_positive"),
        ("max_attempts = 101", "jobs_max_attempts_positive"),
        ("cancel_requested = true", "jobs_waiting_is_not_cancelled"),
        ("status = 'done'", "jobs_status_known"),
        ("kind = 'Not a name'", "jobs_kind_is_a_name"),
        ("priority = 1001", "jobs_priority_range"),
        ("timeout_seconds = 0", "jobs_timeout_range"),
        ("lease_seconds = 0", "jobs_lease_positive"),
        ("history = '{}'", "jobs_history_is_a_list"),
        ("idempotency_key = ''", "jobs_key_length"),
        (&format!("idempotency_key = '{long}'"), "jobs_key_length"),
        (&format!("last_error = '{huge}'"), "jobs_last_error_bounded"),
        ("run_at = '-infinity'", "jobs_times_finite"),
        ("run_at = 'infinity'", "jobs_times_finite"),
        ("run_at = '290000-01-01'", "jobs_times_finite"),
        ("run_at = '4000-01-01 BC'", "jobs_times_finite"),
        ("wanted_run_at = 'infinity'", "jobs_times_finite"),
        ("created_at = 'infinity'", "jobs_times_finite"),
        ("updated_at = '-infinity'", "jobs_times_finite"),
        ("locked_at = 'infinity'", "jobs_times_finite"),
        ("started_at = 'infinity'", "jobs_times_finite"),
        ("finished_at = '-infinity'", "jobs_times_finite"),
        ("handed_back_at = '-infinity'", "jobs_times_finite"),
    ];
    for (change, constraint) in refused {
        let message = db.refuses(&format!("UPDATE jobs SET {change}")).await;
        assert!(message.contains(constraint), "{change}: {message}");
    }
    assert_eq!(db.row(id).await, before);
}

#[tokio::test]
async fn times_are_exact_instants_whatever_the_zones_of_the_database_and_its_writers() {
    let db = Database::new().await;
    let name: String = db.value("SELECT current_database()").await;
    db.run(&format!("ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'")).await;
    let queue = Queue::new(db.options().options([("TimeZone", "Europe/Warsaw")]), Settings::default());
    // The hour that does not exist in Warsaw, and the same instants in other words.
    for (given, utc) in [
        ("2030-03-31T02:30:00+02:00", "2030-03-31T00:30:00Z"),
        ("2030-03-31T02:30:00Z", "2030-03-31T02:30:00Z"),
        ("2030-10-27T02:30:00.123456+01:00", "2030-10-27T01:30:00.123456Z"),
    ] {
        let instant: DateTime<Utc> = given.parse().expect("a time");
        let id = queue.enqueue(&NewJob { run_at: Some(instant), ..job() }).await.expect("accepted").id();
        let mut tokyo = db.connect().await;
        let exact: (bool,) = sqlx::query_as("SELECT run_at = $2::text::timestamptz FROM jobs WHERE id = $1")
            .bind(id)
            .bind(utc)
            .fetch_one(&mut tokyo)
            .await
            .expect("read");
        assert!(exact.0, "{given}");
        let job = queue.get(id).await.expect("it is there");
        assert_eq!((job.run_at, job.wanted_run_at), (instant, Some(instant)));
    }
    // Due now is due now, and the history's times (text in jsonb) read back as the same instants.
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.map(drop).expect("answered");
    db.make_due(id).await;
    drop(claim(&queue).await);
    db.end_lease(id).await;
    db.queue().recover_stale().await.expect("answered");
    let job = queue.get(id).await.expect("it is there");
    assert_eq!(job.history.len(), 2);
    for past in &job.history {
        assert!((Utc::now() - past.to).num_seconds().abs() < 60, "{past:?}");
    }
}

#[tokio::test]
async fn eight_migrations_at_once_on_an_empty_database_end_in_one_schema() {
    let db = Database::empty().await;
    assert_eq!(db.queue().schema_state().await.expect("answered"), SchemaState::Behind(count_of_migrations()));
    let all = (0..8).map(|_| {
        let options = db.options();
        tokio::spawn(async move { migrate(&options).await })
    });
    for one in all.collect::<Vec<_>>() {
        one.await.expect("no panic").expect("migrated");
    }
    assert_schema_is_whole(&db).await;
}

#[tokio::test]
async fn a_migration_killed_midway_holds_nothing_up_and_leaves_nothing_half_done() {
    let db = Database::empty().await;
    // Somebody else's uncommitted table of the same name stops the first migration in the middle.
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query("CREATE TABLE jobs ()").execute(&mut *tx).await.expect("created");
    let start = || {
        std::process::Command::new(env!("CARGO_BIN_EXE_jobrequest"))
            .arg("migrate")
            .env("DATABASE_URL", db.url())
            .spawn()
            .expect("it starts")
    };
    let mut killed = start();
    db.until_blocked(1).await;
    killed.kill().and_then(|()| killed.wait()).expect("killed");
    let mut others: Vec<_> = (0..8).map(|_| start()).collect();
    db.until_blocked(9).await;
    tx.rollback().await.expect("rolled back");
    for other in &mut others {
        assert!(other.wait().expect("it ends").success());
    }
    assert_schema_is_whole(&db).await;
}

fn count_of_migrations() -> usize {
    std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).expect("readable").count()
}

async fn assert_schema_is_whole(db: &Database) {
    let queue = db.queue();
    assert_eq!(queue.schema_state().await.expect("answered"), SchemaState::Current);
    let history: (i64, i64, bool) =
        db.one("SELECT count(*), count(DISTINCT version), bool_and(success) FROM jobrequest_migrations").await;
    let all = i64::try_from(count_of_migrations()).expect("few");
    assert_eq!(history, (all, all, true));
    assert_eq!(db.value::<i64>("SELECT count(*) FROM pg_index WHERE NOT indisvalid").await, 0);
    let job = claimed(&queue, &job()).await;
    queue.mark_succeeded(job, &json!(1)).await.map(drop).expect("answered");
    migrate(&db.options()).await.expect("nothing is left to do");
}

#[tokio::test]
async fn a_column_added_by_a_later_version_breaks_no_living_program() {
    let db = Database::new().await;
    // One connection, so that every statement is prepared before the change and used after it.
    let queue = db.queue_with(|settings| settings.max_connections = 1);
    for round in 0..2 {
        let (new, uid) = job_of(&format!("r{round}"));
        let id = queue.enqueue(&new).await.expect("accepted").id();
        let first = claim(&queue).await;
        queue.heartbeat(&[first.lease()]).await.expect("answered");
        queue.look_for_cancels(&[first.lease()]).await.expect("answered");
        queue.mark_failed_or_retry(first, &failure(Cause::Passing)).await.map(drop).expect("answered");
        db.make_due(id).await;
        drop(claim(&queue).await);
        db.end_lease(id).await;
        assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
        queue.held(uid).await.expect("answered");
        let revision = queue.get(id).await.expect("answered").revision;
        queue.list(&ListFilter::default()).await.expect("answered");
        queue.depth().await.expect("answered");
        queue.due(None, 10).await.expect("answered");
        queue.acknowledge(uid, revision).await.expect("answered");
        db.make_due(id).await;
        let last = claim(&queue).await;
        assert_eq!(last.attempt(), 3, "no attempt was burnt");
        queue.request_cancel(id).await.expect("answered");
        queue.finalize_cancelled(last).await.map(drop).expect("answered");
        queue.retry(id, &round.to_string()).await.expect("answered");
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        queue.release(uid).await.expect("answered");
        queue.purge().await.expect("answered");

        assert!(queue.enqueue_many(&[job(), job(), job()]).await.iter().all(Result::is_ok));
        let from = [SurveyFrom { kind: "test_kind".to_owned(), after: None }];
        let lane = queue.survey(&from, 1).await.expect("answered").remove(0).lane;
        let wants = [Want { lane, from: None, limit: 1 }];
        let mut claims = queue.claim_from("w1", &wants, 1, Payloads::All).await.expect("answered");
        claims.extend(queue.fetch_many("w1", &["test_kind"], 2).await.expect("answered"));
        let failed = AttemptEnd::Failed(failure(Cause::Permanent));
        let ends = [AttemptEnd::Succeeded(json!(1)), AttemptEnd::Succeeded(json!(null)), failed];
        let ends = queue.finish_many(claims.into_iter().zip(ends).collect()).await;
        assert!(ends.len() == 3 && ends.iter().all(Result::is_ok));
        if round == 0 {
            db.run("ALTER TABLE jobs ADD COLUMN note text; ALTER TABLE job_resources ADD COLUMN note text").await;
        }
    }
}

#[tokio::test]
async fn a_version_that_knows_a_later_status_stops_no_claim_of_ours() {
    let db = Database::new().await;
    let queue = db.queue();
    db.run(
        "ALTER TABLE jobs DROP CONSTRAINT jobs_status_known; \
         INSERT INTO jobs (kind, payload, status) VALUES ('test_kind', '{}', 'paused')",
    )
    .await;
    let job = claimed(&queue, &job()).await;
    queue.mark_succeeded(job, &json!(1)).await.map(drop).expect("answered");
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 0);
    assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'paused'").await, 1);
}

#[tokio::test]
async fn notifications_carry_nothing_whatever_the_size_of_the_job() {
    let db = Database::new().await;
    let queue = db.queue();
    let mut listener = PgListener::connect_with(db.pool()).await.expect("connected");
    for channel in Channel::ALL {
        listener.listen(channel.name()).await.expect("listening");
    }
    let mut heard = async |wanted: Channel| loop {
        let notification = tokio::time::timeout(Duration::from_secs(10), listener.recv()).await;
        let notification = notification.unwrap_or_else(|_| panic!("{wanted:?} is not heard")).expect("connected");
        assert_eq!(notification.payload(), "");
        if notification.channel() == wanted.name() {
            return;
        }
    };
    // Nobody would look at the changes of a row that no resource stands for.
    let (new, _) = job_of("large");
    let large = NewJob { payload: json!({"text": "x".repeat(20_000)}), ..new };
    let id = queue.enqueue(&large).await.expect("accepted").id();
    heard(Channel::Ready).await;
    let job = claim(&queue).await;
    heard(Channel::Changed).await;
    queue.request_cancel(id).await.expect("answered");
    heard(Channel::Cancel).await;
    queue.finalize_cancelled(job).await.map(drop).expect("answered");
    heard(Channel::Changed).await;
}
