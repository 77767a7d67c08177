//! The optional admission policies, on a real API server.

use jobrequest::api::Phase;
use kube::ResourceExt;

use super::site::Site;
use super::wait::{PATIENCE, until};
use super::*;

const HAS_MUTATING: [&str; 2] = ["--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"];

/// The policies of a release for these namespaces alone; gone when the test ends.
fn apply(sandbox: &mut Sandbox, sets: &[&str], watched: &[&str]) {
    let watched = format!("watchNamespaces={}", json!(watched));
    let sets = [&[watched.as_str()], sets].concat();
    let only = [&["--show-only", "templates/admission-policies.yaml"][..], &HAS_MUTATING].concat();
    let home = sandbox.namespaces[0].clone();
    sandbox.apply(template("minimal", &home, &sets, &only).unwrap());
}

fn request(spec: &str) -> String {
    format!("apiVersion: jobrequest.dev/v1alpha1\nkind: JobRequest\nmetadata: {{name: x}}\nspec: {spec}\n")
}

/// What the API server says of this spec; nothing is kept. Ok: the finalizers that it would have.
fn created(namespace: &str, spec: &str) -> Result<String, String> {
    let args =
        ["create", "--namespace", namespace, "--dry-run=server", "-o", "jsonpath={.metadata.finalizers}", "-f", "-"];
    let output = run("kubectl", &args, &request(spec));
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// New policies take a moment.
async fn until_refused(namespace: &str, spec: &str) {
    until("the policy is in force", PATIENCE, async || {
        created(namespace, spec).err().map(drop).ok_or("not yet".into())
    })
    .await;
}

#[test]
fn there_are_no_policies_unless_they_are_asked_for_and_the_cluster_has_them() {
    let policies = |sets: &[&str], more: &[&str]| {
        let objects = objects(&template("minimal", "system", sets, more).unwrap());
        objects.iter().filter(|object| object["kind"].as_str().unwrap().contains("Policy")).count()
    };
    assert_eq!(policies(&[], &HAS_MUTATING), 0);
    assert_eq!(policies(&["admissionPolicies.validate=true"], &[]), 2);
    assert_eq!(policies(&["admissionPolicies.finalizer=true"], &[]), 0, "a cluster that has none gets none");
    assert_eq!(policies(&["admissionPolicies.finalizer=true"], &HAS_MUTATING), 2);
    let beta = ["--api-versions", "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy"];
    assert_eq!(policies(&["admissionPolicies.finalizer=true"], &beta), 2);
}

#[tokio::test]
async fn what_the_schema_can_not_see_is_refused_at_once_by_the_fields_name() {
    let mut sandbox = Sandbox::new(&["sees-home", "sees-watched", "sees-other"]);
    let [watched, other] = [1, 2].map(|index| sandbox.namespaces[index].clone());
    let sets = [
        "admissionPolicies.validate=true",
        r#"egress.allow=["10.1.0.0/16"]"#,
        r#"egress.deny=["10.1.7.0/24","93.184.0.0/16"]"#,
    ];
    apply(&mut sandbox, &sets, &[&watched]);
    let blank = r#"{kind: summarize_text, payload: {text: "\u2003"}}"#;
    until_refused(&watched, blank).await;

    let hook = |url: &str| format!(r#"{{kind: webhook_delivery, payload: {{url: "{url}", body: 1}}}}"#);
    let picture =
        |url: &str| format!(r#"{{kind: resize_image, payload: {{source_url: "{url}", width: 1, height: 1}}}}"#);
    let (own, others) = (format!("s3://pictures/out/{watched}/a.png"), format!("s3://pictures/out/{other}/a.png"));
    let not_called = "the host is an address that this install does not call";
    for (spec, message) in [
        (blank.to_owned(), "spec.payload.text: must not be blank"),
        (r#"{kind: summarize_text, payload: {text: "a\0"}}"#.to_owned(), "spec.payload.text: holds a NUL character"),
        (
            r#"{kind: send_email, payload: {to: a@x.org, subject: s, body: b, html: "\0"}}"#.to_owned(),
            "spec.payload.html: holds a NUL character",
        ),
        (
            r#"{kind: summarize_text, payload: {text: a}, idempotencyKey: "a\0"}"#.to_owned(),
            "spec.idempotencyKey: holds a NUL character",
        ),
        (hook("http://10.2.3.4/"), "spec.payload.url: the host is"),
        (hook("http://10.1.7.4/"), not_called),
        (hook("https://93.184.215.14/"), not_called),
        (hook("http://127.0.0.1:8080/"), not_called),
        (hook("http://LocalHost/"), not_called),
        (hook("http://api.localhost./"), not_called),
        (hook("http://[::1]/"), not_called),
        (hook("http://[fd00::1]/"), not_called),
        (hook("http://[2001:db8::1]/"), not_called),
        (picture("http://169.254.169.254/a.png"), "spec.payload.source_url: the host is"),
        (picture(&others), "spec.payload.source_url: is not in this namespace's folder"),
        (picture("gs://pictures/a.png"), "spec.payload.source_url: is not in this namespace's folder"),
    ] {
        let refusal = created(&watched, &spec).expect_err(&format!("{spec} was taken"));
        assert!(refusal.contains(message), "{spec}: {refusal}");
    }
    let mail = "{kind: send_email, payload: {to: a@x.org, subject: '', body: b}}".to_owned();
    for spec in
        [hook("http://10.1.2.3/"), hook("https://example.com/"), hook("https://[2606:2800::1]/"), picture(&own), mail]
    {
        created(&watched, &spec).unwrap();
    }
    created(&other, blank).expect("other namespaces are nobody's business here");
    // The API server's own look at the expressions: do the types fit?
    let name = format!("validate.jobrequest.{}", sandbox.namespaces[0]);
    let checked = until("the policy's types are checked", PATIENCE, async || {
        let policy = kubectl(&["get", "validatingadmissionpolicy", &name, "-o", "json"], "");
        let status = serde_json::from_str::<Value>(&policy).unwrap()["status"].clone();
        if status["typeChecking"].is_object() { Ok(status) } else { Err(status.to_string()) }
    })
    .await;
    assert!(checked["typeChecking"]["expressionWarnings"].is_null(), "{checked}");
}

#[tokio::test]
async fn the_largest_text_is_looked_at_within_the_budget() {
    let mut sandbox = Sandbox::new(&["large-home", "large-watched"]);
    let watched = sandbox.namespaces[1].clone();
    apply(&mut sandbox, &["admissionPolicies.validate=true"], &[&watched]);
    let text = |text: &str| format!(r#"{{kind: summarize_text, payload: {{text: "{text}"}}}}"#);
    until_refused(&watched, &text(r"\u2003")).await;
    created(&watched, &text(&"a ".repeat(500_000))).unwrap();
    let refusal = created(&watched, &text(&format!("{}\\0", "a ".repeat(500_000)))).unwrap_err();
    assert!(
        refusal.contains("spec.payload.text: holds a NUL"),
        "not passed over: {}",
        &refusal[..500.min(refusal.len())]
    );
}

#[tokio::test]
async fn the_finalizer_that_the_api_server_puts_on_saves_a_write_and_holds_nothing_up() {
    let site = Site::new().await;
    let mut sandbox = Sandbox::new(&["adds-home", "adds-other"]);
    let other = sandbox.namespaces[1].clone();
    apply(&mut sandbox, &["admissionPolicies.finalizer=true"], &[&site.namespace]);
    let spec = "{kind: summarize_text, payload: {text: Work waits.}}";
    until("the policy is in force", PATIENCE, async || match created(&site.namespace, spec) {
        Ok(finalizers) if finalizers == r#"["jobrequest.dev/cancel"]"# => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    assert_eq!(created(&other, spec).unwrap(), "", "only in the watched namespaces");

    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let writes = site.proxy.writes().len();
    let summary = json!({"kind": "summarize_text", "payload": {"text": "Work waits."}});
    site.create_with(json!({"name": "fine", "finalizers": ["example.com/ours"]}), summary).await;
    let ended = until("it has ended and is let go", PATIENCE, async || match site.get("fine").await {
        Some(now) if site::phase(&now) == Some(Phase::Succeeded) && now.finalizers().len() == 1 => Ok(now),
        now => Err(format!("{now:?}")),
    })
    .await;
    assert_eq!(ended.finalizers(), ["example.com/ours"]);
    let writes = site.proxy.writes().split_off(writes);
    let metadata: Vec<_> = writes.iter().filter(|call| !call.is_status_patch()).collect();
    assert_eq!(metadata.len(), 1, "the finalizer's removal, and nobody put it on: {writes:#?}");
    // A resource that never becomes a row is let go as well.
    site.create("rejected", json!({"kind": "summarize_text", "payload": {"text": "\u{2003}"}})).await;
    site.until_phase("rejected", Phase::Rejected).await;
    site.delete("rejected").await;
    site.until_gone("rejected", PATIENCE).await;
    kubectl(
        &[
            "patch",
            "jobrequest",
            "fine",
            "--namespace",
            &site.namespace,
            "--type=merge",
            "-p",
            r#"{"metadata":{"finalizers":null}}"#,
        ],
        "",
    );
}
