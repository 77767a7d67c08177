//! Several controllers, of which one leads.

use std::time::{Duration, Instant};

use jobrequest::api::Phase;
use serde_json::json;

use super::api_proxy::{ApiProxy, Call};
use super::program::Program;
use super::site::{PROMPTLY, Setup, Site, with};
use super::wait::{PATIENCE, until_true};

/// How long a job may wait for another leader when the first one died without a word.
const TAKEOVER: Duration = Duration::from_secs(15);
/// What a renewal is good for.
const LEASE: Duration = Duration::from_secs(10);

impl Site {
    fn through(&self, proxy: &ApiProxy) -> Setup {
        self.controller().set("KUBECONFIG", proxy.kubeconfig(self.directory.path()).display())
    }

    async fn create_waiting(&self, name: &str) {
        self.create(name, with(self.hook("/ok"), json!({"runAt": "2099-01-01T00:00:00Z"}))).await;
    }

    /// Creates a job and waits until a leader has shown it; how long that took.
    async fn shown_after(&self, name: &str) -> Duration {
        let started = Instant::now();
        self.create_waiting(name).await;
        self.until_phase(name, Phase::Queued).await;
        started.elapsed()
    }
}

async fn leads(controller: &Program) -> bool {
    controller.get("/metrics").await.1.lines().any(|line| line == "jobrequest_controller_leader 1")
}

#[tokio::test]
async fn a_standby_takes_over_soon_after_a_sigkill_and_at_once_after_a_sigterm() {
    let site = Site::new().await;
    let mut first = site.controller().start().await;
    let mut second = site.controller().start().await;
    assert_eq!(second.get("/readyz").await, (200, "ok\nleader: standby\n".to_owned()));
    assert_eq!(first.get("/readyz").await, (200, "ok\nleader: leads\n".to_owned()));
    assert!(leads(&first).await && !leads(&second).await);
    first.kill();
    let waited = site.shown_after("killed").await;
    assert!(waited < TAKEOVER, "{waited:?}");
    assert!(leads(&second).await);

    let third = site.controller().start().await;
    second.signal("TERM");
    let waited = site.shown_after("told").await;
    // Well before the Lease ends; the rest is a busy machine's.
    assert!(waited < 2 * PROMPTLY, "{waited:?}");
    assert!(second.exit().await.success());
    assert!(leads(&third).await);
    let holders = site.proxy.calls().into_iter().filter(|call| call.is_election() && call.method == "POST").count();
    assert_eq!(holders, 1, "one Lease for all");
}

#[tokio::test]
async fn a_leader_that_can_not_renew_writes_no_more_before_its_lease_ends() {
    let site = Site::new().await;
    let (ours, theirs) = (site.another_proxy().await, site.another_proxy().await);
    let first = site.through(&ours).start().await;
    let second = site.through(&theirs).start().await;
    // Everything but its renewals still reaches the API server.
    ours.hold(Call::is_election);
    ours.until_holding().await;
    let mut made = 0;
    until_true("the other one leads", PATIENCE, async || {
        made += 1;
        site.create_waiting(&format!("a-{made}")).await;
        leads(&second).await
    })
    .await;
    assert!(!leads(&first).await, "two leaders");
    for n in 1..=made {
        site.until_phase(&format!("a-{n}"), Phase::Queued).await;
    }
    let is_renewal = |call: &&Call| call.is_election() && call.is_write() && call.status.is_some();
    let renewed = ours.calls().iter().filter(is_renewal).map(|call| call.at).max();
    let (renewed, wrote) = (renewed.unwrap(), ours.writes().iter().map(|call| call.at).max().unwrap());
    let held_on = wrote.duration_since(renewed);
    assert!(held_on > Duration::from_secs(2) && held_on < LEASE, "it wrote for {held_on:?} after its last renewal");
    let taken = theirs.writes().iter().map(|call| call.at).min().unwrap();
    assert!(wrote < taken, "the other one began before this one ended");
    assert_eq!(site.count_rows().await, made);
    assert_eq!(first.get("/readyz").await.0, 503, "it says that the API server does not answer");

    // And it stands by again when the way is free.
    ours.pass();
    first.until("/readyz", 200).await;
    assert!(!leads(&first).await);
}

#[tokio::test]
async fn a_leader_that_was_stopped_for_a_while_writes_nothing_when_it_goes_on() {
    let site = Site::new().await;
    let (ours, theirs) = (site.another_proxy().await, site.another_proxy().await);
    let first = site.through(&ours).start().await;
    let second = site.through(&theirs).start().await;
    // The other one leaves everything to do for the first one, when that goes on.
    theirs.hold(|call| call.is_write() && !call.is_election());
    first.signal("STOP");
    for n in 0..5 {
        site.create_waiting(&format!("a-{n}")).await;
    }
    until_true("the other one leads", PATIENCE, async || leads(&second).await).await;
    theirs.until_holding().await;
    let before = ours.writes().len();
    first.signal("CONT");
    until_true("it knows", PATIENCE, async || !leads(&first).await).await;
    first.until("/readyz", 200).await;
    theirs.pass();
    for n in 0..5 {
        site.until_phase(&format!("a-{n}"), Phase::Queued).await;
    }
    let wrote = ours.writes().split_off(before);
    assert!(wrote.is_empty(), "{wrote:#?}");
}
