//! The measurements that need no backlog: enqueue, and how soon a job starts.

use std::time::Duration;

use crate::child::Child;
use crate::contenders::Contender;
use crate::database::Server;
use crate::load::Load;
use crate::{Outcome, percentile, quotient};

pub const EVERY: Duration = Duration::from_millis(50);
pub const CONNECTIONS: u64 = 16;

/// Jobs a second, enqueued one by one over 16 connections.
pub async fn enqueue(server: &Server, who: &Contender, jobs: u64) -> Outcome<f64> {
    timed(server, who, jobs, &["enqueue", &jobs.to_string(), &CONNECTIONS.to_string()]).await
}

/// Jobs a second in batches, one after the other: `how` is `bulk`, or `insert` for our tables without our queue.
pub async fn bulk(server: &Server, who: &Contender, how: &str, jobs: u64, batch: u64) -> Outcome<f64> {
    timed(server, who, jobs, &[how, &jobs.to_string(), &batch.to_string()]).await
}

async fn timed(server: &Server, who: &Contender, jobs: u64, command: &[&str]) -> Outcome<f64> {
    let database = server.fresh(who, Load::Empty).await?;
    let mut child = Child::start(who, command, &server.url(&database))?;
    child.ready()?;
    child.go()?;
    let seconds = child.number("seconds")?;
    drop(child);
    server.drop(&database).await?;
    Ok(quotient(jobs, seconds))
}

/// From before a job's enqueue to its executor's start, in milliseconds: the median and the 99th percentile of one job
/// every 50 ms.
pub async fn start_latency(server: &Server, who: &Contender, jobs: u64) -> Outcome<(f64, f64)> {
    let database = server.fresh(who, Load::Empty).await?;
    let command = ["latency", &jobs.to_string(), &EVERY.as_millis().to_string()];
    let mut child = Child::start(who, &command, &server.url(&database))?;
    child.ready()?;
    child.go()?;
    let mut waited = child.numbers("waited_us ")?;
    drop(child);
    server.drop(&database).await?;
    if waited.len() as u64 != jobs {
        return Err(format!("{}: {} of {jobs} jobs started", who.name, waited.len()).into());
    }
    let mut at = |share: usize| percentile(&mut waited, share).ok_or("nothing was measured");
    Ok((at(50)? / 1000.0, at(99)? / 1000.0))
}
