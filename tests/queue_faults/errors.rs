//! What Postgres itself says instead of doing what it is asked: each operation calls it passing, has done nothing by
//! halves, and does it once when it is asked again.

use std::time::{Duration, Instant};

use jobrequest::queue::{Error, Queue};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row};

use crate::db::{Database, goes_through_pooler, settings};
use crate::operations::{Expected, OPERATIONS, Operation, prepare, repeat, stage, tables};

const PATIENCE: Duration = Duration::from_secs(20);

/// A queue whose connections are new, so that the database's settings count for them.
fn fresh(db: &Database) -> Queue {
    Queue::new(db.queue_options(), settings(|settings| settings.time_limit = Duration::from_secs(15)))
}

fn code(error: &Error) -> Option<String> {
    match error {
        Error::Db(sqlx::Error::Database(error)) => error.code().map(Into::into),
        // A batch keeps the words.
        Error::Batch { message } => message.split_once("SQLSTATE ").map(|(_, code)| code[..5].to_owned()),
        _ => None,
    }
}

/// Tries each operation while the database is wrong, as it is after `set(true)`; how many met it.
async fn try_all(db: &Database, set: impl AsyncFn(bool), expected_code: &str) -> usize {
    let mut met = 0;
    for operation in OPERATIONS {
        let what = format!("{}, with {expected_code},", operation.name);
        let clean = fresh(db);
        let expected = Expected::of(db, &clean, operation).await;
        let mut hand = prepare(db, &clean, operation).await;
        set(true).await;
        let tried = (operation.act)(&fresh(db), &mut hand).await;
        set(false).await;
        let done = expected.is_done(&what, operation, &tables(db).await);
        if let Err(error) = tried {
            let code = code(&error).unwrap_or_default();
            assert!(error.is_passing(), "{what} {error} is not said to pass");
            assert_eq!(code, expected_code, "{what} {error}");
            assert!(!done || expected.is_no_change(), "{what} {error}, and it is done");
            repeat(&fresh(db), operation, &mut hand, &what).await;
            expected.must_be_done(&what, operation, &tables(db).await);
            met += 1;
        } else {
            assert!(done, "{what} claims to be done");
        }
    }
    met
}

/// A trigger that raises what `fault` holds, by the statement or when it commits; but not for a session named `beside`.
/// The sequence `met` counts how often.
pub async fn raise_by_trigger(db: &Database, when: &str) {
    db.run(
        "CREATE TABLE fault (code text NOT NULL); \
         CREATE SEQUENCE met; \
         CREATE FUNCTION raise_fault() RETURNS trigger LANGUAGE plpgsql AS $$ \
             DECLARE wanted text := (SELECT code FROM fault); \
             BEGIN \
                 IF wanted IS NOT NULL AND current_setting('application_name') <> 'beside' THEN \
                     PERFORM nextval('met'); \
                     RAISE EXCEPTION 'as the test wants' USING ERRCODE = wanted; \
                 END IF; \
                 RETURN coalesce(NEW, OLD); \
             END $$",
    )
    .await;
    for table in ["jobs", "job_resources", "job_keys", "job_releases", "job_installs"] {
        db.run(&match when {
            "statement" => format!(
                "CREATE TRIGGER fault BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW \
                 EXECUTE FUNCTION raise_fault()"
            ),
            _ => format!(
                "CREATE CONSTRAINT TRIGGER fault AFTER INSERT OR UPDATE OR DELETE ON {table} \
                 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION raise_fault()"
            ),
        })
        .await;
    }
}

/// How many of the operations change something in the scene.
const CHANGES: usize = 20;

async fn raised(when: &str, codes: &[&str]) {
    let db = stage().await;
    raise_by_trigger(&db, when).await;
    for code in codes {
        let on = format!("INSERT INTO fault VALUES ('{code}')");
        let set = async |wrong| db.run(if wrong { &on } else { "DELETE FROM fault" }).await;
        let met = try_all(&db, set, code).await;
        assert!(met >= CHANGES, "{code}: {met} operations met it");
    }
}

#[tokio::test]
async fn a_full_disk_or_memory_is_passing_and_nothing_is_half_done() {
    raised("statement", &["53100", "53200"]).await;
}

#[tokio::test]
async fn a_serialization_failure_or_a_deadlock_or_a_timeout_is_passing_wherever_it_strikes() {
    raised("statement", &["40001", "40P01", "57014"]).await;
}

#[tokio::test]
async fn a_serialization_failure_or_a_full_disk_at_the_commit_is_passing_and_nothing_is_half_done() {
    raised("commit", &["40001", "53100"]).await;
}

/// For sessions that begin from now on.
async fn set_read_only(db: &Database, wanted: bool) {
    let wanted = if wanted { "on" } else { "off" };
    let sql = format!("ALTER DATABASE {} SET default_transaction_read_only = {wanted}", db.name());
    db.run(&format!("BEGIN READ WRITE; {sql}; COMMIT")).await;
    if !goes_through_pooler() {
        return;
    }
    // A pooler's servers are as old as their first client, and it takes a moment to see that one is gone.
    db.run(END_OTHER_SESSIONS).await;
    let queue = fresh(db);
    let started = Instant::now();
    let new_session = async || -> sqlx::Result<bool> {
        let shown = sqlx::raw_sql("SHOW default_transaction_read_only").fetch_one(queue.pool()).await?;
        Ok(shown.get::<String, _>(0) == wanted)
    };
    while !matches!(new_session().await, Ok(true)) {
        assert!(started.elapsed() < PATIENCE, "the pooler keeps its servers");
    }
}

#[tokio::test]
async fn a_read_only_standby_is_passing_and_nothing_is_half_done() {
    let db = stage().await;
    assert!(try_all(&db, async |wrong| set_read_only(&db, wrong).await, "25006").await >= CHANGES);
}

#[tokio::test]
async fn a_database_that_takes_no_more_connections_is_passing_and_nothing_is_half_done() {
    let db = stage().await;
    let mut inside = db.connect().await;
    let queue = Queue::new(db.queue_options(), settings(|settings| settings.time_limit = Duration::from_secs(1)));
    take_no_connections(&db, &mut inside, true).await;
    let error = queue.request_cancel(crate::operations::id(1)).await.expect_err("no connection is to be had");
    // A pooler keeps its client waiting.
    assert!(error.is_passing() && (error.is_outage() || goes_through_pooler()), "{error}");
    take_no_connections(&db, &mut inside, false).await;
    let started = Instant::now();
    while !matches!(queue.request_cancel(crate::operations::id(1)).await, Err(Error::NotFound)) {
        assert!(started.elapsed() < PATIENCE, "it takes connections again");
    }
}

/// Ends those that are there, and takes no other; `inside` stays.
pub async fn take_no_connections(db: &Database, inside: &mut PgConnection, wanted: bool) {
    let limit = if wanted { 0 } else { -1 };
    let sql = format!("ALTER DATABASE {} WITH CONNECTION LIMIT {limit}; {END_OTHER_SESSIONS}", db.name());
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(inside).await.expect("its connection stays");
}

/// Of clients: autovacuum works here too, and may not be ended by whoever owns the database.
pub const END_OTHER_SESSIONS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";

/// Holds every row of the scene.
async fn hold_all(holder: &mut PgConnection) -> sqlx::Transaction<'_, sqlx::Postgres> {
    let mut tx = holder.begin().await.expect("begun");
    // As an application would: a change of nothing.
    for sql in ["UPDATE jobs SET updated_at = updated_at", "UPDATE job_resources SET created_at = created_at"] {
        sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.expect("held");
    }
    tx
}

/// Waits until one of the queue's sessions waits for a lock; its process. None if the operation ended without.
async fn blocked(db: &Database, ended: impl Fn() -> bool) -> Option<i32> {
    let sql = "SELECT pid FROM pg_stat_activity \
        WHERE datname = current_database() AND backend_type = 'client backend' AND wait_event_type = 'Lock'";
    let started = Instant::now();
    loop {
        let pid: Option<(i32,)> = sqlx::query_as(sql).fetch_optional(db.pool()).await.expect("answered");
        if let Some((pid,)) = pid {
            return Some(pid);
        }
        if ended() {
            return None;
        }
        assert!(started.elapsed() < PATIENCE, "neither blocked nor ended");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What happens to an operation that waits for a row which somebody holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    /// Its session is ended, as by an administrator.
    Terminate,
    /// It has waited too long, by a limit of the database's.
    TimeOut,
    /// The holder commits: under stricter isolation the operation can't go on.
    Commit,
}

/// How many operations had to wait and met the fault.
async fn while_all_rows_are_held(db: &Database, meanwhile: Meanwhile, codes: &[&str]) -> usize {
    let clean = db.queue();
    let mut holder = db.connect().await;
    let mut met = 0;
    for operation in OPERATIONS {
        let what = operation.name;
        let expected = Expected::of(db, &clean, operation).await;
        let mut hand = prepare(db, &clean, operation).await;
        let tx = hold_all(&mut holder).await;
        let queue = fresh(db);
        let act = (operation.act)(&queue, &mut hand);
        let ended = std::cell::Cell::new(false);
        let (tried, ()) = tokio::join!(
            async {
                let tried = act.await;
                ended.set(true);
                tried
            },
            async {
                let pid = blocked(db, || ended.get()).await;
                match (meanwhile, pid) {
                    (Meanwhile::Terminate, Some(pid)) => {
                        db.run(&format!("SELECT pg_terminate_backend({pid})")).await;
                        until(|| ended.get()).await;
                        tx.rollback().await.expect("let go");
                    }
                    (Meanwhile::TimeOut, Some(_)) => {
                        until(|| ended.get()).await;
                        tx.rollback().await.expect("let go");
                    }
                    (Meanwhile::Commit, _) | (_, None) => match tx.commit().await {
                        // Under the strictest isolation an operation that did not wait may have struck the holder.
                        Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some("40001") && pid.is_none() => {}
                        committed => committed.expect("let go"),
                    },
                }
            }
        );
        // Some take what is free and leave the rest: with nothing free they have done nothing, and say so.
        let done = expected.is_done(what, operation, &tables(db).await);
        if let Err(error) = tried {
            assert!(error.is_passing(), "{what}: {error} is not said to pass");
            assert!(!done || expected.is_no_change(), "{what}: {error}, and it is done");
            let code = code(&error).unwrap_or_default();
            met += usize::from(codes.contains(&code.as_str()));
            assert!(codes.contains(&code.as_str()) || code.is_empty(), "{what}: {error} is another fault");
        }
        if !done {
            repeat(&fresh(db), operation, &mut hand, what).await;
            expected.must_be_done(what, operation, &tables(db).await);
        }
    }
    met
}

async fn until(holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "in vain");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn an_operation_whose_session_an_administrator_ends_is_passing_and_done_once_when_repeated() {
    let db = stage().await;
    // The server's word comes just before the end of its connection: the client may see either.
    let met = while_all_rows_are_held(&db, Meanwhile::Terminate, &["57P01"]).await;
    assert!(met >= 5, "{met} operations met it");
}

#[tokio::test]
async fn an_operation_that_waits_longer_than_the_databases_limit_is_passing_and_done_once_when_repeated() {
    let db = stage().await;
    db.run(&format!("ALTER DATABASE {} SET statement_timeout = '300ms'", db.name())).await;
    let met = while_all_rows_are_held(&db, Meanwhile::TimeOut, &["57014"]).await;
    assert!(met >= 5, "{met} operations met it");
}

#[tokio::test]
async fn an_operation_under_repeatable_read_meets_serialization_failures_and_is_done_once_when_repeated() {
    for isolation in ["repeatable read", "serializable"] {
        let db = stage().await;
        db.run(&format!("ALTER DATABASE {} SET default_transaction_isolation = '{isolation}'", db.name())).await;
        let met = while_all_rows_are_held(&db, Meanwhile::Commit, &["40001"]).await;
        assert!(met >= 5, "{isolation}: {met} operations met it");
    }
}

/// Operations that take a job's lock and then its resources'.
fn in_two_steps() -> impl Iterator<Item = &'static Operation> {
    let names = ["release of a waiting job", "release of a running job", "purge", "acknowledge"];
    OPERATIONS.iter().filter(move |operation| names.contains(&operation.name))
}

#[tokio::test]
async fn an_operation_that_a_deadlock_ends_is_passing_and_done_once_when_repeated() {
    let db = stage().await;
    let clean = db.queue();
    // Who has waited long enough looks for a deadlock, and ends itself: never the holder.
    let mut holder = db.options().username("postgres").connect().await.expect("the superuser is let in");
    sqlx::raw_sql("SET deadlock_timeout = '1min'").execute(&mut holder).await.expect("set");
    for operation in in_two_steps() {
        let what = operation.name;
        let expected = Expected::of(&db, &clean, operation).await;
        let mut hand = prepare(&db, &clean, operation).await;
        let mut tx = holder.begin().await.expect("begun");
        sqlx::query("UPDATE job_resources SET created_at = created_at").execute(&mut *tx).await.expect("held");
        let queue = fresh(&db);
        let (tried, ()) = tokio::join!((operation.act)(&queue, &mut hand), async {
            blocked(&db, || false).await.expect("it waits");
            // It holds the job.
            sqlx::query("UPDATE jobs SET updated_at = updated_at").execute(&mut *tx).await.expect("it let go");
            tx.rollback().await.expect("let go");
        });
        let error = tried.expect_err("it met a deadlock");
        assert_eq!(code(&error).as_deref(), Some("40P01"), "{what}: {error}");
        assert!(error.is_passing() && !expected.is_done(what, operation, &tables(&db).await), "{what}");
        repeat(&fresh(&db), operation, &mut hand, what).await;
        expected.must_be_done(what, operation, &tables(&db).await);
    }
}
