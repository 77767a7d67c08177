//! Rows without a resource: enqueued in SQL, looked at and acted on with `jobrequest jobs`.

use jobrequest::api::Phase;
use serde_json::{Value, json};
use uuid::Uuid;

use super::site::{Site, condition, job_id, with};

impl Site {
    /// Runs an INSERT that returns the id.
    async fn insert(&self, sql: &str) -> Uuid {
        self.database.value(&format!("INSERT INTO jobs {sql} RETURNING id")).await
    }

    /// Runs `jobrequest jobs …`, which must succeed; what it prints.
    async fn jobs(&self, arguments: &[&str]) -> String {
        let (code, out, error) = self.program(&[&["jobs"], arguments].concat()).output().await;
        assert_eq!(code, Some(0), "jobs {}: {error}", arguments.join(" "));
        out
    }
}

#[tokio::test]
async fn a_job_enqueued_in_sql_runs() {
    let site = Site::new().await;
    let _worker = site.worker().start().await;
    let id = site.insert(r#"(kind, payload) VALUES ('summarize_text', '{"text": "Hello there. Goodbye."}')"#).await;
    assert_eq!(site.until_row(id, "succeeded").await.attempts, 1);
}

#[tokio::test]
async fn jobs_are_listed_shown_cancelled_and_retried_on_the_database() {
    let site = Site::new().await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    site.create("a", with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
    let id = job_id(&site.until_phase("a", Phase::Queued).await).to_string();
    let other = site.insert(r#"(kind, payload) VALUES ('summarize_text', '{"text": "Hello."}')"#).await;
    site.until_row(other, "succeeded").await;

    let list: Value = serde_json::from_str(&site.jobs(&["list", "--output", "json"]).await).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 2);
    assert_eq!(list[0]["id"], json!(other), "newest first");
    let queued = site.jobs(&["list", "--status", "queued", "--namespace", &site.namespace]).await;
    assert!(queued.contains(&id) && queued.contains("0/3") && !queued.contains(&other.to_string()), "{queued}");
    let shown: Value = serde_json::from_str(&site.jobs(&["get", &id, "--output", "json"]).await).unwrap();
    assert_eq!((&shown["id"], &shown["namespace"]), (&json!(id), &json!(site.namespace)));

    assert!(site.jobs(&["cancel", &id]).await.contains("cancelled"));
    site.until_condition("a", "Failed", "True", "Cancelled").await;
    assert!(site.jobs(&["cancel", &id]).await.contains("had ended"));
    assert!(site.jobs(&["retry", &id]).await.contains("queued"));
    // Its time has come: the retry is for now.
    let done = site.until_phase("a", Phase::Succeeded).await;
    assert_eq!((job_id(&done).to_string(), site.sink.count("/ok")), (id.clone(), 1));
    assert_eq!(condition(&done, "Failed"), None);

    let (code, _, error) = site.program(&["jobs", "retry", &id]).output().await;
    assert!(code == Some(1) && error.lines().count() == 1 && error.contains(&id), "{error}");
    let (code, _, error) = site.program(&["jobs", "get", &Uuid::nil().to_string()]).output().await;
    assert!(code == Some(1) && error.lines().count() == 1, "{error}");
}
