//! `webhook_delivery`: sends the JSON body to a URL, signed as Standard Webhooks says.
//!
//! The bytes sent are the body as the row holds it, and the signature is over exactly these. The `webhook-id` is the
//! job's id, the same in every attempt, so that a receiver can drop a second copy.

mod signing;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use futures::future::BoxFuture;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Request};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use url::Url;

pub use signing::{WebhookMasters, WebhookSecret};

use super::egress::{self, Egress};
use super::payload::{Field, PayloadError, Shape, check_fields, optional, required};
use super::{Attempt, Executed, Executor, Failure};

pub const KIND: &str = "webhook_delivery";

/// How much of an answer is read: it is hashed and counted, not kept.
const MAX_ANSWER_BYTES: usize = 64 * 1024;
const MAX_HEADERS: usize = 50;
const MAX_NAME_BYTES: usize = 128;
const MAX_VALUE_BYTES: usize = 4096;

const FIELDS: &[Field] = &[
    required("url", Shape::Text { max_chars: 2048 }),
    required("body", Shape::Any),
    optional("headers", Shape::Texts),
    optional("method", Shape::OneOf(&["POST", "PUT", "PATCH"])),
];

pub struct WebhookDelivery {
    egress: Egress,
    masters: WebhookMasters,
}

/// A payload that has been checked, all but the body, which is taken from the row's own text.
#[derive(Debug)]
struct Delivery {
    url: Url,
    method: Method,
    headers: HeaderMap,
}

#[derive(Deserialize)]
struct Payload {
    url: String,
    headers: Option<BTreeMap<String, String>>,
    method: Option<String>,
}

/// The body alone, with the digits of its numbers and the order of its keys as stored.
#[derive(Deserialize)]
struct BodyText {
    body: Box<RawValue>,
}

impl WebhookDelivery {
    pub fn new(egress: Egress, masters: WebhookMasters) -> Self {
        Self { egress, masters }
    }

    async fn deliver(&self, attempt: &Attempt) -> Executed {
        let Delivery { url, method, headers } = attempt.checked(parse)?;
        let BodyText { body } = attempt.payload()?;
        let body = body.get().to_owned();
        let mut request = Request::new(method, url);
        let secrets = self.masters.secrets(attempt.namespace.as_deref(), request.url());
        let id = attempt.job_id.to_string();
        *request.headers_mut() = headers;
        sign(request.headers_mut(), &secrets, &id, unix_seconds(), body.as_bytes())?;
        *request.body_mut() = Some(body.into());

        let started = Instant::now();
        let reply = self.egress.call(attempt, request, MAX_ANSWER_BYTES).await?.accepted()?;
        Ok(json!({
            "status": reply.status.as_u16(),
            "attempts": attempt.number,
            "duration_ms": u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "response_bytes": reply.body.len(),
            "response_sha256": hex(&Sha256::digest(&reply.body)),
            "response_truncated": reply.truncated,
        }))
    }
}

impl Executor for WebhookDelivery {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        attempt.unless_stopped(self.deliver(attempt)).boxed()
    }
}

pub(super) fn validate(payload: &Value) -> Result<(), PayloadError> {
    parse(payload).map(drop)
}

fn parse(payload: &Value) -> Result<Delivery, PayloadError> {
    check_fields(payload, FIELDS)?;
    let Payload { url, headers, method } =
        Payload::deserialize(payload).map_err(|_| PayloadError::new("", "can't be read as a webhook's"))?;
    let url = egress::parse_url(&url).map_err(|problem| PayloadError::new("url", problem))?;
    let method = match method.as_deref() {
        Some("PUT") => Method::PUT,
        Some("PATCH") => Method::PATCH,
        Some(_) | None => Method::POST,
    };
    Ok(Delivery { url, method, headers: parse_headers(headers.unwrap_or_default())? })
}

fn parse_headers(given: BTreeMap<String, String>) -> Result<HeaderMap, PayloadError> {
    if given.len() > MAX_HEADERS {
        return Err(PayloadError::new("headers", format!("must be at most {MAX_HEADERS}")));
    }
    let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    let mut seen = HashSet::new();
    for (name, value) in given {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| PayloadError::new("headers", "has a name that is no HTTP header name"))?;
        if name.as_str().len() > MAX_NAME_BYTES || value.len() > MAX_VALUE_BYTES {
            let problem =
                format!("must have a name of at most {MAX_NAME_BYTES} bytes and a value of {MAX_VALUE_BYTES}");
            return Err(PayloadError::new("headers", problem));
        }
        let field = || format!("headers.{name}");
        if is_reserved(name.as_str()) {
            return Err(PayloadError::new(field(), "is set by JobRequest or belongs to the connection"));
        }
        if !seen.insert(name.clone()) {
            return Err(PayloadError::new(field(), "is given twice in different case"));
        }
        let value = HeaderValue::from_str(&value)
            .map_err(|_| PayloadError::new(field(), "must be printable, without line breaks"))?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Headers a payload can't set: those of the connection (RFC 9110, section 7.6.1), those that say how the message is
/// framed or whom it is for, the signature's own, and those with which cloud metadata services are asked.
fn is_reserved(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "http2-settings",
        "forwarded",
        "metadata",
        "metadata-flavor",
        "x-google-metadata-request",
    ];
    const PREFIXES: &[&str] = &["proxy-", "webhook-", "x-aws-ec2-metadata-", "x-forwarded-"];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Sets the three headers of Standard Webhooks 1.0 (without a secret the first two only): one signature for each
/// secret, the newest first.
fn sign(
    headers: &mut HeaderMap,
    secrets: &[WebhookSecret],
    id: &str,
    timestamp: u64,
    body: &[u8],
) -> Result<(), Failure> {
    let mut set = |name, value: String| {
        let value = HeaderValue::from_str(&value)
            .map_err(|_| Failure::permanent("SignatureFailed", "the delivery's headers could not be made"))?;
        headers.insert(HeaderName::from_static(name), value);
        Ok(())
    };
    set("webhook-id", id.to_owned())?;
    set("webhook-timestamp", timestamp.to_string())?;
    if secrets.is_empty() {
        return Ok(());
    }
    let signatures: Vec<String> = secrets.iter().map(|secret| secret.sign(id, timestamp, body)).collect();
    set("webhook-signature", signatures.join(" "))
}

/// The receiver compares it with its own clock; nothing here is decided by it.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
