//! Installs, and the clusters that they belong to.

use jobrequest::api::Phase;
use kube::ResourceExt;
use serde_json::json;

use super::site::{PROMPTLY, Site, condition, job_id, with};
use super::wait::{PATIENCE, until_true};

/// The uid of a cluster that was.
const GONE: &str = "6a4c1f0e-8f0e-4b57-9f3e-2d9d2a1d7c11";

#[tokio::test]
async fn another_cluster_under_the_same_name_touches_nothing_until_it_is_told_to_adopt() {
    let site = Site::new().await;
    let mut controller = site.controller().start().await;
    let worker = site.worker().start().await;
    let keyed = with(site.hook("/ok"), json!({"idempotencyKey": "order-42"}));
    site.create("done", keyed.clone()).await;
    let id = job_id(&site.until_phase("done", Phase::Succeeded).await);
    let waiting = with(site.hook("/ok?waiting"), json!({"runAt": "2099-01-01T00:00:00Z", "idempotencyKey": "w"}));
    site.create("waiting", waiting.clone()).await;
    let waits = job_id(&site.until_phase("waiting", Phase::Queued).await);
    drop(worker);

    // The rows become another cluster's: its resources are not to be found here.
    site.database.run(&format!("UPDATE job_installs SET cluster = '{GONE}', adopted_at = now()")).await;
    assert_eq!(controller.exit().await.code(), Some(1), "one that runs hears of it");
    site.delete("done").await;
    site.patch("waiting", json!({"metadata": {"finalizers": null}})).await;
    site.delete("waiting").await;
    site.until_gone("waiting", PROMPTLY).await;
    let before = site.database.row(waits).await;
    let (code, _, log) = site.controller().output().await;
    let line = log.lines().last().unwrap();
    assert_eq!(code, Some(1), "{log}");
    assert!(line.starts_with("jobrequest: install `default` of this database belongs to the cluster"), "{line}");
    assert!(line.contains(&format!("JOBREQUEST_ADOPT_INSTALL={GONE}")), "{line}");
    let other = "00000000-0000-4000-8000-000000000000";
    let (code, ..) = site.controller().set("JOBREQUEST_ADOPT_INSTALL", other).output().await;
    assert_eq!(code, Some(1), "it names the cluster that is meant, or it is not meant");
    assert_eq!(site.database.row(waits).await, before);

    // The resources come back from a backup under other uids.
    site.create("done", keyed).await;
    let restored = site.create("waiting", waiting).await;
    let adopted = site.controller().set("JOBREQUEST_ADOPT_INSTALL", GONE);
    let controller = adopted.start().await;
    let _worker = site.worker().start().await;
    let again = site.until_phase("done", Phase::Succeeded).await;
    assert_eq!((job_id(&again), condition(&again, "Accepted").unwrap().1.as_str()), (id, "Existing"));
    assert_eq!(job_id(&site.until_phase("waiting", Phase::Queued).await), waits);
    // The sweep ends the hold of the old one, and the row goes on as the new one's.
    let owner = restored.uid().unwrap().parse().ok();
    until_true("the row has another owner", PATIENCE, async || site.row(waits).await.owner_uid == owner).await;
    assert_eq!(site.row(waits).await.status, "queued");
    assert_eq!((site.sink.count("/ok"), site.count_rows().await), (1, 2), "nothing ran twice");
    assert!(controller.log().contains("took over the rows and keys of another cluster"));
}

#[tokio::test]
async fn a_controller_that_may_not_see_which_cluster_it_is_in_says_so_and_waits() {
    let site = Site::new().await;
    site.proxy.refuse(403, |call| call.path == "/api/v1/namespaces/kube-system");
    let controller = site.controller().launch();
    until_true("it is named", PATIENCE, async || {
        let (code, text) = controller.get("/readyz").await;
        code == 503 && text.contains("kubernetes: not ready: the namespace kube-system") && text.contains("403")
    })
    .await;
    assert!(controller.log().contains("kube-system"));
    site.create("a", with(site.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
    assert_eq!(site.count_rows().await, 0);
    site.proxy.pass();
    site.until_phase("a", Phase::Queued).await;
    controller.until("/readyz", 200).await;
}

#[tokio::test]
async fn two_installs_on_one_database_have_their_own_rows_and_keys() {
    let (site, other) = (Site::new().await, Site::new().await);
    let _ours = site.controller().start().await;
    let theirs = other.controller().set("DATABASE_URL", site.database.url()).set("JOBREQUEST_INSTALL", "blue");
    let _theirs = theirs.start().await;
    let worker = || site.worker().set("DATABASE_URL", site.database.url());
    let _workers = [worker().start().await, worker().set("JOBREQUEST_INSTALL", "blue").start().await];
    for (site, hook) in [(&site, site.hook("/ok?ours")), (&other, site.hook("/ok?theirs"))] {
        site.create("a", with(hook, json!({"idempotencyKey": "k"}))).await;
        site.until_phase("a", Phase::Succeeded).await;
    }
    assert_eq!((site.sink.count("/ok?ours"), site.sink.count("/ok?theirs")), (1, 1));
    let installs: Vec<(String, i64)> =
        sqlx::query_as("SELECT install, count(*) FROM jobs JOIN job_installs USING (install) GROUP BY 1 ORDER BY 1")
            .fetch_all(site.database.pool())
            .await
            .unwrap();
    assert_eq!(installs, [("blue".to_owned(), 1), ("default".to_owned(), 1)]);
}
