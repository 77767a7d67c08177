//! All lives of one job: an exhaustive model of the queue's rules, on the functions that the queue itself decides by
//! ([`jobrequest::job::decide`], [`jobrequest::job::clamp_max_attempts`]).
//!
//! A state is the row, what each worker holds in memory, and a message that is still under way. The checker walks
//! through every order of: claim (its reply heard or lost), taking up a lost claim, start, the point of no return,
//! success, failure (passing, which is also a panic or the time limit; permanent; Retry-After), hand-back, the
//! executor's own "cancelled", heartbeat (heard or lost), the end of a lease for its worker and for the database,
//! death and restart, a finish that is delivered, delivered unheard, sent again, or late after its worker's death,
//! rescue, cancel, edit of maxAttempts, explicit retry (each mark also sent again), the status shown, retention, and
//! the passing of time.
//!
//! In every state and at every step it checks the first four of product.md's promises, and that from every state a
//! terminal one can be reached with no person's help, whatever the attempts come to from there on: all succeed, all
//! fail, all are handed back, all are told to come later, or every worker dies each time.
//!
//! Bounds. One job; 2 workers with maxAttempts 1 to 4 and 3 workers with 1 to 3, edited at will; two explicit retries;
//! one message that outlives its sender at a time. Times are orders: a back-off is over or not, a lease is over or
//! not, hand-backs go on for less or more than a day. What the holder of a lost claim remembers is left out, as any
//! change that it makes counts as wrong. Assumed, as by the product: a lease ends for its worker (counted from before
//! it sent the claim or heartbeat) before it ends for the database; a statement is done whole, under the row's lock.
//! That the SQL has each guard is shown by tests/queue_*.rs. Suspended jobs are left out, as they wait for a person by
//! design, and so are keys, sharers and the order of revisions.

mod check;
mod rules;
mod state;
mod steps;

use check::{Bounds, explore};
use rules::{Guard, Rules};
use steps::Step;

const TWO: Bounds = Bounds { workers: 2, max_attempts: &[1, 2, 3, 4], retries: 2 };
const THREE: Bounds = Bounds { workers: 3, max_attempts: &[1, 2, 3], retries: 2 };
/// Enough to find what is wrong with broken rules.
const SMALL: Bounds = Bounds { workers: 2, max_attempts: &[1, 2], retries: 1 };

fn the_real_rules_hold(bounds: Bounds) {
    let explored = explore(&Rules::real(), bounds).unwrap_or_else(|broken| panic!("{broken}"));
    // Far fewer states would mean that the model has lost some of its steps.
    assert!(explored.states > 100_000, "{explored:?}");
    // The real rescue reads and writes under one lock.
    assert_eq!(explored.unused_steps, [Step::RescueReads]);
    eprintln!("{} states", explored.states);
}

/// What the checker says of these rules.
fn breaks(rules: &Rules) -> String {
    match explore(rules, SMALL) {
        Ok(explored) => panic!("{rules:?}: nothing found in {} states", explored.states),
        Err(broken) => broken.to_string(),
    }
}

#[test]
fn two_workers_keep_every_promise() {
    the_real_rules_hold(TWO);
}

#[test]
fn three_workers_keep_every_promise() {
    the_real_rules_hold(THREE);
}

#[test]
fn a_claim_that_passes_over_cancelled_rows_leaves_one_stuck() {
    // A cancel only sets the flag.
    let naive = Rules::without(&[Guard::CancelEndsWaiting]).claim_leaves_out_cancelled();
    assert!(breaks(&naive).contains("no terminal state can be reached"));
    // And the rescue puts a cancelled row back.
    let naive = Rules::without(&[Guard::RescueHeedsCancel]).claim_leaves_out_cancelled();
    assert!(breaks(&naive).contains("waits again after its rescue"));
}

#[test]
fn a_rescue_that_ignores_the_limit_makes_one_attempt_too_many() {
    assert!(breaks(&Rules::without(&[Guard::RescueHeedsLimit])).contains("attempts over maxAttempts"));
}

#[test]
fn a_finish_that_names_only_the_id_writes_to_somebody_elses_claim() {
    let naive = Rules::without(&[Guard::FinishNamesToken, Guard::FinishNeedsRunning]);
    assert!(breaks(&naive).contains("whose lease had ended"));
}

#[test]
fn a_token_that_two_claims_can_share_is_none() {
    for rules in [Rules::real().token_is_the_attempt(), Rules::real().token_is_the_worker()] {
        assert!(breaks(&rules).contains("whose lease had ended"), "{rules:?}");
    }
}

#[test]
fn each_guard_taken_away_breaks_a_promise() {
    let promises = [
        (Guard::ClaimNeedsWaiting, "attempts over maxAttempts"),
        (Guard::ClaimNeedsDue, "before it is due"),
        (Guard::FinishNeedsRunning, "whose lease had ended"),
        (Guard::FinishNamesToken, "whose lease had ended"),
        (Guard::FinishHeedsCancel, "asked to stop is claimed"),
        (Guard::FinalizeNeedsRequest, "nobody asked to stop"),
        (Guard::BeatNeedsRunning, "whose lease had ended"),
        (Guard::BeatNamesToken, "whose lease had ended"),
        (Guard::RescueNeedsRunning, "not its to change"),
        (Guard::RescueNeedsLeaseOver, "not its to change"),
        (Guard::RescueHoldsRow, "not its to change"),
        (Guard::RescueClearsToken, "told of a finish that was not applied"),
        (Guard::RescueHeedsCancel, "waits again after its rescue"),
        (Guard::RescueHeedsLimit, "attempts over maxAttempts"),
        (Guard::LostLeaseCosts, "not the claims that count"),
        (Guard::FailureHeedsLimit, "attempts over maxAttempts"),
        (Guard::FailureWaits, "tried again at once"),
        (Guard::HandBacksEnd, "no terminal state can be reached"),
        (Guard::CancelEndsWaiting, "asked to stop is claimed"),
        (Guard::CancelLeavesEnded, "a job that has ended changes"),
        (Guard::EditNeedsWaiting, "a job that has ended changes"),
        (Guard::EditLeavesOneAttempt, "attempts over maxAttempts"),
        (Guard::RetryNeedsEnd, "takes a row that lives"),
        (Guard::RetryLeavesSucceeded, "a job that has ended changes"),
        (Guard::RetryOncePerMark, "a mark works twice"),
        (Guard::RetryStartsFromZero, "not the claims that count"),
        (Guard::RetryLiftsCancel, "asked to stop is claimed"),
        (Guard::PurgeNeedsEnd, "an accepted job is lost"),
        (Guard::PurgeNeedsShown, "before its end was shown"),
        (Guard::WorkerStopsBeforeItsLeaseEnds, "a lease that is another's"),
        (Guard::LeaseCountsFromSending, "a lease that is another's"),
        (Guard::StartNeedsLease, "starts a job without the lease"),
        (Guard::StartHeedsCancel, "has heard of the cancel"),
        (Guard::HandBackBeforeNoReturn, "past its point of no return"),
    ];
    assert_eq!(promises.map(|(guard, _)| guard), Guard::ALL);
    for (guard, promise) in promises {
        let broken = breaks(&Rules::without(&[guard]));
        assert!(broken.contains(promise), "{guard:?}: {broken}");
    }
}
