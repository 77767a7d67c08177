//! What a job does: one [`Executor`] per kind, found by name in a [`Registry`].
//!
//! This module knows the outside world (mail, webhooks, pictures, text) and nothing of Postgres or Kubernetes. The
//! worker hands an [`Attempt`] to the executor of its kind and turns what comes back into the row's next state;
//! the controller uses [`validate`] alone, so that a payload no executor would take never becomes a row.
//!
//! A new kind is one file with an `Executor` and one line in [`Registry::builtin`] (and one in [`validate`], when
//! JobRequests of it are to be accepted).

mod cpu;
pub mod egress;
pub mod email;
pub mod image;
mod payload;
mod settings;
pub mod summary;
#[cfg(test)]
mod tests;
pub mod webhook;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use cpu::MemoryBudget;
pub use payload::PayloadError;
pub use settings::{KindSettings, SettingsError};

/// What a namespace is called for rows enqueued in SQL, which have none: no real namespace can be named so.
pub(crate) const NO_NAMESPACE: &str = "_sql";

/// What an attempt came to: the job's result (any JSON, kept whole in the row), or why there is none.
pub type Executed = Result<Value, Failure>;

/// Does the work of one kind.
pub trait Executor: Send + Sync + 'static {
    /// The name in `jobs.kind` and `spec.kind`: lower case letters, digits and `_`, at most 63.
    fn kind(&self) -> &'static str;

    /// Runs one attempt.
    ///
    /// The future may be dropped at any await (time limit, lost lease), so an effect that must not be cut in two
    /// belongs into one await. It should end with [`Failure::cancelled`] soon after [`Attempt::stopped`] resolves.
    /// A panic counts as a failed attempt. Work that keeps a core busy belongs on a blocking thread.
    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed>;
}

/// Why an attempt has no result. Messages are shown to users in `.status.lastError`: they name the field, the kind of
/// value and the remedy, and never hold a payload, a secret or more than a little of what a server said.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub(crate) cause: FailureCause,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) progress: Option<Value>,
}

/// What kind of failure it was, which decides whether the job is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCause {
    /// Trying again can't help: the job ends.
    Permanent,
    /// May pass: tried again after the back-off, at the cost of an attempt.
    Passing,
    /// The other side asked to come back no sooner than after this time. Handed back without cost, within bounds.
    RetryAfter(Duration),
    /// The executor stopped because it was told to.
    Cancelled,
}

impl Failure {
    /// Trying again can't help. `reason` is a stable CamelCase word from a closed list, `message` a sentence.
    pub fn permanent(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(FailureCause::Permanent, reason, message)
    }

    /// It may work later.
    pub fn passing(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(FailureCause::Passing, reason, message)
    }

    /// The other side named a time before which it wants no further call.
    pub fn retry_after(delay: Duration, reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(FailureCause::RetryAfter(delay), reason, message)
    }

    /// Stopped as told, nothing left half done.
    pub fn cancelled() -> Self {
        Self::new(FailureCause::Cancelled, "Cancelled", "stopped because the job was cancelled")
    }

    /// What the next attempt should know, kept in the row (for instance which recipients have got the mail).
    pub fn with_progress(mut self, progress: Value) -> Self {
        self.progress = Some(progress);
        self
    }

    fn new(cause: FailureCause, reason: &'static str, message: impl Into<String>) -> Self {
        Self { cause, reason, message: message.into(), progress: None }
    }

    pub fn cause(&self) -> FailureCause {
        self.cause
    }

    pub fn reason(&self) -> &'static str {
        self.reason
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn progress(&self) -> Option<&Value> {
        self.progress.as_ref()
    }
}

/// One attempt as its executor sees it.
#[derive(Debug)]
pub struct Attempt {
    /// The row's id: stable over all attempts, so a delivery or message id may be made from it.
    pub job_id: Uuid,
    /// The namespace of the resource; none for a row enqueued in SQL.
    pub namespace: Option<String>,
    /// 1 for the first.
    pub number: u32,
    pub max_attempts: u32,
    /// What an earlier attempt left by [`Failure::with_progress`].
    pub progress: Option<Value>,
    payload: Box<RawValue>,
    deadline: Instant,
    stop: CancellationToken,
    committed: AtomicBool,
}

impl Attempt {
    /// `deadline` is the attempt's time limit on the monotonic clock; `stop` tells a cancelled job's executor to end.
    pub fn new(
        job_id: Uuid,
        namespace: Option<String>,
        (number, max_attempts): (u32, u32),
        payload: Box<RawValue>,
        deadline: Instant,
        stop: CancellationToken,
    ) -> Self {
        let committed = AtomicBool::new(false);
        Self { job_id, namespace, number, max_attempts, progress: None, payload, deadline, stop, committed }
    }

    /// The payload as the executor's own type.
    ///
    /// # Errors
    /// Permanent `PayloadInvalid` when the row holds something else: the row came from SQL or another version.
    pub fn payload<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_str(self.payload.get())
            .map_err(|e| Failure::permanent("PayloadInvalid", describe_json_error(&e)))
    }

    /// The payload read and checked by `parse`, as at acceptance.
    pub(crate) fn checked<T>(&self, parse: impl FnOnce(&Value) -> Result<T, PayloadError>) -> Result<T, Failure> {
        Ok(parse(&self.payload()?)?)
    }

    /// The payload's JSON text with the digits of its numbers as stored.
    pub fn payload_json(&self) -> &RawValue {
        &self.payload
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What is left of the attempt's time.
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// When an executor should give up by itself: a little before the deadline, so that it can still say what it was
    /// waiting for and keep its progress.
    pub fn soft_deadline(&self) -> Instant {
        self.deadline - (self.remaining() / 20).min(Duration::from_millis(250))
    }

    /// Resolves when the job was cancelled or the worker can't keep it.
    pub async fn stopped(&self) {
        self.stop.cancelled().await;
    }

    /// Ends the attempt here when it was told to stop: for use between stages.
    ///
    /// # Errors
    /// [`Failure::cancelled`] when it was.
    pub fn checkpoint(&self) -> Result<(), Failure> {
        if self.stop.is_cancelled() { Err(Failure::cancelled()) } else { Ok(()) }
    }

    /// Runs `work` until it is done or the attempt is told to stop, whichever comes first.
    ///
    /// # Errors
    /// Those of `work`, or [`Failure::cancelled`] when it was dropped at its next await.
    pub async fn unless_stopped<T>(&self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.stopped() => Err(Failure::cancelled()),
            done = work => done,
        }
    }

    /// For code on a blocking thread that has to look at it between its own steps.
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// From here on the effect may have happened and doing it again would show (mail: DATA). The worker no longer
    /// hands the attempt back without cost, and a cancel no longer cuts it short.
    pub fn commit(&self) {
        self.committed.store(true, Ordering::SeqCst);
    }

    pub fn is_committed(&self) -> bool {
        self.committed.load(Ordering::SeqCst)
    }
}

/// serde's message without the value in it: "invalid type: string "secret…", expected u32" must not reach a status.
fn describe_json_error(error: &serde_json::Error) -> String {
    let what = match error.classify() {
        serde_json::error::Category::Syntax => "is not JSON that can be read (nesting over 128 levels counts as such)",
        serde_json::error::Category::Eof => "ends too early",
        serde_json::error::Category::Io => "could not be read",
        serde_json::error::Category::Data => "lacks a required field or has one of the wrong type",
    };
    format!("payload {what}, at column {}", error.column())
}

/// Whether an executor of this kind would take the payload. Pure; kinds that are not built in are taken as they are.
///
/// # Errors
/// The first field that is wrong, and what would be right, without any value.
pub fn validate(kind: &str, payload: &Value) -> Result<(), PayloadError> {
    match kind {
        email::KIND => email::validate(payload),
        image::KIND => image::validate(payload),
        summary::KIND => summary::validate(payload),
        webhook::KIND => webhook::validate(payload),
        _ => Ok(()),
    }
}

/// The executors of a worker, by kind.
#[derive(Clone, Default)]
pub struct Registry {
    by_kind: BTreeMap<&'static str, Arc<dyn Executor>>,
}

impl Registry {
    pub fn new() -> Self {
        Self::default()
    }

    /// The four kinds that come with JobRequest.
    ///
    /// # Errors
    /// When a setting can't be used: certificates that can't be read, no TLS provider.
    pub fn builtin(settings: &KindSettings) -> Result<Self, SettingsError> {
        let KindSettings {
            egress,
            origin_limit,
            smtp,
            object_store,
            webhook_masters,
            memory_budget,
            extra_roots,
            resolver,
        } = settings.clone();
        let extra_roots = extra_roots.as_deref();
        let egress = egress::Egress::new(egress, origin_limit, extra_roots, resolver)?;
        let pool = cpu::Pool::new(memory_budget);
        Ok(Self::new()
            .with(email::SendEmail::new(smtp, extra_roots)?)
            .with(image::ResizeImage::new(egress.clone(), object_store, pool.clone()))
            .with(summary::SummarizeText::new(pool))
            .with(webhook::WebhookDelivery::new(egress, webhook_masters)))
    }

    /// Adds an executor; one registered before for the same kind is replaced.
    #[must_use]
    pub fn with(mut self, executor: impl Executor) -> Self {
        self.by_kind.insert(executor.kind(), Arc::new(executor));
        self
    }

    pub fn get(&self, kind: &str) -> Option<Arc<dyn Executor>> {
        self.by_kind.get(kind).cloned()
    }

    /// All registered kinds, sorted.
    pub fn kinds(&self) -> Vec<&'static str> {
        self.by_kind.keys().copied().collect()
    }
}
