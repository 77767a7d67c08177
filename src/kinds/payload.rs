//! What a payload must look like, checked before a row exists and again before the work starts.
//!
//! The checks are pure and name the field, never its value: their text reaches `.status` and Events. What a field means
//! beyond its shape (an address list, a URL) is checked by the kind that owns it.

use serde_json::Value;

use super::Failure;

/// Why a payload can't be accepted. Display reads `payload.to: must be a string`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PayloadError {
    /// The field below `payload`, empty for the payload itself.
    pub field: String,
    /// What is wrong and what would be right, as the rest of a sentence that starts with the field.
    pub problem: String,
}

impl PayloadError {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

impl std::fmt::Display for PayloadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { field, problem } = self;
        if field.is_empty() { write!(f, "payload: {problem}") } else { write!(f, "payload.{field}: {problem}") }
    }
}

impl std::error::Error for PayloadError {}

impl From<PayloadError> for Failure {
    fn from(error: PayloadError) -> Self {
        Self::permanent("PayloadInvalid", error.to_string())
    }
}

/// The shape of one field.
pub(crate) enum Shape {
    /// A string of at most so many characters.
    Text { max_chars: usize },
    /// A whole number between the two, both allowed.
    Integer { min: u64, max: u64 },
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// An object whose values are strings.
    Texts,
    /// Any JSON, `null` too.
    Any,
}

pub(crate) struct Field {
    pub name: &'static str,
    pub required: bool,
    pub shape: Shape,
}

pub(crate) const fn required(name: &'static str, shape: Shape) -> Field {
    Field { name, required: true, shape }
}

pub(crate) const fn optional(name: &'static str, shape: Shape) -> Field {
    Field { name, required: false, shape }
}

/// Checks presence and shape of every field. A field that is `null` counts as absent, but for one that may be any JSON.
pub(crate) fn check_fields(payload: &Value, fields: &[Field]) -> Result<(), PayloadError> {
    let Value::Object(members) = payload else {
        return Err(PayloadError::new("", format!("must be an object, not {}", name_of(payload))));
    };
    let known = |key: &str| fields.iter().any(|field| field.name == key);
    if let Some((unknown, _)) = members.iter().find(|(key, value)| !value.is_null() && !known(key)) {
        let known = fields.iter().map(|field| field.name).collect::<Vec<_>>().join(", ");
        return Err(PayloadError::new(shown_key(unknown), format!("is not a field of this kind, which takes {known}")));
    }
    for Field { name, required, shape } in fields {
        match (members.get(*name), shape) {
            (None, _) if *required => return Err(PayloadError::new(*name, "is required")),
            (None, _) => {}
            (Some(Value::Null), Shape::Any) => {}
            (Some(Value::Null), _) if !required => {}
            (Some(value), shape) => check_shape(value, shape).map_err(|problem| PayloadError::new(*name, problem))?,
        }
    }
    Ok(())
}

fn check_shape(value: &Value, shape: &Shape) -> Result<(), String> {
    match shape {
        Shape::Any => Ok(()),
        Shape::Text { max_chars } => {
            let text = value.as_str().ok_or_else(|| format!("must be a string, not {}", name_of(value)))?;
            match text.chars().nth(*max_chars) {
                None => Ok(()),
                Some(_) => Err(format!("must be at most {max_chars} characters")),
            }
        }
        Shape::Integer { min, max } => match value.as_u64() {
            Some(number) if (*min..=*max).contains(&number) => Ok(()),
            _ => Err(format!("must be a whole number from {min} to {max}")),
        },
        Shape::OneOf(words) => match value.as_str() {
            Some(word) if words.contains(&word) => Ok(()),
            _ => Err(format!("must be one of {}", words.join(", "))),
        },
        Shape::Texts => match value.as_object() {
            Some(members) if members.values().all(Value::is_string) => Ok(()),
            _ => Err("must be an object whose values are strings".to_owned()),
        },
    }
}

fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A key is shown only when it looks like a field's name: nothing else belongs into a status.
fn shown_key(key: &str) -> String {
    let plain = key.len() <= 63 && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if plain && !key.is_empty() { key.to_owned() } else { "(unprintable key)".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FIELDS: &[Field] = &[
        required("to", Shape::Text { max_chars: 5 }),
        optional("size", Shape::Integer { min: 1, max: 9 }),
        optional("fit", Shape::OneOf(&["cover", "fill"])),
        optional("headers", Shape::Texts),
        optional("body", Shape::Any),
    ];

    #[test]
    fn each_wrong_field_is_named_and_no_value_is_shown() {
        for (payload, expected) in [
            (json!([1]), "payload: must be an object, not a list"),
            (json!({}), "payload.to: is required"),
            (json!({"to": null}), "payload.to: must be a string, not null"),
            (json!({"to": "123456"}), "payload.to: must be at most 5 characters"),
            (json!({"to": "x", "size": 0}), "payload.size: must be a whole number from 1 to 9"),
            (json!({"to": "x", "size": -1}), "payload.size: must be a whole number from 1 to 9"),
            (json!({"to": "x", "size": 1.5}), "payload.size: must be a whole number from 1 to 9"),
            (json!({"to": "x", "fit": "secret"}), "payload.fit: must be one of cover, fill"),
            (json!({"to": "x", "headers": {"a": 1}}), "payload.headers: must be an object whose values are strings"),
            (
                json!({"to": "x", "tto": 1}),
                "payload.tto: is not a field of this kind, which takes to, size, fit, headers, body",
            ),
            (
                json!({"to": "x", "a\nb": 1}),
                "payload.(unprintable key): is not a field of this kind, which takes to, size, fit, headers, body",
            ),
        ] {
            assert_eq!(check_fields(&payload, FIELDS).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn null_counts_as_absent_where_a_field_is_optional() {
        for payload in
            [json!({"to": "ééééé", "size": null, "headers": null}), json!({"to": "x", "body": null, "url": null})]
        {
            assert_eq!(check_fields(&payload, FIELDS), Ok(()));
        }
    }
}
