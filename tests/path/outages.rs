//! Stores that go away while work goes on, or are not there at the start.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jobrequest::api::Phase;
use kube::ResourceExt;
use serde_json::json;
use uuid::Uuid;

use super::api_proxy::{self, ApiProxy, Call};
use super::program::free_address;
use super::site::{PROMPTLY, Setup, Site, attempts, condition, config, job_id, phase, with};
use super::stores::Stores;
use super::wait::{PATIENCE, until, until_true};

const LATER: &str = "2099-01-01T00:00:00Z";
const OUTAGE: Duration = Duration::from_secs(20);
/// How often the API server may be called meanwhile, one condition a resource aside.
const CALLS_A_SECOND: f64 = 5.0;

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{prefix}-{n}")).collect()
}

#[tokio::test]
async fn nothing_is_lost_or_run_twice_when_postgres_is_away_for_20_seconds() {
    let site = Site::on(Stores::own(&["postgres"]).await).await;
    // So that no lease ends: a busy machine takes its time to bring Postgres back.
    let long = |program: Setup| program.set("JOBREQUEST_LEASE_SECONDS", 120);
    let controller = long(site.controller()).start().await;
    let workers = [long(site.worker()).start().await, long(site.worker()).start().await];
    let (running, ending) = (names("running", 5), names("ending", 5));
    let (waiting, doomed) = (names("waiting", 10), names("doomed", 20));
    for name in running.iter().chain(&ending) {
        site.create(name, site.hook(&format!("/gate/{name}"))).await;
    }
    for name in waiting.iter().chain(&doomed) {
        site.create(name, with(site.hook(&format!("/ok?{name}")), json!({"runAt": LATER}))).await;
    }
    site.create("stopped", site.hook("/gate/stopped")).await;
    site.create("finished", site.hook("/ok?finished")).await;
    let mut ids: BTreeMap<String, Uuid> = BTreeMap::new();
    for name in running.iter().chain(&ending).chain([&"stopped".to_owned()]) {
        site.until_hits(&format!("/gate/{name}"), 1).await;
        ids.insert(name.clone(), job_id(&site.until_phase(name, Phase::Running).await));
    }
    for name in waiting.iter().chain(&doomed) {
        ids.insert(name.clone(), job_id(&site.until_phase(name, Phase::Queued).await));
    }
    site.until_phase("finished", Phase::Succeeded).await;

    site.stores.run("down", &["postgres"]).await;
    let (began, calls_before) = (Instant::now(), site.proxy.calls().len());
    ending.iter().for_each(|name| site.sink.open(name));
    let applied = names("applied", 20);
    for name in &applied {
        site.create(name, site.hook(&format!("/ok?{name}"))).await;
    }
    for name in doomed.iter().chain([&"stopped".to_owned()]) {
        site.delete(name).await;
    }
    site.delete("finished").await;
    assert!(site.get("finished").await.is_none(), "what has ended is held up by nothing");
    for name in applied.iter().chain(&doomed) {
        site.until_condition(name, "Ready", "False", "DatabaseUnavailable").await;
    }
    for program in workers.iter().chain([&controller]) {
        until_true(
            "the programs say so",
            PATIENCE,
            async || matches!(program.get("/readyz").await, (503, text) if text.contains("postgres")),
        )
        .await;
        assert_eq!(program.get("/healthz").await.0, 200, "no reason to restart them");
    }
    // The one wait for a time: the outage's length is part of the promise.
    tokio::time::sleep(OUTAGE.saturating_sub(began.elapsed())).await;
    let calls: Vec<Call> = site.proxy.calls().split_off(calls_before);
    let lasted = began.elapsed();
    site.stores.run("up", &["postgres"]).await;

    let mut conditions: BTreeMap<&str, usize> = BTreeMap::new();
    for call in calls.iter().filter(|call| call.is_status_patch()) {
        *conditions.entry(&call.path).or_default() += 1;
    }
    assert!(conditions.values().all(|count| *count == 1), "one condition a resource: {conditions:#?}");
    let others = f64::from(u32::try_from(calls.len() - conditions.len()).unwrap());
    assert!(others / lasted.as_secs_f64() < CALLS_A_SECOND, "{others} calls in {lasted:?}: {calls:#?}");

    for name in &applied {
        let object = site.until_phase(name, Phase::Succeeded).await;
        ids.insert(name.clone(), job_id(&object));
    }
    for name in doomed.iter().chain([&"stopped".to_owned()]) {
        site.until_gone(name, PATIENCE).await;
        assert_eq!(site.row(ids[name]).await.status, "cancelled", "{name}");
    }
    running.iter().for_each(|name| site.sink.open(name));
    for name in running.iter().chain(&ending) {
        let object = site.until_phase(name, Phase::Succeeded).await;
        assert_eq!((job_id(&object), attempts(&object)), (ids[name], Some(1)), "{name}");
    }
    for name in running.iter().chain(&ending).chain([&"stopped".to_owned()]) {
        assert_eq!(site.sink.count(&format!("/gate/{name}")), 1, "{name} ran once");
    }
    for name in &applied {
        assert_eq!(site.sink.count(&format!("/ok?{name}")), 1, "{name} ran once");
    }
    for name in &waiting {
        let object = site.get(name).await.unwrap();
        assert_eq!((phase(&object), job_id(&object)), (Some(Phase::Queued), ids[name]));
        assert_eq!(site.row(ids[name]).await.status, "queued");
    }
    for program in workers.iter().chain([&controller]) {
        program.until("/readyz", 200).await;
    }
    assert_eq!(site.count_rows().await, 5 + 5 + 10 + 20 + 2 + 20);
}

async fn install_the_crd(site: &Site) {
    site.kubectl(
        &["apply", "--server-side", "--force-conflicts", "-f", concat!(env!("CARGO_MANIFEST_DIR"), "/crds")],
        "",
    )
    .await;
    site.kubectl(&["wait", "--for=condition=Established", "crd/jobrequests.jobrequest.dev", "--timeout=30s"], "").await;
}

#[tokio::test]
async fn the_controller_goes_on_when_the_api_server_is_back_and_statuses_agree_with_rows() {
    let stores = Stores::own(&["etcd", "kube-apiserver"]).await;
    let site = Site::prepared(stores, install_the_crd).await;
    let direct = site.stores.kubeconfig.display().to_string();
    let controller = site.controller().set("KUBECONFIG", direct).start().await;
    let _worker = site.worker().start().await;
    let (running, waiting) = (names("running", 5), names("waiting", 5));
    for name in &running {
        site.create(name, site.hook(&format!("/gate/{name}"))).await;
    }
    for name in &waiting {
        site.create(name, with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    }
    let mut ids = Vec::new();
    for (name, wanted) in running.iter().map(|n| (n, Phase::Running)).chain(waiting.iter().map(|n| (n, Phase::Queued)))
    {
        ids.push((name, job_id(&site.until_phase(name, wanted).await)));
    }
    let cancelled = ids[5].1;

    site.stores.run("kill", &["kube-apiserver"]).await;
    until_true(
        "the controller says so",
        PATIENCE,
        async || matches!(controller.get("/readyz").await, (503, text) if text.contains("kubernetes")),
    )
    .await;
    assert_eq!(controller.get("/healthz").await.0, 200, "no reason to restart it");
    running.iter().for_each(|name| site.sink.open(name));
    for (_, id) in &ids[..5] {
        site.until_row(*id, "succeeded").await;
    }
    let (code, _, error) = site.program(&["jobs", "cancel", &cancelled.to_string()]).output().await;
    assert_eq!(code, Some(0), "{error}");
    site.stores.run("up", &["kube-apiserver"]).await;
    controller.until("/readyz", 200).await;

    until("statuses agree with rows", Duration::from_secs(5), async || {
        for (name, id) in &ids {
            let (shown, row) = (phase(&site.get(name).await.unwrap()), site.row(*id).await.status);
            let expected = match row.as_str() {
                "succeeded" => Phase::Succeeded,
                "cancelled" => Phase::Cancelled,
                "queued" => Phase::Queued,
                other => panic!("{name} is {other}"),
            };
            if shown != Some(expected) {
                return Err(format!("{name}: {shown:?}, but {row}"));
            }
        }
        Ok(())
    })
    .await;
    site.create("new", site.hook("/ok")).await;
    site.until_phase("new", Phase::Succeeded).await;
    site.delete(&waiting[1]).await;
    site.until_gone(&waiting[1], PROMPTLY).await;
    for name in &running {
        assert_eq!(site.sink.count(&format!("/gate/{name}")), 1, "{name} ran once");
    }
}

#[tokio::test]
async fn a_right_that_is_missing_in_one_namespace_holds_up_no_other() {
    let (site, other) = (Site::new().await, Site::new().await);
    let forbidden = format!("/namespaces/{}/", other.namespace);
    site.proxy.refuse(403, move |call| call.path.contains(&forbidden));
    let both = format!("{},{}", other.namespace, site.namespace);
    let controller = site.controller().set("JOBREQUEST_WATCH_NAMESPACES", both).launch();
    site.create("a", with(site.hook("/ok"), json!({"runAt": LATER}))).await;
    let id = job_id(&site.until_phase("a", Phase::Queued).await);
    let (code, _, error) = site.program(&["jobs", "cancel", &id.to_string()]).output().await;
    assert_eq!(code, Some(0), "{error}");
    site.until_phase("a", Phase::Cancelled).await;
    let (code, text) = controller.get("/readyz").await;
    assert!(code == 503 && text.contains("403"), "it names what is missing: {text}");
}

#[tokio::test]
async fn a_controller_without_an_api_server_waits_for_it_and_then_works() {
    let site = Site::new().await;
    let (port, _worker) = (free_address().port(), site.worker().start().await);
    let kubeconfig = api_proxy::kubeconfig(port, site.directory.path(), &site.namespace);
    let controller = site.controller().set("KUBECONFIG", kubeconfig.display()).launch();
    until_true(
        "it says what it waits for",
        PATIENCE,
        async || matches!(controller.get("/readyz").await, (503, text) if text.contains("kubernetes: not ready: the Lease")),
    )
    .await;
    site.create("a", site.hook("/ok")).await;
    let _late = ApiProxy::start_on(port, config(&site.stores.kubeconfig).await).await;
    controller.until("/readyz", 200).await;
    site.until_phase("a", Phase::Succeeded).await;
    let warnings = controller.log().lines().filter(|line| line.contains("WARN")).count();
    assert!(warnings == 1, "once, not at each try: {}", controller.log());
}

#[tokio::test]
async fn programs_without_a_database_wait_for_it_and_then_work() {
    let site = Site::on(Stores::own(&["postgres"]).await).await;
    site.stores.run("down", &["postgres"]).await;
    let (controller, worker) = (site.controller().launch(), site.worker().launch());
    for program in [&controller, &worker] {
        until_true(
            "it says what it waits for",
            PATIENCE,
            async || matches!(program.get("/readyz").await, (503, text) if text.contains("postgres: not ready: ")),
        )
        .await;
    }
    site.create("a", site.hook("/ok")).await;
    let object = site.until_condition("a", "Ready", "False", "DatabaseUnavailable").await;
    assert_eq!(condition(&object, "Accepted").unwrap().0, "Unknown");
    site.create("unwanted", site.hook("/ok?unwanted")).await;
    site.delete("unwanted").await;
    site.until_gone("unwanted", PROMPTLY).await;
    site.stores.run("up", &["postgres"]).await;
    controller.until("/readyz", 200).await;
    worker.until("/readyz", 200).await;
    let done = site.until_phase("a", Phase::Succeeded).await;
    assert_eq!((attempts(&done), site.sink.count("/ok"), site.sink.count("/ok?unwanted")), (Some(1), 1, 0));
    until_true("no finalizer is left", PATIENCE, async || site.get("a").await.unwrap().finalizers().is_empty()).await;
    for program in [&controller, &worker] {
        let warnings = program.log().lines().filter(|line| line.contains("WARN")).count();
        assert!(warnings == 1, "once, not at each try: {}", program.log());
    }
}

#[tokio::test]
async fn a_status_that_could_not_be_written_for_long_is_shown_soon_after_it_can() {
    const TRIES: usize = 9;
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    // The watch, and all reads, go on.
    site.proxy.refuse(500, Call::is_status_patch);
    for name in ["a", "b", "c"] {
        site.create(name, site.hook("/ok")).await;
    }
    let refused = || site.proxy.calls().into_iter().filter(|call| call.is_status_patch() && call.is_about("a")).count();
    until_true("it is tried again and again", PATIENCE, async || refused() >= TRIES).await;
    site.proxy.pass();
    let free = Instant::now();
    for name in ["a", "b", "c"] {
        site.until_phase(name, Phase::Succeeded).await;
    }
    assert!(free.elapsed() < PROMPTLY, "{:?}", free.elapsed());
}

#[tokio::test]
async fn a_deleted_resource_is_let_go_without_the_database_where_a_person_says_so_and_its_job_is_cancelled_later() {
    let site = Site::on(Stores::own(&["postgres"]).await).await;
    let controller = site.controller().start().await;
    let mut ids = BTreeMap::new();
    for name in ["given-up", "kept"] {
        site.create(name, with(site.hook("/ok"), json!({"runAt": LATER}))).await;
        ids.insert(name, job_id(&site.until_phase(name, Phase::Queued).await));
    }
    site.stores.run("down", &["postgres"]).await;
    for name in ["given-up", "kept"] {
        site.delete(name).await;
        site.until_condition(name, "Ready", "False", "DatabaseUnavailable").await;
    }
    site.kubectl(&["annotate", "jr", "given-up", "jobrequest.dev/abandon=true"], "").await;
    site.until_gone("given-up", PROMPTLY).await;
    let events = ["get", "events.events.k8s.io", "--output=jsonpath={.items[*].reason}"];
    until_true("an Event says so", PATIENCE, async || {
        site.kubectl(&events, "").await.split_whitespace().any(|reason| reason == "Abandoned")
    })
    .await;
    assert!(site.get("kept").await.is_some(), "nobody gave it up");

    site.stores.run("up", &["postgres"]).await;
    site.until_gone("kept", PATIENCE).await;
    site.until_row(ids["kept"], "cancelled").await;
    // It takes two looks of the orphan sweep.
    until_true("the other is cancelled too", Duration::from_secs(90), async || {
        site.row(ids["given-up"]).await.status == "cancelled"
    })
    .await;
    drop(controller);
}

#[tokio::test]
async fn a_crd_that_is_older_than_the_controller_is_named_with_what_it_lacks() {
    let stores = Stores::own(&["etcd", "kube-apiserver"]).await;
    let site = Site::prepared(stores, install_the_crd).await;
    let field = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/suspend";
    let older = json!([{"op": "remove", "path": field}]).to_string();
    site.kubectl(&["patch", "crd", "jobrequests.jobrequest.dev", "--type=json", "--patch", &older], "").await;
    let direct = site.stores.kubeconfig.display().to_string();
    let controller = site.controller().set("KUBECONFIG", direct).launch();
    until("it says so", PATIENCE, async || match controller.get("/readyz").await {
        (503, text) if text.contains("definition: not ready: ") && text.contains("spec.suspend") => Ok(()),
        answer => Err(format!("{answer:?}")),
    })
    .await;
    assert_eq!(controller.get("/healthz").await.0, 200, "a restart would not help");
    install_the_crd(&site).await;
    controller.until("/readyz", 200).await;
}
