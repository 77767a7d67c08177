//! Enqueue: at most one row per resource and per live key.

use chrono::{DateTime, Datelike, SubsecRound, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::connections::Session;
use super::error::{Error, Result};
use super::resources::RELEASE_KEPT_SECONDS;
use super::{Channel, Queue};

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

/// The largest payload in bytes, as JSON with `<`, `>` and `&` escaped (etcd's form).
pub const PAYLOAD_MAX_BYTES: usize = 1024 * 1024;
/// The deepest nesting of arrays and objects.
pub const PAYLOAD_MAX_DEPTH: usize = crate::text::JSON_MAX_DEPTH;

/// What a statement would refuse or a reader could not read back.
///
/// # Errors
/// [`Error::PayloadInvalid`] with the field's path; never its value.
pub fn check_payload(payload: &Value) -> Result<()> {
    let mut size = 0;
    check_value(payload, &mut "payload".to_owned(), 1, &mut size)?;
    if size > PAYLOAD_MAX_BYTES {
        return Err(Error::invalid("payload", format!("takes {size} bytes as JSON; at most {PAYLOAD_MAX_BYTES} fit")));
    }
    Ok(())
}

fn check_value(value: &Value, path: &mut String, depth: usize, size: &mut usize) -> Result<()> {
    let at = path.len();
    match value {
        Value::Null => *size += 4,
        Value::Bool(b) => *size += if *b { 4 } else { 5 },
        Value::Number(n) => *size += check_number(n, path)?,
        Value::String(s) => *size += check_text(s, path)?,
        Value::Array(items) => {
            check_depth(depth, path)?;
            *size += 2 + items.len().saturating_sub(1);
            for (i, item) in items.iter().enumerate() {
                path.push_str(&format!("[{i}]"));
                check_value(item, path, depth + 1, size)?;
                path.truncate(at);
            }
        }
        Value::Object(fields) => {
            check_depth(depth, path)?;
            *size += 2 + fields.len().saturating_sub(1);
            for (key, item) in fields {
                *size += 1 + check_text(key, path)?;
                path.push('.');
                path.push_str(crate::text::cut(key, 64));
                check_value(item, path, depth + 1, size)?;
                path.truncate(at);
            }
        }
    }
    Ok(())
}

fn check_depth(depth: usize, path: &str) -> Result<()> {
    if depth <= PAYLOAD_MAX_DEPTH {
        return Ok(());
    }
    let at = crate::text::cut(path, 128);
    Err(Error::invalid(at, format!("is nested deeper than {PAYLOAD_MAX_DEPTH} levels: flatten it")))
}

fn check_text(text: &str, path: &str) -> Result<usize> {
    let mut size = 2;
    for c in text.chars() {
        size += match c {
            '\0' => return Err(Error::invalid(path, "holds a NUL character, which Postgres can't store: remove it")),
            '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => 6,
            c if c < ' ' => 6,
            c => c.len_utf8(),
        };
    }
    Ok(size)
}

/// jsonb numbers are numeric: at most 131072 digits before the point and 16383 after it.
fn check_number(number: &serde_json::Number, path: &str) -> Result<usize> {
    let digits = number.to_string();
    let exponent: i64 = match digits.split_once(['e', 'E']) {
        Some((_, e)) => e.parse().unwrap_or(i64::MAX),
        None => 0,
    };
    if exponent.abs() > 10_000 || digits.len() > 10_000 {
        return Err(Error::invalid(path, "is a number out of jsonb's range: write it as a string"));
    }
    Ok(digits.len())
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

fn check(new: &NewJob) -> Result<()> {
    let NewJob { kind, payload, max_attempts, idempotency_key, run_at, priority, timeout_seconds, last_retry, .. } =
        new;
    let name = kind.as_bytes();
    let kind_is_a_name = (1..=63).contains(&name.len())
        && name[0].is_ascii_lowercase()
        && name.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'_');
    if !kind_is_a_name {
        return Err(Error::invalid("kind", "is not a name: lower case letters, digits and _, at most 63"));
    }
    check_payload(payload)?;
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
    Ok(())
}

impl Queue {
    /// Puts a job into the queue, at most once per owner and per live key.
    ///
    /// Outcomes: [`EnqueueOutcome::Created`], or [`EnqueueOutcome::Existing`] when the owner has a row already or a
    /// live or succeeded row of the same install, namespace, key, kind and payload is shared. Safe to repeat when the
    /// job has an owner or a key; without either, a repeat after a lost reply makes a second row.
    ///
    /// # Errors
    /// [`Error::PayloadInvalid`] before anything is sent; [`Error::IdempotencyConflict`]; [`Error::Released`];
    /// [`Error::Db`].
    pub async fn enqueue(&self, new: &NewJob) -> Result<EnqueueOutcome> {
        check(new)?;
        let outcome = self.bounded(self.enqueue_checked(new)).await?;
        if let EnqueueOutcome::Created(_) = outcome {
            self.notify(Channel::Ready);
        }
        Ok(outcome)
    }

    async fn enqueue_checked(&self, new: &NewJob) -> Result<EnqueueOutcome> {
        // Each round loses a race at most: the key's holder ended, or another enqueue of the same resource won.
        for _ in 0..5 {
            if let Some(outcome) = self.try_enqueue(new).await? {
                return Ok(outcome);
            }
        }
        Err(Error::Db(sqlx::Error::Protocol("enqueue lost the same race five times".into())))
    }

    async fn try_enqueue(&self, new: &NewJob) -> Result<Option<EnqueueOutcome>> {
        let mut tx = self.pool.begin().await?;
        if let Some(owner) = &new.owner {
            let known: Option<(Uuid,)> = sqlx::query_as("SELECT job_id FROM job_resources WHERE uid = $1")
                .bind(owner.uid)
                .fetch_optional(&mut *tx)
                .await?;
            if let Some((id,)) = known {
                return Ok(Some(EnqueueOutcome::Existing(id)));
            }
        }
        let namespace = new.owner.as_ref().map(|owner| owner.namespace.as_str());
        let id = Uuid::now_v7();
        let inserted = sqlx::query(
            "INSERT INTO jobs (id, kind, payload, max_attempts, idempotency_key, run_at, priority, timeout_seconds, \
                 suspended, last_retry, install, namespace, owner_uid, wanted_run_at) \
             SELECT $1, $2, $3, $4, $5, coalesce($6, now()), $7, $8, $9, $10, $11, $12, $13, $6 \
             WHERE NOT EXISTS (SELECT FROM job_keys k WHERE k.install = $11 \
                 AND k.namespace = coalesce($12, '') AND k.idempotency_key = $5) \
             ON CONFLICT (install, (coalesce(namespace, '')), idempotency_key) \
                 WHERE idempotency_key IS NOT NULL AND status NOT IN ('failed_permanent', 'cancelled') \
             DO NOTHING",
        )
        .bind(id)
        .bind(&new.kind)
        .bind(&new.payload)
        .bind(i32::try_from(new.max_attempts).unwrap_or(i32::MAX))
        .bind(&new.idempotency_key)
        .bind(new.run_at.map(storable_time))
        .bind(new.priority)
        .bind(i32::try_from(new.timeout_seconds).unwrap_or(i32::MAX))
        .bind(new.suspended)
        .bind(&new.last_retry)
        .bind(&self.settings.install)
        .bind(namespace)
        .bind(new.owner.as_ref().map(|owner| owner.uid))
        .execute(&mut *tx)
        .await?
        .rows_affected();
        let outcome = if inserted == 1 {
            // The insert may have waited for the purge of the key's holder; what the purge wrote down about the key
            // is seen by a later statement only.
            let install = &self.settings.install;
            if kept_key_exists(&mut tx, install, namespace, new.idempotency_key.as_deref()).await? {
                return Ok(None);
            }
            EnqueueOutcome::Created(id)
        } else {
            match holder_of_key(&mut tx, &self.settings.install, namespace, new).await? {
                None => return Ok(None),
                Some((holder, _, true)) => return Err(Error::KeyBeingFreed { holder }),
                Some((holder, true, false)) => EnqueueOutcome::Existing(holder),
                Some((holder, false, false)) => return Err(Error::IdempotencyConflict { holder }),
            }
        };
        if let Some(owner) = &new.owner {
            let held = sqlx::query(
                "INSERT INTO job_resources (uid, job_id, install, namespace, name) VALUES ($1, $2, $3, $4, $5) \
                 ON CONFLICT (uid) DO NOTHING",
            )
            .bind(owner.uid)
            .bind(outcome.id())
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
            // A resource that was let go meanwhile gets no row, whoever still thinks that it leads.
            let (released,): (bool,) = sqlx::query_as(
                "WITH held AS (UPDATE jobs SET mirror_due = true, owner_uid = coalesce(owner_uid, $2), \
                     revision = CASE WHEN $3 THEN revision ELSE revision + 1 END WHERE id = $1) \
                 SELECT EXISTS (SELECT FROM job_releases \
                     WHERE uid = $2 AND released_at > now() - make_interval(secs => $4))",
            )
            .bind(outcome.id())
            .bind(owner.uid)
            .bind(matches!(outcome, EnqueueOutcome::Created(_)))
            .bind(RELEASE_KEPT_SECONDS)
            .fetch_one(&mut *tx)
            .await?;
            if released {
                return Err(Error::Released);
            }
        }
        tx.commit().await?;
        Ok(Some(outcome))
    }
}

/// Whether retention has removed a succeeded row that held this key.
pub(super) async fn kept_key_exists(
    tx: &mut Session,
    install: &str,
    namespace: Option<&str>,
    key: Option<&str>,
) -> Result<bool> {
    let Some(key) = key else { return Ok(false) };
    let kept: (bool,) = sqlx::query_as(
        "SELECT EXISTS (SELECT FROM job_keys \
         WHERE install = $1 AND namespace = coalesce($2, '') AND idempotency_key = $3)",
    )
    .bind(install)
    .bind(namespace)
    .bind(key)
    .fetch_one(tx)
    .await?;
    Ok(kept.0)
}

/// The job that holds the key, whether it is the same work, and whether it is about to be cancelled. The row is
/// locked, so that a cancel can't free the key before the sharer is written down.
async fn holder_of_key(
    tx: &mut Session,
    install: &str,
    namespace: Option<&str>,
    new: &NewJob,
) -> Result<Option<(Uuid, bool, bool)>> {
    let live = "SELECT id, kind = $4 AND payload = $5, cancel_requested AND status = 'running' FROM jobs \
         WHERE install = $1 AND coalesce(namespace, '') = coalesce($2, '') AND idempotency_key = $3 \
           AND status NOT IN ('failed_permanent', 'cancelled') FOR UPDATE";
    let kept = "SELECT job_id, kind = $4 AND payload_sha256 = sha256(convert_to($5::jsonb::text, 'UTF8')), false \
         FROM job_keys WHERE install = $1 AND namespace = coalesce($2, '') AND idempotency_key = $3";
    for sql in [live, kept] {
        let holder = sqlx::query_as(sql)
            .bind(install)
            .bind(namespace)
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

    fn problem(payload: &Value) -> String {
        check_payload(payload).expect_err("it must be refused").to_string()
    }

    #[test]
    fn a_nul_is_refused_wherever_it_stands_and_its_place_is_named() {
        assert!(problem(&json!({"a": [{"b": "x\0"}]})).starts_with("payload.a[0].b holds a NUL"));
        assert!(problem(&json!({"a": {"k\0": 1}})).starts_with("payload.a holds a NUL"));
    }

    #[test]
    fn nesting_is_bounded_at_a_hundred() {
        let nested = |depth| (1..depth).fold(json!([]), |inner, _| json!([inner]));
        assert!(check_payload(&nested(100)).is_ok());
        assert!(problem(&nested(101)).contains("deeper than 100"));
    }

    #[test]
    fn the_size_counts_the_escapes_of_etcd() {
        let fits = "a".repeat(PAYLOAD_MAX_BYTES - 8);
        assert!(check_payload(&json!({"k": fits})).is_ok(), "braces, colon, quotes and key take 8 bytes");
        assert!(problem(&json!({"k": format!("{fits}a")})).contains("1048577 bytes"));
        assert!(problem(&json!({"k": "<".repeat(PAYLOAD_MAX_BYTES / 6 + 1)})).contains("at most"));
    }

    #[test]
    fn the_counted_size_is_the_size_of_the_text() {
        let value = json!({"a": [1, -2.5, null, true, false, "é\n\"\\\u{1}"], "b": {}, "c": []});
        let mut size = 0;
        check_value(&value, &mut String::new(), 1, &mut size).expect("it is valid");
        assert_eq!(size, value.to_string().len());
    }

    #[test]
    fn a_kind_is_a_name() {
        for kind in ["", "Send", "1a", "a-b", &"a".repeat(64)] {
            assert!(check(&NewJob::new(kind, json!({}))).is_err(), "{kind}");
        }
        assert!(check(&NewJob::new("fifth_kind2", json!({}))).is_ok());
    }
}
