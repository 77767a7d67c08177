//! The executors against real servers on loopback.

mod custom_kind;
mod docs;
mod egress;
mod email;
mod hostile;
mod hostile_mail;
mod image;
mod memory;
mod mutations;
mod origins;
#[path = "../support/sink.rs"]
#[allow(dead_code, reason = "shared")]
mod sink;
#[path = "../support/smtp.rs"]
mod smtp;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod webhook;

use std::sync::Arc;
use std::time::Duration;

use jobrequest::kinds::egress::EgressPolicy;
use jobrequest::kinds::{Attempt, Executor, KindSettings, Registry};
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// An attempt as a worker would make it; `limit` is its time.
fn attempt_within(payload: &Value, limit: Duration) -> (Attempt, CancellationToken) {
    let stop = CancellationToken::new();
    let payload = serde_json::value::to_raw_value(payload).unwrap();
    let attempt =
        Attempt::new(Uuid::now_v7(), Some("shop".to_owned()), (1, 3), payload, Instant::now() + limit, stop.clone());
    (attempt, stop)
}

fn attempt(payload: &Value) -> Attempt {
    attempt_within(payload, Duration::from_secs(20)).0
}

/// Settings under which servers on loopback can be called.
fn loopback() -> KindSettings {
    KindSettings { egress: EgressPolicy::parse("127.0.0.0/8", "").unwrap(), ..KindSettings::default() }
}

fn executor(kind: &str, settings: &KindSettings) -> Arc<dyn Executor> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    Registry::builtin(settings).unwrap().get(kind).unwrap()
}
