//! The queue: Postgres, and the only code that writes `jobs` and the tables around it.
//!
//! A job's life is a walk through [`Status`](crate::job::Status); each step is one operation here, one statement or
//! short transaction, whose WHERE carries its guard:
//!
//! | operation | from | to | guard |
//! |---|---|---|---|
//! | [`Queue::enqueue`], [`Queue::enqueue_many`] | - | queued | one row per resource uid and per live key |
//! | [`Queue::fetch_next`] | queued, retrying | running | due, not suspended, kind known; row locks skipped |
//! | [`Queue::mark_succeeded`] | running | succeeded | the claim's token |
//! | [`Queue::mark_failed_or_retry`] | running | retrying, queued, failed_permanent, cancelled | the claim's token |
//! | [`Queue::finalize_cancelled`] | running | cancelled | the claim's token and `cancel_requested` |
//! | [`Queue::request_cancel`] | queued, retrying | cancelled | the state |
//! | | running | running, told | the state |
//! | [`Queue::recover_stale`] | running | as a failure | lease over, under the row's lock |
//! | [`Queue::retry`] | failed_permanent, cancelled | queued | the state, the mark not used before |
//!
//! What follows a failure is decided by [`crate::job::decide`] and nowhere else. Only the database's clock decides:
//! durations go in, times come out. A finish that finds no row under its token is [`Finish::Lost`], a value: the lease
//! was over and somebody else owns the job now.
//!
//! Every operation has a time limit and may be repeated after an error; docs of each say what a repeat does.

mod cancel;
mod claim;
mod claimed;
mod connections;
mod enqueue;
mod enqueue_many;
mod error;
mod finish;
mod finish_many;
mod inspect;
mod installs;
mod lanes;
mod listen;
mod notify;
mod orphans;
mod payload;
mod purge;
mod rescue;
mod resources;
mod row;
mod schema;
mod wary;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

pub use cancel::{CancelOutcome, RetryOutcome};
pub use claim::{ClaimError, ClaimTicket, Heartbeat};
pub use claimed::{ClaimedJob, Lease};
pub use enqueue::{EnqueueOutcome, NewJob, Owner};
pub use enqueue_many::ENQUEUE_CHUNK;
pub use error::{Error, Result};
pub use finish::{AttemptEnd, AttemptFailure, Finish, Unfinished};
pub use inspect::{KindDepth, ListFilter, Page};
pub use installs::Binding;
pub use lanes::{Lane, LaneHead, Mark, Payloads, SurveyFrom, Want};
pub use listen::Listener;
pub use notify::Channel;
pub use payload::{PAYLOAD_MAX_BYTES, PAYLOAD_MAX_DEPTH, check_payload};
pub use purge::Purged;
pub use rescue::Rescued;
pub use resources::{Held, Release, ResourceRef, SpecEdit};
pub use schema::{SchemaState, migrate};

use crate::job::RetryPolicy;
use connections::Connections;
use wary::Wary;

/// How a queue behaves; the command line fills it.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whose rows and keys these are when several installs share a database.
    pub install: String,
    /// How long a claim holds without a heartbeat; whole seconds, at least 1.
    pub lease: Duration,
    pub retry: RetryPolicy,
    /// How long a terminal row is kept.
    pub retention: Duration,
    /// How long a succeeded row's key is kept after the row; none for ever.
    pub key_retention: Option<Duration>,
    /// Limit of one operation.
    pub time_limit: Duration,
    pub max_connections: u32,
    /// The database is reached through a transaction pooler (PgBouncer): nothing may stay on a connection between two
    /// transactions, so each statement costs more round trips. What needs a session ([`migrate`], [`Listener`]) is given
    /// a way to Postgres itself.
    pub transaction_pooler: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            install: "default".to_owned(),
            lease: Duration::from_secs(30),
            retry: RetryPolicy::default(),
            retention: Duration::from_secs(7 * 24 * 60 * 60),
            key_retention: None,
            time_limit: Duration::from_secs(10),
            max_connections: 10,
            transaction_pooler: false,
        }
    }
}

/// A handle to the queue; clones share their connections.
#[derive(Clone)]
pub struct Queue {
    pool: Connections,
    settings: Arc<Settings>,
    notifier: Arc<notify::Notifier>,
    /// Batches of ends lock their rows first.
    ends_wary: Wary,
    /// Large claims don't take turns.
    claims_wary: Wary,
    purged_to: Arc<Mutex<purge::Places>>,
}

impl Queue {
    /// A queue on this database. Connects when first used, so it may be made while the database is away.
    pub fn new(database: PgConnectOptions, settings: Settings) -> Self {
        // Poolers refuse settings that they don't know how to carry from server to server.
        let database = if settings.transaction_pooler { database.extra_float_digits(None) } else { database };
        let pool = PgPoolOptions::new()
            .max_connections(settings.max_connections)
            .acquire_timeout(settings.time_limit.min(Duration::from_secs(5)))
            .test_before_acquire(false)
            // A ping on each acquire would double the round trips; one that sat idle may have died unseen.
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for < Duration::from_secs(5) {
                        return Ok(true);
                    }
                    let ping = sqlx::raw_sql("SELECT 1").execute(connection);
                    Ok(tokio::time::timeout(Duration::from_secs(2), ping).await.is_ok_and(|answer| answer.is_ok()))
                })
            })
            .connect_lazy_with(database);
        let pool = Connections::new(pool, settings.transaction_pooler);
        let notifier = Arc::new(notify::Notifier::spawn(pool.clone(), settings.time_limit));
        Self {
            pool,
            settings: Arc::new(settings),
            notifier,
            ends_wary: Wary::default(),
            claims_wary: Wary::default(),
            purged_to: Arc::default(),
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The pool, for what is not an operation on jobs (a health check, a test's own table). Its statements are prepared
    /// and kept: not for use through a transaction pooler.
    pub fn pool(&self) -> &PgPool {
        self.pool.pool()
    }

    fn notify(&self, channel: Channel) {
        self.notifier.notify(channel);
    }

    /// Nobody looks at the changes of a row that no resource stands for.
    fn notify_changed<'a>(&self, jobs: impl IntoIterator<Item = &'a ClaimedJob>) {
        if jobs.into_iter().any(|job| job.owned) {
            self.notify(Channel::Changed);
        }
    }

    /// An operation with its time limit. A dropped query may still take effect on the server: every operation is
    /// safe to repeat.
    async fn bounded<T>(&self, operation: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.settings.time_limit;
        tokio::time::timeout(limit, operation).await.unwrap_or(Err(Error::Timeout { seconds: limit.as_secs() }))
    }

    fn lease_seconds(&self) -> i32 {
        i32::try_from(self.settings.lease.as_secs()).unwrap_or(86_400).clamp(1, 86_400)
    }
}
