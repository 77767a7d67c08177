//! Where due jobs are, as far as this worker knows, and which of them a claim should take. No clock, no database: time
//! is an argument.
//!
//! The directory learns lanes from surveys (the first job of each) and from claims (how far each lane has been taken).
//! A lane that gave fewer jobs than asked for sleeps until a survey shows it again, or a notification says that
//! something is due somewhere; one whose first job is due later sleeps until then. A survey's word on where a lane
//! begins always counts: jobs that were committed late, handed back or dated back are found by it.
//!
//! Priority orders jobs of one kind and namespace, a *group*: a claim asks the highest lane of a group that is awake.
//! Groups take turns, at most 64 a claim, and share the claim's room evenly, so a flood in one does not delay another.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::desk::{KindRoom, Room};
use crate::queue::{Lane, LaneHead, Mark, SurveyFrom, Want};

/// The most groups that one claim asks.
const GROUPS: usize = 64;
/// How many lanes a notification wakes: those that jobs were claimed from last.
const RECENT: usize = 16;
/// How long a lane is remembered that no survey shows any more.
const REMEMBERED: Duration = Duration::from_secs(60);

/// What to ask of one lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    pub want: Want,
    pub kind: usize,
    /// Each job needs a slot set aside.
    pub into_slots: bool,
}

#[derive(Debug, Default)]
pub(super) struct Plan {
    pub asks: Vec<Ask>,
    /// Lanes are awake that need a free slot, and there is none.
    pub starved: bool,
}

pub(super) struct Directory {
    kinds: Vec<Kind>,
    next: usize,
    /// When the first of the sleeping lanes is due.
    wake_at: Option<Instant>,
    recent: VecDeque<Lane>,
}

struct Kind {
    name: &'static str,
    groups: HashMap<String, Group>,
    /// The namespaces with a lane that is awake, in the order of their turns.
    turns: VecDeque<String>,
    /// Those that woke and have not had a turn since. They have seven of eight turns, so that a job of a quiet namespace
    /// does not wait for a whole round of a thousand busy ones.
    woken: VecDeque<String>,
    turned: usize,
    /// Which survey of all its lanes is under way, and how far.
    round: u64,
    after: Option<Lane>,
}

#[derive(Default)]
struct Group {
    /// Highest priority first.
    lanes: BTreeMap<(Reverse<i16>, bool), LaneState>,
    has_turn: bool,
}

struct LaneState {
    from: Option<Mark>,
    sleep: Sleep,
    /// The round that saw it last.
    seen: u64,
    claimed_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sleep {
    Awake,
    Until(Instant),
    /// It gave fewer than asked.
    Drained,
}

impl Directory {
    pub(super) fn new(kinds: &[&'static str]) -> Self {
        let kind = |name: &&'static str| Kind {
            name,
            groups: HashMap::new(),
            turns: VecDeque::new(),
            woken: VecDeque::new(),
            turned: 0,
            round: 1,
            after: None,
        };
        Self { kinds: kinds.iter().map(kind).collect(), next: 0, wake_at: None, recent: VecDeque::new() }
    }

    pub(super) fn kind_of(&self, name: &str) -> Option<usize> {
        self.kinds.iter().position(|kind| kind.name == name)
    }

    /// When a lane that sleeps is due.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    /// Nothing is known to be due.
    pub(super) fn is_asleep(&self) -> bool {
        self.kinds.iter().all(|kind| kind.turns.is_empty() && kind.woken.is_empty())
    }

    /// Where the next survey starts.
    pub(super) fn survey_from(&self) -> Vec<SurveyFrom> {
        self.kinds.iter().map(|kind| SurveyFrom { kind: kind.name.to_owned(), after: kind.after.clone() }).collect()
    }

    /// What a survey of at most `per_kind` lanes of each kind found. True if that was all there is; else it goes on
    /// from [`Directory::survey_from`].
    pub(super) fn surveyed(&mut self, heads: Vec<LaneHead>, per_kind: usize, now: Instant) -> bool {
        let mut pages: Vec<(usize, Option<Lane>)> = vec![(0, None); self.kinds.len()];
        for LaneHead { lane, mark, due_in } in heads {
            let Some(at) = self.kind_of(&lane.kind) else { continue };
            let sleep = if due_in.is_zero() { Sleep::Awake } else { Sleep::Until(now + due_in) };
            let kind = &mut self.kinds[at];
            let state = kind.lane(&lane);
            (state.from, state.sleep) = (Some(mark), sleep);
            kind.wake(&lane);
            if let Sleep::Until(then) = sleep {
                self.wake_at = Some(self.wake_at.map_or(then, |at| at.min(then)));
            }
            let (count, last) = &mut pages[at];
            *count += 1;
            *last = Some(lane);
        }
        let mut complete = true;
        for (kind, (count, last)) in self.kinds.iter_mut().zip(pages) {
            if count >= per_kind {
                kind.after = last;
                complete = false;
            } else {
                kind.end_round(now);
            }
        }
        complete
    }

    /// Something is due somewhere: perhaps where jobs were found last.
    pub(super) fn notified(&mut self) {
        for lane in &self.recent {
            let Some(kind) = self.kinds.iter_mut().find(|kind| kind.name == lane.kind) else { continue };
            let state = kind.lane(lane);
            if state.sleep == Sleep::Drained {
                state.sleep = Sleep::Awake;
                kind.wake(lane);
            }
        }
    }

    /// Which lanes a claim should ask for how much.
    pub(super) fn plan(&mut self, now: Instant, room: Room) -> Plan {
        if self.wake_at.is_some_and(|at| at <= now) {
            self.wake_due(now);
        }
        let mut plan = Plan::default();
        let most = room.total.min(GROUPS);
        // Each kind looks at each of its groups once.
        let mut left: Vec<Left> = self.kinds.iter().map(Kind::left).collect();
        let (mut free, mut rows): (usize, Vec<KindRoom>) = (room.free, room.kinds);
        while plan.asks.len() < most && left.iter().any(|left| *left != Left::default()) {
            let at = self.next % self.kinds.len();
            self.next = at + 1;
            let kind_room = &mut rows[at];
            let Some(ask) = self.kinds[at].take_turn(at, kind_room, free, &mut left[at]) else { continue };
            match ask {
                Turned::Nothing => {}
                Turned::Full => left[at] = Left::default(),
                Turned::Starved => {
                    plan.starved |= kind_room.free > 0;
                    if !kind_room.ahead {
                        // All its groups would say the same.
                        left[at] = Left::default();
                    }
                }
                Turned::Ask(ask) => {
                    // One each at first, so that none comes away empty.
                    if ask.into_slots {
                        free -= 1;
                        kind_room.free -= 1;
                    } else {
                        kind_room.rows -= 1;
                    }
                    plan.asks.push(ask);
                }
            }
        }
        share_out(&mut plan.asks, room.total, free, rows);
        plan
    }

    /// What came of a plan: how many jobs each lane gave, and the place of the last.
    pub(super) fn claimed(&mut self, asks: &[Ask], got: &[(usize, Option<Mark>)], now: Instant) {
        for (ask, (count, last)) in asks.iter().zip(got) {
            let lane = &ask.want.lane;
            let state = self.kinds[ask.kind].lane(lane);
            if let Some(last) = last {
                // A survey that came in between may have found something further ahead.
                if state.from >= ask.want.from {
                    state.from = state.from.max(Some(*last));
                }
                state.claimed_at = Some(now);
                self.recent.retain(|recent| recent != lane);
                self.recent.push_front(lane.clone());
                self.recent.truncate(RECENT);
            }
            if *count < ask.want.limit {
                state.sleep = Sleep::Drained;
            } else {
                state.sleep = Sleep::Awake;
                self.kinds[ask.kind].wake(lane);
            }
        }
    }

    fn wake_due(&mut self, now: Instant) {
        self.wake_at = None;
        for kind in &mut self.kinds {
            for (namespace, group) in &mut kind.groups {
                for state in group.lanes.values_mut() {
                    match state.sleep {
                        Sleep::Until(then) if then <= now => {
                            state.sleep = Sleep::Awake;
                            if !std::mem::replace(&mut group.has_turn, true) {
                                kind.woken.push_back(namespace.clone());
                            }
                        }
                        Sleep::Until(then) => self.wake_at = Some(self.wake_at.map_or(then, |at| at.min(then))),
                        Sleep::Awake | Sleep::Drained => {}
                    }
                }
            }
        }
    }
}

/// How many groups of a kind a plan has yet to look at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Left {
    turns: usize,
    woken: usize,
}

enum Turned {
    Ask(Ask),
    /// No lane of the group is awake.
    Nothing,
    /// One is, but it needs a slot.
    Starved,
    /// The kind has all its slots.
    Full,
}

impl Kind {
    fn lane(&mut self, lane: &Lane) -> &mut LaneState {
        if !self.groups.contains_key(&lane.namespace) {
            self.groups.insert(lane.namespace.clone(), Group::default());
        }
        let round = self.round;
        let group = self.groups.get_mut(&lane.namespace).expect("it was inserted");
        let new = || LaneState { from: None, sleep: Sleep::Drained, seen: 0, claimed_at: None };
        let state = group.lanes.entry((Reverse(lane.priority), lane.careful)).or_insert_with(new);
        state.seen = round;
        state
    }

    /// Gives the lane's group a turn, if the lane is awake.
    fn wake(&mut self, lane: &Lane) {
        let Some(group) = self.groups.get_mut(&lane.namespace) else { return };
        let state = group.lanes.get(&(Reverse(lane.priority), lane.careful));
        let awake = state.is_some_and(|state| state.sleep == Sleep::Awake);
        if awake && !std::mem::replace(&mut group.has_turn, true) {
            self.woken.push_back(lane.namespace.clone());
        }
    }

    fn left(&self) -> Left {
        Left { turns: self.turns.len(), woken: self.woken.len() }
    }

    /// The group whose turn it is goes to the back, if a lane of it is awake. None if none is left.
    fn take_turn(&mut self, at: usize, room: &KindRoom, free: usize, left: &mut Left) -> Option<Turned> {
        self.turned += 1;
        let woken = left.woken > 0 && (!self.turned.is_multiple_of(8) || left.turns == 0);
        let (queue, left) = if woken { (&mut self.woken, &mut left.woken) } else { (&mut self.turns, &mut left.turns) };
        *left = left.checked_sub(1)?;
        let namespace = queue.pop_front()?;
        let Some(group) = self.groups.get_mut(&namespace) else { return Some(Turned::Nothing) };
        let slots = free.min(room.free);
        let mut awake = group.lanes.iter().filter(|(_, state)| state.sleep == Sleep::Awake).peekable();
        if awake.peek().is_none() {
            group.has_turn = false;
            if group.lanes.is_empty() {
                self.groups.remove(&namespace);
            }
            return Some(Turned::Nothing);
        }
        let mut starved = false;
        for ((Reverse(priority), careful), state) in awake {
            let into_slots = *careful || !room.ahead;
            if if into_slots { slots == 0 } else { room.rows == 0 } {
                starved |= into_slots;
                continue;
            }
            let lane = Lane {
                kind: self.name.to_owned(),
                namespace: namespace.clone(),
                careful: *careful,
                priority: *priority,
            };
            let want = Want { lane, from: state.from, limit: 1 };
            self.turns.push_back(namespace);
            return Some(Turned::Ask(Ask { want, kind: at, into_slots }));
        }
        if starved && !room.ahead {
            // It keeps its place.
            queue.push_front(namespace);
            return Some(if room.free == 0 { Turned::Full } else { Turned::Starved });
        }
        self.turns.push_back(namespace);
        Some(if starved { Turned::Starved } else { Turned::Nothing })
    }

    /// All lanes have been seen that there are: the others are empty, and in time forgotten.
    fn end_round(&mut self, now: Instant) {
        let round = self.round;
        self.round += 1;
        self.after = None;
        self.groups.retain(|_, group| {
            group.lanes.retain(|_, state| {
                let gone = state.seen != round;
                if gone {
                    state.sleep = Sleep::Drained;
                }
                !gone || state.claimed_at.is_some_and(|at| now.saturating_duration_since(at) < REMEMBERED)
            });
            // A group that still has a turn goes when that comes.
            group.has_turn || !group.lanes.is_empty()
        });
    }
}

/// Each ask has one job; the rest of the room goes to them one by one in turns, so that whoever can't take its share
/// leaves it to the others.
fn share_out(asks: &mut [Ask], total: usize, mut free: usize, mut rows: Vec<KindRoom>) {
    let mut left = total.saturating_sub(asks.len());
    loop {
        let before = left;
        for Ask { want, kind, into_slots } in &mut *asks {
            let room = &mut rows[*kind];
            let has_room = if *into_slots { free > 0 && room.free > 0 } else { room.rows > 0 };
            if left == 0 || !has_room {
                continue;
            }
            if *into_slots {
                free -= 1;
                room.free -= 1;
            } else {
                room.rows -= 1;
            }
            want.limit += 1;
            left -= 1;
        }
        if left == before {
            return;
        }
    }
}
