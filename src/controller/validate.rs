//! Whether a spec can become a row: what the API server's schema and CEL can't see. Pure.
//!
//! What is refused here stays refused: kind, payload and key never change, so the answer doesn't either.

use super::reason::Reason;
use crate::api::{JobRequestSpec, Json};
use crate::{kinds, queue};

/// Why a resource can't become a row: for its conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    pub reason: Reason,
    /// Names the field and the remedy, never the value.
    pub message: String,
}

/// Whether the queue and the kind's executor can take this spec. Not for a cached object, whose payload was dropped.
///
/// # Errors
/// The first fault found.
pub fn validate(spec: &JobRequestSpec) -> Result<(), Rejection> {
    if spec.idempotency_key.as_ref().is_some_and(|key| key.contains('\0')) {
        let message = "spec.idempotencyKey holds a NUL character: remove it".to_owned();
        return Err(Rejection { reason: Reason::SpecInvalid, message });
    }
    let invalid = |problem: String| Rejection { reason: Reason::PayloadInvalid, message: format!("spec.{problem}") };
    let payload = spec.payload.as_ref().ok_or_else(|| invalid("payload is missing".to_owned()))?;
    check_payload(&spec.kind, payload).map_err(invalid)
}

/// The fault as the rest of a sentence that begins with `spec.`.
fn check_payload(kind: &str, payload: &Json) -> Result<(), String> {
    // Before the tree is made, which fails beyond 127 levels.
    let (depth, most) = (depth(payload.text()), queue::PAYLOAD_MAX_DEPTH);
    if depth > most {
        return Err(format!(
            "payload is nested {depth} levels deep: flatten it to at most {most}, or send it as a string"
        ));
    }
    let payload = payload.to_value().map_err(|_| {
        "payload holds a number out of range, or a text that is not Unicode: write the number as a string".to_owned()
    })?;
    queue::check_payload(&payload).map_err(|error| error.to_string())?;
    kinds::validate(kind, &payload).map_err(|error| error.to_string())
}

/// How deep arrays and objects are nested in a JSON text.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut escaped) = (false, false);
    for byte in text.bytes() {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;
    use serde_json::{Value, json};

    use super::*;
    use crate::queue::PAYLOAD_MAX_BYTES;

    fn spec(kind: &str, payload: Value) -> JobRequestSpec {
        JobRequestSpec::new(kind, payload)
    }

    fn webhook(body: &str) -> JobRequestSpec {
        let payload = RawValue::from_string(format!(r#"{{"url":"https://example.com/","body":{body}}}"#)).unwrap();
        JobRequestSpec::new("webhook_delivery", payload)
    }

    fn nested(depth: usize) -> String {
        format!("{}{}", "[".repeat(depth), "]".repeat(depth))
    }

    #[test]
    fn a_good_spec_of_each_kind_is_valid() {
        for (kind, payload) in [
            ("send_email", json!({"to": "ada@example.com", "subject": "", "body": ""})),
            ("resize_image", json!({"source_url": "https://example.com/a.png", "width": 1, "height": 1})),
            ("summarize_text", json!({"text": "Hello."})),
            ("webhook_delivery", json!({"url": "https://example.com/", "body": null})),
        ] {
            assert_eq!(validate(&spec(kind, payload)), Ok(()));
        }
    }

    #[test]
    fn what_no_row_can_hold_is_refused_with_the_fields_path_and_without_its_value() {
        let mail = |subject: &str| spec("send_email", json!({"to": "a@x.org", "subject": subject, "body": "b"}));
        for (spec, expected) in [
            (mail("secret\0"), "spec.payload.subject holds a NUL"),
            (webhook(r#"{"a":[1,{"b":"secret\u0000"}]}"#), "spec.payload.body.a[1].b holds a NUL"),
            (webhook(r#"{"a":{"secret\u0000":1}}"#), "spec.payload.body.a holds a NUL"),
            (webhook(&nested(100)), "spec.payload is nested 101 levels deep: flatten it to at most 100"),
            (webhook(&nested(200)), "spec.payload is nested 201 levels deep: flatten it to at most 100"),
            (webhook(&nested(100_000)), "spec.payload is nested 100001 levels deep: flatten it to at most 100"),
            (webhook("1e400"), "spec.payload holds a number out of range"),
            (webhook(r#""\ud800""#), "spec.payload holds a number out of range, or a text that is not Unicode"),
            (webhook(&format!("\"{}\"", "<".repeat(PAYLOAD_MAX_BYTES / 6))), "at most 1048576"),
            (spec("send_email", json!({"to": "a@x", "body": "b"})), "spec.payload.subject"),
            (JobRequestSpec { payload: None, ..mail("s") }, "spec.payload is missing"),
        ] {
            let Rejection { reason, message } = validate(&spec).unwrap_err();
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains("secret"), "{message}");
            assert_eq!(reason, Reason::PayloadInvalid);
        }
    }

    #[test]
    fn what_fits_exactly_is_valid() {
        let frame = webhook("\"\"").payload.unwrap().text().len();
        for body in [
            nested(99),
            format!("\"{}\"", "[".repeat(200)),
            format!("\"{}\"", r#"\"["#.repeat(200)),
            "[1.5, 1e3, 12345678901234567890, -0, 1e-300, 1e300]".to_owned(),
            format!("\"{}\"", "a".repeat(PAYLOAD_MAX_BYTES - frame)),
        ] {
            assert_eq!(validate(&webhook(&body)).err(), None);
        }
    }

    #[test]
    fn a_key_that_no_row_can_hold_is_refused() {
        let good = spec("summarize_text", json!({"text": "Hello."}));
        let rejection = validate(&JobRequestSpec { idempotency_key: Some("secret\0".into()), ..good }).unwrap_err();
        assert_eq!(rejection.reason, Reason::SpecInvalid);
        assert_eq!(rejection.message, "spec.idempotencyKey holds a NUL character: remove it");
    }

    #[test]
    fn what_an_executor_would_not_take_is_refused_in_its_words() {
        for (kind, payload, expected) in [
            ("send_email", json!({"to": "a@x.org, @", "subject": "", "body": ""}), "spec.payload.to: must be a list"),
            (
                "webhook_delivery",
                json!({"url": "http://x.org:25/", "body": 1}),
                "spec.payload.url: must not use a port",
            ),
            ("summarize_text", json!({"text": "\u{2003}"}), "spec.payload.text: must not be blank"),
        ] {
            let Rejection { reason, message } = validate(&spec(kind, payload)).unwrap_err();
            assert_eq!(reason, Reason::PayloadInvalid);
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
