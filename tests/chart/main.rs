//! The Helm chart: what it renders, what it refuses, and that a real API server takes it.
//!
//! Needs helm and kubectl on PATH and an administrator's KUBECONFIG, as `make test` provides them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

#[path = "../support/api_proxy.rs"]
#[allow(dead_code, reason = "shared")]
mod api_proxy;
#[path = "../support/db.rs"]
#[allow(dead_code, reason = "shared")]
mod db;
#[path = "../support/program.rs"]
#[allow(dead_code, reason = "shared")]
mod program;
#[path = "../support/sink.rs"]
#[allow(dead_code, reason = "shared")]
mod sink;
#[path = "../support/site.rs"]
#[allow(dead_code, reason = "shared")]
mod site;
#[path = "../support/smtp.rs"]
#[allow(dead_code, reason = "shared")]
mod smtp;
#[path = "../support/stores.rs"]
#[allow(dead_code, reason = "shared")]
mod stores;
#[path = "../support/wait.rs"]
mod wait;

mod admission;
mod autoscaling;
mod check;
mod monitoring;
mod network;
mod secrets;

// --- running the tools -------------------------------------------------------------------------------------------------

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// The value sets of the chart's ci/ directory: between them every value is used.
const VALUE_SETS: [&str; 4] = ["minimal", "ha", "namespaced", "all"];

fn run(program: &str, args: &[&str], stdin: &str) -> Output {
    let child =
        Command::new(program).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|error| panic!("{program} can't be started ({error}): run make test"));
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What kubectl printed; a failure ends the test.
fn kubectl(args: &[&str], stdin: &str) -> String {
    assert!(std::env::var_os("KUBECONFIG").is_some(), "KUBECONFIG isn't set: run make test");
    let output = run("kubectl", args, stdin);
    assert!(output.status.success(), "kubectl {args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// `helm template` of release "jobrequest" with a value set of ci/, and then `sets` as --set-json.
fn template(values: &str, namespace: &str, sets: &[&str], more: &[&str]) -> Result<String, String> {
    let chart = format!("{ROOT}/charts/jobrequest");
    let values = format!("{chart}/ci/{values}-values.yaml");
    let mut args = vec!["template", "jobrequest", &chart, "--namespace", namespace, "--values", &values];
    for set in sets {
        args.extend(["--set-json", set]);
    }
    args.extend(more);
    let output = run("helm", &args, "");
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

fn objects(yaml: &str) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(yaml).map(|document| Value::deserialize(document).unwrap());
    documents.filter(|value| !value.is_null()).collect()
}

fn render(values: &str, sets: &[&str]) -> Vec<Value> {
    objects(&template(values, "system", sets, &[]).unwrap())
}

fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name} was rendered"))
}

fn of_kind<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["kind"] == kind)
}

/// Deployments and Jobs.
fn workloads(objects: &[Value]) -> impl Iterator<Item = &Value> {
    objects.iter().filter(|object| object["spec"]["template"]["spec"]["containers"].is_array())
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn strings(value: &Value) -> Vec<String> {
    list(value).map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// A container's environment, name to value; a reference to a Secret is shown as "secret/key".
fn environment(container: &Value) -> BTreeMap<String, String> {
    let pairs = list(&container["env"]).map(|variable| {
        let secret = &variable["valueFrom"]["secretKeyRef"];
        let value = match variable["value"].as_str() {
            Some(value) => value.to_owned(),
            None => format!("{}/{}", secret["name"].as_str().unwrap(), secret["key"].as_str().unwrap()),
        };
        (variable["name"].as_str().unwrap().to_owned(), value)
    });
    let pairs: Vec<_> = pairs.collect();
    let map: BTreeMap<_, _> = pairs.iter().cloned().collect();
    assert_eq!(pairs.len(), map.len(), "server-side apply refuses a variable that is set twice: {pairs:?}");
    map
}

fn main_environment(objects: &[Value], deployment: &str) -> BTreeMap<String, String> {
    environment(&named(objects, "Deployment", deployment)["spec"]["template"]["spec"]["containers"][0])
}

// --- what users meet first -----------------------------------------------------------------------------------------------

#[test]
fn lint_finds_nothing() {
    let chart = format!("{ROOT}/charts/jobrequest");
    let files = VALUE_SETS.map(|name| format!("--values={chart}/ci/{name}-values.yaml"));
    for values in std::iter::once(None).chain(files.iter().map(Some)) {
        let args: Vec<_> = ["lint", "--strict", &chart].into_iter().chain(values.map(String::as_str)).collect();
        let output = run("helm", &args, "");
        let printed = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success() && !printed.contains("[WARNING]"), "{values:?}: {printed}");
    }
}

#[test]
fn a_bad_value_is_refused_with_its_name_or_the_remedy() {
    for (sets, message) in [
        (&[r#"database.existingSecret="""#][..], "kubectl --namespace system create secret generic jobrequest-db"),
        (&[r#"objectStore.url="""#], "--set objectStore.url=s3://bucket/prefix"),
        (
            &[r#"objectStore.url="""#, r#"workers.x={"kinds":["resize_image"]}"#, "workers.default=null"],
            "worker pool \"x\"",
        ),
        (&[r#"objectStore.existingClaim="c""#], "set one of them"),
        (&[r#"smtp.existingSecret="mail""#], "--set smtp.from=jobs@example.com"),
        (&["controler={}"], "'controler' not allowed"),
        (&[r#"workers.mail={"kind":["send_email"]}"#], "/workers/mail"),
        (&[r#"workers.Mail={}"#], "'Mail'"),
        (&[r#"workers.pool-with-a-long-name={}"#], "'pool-with-a-long-name'"),
        (&["workerDefaults.concurrency=0"], "/workerDefaults/concurrency"),
        (&[r#"settings.leaseSeconds="30s""#], "/settings/leaseSeconds"),
        (&[r#"settings.install="A""#], "/settings/install"),
        (&[r#"settings.logFormat="xml""#], "/settings/logFormat"),
        (&[r#"controller.adoptInstall="true""#], "/controller/adoptInstall"),
        (&[r#"egress.allow=["10.0.0.1"]"#], "/egress/allow"),
        (&[r#"watchNamespaces=["a","a"]"#], "/watchNamespaces"),
        (&[r#"migrate.mode="Hook""#], "/migrate/mode"),
        (&[r#"image.digest="latest""#], "/image/digest"),
        (&[r#"smtp.password="x""#], "/smtp"),
        (&["controller.serviceAccount.create=false"], "controller.serviceAccount.name"),
    ] {
        let refusal = template("minimal", "system", sets, &[]).expect_err(&format!("{sets:?} was accepted"));
        assert!(refusal.contains(message), "{sets:?}: {refusal}");
    }
}

#[test]
fn versions_agree_with_the_crate() {
    let chart: Value = serde_yaml::from_str(include_str!("../../charts/jobrequest/Chart.yaml")).unwrap();
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    let oldest =
        include_str!("../../Cargo.toml").split("\"v1_").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    assert_eq!(chart["kubeVersion"], format!(">=1.{oldest}.0-0"));
    let before = format!("1.{}.9", oldest.parse::<u32>().unwrap() - 1);
    assert!(template("minimal", "system", &[], &["--kube-version", &before]).is_err());
    for version in [format!("1.{oldest}.0"), "v1.37.2-vendor.1".to_owned()] {
        template("minimal", "system", &[], &["--kube-version", &version]).unwrap();
    }
}

// --- the programs ----------------------------------------------------------------------------------------------------------

#[test]
fn every_setting_reaches_the_program_that_reads_it() {
    let objects =
        render("all", &[r#"migrate.mode="InitContainer""#, "controller.env=[]", r#"watchNamespaces=["a","b"]"#]);
    let both = [
        ("DATABASE_URL", "queue-app/pooler"),
        ("JOBREQUEST_DATABASE_DIRECT_URL", "queue-app/uri"),
        ("JOBREQUEST_INSTALL", "blue"),
        ("JOBREQUEST_LEASE_SECONDS", "20"),
        ("JOBREQUEST_RETRY_BASE_SECONDS", "2"),
        ("JOBREQUEST_RETRY_CAP_SECONDS", "86400"),
        ("JOBREQUEST_RETENTION_SECONDS", "31536000"),
        ("JOBREQUEST_KEY_RETENTION_SECONDS", "2147483647"),
        ("JOBREQUEST_HTTP_ADDR", "[::]:9090"),
        ("JOBREQUEST_LOG", "info,jobrequest=debug"),
        ("JOBREQUEST_LOG_FORMAT", "text"),
        ("PGSSLROOTCERT", "/etc/jobrequest/ca/ca.crt"),
    ];
    let controller = [
        ("JOBREQUEST_WATCH_NAMESPACES", "a,b"),
        ("JOBREQUEST_DEFAULT_TTL_SECONDS", "0"),
        ("JOBREQUEST_ADOPT_INSTALL", "6a4c1f0e-8f0e-4b57-9f3e-2d9d2a1d7c11"),
    ];
    let worker = [
        ("JOBREQUEST_POLL_SECONDS", "1"),
        ("JOBREQUEST_EXTRA_CA_FILE", "/etc/jobrequest/ca/ca.crt"),
        ("JOBREQUEST_EGRESS_ALLOW", "10.1.0.0/16,fd00::/8"),
        ("JOBREQUEST_EGRESS_DENY", "10.1.2.3/32"),
    ];
    // A pool gets no secret of a kind that it doesn't run.
    let mail = [
        ("JOBREQUEST_KINDS", "send_email,webhook_delivery"),
        ("JOBREQUEST_CONCURRENCY", "100"),
        ("JOBREQUEST_MEMORY_BUDGET_MIB", "384"),
        ("JOBREQUEST_SHUTDOWN_GRACE_SECONDS", "60"),
        ("JOBREQUEST_SMTP_URL", "mail/smtp"),
        ("JOBREQUEST_SMTP_FROM", "Jobs <jobs@example.com>"),
        ("JOBREQUEST_SMTP_ALLOW_PLAINTEXT", "true"),
        ("JOBREQUEST_WEBHOOK_SECRET", "hooks/master"),
    ];
    let pictures = [
        ("JOBREQUEST_KINDS", "resize_image"),
        ("JOBREQUEST_CONCURRENCY", "2"),
        ("JOBREQUEST_MEMORY_BUDGET_MIB", "896"),
        ("JOBREQUEST_SHUTDOWN_GRACE_SECONDS", "120"),
        ("JOBREQUEST_OBJECT_STORE_URL", "file:///var/lib/jobrequest"),
        ("TZ", "UTC"),
    ];
    for (deployment, expected) in [
        ("jr-controller", [&both[..], &controller].concat()),
        ("jr-worker-mail", [&both[..], &worker, &mail].concat()),
        ("jr-worker-pictures", [&both[..], &worker, &pictures].concat()),
    ] {
        let expected = expected.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        assert_eq!(main_environment(&objects, deployment), expected, "{deployment}");
        let pod = &named(&objects, "Deployment", deployment)["spec"]["template"]["spec"];
        let migrate = environment(&pod["initContainers"][0]);
        assert_eq!(migrate["DATABASE_URL"], "queue-owner/uri");
        assert!(!migrate.contains_key("JOBREQUEST_DATABASE_DIRECT_URL"), "the direct URL isn't the owner's");
    }
    let objects = render("minimal", &[]);
    let worker = main_environment(&objects, "jobrequest-worker-default");
    assert_eq!(worker["JOBREQUEST_OBJECT_STORE_URL"], "s3://pictures/out");
    assert!(!worker.contains_key("JOBREQUEST_KINDS"), "an empty list is every kind, not none");
    let controller = main_environment(&objects, "jobrequest-controller");
    assert!(!controller.contains_key("JOBREQUEST_DEFAULT_TTL_SECONDS"), "no default TTL unless it is set");
}

#[test]
fn the_program_knows_every_variable_and_can_use_every_value() {
    let program = env!("CARGO_BIN_EXE_jobrequest");
    let directory = tempfile::tempdir().unwrap();
    let roots = directory.path().join("ca.crt");
    std::fs::write(&roots, "").unwrap();
    // What the Secrets hold, and a place that this machine has.
    let meant = |name: &str, value: String| match name {
        "JOBREQUEST_SMTP_URL" => "smtps://user:password@mail.example.com".to_owned(),
        "JOBREQUEST_WEBHOOK_SECRET" => "sixteen letters and more".to_owned(),
        "JOBREQUEST_DATABASE_DIRECT_URL" => "postgres://host/database".to_owned(),
        "JOBREQUEST_OBJECT_STORE_URL" if value.starts_with("file:") => format!("file://{}", directory.path().display()),
        "JOBREQUEST_EXTRA_CA_FILE" => roots.display().to_string(),
        _ => value,
    };
    let longest = [
        r#"settings.leaseSeconds=86400"#,
        r#"settings.pollSeconds=3600"#,
        r#"settings.retryBaseSeconds=86400"#,
        r#"settings.retentionSeconds=2147483647"#,
        r#"settings.shutdownGraceSeconds=86400"#,
        r#"controller.defaultTtlSeconds=2147483647"#,
    ];
    let sets = VALUE_SETS.map(|values| (values, &[][..])).into_iter().chain([("all", &longest[..])]);
    for (values, sets) in sets {
        let objects = render(values, sets);
        for workload in workloads(&objects) {
            let pod = &workload["spec"]["template"]["spec"];
            for container in list(&pod["containers"]).chain(list(&pod["initContainers"])) {
                let subcommand = container["args"][0].as_str().unwrap();
                let help = text(&run(program, &[subcommand, "--help"], "").stdout);
                let variables = environment(container);
                for name in variables.keys().filter(|name| name.starts_with("JOBREQUEST_") || *name == "DATABASE_URL") {
                    assert!(help.contains(&format!("[env: {name}]")), "{values}: {subcommand} doesn't know {name}");
                }
                // The database's URL is looked at last: who complains of that is content with all the rest.
                let mut command = Command::new(program);
                command.env_clear().args([subcommand, "--database-url", "none"]);
                command.envs(variables.into_iter().map(|(name, value)| (name.clone(), meant(&name, value))));
                let said = text(&command.output().unwrap().stderr);
                assert!(said.starts_with("jobrequest: DATABASE_URL (--database-url) is not"), "{values}: {said}");
            }
        }
    }
}

#[test]
fn the_users_environment_wins() {
    let objects = render("all", &[]);
    let environment = main_environment(&objects, "jr-controller");
    assert_eq!((environment["JOBREQUEST_LOG"].as_str(), environment["RUST_BACKTRACE"].as_str()), ("trace", "1"));
}

#[test]
fn pods_are_restricted_and_only_the_controller_has_a_token() {
    for values in VALUE_SETS {
        let objects = render(values, &[]);
        for account in of_kind(&objects, "ServiceAccount") {
            assert_eq!(account["automountServiceAccountToken"], false);
        }
        for workload in workloads(&objects) {
            let pod = &workload["spec"]["template"]["spec"];
            let name = workload["metadata"]["name"].as_str().unwrap();
            assert_eq!(pod["automountServiceAccountToken"], name.ends_with("-controller"), "{values}: {name}");
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
            for container in list(&pod["containers"]).chain(list(&pod["initContainers"])) {
                let context = json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}});
                assert_eq!(container["securityContext"], context, "{values}: {name}");
                assert!(container["resources"]["limits"]["memory"].is_string(), "{values}: {name}");
                assert!(list(&container["volumeMounts"]).any(|mount| mount["mountPath"] == "/tmp"));
            }
            if workload["kind"] == "Deployment" {
                let container = &pod["containers"][0];
                for (probe, path) in
                    [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
                {
                    assert_eq!(container[probe]["httpGet"], json!({"path": path, "port": "http"}), "{values}: {name}");
                }
            }
        }
    }
}

#[test]
fn a_pod_outlives_its_workers_grace() {
    let objects = render("all", &[]);
    for (pool, seconds) in [("mail", 75), ("pictures", 135)] {
        let deployment = named(&objects, "Deployment", &format!("jr-worker-{pool}"));
        assert_eq!(deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], seconds);
    }
}

#[test]
fn a_pool_replaces_what_it_sets_and_keeps_the_other_defaults() {
    let sets =
        [r#"workerDefaults.replicas=4"#, r#"workers.quiet={"replicas":0,"resources":{"limits":{"memory":"64Mi"}}}"#];
    let objects = render("minimal", &sets);
    let quiet = named(&objects, "Deployment", "jobrequest-worker-quiet");
    assert_eq!(quiet["spec"]["replicas"], 0);
    let container = &quiet["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["resources"], json!({"limits": {"memory": "64Mi"}}));
    assert_eq!(environment(container)["JOBREQUEST_CONCURRENCY"], "32");
    assert_eq!(named(&objects, "Deployment", "jobrequest-worker-default")["spec"]["replicas"], 4);
    let pools: BTreeSet<_> =
        of_kind(&objects, "Deployment").map(|d| d["spec"]["selector"]["matchLabels"].to_string()).collect();
    assert_eq!(pools.len(), 3, "each Deployment selects its own Pods");
}

#[test]
fn names_and_labels_fit_whatever_the_release_is_called() {
    let chart = format!("{ROOT}/charts/jobrequest");
    let values = format!("{chart}/ci/minimal-values.yaml");
    let (release, pool) = ("r".repeat(53), "p".repeat(20));
    let pool = format!(r#"workers.{pool}={{"podDisruptionBudget":{{"enabled":true}}}}"#);
    let args = ["template", &release, &chart, "--values", &values, "--set-json", &pool, "--set", "migrate.mode=Job"];
    let output = run("helm", &args, "");
    for object in objects(&text(&output.stdout)) {
        let metadata = &object["metadata"];
        let cluster = object["kind"].as_str().unwrap().starts_with("Cluster");
        assert!(cluster || metadata["name"].as_str().unwrap().len() <= 63, "{metadata}");
        for label in metadata["labels"].as_object().unwrap().values() {
            assert!(label.as_str().unwrap().len() <= 63, "{metadata}");
        }
    }
}

// --- migrations and the CRD ------------------------------------------------------------------------------------------------

#[test]
fn no_install_waits_for_a_hook_and_the_migration_goes_with_the_pods() {
    for (mode, expected) in [("InitContainer", (2, 0)), ("Job", (0, 1)), ("None", (0, 0))] {
        let objects = render("minimal", &[&format!(r#"migrate.mode="{mode}""#)]);
        let in_pods =
            workloads(&objects).flat_map(|workload| list(&workload["spec"]["template"]["spec"]["initContainers"]));
        let in_pods = in_pods.filter(|container| container["args"] == json!(["migrate"])).count();
        assert_eq!((in_pods, of_kind(&objects, "Job").count()), expected, "{mode}");
        for object in &objects {
            let annotations = &object["metadata"]["annotations"];
            let hook = &annotations["helm.sh/hook"];
            assert!(hook.is_null() || hook == "test", "{annotations}: only what `helm test` runs");
            assert!(!annotations.to_string().contains("argocd.argoproj.io"), "{annotations}");
        }
    }
}

#[test]
fn a_changed_migration_is_a_new_job_and_an_unchanged_one_the_same() {
    let name = |sets: &[&str]| {
        let objects = render("minimal", &[&[r#"migrate.mode="Job""#], sets].concat());
        of_kind(&objects, "Job").next().unwrap()["metadata"]["name"].as_str().unwrap().to_owned()
    };
    let first = name(&[]);
    assert_eq!(first, name(&["controller.replicas=3", "settings.leaseSeconds=9"]));
    for change in
        [r#"image.tag="next""#, r#"database.existingSecret="other""#, r#"migrate.resources.limits.memory="1Gi""#]
    {
        assert_ne!(first, name(&[change]), "{change}: a Job's spec can't be changed in place");
    }
}

#[test]
fn the_crd_is_the_generated_one_and_stays_on_uninstall() {
    let generated = include_str!("../../crds/jobrequests.yaml");
    assert!(
        generated == include_str!("../../charts/jobrequest/files/crd.yaml"),
        "the chart's copy differs: run make generate"
    );
    let generated: Value = serde_yaml::from_str(generated).unwrap();
    let kept = json!("keep");
    for (sets, policy) in [(&[][..], Some(&kept)), (&["crds.keep=false"], None)] {
        let objects = render("minimal", sets);
        let crd = named(&objects, "CustomResourceDefinition", "jobrequests.jobrequest.dev");
        assert!(crd["spec"] == generated["spec"], "the rendered CRD differs from the generated one");
        assert_eq!(crd["metadata"]["annotations"].get("helm.sh/resource-policy"), policy);
    }
    let objects = render("minimal", &["crds.enabled=false"]);
    assert_eq!(of_kind(&objects, "CustomResourceDefinition").count(), 0);
}

// --- rights ------------------------------------------------------------------------------------------------------------------

/// What the controller does: group, resource, verb, the only object's name if it's about one, and where.
const CONTROLLER_USES: [(&str, &str, &str, &str, Where); 13] = [
    ("jobrequest.dev", "jobrequests", "list", "", Where::Watched),
    ("jobrequest.dev", "jobrequests", "watch", "", Where::Watched),
    ("jobrequest.dev", "jobrequests", "get", "", Where::Watched),
    ("jobrequest.dev", "jobrequests", "delete", "", Where::Watched),
    ("jobrequest.dev", "jobrequests/status", "patch", "", Where::Watched),
    ("events.k8s.io", "events", "create", "", Where::Watched),
    ("jobrequest.dev", "jobrequests", "patch", "", Where::Everywhere),
    ("", "namespaces", "get", "kube-system", Where::Everywhere),
    ("apiextensions.k8s.io", "customresourcedefinitions", "get", "jobrequests.jobrequest.dev", Where::Everywhere),
    ("events.k8s.io", "events", "create", "", Where::Home),
    ("coordination.k8s.io", "leases", "create", "", Where::Home),
    ("coordination.k8s.io", "leases", "get", "jobrequest-NAME", Where::Home),
    ("coordination.k8s.io", "leases", "patch", "jobrequest-NAME", Where::Home),
];

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Where {
    Everywhere,
    /// In the watched namespaces; everywhere if none is named.
    Watched,
    /// In the controller's own namespace.
    Home,
}

type Right = (String, String, String, String, Where);

/// The rules that bindings of the controller's ServiceAccount grant, one by one.
fn granted(objects: &[Value], account: &str, watched: &[&str]) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    let bindings = objects.iter().filter(|object| object["roleRef"].is_object());
    for binding in bindings.filter(|binding| binding["metadata"]["annotations"]["helm.sh/hook"].is_null()) {
        assert_eq!(binding["subjects"], json!([{"kind": "ServiceAccount", "name": account, "namespace": "system"}]));
        let (role, namespace) = (&binding["roleRef"], &binding["metadata"]["namespace"]);
        let role = objects.iter().find(|object| {
            object["kind"] == role["kind"]
                && object["metadata"]["name"] == role["name"]
                && object["metadata"]["namespace"] == *namespace
        });
        let place = match namespace.as_str() {
            None => Where::Everywhere,
            Some("system") => Where::Home,
            Some(namespace) => {
                assert!(watched.contains(&namespace), "{namespace} isn't watched");
                Where::Watched
            }
        };
        for rule in list(&role.expect("a binding to a role that exists")["rules"]) {
            let names = strings(&rule["resourceNames"]);
            for group in strings(&rule["apiGroups"]) {
                for resource in strings(&rule["resources"]) {
                    for verb in strings(&rule["verbs"]) {
                        for name in names.iter().cloned().chain(names.is_empty().then(String::new)) {
                            rights.insert((group.clone(), resource.clone(), verb.clone(), name, place));
                        }
                    }
                }
            }
        }
    }
    rights
}

#[test]
fn the_controller_may_do_what_it_does_and_nothing_else() {
    for (values, install, watched) in
        [("minimal", "default", vec![]), ("namespaced", "teams", vec!["team-a", "team-b"])]
    {
        let expected = CONTROLLER_USES.map(|(group, resource, verb, name, place)| {
            let place = if watched.is_empty() && place == Where::Watched { Where::Everywhere } else { place };
            (group.to_owned(), resource.to_owned(), verb.to_owned(), name.replace("NAME", install), place)
        });
        let objects = render(values, &[]);
        assert_eq!(granted(&objects, "jobrequest-controller", &watched), BTreeSet::from(expected), "{values}");
        let bound =
            of_kind(&objects, "RoleBinding").filter(|binding| binding["subjects"][0]["name"] != "jobrequest-test");
        let bound = bound.filter_map(|binding| binding["metadata"]["namespace"].as_str());
        let bound: BTreeSet<_> = bound.filter(|namespace| *namespace != "system").collect();
        assert_eq!(bound, watched.into_iter().collect(), "rights in every watched namespace");
    }
}

#[test]
fn no_rule_has_a_wildcard_and_nobody_else_is_bound() {
    for values in VALUE_SETS {
        for object in render(values, &[]) {
            assert!(!object["rules"].to_string().contains('*'), "{object}");
            assert!(!object["subjects"].to_string().contains("worker"), "{object}");
        }
    }
    assert!(
        render("minimal", &["rbac.create=false"])
            .iter()
            .all(|object| object["rules"].is_null() && object["roleRef"].is_null())
    );
}

// --- against the API server ------------------------------------------------------------------------------------------------

/// Namespaces, and what was applied for a test; gone when it ends, however it ends.
struct Sandbox {
    namespaces: Vec<String>,
    applied: Vec<String>,
}

impl Sandbox {
    /// The namespaces enforce Pod Security "restricted", and warn about workloads whose Pods it would refuse.
    fn new(names: &[&str]) -> Sandbox {
        let mut sandbox = Sandbox { namespaces: vec![], applied: vec![] };
        for name in names {
            let name = format!("chart-{name}-{}", std::process::id());
            let labels = ["enforce", "warn"].map(|mode| (format!("pod-security.kubernetes.io/{mode}"), "restricted"));
            let labels: BTreeMap<_, _> = labels.into_iter().collect();
            let namespace =
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
            sandbox.namespaces.push(name);
            kubectl(&["create", "-f", "-"], &namespace.to_string());
        }
        sandbox
    }

    fn apply(&mut self, yaml: String) {
        self.applied.push(yaml);
        kubectl(&["apply", "--server-side", "--field-manager=chart-test", "-f", "-"], self.applied.last().unwrap());
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for yaml in &self.applied {
            run("kubectl", &["delete", "--ignore-not-found", "--wait=false", "-f", "-"], yaml);
        }
        for name in &self.namespaces {
            run("kubectl", &["delete", "namespace", name, "--wait=false"], "");
        }
    }
}

/// `kubectl auth can-i` until the answer is the expected one; authorizers learn of new rules a moment later.
/// `what` is RESOURCE.GROUP, RESOURCE.GROUP/SUBRESOURCE or, for one object, RESOURCE.GROUP:NAME.
fn assert_can(expected: bool, user: &str, verb: &str, what: &str, namespace: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
    let resource = resource.replacen(':', "/", 1);
    let subresource = format!("--subresource={subresource}");
    let args = ["auth", "can-i", verb, &resource, &subresource, "--namespace", namespace, "--as", user];
    loop {
        let output = run("kubectl", &args, "");
        let answer = text(&output.stdout);
        if answer.trim() == if expected { "yes" } else { "no" } {
            return;
        }
        let more = text(&output.stderr);
        assert!(Instant::now() < deadline, "{user} {verb} {what} in {namespace}: {answer:?}, not {expected}; {more}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Has the API server know the kinds of others that the chart makes objects of.
fn apply_others_crds() {
    let directory =
        std::env::var("JOBREQUEST_TEST_OTHERS_CRDS").expect("JOBREQUEST_TEST_OTHERS_CRDS isn't set: run make test");
    kubectl(&["apply", "--server-side", "--force-conflicts", "-f", &directory], "");
    kubectl(&["wait", "--for=condition=Established", "--timeout=60s", "-f", &directory], "");
}

#[test]
fn the_api_server_takes_every_object_and_pod_security_every_pod() {
    apply_others_crds();
    let sandbox = Sandbox::new(&["home", "a", "b"]);
    let [home, a, b] = [0, 1, 2].map(|index| sandbox.namespaces[index].as_str());
    let watched = format!(r#"watchNamespaces=["{a}","{b}"]"#);
    let apply = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "--warnings-as-errors",
        "-f",
        "-",
    ];
    for (values, sets) in [
        ("minimal", &[][..]),
        ("minimal", &[r#"migrate.mode="Job""#]),
        ("namespaced", &[&watched]),
        ("ha", &[]),
        ("all", &[]),
        ("all", &[&watched, r#"migrate.mode="InitContainer""#]),
    ] {
        let yaml = template(values, home, sets, &[]).unwrap();
        // A Pod's account must be there.
        let accounts: Vec<_> = objects(&yaml).into_iter().filter(|object| object["kind"] == "ServiceAccount").collect();
        kubectl(
            &["apply", "--server-side", "-f", "-"],
            &json!({"apiVersion": "v1", "kind": "List", "items": accounts}).to_string(),
        );
        let taken = kubectl(&apply, &yaml);
        assert_eq!(taken.lines().count(), objects(&yaml).len(), "{values} {sets:?}: {taken}");
    }
    // The same check does see a Pod that isn't restricted.
    let yaml = template("minimal", home, &["securityContext.allowPrivilegeEscalation=true"], &[]).unwrap();
    let refused = run("kubectl", &apply, &yaml);
    assert!(!refused.status.success() && text(&refused.stderr).contains("allowPrivilegeEscalation"), "{refused:?}");
}

#[test]
fn rights_are_what_the_api_server_says_they_are() {
    let mut sandbox = Sandbox::new(&["all", "some", "watched", "other"]);
    let [all, some, watched, other] = [0, 1, 2, 3].map(|index| sandbox.namespaces[index].clone());
    let rules = ["--show-only", "templates/controller-rbac.yaml"];
    sandbox.apply(template("minimal", &all, &[], &rules).unwrap());
    let list = format!(r#"watchNamespaces=["{watched}"]"#);
    sandbox.apply(template("namespaced", &some, &[&list], &rules).unwrap());

    let user = format!("system:serviceaccount:{all}:jobrequest-controller");
    for (group, resource, verb, name, place) in CONTROLLER_USES {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let name = name.replace("NAME", "default");
        let what = match (subresource, name.as_str()) {
            ("", "") => format!("{resource}.{group}"),
            ("", name) => format!("{resource}.{group}:{name}"),
            (subresource, _) => format!("{resource}.{group}/{subresource}"),
        };
        assert_can(true, &user, verb, &what, if place == Where::Home { &all } else { &other });
    }
    for (verb, resource) in [
        ("create", "jobrequests.jobrequest.dev"),
        ("update", "jobrequests.jobrequest.dev"),
        ("deletecollection", "jobrequests.jobrequest.dev"),
        ("get", "secrets"),
        ("list", "pods"),
        ("get", "namespaces:default"),
        ("get", "customresourcedefinitions.apiextensions.k8s.io:other.example.com"),
        ("create", "leases.coordination.k8s.io"),
    ] {
        assert_can(false, &user, verb, resource, &other);
    }
    assert_can(false, &user, "patch", "leases.coordination.k8s.io:other", &all);

    let user = format!("system:serviceaccount:{some}:jobrequest-controller");
    for verb in ["get", "list", "watch", "delete"] {
        assert_can(true, &user, verb, "jobrequests.jobrequest.dev", &watched);
        assert_can(false, &user, verb, "jobrequests.jobrequest.dev", &other);
    }
    assert_can(true, &user, "patch", "jobrequests.jobrequest.dev/status", &watched);
    assert_can(false, &user, "patch", "jobrequests.jobrequest.dev/status", &other);
    // A dying namespace loses its RoleBindings; finalizers can be taken off all the same.
    kubectl(&["delete", "rolebindings", "--all", "--namespace", &watched], "");
    assert_can(false, &user, "get", "jobrequests.jobrequest.dev", &watched);
    assert_can(true, &user, "patch", "jobrequests.jobrequest.dev", &watched);
}

#[test]
fn a_namespaces_users_get_their_rights_by_aggregation() {
    let mut sandbox = Sandbox::new(&["users"]);
    let namespace = sandbox.namespaces[0].clone();
    sandbox.apply(template("minimal", &namespace, &[], &["--show-only", "templates/user-roles.yaml"]).unwrap());
    for role in ["view", "edit", "admin"] {
        let user = format!("--user=chart-{role}");
        kubectl(&["create", "rolebinding", role, "--clusterrole", role, &user, "--namespace", &namespace], "");
        let user = format!("chart-{role}");
        for verb in ["get", "list", "watch"] {
            assert_can(true, &user, verb, "jobrequests.jobrequest.dev", &namespace);
        }
        for verb in ["create", "update", "patch", "delete", "deletecollection"] {
            assert_can(role != "view", &user, verb, "jobrequests.jobrequest.dev", &namespace);
        }
        assert_can(false, &user, "patch", "jobrequests.jobrequest.dev/status", &namespace);
        assert_can(false, &user, "list", "jobrequests.jobrequest.dev", "default");
    }
}
