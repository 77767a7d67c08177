//! GitOps tools: what they make of each phase, and that they see no drift. Judged by kstatus' own library, by our Lua in
//! the interpreter that Argo CD uses, by kubectl's server-side apply and by Helm.

use std::collections::BTreeMap;
use std::process::Command;

use jobrequest::api::{JobRequest, Phase};
use kube::ResourceExt;
use serde::Deserialize;
use serde_json::{Value, json};

use super::site::{PROMPTLY, Site, condition, job_id, run, with};
use super::wait::{PATIENCE, until, until_true};

const LATER: &str = "2099-01-01T00:00:00Z";
const ARGO_CD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/gitops/argocd/argocd-cm.yaml");

#[derive(Debug, Deserialize)]
struct Judgement {
    kstatus: String,
    health: String,
    message: String,
    /// The resource after each action that is offered.
    actions: BTreeMap<String, Value>,
}

impl Judgement {
    fn words(&self) -> (&str, &str, Vec<&str>) {
        (&self.kstatus, &self.health, self.actions.keys().map(String::as_str).collect())
    }
}

async fn judged(object: &JobRequest) -> Judgement {
    let mut object = serde_json::to_value(object).unwrap();
    object["apiVersion"] = json!("jobrequest.dev/v1alpha1");
    object["kind"] = json!("JobRequest");
    let mut command = Command::new("judges");
    command.arg(ARGO_CD);
    let done = run(command, format!("{object}\n")).await;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

fn named(site: &Site, name: &str) -> Value {
    with(site.hook("/ok"), json!({"idempotencyKey": name}))
}

impl Site {
    async fn seen(&self, name: &str) -> JobRequest {
        self.get(name).await.unwrap_or_else(|| panic!("{name} is not there"))
    }

    /// Ended so, with nothing left to be written about it.
    async fn until_at_rest(&self, name: &str, end: Phase) -> JobRequest {
        self.until_phase(name, end).await;
        until(&format!("{name} is at rest"), PATIENCE, async || {
            let object = self.seen(name).await;
            if object.finalizers().is_empty() { Ok(object) } else { Err(format!("{:?}", object.finalizers())) }
        })
        .await
    }

    async fn helm(&self, arguments: &[&str]) {
        let mut command = Command::new("helm");
        command.env("KUBECONFIG", &self.stores.kubeconfig).args(["--namespace", &self.namespace]).args(arguments);
        let done = run(command, String::new()).await;
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
}

#[tokio::test]
async fn kstatus_and_argo_cd_see_what_each_phase_means() {
    let site = Site::new().await;
    let fresh = site.create("fresh", site.hook("/ok")).await;
    assert_eq!(judged(&fresh).await.words(), ("InProgress", "Progressing", vec![]), "no controller has seen it");

    let controller = site.controller().start().await;
    let waits = |spec: Value| with(spec, json!({"runAt": LATER}));
    site.create("waits", waits(site.hook("/ok"))).await;
    site.create("suspended", with(site.hook("/ok"), json!({"suspend": true}))).await;
    site.create("cancelled", waits(site.hook("/ok"))).await;
    site.create("rejected", with(site.hook("/ok"), json!({"idempotencyKey": "taken"}))).await;
    let waiting = site.until_phase("waits", Phase::Queued).await;
    assert_eq!(judged(&waiting).await.words(), ("InProgress", "Progressing", vec!["suspend"]));
    let held = judged(&site.until_condition("suspended", "Ready", "False", "Suspended").await).await;
    assert_eq!(held.words(), ("InProgress", "Suspended", vec!["resume"]));
    assert_eq!(held.actions["resume"]["spec"]["suspend"], false);
    let id = job_id(&site.until_phase("cancelled", Phase::Queued).await).to_string();
    let (code, _, error) = site.program(&["jobs", "cancel", &id]).output().await;
    assert_eq!(code, Some(0), "{error}");
    let cancelled = site.until_phase("cancelled", Phase::Cancelled).await;
    assert_eq!(judged(&cancelled).await.words(), ("Failed", "Degraded", vec!["retry"]));

    let _worker = site.worker().set("JOBREQUEST_RETRY_BASE_SECONDS", 60).start().await;
    site.until_phase("rejected", Phase::Succeeded).await;
    site.create("conflict", with(site.hook("/other"), json!({"idempotencyKey": "taken"}))).await;
    let conflict = judged(&site.until_phase("conflict", Phase::Rejected).await).await;
    assert_eq!(conflict.words(), ("Failed", "Degraded", vec![]), "a rejected one can't be retried");
    assert!(conflict.message.starts_with("IdempotencyConflict: "), "{}", conflict.message);
    site.create("runs", site.hook("/gate/runs")).await;
    let running = site.until_phase("runs", Phase::Running).await;
    assert_eq!(judged(&running).await.words(), ("InProgress", "Progressing", vec![]));
    site.create("retries", site.hook("/code/500")).await;
    let retrying = site.until_phase("retries", Phase::Retrying).await;
    assert_eq!(judged(&retrying).await.words(), ("InProgress", "Progressing", vec!["suspend"]));
    site.create("fails", with(site.hook("/code/500"), json!({"maxAttempts": 1}))).await;
    let failed = judged(&site.until_at_rest("fails", Phase::FailedPermanent).await).await;
    assert_eq!(failed.words(), ("Failed", "Degraded", vec!["retry"]));
    let succeeded = site.until_phase("fresh", Phase::Succeeded).await;
    assert_eq!(judged(&succeeded).await.words(), ("Current", "Healthy", vec![]));

    // What Argo CD would apply makes it run again.
    site.kubectl(&["replace", "-f", "-"], &failed.actions["retry"].to_string()).await;
    site.until_hits("/code/500", 3).await;
    // One that waits for its job to stop is on its way, whatever its conditions say.
    site.delete("runs").await;
    let going = site.until_condition("runs", "Ready", "False", "Cancelling").await;
    assert_eq!(judged(&going).await.kstatus, "Terminating");
    drop(controller);
}

#[tokio::test]
async fn what_another_manager_applies_again_has_not_drifted_and_changes_nothing() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let manifest = json!({
        "apiVersion": "jobrequest.dev/v1alpha1", "kind": "JobRequest", "metadata": {"name": "a"}, "spec": named(&site, "a"),
    })
    .to_string();
    let apply = ["apply", "--server-side", "--field-manager=argocd-controller", "-f", "-"];
    site.kubectl(&apply, &manifest).await;
    let before = site.until_at_rest("a", Phase::Succeeded).await;
    for manager in ["argocd-controller", "kustomize-controller"] {
        let manager = format!("--field-manager={manager}");
        // Exits with 1 where there is a difference.
        site.kubectl(&["diff", "--server-side", &manager, "-f", "-"], &manifest).await;
    }
    site.kubectl(&apply, &manifest).await;
    let after = site.seen("a").await;
    assert_eq!((after.resource_version(), site.sink.count("/ok")), (before.resource_version(), 1));
}

#[tokio::test]
async fn helms_merge_of_three_finds_nothing_to_change_and_a_changed_value_reaches_the_row() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let chart = site.directory.path().join("jobs");
    std::fs::create_dir_all(chart.join("templates")).unwrap();
    std::fs::write(chart.join("Chart.yaml"), "apiVersion: v2\nname: jobs\nversion: 1.0.0\n").unwrap();
    let manifest = |name: &str, spec: Value| json!({"apiVersion": "jobrequest.dev/v1alpha1", "kind": "JobRequest", "metadata": {"name": name}, "spec": spec});
    let waits = with(named(&site, "b"), json!({"runAt": LATER, "priority": 1}));
    let text = format!("{}\n---\n{}\n", manifest("a", named(&site, "a")), manifest("b", waits));
    let text = text.replace("\"priority\":1", "\"priority\":{{ .Values.priority }}");
    std::fs::write(chart.join("templates/jobs.yaml"), text).unwrap();
    let chart = chart.display().to_string();
    let release = ["upgrade", "--install", "jobs", &chart, "--set"];
    site.helm(&[&release[..], &["priority=1"]].concat()).await;
    let (a, b) = (site.until_at_rest("a", Phase::Succeeded).await, site.until_phase("b", Phase::Queued).await);
    site.helm(&[&release[..], &["priority=1"]].concat()).await;
    for before in [&a, &b] {
        let after = site.seen(&before.name_any()).await;
        assert_eq!(after.resource_version(), before.resource_version(), "{}", before.name_any());
    }
    site.helm(&[&release[..], &["priority=7"]].concat()).await;
    let sql = format!("SELECT priority FROM jobs WHERE id = '{}'", job_id(&b));
    until_true("the row has the new priority", PATIENCE, async || site.database.value::<i16>(&sql).await == 7).await;
    assert_eq!(site.sink.count("/ok"), 1);
}

#[tokio::test]
async fn a_loop_of_deletes_and_creations_runs_keyed_work_once() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let mut first = None;
    for _ in 0..5 {
        site.create("a", named(&site, "a")).await;
        let object = site.until_phase("a", Phase::Succeeded).await;
        assert_eq!(*first.get_or_insert(job_id(&object)), job_id(&object));
        assert_eq!(condition(&object, "Ready"), Some(("True".to_owned(), "Succeeded".to_owned())));
        site.delete("a").await;
        site.until_gone("a", PROMPTLY).await;
    }
    assert_eq!(site.sink.count("/ok"), 1);
}
