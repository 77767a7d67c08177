//! The watches: one for the cluster, or one for each namespace that the controller works for.
//!
//! The cache keeps no payloads: a row is made from a fresh read, and nothing else needs them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt, TryStreamExt};
use kube::api::ListParams;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};

use super::patch;
use crate::admin::{Beat, Part};
use crate::api::JobRequest;
use crate::queue::ResourceRef;

/// How soon, and how seldom at most, an API server that failed is asked whether it is back.
const PROBE_MIN: Duration = Duration::from_millis(100);
const PROBE_MAX: Duration = Duration::from_secs(5);

/// Pauses of a failing watch: doubling to three seconds, with jitter. kube's default grows to thirty, and so long after
/// an outage nothing would be seen.
struct BackOff {
    pause: Duration,
}

impl BackOff {
    const FIRST: Duration = Duration::from_millis(500);
    const CAP: Duration = Duration::from_secs(3);
}

impl Default for BackOff {
    fn default() -> Self {
        Self { pause: Self::FIRST }
    }
}

impl Iterator for BackOff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.pause;
        self.pause = (pause * 2).min(Self::CAP);
        Some(pause.mul_f64(rand::random_range(0.5..=1.0)))
    }
}

impl Backoff for BackOff {
    fn reset(&mut self) {
        self.pause = Self::FIRST;
    }
}

/// One watch, seen from outside.
pub(super) struct Watch {
    /// None for all.
    namespace: Option<String>,
    api: Api<JobRequest>,
    store: Store<JobRequest>,
    complete: Arc<AtomicBool>,
    answers: Arc<AtomicBool>,
    to: UnboundedSender<ObjectRef<JobRequest>>,
}

impl Watch {
    pub(super) fn covers(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }

    /// Whether a whole list has been seen. (`Store::wait_until_ready` wakes one waiter only, and the controller waits.)
    pub(super) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::SeqCst)
    }

    /// Whether the API server answers for these namespaces: a right that is missing in one of them must not hold up
    /// the others.
    pub(super) fn answers(&self) -> bool {
        self.answers.load(Ordering::SeqCst)
    }

    /// Whether the cache has this very resource, not a namesake.
    pub(super) fn knows(&self, resource: &ResourceRef) -> bool {
        let cached = self.store.get(&key(resource));
        cached.is_some_and(|object| patch::uid(&object).is_ok_and(|uid| uid == resource.uid))
    }

    /// Asks for a reconcile; the controller keeps one entry for each resource.
    pub(super) fn trigger(&self, resource: &ResourceRef) {
        // Closed at shutdown only.
        drop(self.to.unbounded_send(key(resource)));
    }
}

fn key(resource: &ResourceRef) -> ObjectRef<JobRequest> {
    ObjectRef::new(&resource.name).within(&resource.namespace)
}

/// One watch, seen from its controller.
pub(super) struct Streams {
    pub(super) objects: BoxStream<'static, Result<JobRequest, watcher::Error>>,
    pub(super) store: Store<JobRequest>,
    pub(super) triggered: UnboundedReceiver<ObjectRef<JobRequest>>,
}

/// The watches over these namespaces, or one over all.
pub(super) fn start(client: &Client, namespaces: &[String], part: &Part) -> (Vec<Watch>, Vec<Streams>) {
    let one = |namespace: Option<&String>| {
        let api: Api<JobRequest> = match namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        };
        let (store, writer) = reflector::store();
        let (to, triggered) = unbounded();
        let complete = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicBool::new(false));
        let (seen, answered, part) = (complete.clone(), answers.clone(), part.clone());
        let objects = watcher(api.clone(), watcher::Config::default())
            .modify(|object| {
                object.spec.payload = None;
                object.metadata.managed_fields = None;
                // kubectl's copy of the manifest, payload and all.
                object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
            })
            .inspect_ok(move |event| {
                if matches!(event, watcher::Event::InitDone) {
                    seen.store(true, Ordering::SeqCst);
                }
            })
            .inspect_err(move |error| {
                answered.store(false, Ordering::SeqCst);
                part.not_ready(format!("watch: {error}"));
            })
            .backoff(BackOff::default())
            .reflect(writer);
        let objects = once_cached(objects).map(Ok).boxed();
        let watch = Watch { namespace: namespace.cloned(), api, store: store.clone(), complete, answers, to };
        (watch, Streams { objects, store, triggered })
    };
    if namespaces.is_empty() { vec![one(None)] } else { namespaces.iter().map(|name| one(Some(name))).collect() }
        .into_iter()
        .unzip()
}

/// Hands an object on once the cache has it. A list is in the cache when it is whole; the controller drops what it is told of
/// before that, and so a resource that was made while the watch was broken would never be seen.
///
/// Errors end here: the controller would hold up everything that is merged into its queue for a watch that fails.
fn once_cached(
    events: impl Stream<Item = Result<watcher::Event<JobRequest>, watcher::Error>>,
) -> impl Stream<Item = JobRequest> {
    let mut listed = Vec::new();
    events.flat_map(move |event| {
        stream::iter(match event {
            Ok(watcher::Event::Apply(object)) => vec![object],
            Ok(watcher::Event::InitDone) => std::mem::take(&mut listed),
            Ok(watcher::Event::InitApply(object)) => {
                listed.push(object);
                Vec::new()
            }
            Ok(watcher::Event::Init) => {
                listed.clear(); // of a list that broke off
                Vec::new()
            }
            Ok(watcher::Event::Delete(_)) | Err(_) => Vec::new(),
        })
    })
}

/// Says when the API server is there: at the start, and again after a watch has failed. Asks nothing while all is well.
pub(super) async fn probe(watches: Arc<Vec<Watch>>, part: Part, beat: Beat) -> Infallible {
    let mut pause = PROBE_MIN;
    loop {
        beat.beat();
        let silent: Vec<&Watch> = watches.iter().filter(|watch| !watch.answers()).collect();
        if silent.is_empty() {
            part.ready();
            pause = PROBE_MIN;
        } else {
            let answers = futures::future::join_all(silent.into_iter().map(look)).await;
            match answers.into_iter().collect::<Result<Vec<bool>, String>>() {
                Ok(complete) if complete.iter().all(|complete| *complete) => continue,
                // At each start it is so for a moment: worth a word only when it lasts.
                Ok(_) if pause < PROBE_MAX => {}
                Ok(_) => part.not_ready("the first list of JobRequests is not complete yet"),
                Err(why) => part.not_ready(why),
            }
            pause = (pause * 2).min(PROBE_MAX);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Whether its list is complete; an error if the API server does not answer.
async fn look(watch: &Watch) -> Result<bool, String> {
    patch::bounded(watch.api.list(&ListParams::default().limit(1))).await.map_err(|error| error.to_string())?;
    let complete = watch.is_complete();
    if complete {
        watch.answers.store(true, Ordering::SeqCst);
    }
    Ok(complete)
}

#[cfg(test)]
mod tests {
    use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};

    use super::*;
    #[tokio::test]
    async fn an_object_is_handed_on_once_the_cache_has_it() {
        let named = |name: &str| -> JobRequest {
            let resource = serde_json::json!({
                "apiVersion": "jobrequest.dev/v1alpha1",
                "kind": "JobRequest",
                "metadata": {"name": name},
                "spec": {"kind": "summarize_text"},
            });
            serde_json::from_value(resource).unwrap()
        };
        let events = [
            Init,
            InitApply(named("broken-off")),
            Init,
            InitApply(named("first")),
            InitDone,
            Apply(named("second")),
            // The list of a watch that was broken, while "new" was made.
            Init,
            InitApply(named("first")),
            InitApply(named("new")),
            InitApply(named("second")),
            InitDone,
            Delete(named("first")),
        ];
        let (store, writer) = reflector::store();
        let objects = once_cached(stream::iter(events.map(Ok)).reflect(writer));
        let seen: Vec<String> = objects
            .map(|object| {
                let name = object.name_any();
                assert!(store.get(&ObjectRef::new(&name)).is_some(), "{name} is not in the cache yet");
                name
            })
            .collect()
            .await;
        assert_eq!(seen, ["first", "second", "first", "new", "second"]);
    }
}
