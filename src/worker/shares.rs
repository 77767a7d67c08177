//! What a kind may take of the slots, and how far ahead of its jobs may be claimed. Pure.
//!
//! One slow kind never takes every slot: with K registered kinds and C slots each kind has max(1, C / 4K) slots of its
//! own that no other kind may take; none when there are fewer slots than kinds. The most that a kind may take is C less
//! what the others have for their own: with 4 kinds and 32 slots each kind has 2 of its own and takes at most 26.
//!
//! Jobs are claimed before their slots are free (prefetched) only of kinds that are known to be fast: so many as all of
//! the kind's slots start within about a tenth of a second, by a moving average of how long its attempts take. Attempts
//! that suddenly take ten times as long make that one second of work; what still waits after two is handed back.

use std::time::Duration;

/// The most slots each of `kinds` kinds may take of `slots`.
pub(super) fn most(slots: usize, kinds: usize) -> usize {
    if slots < kinds {
        return slots;
    }
    let own = (slots / (4 * kinds)).max(1);
    slots - own * (kinds - 1)
}

/// The most prefetched jobs, of all kinds. Their payloads are at most 2 kB each: [`crate::queue::Payloads::Small`].
pub(super) const AHEAD_ROWS: usize = 2000;
/// How much work is claimed ahead.
const AHEAD_SECONDS: f64 = 0.1;
/// How many attempts of a kind must have ended before it counts as known.
const KNOWN_AFTER: u32 = 8;
/// What a slower or faster attempt weighs in the average: slowness shows at once, speed must last.
const SLOWER: f64 = 0.125;
const FASTER: f64 = 0.03125;
/// A kind whose attempts take longer gains nothing by prefetching: fewer than this many a slot would be ahead.
const LEAST_AHEAD_PER_SLOT: f64 = 0.5;

/// How long a kind's attempts take.
#[derive(Debug, Default)]
pub(super) struct Pace {
    ended: u32,
    average: f64,
}

impl Pace {
    pub(super) fn ended(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.ended = self.ended.saturating_add(1);
        if self.ended <= KNOWN_AFTER {
            self.average += (took - self.average) / f64::from(self.ended);
        } else {
            self.average += (took - self.average) * if took > self.average { SLOWER } else { FASTER };
        }
    }

    /// It was mistaken: learn anew.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// How many jobs may wait for `slots` slots of this kind.
    pub(super) fn ahead(&self, slots: usize) -> usize {
        if self.ended < KNOWN_AFTER {
            return 0;
        }
        let per_slot = AHEAD_SECONDS / self.average.max(1e-6);
        if per_slot < LEAST_AHEAD_PER_SLOT {
            return 0;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "clamped"
        )]
        let rows = (per_slot * slots as f64).min(AHEAD_ROWS as f64) as usize;
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_keeps_a_few_slots_from_all_others() {
        for (slots, kinds, most_of_one) in
            [(1, 1, 1), (32, 1, 32), (32, 4, 26), (1000, 4, 814), (4, 4, 1), (3, 4, 3), (8, 2, 7), (2, 2, 1)]
        {
            assert_eq!(most(slots, kinds), most_of_one, "{slots} slots, {kinds} kinds");
        }
    }

    #[test]
    fn only_a_kind_known_to_be_fast_is_prefetched_and_no_more_than_a_tenth_of_a_second_of_it() {
        let ms = Duration::from_millis;
        for (took, times, ahead) in [
            (Duration::from_micros(1), 7, 0),
            (Duration::from_micros(1), 8, AHEAD_ROWS),
            (ms(20), 8, 160),
            (ms(100), 100, 32),
            (ms(250), 100, 0),
            (ms(60_000), 100, 0),
        ] {
            let mut pace = Pace::default();
            (0..times).for_each(|_| pace.ended(took));
            let found = pace.ahead(32);
            assert!(found.abs_diff(ahead) <= 1, "{took:?} x {times}: {found}, not {ahead}");
        }
    }

    #[test]
    fn slowness_shows_within_a_few_attempts_and_a_mistake_is_forgotten() {
        let mut pace = Pace::default();
        (0..1000).for_each(|_| pace.ended(Duration::from_millis(1)));
        (0..8).for_each(|_| pace.ended(Duration::from_secs(1)));
        assert_eq!(pace.ahead(32), 0);
        pace.forget();
        assert_eq!(pace.ahead(1000), 0);
    }
}
