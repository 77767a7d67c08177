//! Parts that are ready or not, and loops that show they still turn.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Collects the program's parts and loops; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Health {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    parts: Mutex<Vec<Part>>,
    beats: Mutex<Vec<Beat>>,
}

/// Something the program depends on. Clones are the same part.
#[derive(Debug, Clone)]
pub struct Part {
    name: &'static str,
    state: Arc<Mutex<PartState>>,
}

#[derive(Debug, PartialEq, Eq)]
enum PartState {
    Starting,
    Ready,
    /// Ready, and something to say about it.
    ReadyAs(&'static str),
    NotReady(String),
}

/// A loop that must show now and then that it still turns. Clones are the same loop.
#[derive(Debug, Clone)]
pub struct Beat {
    name: &'static str,
    max_silence: Duration,
    /// None once the loop has ended on purpose.
    last: Arc<Mutex<Option<Instant>>>,
}

impl Health {
    pub fn new() -> Self {
        Self::default()
    }

    /// A dependency of this name, not ready ("starting") at first; the same part for the same name.
    pub fn part(&self, name: &'static str) -> Part {
        let mut parts = lock(&self.inner.parts);
        if let Some(known) = parts.iter().find(|part| part.name == name) {
            return known.clone();
        }
        let part = Part { name, state: Arc::new(Mutex::new(PartState::Starting)) };
        parts.push(part.clone());
        part
    }

    /// A loop that beats at least once in `max_silence`, counted from now on the monotonic clock. A loop that ends
    /// unasked goes silent too, so it is found; one that ends on purpose says so with [`Beat::end`].
    pub fn beat(&self, name: &'static str, max_silence: Duration) -> Beat {
        let beat = Beat { name, max_silence, last: Arc::new(Mutex::new(Some(Instant::now()))) };
        let mut beats = lock(&self.inner.beats);
        beats.retain(|known| known.name != name);
        beats.push(beat.clone());
        beat
    }

    /// Whether every part is ready: what those that are have to say, or a line for each that is not.
    pub fn readiness(&self) -> Result<String, String> {
        let (mut notes, mut lines) = (String::new(), String::new());
        let parts = lock(&self.inner.parts);
        for part in parts.iter() {
            match &*lock(&part.state) {
                PartState::Ready => {}
                PartState::ReadyAs(note) => _ = writeln!(notes, "{}: {note}", part.name),
                PartState::Starting => _ = writeln!(lines, "{}: not ready: starting", part.name),
                PartState::NotReady(why) => _ = writeln!(lines, "{}: not ready: {why}", part.name),
            }
        }
        match lines.as_str() {
            // A program that has not come so far as to name its parts.
            "" if parts.is_empty() => Err("not ready: starting\n".to_owned()),
            "" => Ok(notes),
            _ => Err(lines),
        }
    }

    /// Whether every loop turns, and a line for each that has been silent for too long.
    pub fn liveness(&self) -> Result<(), String> {
        let mut lines = String::new();
        for Beat { name, max_silence, last } in lock(&self.inner.beats).iter() {
            let silent = lock(last).map(|last| last.elapsed()).unwrap_or_default();
            if silent > *max_silence {
                _ = writeln!(lines, "{name}: silent for {} s, at most {} s", silent.as_secs(), max_silence.as_secs());
            }
        }
        if lines.is_empty() { Ok(()) } else { Err(lines) }
    }
}

impl Part {
    /// Logs once per change from not ready to ready.
    pub fn ready(&self) {
        let was = std::mem::replace(&mut *lock(&self.state), PartState::Ready);
        if was != PartState::Ready {
            tracing::info!(part = self.name, "ready");
        }
    }

    /// Ready with a word that /readyz shows. Logs nothing: who has something to say says it.
    pub fn ready_as(&self, note: &'static str) {
        *lock(&self.state) = PartState::ReadyAs(note);
    }

    /// Logs once per change from starting or ready to not ready; a new reason replaces the old one unlogged, since
    /// a store that is away answers with changing errors. The reason is one bounded line.
    pub fn not_ready(&self, why: impl Into<String>) {
        let why = one_line(why.into());
        let mut state = lock(&self.state);
        if !matches!(*state, PartState::NotReady(_)) {
            tracing::warn!(part = self.name, why, "not ready");
        }
        *state = PartState::NotReady(why);
    }

    pub fn is_ready(&self) -> bool {
        matches!(*lock(&self.state), PartState::Ready | PartState::ReadyAs(_))
    }
}

impl Beat {
    /// Shows that the loop still turns.
    pub fn beat(&self) {
        *lock(&self.last) = Some(Instant::now());
    }

    /// The loop ends on purpose: its silence from here on means nothing.
    pub fn end(&self) {
        *lock(&self.last) = None;
    }
}

fn one_line(text: String) -> String {
    let text = if text.contains(['\n', '\r']) { text.replace(['\n', '\r'], " ") } else { text };
    crate::text::cut(&text, 512).to_owned()
}

/// Nothing panics while it holds one of these, and a value half written is no danger here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_ready_when_all_its_parts_are() {
        let health = Health::new();
        assert_eq!(health.readiness(), Err("not ready: starting\n".to_owned()), "nothing is known yet");
        let (postgres, api) = (health.part("postgres"), health.part("kube-apiserver"));
        postgres.ready();
        api.not_ready("connection\nrefused");
        assert_eq!(health.readiness(), Err("kube-apiserver: not ready: connection refused\n".to_owned()));
        api.ready();
        assert_eq!(health.readiness(), Ok(String::new()));
        assert!(health.part("postgres").is_ready(), "the same name is the same part");
        health.part("leader").ready_as("standby");
        assert_eq!(health.readiness(), Ok("leader: standby\n".to_owned()));
    }

    #[test]
    fn a_part_that_was_never_heard_of_is_starting() {
        let health = Health::new();
        _ = health.part("postgres");
        assert_eq!(health.readiness(), Err("postgres: not ready: starting\n".to_owned()));
    }

    #[test]
    fn a_silent_loop_is_named_until_it_beats_or_ends() {
        let health = Health::new();
        let beat = health.beat("claim", Duration::ZERO);
        let other = health.beat("rescue", Duration::from_secs(3600));
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(health.liveness(), Err("claim: silent for 0 s, at most 0 s\n".to_owned()));
        beat.end();
        assert_eq!(health.liveness(), Ok(()));
        other.beat();
        drop(health.part("postgres"));
        assert_eq!(health.liveness(), Ok(()), "a store that is away is no reason to restart");
    }
}
