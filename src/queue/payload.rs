//! What a payload may hold: what jsonb can store and every reader can read back.

use std::fmt::Write;

use serde_json::Value;

use super::error::{Error, Result};

/// The largest payload in bytes, as JSON with `<`, `>` and `&` escaped (etcd's form).
pub const PAYLOAD_MAX_BYTES: usize = 1024 * 1024;
/// The deepest nesting of arrays and objects.
pub const PAYLOAD_MAX_DEPTH: usize = crate::text::JSON_MAX_DEPTH;

/// What a statement would refuse or a reader could not read back.
///
/// # Errors
/// [`Error::PayloadInvalid`] with the field's path; never its value.
pub fn check_payload(payload: &Value) -> Result<()> {
    payload_size(payload).map(drop)
}

/// The same, with the size in bytes that was counted.
pub(super) fn payload_size(payload: &Value) -> Result<usize> {
    let mut size = 0;
    check_value(payload, &mut "payload".to_owned(), 1, &mut size)?;
    if size > PAYLOAD_MAX_BYTES {
        return Err(Error::invalid("payload", format!("takes {size} bytes as JSON; at most {PAYLOAD_MAX_BYTES} fit")));
    }
    Ok(size)
}

fn check_value(value: &Value, path: &mut String, depth: usize, size: &mut usize) -> Result<()> {
    let at = path.len();
    match value {
        Value::Null => *size += 4,
        Value::Bool(b) => *size += if *b { 4 } else { 5 },
        Value::Number(n) => *size += check_number(n, path)?,
        Value::String(s) => *size += check_text(s, path)?,
        Value::Array(items) => {
            check_depth(depth, path)?;
            *size += 2 + items.len().saturating_sub(1);
            for (i, item) in items.iter().enumerate() {
                _ = write!(path, "[{i}]");
                check_value(item, path, depth + 1, size)?;
                path.truncate(at);
            }
        }
        Value::Object(fields) => {
            check_depth(depth, path)?;
            *size += 2 + fields.len().saturating_sub(1);
            for (key, item) in fields {
                *size += 1 + check_text(key, path)?;
                path.push('.');
                path.push_str(crate::text::cut(key, 64));
                check_value(item, path, depth + 1, size)?;
                path.truncate(at);
            }
        }
    }
    Ok(())
}

fn check_depth(depth: usize, path: &str) -> Result<()> {
    if depth <= PAYLOAD_MAX_DEPTH {
        return Ok(());
    }
    let at = crate::text::cut(path, 128);
    Err(Error::invalid(at, format!("is nested deeper than {PAYLOAD_MAX_DEPTH} levels: flatten it")))
}

fn check_text(text: &str, path: &str) -> Result<usize> {
    let mut size = 2;
    for c in text.chars() {
        size += match c {
            '\0' => return Err(Error::invalid(path, "holds a NUL character, which Postgres can't store: remove it")),
            '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => 6,
            c if c < ' ' => 6,
            c => c.len_utf8(),
        };
    }
    Ok(size)
}

/// jsonb numbers are numeric: at most 131072 digits before the point and 16383 after it.
fn check_number(number: &serde_json::Number, path: &str) -> Result<usize> {
    if let Some(whole) = number.as_i64() {
        let digits = whole.unsigned_abs().checked_ilog10().unwrap_or_default() as usize + 1;
        return Ok(digits + usize::from(whole < 0));
    }
    let digits = number.to_string();
    let exponent: i64 = match digits.split_once(['e', 'E']) {
        Some((_, e)) => e.parse().unwrap_or(i64::MAX),
        None => 0,
    };
    if exponent.abs() > 10_000 || digits.len() > 10_000 {
        return Err(Error::invalid(path, "is a number out of jsonb's range: write it as a string"));
    }
    Ok(digits.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problem(payload: &Value) -> String {
        check_payload(payload).expect_err("it must be refused").to_string()
    }

    #[test]
    fn a_nul_is_refused_wherever_it_stands_and_its_place_is_named() {
        assert!(problem(&json!({"a": [{"b": "x\0"}]})).starts_with("payload.a[0].b holds a NUL"));
        assert!(problem(&json!({"a": {"k\0": 1}})).starts_with("payload.a holds a NUL"));
    }

    #[test]
    fn nesting_is_bounded_at_a_hundred() {
        let nested = |depth| (1..depth).fold(json!([]), |inner, _| json!([inner]));
        assert!(check_payload(&nested(100)).is_ok());
        assert!(problem(&nested(101)).contains("deeper than 100"));
    }

    #[test]
    fn the_size_counts_the_escapes_of_etcd() {
        let fits = "a".repeat(PAYLOAD_MAX_BYTES - 8);
        assert!(check_payload(&json!({"k": fits})).is_ok(), "braces, colon, quotes and key take 8 bytes");
        assert!(problem(&json!({"k": format!("{fits}a")})).contains("1048577 bytes"));
        assert!(problem(&json!({"k": "<".repeat(PAYLOAD_MAX_BYTES / 6 + 1)})).contains("at most"));
    }

    #[test]
    fn the_counted_size_is_the_size_of_the_text() {
        let value =
            json!({"a": [1, 0, -7, 10, i64::MIN, u64::MAX, -2.5, null, true, false, "é\n\"\\\u{1}"], "b": {}, "c": []});
        let mut size = 0;
        check_value(&value, &mut String::new(), 1, &mut size).expect("it is valid");
        assert_eq!(size, value.to_string().len());
    }
}
