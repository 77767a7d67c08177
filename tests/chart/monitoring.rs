//! Alerts and the dashboard: judged by promtool, and asked of a real Prometheus that has scraped real programs.

use std::path::Path;
use std::process::Child;

use jobrequest::api::Phase;

use super::program::free_address;
use super::site::{Site, with};
use super::wait::{PATIENCE, until};
use super::*;

const RULES_ON: &str = "metrics.prometheusRule.enabled=true";

/// The rules as Prometheus reads them: a PrometheusRule's spec is a file of rules.
fn rules(values: &str, sets: &[&str]) -> Value {
    let objects = render(values, &[&[RULES_ON], sets].concat());
    of_kind(&objects, "PrometheusRule").next().unwrap()["spec"].clone()
}

fn alerts(rules: &Value) -> Vec<&Value> {
    list(&rules["groups"]).flat_map(|group| list(&group["rules"])).filter(|rule| rule["alert"].is_string()).collect()
}

fn names(objects: Vec<&Value>, key: &str) -> BTreeSet<String> {
    objects.into_iter().map(|object| object[key].as_str().unwrap().to_owned()).collect()
}

fn promtool(directory: &Path, words: &[&str]) {
    let output = Command::new("promtool").args(words).current_dir(directory).output();
    let output = output.unwrap_or_else(|error| panic!("promtool can't be started ({error}): run make test"));
    assert!(output.status.success(), "{words:?}: {}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn every_alert_fires_when_it_should_and_not_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let (rules, cases) = (rules("minimal", &[]), include_str!("alerts.yaml"));
    std::fs::write(directory.path().join("rules.yaml"), rules.to_string()).unwrap();
    std::fs::write(directory.path().join("alerts.yaml"), cases).unwrap();
    promtool(directory.path(), &["check", "rules", "rules.yaml"]);
    promtool(directory.path(), &["test", "rules", "alerts.yaml"]);
    let cases: Value = serde_yaml::from_str(cases).unwrap();
    let expected = list(&cases["tests"]).flat_map(|case| list(&case["alert_rule_test"]));
    let (fires, stays): (Vec<_>, Vec<_>) = expected.partition(|case| case["exp_alerts"].is_array());
    let (fires, stays) = (names(fires, "alertname"), names(stays, "alertname"));
    let all = names(alerts(&rules), "alert");
    assert!(all.len() >= 10);
    assert_eq!((&fires, &stays), (&all, &all), "each alert has a case in which it fires and one in which it doesn't");
}

#[test]
fn every_alert_names_its_place_in_the_runbook() {
    let elsewhere = r#"metrics.prometheusRule.runbookUrl="https://wiki.example.com/jobs""#;
    for (sets, page) in [(&[][..], "docs/operating.md"), (&[elsewhere], "https://wiki.example.com/jobs")] {
        for alert in alerts(&rules("minimal", sets)) {
            let name = alert["alert"].as_str().unwrap();
            assert_eq!(alert["annotations"]["runbook_url"], format!("{page}#{}", name.to_lowercase()));
            let section = format!("\n### {name}\n");
            assert!(include_str!("../../docs/operating.md").contains(&section), "the runbook says nothing of {name}");
            assert!(["critical", "warning"].contains(&alert["labels"]["severity"].as_str().unwrap()));
        }
    }
}

#[test]
fn thresholds_are_values_and_other_rules_can_be_added() {
    let rules = rules("all", &[]);
    let text = rules.to_string();
    for part in ["> 60", "> 0.05", "> 30", "jobs:started", r#"job=\"queue\""#] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("rules.yaml"), &text).unwrap();
    promtool(directory.path(), &["check", "rules", "rules.yaml"]);
}

#[test]
fn a_pool_that_may_shrink_to_nothing_is_no_alert() {
    let has =
        |sets: &[&str]| alerts(&rules("minimal", sets)).iter().any(|alert| alert["alert"] == "JobRequestNoWorkers");
    assert!(has(&[]));
    assert!(!has(&["workers.default.replicas=0"]));
    assert!(!has(&[r#"workers.default.autoscaling={"mode":"KEDA","minReplicas":0}"#]));
    assert!(has(&[r#"workers.default.autoscaling={"mode":"KEDA"}"#, "workers.default.replicas=0"]));
}

#[test]
fn the_operator_finds_every_pod_with_metrics_and_each_once() {
    for (sets, kind) in [
        (&["metrics.podMonitor.enabled=true"][..], "PodMonitor"),
        (&["metrics.serviceMonitor.enabled=true", "metrics.service.enabled=true"], "ServiceMonitor"),
    ] {
        let objects = render("minimal", sets);
        let monitor = of_kind(&objects, kind).next().unwrap();
        let selected = if kind == "ServiceMonitor" {
            let service = of_kind(&objects, "Service").next().unwrap();
            for (key, value) in monitor["spec"]["selector"]["matchLabels"].as_object().unwrap() {
                assert_eq!(service["metadata"]["labels"][key], *value);
            }
            &service["spec"]["selector"]
        } else {
            &monitor["spec"]["selector"]["matchLabels"]
        };
        for deployment in of_kind(&objects, "Deployment") {
            let labels = &deployment["spec"]["template"]["metadata"]["labels"];
            assert!(selected.as_object().unwrap().iter().all(|(key, value)| labels[key] == *value), "{kind}");
        }
    }
    for (sets, message) in [
        (&["metrics.serviceMonitor.enabled=true"][..], "metrics.service.enabled=true"),
        (&["metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true"], "take one of them"),
    ] {
        let refusal = template("minimal", "system", sets, &[]).unwrap_err();
        assert!(refusal.contains(message), "{refusal}");
    }
}

// --- against a real Prometheus -----------------------------------------------------------------------------------------------

/// Scrapes programs each second; ended when dropped.
struct Prometheus {
    child: Child,
    url: String,
    directory: tempfile::TempDir,
}

impl Prometheus {
    /// `targets` are the addresses and the names of the Pods that they stand for.
    fn start(targets: &[(String, &str)], rules: &Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let targets: Vec<_> = targets
            .iter()
            .map(|(address, pod)| json!({"targets": [address], "labels": {"namespace": "system", "pod": pod}}))
            .collect();
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "jobrequest", "static_configs": targets}],
        });
        std::fs::write(directory.path().join("prometheus.yaml"), config.to_string()).unwrap();
        std::fs::write(directory.path().join("rules.yaml"), rules.to_string()).unwrap();
        promtool(directory.path(), &["check", "config", "prometheus.yaml"]);
        let address = free_address();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let child = Command::new("prometheus")
            .args(["--config.file=prometheus.yaml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address={address}"))
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, url: format!("http://{address}/api/v1/"), directory }
    }

    async fn ask(&self, path: &str, parameters: &[(&str, &str)]) -> Result<Value, String> {
        let url = url::Url::parse_with_params(&format!("{}{path}", self.url), parameters).unwrap();
        let answer = reqwest::get(url).await.map_err(|error| error.to_string())?;
        let answer = answer.text().await.map_err(|error| error.to_string())?;
        let answer: Value = serde_json::from_str(&answer).map_err(|_| answer)?;
        if answer["status"] == "success" { Ok(answer["data"].clone()) } else { Err(answer.to_string()) }
    }

    /// Waits until a query has a result.
    async fn until_answered(&self, what: &str, query: &str) {
        until(&format!("{what}: {query}"), PATIENCE, async || {
            let data = self.ask("query", &[("query", query)]).await?;
            if list(&data["result"]).next().is_some() { Ok(()) } else { Err("no result".to_owned()) }
        })
        .await;
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default());
        }
    }
}

/// The names of our metrics in a query, as written.
fn metric_names(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = |word: &&str| word.starts_with("jobrequest_") || word.starts_with("worker_job");
    words.filter(ours).map(str::to_owned).collect()
}

#[tokio::test]
async fn every_query_of_the_dashboard_and_the_alerts_finds_what_the_programs_export() {
    let site = Site::new().await;
    let (controller, worker) = (site.controller().start().await, site.worker().start().await);
    // A success, a permanent failure, one that tries again, one that waits.
    site.create("fine", json!({"kind": "summarize_text", "payload": {"text": "Work waits. Workers take it."}})).await;
    site.create("refused", site.hook("/code/404")).await;
    site.create("again", site.hook("/code/503")).await;
    site.create("later", with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
    site.until_phase("fine", Phase::Succeeded).await;
    site.until_phase("refused", Phase::FailedPermanent).await;

    let targets = [(controller.address().to_string(), "controller-1"), (worker.address().to_string(), "worker-1")];
    let rules = rules("minimal", &[]);
    let prometheus = Prometheus::start(&targets, &rules);
    let objects = render("minimal", &["metrics.dashboard.enabled=true"]);
    let map = named(&objects, "ConfigMap", "jobrequest-dashboard");
    assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
    let dashboard: Value = serde_json::from_str(map["data"]["jobrequest.json"].as_str().unwrap()).unwrap();

    let mut queries = Vec::new();
    for panel in list(&dashboard["panels"]) {
        for target in list(&panel["targets"]) {
            let query = target["expr"].as_str().unwrap().replace("$namespace", "system");
            queries.push((panel["title"].as_str().unwrap(), query.replace("$__rate_interval", "1m")));
        }
    }
    assert!(queries.len() > 20, "{queries:?}");
    for (panel, query) in &queries {
        assert!(!query.contains('$'), "a variable that this test doesn't know: {query}");
        prometheus.until_answered(panel, query).await;
    }
    // An alert that has no reason to fire has no result; what it looks at must be there all the same.
    let exported = prometheus.ask("label/__name__/values", &[]).await.unwrap();
    let exported: BTreeSet<String> = strings(&exported).into_iter().collect();
    for alert in alerts(&rules) {
        let query = alert["expr"].as_str().unwrap();
        prometheus.ask("query", &[("query", query)]).await.unwrap();
        let missing: Vec<_> = metric_names(query).into_iter().filter(|name| !exported.contains(name)).collect();
        assert!(missing.is_empty(), "{}: nothing exports {missing:?}", alert["alert"]);
    }
    let keda =
        r#"workers.default.autoscaling={"mode":"KEDA","keda":{"trigger":"prometheus","prometheusUrl":"http://p"}}"#;
    let objects = render("minimal", &[keda]);
    let trigger = &of_kind(&objects, "ScaledObject").next().unwrap()["spec"]["triggers"][0]["metadata"];
    prometheus.until_answered("KEDA", trigger["query"].as_str().unwrap()).await;

    // The other way round: whatever is exported is to be seen.
    let shown: BTreeSet<_> = queries.iter().flat_map(|(_, query)| metric_names(query)).collect();
    let families =
        |name: &str| ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).map(str::to_owned);
    for name in exported.iter().filter(|name| !metric_names(name).is_empty()) {
        let shown =
            shown.contains(name) || families(name).is_some_and(|base| shown.contains(&format!("{base}_bucket")));
        assert!(shown, "{name} is on no panel");
    }
}
