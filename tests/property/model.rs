//! The rules of the queue and its workers: what each operation does to the rows, and what it answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jobrequest::job::{Cause, Outcome, Status};
use jobrequest::queue::{AttemptEnd, Finish, Lane, LaneHead, NewJob, Rescued, SurveyFrom, Want};
use proptest::prelude::{prop_assert, prop_assert_eq};
use serde_json::Value;
use uuid::Uuid;

use crate::database::{INSTALLS, KeptKey, Row, Seen, Time};
use crate::job::{Check, Claim, Job, fail, later};

#[derive(Default)]
pub struct Model {
    pub jobs: BTreeMap<Uuid, Job>,
    pub keys: Vec<(KeptKey, Value)>,
    /// Which job each resource stands for.
    pub resources: BTreeMap<Uuid, Hold>,
    /// When resources were let go.
    pub releases: BTreeMap<Uuid, Time>,
    claims: u32,
    holds: u32,
}

pub struct Hold {
    pub job: Uuid,
    /// The newest revision that the resource's status has shown.
    pub shown: i64,
    /// Holds are numbered as they begin.
    pub number: u32,
    /// The resource is being deleted, and waits for its job's end.
    pub released: bool,
}

/// For how long a resource that was let go gets no row.
const RELEASE_KEPT: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, PartialEq, Eq)]
pub enum Enqueued {
    Created(Uuid),
    Existing(Uuid),
    Conflict(Uuid),
    BeingFreed(Uuid),
    Released,
}

/// Who holds a key.
pub struct Holder {
    job: Uuid,
    kind: String,
    payload: Value,
    ending: bool,
}

impl Model {
    pub fn of(&self, install: usize) -> impl Iterator<Item = &Job> {
        self.jobs.values().filter(move |job| job.row.install == INSTALLS[install])
    }

    /// A job, if it is this install's.
    pub fn job(&mut self, install: usize, id: Uuid) -> Option<&mut Job> {
        self.jobs.get_mut(&id).filter(|job| job.row.install == INSTALLS[install])
    }

    /// The live or succeeded job that has the key, be its row purged.
    pub fn holder(&self, install: &str, namespace: Option<&str>, key: Option<&str>) -> Option<Holder> {
        let key = key?;
        let theirs = |row: &Row| {
            row.install == install
                && row.namespace.as_deref() == namespace
                && row.idempotency_key.as_deref() == Some(key)
        };
        let live = self.jobs.values().find(|job| theirs(&job.row) && job.holds_its_key()).map(|job| Holder {
            job: job.row.id,
            kind: job.row.kind.clone(),
            payload: job.row.payload.clone(),
            ending: job.row.status == Status::Running && job.row.cancel_requested,
        });
        live.or_else(|| {
            let place = |kept: &KeptKey| {
                (kept.install.as_str(), kept.namespace.as_str(), kept.idempotency_key.as_str())
                    == (install, namespace.unwrap_or_default(), key)
            };
            self.keys.iter().find(|(kept, _)| place(kept)).map(|(kept, payload)| Holder {
                job: kept.job_id,
                kind: kept.kind.clone(),
                payload: payload.clone(),
                ending: false,
            })
        })
    }

    pub fn enqueue(&mut self, install: usize, new: &NewJob, answer: &Enqueued, seen: &Seen) -> Check<Enqueued> {
        let uid = new.owner.as_ref().map(|owner| owner.uid);
        if let Some(hold) = uid.and_then(|uid| self.resources.get(&uid)) {
            return Ok(Enqueued::Existing(hold.job));
        }
        let released =
            uid.and_then(|uid| self.releases.get(&uid)).is_some_and(|at| later(*at, RELEASE_KEPT) > seen.after);
        let namespace = new.owner.as_ref().map(|owner| owner.namespace.as_str());
        let job = match self.holder(INSTALLS[install], namespace, new.idempotency_key.as_deref()) {
            Some(holder) if holder.ending => return Ok(Enqueued::BeingFreed(holder.job)),
            Some(holder) if (&holder.kind, &holder.payload) != (&new.kind, &new.payload) => {
                return Ok(Enqueued::Conflict(holder.job));
            }
            _ if released => return Ok(Enqueued::Released),
            Some(holder) => Enqueued::Existing(holder.job),
            None => {
                let Enqueued::Created(id) = *answer else { return fail(format!("not created, but {answer:?}")) };
                self.create(install, new, id, seen)?;
                Enqueued::Created(id)
            }
        };
        let (Enqueued::Created(id) | Enqueued::Existing(id)) = job else { return Ok(job) };
        if let Some(uid) = uid {
            self.holds += 1;
            self.resources.insert(uid, Hold { job: id, shown: 0, number: self.holds, released: false });
            if let (Enqueued::Existing(_), Some(shared)) = (&job, self.jobs.get_mut(&id)) {
                shared.row.owner_uid = shared.row.owner_uid.or(Some(uid));
                shared.change();
            }
        }
        Ok(job)
    }

    /// A row that was not there before.
    pub fn create(&mut self, install: usize, new: &NewJob, id: Uuid, seen: &Seen) -> Check {
        let Some(made) = seen.row(id).filter(|row| !self.jobs.contains_key(&row.id)) else {
            return fail("a job was accepted and there is no row");
        };
        prop_assert!(seen.during(made.created_at) && (new.run_at.is_some() || seen.during(made.run_at)));
        let row = Row {
            id: made.id,
            install: INSTALLS[install].to_owned(),
            namespace: new.owner.as_ref().map(|owner| owner.namespace.clone()),
            kind: new.kind.clone(),
            payload: new.payload.clone(),
            idempotency_key: new.idempotency_key.clone(),
            status: Status::Queued,
            attempts: 0,
            max_attempts: new.max_attempts,
            cancel_requested: false,
            priority: new.priority,
            suspended: new.suspended,
            timeout_seconds: new.timeout_seconds,
            run_at: new.run_at.unwrap_or(made.run_at),
            wanted_run_at: new.run_at,
            locked_at: None,
            locked_by: None,
            started_at: None,
            finished_at: None,
            worker: None,
            last_error: None,
            result: None,
            history: Vec::new(),
            last_retry: new.last_retry.clone(),
            owner_uid: new.owner.as_ref().map(|owner| owner.uid),
            revision: made.revision,
            mirror_due: new.owner.is_some(),
            created_at: made.created_at,
        };
        self.jobs.insert(
            row.id,
            Job { row, token: None, handed_since: None, progress: None, lost_leases: 0, changed: false },
        );
        Ok(())
    }

    /// What a claim took; its token. Nothing at all is right too when no answer was heard.
    pub fn claim(
        &mut self,
        install: usize,
        (worker, kinds, limit): (&str, &[&str], usize),
        heard: bool,
        seen: &Seen,
    ) -> Check<(u32, Vec<Claim>)> {
        self.claims += 1;
        let token = self.claims;
        let due = |now| self.jobs.values().filter(move |job| job.may_be_claimed(install, kinds, now));
        let is_running = |job: &&Job| seen.row(job.row.id).is_some_and(|row| row.status == Status::Running);
        let (taken, left): (Vec<_>, Vec<_>) = due(seen.after).partition(is_running);
        let (least, most) = (due(seen.before).count().min(limit), limit);
        let nothing_happened = !heard && taken.is_empty();
        prop_assert!(
            nothing_happened || (least..=most).contains(&taken.len()),
            "a claim of {limit} took {}, and at least {least} were due",
            taken.len()
        );
        let passed_over = left.iter().filter(|job| job.row.run_at <= seen.before);
        for job in passed_over {
            prop_assert!(
                nothing_happened || !taken.iter().any(|taken| job.goes_before(taken)),
                "job {} had to be claimed before another of its kind",
                job.row.id
            );
        }
        let ids: Vec<Uuid> = taken.iter().map(|job| job.row.id).collect();
        Ok((token, self.take(ids, token, worker, seen)?))
    }

    /// These rows run now.
    fn take(&mut self, ids: Vec<Uuid>, token: u32, worker: &str, seen: &Seen) -> Check<Vec<Claim>> {
        let mut claims = Vec::new();
        for id in ids {
            let (Some(job), Some(new)) = (self.jobs.get_mut(&id), seen.row(id)) else { continue };
            let Some(now) = new.started_at else { return fail("a claim without a time") };
            prop_assert!(seen.during(now) && job.row.run_at <= now, "a claim at a time that was not");
            job.row.status = Status::Running;
            job.row.attempts += 1;
            job.row.locked_at = Some(now);
            job.row.started_at = Some(now);
            job.row.locked_by = Some(worker.to_owned());
            job.row.finished_at = None;
            job.token = Some(token);
            job.change();
            claims.push(Claim { id, token, handed_for: [job.handed_for(now); 2] });
        }
        Ok(claims)
    }

    /// The lanes of all jobs, whatever their state.
    pub fn lanes(&self, install: usize) -> BTreeSet<Lane> {
        self.of(install).map(Job::lane).collect()
    }

    /// Each lane in which a job of the kinds waits, due or not, and its first job.
    pub fn survey(&self, install: usize, from: &[SurveyFrom], heads: &[LaneHead], seen: &Seen) -> Check {
        let mut lanes: BTreeMap<Lane, &Row> = BTreeMap::new();
        let waiting = self.of(install).filter(|job| job.row.status.is_waiting() && !job.row.suspended);
        for job in waiting.filter(|job| from.iter().any(|from| from.kind == job.row.kind)) {
            let first = lanes.entry(job.lane()).or_insert(&job.row);
            if (job.row.run_at, job.row.id) < (first.run_at, first.id) {
                *first = &job.row;
            }
        }
        let found: BTreeMap<&Lane, &LaneHead> = heads.iter().map(|head| (&head.lane, head)).collect();
        prop_assert_eq!(heads.len(), found.len(), "a lane twice");
        prop_assert_eq!(found.keys().copied().collect::<Vec<_>>(), lanes.keys().collect::<Vec<_>>(), "lanes");
        for (head, first) in found.values().zip(lanes.values()) {
            let due_in = |now: Time| (first.run_at - now).to_std().unwrap_or_default();
            let slack = Duration::from_micros(1);
            let in_time = due_in(seen.after) <= head.due_in + slack && head.due_in <= due_in(seen.before) + slack;
            prop_assert!(in_time, "{head:?} of {}", first.id);
        }
        Ok(())
    }

    /// What a claim took from lanes: from each its first due jobs, the lanes in the order in which they were named.
    pub fn claim_lanes(
        &mut self,
        install: usize,
        worker: &str,
        wants: &[Want],
        limit: usize,
        seen: &Seen,
    ) -> Check<Vec<Claim>> {
        self.claims += 1;
        let is_running = |job: &Job| seen.row(job.row.id).is_some_and(|row| row.status == Status::Running);
        let mut ids = Vec::new();
        for Want { lane, limit: each, .. } in wants {
            let kinds = [lane.kind.as_str()];
            let mut due: Vec<&Job> = self.jobs.values().filter(|job| job.lane() == *lane).collect();
            due.retain(|job| job.may_be_claimed(install, &kinds, seen.after));
            due.sort_by_key(|job| (job.row.run_at, job.row.id));
            let for_sure = due.iter().filter(|job| job.row.run_at <= seen.before).count();
            let taken = due.iter().take_while(|job| is_running(job)).count();
            let [least, most] = [for_sure, due.len()].map(|due| due.min(*each).min(limit - ids.len()));
            prop_assert!((least..=most).contains(&taken), "{taken} of {least} to {most} were taken from {lane:?}");
            ids.extend(due.iter().take(taken).map(|job| job.row.id));
        }
        ids.sort();
        self.take(ids, self.claims, worker, seen)
    }

    /// The claims under this token whose leases stand.
    pub fn claims_under(&self, token: u32, seen: &Seen) -> Vec<Claim> {
        let ours = self.jobs.values().filter(|job| job.token == Some(token) && job.row.status == Status::Running);
        let handed_for = |job: &Job| [seen.before, seen.after].map(|now| job.handed_for(now));
        ours.map(|job| Claim { id: job.row.id, token, handed_for: handed_for(job) }).collect()
    }

    /// The job of a claim whose lease stands.
    pub fn held(&mut self, claim: &Claim) -> Option<&mut Job> {
        self.jobs.get_mut(&claim.id).filter(|job| job.token == Some(claim.token) && job.row.status == Status::Running)
    }

    /// Whether the claim was renewed by this step; none if it is lost.
    pub fn heartbeat(&mut self, claim: &Claim, seen: &Seen) -> Check<Option<bool>> {
        let Some(job) = self.held(claim) else { return Ok(None) };
        let renewed = seen.row(claim.id).and_then(|row| row.locked_at).filter(|at| seen.during(*at));
        prop_assert!(renewed.is_some(), "a lease was not renewed");
        job.row.locked_at = renewed;
        Ok(Some(job.row.cancel_requested))
    }

    pub fn finish(&mut self, claim: &Claim, end: &AttemptEnd, seen: &Seen) -> Check<Finish> {
        let Some(job) = self.held(claim) else { return Ok(self.finished_before(claim)) };
        let Some(new) = seen.row(claim.id) else { return fail("a running row has vanished") };
        match end {
            AttemptEnd::Succeeded(result) => {
                job.end_attempt(new, seen, Outcome::Succeeded, None)?;
                job.row.status = Status::Succeeded;
                job.row.result = Some(result.clone());
            }
            AttemptEnd::Failed(failure) => {
                let outcome = match failure.cause {
                    _ if job.row.cancel_requested => Outcome::Cancelled,
                    Cause::HandBack => Outcome::HandedBack,
                    Cause::LeaseLost => Outcome::LeaseLost,
                    Cause::Permanent | Cause::Passing | Cause::RetryAfter(_) | Cause::Cancelled => Outcome::Failed,
                };
                let now = job.end_attempt(new, seen, outcome, failure.error.clone())?;
                job.follow(failure.cause, claim.handed_for, new, now)?;
                job.progress = failure.progress.clone().or(job.progress.take());
            }
        }
        Ok(Finish::Done(job.row.status))
    }

    /// A finish that was sent before is known by its token; any other comes too late.
    fn finished_before(&self, claim: &Claim) -> Finish {
        let same = self.jobs.get(&claim.id).filter(|job| job.token == Some(claim.token));
        same.map_or(Finish::Lost, |job| Finish::Done(job.row.status))
    }

    /// None if nobody asked for it.
    pub fn finalize(&mut self, claim: &Claim, seen: &Seen) -> Check<Option<Finish>> {
        let Some(job) = self.held(claim) else { return Ok(Some(self.finished_before(claim))) };
        if !job.row.cancel_requested {
            return Ok(None);
        }
        let Some(new) = seen.row(claim.id) else { return fail("a running row has vanished") };
        job.end_attempt(new, seen, Outcome::Cancelled, None)?;
        job.row.status = Status::Cancelled;
        job.progress = None;
        Ok(Some(Finish::Done(Status::Cancelled)))
    }

    pub fn rescue(&mut self, install: usize, seen: &Seen) -> Check<Rescued> {
        let mut rescued = Rescued::default();
        for job in self.jobs.values_mut().filter(|job| job.row.install == INSTALLS[install]) {
            let Some(new) = seen.row(job.row.id) else { return fail("a rescue removes a row") };
            let is_over = if job.row.status == Status::Running && new.status != Status::Running {
                job.lease_is_over(seen.after)
            } else {
                job.lease_is_over(seen.before)
            };
            if !is_over {
                continue;
            }
            prop_assert!(new.last_error.is_some(), "a lost lease leaves no error");
            let now = job.end_attempt(new, seen, Outcome::LeaseLost, new.last_error.clone())?;
            job.follow(Cause::LeaseLost, [Duration::ZERO; 2], new, now)?;
            job.token = None;
            job.lost_leases += 1;
            match job.row.status {
                Status::Cancelled => rescued.cancelled += 1,
                Status::FailedPermanent => rescued.failed += 1,
                _ => rescued.retried += 1,
            }
        }
        Ok(rescued)
    }

    /// The rows are what the rules make of them; those that changed have a higher revision, and no others.
    pub fn compare(&mut self, seen: &Seen) -> Check {
        let ids = |rows: &[Row]| rows.iter().map(|row| row.id).collect::<Vec<_>>();
        prop_assert_eq!(ids(&seen.rows), self.jobs.keys().copied().collect::<Vec<_>>(), "which rows there are");
        for (job, row) in self.jobs.values_mut().zip(&seen.rows) {
            if std::mem::take(&mut job.changed) {
                prop_assert!(row.revision > job.row.revision, "a change without a revision: {row:#?}");
                job.row.revision = row.revision;
            }
            prop_assert_eq!(row, &job.row, "the row on the left, the rules on the right");
            prop_assert!(row.attempts <= row.max_attempts && row.history.len() <= 20);
            prop_assert!(!(row.cancel_requested && row.status.is_waiting()), "a cancelled job waits");
        }
        let mut keys: Vec<KeptKey> = self.keys.iter().map(|(key, _)| key.clone()).collect();
        keys.sort_by_key(|key| key.job_id);
        prop_assert_eq!(&seen.keys, &keys, "kept keys");
        Ok(())
    }
}
