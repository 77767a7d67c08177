//! How long a backlog takes, from the worker's start to the last finish committed, seen from another connection.

use std::time::Duration;

use jobrequest::queue::{Channel, Listener, Queue, Settings};
use sqlx::{Connection, PgConnection};
use tokio::time::{Instant, sleep};

use crate::Outcome;
use crate::child::Child;
use crate::contenders::Contender;
use crate::database::{Load, Server, assert_kept};
use crate::ours::LEASE;

const LIMIT: Duration = Duration::from_secs(600);
/// The product's mirror reads no faster.
const FEED_GAP: Duration = Duration::from_millis(10);
const FEED_PAGE: i64 = 500;

pub struct Drain {
    pub jobs_per_second: f64,
    /// Of the queue's own processes, in seconds of CPU per million jobs.
    pub worker_cpu: f64,
}

/// Drains a fresh copy of this load with so many processes.
pub async fn drain(server: &Server, who: &Contender, load: Load, how: &str, processes: usize) -> Outcome<Drain> {
    let database = server.fresh(who, load).await?;
    let url = server.url(&database);
    let mut watcher = server.connect(&database).await?;
    let mut children = Vec::new();
    for _ in 0..processes {
        children.push(Child::start(who, &[how], &url)?);
    }
    for child in &children {
        child.ready()?;
    }
    let feed = matches!(load, Load::Controller(_)).then(|| tokio::spawn(read_feed(url.clone())));
    let start = Instant::now();
    for child in &mut children {
        child.go()?;
    }
    let end = wait_for_end(&mut watcher, who, &mut children, load.jobs(), start + LIMIT).await?;
    let cpu: f64 = children.iter().map(|child| cpu_seconds(child.pid())).sum();
    if let Some(feed) = feed {
        feed.abort();
    }
    for child in &mut children {
        child.tell_to_end();
    }
    if who.schema == "ours" {
        if how == "drain" {
            // Each process asks its own sessions, and fails if one is not synchronous.
            let asked: Vec<f64> = children.iter().map(|child| child.number("synchronous")).collect::<Outcome<_>>()?;
            if asked.contains(&0.0) {
                return Err("a worker had no session to ask for its synchronous_commit".into());
            }
        }
        assert_kept(&mut watcher, load.jobs(), LEASE.as_secs()).await?;
    } else if let Some(succeeded) = who.succeeded {
        let (count,): (i64,) = sqlx::query_as(succeeded).fetch_one(&mut watcher).await?;
        if u64::try_from(count)? != load.jobs() {
            return Err(format!("{}: {count} of {} jobs succeeded at once", who.name, load.jobs()).into());
        }
    }
    drop(children);
    watcher.close().await?;
    server.drop(&database).await?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52 jobs")]
    let jobs = load.jobs() as f64;
    Ok(Drain { jobs_per_second: jobs / (end - start).as_secs_f64(), worker_cpu: cpu / jobs * 1e6 })
}

/// Until all executors have run, only their own counts are looked at: looking into the database costs it something.
async fn wait_for_end(
    watcher: &mut PgConnection,
    who: &Contender,
    children: &mut [Child],
    jobs: u64,
    limit: Instant,
) -> Outcome<Instant> {
    while children.iter().map(Child::done).sum::<u64>() < jobs {
        check_limit(limit, who, children)?;
        sleep(Duration::from_millis(1)).await;
    }
    loop {
        // What this statement sees was committed before it was sent.
        let sent = Instant::now();
        let (left,): (bool,) = sqlx::query_as(who.left).fetch_one(&mut *watcher).await?;
        if !left {
            return Ok(sent);
        }
        check_limit(limit, who, children)?;
        sleep(Duration::from_millis(1)).await;
    }
}

fn check_limit(limit: Instant, who: &Contender, children: &mut [Child]) -> Outcome<()> {
    children.iter_mut().try_for_each(Child::check_alive)?;
    if Instant::now() < limit {
        return Ok(());
    }
    let done: u64 = children.iter().map(Child::done).sum();
    Err(format!("{}: only {done} jobs were run within {} s", who.name, LIMIT.as_secs()).into())
}

/// Reads the change feed as the controller does, without writing statuses: those are Kubernetes' to bear.
async fn read_feed(url: String) -> Outcome<()> {
    let database: sqlx::postgres::PgConnectOptions = url.parse()?;
    let queue = Queue::new(database.clone(), Settings::default());
    let listener = Listener::spawn(database, &[Channel::Changed]);
    let mut after = None;
    loop {
        listener.woken(Channel::Changed).await;
        (_, after) = queue.due(after, FEED_PAGE).await?;
        sleep(FEED_GAP).await;
    }
}

/// What a process has used so far, user and system.
pub fn cpu_seconds(pid: u32) -> f64 {
    // Fields 14 and 15, in ticks of 10 ms; the name before them may hold spaces.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
