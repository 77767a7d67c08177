//! The right to finish one attempt.

use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::Instant;
use uuid::Uuid;

use super::error::Error;
use super::lanes::{Lane, Mark};
use super::row::count;
use crate::job::Facts;

/// A claim: whoever holds it may end the attempt, once. Made only by [`Queue::fetch_next`](super::Queue::fetch_next)
/// and consumed by the operation that ends it, so finishing twice does not compile. Dropping it leaves the row running
/// until its lease ends and the rescue takes it.
#[must_use = "a dropped claim leaves its job running until the lease ends"]
pub struct ClaimedJob {
    pub(super) lease: Lease,
    lane: Lane,
    mark: Mark,
    lost_leases: i16,
    pub(super) attempts: u32,
    pub(super) max_attempts: u32,
    pub(super) handed_back_for: Duration,
    timeout: Duration,
    waited: Duration,
    /// None until it is loaded, for a large one that was prefetched.
    payload: Option<Box<RawValue>>,
    progress: Option<Value>,
    /// A resource stood for it when it was claimed.
    pub(super) owned: bool,
}

/// Names a claim to the heartbeat: the row and the token its writes must carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    pub(super) id: Uuid,
    pub(super) token: Uuid,
    /// Counted from before the claim was sent: the database's clock for it started later.
    since: Instant,
}

/// Without what the job is about: an error that holds a claim may be printed.
impl fmt::Debug for ClaimedJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lease, lane, attempts, max_attempts, .. } = self;
        f.debug_struct("ClaimedJob")
            .field("id", &lease.id)
            .field("kind", &lane.kind)
            .field("attempt", attempts)
            .field("max_attempts", max_attempts)
            .finish_non_exhaustive()
    }
}

impl Lease {
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// Unique per claim.
    pub fn token(&self) -> Uuid {
        self.token
    }

    /// From when this lease counts, on the process's monotonic clock.
    pub fn since(&self) -> Instant {
        self.since
    }
}

impl ClaimedJob {
    pub fn lease(&self) -> Lease {
        self.lease
    }

    pub fn id(&self) -> Uuid {
        self.lease.id
    }

    pub fn kind(&self) -> &str {
        &self.lane.kind
    }

    pub fn namespace(&self) -> Option<&str> {
        Some(self.lane.namespace.as_str()).filter(|namespace| !namespace.is_empty())
    }

    /// Number of this attempt, 1 for the first.
    pub fn attempt(&self) -> u32 {
        self.attempts
    }

    pub fn max_attempts(&self) -> u32 {
        self.max_attempts
    }

    /// The attempt's time limit.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How long the job had been due when it was claimed, by the database's clock.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// None for a large one that [`Payloads::Small`](super::Payloads::Small) left out:
    /// [`Queue::load_payload`](super::Queue::load_payload) brings it.
    pub fn payload(&self) -> Option<&RawValue> {
        self.payload.as_deref()
    }

    /// Moves the payload out, for the attempt.
    pub(crate) fn take_payload(&mut self) -> Option<Box<RawValue>> {
        self.payload.take()
    }

    pub(super) fn set_payload(&mut self, text: String) -> Result<(), Error> {
        self.payload = Some(raw(self.lease.id, text)?);
        Ok(())
    }

    /// Where it was waiting.
    pub fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Its place there.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// How many leases of this job ended before their worker did: what it does may kill a process.
    pub fn lost_leases(&self) -> u16 {
        u16::try_from(self.lost_leases).unwrap_or_default()
    }

    pub fn progress(&self) -> Option<&Value> {
        self.progress.as_ref()
    }

    pub(super) fn facts(&self, cancel_requested: bool) -> Facts {
        Facts {
            attempts: self.attempts,
            max_attempts: self.max_attempts,
            cancel_requested,
            handed_back_for: self.handed_back_for,
        }
    }
}

/// What a claim returns of each row.
#[derive(sqlx::FromRow)]
pub(super) struct ClaimedRow {
    pub(super) id: Uuid,
    kind: String,
    namespace: Option<String>,
    priority: i16,
    run_at: DateTime<Utc>,
    lost_leases: i16,
    attempts: i32,
    max_attempts: i32,
    timeout_seconds: i32,
    handed_back_seconds: f64,
    waited_seconds: f64,
    payload: Option<String>,
    progress: Option<String>,
    owned: bool,
}

impl ClaimedRow {
    pub(super) fn into_job(self, token: Uuid, since: Instant) -> Result<ClaimedJob, Error> {
        let Self {
            id,
            kind,
            namespace,
            priority,
            run_at,
            lost_leases,
            attempts,
            max_attempts,
            timeout_seconds,
            handed_back_seconds,
            waited_seconds,
            payload,
            progress,
            owned,
        } = self;
        let payload = payload.map(|text| raw(id, text)).transpose()?;
        let progress = progress.as_deref().map(serde_json::from_str).transpose().map_err(|_| Error::RowInvalid {
            id,
            column: "progress",
            problem: "is not JSON that can be read",
        })?;
        let lane = Lane {
            kind,
            namespace: namespace.unwrap_or_default(),
            careful: attempts >= max_attempts || lost_leases >= 2,
            priority,
        };
        Ok(ClaimedJob {
            lease: Lease { id, token, since },
            lane,
            mark: Mark { run_at, id },
            lost_leases,
            attempts: count(id, "attempts", attempts)?,
            max_attempts: count(id, "max_attempts", max_attempts)?,
            handed_back_for: seconds(handed_back_seconds),
            timeout: Duration::from_secs(count(id, "timeout_seconds", timeout_seconds)?.into()),
            waited: seconds(waited_seconds),
            payload,
            progress,
            owned,
        })
    }
}

fn raw(id: Uuid, text: String) -> Result<Box<RawValue>, Error> {
    RawValue::from_string(text).map_err(|_| Error::RowInvalid {
        id,
        column: "payload",
        problem: "is not JSON that can be read",
    })
}

/// A negative or absurd number of seconds (a clock set back) counts as none.
fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}
