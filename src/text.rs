//! Bounded text for statuses, rows and logs.

/// The longest prefix of at most `max_bytes` bytes that ends at a character.
pub fn cut(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

/// Without the NUL that Postgres can't hold, at most `max_bytes` bytes.
pub fn storable(text: &str, max_bytes: usize) -> String {
    cut(&text.replace('\0', " "), max_bytes).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_a_character() {
        assert_eq!(cut("ééé", 3), "é");
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abc", 0), "");
    }
}
