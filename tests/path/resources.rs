//! Resources over time: edited, replaced, stripped, with rows that vanish.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use futures::StreamExt;
use jobrequest::api::{FINALIZER, JobRequest, Phase};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use super::site::{PROMPTLY, Site, attempts, job_id, phase, with};
use super::wait::{PATIENCE, until, until_true};

const LATER: &str = "2099-01-01T00:00:00Z";
/// The orphan sweep looks every 15 s, and twice before it believes.
const SWEEPS: Duration = Duration::from_secs(60);
const FOREIGN: &str = "test.example/hold";

impl Site {
    pub(super) async fn patch(&self, name: &str, patch: Value) {
        self.jobs.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    pub async fn annotate_retry(&self, name: &str, mark: &str) {
        self.patch(name, json!({"metadata": {"annotations": {"jobrequest.dev/retry": mark}}})).await;
    }
}

#[tokio::test]
async fn an_edit_reaches_a_job_that_waits() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", with(site.hook("/ok?a"), json!({"runAt": LATER}))).await;
    let id = job_id(&site.until_phase("a", Phase::Queued).await);
    site.patch("a", json!({"spec": {"priority": 7, "maxAttempts": 9}})).await;
    let row = format!("SELECT priority::int4, max_attempts FROM jobs WHERE id = '{id}'");
    until_true("the row has the edit", PATIENCE, async || site.database.one::<(i32, i32)>(&row).await == (7, 9)).await;
    site.patch("a", json!({"spec": {"runAt": null}})).await;
    let done = site.until_phase("a", Phase::Succeeded).await;
    assert_eq!(done.status.unwrap().observed_generation, Some(3));

    site.create("held", with(site.hook("/ok?held"), json!({"suspend": true}))).await;
    site.until_condition("held", "Ready", "False", "Suspended").await;
    assert_eq!(site.sink.count("/ok?held"), 0);
    site.patch("held", json!({"spec": {"suspend": false}})).await;
    site.until_phase("held", Phase::Succeeded).await;
}

/// Where a job is in its life: never less than before.
fn progress(object: &JobRequest) -> (i32, u8) {
    let step = match phase(object) {
        None | Some(Phase::Queued) => 0,
        Some(Phase::Running) => 1,
        Some(Phase::Retrying) => 2,
        Some(_) => 3,
    };
    (attempts(object).unwrap_or(0), step)
}

#[tokio::test]
async fn a_status_never_goes_back_though_the_resource_changes_all_the_time() {
    let site = Site::new().await;
    // Time enough between attempts for each to be shown, though every write meets another's on a busy machine.
    let worker = site.worker().set("JOBREQUEST_RETRY_BASE_SECONDS", 6).set("JOBREQUEST_RETRY_CAP_SECONDS", 6);
    let (_controller, _worker) = (site.controller().start().await, worker.start().await);
    let names: Vec<_> = (0..4).map(|n| format!("a-{n}")).collect();
    for name in &names {
        site.create(name, with(site.hook(&format!("/gate/{name}?code=503")), json!({"maxAttempts": 3}))).await;
    }
    let mut seen: BTreeMap<String, Vec<(i32, u8)>> = BTreeMap::new();
    let mut events = watcher(site.jobs.clone(), watcher::Config::default()).applied_objects().boxed();
    let churn = async {
        for n in 0.. {
            for name in &names {
                site.patch(name, json!({"metadata": {"annotations": {"n": n.to_string()}}})).await;
            }
            if n == 20 {
                names.iter().for_each(|name| site.sink.open(name));
            }
            // Without a pause no status write would ever be the only one on its way.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let watch = async {
        while let Some(object) = events.next().await {
            let object = object.unwrap();
            seen.entry(object.name_any()).or_default().push(progress(&object));
            if seen.len() == names.len() && seen.values().all(|all| all.last() == Some(&(3, 3))) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, futures::future::select(pin!(watch), pin!(churn))).await.expect("all end");
    for (name, all) in seen {
        assert!(all.is_sorted(), "{name} went back: {all:?}");
        assert!(all.contains(&(1, 1)) && all.contains(&(2, 2)), "{name} was not followed: {all:?}");
    }
}

#[tokio::test]
async fn a_failed_job_runs_again_once_for_each_new_value_of_the_annotation() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let metadata = json!({"name": "a", "annotations": {"jobrequest.dev/retry": "at-first"}});
    let object = site.create_with(metadata, site.hook("/code/404")).await;
    let id = site.until_enqueued(&object).await;
    site.until_phase("a", Phase::FailedPermanent).await;
    for (mark, hits) in [("1", 2), ("2", 3)] {
        site.annotate_retry("a", mark).await;
        site.until_hits("/code/404", hits).await;
        let shown = site.until_run_failed("a", mark).await;
        assert_eq!((job_id(&shown), attempts(&shown)), (id, Some(1)), "attempts count from zero");
        assert_eq!(shown.status.unwrap().history.len(), hits, "the history stays");
    }
    // The same value, another edit: nothing.
    site.annotate_retry("a", "2").await;
    site.patch("a", json!({"metadata": {"labels": {"x": "y"}}})).await;
    site.create("b", site.hook("/ok")).await;
    site.until_phase("b", Phase::Succeeded).await;
    assert_eq!(site.sink.count("/code/404"), 3);
}

#[tokio::test]
async fn a_namesake_has_a_row_and_a_status_of_its_own() {
    const TIMES: usize = 20;
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let mut uids = Vec::new();
    for n in 0..TIMES {
        if n > 0 {
            drop(site.jobs.delete("n", &DeleteParams::default()).await.unwrap());
            site.until_gone("n", PATIENCE).await;
        }
        uids.push(site.create("n", site.hook(&format!("/ok?{n}"))).await.uid().unwrap());
    }
    let last = site.until_phase("n", Phase::Succeeded).await;
    let target = site.sink.url(&format!("/ok?{}", TIMES - 1));
    assert_eq!(last.uid().as_ref(), uids.last());
    let url: String =
        site.database.value(&format!("SELECT payload->>'url' FROM jobs WHERE id = '{}'", job_id(&last))).await;
    assert_eq!(url, target, "the status shows the row of this very resource");
    let (rows, urls): (i64, i64) =
        site.database.one("SELECT count(*), count(DISTINCT payload->>'url') FROM jobs").await;
    assert_eq!(rows, urls, "one row for each at most");
    for n in 0..TIMES {
        assert!(site.sink.count(&format!("/ok?{n}")) <= 1, "{n} ran twice");
    }
    let live: i64 =
        site.database.value("SELECT count(*) FROM jobs WHERE status IN ('queued', 'retrying', 'running')").await;
    assert_eq!(live, 0, "what was replaced has ended");
}

#[tokio::test]
async fn a_row_that_vanished_is_made_again_only_if_its_job_never_started() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("waiting", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    site.create("running", site.hook("/gate/running")).await;
    site.create("done", site.hook("/ok?done")).await;
    let waiting = job_id(&site.until_phase("waiting", Phase::Queued).await);
    site.until_phase("running", Phase::Running).await;
    site.until_phase("done", Phase::Succeeded).await;
    site.database.run("DELETE FROM jobs").await;

    let lost = until("the lost one says so", SWEEPS, async || match site.get("running").await {
        Some(object) if phase(&object) == Some(Phase::FailedPermanent) => Ok(object),
        object => Err(format!("{:?}", object.and_then(|object| object.status))),
    })
    .await;
    let ready = lost.status.unwrap().conditions.into_iter().find(|condition| condition.type_ == "Ready").unwrap();
    assert_eq!(ready.reason, "RowLost");
    let again = until("the waiting one has a row again", SWEEPS, async || match site.get("waiting").await {
        Some(object) if job_id(&object) != waiting => Ok(job_id(&object)),
        _ => Err("not yet".to_owned()),
    })
    .await;
    assert_eq!((site.row(again).await.status.as_str(), site.count_rows().await), ("queued", 1));
    assert_eq!(phase(&site.get("done").await.unwrap()), Some(Phase::Succeeded), "an end is an end");
    assert_eq!((site.sink.count("/gate/running"), site.sink.count("/ok?done")), (1, 1));
    site.delete("running").await;
    site.until_gone("running", PROMPTLY).await;
}

#[tokio::test]
async fn finished_resources_run_nothing_again_when_the_database_is_older_than_they_are() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let _worker = site.worker().start().await;
    for n in 0..5 {
        site.create(&format!("a-{n}"), site.hook(&format!("/ok?{n}"))).await;
    }
    for n in 0..5 {
        site.until_phase(&format!("a-{n}"), Phase::Succeeded).await;
    }
    site.kill(&mut controller).await;
    site.database.run("DELETE FROM jobs; DELETE FROM job_resources").await;
    let _controller = site.controller().start().await;
    site.create("new", site.hook("/ok?new")).await;
    site.until_phase("new", Phase::Succeeded).await;
    for n in 0..5 {
        assert_eq!(phase(&site.get(&format!("a-{n}")).await.unwrap()), Some(Phase::Succeeded));
        assert_eq!(site.sink.count(&format!("/ok?{n}")), 1);
    }
    assert_eq!(site.count_rows().await, 1);
}

#[tokio::test]
async fn our_finalizer_goes_and_anothers_stays() {
    let site = Site::new().await;
    let _controller = site.controller().start().await;
    let metadata = json!({"name": "a", "finalizers": [FOREIGN]});
    site.create_with(metadata, with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    let id = job_id(&site.until_phase("a", Phase::Queued).await);
    assert_eq!(site.get("a").await.unwrap().finalizers(), [FOREIGN, FINALIZER]);
    site.delete("a").await;
    until_true("ours is gone", PROMPTLY, async || site.get("a").await.unwrap().finalizers() == [FOREIGN]).await;
    assert_eq!(site.row(id).await.status, "cancelled");
    site.patch("a", json!({"metadata": {"finalizers": null}})).await;
    site.until_gone("a", PROMPTLY).await;
    let refused: Vec<_> = site.proxy.calls().into_iter().filter(|call| call.status == Some(422)).collect();
    assert!(refused.len() <= 1, "no loop of patches that can't apply: {refused:#?}");
}

#[tokio::test]
async fn a_status_of_another_shape_is_understood_or_made_anew() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let mut ids = Vec::new();
    for name in ["empty", "old"] {
        site.create(name, with(site.hook("/ok"), json!({"runAt": LATER}))).await;
        ids.push(job_id(&site.until_phase(name, Phase::Queued).await));
    }
    site.kill(&mut controller).await;
    for (name, status) in [
        ("empty", json!({})),
        ("old", json!({"phase": "Hibernating", "attempts": 0, "conditions": [], "observedGeneration": 1})),
    ] {
        let patch = json!([{"op": "replace", "path": "/status", "value": status}]);
        let patch = Patch::<()>::Json(serde_json::from_value(patch).unwrap());
        site.jobs.patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }
    let _controller = site.controller().start().await;
    for (name, id) in ["empty", "old"].into_iter().zip(ids) {
        assert_eq!(job_id(&site.until_phase(name, Phase::Queued).await), id);
    }
    assert_eq!(site.count_rows().await, 2);
}

#[tokio::test]
async fn a_row_whose_resource_was_stripped_of_its_finalizer_is_cancelled() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    site.create("a", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    site.create("b", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    let id = job_id(&site.until_phase("a", Phase::Queued).await);
    let other = job_id(&site.until_phase("b", Phase::Queued).await);
    site.kill(&mut controller).await;
    site.delete("a").await;
    site.patch("a", json!({"metadata": {"finalizers": null}})).await;
    site.until_gone("a", PROMPTLY).await;
    assert_eq!(site.row(id).await.status, "queued");

    let _controller = site.controller().start().await;
    until_true("the orphan is cancelled", SWEEPS, async || site.row(id).await.status == "cancelled").await;
    assert_eq!(site.row(other).await.status, "queued", "a row whose resource lives stays");
}
