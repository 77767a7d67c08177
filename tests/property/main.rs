//! The queue against its rules: random sequences of its operations, on a real Postgres, compared with a model after
//! every step: each row, each kept key, each answer.
//!
//! Two installs share the database; three workers claim (by kind, and by survey and lanes), beat, finish (alone, in
//! batches that mix workers and stale claims, or with the reply lost and sent again), die, and take up claims whose
//! reply was lost. Jobs are enqueued one by one, in bulk and in SQL, replies are lost here too; people cancel, retry and
//! edit; resources share jobs by key, are shown their job's status, and are let go; leases end, rows are rescued and
//! purged; clocks move forward by hours and backward.
//!
//! The model states what is promised, row by row (`model.rs` of the queue and its workers, `people.rs` of people, the
//! controller and time). It decides by the same pure functions as the queue
//! ([`jobrequest::job::decide`], [`jobrequest::job::clamp_max_attempts`]), which have tests of their own, and knows
//! nothing of the queue's SQL. What is the database's choice (ids, times, the back-off's jitter, which of the due jobs)
//! it takes from the rows, once it is seen to be within the rules: a time must lie within its step.
//!
//! Bounds: up to 7 jobs at the start, then 1 to 39 parts, a part being one step or a few that belong together; 3
//! workers, 3 kinds, 8 resources in 2 namespaces, 2 keys, batches of at most 24. Steps follow one another: what two sessions do at once is
//! shown by `tests/queue_*.rs` and, over all orders, by `tests/model/`; what a broken connection does to each operation
//! by `tests/queue_faults/`. Left out, too: what is refused before it is sent (payloads, ranges), rows that can't be
//! read, payloads left out of a claim, the orphan sweep's questions, notifications, and `updated_at`.
//!
//! A case's sequence follows from its seed. A failure names the seed and the shortest sequence found; with
//! `PROPTEST_RNG_SEED` set to it and `PROPTEST_CASES=1` the same case runs again. `PROPTEST_CASES` is the number of
//! cases, 2,000 if it is not set. That it finds what is wrong is shown by `teeth.rs`.

mod database;
mod guards;
mod job;
mod model;
mod ops;
mod people;
mod steps;
#[path = "../support/mod.rs"]
mod support;
mod teeth;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::TestCaseError;
use proptest::test_runner::{Config, RngSeed, TestError, TestRunner};

use database::Lab;
use job::Check;
use ops::{Op, sequence};
use steps::Case;
use tokio::runtime::{Builder, Runtime};

const CASES: u64 = 2_000;
const SHORTEN_FOR: Duration = Duration::from_secs(120);

fn cases() -> u64 {
    std::env::var("PROPTEST_CASES").map_or(CASES, |cases| cases.parse().expect("PROPTEST_CASES is a number"))
}

async fn run(lab: &Lab, ops: &[Op]) -> Check {
    let mut case = Case::new(lab).await;
    for (at, op) in ops.iter().enumerate() {
        case.step(op).await.map_err(|error| match error {
            TestCaseError::Fail(why) => TestCaseError::fail(format!("step {}, {op:?}: {why}", at + 1)),
            rejected => rejected,
        })?;
    }
    Ok(())
}

/// A thread's part of the work: cases one after the other, on a database of its own.
struct Bench {
    runtime: Runtime,
    lab: Option<Lab>,
    cases: u32,
}

impl Bench {
    fn with(lab: impl Future<Output = Lab>) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let lab = Some(runtime.block_on(lab));
        Self { runtime, lab, cases: 0 }
    }

    fn lab(&self) -> &Lab {
        self.lab.as_ref().expect("it is there until the end")
    }

    /// Why the case fails, if it does, in the shortest sequence found in that time, and how to run it again.
    fn failure_of(&mut self, seed: u64, shorten_for: Duration) -> Option<String> {
        self.cases += 1;
        if self.cases.is_multiple_of(16) {
            self.runtime.block_on(self.lab().vacuum());
        }
        let config = Config {
            cases: 1,
            rng_seed: RngSeed::Fixed(seed),
            failure_persistence: None,
            max_shrink_iters: if shorten_for.is_zero() { 0 } else { 5_000 },
            max_shrink_time: u32::try_from(shorten_for.as_millis()).expect("a few minutes"),
            ..Config::default()
        };
        let outcome = TestRunner::new(config).run(&sequence(), |ops| self.runtime.block_on(run(self.lab(), &ops)));
        let said = match outcome.err()? {
            TestError::Fail(why, ops) => format!("{why}\nin the sequence {ops:#?}"),
            TestError::Abort(why) => why.to_string(),
        };
        Some(format!("{said}\nagain: PROPTEST_RNG_SEED={seed} PROPTEST_CASES=1"))
    }
}

impl Drop for Bench {
    /// The queues' tasks end with the runtime; what they hold needs it.
    fn drop(&mut self) {
        let lab = self.lab.take();
        self.runtime.block_on(async { drop(lab) });
    }
}

/// Cases wait for Postgres more than they work.
fn in_threads(work: impl Fn() + Sync) {
    let threads = 2 * std::thread::available_parallelism().map_or(2, usize::from).min(4);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(&work);
        }
    });
}

#[test]
fn every_sequence_of_operations_leaves_what_the_rules_say() {
    let cases = cases();
    let first_seed = match Config::default().rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => rand::random(),
    };
    eprintln!("{cases} cases from seed {first_seed} on");
    let (next, failure) = (AtomicU64::new(0), Mutex::new(None));
    in_threads(|| {
        let mut bench = Bench::with(Lab::new());
        loop {
            let case = next.fetch_add(1, Ordering::SeqCst);
            if case >= cases {
                break;
            }
            if let Some(why) = bench.failure_of(first_seed.wrapping_add(case), SHORTEN_FOR) {
                next.store(cases, Ordering::SeqCst);
                failure.lock().expect("not poisoned").get_or_insert(why);
            }
        }
    });
    if let Some(failure) = failure.into_inner().expect("not poisoned") {
        panic!("{failure}");
    }
}
