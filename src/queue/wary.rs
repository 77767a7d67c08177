//! What a handle remembers of a wait that was too long: for a while it goes the other way at once.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For how long.
const WARY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Default)]
pub(super) struct Wary(Arc<Mutex<Option<Instant>>>);

impl Wary {
    pub(super) fn is_wary(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| Instant::now() < until)
    }

    pub(super) fn waited_too_long(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + WARY);
    }
}
