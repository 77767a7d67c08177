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

    let versions = async || -> BTreeMap<String, Option<String>> {
        site.all().await.into_iter().map(|object| (object.name_any(), object.resource_version())).collect()
    };
    let (before, writes) = (versions().await, site.proxy.writes().len());
    let calls = site.proxy.calls().len();
    // The one wait for a time: the time is what is tested.
    tokio::time::sleep(QUIET).await;
    assert_eq!(versions().await, before);
    let more: Vec<_> =
        site.proxy.writes().split_off(writes).into_iter().filter(|call| !call.path.contains("/leases/")).collect();
    assert!(more.is_empty(), "{more:#?}");
    let reads = site.proxy.calls().len() - calls;
    assert!(reads < 10, "{reads} calls in an idle minute");
}
