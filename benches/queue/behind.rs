//! How soon a job of a higher priority starts while every slot is taken and a backlog of lower ones never ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlx::{Connection, PgConnection};

use crate::child::Child;
use crate::contenders::OURS;
use crate::database::Server;
use crate::load::{Load, SLOW};
use crate::small::EVERY;
use crate::{Outcome, percentile, quotient};

/// The backlog is kept at this, and never under the other.
const BACKLOG: u64 = 200_000;
const LEAST: u64 = 100_000;
const BATCH: u64 = 1000;

pub struct Behind {
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// Of all slots, in percent: the median of ten looks a second.
    pub busy_percent: f64,
    pub least_backlog: u64,
    /// All jobs, from the worker's start.
    pub jobs_per_second: f64,
}

pub async fn behind(server: &Server, slots: usize, time: Duration) -> Outcome<Behind> {
    let database = server.fresh(&OURS, Load::Slow(BACKLOG)).await?;
    let jobs = time.as_millis() / EVERY.as_millis();
    let command = ["behind", &jobs.to_string(), &EVERY.as_millis().to_string(), &slots.to_string()];
    let mut child = Child::start(&OURS, &command, &server.url(&database))?;
    let ended = Arc::new(AtomicBool::new(false));
    let counter = child.counter();
    let began = Instant::now();
    let feeding = feed(server.connect(&database).await?, child.counter(), ended.clone());
    let feeding = tokio::spawn(feeding);
    // What it says is read on a thread of its own: this one's runtime feeds the backlog meanwhile.
    let said = tokio::task::spawn_blocking(move || -> Outcome<_> {
        child.ready()?;
        child.heard("busy ");
        child.go()?;
        child.several(["waited_us ", "busy "])
    })
    .await?;
    let jobs_per_second = quotient(counter.load(Ordering::Acquire), began.elapsed().as_secs_f64());
    ended.store(true, Ordering::Release);
    let least_backlog = feeding.await??;
    let [mut waited, mut busy] = said?;
    server.drop(&database).await?;
    if waited.len() as u128 != jobs {
        return Err(format!("{} of {jobs} jobs of a higher priority started", waited.len()).into());
    }
    if least_backlog < LEAST {
        return Err(format!("the backlog fell to {least_backlog} jobs").into());
    }
    let mut at = |share| percentile(&mut waited, share).ok_or("nothing was measured");
    let busy = percentile(&mut busy, 50).ok_or("nobody said how many slots were taken")?;
    #[expect(clippy::cast_precision_loss, reason = "some thousand slots")]
    let busy_percent = busy / slots as f64 * 100.0;
    Ok(Behind { p50_ms: at(50)? / 1000.0, p99_ms: at(99)? / 1000.0, busy_percent, least_backlog, jobs_per_second })
}

/// Keeps the backlog up, until told that the measurement has ended; says what was the least.
async fn feed(mut connection: PgConnection, done: Arc<AtomicU64>, ended: Arc<AtomicBool>) -> Outcome<u64> {
    let (mut enqueued, mut least) = (BACKLOG, BACKLOG);
    while !ended.load(Ordering::Acquire) {
        let backlog = enqueued.saturating_sub(done.load(Ordering::Acquire));
        least = least.min(backlog);
        if backlog < BACKLOG {
            sqlx::query(SLOW).bind(i32::try_from(BATCH)?).execute(&mut connection).await?;
            enqueued += BATCH;
        } else {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    connection.close().await?;
    Ok(least)
}
