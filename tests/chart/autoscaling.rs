//! Who sets a pool's number of Pods, and by what.

use jobrequest::queue::NewJob;
use serde_json::json;

use super::db::Database;
use super::*;

/// A pool "x" that runs two kinds, under an autoscaler.
fn pool(autoscaling: Value) -> String {
    format!("workers.x={}", json!({"kinds": ["send_email", "webhook_delivery"], "autoscaling": autoscaling}))
}

#[test]
fn a_pool_has_one_master_of_its_replicas() {
    for (mode, kind) in [("None", None), ("HPA", Some("HorizontalPodAutoscaler")), ("KEDA", Some("ScaledObject"))] {
        let objects = render("minimal", &[&pool(json!({"mode": mode}))]);
        let deployment = named(&objects, "Deployment", "jobrequest-worker-x");
        assert_eq!(deployment["spec"].get("replicas").is_some(), kind.is_none(), "{mode}");
        let masters: Vec<_> = objects.iter().filter(|object| object["spec"]["scaleTargetRef"].is_object()).collect();
        assert_eq!(masters.len(), usize::from(kind.is_some()), "{mode}: the other pool keeps its replicas");
        for master in masters {
            assert_eq!(Some(master["kind"].as_str().unwrap()), kind);
            let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "jobrequest-worker-x"});
            assert_eq!(master["spec"]["scaleTargetRef"], target);
        }
    }
}

/// Scaling down is a Pod that is told to stop: what it needs then does not depend on who asked.
#[test]
fn a_pod_that_an_autoscaler_stops_has_the_grace_of_every_other() {
    let sets = ["settings.shutdownGraceSeconds=40", &pool(json!({"mode": "KEDA"}))];
    let objects = render("minimal", &sets);
    let pod = &named(&objects, "Deployment", "jobrequest-worker-x")["spec"]["template"]["spec"];
    assert_eq!(pod["terminationGracePeriodSeconds"], 55);
    assert_eq!(environment(&pod["containers"][0])["JOBREQUEST_SHUTDOWN_GRACE_SECONDS"], "40");
}

#[test]
fn a_pool_fills_up_its_autoscaling_from_the_defaults() {
    let sets =
        ["workerDefaults.autoscaling.maxReplicas=7", &pool(json!({"mode": "KEDA", "keda": {"secondsPerPod": 9}}))];
    let objects = render("minimal", &sets);
    let spec = &named(&objects, "ScaledObject", "jobrequest-worker-x")["spec"];
    assert_eq!((&spec["minReplicaCount"], &spec["maxReplicaCount"]), (&json!(1), &json!(7)));
    assert_eq!(spec["triggers"][0]["metadata"]["targetQueryValue"], "9");
    assert_eq!(spec["pollingInterval"], 15);
    let objects = render("minimal", &[r#"workers.x={"podDisruptionBudget":{"enabled":true}}"#]);
    assert_eq!(named(&objects, "PodDisruptionBudget", "jobrequest-worker-x")["spec"]["maxUnavailable"], 1);
}

#[test]
fn limits_that_can_not_work_are_refused_with_the_remedy() {
    for (autoscaling, message) in [
        (json!({"mode": "HPA", "minReplicas": 0}), "workers.x.autoscaling.keda.trigger=postgresql"),
        (json!({"mode": "KEDA", "minReplicas": 0, "keda": {"trigger": "prometheus"}}), "set it to 1 or more"),
        (json!({"mode": "KEDA", "keda": {"trigger": "prometheus"}}), "workers.x.autoscaling.keda.prometheusUrl"),
        (json!({"mode": "HPA", "minReplicas": 5, "maxReplicas": 4}), "minReplicas is over maxReplicas"),
        (json!({"mode": "VPA"}), "/workers/x/autoscaling/mode"),
        (json!({"keda": {"seconds": 3}}), "/workers/x/autoscaling/keda"),
    ] {
        let refusal = template("minimal", "system", &[&pool(autoscaling.clone())], &[]);
        let refusal = refusal.expect_err(&format!("{autoscaling} was accepted"));
        assert!(refusal.contains(message), "{autoscaling}: {refusal}");
    }
}

#[test]
fn keda_gets_the_url_of_postgres_itself_by_reference() {
    let objects = render("all", &[]);
    let trigger = &named(&objects, "ScaledObject", "jr-worker-mail")["spec"]["triggers"][0];
    assert_eq!(trigger["authenticationRef"]["name"], "jr-worker-mail");
    let authentication = named(&objects, "TriggerAuthentication", "jr-worker-mail");
    let expected = json!([{"parameter": "connection", "name": "queue-app", "key": "uri"}]);
    assert_eq!(authentication["spec"]["secretTargetRef"], expected);
}

/// What KEDA would read, on real rows.
#[tokio::test]
async fn the_query_is_the_age_of_the_oldest_ready_job_of_the_pool() {
    let objects = render("minimal", &[r#"settings.install="blue""#, &pool(json!({"mode": "KEDA"}))]);
    let spec = &named(&objects, "ScaledObject", "jobrequest-worker-x")["spec"];
    let query = spec["triggers"][0]["metadata"]["query"].as_str().unwrap();
    let database = Database::new().await;
    let age = async || database.value::<f64>(query).await;
    assert_eq!(age().await, 0.0, "an empty queue needs nobody");
    // Not of this pool, not of this install, not due, held: none of these is ready for it.
    database
        .run(
            "INSERT INTO jobs (kind, payload, install, run_at, suspended) VALUES
         ('resize_image', '{}', 'blue', now() - interval '1 hour', false),
         ('send_email', '{}', 'default', now() - interval '1 hour', false),
         ('send_email', '{}', 'blue', now() + interval '1 hour', false),
         ('send_email', '{}', 'blue', now() - interval '1 hour', true)",
        )
        .await;
    assert_eq!(age().await, 0.0);
    let queue = database.queue_with(|settings| settings.install = "blue".to_owned());
    let job = NewJob::new("webhook_delivery", json!({"url": "https://example.com", "body": 1}));
    queue.enqueue(&job).await.unwrap();
    let running = queue.fetch_next("w1", &["webhook_delivery"]).await.unwrap().expect("a job is due");
    assert_eq!(age().await, 1.0, "a running job keeps a Pod, which finishes it or takes it over");
    database.run("INSERT INTO jobs (kind, payload, install, run_at) VALUES ('send_email', '{}', 'blue', now() - interval '90 seconds')").await;
    let ready = age().await;
    assert!((90.0..110.0).contains(&ready), "{ready}");
    drop(running);
}
