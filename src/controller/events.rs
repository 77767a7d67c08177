//! Events: what `kubectl describe` tells of a resource's life beside its status.
//!
//! Few, and once for each change: they follow from a status that was written, so that a reconcile which has nothing to
//! write has nothing to say. An ordinary success says nothing. At best: written one after the other behind everybody's
//! back, and lost when there are too many of them or the API server takes none; nothing waits for one or fails with it.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::patch;
use super::reason::Reason;
use crate::admin::{Beat, EventOutcome, Metrics};
use crate::api::{JobRequest, JobRequestStatus, Phase};
use crate::text::cut;

/// So many may wait to be written: some seconds' work of an API server.
const WAITING_MAX: usize = 1024;
/// The longest note that the API server takes, in bytes.
const NOTE_MAX_BYTES: usize = 1024;
/// The longest name of an object, and of what tells Events about the same one apart, with its dot.
const NAME_MAX_BYTES: usize = 253;
const SUFFIX_MAX_BYTES: usize = 17;
/// The longest name of a reporting process, in bytes.
const REPORTER_MAX_BYTES: usize = 128;
/// How often the loop beats when there is nothing to say.
const BEAT: Duration = Duration::from_secs(15);

/// What is said of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct News {
    /// `Normal` or `Warning`.
    type_: &'static str,
    reason: Reason,
    /// What the controller was doing, in a word.
    action: &'static str,
    note: String,
}

impl News {
    pub(super) fn normal(reason: Reason, action: &'static str, note: impl Into<String>) -> Self {
        Self { type_: "Normal", reason, action, note: note.into() }
    }

    pub(super) fn warning(reason: Reason, action: &'static str, note: impl Into<String>) -> Self {
        Self { type_: "Warning", ..Self::normal(reason, action, note) }
    }
}

/// What a status that was just written has to say beside the one before: another run, a bad end, a cancel that takes
/// its time.
pub(super) fn of_change(old: &JobRequestStatus, new: &JobRequestStatus, deleting: bool) -> Vec<News> {
    let ended_badly = |phase| matches!(phase, Some(Phase::FailedPermanent | Phase::Cancelled | Phase::Rejected));
    // Times are shown in whole seconds: of a run that was over at once, the history alone may tell.
    let again = ended_badly(old.phase)
        && (!new.phase.is_some_and(Phase::is_terminal)
            || (&new.finished_at, &new.history) != (&old.finished_at, &old.history));
    let mut news = Vec::new();
    if again {
        let note = "runs again because a person asked for it; attempts count from zero";
        news.push(News::normal(Reason::Retried, "Retry", note));
    }
    // Whoever deletes a job sees it go, and has been told if that takes its time.
    let goes = deleting && new.phase == Some(Phase::Cancelled);
    if ended_badly(new.phase)
        && !goes
        && (again || old.phase != new.phase)
        && let Some(failed) = new.condition("Failed")
        && let Some(reason) = Reason::of(failed)
    {
        news.push(match new.phase {
            Some(Phase::Cancelled) => News::normal(reason, "Cancel", &failed.message),
            Some(Phase::Rejected) => News::warning(reason, "Accept", &failed.message),
            _ => News::warning(reason, "Run", &failed.message),
        });
    }
    let cancelling =
        |status: &JobRequestStatus| status.condition("Ready").and_then(Reason::of) == Some(Reason::Cancelling);
    if deleting && cancelling(new) && !cancelling(old) {
        let note = "the worker has been told to stop; the resource goes when the job has ended";
        news.push(News::normal(Reason::Cancelling, "Cancel", note));
    }
    news
}

/// Where news are handed in; clones are the same.
#[derive(Clone)]
pub(super) struct Events {
    to: mpsc::Sender<(ObjectReference, News)>,
    metrics: Metrics,
}

/// Where they come out.
pub(super) struct Writer {
    from: mpsc::Receiver<(ObjectReference, News)>,
    client: Client,
    /// This process.
    instance: String,
    metrics: Metrics,
}

/// `instance` is the process's name.
pub(super) fn channel(client: Client, instance: &str, metrics: Metrics) -> (Events, Writer) {
    let (to, from) = mpsc::channel(WAITING_MAX);
    let instance = cut(instance, REPORTER_MAX_BYTES).to_owned();
    (Events { to, metrics: metrics.clone() }, Writer { from, client, instance, metrics })
}

impl Events {
    pub(super) fn about(&self, object: &JobRequest, news: News) {
        self.tell(object.object_ref(&()), news);
    }

    /// Never waits.
    pub(super) fn tell(&self, regarding: ObjectReference, news: News) {
        if self.to.try_send((regarding, news)).is_err() {
            self.metrics.event(EventOutcome::Dropped);
        }
    }
}

impl Writer {
    /// Writes what is handed in, until dropped.
    pub(super) async fn run(mut self, beat: Beat) -> std::convert::Infallible {
        let mut failing = false;
        loop {
            beat.beat();
            let (regarding, news) = match timeout(BEAT, self.from.recv()).await {
                Ok(Some(news)) => news,
                Ok(None) => {
                    // Nobody is left who could say anything.
                    beat.end();
                    return std::future::pending().await;
                }
                Err(_) => continue,
            };
            let (namespace, name, reason) = (regarding.namespace.clone(), regarding.name.clone(), news.reason.as_str());
            match self.write(regarding, news).await {
                Ok(()) => {
                    self.metrics.event(EventOutcome::Written);
                    failing = false;
                }
                Err(error) => {
                    self.metrics.event(EventOutcome::Failed);
                    // A right that is missing is worth one line, not one for each Event.
                    if std::mem::replace(&mut failing, true) {
                        tracing::debug!(namespace, name, reason, error = %error, "no Event");
                    } else {
                        tracing::warn!(namespace, name, reason, error = %error, "no Event could be written");
                    }
                }
            }
        }
    }

    async fn write(&self, regarding: ObjectReference, news: News) -> super::Result<()> {
        let event = event(regarding, news, &self.instance, Timestamp::now());
        let api: Api<Event> = Api::namespaced(self.client.clone(), &event.namespace().unwrap_or_default());
        let params = PostParams { field_manager: Some(patch::FIELD_MANAGER.to_owned()), ..Default::default() };
        match patch::bounded(api.create(&params, &event)).await {
            // The name is made once, so this is a call that was repeated.
            Err(super::Error::Api(kube::Error::Api(status))) if status.code == 409 => Ok(()),
            answer => answer.map(|_| ()),
        }
    }
}

/// `now` is the time that people see.
fn event(regarding: ObjectReference, news: News, instance: &str, now: Timestamp) -> Event {
    let News { type_, reason, action, note } = news;
    let about = cut(regarding.name.as_deref().unwrap_or_default(), NAME_MAX_BYTES - SUFFIX_MAX_BYTES);
    // What is cut must still end as a name ends.
    let about = about.trim_end_matches(['-', '.']);
    let name = format!("{about}.{:x}", now.as_nanosecond());
    Event {
        metadata: ObjectMeta { name: Some(name), namespace: regarding.namespace.clone(), ..Default::default() },
        regarding: Some(regarding),
        type_: Some(type_.to_owned()),
        reason: Some(reason.as_str().to_owned()),
        action: Some(action.to_owned()),
        note: Some(cut(&note, NOTE_MAX_BYTES).to_owned()),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(patch::FIELD_MANAGER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
