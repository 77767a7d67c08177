//! Enqueue: at most one row per resource and per live key.

use chrono::{DateTime, Datelike, SubsecRound, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::connections::Session;
use super::error::{Error, Result};
use super::payload::payload_size;
use super::resources::RELEASE_KEPT_SECONDS;
use super::{Channel, Queue};

/// How many races in a row an enqueue may lose: each against somebody who ended the key's holder, or enqueued the same
/// resource, between two of its looks.
pub(super) const ROUNDS: usize = 5;

/// Keeps a key to one live or succeeded row. A plain INSERT of a key that retention kept is refused in its name.
pub(super) const KEY_INDEX: &str = "jobs_idempotency_key_uidx";

/// A job to be enqueued.
#[derive(Debug, Clone)]
pub struct NewJob {
    /// Lower case letters, digits and `_`, beginning with a letter, at most 63.
    pub kind: String,
    /// At most 1 MiB; no NUL, no number that jsonb can't hold, nesting at most 100.
    pub payload: Value,
    /// 1..=100.
    pub max_attempts: u32,
    /// 1..=255 characters; unique per install and namespace while the row is live or has succeeded.
    pub idempotency_key: Option<String>,
    /// Not before this; none = now, by the database's clock.
    pub run_at: Option<DateTime<Utc>>,
    /// -1000..=1000, higher starts first.
    pub priority: i16,
    /// Limit of one attempt, 1..=86400.
    pub timeout_seconds: u32,
    /// Held until this is lifted.
    pub suspended: bool,
    /// The resource that asks for it; none for a job of a library user.
    pub owner: Option<Owner>,
    /// A retry mark that counts as used from the start.
    pub last_retry: Option<String>,
}

impl NewJob {
    /// With the defaults of the resource.
    pub fn new(kind: impl Into<String>, payload: Value) -> Self {
        Self {
            kind: kind.into(),
            payload,
            max_attempts: 3,
            idempotency_key: None,
            run_at: None,
            priority: 0,
            timeout_seconds: 300,
            suspended: false,
            owner: None,
            last_retry: None,
        }
    }
}

/// The resource behind a job.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    pub uid: Uuid,
    pub namespace: String,
    pub name: String,
}

/// Whether a row was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnqueueOutcome {
    Created(Uuid),
    /// The resource had a row, or shares the row that holds its key.
    Existing(Uuid),
}

impl EnqueueOutcome {
    pub fn id(self) -> Uuid {
        match self {
            Self::Created(id) | Self::Existing(id) => id,
        }
    }
}

/// As Postgres keeps it: in microseconds.
pub(super) fn storable_time(time: DateTime<Utc>) -> DateTime<Utc> {
    time.trunc_subsecs(6)
}

/// Years of four digits, as RFC 3339 has them: beyond, one reader or another can't hold the time.
pub(super) fn check_run_at(run_at: DateTime<Utc>) -> Result<()> {
    if (1..=9999).contains(&run_at.year()) {
        return Ok(());
    }
    Err(Error::invalid("runAt", "is out of range: years 1 to 9999"))
}

/// What the database would refuse, before it is asked; the payload's size in bytes.
pub(super) fn check(new: &NewJob) -> Result<usize> {
    let NewJob { kind, payload, max_attempts, idempotency_key, run_at, priority, timeout_seconds, last_retry, .. } =
        new;
    let name = kind.as_bytes();
    let kind_is_a_name = (1..=63).contains(&name.len())
        && name[0].is_ascii_lowercase()
        && name.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'_');
    if !kind_is_a_name {
        return Err(Error::invalid("kind", "is not a name: lower case letters, digits and _, at most 63"));
    }
    let size = payload_size(payload)?;
    if !(1..=100).contains(max_attempts) {
        return Err(Error::invalid("maxAttempts", "is out of range: 1 to 100"));
    }
    if !(-1000..=1000).contains(priority) {
        return Err(Error::invalid("priority", "is out of range: -1000 to 1000"));
    }
    if !(1..=86_400).contains(timeout_seconds) {
        return Err(Error::invalid("timeoutSeconds", "is out of range: 1 to 86400"));
    }
    if let Some(run_at) = run_at {
        check_run_at(*run_at)?;
    }
    for (field, text) in [("idempotencyKey", idempotency_key), ("lastRetry", last_retry)] {
        let Some(text) = text else { continue };
        if !(1..=255).contains(&text.chars().count()) {
            return Err(Error::invalid(field, "has a wrong length: 1 to 255 characters"));
        }
        if text.contains('\0') {
            return Err(Error::invalid(field, "holds a NUL character: remove it"));
        }
    }
    Ok(size)
}

/// The largest attempts and seconds are far below: checked before.
pub(super) fn small(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

pub(super) fn lost_the_race() -> Error {
    Error::Db(sqlx::Error::Protocol(format!("enqueue lost the same race {ROUNDS} times")))
}

impl Queue {
    /// Puts a job into the queue, at most once per owner and per live or succeeded key: - -> queued.
    ///
    /// Guard: the owner has no row and was not let go; no live or succeeded row of the same install, namespace and key is there, and
    /// retention kept no such key. Without owner and key there is none. It is one statement unless the guard holds the
    /// job back.
    ///
    /// Outcomes: [`EnqueueOutcome::Created`], or [`EnqueueOutcome::Existing`] when the owner has a row already or a
    /// row (or kept key) of the same kind and payload holds the key: the owner, if any, becomes one of its holders.
    /// Safe to repeat when the job has an owner or a key; without either, a repeat after an error of the database
    /// may make a second row. A connection that breaks is replaced once, and that makes no second row.
    ///
    /// # Errors
    /// [`Error::PayloadInvalid`], before anything is sent: a field is out of its range.
    /// [`Error::IdempotencyConflict`]: the key's holder has another kind or payload; final.
    /// [`Error::KeyBeingFreed`]: the key's holder runs and was asked to stop; passing.
    /// [`Error::Released`]: the owner was let go a short while ago ([`Queue::release`]); final.
    /// [`Error::Db`], [`Error::Timeout`]: the job may be in the queue or not.
    pub async fn enqueue(&self, new: &NewJob) -> Result<EnqueueOutcome> {
        check(new)?;
        let outcome = self.bounded(self.enqueue_as(Uuid::now_v7(), new)).await?;
        if let EnqueueOutcome::Created(_) = outcome {
            self.notify(Channel::Ready);
        }
        Ok(outcome)
    }

    /// Under this id, if it makes a row: an insert that is sent again knows by it what the first one did.
    pub(super) async fn enqueue_as(&self, id: Uuid, new: &NewJob) -> Result<EnqueueOutcome> {
        let mut reconnected = false;
        for _ in 0..ROUNDS {
            match self.insert(id, new).await {
                Ok(true) => return Ok(EnqueueOutcome::Created(id)),
                Err(error) if error.violates("jobs_pkey") => return Ok(EnqueueOutcome::Created(id)),
                Err(error) if error.is_broken_connection() && !reconnected => {
                    reconnected = true;
                    continue;
                }
                // Its key is held, or another enqueue of the resource won.
                Ok(false) => {}
                Err(error) if error.violates("job_resources_pkey") => {}
                // A trigger of the table found the key among those that retention kept.
                Err(error) if error.violates(KEY_INDEX) => {}
                Err(error) => return Err(error),
            }
            match self.share(new).await? {
                Some(holder) if holder == id => return Ok(EnqueueOutcome::Created(id)),
                Some(holder) => return Ok(EnqueueOutcome::Existing(holder)),
                None => {}
            }
        }
        Err(lost_the_race())
    }

    /// True when it made the row. One statement; for an owner a transaction, which looks for a release at its end.
    async fn insert(&self, id: Uuid, new: &NewJob) -> Result<bool> {
        let NewJob { owner, idempotency_key: key, .. } = new;
        let sql = match (owner, key) {
            (None, None) => {
                "INSERT INTO jobs (id, kind, payload, max_attempts, run_at, wanted_run_at, priority, timeout_seconds, \
                     suspended, last_retry, install) \
                 VALUES ($1, $2, $3, $4, coalesce($5, now()), $5, $6, $7, $8, $9, $10)"
            }
            // One snapshot sees the key's holder or, once that was purged, the kept key. A second row of the owner
            // breaks the key of job_resources, and the whole statement with it.
            (Some(_), _) | (_, Some(_)) => {
                "WITH made AS ( \
                     INSERT INTO jobs (id, kind, payload, max_attempts, run_at, wanted_run_at, priority, \
                         timeout_seconds, suspended, last_retry, install, idempotency_key, namespace, owner_uid, \
                         mirror_due) \
                     SELECT $1, $2, $3, $4, coalesce($5, now()), $5, $6, $7, $8, $9, $10, $11, $12, $13, \
                         $13::uuid IS NOT NULL \
                     WHERE NOT EXISTS (SELECT FROM job_resources WHERE uid = $13) \
                       AND NOT EXISTS (SELECT FROM job_keys WHERE install = $10 AND namespace = coalesce($12, '') \
                           AND idempotency_key = $11) \
                       AND NOT EXISTS (SELECT FROM jobs WHERE install = $10 AND coalesce(namespace, '') = \
                           coalesce($12, '') AND idempotency_key = $11 AND status NOT IN ('failed_permanent', 'cancelled')) \
                     ON CONFLICT (install, (coalesce(namespace, '')), idempotency_key) \
                         WHERE idempotency_key IS NOT NULL AND status NOT IN ('failed_permanent', 'cancelled') \
                     DO NOTHING RETURNING id), \
                 held AS ( \
                     INSERT INTO job_resources (uid, job_id, install, namespace, name) \
                     SELECT $13, id, $10, $12, $14 FROM made WHERE $13::uuid IS NOT NULL) \
                 SELECT FROM made"
            }
        };
        let mut query = sqlx::query(sql)
            .bind(id)
            .bind(&new.kind)
            .bind(&new.payload)
            .bind(small(new.max_attempts))
            .bind(new.run_at.map(storable_time))
            .bind(new.priority)
            .bind(small(new.timeout_seconds))
            .bind(new.suspended)
            .bind(&new.last_retry)
            .bind(&self.settings.install);
        if owner.is_some() || key.is_some() {
            query = query
                .bind(key)
                .bind(owner.as_ref().map(|owner| &owner.namespace))
                .bind(owner.as_ref().map(|owner| owner.uid))
                .bind(owner.as_ref().map(|owner| &owner.name));
        }
        let Some(owner) = owner else { return Ok(query.execute(&self.pool).await?.rows_affected() == 1) };
        let mut tx = self.pool.begin().await?;
        let made = query.execute(&mut *tx).await?.rows_affected() == 1;
        if made {
            refuse_released(&mut tx, owner.uid).await?;
            tx.commit().await?;
        }
        Ok(made)
    }

    /// The job that the owner has, or that holds the key; none when there is neither any more.
    async fn share(&self, new: &NewJob) -> Result<Option<Uuid>> {
        let mut tx = self.pool.begin().await?;
        if let Some(owner) = &new.owner {
            let known: Option<(Uuid,)> = sqlx::query_as("SELECT job_id FROM job_resources WHERE uid = $1")
                .bind(owner.uid)
                .fetch_optional(&mut *tx)
                .await?;
            if let Some((id,)) = known {
                return Ok(Some(id));
            }
        }
        let holder = match holder_of_key(&mut tx, &self.settings.install, new).await? {
            None => return Ok(None),
            Some(holder) => holder.shared()?,
        };
        if let Some(owner) = &new.owner {
            let held = sqlx::query(
                "INSERT INTO job_resources (uid, job_id, install, namespace, name) VALUES ($1, $2, $3, $4, $5) \
                 ON CONFLICT (uid) DO NOTHING",
            )
            .bind(owner.uid)
            .bind(holder)
            .bind(&self.settings.install)
            .bind(&owner.namespace)
            .bind(&owner.name)
            .execute(&mut *tx)
            .await?
            .rows_affected();
            if held == 0 {
                return Ok(None);
            }
            // A first holder (the row came from SQL) owns the row; a further one has a status to be written. The
            // revision is raised for it: an acknowledgement under way does not know of the new holder.
            sqlx::query(
                "UPDATE jobs SET mirror_due = true, owner_uid = coalesce(owner_uid, $2), revision = revision + 1 \
                 WHERE id = $1",
            )
            .bind(holder)
            .bind(owner.uid)
            .execute(&mut *tx)
            .await?;
            refuse_released(&mut tx, owner.uid).await?;
        }
        tx.commit().await?;
        Ok(Some(holder))
    }
}

/// A resource that was let go gets no row, whoever still thinks that it leads. The hold is written before: it may have
/// waited for the release, which a later statement alone sees.
async fn refuse_released(tx: &mut Session, uid: Uuid) -> Result<()> {
    let (released,): (bool,) = sqlx::query_as(
        "SELECT EXISTS (SELECT FROM job_releases WHERE uid = $1 AND released_at > now() - make_interval(secs => $2))",
    )
    .bind(uid)
    .bind(RELEASE_KEPT_SECONDS)
    .fetch_one(tx)
    .await?;
    if released { Err(Error::Released) } else { Ok(()) }
}

/// Whoever holds a key that a job asks for.
#[derive(sqlx::FromRow)]
pub(super) struct Holder {
    id: Uuid,
    same_work: bool,
    /// It runs and was asked to stop.
    ending: bool,
}

impl Holder {
    /// Its id, if the job may share it.
    pub(super) fn shared(self) -> Result<Uuid> {
        let Self { id: holder, same_work, ending } = self;
        match (ending, same_work) {
            (true, _) => Err(Error::KeyBeingFreed { holder }),
            (false, true) => Ok(holder),
            (false, false) => Err(Error::IdempotencyConflict { holder }),
        }
    }
}

/// The row is locked, so that a cancel can't free the key before the sharer is written down. Whoever waited for a purge
/// finds the key where that has put it, by a later statement.
async fn holder_of_key(tx: &mut Session, install: &str, new: &NewJob) -> Result<Option<Holder>> {
    let live = "SELECT id, kind = $4 AND payload = $5 AS same_work, cancel_requested AND status = 'running' AS ending \
         FROM jobs WHERE install = $1 AND coalesce(namespace, '') = coalesce($2, '') AND idempotency_key = $3 \
           AND status NOT IN ('failed_permanent', 'cancelled') FOR UPDATE";
    let kept = "SELECT job_id AS id, false AS ending, \
             kind = $4 AND payload_sha256 = sha256(convert_to($5::jsonb::text, 'UTF8')) AS same_work \
         FROM job_keys WHERE install = $1 AND namespace = coalesce($2, '') AND idempotency_key = $3";
    for sql in [live, kept] {
        let holder = sqlx::query_as(sql)
            .bind(install)
            .bind(new.owner.as_ref().map(|owner| &owner.namespace))
            .bind(&new.idempotency_key)
            .bind(&new.kind)
            .bind(&new.payload)
            .fetch_optional(&mut *tx)
            .await?;
        if holder.is_some() {
            return Ok(holder);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_kind_is_a_name() {
        for kind in ["", "Send", "1a", "a-b", &"a".repeat(64)] {
            assert!(check(&NewJob::new(kind, json!({}))).is_err(), "{kind}");
        }
        assert!(check(&NewJob::new("fifth_kind2", json!({}))).is_ok());
    }
}
