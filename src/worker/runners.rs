//! Runners: tasks that run one job after the other, as the desk hands them out. A job that ends without ever waiting
//! costs no task and no timer.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::desk::Turn;
use super::{Shared, execute, lock};

/// How long a runner keeps its thread to itself.
const STRETCH: Duration = Duration::from_micros(200);

/// Slots or jobs have come to the desk.
pub(super) fn call_if_needed(shared: &Arc<Shared>) {
    if lock(&shared.desk).calls() {
        call(shared);
    }
}

/// Starts a runner that the desk calls for.
pub(super) fn call(shared: &Arc<Shared>) {
    tokio::spawn(serve(shared.clone()));
}

async fn serve(shared: Arc<Shared>) {
    let mut freed = None;
    let mut since = Instant::now();
    loop {
        let Turn { job, call: called, hungry } = lock(&shared.desk).turn(freed.take());
        if hungry {
            shared.hungry.notify_one();
        }
        let Some(job) = job else { return };
        if called {
            call(&shared);
        }
        if called || hungry || since.elapsed() > STRETCH {
            let_others_run().await;
            since = Instant::now();
        }
        freed = Some(execute::run(&shared, &job).await);
    }
}

/// A task that was woken just now stands in a place of this thread from which no other thread takes it: it must have
/// run, or have moved, before this thread meets an executor that does not yield.
pub(super) async fn let_others_run() {
    tokio::task::yield_now().await;
}
