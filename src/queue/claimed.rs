//! The right to finish one attempt.

use std::fmt;
use std::time::Duration;

use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::Instant;
use uuid::Uuid;

use super::error::Error;
use super::row::count;
use crate::job::Facts;

/// A claim: whoever holds it may end the attempt, once. Made only by [`Queue::fetch_next`](super::Queue::fetch_next)
/// and consumed by the operation that ends it, so finishing twice does not compile. Dropping it leaves the row running
/// until its lease ends and the rescue takes it.
#[must_use = "a dropped claim leaves its job running until the lease ends"]
pub struct ClaimedJob {
    pub(super) lease: Lease,
    kind: String,
    namespace: Option<String>,
    pub(super) attempts: u32,
    pub(super) max_attempts: u32,
    pub(super) handed_back_for: Duration,
    timeout: Duration,
    waited: Duration,
    payload: Box<RawValue>,
    progress: Option<Value>,
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
        let Self { lease, kind, attempts, max_attempts, .. } = self;
        f.debug_struct("ClaimedJob")
            .field("id", &lease.id)
            .field("kind", kind)
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
        &self.kind
    }

    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
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

    pub fn payload(&self) -> &RawValue {
        &self.payload
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
    attempts: i32,
    max_attempts: i32,
    timeout_seconds: i32,
    handed_back_seconds: f64,
    waited_seconds: f64,
    payload: String,
    progress: Option<String>,
}

impl ClaimedRow {
    pub(super) fn into_job(self, token: Uuid, since: Instant) -> Result<ClaimedJob, Error> {
        let Self {
            id,
            kind,
            namespace,
            attempts,
            max_attempts,
            timeout_seconds,
            handed_back_seconds,
            waited_seconds,
            payload,
            progress,
        } = self;
        let payload = RawValue::from_string(payload).map_err(|_| Error::RowInvalid {
            id,
            column: "payload",
            problem: "is not JSON that can be read",
        })?;
        let progress = progress.as_deref().map(serde_json::from_str).transpose().map_err(|_| Error::RowInvalid {
            id,
            column: "progress",
            problem: "is not JSON that can be read",
        })?;
        Ok(ClaimedJob {
            lease: Lease { id, token, since },
            kind,
            namespace,
            attempts: count(id, "attempts", attempts)?,
            max_attempts: count(id, "max_attempts", max_attempts)?,
            handed_back_for: seconds(handed_back_seconds),
            timeout: Duration::from_secs(count(id, "timeout_seconds", timeout_seconds)?.into()),
            waited: seconds(waited_seconds),
            payload,
            progress,
        })
    }
}

/// A negative or absurd number of seconds (a clock set back) counts as none.
fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}
