//! Decides when to look for jobs and when to take them. What to take is the directory's word (`lanes.rs`), for how much
//! there is room the desk's (`desk.rs`).
//!
//! One loop asks and hears the answers: one claim at a time, beside it a survey. Where jobs are claimed one by one, a
//! claim for each free slot, as long as they find something.

use std::collections::HashMap;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::complete::{End, Ending};
use super::lanes::{Ask, Directory, Plan};
use super::running::{Claim, Run};
use super::surveys::{PER_KIND, Surveys};
use super::{BackOff, Shared, lock, runners};
use crate::admin::Beat;
use crate::queue::{self, Channel, ClaimError, ClaimTicket, ClaimedJob, LaneHead, Mark, Payloads};

/// Claims until the shutdown, and until every claim that was on its way has come back. One whose reply was lost is asked
/// for again during half of the grace period: the rescue would count it as an attempt.
pub(super) async fn claim_until(shutdown: &CancellationToken, shared: &Arc<Shared>, beat: &Beat) {
    let names: Vec<&'static str> = shared.kinds.iter().map(|kind| kind.name).collect();
    let mut claims = Claims {
        shared,
        directory: Directory::new(&names),
        surveys: Surveys::new(shared.settings.poll),
        answers: FuturesUnordered::new(),
        under_way: 0,
        allowed: 1,
        open: Vec::new(),
        back_off: BackOff::default(),
        paused: None,
    };
    let mut give_up = None;
    loop {
        beat.beat();
        let (ending, now) = (shutdown.is_cancelled(), Instant::now());
        if ending {
            hand_back(shared, lock(&shared.desk).close());
            let give_up = *give_up.get_or_insert(now + shared.settings.shutdown_grace / 2);
            if now < give_up {
                claims.take_up_open(now);
            }
            if claims.answers.is_empty() && (claims.open.is_empty() || now >= give_up) {
                return;
            }
        } else {
            claims.ask(now);
        }
        let wake = if ending {
            claims.paused.into_iter().chain(give_up).filter(|at| *at > now).min()
        } else {
            claims.wake(Instant::now())
        };
        let may_claim = !ending && claims.may_claim();
        tokio::select! {
            Some(answer) = claims.answers.next() => claims.answered(answer, ending),
            () = shutdown.cancelled(), if !ending => {}
            // Kept while nobody waits for it, so one that arrives between a look and this ends the wait at once.
            () = shared.woken(Channel::Ready), if !ending => claims.woken(),
            () = shared.hungry.notified(), if may_claim => {}
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
        }
    }
}

struct Claims<'a> {
    shared: &'a Arc<Shared>,
    directory: Directory,
    surveys: Surveys,
    answers: FuturesUnordered<BoxFuture<'a, Answer>>,
    /// Claims on their way, and how many may be.
    under_way: usize,
    allowed: usize,
    /// Claims whose reply was lost: the jobs may be ours already. Their slots stay set aside.
    open: Vec<(Vec<Ask>, ClaimTicket)>,
    back_off: BackOff,
    /// After an error.
    paused: Option<Instant>,
}

enum Answer {
    Claimed(Vec<Ask>, Result<Vec<Claim>, (queue::Error, ClaimTicket)>),
    Surveyed(queue::Result<Vec<LaneHead>>, Instant),
}

impl<'a> Claims<'a> {
    /// Sends what is to be sent now.
    fn ask(&mut self, now: Instant) {
        if !self.take_up_open(now) {
            return;
        }
        while self.under_way < self.allowed {
            let Some(asks) = self.plan(now) else { break };
            self.under_way += 1;
            self.answers.push(Box::pin(claim(self.shared, asks)));
        }
        if self.surveys.next(now, self.is_busy()).is_some_and(|at| at <= now) {
            self.surveys.sent();
            self.answers.push(Box::pin(survey(self.shared, self.directory.survey_from())));
        }
    }

    /// Asks again for what lost replies may have brought; not during a pause. True if there is none.
    fn take_up_open(&mut self, now: Instant) -> bool {
        if self.paused.is_some_and(|until| now < until) {
            return false;
        }
        self.paused = None;
        for (asks, ticket) in std::mem::take(&mut self.open) {
            self.under_way += 1;
            self.answers.push(Box::pin(take_up(self.shared, asks, ticket)));
        }
        true
    }

    /// What to claim now, with the slots for it set aside. None if there is nothing to claim, or no room.
    fn plan(&mut self, now: Instant) -> Option<Vec<Ask>> {
        let mut room = lock(&self.shared.desk).room(self.shared.running.len());
        room.total = room.total.min(self.shared.settings.batch);
        let Plan { mut asks, starved } = self.directory.plan(now, room);
        let asleep = asks.is_empty() && self.directory.is_asleep();
        if asleep {
            self.surveys.ran_dry();
        }
        let mut desk = lock(&self.shared.desk);
        for Ask { want, kind, into_slots } in &mut asks {
            if *into_slots {
                want.limit = desk.set_aside(*kind, want.limit);
            }
        }
        desk.planned(starved, asleep);
        drop(desk);
        runners::call_if_needed(self.shared);
        asks.retain(|ask| ask.want.limit > 0);
        Some(asks).filter(|asks| !asks.is_empty())
    }

    fn may_claim(&self) -> bool {
        self.paused.is_none() && self.under_way < self.allowed
    }

    fn is_busy(&self) -> bool {
        self.shared.running.len() > 0 || !self.directory.is_asleep()
    }

    /// When there will be something to do unasked.
    fn wake(&self, now: Instant) -> Option<Instant> {
        if self.paused.is_some() {
            return self.paused;
        }
        // A lane that is due already waits for room, and is seen to with the next plan.
        let lane = self.directory.wake_at().filter(|at| *at > now);
        [lane, self.surveys.next(now, self.is_busy())].into_iter().flatten().min()
    }

    fn woken(&mut self) {
        self.directory.notified();
        self.surveys.want();
    }

    fn answered(&mut self, answer: Answer, ending: bool) {
        let now = Instant::now();
        match answer {
            Answer::Surveyed(answer, sent) => {
                self.shared.report(&answer);
                match answer {
                    Ok(heads) => {
                        let complete = self.directory.surveyed(heads, PER_KIND, now);
                        self.surveys.answered(complete, now - sent, now, rand::random_range(0.0..=1.0));
                        self.back_off.reset();
                    }
                    Err(_reported) => {
                        self.surveys.failed();
                        self.pause(now);
                    }
                }
            }
            Answer::Claimed(asks, answer) => {
                self.under_way -= 1;
                match answer {
                    Ok(claims) => {
                        self.shared.postgres.ready();
                        self.back_off.reset();
                        self.claimed(&asks, claims, now, ending);
                    }
                    Err((error, ticket)) => {
                        self.shared.report::<()>(&Err(error));
                        self.open.push((asks, ticket));
                        // Should it have taken nothing, its lanes look empty.
                        self.surveys.want();
                        self.pause(now);
                    }
                }
            }
        }
    }

    fn pause(&mut self, now: Instant) {
        self.paused = Some(now + self.back_off.next());
    }

    fn claimed(&mut self, asks: &[Ask], claims: Vec<Claim>, now: Instant, ending: bool) {
        let by_lane: HashMap<_, _> = asks.iter().enumerate().map(|(at, ask)| (&ask.want.lane, at)).collect();
        let mut got: Vec<(usize, Option<Mark>)> = vec![(0, None); asks.len()];
        let mut places = Vec::with_capacity(claims.len());
        for Claim { job, .. } in &claims {
            let mark = job.mark();
            let at = by_lane.get(job.lane()).copied();
            if let Some((count, last)) = at.map(|at| &mut got[at]) {
                *count += 1;
                *last = (*last).max(Some(mark));
            }
            places.push((at, mark));
        }
        if !claims.is_empty() {
            self.surveys.jobs_claimed();
        }
        let full = asks.iter().zip(&got).all(|(ask, (count, _))| *count >= ask.want.limit);
        if self.shared.settings.batch == 1 {
            self.allowed = if full { (self.allowed * 2).min(self.shared.settings.concurrency) } else { 1 };
        }
        self.directory.claimed(asks, &got, now);
        let runs = self.shared.running.enter(claims, |kind| self.directory.kind_of(kind).unwrap_or_default());
        self.give_out(asks, &got, runs, &places, ending);
    }

    /// Brings claimed jobs to the desk; at the shutdown, and should one come that was not asked for, back to the queue.
    fn give_out(
        &self,
        asks: &[Ask],
        got: &[(usize, Option<Mark>)],
        runs: Vec<Arc<Run>>,
        places: &[(Option<usize>, Mark)],
        ending: bool,
    ) {
        let mut back = Vec::new();
        let mut desk = lock(&self.shared.desk);
        for (Ask { want, kind, into_slots }, (count, _)) in asks.iter().zip(got) {
            if *into_slots {
                let needed = if ending { 0 } else { *count };
                desk.give_up(*kind, want.limit - needed.min(want.limit));
            }
        }
        for (run, (at, mark)) in runs.into_iter().zip(places) {
            match at.map(|at| &asks[at]) {
                Some(Ask { want, kind, into_slots }) if !ending => {
                    if *into_slots {
                        desk.put_ready(*kind, run.alone, run);
                    } else {
                        desk.put_ahead(*kind, &want.lane, *mark, run);
                    }
                }
                Some(_) | None => back.push(run),
            }
        }
        drop(desk);
        runners::call_if_needed(self.shared);
        hand_back(self.shared, back);
    }
}

/// Gives jobs back that have not started.
pub(super) fn hand_back(shared: &Shared, runs: Vec<Arc<Run>>) {
    for run in runs {
        if let Some(job) = run.take_job() {
            shared.finisher.push(End::new(run, job, Ending::hand_back(None), None));
        }
    }
}

/// Not raced against the shutdown: a claim cut short may have taken jobs.
async fn claim(shared: &Shared, asks: Vec<Ask>) -> Answer {
    let wants: Vec<_> = asks.iter().map(|ask| ask.want.clone()).collect();
    let limit = wants.iter().map(|want| want.limit).sum();
    // What is about to start needs its payload anyway.
    let payloads = if asks.iter().all(|ask| ask.into_slots) { Payloads::All } else { Payloads::Small };
    match shared.queue.claim_from(&shared.settings.name, &wants, limit, payloads).await {
        Ok(jobs) => {
            let claim = |job: ClaimedJob| Claim { lease_until: job.lease().since() + shared.lease, job };
            Answer::Claimed(asks, Ok(jobs.into_iter().map(claim).collect()))
        }
        Err(ClaimError { error, ticket }) => Answer::Claimed(asks, Err((error, ticket))),
    }
}

async fn survey(shared: &Shared, from: Vec<queue::SurveyFrom>) -> Answer {
    let sent = Instant::now();
    Answer::Surveyed(shared.queue.survey(&from, PER_KIND).await, sent)
}

async fn take_up(shared: &Shared, asks: Vec<Ask>, ticket: ClaimTicket) -> Answer {
    let found = async {
        let jobs = shared.queue.take_up(ticket).await?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        tracing::info!(jobs = jobs.len(), "took up a claim whose reply was lost");
        renewed(shared, jobs).await
    };
    let found = found.await;
    Answer::Claimed(asks, found.map_err(|error| (error, ticket)))
}

/// Claims taken up late start with a fresh lease, or not at all: then the rescue has them.
async fn renewed(shared: &Shared, jobs: Vec<ClaimedJob>) -> queue::Result<Vec<Claim>> {
    let sent = Instant::now();
    let leases: Vec<_> = jobs.iter().map(ClaimedJob::lease).collect();
    let found = shared.queue.heartbeat(&leases).await?;
    let renewed: HashMap<_, _> = found.iter().map(|found| (found.id, found.renewed)).collect();
    let is_renewed = |job: &ClaimedJob| renewed.get(&job.id()).is_some_and(|renewed| *renewed);
    let lease_until = sent + shared.lease;
    Ok(jobs.into_iter().filter(is_renewed).map(|job| Claim { job, lease_until }).collect())
}
