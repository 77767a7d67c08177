//! Work that keeps a core busy, off the runtime's threads and within a budget of memory.
//!
//! At most cores - 1 pieces (at least one) run at once in a process, so that heartbeats, probes and the other jobs
//! always find a core. Before a piece takes memory it reserves it; what doesn't fit now waits in line, first come first
//! served, and while it waits it can be cancelled or run out of time. What was fetched to be worked on has a share of
//! its own: a job that holds its source then waits only for jobs that already have all they need, never for one that
//! waits like itself.

use std::num::NonZero;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::{Attempt, Failure};

pub(crate) const MIB: u64 = 1024 * 1024;
/// What a permit of the two semaphores stands for.
const UNIT: u64 = 1024;
/// One part in so many is for sources, but at least the largest one.
const SOURCES_SHARE: u64 = 8;
const SOURCES_MIN: u64 = 32 * MIB;

/// How much memory jobs that work in memory (`resize_image`, `summarize_text`) may take in a process, all together. The
/// rest of the process takes some 100 MiB beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    mib: u32,
}

impl MemoryBudget {
    /// In MiB: less would not do for the largest text.
    pub const MIN_MIB: u32 = 128;
    /// In MiB: a tebibyte.
    pub const MAX_MIB: u32 = 1024 * 1024;

    /// Values beyond [`Self::MIN_MIB`] and [`Self::MAX_MIB`] are taken for these.
    pub fn from_mib(mib: u32) -> Self {
        Self { mib: mib.clamp(Self::MIN_MIB, Self::MAX_MIB) }
    }
}

impl Default for MemoryBudget {
    /// 384 MiB: what a container with 512 MiB can spare.
    fn default() -> Self {
        Self::from_mib(384)
    }
}

/// The process's cores and memory for such work. Clones share them.
#[derive(Clone)]
pub(crate) struct Pool {
    slots: Arc<Semaphore>,
    sources: Arc<Semaphore>,
    work: Arc<Semaphore>,
    work_bytes: u64,
}

/// A part of the budget, given back when dropped.
#[derive(Debug)]
pub(crate) struct Room(OwnedSemaphorePermit);

impl Pool {
    pub(crate) fn new(budget: MemoryBudget) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let bytes = u64::from(budget.mib) * MIB;
        let sources = (bytes / SOURCES_SHARE).max(SOURCES_MIN);
        let work_bytes = bytes - sources;
        let memory = |bytes: u64| Arc::new(Semaphore::new(units(bytes) as usize));
        Self {
            slots: Arc::new(Semaphore::new(cores.saturating_sub(1).max(1))),
            sources: memory(sources),
            work: memory(work_bytes),
            work_bytes,
        }
    }

    /// The most that [`Self::room`] can give.
    pub(crate) fn work_bytes(&self) -> u64 {
        self.work_bytes
    }

    /// Waits for room for what is fetched before work on it begins: at most 32 MiB.
    ///
    /// # Errors
    /// [`Failure::cancelled`] when the attempt was stopped first.
    pub(crate) async fn source_room(&self, attempt: &Attempt, bytes: u64) -> Result<Room, Failure> {
        acquire(&self.sources, attempt, units(bytes.min(SOURCES_MIN))).await.map(Room)
    }

    /// Waits for room to work in; more than [`Self::work_bytes`] is taken for that much.
    ///
    /// # Errors
    /// [`Failure::cancelled`] when the attempt was stopped first.
    pub(crate) async fn room(&self, attempt: &Attempt, bytes: u64) -> Result<Room, Failure> {
        acquire(&self.work, attempt, units(bytes.min(self.work_bytes))).await.map(Room)
    }

    /// Runs `work` on a blocking thread, once a slot is free. A panic in it goes on in the caller. If the caller's
    /// future is dropped, the work is told to stop and keeps its slot, and the rooms moved into it, until it has.
    ///
    /// # Errors
    /// What `work` returns, or [`Failure::cancelled`] when the attempt was stopped before a slot was free.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        attempt: &Attempt,
        work: impl FnOnce(&Stop) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let slot = acquire(&self.slots, attempt, 1).await?;
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
}

impl Room {
    /// Gives back all but so many bytes.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let surplus = self.0.num_permits().saturating_sub(units(bytes) as usize);
        drop(self.0.split(surplus));
    }
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

async fn acquire(from: &Arc<Semaphore>, attempt: &Attempt, permits: u32) -> Result<OwnedSemaphorePermit, Failure> {
    tokio::select! {
        biased;
        () = attempt.stopped() => Err(Failure::cancelled()),
        // none of them is ever closed
        permit = from.clone().acquire_many_owned(permits) => permit.map_err(|_| Failure::cancelled()),
    }
}

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::value::RawValue;
    use tokio::time::Instant;
    use uuid::Uuid;

    use super::*;

    fn attempt() -> Attempt {
        let deadline = Instant::now() + Duration::from_secs(60);
        Attempt::new(Uuid::now_v7(), None, (1, 1), RawValue::NULL.to_owned(), deadline, CancellationToken::new())
    }

    #[tokio::test]
    async fn what_does_not_fit_waits_its_turn_and_can_be_cancelled_meanwhile() {
        let pool = Pool::new(MemoryBudget::from_mib(0));
        assert_eq!(pool.work_bytes(), 96 * MIB);
        let (first, waits, behind) = (attempt(), attempt(), attempt());
        let mut held = pool.room(&first, 90 * MIB).await.unwrap();
        let mut waiting = Box::pin(pool.room(&waits, 90 * MIB));
        let mut small = Box::pin(pool.room(&behind, MIB));
        assert!(futures::poll!(&mut waiting).is_pending());
        assert!(futures::poll!(&mut small).is_pending(), "it would overtake a larger one for ever");
        waits.stop_token().cancel();
        assert_eq!(waiting.await.unwrap_err(), Failure::cancelled());
        drop(small.await.unwrap());
        held.shrink_to(MIB);
        drop(pool.room(&first, 95 * MIB).await.unwrap());
        drop(pool.source_room(&first, u64::MAX).await.unwrap());
        drop(held);
        drop(pool.room(&first, u64::MAX).await.unwrap());
    }
}
