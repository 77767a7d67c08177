//! The domain: what states a job has, and what follows what. Pure: no SQL, no Kubernetes, no clock, no randomness;
//! times and jitter are arguments.
//!
//! [`decide`] is the one place that knows what follows a failure, a crash, a hand-back or a cancel. The queue's
//! statements apply its answer and add the guards (status and claim token); the model test explores the same function.

mod retry;
mod state;

pub use retry::{Cause, Facts, HAND_BACK_LIMIT, Next, RetryPolicy, clamp_max_attempts, decide};
pub use state::{Job, JobState, Outcome, PastAttempt, Status};
