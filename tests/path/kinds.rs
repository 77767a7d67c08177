//! Each kind through the whole path, from the manifests that people copy, under the rights that the chart gives.

use std::io::Cursor;
use std::process::Command;

use image::{DynamicImage, ImageFormat, RgbImage};
use jobrequest::api::Phase;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::ResourceExt;
use kube::config::AuthInfo;
use serde_json::{Value, json};

use super::api_proxy::ApiProxy;
use super::site::{PROMPTLY, Setup, Site, attempts, condition, config, job_id, run, with};
use super::wait::{PATIENCE, until_true};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

pub fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let picture = DynamicImage::from(RgbImage::from_pixel(width, height, image::Rgb([200, 10, 10])));
    picture.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png).unwrap();
    bytes
}

impl Site {
    /// A controller that is the chart's ServiceAccount in a namespace of the operator's, with the chart's rights for
    /// this namespace alone.
    async fn charts_controller(&self) -> (ApiProxy, Setup) {
        let home = format!("{}-system", self.namespace);
        self.kubectl_anywhere(&["create", "namespace", &home], "").await;
        let mut helm = Command::new("helm");
        helm.args(["template", "e2e", "charts/jobrequest", "--values", "charts/jobrequest/ci/minimal-values.yaml"])
            .args(["--namespace", &home, "--set", &format!("watchNamespaces={{{}}}", self.namespace)])
            .args(["--show-only", "templates/controller-rbac.yaml"])
            .current_dir(ROOT);
        let rendered = run(helm, String::new()).await;
        assert!(rendered.status.success(), "{}", String::from_utf8_lossy(&rendered.stderr));
        self.kubectl_anywhere(&["apply", "-f", "-"], &String::from_utf8(rendered.stdout).unwrap()).await;
        let accounts = self.kubectl_anywhere(&["get", "serviceaccounts", "--namespace", &home, "-o", "name"], "").await;
        let account = accounts.lines().find_map(|line| line.strip_prefix("serviceaccount/e2e")).unwrap();
        let token =
            self.kubectl_anywhere(&["create", "token", "--namespace", &home, &format!("e2e{account}")], "").await;

        let mut config = config(&self.stores.kubeconfig).await;
        config.default_namespace = home;
        config.auth_info = AuthInfo { token: Some(token.trim().to_owned().into()), ..AuthInfo::default() };
        let proxy = ApiProxy::start(config).await;
        let setup = self.controller().set("KUBECONFIG", proxy.kubeconfig(self.directory.path()).display());
        (proxy, setup)
    }

    async fn apply_example(&self, kind: &str) {
        self.kubectl(&["apply", "-f", "-"], &example(self, kind)).await;
    }
}

/// An example's manifest with its public addresses replaced by this site's.
pub fn example(site: &Site, kind: &str) -> String {
    std::fs::read_to_string(format!("{ROOT}/examples/{kind}.yaml"))
        .unwrap()
        .replace("https://images.example.com/picture.png", &site.sink.url("/file"))
        .replace("https://hooks.example.com/orders", &site.sink.url("/ok"))
}

/// The fields of an entry: the first level, and of `metadata` the second.
fn written_fields(entry: &ManagedFieldsEntry) -> Vec<String> {
    let fields = serde_json::to_value(&entry.fields_v1).unwrap();
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let metadata = fields.get("f:metadata").map(names).unwrap_or_default();
    let top = names(&fields).into_iter().filter(|name| name != "f:metadata");
    top.chain(metadata.iter().map(|name| format!("f:metadata.{name}"))).collect()
}

#[tokio::test]
async fn every_example_succeeds_with_no_more_than_the_charts_rights() {
    let site = Site::serving(png(1200, 800)).await;
    let (proxy, controller) = site.charts_controller().await;
    let (_controller, _worker) = (controller.start().await, site.worker().start().await);
    for kind in ["send-email", "resize-image", "summarize-text", "webhook-delivery"] {
        site.apply_example(kind).await;
    }
    site.kubectl(&["wait", "--for=condition=Complete", "--timeout=45s", "jobrequests", "--all"], "").await;
    site.kubectl(&["wait", "--for=condition=Ready", "--timeout=5s", "jobrequests", "--all"], "").await;

    let mails = site.smtp.stored();
    assert_eq!(mails.len(), 1);
    assert_eq!(
        (mails[0].to.clone(), mails[0].header("Subject")),
        (vec!["ada@example.com".to_owned()], "Welcome to the shop".to_owned())
    );
    let hits = site.sink.hits();
    let hook = hits.iter().find(|hit| hit.target == "/ok").unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&hook.body).unwrap()["order"], 42);
    assert!(hook.header("webhook-signature").starts_with("v1,"), "{:?}", hook.headers);
    let hook_id = job_id(&site.get("order-42-paid").await.unwrap()).to_string();
    assert!(hook.header("webhook-id").contains(&hook_id), "{:?}", hook.headers);

    let results = async |name: &str| {
        let status = site.get(name).await.unwrap().status.unwrap();
        status.result.expect("a result").to_value().unwrap()
    };
    let picture = results("thumbnail-42").await;
    let kept = site.objects().join(&site.namespace).join("thumbnails/42.webp");
    assert_eq!((&picture["width"], &picture["height"]), (&json!(320), &json!(213)), "{picture}");
    assert_eq!(image::guess_format(&std::fs::read(kept).unwrap()).unwrap(), ImageFormat::WebP);
    let summary = results("summary-of-the-report").await["summary"].as_str().unwrap().to_owned();
    assert!((1..=40).contains(&summary.split_whitespace().count()), "{summary}");
    assert!(!results("welcome-ada").await.is_null());

    let table = site.kubectl(&["get", "jr"], "").await;
    let head: Vec<_> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["NAME", "KIND", "PHASE", "ATTEMPTS", "RUN-AT", "AGE"]);
    assert_eq!(table.matches("Succeeded").count(), 4, "{table}");
    let wide = site.kubectl(&["get", "jr", "-o", "wide"], "").await;
    assert!(wide.contains("JOB-ID") && wide.contains(&hook_id), "{wide}");
    let failed =
        site.kubectl(&["get", "jr", "--field-selector", "spec.kind=send_email,status.phase=Succeeded"], "").await;
    assert_eq!(failed.lines().count(), 2, "{failed}");

    for object in site.all().await {
        let ours = |entry: &&ManagedFieldsEntry| entry.manager.as_deref() == Some("jobrequest-controller");
        let written: Vec<String> = object.managed_fields().iter().filter(ours).flat_map(written_fields).collect();
        let expected = |field: &String| field == "f:status" || field == "f:metadata.f:finalizers";
        assert!(!written.is_empty() && written.iter().all(expected), "{written:?}");
    }

    // The rest of what a controller does: a cancel, and the end.
    site.create("waiting", with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
    site.until_phase("waiting", Phase::Queued).await;
    site.delete("waiting").await;
    site.until_gone("waiting", PROMPTLY).await;
    let refused: Vec<_> = proxy.calls().into_iter().filter(|call| matches!(call.status, Some(401 | 403))).collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

#[tokio::test]
async fn a_namespace_with_live_jobs_goes_with_no_more_than_the_charts_rights() {
    let site = Site::new().await;
    let (_proxy, controller) = site.charts_controller().await;
    let (_controller, _worker) = (controller.start().await, site.worker().start().await);
    let mut ids = Vec::new();
    for n in 0..5 {
        let name = format!("waiting-{n}");
        site.create(&name, with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
        ids.push(job_id(&site.until_phase(&name, Phase::Queued).await));
    }
    site.create("running", site.hook("/gate/running")).await;
    ids.push(job_id(&site.until_phase("running", Phase::Running).await));
    site.kubectl(&["delete", "namespace", &site.namespace, "--timeout=30s"], "").await;
    for id in ids {
        assert_eq!(site.row(id).await.status, "cancelled");
    }
}

#[tokio::test]
async fn a_job_that_fails_for_good_is_stalled_for_kubectl_and_gitops() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("bad", site.hook("/code/404")).await;
    site.create("again", with(site.hook("/code/500"), json!({"maxAttempts": 2}))).await;
    site.kubectl(&["wait", "--for=condition=Stalled", "--timeout=45s", "jr/bad", "jr/again"], "").await;
    for (name, made) in [("bad", 1), ("again", 2)] {
        let object = site.get(name).await.unwrap();
        let failed = |status: &str| Some((status.to_owned(), "FailedPermanent".to_owned()));
        for (kind, status) in [("Ready", "False"), ("Stalled", "True"), ("Failed", "True")] {
            assert_eq!(condition(&object, kind), failed(status), "{name} {kind}");
        }
        assert_eq!(condition(&object, "Complete"), None);
        assert_eq!(attempts(&object), Some(made));
        assert_eq!(object.status.as_ref().unwrap().observed_generation, object.metadata.generation);
        assert!(object.status.unwrap().last_error.is_some_and(|error| error.contains("404") || error.contains("500")));
    }
    // An edit that changes nothing for an ended job is seen all the same.
    let patch = r#"{"spec": {"ttlSecondsAfterFinished": 3600}}"#;
    site.kubectl(&["patch", "jr", "bad", "--type=merge", "-p", patch], "").await;
    until_true("the generation is observed", PATIENCE, async || {
        let object = site.get("bad").await.unwrap();
        object.metadata.generation == Some(2) && object.status.unwrap().observed_generation == Some(2)
    })
    .await;
    let patch = r#"{"spec": {"payload": {"body": 2}}}"#;
    let error = site.try_kubectl(&["patch", "jr", "bad", "--type=merge", "-p", patch], "").await.unwrap_err();
    assert!(error.contains("spec.payload") && error.contains("immutable"), "{error}");
}
