//! Whether the database is worth asking. One loop finds out; everybody else is spared the wait: with the database
//! down and thousands of live resources, each of them asking for itself would be a storm on both stores.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use crate::queue::ResourceRef;

/// What is known of the database.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Nothing yet.
    #[default]
    Unknown,
    Open,
    Closed,
}

/// Open while the database answers. Resources that came while it did not are parked, and handed out at the next change.
#[derive(Default)]
pub(super) struct Gate(Mutex<(State, HashMap<Uuid, ResourceRef>)>);

impl Gate {
    fn inner(&self) -> MutexGuard<'_, (State, HashMap<Uuid, ResourceRef>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_open(&self) -> bool {
        self.inner().0 == State::Open
    }

    /// Known to be closed: at the start nobody knows.
    pub(super) fn is_closed(&self) -> bool {
        self.inner().0 == State::Closed
    }

    /// Closes it; hands out who waited without knowing for what, so that they can say so.
    pub(super) fn close(&self) -> Vec<ResourceRef> {
        self.turn(State::Closed)
    }

    /// Opens it and hands out who waited.
    pub(super) fn open(&self) -> Vec<ResourceRef> {
        self.turn(State::Open)
    }

    fn turn(&self, to: State) -> Vec<ResourceRef> {
        let (state, parked) = &mut *self.inner();
        if std::mem::replace(state, to) == to {
            return Vec::new();
        }
        parked.drain().map(|(_, resource)| resource).collect()
    }

    /// Parks a resource; false when the gate has opened meanwhile, and there is nothing to wait for.
    #[must_use]
    pub(super) fn park(&self, resource: ResourceRef) -> bool {
        let (state, parked) = &mut *self.inner();
        if *state == State::Open {
            return false;
        }
        parked.insert(resource.uid, resource);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_while_it_was_closed_is_handed_out_once() {
        let gate = Gate::default();
        assert!(!gate.is_open() && !gate.is_closed(), "nothing is known at the start");
        let resource = ResourceRef { uid: Uuid::nil(), namespace: "a".into(), name: "b".into() };
        assert!(gate.park(resource.clone()) && gate.park(resource.clone()));
        assert_eq!(gate.open(), std::slice::from_ref(&resource));
        assert!(!gate.park(resource), "an open gate keeps nobody");
        assert!(gate.is_open() && gate.open().is_empty());
    }
}
