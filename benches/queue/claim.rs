//! What a claim of 100 costs among rows that are none of its business, against the same ready rows alone.

use std::time::Duration;

use jobrequest::queue::{ClaimedJob, LaneHead, Payloads, Queue, Settings, SurveyFrom, Want};
use serde::Serialize;
use tokio::time::Instant;

use crate::contenders::OURS;
use crate::database::Server;
use crate::load::Load;
use crate::ours::{KINDS, queue_settings};
use crate::{Outcome, percentile};

const CLAIM: usize = 100;
const WARM_UP: usize = 20;
/// As many lanes of a kind as a worker's survey asks for.
const LANES: usize = 500;

/// The median of each way to ask, in milliseconds.
pub struct Costs {
    /// As a busy worker claims: from the place in its lane where the last claim ended.
    pub by_place: f64,
    /// Where there are jobs at all: what a worker asks now and then, and each time its lanes have run dry.
    pub survey: f64,
    /// Without knowing of any lane.
    pub unknowing: f64,
}

/// How many claims of each way, and among how many rows.
#[derive(Serialize)]
pub struct Size {
    pub claims: usize,
    pub ended: u64,
    pub later: u64,
    pub others: u64,
}

/// Alone, and among the others. Asked in turns.
pub async fn costs(server: &Server, size: &Size) -> Outcome<[Costs; 2]> {
    let &Size { claims, ended, later, others } = size;
    let ready = u64::try_from((claims + WARM_UP) * CLAIM * 2)?;
    let alone = server.once(&OURS, Load::Among { ready, ended: 0, later: 0, others: 0 }).await?;
    let among = server.once(&OURS, Load::Among { ready, ended, later, others }).await?;
    let mut sides = [Side::new(server, &alone)?, Side::new(server, &among)?];
    for _ in 0..WARM_UP + claims {
        for side in &mut sides {
            side.survey().await?;
        }
    }
    for _ in 0..WARM_UP + claims {
        for side in &mut sides {
            side.claim_by_place().await?;
        }
    }
    for _ in 0..WARM_UP + claims {
        for side in &mut sides {
            side.claim_unknowing().await?;
        }
    }
    let costs = sides.map(Side::costs);
    server.drop(&alone).await?;
    server.drop(&among).await?;
    let [alone, among] = costs;
    Ok([alone?, among?])
}

struct Side {
    queue: Queue,
    want: Option<Want>,
    by_place: Vec<Duration>,
    survey: Vec<Duration>,
    unknowing: Vec<Duration>,
}

impl Side {
    fn new(server: &Server, database: &str) -> Outcome<Self> {
        let settings = Settings { max_connections: 1, ..queue_settings() };
        let queue = Queue::new(server.url(database).parse()?, settings);
        Ok(Self { queue, want: None, by_place: Vec::new(), survey: Vec::new(), unknowing: Vec::new() })
    }

    async fn survey(&mut self) -> Outcome<()> {
        let from: Vec<_> = KINDS.iter().map(|kind| SurveyFrom { kind: (*kind).to_owned(), after: None }).collect();
        let asked = Instant::now();
        let heads = self.queue.survey(&from, LANES).await?;
        self.survey.push(asked.elapsed());
        let due: Vec<LaneHead> = heads.into_iter().filter(|head| head.due_in.is_zero()).collect();
        let [LaneHead { lane, mark, .. }] = due.as_slice() else { return Err("more than one lane is due".into()) };
        self.want = Some(Want { lane: lane.clone(), from: Some(*mark), limit: CLAIM });
        Ok(())
    }

    async fn claim_by_place(&mut self) -> Outcome<()> {
        let want = self.want.as_mut().ok_or("no survey")?;
        let asked = Instant::now();
        let jobs = self.queue.claim_from("bench", std::slice::from_ref(want), CLAIM, Payloads::Small).await?;
        self.by_place.push(asked.elapsed());
        want.from = jobs.iter().map(ClaimedJob::mark).max();
        whole(&jobs)
    }

    async fn claim_unknowing(&mut self) -> Outcome<()> {
        let asked = Instant::now();
        let jobs = self.queue.fetch_many("bench", &KINDS, CLAIM).await?;
        self.unknowing.push(asked.elapsed());
        whole(&jobs)
    }

    fn costs(self) -> Outcome<Costs> {
        let median = |took: Vec<Duration>| -> Outcome<f64> {
            let mut warm: Vec<f64> = took.into_iter().skip(WARM_UP).map(|took| took.as_secs_f64() * 1e3).collect();
            Ok(percentile(&mut warm, 50).ok_or("nothing was measured")?)
        };
        let Self { by_place, survey, unknowing, .. } = self;
        Ok(Costs { by_place: median(by_place)?, survey: median(survey)?, unknowing: median(unknowing)? })
    }
}

fn whole(jobs: &[ClaimedJob]) -> Outcome<()> {
    if jobs.len() == CLAIM { Ok(()) } else { Err(format!("a claim of {CLAIM} brought {}", jobs.len()).into()) }
}
