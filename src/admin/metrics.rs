//! The counters and gauges, by the names that dashboards rely on. Labels are bounded: a kind that this program does not
//! know counts as `other`, an outcome is one of a closed list.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::job::Status;
use crate::queue::KindDepth;

/// All metrics of both programs; clones share them. One that a program never touches stays empty there.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    kinds: Arc<[&'static str]>,
    ready: Gauge,
    started: Family<ByKind, Counter>,
    completed: Family<ByOutcome, Counter>,
    duration: Family<ByOutcome, Histogram>,
    depth: Family<ByStatus, Gauge>,
    oldest_ready: Family<ByKind, Gauge<f64, AtomicU64>>,
    start_latency: Histogram,
    status_lag: Histogram,
    reconciles: Family<Outcome, Counter>,
    reconcile_duration: Family<Outcome, Histogram>,
    api_requests: Family<ApiRequest, Counter>,
    conflicts: Counter,
    leader: Gauge,
    orphans_ended: Counter,
    orphans_held_back: Gauge,
    events: Family<Outcome, Counter>,
}

/// How an attempt ended, as `worker_jobs_completed_total` and `worker_job_duration_seconds` name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobOutcome {
    Succeeded,
    /// Failed; another attempt follows.
    Retrying,
    FailedPermanent,
    Cancelled,
    /// Given back without cost: the worker shut down, or the other side asked for time.
    HandedBack,
    /// The lease ended before the attempt's end could be written: somebody else runs the job now.
    Lost,
}

impl JobOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Retrying => "retrying",
            Self::FailedPermanent => "failed_permanent",
            Self::Cancelled => "cancelled",
            Self::HandedBack => "handed_back",
            Self::Lost => "lost",
        }
    }
}

/// What a worker counts of one kind.
#[derive(Debug)]
pub struct KindMetrics {
    started: Counter,
    start_latency: Histogram,
    /// By outcome, each from its first time on.
    ended: [OnceLock<(Counter, Histogram)>; 6],
    metrics: Metrics,
    kind: &'static str,
}

impl KindMetrics {
    /// An attempt started, this long after it had become due.
    pub fn started(&self, waited: Duration) {
        self.started.inc();
        self.start_latency.observe(waited.as_secs_f64());
    }

    /// An attempt ended, this long after its start.
    pub fn ended(&self, outcome: JobOutcome, took: Duration) {
        let (count, duration) = self.ended[outcome as usize].get_or_init(|| {
            let labels = ByOutcome { kind: self.kind, outcome: outcome.as_str() };
            let Metrics { completed, duration, .. } = &self.metrics;
            (completed.get_or_create(&labels).clone(), duration.get_or_create(&labels).clone())
        });
        count.inc();
        duration.observe(took.as_secs_f64());
    }
}

/// What became of a Kubernetes Event, as `jobrequest_events_total` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventOutcome {
    Written,
    /// The API server did not take it.
    Failed,
    /// Too many were waiting.
    Dropped,
}

impl EventOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByKind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByStatus {
    kind: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiRequest {
    verb: &'static str,
    /// One of the statuses that API servers answer with.
    code: String,
}

/// The label of every kind that is not known here.
const OTHER: &str = "other";
/// The states of jobs that have not ended, for the depth.
const LIVE: [Status; 3] = [Status::Queued, Status::Running, Status::Retrying];

/// In seconds: from a millisecond for what the queue does to a day for what a job may take.
fn seconds() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
        7200.0, 86400.0,
    ])
}

impl Metrics {
    /// `kinds` are the values of the label `kind`; every other kind is `other`.
    pub fn new(kinds: impl IntoIterator<Item = &'static str>) -> Self {
        let mut registry = Registry::default();
        let ready = Gauge::default();
        let started = Family::default();
        let completed = Family::default();
        let duration = Family::new_with_constructor(seconds as fn() -> Histogram);
        let depth = Family::default();
        let oldest_ready = Family::default();
        let (start_latency, status_lag) = (seconds(), seconds());
        let reconciles = Family::default();
        let reconcile_duration = Family::new_with_constructor(seconds as fn() -> Histogram);
        let (api_requests, conflicts) = (Family::default(), Counter::default());
        let leader = Gauge::default();
        let (orphans_ended, orphans_held_back) = (Counter::default(), Gauge::default());
        let events = Family::default();
        // The registry adds `_total` to a counter's name and a full stop to the help.
        registry.register("jobrequest_ready", "1 while /readyz says that the program does its work", ready.clone());
        registry.register("worker_jobs_started", "Attempts started, by kind", started.clone());
        registry.register("worker_jobs_completed", "Attempts ended, by kind and outcome", completed.clone());
        registry.register("worker_job_duration_seconds", "From start to end of an attempt", duration.clone());
        registry.register("jobrequest_queue_depth", "Jobs that have not ended, by kind and status", depth.clone());
        registry.register(
            "jobrequest_queue_oldest_ready_seconds",
            "For how long the oldest ready job has been due, by kind",
            oldest_ready.clone(),
        );
        registry.register("jobrequest_start_latency_seconds", "From due to started", start_latency.clone());
        registry.register(
            "jobrequest_status_lag_seconds",
            "From the change of a row to the write of the status that shows it",
            status_lag.clone(),
        );
        registry.register("jobrequest_reconciles", "Reconciles, by outcome", reconciles.clone());
        registry.register(
            "jobrequest_reconcile_duration_seconds",
            "Time of one reconcile, by outcome",
            reconcile_duration.clone(),
        );
        registry.register(
            "jobrequest_api_requests",
            "Calls to the API server, by verb and HTTP status; code=none had no answer",
            api_requests.clone(),
        );
        registry.register(
            "jobrequest_conflicts",
            "Writes to a resource that had changed since it was read, and were decided anew",
            conflicts.clone(),
        );
        registry.register("jobrequest_controller_leader", "1 while this controller leads its install", leader.clone());
        registry.register(
            "jobrequest_orphans_ended",
            "Resources that were gone without a cancel, whose hold on a row was ended",
            orphans_ended.clone(),
        );
        registry.register(
            "jobrequest_orphans_held_back",
            "Orphans that are not ended yet, since they are most of the live rows",
            orphans_held_back.clone(),
        );
        registry.register("jobrequest_events", "Kubernetes Events, by what became of them", events.clone());
        Self {
            registry: Arc::new(registry),
            kinds: kinds.into_iter().collect(),
            ready,
            started,
            completed,
            duration,
            depth,
            oldest_ready,
            start_latency,
            status_lag,
            reconciles,
            reconcile_duration,
            api_requests,
            conflicts,
            leader,
            orphans_ended,
            orphans_held_back,
            events,
        }
    }

    /// Whether the program is ready, as of now; [`serve`](super::serve) says it each time that it is asked for metrics.
    pub fn ready(&self, ready: bool) {
        self.ready.set(ready.into());
    }

    /// The counters of this kind's attempts, looked up once.
    pub fn of_kind(&self, kind: &str) -> KindMetrics {
        let kind = self.label(kind);
        KindMetrics {
            started: self.started.get_or_create(&ByKind { kind }).clone(),
            start_latency: self.start_latency.clone(),
            ended: Default::default(),
            metrics: self.clone(),
            kind,
        }
    }

    /// The queue as it is now; kinds and states that are not named have no jobs.
    pub fn queue_depth(&self, depth: &[KindDepth]) {
        let labels = self.kinds.iter().copied().chain([OTHER]);
        let mut jobs: BTreeMap<_, i64> =
            labels.clone().flat_map(|kind| LIVE.map(|status| ((kind, status), 0))).collect();
        let mut oldest: BTreeMap<_, Duration> = labels.map(|kind| (kind, Duration::ZERO)).collect();
        for KindDepth { kind, status, jobs: count, oldest_ready } in depth {
            let kind = self.label(kind);
            *jobs.entry((kind, *status)).or_default() += i64::try_from(*count).unwrap_or(i64::MAX);
            let known = oldest.entry(kind).or_default();
            *known = (*known).max(*oldest_ready);
        }
        for ((kind, status), count) in jobs {
            self.depth.get_or_create(&ByStatus { kind, status: status.as_str() }).set(count);
        }
        for (kind, age) in oldest {
            self.oldest_ready.get_or_create(&ByKind { kind }).set(age.as_secs_f64());
        }
    }

    /// A status was written, this long after its row changed.
    pub fn status_written(&self, lag: Duration) {
        self.status_lag.observe(lag.as_secs_f64());
    }

    /// A reconcile ended. `outcome` is a word from a closed list.
    pub fn reconciled(&self, outcome: &'static str, took: Duration) {
        self.reconciles.get_or_create(&Outcome { outcome }).inc();
        self.reconcile_duration.get_or_create(&Outcome { outcome }).observe(took.as_secs_f64());
    }

    /// The API server was called; `verb` is a word from a closed list, `status` that of its answer, if there was one.
    pub fn api_request(&self, verb: &'static str, status: Option<u16>) {
        let code = status.map_or_else(|| "none".to_owned(), |status| status.to_string());
        self.api_requests.get_or_create(&ApiRequest { verb, code }).inc();
    }

    /// A write found the resource changed.
    pub fn conflict(&self) {
        self.conflicts.inc();
    }

    /// Whether this controller leads.
    pub fn leads(&self, leads: bool) {
        self.leader.set(leads.into());
    }

    /// A resource's hold on its row was ended by the sweep.
    pub fn orphan_ended(&self) {
        self.orphans_ended.inc();
    }

    /// So many of them wait for the sweep's brake.
    pub fn orphans_held_back(&self, count: usize) {
        self.orphans_held_back.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// A Kubernetes Event was written, or was not.
    pub fn event(&self, outcome: EventOutcome) {
        self.events.get_or_create(&Outcome { outcome: outcome.as_str() }).inc();
    }

    /// Everything as OpenMetrics text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String can't fail, and each metric encodes itself.
        _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }

    fn label(&self, kind: &str) -> &'static str {
        self.kinds.iter().copied().find(|known| *known == kind).unwrap_or(OTHER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_keep_their_names_and_labels_are_bounded() {
        let metrics = Metrics::new(["send_email"]);
        metrics.of_kind("send_email").started(Duration::from_millis(2));
        metrics.of_kind("mallory's").ended(JobOutcome::FailedPermanent, Duration::from_secs(3));
        metrics.reconciled("applied", Duration::from_millis(1));
        metrics.status_written(Duration::from_millis(1));
        metrics.conflict();
        metrics.leads(true);
        metrics.orphan_ended();
        metrics.orphans_held_back(60);
        metrics.event(EventOutcome::Dropped);
        let text = metrics.text();
        for line in [
            "worker_jobs_started_total{kind=\"send_email\"} 1",
            "worker_jobs_completed_total{kind=\"other\",outcome=\"failed_permanent\"} 1",
            "worker_job_duration_seconds_sum{kind=\"other\",outcome=\"failed_permanent\"} 3.0",
            "jobrequest_start_latency_seconds_count 1",
            "jobrequest_status_lag_seconds_count 1",
            "jobrequest_reconciles_total{outcome=\"applied\"} 1",
            "jobrequest_reconcile_duration_seconds_count{outcome=\"applied\"} 1",
            "jobrequest_conflicts_total 1",
            "jobrequest_controller_leader 1",
            "jobrequest_orphans_ended_total 1",
            "jobrequest_orphans_held_back 60",
            "jobrequest_events_total{outcome=\"dropped\"} 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("mallory"));
    }

    #[test]
    fn an_emptied_queue_shows_zero_and_unknown_kinds_add_up() {
        let metrics = Metrics::new(["send_email"]);
        let depth = |kind: &str, jobs| KindDepth {
            kind: kind.to_owned(),
            status: Status::Queued,
            jobs,
            oldest_ready: Duration::from_secs(jobs),
        };
        metrics.queue_depth(&[depth("send_email", 4), depth("a", 2), depth("b", 3)]);
        let text = metrics.text();
        assert!(text.contains("jobrequest_queue_depth{kind=\"other\",status=\"queued\"} 5\n"), "{text}");
        assert!(text.contains("jobrequest_queue_oldest_ready_seconds{kind=\"other\"} 3.0\n"), "{text}");
        metrics.queue_depth(&[]);
        assert!(metrics.text().contains("jobrequest_queue_depth{kind=\"send_email\",status=\"queued\"} 0\n"));
    }
}
