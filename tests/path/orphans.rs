//! Live rows whose resources are gone.

use std::time::{Duration, Instant};

use serde_json::json;

use super::program::Program;
use super::site::{LEASE, Site, with};
use super::wait::{PATIENCE, until, until_true};

const WAIT: Duration = Duration::from_secs(12);

pub(super) async fn metric(controller: &Program, name: &str) -> Option<String> {
    let text = controller.get("/metrics").await.1;
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
}

impl Site {
    async fn count(&self, status: &str) -> i64 {
        self.database.value(&format!("SELECT count(*) FROM jobs WHERE status = '{status}'")).await
    }
}

#[tokio::test]
async fn most_of_many_live_jobs_are_not_cancelled_before_a_wait_that_is_said_aloud() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    for n in 0..101 {
        site.create(&format!("a-{n}"), with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
    }
    until_true("all are enqueued", PATIENCE, async || site.count("queued").await == 101).await;
    site.kill(&mut controller).await;
    for n in 0..60 {
        let name = format!("a-{n}");
        site.patch(&name, json!({"metadata": {"finalizers": null}})).await;
        site.delete(&name).await;
    }

    let controller = site.controller().set("JOBREQUEST_ORPHAN_WAIT_SECONDS", WAIT.as_secs()).start().await;
    until_true("it holds back", PATIENCE, async || {
        metric(&controller, "jobrequest_orphans_held_back ").await.as_deref() == Some("60")
    })
    .await;
    let held = Instant::now();
    assert_eq!((site.count("queued").await, site.count("cancelled").await), (101, 0));
    let event = until("an Event says so", PATIENCE, async || {
        let found = site.events().await.into_iter().find(|event| event.reason.as_deref() == Some("OrphansHeldBack"));
        found.ok_or_else(|| "none".to_owned())
    })
    .await;
    assert_eq!(event.regarding.unwrap().name.as_deref(), Some(LEASE));
    assert!(event.note.unwrap().starts_with("60 of 101 live jobs have no JobRequest any more"));

    until_true("they are cancelled", PATIENCE, async || site.count("cancelled").await > 0).await;
    assert!(held.elapsed() > WAIT - Duration::from_secs(2), "only {:?} later", held.elapsed());
    until_true("all of them", PATIENCE, async || site.count("cancelled").await == 60).await;
    assert_eq!(site.count("queued").await, 41, "those whose resources live stay");
    until_true("that is counted", PATIENCE, async || {
        metric(&controller, "jobrequest_orphans_ended_total ").await.as_deref() == Some("60")
            && metric(&controller, "jobrequest_orphans_held_back ").await.as_deref() == Some("0")
    })
    .await;
}
