//! Leases: a finish carries its claim's token, the rescue ends what nobody renews, and attempts never pass their limit.

mod support;

use std::time::Duration;

use jobrequest::job::{Cause, Outcome, Status};
use jobrequest::queue::{AttemptFailure, Error, Finish, NewJob, Queue, Settings};
use serde_json::json;
use sqlx::Connection;
use uuid::Uuid;

use support::db::{Database, claim, claimed, failure, job};
use support::proxy::Proxy;

/// Every UPDATE of `jobs` that satisfies `condition` waits, with its row locked, for as long as the test holds this.
async fn hold_updates<'c>(
    db: &Database,
    condition: &str,
    connection: &'c mut sqlx::PgConnection,
) -> sqlx::Transaction<'c, sqlx::Postgres> {
    db.run(&format!(
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$; \
         CREATE TRIGGER hold BEFORE UPDATE ON jobs FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION hold()"
    ))
    .await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query("SELECT pg_advisory_xact_lock(1)").execute(&mut *tx).await.expect("locked");
    tx
}

/// Claims, and loses the lease: the worker is dead, but its claim is at hand as a worker's would be that was only slow.
async fn claimed_and_lost(db: &Database, queue: &Queue, new: &NewJob) -> jobrequest::queue::ClaimedJob {
    let old = claimed(queue, new).await;
    db.end_lease(old.id()).await;
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
    old
}

/// Seconds from the end of the attempt to the next one, both by the database's clock.
async fn back_off(db: &Database, id: Uuid) -> f64 {
    db.value(&format!("SELECT extract(epoch FROM run_at - finished_at)::float8 FROM jobs WHERE id = '{id}'")).await
}

#[tokio::test]
async fn a_job_that_succeeds_keeps_its_whole_result_and_what_its_attempts_came_to() {
    let db = Database::new().await;
    let queue = db.queue();
    let first = claimed(&queue, &job()).await;
    let id = first.id();
    let answer = queue.mark_failed_or_retry(first, &failure(Cause::Passing)).await.expect("answered");
    assert_eq!(answer, Finish::Done(Status::Retrying));
    db.make_due(id).await;
    let result = json!({"text": "é".repeat(5000)});
    let answer = queue.mark_succeeded(claim(&queue).await, &result).await.expect("answered");
    assert_eq!(answer, Finish::Done(Status::Succeeded));
    let job = queue.get(id).await.expect("it is there");
    assert_eq!((job.state.status(), job.attempts, job.worker.as_deref()), (Status::Succeeded, 2, Some("w1")));
    assert!(matches!(&job.state, jobrequest::job::JobState::Succeeded { result: r, .. } if *r == result));
    let outcomes: Vec<_> = job.history.iter().map(|past| (past.number, past.outcome)).collect();
    assert_eq!(outcomes, [(1, Outcome::Failed), (2, Outcome::Succeeded)]);
    assert_eq!(job.history[0].error.as_deref(), Some("it did not work"));
    let free: bool = db.value("SELECT locked_at IS NULL AND locked_by IS NULL FROM jobs").await;
    assert!(free);
}

#[tokio::test]
async fn a_result_or_an_error_that_postgres_can_not_hold_is_cleaned_and_not_refused_for_ever() {
    let db = Database::new().await;
    let queue = db.queue();
    let mut deep = json!(1);
    for _ in 0..200 {
        deep = json!([deep]);
    }
    for result in [json!({"a\0b": ["c\0d"]}), deep] {
        let job = claimed(&queue, &job()).await;
        let id = job.id();
        let answer = queue.mark_succeeded(job, &result).await.expect("accepted");
        assert_eq!(answer, Finish::Done(Status::Succeeded));
        queue.get(id).await.expect("it can be read");
    }
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    let dirty = AttemptFailure {
        cause: Cause::Passing,
        error: Some(format!("\0{}", "é".repeat(5000))),
        progress: Some(json!({"x": "\0"})),
    };
    let answer = queue.mark_failed_or_retry(job, &dirty).await.expect("accepted");
    assert_eq!(answer, Finish::Done(Status::Retrying));
    let job = queue.get(id).await.expect("it can be read");
    let error = job.last_error.expect("it has one");
    assert!(error.len() <= 4096 && error.ends_with('é'));
}

#[tokio::test]
async fn a_permanent_failure_ends_the_job_with_attempts_left() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    let answer = queue.mark_failed_or_retry(job, &failure(Cause::Permanent)).await.expect("answered");
    assert_eq!(answer, Finish::Done(Status::FailedPermanent));
    let job = queue.get(id).await.expect("it is there");
    assert_eq!((job.attempts, job.last_error.as_deref()), (1, Some("it did not work")));
}

#[tokio::test]
async fn a_job_fails_as_often_as_it_may_and_never_once_more() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&NewJob { max_attempts: 3, ..job() }).await.expect("accepted").id();
    for (attempt, after) in [(1, Status::Retrying), (2, Status::Retrying), (3, Status::FailedPermanent)] {
        let job = claim(&queue).await;
        assert_eq!(job.attempt(), attempt);
        let answer = queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.expect("answered");
        assert_eq!(answer, Finish::Done(after));
        db.make_due(id).await;
    }
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
}

#[tokio::test]
async fn a_job_whose_workers_die_ends_with_its_last_attempt() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&NewJob { max_attempts: 3, ..job() }).await.expect("accepted").id();
    for attempt in 1..=3 {
        assert_eq!(claim(&queue).await.attempt(), attempt);
        db.end_lease(id).await;
        assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
        db.make_due(id).await;
    }
    assert!(queue.fetch_next("w1", &["test_kind"]).await.expect("answered").is_none());
    let job = queue.get(id).await.expect("it is there");
    assert_eq!((job.state.status(), job.attempts), (Status::FailedPermanent, 3));
    assert!(job.history.iter().all(|past| past.outcome == Outcome::LeaseLost) && job.history.len() == 3);
    assert!(job.last_error.expect("it has one").contains("lease"));
}

#[tokio::test]
async fn a_living_lease_is_left_alone_whoever_its_worker_is() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let before = db.row(job.id()).await;
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 0);
    assert_eq!(db.row(job.id()).await, before);
    // Each row's lease has the length with which it was claimed, not that of the rescuer.
    let hasty = db.queue_with(|settings| settings.lease = Duration::from_secs(1));
    db.run("UPDATE jobs SET locked_at = now() - interval '20 s'").await;
    assert_eq!(hasty.recover_stale().await.expect("answered").total(), 0);
}

#[tokio::test]
async fn a_running_row_without_a_time_of_lease_is_recovered() {
    let db = Database::new().await;
    db.run("INSERT INTO jobs (kind, payload, status) VALUES ('test_kind', '{}', 'running')").await;
    assert_eq!(db.queue().recover_stale().await.expect("answered").retried, 1);
    assert_eq!(db.value::<String>("SELECT status FROM jobs").await, "retrying");
}

#[tokio::test]
async fn a_lost_lease_is_found_behind_five_thousand_older_ones_that_stand() {
    let db = Database::new().await;
    let queue = db.queue();
    db.run(
        "INSERT INTO jobs (kind, payload, status, attempts, locked_at, locked_by, lease_seconds, claim_token) \
         SELECT 'test_kind', '{}', 'running', 1, now() - interval '1 h', 'alive', 86400, gen_random_uuid() \
         FROM generate_series(1, 5000)",
    )
    .await;
    let stale = claimed(&queue, &job()).await.id();
    db.end_lease(stale).await;
    assert_eq!(queue.recover_stale().await.expect("answered").retried, 1);
    assert_eq!(db.status(stale).await, "retrying");
}

#[tokio::test]
async fn more_lost_leases_than_one_rescue_takes_are_taken_by_the_next() {
    let db = Database::new().await;
    let queue = db.queue();
    db.run("INSERT INTO jobs (kind, payload, status) SELECT 'test_kind', '{}', 'running' FROM generate_series(1, 600)")
        .await;
    let first = queue.recover_stale().await.expect("answered").total();
    let second = queue.recover_stale().await.expect("answered").total();
    assert_eq!((first, second), (500, 100));
}

#[tokio::test]
async fn a_row_that_somebody_holds_delays_the_rescue_of_that_row_alone() {
    let db = Database::new().await;
    let queue = db.queue();
    let (held, other) = (claimed(&queue, &job()).await.id(), claimed(&queue, &job()).await.id());
    db.end_lease(held).await;
    db.end_lease(other).await;
    let mut connection = db.connect().await;
    let mut tx = connection.begin().await.expect("begun");
    sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(held).execute(&mut *tx).await.expect("locked");
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
    assert_eq!((db.status(held).await.as_str(), db.status(other).await.as_str()), ("running", "retrying"));
    tx.rollback().await.expect("rolled back");
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
}

#[tokio::test]
async fn a_finish_before_the_rescue_stands_though_the_lease_was_over() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    db.end_lease(id).await;
    let mut connection = db.connect().await;
    let gate = hold_updates(&db, "NEW.status = 'succeeded'", &mut connection).await;
    let finish = tokio::spawn({
        let queue = queue.clone();
        async move { queue.mark_succeeded(job, &json!("done")).await.expect("answered") }
    });
    db.until_blocked(1).await;
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 0, "the finish has the row");
    gate.rollback().await.expect("released");
    assert_eq!(finish.await.expect("no panic"), Finish::Done(Status::Succeeded));
    let before = db.row(id).await;
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 0);
    assert_eq!(db.row(id).await, before);
}

#[tokio::test]
async fn a_finish_after_the_rescue_is_lost_and_changes_nothing() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    db.end_lease(id).await;
    let mut connection = db.connect().await;
    let gate = hold_updates(&db, "NEW.status = 'retrying'", &mut connection).await;
    // The rescue has read the row and decided, and waits before it writes.
    let rescue = tokio::spawn({
        let queue = queue.clone();
        async move { queue.recover_stale().await.expect("answered") }
    });
    db.until_blocked(1).await;
    let held = queue.mark_succeeded(job, &json!("done")).await.expect_err("the rescue has the row");
    assert!(matches!(held.error, Error::RowLocked) && held.error.is_passing(), "{held}");
    gate.rollback().await.expect("released");
    assert_eq!(rescue.await.expect("no panic").retried, 1);
    assert_eq!(queue.mark_succeeded(held.job, &json!("done")).await.expect("answered"), Finish::Lost);
    let row: (String, bool, i32) = db.one("SELECT status, result IS NULL, attempts FROM jobs").await;
    assert_eq!(row, ("retrying".to_owned(), true, 1));
    assert_eq!(db.status(id).await, "retrying");
}

#[tokio::test]
async fn two_rescues_at_once_end_each_lease_once() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &NewJob { max_attempts: 2, ..job() }).await;
    db.end_lease(job.id()).await;
    let mut connection = db.connect().await;
    let gate = hold_updates(&db, "NEW.status = 'retrying'", &mut connection).await;
    let first = tokio::spawn({
        let queue = queue.clone();
        async move { queue.recover_stale().await.expect("answered").total() }
    });
    db.until_blocked(1).await;
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 0);
    gate.rollback().await.expect("released");
    assert_eq!(first.await.expect("no panic"), 1);
    assert_eq!(queue.recover_stale().await.expect("answered").total(), 0);
    assert_eq!(queue.get(job.id()).await.expect("it is there").history.len(), 1);
}

#[tokio::test]
async fn whatever_an_old_claim_sends_after_the_rescue_is_lost() {
    let db = Database::new().await;
    let queue = db.queue();
    let mut old = Vec::new();
    for _ in 0..4 {
        old.push(claimed_and_lost(&db, &queue, &job()).await);
    }
    // The first waits; the others have been claimed again, under the same name; the last has ended.
    for job in &old[1..] {
        db.make_due(job.id()).await;
        let new = claim(&queue).await;
        assert_eq!(new.id(), job.id());
        if job.id() == old[3].id() {
            queue.mark_succeeded(new, &json!("new")).await.map(drop).expect("answered");
        }
    }
    db.run("UPDATE jobs SET cancel_requested = true WHERE status = 'running'").await;
    for (n, job) in old.into_iter().enumerate() {
        let id = job.id();
        let before = db.row(id).await;
        let answer = match n {
            0 => queue.mark_succeeded(job, &json!("old")).await,
            1 => queue.mark_failed_or_retry(job, &failure(Cause::Permanent)).await,
            2 => queue.finalize_cancelled(job).await,
            _ => queue.mark_failed_or_retry(job, &failure(Cause::HandBack)).await,
        };
        assert_eq!(answer.expect("answered"), Finish::Lost, "{n}");
        assert_eq!(db.row(id).await, before, "{n}");
    }
}

#[tokio::test]
async fn a_finish_whose_reply_was_lost_is_known_when_it_is_sent_again() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.options()).await;
    let queue = Queue::new(proxy.options(db.options()), Settings::default());
    for wanted in [Status::Succeeded, Status::Retrying, Status::FailedPermanent, Status::Cancelled] {
        let job = claimed(&queue, &job()).await;
        let id = job.id();
        if wanted == Status::Cancelled {
            queue.request_cancel(id).await.expect("answered");
        }
        let finish = async |job| match wanted {
            Status::Succeeded => queue.mark_succeeded(job, &json!(1)).await,
            Status::Retrying => queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await,
            Status::Cancelled => queue.finalize_cancelled(job).await,
            _ => queue.mark_failed_or_retry(job, &failure(Cause::Permanent)).await,
        };
        proxy.lose_the_reply_to(id.as_bytes());
        let unfinished = finish(job).await.expect_err("nobody heard the answer");
        assert!(proxy.has_seen_it() && unfinished.error.is_passing(), "{unfinished}");
        assert_eq!(db.status(id).await, wanted.as_str(), "but it was done");
        let before = db.row(id).await;
        assert_eq!(finish(unfinished.job).await.expect("answered"), Finish::Done(wanted));
        assert_eq!(db.row(id).await, before);
    }
}

#[tokio::test]
async fn the_next_attempt_starts_within_the_bounds_of_the_back_off_by_the_databases_clock() {
    let db = Database::new().await;
    let queue = db.queue();
    for (before, longest) in [(0, 3.0), (1, 9.0), (2, 27.0), (3, 60.0), (40, 60.0), (63, 60.0), (70, 60.0)] {
        let id = queue.enqueue(&NewJob { max_attempts: 100, ..job() }).await.expect("accepted").id();
        db.run(&format!("UPDATE jobs SET attempts = {before} WHERE id = '{id}'")).await;
        let job = claim(&queue).await;
        assert_eq!(job.attempt(), before + 1);
        queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.map(drop).expect("answered");
        let wait = back_off(&db, id).await;
        assert!((1.0..=longest).contains(&wait), "after attempt {}: {wait} s", before + 1);
    }
}

#[tokio::test]
async fn a_job_that_kills_its_workers_waits_longer_each_time() {
    let db = Database::new().await;
    let queue = db.queue();
    for (attempts, longest) in [(1, 3.0), (4, 60.0)] {
        db.run(&format!(
            "DELETE FROM jobs; INSERT INTO jobs (kind, payload, status, attempts, max_attempts, locked_at) \
             SELECT 'test_kind', '{{}}', 'running', {attempts}, 5, now() - interval '1 h' FROM generate_series(1, 40)"
        ))
        .await;
        assert_eq!(queue.recover_stale().await.expect("answered").retried, 40);
        let (least, most): (f64, f64) = db
            .one(
                "SELECT extract(epoch FROM min(run_at - finished_at))::float8, \
                 extract(epoch FROM max(run_at - finished_at))::float8 FROM jobs",
            )
            .await;
        // Forty drawn from [1, 60] all within a tenth of it: one run in 10^40.
        assert!(least >= 1.0 && most <= longest && most > longest / 10.0, "{attempts}: {least} to {most}");
    }
}

#[tokio::test]
async fn a_claim_that_is_handed_back_costs_nothing_even_if_it_was_the_last() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&NewJob { max_attempts: 1, ..job() }).await.expect("accepted").id();
    for _ in 0..5 {
        let job = claim(&queue).await;
        assert_eq!(job.attempt(), 1);
        let answer = queue.mark_failed_or_retry(job, &failure(Cause::HandBack)).await.expect("answered");
        assert_eq!(answer, Finish::Done(Status::Queued));
        assert_eq!(queue.get(id).await.expect("it is there").attempts, 0);
    }
}

#[tokio::test]
async fn a_job_that_has_been_handed_back_for_a_day_pays_for_the_next_time() {
    let db = Database::new().await;
    let queue = db.queue();
    let age = |hours: u32| format!("UPDATE jobs SET handed_back_at = now() - interval '{hours} h'");
    for cause in [Cause::HandBack, Cause::RetryAfter(Duration::from_secs(5))] {
        let id = queue.enqueue(&NewJob { max_attempts: 2, ..job() }).await.expect("accepted").id();
        let mut statuses = Vec::new();
        for hours in [0, 23, 25, 25] {
            db.make_due(id).await;
            let job = claim(&queue).await;
            queue.mark_failed_or_retry(job, &failure(cause)).await.map(drop).expect("answered");
            let job = queue.get(id).await.expect("it is there");
            statuses.push((job.state.status().is_terminal(), job.attempts));
            db.run(&age(hours.max(23) + if hours == 0 { 0 } else { 2 })).await;
        }
        assert_eq!(statuses, [(false, 0), (false, 0), (false, 1), (true, 2)], "{cause:?}");
    }
}

#[tokio::test]
async fn the_day_of_hand_backs_counts_from_the_first_of_them_and_anew_after_any_other_end() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&NewJob { max_attempts: 9, ..job() }).await.expect("accepted").id();
    let end = async |cause| {
        db.make_due(id).await;
        queue.mark_failed_or_retry(claim(&queue).await, &failure(cause)).await.map(drop).expect("answered");
    };
    let hours = async || -> Option<f64> {
        db.value("SELECT round(extract(epoch FROM now() - handed_back_at) / 3600)::float8 FROM jobs").await
    };
    for other in [Some(Cause::Passing), None] {
        end(Cause::HandBack).await;
        assert_eq!(hours().await, Some(0.0));
        db.run("UPDATE jobs SET handed_back_at = now() - interval '5 h'").await;
        end(Cause::HandBack).await;
        end(Cause::RetryAfter(Duration::from_secs(1))).await;
        assert_eq!(hours().await, Some(5.0), "{other:?}");
        match other {
            Some(cause) => end(cause).await,
            None => {
                db.make_due(id).await;
                drop(claim(&queue).await);
                db.end_lease(id).await;
                assert_eq!(queue.recover_stale().await.expect("answered").total(), 1);
            }
        }
        assert_eq!(hours().await, None, "{other:?}");
    }
}

#[tokio::test]
async fn lost_leases_are_counted_until_an_explicit_retry() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&NewJob { max_attempts: 2, ..job() }).await.expect("accepted").id();
    for lost in 1..=2_i16 {
        db.make_due(id).await;
        drop(claim(&queue).await);
        db.end_lease(id).await;
        queue.recover_stale().await.expect("answered");
        assert_eq!(db.value::<i16>("SELECT lost_leases FROM jobs").await, lost);
    }
    queue.retry(id, "1").await.expect("answered");
    assert_eq!(db.value::<i16>("SELECT lost_leases FROM jobs").await, 0);
}

#[tokio::test]
async fn an_end_without_an_error_keeps_the_error_before_it() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&job()).await.expect("accepted").id();
    for error in [Some("it did not work".to_owned()), None] {
        db.make_due(id).await;
        let end = AttemptFailure { error, ..failure(Cause::Passing) };
        queue.mark_failed_or_retry(claim(&queue).await, &end).await.map(drop).expect("answered");
        assert_eq!(queue.get(id).await.expect("there").last_error.as_deref(), Some("it did not work"));
    }
}

#[tokio::test]
async fn a_named_delay_is_kept_without_cost_but_not_beyond_a_day() {
    let db = Database::new().await;
    let queue = db.queue();
    let named = [(0, 1.0, 3.0), (7, 7.0, 7.0), (3600, 3600.0, 3600.0), (u64::MAX, 1.0, 86_400.0)];
    for (seconds, least, most) in named {
        let job = claimed(&queue, &job()).await;
        let id = job.id();
        let cause = Cause::RetryAfter(Duration::from_secs(seconds));
        let answer = queue.mark_failed_or_retry(job, &failure(cause)).await.expect("answered");
        assert_eq!(answer, Finish::Done(Status::Retrying));
        assert_eq!(queue.get(id).await.expect("it is there").attempts, 0);
        let wait = back_off(&db, id).await;
        assert!((least..=most).contains(&wait), "{seconds}: {wait}");
    }
}

#[tokio::test]
async fn a_lost_lease_is_not_free() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed_and_lost(&db, &queue, &job()).await;
    let row = queue.get(job.id()).await.expect("it is there");
    assert_eq!((row.state.status(), row.attempts), (Status::Retrying, 1));
}

#[tokio::test]
async fn what_an_attempt_leaves_reaches_the_next_one() {
    let db = Database::new().await;
    let queue = db.queue();
    let job = claimed(&queue, &job()).await;
    let id = job.id();
    let left = AttemptFailure { progress: Some(json!({"sent": ["a"]})), ..failure(Cause::Passing) };
    queue.mark_failed_or_retry(job, &left).await.map(drop).expect("answered");
    db.make_due(id).await;
    let job = claim(&queue).await;
    assert_eq!(job.progress(), Some(&json!({"sent": ["a"]})));
    queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.map(drop).expect("answered");
    db.make_due(id).await;
    assert_eq!(claim(&queue).await.progress(), Some(&json!({"sent": ["a"]})), "silence forgets nothing");
}

#[tokio::test]
async fn the_history_keeps_the_last_twenty_attempts() {
    let db = Database::new().await;
    let queue = db.queue();
    let id = queue.enqueue(&NewJob { max_attempts: 100, ..job() }).await.expect("accepted").id();
    for _ in 0..23 {
        queue.mark_failed_or_retry(claim(&queue).await, &failure(Cause::Passing)).await.map(drop).expect("answered");
        db.make_due(id).await;
    }
    let numbers: Vec<u32> = queue.get(id).await.expect("there").history.iter().map(|past| past.number).collect();
    assert_eq!(numbers, (4..=23).collect::<Vec<_>>());
}
