//! The resources behind a row: owners and sharers, edits, which statuses are due, and what a deletion means.

mod support;

use chrono::{DateTime, TimeDelta, Timelike, Utc};
use jobrequest::job::{Cause, Job, Status};
use jobrequest::queue::{EnqueueOutcome, Error, Held, NewJob, Queue, Release, SpecEdit};
use serde_json::json;
use sqlx::Connection;
use uuid::Uuid;

use support::db::{Database, claim, failure, job_of};

/// A resource of this name with the key all these tests share.
fn keyed(name: &str) -> (NewJob, Uuid) {
    let (new, uid) = job_of(name);
    (NewJob { idempotency_key: Some("k".to_owned()), ..new }, uid)
}

async fn enqueue(queue: &Queue, (new, uid): (NewJob, Uuid)) -> (Uuid, Uuid) {
    (queue.enqueue(&new).await.expect("accepted").id(), uid)
}

async fn row(queue: &Queue, uid: Uuid) -> (Job, bool) {
    match queue.held(uid).await.expect("answered") {
        Held::Row { job, owner, .. } => (*job, owner),
        other => panic!("{other:?}"),
    }
}

/// Names of the resources whose status is due.
async fn due(queue: &Queue) -> Vec<String> {
    let (resources, _) = queue.due(None, 100).await.expect("answered");
    let mut names: Vec<_> = resources.into_iter().map(|resource| resource.name).collect();
    names.sort();
    names
}

async fn acknowledge_newest(queue: &Queue, uid: Uuid) {
    let revision = row(queue, uid).await.0.revision;
    queue.acknowledge(uid, revision).await.expect("answered");
}

fn edit_of(job: &Job) -> SpecEdit {
    SpecEdit {
        priority: job.priority,
        suspended: job.suspended,
        max_attempts: job.max_attempts,
        timeout_seconds: job.timeout_seconds,
        run_at: job.wanted_run_at,
    }
}

mod edits {
    use super::*;

    #[tokio::test]
    async fn an_owners_edit_reaches_a_row_that_waits() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        let later = Utc::now() + TimeDelta::hours(2);
        let edit = SpecEdit { priority: 7, suspended: true, max_attempts: 9, timeout_seconds: 11, run_at: Some(later) };
        let (before, _) = row(&queue, uid).await;
        assert!(edit.changes(&before));
        assert!(queue.edit_waiting(uid, edit).await.expect("answered"));
        let (job, owner) = row(&queue, uid).await;
        assert!(owner && !edit.changes(&job) && job.revision > before.revision);
        assert_eq!((job.id, job.priority, job.suspended, job.max_attempts), (id, 7, true, 9));
        assert!((job.run_at - later).abs() < TimeDelta::milliseconds(1));
        assert!(queue.edit_waiting(uid, edit_of(&before)).await.expect("answered"));
        claim(&queue).await.id();
    }

    #[tokio::test]
    async fn a_time_in_nanoseconds_is_not_an_edit_for_ever() {
        let db = Database::new().await;
        let queue = db.queue();
        let time = |year: i32| {
            let text = format!("{year}-06-01T00:00:00Z");
            text.parse::<DateTime<Utc>>().expect("a time").with_nanosecond(123_456_789)
        };
        for year in [1970, 2030] {
            let (new, uid) = job_of("a");
            enqueue(&queue, (NewJob { run_at: time(year), ..new }, uid)).await;
            let (job, _) = row(&queue, uid).await;
            let spec = SpecEdit { run_at: time(year), ..edit_of(&job) };
            assert!(!spec.changes(&job), "{year}");
            let edit = SpecEdit { run_at: time(year + 1), ..spec };
            assert!(edit.changes(&job));
            assert!(queue.edit_waiting(uid, edit).await.expect("answered"));
            assert!(!edit.changes(&row(&queue, uid).await.0), "{year}");
        }
    }

    #[tokio::test]
    async fn a_lower_limit_than_the_attempts_made_leaves_one() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        for _ in 0..2 {
            queue
                .mark_failed_or_retry(claim(&queue).await, &failure(Cause::Passing))
                .await
                .map(drop)
                .expect("answered");
            db.make_due(id).await;
        }
        let (job, _) = row(&queue, uid).await;
        let edit = SpecEdit { max_attempts: 1, ..edit_of(&job) };
        assert!(!edit.changes(&job), "three is two attempts and one more");
        assert!(queue.edit_waiting(uid, edit).await.expect("answered"));
        let (job, _) = row(&queue, uid).await;
        assert_eq!((job.attempts, job.max_attempts), (2, 3));
        queue.mark_failed_or_retry(claim(&queue).await, &failure(Cause::Passing)).await.map(drop).expect("answered");
        assert_eq!(db.status(id).await, "failed_permanent");
    }

    #[tokio::test]
    async fn an_edit_of_something_else_does_not_move_a_back_off() {
        let db = Database::new().await;
        let queue = db.queue();
        let (new, uid) = job_of("a");
        enqueue(&queue, (NewJob { run_at: Some(Utc::now() - TimeDelta::hours(1)), ..new }, uid)).await;
        queue.mark_failed_or_retry(claim(&queue).await, &failure(Cause::Passing)).await.map(drop).expect("answered");
        let (job, _) = row(&queue, uid).await;
        assert!(queue.edit_waiting(uid, SpecEdit { priority: 5, ..edit_of(&job) }).await.expect("answered"));
        assert_eq!(row(&queue, uid).await.0.run_at, job.run_at);
    }

    #[tokio::test]
    async fn a_row_that_runs_or_has_ended_takes_no_edit() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        let claimed = claim(&queue).await;
        let (job, _) = row(&queue, uid).await;
        let edit = SpecEdit { priority: 5, ..edit_of(&job) };
        for _ in 0..2 {
            let before = db.row(id).await;
            assert!(!queue.edit_waiting(uid, edit).await.expect("answered"));
            assert_eq!(db.row(id).await, before);
            if db.status(id).await == "running" {
                db.run("UPDATE jobs SET status = 'succeeded', finished_at = now()").await;
            }
        }
        drop(claimed);
    }

    #[tokio::test]
    async fn a_sharer_edits_nothing_and_an_edit_out_of_range_is_refused() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, owner) = enqueue(&queue, keyed("owner")).await;
        let (shared, sharer) = enqueue(&queue, keyed("sharer")).await;
        assert_eq!(shared, id);
        let (job, is_owner) = row(&queue, sharer).await;
        assert!(!is_owner && row(&queue, owner).await.1);
        let before = db.row(id).await;
        assert!(!queue.edit_waiting(sharer, SpecEdit { priority: 5, ..edit_of(&job) }).await.expect("answered"));
        assert!(!queue.edit_waiting(Uuid::new_v4(), edit_of(&job)).await.expect("answered"));
        let never = SpecEdit { run_at: Some(DateTime::<Utc>::MAX_UTC), ..edit_of(&job) };
        assert!(matches!(queue.edit_waiting(owner, never).await, Err(Error::PayloadInvalid { .. })));
        assert_eq!(db.row(id).await, before);
    }
}

mod statuses {
    use super::*;

    #[tokio::test]
    async fn every_change_of_a_row_makes_its_status_due_and_raises_its_revision() {
        let db = Database::new().await;
        let queue = db.queue_with(|settings| settings.retry = jobrequest::job::RetryPolicy::default());
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        let mut last = 0;
        let mut changed = async |what: &str| {
            assert_eq!(due(&queue).await, ["a"], "{what}");
            let (job, _) = row(&queue, uid).await;
            assert!(job.revision > last, "{what}");
            last = job.revision;
            acknowledge_newest(&queue, uid).await;
            assert!(due(&queue).await.is_empty(), "{what}");
        };
        changed("enqueue").await;
        let job = claim(&queue).await;
        changed("claim").await;
        queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.map(drop).expect("answered");
        changed("failure").await;
        db.make_due(id).await;
        drop(claim(&queue).await);
        changed("second claim").await;
        db.end_lease(id).await;
        queue.recover_stale().await.expect("answered");
        changed("rescue").await;
        queue.request_cancel(id).await.expect("answered");
        changed("cancel").await;
        queue.retry(id, "1").await.expect("answered");
        changed("retry").await;
        let job = claim(&queue).await;
        changed("third claim").await;
        queue.request_cancel(id).await.expect("answered");
        changed("cancel of a running one").await;
        queue.finalize_cancelled(job).await.map(drop).expect("answered");
        changed("end").await;
        queue.retry(id, "2").await.expect("answered");
        changed("second retry").await;
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        changed("success").await;
    }

    #[tokio::test]
    async fn a_heartbeat_makes_nothing_due() {
        let db = Database::new().await;
        let queue = db.queue();
        let (_, uid) = enqueue(&queue, job_of("a")).await;
        let job = claim(&queue).await;
        acknowledge_newest(&queue, uid).await;
        queue.heartbeat(&[job.lease()]).await.expect("answered");
        assert!(due(&queue).await.is_empty());
    }

    #[tokio::test]
    async fn a_row_stays_due_until_its_newest_revision_is_shown_in_whatever_order_that_is_told() {
        let orders: [&[i64]; 6] = [&[3, 2, 1], &[1, 3, 2], &[2, 3, 1], &[2, 1, 3], &[1, 2, 3], &[3, 3]];
        let db = Database::new().await;
        let queue = db.queue();
        for order in orders {
            let (id, uid) = enqueue(&queue, job_of("a")).await;
            db.run(&format!("UPDATE jobs SET revision = 3 WHERE id = '{id}'")).await;
            let mut newest_told = false;
            for revision in order {
                assert_eq!(due(&queue).await.is_empty(), newest_told, "{order:?} before {revision}");
                queue.acknowledge(uid, *revision).await.expect("answered");
                newest_told |= *revision == 3;
            }
            assert!(due(&queue).await.is_empty(), "{order:?}");
        }
    }

    #[tokio::test]
    async fn an_old_revision_shown_after_a_change_does_not_hide_the_change() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        let old = row(&queue, uid).await.0.revision;
        queue.request_cancel(id).await.expect("answered");
        queue.acknowledge(uid, old).await.expect("answered");
        assert_eq!(due(&queue).await, ["a"]);
    }

    #[tokio::test]
    async fn an_acknowledgement_that_waits_for_a_change_does_not_hide_it() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        let old = row(&queue, uid).await.0.revision;
        let mut connection = db.connect().await;
        let mut tx = connection.begin().await.expect("begun");
        let sql = "UPDATE jobs SET priority = 1, revision = revision + 1, mirror_due = true WHERE id = $1";
        sqlx::query(sql).bind(id).execute(&mut *tx).await.expect("changed");
        let told = tokio::spawn({
            let queue = queue.clone();
            async move { queue.acknowledge(uid, old).await.expect("answered") }
        });
        db.until_blocked(1).await;
        tx.commit().await.expect("committed");
        told.await.expect("no panic");
        assert_eq!(due(&queue).await, ["a"]);
    }

    #[tokio::test]
    async fn each_holder_of_a_row_is_due_until_its_own_status_shows_it() {
        let db = Database::new().await;
        let queue = db.queue();
        let (_, a) = enqueue(&queue, keyed("a")).await;
        acknowledge_newest(&queue, a).await;
        let (_, b) = enqueue(&queue, keyed("b")).await;
        assert!(due(&queue).await.contains(&"b".to_owned()), "the new holder's status shows nothing yet");
        acknowledge_newest(&queue, a).await;
        assert_eq!(due(&queue).await, ["b"]);
        acknowledge_newest(&queue, b).await;
        assert!(due(&queue).await.is_empty());
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        assert_eq!(due(&queue).await, ["a", "b"]);
        acknowledge_newest(&queue, b).await;
        assert_eq!(due(&queue).await, ["a"]);
        acknowledge_newest(&queue, a).await;
        assert!(due(&queue).await.is_empty());
    }

    #[tokio::test]
    async fn a_holder_who_comes_while_another_is_acknowledged_is_due() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, a) = enqueue(&queue, keyed("a")).await;
        let revision = row(&queue, a).await.0.revision;
        let mut connection = db.connect().await;
        let mut tx = connection.begin().await.expect("begun");
        sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(id).execute(&mut *tx).await.expect("locked");
        // Both wait for the row: first the new holder, then the acknowledgement, which does not see it yet.
        let sharer = tokio::spawn({
            let queue = queue.clone();
            async move { enqueue(&queue, keyed("b")).await.1 }
        });
        db.until_blocked(1).await;
        let told = tokio::spawn({
            let queue = queue.clone();
            async move { queue.acknowledge(a, revision).await.expect("answered") }
        });
        db.until_blocked(2).await;
        tx.rollback().await.expect("released");
        sharer.await.expect("no panic");
        told.await.expect("no panic");
        assert!(due(&queue).await.contains(&"b".to_owned()));
    }

    #[tokio::test]
    async fn two_holders_acknowledged_at_once_leave_nothing_due() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, a) = enqueue(&queue, keyed("a")).await;
        let (_, b) = enqueue(&queue, keyed("b")).await;
        let revision = row(&queue, a).await.0.revision;
        let mut connection = db.connect().await;
        let mut tx = connection.begin().await.expect("begun");
        sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(id).execute(&mut *tx).await.expect("locked");
        let mut both = Vec::new();
        for (n, uid) in [a, b].into_iter().enumerate() {
            let queue = queue.clone();
            both.push(tokio::spawn(async move { queue.acknowledge(uid, revision).await.expect("answered") }));
            db.until_blocked(1 + i64::try_from(n).expect("small")).await;
        }
        tx.rollback().await.expect("released");
        for told in both {
            told.await.expect("no panic");
        }
        assert!(due(&queue).await.is_empty());
        assert!(!db.value::<bool>("SELECT mirror_due FROM jobs").await, "and the row is out of the index");
    }

    #[tokio::test]
    async fn due_resources_come_in_pages_and_each_once() {
        let db = Database::new().await;
        let queue = db.queue();
        let names: Vec<String> = (0..25).map(|n| format!("r{n:02}")).collect();
        for name in &names {
            enqueue(&queue, job_of(name)).await;
        }
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let (page, next) = queue.due(after, 10).await.expect("answered");
            assert!(page.len() <= 10);
            seen.extend(page.into_iter().map(|resource| resource.name));
            after = next;
            if after.is_none() {
                break;
            }
        }
        seen.sort();
        assert_eq!(seen, names);
    }

    #[tokio::test]
    async fn a_row_without_a_resource_is_never_due() {
        let db = Database::new().await;
        let queue = db.queue();
        db.run("INSERT INTO jobs (kind, payload) VALUES ('test_kind', '{}')").await;
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        assert!(due(&queue).await.is_empty());
        assert!(!db.value::<bool>("SELECT mirror_due FROM jobs").await);
    }
}

mod deletion {
    use super::*;

    #[tokio::test]
    async fn the_only_holder_of_a_waiting_row_cancels_it_and_may_go() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Ended);
        assert_eq!(db.status(id).await, "cancelled");
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Ended, "safe to repeat");
        assert_eq!(queue.held(uid).await.expect("answered"), Held::Nothing);
        assert!(due(&queue).await.is_empty(), "nobody is left to be shown it");
    }

    #[tokio::test]
    async fn the_holder_of_a_running_row_stays_until_the_row_has_ended() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        let job = claim(&queue).await;
        for _ in 0..2 {
            assert_eq!(queue.release(uid).await.expect("answered"), Release::PendingOnWorker);
        }
        acknowledge_newest(&queue, uid).await;
        queue.finalize_cancelled(job).await.map(drop).expect("answered");
        assert_eq!(due(&queue).await, ["a"], "so that its end is made known");
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Ended);
        assert_eq!(db.status(id).await, "cancelled");
    }

    #[tokio::test]
    async fn the_holder_of_a_row_that_ended_goes_and_the_row_stays_as_it_is() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, uid) = enqueue(&queue, job_of("a")).await;
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        let before = queue.get(id).await.expect("it is there");
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Ended);
        assert_eq!(queue.get(id).await.expect("it is there"), before);
    }

    #[tokio::test]
    async fn a_sharer_that_goes_cancels_nothing() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, owner) = enqueue(&queue, keyed("owner")).await;
        let (_, sharer) = enqueue(&queue, keyed("sharer")).await;
        assert_eq!(queue.release(sharer).await.expect("answered"), Release::Shared);
        assert_eq!((db.status(id).await.as_str(), row(&queue, owner).await.1), ("queued", true));
        drop(claim(&queue).await);
        let (_, sharer) = enqueue(&queue, keyed("sharer")).await;
        assert_eq!(queue.release(sharer).await.expect("answered"), Release::Shared);
        assert!(!db.value::<bool>("SELECT cancel_requested FROM jobs").await);
    }

    #[tokio::test]
    async fn an_owner_that_goes_leaves_the_row_to_the_next_holder_and_the_last_one_cancels_it() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, owner) = enqueue(&queue, keyed("owner")).await;
        let (_, second) = enqueue(&queue, keyed("second")).await;
        let (_, third) = enqueue(&queue, keyed("third")).await;
        assert_eq!(queue.release(owner).await.expect("answered"), Release::Shared);
        assert_eq!((row(&queue, second).await.1, row(&queue, third).await.1), (true, false));
        assert!(due(&queue).await.contains(&"second".to_owned()), "its own spec is to reach the row");
        let (job, _) = row(&queue, second).await;
        assert!(queue.edit_waiting(second, SpecEdit { priority: 4, ..edit_of(&job) }).await.expect("answered"));
        assert_eq!(queue.release(second).await.expect("answered"), Release::Shared);
        assert!(row(&queue, third).await.1);
        assert_eq!(queue.release(third).await.expect("answered"), Release::Ended);
        assert_eq!(db.status(id).await, "cancelled");
    }

    #[tokio::test]
    async fn two_holders_that_go_at_once_cancel_the_row() {
        let db = Database::new().await;
        let queue = db.queue();
        for _ in 0..10 {
            let (id, a) = enqueue(&queue, keyed("a")).await;
            let (_, b) = enqueue(&queue, keyed("b")).await;
            let (first, second) = tokio::join!(queue.release(a), queue.release(b));
            let mut both = [first.expect("answered"), second.expect("answered")];
            both.sort_by_key(|release| *release == Release::Ended);
            assert_eq!(both, [Release::Shared, Release::Ended]);
            assert_eq!(db.status(id).await, "cancelled");
        }
    }

    #[tokio::test]
    async fn a_holder_that_comes_as_the_last_one_goes_gets_a_row_that_lives() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, a) = enqueue(&queue, keyed("a")).await;
        let mut connection = db.connect().await;
        let mut tx = connection.begin().await.expect("begun");
        sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(id).execute(&mut *tx).await.expect("locked");
        let going = tokio::spawn({
            let queue = queue.clone();
            async move { queue.release(a).await.expect("answered") }
        });
        db.until_blocked(1).await;
        let coming = tokio::spawn({
            let queue = queue.clone();
            async move { queue.enqueue(&keyed("b").0).await.expect("accepted") }
        });
        db.until_blocked(2).await;
        tx.rollback().await.expect("released");
        assert_eq!(going.await.expect("no panic"), Release::Ended);
        let EnqueueOutcome::Created(other) = coming.await.expect("no panic") else { panic!("it shares a dead row") };
        assert_eq!((db.status(id).await.as_str(), db.status(other).await.as_str()), ("cancelled", "queued"));
    }

    #[tokio::test]
    async fn a_release_and_a_purge_at_once_are_no_deadlock() {
        let db = Database::new().await;
        let queue = db.queue_with(|settings| settings.retention = std::time::Duration::ZERO);
        let (_, uid) = enqueue(&queue, job_of("a")).await;
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        acknowledge_newest(&queue, uid).await;
        db.run("UPDATE jobs SET finished_at = now() - interval '1 h'").await;
        let mut connection = db.connect().await;
        let mut tx = connection.begin().await.expect("begun");
        // The purge stops when it has the job and before it takes the resource.
        sqlx::query("LOCK TABLE job_keys IN EXCLUSIVE MODE").execute(&mut *tx).await.expect("locked");
        let purge = tokio::spawn({
            let queue = queue.clone();
            async move { queue.purge().await }
        });
        db.until_blocked(1).await;
        let release = tokio::spawn({
            let queue = queue.clone();
            async move { queue.release(uid).await }
        });
        db.until_blocked(2).await;
        tx.rollback().await.expect("released");
        assert_eq!(purge.await.expect("no panic").expect("no deadlock").jobs, 1);
        assert_eq!(release.await.expect("no panic").expect("no deadlock"), Release::Ended);
    }

    #[tokio::test]
    async fn a_row_that_vanished_is_told_from_one_that_never_was_and_is_enqueued_again_once_forgotten() {
        let db = Database::new().await;
        let queue = db.queue();
        let (new, uid) = job_of("a");
        assert_eq!(queue.held(uid).await.expect("answered"), Held::Nothing);
        let (id, _) = enqueue(&queue, (new.clone(), uid)).await;
        db.run("DELETE FROM jobs").await;
        assert_eq!(queue.held(uid).await.expect("answered"), Held::Vanished { job_id: id });
        let vanished = queue.holders_of_vanished_rows(Uuid::nil(), 10).await.expect("answered");
        assert_eq!(vanished.into_iter().map(|resource| resource.uid).collect::<Vec<_>>(), [uid]);
        queue.forget_vanished(uid).await.expect("answered");
        assert!(matches!(queue.enqueue(&new).await.expect("accepted"), EnqueueOutcome::Created(other) if other != id));
        queue.forget_vanished(uid).await.expect("answered");
        assert!(matches!(queue.held(uid).await.expect("answered"), Held::Row { .. }), "a new row stays its own");
    }

    #[tokio::test]
    async fn the_sweep_sees_the_holders_of_live_rows_and_of_statuses_that_are_due() {
        let db = Database::new().await;
        let queue = db.queue();
        let (_, live) = enqueue(&queue, job_of("live")).await;
        let (ended, shown) = enqueue(&queue, job_of("shown")).await;
        let (_, due) = enqueue(&queue, job_of("due")).await;
        queue.request_cancel(ended).await.expect("answered");
        acknowledge_newest(&queue, shown).await;
        let mut wanted = vec![live, due];
        wanted.sort();
        let first = queue.holders_of_live_rows(Uuid::nil(), 1).await.expect("answered");
        let second = queue.holders_of_live_rows(first[0].uid, 10).await.expect("answered");
        let seen: Vec<Uuid> = first.into_iter().chain(second).map(|resource| resource.uid).collect();
        assert_eq!(seen, wanted);
    }
}

mod ends {
    use std::time::Duration;

    use jobrequest::queue::{ListFilter, Page, RetryOutcome};

    use super::*;

    #[tokio::test]
    async fn an_explicit_retry_runs_a_failed_or_cancelled_job_again_once_per_mark() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, _) = enqueue(&queue, job_of("a")).await;
        queue.mark_failed_or_retry(claim(&queue).await, &failure(Cause::Permanent)).await.map(drop).expect("answered");
        assert_eq!(queue.retry(id, "1").await.expect("answered"), RetryOutcome::Queued);
        let job = queue.get(id).await.expect("it is there");
        assert_eq!((job.state.status(), job.attempts, job.history.len()), (Status::Queued, 0, 1));
        assert_eq!(job.last_retry.as_deref(), Some("1"));
        let claimed = claim(&queue).await;
        assert_eq!(claimed.attempt(), 1);
        queue.request_cancel(id).await.expect("answered");
        queue.finalize_cancelled(claimed).await.map(drop).expect("answered");
        let before = db.row(id).await;
        assert_eq!(queue.retry(id, "1").await.expect("answered"), RetryOutcome::AlreadyUsed);
        assert_eq!(db.row(id).await, before);
        assert_eq!(queue.retry(id, "2").await.expect("answered"), RetryOutcome::Queued);
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("not cancelled any more");
        assert_eq!(db.status(id).await, "succeeded");
    }

    #[tokio::test]
    async fn a_retry_by_hand_leaves_the_mark_that_the_resource_shows() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, _) = enqueue(&queue, job_of("a")).await;
        queue.request_cancel(id).await.expect("answered");
        assert_eq!(queue.retry(id, "1").await.expect("answered"), RetryOutcome::Queued);
        queue.request_cancel(id).await.expect("answered");
        assert_eq!(queue.retry_by_hand(id).await.expect("answered"), RetryOutcome::Queued);
        queue.request_cancel(id).await.expect("answered");
        assert_eq!(queue.retry(id, "1").await.expect("answered"), RetryOutcome::AlreadyUsed);
        assert_eq!(db.status(id).await, "cancelled");
    }

    #[tokio::test]
    async fn an_explicit_retry_starts_afresh() {
        let db = Database::new().await;
        let queue = db.queue();
        let (new, uid) = job_of("a");
        let (id, _) = enqueue(&queue, (NewJob { suspended: true, ..new }, uid)).await;
        db.run("UPDATE jobs SET handed_back_at = now() - interval '30 h', run_at = now() + interval '1 h'").await;
        queue.request_cancel(id).await.expect("answered");
        assert_eq!(queue.retry(id, "1").await.expect("answered"), RetryOutcome::Queued);
        // Neither suspended nor delayed, and with a day of hand-backs before it.
        queue.mark_failed_or_retry(claim(&queue).await, &failure(Cause::HandBack)).await.map(drop).expect("answered");
        assert_eq!(queue.get(id).await.expect("it is there").attempts, 0);
    }

    #[tokio::test]
    async fn a_mark_that_was_there_from_the_start_counts_as_used() {
        let db = Database::new().await;
        let queue = db.queue();
        let (new, uid) = job_of("a");
        let (id, _) = enqueue(&queue, (NewJob { last_retry: Some("1".to_owned()), ..new }, uid)).await;
        queue.request_cancel(id).await.expect("answered");
        assert_eq!(queue.retry(id, "1").await.expect("answered"), RetryOutcome::AlreadyUsed);
        assert_eq!(db.status(id).await, "cancelled");
    }

    #[tokio::test]
    async fn a_job_that_lives_or_succeeded_or_is_not_there_or_not_ours_can_not_be_retried() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, _) = enqueue(&queue, job_of("a")).await;
        let refused = async |from: Status| {
            let before = db.row(id).await;
            let answer = queue.retry(id, "1").await;
            assert!(matches!(answer, Err(Error::InvalidTransition { from: f, .. }) if f == from), "{answer:?}");
            assert_eq!(db.row(id).await, before);
        };
        refused(Status::Queued).await;
        let job = claim(&queue).await;
        refused(Status::Running).await;
        queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await.map(drop).expect("answered");
        refused(Status::Retrying).await;
        db.make_due(id).await;
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        refused(Status::Succeeded).await;
        assert!(matches!(queue.retry(Uuid::now_v7(), "1").await, Err(Error::NotFound)));
        let theirs = db.queue_with(|settings| settings.install = "theirs".to_owned());
        let (other, _) = enqueue(&theirs, job_of("b")).await;
        theirs.request_cancel(other).await.expect("answered");
        assert!(matches!(queue.retry(other, "1").await, Err(Error::NotFound)));
        assert!(matches!(queue.retry(id, &"x".repeat(256)).await, Err(Error::PayloadInvalid { .. })));
    }

    #[tokio::test]
    async fn two_retries_with_one_mark_at_once_queue_the_job_once() {
        let db = Database::new().await;
        let queue = db.queue();
        let (id, _) = enqueue(&queue, job_of("a")).await;
        queue.request_cancel(id).await.expect("answered");
        let mut connection = db.connect().await;
        let mut tx = connection.begin().await.expect("begun");
        sqlx::query("SELECT FROM jobs WHERE id = $1 FOR UPDATE").bind(id).execute(&mut *tx).await.expect("locked");
        let retry = || {
            let queue = queue.clone();
            tokio::spawn(async move { queue.retry(id, "1").await.expect("answered") })
        };
        let first = retry();
        db.until_blocked(1).await;
        let second = retry();
        db.until_blocked(2).await;
        tx.rollback().await.expect("released");
        assert_eq!(first.await.expect("no panic"), RetryOutcome::Queued);
        assert_eq!(second.await.expect("no panic"), RetryOutcome::AlreadyUsed);
    }

    #[tokio::test]
    async fn a_row_is_purged_when_it_is_old_enough_and_every_status_shows_its_end() {
        let db = Database::new().await;
        let queue = db.queue_with(|settings| settings.retention = Duration::from_secs(3600));
        let (id, owner) = enqueue(&queue, keyed("owner")).await;
        let (_, sharer) = enqueue(&queue, keyed("sharer")).await;
        queue.mark_succeeded(claim(&queue).await, &json!(1)).await.map(drop).expect("answered");
        let (live, _) = enqueue(&queue, job_of("live")).await;
        db.run("UPDATE jobs SET finished_at = now() - interval '2 h', created_at = now() - interval '9 d'").await;
        acknowledge_newest(&queue, owner).await;
        assert_eq!(queue.purge().await.expect("answered").jobs, 0, "the sharer's status does not show it");
        acknowledge_newest(&queue, sharer).await;
        db.run("UPDATE jobs SET finished_at = now()").await;
        assert_eq!(queue.purge().await.expect("answered").jobs, 0, "it is young");
        db.run("UPDATE jobs SET finished_at = now() - interval '2 h'").await;
        assert_eq!(queue.purge().await.expect("answered").jobs, 1);
        assert!(matches!(queue.get(id).await, Err(Error::NotFound)));
        queue.get(live).await.expect("it lives");
        assert_eq!(queue.held(owner).await.expect("answered"), Held::Nothing);
        assert!(queue.holders_of_vanished_rows(Uuid::nil(), 10).await.expect("answered").is_empty());
    }

    #[tokio::test]
    async fn a_page_of_jobs_is_newest_first_and_its_bounds_are_clamped() {
        let db = Database::new().await;
        let queue = db.queue();
        db.run(
            "INSERT INTO jobs (kind, payload, created_at, priority) \
             SELECT 'test_kind', '{}', now() - make_interval(secs => n), n FROM generate_series(1, 250) n",
        )
        .await;
        let page = async |limit: Option<i64>, offset: i64| -> Vec<i16> {
            let filter = ListFilter { limit, offset, ..Default::default() };
            queue.list(&filter).await.expect("listed").iter().map(|job| job.priority).collect()
        };
        for (asked, got) in [(None, 50), (Some(0), 1), (Some(-3), 1), (Some(7), 7), (Some(1000), 200)] {
            assert_eq!(page(asked, 0).await, (1..=got).collect::<Vec<i16>>(), "{asked:?}");
        }
        assert_eq!(page(Some(2), 10).await, [11, 12]);
        assert_eq!(page(Some(1), -5).await, [1]);
        assert!(page(None, 250).await.is_empty());
    }

    #[tokio::test]
    async fn rows_whose_ids_were_given_in_sql_stand_where_they_were_made() {
        let db = Database::new().await;
        let queue = db.queue();
        // More of them than a page looks at beyond its end; before, among and after the ids that tell a time.
        db.run(
            "INSERT INTO jobs (id, kind, payload, created_at, priority) \
             SELECT CASE n % 3 WHEN 0 THEN jobs_new_id() \
                 WHEN 1 THEN overlay(md5(n::text) PLACING 'f' FROM 1 FOR 1)::uuid ELSE lpad(n::text, 32, '0')::uuid END, \
                 'test_kind', '{}', now() - make_interval(secs => n), n % 1000 FROM generate_series(5000, 1, -1) n",
        )
        .await;
        let mut listed = Vec::new();
        for page in 0..25 {
            let filter = ListFilter { limit: Some(200), offset: 200 * page, ..Default::default() };
            listed.extend(queue.list(&filter).await.expect("listed").iter().map(|job| i64::from(job.priority)));
        }
        assert_eq!(listed, (1..=5000).map(|n| n % 1000).collect::<Vec<i64>>());
    }

    #[tokio::test]
    async fn a_row_that_can_not_be_read_fails_no_list() {
        let db = Database::new().await;
        let queue = db.queue();
        let mut ids = Vec::new();
        for name in ["a", "b", "c"] {
            ids.insert(0, enqueue(&queue, job_of(name)).await.0);
        }
        db.run(&format!("UPDATE jobs SET history = '[{{\"number\": \"one\"}}]' WHERE id = '{}'", ids[1])).await;
        let readable = |jobs: &[Job]| jobs.iter().map(|job| job.id).collect::<Vec<_>>();
        assert_eq!(readable(&queue.list(&ListFilter::default()).await.expect("listed")), [ids[0], ids[2]]);
        let Page { jobs, unreadable } = queue.list_page(&ListFilter::default()).await.expect("listed");
        assert_eq!(readable(&jobs), [ids[0], ids[2]]);
        let [Error::RowInvalid { id, column, .. }] = &unreadable[..] else { panic!("{unreadable:?}") };
        assert_eq!((id, *column), (&ids[1], "history"));
        assert!(matches!(queue.get(ids[1]).await, Err(Error::RowInvalid { column: "history", .. })));
    }

    #[tokio::test]
    async fn jobs_are_listed_by_status_kind_and_namespace() {
        let db = Database::new().await;
        let queue = db.queue();
        let (cancelled, _) = enqueue(&queue, job_of("a")).await;
        queue.request_cancel(cancelled).await.expect("answered");
        enqueue(&queue, job_of("b")).await;
        queue.enqueue(&NewJob::new("other_kind", json!({}))).await.expect("accepted");
        let of = async |filter: ListFilter| queue.list(&filter).await.expect("listed").len();
        assert_eq!(of(ListFilter::default()).await, 3);
        assert_eq!(of(ListFilter { status: Some(Status::Cancelled), ..Default::default() }).await, 1);
        assert_eq!(of(ListFilter { kind: Some("test_kind".to_owned()), ..Default::default() }).await, 2);
        assert_eq!(of(ListFilter { namespace: Some("shop".to_owned()), ..Default::default() }).await, 2);
        assert_eq!(of(ListFilter { namespace: Some("blog".to_owned()), ..Default::default() }).await, 0);
    }
}

mod releases {
    use super::*;

    #[tokio::test]
    async fn a_resource_that_was_let_go_gets_no_row_any_more() {
        let db = Database::new().await;
        let queue = db.queue();
        let (never, uid) = job_of("never-enqueued");
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Ended);
        assert!(matches!(queue.enqueue(&never).await, Err(Error::Released)));
        let (cancelled, uid) = job_of("cancelled");
        queue.enqueue(&cancelled).await.expect("accepted");
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Ended);
        assert!(matches!(queue.enqueue(&cancelled).await, Err(Error::Released)));
        let (owner, sharer) = (keyed("owner"), keyed("sharer"));
        enqueue(&queue, owner).await;
        let (again, uid) = sharer.clone();
        enqueue(&queue, sharer).await;
        assert_eq!(queue.release(uid).await.expect("answered"), Release::Shared);
        assert!(matches!(queue.enqueue(&again).await, Err(Error::Released)));
        assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs").await, 2, "nothing is half done");
        assert_eq!(db.value::<i64>("SELECT count(*) FROM job_resources").await, 1);
        // Others are not held up, and the memory is short.
        enqueue(&queue, job_of("other")).await;
        db.run("UPDATE job_releases SET released_at = now() - interval '11 minutes'").await;
        queue.enqueue(&never).await.expect("accepted");
        queue.forget_releases().await.expect("answered");
        assert_eq!(db.value::<i64>("SELECT count(*) FROM job_releases").await, 0);
    }

    #[tokio::test]
    async fn a_release_that_meets_an_enqueue_under_way_waits_for_it_and_cancels_its_row() {
        let db = Database::new().await;
        let (new, uid) = job_of("a");
        let mut other = db.connect().await;
        let mut tx = other.begin().await.expect("begun");
        let id = Uuid::now_v7();
        for sql in [
            "INSERT INTO jobs (id, kind, payload, namespace, owner_uid) VALUES ($1, 'test_kind', '{}', 'shop', $2)",
            "INSERT INTO job_resources (job_id, uid, install, namespace, name) VALUES ($1, $2, 'default', 'shop', 'a')",
        ] {
            sqlx::query(sql).bind(id).bind(uid).execute(&mut *tx).await.expect("inserted");
        }
        let queue = db.queue();
        let release = tokio::spawn(async move { queue.release(uid).await });
        db.until_blocked(1).await;
        tx.commit().await.expect("committed");
        assert_eq!(release.await.expect("no panic").expect("answered"), Release::Ended);
        assert_eq!(db.status(id).await, "cancelled");
        assert!(matches!(db.queue().enqueue(&new).await, Err(Error::Released)));
    }

    #[tokio::test]
    async fn an_enqueue_that_meets_a_release_under_way_waits_for_it_and_makes_no_row() {
        let db = Database::new().await;
        let (new, uid) = job_of("a");
        let mut other = db.connect().await;
        let mut tx = other.begin().await.expect("begun");
        for sql in [
            "INSERT INTO job_resources (uid, job_id, install, namespace, name) VALUES ($1, gen_random_uuid(), '', '', '')",
            "INSERT INTO job_releases (uid) VALUES ($1)",
        ] {
            sqlx::query(sql).bind(uid).execute(&mut *tx).await.expect("inserted");
        }
        let queue = db.queue();
        let enqueue = tokio::spawn(async move { queue.enqueue(&new).await });
        db.until_blocked(1).await;
        sqlx::query("DELETE FROM job_resources WHERE uid = $1").bind(uid).execute(&mut *tx).await.expect("deleted");
        tx.commit().await.expect("committed");
        assert!(matches!(enqueue.await.expect("no panic"), Err(Error::Released)));
        assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs").await, 0);
    }
}

mod installs {
    use jobrequest::queue::Binding;

    use super::*;

    #[tokio::test]
    async fn an_install_belongs_to_the_first_cluster_until_another_adopts_it_by_name() {
        let db = Database::new().await;
        let queue = db.queue();
        let ours = Binding::Ours { adopted: false };
        let others = |cluster: &str| Binding::Others { cluster: cluster.to_owned() };
        assert_eq!(queue.bind_install("a", Some("z")).await.expect("answered"), ours, "the first one");
        assert_eq!(queue.bind_install("a", None).await.expect("answered"), ours, "again");
        assert_eq!(queue.bind_install("b", None).await.expect("answered"), others("a"));
        assert_eq!(
            queue.bind_install("b", Some("c")).await.expect("answered"),
            others("a"),
            "not the one that is meant"
        );
        assert_eq!(queue.bind_install("b", Some("a")).await.expect("answered"), Binding::Ours { adopted: true });
        assert_eq!(queue.bind_install("b", Some("a")).await.expect("answered"), ours, "the setting may stay");
        assert_eq!(queue.bind_install("a", None).await.expect("answered"), others("b"));
        let theirs = db.queue_with(|settings| settings.install = "theirs".to_owned());
        assert_eq!(theirs.bind_install("a", None).await.expect("answered"), ours, "another install is not meant");
    }

    #[tokio::test]
    async fn of_clusters_that_come_at_once_one_gets_the_install() {
        let db = Database::new().await;
        let all = (0..8).map(|n| {
            let queue = db.queue();
            tokio::spawn(async move { queue.bind_install(&n.to_string(), None).await.expect("answered") })
        });
        let mut ours = 0;
        for one in all.collect::<Vec<_>>() {
            ours += usize::from(one.await.expect("no panic") == Binding::Ours { adopted: false });
        }
        assert_eq!(ours, 1);
    }
}
