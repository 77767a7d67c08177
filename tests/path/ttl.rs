//! How long a resource stays after its end.

use jobrequest::api::Phase;
use serde_json::{Value, json};

use super::site::{PROMPTLY, Site, phase, with};
use super::wait::{PATIENCE, until_true};

fn blank(ttl: u32) -> Value {
    json!({"kind": "summarize_text", "payload": {"text": "\u{2003}"}, "ttlSecondsAfterFinished": ttl})
}

#[tokio::test]
async fn a_resource_that_never_had_a_row_goes_by_the_time_since_when_it_shows_that() {
    let site = Site::new().await;
    let _controller = site.controller().start().await;
    site.create("stays", blank(3600)).await;
    site.until_phase("stays", Phase::Rejected).await;
    site.create("goes", blank(0)).await;
    let said = async || {
        let of_it = |name: &str| name.starts_with("goes.");
        site.events().await.iter().any(|event| event.metadata.name.as_deref().is_some_and(of_it))
    };
    until_true("it was rejected", PATIENCE, said).await;
    site.until_gone("goes", PROMPTLY).await;
    assert_eq!(phase(&site.get("stays").await.unwrap()), Some(Phase::Rejected));
    site.patch("stays", json!({"spec": {"ttlSecondsAfterFinished": 1}})).await;
    site.until_gone("stays", PROMPTLY).await;
}

#[tokio::test]
async fn a_resource_whose_row_is_lost_goes_by_the_time_since_when_it_shows_that() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let _worker = site.worker().start().await;
    site.create("a", with(site.hook("/gate/a"), json!({"ttlSecondsAfterFinished": 2}))).await;
    site.until_phase("a", Phase::Running).await;
    site.kill(&mut controller).await;
    site.database.run("DELETE FROM jobs").await;
    let _controller = site.controller().start().await;
    site.until_condition("a", "Failed", "True", "RowLost").await;
    site.until_gone("a", PATIENCE).await;
}
