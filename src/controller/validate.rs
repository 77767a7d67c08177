//! What the schema can't see of a spec. Pure. A resource refused here is `Rejected`: what it says never changes, so
//! neither does the answer.

use crate::api::JobRequestSpec;
use crate::{kinds, queue};

/// Why a resource can't become a row: for its conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// A stable CamelCase word.
    pub reason: &'static str,
    /// Names the field and the remedy, never the value.
    pub message: String,
}

/// Whether the queue and the kind's executor can take this spec.
///
/// # Errors
/// The first fault found.
pub fn validate(spec: &JobRequestSpec) -> Result<(), Rejection> {
    let invalid = |message: String| Rejection { reason: "PayloadInvalid", message };
    let Some(payload) = &spec.payload else {
        return Err(invalid("spec.payload is missing".to_owned()));
    };
    let depth = depth(payload.text());
    if depth > queue::PAYLOAD_MAX_DEPTH {
        let most = queue::PAYLOAD_MAX_DEPTH;
        return Err(invalid(format!("spec.payload is nested {depth} levels deep: flatten it to at most {most}")));
    }
    let value = payload
        .to_value()
        .map_err(|_| invalid("spec.payload holds a number that can't be stored: write it as a string".to_owned()))?;
    queue::check_payload(&value).map_err(|error| invalid(format!("spec.{error}")))?;
    kinds::validate(&spec.kind, &value).map_err(|error| invalid(format!("spec.{error}")))
}

/// The nesting of a JSON text, counted without reading it into a tree, which would end at 128.
fn depth(text: &str) -> usize {
    let (mut now, mut most, mut in_string, mut escaped) = (0_usize, 0, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                now += 1;
                most = most.max(now);
            }
            b']' | b'}' if !in_string => now = now.saturating_sub(1),
            _ => {}
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_depth_is_the_texts_and_not_its_strings() {
        assert_eq!(depth(r#"{"a":[1,{"b":"[[[\"[["}]}"#), 3);
        assert_eq!(depth("1"), 0);
    }

    #[test]
    fn a_nul_and_a_deep_payload_are_rejected_by_the_name_of_their_field() {
        let nul = JobRequestSpec::new("summarize_text", json!({"text": "a\0b"}));
        assert!(validate(&nul).expect_err("NUL").message.starts_with("spec.payload.text holds a NUL"));
        let nested = (0..200).fold(json!(1), |inner, _| json!([inner]));
        let deep = JobRequestSpec::new("webhook_delivery", json!({"url": "https://a.example", "body": nested}));
        assert!(validate(&deep).expect_err("deep").message.contains("at most 100"));
        assert_eq!(validate(&JobRequestSpec::new("summarize_text", json!({"text": "Hello."}))), Ok(()));
    }
}
