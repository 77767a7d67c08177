//! Walks through every state, and back from the terminal ones.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use crate::rules::{Rules, Wrong, judge};
use crate::state::State;
use crate::steps::{Step, ways};

#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub workers: usize,
    pub max_attempts: &'static [u8],
    pub retries: u8,
}

#[derive(Debug)]
pub struct Explored {
    pub states: usize,
    /// Steps that no state has: the model is not about them.
    pub unused_steps: Vec<Step>,
}

/// The shortest way to what went wrong.
#[derive(Debug)]
pub struct Broken {
    wrong: String,
    way: Vec<(Step, usize)>,
    state: State,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.wrong)?;
        for (step, who) in &self.way {
            match who {
                3 => write!(f, " {step:?}")?,
                worker => write!(f, " {step:?}({worker})")?,
            }
        }
        write!(f, " from {:?}", self.state)
    }
}

struct Search {
    known: HashMap<State, u32, BuildHasherDefault<Quick>>,
    states: Vec<State>,
    /// How each state was first reached.
    from: Vec<Option<(u32, Step, u8)>>,
    /// Steps that happen by themselves: from, to, under which ways.
    edges: Vec<(u32, u32, u8)>,
}

pub fn explore(rules: &Rules, bounds: Bounds) -> Result<Explored, Box<Broken>> {
    let mut search = Search { known: HashMap::default(), states: Vec::new(), from: Vec::new(), edges: Vec::new() };
    for max in bounds.max_attempts {
        search.meet(State::accepted(bounds.workers, *max, bounds.retries).normal(rules.tokens_name_claims()), None);
    }
    let mut used = vec![false; Step::ALL.len()];
    let mut at = 0;
    while at < search.states.len() {
        let state = search.states[at];
        let here = index(at);
        let mut broken: Option<(Step, usize, Wrong)> = None;
        rules.steps(&state, bounds.max_attempts, &mut |step, who, ways, next| {
            used[step as usize] = true;
            match next.and_then(|next| judge(&next).map(|()| next)) {
                Err(wrong) => broken = broken.or(Some((step, who, wrong))),
                Ok(next) if next == state => {}
                Ok(next) => {
                    let by = Some((here, step, u8::try_from(who).expect("few workers")));
                    let there = search.meet(next.normal(rules.tokens_name_claims()), by);
                    if ways != ways::NONE {
                        search.edges.push((here, there, ways));
                    }
                }
            }
        });
        if let Some((step, who, wrong)) = broken {
            return Err(Box::new(search.broken(here, Some((step, who)), wrong.to_owned())));
        }
        at += 1;
    }
    search.everything_ends()?;
    let unused_steps = Step::ALL.iter().copied().filter(|step| !used[*step as usize]).collect();
    Ok(Explored { states: search.states.len(), unused_steps })
}

impl Search {
    fn meet(&mut self, state: State, from: Option<(u32, Step, u8)>) -> u32 {
        let next = index(self.states.len());
        let found = *self.known.entry(state).or_insert(next);
        if found == next {
            self.states.push(state);
            self.from.push(from);
        }
        found
    }

    /// From every state, whatever the attempts come to, a terminal one can be reached.
    fn everything_ends(&mut self) -> Result<(), Box<Broken>> {
        // Grouped by where they lead to.
        let mut starts = vec![0_usize; self.states.len() + 1];
        for (_, to, _) in &self.edges {
            starts[*to as usize + 1] += 1;
        }
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let mut places = starts.clone();
        let mut backward = vec![(0_u32, 0_u8); self.edges.len()];
        for (from, to, ways) in self.edges.drain(..) {
            backward[places[to as usize]] = (from, ways);
            places[to as usize] += 1;
        }
        for (bit, name) in ways::NAMES.iter().enumerate() {
            let ended = |state: &State| state.row.is_none_or(|row| row.status.is_terminal());
            let mut ends: Vec<bool> = self.states.iter().map(ended).collect();
            let mut todo: Vec<usize> = (0..ends.len()).filter(|at| ends[*at]).collect();
            while let Some(to) = todo.pop() {
                for (from, ways) in &backward[starts[to]..starts[to + 1]] {
                    let from = *from as usize;
                    if ways & (1 << bit) != 0 && !ends[from] {
                        ends[from] = true;
                        todo.push(from);
                    }
                }
            }
            if let Some(stuck) = ends.iter().position(|ends| !ends) {
                let wrong = format!("no terminal state can be reached when attempts {name}");
                return Err(Box::new(self.broken(index(stuck), None, wrong)));
            }
        }
        Ok(())
    }

    fn broken(&self, at: u32, last: Option<(Step, usize)>, wrong: String) -> Broken {
        let mut way: Vec<_> = last.into_iter().collect();
        let mut here = at;
        while let Some((from, step, who)) = self.from[here as usize] {
            way.push((step, who.into()));
            here = from;
        }
        way.reverse();
        Broken { wrong, way, state: self.states[at as usize] }
    }
}

fn index(at: usize) -> u32 {
    u32::try_from(at).expect("fewer than four thousand million states")
}

/// States are hashed by the million: a multiplication a field does.
#[derive(Default)]
struct Quick(u64);

impl Hasher for Quick {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u8(*byte);
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}
