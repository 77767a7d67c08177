use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use jobrequest::kinds::egress::EgressPolicy;
use jobrequest::kinds::webhook::WebhookMasters;
use jobrequest::kinds::{Failure, FailureCause, KindSettings};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use serde_json::{Value, json};
use sha2::Sha256;
use url::Url;

use super::sink::Sink;
use super::{attempt, attempt_within, executor, loopback};

const KIND: &str = "webhook_delivery";

async fn deliver(settings: &KindSettings, payload: &Value) -> Result<Value, Failure> {
    executor(KIND, settings).execute(&attempt(payload)).await
}

#[tokio::test]
async fn the_body_arrives_byte_for_byte_and_its_signature_verifies_on_every_attempt() {
    let sink = Sink::start().await;
    let masters = WebhookMasters::parse("a master secret for tests").unwrap();
    let settings = KindSettings { webhook_masters: masters.clone(), ..loopback() };
    // digits no f64 holds, a key order no map keeps
    let text = format!(
        r#"{{"url": "{}", "body": {{"z": 1.10, "a": {{"y": 12345678901234567890, "b": [1e3, "é"]}}}}}}"#,
        sink.url("/ok")
    );
    let body = text.split_once(r#""body": "#).unwrap().1.strip_suffix('}').unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    let id = uuid::Uuid::now_v7();
    for number in [1, 2] {
        let payload = serde_json::value::RawValue::from_string(text.clone()).unwrap();
        let attempt =
            jobrequest::kinds::Attempt::new(id, Some("shop".into()), (number, 3), payload, deadline, stop.clone());
        let result = executor(KIND, &settings).execute(&attempt).await.unwrap();
        assert_eq!(result["status"], 204);
        assert_eq!(result["attempts"], number);
    }
    let secret = masters.secrets(Some("shop"), &Url::parse(&sink.url("/")).unwrap())[0].to_string();
    let key = STANDARD.decode(secret.strip_prefix("whsec_").unwrap()).unwrap();
    assert_eq!(sink.hits().len(), 2);
    for hit in sink.hits() {
        assert_eq!(hit.body, body.as_bytes());
        assert_eq!(hit.method, "POST");
        assert_eq!(hit.header("content-type"), "application/json");
        assert_eq!(hit.header("webhook-id"), id.to_string());
        let mut mac = Hmac::<Sha256>::new_from_slice(&key).unwrap();
        mac.update(format!("{}.{}.", hit.header("webhook-id"), hit.header("webhook-timestamp")).as_bytes());
        mac.update(&hit.body);
        assert_eq!(hit.header("webhook-signature"), format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())));
    }
}

#[tokio::test]
async fn without_a_master_a_delivery_carries_its_id_and_no_signature() {
    let sink = Sink::start().await;
    let payload = json!({"url": sink.url("/ok"), "body": null, "method": "PUT", "headers": {"X-Team": "shop"}});
    deliver(&loopback(), &payload).await.unwrap();
    let hit = &sink.hits()[0];
    assert_eq!((hit.method.as_str(), hit.body.as_slice()), ("PUT", b"null".as_slice()));
    assert_eq!(hit.header("x-team"), "shop");
    assert!(!hit.header("webhook-id").is_empty());
    assert_eq!(hit.header("webhook-signature"), "");
}

#[tokio::test]
async fn a_status_ends_the_job_or_lets_it_be_tried_again() {
    use FailureCause::{Passing, Permanent, RetryAfter};
    let sink = Sink::start().await;
    for (target, cause) in [
        ("/code/400", Permanent),
        ("/code/404", Permanent),
        ("/code/410", Permanent),
        ("/redir?to=/ok", Permanent),
        ("/code/408", Passing),
        ("/code/500", Passing),
        ("/code/503", Passing),
        ("/code/429?ra=7", RetryAfter(Duration::from_secs(7))),
        ("/code/503?ra=1000000000", RetryAfter(Duration::from_secs(3600))),
        ("/code/404?ra=7", Permanent),
        ("/reset", Passing),
    ] {
        let failure = deliver(&loopback(), &json!({"url": sink.url(target), "body": {}})).await.unwrap_err();
        assert_eq!(failure.cause(), cause, "{target}: {}", failure.message());
    }
    assert!(sink.hits().iter().all(|hit| hit.target != "/ok"), "no redirect was followed");
}

#[tokio::test]
async fn a_closed_port_may_open_again() {
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let failure = deliver(&loopback(), &json!({"url": format!("http://{closed}/"), "body": {}})).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "ConnectFailed"));
    assert!(!failure.message().contains(&closed.port().to_string()), "{}", failure.message());
}

#[tokio::test]
async fn a_body_without_end_is_read_to_the_cap_and_no_further() {
    let sink = Sink::start().await;
    let result = deliver(&loopback(), &json!({"url": sink.url("/endless"), "body": {}})).await.unwrap();
    assert_eq!(result["response_bytes"], 65536);
    assert_eq!(result["response_truncated"], true);
}

#[tokio::test]
async fn a_slow_head_or_body_ends_with_the_attempts_time() {
    let sink = Sink::start().await;
    for target in ["/trickle", "/hold"] {
        let started = Instant::now();
        let payload = json!({"url": sink.url(target), "body": {}});
        let (attempt, _stop) = attempt_within(&payload, Duration::from_secs(1));
        let failure = executor(KIND, &loopback()).execute(&attempt).await.unwrap_err();
        assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "Timeout"));
        assert!(started.elapsed() < Duration::from_secs(1), "it ends before the worker has to cut it off");
    }
}

#[tokio::test]
async fn a_cancelled_job_stops_waiting_for_its_answer() {
    let sink = Sink::start().await;
    let payload = json!({"url": sink.url("/hold"), "body": {}});
    let (attempt, stop) = attempt_within(&payload, Duration::from_secs(60));
    let running = tokio::spawn(async move { executor(KIND, &loopback()).execute(&attempt).await });
    while sink.hits().is_empty() {
        tokio::task::yield_now().await;
    }
    stop.cancel();
    assert_eq!(running.await.unwrap().unwrap_err().cause(), FailureCause::Cancelled);
}

#[tokio::test]
async fn an_address_inside_is_refused_under_every_name_and_nothing_is_sent() {
    let sink = Sink::start().await;
    let port = sink.address.port();
    for host in ["127.0.0.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "[::1]", "localhost", "localhost."] {
        let payload = json!({"url": format!("http://{host}:{port}/ok"), "body": {}});
        let failure = deliver(&KindSettings::default(), &payload).await.unwrap_err();
        assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "AddressNotAllowed"), "{host}");
        assert!(!failure.message().contains("127"), "{}", failure.message());
    }
    let denied = KindSettings { egress: EgressPolicy::parse("127.0.0.0/8", "127.0.0.1").unwrap(), ..loopback() };
    let failure = deliver(&denied, &json!({"url": sink.url("/ok"), "body": {}})).await.unwrap_err();
    assert_eq!(failure.reason(), "AddressNotAllowed");
    assert!(sink.hits().is_empty());
}

/// Answers the first question with the first list, the next with the next, and the last for ever.
struct Scripted {
    answers: Vec<Vec<IpAddr>>,
    asked: AtomicUsize,
}

impl Scripted {
    fn new(answers: &[&[&str]]) -> Arc<Self> {
        let answers = answers.iter().map(|list| list.iter().map(|ip| ip.parse().unwrap()).collect()).collect();
        Arc::new(Self { answers, asked: AtomicUsize::new(0) })
    }
}

impl Resolve for Scripted {
    fn resolve(&self, _: Name) -> Resolving {
        let turn = self.asked.fetch_add(1, Ordering::SeqCst).min(self.answers.len() - 1);
        let addresses: Vec<SocketAddr> = self.answers[turn].iter().map(|ip| SocketAddr::new(*ip, 0)).collect();
        Box::pin(async move { Ok(Box::new(addresses.into_iter()) as Addrs) })
    }
}

#[tokio::test]
async fn a_name_with_one_address_inside_is_refused_whole() {
    for answers in [
        ["93.184.216.34", "10.0.0.5"],
        ["10.0.0.5", "93.184.216.34"],
        ["2606:4700::1111", "fd00::1"],
        ["93.184.216.34", "::ffff:169.254.169.254"],
    ] {
        let settings = KindSettings { resolver: Some(Scripted::new(&[&answers])), ..KindSettings::default() };
        let failure = deliver(&settings, &json!({"url": "http://two.test/", "body": {}})).await.unwrap_err();
        assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "AddressNotAllowed"), "{answers:?}");
    }
}

#[tokio::test]
async fn the_connection_goes_to_the_checked_address_and_a_second_lookup_is_checked_too() {
    let sink = Sink::start().await;
    let url = format!("http://rebinding.test:{}", sink.address.port());
    // 127.0.0.1 is allowed here, all else inside is not
    let resolver = Scripted::new(&[&["127.0.0.1"], &["10.0.0.5"]]);
    let settings = KindSettings {
        egress: EgressPolicy::parse("127.0.0.1", "").unwrap(),
        resolver: Some(resolver.clone()),
        ..KindSettings::default()
    };
    let executor = executor(KIND, &settings);
    executor.execute(&attempt(&json!({"url": format!("{url}/ok"), "body": {}}))).await.unwrap();
    assert_eq!(resolver.asked.load(Ordering::SeqCst), 1, "no second lookup between check and connection");
    assert_eq!(sink.hits()[0].header("host"), format!("rebinding.test:{}", sink.address.port()));
    // the server closes, so the next delivery needs a new connection and with it a new lookup
    executor.execute(&attempt(&json!({"url": format!("{url}/reset"), "body": {}}))).await.unwrap_err();
    let failure = executor.execute(&attempt(&json!({"url": format!("{url}/ok"), "body": {}}))).await.unwrap_err();
    assert_eq!(failure.reason(), "AddressNotAllowed");
}

#[tokio::test]
async fn a_name_that_does_not_resolve_may_do_so_later() {
    let settings = KindSettings { resolver: Some(Scripted::new(&[&[]])), ..KindSettings::default() };
    let failure = deliver(&settings, &json!({"url": "http://gone.test/", "body": {}})).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "DnsFailed"));
}

#[tokio::test]
async fn a_row_with_a_bad_payload_fails_for_good_and_names_the_field() {
    for (payload, message) in [
        (json!([1, 2]), "payload: must be an object, not a list"),
        (
            json!({"url": "http://example.com:25/", "body": {}}),
            "payload.url: must not use a port of another protocol, such as 25 for mail",
        ),
    ] {
        let failure = deliver(&loopback(), &payload).await.unwrap_err();
        assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "PayloadInvalid"));
        assert_eq!(failure.message(), message);
    }
}
