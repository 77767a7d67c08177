//! Executors that do what a test tells them, and say what happens to them: order comes from here, never from sleeping.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use jobrequest::kinds::{Attempt, Executed, Executor, Failure, Registry};
use jobrequest::queue::Queue;
use jobrequest::worker::{Builder, Worker};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

/// How long a test waits for what must happen soon.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What an attempt does once it has started.
#[derive(Debug, Clone)]
pub enum Act {
    /// Succeeds, when the stage lets it.
    Succeed,
    /// Fails in passing, when the stage lets it.
    Fail,
    /// Fails in passing as soon as it is told to stop.
    FailWhenStopped,
    /// Ends as cancelled as soon as it is told to stop.
    Stop,
    /// Waits for the stage whatever it is told.
    Ignore,
    /// The same, past its point of no return.
    Commit,
    /// Never yields to the runtime until the stage lets it.
    Block,
    Panic,
}

/// An executor of `test_kind`. Its payload is ignored; `act` says what attempts do.
#[derive(Clone)]
pub struct Stage(Arc<Inner>);

struct Inner {
    kind: &'static str,
    act: Mutex<Act>,
    runs: AtomicUsize,
    started: Semaphore,
    stopped: Semaphore,
    gone: Semaphore,
    gate: Semaphore,
    /// Ends of attempts, whoever ended them.
    ends: Mutex<Vec<Instant>>,
}

impl Stage {
    pub fn new(act: Act) -> Self {
        Self::of_kind("test_kind", act)
    }

    pub fn of_kind(kind: &'static str, act: Act) -> Self {
        let closed = || Semaphore::new(0);
        Self(Arc::new(Inner {
            kind,
            act: Mutex::new(act),
            runs: AtomicUsize::new(0),
            started: closed(),
            stopped: closed(),
            gone: closed(),
            gate: closed(),
            ends: Mutex::default(),
        }))
    }

    /// What attempts that start from now on do.
    pub fn set(&self, act: Act) {
        *self.0.act.lock().expect("not poisoned") = act;
    }

    pub fn registry(&self) -> Registry {
        Registry::new().with(self.clone())
    }

    /// How many attempts have started.
    pub fn runs(&self) -> usize {
        self.0.runs.load(Ordering::SeqCst)
    }

    /// One more attempt has started.
    pub async fn until_started(&self) {
        pass(&self.0.started, "an attempt starts").await;
    }

    /// One more attempt has seen that it should stop.
    pub async fn until_stopped(&self) {
        pass(&self.0.stopped, "an attempt is told to stop").await;
    }

    /// One more attempt's future is gone: ended or dropped. When that was.
    pub async fn until_gone(&self) -> Instant {
        pass(&self.0.gone, "an attempt's future ends").await;
        *self.0.ends.lock().expect("not poisoned").last().expect("it was noted")
    }

    /// Lets so many attempts go on.
    pub fn let_go(&self, attempts: usize) {
        self.0.gate.add_permits(attempts);
    }
}

async fn pass(semaphore: &Semaphore, what: &str) {
    match timeout(PATIENCE, semaphore.acquire()).await {
        Ok(permit) => permit.expect("never closed").forget(),
        Err(_) => panic!("waited {PATIENCE:?} in vain until {what}"),
    }
}

/// Notes the end of an attempt even when its future is dropped.
struct Gone<'a>(&'a Inner);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.ends.lock().expect("not poisoned").push(Instant::now());
        self.0.gone.add_permits(1);
    }
}

impl Executor for Stage {
    fn kind(&self) -> &'static str {
        self.0.kind
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            let inner = &*self.0;
            let _gone = Gone(inner);
            inner.runs.fetch_add(1, Ordering::SeqCst);
            let act = inner.act.lock().expect("not poisoned").clone();
            if matches!(act, Act::Commit) {
                attempt.commit();
            }
            inner.started.add_permits(1);
            let gate = async { inner.gate.acquire().await.expect("never closed").forget() };
            let told = async {
                attempt.stopped().await;
                inner.stopped.add_permits(1);
            };
            let done = Ok(json!({ "attempt": attempt.number }));
            match act {
                Act::Succeed => gate.await,
                Act::Fail => {
                    gate.await;
                    return Err(Failure::passing("TestFailure", "as the test wanted"));
                }
                Act::FailWhenStopped => {
                    told.await;
                    return Err(Failure::passing("TestFailure", "as the test wanted"));
                }
                Act::Stop => {
                    told.await;
                    return Err(Failure::cancelled());
                }
                Act::Ignore | Act::Commit => {
                    tokio::pin!(gate);
                    tokio::select! {
                        () = &mut gate => return done,
                        () = told => {}
                    }
                    gate.await;
                }
                Act::Block => {
                    while inner.gate.try_acquire().map(|permit| permit.forget()).is_err() {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
                Act::Panic => panic!("the test's own panic"),
            }
            done
        })
    }
}

/// A worker under test: asked to end when dropped.
pub struct Running {
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// A worker that looks often and has a short grace, unless `change` says otherwise.
    pub fn start(queue: &Queue, registry: Registry, change: impl FnOnce(Builder) -> Builder) -> Self {
        let builder = Worker::builder(queue.clone(), registry).poll(Duration::from_millis(50)).name("w1");
        let worker = change(builder.shutdown_grace(Duration::from_secs(3))).build().expect("it can be built");
        let shutdown = CancellationToken::new();
        Self { task: tokio::spawn(worker.run(shutdown.clone())), shutdown }
    }

    /// Asks it to end.
    pub fn ask(&self) {
        self.shutdown.cancel();
    }

    /// Asks it to end and waits until it has; how long that took.
    pub async fn end(mut self) -> Duration {
        let asked = Instant::now();
        self.shutdown.cancel();
        timeout(PATIENCE * 2, &mut self.task).await.expect("it drains in time").expect("it does not panic");
        asked.elapsed()
    }

    /// Ends it as a crash would: nothing is written any more.
    pub async fn crash(mut self) {
        self.task.abort();
        _ = (&mut self.task).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}
