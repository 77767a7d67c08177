//! Bounded text for statuses, rows and logs.

use serde_json::Value;

/// The deepest nesting that a JSON value keeps: serde_json stops reading at 128.
pub const JSON_MAX_DEPTH: usize = 100;

/// The longest prefix of at most `max_bytes` bytes that ends at a character.
pub fn cut(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

/// Without the NUL that Postgres can't hold, at most `max_bytes` bytes.
pub fn storable(text: &str, max_bytes: usize) -> String {
    cut(&text.replace('\0', " "), max_bytes).to_owned()
}

/// The same for JSON that an executor made: what jsonb can't hold or nobody could read back is replaced, so that work
/// which was done is not lost with its result.
pub fn storable_json(value: &Value) -> Value {
    storable_at(value, 1)
}

fn storable_at(value: &Value, depth: usize) -> Value {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        Value::String(text) => Value::String(text.replace('\0', " ")),
        Value::Array(_) | Value::Object(_) if depth > JSON_MAX_DEPTH => Value::from("(nested too deeply)"),
        Value::Array(items) => items.iter().map(|item| storable_at(item, depth + 1)).collect(),
        Value::Object(fields) => {
            fields.iter().map(|(key, item)| (key.replace('\0', " "), storable_at(item, depth + 1))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_without_a_nul_or_great_depth_stays_as_it_is() {
        let value = json!({"a": [1, 2.5, null, true, {"b": "é"}], "": {}});
        assert_eq!(storable_json(&value), value);
        assert_eq!(storable_json(&json!({"a\0": ["b\0"]})), json!({"a ": ["b "]}));
    }

    #[test]
    fn a_text_is_cut_at_a_character() {
        assert_eq!(cut("ééé", 3), "é");
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abc", 0), "");
    }
}
