//! Secrets and roots: who gets them, and that Pods are replaced when they change.

use super::*;

#[test]
fn every_container_that_is_told_of_the_roots_has_them() {
    for source in [
        r#"{"existingConfigMap":"roots","database":true}"#,
        r#"{"existingSecret":"roots","key":"a.pem","database":true}"#,
    ] {
        for mode in ["InitContainer", "Job"] {
            let sets = [&format!("caBundle={source}") as &str, &format!(r#"migrate.mode="{mode}""#)];
            let objects = render("minimal", &sets);
            for workload in workloads(&objects) {
                let pod = &workload["spec"]["template"]["spec"];
                let volume = list(&pod["volumes"]).find(|volume| volume["name"] == "ca-bundle").unwrap();
                let items = [&volume["configMap"]["items"], &volume["secret"]["items"]]
                    .into_iter()
                    .find(|items| items.is_array());
                assert_eq!(items.unwrap()[0]["path"], "ca.crt");
                for container in list(&pod["containers"]).chain(list(&pod["initContainers"])) {
                    assert!(list(&container["volumeMounts"]).any(|mount| mount["mountPath"] == "/etc/jobrequest/ca"));
                    let environment = environment(container);
                    assert_eq!(environment["PGSSLROOTCERT"], "/etc/jobrequest/ca/ca.crt");
                    let extra = environment.contains_key("JOBREQUEST_EXTRA_CA_FILE");
                    assert_eq!(extra, container["args"] == json!(["worker"]), "only jobs call others");
                }
            }
        }
    }
    let objects = render("minimal", &[r#"caBundle.existingConfigMap="roots""#]);
    assert!(
        !main_environment(&objects, "jobrequest-controller").contains_key("PGSSLROOTCERT"),
        "unless it is asked for"
    );
}

/// As `helm upgrade` renders it: with a cluster to look Secrets up in.
fn versions(namespace: &str, sets: &[&str]) -> BTreeMap<String, Value> {
    let yaml = template("minimal", namespace, sets, &["--dry-run=server"]).unwrap();
    let objects = objects(&yaml);
    let annotation = |deployment: &Value| {
        let annotations = &deployment["spec"]["template"]["metadata"]["annotations"];
        (
            deployment["metadata"]["name"].as_str().unwrap().to_owned(),
            annotations["jobrequest.dev/secret-versions"].clone(),
        )
    };
    of_kind(&objects, "Deployment").map(annotation).collect()
}

#[test]
fn pods_are_replaced_when_a_secret_that_they_read_has_changed() {
    let sandbox = Sandbox::new(&["secrets"]);
    let namespace = sandbox.namespaces[0].as_str();
    let set = |name: &str, value: &str| {
        let data = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"url": value, "uri": value}});
        kubectl(&["apply", "--namespace", namespace, "-f", "-"], &data.to_string());
    };
    let sets = [
        "crds.enabled=false",
        r#"smtp={"existingSecret":"mail","from":"a@x.org"}"#,
        r#"workers={"default":{"kinds":["send_email"]},"texts":{"kinds":["summarize_text"]}}"#,
    ];
    assert!(versions(namespace, &sets).values().all(Value::is_null), "Secrets may come later");
    set("jobrequest-db", "a");
    set("mail", "a");
    let first = versions(namespace, &sets);
    assert!(first.values().all(Value::is_string), "{first:?}");
    assert_eq!(first, versions(namespace, &sets), "nothing has changed");
    set("mail", "b");
    let second = versions(namespace, &sets);
    let changed = |before: &BTreeMap<String, Value>, after: &BTreeMap<String, Value>| -> Vec<String> {
        after.iter().filter(|(name, value)| before[*name] != **value).map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(changed(&first, &second), ["jobrequest-worker-default"], "only those who read it");
    set("jobrequest-db", "b");
    let third = versions(namespace, &sets);
    assert_eq!(changed(&second, &third).len(), 3, "{third:?}");
    let off = [&sets[..], &["rollOnSecretChange=false"]].concat();
    assert!(versions(namespace, &off).values().all(Value::is_null));
    let rendered = render("minimal", &[]);
    assert!(!json!(rendered).to_string().contains("secret-versions"), "without a cluster there is nothing to look up");
}
