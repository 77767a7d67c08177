//! Idempotency keys: shared, in conflict, freed.

use jobrequest::api::Phase;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::site::{PROMPTLY, Site, condition, job_id, with};
use super::wait::{PATIENCE, until_true};

const LATER: &str = "2099-01-01T00:00:00Z";

fn keyed(site: &Site, target: &str, key: &str) -> Value {
    with(site.hook(target), json!({"idempotencyKey": key}))
}

fn accepted(reason: &str) -> Option<(String, String)> {
    Some(("True".to_owned(), reason.to_owned()))
}

#[tokio::test]
async fn the_same_key_with_another_payload_is_a_conflict_and_with_the_same_one_shares_the_job() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", keyed(&site, "/gate/a", "k1")).await;
    let owner = site.until_phase("a", Phase::Running).await;
    assert_eq!(condition(&owner, "Accepted"), accepted("Enqueued"));
    site.create("other", keyed(&site, "/ok", "k1")).await;
    site.create("same", keyed(&site, "/gate/a", "k1")).await;

    let other = site.until_phase("other", Phase::Rejected).await;
    for (kind, status) in [("Accepted", "False"), ("Ready", "False"), ("Stalled", "True"), ("Failed", "True")] {
        let expected = Some((status.to_owned(), "IdempotencyConflict".to_owned()));
        assert_eq!(condition(&other, kind), expected, "{kind}");
    }
    assert_eq!(other.status.as_ref().unwrap().job_id, None, "it does not show the other's job");
    let same = site.until_phase("same", Phase::Running).await;
    assert_eq!(job_id(&same), job_id(&owner));
    assert_eq!(condition(&same, "Accepted"), accepted("Existing"));

    site.sink.open("a");
    for name in ["a", "same"] {
        site.until_phase(name, Phase::Succeeded).await;
    }
    assert_eq!((site.sink.count("/gate/a"), site.sink.count("/ok"), site.count_rows().await), (1, 0, 1));
    // A conflict is final, and one that shares after the end is done at once.
    site.create("late", keyed(&site, "/gate/a", "k1")).await;
    assert_eq!(job_id(&site.until_phase("late", Phase::Succeeded).await), job_id(&owner));
    assert_eq!(site.sink.count("/gate/a"), 1);
    site.delete("other").await;
    site.until_gone("other", PROMPTLY).await;
}

#[tokio::test]
async fn a_shared_job_is_cancelled_with_its_last_holder_only() {
    let site = Site::new().await;
    let _controller = site.controller().start().await;
    let spec = with(keyed(&site, "/ok", "k"), json!({"runAt": LATER}));
    let mut id = None;
    for name in ["owner", "sharer", "last"] {
        site.create(name, spec.clone()).await;
        let shown = job_id(&site.until_phase(name, Phase::Queued).await);
        assert_eq!(*id.get_or_insert(shown), shown);
    }
    let id = id.unwrap();
    for (name, then) in [("sharer", "queued"), ("owner", "queued"), ("last", "cancelled")] {
        site.delete(name).await;
        site.until_gone(name, PROMPTLY).await;
        assert_eq!(site.row(id).await.status, then, "after {name}");
    }
}

#[tokio::test]
async fn a_cancelled_job_frees_its_key_and_stays_for_the_record() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", with(keyed(&site, "/ok", "k2"), json!({"runAt": LATER}))).await;
    let first = job_id(&site.until_phase("a", Phase::Queued).await);
    site.delete("a").await;
    site.until_gone("a", PROMPTLY).await;
    site.create("a", keyed(&site, "/ok", "k2")).await;
    let second = job_id(&site.until_phase("a", Phase::Succeeded).await);
    assert_ne!(first, second);
    assert_eq!(site.row(first).await.status, "cancelled");
    assert_eq!((site.sink.count("/ok"), site.count_rows().await), (1, 2));
}

#[tokio::test]
async fn a_key_belongs_to_its_namespace() {
    let (site, other) = (Site::new().await, Site::new().await);
    // One database, two namespaces.
    let both = format!("{},{}", site.namespace, other.namespace);
    let _controller = site.controller().set("JOBREQUEST_WATCH_NAMESPACES", both).start().await;
    let _worker = site.worker().start().await;
    site.create("a", keyed(&site, "/ok?1", "k")).await;
    other.create("a", keyed(&site, "/ok?2", "k")).await;
    site.until_phase("a", Phase::Succeeded).await;
    other.until_phase("a", Phase::Succeeded).await;
    assert_eq!((site.sink.count("/ok?1"), site.sink.count("/ok?2"), site.count_rows().await), (1, 1, 2));
}

#[tokio::test]
async fn a_retry_whose_key_is_taken_is_refused_once_and_then_nothing_is_written() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", keyed(&site, "/code/404", "k")).await;
    let id = job_id(&site.until_phase("a", Phase::FailedPermanent).await);
    site.create("b", with(keyed(&site, "/ok", "k"), json!({"runAt": LATER}))).await;
    site.until_phase("b", Phase::Queued).await;
    site.annotate_retry("a", "1").await;
    let settled = async || {
        let a = site.get("a").await.unwrap();
        let shown = a.status.as_ref().and_then(|status| status.last_retry.as_deref()) == Some("1");
        shown && a.finalizers().is_empty()
    };
    until_true("the refusal is recorded and holds nothing up", PATIENCE, settled).await;
    let writes = site.proxy.writes().into_iter().filter(|call| call.is_about("a")).count();
    // By the time these have ended, the changes of the first have been looked at.
    for n in 0..5 {
        site.create(&format!("c-{n}"), site.hook("/ok?c")).await;
        site.until_phase(&format!("c-{n}"), Phase::Succeeded).await;
    }
    // A write from a cache that was behind is refused (422 by its test of the version) and changes nothing.
    let about_a = site.proxy.writes().into_iter().filter(|call| call.is_about("a")).skip(writes);
    let more: Vec<_> = about_a.filter(|call| call.status != Some(422)).collect();
    assert!(more.is_empty(), "{more:#?}");
    assert_eq!(site.row(id).await.status, "failed_permanent");
    // The key is free: a new value is a new question.
    site.delete("b").await;
    site.until_gone("b", PROMPTLY).await;
    site.annotate_retry("a", "2").await;
    site.until_hits("/code/404", 2).await;
}

#[tokio::test]
async fn the_next_holders_own_spec_reaches_the_job_when_the_owner_goes() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("owner", with(keyed(&site, "/ok", "k"), json!({"suspend": true}))).await;
    site.until_condition("owner", "Ready", "False", "Suspended").await;
    site.create("heir", keyed(&site, "/ok", "k")).await;
    site.until_condition("heir", "Ready", "False", "Suspended").await;
    site.delete("owner").await;
    let done = site.until_phase("heir", Phase::Succeeded).await;
    assert_eq!(condition(&done, "Accepted"), accepted("Enqueued"));
}
