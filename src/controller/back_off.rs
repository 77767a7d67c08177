//! How long a resource waits after a failed reconcile: kube's requeues carry no count of their own.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::queue::ResourceRef;

const FIRST: Duration = Duration::from_millis(500);
const CAP: Duration = Duration::from_secs(60);

struct Failing {
    resource: ResourceRef,
    failures: u32,
    until: Instant,
}

/// Failures in a row, by resource.
#[derive(Default)]
pub(super) struct BackOff(Mutex<HashMap<Uuid, Failing>>);

impl BackOff {
    fn entries(&self) -> MutexGuard<'_, HashMap<Uuid, Failing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The count with this failure, and how long to wait: from half a second, doubling to a minute, with jitter.
    pub(super) fn failed(&self, resource: ResourceRef) -> (u32, Duration) {
        let mut entries = self.entries();
        let until = Instant::now();
        let entry = entries.entry(resource.uid).or_insert(Failing { resource, failures: 0, until });
        entry.failures = entry.failures.saturating_add(1);
        let ceiling = FIRST.saturating_mul(1 << (entry.failures - 1).min(7)).min(CAP);
        let delay = ceiling.mul_f64(rand::random_range(0.5..=1.0));
        entry.until = Instant::now() + delay;
        (entry.failures, delay)
    }

    pub(super) fn reset(&self, uid: Uuid) {
        self.entries().remove(&uid);
    }

    /// Whether it is too early for another try that nobody asked for.
    pub(super) fn is_waiting(&self, uid: Uuid) -> bool {
        self.entries().get(&uid).is_some_and(|failing| failing.until > Instant::now())
    }

    /// What these waited for is there again: they may try at once.
    pub(super) fn release(&self, which: impl Fn(&ResourceRef) -> bool) -> Vec<ResourceRef> {
        let mut entries = self.entries();
        entries.extract_if(|_, failing| which(&failing.resource)).map(|(_, failing)| failing.resource).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(n: u128) -> ResourceRef {
        ResourceRef { uid: Uuid::from_u128(n), namespace: "a".to_owned(), name: n.to_string() }
    }

    #[test]
    fn a_resource_waits_longer_each_time_up_to_a_minute_and_forgets_with_a_success() {
        let back_off = BackOff::default();
        let delays: Vec<_> = (0..20).map(|_| back_off.failed(resource(1)).1.as_secs_f64()).collect();
        assert!((0.25..=0.5).contains(&delays[0]) && (30.0..=60.0).contains(&delays[19]), "{delays:?}");
        assert!(back_off.failed(resource(2)).1.as_secs_f64() <= 0.5, "another resource has its own");
        assert!(back_off.is_waiting(Uuid::from_u128(1)));
        back_off.reset(Uuid::from_u128(1));
        assert!(!back_off.is_waiting(Uuid::from_u128(1)));
        assert_eq!(back_off.failed(resource(1)).0, 1);
        assert_eq!(back_off.release(|resource| resource.name == "2").len(), 1);
    }
}
