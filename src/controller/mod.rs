//! The controller: JobRequests to rows, rows to statuses.
//!
//! It never runs a job, and the worker never talks to the API server: the table is their only contract. On JobRequests
//! it writes `.status` and its own finalizer, and deletes by TTL; never spec, labels or annotations.
//!
//! Order matters in three places. The finalizer goes on before the row is made, so that no deletion slips in between.
//! A status is written before the queue is told that it is shown, so that a crash leaves the row due. The row ends
//! before the finalizer goes, so that a deleted resource's job is never left running unseen.

mod gate;
mod mirror;
mod orphans;
mod patch;
mod reconcile;
mod spec;
mod status;
mod ttl;
mod validate;
mod watch;
mod young;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::runtime::controller::{Action, Config, Controller};
use kube::{Client, ResourceExt};
use sqlx::postgres::PgConnectOptions;
use tokio_util::sync::CancellationToken;

use crate::admin::{Health, Metrics, Part};
use crate::api::JobRequest;
use crate::queue::{self, Channel, Listener, Queue};

/// How the controller behaves; the command line fills it.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The namespaces it works for; empty for all.
    pub watch_namespaces: Vec<String>,
    /// For resources without `ttlSecondsAfterFinished`; none keeps them.
    pub default_ttl: Option<Duration>,
    /// A third of this passes between two rescues.
    pub lease: Duration,
    /// Reconciles at once. One API server bears about 16 writes in flight; more only wait there.
    pub concurrency: u16,
}

/// What can go wrong in a reconcile.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("queue: {0}")]
    Queue(#[from] queue::Error),
    #[error("API server: {0}")]
    Api(#[from] kube::Error),
    #[error("API server: no answer within {seconds} s")]
    ApiTimeout { seconds: u64 },
    #[error("a patch could not be built: {0}")]
    Patch(serde_json::Error),
    #[error("the resource has no uid that can be read")]
    NoUid,
    #[error("the resource changed at each try to write its status")]
    Contended,
    #[error("no way to the API server: {0}")]
    Config(#[from] kube::config::InferConfigError),
}

impl Error {
    /// The variant's name, for a metric's label.
    fn label(&self) -> &'static str {
        match self {
            Self::Queue(_) => "queue",
            Self::Api(_) => "api",
            Self::ApiTimeout { .. } => "api_timeout",
            Self::Patch(_) => "patch",
            Self::NoUid => "no_uid",
            Self::Contended => "contended",
            Self::Config(_) => "config",
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What every reconcile shares.
struct Context {
    client: Client,
    queue: Queue,
    gate: gate::Gate,
    due: mirror::Due,
    young: young::Young,
    back_off: BackOff,
    metrics: Metrics,
    kubernetes: Part,
    default_ttl: Option<Duration>,
}

/// Runs the controller until `shutdown`. `direct` reaches Postgres itself, for LISTEN.
///
/// # Errors
/// [`Error::Config`] when there is no kubeconfig and no service account; everything later is waited for.
pub async fn run(
    settings: Settings,
    queue: Queue,
    direct: PgConnectOptions,
    health: Health,
    metrics: Metrics,
    shutdown: CancellationToken,
) -> Result<()> {
    let Settings { watch_namespaces, default_ttl, lease, concurrency } = settings;
    let client = Client::try_from(kube::Config::infer().await?)?;
    let kubernetes = health.part("kubernetes");
    let context = Arc::new(Context {
        client: client.clone(),
        queue: queue.clone(),
        gate: gate::Gate::default(),
        due: mirror::Due::default(),
        young: young::Young::default(),
        back_off: BackOff::default(),
        metrics,
        kubernetes: kubernetes.clone(),
        default_ttl,
    });
    let (watches, streams) = watch::start(&client, &watch_namespaces, &kubernetes);
    let watches = Arc::new(watches);
    let trigger = mirror::Trigger { watches: watches.clone() };

    let mut loops = tokio::task::JoinSet::new();
    let listener = Listener::spawn(direct, &[Channel::Changed]);
    let beat = health.beat("mirror", Duration::from_secs(60));
    loops.spawn(mirror::run(context.clone(), trigger.clone(), listener, health.part("postgres"), beat));
    loops.spawn(mirror::rescue(queue, context.clone(), lease / 3));
    loops.spawn(watch::probe(watches.clone(), kubernetes));
    loops.spawn(orphans::run(context.clone(), trigger));

    let share = u16::try_from(usize::from(concurrency).div_ceil(streams.len())).unwrap_or(1);
    let controllers = streams.into_iter().map(|stream| {
        let watch::Streams { objects, store, triggered } = stream;
        Controller::for_stream(objects, store)
            .with_config(Config::default().concurrency(share))
            .reconcile_on(triggered)
            .graceful_shutdown_on(shutdown.clone().cancelled_owned())
            .run(reconcile_counted, error_policy, context.clone())
            .for_each(|outcome| {
                // The errors of reconciles are the error policy's; what else comes here is a resource that went
                // before its turn, or the watch's trouble, which the stream has reported.
                if let Err(error) = outcome {
                    tracing::trace!(error = %error, "controller");
                }
                std::future::ready(())
            })
    });
    futures::future::join_all(controllers).await;
    loops.shutdown().await;
    Ok(())
}

async fn reconcile_counted(object: Arc<JobRequest>, context: Arc<Context>) -> Result<Action> {
    let start = Instant::now();
    let uid = object.metadata.uid.clone();
    let outcome = reconcile::reconcile(object, context.clone()).await;
    let label = outcome.as_ref().map_or_else(Error::label, |_| "ok");
    context.metrics.reconciled(label, start.elapsed());
    if let (Ok(_), Some(uid)) = (&outcome, uid) {
        context.back_off.reset(&uid);
    }
    outcome
}

/// A passing fault: tried again after a back-off of the object's own, which ends with its first success.
fn error_policy(object: Arc<JobRequest>, error: &Error, context: Arc<Context>) -> Action {
    let uid = object.metadata.uid.clone().unwrap_or_default();
    let (failures, delay) = context.back_off.next(uid);
    let (namespace, name) = (object.namespace(), object.name_any());
    // The first failure of an object is often a restart somewhere; one that lasts is said, at each doubling.
    if failures.is_power_of_two() && failures > 1 {
        tracing::warn!(namespace, name, failures, error = %error, delay_ms = delay.as_millis(), "not reconciled yet");
    } else {
        tracing::debug!(namespace, name, failures, error = %error, "not reconciled yet");
    }
    Action::requeue(delay)
}

/// Failures in a row, by uid.
#[derive(Default)]
struct BackOff(Mutex<HashMap<String, u32>>);

impl BackOff {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<String, u32>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The count with this failure, and how long to wait: from half a second, doubling to a minute, with jitter.
    fn next(&self, uid: String) -> (u32, Duration) {
        let mut entries = self.entries();
        let failures = entries.entry(uid).or_default();
        *failures = failures.saturating_add(1);
        let ceiling =
            Duration::from_millis(500).saturating_mul(1 << (*failures - 1).min(7)).min(Duration::from_secs(60));
        (*failures, ceiling.mul_f64(rand::random_range(0.5..=1.0)))
    }

    fn reset(&self, uid: &str) {
        self.entries().remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_waits_longer_each_time_up_to_a_minute_and_forgets_with_a_success() {
        let back_off = BackOff::default();
        let delays: Vec<_> = (0..20).map(|_| back_off.next("a".to_owned()).1.as_secs_f64()).collect();
        assert!((0.25..=0.5).contains(&delays[0]) && (30.0..=60.0).contains(&delays[19]), "{delays:?}");
        assert!(back_off.next("b".to_owned()).1.as_secs_f64() <= 0.5, "another object has its own");
        back_off.reset("a");
        assert_eq!(back_off.next("a".to_owned()).0, 1);
    }
}
