//! `helm test`, and `jobrequest check`, which it runs.

use super::program::output;
use super::site::Site;
use super::*;

/// The test's Pod and the arguments of its container.
fn test_pod(values: &str, sets: &[&str]) -> Option<Value> {
    of_kind(&render(values, sets), "Pod").next().cloned()
}

#[test]
fn the_test_runs_where_its_job_is_served() {
    for (values, sets, namespace) in [("minimal", &[][..], "system"), ("namespaced", &[], "team-a")] {
        let pod = test_pod(values, sets).unwrap();
        let args = json!(["check", format!("--namespace={namespace}"), "--timeout-seconds=60"]);
        assert_eq!(pod["spec"]["containers"][0]["args"], args);
        assert_eq!(pod["metadata"]["annotations"]["helm.sh/hook"], "test");
        let objects = render(values, sets);
        let role = named(&objects, "Role", "system:jobrequest-test");
        assert_eq!(role["metadata"]["namespace"], namespace);
        let rules = json!([{"apiGroups": ["jobrequest.dev"], "resources": ["jobrequests"], "verbs": ["create", "delete", "get"]}]);
        assert_eq!(role["rules"], rules, "no more than the check does");
    }
    assert!(test_pod("minimal", &["test.enabled=false"]).is_none());
    assert!(test_pod("minimal", &[r#"workers.default.kinds=["send_email"]"#]).is_none(), "nobody would run its job");
    assert!(test_pod("minimal", &[r#"workers.default.kinds=["send_email"]"#, "workers.more={}"]).is_some());
}

#[tokio::test]
async fn check_runs_one_job_all_the_way_and_leaves_nothing_behind() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let namespace = format!("--namespace={}", site.namespace);
    let (code, out, error) =
        site.program(&["check", &namespace]).set("KUBECONFIG", site.stores.kubeconfig.display()).output().await;
    assert_eq!(code, Some(0), "{error}");
    assert!(out.contains("succeeded") && out.contains(&site.namespace), "{out}");
    assert!(site.all().await.is_empty());
    assert_eq!(site.count_rows().await, 1);
}

#[tokio::test]
async fn a_check_that_fails_says_who_is_to_be_looked_at() {
    let site = Site::new().await;
    let namespace = format!("--namespace={}", site.namespace);
    let check = async |seconds: u32| {
        let check = site.program(&["check", &namespace, &format!("--timeout-seconds={seconds}")]);
        let (code, _, error) = check.set("KUBECONFIG", site.stores.kubeconfig.display()).output().await;
        assert_eq!(code, Some(1));
        error
    };
    let error = check(1).await;
    assert!(error.contains("no controller has taken it"), "{error}");
    let controller = site.controller().start().await;
    let error = check(15).await;
    assert!(error.contains("no worker has ended it"), "{error}");
    drop(controller);
    let nowhere = site.program(&["check"]).set("KUBECONFIG", "/nonexistent").output().await;
    assert!(nowhere.0 == Some(1) && nowhere.2.contains("no way to an API server"), "{nowhere:?}");
    let (code, _, error) = output(&["check", "--namespace=Shop"], &[]);
    assert!(code == Some(2) && error.contains("is not a namespace's name"), "{error}");
}
