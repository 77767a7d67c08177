//! What a process that leads no more must not get past.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Lets writes through while this process leads. Clones are the same fence; it is shut at first.
#[derive(Debug, Clone, Default)]
pub(super) struct Fence(Arc<Mutex<Option<Instant>>>);

impl Fence {
    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, until: Instant) {
        *self.until() = Some(until);
    }

    pub(super) fn shut(&self) {
        *self.until() = None;
    }

    /// Until when this process may write.
    pub(super) fn end(&self) -> Option<Instant> {
        self.until().filter(|end| *end > Instant::now())
    }

    fn is_open(&self) -> bool {
        self.end().is_some()
    }
}

/// Reads pass, writes while the fence is open: a process that was stopped for a while and goes on in the middle of a
/// reconcile is held up here.
impl<B> tower::filter::Predicate<http::Request<B>> for Fence {
    type Request = http::Request<B>;

    fn check(&mut self, request: Self::Request) -> Result<Self::Request, tower::BoxError> {
        if request.method() == http::Method::GET || self.is_open() {
            Ok(request)
        } else {
            Err("this controller leads no more: not written".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_fence_is_open_until_its_time() {
        let fence = Fence::default();
        assert!(!fence.is_open(), "shut at first");
        fence.open(Instant::now() + HOUR);
        assert!(fence.is_open());
        fence.open(Instant::now());
        assert!(!fence.is_open(), "it shuts by itself");
        fence.open(Instant::now() + HOUR);
        fence.shut();
        assert!(!fence.is_open());
    }

    #[test]
    fn a_shut_fence_lets_reads_through_and_no_write() {
        let fence = Fence::default();
        let passes = |method| {
            let request = http::Request::builder().method(method).body(()).expect("a request");
            tower::filter::Predicate::check(&mut fence.clone(), request).is_ok()
        };
        assert!(passes("GET"));
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            assert!(!passes(method), "{method}");
        }
        fence.open(Instant::now() + HOUR);
        assert!(passes("PATCH"));
    }
}
