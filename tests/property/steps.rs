//! How one step is done and judged: the operation, a look at all rows, the rules.

use std::time::Duration;

use chrono::TimeDelta;
use jobrequest::job::Status;
use jobrequest::queue::{
    AttemptEnd, ClaimTicket, ClaimedJob, EnqueueOutcome, Error, Finish, Heartbeat, Lease, ListFilter, NewJob, Owner,
    Payloads, Queue, SpecEdit, SurveyFrom, Want,
};
use proptest::prelude::{prop_assert, prop_assert_eq};
use serde_json::json;
use uuid::Uuid;

use crate::database::{INSTALLS, Lab, Row, Seen, Time};
use crate::job::{Check, Claim, fail, read};
use crate::model::{Enqueued, Model};
use crate::ops::{Edit, EditRunAt, KINDS, New, Op, WORKERS, Way};

/// A claim in a worker's hands, and what the rules know of it.
struct Held {
    install: usize,
    job: ClaimedJob,
    claim: Claim,
}

pub struct Case<'a> {
    lab: &'a Lab,
    model: Model,
    clock: Time,
    hands: [Vec<Held>; WORKERS],
    /// Each worker's newest claim without an answer.
    tickets: [Option<(usize, ClaimTicket, u32)>; WORKERS],
}

fn mark(number: u8) -> String {
    format!("mark {number}")
}

/// The uid and namespace of a resource, and its install.
fn resource(number: usize) -> (Owner, usize) {
    let uid = Uuid::from_u128(number as u128 + 1);
    let namespace = ["shop", "depot"][number / 2 % 2].to_owned();
    (Owner { uid, namespace, name: format!("resource-{number}") }, number % 2)
}

impl<'a> Case<'a> {
    pub async fn new(lab: &'a Lab) -> Self {
        let clock = lab.clear().await;
        Self { lab, model: Model::default(), clock, hands: Default::default(), tickets: Default::default() }
    }

    pub async fn step(&mut self, op: &Op) -> Check {
        match op {
            Op::Enqueue { install, new, heard } => self.enqueue(*install, new, *heard).await,
            Op::EnqueueMany { install, new, heard } => self.enqueue_many(*install, new, *heard).await,
            Op::InsertInSql { install, kind } => {
                let new = NewJob::new(KINDS[*kind], json!(0));
                self.lab.insert(*install, KINDS[*kind]).await;
                let seen = self.look().await;
                let made = seen.rows.iter().find(|row| !self.model.jobs.contains_key(&row.id));
                let Some(made) = made else { return fail("an insert in SQL left no row") };
                self.model.create(*install, &new, made.id, &seen)?;
                self.compare(&seen)
            }
            Op::Claim { install, worker, kinds, limit, heard } => {
                self.claim(*install, *worker, kinds, *limit, *heard).await
            }
            Op::ClaimLanes { install, worker, kinds, turn, lanes, each, limit, from_head } => {
                self.claim_lanes(*install, *worker, kinds, (*turn, *lanes), (*each, *limit), *from_head).await
            }
            Op::TakeUp { worker } => self.take_up(*worker).await,
            Op::Heartbeat { install, picks } => self.heartbeat(*install, picks).await,
            Op::LookForCancels { install, picks } => self.look_for_cancels(*install, picks).await,
            Op::Finish { ends, way } => self.finish(ends, *way).await,
            Op::FinalizeCancelled { pick } => self.finalize(*pick).await,
            Op::Crash { worker } => {
                self.hands[*worker].clear();
                self.tickets[*worker] = None;
                Ok(())
            }
            Op::RequestCancel { via, job } => self.request_cancel(*via, *job).await,
            Op::Retry { via, job, mark } => self.retry(*via, *job, *mark).await,
            Op::EditWaiting { resource, edit } => self.edit(*resource, edit).await,
            Op::Release { resource } => self.release(*resource).await,
            Op::RecoverStale { install } => {
                let answer = answered(self.lab.queues[*install].recover_stale().await)?;
                let seen = self.look().await;
                prop_assert_eq!(answer, self.model.rescue(*install, &seen)?, "rescued");
                self.compare(&seen)
            }
            Op::Acknowledge { resource, behind } => self.acknowledge(*resource, *behind).await,
            Op::Purge { install } => {
                let answer = answered(self.lab.queues[*install].purge().await)?;
                let seen = self.look().await;
                prop_assert_eq!(answer, self.model.purge(*install, &seen)?, "purged");
                self.compare(&seen)
            }
            Op::EndLease { job } => {
                let Some(id) = self.pick_job(*job) else { return Ok(()) };
                self.lab.age_lease(id, 100).await;
                self.model.age_lease(id, 100);
                let seen = self.look().await;
                self.compare(&seen)
            }
            Op::Pass { seconds } => {
                self.lab.pass(*seconds).await;
                self.model.pass(*seconds);
                let seen = self.look().await;
                self.compare(&seen)
            }
            Op::Get { via, job } => self.get(*via, *job).await,
            Op::Held { resource } => self.held(*resource).await,
            Op::Due { install } => self.due(*install).await,
            Op::List { install, status, kind, limit, offset } => {
                let filter = ListFilter {
                    status: *status,
                    kind: kind.map(|kind| KINDS[kind].to_owned()),
                    namespace: None,
                    limit: *limit,
                    offset: *offset,
                };
                self.list(*install, &filter).await
            }
            Op::Depth { install } => self.depth(*install).await,
        }
    }

    async fn look(&mut self) -> Seen {
        let seen = self.lab.look(self.clock).await;
        self.clock = seen.after;
        seen
    }

    fn compare(&mut self, seen: &Seen) -> Check {
        self.model.compare(seen)
    }

    fn pick_job(&self, number: usize) -> Option<Uuid> {
        self.model.jobs.keys().nth(number % self.model.jobs.len().max(1)).copied()
    }

    /// Takes a claim out of the hands of whoever has it.
    fn pick(&mut self, number: usize) -> Option<Held> {
        let mut number = number % self.hands.iter().map(Vec::len).sum::<usize>().max(1);
        for hand in &mut self.hands {
            if number < hand.len() {
                return Some(hand.remove(number));
            }
            number -= hand.len();
        }
        None
    }

    /// Different claims of one install: nobody sends one twice at once.
    fn pick_leases(&self, install: usize, picks: &[usize]) -> Vec<(Lease, Claim)> {
        let all: Vec<&Held> = self.hands.iter().flatten().filter(|held| held.install == install).collect();
        let mut leases: Vec<(Lease, Claim)> = Vec::new();
        for held in picks.iter().filter_map(|pick| all.get(pick % all.len().max(1))) {
            if !leases.iter().any(|(_, claim)| claim.is(&held.claim)) {
                leases.push((held.job.lease(), held.claim));
            }
        }
        leases
    }

    /// What is asked for, and by which install: a resource is one install's.
    fn new_job(&self, install: usize, new: &New) -> (NewJob, usize) {
        let New { kind, payload, key, resource: number, run_at, priority, max_attempts, suspended, mark: used } = new;
        let (owner, install) = match number.map(resource) {
            Some((owner, install)) => (Some(owner), install),
            None => (None, install),
        };
        let new = NewJob {
            max_attempts: *max_attempts,
            idempotency_key: key.map(|key| format!("key {key}")),
            run_at: run_at.map(|seconds| self.clock + TimeDelta::seconds(seconds)),
            priority: *priority,
            suspended: *suspended,
            owner,
            last_retry: used.map(mark),
            ..NewJob::new(KINDS[*kind], json!({ "n": payload }))
        };
        (new, install)
    }

    /// A queue whose next insert goes through, and its reply is lost unless it is to be heard.
    fn enqueuer(&self, install: usize, heard: bool) -> &Queue {
        if heard {
            return &self.lab.queues[install];
        }
        self.lab.proxy.lose_the_reply_to(INSTALLS[install].as_bytes());
        &self.lab.deaf[install]
    }

    async fn enqueue(&mut self, install: usize, new: &New, heard: bool) -> Check {
        let (new, install) = self.new_job(install, new);
        let answer = enqueued(self.enqueuer(install, heard).enqueue(&new).await)?;
        self.lab.until_all_has_ended().await;
        let seen = self.look().await;
        let expected = self.model.enqueue(install, &new, &answer, &seen)?;
        prop_assert_eq!(answer, expected, "enqueue");
        self.compare(&seen)
    }

    async fn enqueue_many(&mut self, install: usize, new: &[New], heard: bool) -> Check {
        let new: Vec<NewJob> = new.iter().map(|new| self.new_job(install, new).0).collect();
        let answers = self.enqueuer(install, heard).enqueue_many(&new).await;
        self.lab.until_all_has_ended().await;
        let seen = self.look().await;
        prop_assert_eq!(answers.len(), new.len(), "an answer for each item");
        for (new, answer) in new.iter().zip(answers) {
            if new.owner.is_some() {
                prop_assert!(matches!(answer, Err(Error::PayloadInvalid { .. })), "with an owner: {answer:?}");
                continue;
            }
            let answer = enqueued(answer)?;
            let expected = self.model.enqueue(install, new, &answer, &seen)?;
            prop_assert_eq!(answer, expected, "enqueue many");
        }
        self.compare(&seen)
    }

    async fn claim(&mut self, install: usize, worker: usize, kinds: &[usize], limit: usize, heard: bool) -> Check {
        let name = format!("worker {worker}");
        let kinds: Vec<&str> = kinds.iter().map(|kind| KINDS[*kind]).collect();
        let answer = match (heard, limit) {
            (true, 1) => self.lab.queues[install].fetch_next(&name, &kinds).await.map(|job| job.into_iter().collect()),
            (true, _) => self.lab.queues[install].fetch_many(&name, &kinds, limit).await,
            (false, _) => {
                self.lab.proxy.lose_the_reply_to(name.as_bytes());
                self.lab.deaf[install].fetch_many(&name, &kinds, limit).await
            }
        };
        let seen = self.look().await;
        let (token, claims) = self.model.claim(install, (&name, &kinds, limit), heard, &seen)?;
        self.compare(&seen)?;
        match answer {
            Ok(jobs) if heard => self.hold(install, worker, jobs, claims),
            Err(unheard) if !heard => {
                self.tickets[worker] = Some((install, unheard.ticket, token));
                Ok(())
            }
            Ok(_) => fail("a reply that was lost was heard"),
            Err(error) => fail(format!("claim: {error}")),
        }
    }

    async fn claim_lanes(
        &mut self,
        install: usize,
        worker: usize,
        kinds: &[usize],
        (turn, lanes): (usize, usize),
        (each, limit): (usize, usize),
        from_head: bool,
    ) -> Check {
        let queue = &self.lab.queues[install];
        let name = format!("worker {worker}");
        let from: Vec<_> = kinds.iter().map(|kind| SurveyFrom { kind: KINDS[*kind].to_owned(), after: None }).collect();
        let heads = answered(queue.survey(&from, 100).await)?;
        let seen = self.look().await;
        self.model.survey(install, &from, &heads, &seen)?;
        let mut wants: Vec<Want> = if from_head {
            heads.into_iter().map(|head| Want { lane: head.lane, from: Some(head.mark), limit: each }).collect()
        } else {
            self.model.lanes(install).into_iter().map(|lane| Want { lane, from: None, limit: each }).collect()
        };
        let turn = turn % wants.len().max(1);
        wants.rotate_left(turn);
        wants.truncate(lanes);
        let jobs = answered(queue.claim_from(&name, &wants, limit, Payloads::All).await)?;
        let seen = self.look().await;
        let claims = self.model.claim_lanes(install, &name, &wants, limit, &seen)?;
        self.compare(&seen)?;
        self.hold(install, worker, jobs, claims)
    }

    async fn take_up(&mut self, worker: usize) -> Check {
        let Some((install, ticket, token)) = self.tickets[worker] else { return Ok(()) };
        let jobs = answered(self.lab.queues[install].take_up(ticket).await)?;
        let seen = self.look().await;
        self.compare(&seen)?;
        let claims = self.model.claims_under(token, &seen);
        self.hold(install, worker, jobs, claims)
    }

    /// The claims are those of the rules, and each says what its row says.
    fn hold(&mut self, install: usize, worker: usize, mut jobs: Vec<ClaimedJob>, claims: Vec<Claim>) -> Check {
        jobs.sort_by_key(ClaimedJob::id);
        let ids: Vec<Uuid> = jobs.iter().map(ClaimedJob::id).collect();
        prop_assert_eq!(
            ids,
            claims.iter().map(|claim| claim.id).collect::<Vec<_>>(),
            "claimed, by the answer and the rows"
        );
        for (job, claim) in jobs.into_iter().zip(claims) {
            let Some(held) = self.model.held(&claim) else { return fail("a claim of a row that does not run") };
            let Row { kind, namespace, attempts, max_attempts, payload, timeout_seconds, run_at, started_at, .. } =
                &held.row;
            prop_assert_eq!((job.kind(), job.namespace()), (kind.as_str(), namespace.as_deref()));
            prop_assert_eq!((job.attempt(), job.max_attempts()), (*attempts, *max_attempts));
            prop_assert_eq!(job.timeout(), Duration::from_secs((*timeout_seconds).into()));
            let claimed = job.payload().and_then(|text| text.get().parse().ok());
            prop_assert_eq!(claimed.as_ref(), Some(payload));
            prop_assert_eq!(job.progress(), held.progress.as_ref());
            // A claim that is taken up later may count from then.
            let due_for = [*started_at, Some(self.clock)].map(|now| now.map(|now| now - *run_at).unwrap_or_default());
            let [least, most] = due_for.map(|time| time.to_std().unwrap_or_default());
            let slack = Duration::from_micros(1);
            prop_assert!(least <= job.waited() + slack && job.waited() <= most + slack, "waited {:?}", job.waited());
            self.hands[worker].push(Held { install, job, claim });
        }
        Ok(())
    }

    async fn heartbeat(&mut self, install: usize, picks: &[usize]) -> Check {
        let leases = self.pick_leases(install, picks);
        let sent: Vec<Lease> = leases.iter().map(|(lease, _)| *lease).collect();
        let answer = answered(self.lab.queues[install].heartbeat(&sent).await)?;
        let seen = self.look().await;
        let mut expected = Vec::new();
        for (lease, claim) in leases {
            if let Some(cancel_requested) = self.model.heartbeat(&claim, &seen)? {
                expected.push(Heartbeat { id: lease.id(), token: lease.token(), renewed: true, cancel_requested });
            }
        }
        prop_assert_eq!(sorted(answer), sorted(expected), "heartbeat");
        self.compare(&seen)
    }

    async fn look_for_cancels(&mut self, install: usize, picks: &[usize]) -> Check {
        let leases = self.pick_leases(install, picks);
        let sent: Vec<Lease> = leases.iter().map(|(lease, _)| *lease).collect();
        let answer = answered(self.lab.queues[install].look_for_cancels(&sent).await)?;
        let seen = self.look().await;
        let expected = leases.iter().filter_map(|(lease, claim)| {
            let cancel_requested = self.model.held(claim)?.row.cancel_requested;
            Some(Heartbeat { id: lease.id(), token: lease.token(), renewed: false, cancel_requested })
        });
        prop_assert_eq!(sorted(answer), sorted(expected.collect()), "look for cancels");
        self.compare(&seen)
    }

    async fn finish(&mut self, ends: &[(usize, AttemptEnd)], way: Way) -> Check {
        let mut batch: Vec<(Held, AttemptEnd)> = Vec::new();
        for (pick, end) in ends {
            let Some(held) = self.pick(*pick) else { continue };
            if batch.iter().any(|(other, _)| other.claim.is(&held.claim)) {
                self.hands[0].push(held);
            } else {
                batch.push((held, end.clone()));
            }
        }
        let queue = &self.lab.queues[0];
        if way == Way::OneByOne {
            for (Held { job, claim, .. }, end) in batch {
                let answer = match &end {
                    AttemptEnd::Succeeded(result) => queue.mark_succeeded(job, result).await,
                    AttemptEnd::Failed(failure) => queue.mark_failed_or_retry(job, failure).await,
                };
                let seen = self.look().await;
                prop_assert_eq!(answered(answer)?, self.model.finish(&claim, &end, &seen)?, "finish");
                self.compare(&seen)?;
            }
            return Ok(());
        }
        let Some((first, _)) = batch.first() else { return Ok(()) };
        let sender = if way == Way::Twice {
            self.lab.proxy.lose_the_reply_to(first.job.lease().token().as_bytes());
            &self.lab.deaf[0]
        } else {
            queue
        };
        let (sent, claims): (Vec<_>, Vec<_>) =
            batch.into_iter().map(|(held, end)| ((held.job, end.clone()), (held.claim, end))).unzip();
        let mut answers = Vec::new();
        for (answer, (_, end)) in sender.finish_many(sent).await.into_iter().zip(&claims) {
            answers.push(match answer {
                Err(unheard) if way == Way::Twice => {
                    let again = queue.finish_many(vec![(unheard.job, end.clone())]).await;
                    answered(again.into_iter().next().expect("an answer for each end"))?
                }
                answer => answered(answer)?,
            });
        }
        let seen = self.look().await;
        let mut expected: Vec<Finish> = Vec::new();
        for (claim, end) in &claims {
            expected.push(self.model.finish(claim, end, &seen)?);
        }
        prop_assert_eq!(answers, expected, "finish many");
        self.compare(&seen)
    }

    async fn finalize(&mut self, pick: usize) -> Check {
        let Some(Held { install, job, claim }) = self.pick(pick) else { return Ok(()) };
        let answer = self.lab.queues[0].finalize_cancelled(job).await;
        let seen = self.look().await;
        match (answer, self.model.finalize(&claim, &seen)?) {
            (Ok(answer), Some(expected)) => prop_assert_eq!(answer, expected, "finalize"),
            (Err(unasked), None) => {
                let refused = matches!(unasked.error, Error::InvalidTransition { from: Status::Running, .. });
                prop_assert!(refused, "finalize: {}", unasked.error);
                self.hands[0].push(Held { install, job: unasked.job, claim });
            }
            (answer, expected) => return fail(format!("finalize: {answer:?}, not {expected:?}")),
        }
        self.compare(&seen)
    }

    async fn request_cancel(&mut self, via: usize, job: usize) -> Check {
        let Some(id) = self.pick_job(job) else { return Ok(()) };
        let answer = found(self.lab.queues[via].request_cancel(id).await)?;
        let seen = self.look().await;
        prop_assert_eq!(answer, self.model.cancel(via, id, &seen)?, "cancel");
        self.compare(&seen)
    }

    async fn retry(&mut self, via: usize, job: usize, number: Option<u8>) -> Check {
        let Some(id) = self.pick_job(job) else { return Ok(()) };
        let queue = &self.lab.queues[via];
        let mark = number.map(mark);
        let answer = match &mark {
            Some(mark) => queue.retry(id, mark).await,
            None => queue.retry_by_hand(id).await,
        };
        let answer = match answer {
            Err(Error::InvalidTransition { from, .. }) => Some(Err(from)),
            answer => found(answer)?.map(Ok),
        };
        self.lab.until_all_has_ended().await;
        let seen = self.look().await;
        prop_assert_eq!(answer, self.model.retry(via, id, mark.as_deref(), &seen)?, "retry");
        self.compare(&seen)
    }

    async fn edit(&mut self, number: usize, edit: &Edit) -> Check {
        let Edit { priority, suspended, max_attempts, run_at } = *edit;
        let (Owner { uid, .. }, install) = resource(number);
        let held = self.model.resources.get(&uid).and_then(|hold| self.model.jobs.get(&hold.job));
        let run_at = match run_at {
            EditRunAt::Same => held.and_then(|job| job.row.wanted_run_at),
            EditRunAt::Now => None,
            EditRunAt::In(seconds) => Some(self.clock + TimeDelta::seconds(seconds)),
        };
        let edit = SpecEdit { priority, suspended, max_attempts, timeout_seconds: 60, run_at };
        let answer = answered(self.lab.queues[install].edit_waiting(uid, edit).await)?;
        let seen = self.look().await;
        prop_assert_eq!(answer, self.model.edit(uid, edit, &seen)?, "edit");
        self.compare(&seen)
    }

    async fn acknowledge(&mut self, number: usize, behind: i64) -> Check {
        let (Owner { uid, .. }, install) = resource(number);
        let held = self.model.resources.get(&uid).and_then(|hold| self.model.jobs.get(&hold.job));
        let revision = held.map_or(1, |job| job.row.revision) - behind;
        let answer = answered(self.lab.queues[install].acknowledge(uid, revision).await)?;
        let seen = self.look().await;
        let settled = self.model.show(uid, revision);
        prop_assert!(settled || answer.is_none(), "a status that is still due is said to be shown");
        self.compare(&seen)
    }

    async fn release(&mut self, number: usize) -> Check {
        let (Owner { uid, .. }, install) = resource(number);
        let answer = answered(self.lab.queues[install].release(uid).await)?;
        let seen = self.look().await;
        prop_assert_eq!(answer, self.model.release(install, uid, &seen)?, "release");
        self.compare(&seen)
    }

    async fn held(&mut self, number: usize) -> Check {
        let (Owner { uid, .. }, install) = resource(number);
        let answer = answered(self.lab.queues[install].held(uid).await)?;
        let expected = self.model.hold_of(uid, &answer);
        prop_assert_eq!(answer, expected, "held");
        Ok(())
    }

    async fn due(&mut self, install: usize) -> Check {
        let (due, more) = answered(self.lab.queues[install].due(None, 100).await)?;
        let seen = self.look().await;
        let mut due: Vec<Uuid> = due.into_iter().map(|resource| resource.uid).collect();
        let mut expected = self.model.due(install);
        due.sort();
        expected.sort();
        prop_assert_eq!((due, more), (expected, None), "due");
        self.compare(&seen)
    }

    async fn get(&mut self, via: usize, number: usize) -> Check {
        let Some(id) = self.pick_job(number) else { return Ok(()) };
        let answer = found(self.lab.queues[via].get(id).await)?;
        let expected = self.model.job(via, id).map(|job| read(&job.row, answer.as_ref()));
        prop_assert_eq!(answer, expected, "get");
        Ok(())
    }

    async fn list(&mut self, install: usize, filter: &ListFilter) -> Check {
        let answer = answered(self.lab.queues[install].list(filter).await)?;
        let rows = self.model.list(install).into_iter().filter(|row| {
            filter.status.is_none_or(|status| row.status == status)
                && filter.kind.as_ref().is_none_or(|kind| row.kind == *kind)
        });
        let offset = usize::try_from(filter.offset).unwrap_or(0);
        let limit = filter.limit.map_or(50, |limit| usize::try_from(limit.clamp(1, 200)).expect("a small number"));
        let expected: Vec<_> = rows.skip(offset).take(limit).collect();
        prop_assert_eq!(answer.len(), expected.len(), "listed");
        for (answer, row) in answer.into_iter().zip(expected) {
            let expected = read(row, Some(&answer));
            prop_assert_eq!(answer, expected, "list");
        }
        Ok(())
    }

    async fn depth(&mut self, install: usize) -> Check {
        let before = self.clock;
        let answer = answered(self.lab.queues[install].depth().await)?;
        let after = self.look().await.after;
        for kind in KINDS {
            for status in [Status::Queued, Status::Retrying, Status::Running] {
                let found = answer.iter().find(|depth| depth.kind == kind && depth.status == status);
                let (jobs, oldest_now) = self.model.depth(install, kind, status, after);
                prop_assert_eq!(found.map_or(0, |depth| depth.jobs), jobs, "depth of {} {}", kind, status);
                let (_, oldest) = self.model.depth(install, kind, status, before);
                let age = |now: Time, since: Option<Time>| since.map_or(TimeDelta::zero(), |since| now - since);
                let ready =
                    found.map_or(TimeDelta::zero(), |depth| TimeDelta::from_std(depth.oldest_ready).expect("short"));
                let slack = TimeDelta::microseconds(1);
                prop_assert!(age(before, oldest) - slack <= ready && ready <= age(after, oldest_now) + slack);
            }
        }
        Ok(())
    }
}

fn answered<T, E: std::fmt::Display>(answer: Result<T, E>) -> Check<T> {
    answer.or_else(|error| fail(error.to_string()))
}

fn enqueued(answer: Result<EnqueueOutcome, Error>) -> Check<Enqueued> {
    match answer {
        Ok(EnqueueOutcome::Created(id)) => Ok(Enqueued::Created(id)),
        Ok(EnqueueOutcome::Existing(id)) => Ok(Enqueued::Existing(id)),
        Err(Error::IdempotencyConflict { holder }) => Ok(Enqueued::Conflict(holder)),
        Err(Error::KeyBeingFreed { holder }) => Ok(Enqueued::BeingFreed(holder)),
        Err(Error::Released) => Ok(Enqueued::Released),
        Err(error) => fail(format!("enqueue: {error}")),
    }
}

fn found<T>(answer: Result<T, Error>) -> Check<Option<T>> {
    match answer {
        Err(Error::NotFound) => Ok(None),
        answer => answered(answer).map(Some),
    }
}

fn sorted(mut answers: Vec<Heartbeat>) -> Vec<Heartbeat> {
    answers.sort_by_key(|answer| (answer.id, answer.token));
    answers
}
