//! How many calls a namespace has under way at one origin, and whether that origin wants any.
//!
//! A worker's slots are for all. So of one namespace only so many calls go to an origin at once, and while an origin
//! refuses connections, or has answered 429 or 503 with a Retry-After, none does. What is not let through has not
//! started: it is handed back at no cost and comes again later, spread over the time that the calls before it take. Where
//! calls end fast a slot is held and waited in instead, for a second at most.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use url::Url;

use crate::kinds::Failure;

/// How many calls of one namespace may be under way at one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginLimit(u16);

impl OriginLimit {
    pub const MAX: u16 = 1024;

    /// Values beyond 1 and [`Self::MAX`] are taken for these.
    pub fn new(calls: u16) -> Self {
        Self(calls.clamp(1, Self::MAX))
    }
}

impl Default for OriginLimit {
    fn default() -> Self {
        Self(8)
    }
}

/// The longest wait in a slot, and how lately a call must have ended for that.
const PATIENCE: Duration = Duration::from_secs(1);
/// Calls that take less, as a rule, are worth waiting for.
const FAST: Duration = Duration::from_millis(250);
/// The longest that a job is sent away for because others are before it.
const LONGEST_TURN: Duration = Duration::from_secs(120);
/// So many connections refused in a row, and nobody calls for a while: a second, doubled with each, a minute at most.
const REFUSALS: u32 = 3;
const LONGEST_REST: Duration = Duration::from_secs(60);
/// So many origins are remembered; then all that nobody calls just now are forgotten, which costs a call at most.
const MANY: usize = 10_000;

pub(super) struct Origins {
    limit: OriginLimit,
    known: Mutex<HashMap<(String, String), Arc<Origin>>>,
}

struct Origin {
    limit: usize,
    calls: Arc<Semaphore>,
    state: Mutex<State>,
}

struct State {
    /// What a call takes, smoothed.
    pace: Duration,
    /// When a call last began where none was under way, or ended.
    moved: Instant,
    /// When the last job that was sent away is to come again.
    turn: Instant,
    refusals: u32,
    rests_until: Option<Instant>,
    /// After a rest one call finds out for all.
    probing: bool,
}

/// A call that was let through. Dropped without a word of how it went, it counts as ended.
pub(super) struct Call {
    origin: Arc<Origin>,
    since: Instant,
    probe: bool,
    _permit: OwnedSemaphorePermit,
}

/// What a call has shown of its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    Answered,
    /// No connection came about.
    Refused,
    /// It wants no call for so long.
    Pause(Duration),
    Nothing,
}

impl Origins {
    pub(super) fn new(limit: OriginLimit) -> Self {
        Self { limit, known: Mutex::default() }
    }

    /// Lets a call through, or says when to come again. It waits for that a second, and `patience`, at most.
    ///
    /// # Errors
    /// Handed back: `OriginBusy`, `OriginResting`.
    pub(super) async fn enter(&self, namespace: &str, url: &Url, patience: Duration) -> Result<Call, Failure> {
        let origin = self.origin(namespace, url);
        if let Some(call) = origin.try_call()? {
            return Ok(call);
        }
        if origin.is_fast()
            && let Ok(Ok(permit)) = timeout(PATIENCE.min(patience), origin.calls.clone().acquire_owned()).await
        {
            // It may have begun to rest meanwhile.
            return origin.call(permit);
        }
        let delay = lock(&origin.state).next_turn(Instant::now(), self.limit);
        Err(Failure::retry_after(
            delay,
            "OriginBusy",
            format!("{} jobs of this namespace call this origin already; this one waits its turn", self.limit.0),
        ))
    }

    fn origin(&self, namespace: &str, url: &Url) -> Arc<Origin> {
        let mut known = lock(&self.known);
        if known.len() >= MANY {
            known.retain(|_, origin| Arc::strong_count(origin) > 1);
        }
        let new = || {
            let now = Instant::now();
            let state =
                State { pace: Duration::ZERO, moved: now, turn: now, refusals: 0, rests_until: None, probing: false };
            let limit = usize::from(self.limit.0);
            Arc::new(Origin { limit, calls: Arc::new(Semaphore::new(limit)), state: Mutex::new(state) })
        };
        known.entry((namespace.to_owned(), url.origin().ascii_serialization())).or_insert_with(new).clone()
    }
}

impl Origin {
    fn try_call(self: &Arc<Self>) -> Result<Option<Call>, Failure> {
        match self.calls.clone().try_acquire_owned() {
            Ok(permit) => self.call(permit).map(Some),
            Err(_) => lock(&self.state).may_call(Instant::now()).map(|_| None),
        }
    }

    fn call(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> Result<Call, Failure> {
        let now = Instant::now();
        let mut state = lock(&self.state);
        let probe = state.may_call(now)?;
        state.probing |= probe;
        if self.calls.available_permits() + 1 == self.limit {
            state.moved = now;
        }
        drop(state);
        Ok(Call { origin: self.clone(), since: now, probe, _permit: permit })
    }

    fn is_fast(&self) -> bool {
        let state = lock(&self.state);
        state.pace < FAST && state.moved.elapsed() < PATIENCE
    }
}

impl State {
    /// Whether the call would be the one that finds out whether a rest is over.
    fn may_call(&self, now: Instant) -> Result<bool, Failure> {
        let Some(until) = self.rests_until else { return Ok(false) };
        let left = until.saturating_duration_since(now);
        if left.is_zero() && !self.probing {
            return Ok(true);
        }
        Err(Failure::retry_after(
            // Not all in the same moment.
            left.max(PATIENCE) + PATIENCE.mul_f64(rand::random_range(0.0..=1.0)),
            "OriginResting",
            "the origin refuses connections or has asked for a pause, so it is not called for a while",
        ))
    }

    fn next_turn(&mut self, now: Instant, limit: OriginLimit) -> Duration {
        let call = self.pace.max(now.saturating_duration_since(self.moved)).max(Duration::from_millis(10));
        let turn = self.turn.max(now) + call / u32::from(limit.0);
        self.turn = turn.min(now + LONGEST_TURN);
        self.turn - now
    }

    fn learn(&mut self, shown: Shown, now: Instant) {
        let rest = match shown {
            Shown::Nothing => return,
            Shown::Answered => {
                self.refusals = 0;
                None
            }
            Shown::Pause(pause) => {
                self.refusals = 0;
                Some(pause)
            }
            // One of several that were under way together.
            Shown::Refused if self.rests_until.is_some_and(|until| until > now) => return,
            Shown::Refused => {
                self.refusals = self.refusals.saturating_add(1);
                let doublings = self.refusals.checked_sub(REFUSALS);
                doublings.map(|doublings| (PATIENCE * (1 << doublings.min(6))).min(LONGEST_REST))
            }
        };
        match (rest, self.rests_until) {
            (Some(rest), known) => self.rests_until = known.max(Some(now + rest)),
            // A call from before a pause says nothing of it.
            (None, Some(until)) if until > now => {}
            (None, _) => self.rests_until = None,
        }
    }
}

impl Call {
    pub(super) fn shows(&self, shown: Shown) {
        lock(&self.origin.state).learn(shown, Instant::now());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut state = lock(&self.origin.state);
        state.pace = (state.pace * 7 + (now - self.since)) / 8;
        state.moved = now;
        if self.probe {
            state.probing = false;
        }
    }
}

/// Nothing panics while it holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::FailureCause;

    fn url() -> Url {
        Url::parse("https://example.com/hook").unwrap()
    }

    fn origins(limit: u16) -> Origins {
        Origins::new(OriginLimit::new(limit))
    }

    async fn enter(origins: &Origins, namespace: &str) -> Result<Call, Failure> {
        origins.enter(namespace, &url(), LONGEST_REST).await
    }

    async fn refusal(origins: &Origins, namespace: &str) -> (&'static str, Duration) {
        let failure = enter(origins, namespace).await.err().unwrap();
        let FailureCause::RetryAfter(delay) = failure.cause() else { panic!("{failure:?}") };
        (failure.reason(), delay)
    }

    #[tokio::test(start_paused = true)]
    async fn a_namespace_has_so_many_calls_at_an_origin_and_others_have_theirs() {
        let origins = origins(2);
        let _held = [enter(&origins, "shop").await.unwrap(), enter(&origins, "shop").await.unwrap()];
        let (reason, first) = refusal(&origins, "shop").await;
        let (_, second) = refusal(&origins, "shop").await;
        assert_eq!(reason, "OriginBusy");
        assert!(second > first, "each has its turn: {first:?}, {second:?}");
        enter(&origins, "blog").await.unwrap();
        origins.enter("shop", &Url::parse("https://example.com:8443/").unwrap(), LONGEST_REST).await.unwrap();
        tokio::time::advance(Duration::from_secs(3600)).await;
        for _ in 0..100 {
            assert!(refusal(&origins, "shop").await.1 <= LONGEST_TURN);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_calls_end_fast_the_next_one_waits_for_its_place() {
        let origins = Arc::new(origins(1));
        let held = enter(&origins, "shop").await.unwrap();
        let waiting = tokio::spawn({
            let origins = origins.clone();
            async move { enter(&origins, "shop").await.map(drop) }
        });
        tokio::time::advance(Duration::from_millis(100)).await;
        drop(held);
        waiting.await.unwrap().unwrap();
        // One that does not end is waited for once.
        let _held = enter(&origins, "shop").await.unwrap();
        let asked = Instant::now();
        assert_eq!(refusal(&origins, "shop").await.0, "OriginBusy");
        assert!(asked.elapsed() >= PATIENCE);
        let asked = Instant::now();
        assert_eq!(refusal(&origins, "shop").await.0, "OriginBusy");
        assert!(asked.elapsed().is_zero());
    }

    #[tokio::test(start_paused = true)]
    async fn an_origin_that_refuses_connections_rests_longer_and_longer_and_one_call_tries_it() {
        let origins = origins(8);
        let mut many = Vec::new();
        for _ in 0..8 {
            many.push(enter(&origins, "shop").await.unwrap());
        }
        many.iter().for_each(|call| call.shows(Shown::Refused));
        drop(many);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let (reason, delay) = refusal(&origins, "shop").await;
            assert_eq!(reason, "OriginResting");
            assert!(delay >= Duration::from_secs(seconds) && delay <= Duration::from_secs(seconds + 1), "{delay:?}");
            tokio::time::advance(Duration::from_secs(seconds)).await;
            let probe = enter(&origins, "shop").await.unwrap();
            assert_eq!(refusal(&origins, "shop").await.0, "OriginResting", "one is enough");
            probe.shows(Shown::Refused);
        }
        tokio::time::advance(LONGEST_REST).await;
        enter(&origins, "shop").await.unwrap().shows(Shown::Answered);
        let _both = [enter(&origins, "shop").await.unwrap(), enter(&origins, "shop").await.unwrap()];
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_kept_whatever_earlier_calls_show() {
        let origins = origins(8);
        let earlier = enter(&origins, "shop").await.unwrap();
        enter(&origins, "shop").await.unwrap().shows(Shown::Pause(Duration::from_secs(30)));
        earlier.shows(Shown::Answered);
        let (reason, delay) = refusal(&origins, "shop").await;
        assert_eq!(reason, "OriginResting");
        assert!(delay >= Duration::from_secs(30));
        enter(&origins, "blog").await.unwrap();
        tokio::time::advance(Duration::from_secs(30)).await;
        // A probe that ends without a word leaves the question to the next.
        drop(enter(&origins, "shop").await.unwrap());
        enter(&origins, "shop").await.unwrap().shows(Shown::Answered);
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_calls_is_forgotten_when_there_is_too_much_of_it() {
        let origins = origins(1);
        let named = |n: usize| Url::parse(&format!("https://a{n}.example.com")).unwrap();
        let _held = origins.enter("shop", &named(0), LONGEST_REST).await.unwrap();
        for n in 1..MANY + 10 {
            origins.enter("shop", &named(n), LONGEST_REST).await.unwrap().shows(Shown::Pause(LONGEST_REST));
        }
        assert!(lock(&origins.known).len() < 20);
        assert!(origins.enter("shop", &named(0), LONGEST_REST).await.is_err(), "its call is still under way");
    }
}
