//! Who leads: one controller of an install at a time, by a Lease in its own namespace.
//!
//! No clock is compared with another machine's. The leader counts its lease from before it sent the renewal; a standby
//! counts from when it saw the last one. So the leader has stopped, by [`MARGIN`] and more, before a standby takes over.
//! Nothing rests on that alone: every write carries its guard, and two leaders would only do the same work twice.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::{sleep, sleep_until, timeout};

use super::fence::Fence;
use super::{Error, Result, patch};
use crate::admin::{Beat, Part};

/// How long a renewal holds. A standby waits for as long before it takes over.
const LEASE: Duration = Duration::from_secs(10);
/// So long before the lease ends a leader writes no more.
const MARGIN: Duration = Duration::from_secs(2);
/// From one renewal to the next, and after one that failed.
const RENEW: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(500);
/// How often a standby looks.
const LOOK: Duration = Duration::from_secs(1);
/// Limit of one call.
const CALL: Duration = Duration::from_secs(2);
/// The longest lease of another program that is believed.
const LEASE_MAX: Duration = Duration::from_secs(60);

/// A Lease as it was read, and when it was first seen like this.
#[derive(Debug, Clone)]
struct Seen {
    version: Option<String>,
    spec: LeaseSpec,
    since: Instant,
}

/// What a candidate does about a Lease.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Take,
    /// Somebody holds it, for so long if nothing more is heard.
    Wait(Duration),
}

/// Whose turn it is. Times that others wrote are not read: a renewal is a change, counted from when it was seen.
fn turn(me: &str, seen: &Seen, now: Instant) -> Turn {
    let holder = seen.spec.holder_identity.as_deref().unwrap_or_default();
    if holder.is_empty() || holder == me {
        return Turn::Take;
    }
    let lasts = match seen.spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok()) {
        None | Some(0) => LEASE,
        Some(seconds) => Duration::from_secs(seconds).min(LEASE_MAX),
    };
    match lasts.checked_sub(now.saturating_duration_since(seen.since)) {
        None | Some(Duration::ZERO) => Turn::Take,
        Some(left) => Turn::Wait(left),
    }
}

/// What was read, with the time at which it was first seen like this.
fn observe(before: Option<Seen>, lease: &Lease, now: Instant) -> Seen {
    let spec = lease.spec.clone().unwrap_or_default();
    let since = before.filter(|before| before.spec == spec).map_or(now, |before| before.since);
    Seen { version: lease.resource_version(), spec, since }
}

/// The Lease that `me` writes in place of this one. Its times are for people.
fn held_by(me: &str, before: Option<&LeaseSpec>, now: Timestamp) -> LeaseSpec {
    let mut spec = before.cloned().unwrap_or_default();
    if spec.holder_identity.as_deref() != Some(me) {
        spec.lease_transitions = Some(before.map_or(0, |_| spec.lease_transitions.unwrap_or(0).saturating_add(1)));
        spec.acquire_time = Some(MicroTime(now));
    }
    spec.holder_identity = Some(me.to_owned());
    spec.lease_duration_seconds = i32::try_from(LEASE.as_secs()).ok();
    spec.renew_time = Some(MicroTime(now));
    spec
}

/// The Lease of an install.
fn lease_name(install: &str) -> String {
    format!("jobrequest-{install}")
}

/// The same, for Events about the install.
pub(super) fn reference(client: &Client, install: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("coordination.k8s.io/v1".to_owned()),
        kind: Some("Lease".to_owned()),
        namespace: Some(client.default_namespace().to_owned()),
        name: Some(lease_name(install)),
        ..Default::default()
    }
}

/// One process's part in the election.
pub(super) struct Election {
    leases: Api<Lease>,
    name: String,
    me: String,
    fence: Fence,
}

/// A won election: the right to [`keep`](Election::keep) the Lease, and to give it up.
#[must_use]
pub(super) struct Term {
    /// The Lease as this process wrote it; none when it can't be sure.
    seen: Option<Seen>,
}

impl Election {
    /// `client` must pass writes whatever the fence says. `process` is told apart from its namesakes.
    pub(super) fn new(client: Client, install: &str, process: &str, fence: Fence) -> Self {
        let me = format!("{process}_{}", uuid::Uuid::new_v4().simple());
        Self { leases: Api::default_namespaced(client), name: lease_name(install), me, fence }
    }

    /// Waits until this process leads. Meanwhile it is a standby, and ready if the API server answers.
    pub(super) async fn win(&self, kubernetes: &Part, leader: &Part, beat: &Beat) -> Term {
        let mut seen = None;
        loop {
            beat.beat();
            let pause = match self.campaign(&mut seen).await {
                Ok(Turn::Take) => {
                    tracing::info!(lease = self.name, holder = self.me, "leads");
                    leader.ready_as("leads");
                    return Term { seen };
                }
                Ok(Turn::Wait(left)) => {
                    kubernetes.ready();
                    leader.ready_as("standby");
                    left.min(LOOK)
                }
                Err(error) => {
                    kubernetes.not_ready(format!("the Lease {}: {error}", self.name));
                    LOOK
                }
            };
            sleep(pause).await;
        }
    }

    /// One try: [`Turn::Take`] means that it succeeded.
    async fn campaign(&self, seen: &mut Option<Seen>) -> Result<Turn> {
        if let Some(lease) = self.read().await? {
            let now = observe(seen.take(), &lease, Instant::now());
            let turn = turn(&self.me, seen.insert(now), Instant::now());
            if matches!(turn, Turn::Wait(_)) {
                return Ok(turn);
            }
        } else {
            *seen = None;
        }
        Ok(if self.write(seen).await? { Turn::Take } else { Turn::Wait(RETRY) })
    }

    /// Renews until the Lease is somebody else's or this process may write no more; then the fence is shut.
    pub(super) async fn keep(&self, term: &mut Term, beat: &Beat) {
        let mut pause = RENEW;
        while let Some(end) = self.fence.end() {
            beat.beat();
            sleep(pause).await;
            let renewed = tokio::select! {
                renewed = self.renew(&mut term.seen) => renewed,
                () = sleep_until(end.into()) => break,
            };
            pause = match renewed {
                Ok(true) => RENEW,
                Ok(false) => {
                    term.seen = None;
                    break;
                }
                Err(error) => {
                    tracing::debug!(lease = self.name, error = %error, "not renewed");
                    // It may have taken effect or not.
                    term.seen = None;
                    RETRY
                }
            };
        }
        self.fence.shut();
        tracing::warn!(lease = self.name, holder = self.me, "leads no more: what is under way is dropped");
    }

    /// False when somebody else has the Lease.
    async fn renew(&self, seen: &mut Option<Seen>) -> Result<bool> {
        if seen.is_some() && self.write(seen).await? {
            return Ok(true);
        }
        // Changed by somebody, or by a call of ours whose answer was lost.
        *seen = self.read().await?.map(|lease| observe(None, &lease, Instant::now()));
        let is_ours = |seen: &Seen| seen.spec.holder_identity.as_deref() == Some(&self.me);
        // One that was deleted is made again, unless somebody else was faster.
        Ok(seen.as_ref().is_none_or(is_ours) && self.write(seen).await?)
    }

    /// Gives the Lease up, so that a standby need not wait for its end.
    pub(super) async fn resign(&self, term: Term) {
        drop(term);
        self.fence.shut();
        // A renewal may have been under way, so what was seen last may be out of date, once.
        for _ in 0..2 {
            match self.give_up().await {
                Ok(true) => return tracing::info!(lease = self.name, "the lead is given up"),
                Ok(false) => {}
                Err(error) => return tracing::debug!(lease = self.name, error = %error, "the lead ends by itself"),
            }
        }
    }

    async fn give_up(&self) -> Result<bool> {
        let Some(lease) = self.read().await? else { return Ok(true) };
        let spec = lease.spec.unwrap_or_default();
        if spec.holder_identity.as_deref() != Some(&self.me) {
            return Ok(true);
        }
        let nobody = LeaseSpec { holder_identity: Some(String::new()), ..spec };
        Ok(self.replace(lease.metadata.resource_version.as_deref(), &nobody).await?.is_some())
    }

    async fn read(&self) -> Result<Option<Lease>> {
        limited(self.leases.get_opt(&self.name)).await
    }

    /// Makes the Lease this process's, if it still is as it was seen; true when it did, and the fence is open.
    async fn write(&self, seen: &mut Option<Seen>) -> Result<bool> {
        let sent = Instant::now();
        let spec = held_by(&self.me, seen.as_ref().map(|seen| &seen.spec), Timestamp::now());
        let written = match &seen {
            Some(seen) => self.replace(seen.version.as_deref(), &spec).await?,
            None => self.create(spec).await?,
        };
        let Some(lease) = written else { return Ok(false) };
        self.fence.open(sent + LEASE - MARGIN);
        *seen = Some(observe(None, &lease, sent));
        Ok(true)
    }

    async fn create(&self, spec: LeaseSpec) -> Result<Option<Lease>> {
        let metadata = ObjectMeta { name: Some(self.name.clone()), ..Default::default() };
        let lease = Lease { metadata, spec: Some(spec) };
        let params = PostParams { field_manager: Some(patch::FIELD_MANAGER.to_owned()), ..Default::default() };
        unless_beaten(limited(self.leases.create(&params, &lease)).await)
    }

    async fn replace(&self, version: Option<&str>, spec: &LeaseSpec) -> Result<Option<Lease>> {
        let operations = json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/spec", "value": spec},
        ]);
        let patch = Patch::<()>::Json(serde_json::from_value(operations).map_err(Error::Patch)?);
        let params = PatchParams { field_manager: Some(patch::FIELD_MANAGER.to_owned()), ..Default::default() };
        unless_beaten(limited(self.leases.patch(&self.name, &params, &patch)).await)
    }
}

async fn limited<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T> {
    match timeout(CALL, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Error::ApiTimeout { seconds: CALL.as_secs() }),
    }
}

/// None when the Lease was not as expected: there already, changed, or gone.
fn unless_beaten(answer: Result<Lease>) -> Result<Option<Lease>> {
    match answer {
        Ok(lease) => Ok(Some(lease)),
        Err(Error::Api(kube::Error::Api(status))) if matches!(status.code, 404 | 409 | 422) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(holder: &str, renewed: i64) -> Lease {
        let spec = LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(10),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).expect("in range"))),
            ..Default::default()
        };
        Lease { spec: Some(spec), ..Default::default() }
    }

    #[test]
    fn a_lease_of_nobody_or_ones_own_is_taken_and_anothers_when_nothing_was_heard_for_its_length() {
        let start = Instant::now();
        let seen = |holder| observe(None, &lease(holder, 0), start);
        assert_eq!(turn("me", &seen(""), start), Turn::Take);
        assert_eq!(turn("me", &seen("me"), start), Turn::Take);
        assert_eq!(turn("me", &seen("other"), start), Turn::Wait(10 * SECOND));
        assert_eq!(turn("me", &seen("other"), start + 9 * SECOND), Turn::Wait(SECOND));
        assert_eq!(turn("me", &seen("other"), start + 10 * SECOND), Turn::Take);
    }

    #[test]
    fn a_renewal_counts_from_when_it_was_seen_whatever_time_it_bears() {
        let start = Instant::now();
        let first = observe(None, &lease("other", 4_000_000_000), start);
        let same = observe(Some(first), &lease("other", 4_000_000_000), start + 9 * SECOND);
        assert_eq!(turn("me", &same, start + 10 * SECOND), Turn::Take, "a clock in the future renews nothing");
        let renewed = observe(Some(same), &lease("other", 1), start + 9 * SECOND);
        assert_eq!(
            turn("me", &renewed, start + 10 * SECOND),
            Turn::Wait(9 * SECOND),
            "nor does one in the past end it"
        );
    }

    #[test]
    fn a_length_that_makes_no_sense_is_not_believed() {
        let start = Instant::now();
        for (seconds, lasts) in [(None, LEASE), (Some(0), LEASE), (Some(-5), LEASE), (Some(i32::MAX), LEASE_MAX)] {
            let mut seen = observe(None, &lease("other", 0), start);
            seen.spec.lease_duration_seconds = seconds;
            assert_eq!(turn("me", &seen, start), Turn::Wait(lasts), "{seconds:?}");
        }
    }

    #[test]
    fn a_new_holder_is_a_transition_and_a_renewal_is_none() {
        let now = Timestamp::UNIX_EPOCH;
        let first = held_by("a", None, now);
        assert_eq!((first.lease_transitions, first.lease_duration_seconds), (Some(0), Some(10)));
        let later = now + LEASE;
        let renewed = held_by("a", Some(&first), later);
        assert_eq!((renewed.lease_transitions, &renewed.acquire_time), (Some(0), &first.acquire_time));
        let taken = held_by("b", Some(&renewed), later);
        assert_eq!((taken.lease_transitions, taken.acquire_time), (Some(1), Some(MicroTime(later))));
    }
}
