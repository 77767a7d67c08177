//! Events: few, once for each change, and nothing depends on them.

use jobrequest::api::Phase;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::api_proxy::Call;
use super::orphans::metric;
use super::site::{PROMPTLY, Site, job_id, phase, with};
use super::wait::{PATIENCE, until, until_true};

const LATER: &str = "2099-01-01T00:00:00Z";

fn is_event(call: &Call) -> bool {
    call.is_write() && call.path.ends_with("/events")
}

impl Site {
    /// All Events, in the order in which they were written.
    pub(super) async fn events(&self) -> Vec<Event> {
        let events: Api<Event> = Api::namespaced(self.jobs.clone().into_client(), &self.namespace);
        let mut all = events.list(&ListParams::default()).await.unwrap().items;
        all.sort_by_key(|event| event.event_time.as_ref().map(|time| time.0));
        all
    }

    /// What was said of a resource, in order.
    async fn said_of(&self, name: &str) -> Vec<String> {
        let of = |event: &Event| event.regarding.as_ref().and_then(|about| about.name.as_deref()) == Some(name);
        let told = self.events().await.into_iter().filter(of);
        told.map(|event| format!("{} {}", event.type_.unwrap(), event.reason.unwrap())).collect()
    }

    async fn until_said(&self, name: &str, expected: &[&str]) {
        until(&format!("{expected:?} is said of {name}"), PATIENCE, async || {
            let said = self.said_of(name).await;
            if said == expected { Ok(()) } else { Err(format!("{said:?}")) }
        })
        .await;
    }

    /// Events are written one after the other: by the time this one is there, so are all that came before.
    async fn until_all_is_said(&self, mark: &str) {
        self.create(mark, json!({"kind": "summarize_text", "payload": {"text": "\u{2003}"}})).await;
        self.until_said(mark, &["Warning PayloadInvalid"]).await;
    }
}

#[tokio::test]
async fn a_failure_and_a_retry_are_said_once_each_and_a_success_not_at_all() {
    let site = Site::new().await;
    let (mut controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let payload = json!({"url": site.sink.url("/code/404"), "body": "a secret"});
    let failing = site.create("a", json!({"kind": "webhook_delivery", "payload": payload})).await;
    site.create("fine", site.hook("/ok")).await;
    site.until_phase("fine", Phase::Succeeded).await;
    site.until_phase("a", Phase::FailedPermanent).await;
    site.until_said("a", &["Warning FailedPermanent"]).await;
    site.annotate_retry("a", "1").await;
    site.until_run_failed("a", "1").await;

    // Other looks at it, by this controller and the next, have nothing to say.
    site.patch("a", json!({"metadata": {"labels": {"x": "y"}}, "spec": {"priority": 7}})).await;
    until_true("the edit is seen", PATIENCE, async || {
        let object = site.get("a").await.unwrap();
        object.status.unwrap().observed_generation == object.metadata.generation
    })
    .await;
    site.until_all_is_said("first").await;
    site.kill(&mut controller).await;
    let _controller = site.controller().start().await;
    site.until_all_is_said("second").await;
    let expected = ["Warning FailedPermanent", "Normal Retried", "Warning FailedPermanent"];
    assert_eq!(site.said_of("a").await, expected);
    assert_eq!(site.said_of("fine").await, [""; 0]);

    let all = site.events().await;
    assert_eq!(all.len(), 5, "{all:#?}");
    assert!(!serde_json::to_string(&all).unwrap().contains("secret"));
    let about = all[0].regarding.as_ref().unwrap();
    assert_eq!((about.uid.clone(), about.kind.as_deref()), (failing.uid(), Some("JobRequest")));
    let described = site.kubectl(&["describe", "jr", "a"], "").await;
    assert!(described.contains("FailedPermanent  ") && described.contains("Retried"), "{described}");
}

#[tokio::test]
async fn a_cancel_is_said_of_a_resource_that_stays_or_waits_for_it() {
    let site = Site::new().await;
    let (_controller, worker) = (site.controller().start().await, site.worker().start().await);
    site.create("stays", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    site.create("goes", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    site.create("running", site.hook("/gate/running")).await;
    let id = job_id(&site.until_phase("stays", Phase::Queued).await).to_string();
    site.until_phase("goes", Phase::Queued).await;
    site.until_phase("running", Phase::Running).await;

    let (code, _, error) = site.program(&["jobs", "cancel", &id]).output().await;
    assert_eq!(code, Some(0), "{error}");
    site.until_said("stays", &["Normal Cancelled"]).await;
    site.delete("goes").await;
    site.until_gone("goes", PROMPTLY).await;
    worker.signal("STOP");
    site.delete("running").await;
    site.until_said("running", &["Normal Cancelling"]).await;
    worker.signal("CONT");
    site.until_gone("running", PROMPTLY).await;
    site.until_all_is_said("last").await;
    assert_eq!(site.said_of("running").await, ["Normal Cancelling"]);
    assert_eq!(site.said_of("goes").await, [""; 0], "whoever deletes what only waits sees it go");
}

#[tokio::test]
async fn a_ttl_that_is_held_back_is_said_once_for_each_end() {
    let site = Site::new().await;
    let (mut controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let text = json!({"kind": "summarize_text", "payload": {"text": "Hello."}, "ttlSecondsAfterFinished": 0});
    let flux = json!({"name": "kept", "labels": {"kustomize.toolkit.fluxcd.io/name": "apps"}});
    site.create_with(flux, text.clone()).await;
    site.create("goes", text).await;
    site.until_said("kept", &["Normal TTLHeldBack"]).await;
    site.until_gone("goes", PROMPTLY).await;
    site.kill(&mut controller).await;
    let _controller = site.controller().start().await;
    site.patch("kept", json!({"metadata": {"annotations": {"n": "1"}}})).await;
    site.until_all_is_said("last").await;
    assert_eq!(site.said_of("kept").await, ["Normal TTLHeldBack"]);
    assert_eq!(phase(&site.get("kept").await.unwrap()), Some(Phase::Succeeded));
}

#[tokio::test]
async fn a_retry_that_is_refused_says_why() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let keyed = |target: &str| with(site.hook(target), json!({"idempotencyKey": "k"}));
    site.create("a", keyed("/code/404")).await;
    site.until_phase("a", Phase::FailedPermanent).await;
    site.create("b", with(keyed("/ok"), json!({"runAt": LATER}))).await;
    site.until_phase("b", Phase::Queued).await;
    site.annotate_retry("a", "1").await;
    site.until_run_failed("a", "1").await;
    site.until_all_is_said("last").await;
    assert_eq!(site.said_of("a").await, ["Warning FailedPermanent", "Warning RetryRefused"]);
}

#[tokio::test]
async fn no_job_waits_for_an_event_or_fails_with_it() {
    let site = Site::new().await;
    let (controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.proxy.refuse(403, is_event);
    site.create("refused", site.hook("/code/404?1")).await;
    site.until_phase("refused", Phase::FailedPermanent).await;
    until_true("that is counted", PATIENCE, async || {
        metric(&controller, "jobrequest_events_total{outcome=\"failed\"} ").await.as_deref() == Some("1")
    })
    .await;
    let refused = metric(&controller, "jobrequest_api_requests_total{verb=\"create\",code=\"403\"} ").await;
    assert_eq!(refused.as_deref(), Some("1"), "and not repeated");
    site.proxy.hold(is_event);
    for name in ["held", "behind"] {
        site.create(name, site.hook(&format!("/code/404?{name}"))).await;
        site.until_phase(name, Phase::FailedPermanent).await;
        until_true("nothing holds it", PATIENCE, async || site.get(name).await.unwrap().finalizers().is_empty()).await;
    }
    site.proxy.until_holding().await;
    site.proxy.pass();
    site.until_said("behind", &["Warning FailedPermanent"]).await;
    site.until_said("held", &["Warning FailedPermanent"]).await;
    assert_eq!(site.said_of("refused").await, [""; 0], "it is not tried again");
}
