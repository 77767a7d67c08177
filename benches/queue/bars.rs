//! What was measured, and the bars that it is held against.

use serde::Serialize;

/// All values of one thing for one contender, one a round.
#[derive(Debug, Clone, Serialize)]
pub struct Series {
    pub what: &'static str,
    pub who: String,
    pub unit: &'static str,
    pub values: Vec<f64>,
}

impl Series {
    /// Least, median, most.
    pub fn spread(&self) -> Option<(f64, f64, f64)> {
        let mut sorted = self.values.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() {
            0 => return None,
            even if even % 2 == 0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
            _ => sorted[middle],
        };
        Some((*sorted.first()?, median, *sorted.last()?))
    }
}

#[derive(Debug, Default)]
pub struct Results {
    pub series: Vec<Series>,
}

impl Results {
    pub fn add(&mut self, what: &'static str, who: &str, unit: &'static str, value: f64) {
        let at = self.series.iter().position(|series| series.what == what && series.who == who);
        match at {
            Some(at) => self.series[at].values.push(value),
            None => self.series.push(Series { what, who: who.to_owned(), unit, values: vec![value] }),
        }
    }

    pub fn of<'a>(&'a self, what: &'a str) -> impl Iterator<Item = &'a Series> {
        self.series.iter().filter(move |series| series.what == what)
    }

    /// The median of the contender whose name starts so; of several, by `best`.
    fn median(&self, what: &str, who: &str, best: fn(f64, f64) -> f64) -> Option<f64> {
        self.of(what)
            .filter(|series| series.who.starts_with(who))
            .filter_map(|series| series.spread().map(|(_, median, _)| median))
            .reduce(best)
    }

    fn most(&self, what: &str, who: &str) -> Option<f64> {
        self.median(what, who, f64::max)
    }

    fn least(&self, what: &str, who: &str) -> Option<f64> {
        self.median(what, who, f64::min)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

/// A bar and where we stand.
#[derive(Debug)]
pub struct Bar {
    pub what: String,
    limit: Limit,
    unit: &'static str,
    /// None when this run did not measure it.
    pub value: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    Miss,
    NotMeasured,
}

impl Bar {
    pub fn verdict(&self) -> Verdict {
        match (self.value, self.limit) {
            (None, _) => Verdict::NotMeasured,
            (Some(value), Limit::AtLeast(least)) if value >= least => Verdict::Pass,
            (Some(value), Limit::AtMost(most)) if value <= most => Verdict::Pass,
            // What is no number passes nothing.
            (Some(_), _) => Verdict::Miss,
        }
    }

    pub fn limit(&self) -> String {
        match self.limit {
            Limit::AtLeast(value) => format!("at least {value}{}", self.unit),
            Limit::AtMost(value) => format!("at most {value}{}", self.unit),
        }
    }

    pub fn reached(&self) -> String {
        self.value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}{}", self.unit))
    }
}

impl Verdict {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pass => "PASS",
            Self::Miss => "MISS",
            Self::NotMeasured => "not measured",
        }
    }
}

pub const DRAIN: &str = "drain";
pub const DRAIN_CONTROLLER: &str = "drain, rows as the controller writes them";
pub const ONE: &str = "one at a time, 16 in flight";
pub const ENQUEUE: &str = "enqueue one by one, 16 connections";
pub const BULK: &str = "enqueue in bulk of 1,000";
pub const BARE_INSERT: &str = "a bare UNNEST insert of id, kind and payload";
pub const P50: &str = "start latency, idle, p50";
pub const P99: &str = "start latency, idle, p99";
pub const PROCESSES: &str = "drain by worker processes";
pub const HIGHER_P50: &str = "start latency of higher priorities behind a backlog, p50";
pub const HIGHER_P99: &str = "start latency of higher priorities behind a backlog, p99";
pub const HIGHER_BUSY: &str = "slots taken meanwhile";
pub const HELD_RATE: &str = "mixed jobs until each was run once";
pub const HELD: &str = "under a held snapshot";
pub const FREE: &str = "free";
pub const HELD_PACE: &str = "held snapshot: the last tenth's rate against the first's";
pub const HELD_SHARE: &str = "held snapshot: the average against the free drain's";
pub const HELD_LATE: &str = "held snapshot: a job that belongs before the last claim waits";
pub const CLAIM_PLACE: &str = "claim of 100 from its place in a lane";
pub const CLAIM_UNKNOWING: &str = "claim of 100 by fetch_many";
pub const SURVEY: &str = "survey of the lanes";
pub const ALONE: &str = "ready rows alone";
pub const AMONG: &str = "among ended, later and others' rows";
pub const LARGE_RSS: &str = "payloads of 64 kB, 32 slots, memory at its most";
pub const ROW: &str = "enqueued and drained together, with retention";
pub const ROW_SPACE: &str = "in a row: dead and free space after each fifth";
pub const ROW_INDEXES: &str = "in a row: indexes of claim, finish and rescue after each fifth";
pub const ROW_CLAIM: &str = "in a row: p99 of the worker's claims in each fifth";
pub const FIFTHS: [&str; 5] = ["first", "second", "third", "fourth", "last"];
pub const IDLE_QUERIES: &str = "idle worker, queries";
pub const IDLE_RSS: &str = "idle worker, memory";
pub const IDLE_CPU: &str = "idle worker, CPU";

const US: &str = "jobrequest";
const GRAPHILE: &str = "graphile_worker";
const RIVER: &str = "River";
const SEED: &str = "rust-job-queue";

/// All bars of the specification, measured in this run or not.
pub fn bars(results: &Results) -> Vec<Bar> {
    let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
    let against = |what, who| ratio(results.most(what, US), results.most(what, who));
    // Half a millisecond is given.
    let latency = |what| Some(results.least(what, US)? - results.least(what, GRAPHILE)?);
    let processes = |count: &str| {
        let rate = |count: &str| results.most(PROCESSES, &format!("{US}, {count}"));
        ratio(rate(count), rate("1"))
    };
    let best_peer = [GRAPHILE, RIVER, SEED].iter().filter_map(|who| results.most(ENQUEUE, who)).reduce(f64::max);
    let ours = |what| results.most(what, US);
    let worst =
        |what| results.of(what).filter_map(|series| series.spread()).map(|(_, median, _)| median).reduce(f64::max);
    let among = |what| ratio(results.least(what, AMONG), results.least(what, ALONE));
    let grown = |what| ratio(results.least(what, FIFTHS[4]), results.least(what, FIFTHS[1]));
    let bar = |what: &str, limit, unit, value| Bar { what: what.to_owned(), limit, unit, value };
    use Limit::{AtLeast, AtMost};
    vec![
        bar("drain against graphile_worker's better setting", AtLeast(1.25), "x", against(DRAIN, GRAPHILE)),
        bar("drain against River", AtLeast(3.0), "x", against(DRAIN, RIVER)),
        bar(
            "drain against the seed crate",
            AtLeast(20.0),
            "x",
            ratio(results.most(DRAIN, US), results.most(ONE, SEED)),
        ),
        bar(
            "drain of rows as the controller writes them, against graphile_worker's plain ones",
            AtLeast(1.0),
            "x",
            ratio(results.most(DRAIN_CONTROLLER, US), results.most(DRAIN, GRAPHILE)),
        ),
        bar("one at a time against the seed crate", AtLeast(1.0), "x", against(ONE, SEED)),
        bar("enqueue_many of 1,000 against a bare UNNEST insert", AtLeast(0.8), "x", against(BULK, BARE_INSERT)),
        bar("enqueue_many of 1,000 against River's fast insert", AtLeast(1.0), "x", against(BULK, RIVER)),
        bar("enqueue one by one against the best peer", AtLeast(1.0), "x", ratio(ours(ENQUEUE), best_peer)),
        bar("start latency p50 over graphile_worker's better setting", AtMost(0.5), " ms", latency(P50)),
        bar("start latency p99 over graphile_worker's better setting", AtMost(0.5), " ms", latency(P99)),
        bar("start latency p99 of higher priorities behind a backlog", AtMost(250.0), " ms", worst(HIGHER_P99)),
        bar(HELD_PACE, AtLeast(0.9), "x", ours(HELD_PACE)),
        bar(HELD_SHARE, AtLeast(0.7), "x", ours(HELD_SHARE)),
        // Two polls.
        bar(HELD_LATE, AtMost(4.0), " s", worst(HELD_LATE)),
        bar(
            "claim of 100 among rows that are none of its business against alone, by a worker",
            AtMost(1.2),
            "x",
            among(CLAIM_PLACE),
        ),
        bar("the same by fetch_many", AtMost(1.2), "x", among(CLAIM_UNKNOWING)),
        bar("idle worker: queries", AtMost(2.0), "/s", ours(IDLE_QUERIES)),
        bar("idle worker: memory", AtMost(32.0), " MiB", ours(IDLE_RSS)),
        bar("idle worker: CPU", AtMost(0.5), " %", ours(IDLE_CPU)),
        bar("payloads of 64 kB at concurrency 32: memory", AtMost(256.0), " MiB", worst(LARGE_RSS)),
        bar("two worker processes against one", AtLeast(0.9), "x", processes("2")),
        bar("four worker processes against one", AtLeast(0.9), "x", processes("4")),
        bar("eight worker processes against one", AtLeast(0.9), "x", processes("8")),
        bar("jobs in a row: dead and free space, last fifth against second", AtMost(1.3), "x", grown(ROW_SPACE)),
        bar("jobs in a row: size of the indexes, last fifth against second", AtMost(1.3), "x", grown(ROW_INDEXES)),
        bar("jobs in a row: p99 of the claims, last fifth against second", AtMost(1.3), "x", grown(ROW_CLAIM)),
    ]
}
