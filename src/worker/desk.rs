//! Who gets the next free slot: the jobs that wait in this process, and the slots. No clock, no database.
//!
//! Kinds take turns, and within a kind its namespaces; within a namespace the highest priority goes first, then the
//! place in the lane. A claimed job waits in one of three places:
//!
//! - *ready*: claimed into a slot that was set aside for it, and only on its way there;
//! - *ahead*: prefetched, for whichever slot comes free;
//! - *alone*: it has lost two leases and may be what kills processes. It has a slot set aside, and starts once nothing
//!   waits ahead.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use super::shares::{AHEAD_ROWS, Pace, most};
use crate::queue::{Lane, Mark};

/// The most jobs one claim takes.
pub(super) const BATCH: usize = 1000;
/// While jobs wait for a slot that they may not be prefetched into, one of this many freed slots is left for them.
const TURN: u32 = 8;

pub(super) struct Desk<T> {
    slots: usize,
    used: usize,
    kinds: Vec<Kind<T>>,
    /// Whose turn it is.
    next: usize,
    waiting: usize,
    ready: VecDeque<(usize, T)>,
    alone: VecDeque<(usize, T)>,
    alone_under_way: usize,
    /// Jobs are due that may only be claimed into a free slot.
    starved: bool,
    freed: u32,
    /// Slots left free for those.
    left: usize,
    /// Runners that were called, or whose job has not yielded yet. There are never more than the runtime has threads,
    /// so a few runners serve jobs that end at once, and whoever's job waits for something is followed by another.
    at_desk: usize,
    runners: usize,
    /// That it is time to claim has been said.
    told: bool,
    /// Jobs may be prefetched.
    prefetch: bool,
    closed: bool,
}

struct Kind<T> {
    most: usize,
    used: usize,
    pace: Pace,
    waiting: usize,
    /// At so few waiting it is time to claim.
    low: usize,
    by_namespace: HashMap<String, usize>,
    namespaces: Vec<Namespace<T>>,
    unused: Vec<usize>,
    turns: VecDeque<usize>,
}

struct Namespace<T> {
    name: String,
    lanes: BTreeMap<Reverse<i16>, VecDeque<(Mark, T)>>,
}

/// What a claim may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Room {
    /// Slots that are free.
    pub free: usize,
    pub kinds: Vec<KindRoom>,
    /// The most jobs in all.
    pub total: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KindRoom {
    /// How many more slots this kind may take, if they are free.
    pub free: usize,
    /// Its jobs may be prefetched.
    pub ahead: bool,
    /// How many jobs of it may be claimed that need no slot set aside.
    pub rows: usize,
}

/// A runner's slot that has come free.
#[derive(Debug, Clone, Copy)]
pub(super) struct Freed {
    pub kind: usize,
    /// None for a job that did not start.
    pub took: Option<Duration>,
    pub alone: bool,
    /// It had left the desk: see [`Desk::away`].
    pub away: bool,
}

/// What a runner is told.
pub(super) struct Turn<T> {
    /// Run this; end if there is none.
    pub job: Option<T>,
    /// Another runner is needed.
    pub call: bool,
    /// It is time to claim.
    pub hungry: bool,
}

impl<T> Desk<T> {
    /// `runners` is how many jobs can be polled at once: the runtime's threads.
    pub(super) fn new(slots: usize, kinds: usize, runners: usize, prefetch: bool) -> Self {
        let most = most(slots, kinds);
        Self {
            slots,
            used: 0,
            kinds: (0..kinds).map(|_| Kind::new(most)).collect(),
            next: 0,
            waiting: 0,
            ready: VecDeque::new(),
            alone: VecDeque::new(),
            alone_under_way: 0,
            starved: false,
            freed: 0,
            left: 0,
            at_desk: 0,
            runners,
            told: false,
            prefetch,
            closed: false,
        }
    }

    /// What a claim may take when the worker holds `held` jobs in all. Nothing is set aside by asking.
    pub(super) fn room(&mut self, held: usize) -> Room {
        let free = self.slots - self.used + self.left;
        let prefetch = self.prefetch && self.alone_under_way == 0 && self.alone.is_empty();
        // What has ended and is not yet written counts, so that a slow database is not buried.
        let total = (self.slots + AHEAD_ROWS).saturating_sub(held).min(BATCH);
        let worth = total >= BATCH / 2 || self.waiting == 0;
        let rows = if worth { (AHEAD_ROWS + free).saturating_sub(self.waiting) } else { 0 };
        let kind_room = |kind: &mut Kind<T>| {
            let own = kind.most - kind.used;
            let ahead = if prefetch { kind.pace.ahead(kind.most) } else { 0 };
            kind.low = ahead / 2;
            let is_low = ahead > 0 && kind.waiting <= kind.low;
            let rows = if is_low { (ahead + own.min(free) - kind.waiting).min(rows) } else { 0 };
            KindRoom { free: own, ahead: ahead > 0, rows }
        };
        let kinds = self.kinds.iter_mut().map(kind_room).collect();
        Room { free, kinds, total: if self.closed { 0 } else { total } }
    }

    /// Sets slots aside, as a plan has it, and takes back those that were left for the plan. Not for more than
    /// [`Desk::room`] said: runners may have taken some since.
    pub(super) fn set_aside(&mut self, kind: usize, wanted: usize) -> usize {
        let kind = &mut self.kinds[kind];
        let free = self.slots - self.used + self.left;
        let granted = wanted.min(free).min(kind.most - kind.used);
        let from_left = granted.min(self.left);
        self.left -= from_left;
        self.used += granted - from_left;
        kind.used += granted;
        granted
    }

    /// The plan is made. `starved`: it left jobs that no slot was free for. `asleep`: nothing is due anywhere, so it
    /// need not be said when there is room for more. Slots may have come free: see [`Desk::calls`].
    pub(super) fn planned(&mut self, starved: bool, asleep: bool) {
        self.used -= self.left;
        self.left = 0;
        self.starved = starved;
        self.told = asleep;
    }

    /// Slots that were set aside and are not needed.
    pub(super) fn give_up(&mut self, kind: usize, slots: usize) {
        self.used -= slots;
        self.kinds[kind].used -= slots;
    }

    /// A job that has a slot set aside.
    pub(super) fn put_ready(&mut self, kind: usize, alone: bool, job: T) {
        if alone { self.alone.push_back((kind, job)) } else { self.ready.push_back((kind, job)) }
    }

    /// A job that waits for a slot.
    pub(super) fn put_ahead(&mut self, kind: usize, lane: &Lane, mark: Mark, job: T) {
        self.waiting += 1;
        self.kinds[kind].put(lane, mark, job);
    }

    /// Whether a runner has to be called for what waits. It comes by [`Desk::turn`].
    pub(super) fn calls(&mut self) -> bool {
        let call = self.at_desk < self.runners && !self.closed && self.has_turn();
        self.at_desk += usize::from(call);
        call
    }

    /// A runner's job waits for something. Whether another runner has to be called.
    pub(super) fn away(&mut self) -> bool {
        self.at_desk -= 1;
        self.calls()
    }

    fn has_turn(&self) -> bool {
        !self.ready.is_empty()
            || (self.used < self.slots && self.kinds.iter().any(Kind::may_start))
            || (self.waiting == 0 && !self.alone.is_empty())
    }

    /// The next job for a runner: one that comes new, or one whose slot has come free.
    pub(super) fn turn(&mut self, freed: Option<Freed>) -> Turn<T> {
        let mut hungry = false;
        match freed {
            None => {}
            Some(Freed { kind, took, alone, away }) => {
                self.at_desk += usize::from(away);
                self.used -= 1;
                self.alone_under_way -= usize::from(alone);
                let kind = &mut self.kinds[kind];
                kind.used -= 1;
                if let Some(took) = took {
                    kind.pace.ended(took);
                }
                hungry = kind.low == 0 || alone;
            }
        }
        let job = self.take(freed.is_some(), &mut hungry);
        hungry |= job.is_none();
        if job.is_none() {
            self.at_desk -= 1;
        }
        let hungry = hungry && !std::mem::replace(&mut self.told, true);
        Turn { call: job.is_some() && self.calls(), job, hungry }
    }

    fn take(&mut self, has_freed: bool, hungry: &mut bool) -> Option<T> {
        if self.closed {
            return None;
        }
        if let Some((_, job)) = self.ready.pop_front() {
            return Some(job);
        }
        if has_freed && self.starved && self.used < self.slots {
            self.freed = self.freed.wrapping_add(1);
            if self.freed.is_multiple_of(TURN) && self.left < self.slots.div_ceil(TURN as usize) {
                self.used += 1;
                self.left += 1;
                return None;
            }
        }
        if self.waiting == 0 {
            let (_, job) = self.alone.pop_front()?;
            self.alone_under_way += 1;
            return Some(job);
        }
        if self.used == self.slots {
            return None;
        }
        let count = self.kinds.len();
        let at = (self.next..count).chain(0..self.next).find(|at| self.kinds[*at].may_start())?;
        self.next = (at + 1) % count;
        let kind = &mut self.kinds[at];
        let job = kind.pop()?;
        kind.used += 1;
        self.used += 1;
        self.waiting -= 1;
        *hungry |= kind.waiting <= kind.low;
        Some(job)
    }

    /// Takes back what waits ahead, where it is said so. What waited for that may start: see [`Desk::calls`].
    pub(super) fn withdraw(&mut self, is_wanted: impl Fn(&T) -> bool) -> Vec<T> {
        let mut taken = Vec::new();
        self.kinds.iter_mut().for_each(|kind| kind.withdraw(&is_wanted, &mut taken));
        self.waiting -= taken.len();
        taken
    }

    /// What was thought of this kind's pace was wrong.
    pub(super) fn forget_pace(&mut self, kind: usize) {
        self.kinds[kind].pace.forget();
    }

    /// No job starts any more; what waited.
    pub(super) fn close(&mut self) -> Vec<T> {
        self.closed = true;
        let mut waited = self.withdraw(|_| true);
        for (kind, job) in std::mem::take(&mut self.ready).into_iter().chain(std::mem::take(&mut self.alone)) {
            self.give_up(kind, 1);
            waited.push(job);
        }
        waited
    }
}

impl<T> Kind<T> {
    fn new(most: usize) -> Self {
        Self {
            most,
            used: 0,
            pace: Pace::default(),
            waiting: 0,
            low: 0,
            by_namespace: HashMap::new(),
            namespaces: Vec::new(),
            unused: Vec::new(),
            turns: VecDeque::new(),
        }
    }

    fn may_start(&self) -> bool {
        self.waiting > 0 && self.used < self.most
    }

    fn put(&mut self, lane: &Lane, mark: Mark, job: T) {
        self.waiting += 1;
        let at = match self.by_namespace.get(&lane.namespace) {
            Some(at) => *at,
            None => {
                let new = Namespace { name: lane.namespace.clone(), lanes: BTreeMap::new() };
                let at = match self.unused.pop() {
                    Some(at) => {
                        self.namespaces[at] = new;
                        at
                    }
                    None => {
                        self.namespaces.push(new);
                        self.namespaces.len() - 1
                    }
                };
                self.by_namespace.insert(lane.namespace.clone(), at);
                self.turns.push_back(at);
                at
            }
        };
        let jobs = self.namespaces[at].lanes.entry(Reverse(lane.priority)).or_default();
        // Nearly always behind all others.
        let behind = match jobs.back() {
            Some((last, _)) if *last > mark => jobs.partition_point(|(other, _)| *other <= mark),
            Some(_) | None => jobs.len(),
        };
        jobs.insert(behind, (mark, job));
    }

    fn pop(&mut self) -> Option<T> {
        let at = self.turns.pop_front()?;
        let mut lane = self.namespaces[at].lanes.first_entry()?;
        let (_, job) = lane.get_mut().pop_front()?;
        if lane.get().is_empty() {
            lane.remove();
        }
        self.waiting -= 1;
        if self.namespaces[at].lanes.is_empty() {
            self.remove(at);
        } else {
            self.turns.push_back(at);
        }
        Some(job)
    }

    fn remove(&mut self, at: usize) {
        self.by_namespace.remove(&self.namespaces[at].name);
        self.unused.push(at);
    }

    fn withdraw(&mut self, is_wanted: &impl Fn(&T) -> bool, taken: &mut Vec<T>) {
        for at in std::mem::take(&mut self.turns) {
            let lanes = &mut self.namespaces[at].lanes;
            for jobs in lanes.values_mut() {
                let (out, stay): (Vec<_>, Vec<_>) =
                    std::mem::take(jobs).into_iter().partition(|(_, job)| is_wanted(job));
                self.waiting -= out.len();
                taken.extend(out.into_iter().map(|(_, job)| job));
                *jobs = stay.into();
            }
            lanes.retain(|_, jobs| !jobs.is_empty());
            if lanes.is_empty() { self.remove(at) } else { self.turns.push_back(at) }
        }
    }
}
