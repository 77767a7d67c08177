//! How long a resource waits after a failed reconcile: kube's requeues carry no count of their own.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::queue::ResourceRef;

const FIRST: Duration = Duration::from_millis(500);
const CAP: Duration = Duration::from_secs(60);
/// The longest wait when it is the API server that takes no writes: it says nothing when it takes them again.
const SERVERS_CAP: Duration = Duration::from_secs(3);
/// So many tries a second that may be in vain are borne: with more resources each waits longer, up to the minute.
const TRIES: u32 = 20;
/// The shortest time between two releases of all, and how long one that failed in spite of it takes part in no other.
const RELEASE: Duration = Duration::from_secs(3);
const STUBBORN: Duration = Duration::from_secs(60);

/// Whose fault a failure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The API server's: what holds up one resource holds up all, and ends for all at once.
    Servers,
    /// The resource's own, or nobody knows.
    Own,
}

struct Failing {
    resource: ResourceRef,
    fault: Fault,
    failures: u32,
    until: Instant,
    /// When it was last tried because another one had succeeded.
    released: Option<Instant>,
}

#[derive(Default)]
struct Entries {
    failing: HashMap<Uuid, Failing>,
    /// How many of them wait for the API server.
    for_server: u32,
    released: Option<Instant>,
}

/// Failures in a row, by resource.
#[derive(Default)]
pub(super) struct BackOff(Mutex<Entries>);

impl Entries {
    fn remove(&mut self, uid: Uuid) -> Option<Failing> {
        let known = self.failing.remove(&uid)?;
        self.for_server -= u32::from(known.fault == Fault::Servers);
        Some(known)
    }
}

impl BackOff {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The count with this failure, and how long to wait: from half a second, doubling, with jitter, to three seconds
    /// (of few resources that wait for the API server) or a minute.
    pub(super) fn failed(&self, resource: ResourceRef, fault: Fault) -> (u32, Duration) {
        let entries = &mut *self.entries();
        let before = entries.remove(resource.uid);
        entries.for_server += u32::from(fault == Fault::Servers);
        let failures = before.as_ref().map_or(0, |before| before.failures).saturating_add(1);
        let cap = match fault {
            Fault::Servers => (Duration::from_secs(1) * entries.for_server / TRIES).clamp(SERVERS_CAP, CAP),
            Fault::Own => CAP,
        };
        let delay = FIRST.saturating_mul(1 << (failures - 1).min(7)).min(cap).mul_f64(rand::random_range(0.5..=1.0));
        let (until, released) = (Instant::now() + delay, before.and_then(|before| before.released));
        entries.failing.insert(resource.uid, Failing { resource, fault, failures, until, released });
        (failures, delay)
    }

    /// It succeeded. If it had waited for the API server, so may the others, and are handed out.
    pub(super) fn succeeded(&self, uid: Uuid, now: Instant) -> Vec<ResourceRef> {
        let entries = &mut *self.entries();
        let waited = entries.remove(uid).is_some_and(|known| known.fault == Fault::Servers);
        if !waited || entries.released.is_some_and(|last| now.saturating_duration_since(last) < RELEASE) {
            return Vec::new();
        }
        entries.released = Some(now);
        let is_due = |failing: &&mut Failing| {
            let lately = failing.released.is_some_and(|last| now.saturating_duration_since(last) < STUBBORN);
            failing.fault == Fault::Servers && !lately
        };
        let due = entries.failing.values_mut().filter(is_due);
        due.map(|failing| {
            (failing.until, failing.released) = (now, Some(now));
            failing.resource.clone()
        })
        .collect()
    }

    /// Whether it is too early for another try that nobody asked for.
    pub(super) fn is_waiting(&self, uid: Uuid) -> bool {
        self.entries().failing.get(&uid).is_some_and(|failing| failing.until > Instant::now())
    }

    /// What these waited for is there again: they may try at once.
    pub(super) fn release(&self, which: impl Fn(&ResourceRef) -> bool) -> Vec<ResourceRef> {
        let entries = &mut *self.entries();
        let released: Vec<Failing> =
            entries.failing.extract_if(|_, failing| which(&failing.resource)).map(|(_, failing)| failing).collect();
        let for_server = released.iter().filter(|failing| failing.fault == Fault::Servers).count();
        entries.for_server -= u32::try_from(for_server).unwrap_or(entries.for_server);
        released.into_iter().map(|failing| failing.resource).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(n: u128) -> ResourceRef {
        ResourceRef { uid: Uuid::from_u128(n), namespace: "a".to_owned(), name: n.to_string() }
    }

    fn names(mut resources: Vec<ResourceRef>) -> Vec<String> {
        resources.sort_by_key(|resource| resource.uid);
        resources.into_iter().map(|resource| resource.name).collect()
    }

    fn fail(back_off: &BackOff, n: u128, fault: Fault, times: usize) -> f64 {
        (0..times).map(|_| back_off.failed(resource(n), fault).1.as_secs_f64()).last().expect("some")
    }

    #[test]
    fn a_resource_waits_longer_each_time_up_to_a_minute_and_forgets_with_a_success() {
        let back_off = BackOff::default();
        assert!((0.25..=0.5).contains(&fail(&back_off, 1, Fault::Own, 1)));
        assert!((30.0..=60.0).contains(&fail(&back_off, 1, Fault::Own, 20)));
        assert!(back_off.failed(resource(2), Fault::Own).1.as_secs_f64() <= 0.5, "another resource has its own");
        assert!(back_off.is_waiting(Uuid::from_u128(1)));
        assert_eq!(back_off.succeeded(Uuid::from_u128(1), Instant::now()), []);
        assert!(!back_off.is_waiting(Uuid::from_u128(1)));
        assert_eq!(back_off.failed(resource(1), Fault::Own).0, 1);
        assert_eq!(names(back_off.release(|resource| resource.name == "2")), ["2"]);
    }

    #[test]
    fn few_that_wait_for_the_server_try_every_three_seconds_and_many_so_that_it_bears_them() {
        let back_off = BackOff::default();
        assert!((1.5..=3.0).contains(&fail(&back_off, 1, Fault::Servers, 20)));
        for n in 2..=600 {
            back_off.failed(resource(n), Fault::Servers);
        }
        assert!((15.0..=30.0).contains(&fail(&back_off, 1, Fault::Servers, 1)), "20 tries a second");
        for n in 601..=5000 {
            back_off.failed(resource(n), Fault::Servers);
        }
        assert!((30.0..=60.0).contains(&fail(&back_off, 1, Fault::Servers, 1)));
        drop(back_off.release(|resource| resource.name != "1"));
        assert!((1.5..=3.0).contains(&fail(&back_off, 1, Fault::Servers, 1)), "the others are counted no more");
    }

    #[test]
    fn the_first_that_gets_through_to_the_server_lets_the_others_try() {
        let (back_off, now) = (BackOff::default(), Instant::now());
        for n in 1..=4 {
            fail(&back_off, n, Fault::Servers, 5);
        }
        fail(&back_off, 5, Fault::Own, 5);
        assert_eq!(back_off.succeeded(Uuid::from_u128(9), now), [], "one that never failed says nothing");
        assert_eq!(names(back_off.succeeded(Uuid::from_u128(1), now)), ["2", "3", "4"]);
        assert!(!back_off.is_waiting(Uuid::from_u128(2)) && back_off.is_waiting(Uuid::from_u128(5)));
        assert_eq!(back_off.succeeded(Uuid::from_u128(2), now + RELEASE / 2), [], "not all the time");
        // One that failed again is left to its own time.
        assert_eq!(back_off.failed(resource(3), Fault::Servers).0, 6);
        fail(&back_off, 6, Fault::Servers, 5);
        assert_eq!(names(back_off.succeeded(Uuid::from_u128(4), now + RELEASE)), ["6"]);
        fail(&back_off, 7, Fault::Servers, 5);
        assert_eq!(names(back_off.succeeded(Uuid::from_u128(7), now + STUBBORN)), ["3"]);
    }
}
