//! Which sentences say most of what a text says.
//!
//! Continuous LexRank (G. Erkan and D. R. Radev, "LexRank: Graph-based Lexical Centrality as Salience in Text
//! Summarization", JAIR 22, 2004): sentences are nodes, the cosine of their tf-idf vectors is the weight of an edge,
//! and PageRank over the row-normalised weights gives each its score. Sentences are then taken by Maximal Marginal
//! Relevance (J. Carbonell and J. Goldstein, SIGIR 1998), so that no thing is said twice.
//!
//! The cost is bounded: at most [`MAX_NODES`] sentences enter the graph, the ones nearest to the text's centroid, each
//! with its [`MAX_TERMS`] heaviest terms. Everything is deterministic; equal scores go to the earlier sentence.

use std::collections::HashMap;

use unicode_segmentation::UnicodeSegmentation;

use crate::kinds::Failure;
use crate::kinds::cpu::Stop;

const MAX_NODES: usize = 500;
const MAX_TERMS: usize = 64;
const DAMPING: f32 = 0.85;
const MAX_ROUNDS: usize = 100;
const SETTLED: f32 = 1e-6;
/// The weight of a sentence's score against its likeness to what is already taken.
const RELEVANCE: f32 = 0.7;
/// A sentence scoring below this share of the average is beside the point: a summary is rather shorter than it might be.
const TO_THE_POINT: f32 = 0.8;
/// A sentence as like as this to one that is taken says the same.
const THE_SAME: f32 = 0.95;

/// A sentence's terms by number, ascending, with weights; its length is 1, or it is empty.
type Vector = Vec<(u32, f32)>;

struct Graph {
    /// The sentences that entered it, by number, ascending.
    nodes: Vec<usize>,
    /// PageRank, one for each node.
    scores: Vec<f32>,
    /// Cosines, row by row; 0 on the diagonal.
    likeness: Vec<f32>,
}

/// Chooses sentences of at most `budget` words together: their numbers, ascending. Empty when none fits.
pub(super) fn choose(sentences: &[String], words: &[usize], budget: usize, stop: &Stop) -> Result<Vec<usize>, Failure> {
    let Graph { nodes, scores, likeness } = score(sentences, stop)?;
    let highest = scores.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let lowest = TO_THE_POINT / nodes.len() as f32;
    let mut nearest = vec![0.0_f32; nodes.len()];
    let mut open = vec![true; nodes.len()];
    let mut chosen = Vec::new();
    let mut left = budget;
    loop {
        stop.check()?;
        let worth = |node: usize| RELEVANCE * scores[node] / highest - (1.0 - RELEVANCE) * nearest[node];
        let fits = |node: &usize| {
            let worth_it = scores[*node] >= lowest && nearest[*node] < THE_SAME;
            open[*node] && words[nodes[*node]] <= left && (worth_it || chosen.is_empty())
        };
        let best = (0..nodes.len()).filter(fits).fold(None, |best: Option<usize>, node| match best {
            Some(best) if worth(best) >= worth(node) => Some(best),
            _ => Some(node),
        });
        let Some(best) = best else { break };
        open[best] = false;
        left -= words[nodes[best]];
        chosen.push(nodes[best]);
        for (node, nearest) in nearest.iter_mut().enumerate() {
            *nearest = nearest.max(likeness[best * nodes.len() + node]);
        }
    }
    chosen.sort_unstable();
    Ok(chosen)
}

/// The sentence with the highest score.
pub(super) fn best(sentences: &[String], stop: &Stop) -> Result<usize, Failure> {
    let Graph { nodes, scores, likeness: _ } = score(sentences, stop)?;
    let best = (0..nodes.len()).reduce(|best, node| if scores[best] >= scores[node] { best } else { node });
    Ok(best.map_or(0, |best| nodes[best]))
}

fn score(sentences: &[String], stop: &Stop) -> Result<Graph, Failure> {
    let (vectors, terms) = vectors(sentences, stop)?;
    let nodes = nearest_to_centroid(&vectors, terms);
    let count = nodes.len();
    let mut likeness = vec![0.0_f32; count * count];
    for row in 0..count {
        stop.check()?;
        for column in row + 1..count {
            let cosine = dot(&vectors[nodes[row]], &vectors[nodes[column]]);
            likeness[row * count + column] = cosine;
            likeness[column * count + row] = cosine;
        }
    }
    let scores = page_rank(&likeness, count, stop)?;
    Ok(Graph { nodes, scores, likeness })
}

fn vectors(sentences: &[String], stop: &Stop) -> Result<(Vec<Vector>, usize), Failure> {
    let mut numbers: HashMap<String, u32> = HashMap::new();
    let mut containing: Vec<u32> = Vec::new();
    let mut counted: Vec<Vector> = Vec::with_capacity(sentences.len());
    for sentence in sentences {
        stop.check()?;
        let mut terms: Vec<u32> = Vec::new();
        for word in sentence.unicode_words() {
            let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
            let number = *numbers.entry(word.to_lowercase()).or_insert(next);
            if number == next {
                containing.push(0);
            }
            terms.push(number);
        }
        terms.sort_unstable();
        let mut vector: Vector = Vec::new();
        for term in terms {
            match vector.last_mut() {
                Some((last, frequency)) if *last == term => *frequency += 1.0,
                _ => {
                    vector.push((term, 1.0));
                    containing[term as usize] += 1;
                }
            }
        }
        counted.push(vector);
    }
    let total = sentences.len() as f32 + 1.0;
    for vector in &mut counted {
        for (term, weight) in vector.iter_mut() {
            *weight *= (total / (containing[*term as usize] as f32 + 0.5)).ln();
        }
        if vector.len() > MAX_TERMS {
            vector.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
            vector.truncate(MAX_TERMS);
            vector.sort_unstable_by_key(|(term, _)| *term);
        }
        normalise(vector);
    }
    Ok((counted, containing.len()))
}

fn normalise(vector: &mut Vector) {
    let length = vector.iter().map(|(_, weight)| weight * weight).sum::<f32>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|(_, weight)| *weight /= length);
    } else {
        vector.clear();
    }
}

/// All sentences when there are few, else those most like the sum of all, in the text's order.
fn nearest_to_centroid(vectors: &[Vector], terms: usize) -> Vec<usize> {
    let mut nodes: Vec<usize> = (0..vectors.len()).collect();
    if nodes.len() <= MAX_NODES {
        return nodes;
    }
    let mut centroid = vec![0.0_f32; terms];
    for (term, weight) in vectors.iter().flatten() {
        centroid[*term as usize] += weight;
    }
    let nearness: Vec<f32> = vectors
        .iter()
        .map(|vector| vector.iter().map(|(term, weight)| weight * centroid[*term as usize]).sum())
        .collect();
    nodes.sort_by(|one, other| nearness[*other].total_cmp(&nearness[*one]).then(one.cmp(other)));
    nodes.truncate(MAX_NODES);
    nodes.sort_unstable();
    nodes
}

fn dot(one: &Vector, other: &Vector) -> f32 {
    let (mut i, mut j, mut sum) = (0, 0, 0.0);
    while let (Some((a, x)), Some((b, y))) = (one.get(i), other.get(j)) {
        match a.cmp(b) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                sum += x * y;
                i += 1;
                j += 1;
            }
        }
    }
    sum
}

/// Power iteration. A sentence like no other gives its weight to all alike.
fn page_rank(likeness: &[f32], count: usize, stop: &Stop) -> Result<Vec<f32>, Failure> {
    let share = 1.0 / (count.max(1) as f32);
    let sums: Vec<f32> = (0..count).map(|row| likeness[row * count..][..count].iter().sum()).collect();
    let mut scores = vec![share; count];
    for _ in 0..MAX_ROUNDS {
        stop.check()?;
        let loose: f32 = (0..count).filter(|row| sums[*row] <= 0.0).map(|row| scores[row]).sum();
        let mut next = vec![(1.0 - DAMPING) * share + DAMPING * loose * share; count];
        for row in (0..count).filter(|row| sums[*row] > 0.0) {
            let given = DAMPING * scores[row] / sums[row];
            for (next, likeness) in next.iter_mut().zip(&likeness[row * count..][..count]) {
                *next += given * likeness;
            }
        }
        let moved: f32 = scores.iter().zip(&next).map(|(old, new)| (old - new).abs()).sum();
        scores = next;
        if moved < SETTLED {
            break;
        }
    }
    Ok(scores)
}
