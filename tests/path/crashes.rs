//! Programs that die without a word.

use std::time::Duration;

use jobrequest::api::{FINALIZER, Phase};
use kube::ResourceExt;
use serde_json::json;

use super::api_proxy::Call;
use super::site::{PROMPTLY, Site, attempts, job_id, with};
use super::wait::{PATIENCE, until_true};

/// Long enough for a busy machine, short enough to be waited for.
const LEASE_SECONDS: u32 = 3;

#[tokio::test]
async fn a_controller_killed_between_the_insert_and_the_status_makes_one_row_and_one_run() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let _worker = site.worker().start().await;
    site.proxy.hold(Call::is_status_patch);
    let object = site.create("a", site.hook("/ok")).await;
    let id = site.until_enqueued(&object).await;
    site.until_row(id, "succeeded").await;
    site.proxy.until_holding().await;
    site.kill(&mut controller).await;
    site.proxy.until_abandoned().await;
    assert_eq!(site.get("a").await.unwrap().status.unwrap().job_id, None, "it was killed before it wrote");
    site.proxy.pass();

    let _controller = site.controller().start().await;
    let shown = site.until_phase("a", Phase::Succeeded).await;
    assert_eq!((job_id(&shown), attempts(&shown)), (id, Some(1)));
    assert_eq!((site.count_rows().await, site.sink.count("/ok")), (1, 1));
}

#[tokio::test]
async fn a_controller_killed_before_it_showed_a_waiting_job_finds_its_row_again() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    site.proxy.hold(Call::is_status_patch);
    let object = site.create("a", site.hook("/ok")).await;
    let id = site.until_enqueued(&object).await;
    site.proxy.until_holding().await;
    site.kill(&mut controller).await;
    site.proxy.until_abandoned().await;
    site.proxy.pass();

    let _controller = site.controller().start().await;
    assert_eq!(job_id(&site.until_phase("a", Phase::Queued).await), id);
    let _worker = site.worker().start().await;
    site.until_phase("a", Phase::Succeeded).await;
    assert_eq!((site.count_rows().await, site.sink.count("/ok")), (1, 1));
}

/// The finalizer, the status and the finalizer's removal; each before it is sent and after it has taken effect.
#[tokio::test]
async fn a_controller_killed_at_any_of_its_writes_comes_to_the_same_end() {
    let site = Site::new().await;
    let _worker = site.worker().start().await;
    let mut controller = site.controller().start().await;
    for write in 0..3 {
        for sent in [false, true] {
            let name = format!("write-{write}-{}", if sent { "sent" } else { "unsent" });
            let (target, about, proxy) = (format!("/ok?{name}"), name.clone(), site.proxy.clone());
            let is_chosen = move |call: &Call| {
                call.is_write() && proxy.writes().iter().filter(|write| write.is_about(&about)).count() == write + 1
            };
            if sent {
                site.proxy.hold_replies(is_chosen)
            } else {
                site.proxy.hold(is_chosen)
            }
            site.create(&name, site.hook(&target)).await;
            site.proxy.until_holding().await;
            site.kill(&mut controller).await;
            site.proxy.until_abandoned().await;
            site.proxy.pass();

            controller = site.controller().start().await;
            site.until_phase(&name, Phase::Succeeded).await;
            until_true("the finalizer is gone", PATIENCE, async || {
                !site.get(&name).await.unwrap().finalizers().iter().any(|finalizer| finalizer == FINALIZER)
            })
            .await;
            assert_eq!(site.sink.count(&target), 1, "{name}");
        }
    }
    assert_eq!(site.count_rows().await, 6);
}

/// The row is cancelled, and the finalizer's removal is the write: before it is sent and after it has taken effect.
#[tokio::test]
async fn a_controller_killed_while_it_cancels_comes_to_the_same_end() {
    let site = Site::new().await;
    let later = json!({"runAt": "2099-01-01T00:00:00Z"});
    let mut controller = site.controller().start().await;
    for name in ["unsent", "sent"] {
        site.create(name, with(site.hook("/ok"), later.clone())).await;
        let id = job_id(&site.until_phase(name, Phase::Queued).await);
        let is_about = move |call: &Call| call.is_write() && call.is_about(name);
        if name == "sent" {
            site.proxy.hold_replies(is_about)
        } else {
            site.proxy.hold(is_about)
        }
        site.delete(name).await;
        site.proxy.until_holding().await;
        assert_eq!(site.row(id).await.status, "cancelled", "the row ends before the finalizer goes");
        site.kill(&mut controller).await;
        site.proxy.until_abandoned().await;
        site.proxy.pass();
        assert_eq!(site.get(name).await.is_some(), name == "unsent");

        controller = site.controller().start().await;
        site.until_gone(name, PROMPTLY).await;
        assert_eq!(site.row(id).await.status, "cancelled");
    }
}

#[tokio::test]
async fn a_job_whose_worker_was_killed_is_run_again_by_another_one() {
    let site = Site::new().await;
    let _controller = site.controller().set("JOBREQUEST_LEASE_SECONDS", LEASE_SECONDS).start().await;
    let worker = || site.worker().set("JOBREQUEST_LEASE_SECONDS", LEASE_SECONDS);
    let mut first = worker().start().await;
    site.create("a", site.hook("/gate/a")).await;
    site.until_hits("/gate/a", 1).await;
    let running = site.until_phase("a", Phase::Running).await;
    let _second = worker().start().await;
    first.kill();
    site.until_hits("/gate/a", 2).await;
    site.sink.open("a");

    let shown = site.until_phase("a", Phase::Succeeded).await;
    let status = shown.status.as_ref().unwrap();
    assert_eq!((status.attempts, job_id(&shown)), (Some(2), job_id(&running)));
    assert_eq!(status.history[0].outcome.as_deref(), Some("LeaseLost"));
    assert_ne!(status.worker, running.status.unwrap().worker, "another worker");
    assert_eq!(site.sink.count("/gate/a"), 2);
    let ids: Vec<_> = site.sink.hits().iter().map(|hit| hit.header("webhook-id").to_owned()).collect();
    assert_eq!(ids[0], ids[1], "the receiver can tell that it is the same delivery");
}

#[tokio::test]
async fn a_job_whose_only_attempt_died_with_its_worker_has_failed_and_never_runs_again() {
    let site = Site::new().await;
    let _controller = site.controller().set("JOBREQUEST_LEASE_SECONDS", LEASE_SECONDS).start().await;
    let worker = || site.worker().set("JOBREQUEST_LEASE_SECONDS", LEASE_SECONDS);
    let mut first = worker().start().await;
    site.create("a", with(site.hook("/gate/a"), json!({"maxAttempts": 1}))).await;
    site.until_hits("/gate/a", 1).await;
    let _second = worker().start().await;
    first.kill();
    let shown = site.until_phase("a", Phase::FailedPermanent).await;
    assert_eq!(attempts(&shown), Some(1));
    let row = site.row(job_id(&shown)).await;
    assert_eq!((row.status.as_str(), row.attempts), ("failed_permanent", 1));

    // The second worker would have taken it before this one.
    site.create("b", site.hook("/ok")).await;
    site.until_phase("b", Phase::Succeeded).await;
    assert_eq!(site.sink.count("/gate/a"), 1);
    assert_eq!(site.row(row.id).await, row);
}

#[tokio::test]
async fn a_controller_alone_ends_any_number_of_dead_leases_in_one_go() {
    let site = Site::new().await;
    site.database
        .run(
            "INSERT INTO jobs (kind, payload, status, attempts, locked_by, locked_at, claim_token) \
             SELECT 'summarize_text', '{}', 'running', 1, 'dead', now() - interval '1 hour', gen_random_uuid() \
             FROM generate_series(1, 2000)",
        )
        .await;
    // A third of this is between two rescues, of 500 each.
    let _controller = site.controller().set("JOBREQUEST_LEASE_SECONDS", 30).start().await;
    let running = "SELECT count(*) FROM jobs WHERE status = 'running'";
    let limit = Duration::from_secs(19);
    until_true("none is left", limit, async || site.database.value::<i64>(running).await == 0).await;
}

#[tokio::test]
async fn a_worker_told_to_stop_finishes_its_jobs_and_takes_no_new_ones() {
    let site = Site::new().await;
    let _controller = site.controller().start().await;
    let mut worker = site.worker().start().await;
    for name in ["a", "b"] {
        site.create(name, site.hook(&format!("/gate/{name}"))).await;
        site.until_hits(&format!("/gate/{name}"), 1).await;
    }
    worker.signal("TERM");
    let late = site.create("late", site.hook("/ok")).await;
    let late = site.until_enqueued(&late).await;
    site.sink.open("a");
    site.sink.open("b");
    assert!(worker.exit().await.success());
    for name in ["a", "b"] {
        assert_eq!(attempts(&site.until_phase(name, Phase::Succeeded).await), Some(1));
    }
    assert_eq!((site.row(late).await.status.as_str(), site.sink.count("/ok")), ("queued", 0));
}
