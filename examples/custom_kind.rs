//! A worker with a kind of its own, beside the built-in ones: `count_words` counts the words of a text.
//!
//! DATABASE_URL=postgres://… cargo run --example custom_kind, and from psql:
//! INSERT INTO jobs (kind, payload) VALUES ('count_words', '{"text": "to be or not to be"}');

use futures::future::BoxFuture;
use jobrequest::kinds::{Attempt, Executed, Executor, Failure, KindSettings, Registry};
use jobrequest::queue::{Queue, Settings, migrate};
use jobrequest::worker::Worker;
use serde::Deserialize;
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use tokio_util::sync::CancellationToken;

type Outcome = Result<(), Box<dyn std::error::Error>>;

struct CountWords;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Payload {
    text: String,
}

impl Executor for CountWords {
    fn kind(&self) -> &'static str {
        "count_words"
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        Box::pin(async move {
            let Payload { text } = attempt.payload()?;
            if text.trim().is_empty() {
                return Err(Failure::permanent("TextBlank", "payload.text: must not be blank"));
            }
            Ok(json!({"words": text.split_whitespace().count()}))
        })
    }
}

pub async fn work(database: PgConnectOptions, shutdown: CancellationToken) -> Outcome {
    migrate(&database).await?;
    let queue = Queue::new(database.clone(), Settings::default());
    let registry = Registry::builtin(&KindSettings::default())?.with(CountWords);
    Worker::builder(queue, registry).listen(database).build()?.run(shutdown).await;
    Ok(())
}

#[tokio::main]
pub async fn main() -> Outcome {
    // The library leaves the choice of a TLS implementation to the program.
    _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let shutdown = CancellationToken::new();
    let (database, stop) = (std::env::var("DATABASE_URL")?.parse()?, shutdown.clone());
    tokio::spawn(async move { tokio::signal::ctrl_c().await.map(|()| stop.cancel()) });
    work(database, shutdown).await
}
