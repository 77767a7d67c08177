//! The controller: JobRequests to rows, rows to statuses.
//!
//! It never runs a job, and the worker never talks to the API server: the table is their only contract. On JobRequests
//! it writes `.status` and its own finalizer, and deletes by TTL; never spec, labels or annotations.
//!
//! Order matters in three places. The finalizer goes on before the row is made, so that no deletion slips in between.
//! A status is written before the queue is told that it is shown, so that a crash leaves the row due. The row ends
//! before the finalizer goes, so that a deleted resource's job is never left running unseen.

mod back_off;
mod brake;
mod cluster;
mod count;
mod definition;
mod events;
mod fence;
mod gate;
mod leader;
mod mirror;
mod orphans;
mod outage;
mod patch;
mod reason;
mod reconcile;
mod spec;
mod status;
mod ttl;
mod validate;
mod watch;
mod young;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::Client;
use kube::client::ClientBuilder;
use kube::runtime::controller::{Action, Config, Controller};
use sqlx::postgres::PgConnectOptions;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::filter::FilterLayer;

use self::back_off::Fault;
use self::fence::Fence;
use self::leader::Election;
use crate::admin::{Beat, Health, Metrics};
use crate::api::JobRequest;
use crate::queue::{self, Channel, Listener, Queue};
use crate::text;

/// The longest silence of a loop that lives.
const SILENCE: Duration = Duration::from_secs(60);
/// How long reconciles may take to end after the shutdown; then a standby takes over.
const DRAIN: Duration = Duration::from_secs(5);

/// How the controller behaves; the command line fills it.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The process's name, for people who ask who leads.
    pub name: String,
    /// The namespaces it works for; empty for all.
    pub watch_namespaces: Vec<String>,
    /// For resources without `ttlSecondsAfterFinished`; none keeps them.
    pub default_ttl: Option<Duration>,
    /// A third of this passes between two rescues.
    pub lease: Duration,
    /// Reconciles at once. One API server bears about 16 writes in flight; more only wait there.
    pub concurrency: u16,
    /// How long the orphan sweep holds back before it cancels more than half of over 100 live rows.
    pub orphan_wait: Duration,
    /// The uid of the cluster whose rows and keys this one takes over.
    pub adopt_install: Option<String>,
}

/// What can go wrong in a reconcile.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("queue: {0}")]
    Queue(#[from] queue::Error),
    #[error("API server: {}", brief(.0))]
    Api(#[from] kube::Error),
    #[error("API server: no answer within {seconds} s")]
    ApiTimeout { seconds: u64 },
    #[error("a patch could not be built: {0}")]
    Patch(serde_json::Error),
    #[error("the resource has no uid that can be read")]
    NoUid,
    #[error("the resource changed at each try to write its status")]
    Contended,
    #[error("the schema lacks {missing} migrations: run `jobrequest migrate`")]
    Schema { missing: usize },
    /// Final: nothing is done with another cluster's rows.
    #[error(
        "install `{install}` of this database belongs to the cluster {bound}, and this is the cluster {this}: give it a \
         JOBREQUEST_INSTALL of its own; or, if it takes the place of the other one, stop that one's controller and set \
         JOBREQUEST_ADOPT_INSTALL={bound}"
    )]
    OtherCluster { install: String, bound: String, this: String },
    #[error("no way to the API server: {0}")]
    Config(#[from] kube::config::InferConfigError),
}

impl Error {
    /// Whether it is the API server's, and so everybody's. That of the database is the gate's to know.
    fn fault(&self) -> Fault {
        match self {
            Self::Api(kube::Error::Api(status)) if status.code != 429 && status.code < 500 => Fault::Own,
            Self::Api(_) | Self::ApiTimeout { .. } => Fault::Servers,
            Self::Queue(_)
            | Self::Patch(_)
            | Self::NoUid
            | Self::Contended
            | Self::Schema { .. }
            | Self::OtherCluster { .. }
            | Self::Config(_) => Fault::Own,
        }
    }

    /// The variant's name, for a metric's label.
    fn label(&self) -> &'static str {
        match self {
            Self::Queue(_) => "queue",
            Self::Api(_) => "api",
            Self::ApiTimeout { .. } => "api_timeout",
            Self::Patch(_) => "patch",
            Self::NoUid => "no_uid",
            Self::Contended => "contended",
            Self::Schema { .. } => "schema",
            Self::OtherCluster { .. } => "other_cluster",
            Self::Config(_) => "config",
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error in a bounded text. kube's own prints the whole answer, and that of an object that was refused quotes it:
/// payloads don't belong in a log.
fn brief(error: &kube::Error) -> String {
    let kube::Error::Api(status) = error else { return text::cut(&error.to_string(), 512).to_owned() };
    let (code, reason) = (status.code, &status.reason);
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let fields: Vec<&str> = causes.map(|cause| cause.field.as_str()).collect();
    let said = if code == 422 { fields.join(", ") } else { status.message.clone() };
    text::cut(&format!("{code} {reason}: {said}"), 512).to_owned()
}

/// What every reconcile shares.
struct Context {
    client: Client,
    queue: Queue,
    cluster: cluster::Cluster,
    gate: gate::Gate,
    trigger: mirror::Trigger,
    due: mirror::Due,
    young: young::Young,
    back_off: back_off::BackOff,
    metrics: Metrics,
    events: events::Events,
    default_ttl: Option<Duration>,
}

/// Runs the controller until `shutdown`: as a standby until it leads, and again when it leads no more. `direct` reaches
/// Postgres itself, for LISTEN.
///
/// # Errors
/// [`Error::Config`] when there is no kubeconfig and no service account; [`Error::OtherCluster`] when the install's rows
/// are another cluster's. Everything else is waited for.
pub async fn run(
    settings: Settings,
    queue: Queue,
    direct: PgConnectOptions,
    health: Health,
    metrics: Metrics,
    shutdown: CancellationToken,
) -> Result<()> {
    let (kubernetes, postgres, leader) = (health.part("kubernetes"), health.part("postgres"), health.part("leader"));
    let mut config = kube::Config::infer().await?;
    let fence = Fence::default();
    let count = count::Count(metrics.clone());
    let client = ClientBuilder::try_from(config.clone())?.with_layer(&count);
    let client = client.with_layer(&FilterLayer::new(fence.clone())).build();
    // The election repeats its calls itself, in its own time.
    config.default_retry = false;
    let election = ClientBuilder::try_from(config)?.with_layer(&count).build();
    let election = Election::new(election, &queue.settings().install, &settings.name, fence);
    let beat = health.beat("leader", SILENCE);
    let leading = Leading { settings, client, queue: queue.clone(), direct, health, metrics: metrics.clone() };
    loop {
        let mut term = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            term = election.win(&kubernetes, &leader, &beat) => term,
            never = mirror::look(&queue, &postgres) => match never {},
        };
        metrics.leads(true);
        let ended = tokio::select! {
            ended = leading.run(&shutdown, &beat) => ended,
            () = election.keep(&mut term, &beat) => Ok(()),
        };
        metrics.leads(false);
        if ended.is_err() || shutdown.is_cancelled() {
            election.resign(term).await;
            return ended;
        }
    }
}

/// What a controller does while it leads. Nothing of it is kept from one term to the next.
struct Leading {
    settings: Settings,
    client: Client,
    queue: Queue,
    direct: PgConnectOptions,
    health: Health,
    metrics: Metrics,
}

impl Leading {
    /// Until the shutdown, whose drain is bounded. Dropped, it ends at once: that is safe anywhere.
    async fn run(&self, shutdown: &CancellationToken, beat: &Beat) -> Result<()> {
        let Self { settings, client, queue, direct, health, metrics } = self;
        let Settings { name, watch_namespaces, default_ttl, lease, concurrency, orphan_wait, adopt_install } = settings;
        let kubernetes = health.part("kubernetes");
        let cluster = cluster::Cluster::identify(client, adopt_install.clone(), &kubernetes, beat);
        let Some(cluster) = shutdown.run_until_cancelled(cluster).await else { return Ok(()) };
        let (watches, streams) = watch::start(client, watch_namespaces, &kubernetes);
        let watches = Arc::new(watches);
        let trigger = mirror::Trigger { watches: watches.clone() };
        let (events, news) = events::channel(client.clone(), name, metrics.clone());
        let context = Arc::new(Context {
            client: client.clone(),
            queue: queue.clone(),
            cluster,
            gate: gate::Gate::default(),
            trigger: trigger.clone(),
            due: mirror::Due::default(),
            young: young::Young::default(),
            back_off: back_off::BackOff::default(),
            metrics: metrics.clone(),
            events,
            default_ttl: *default_ttl,
        });

        let mut loops = JoinSet::new();
        let listener = Listener::spawn(direct.clone(), &[Channel::Changed]);
        let mirror = Beating(health.beat("mirror", SILENCE));
        loops.spawn(mirror::run(context.clone(), trigger.clone(), listener, health.part("postgres"), mirror.0.clone()));
        let silence = SILENCE + *lease / 3;
        let rescue = Beating(health.beat("rescue", silence));
        let rescuing = mirror::rescue(queue.clone(), context.clone(), *lease / 3, rescue.0.clone());
        loops.spawn(async move { match rescuing.await {} });
        let probe = Beating(health.beat("probe", SILENCE));
        let probing = watch::probe(watches.clone(), kubernetes, probe.0.clone());
        loops.spawn(async move { match probing.await {} });
        let sweep = Beating(health.beat("orphans", 2 * SILENCE));
        let lease = leader::reference(client, &queue.settings().install);
        loops.spawn(orphans::run(context.clone(), trigger, *orphan_wait, lease, sweep.0.clone()));
        let telling = Beating(health.beat("events", SILENCE));
        let writing = news.run(telling.0.clone());
        loops.spawn(async move { match writing.await {} });
        let defining = Beating(health.beat("definition", SILENCE));
        let definition = definition::watch(client.clone(), health.part("definition"), defining.0.clone());
        loops.spawn(async move { match definition.await {} });

        let share = u16::try_from(usize::from(*concurrency).div_ceil(streams.len())).unwrap_or(1);
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
        let late = async {
            shutdown.cancelled().await;
            tokio::time::sleep(DRAIN).await;
        };
        tokio::select! {
            _ = futures::future::join_all(controllers) => Ok(()),
            () = late => Ok(()),
            error = first_error(&mut loops) => Err(error),
        }
    }
}

/// A loop that ended with an error. One that panicked falls silent, which is what /healthz looks for.
async fn first_error(loops: &mut JoinSet<Error>) -> Error {
    while let Some(ended) = loops.join_next().await {
        if let Ok(error) = ended {
            return error;
        }
    }
    std::future::pending().await
}

/// A beat whose loop may be dropped: that is no silence.
struct Beating(Beat);

impl Drop for Beating {
    fn drop(&mut self) {
        self.0.end();
    }
}

async fn reconcile_counted(object: Arc<JobRequest>, context: Arc<Context>) -> Result<Action> {
    let start = Instant::now();
    let outcome = reconcile::reconcile(object.clone(), context.clone()).await;
    let label = outcome.as_ref().map_or_else(Error::label, |_| "ok");
    context.metrics.reconciled(label, start.elapsed());
    if outcome.is_ok()
        && let Ok(uid) = patch::uid(&object)
    {
        let others = context.back_off.succeeded(uid, Instant::now());
        others.iter().for_each(|resource| context.trigger.send(resource, &context.due));
    }
    outcome
}

/// A passing fault: tried again after a back-off of the object's own, which ends with its first success.
fn error_policy(object: Arc<JobRequest>, error: &Error, context: Arc<Context>) -> Action {
    let Ok(resource) = patch::reference(&object) else { return Action::await_change() };
    let (namespace, name) = (resource.namespace.clone(), resource.name.clone());
    let (failures, delay) = context.back_off.failed(resource, error.fault());
    // The first failure of an object is often a restart somewhere; one that lasts is said, at each doubling.
    if failures.is_power_of_two() && failures > 1 {
        tracing::warn!(namespace, name, failures, error = %error, delay_ms = delay.as_millis(), "not reconciled yet");
    } else {
        tracing::debug!(namespace, name, failures, error = %error, "not reconciled yet");
    }
    Action::requeue(delay)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_api_server_is_told_without_what_it_quotes() {
        let told = |answer: serde_json::Value| {
            let status = serde_json::from_value(answer).expect("a Status");
            Error::Api(kube::Error::Api(Box::new(status))).to_string()
        };
        let refused = told(serde_json::json!({
            "code": 422, "reason": "Invalid", "message": "spec.payload.text: Invalid value: \"secret\"",
            "details": {"causes": [{"field": "spec.payload.text", "message": "Invalid value: \"secret\""}]},
        }));
        assert_eq!(refused, "API server: 422 Invalid: spec.payload.text");
        let forbidden = told(serde_json::json!({"code": 403, "reason": "Forbidden", "message": "cannot patch"}));
        assert_eq!(forbidden, "API server: 403 Forbidden: cannot patch");
        let long = told(serde_json::json!({"code": 500, "reason": "InternalError", "message": "x".repeat(9000)}));
        assert!(long.len() < 600, "{}", long.len());
    }
}
