//! What can happen to the queue, and how often it does.

use std::time::Duration;

use jobrequest::job::{Cause, Status};
use jobrequest::queue::{AttemptEnd, AttemptFailure};
use proptest::collection::vec;
use proptest::option::{of, weighted};
use proptest::prelude::*;
use serde_json::json;

use crate::database::INSTALLS;

const HOUR: i64 = 60 * 60;
pub const KINDS: [&str; 3] = ["anchor", "buoy", "cable"];
pub const WORKERS: usize = 3;
pub const RESOURCES: usize = 8;

/// One thing that happens. Numbers choose among what there is at the time, and the step is left out if there is nothing.
#[derive(Debug, Clone)]
pub enum Op {
    Enqueue {
        install: usize,
        new: New,
        heard: bool,
    },
    EnqueueMany {
        install: usize,
        new: Vec<New>,
        heard: bool,
    },
    InsertInSql {
        install: usize,
        kind: usize,
    },
    Claim {
        install: usize,
        worker: usize,
        kinds: Vec<usize>,
        limit: usize,
        heard: bool,
    },
    /// As the product's worker claims: a survey, then from the lanes that it found, in some order.
    ClaimLanes {
        install: usize,
        worker: usize,
        kinds: Vec<usize>,
        turn: usize,
        /// How many of the lanes.
        lanes: usize,
        each: usize,
        limit: usize,
        /// From their first jobs on; otherwise all of each lane, and lanes too in which nothing waits.
        from_head: bool,
    },
    TakeUp {
        worker: usize,
    },
    Heartbeat {
        install: usize,
        picks: Vec<usize>,
    },
    LookForCancels {
        install: usize,
        picks: Vec<usize>,
    },
    Finish {
        ends: Vec<(usize, AttemptEnd)>,
        way: Way,
    },
    FinalizeCancelled {
        pick: usize,
    },
    /// The worker dies: its claims are forgotten.
    Crash {
        worker: usize,
    },
    RequestCancel {
        via: usize,
        job: usize,
    },
    Retry {
        via: usize,
        job: usize,
        mark: Option<u8>,
    },
    EditWaiting {
        resource: usize,
        edit: Edit,
    },
    /// The resource is being deleted.
    Release {
        resource: usize,
    },
    RecoverStale {
        install: usize,
    },
    /// The resource's status shows the newest revision, or one before it.
    Acknowledge {
        resource: usize,
        behind: i64,
    },
    Purge {
        install: usize,
    },
    EndLease {
        job: usize,
    },
    Pass {
        seconds: i64,
    },
    Get {
        via: usize,
        job: usize,
    },
    /// What the controller asks: which row a resource has, and whose statuses are due.
    Held {
        resource: usize,
    },
    Due {
        install: usize,
    },
    List {
        install: usize,
        status: Option<Status>,
        kind: Option<usize>,
        limit: Option<i64>,
        offset: i64,
    },
    Depth {
        install: usize,
    },
}

/// How the ends are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    OneByOne,
    Together,
    /// Together, but the reply is lost, and they are sent again.
    Twice,
}

#[derive(Debug, Clone)]
pub struct New {
    pub kind: usize,
    pub payload: u8,
    pub key: Option<u8>,
    pub resource: Option<usize>,
    /// Seconds from now.
    pub run_at: Option<i64>,
    pub priority: i16,
    pub max_attempts: u32,
    pub suspended: bool,
    pub mark: Option<u8>,
}

#[derive(Debug, Clone)]
pub struct Edit {
    pub priority: i16,
    pub suspended: bool,
    pub max_attempts: u32,
    pub run_at: EditRunAt,
}

#[derive(Debug, Clone, Copy)]
pub enum EditRunAt {
    Same,
    Now,
    In(i64),
}

/// The second install is there to be left alone, most of the time.
fn install() -> impl Strategy<Value = usize> {
    prop_oneof![5 => Just(0), 1 => 0..INSTALLS.len()]
}

fn number() -> impl Strategy<Value = usize> {
    0_usize..12
}

fn priority() -> impl Strategy<Value = i16> {
    prop_oneof![3 => Just(0), 1 => -1_i16..=1, 1 => prop_oneof![Just(-1000), Just(1000)]]
}

fn new() -> impl Strategy<Value = New> {
    let who = (weighted(0.4, 0_u8..2), weighted(0.5, 0..RESOURCES), weighted(0.1, 0_u8..3));
    let when = prop_oneof![4 => Just(None), 1 => Just(Some(30)), 1 => Just(Some(-30)), 1 => Just(Some(HOUR))];
    let limits = (prop_oneof![3 => 1_u32..4, 1 => Just(100)], prop::bool::weighted(0.15));
    (0..KINDS.len(), prop_oneof![4 => Just(0_u8), 1 => Just(1)], who, when, priority(), limits).prop_map(
        |(kind, payload, (key, resource, mark), run_at, priority, (max_attempts, suspended))| New {
            kind,
            payload,
            key,
            resource,
            run_at,
            priority,
            max_attempts,
            suspended,
            mark,
        },
    )
}

/// What the table's own defaults are enough for.
fn plain() -> impl Strategy<Value = New> {
    (0..KINDS.len(), 0_u8..2).prop_map(|(kind, payload)| New {
        kind,
        payload,
        key: None,
        resource: None,
        run_at: None,
        priority: 0,
        max_attempts: 3,
        suspended: false,
        mark: None,
    })
}

/// Whether the reply comes through.
fn heard() -> impl Strategy<Value = bool> {
    prop::bool::weighted(0.95)
}

fn enqueue() -> impl Strategy<Value = Op> {
    (install(), new(), heard()).prop_map(|(install, new, heard)| Op::Enqueue { install, new, heard })
}

fn enqueue_many() -> impl Strategy<Value = Op> {
    // Resources ask one by one: an item that has one is refused, most have none.
    let without = || new().prop_map(|new| New { resource: None, ..new });
    let items = prop_oneof![
        1 => vec(plain(), 0..5),
        3 => vec(prop_oneof![6 => without(), 1 => new()], 1..8),
    ];
    (install(), items, heard()).prop_map(|(install, new, heard)| Op::EnqueueMany { install, new, heard })
}

fn cause() -> impl Strategy<Value = Cause> {
    let named = prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::from_secs(30)),
        Just(Duration::from_secs(13 * 60 * 60)),
        Just(Duration::MAX)
    ];
    prop_oneof![
        5 => Just(Cause::Passing),
        4 => Just(Cause::HandBack),
        2 => named.prop_map(Cause::RetryAfter),
        2 => Just(Cause::Permanent),
        1 => Just(Cause::Cancelled),
        1 => Just(Cause::LeaseLost),
    ]
}

fn succeeded() -> impl Strategy<Value = AttemptEnd> {
    (0_u8..9).prop_map(|n| AttemptEnd::Succeeded(json!({ "n": n })))
}

fn unsuccessful() -> impl Strategy<Value = AttemptEnd> {
    (cause(), of(0_u8..9), weighted(0.2, 0_u8..9)).prop_map(|(c, e, p)| failed(c, e, p))
}

fn end() -> impl Strategy<Value = AttemptEnd> {
    prop_oneof![1 => succeeded(), 3 => unsuccessful()]
}

fn claim() -> impl Strategy<Value = Op> {
    let kinds = prop_oneof![
        4 => Just(vec![0, 1, 2]),
        1 => Just(vec![]),
        2 => prop::sample::subsequence(vec![0, 1, 2], 1..3),
    ];
    (install(), 0..WORKERS, kinds, prop_oneof![Just(1_usize), 1_usize..5], heard())
        .prop_map(|(install, worker, kinds, limit, heard)| Op::Claim { install, worker, kinds, limit, heard })
}

fn claim_lanes() -> impl Strategy<Value = Op> {
    let kinds = prop_oneof![3 => Just(vec![0, 1, 2]), 1 => prop::sample::subsequence(vec![0, 1, 2], 0..3)];
    let lanes = (number(), prop_oneof![1 => Just(usize::MAX), 1 => 1_usize..4]);
    (install(), 0..WORKERS, kinds, lanes, 1_usize..4, 1_usize..5, any::<bool>()).prop_map(
        |(install, worker, kinds, (turn, lanes), each, limit, from_head)| Op::ClaimLanes {
            install,
            worker,
            kinds,
            turn,
            lanes,
            each,
            limit,
            from_head,
        },
    )
}

fn finish() -> impl Strategy<Value = Op> {
    let way = prop_oneof![6 => Just(Way::OneByOne), 6 => Just(Way::Together), 1 => Just(Way::Twice)];
    (vec((number(), end()), 1..4), way).prop_map(|(ends, way)| Op::Finish { ends, way })
}

fn pass() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(61),
        1 => Just(5),
        2 => Just(3 * HOUR),
        2 => Just(13 * HOUR),
        1 => Just(-HOUR),
    ]
    .prop_map(|seconds| Op::Pass { seconds })
}

fn edit() -> impl Strategy<Value = Edit> {
    let run_at = prop_oneof![
        2 => Just(EditRunAt::Same),
        1 => Just(EditRunAt::Now),
        1 => prop_oneof![Just(-30), Just(30), Just(HOUR)].prop_map(EditRunAt::In),
    ];
    let limits = (prop::bool::weighted(0.25), prop_oneof![3 => 1_u32..4, 1 => Just(100)]);
    (priority(), limits, run_at).prop_map(|(priority, (suspended, max_attempts), run_at)| Edit {
        priority,
        suspended,
        max_attempts,
        run_at,
    })
}

fn one() -> impl Strategy<Value = Op> {
    let picks = || vec(number(), 0..4);
    let mark = of(0_u8..3);
    let status = of(prop::sample::select(Status::ALL.to_vec()));
    prop_oneof![
        9 => enqueue(),
        3 => enqueue_many(),
        1 => (install(), 0..KINDS.len()).prop_map(|(install, kind)| Op::InsertInSql { install, kind }),
        9 => claim(),
        5 => claim_lanes(),
        14 => finish(),
        8 => pass(),
        5 => (install(), number()).prop_map(|(via, job)| Op::RequestCancel { via, job }),
        6 => (install(), number(), mark).prop_map(|(via, job, mark)| Op::Retry { via, job, mark }),
        5 => (0..RESOURCES, edit()).prop_map(|(resource, edit)| Op::EditWaiting { resource, edit }),
        5 => (0..RESOURCES, prop_oneof![5 => Just(0_i64), 1 => Just(1)])
            .prop_map(|(resource, behind)| Op::Acknowledge { resource, behind }),
        3 => (0..RESOURCES).prop_map(|resource| Op::Release { resource }),
        6 => install().prop_map(|install| Op::RecoverStale { install }),
        5 => install().prop_map(|install| Op::Purge { install }),
        3 => number().prop_map(|job| Op::EndLease { job }),
        3 => number().prop_map(|pick| Op::FinalizeCancelled { pick }),
        3 => (install(), picks()).prop_map(|(install, picks)| Op::Heartbeat { install, picks }),
        2 => (install(), picks()).prop_map(|(install, picks)| Op::LookForCancels { install, picks }),
        1 => (0..WORKERS).prop_map(|worker| Op::Crash { worker }),
        2 => (install(), number()).prop_map(|(via, job)| Op::Get { via, job }),
        2 => (0..RESOURCES).prop_map(|resource| Op::Held { resource }),
        2 => install().prop_map(|install| Op::Due { install }),
        2 => (install(), status, weighted(0.3, 0..KINDS.len()), of(-1_i64..4), -1_i64..3).prop_map(
            |(install, status, kind, limit, offset)| Op::List { install, status, kind, limit, offset }
        ),
        1 => install().prop_map(|install| Op::Depth { install }),
    ]
}

/// Steps that belong together, so that long lives are met too.
fn some() -> impl Strategy<Value = Vec<Op>> {
    let all = || Op::Claim { install: 0, worker: 0, kinds: vec![0, 1, 2], limit: 1, heard: true };
    let lost = (1_usize..4, 1_usize..3).prop_map(|(limit, times)| {
        let claim = Op::Claim { install: 0, worker: 1, kinds: vec![0, 1, 2], limit, heard: false };
        [vec![claim], vec![Op::TakeUp { worker: 1 }; times]].concat()
    });
    // A worker that was too slow speaks up, and somebody else has its job by then, or not.
    let says = prop_oneof![
        2 => (number(), end()).prop_map(|(pick, end)| Op::Finish { ends: vec![(pick, end)], way: Way::OneByOne }),
        1 => finish(),
        1 => number().prop_map(|pick| Op::FinalizeCancelled { pick }),
        1 => vec(number(), 4).prop_map(|picks| Op::Heartbeat { install: 0, picks }),
        1 => vec(number(), 4).prop_map(|picks| Op::LookForCancels { install: 0, picks }),
    ];
    let stale = (any::<bool>(), vec(says, 1..3)).prop_map(move |(again, says)| {
        let lost = vec![all(), Op::Pass { seconds: 61 }, Op::RecoverStale { install: 0 }];
        let again = if again { vec![Op::Pass { seconds: 61 }, all()] } else { vec![] };
        [lost, again, says].concat()
    });
    let handed = (1_usize..13).prop_map(move |times| {
        let back = Op::Finish { ends: vec![(0, failed(Cause::HandBack, None, None))], way: Way::Together };
        vec![[all(), back]; times].concat()
    });
    // A key outlives its row, and is asked for again.
    let kept = (plain(), 0_u8..2, vec(number(), 1..4), vec(prop_oneof![enqueue(), enqueue_many()], 0..3)).prop_map(
        move |(new, key, picks, asked)| {
            let new = New { key: Some(key), ..new };
            let first = Op::Enqueue { install: 0, new: new.clone(), heard: true };
            let claim = Op::Claim { install: 0, worker: 0, kinds: vec![0, 1, 2], limit: 4, heard: true };
            let ends = picks.into_iter().map(|pick| (pick, AttemptEnd::Succeeded(json!({})))).collect();
            let done = Op::Finish { ends, way: Way::Together };
            let purged = [Op::Pass { seconds: 3 * HOUR }, Op::Purge { install: 0 }];
            let again = Op::Enqueue { install: 0, new, heard: true };
            [vec![first, claim, done], purged.to_vec(), vec![again], asked].concat()
        },
    );
    // So many ends at once go another way: those with a result, and those without.
    let ends = prop_oneof![vec(succeeded(), 17..25), vec(unsuccessful(), 17..25)];
    let bulk = (vec(plain(), 20..25), vec(number(), 0..3), ends).prop_map(|(new, late, ends)| {
        let enqueue = Op::EnqueueMany { install: 0, new, heard: true };
        let claim = Op::Claim { install: 0, worker: 0, kinds: vec![0, 1, 2], limit: 24, heard: true };
        let late: Vec<Op> = late.into_iter().map(|job| Op::EndLease { job }).collect();
        let ends = ends.into_iter().map(|end| (0, end)).collect();
        let after = vec![Op::RecoverStale { install: 0 }, Op::Finish { ends, way: Way::Together }];
        [vec![enqueue, claim], late, after].concat()
    });
    prop_oneof![
        60 => one().prop_map(|op| vec![op]),
        1 => lost,
        4 => stale,
        1 => handed,
        2 => kept,
        1 => bulk,
    ]
}

pub fn sequence() -> impl Strategy<Value = Vec<Op>> {
    (vec(enqueue(), 0..8), vec(some(), 1..40)).prop_map(|(first, parts)| [first, parts.concat()].concat())
}

/// The end of an attempt without a result.
fn failed(cause: Cause, error: Option<u8>, progress: Option<u8>) -> AttemptEnd {
    let (error, progress) = (error.map(|n| format!("error {n}")), progress.map(|n| json!({ "at": n })));
    AttemptEnd::Failed(AttemptFailure { cause, error, progress })
}
