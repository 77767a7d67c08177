//! The attempts under way. Others tell them things here; the attempt itself decides what follows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::kinds::Attempt;
use crate::queue::{Heartbeat, Lease};

/// What an attempt has been told so far.
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

#[derive(Default)]
pub(super) struct Running {
    attempts: Mutex<HashMap<Lease, Entry>>,
}

struct Entry {
    orders: watch::Sender<Orders>,
    attempt: Arc<Attempt>,
}

/// An attempt's place among those under way, and its ear. Dropping it leaves.
pub(super) struct Place {
    running: Arc<Running>,
    lease: Lease,
    pub orders: watch::Receiver<Orders>,
}

impl Running {
    /// From here on the lease is renewed and the attempt is told of cancels.
    pub(super) fn enter(self: &Arc<Self>, lease: Lease, lease_until: Instant, attempt: Arc<Attempt>) -> Place {
        let (sender, orders) = watch::channel(Orders { lease_until, cancelled: None, lost: false, hand_back: None });
        self.lock().insert(lease, Entry { orders: sender, attempt });
        Place { running: self.clone(), lease, orders }
    }

    pub(super) fn leases(&self) -> Vec<Lease> {
        self.lock().keys().copied().collect()
    }

    /// Passes on what the database said of the leases that it was asked about. `renewed_until` is from before the
    /// question was sent; none if the question renews nothing.
    pub(super) fn tell(&self, asked: &[Lease], found: &[Heartbeat], renewed_until: Option<Instant>) {
        let found: HashMap<_, _> = found.iter().map(|found| ((found.id, found.token), found)).collect();
        let attempts = self.lock();
        for lease in asked {
            // It may have ended meanwhile.
            let Some(entry) = attempts.get(lease) else { continue };
            match found.get(&(lease.id(), lease.token())) {
                None => entry.tell(|orders| orders.lost = true),
                Some(Heartbeat { id: _, token: _, renewed, cancel_requested }) => entry.tell(|orders| {
                    if let (true, Some(until)) = (*renewed, renewed_until) {
                        orders.lease_until = until;
                    }
                    if *cancel_requested {
                        orders.cancelled.get_or_insert_with(Instant::now);
                    }
                }),
            }
        }
    }

    /// Tells all attempts that the worker shuts down.
    pub(super) fn hand_back(&self, order: HandBack) {
        self.lock().values().for_each(|entry| entry.tell(|orders| orders.hand_back = Some(order)));
    }

    pub(super) fn any_committed(&self) -> bool {
        self.lock().values().any(|entry| entry.attempt.is_committed())
    }

    /// Nothing panics while it holds this.
    fn lock(&self) -> MutexGuard<'_, HashMap<Lease, Entry>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// Wakes the attempt only when something has changed.
    fn tell(&self, change: impl FnOnce(&mut Orders)) {
        self.orders.send_if_modified(|orders| {
            let before = *orders;
            change(orders);
            before != *orders
        });
    }
}

impl Place {
    /// What it has been told so far.
    pub(super) fn orders_now(&self) -> Orders {
        *self.orders.borrow()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.running.lock().remove(&self.lease);
    }
}
