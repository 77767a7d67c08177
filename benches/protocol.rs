//! How the benchmark talks with the programs that it measures, ours and the peers': lines on their standard input and
//! output. The code that counts and times is the same for all of them.
//!
//! A program prints `ready` when all that may be prepared is prepared, and starts when it reads `go`. While its worker
//! runs it prints `done N`: how many jobs the executor has run. It ends when its standard input ends.

use std::io::{BufRead, Write};
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

static DONE: AtomicU64 = AtomicU64::new(0);
static WAITED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Says a line to the benchmark.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The benchmark is gone: so is the reason to go on.
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

/// Waits for the benchmark's word.
pub fn ready() {
    now_nanos();
    say("ready");
    read_line();
}

fn read_line() -> bool {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).is_ok_and(|bytes| bytes > 0)
}

/// Called by the executor for each job that it runs.
pub fn count_one() {
    count(1);
}

pub fn count(jobs: u64) {
    DONE.fetch_add(jobs, Ordering::Relaxed);
}

/// Nanoseconds since the process was ready; never 0.
pub fn now_nanos() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// Called by the executor for a job that carries when it was sent; 0 for one that does not.
pub fn started(sent_nanos: u64) {
    if sent_nanos > 0 {
        WAITED.lock().expect("nothing panics under this lock").push(now_nanos().saturating_sub(sent_nanos));
    }
}

/// Tells the benchmark of the jobs that were run, every 10 ms, from a thread of its own.
pub fn report_done() {
    std::thread::spawn(|| {
        let mut told = 0;
        loop {
            let done = DONE.load(Ordering::Relaxed);
            if done != told {
                say(&format!("done {done}"));
                told = done;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}

/// Returns when the benchmark wants no more.
pub async fn told_to_end() {
    tokio::task::spawn_blocking(|| while read_line() {}).await.expect("reading does not panic");
}

/// Enqueues `total` jobs over this many tasks, each one after the other, and prints `seconds`.
pub async fn one_by_one<F, E>(total: u64, tasks: u64, enqueue: F)
where
    F: Fn() -> E + Clone + Send + 'static,
    E: Future<Output = ()> + Send,
{
    let each = |jobs: u64, enqueue: F| {
        tokio::spawn(async move {
            for _ in 0..jobs {
                enqueue().await;
            }
        })
    };
    // Connections are opened before the clock runs.
    let warm: Vec<_> = (0..tasks).map(|_| each(5, enqueue.clone())).collect();
    for task in warm {
        task.await.expect("an enqueue that fails ends the benchmark");
    }
    ready();
    let start = Instant::now();
    let tasks: Vec<_> = (0..tasks).map(|_| each(total / tasks, enqueue.clone())).collect();
    for task in tasks {
        task.await.expect("an enqueue that fails ends the benchmark");
    }
    say(&format!("seconds {}", start.elapsed().as_secs_f64()));
}

/// Enqueues a job with the time every so often, and prints how many microseconds each had waited when its executor
/// started it: from before the enqueue was called.
pub async fn start_latency<F, E>(jobs: u64, every: Duration, enqueue: F)
where
    F: Fn(u64) -> E,
    E: Future<Output = ()>,
{
    const WARM_UP: u64 = 20;
    for _ in 0..WARM_UP {
        enqueue(0).await;
        tokio::time::sleep(every).await;
    }
    ready();
    let mut ticks = tokio::time::interval(every);
    for _ in 0..jobs {
        ticks.tick().await;
        enqueue(now_nanos()).await;
    }
    let waited = || WAITED.lock().expect("nothing panics under this lock").clone();
    let patience = Instant::now() + Duration::from_secs(20);
    while (waited().len() as u64) < jobs && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for nanos in waited() {
        say(&format!("waited_us {}", nanos / 1000));
    }
    say("end");
}
