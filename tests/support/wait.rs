//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

/// How long a test waits for what has no limit of its own.
pub const PATIENCE: Duration = Duration::from_secs(45);

/// Looks until the answer is yes, at most for `limit`; then fails with what the last look saw.
pub async fn until<T>(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let started = Instant::now();
    loop {
        match look().await {
            Ok(found) => return found,
            Err(seen) => assert!(started.elapsed() < limit, "not within {limit:?}: {what}; last seen: {seen}"),
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

/// The same for a bare predicate.
pub async fn until_true(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> bool) {
    until(what, limit, async || if look().await { Ok(()) } else { Err("not yet".to_owned()) }).await;
}
