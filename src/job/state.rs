//! A job as a value: its state is a sum type, so that a retrying job without an error or a running one without a
//! worker can't be written down.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

/// The name of a state, as in `jobs.status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Queued,
    Running,
    Retrying,
    Succeeded,
    FailedPermanent,
    Cancelled,
}

impl Status {
    pub const ALL: [Self; 6] =
        [Self::Queued, Self::Running, Self::Retrying, Self::Succeeded, Self::FailedPermanent, Self::Cancelled];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Retrying => "retrying",
            Self::Succeeded => "succeeded",
            Self::FailedPermanent => "failed_permanent",
            Self::Cancelled => "cancelled",
        }
    }

    /// Waits for a worker.
    pub fn is_waiting(self) -> bool {
        match self {
            Self::Queued | Self::Retrying => true,
            Self::Running | Self::Succeeded | Self::FailedPermanent | Self::Cancelled => false,
        }
    }

    /// Never changes again, an explicit retry aside.
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Succeeded | Self::FailedPermanent | Self::Cancelled => true,
            Self::Queued | Self::Running | Self::Retrying => false,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The word is none of the six states.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a status is one of queued, running, retrying, succeeded, failed_permanent, cancelled")]
pub struct UnknownStatus;

impl FromStr for Status {
    type Err = UnknownStatus;

    fn from_str(s: &str) -> Result<Self, UnknownStatus> {
        Self::ALL.into_iter().find(|status| status.as_str() == s).ok_or(UnknownStatus)
    }
}

/// Where a job stands. Times are the database's.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum JobState {
    /// Waits for its first attempt (or for one that was handed back before any had failed).
    Queued {
        run_at: DateTime<Utc>,
    },
    /// A worker holds the lease.
    Running {
        worker: String,
        since: DateTime<Utc>,
        cancel_requested: bool,
    },
    /// Waits for another attempt.
    Retrying {
        run_at: DateTime<Utc>,
        error: String,
    },
    Succeeded {
        at: DateTime<Utc>,
        result: Value,
    },
    FailedPermanent {
        at: DateTime<Utc>,
        error: String,
    },
    Cancelled {
        at: DateTime<Utc>,
    },
}

impl JobState {
    pub fn status(&self) -> Status {
        match self {
            Self::Queued { .. } => Status::Queued,
            Self::Running { .. } => Status::Running,
            Self::Retrying { .. } => Status::Retrying,
            Self::Succeeded { .. } => Status::Succeeded,
            Self::FailedPermanent { .. } => Status::FailedPermanent,
            Self::Cancelled { .. } => Status::Cancelled,
        }
    }
}

/// A whole job, parsed from its row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    pub id: Uuid,
    pub kind: String,
    #[serde(flatten)]
    pub state: JobState,
    pub attempts: u32,
    pub max_attempts: u32,
    pub priority: i16,
    pub suspended: bool,
    pub timeout_seconds: u32,
    pub idempotency_key: Option<String>,
    pub namespace: Option<String>,
    pub install: String,
    /// Newest attempt's error, whatever came after it.
    pub last_error: Option<String>,
    pub run_at: DateTime<Utc>,
    /// As the spec has it; `run_at` moves with each back-off.
    pub wanted_run_at: Option<DateTime<Utc>>,
    /// Start and end of the newest attempt.
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
    /// Who ran the newest attempt.
    pub worker: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// Raised by each change of the row.
    pub revision: i64,
    /// The newest explicit retry's mark.
    pub last_retry: Option<String>,
    /// Ended attempts, oldest first, at most the last 20.
    pub history: Vec<PastAttempt>,
}

/// One attempt that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastAttempt {
    /// 1 for the first. A handed-back claim and its successor share a number.
    pub number: u32,
    pub worker: Option<String>,
    pub from: Option<DateTime<Utc>>,
    pub to: DateTime<Utc>,
    pub outcome: Outcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Succeeded,
    Failed,
    HandedBack,
    Cancelled,
    LeaseLost,
}

impl Outcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::HandedBack => "handed_back",
            Self::Cancelled => "cancelled",
            Self::LeaseLost => "lease_lost",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_reads_back_as_written() {
        for status in Status::ALL {
            assert_eq!(status.as_str().parse(), Ok(status));
        }
        assert_eq!("Queued".parse::<Status>(), Err(UnknownStatus));
    }

    #[test]
    fn a_status_is_waiting_running_or_terminal() {
        for status in Status::ALL {
            let is = [status.is_waiting(), status == Status::Running, status.is_terminal()];
            assert_eq!(is.iter().filter(|x| **x).count(), 1, "{status}");
        }
    }
}
