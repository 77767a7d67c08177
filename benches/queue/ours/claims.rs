//! How long the worker's own claims take: sqlx says of each statement when its answer was there.

use std::fmt::Debug;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::{Outcome, protocol};

/// Prints `claim_us N` for each statement that claims jobs, from now on.
pub fn report() -> Outcome<()> {
    let statements = Targets::new().with_target("sqlx::query", Level::DEBUG);
    Ok(tracing_subscriber::registry().with(Claims.with_filter(statements)).try_init()?)
}

struct Claims;

impl<S: Subscriber> Layer<S> for Claims {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut statement = Statement::default();
        event.record(&mut statement);
        if statement.claims {
            protocol::say(&format!("claim_us {}", statement.seconds * 1e6));
        }
    }
}

#[derive(Default)]
struct Statement {
    claims: bool,
    seconds: f64,
}

impl Visit for Statement {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "db.statement" {
            self.claims = value.contains("UPDATE jobs j SET status = 'running'");
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        if field.name() == "elapsed_secs" {
            self.seconds = value;
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}
