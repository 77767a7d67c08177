//! `make bench`: the queue against its peers, side by side in one run on one Postgres.
//!
//! A program, not a timed test. It starts every queue as a process of its own (this program with `ours`, or a peer's
//! from `benches/peers/`), gives it a fresh copy of a preloaded database, and watches from a connection of its own.
//! Rounds are interleaved: what drifts on the machine hits all alike, and only ratios within one run are judged.
//!
//! The promise stays what it is: the worker is the product's, with a lease of 3 s, so that heartbeats and rescues run
//! in each drain; after each drain every job is counted exactly once succeeded at its first attempt, and tables, CHECKs
//! and sessions are asked whether they were logged, validated and synchronous.
//!
//! tests/cluster/bench builds the programs and starts Postgres; it says which settings there are.

mod bars;
mod behind;
mod child;
mod claim;
mod contenders;
mod database;
mod drain;
mod figures;
mod held;
mod idle;
mod load;
mod ours;
mod plan;
#[path = "../protocol.rs"]
mod protocol;
mod row;
mod small;
mod svg;

use std::process::ExitCode;

/// What went wrong, in one line.
type Failed = Box<dyn std::error::Error + Send + Sync>;
type Outcome<T> = Result<T, Failed>;

/// So many by this.
fn quotient(jobs: u64, by: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52 jobs")]
    let jobs = jobs as f64;
    jobs / by
}

/// The value below which this share of them lies, in percent; they are sorted on the way.
fn percentile(values: &mut [f64], share: usize) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? * share / 100).copied()
}

fn main() -> ExitCode {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    let outcome = runtime.block_on(async {
        match arguments.split_first() {
            Some((ours, command)) if ours == "ours" => ours::run(command).await.map(|()| ExitCode::SUCCESS),
            _ => plan::run().await,
        }
    });
    outcome.unwrap_or_else(|error| {
        eprintln!("FAILED: {error}");
        ExitCode::FAILURE
    })
}
