//! The jobs that this worker holds: prefetched, under way, or ended and not yet written. Others tell them things here;
//! the attempt itself decides what follows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::execute::Limits;
use crate::kinds::Attempt;
use crate::queue::{ClaimedJob, Heartbeat, Lease};

/// What a held job has been told so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Orders {
    /// Until when its lease holds, if nothing renews it.
    pub lease_until: Instant,
    /// Since when it is known that the job was asked to stop.
    pub cancelled: Option<Instant>,
    /// The row is somebody else's now.
    pub lost: bool,
    pub hand_back: Option<HandBack>,
}

/// The worker shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HandBack {
    /// The attempt has until then to end by itself.
    pub cut_at: Instant,
    /// An attempt past its point of no return has until then.
    pub give_up_at: Instant,
}

/// A claimed job and until when its lease holds.
pub(super) struct Claim {
    pub job: ClaimedJob,
    pub lease_until: Instant,
}

/// One job that this worker holds.
pub(super) struct Run {
    pub lease: Lease,
    /// Which of the worker's kinds.
    pub kind: usize,
    pub number: u32,
    /// It has lost two leases: it may be what kills processes.
    pub alone: bool,
    place: usize,
    state: Mutex<State>,
    told: Notify,
}

struct State {
    /// Whoever takes it ends the attempt: its runner, or the watch when that does not yield.
    job: Option<ClaimedJob>,
    orders: Orders,
    /// From the attempt's start to its end.
    started: Option<Arc<Started>>,
}

/// An attempt under way.
pub(super) struct Started {
    pub at: Instant,
    pub attempt: Attempt,
    pub limits: Limits,
}

impl Orders {
    /// An attempt is told to stop, and one that has not started must not.
    pub(super) fn stop(&self) -> bool {
        self.cancelled.is_some() || self.lost || self.hand_back.is_some()
    }
}

impl Run {
    pub(super) fn orders(&self) -> Orders {
        lock(&self.state).orders
    }

    /// Resolves when there are new orders, or were some that nobody has waited for.
    pub(super) async fn told(&self) {
        self.told.notified().await;
    }

    pub(super) fn take_job(&self) -> Option<ClaimedJob> {
        lock(&self.state).job.take()
    }

    /// The attempt begins; the job is kept for whoever ends it. It comes back when it has been told to stop since the
    /// last look.
    pub(super) fn start(&self, job: ClaimedJob, started: Started) -> Result<Arc<Started>, Box<ClaimedJob>> {
        let started = Arc::new(started);
        let mut state = lock(&self.state);
        if state.orders.stop() {
            return Err(Box::new(job));
        }
        state.job = Some(job);
        state.started = Some(started.clone());
        Ok(started)
    }

    pub(super) fn started(&self) -> Option<Arc<Started>> {
        lock(&self.state).started.clone()
    }

    /// The attempt has ended: the claim, unless somebody else has ended it.
    pub(super) fn ended(&self) -> Option<ClaimedJob> {
        let mut state = lock(&self.state);
        // The payload need not wait for the write of its end.
        state.started = None;
        state.job.take()
    }

    /// Wakes the attempt only when something has changed. True if it must not start any more, and has not.
    fn tell(&self, change: impl FnOnce(&mut Orders)) -> bool {
        let mut state = lock(&self.state);
        let before = state.orders;
        change(&mut state.orders);
        if before == state.orders {
            return false;
        }
        let stop = state.orders.stop();
        match &state.started {
            Some(started) => {
                if stop {
                    started.attempt.stop_token().cancel();
                }
                drop(state);
                self.told.notify_one();
                false
            }
            None => stop,
        }
    }
}

#[derive(Default)]
pub(super) struct Running {
    held: Mutex<Held>,
    count: AtomicUsize,
    emptied: Notify,
}

#[derive(Default)]
struct Held {
    runs: Vec<Option<Arc<Run>>>,
    free: Vec<usize>,
}

impl Running {
    /// From here on the leases are renewed and the jobs told of cancels. `kind_of` says which of the worker's kinds it
    /// is.
    pub(super) fn enter(&self, claims: Vec<Claim>, kind_of: impl Fn(&str) -> usize) -> Vec<Arc<Run>> {
        let mut held = lock(&self.held);
        let Held { runs, free } = &mut *held;
        self.count.fetch_add(claims.len(), Ordering::Relaxed);
        let enter = |Claim { job, lease_until }| {
            let place = free.pop().unwrap_or_else(|| {
                runs.push(None);
                runs.len() - 1
            });
            let run = Arc::new(Run {
                lease: job.lease(),
                kind: kind_of(job.kind()),
                number: job.attempt(),
                alone: job.lost_leases() >= 2,
                place,
                told: Notify::new(),
                state: Mutex::new(State {
                    job: Some(job),
                    orders: Orders { lease_until, cancelled: None, lost: false, hand_back: None },
                    started: None,
                }),
            });
            runs[place] = Some(run.clone());
            run
        };
        claims.into_iter().map(enter).collect()
    }

    /// What has become of these is written, or nobody's business any more.
    pub(super) fn leave<'a>(&self, runs: impl IntoIterator<Item = &'a Run>) {
        let mut held = lock(&self.held);
        for run in runs {
            // Its place may be another's by now.
            if held.runs[run.place].take_if(|held| std::ptr::eq(Arc::as_ptr(held), run)).is_some() {
                held.free.push(run.place);
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
        if self.len() == 0 {
            self.emptied.notify_waiters();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Resolves when none is held.
    pub(super) async fn emptied(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.len() == 0 {
                return;
            }
            emptied.await;
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Run>> {
        lock(&self.held).runs.iter().flatten().cloned().collect()
    }

    /// Passes on what the database said of the leases that it was asked about. `renewed_until` is from before the
    /// question was sent; none if the question renews nothing. True if a job that has not started must not start.
    pub(super) fn tell(asked: &[Arc<Run>], found: &[Heartbeat], renewed_until: Option<Instant>) -> bool {
        let found: HashMap<_, _> = found.iter().map(|found| ((found.id, found.token), found)).collect();
        let mut stopped = false;
        for run in asked {
            stopped |= match found.get(&(run.lease.id(), run.lease.token())) {
                // It may have ended meanwhile; then nobody listens.
                None => run.tell(|orders| orders.lost = true),
                Some(Heartbeat { id: _, token: _, renewed, cancel_requested }) => run.tell(|orders| {
                    if let (true, Some(until)) = (*renewed, renewed_until) {
                        orders.lease_until = until;
                    }
                    if *cancel_requested {
                        orders.cancelled.get_or_insert_with(Instant::now);
                    }
                }),
            };
        }
        stopped
    }

    /// Tells all attempts that the worker shuts down.
    pub(super) fn hand_back(&self, order: HandBack) {
        for run in self.all() {
            run.tell(|orders| orders.hand_back = Some(order));
        }
    }

    pub(super) fn any_committed(&self) -> bool {
        self.all().iter().any(|run| run.started().is_some_and(|started| started.attempt.is_committed()))
    }
}

/// Nothing panics while it holds one of these.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
