//! What a worker is made of, checked before it runs.

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;

use super::{Kind, Worker};
use crate::admin::{Health, Metrics};
use crate::kinds::Registry;
use crate::queue::Queue;

/// How a worker behaves; the command line fills it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// How many attempts run at once; at least 1. Of C slots for K kinds each kind has max(1, C / 4K) that no other kind
    /// may take, so that one slow kind never takes all; none when there are fewer slots than kinds.
    pub concurrency: usize,
    /// The most jobs that one statement claims or finishes, 1 to 1000 (more counts as 1000). Above 1, jobs of kinds that
    /// end fast are claimed before their slots are free: a tenth of a second's work, at most 2000 jobs in all, never one
    /// on its last attempt or that has lost two leases. What waits for 2 s is given back at no cost. At 1 nothing is prefetched:
    /// each job is claimed into a free slot and finished there, by statements of its own.
    pub batch: usize,
    /// The longest wait before an idle worker looks for due jobs unasked.
    pub poll: Duration,
    /// How long a shutdown may take. Attempts that have not ended a little before that are stopped and handed back;
    /// those past their point of no return have 10 s more.
    pub shutdown_grace: Duration,
    /// Claim these kinds only; all registered ones if there are none.
    pub kinds: Vec<String>,
    /// What `jobs.locked_by` and `.status.worker` say; need not be unique. At most 255 bytes are kept.
    pub name: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            concurrency: 32,
            batch: super::desk::BATCH,
            poll: Duration::from_secs(2),
            shutdown_grace: Duration::from_secs(30),
            kinds: Vec::new(),
            name: "worker".to_owned(),
        }
    }
}

/// The worker can't be built as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A kind to be claimed that no executor is registered for.
    #[error("kind {kind:?} has no executor; known: {}", known.join(", "))]
    UnknownKind { kind: String, known: Vec<&'static str> },
    #[error("a worker needs an executor: the registry is empty")]
    NoExecutor,
    #[error("a worker needs at least one slot: the concurrency is 0")]
    NoSlot,
    #[error("a worker claims at least one job at a time: the batch is 0")]
    NoBatch,
}

/// Collects what a worker needs; see [`Worker::builder`].
#[must_use]
pub struct Builder {
    queue: Queue,
    registry: Registry,
    settings: Settings,
    direct: Option<PgConnectOptions>,
    health: Health,
    metrics: Option<Metrics>,
}

impl Builder {
    /// All settings at once.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// How many attempts run at once; 32 unless told otherwise.
    pub fn concurrency(mut self, slots: usize) -> Self {
        self.settings.concurrency = slots;
        self
    }

    /// The most jobs that one statement claims or finishes; 1000 unless told otherwise. At 1 each job is claimed into a
    /// free slot and finished there by statements of its own, at up to as many connections as there are slots.
    pub fn batch(mut self, jobs: usize) -> Self {
        self.settings.batch = jobs;
        self
    }

    /// The longest wait before an idle worker looks for due jobs unasked; 2 s unless told otherwise.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.settings.poll = poll;
        self
    }

    /// How long a shutdown may take; 30 s unless told otherwise.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.settings.shutdown_grace = grace;
        self
    }

    /// Claim only these of the registered kinds.
    pub fn kinds(mut self, kinds: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.settings.kinds = kinds.into_iter().map(Into::into).collect();
        self
    }

    /// What rows and statuses call this worker.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = name.into();
        self
    }

    /// Hear of new jobs and of cancels at once, on a connection of its own. `database` must reach Postgres itself, not
    /// a transaction pooler. Without it the worker polls.
    pub fn listen(mut self, database: PgConnectOptions) -> Self {
        self.direct = Some(database);
        self
    }

    /// Where the worker reports whether its database answers and its loops turn.
    pub fn health(mut self, health: Health) -> Self {
        self.health = health;
        self
    }

    /// Where the worker counts; without it, in metrics of its own that nobody reads.
    pub fn metrics(mut self, metrics: Metrics) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// # Errors
    /// [`BuildError`] when there is nothing to run or nothing to run it in.
    pub fn build(self) -> Result<Worker, BuildError> {
        let Self { queue, registry, settings, direct, health, metrics } = self;
        if settings.concurrency == 0 {
            return Err(BuildError::NoSlot);
        }
        if settings.batch == 0 {
            return Err(BuildError::NoBatch);
        }
        check_kinds(&registry, &settings.kinds)?;
        let known = registry.kinds();
        let wanted = |kind: &&str| settings.kinds.is_empty() || settings.kinds.iter().any(|other| other == kind);
        let metrics = metrics.unwrap_or_else(|| Metrics::new(known.iter().copied()));
        let run =
            |name: &'static str| Some(Kind { name, executor: registry.get(name)?, metrics: metrics.of_kind(name) });
        let kinds = known.iter().copied().filter(wanted).filter_map(run).collect();
        Ok(Worker { queue, kinds, settings, direct, health, metrics })
    }
}

/// Whether a worker with these executors can claim these kinds.
///
/// # Errors
/// [`BuildError::NoExecutor`], [`BuildError::UnknownKind`].
pub fn check_kinds(registry: &Registry, kinds: &[String]) -> Result<(), BuildError> {
    let known = registry.kinds();
    if known.is_empty() {
        return Err(BuildError::NoExecutor);
    }
    match kinds.iter().find(|kind| !known.contains(&kind.as_str())) {
        Some(kind) => Err(BuildError::UnknownKind { kind: crate::text::cut(kind, 64).to_owned(), known }),
        None => Ok(()),
    }
}

impl Worker {
    /// A worker for this queue with these executors.
    pub fn builder(queue: Queue, registry: Registry) -> Builder {
        let (settings, health) = (Settings::default(), Health::new());
        Builder { queue, registry, settings, direct: None, health, metrics: None }
    }
}
