//! A system in which nothing happens.

use std::collections::BTreeMap;
use std::time::Duration;

use jobrequest::api::{JobRequest, Phase};
use kube::ResourceExt;
use serde_json::json;

use super::site::{Site, phase, with};
use super::wait::{PATIENCE, until, until_true};

const EACH: usize = 50;
const QUIET: Duration = Duration::from_secs(60);

#[tokio::test]
async fn fifty_finished_and_fifty_waiting_resources_cause_no_api_write_for_a_minute() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    for n in 0..EACH {
        let finished = json!({"kind": "summarize_text", "payload": {"text": format!("This is text number {n}.")}});
        site.create(&format!("finished-{n}"), finished).await;
        let waiting = with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}));
        site.create(&format!("waiting-{n}"), waiting).await;
    }
    // Other ends, and marks that ask for nothing any more.
    site.create("failed", site.hook("/code/404")).await;
    site.create("rejected", json!({"kind": "summarize_text", "payload": {"text": "\u{2003}"}})).await;
    let used = json!({"name": "used", "annotations": {"jobrequest.dev/retry": "1"}});
    site.create_with(used, site.hook("/code/404")).await;

    let is_settled = |object: &JobRequest| match phase(object) {
        Some(Phase::Queued) => !object.finalizers().is_empty(),
        phase => phase.is_some_and(Phase::is_terminal) && object.finalizers().is_empty(),
    };
    until("all is settled", PATIENCE, async || {
        let all = site.all().await;
        let busy = all.iter().filter(|object| !is_settled(object)).count();
        if all.len() == 2 * EACH + 3 && busy == 0 { Ok(()) } else { Err(format!("{busy} of {} are not", all.len())) }
    })
    .await;
    let due = "SELECT count(*) FROM jobs WHERE mirror_due OR status = 'running'";
    until_true("no status is due", PATIENCE, async || site.database.value::<i64>(due).await == 0).await;

    until_true("the bad ends are said", PATIENCE, async || site.events().await.len() == 3).await;

    let versions = async || -> BTreeMap<String, Option<String>> {
        site.all().await.into_iter().map(|object| (object.name_any(), object.resource_version())).collect()
    };
    let (before, writes) = (versions().await, site.proxy.writes().len());
    let others = || site.proxy.calls().into_iter().filter(|call| !call.is_election()).count();
    let calls = others();
    // The one wait for a time: the time is what is tested.
    tokio::time::sleep(QUIET).await;
    assert_eq!(versions().await, before);
    let more = site.proxy.writes().split_off(writes);
    assert!(more.is_empty(), "{more:#?}");
    let reads = others() - calls;
    assert!(reads < 10, "{reads} calls in an idle minute");
}

#[tokio::test]
async fn a_controller_that_starts_writes_nothing_that_is_shown_already() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let worker = site.worker().start().await;
    let waiting = with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}));
    site.create("waiting", waiting.clone()).await;
    site.create("suspended", with(site.hook("/ok"), json!({"suspend": true}))).await;
    site.create("running", site.hook("/gate/running")).await;
    site.create("finished", json!({"kind": "summarize_text", "payload": {"text": "Hello."}})).await;
    let expiring =
        json!({"kind": "summarize_text", "payload": {"text": "A <b> & c."}, "ttlSecondsAfterFinished": 3600});
    site.create("expiring", expiring).await;
    for (name, wanted) in [
        ("waiting", Phase::Queued),
        ("suspended", Phase::Queued),
        ("running", Phase::Running),
        ("finished", Phase::Succeeded),
        ("expiring", Phase::Succeeded),
    ] {
        site.until_phase(name, wanted).await;
    }
    for name in ["finished", "expiring"] {
        until_true("nothing holds it", PATIENCE, async || site.get(name).await.unwrap().finalizers().is_empty()).await;
    }
    let due = "SELECT count(*) FROM jobs WHERE mirror_due";
    until_true("no status is due", PATIENCE, async || site.database.value::<i64>(due).await == 0).await;
    site.kill(&mut controller).await;
    let before = site.proxy.writes().len();
    let _controller = site.controller().start().await;
    // By the time a new one is shown, the old ones have been looked at.
    site.create("new", waiting).await;
    site.until_phase("new", Phase::Queued).await;
    let old = site.proxy.writes().split_off(before).into_iter().filter(|call| !call.is_about("new"));
    assert_eq!(old.map(|call| call.path).collect::<Vec<_>>(), Vec::<String>::new());
    drop(worker);
}
