//! JSON that this program passes on without looking into it.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

/// One JSON value as the text that the API server sent.
///
/// Text, because reading it into a tree would round some numbers and fails beyond 127 levels of nesting, and an object
/// that can't be read would stop the watch for all others. Two values are equal if their texts are: the API server
/// writes equal objects with equal texts.
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
        self.text() == other.text()
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
