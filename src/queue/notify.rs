//! NOTIFY, coalesced: a notification takes a database-wide lock at commit, so there is at most one per channel every
//! few milliseconds, outside the transactions that change rows. It carries nothing and promises nothing: who listens
//! also polls.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::connections::Connections;

/// What a notification is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// A job may be ready: workers claim.
    Ready,
    /// A row that a resource stands for has changed: the controller looks.
    Changed,
    /// A running job was asked to stop: its worker looks.
    Cancel,
}

impl Channel {
    pub const ALL: [Self; 3] = [Self::Ready, Self::Changed, Self::Cancel];

    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "jobrequest_ready",
            Self::Changed => "jobrequest_changed",
            Self::Cancel => "jobrequest_cancel",
        }
    }

    /// One request, with nothing to prepare, whoever stands before Postgres.
    fn statement(self) -> &'static str {
        match self {
            Self::Ready => "NOTIFY jobrequest_ready",
            Self::Changed => "NOTIFY jobrequest_changed",
            Self::Cancel => "NOTIFY jobrequest_cancel",
        }
    }
}

/// The shortest and the longest time between two notifications of a channel.
const GAP: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(50);
/// How many times as long as the last one took. It is a transaction with a write to disk of its own, so on a busy server
/// it comes less often, where another job or change is due any moment anyway.
const REST: u32 = 4;

pub(super) struct Notifier {
    pending: [Arc<Notify>; 3],
    task: tokio::task::JoinHandle<()>,
}

impl Notifier {
    /// A send has this long: it must not keep its channel silent, nor a connection busy, for ever.
    pub(super) fn spawn(pool: Connections, time_limit: Duration) -> Self {
        let pending: [Arc<Notify>; 3] = Default::default();
        let sources = pending.clone();
        let task = tokio::spawn(async move {
            let sends = Channel::ALL
                .into_iter()
                .zip(sources)
                .map(|(channel, source)| send_loop(&pool, time_limit, channel, source));
            futures::future::join_all(sends).await;
        });
        Self { pending, task }
    }

    pub(super) fn notify(&self, channel: Channel) {
        let index = match channel {
            Channel::Ready => 0,
            Channel::Changed => 1,
            Channel::Cancel => 2,
        };
        self.pending[index].notify_one();
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn send_loop(pool: &Connections, time_limit: Duration, channel: Channel, source: Arc<Notify>) {
    loop {
        source.notified().await;
        let sent = Instant::now();
        // A lost notification costs a poll interval, so a failure is not tried again.
        match timeout(time_limit, sqlx::raw_sql(channel.statement()).execute(pool)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(channel = channel.name(), error = %error, "notification not sent"),
            Err(_) => tracing::debug!(channel = channel.name(), "notification not sent in time"),
        }
        tokio::time::sleep((REST * sent.elapsed()).clamp(*GAP.start(), *GAP.end())).await;
    }
}
