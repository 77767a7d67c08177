//! The example of a kind that is not built in: its file is what runs here.

use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::support::db::Database;

#[path = "../../examples/custom_kind.rs"]
#[allow(dead_code, reason = "its main is for people")]
mod example;

const PATIENCE: Duration = Duration::from_secs(20);
const EXAMPLE: &str = include_str!("../../examples/custom_kind.rs");

#[tokio::test]
async fn a_fifth_kind_in_a_file_of_less_than_60_lines_does_jobs_enqueued_in_sql_beside_the_built_in_ones() {
    assert!(EXAMPLE.lines().count() < 60);
    _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let db = Database::new().await;
    let shutdown = CancellationToken::new();
    let options = db.options();
    let worker = tokio::spawn({
        let shutdown = shutdown.clone();
        async move { example::work(options, shutdown).await.map_err(|error| error.to_string()) }
    });
    // As its head says.
    let statement =
        EXAMPLE.lines().find_map(|line| line.strip_prefix("//! INSERT").map(|rest| format!("INSERT{rest}")));
    let statement = statement.unwrap().trim_end_matches(';').to_owned();
    let good: Uuid = db.value(&format!("{statement} RETURNING id")).await;
    let insert = |kind: &str, payload: &str| {
        format!("INSERT INTO jobs (kind, payload) VALUES ('{kind}', '{payload}') RETURNING id")
    };
    let blank: Uuid = db.value(&insert("count_words", r#"{"text": " "}"#)).await;
    let wrong: Uuid = db.value(&insert("count_words", r#"{"txt": "secret"}"#)).await;
    let built_in: Uuid = db.value(&insert("summarize_text", r#"{"text": "One sentence."}"#)).await;
    db.until_status(good, "succeeded", PATIENCE).await;
    db.until_status(built_in, "succeeded", PATIENCE).await;
    assert_eq!(db.value::<Value>(&format!("SELECT result FROM jobs WHERE id = '{good}'")).await["words"], 6);
    for (id, reason) in [(blank, "TextBlank: "), (wrong, "PayloadInvalid: ")] {
        db.until_status(id, "failed_permanent", PATIENCE).await;
        let error = db.value::<String>(&format!("SELECT last_error FROM jobs WHERE id = '{id}'")).await;
        assert!(error.starts_with(reason) && !error.contains("secret"), "{error}");
    }
    shutdown.cancel();
    assert_eq!(worker.await.unwrap(), Ok(()));
}
