//! The worker: claims jobs, runs their executors, writes how they ended. It knows the queue and the executors and
//! nothing of Kubernetes.
//!
//! | file | what it does |
//! |---|---|
//! | `builder.rs` | what a worker is made of |
//! | `claim.rs` | asks the queue where jobs are and takes them |
//! | `lanes.rs`, `surveys.rs` | where due jobs are, what to claim next, when to look again; pure |
//! | `desk.rs`, `shares.rs` | who gets the next slot, how much is prefetched, what a kind may take; pure |
//! | `runners.rs` | tasks that run one job after the other |
//! | `execute.rs` | one attempt, as a pipeline of named steps |
//! | `complete.rs` | writes how attempts ended, in batches, again and again while that makes sense |
//! | `running.rs` | the jobs that this worker holds, and what each has been told |
//! | `leases.rs` | renews their leases, learns of cancels, ends what no longer answers |
//! | `rescue.rs` | ends other workers' dead leases, removes old rows, measures the queue |
//!
//! A job's way: the directory plans a claim, as far as the desk has room; claimed jobs wait at the desk; a runner takes
//! the next one, runs it, and leaves its end to the finisher.
//!
//! An attempt under way is told things (its lease was renewed until then, its job was cancelled, the worker shuts down)
//! and never asked: one pure function, `execute::what_now`, weighs the orders against each other and the clock. The
//! clock is the process's monotonic one; a lease counts from before its claim or heartbeat was sent, so it ends here
//! before it ends in the database.

mod builder;
mod claim;
mod complete;
mod desk;
mod execute;
mod lanes;
mod leases;
mod rescue;
mod runners;
mod running;
mod shares;
mod surveys;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::{Beat, Health, KindMetrics, Metrics, Part};
use crate::kinds::Executor;
use crate::queue::{self, Channel, Listener, Queue};
pub use builder::{BuildError, Builder, Settings, check_kinds};
use desk::Desk;
use running::{HandBack, Run, Running, lock};

/// Runs jobs of the registered kinds from a queue.
///
/// ```no_run
/// use futures::future::BoxFuture;
/// use jobrequest::kinds::{Attempt, Executed, Executor, Failure, Registry};
/// use jobrequest::queue::{self, Queue};
/// use jobrequest::worker::Worker;
/// use tokio_util::sync::CancellationToken;
///
/// struct Greet;
///
/// impl Executor for Greet {
///     fn kind(&self) -> &'static str {
///         "greet"
///     }
///
///     fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
///         Box::pin(async move {
///             let name: String = attempt.payload()?;
///             if name.is_empty() {
///                 return Err(Failure::permanent("NobodyThere", "the payload names nobody to greet"));
///             }
///             println!("hello {name}");
///             Ok(serde_json::json!({ "greeted": true }))
///         })
///     }
/// }
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let database: sqlx::postgres::PgConnectOptions = "postgres://localhost/app".parse()?;
/// queue::migrate(&database).await?;
/// let queue = Queue::new(database.clone(), queue::Settings::default());
/// let worker = Worker::builder(queue, Registry::new().with(Greet)).concurrency(8).listen(database).build()?;
///
/// let shutdown = CancellationToken::new();
/// let on_signal = shutdown.clone();
/// tokio::spawn(async move {
///     tokio::signal::ctrl_c().await.ok();
///     on_signal.cancel();
/// });
/// worker.run(shutdown).await;
/// # Ok(())
/// # }
/// ```
pub struct Worker {
    queue: Queue,
    kinds: Vec<Kind>,
    settings: Settings,
    direct: Option<PgConnectOptions>,
    health: Health,
    metrics: Metrics,
}

/// A kind that this worker runs.
struct Kind {
    name: &'static str,
    executor: Arc<dyn Executor>,
    metrics: KindMetrics,
}

/// What a worker's parts share.
struct Shared {
    queue: Queue,
    kinds: Vec<Kind>,
    settings: Settings,
    metrics: Metrics,
    postgres: Part,
    running: Running,
    desk: Mutex<Desk<Arc<Run>>>,
    /// There is room for more jobs.
    hungry: Notify,
    listener: Option<Listener>,
    finisher: complete::Finisher,
    /// As the row has it.
    lease: Duration,
}

/// A shutdown stops attempts this share of the grace period before its end, within bounds.
const MARGIN_SHARE: u32 = 5;
const MARGIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// How much longer than the grace period an attempt past its point of no return has, and then the write of its end.
/// Together less than what the chart gives a Pod beyond the grace.
const COMMITTED_EXTRA: Duration = Duration::from_secs(10);
const LAST_WRITE: Duration = Duration::from_secs(2);

impl Worker {
    /// Works until the shutdown, then drains: claims no more, lets attempts end while the grace period lasts, stops
    /// the rest and hands their jobs back. Attempts past their point of no return have 10 s more. A database that is
    /// away is waited for; nothing ends this early.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { queue, kinds, mut settings, direct, health, metrics } = self;
        settings.batch = settings.batch.min(desk::BATCH);
        let channels = [Channel::Ready, Channel::Cancel];
        let threads = tokio::runtime::Handle::current().metrics().num_workers();
        let shared = Arc::new(Shared {
            lease: Duration::from_secs(queue.settings().lease.as_secs().max(1)),
            postgres: health.part("postgres"),
            running: Running::default(),
            desk: Mutex::new(Desk::new(settings.concurrency, kinds.len(), threads, settings.batch > 1)),
            hungry: Notify::new(),
            finisher: complete::Finisher::default(),
            listener: direct.map(|database| Listener::spawn(database, &channels)),
            queue,
            kinds,
            settings,
            metrics,
        });
        let beats = Beats::new(&health, &shared);
        let helpers = CancellationToken::new();
        let background = TaskTracker::new();
        background.spawn(leases::keep(shared.clone(), beats.heartbeat.clone(), helpers.clone()));
        background.spawn(leases::watch(shared.clone(), helpers.clone()));
        background.spawn(rescue::rescue(shared.clone(), beats.rescue.clone(), helpers.clone()));
        background.spawn(rescue::purge(shared.clone(), helpers.clone()));
        background.spawn(rescue::measure(shared.clone(), helpers.clone()));
        let (finishing, written) = (beats.finish.clone(), CancellationToken::new());
        let (finisher, until) = (shared.clone(), written.clone());
        background.spawn(async move { finisher.finisher.run(&finisher, &finishing, &until).await });
        background.close();

        let (name, slots) = (&shared.settings.name, shared.settings.concurrency);
        let kinds = shared.kinds.iter().map(|kind| kind.name).collect::<Vec<_>>().join(",");
        tracing::info!(worker = name, slots, kinds, "the worker starts");
        // The grace period counts from the shutdown, not from when a claim that was on its way has come back.
        let asked = async {
            shutdown.cancelled().await;
            Instant::now()
        };
        let (asked, ()) = tokio::join!(asked, claim::claim_until(&shutdown, &shared, &beats.claim));
        beats.claim.end();
        let drained = drain(&shared, asked).await;

        beats.heartbeat.end();
        beats.rescue.end();
        beats.finish.end();
        helpers.cancel();
        written.cancel();
        if drained {
            background.wait().await;
        }
    }
}

struct Beats {
    claim: Beat,
    heartbeat: Beat,
    rescue: Beat,
    finish: Beat,
}

impl Beats {
    /// Each may be silent for as long as its slowest turn takes: operations on a database that does not answer.
    fn new(health: &Health, shared: &Shared) -> Self {
        let slow = shared.queue.settings().time_limit * 3 + Duration::from_secs(30);
        Self {
            claim: health.beat("claim", slow + shared.settings.poll),
            heartbeat: health.beat("heartbeat", slow + shared.lease),
            rescue: health.beat("rescue", slow + shared.lease),
            finish: health.beat("finish", slow),
        }
    }
}

/// Lets the attempts under way end, and their ends be written. Their leases are renewed meanwhile. False if the worker
/// ends before that.
async fn drain(shared: &Shared, asked: Instant) -> bool {
    let grace = shared.settings.shutdown_grace;
    let margin = (grace / MARGIN_SHARE).clamp(MARGIN.0, MARGIN.1);
    let waiting = shared.running.len();
    if waiting > 0 {
        tracing::info!(jobs = waiting, seconds = grace.as_secs(), "draining");
    }
    let end = asked + grace;
    let all_ended = || shared.running.emptied();
    if timeout_at(end.checked_sub(margin).unwrap_or(asked), all_ended()).await.is_err() {
        let now = Instant::now();
        let give_up_at = end.max(now) + COMMITTED_EXTRA;
        shared.running.hand_back(HandBack { cut_at: now + margin / 2, give_up_at });
        let ended = timeout(margin, all_ended()).await.is_ok()
            || (shared.running.any_committed() && timeout_at(give_up_at + LAST_WRITE, all_ended()).await.is_ok());
        if !ended {
            tracing::warn!(jobs = shared.running.len(), "ended with jobs under way: the rescue takes them");
            return false;
        }
    }
    tracing::info!("drained");
    true
}

impl Shared {
    /// Tells the health page whether the database answers.
    fn report<T>(&self, answer: &queue::Result<T>) {
        match answer {
            Ok(_) => self.postgres.ready(),
            Err(error) => self.postgres.not_ready(error.to_string()),
        }
    }

    async fn woken(&self, channel: Channel) {
        match &self.listener {
            Some(listener) => listener.woken(channel).await,
            None => std::future::pending().await,
        }
    }
}

/// Growing pauses with jitter, from a tenth of a second to five.
#[derive(Debug, Default)]
struct BackOff {
    failures: u32,
}

impl BackOff {
    const BASE: Duration = Duration::from_millis(100);
    const CAP: Duration = Duration::from_secs(5);

    fn reset(&mut self) {
        self.failures = 0;
    }

    /// The next pause: uniform in the upper half of what the failures so far call for.
    fn next(&mut self) -> Duration {
        let whole = Self::BASE.saturating_mul(1 << self.failures.min(10)).min(Self::CAP);
        self.failures = self.failures.saturating_add(1);
        whole.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_back_off_grows_to_five_seconds_and_starts_anew_after_a_success() {
        let mut back_off = BackOff::default();
        let pauses: Vec<_> = (0..20).map(|_| back_off.next()).collect();
        assert!(pauses[0] <= BackOff::BASE && pauses[0] >= BackOff::BASE / 2);
        assert!(pauses.iter().all(|pause| *pause <= BackOff::CAP));
        assert!(pauses[10..].iter().all(|pause| *pause >= BackOff::CAP / 2), "{pauses:?}");
        back_off.reset();
        assert!(back_off.next() <= BackOff::BASE);
    }
}
