//! Sentences and words of a text in any script.
//!
//! The bounds are those of Unicode (UAX 29), which end a sentence at `。`, `؟`, `۔` or `।` without needing a space. On
//! top come rules for what UAX 29 leaves to languages: abbreviations, initials, list labels, quoted speech, and texts
//! wrapped at a line's length.

use unicode_segmentation::UnicodeSegmentation;

/// Never the last word of a sentence.
const TITLES: &[&str] = &[
    "mr", "mrs", "ms", "dr", "prof", "st", "messrs", "mme", "mlle", "sr", "sra", "gen", "col", "lt", "sgt", "capt",
    "rev", "hon", "sen", "rep", "gov", "pres", "e.g", "i.e", "cf", "viz", "vs", "z.b", "d.h", "bzw", "approx", "ca",
];
/// Not the last word when a number follows.
const LABELS: &[&str] = &["no", "nos", "nr", "fig", "figs", "p", "pp", "vol", "ch", "sec", "art", "eq", "para"];
/// Words that begin sentences and hardly ever follow an abbreviation within one.
const STARTERS: &[&str] = &[
    "the",
    "a",
    "an",
    "this",
    "that",
    "these",
    "those",
    "it",
    "its",
    "he",
    "she",
    "they",
    "we",
    "you",
    "i",
    "in",
    "on",
    "at",
    "but",
    "and",
    "or",
    "so",
    "if",
    "when",
    "while",
    "after",
    "before",
    "there",
    "their",
    "his",
    "her",
    "our",
    "as",
    "for",
    "however",
    "meanwhile",
    "what",
    "who",
    "how",
    "why",
];
/// `(12.)`, in bytes, with room for a bracket more.
const LONGEST_LABEL: usize = 6;
/// Brackets, quotes and spaces after a full stop.
const MOST_SIGNS: usize = 32;
/// In bytes.
const LONGEST_ABBREVIATION: usize = 64;
/// A line at least this wide was probably wrapped, a shorter one ended on purpose. Columns; wide letters take two.
const WRAPPED_COLUMNS: usize = 45;

/// The sentences of a text in their order, white space within them made single. No text is lost but white space.
pub(super) fn split(text: &str) -> Vec<String> {
    let paragraphs = paragraphs(text);
    paragraphs.iter().flat_map(|paragraph| readable(paragraph)).flat_map(split_paragraph).collect()
}

/// Words by UAX 29. Text without a letter or digit counts by its visible characters, so that nothing is free.
pub(super) fn count_words(text: &str) -> usize {
    match text.unicode_words().count() {
        0 => visible(text).count(),
        words => words,
    }
}

/// The text up to the end of its word number `words`.
pub(super) fn cut(text: &str, words: usize) -> &str {
    let last_word = words.checked_sub(1).and_then(|last| text.unicode_word_indices().nth(last));
    if let Some((start, word)) = last_word {
        &text[..start + word.len()]
    } else if text.unicode_words().next().is_some() {
        text
    } else {
        visible(text).nth(words).map_or(text, |(start, _)| text[..start].trim_end())
    }
}

fn visible(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.grapheme_indices(true).filter(|(_, cluster)| !cluster.trim().is_empty())
}

/// Appends a piece of text, with a space unless both sides are of a script that has none.
pub(super) fn join(into: &mut String, piece: &str) {
    let without_space =
        into.chars().next_back().is_some_and(has_no_spaces) && piece.chars().next().is_some_and(has_no_spaces);
    if !into.is_empty() && !without_space {
        into.push(' ');
    }
    into.push_str(piece);
}

/// Han, kana and the punctuation that goes with them.
fn has_no_spaces(c: char) -> bool {
    matches!(u32::from(c), 0x3000..=0x30ff | 0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xf900..=0xfaff | 0xff00..=0xffef | 0x20000..=0x3ffff)
}

fn paragraphs(text: &str) -> Vec<String> {
    let mut paragraphs: Vec<String> = Vec::new();
    let mut open = false;
    let mut previous = String::new();
    for line in text.lines() {
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            open = false;
            continue;
        }
        match paragraphs.last_mut() {
            Some(paragraph) if open && continues(&previous, &line) => join(paragraph, &line),
            _ => paragraphs.push(line.clone()),
        }
        open = true;
        previous = line;
    }
    paragraphs
}

/// Whether a line goes on where the one before it was broken.
fn continues(previous: &str, line: &str) -> bool {
    if is_list_item(line) {
        return false;
    }
    let columns: usize = previous.chars().map(|c| if has_no_spaces(c) { 2 } else { 1 }).sum();
    let ended = previous.ends_with(['.', '!', '?', '。', '！', '？', '؟', '۔', '।', '"', '”', '»', '」']);
    ended || columns >= WRAPPED_COLUMNS || line.chars().find(|c| c.is_alphanumeric()).is_some_and(char::is_lowercase)
}

fn is_list_item(line: &str) -> bool {
    let Some((label, _)) = line.split_once(' ') else { return false };
    matches!(label, "-" | "*" | "•" | "–" | "·") || is_label(label)
}

/// `1.`, `12)`, `a.`, `(b)`
fn is_label(text: &str) -> bool {
    // Any number of brackets would be looked at again for each sentence bound after them.
    if text.len() > LONGEST_LABEL {
        return false;
    }
    let Some(inner) = text.strip_suffix(['.', ')']).map(|inner| inner.trim_start_matches('(')) else { return false };
    let number = !inner.is_empty() && inner.len() <= 3 && inner.bytes().all(|b| b.is_ascii_digit());
    number || (inner.len() == 1 && inner.bytes().all(|b| b.is_ascii_lowercase()))
}

/// The paragraph in one part, unless more signs follow a full stop than any writing has: the search for sentence bounds
/// reads all that follows anew at each of them.
fn readable(paragraph: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut signs) = (0, None);
    for (at, cluster) in paragraph.grapheme_indices(true) {
        signs = match cluster.chars().next() {
            Some('.' | '\u{2024}' | '\u{fe52}' | '\u{ff0e}') => Some(0),
            Some(c) if c.is_alphanumeric() => None,
            _ => signs.map(|signs: usize| signs + 1),
        };
        if signs.is_some_and(|signs| signs > MOST_SIGNS) {
            parts.push(&paragraph[start..at]);
            (start, signs) = (at, None);
        }
    }
    parts.push(&paragraph[start..]);
    parts
}

fn split_paragraph(paragraph: &str) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut start = 0;
    let mut end = 0;
    let mut pieces = paragraph.split_sentence_bounds().peekable();
    while let Some(piece) = pieces.next() {
        end += piece.len();
        let so_far = paragraph[start..end].trim();
        if pieces.peek().is_none_or(|next| ends_sentence(so_far, next)) {
            if !so_far.is_empty() {
                sentences.push(so_far.to_owned());
            }
            start = end;
        }
    }
    sentences
}

/// Whether a sentence bound of UAX 29 is one, given what stands before and after it.
fn ends_sentence(before: &str, next: &str) -> bool {
    let opened = next.trim_start_matches(|c: char| !c.is_alphanumeric());
    let Some(first) = opened.chars().next() else { return false };
    if first.is_lowercase() || is_label(before) {
        return false;
    }
    let Some(stem) = before.strip_suffix('.') else { return true };
    // No abbreviation is longer, and a text without spaces would be looked at again from its start for each full stop.
    let tail = &stem[stem.ceil_char_boundary(stem.len().saturating_sub(LONGEST_ABBREVIATION))..];
    let word = tail.rsplit(|c: char| c.is_whitespace() || matches!(c, '(' | '"' | '“' | '[')).next().unwrap_or(tail);
    if word.len() == tail.len() && tail.len() < stem.len() {
        return true;
    }
    let lower = word.to_lowercase();
    let next_word = opened.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_lowercase();
    if TITLES.contains(&lower.as_str()) {
        return false;
    }
    if first.is_numeric() && LABELS.contains(&lower.as_str()) {
        return false;
    }
    // "J. Smith", "the U.S. Senate"
    let initials = !word.is_empty() && word.split('.').all(|part| part.chars().count() == 1) && word != "I";
    !(initials && word.chars().any(char::is_uppercase) && !STARTERS.contains(&next_word.as_str()))
}
