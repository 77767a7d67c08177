//! JSON that this program passes on without looking into it.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

/// One JSON value as the text that the API server sent.
///
/// Text, because reading it into a tree would round some numbers and fails beyond 127 levels of nesting, and an object
/// that can't be read would stop the watch for all others. Two values are equal if they mean the same: the API server
/// gives back `<`, `>` and `&` escaped and numbers in its own spelling.
#[derive(Clone)]
pub struct Json(Box<RawValue>);

impl Json {
    /// The JSON text.
    pub fn text(&self) -> &str {
        self.0.get()
    }

    pub fn raw(&self) -> &RawValue {
        &self.0
    }

    /// The value as a tree.
    ///
    /// # Errors
    /// When it is nested over 127 levels or holds a number beyond a 64-bit float.
    pub fn to_value(&self) -> serde_json::Result<Value> {
        serde_json::from_str(self.text())
    }
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        Self(to_raw_value(value).expect("a JSON value has string keys and finite numbers"))
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Self {
        Self::from(&value)
    }
}

impl From<Box<RawValue>> for Json {
    fn from(raw: Box<RawValue>) -> Self {
        Self(raw)
    }
}

impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        let as_trees = || match (self.to_value(), other.to_value()) {
            (Ok(a), Ok(b)) => means_the_same(&a, &b),
            _ => false,
        };
        self.text() == other.text() || as_trees()
    }
}

fn means_the_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64()),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| means_the_same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| means_the_same(a, b)))
        }
        (a, b) => a == b,
    }
}

/// Its length only: payloads and results don't belong in a log.
impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Json({} bytes)", self.text().len())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_the_same_is_equal_however_it_is_spelled() {
        let json = |text: &str| Json(RawValue::from_string(text.to_owned()).expect("JSON"));
        for (a, b) in [
            (r#"{"a": "<&>", "b": [1.0]}"#, r#"{"b":[1],"a":"\u003c\u0026\u003e"}"#),
            ("1e3", "1000"),
            ("12345678901234567890123", "12345678901234567890123"),
        ] {
            assert_eq!(json(a), json(b));
        }
        for (a, b) in [("1", "2"), ("[1]", "[1,1]"), (r#"{"a":1}"#, r#"{"b":1}"#), ("null", "{}"), (r#""1""#, "1")] {
            assert_ne!(json(a), json(b));
        }
    }
}
