//! Work that keeps a core busy, off the runtime's threads.
//!
//! At most cores - 1 pieces (at least one) run at once in a process, so that heartbeats, probes and the other jobs
//! always find a core.

use std::num::NonZero;
use std::sync::{Arc, LazyLock};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::{Attempt, Failure};

static SLOTS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    Arc::new(Semaphore::new(cores.saturating_sub(1).max(1)))
});

/// Tells work on a blocking thread whether to go on. Looked at between stages, each of which is short.
#[derive(Clone)]
pub(crate) struct Stop(CancellationToken);

impl Stop {
    /// # Errors
    /// [`Failure::cancelled`] when the job was cancelled or its attempt is over.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.0.is_cancelled() { Err(Failure::cancelled()) } else { Ok(()) }
    }

    #[cfg(test)]
    pub(crate) fn told_by(token: CancellationToken) -> Self {
        Self(token)
    }

    #[cfg(test)]
    pub(crate) fn never() -> Self {
        Self(CancellationToken::new())
    }
}

/// Runs `work` on a blocking thread, once a slot is free. A panic in it goes on in the caller. If the caller's future
/// is dropped, the work is told to stop and keeps its slot until it has.
///
/// # Errors
/// What `work` returns, or [`Failure::cancelled`] when the attempt was stopped before a slot was free.
pub(crate) async fn run<T: Send + 'static>(
    attempt: &Attempt,
    work: impl FnOnce(&Stop) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let slot = tokio::select! {
        biased;
        () = attempt.stopped() => return Err(Failure::cancelled()),
        // the semaphore is never closed
        slot = SLOTS.clone().acquire_owned() => slot.map_err(|_| Failure::cancelled())?,
    };
    let token = attempt.stop_token().child_token();
    let _stop_when_dropped = token.clone().drop_guard();
    let done = tokio::task::spawn_blocking(move || {
        let _slot = slot;
        work(&Stop(token))
    });
    match done.await {
        Ok(result) => result,
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // only a runtime that is shutting down cancels a blocking task
            Err(_) => Err(Failure::cancelled()),
        },
    }
}
