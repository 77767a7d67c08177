//! `summarize_text`: the sentences that say most of what a text says, whole and in their order.
//!
//! Extractive and deterministic: nothing is written that the text doesn't say. See `rank` for the method and
//! `sentences` for what a sentence is.

mod rank;
mod sentences;
#[cfg(test)]
mod tests;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};

use super::cpu::{MIB, MemoryBudget, Pool, Stop};
use super::payload::{Field, PayloadError, Shape, check_fields, optional, required};
use super::{Attempt, Executed, Executor, Failure};

pub const KIND: &str = "summarize_text";

const DEFAULT_MAX_WORDS: usize = 100;
const MAX_TEXT_CHARS: usize = 1024 * 1024;

const FIELDS: &[Field] = &[
    required("text", Shape::Text { max_chars: MAX_TEXT_CHARS }),
    optional("max_words", Shape::Integer { min: 1, max: 10_000 }),
];

/// What a byte of the text comes to at most, as sentences, terms and vectors of one-letter words; and the graph.
const MEMORY_FOR_A_BYTE: u64 = 64;
const MEMORY_FOR_THE_GRAPH: u64 = 4 * MIB;

pub struct SummarizeText {
    pool: Pool,
}

#[derive(Debug, Deserialize)]
struct Payload {
    text: String,
    max_words: Option<usize>,
}

#[derive(Debug, PartialEq, Eq)]
struct Summary {
    text: String,
    sentences: usize,
    words: usize,
    /// No sentence fitted whole, so the best one was cut at a word.
    truncated: bool,
}

impl Default for SummarizeText {
    /// With cores and a memory budget of its own: in a registry with other kinds, take [`super::Registry::builtin`]'s.
    fn default() -> Self {
        Self::new(Pool::new(MemoryBudget::default()))
    }
}

impl SummarizeText {
    pub(crate) fn new(pool: Pool) -> Self {
        Self { pool }
    }

    async fn summarize(&self, attempt: &Attempt) -> Executed {
        let Payload { text, max_words } = attempt.checked(parse)?;
        let max_words = max_words.unwrap_or(DEFAULT_MAX_WORDS);
        let memory = MEMORY_FOR_THE_GRAPH + MEMORY_FOR_A_BYTE * text.len() as u64;
        let room = self.pool.room(attempt, memory).await?;
        let Summary { text, sentences, words, truncated } =
            self.pool.run(attempt, move |stop| (summarize(&text, max_words, stop), drop(room)).0).await?;
        Ok(json!({"summary": text, "sentences": sentences, "words": words, "truncated": truncated}))
    }
}

impl Executor for SummarizeText {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        // the work itself looks at the stop token, so it need not be raced against it
        self.summarize(attempt).boxed()
    }
}

pub(super) fn validate(payload: &Value) -> Result<(), PayloadError> {
    parse(payload).map(drop)
}

fn parse(payload: &Value) -> Result<Payload, PayloadError> {
    check_fields(payload, FIELDS)?;
    let payload =
        Payload::deserialize(payload).map_err(|_| PayloadError::new("", "can't be read as a text to summarise"))?;
    if payload.text.trim().is_empty() {
        return Err(PayloadError::new("text", "must not be blank"));
    }
    Ok(payload)
}

fn summarize(text: &str, max_words: usize, stop: &Stop) -> Result<Summary, Failure> {
    let sentences = sentences::split(text);
    stop.check()?;
    let words: Vec<usize> = sentences.iter().map(|sentence| sentences::count_words(sentence)).collect();
    let chosen = if words.iter().sum::<usize>() <= max_words {
        (0..sentences.len()).collect()
    } else {
        rank::choose(&sentences, &words, max_words, stop)?
    };
    if chosen.is_empty() {
        return cut_best(&sentences, max_words, stop);
    }
    let mut text = String::new();
    for index in &chosen {
        sentences::join(&mut text, &sentences[*index]);
    }
    let words = chosen.iter().map(|index| words[*index]).sum();
    Ok(Summary { text, sentences: chosen.len(), words, truncated: false })
}

/// Every sentence is longer than the limit: the best one, up to it.
fn cut_best(sentences: &[String], max_words: usize, stop: &Stop) -> Result<Summary, Failure> {
    let best = rank::best(sentences, stop)?;
    let part = sentences::cut(&sentences[best], max_words);
    Ok(Summary { text: format!("{part}…"), sentences: 1, words: sentences::count_words(part), truncated: true })
}
