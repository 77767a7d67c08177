//! The rules of what people, the controller and time do to the rows.

use std::collections::BTreeMap;

use chrono::TimeDelta;
use jobrequest::job::{Status, clamp_max_attempts};
use jobrequest::queue::{CancelOutcome, Held, Purged, Release, RetryOutcome, SpecEdit};
use proptest::prelude::prop_assert;
use uuid::Uuid;

use crate::database::{INSTALLS, KeptKey, Row, Seen, Time, settings};
use crate::job::{Check, Job, fail, later, read};
use crate::model::{Hold, Model};

impl Model {
    pub fn cancel(&mut self, install: usize, id: Uuid, seen: &Seen) -> Check<Option<CancelOutcome>> {
        let Some(job) = self.job(install, id) else { return Ok(None) };
        Ok(Some(match job.row.status {
            status if status.is_terminal() => CancelOutcome::AlreadyTerminal,
            Status::Running => {
                if !job.row.cancel_requested {
                    job.row.cancel_requested = true;
                    job.change();
                }
                CancelOutcome::PendingOnWorker
            }
            _ => {
                job.row.cancel_requested = true;
                job.row.status = Status::Cancelled;
                job.row.finished_at = seen.row(id).and_then(|row| row.finished_at).filter(|at| seen.during(*at));
                prop_assert!(job.row.finished_at.is_some(), "a cancel without a time");
                job.change();
                CancelOutcome::CancelledNow
            }
        }))
    }

    /// The answer, or the state from which there is no retry; none for a job that is not there.
    pub fn retry(
        &mut self,
        install: usize,
        id: Uuid,
        mark: Option<&str>,
        seen: &Seen,
    ) -> Check<Option<Result<RetryOutcome, Status>>> {
        let Some(Row { namespace, idempotency_key, .. }) = self.job(install, id).map(|job| job.row.clone()) else {
            return Ok(None);
        };
        let holder = self.holder(INSTALLS[install], namespace.as_deref(), idempotency_key.as_deref());
        let Some(job) = self.job(install, id) else { return Ok(None) };
        if mark.is_some() && job.row.last_retry.as_deref() == mark {
            return Ok(Some(Ok(RetryOutcome::AlreadyUsed)));
        }
        if job.holds_its_key() {
            return Ok(Some(Err(job.row.status)));
        }
        if let Some(mark) = mark {
            job.row.last_retry = Some(mark.to_owned());
            job.change();
        }
        if holder.is_some() {
            return Ok(Some(Ok(RetryOutcome::KeyTaken)));
        }
        job.change();
        job.row.status = Status::Queued;
        job.row.attempts = 0;
        job.row.cancel_requested = false;
        job.row.suspended = false;
        job.row.finished_at = None;
        job.token = None;
        job.handed_since = None;
        job.lost_leases = 0;
        match seen.row(id).map(|row| row.run_at) {
            Some(run_at) if seen.during(run_at) => job.row.run_at = run_at,
            _ => return fail("a job that was asked to run again is not due"),
        }
        Ok(Some(Ok(RetryOutcome::Queued)))
    }

    /// Only its owner's edit reaches a row, and only while it waits.
    pub fn edit(&mut self, uid: Uuid, edit: SpecEdit, seen: &Seen) -> Check<bool> {
        let held = self.resources.get(&uid).map(|hold| hold.job);
        let Some(job) = held.and_then(|id| self.jobs.get_mut(&id)) else { return Ok(false) };
        if job.row.owner_uid != Some(uid) || !job.row.status.is_waiting() {
            return Ok(false);
        }
        let SpecEdit { priority, suspended, max_attempts, timeout_seconds, run_at } = edit;
        if run_at != job.row.wanted_run_at {
            let chosen = seen.row(job.row.id).map(|row| row.run_at).filter(|at| seen.during(*at));
            let Some(now_or_then) = run_at.or(chosen) else { return fail("an edit to run now is not due") };
            job.row.run_at = now_or_then;
        }
        job.row.wanted_run_at = run_at;
        job.row.priority = priority;
        job.row.suspended = suspended;
        job.row.timeout_seconds = timeout_seconds;
        job.row.max_attempts = clamp_max_attempts(max_attempts, job.row.attempts);
        job.change();
        Ok(true)
    }

    /// Whether all statuses of the job are shown now and were not before.
    pub fn show(&mut self, uid: Uuid, revision: i64) -> bool {
        let Some(hold) = self.resources.get_mut(&uid) else { return false };
        let Some(job) = self.jobs.get_mut(&hold.job).filter(|_| revision > hold.shown) else { return false };
        hold.shown = revision;
        let settles = job.row.mirror_due && behind(&self.resources, job).next().is_none();
        job.row.mirror_due &= !settles;
        settles
    }

    /// The resources whose statuses are due, by job. A job that has none of them is due no more.
    pub fn due(&mut self, install: usize) -> Vec<Uuid> {
        let mut due = Vec::new();
        for job in self.jobs.values_mut().filter(|job| job.row.install == INSTALLS[install] && job.row.mirror_due) {
            let before = due.len();
            due.extend(behind(&self.resources, job));
            job.row.mirror_due = due.len() > before;
        }
        due
    }

    /// The resource is going: the next holder owns the job; without one it is cancelled, and a worker that has it is
    /// waited for.
    pub fn release(&mut self, install: usize, uid: Uuid, seen: &Seen) -> Check<Release> {
        let Some(id) = self.resources.get(&uid).map(|hold| hold.job) else {
            self.releases.insert(uid, seen.after);
            return Ok(Release::Ended);
        };
        let others = self.resources.iter().filter(|(other, hold)| hold.job == id && **other != uid && !hold.released);
        let heir = others.min_by_key(|(_, hold)| hold.number).map(|(other, _)| *other);
        if heir.is_none() && self.cancel(install, id, seen)? == Some(CancelOutcome::PendingOnWorker) {
            self.resources.entry(uid).and_modify(|hold| hold.released = true);
            return Ok(Release::PendingOnWorker);
        }
        self.resources.remove(&uid);
        self.releases.insert(uid, seen.after);
        if let Some(job) = self.jobs.get_mut(&id) {
            let owned = job.row.owner_uid == Some(uid);
            if owned {
                job.row.owner_uid = heir;
            }
            if owned && heir.is_some() && !job.row.status.is_terminal() {
                job.change();
            }
            job.row.mirror_due &= heir.is_some();
        }
        Ok(if heir.is_some() { Release::Shared } else { Release::Ended })
    }

    pub fn hold_of(&self, uid: Uuid, answer: &Held) -> Held {
        let Some(hold) = self.resources.get(&uid) else { return Held::Nothing };
        let answered = match answer {
            Held::Row { job, .. } => Some(&**job),
            _ => None,
        };
        if let Some(job) = self.jobs.get(&hold.job) {
            let owner = job.row.owner_uid == Some(uid);
            return Held::Row { job: Box::new(read(&job.row, answered)), owner, mirrored_revision: hold.shown };
        }
        match self.keys.iter().find(|(key, _)| key.job_id == hold.job) {
            Some((KeptKey { job_id, attempts, finished_at, .. }, _)) => {
                Held::KeptKey { job_id: *job_id, attempts: *attempts, finished_at: *finished_at }
            }
            None => Held::Vanished { job_id: hold.job },
        }
    }

    pub fn purge(&mut self, install: usize, seen: &Seen) -> Check<Purged> {
        let mut purged = Purged::default();
        let goes = |job: &Job| {
            let gone = seen.row(job.row.id).is_none();
            job.purgeable(install, if gone { seen.after } else { seen.before })
        };
        let ids: Vec<Uuid> = self.jobs.values().filter(|job| goes(job)).map(|job| job.row.id).collect();
        for id in ids {
            let Some(Job { row, .. }) = self.jobs.remove(&id) else { continue };
            purged.jobs += 1;
            self.resources.retain(|_, hold| hold.job != id);
            if let (Status::Succeeded, Some(key), Some(finished_at)) =
                (row.status, row.idempotency_key, row.finished_at)
            {
                let kept = KeptKey {
                    install: row.install,
                    namespace: row.namespace.unwrap_or_default(),
                    idempotency_key: key,
                    job_id: id,
                    kind: row.kind,
                    attempts: row.attempts,
                    finished_at,
                };
                self.keys.push((kept, row.payload));
            }
        }
        let Some(retention) = settings(install).key_retention else { return Ok(purged) };
        let before = self.keys.len();
        self.keys.retain(|(key, _)| {
            let gone = !seen.keys.contains(key);
            key.install != INSTALLS[install]
                || later(key.finished_at, retention) >= if gone { seen.after } else { seen.before }
        });
        purged.keys = (before - self.keys.len()) as u64;
        Ok(purged)
    }

    pub fn pass(&mut self, by: i64) {
        let by = TimeDelta::seconds(by);
        for job in self.jobs.values_mut() {
            let row = &mut job.row;
            row.run_at -= by;
            row.created_at -= by;
            let times = [&mut row.wanted_run_at, &mut row.locked_at, &mut row.started_at, &mut row.finished_at];
            for time in times.into_iter().chain([&mut job.handed_since]).flatten() {
                *time -= by;
            }
        }
        for (key, _) in &mut self.keys {
            key.finished_at -= by;
        }
        for released in self.releases.values_mut() {
            *released -= by;
        }
    }

    pub fn age_lease(&mut self, id: Uuid, by: i64) {
        if let Some(time) = self.jobs.get_mut(&id).and_then(|job| job.row.locked_at.as_mut()) {
            *time -= TimeDelta::seconds(by);
        }
    }

    /// How many jobs of the kind are in this state, and since when the oldest ready one has been due.
    pub fn depth(&self, install: usize, kind: &str, status: Status, now: Time) -> (u64, Option<Time>) {
        let there = || self.of(install).filter(|job| job.row.kind == kind && job.row.status == status);
        let ready = there().filter(|job| job.may_be_claimed(install, &[kind], now));
        (there().count() as u64, ready.map(|job| job.row.run_at).min())
    }

    /// This install's jobs, newest first.
    pub fn list(&self, install: usize) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.of(install).map(|job| &job.row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id)));
        rows
    }
}

/// The resources of a job whose statuses don't show its newest revision.
fn behind<'a>(holds: &'a BTreeMap<Uuid, Hold>, job: &Job) -> impl Iterator<Item = Uuid> + use<'a> {
    let (id, revision) = (job.row.id, job.row.revision);
    holds.iter().filter(move |(_, hold)| hold.job == id && hold.shown < revision).map(|(uid, _)| *uid)
}
