//! The resource: what a real API server takes, refuses and shows. No controller takes part.

mod support;

use std::collections::BTreeMap;

use jobrequest::api::{self, JobRequest, JobRequestStatus, Phase};
use jobrequest::{kinds, queue};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams};
use serde::Deserialize;
use serde_json::{Value, json};
use support::kubectl::{Namespace, job_request, kubectl};

/// Runs the check for every case, a few at once: most of the time kubectl waits.
fn for_each<T: Sync>(cases: &[T], check: impl Fn(&T) -> Result<(), String> + Sync) {
    let check = &check;
    let failures: Vec<String> = std::thread::scope(|scope| {
        let parts = cases.chunks(cases.len().div_ceil(6));
        let threads: Vec<_> =
            parts.map(|part| scope.spawn(move || part.iter().filter_map(|case| check(case).err()).collect())).collect();
        threads.into_iter().flat_map(|thread| -> Vec<String> { thread.join().unwrap() }).collect()
    });
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

/// The spec in YAML, and what the refusal must say: the field and the remedy.
const BAD: &[(&str, &[&str])] = &[
    // the frame
    ("{}", &["spec.kind: Required", "spec.payload: Required"]),
    ("{kind: send_email}", &["spec.payload: Required"]),
    ("{payload: {text: Hello.}}", &["spec.kind: Required"]),
    ("{kind: send_mail, payload: {}}", &["spec.kind: Unsupported value", "\"send_email\""]),
    ("{kind: summarize_text, payload: Hello.}", &["spec.payload", "must be of type object"]),
    ("{kind: summarize_text, payload: {text: Hello., max_wrds: 5}}", &["unknown field \"spec.payload.max_wrds\""]),
    ("{kind: summarize_text, payload: {text: Hello.}, maxAttempt: 5}", &["unknown field \"spec.maxAttempt\""]),
    ("{kind: summarize_text, payload: {text: Hello.}, maxAttempts: 0}", &["spec.maxAttempts", "equal to 1"]),
    ("{kind: summarize_text, payload: {text: Hello.}, maxAttempts: 101}", &["spec.maxAttempts", "equal to 100"]),
    ("{kind: summarize_text, payload: {text: Hello.}, maxAttempts: '3'}", &["spec.maxAttempts", "type integer"]),
    ("{kind: summarize_text, payload: {text: Hello.}, idempotencyKey: ''}", &["spec.idempotencyKey", "at least 1"]),
    ("{kind: summarize_text, payload: {text: Hello.}, idempotencyKey: KEY256}", &["spec.idempotencyKey", "255"]),
    ("{kind: summarize_text, payload: {text: Hello.}, idempotencyKey: KEY6000}", &["spec.idempotencyKey", "255"]),
    ("{kind: summarize_text, payload: {text: Hello.}, priority: 1001}", &["spec.priority", "equal to 1000"]),
    ("{kind: summarize_text, payload: {text: Hello.}, priority: -1001}", &["spec.priority", "equal to -1000"]),
    ("{kind: summarize_text, payload: {text: Hello.}, timeoutSeconds: 0}", &["spec.timeoutSeconds", "equal to 1"]),
    ("{kind: summarize_text, payload: {text: Hello.}, timeoutSeconds: 86401}", &["spec.timeoutSeconds", "86400"]),
    ("{kind: summarize_text, payload: {text: Hello.}, suspend: 'yes'}", &["spec.suspend", "type boolean"]),
    (
        "{kind: summarize_text, payload: {text: Hello.}, ttlSecondsAfterFinished: -1}",
        &["spec.ttlSeconds", "equal to 0"],
    ),
    // B76: without an offset a time is read in another zone by everybody
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: '2030-03-31T02:30:00'}", &["spec.runAt", "offset", "00Z"]),
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: '2030-03-31 02:30:00Z'}", &["spec.runAt", "RFC 3339"]),
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: '2030-02-30T02:30:00Z'}", &["spec.runAt", "RFC 3339"]),
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: '2030-03-31T24:00:00Z'}", &["spec.runAt", "RFC 3339"]),
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: '9999-12-31T23:59:59Z'}", &["spec.runAt", "RFC 3339"]),
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: tomorrow}", &["spec.runAt", "RFC 3339"]),
    ("{kind: summarize_text, payload: {text: Hello.}, runAt: 1900000000}", &["spec.runAt", "type string"]),
    // send_email
    (
        "{kind: send_email, payload: {}}",
        &["payload.to: Required", "payload.subject: Required", "payload.body: Required"],
    ),
    ("{kind: send_email, payload: {subject: s, body: b}}", &["spec.payload.to: Required", "add it"]),
    ("{kind: send_email, payload: {to: a@x.org, body: b}}", &["spec.payload.subject: Required", "add it"]),
    ("{kind: send_email, payload: {to: a@x.org, subject: s}}", &["spec.payload.body: Required"]),
    ("{kind: send_email, payload: {to: a@x.org, subject: s, body: {a: 1}}}", &["spec.payload.body", "a string"]),
    ("{kind: send_email, payload: {to: a@x.org, subject: s, body: [b]}}", &["spec.payload.body", "a string"]),
    ("{kind: send_email, payload: {to: a@x.org, subject: s, body: 5}}", &["spec.payload.body", "a string"]),
    ("{kind: send_email, payload: {to: a@x.org, subject: s, body: true}}", &["spec.payload.body", "a string"]),
    ("{kind: send_email, payload: {to: nobody, subject: s, body: b}}", &["spec.payload.to", "such as ada@example.com"]),
    ("{kind: send_email, payload: {to: [a@x.org], subject: s, body: b}}", &["spec.payload.to", "type string"]),
    (
        "{kind: send_email, payload: {to: \"a@x.org>\\r\\nRCPT TO:<b@x.org\", subject: s, body: b}}",
        &["spec.payload.to", "one line"],
    ),
    ("{kind: send_email, payload: {to: a@x.org, cc: b, subject: s, body: b}}", &["spec.payload.cc", "ada@example.com"]),
    (
        "{kind: send_email, payload: {to: a@x.org, bcc: b, subject: s, body: b}}",
        &["spec.payload.bcc", "ada@example.com"],
    ),
    (
        "{kind: send_email, payload: {to: a@x.org, reply_to: b, subject: s, body: b}}",
        &["spec.payload.reply_to", "ada@"],
    ),
    (
        "{kind: send_email, payload: {to: a@x.org, subject: \"Hi\\r\\nBcc: b@x.org\", body: b}}",
        &["spec.payload.subject", "one line"],
    ),
    ("{kind: send_email, payload: {to: a@x.org, subject: s, body: b, width: 5}}", &["spec.payload.width", "remove it"]),
    (
        "{kind: send_email, payload: {to: a@x.org, subject: s, body: b, text: t, url: 'https://x.org'}}",
        &[
            "spec.payload.text: Forbidden: is for summarize_text only",
            "spec.payload.url: Forbidden: is for webhook_delivery only",
        ],
    ),
    // resize_image
    (
        "{kind: resize_image, payload: {}}",
        &["payload.source_url: Required", "payload.width: Required", "payload.height: Required"],
    ),
    ("{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1}}", &["spec.payload.height: Required"]),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 0, height: 1}}",
        &["spec.payload.width", "equal to 1"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: -1}}",
        &["spec.payload.height", "equal to 1"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 4294967295, height: 1}}",
        &["spec.payload.width", "8192"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 8000, height: 8000}}",
        &["spec.payload.width", "40000000"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1.5, height: 1}}",
        &["spec.payload.width", "type integer"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: '1', height: 1}}",
        &["spec.payload.width", "type integer"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'file:///etc/passwd', width: 1, height: 1}}",
        &["spec.payload.source_url", "https://"],
    ),
    (
        "{kind: resize_image, payload: {source_url: picture.png, width: 1, height: 1}}",
        &["spec.payload.source_url", "https://"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, fit: crop}}",
        &["spec.payload.fit", "\"cover\""],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, format: gif}}",
        &["spec.payload.format", "\"png\""],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, destination: ../a.png}}",
        &["spec.payload.destination", "relative key"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, destination: /a.png}}",
        &["spec.payload.destination", "relative key"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, destination: 's3://b/a'}}",
        &["spec.payload.destination", "relative key"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, body: b}}",
        &["spec.payload.body", "remove it"],
    ),
    (
        "{kind: resize_image, payload: {source_url: 'https://x.org/a', width: 1, height: 1, to: a@x.org}}",
        &["spec.payload.to", "remove it"],
    ),
    // summarize_text
    ("{kind: summarize_text, payload: {}}", &["spec.payload.text: Required", "add it"]),
    ("{kind: summarize_text, payload: {text: ''}}", &["spec.payload.text", "at least 1"]),
    ("{kind: summarize_text, payload: {text: \" \\n\\t\"}}", &["spec.payload.text", "blank"]),
    ("{kind: summarize_text, payload: {text: [Hello.]}}", &["spec.payload.text", "type string"]),
    ("{kind: summarize_text, payload: {text: Hello., max_words: 0}}", &["spec.payload.max_words", "equal to 1"]),
    (
        "{kind: summarize_text, payload: {text: Hello., max_words: 10001}}",
        &["spec.payload.max_words", "equal to 10000"],
    ),
    ("{kind: summarize_text, payload: {text: Hello., body: {a: 1}}}", &["spec.payload.body", "remove it"]),
    ("{kind: summarize_text, payload: {text: Hello., subject: s}}", &["spec.payload.subject", "remove it"]),
    // webhook_delivery
    ("{kind: webhook_delivery, payload: {}}", &["payload.url: Required", "payload.body: Required"]),
    ("{kind: webhook_delivery, payload: {body: 1}}", &["spec.payload.url: Required", "add it"]),
    ("{kind: webhook_delivery, payload: {url: 'https://x.org'}}", &["spec.payload.body: Required"]),
    ("{kind: webhook_delivery, payload: {url: 'ftp://x.org', body: 1}}", &["spec.payload.url", "https://"]),
    ("{kind: webhook_delivery, payload: {url: /hook, body: 1}}", &["spec.payload.url", "https://"]),
    ("{kind: webhook_delivery, payload: {url: 'https:///hook', body: 1}}", &["spec.payload.url", "https://"]),
    (
        "{kind: webhook_delivery, payload: {url: 'https://u:p@x.org/', body: 1}}",
        &["spec.payload.url", "without user name"],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, method: GET}}",
        &["spec.payload.method", "\"POST\""],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, headers: {a b: c}}}",
        &["spec.payload.headers", "only letters"],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, headers: {a: \"b\\nc: d\"}}}",
        &["spec.payload.headers[a]", "one line"],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, headers: {a: 5}}}",
        &["spec.payload.headers.a", "type string"],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, headers: [a]}}",
        &["spec.payload.headers", "type object"],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, headers: {Webhook-Id: c}}}",
        &["spec.payload.headers", "remove it"],
    ),
    (
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1, max_words: 5}}",
        &["spec.payload.max_words", "remove it"],
    ),
];

#[test]
fn a_bad_manifest_is_refused_with_the_fields_name_and_the_remedy() {
    let namespace = Namespace::new();
    for_each(BAD, |(spec, expected)| {
        let spec = spec.replace("KEY256", &"k".repeat(256)).replace("KEY6000", &"0123456789".repeat(600));
        match namespace.try_kubectl(&["apply", "--dry-run=server", "-f", "-"], &job_request("bad", &spec)) {
            Ok(_) => Err(format!("{spec}: was taken")),
            Err(message) if expected.iter().all(|part| message.contains(part)) => Ok(()),
            Err(message) => Err(format!("{spec}: should say {expected:?}, says: {message}")),
        }
    });
}

const GOOD: &[&str] = &[
    "{kind: send_email, payload: {to: a@x.org, subject: s, body: b}}",
    "{kind: send_email, payload: {to: a@x.org, subject: '', body: '', html: '', cc: '', bcc: '', reply_to: ''}}",
    "{kind: send_email, payload: {to: 'a@x.org, B <b@x.org>, \"C, D\" <c@例え.テスト>', subject: 株式会社, body: b,
      html: <p>b</p>, cc: c@x.org, bcc: d@x.org, reply_to: E <e@x.org>}}",
    "{kind: resize_image, payload: {source_url: 'https://x.org/a.png?b=c@d', width: 8192, height: 1}}",
    "{kind: resize_image, payload: {source_url: 's3://bucket/a', width: 5000, height: 8000, fit: cover, format: webp,
      destination: a/b..c/é x(1).webp}}",
    "{kind: summarize_text, payload: {text: Hello.}}",
    "{kind: summarize_text, payload: {text: Hello., max_words: 10000}}",
    "{kind: webhook_delivery, payload: {url: 'http://x.org:8080/', body: {a: [1, null, {b: c}]}}}",
    "{kind: webhook_delivery, payload: {url: 'https://x.org/', body: text, method: PUT, headers: {X-A: b, Content-Type: text/plain}}}",
    "{kind: summarize_text, payload: {text: Hello.}, runAt: '2030-03-31T02:30:00Z'}",
    "{kind: summarize_text, payload: {text: Hello.}, runAt: '2030-03-31T02:30:00.123456789+02:00'}",
    "{kind: summarize_text, payload: {text: Hello.}, maxAttempts: 100, idempotencyKey: KEY255, priority: -1000,
      timeoutSeconds: 86400, suspend: true, ttlSecondsAfterFinished: 0}",
];

#[test]
fn a_good_manifest_is_taken_by_the_api_server_and_by_the_executor() {
    #[derive(Deserialize)]
    struct Spec {
        kind: String,
        payload: Value,
    }
    let namespace = Namespace::new();
    for_each(GOOD, |spec| {
        let spec = spec.replace("KEY255", &"k".repeat(255));
        namespace.try_kubectl(&["apply", "--dry-run=server", "-f", "-"], &job_request("good", &spec))?;
        let Spec { kind, payload } = serde_yaml::from_str(&spec.replace('\n', " ")).map_err(|e| e.to_string())?;
        kinds::validate(&kind, &payload).map_err(|error| format!("{spec}: {error}"))
    });
}

#[test]
fn a_header_that_the_executor_keeps_for_itself_is_refused_at_apply() {
    let namespace = Namespace::new();
    let headers = "Host Content-Length Transfer-Encoding Connection Keep-Alive TE Trailer Upgrade Expect Http2-Settings \
        Forwarded Metadata Metadata-Flavor X-Google-Metadata-Request Proxy-Authorization Webhook-Signature \
        X-Aws-Ec2-Metadata-Token X-Forwarded-For";
    for_each(&headers.split_whitespace().collect::<Vec<_>>(), |header| {
        let payload = json!({"url": "https://x.org", "body": 1, "headers": {*header: "a"}});
        let spec = json!({"kind": "webhook_delivery", "payload": payload}).to_string();
        let refused = namespace.try_kubectl(&["apply", "--dry-run=server", "-f", "-"], &job_request("bad", &spec));
        let message = refused.err().ok_or_else(|| format!("{header} was taken"))?;
        kinds::validate("webhook_delivery", &payload).err().ok_or_else(|| format!("the executor takes {header}"))?;
        if message.contains("spec.payload.headers") { Ok(()) } else { Err(message) }
    });
}

#[test]
fn each_example_is_taken_by_client_side_and_server_side_apply() {
    let namespace = Namespace::new();
    let mut kinds = Vec::new();
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "yaml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let Ok(manifest) = serde_yaml::from_str::<Value>(&text) else { continue };
        if manifest["kind"] == "JobRequest" {
            let file = path.to_str().unwrap();
            namespace.kubectl(&["apply", "--dry-run=server", "-f", file], "");
            namespace.kubectl(&["apply", "--server-side", "--dry-run=server", "-f", file], "");
            kinds.push(manifest["spec"]["kind"].as_str().unwrap().to_owned());
        }
    }
    for kind in ["send_email", "resize_image", "summarize_text", "webhook_delivery"] {
        assert!(kinds.iter().any(|k| k == kind), "no example of {kind}");
    }
}

#[test]
fn kind_payload_and_key_are_immutable_and_the_rest_is_not() {
    let namespace = Namespace::new();
    let mail = "kind: send_email, payload: {to: a@x.org, subject: s, body: b}, suspend: true";
    namespace.kubectl(&["apply", "-f", "-"], &job_request("plain", &format!("{{{mail}}}")));
    namespace.kubectl(&["apply", "-f", "-"], &job_request("keyed", &format!("{{{mail}, idempotencyKey: k}}")));
    let patch = |name, patch: &str| namespace.try_kubectl(&["patch", "jr", name, "--type=merge", "-p", patch], "");
    for (name, change, field) in [
        ("plain", r#"{"spec":{"payload":{"to":"z@x.org"}}}"#, "spec.payload"),
        ("plain", r#"{"spec":{"payload":{"html":"<p>"}}}"#, "spec.payload"),
        ("plain", r#"{"spec":{"payload":{"body":"c"}}}"#, "spec.payload"),
        ("plain", r#"{"spec":{"idempotencyKey":"k"}}"#, "spec.idempotencyKey"),
        ("keyed", r#"{"spec":{"idempotencyKey":"l"}}"#, "spec.idempotencyKey"),
        ("keyed", r#"{"spec":{"idempotencyKey":null}}"#, "spec.idempotencyKey"),
        ("plain", r#"{"spec":{"kind":"webhook_delivery"}}"#, "spec.kind"),
    ] {
        let message = patch(name, change).expect_err(change);
        assert!(message.contains(&format!("{field}: Forbidden: is immutable")), "{change}: {message}");
    }
    for change in [
        r#"{"metadata":{"labels":{"a":"b"},"annotations":{"jobrequest.dev/retry":"1"}}}"#,
        r#"{"spec":{"priority":5,"maxAttempts":5,"timeoutSeconds":5,"runAt":"2030-01-01T00:00:00Z","suspend":false}}"#,
        r#"{"spec":{"ttlSecondsAfterFinished":5,"suspend":true}}"#,
        r#"{"spec":{"ttlSecondsAfterFinished":null,"runAt":null}}"#,
    ] {
        patch("plain", change).expect(change);
    }
    // applied again as it was, numbers that JSON writes in two ways included
    let hook =
        "{kind: webhook_delivery, payload: {url: 'https://x.org', body: [1.10, 1e3, 12345678901234567890, null]}}";
    for _ in 0..2 {
        namespace.kubectl(&["apply", "--server-side", "-f", "-"], &job_request("hook", hook));
    }
}

#[test]
fn an_explicit_null_is_the_same_as_nothing() {
    let namespace = Namespace::new();
    let spec = "{kind: send_email, payload: {to: a@x.org, subject: s, body: b, cc: null, html: null, url: null, width: null,
        headers: null}, idempotencyKey: null, runAt: null, ttlSecondsAfterFinished: null, maxAttempts: null, suspend: null}";
    namespace.kubectl(&["apply", "--server-side", "-f", "-"], &job_request("nulls", spec));
    let object: JobRequest =
        serde_json::from_str(&namespace.kubectl(&["get", "jr", "nulls", "-o", "json"], "")).unwrap();
    assert_eq!((object.spec.idempotency_key, object.spec.run_at), (None, None));
    assert_eq!((object.spec.max_attempts, object.spec.ttl_seconds_after_finished), (3, None));
    let payload = object.spec.payload.unwrap().to_value().unwrap();
    assert_eq!(kinds::validate("send_email", &payload), Ok(()));

    for (spec, expected) in [
        ("{kind: send_email, payload: {to: null, subject: s, body: b}}", "spec.payload.to: Required"),
        ("{kind: send_email, payload: {to: a@x.org, subject: s, body: null}}", "spec.payload.body"),
    ] {
        let refused = namespace.try_kubectl(&["apply", "--server-side", "-f", "-"], &job_request("bad", spec));
        let message = refused.expect_err(spec);
        assert!(message.contains(expected), "{message}");
    }
    let body = "{kind: webhook_delivery, payload: {url: 'https://x.org', body: null}}";
    namespace.kubectl(&["apply", "--server-side", "-f", "-"], &job_request("body", body));
}

#[test]
fn a_text_of_300_kib_passes_and_the_largest_payload_takes_its_finalizer_and_fullest_status() {
    let namespace = Namespace::new();
    let apply = |name: &str, text: &str| {
        let spec = json!({"kind": "summarize_text", "payload": {"text": text}}).to_string();
        namespace.kubectl(&["apply", "--server-side", "-f", "-"], &job_request(name, &spec));
    };
    apply("text", &"0123456789abcdef".repeat(300 * 64));
    // etcd stores each of these in six bytes
    let frame = r#"{"text":""}"#.len();
    apply("largest", &"<".repeat((queue::PAYLOAD_MAX_BYTES - frame) / 6));
    let patch = r#"{"metadata":{"finalizers":["jobrequest.dev/cancel"]}}"#;
    namespace.kubectl(&["patch", "jr", "largest", "--type=merge", "-p", patch], "");

    let text = "<".repeat(1024);
    let time = "2030-01-01T00:00:00Z";
    let attempt = json!({"number": 100, "worker": "w".repeat(253), "startedAt": time, "finishedAt": time,
        "outcome": "FailedPermanent", "error": text});
    let condition = |kind| {
        json!({"type": kind, "status": "False", "reason": "FailedPermanent", "message": text,
            "lastTransitionTime": time, "observedGeneration": 1})
    };
    let conditions = ["Accepted", "Ready", "Complete", "Failed", "Stalled"].map(condition);
    let status = json!({"phase": "FailedPermanent", "jobId": "0193a8f0-0000-7000-8000-000000000000", "attempts": 100,
        "lastError": text, "history": [attempt, attempt, attempt, attempt, attempt], "result": {"a": "<".repeat(4087)},
        "runAt": time, "startedAt": time, "finishedAt": time, "worker": "w".repeat(253), "observedGeneration": 1,
        "lastRetry": "r".repeat(255),
        "conditions": conditions});
    let patch = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(patch.path(), json!({"status": status}).to_string()).unwrap();
    let file = patch.path().to_str().unwrap();
    let args = ["patch", "jr", "largest", "--subresource=status", "--type=merge", "--patch-file", file];
    namespace.kubectl(&args, "");
    namespace.kubectl(&["patch", "jr", "largest", "--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#], "");
}

#[tokio::test]
async fn a_payload_of_any_depth_is_listed_beside_the_others_and_not_repeated_in_managed_fields() {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let namespace = Namespace::new();
    let nested = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let spec = format!(r#"{{kind: webhook_delivery, payload: {{url: "https://x.org", body: {}}}}}"#, nested(5000));
    namespace.kubectl(&["create", "-f", "-"], &job_request("deep", &spec));
    let spec = "{kind: summarize_text, payload: {text: Hello.}}";
    namespace.kubectl(&["create", "-f", "-"], &job_request("flat", spec));
    let result = format!(r#"{{"status":{{"result":{{"a":{}}}}}}}"#, nested(5000));
    namespace.kubectl(&["patch", "jr", "flat", "--subresource=status", "--type=merge", "-p", &result], "");

    let client = kube::Client::try_default().await.unwrap();
    let requests: Api<JobRequest> = Api::namespaced(client, namespace.name());
    let listed = requests.list(&ListParams::default()).await.unwrap();
    let payloads: BTreeMap<_, _> =
        listed.items.into_iter().map(|object| (object.metadata.name.unwrap(), object.spec.payload.unwrap())).collect();
    assert_eq!(payloads["flat"].text(), r#"{"text":"Hello."}"#);
    assert_eq!(payloads["deep"].text(), format!(r#"{{"body":{},"url":"https://x.org"}}"#, nested(5000)));
}

#[test]
fn what_it_shows_is_what_people_look_for() {
    let namespace = Namespace::new();
    namespace.kubectl(&["create", "-f", "-"], &job_request("a", "{kind: summarize_text, payload: {text: Hello.}}"));
    namespace.kubectl(
        &["create", "-f", "-"],
        &job_request("b", "{kind: webhook_delivery, payload: {url: 'https://x.org', body: 1}}"),
    );
    let get = |args: &[&str]| namespace.kubectl(&[&["get"], args].concat(), "");

    // a fresh object doesn't pass for a finished one
    assert_eq!(get(&["jr", "a", "-o", "jsonpath={.status}"]), r#"{"observedGeneration":-1}"#);

    let status = r#"{"status":{"phase":"Queued","attempts":2,"runAt":"2030-01-01T00:00:00Z","jobId":"0193",
        "worker":"worker-1","lastError":"the receiver answered 500"}}"#;
    namespace.kubectl(&["patch", "jr", "a", "--subresource=status", "--type=merge", "-p", status], "");
    let words = |text: String| -> Vec<Vec<String>> {
        text.lines()
            .map(|line| line.split("  ").map(|w| w.trim().to_owned()).filter(|w| !w.is_empty()).collect())
            .collect()
    };
    let columns = words(get(&["jr", "a"]));
    assert_eq!(columns[0], ["NAME", "KIND", "PHASE", "ATTEMPTS", "RUN-AT", "AGE"]);
    assert_eq!(columns[1][..5], ["a", "summarize_text", "Queued", "2", "2030-01-01T00:00:00Z"]);
    let wide = words(get(&["jobrequests", "a", "-o", "wide"]));
    assert_eq!(wide[0][4..], ["RUN-AT", "JOB-ID", "WORKER", "LAST-ERROR", "AGE"]);
    assert_eq!(wide[1][5..8], ["0193", "worker-1", "the receiver answered 500"]);

    for (selector, expected) in [
        ("spec.kind=summarize_text", "jobrequest.jobrequest.dev/a\n"),
        ("spec.kind!=summarize_text", "jobrequest.jobrequest.dev/b\n"),
        ("status.phase=Queued", "jobrequest.jobrequest.dev/a\n"),
        ("status.phase!=Queued", "jobrequest.jobrequest.dev/b\n"),
    ] {
        assert_eq!(get(&["jr", "-o", "name", "--field-selector", selector]), expected, "{selector}");
    }
}

#[test]
fn explain_tells_each_fields_limit_unit_and_default() {
    // kubectl breaks lines by width
    let explain = |path| kubectl(&["explain", path], "").unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let spec = explain("jr.spec");
    for text in [
        "1 to 100. The default is 3.",
        "1 to 255 characters",
        "RFC 3339 with an offset",
        "-1000 to 1000, the default is 0.",
        "in seconds, 1 to 86400 (a day), the default is 300.",
        "The default is false.",
        "in seconds, 0 to 315360000 (ten years)",
        "At most 1 MiB in all, nested at most 100 levels deep.",
    ] {
        assert!(spec.contains(text), "{text}: {spec}");
    }
    let payload = explain("jr.spec.payload");
    for text in [
        "send_email, required: the recipients",
        "webhook_delivery, required: what is sent, any JSON",
        "in pixels, 1 to 8192",
        "1 to 1048576 characters",
        "in words, 1 to 10000. The default is 100.",
        "POST (the default), PUT or PATCH",
        "enum: contain, cover, fill",
    ] {
        assert!(payload.contains(text), "{text}: {payload}");
    }
    assert!(explain("jr.status").contains("Other values may be added."));
}

#[test]
fn a_status_of_any_version_is_kept_and_can_be_read() {
    let namespace = Namespace::new();
    namespace.kubectl(&["create", "-f", "-"], &job_request("a", "{kind: summarize_text, payload: {text: Hello.}}"));
    let status = || -> JobRequestStatus {
        let object = namespace.kubectl(&["get", "jr", "a", "-o", "json"], "");
        serde_json::from_str::<JobRequest>(&object).unwrap().status.unwrap()
    };
    let patch = |patch: &str| {
        namespace.kubectl(&["patch", "jr", "a", "--subresource=status", "--type=json", "-p", patch], "");
    };
    patch(r#"[{"op":"replace","path":"/status","value":{}}]"#);
    assert_eq!(status(), JobRequestStatus::default());
    patch(r#"[{"op":"add","path":"/status/phase","value":"Hibernating"}]"#);
    assert_eq!(status().phase, Some(Phase::Unknown));
    patch(r#"[{"op":"remove","path":"/status"}]"#);
    assert_eq!(status(), JobRequestStatus { observed_generation: Some(-1), ..Default::default() });
}

#[test]
fn a_name_may_have_253_characters() {
    let namespace = Namespace::new();
    let spec = "{kind: summarize_text, payload: {text: Hello.}}";
    for ending in ["a", "b"] {
        let name = format!("{}{ending}", "n".repeat(252));
        namespace.kubectl(&["create", "-f", "-"], &job_request(&name, spec));
    }
}

#[test]
fn the_definition_is_served_as_it_is_generated() {
    let served = kubectl(&["get", "crd", "jobrequests.jobrequest.dev", "-o", "json"], "").unwrap();
    let served: CustomResourceDefinition = serde_json::from_str(&served).unwrap();
    assert_eq!(served.spec.versions, api::crd().spec.versions);

    let conditions = served.status.unwrap().conditions.unwrap();
    let is = |kind, status| conditions.iter().any(|c| c.type_ == kind && c.status == status);
    assert!(is("Established", "True") && is("NamesAccepted", "True"), "{conditions:?}");
    assert!(!is("NonStructuralSchema", "True"), "{conditions:?}");
}
