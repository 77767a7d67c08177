//! LISTEN: hears of changes at once, and promises nothing. A notification may be lost (a dead connection, a pooler),
//! so whoever waits here also polls.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::notify::Channel;

/// A connection that is quiet for this long is asked whether it lives: half-open ones are replaced within a minute.
const QUIET: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(5);
const BACK_OFF: Duration = Duration::from_secs(2);

/// Waits for notifications on a connection of its own, which it replaces for as long as it lives.
pub struct Listener {
    wakes: Vec<(Channel, Arc<Notify>)>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    /// `database` must reach Postgres itself: LISTEN does nothing through a transaction pooler.
    pub fn spawn(database: PgConnectOptions, channels: &[Channel]) -> Self {
        let wakes: Vec<_> = channels.iter().map(|channel| (*channel, Arc::new(Notify::new()))).collect();
        let heard = wakes.clone();
        let task = tokio::spawn(async move {
            loop {
                if let Err(error) = listen(&database, &heard).await {
                    // The pools' own users report a database that is away; this is only the faster path.
                    tracing::debug!(error = %error, "listening again in a moment");
                }
                tokio::time::sleep(BACK_OFF).await;
            }
        });
        Self { wakes, task }
    }

    /// Resolves when the channel was notified since the last call, or may have been: a new connection wakes all.
    /// Pends for ever on a channel that this listener was not made for.
    pub async fn woken(&self, channel: Channel) {
        match self.wakes.iter().find(|(own, _)| *own == channel) {
            Some((_, notify)) => notify.notified().await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen(database: &PgConnectOptions, wakes: &[(Channel, Arc<Notify>)]) -> sqlx::Result<()> {
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(ANSWER).connect_lazy_with(database.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    let listening = listener.listen_all(wakes.iter().map(|(channel, _)| channel.name()));
    timeout(ANSWER, listening).await.map_err(|_| sqlx::Error::PoolTimedOut)??;
    wakes.iter().for_each(|(_, notify)| notify.notify_one());
    loop {
        match timeout(QUIET, listener.try_recv()).await {
            Ok(notification) => match notification? {
                Some(heard) => wakes
                    .iter()
                    .filter(|(channel, _)| channel.name() == heard.channel())
                    .for_each(|(_, notify)| notify.notify_one()),
                // The connection was lost and made anew: what came between is unknown.
                None => wakes.iter().for_each(|(_, notify)| notify.notify_one()),
            },
            Err(_quiet) => match timeout(ANSWER, sqlx::query("SELECT 1").execute(&mut listener)).await {
                Ok(answer) => {
                    answer?;
                }
                Err(_) => return Err(sqlx::Error::PoolTimedOut),
            },
        }
    }
}
