//! Jobs that may end before anybody looks: one that ends within a moment shows its end only.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

/// For how long a new job's state is not shown unless it has ended: two writes saved for each small job.
pub(super) const YOUNG: Duration = Duration::from_millis(100);

/// When resources were enqueued, for as long as it matters.
#[derive(Default)]
pub(super) struct Young(Mutex<HashMap<Uuid, Instant>>);

impl Young {
    fn entries(&self) -> MutexGuard<'_, HashMap<Uuid, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn born(&self, uid: Uuid) {
        self.entries().insert(uid, Instant::now());
    }

    pub(super) fn forget(&self, uid: Uuid) {
        self.entries().remove(&uid);
    }

    /// What is left of its youth.
    pub(super) fn left(&self, uid: Uuid) -> Option<Duration> {
        let mut entries = self.entries();
        let left = YOUNG.checked_sub(entries.get(&uid)?.elapsed()).filter(|left| !left.is_zero());
        if left.is_none() {
            entries.remove(&uid);
        }
        left
    }
}
