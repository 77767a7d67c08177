use super::*;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};

fn problem(payload: Value) -> String {
    parse(&payload).unwrap_err().to_string()
}

fn with_headers(headers: Value) -> Value {
    json!({"url": "https://example.com/hook", "body": null, "headers": headers})
}

#[test]
fn a_payload_is_read_with_its_defaults() {
    let delivery = parse(&json!({"url": "https://example.com/hook", "body": null, "method": null})).unwrap();
    assert_eq!((delivery.method, delivery.headers.len()), (Method::POST, 1));
    let delivery = parse(&json!({
        "url": "https://example.com/hook", "body": [1], "method": "PATCH",
        "headers": {"X-Team": "shop", "Content-Type": "application/cloudevents+json", "Authorization": "Bearer x"},
    }))
    .unwrap();
    assert_eq!(delivery.method, Method::PATCH);
    assert_eq!(delivery.headers["content-type"], "application/cloudevents+json");
    assert_eq!(delivery.headers["x-team"], "shop");
}

#[test]
fn a_bad_payload_names_its_field_and_shows_no_value() {
    for (payload, expected) in [
        (json!({"url": "https://example.com"}), "payload.body: is required"),
        (json!({"url": "ftp://secret.example", "body": 1}), "payload.url: must begin with http:// or https://"),
        (
            json!({"url": "https://e.com", "body": 1, "method": "GET"}),
            "payload.method: must be one of POST, PUT, PATCH",
        ),
        (with_headers(json!({"X-A": "se\r\ncret: x"})), "payload.headers.x-a: must be printable, without line breaks"),
        (
            with_headers(json!({("proxy-".to_owned() + &"a".repeat(123)): "x"})),
            "payload.headers: must have a name of at most 128 bytes and a value of 4096",
        ),
        (with_headers(json!({"X A": "secret"})), "payload.headers: has a name that is no HTTP header name"),
        (with_headers(json!({"X\r\nB": "secret"})), "payload.headers: has a name that is no HTTP header name"),
        (with_headers(json!({"X-A": "1", "x-a": "2"})), "payload.headers.x-a: is given twice in different case"),
    ] {
        assert_eq!(problem(payload), expected);
    }
}

#[test]
fn headers_of_the_connection_the_signature_and_the_cloud_are_not_the_payloads_to_set() {
    for name in [
        "Host",
        "Content-Length",
        "Transfer-Encoding",
        "Connection",
        "Keep-Alive",
        "TE",
        "Trailer",
        "Upgrade",
        "Proxy-Authorization",
        "Proxy-Connection",
        "Webhook-Id",
        "webhook-signature",
        "webhook-timestamp",
        "Metadata",
        "Metadata-Flavor",
        "X-aws-ec2-metadata-token",
        "X-Google-Metadata-Request",
        "Expect",
        "X-Forwarded-For",
    ] {
        assert!(problem(with_headers(json!({name: "x"}))).ends_with("belongs to the connection"), "{name}");
    }
}

#[test]
fn the_signature_is_the_one_of_standard_webhooks() {
    let url = Url::parse("https://example.com/hook").unwrap();
    let secret = &WebhookMasters::parse("a master of 20 chars").unwrap().secrets(Some("shop"), &url)[0];
    let shown = secret.to_string();
    // what a receiver does: drop the prefix, decode, MAC over the raw bytes
    let key = STANDARD.decode(shown.strip_prefix("whsec_").unwrap()).unwrap();
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).unwrap();
    mac.update(br#"msg_1.1700000000.{"a":1}"#);
    let expected = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
    assert_eq!(secret.sign("msg_1", 1_700_000_000, br#"{"a":1}"#), expected);
}

#[test]
fn every_namespace_and_origin_has_its_own_secret() {
    let masters = WebhookMasters::parse("a master of 20 chars").unwrap();
    let secret = |namespace, url: &str| masters.secrets(namespace, &Url::parse(url).unwrap())[0].to_string();
    let own = secret(Some("shop"), "https://example.com/a");
    assert_eq!(own, secret(Some("shop"), "https://EXAMPLE.com:443/b?c"), "one origin, one secret");
    for other in [
        secret(Some("blog"), "https://example.com/a"),
        secret(None, "https://example.com/a"),
        secret(Some("shop"), "http://example.com/a"),
        secret(Some("shop"), "https://example.com:8443/a"),
        secret(Some("shop"), "https://a.example.com/a"),
    ] {
        assert_ne!(own, other);
    }
}

#[test]
fn two_masters_sign_both_and_the_old_one_keeps_its_secret() {
    let url = Url::parse("https://example.com").unwrap();
    let old = WebhookMasters::parse("the old master secret").unwrap().secrets(None, &url);
    let both = WebhookMasters::parse("the new master secret, the old master secret").unwrap().secrets(None, &url);
    assert_eq!(both.len(), 2);
    assert_eq!(both[1], old[0]);
    let mut headers = HeaderMap::new();
    sign(&mut headers, &both, "id", 1, b"{}").unwrap();
    let value = headers["webhook-signature"].to_str().unwrap();
    assert_eq!(value.split(' ').filter(|signature| signature.starts_with("v1,")).count(), 2);
}

#[test]
fn masters_that_can_be_guessed_are_refused_and_none_is_fine() {
    assert!(WebhookMasters::parse("short").is_err());
    assert!(WebhookMasters::parse("aaaaaaaaaaaaaaaaaaaa,bbbbbbbbbbbbbbbbbbbb,cccccccccccccccccccc").is_err());
    let none = WebhookMasters::parse("").unwrap();
    assert!(none.secrets(None, &Url::parse("https://example.com").unwrap()).is_empty());
    assert_eq!(format!("{:?}", WebhookMasters::parse("a master of 20 chars").unwrap()), "WebhookMasters(1 hidden)");
}
