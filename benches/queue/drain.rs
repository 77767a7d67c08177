//! How long a backlog takes, from the worker's start to the last finish committed, seen from another connection.

use std::time::Duration;

use jobrequest::queue::{Channel, Listener, Queue, Settings};
use sqlx::Connection;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::child::Child;
use crate::contenders::Contender;
use crate::database::{Server, assert_kept};
use crate::load::Load;
use crate::ours::LEASE;
use crate::{Outcome, quotient};

const LIMIT: Duration = Duration::from_secs(240);
/// As the product's mirror reads: pass by pass, with pauses of at least the gap and so many times what the last took.
const FEED_GAP: Duration = Duration::from_millis(10);
const FEED_REST: u32 = 4;
const FEED_POLL: Duration = Duration::from_secs(2);
const FEED_PAGE: i64 = 500;

pub struct Drain {
    pub jobs_per_second: f64,
    /// Of the queue's own processes, in seconds of CPU per million jobs.
    pub worker_cpu: f64,
    /// The most memory that one of the processes ever had.
    pub peak_mib: f64,
    pub pace: Pace,
}

/// When the executors had run so much of the backlog, each job's first attempt counted.
#[derive(Default)]
pub struct Pace {
    /// The first report: how many there were already.
    first: Option<(Instant, u64)>,
    /// After one tenth, two tenths, ... all.
    tenths: Vec<(Instant, u64)>,
    jobs: u64,
    start: Option<Instant>,
}

impl Pace {
    fn look(&mut self, done: u64) {
        let now = Instant::now();
        if done > 0 && self.first.is_none() {
            self.first = Some((now, done));
        }
        while self.tenths.len() < 10 && done * 10 >= self.jobs * (self.tenths.len() as u64 + 1) {
            self.tenths.push((now, done));
        }
    }

    fn between(from: (Instant, u64), to: (Instant, u64)) -> f64 {
        quotient(to.1.saturating_sub(from.1), (to.0 - from.0).as_secs_f64())
    }

    /// The rate of the last tenth against that of the first, whose start is the first report.
    pub fn last_to_first(&self) -> Option<f64> {
        let [first, .., before, last] = self.tenths.as_slice() else { return None };
        Some(Self::between(*before, *last) / Self::between(self.first?, *first))
    }

    /// From the start until each job was run once.
    pub fn average(&self) -> Option<f64> {
        Some(Self::between((self.start?, 0), *self.tenths.get(9)?))
    }
}

/// Drains a fresh copy of this load with so many processes.
pub async fn drain(server: &Server, who: &Contender, load: Load, how: &[&str], processes: usize) -> Outcome<Drain> {
    let database = server.fresh(who, load).await?;
    let drained = drain_in(server, who, &database, load, how, processes, Meanwhile::default()).await?;
    server.drop(&database).await?;
    Ok(drained)
}

/// What else goes on during a drain.
#[derive(Default)]
pub struct Meanwhile {
    /// Told when half of the load is done.
    pub half: Option<oneshot::Sender<()>>,
    /// How many jobs are enqueued then.
    pub more: u64,
}

pub async fn drain_in(
    server: &Server,
    who: &Contender,
    database: &str,
    load: Load,
    how: &[&str],
    processes: usize,
    mut meanwhile: Meanwhile,
) -> Outcome<Drain> {
    let url = server.url(database);
    let mut watcher = server.connect(database).await?;
    let mut children = Vec::new();
    for _ in 0..processes {
        children.push(Child::start(who, how, &url)?);
    }
    for child in &children {
        child.ready()?;
    }
    let feed = matches!(load, Load::Controller(_)).then(|| tokio::spawn(read_feed(url.clone())));
    let start = Instant::now();
    for child in &mut children {
        child.go()?;
    }
    let mut pace = Pace { jobs: load.jobs(), start: Some(start), ..Pace::default() };
    let jobs = load.jobs() + meanwhile.more;
    // Until all executors have run, only their own counts are looked at: looking into the database costs it something.
    loop {
        let done = children.iter().map(Child::done).sum::<u64>();
        pace.look(done);
        if done * 2 >= load.jobs()
            && let Some(half) = meanwhile.half.take()
        {
            half.send(()).map_err(|()| "nobody waited for the half")?;
        }
        if done >= jobs {
            break;
        }
        check_limit(start + LIMIT, who, &mut children)?;
        sleep(Duration::from_millis(1)).await;
    }
    let end = loop {
        // What this statement sees was committed before it was sent.
        let sent = Instant::now();
        let (left,): (bool,) = sqlx::query_as(who.left).fetch_one(&mut watcher).await?;
        if !left {
            break sent;
        }
        check_limit(start + LIMIT, who, &mut children)?;
        sleep(Duration::from_millis(1)).await;
    };
    let cpu: f64 = children.iter().map(Child::cpu_seconds).sum();
    let peak_mib = children.iter().map(|child| child.memory_mib("VmHWM")).fold(0.0, f64::max);
    if let Some(feed) = feed {
        feed.abort();
    }
    for child in &mut children {
        child.tell_to_end();
    }
    if who.schema == "ours" {
        if matches!(how, ["drain" | "one", ..]) {
            assert_synchronous(&children)?;
        }
        assert_kept(&mut watcher, jobs, LEASE.as_secs()).await?;
    } else if let Some(succeeded) = who.succeeded {
        let (count,): (i64,) = sqlx::query_as(succeeded).fetch_one(&mut watcher).await?;
        if u64::try_from(count)? != jobs {
            return Err(format!("{}: {count} of {jobs} jobs succeeded at once", who.name).into());
        }
    }
    drop(children);
    watcher.close().await?;
    let jobs_per_second = quotient(jobs, (end - start).as_secs_f64());
    Ok(Drain { jobs_per_second, worker_cpu: cpu * 1e6 / quotient(jobs, 1.0), peak_mib, pace })
}

/// Each process that was told to end asks its own sessions, and fails if one is not synchronous.
pub fn assert_synchronous(children: &[Child]) -> Outcome<()> {
    for child in children {
        if child.number("synchronous")? < 1.0 {
            return Err("a worker had no session to ask for its synchronous_commit".into());
        }
    }
    Ok(())
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
    loop {
        let started = Instant::now();
        let mut after = None;
        loop {
            (_, after) = queue.due(after, FEED_PAGE).await?;
            if after.is_none() {
                break;
            }
        }
        sleep((started.elapsed() * FEED_REST).clamp(FEED_GAP, FEED_POLL)).await;
        listener.woken(Channel::Changed).await;
    }
}
