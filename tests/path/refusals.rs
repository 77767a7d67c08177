//! What the API server takes and no row can hold.

use std::time::{Duration, Instant};

use jobrequest::api::Phase;
use serde_json::json;

use super::site::{PROMPTLY, Site, condition};
use super::wait::{PATIENCE, until_true};

#[tokio::test]
async fn a_payload_that_no_row_can_hold_is_rejected_once_and_holds_nobody_up() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let nul = r#"{apiVersion: jobrequest.dev/v1alpha1, kind: JobRequest, metadata: {name: nul}, spec: {kind: send_email,
        payload: {to: ada@example.com, subject: "secret\0", body: b}}}"#;
    let deep = format!(
        "{{apiVersion: jobrequest.dev/v1alpha1, kind: JobRequest, metadata: {{name: deep}}, spec: {{kind: webhook_delivery, \
         payload: {{url: 'http://example.com/', body: {}{}}}}}}}",
        "[".repeat(200),
        "]".repeat(200)
    );
    for manifest in [nul, &deep] {
        site.kubectl(&["apply", "--server-side", "-f", "-"], manifest).await;
    }
    for (name, message) in [("nul", "spec.payload.subject holds a NUL"), ("deep", "spec.payload is nested 201 levels")]
    {
        let object = site.until_phase(name, Phase::Rejected).await;
        let invalid = |status: &str| Some((status.to_owned(), "PayloadInvalid".to_owned()));
        for (kind, status) in [("Accepted", "False"), ("Ready", "False"), ("Failed", "True"), ("Stalled", "True")] {
            assert_eq!(condition(&object, kind), invalid(status), "{name} {kind}");
        }
        let conditions = serde_json::to_string(&object.status.as_ref().unwrap().conditions).unwrap();
        assert!(conditions.contains(message) && !conditions.contains("secret"), "{conditions}");
        assert_eq!(object.metadata.finalizers, None);
        let written = site.proxy.writes().iter().filter(|call| call.is_about(name)).count();
        assert_eq!(written, 1, "{name}: its status is the one write");
    }
    assert_eq!(site.count_rows().await, 0);

    // No loop: while others come and go, nobody asks for these again.
    let of_the_bad = || site.proxy.calls().iter().filter(|call| call.is_about("nul") || call.is_about("deep")).count();
    let before = of_the_bad();
    let mut fastest = Duration::MAX;
    for n in 0..5 {
        // The machine may be busy; whoever is held up is so each time.
        if fastest < Duration::from_secs(1) {
            break;
        }
        let (name, started) = (format!("good-{n}"), Instant::now());
        site.create(&name, json!({"kind": "summarize_text", "payload": {"text": "Hello."}})).await;
        site.until_phase(&name, Phase::Succeeded).await;
        fastest = fastest.min(started.elapsed());
    }
    assert!(fastest < Duration::from_secs(1), "{fastest:?} for a good one");
    assert_eq!(of_the_bad(), before);

    for name in ["nul", "deep"] {
        site.delete(name).await;
        assert!(site.get(name).await.is_none(), "{name} goes at once");
    }
}

#[tokio::test]
async fn what_is_rejected_can_be_deleted_while_everything_else_is_down() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    site.create("bad", json!({"kind": "summarize_text", "payload": {"text": "\u{2003}"}})).await;
    site.until_phase("bad", Phase::Rejected).await;
    site.kill(&mut controller).await;
    site.delete("bad").await;
    site.until_gone("bad", PROMPTLY).await;
}

#[tokio::test]
async fn a_text_of_300_kib_goes_the_whole_way() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let sentence = "The harbour of Port Ellery closed for nine days after the storm. ";
    let text = sentence.repeat(300 * 1024 / sentence.len() + 1);
    let manifest = json!({
        "apiVersion": "jobrequest.dev/v1alpha1", "kind": "JobRequest", "metadata": {"name": "long"},
        "spec": {"kind": "summarize_text", "payload": {"text": text, "max_words": 30}},
    });
    site.kubectl(&["apply", "--server-side", "-f", "-"], &manifest.to_string()).await;
    let object = site.until_phase("long", Phase::Succeeded).await;
    let status = serde_json::to_string(&object.status).unwrap();
    assert!(status.len() < 8 * 1024 && status.contains("Port Ellery"), "{status}");
    let length: i64 = site.database.value("SELECT length(payload->>'text')::bigint FROM jobs").await;
    assert_eq!(length, i64::try_from(text.len()).unwrap());
    until_true("no finalizer is left", PATIENCE, async || {
        site.get("long").await.unwrap().metadata.finalizers.is_none()
    })
    .await;
}
