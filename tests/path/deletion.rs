//! `kubectl delete` cancels.

use std::time::Duration;

use jobrequest::api::Phase;
use kube::ResourceExt;
use serde_json::json;

use super::site::{PROMPTLY, Site, job_id, with};
use super::wait::{PATIENCE, until_true};

const LATER: &str = "2099-01-01T00:00:00Z";

#[tokio::test]
async fn a_waiting_job_is_cancelled_with_its_resource() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    let id = job_id(&site.until_phase("a", Phase::Queued).await);
    site.delete("a").await;
    site.until_gone("a", PROMPTLY).await;
    let row = site.row(id).await;
    assert_eq!((row.status.as_str(), row.attempts, site.sink.hits().len()), ("cancelled", 0, 0));
}

#[tokio::test]
async fn a_running_job_is_stopped_and_its_resource_goes_when_the_row_has_ended() {
    let site = Site::new().await;
    let (_controller, worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", site.hook("/gate/a")).await;
    site.until_hits("/gate/a", 1).await;
    let id = job_id(&site.until_phase("a", Phase::Running).await);
    // As long as the worker does not answer, the resource stays.
    worker.signal("STOP");
    site.delete("a").await;
    site.until_condition("a", "Ready", "False", "Cancelling").await;
    let row = site.row(id).await;
    assert_eq!((row.status.as_str(), row.cancel_requested), ("running", true));
    worker.signal("CONT");
    site.until_gone("a", PROMPTLY).await;
    assert_eq!(site.row(id).await.status, "cancelled", "the row ends before the resource goes");
    until_true("the executor has stopped", PROMPTLY, async || site.sink.was_abandoned("/gate/a")).await;
    assert_eq!(site.sink.count("/gate/a"), 1);
}

#[tokio::test]
async fn a_finished_job_keeps_its_row_as_it_was() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", site.hook("/ok")).await;
    let id = job_id(&site.until_phase("a", Phase::Succeeded).await);
    until_true("nothing holds it", PATIENCE, async || site.get("a").await.unwrap().finalizers().is_empty()).await;
    let before = site.database.row(id).await;
    site.delete("a").await;
    assert!(site.get("a").await.is_none(), "gone at once");
    assert_eq!(site.database.row(id).await, before);
}

#[tokio::test]
async fn what_is_deleted_while_no_controller_runs_is_cancelled_when_one_is_back() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let _worker = site.worker().start().await;
    site.create("waiting", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    site.create("running", site.hook("/gate/running")).await;
    let waiting = job_id(&site.until_phase("waiting", Phase::Queued).await);
    let running = job_id(&site.until_phase("running", Phase::Running).await);
    site.kill(&mut controller).await;
    site.delete("waiting").await;
    site.delete("running").await;
    for name in ["waiting", "running"] {
        assert!(site.get(name).await.unwrap().metadata.deletion_timestamp.is_some(), "{name} waits");
    }
    assert_eq!(site.row(waiting).await.status, "queued");

    let _controller = site.controller().start().await;
    for (name, id) in [("waiting", waiting), ("running", running)] {
        site.until_gone(name, PROMPTLY).await;
        assert_eq!(site.row(id).await.status, "cancelled", "{name}");
    }
    assert_eq!((site.sink.count("/gate/running"), site.sink.count("/ok")), (1, 0));
}

#[tokio::test]
async fn a_cancelled_job_that_then_fails_is_cancelled_and_not_retried() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", site.hook("/gate/a?code=500")).await;
    site.until_hits("/gate/a?code=500", 1).await;
    let id = job_id(&site.until_phase("a", Phase::Running).await);
    site.delete("a").await;
    until_true("the row is told", PROMPTLY, async || site.row(id).await.cancel_requested).await;
    site.sink.open("a");
    site.until_gone("a", Duration::from_secs(10)).await;
    assert_eq!(site.row(id).await.status, "cancelled");
    assert_eq!(site.sink.count("/gate/a?code=500"), 1);
}

#[tokio::test]
async fn a_job_whose_worker_is_dead_is_cancelled_when_its_lease_is_over_even_without_another_worker() {
    let site = Site::new().await;
    let _controller = site.controller().set("JOBREQUEST_LEASE_SECONDS", 3).start().await;
    let mut worker = site.worker().set("JOBREQUEST_LEASE_SECONDS", 3).start().await;
    site.create("a", site.hook("/gate/a")).await;
    let id = job_id(&site.until_phase("a", Phase::Running).await);
    worker.kill();
    site.delete("a").await;
    site.until_gone("a", Duration::from_secs(10)).await;
    assert_eq!(site.row(id).await.status, "cancelled");
}
