//! Lanes: how a busy worker claims at a cost that depends on nothing but what it takes.
//!
//! A lane is what the claim's index is sorted by: kind, namespace, whether the rows want care, priority. Within a lane
//! jobs go by the time they are due since, then by id. A survey finds the first job of each lane; a claim names lanes
//! and the place in each from which to look. So neither jobs that are due later, nor other kinds, nor ended jobs, nor
//! the dead index entries that a long transaction elsewhere keeps at a lane's head are walked by it. What lies before
//! that place (a job committed late, given back, or dated back) is the next survey's to find.
//!
//! The claim of a few jobs from one lane, like the end of a few, takes its arrays and limit as `(SELECT $1)`: the planner
//! does not look at the values, finds a plan for all values no worse, and so plans once a connection. To plan a claim
//! takes longer than to claim one job. All others are planned for the table as it is.

use chrono::{DateTime, Utc};
use sqlx::AssertSqlSafe;
use std::sync::LazyLock;
use std::time::Duration;
use uuid::Uuid;

use super::Queue;
use super::claim::{CLAIMED, ClaimError, ClaimTicket, START};
use super::claimed::{ClaimedJob, ClaimedRow};
use super::connections::{TAKING_TURNS, Transaction};
use super::error::Result;
use crate::text::storable;

/// Jobs that are taken in one order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    pub kind: String,
    /// Empty for jobs without one.
    pub namespace: String,
    /// Its jobs must not be prefetched: the claim is their last attempt, or they have lost two leases.
    pub careful: bool,
    pub priority: i16,
}

/// A place in a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) id: Uuid,
}

/// The first job of a lane that has any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneHead {
    pub lane: Lane,
    /// Where that job stands.
    pub mark: Mark,
    /// How long until it is due, by the database's clock; zero if it is.
    pub due_in: Duration,
}

/// Where a survey of one kind starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SurveyFrom {
    pub kind: String,
    /// Behind this lane; at the first one if none.
    pub after: Option<Lane>,
}

/// What to claim from one lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    pub lane: Lane,
    /// Look from this place on (it counts); from the lane's start if none.
    pub from: Option<Mark>,
    /// The most jobs to take from this lane.
    pub limit: usize,
}

/// Whether a claim brings every payload with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payloads {
    All,
    /// Leaves out those that Postgres stores compressed or over 2 kB, so that what a prefetch holds in memory is
    /// bounded by its number of jobs. [`Queue::load_payload`] brings them when the job is about to start.
    Small,
}

/// Larger claims take turns: one that runs beside others walks all that they hold.
const MANY: usize = 100;
/// The turn's advisory lock. The number has no meaning but to be the same for all.
const TURN: i64 = 7_309_754_913;
const SMALL_PAYLOAD_BYTES: i32 = 2048;
/// Lower than any priority.
pub(super) const BEFORE_ALL: i16 = i16::MIN;

// What the claim's index is made of, word for word: only so does Postgres see that it serves.
pub(super) const WAITING: &str = "status IN ('queued', 'retrying') AND NOT suspended";
pub(super) const NAMESPACE: &str = "coalesce(namespace, '')";
pub(super) const CAREFUL: &str = "(attempts + 1 >= max_attempts OR lost_leases >= 2)";

/// The first job of each lane of k.kind behind the lane (k.namespace, k.careful, k.priority), in the index's order. The
/// caller ends it: `) l`, or with a limit.
pub(super) static LANES: LazyLock<String> = LazyLock::new(|| {
    let next = |after: &str| {
        format!(
            "SELECT {NAMESPACE} AS namespace, {CAREFUL} AS careful, priority, run_at, id FROM jobs \
             WHERE install = $1 AND kind = k.kind AND {WAITING} \
               AND ({NAMESPACE}, {CAREFUL}, priority) > ({after}.namespace, {after}.careful, {after}.priority) \
             ORDER BY {NAMESPACE}, {CAREFUL}, priority, run_at, id LIMIT 1"
        )
    };
    format!(
        "CROSS JOIN LATERAL ( \
             WITH RECURSIVE heads AS ( \
                 ({}) UNION ALL SELECT next.* FROM heads h CROSS JOIN LATERAL ({}) next) \
             SELECT * FROM heads",
        next("k"),
        next("h"),
    )
});

/// Of jobs from one lane, and from many.
static CLAIM_ONE: LazyLock<String> = LazyLock::new(|| claim(|parameter| format!("(SELECT {parameter})")));
static CLAIM: LazyLock<String> = LazyLock::new(|| claim(str::to_owned));

fn claim(parameter: impl Fn(&str) -> String) -> String {
    let lanes = ["5::text", "6::text", "7::bool", "8::int2", "9::timestamptz", "10::uuid", "11::int8", "14::bool"];
    let lanes = lanes.map(|column| parameter(&format!("${column}[]"))).join(", ");
    format!(
        "WITH next AS ( \
             SELECT n.id FROM unnest({lanes}) \
                 WITH ORDINALITY AS l(kind, namespace, careful, priority, run_at, id, max, whole, place) \
             CROSS JOIN LATERAL ( \
                 SELECT id FROM jobs WHERE install = $1 AND {WAITING} \
                   AND kind = l.kind AND {NAMESPACE} = l.namespace AND {CAREFUL} = l.careful AND priority = l.priority \
                   AND run_at <= now() AND (run_at, id) >= (CASE WHEN l.whole THEN '-infinity' ELSE l.run_at END, l.id) \
                 ORDER BY run_at, id LIMIT l.max FOR UPDATE SKIP LOCKED) n \
             LIMIT {limit}) \
         UPDATE jobs j SET {START}, claim_token = $3, locked_by = $4, lease_seconds = $2 \
         FROM next WHERE j.id = next.id RETURNING {CLAIMED}, \
             CASE WHEN $13 IS NULL OR pg_column_size(j.payload) <= $13 AND pg_column_compression(j.payload) IS NULL \
                 THEN j.payload::text END AS payload",
        limit = parameter("$12::int8"),
    )
}

static SURVEY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT k.kind, l.namespace, l.careful, l.priority, l.run_at, l.id, \
             greatest(date_part('epoch', l.run_at - now()), 0) AS due_in \
         FROM unnest($2::text[], $3::text[], $4::bool[], $5::int2[]) AS k(kind, namespace, careful, priority) \
         {} LIMIT $6) l",
        *LANES
    )
});

#[derive(sqlx::FromRow)]
struct HeadRow {
    kind: String,
    namespace: String,
    careful: bool,
    priority: i16,
    run_at: DateTime<Utc>,
    id: Uuid,
    due_in: f64,
}

impl Queue {
    /// The first job of each lane of these kinds, at most `per_kind` lanes of each in the index's order; a kind with
    /// that many may have more behind the last. Reads only; one index descent for each lane.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn survey(&self, from: &[SurveyFrom], per_kind: usize) -> Result<Vec<LaneHead>> {
        let kinds: Vec<&str> = from.iter().map(|from| from.kind.as_str()).collect();
        let namespaces: Vec<&str> =
            from.iter().map(|from| from.after.as_ref().map_or("", |lane| lane.namespace.as_str())).collect();
        let careful: Vec<bool> = from.iter().map(|from| from.after.as_ref().is_some_and(|lane| lane.careful)).collect();
        let priorities: Vec<i16> =
            from.iter().map(|from| from.after.as_ref().map_or(BEFORE_ALL, |lane| lane.priority)).collect();
        let query = sqlx::query_as(AssertSqlSafe(SURVEY.as_str()))
            .bind(&self.settings.install)
            .bind(kinds)
            .bind(namespaces)
            .bind(careful)
            .bind(priorities)
            .bind(i64::try_from(per_kind).unwrap_or(i64::MAX));
        let rows: Vec<HeadRow> = self.bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        Ok(rows.into_iter().map(LaneHead::from).collect())
    }

    /// Claims due jobs from these lanes in one statement, at most `limit` in all, the lanes in the order given. Claims of
    /// more than 100 take turns in the whole database (an advisory lock of the transaction), as long as no turn takes
    /// over a second.
    ///
    /// Guard: as [`Queue::fetch_many`].
    ///
    /// # Errors
    /// As [`Queue::fetch_many`].
    pub async fn claim_from(
        &self,
        worker: &str,
        wants: &[Want],
        limit: usize,
        payloads: Payloads,
    ) -> Result<Vec<ClaimedJob>, ClaimError> {
        let ticket = ClaimTicket::new();
        let claim = self.bounded(self.claim_lanes(worker, wants, limit, payloads, ticket)).await;
        claim.map_err(|error| ClaimError { error, ticket })
    }

    async fn claim_lanes(
        &self,
        worker: &str,
        wants: &[Want],
        limit: usize,
        payloads: Payloads,
        ticket: ClaimTicket,
    ) -> Result<Vec<ClaimedJob>> {
        let kinds: Vec<&str> = wants.iter().map(|want| want.lane.kind.as_str()).collect();
        let namespaces: Vec<&str> = wants.iter().map(|want| want.lane.namespace.as_str()).collect();
        let careful: Vec<bool> = wants.iter().map(|want| want.lane.careful).collect();
        let priorities: Vec<i16> = wants.iter().map(|want| want.lane.priority).collect();
        let run_ats: Vec<DateTime<Utc>> =
            wants.iter().map(|want| want.from.map_or(DateTime::UNIX_EPOCH, |mark| mark.run_at)).collect();
        let ids: Vec<Uuid> = wants.iter().map(|want| want.from.map_or(Uuid::nil(), |mark| mark.id)).collect();
        let whole: Vec<bool> = wants.iter().map(|want| want.from.is_none()).collect();
        let limits: Vec<i64> = wants.iter().map(|want| i64::try_from(want.limit).unwrap_or(i64::MAX)).collect();
        let small = match payloads {
            Payloads::All => None,
            Payloads::Small => Some(SMALL_PAYLOAD_BYTES),
        };
        let worker = storable(worker, 255);
        let sql = if wants.len() == 1 && limit <= MANY { &CLAIM_ONE } else { &CLAIM };
        let query = || {
            sqlx::query_as(AssertSqlSafe(sql.as_str()))
                .bind(&self.settings.install)
                .bind(self.lease_seconds())
                .bind(ticket.token)
                .bind(&worker)
                .bind(&kinds)
                .bind(&namespaces)
                .bind(&careful)
                .bind(&priorities)
                .bind(&run_ats)
                .bind(&ids)
                .bind(&limits)
                .bind(i64::try_from(limit).unwrap_or(i64::MAX))
                .bind(small)
                .bind(&whole)
        };
        let rows: Vec<ClaimedRow> = match self.turn(limit).await? {
            Some(mut turn) => {
                let rows = query().fetch_all(&mut *turn).await?;
                turn.commit().await?;
                rows
            }
            None => query().fetch_all(&self.pool).await?,
        };
        Ok(self.read_claim(rows, ticket).await?.jobs)
    }

    /// The transaction for a large claim. None for others, and when the turn was long in coming.
    async fn turn(&self, limit: usize) -> Result<Option<Transaction>> {
        if limit <= MANY || self.claims_wary.is_wary() {
            return Ok(None);
        }
        let mut turn = self.pool.begin_with(TAKING_TURNS).await?;
        match sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(TURN).execute(&mut *turn).await {
            Ok(_) => Ok(Some(turn)),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("55P03") => {
                self.claims_wary.waited_too_long();
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Brings the payload of a job that was claimed without it; does nothing if it is there.
    ///
    /// # Errors
    /// [`Error::NotFound`](super::Error::NotFound) when the claim is lost, [`Error::Db`](super::Error::Db),
    /// [`Error::Timeout`](super::Error::Timeout).
    pub async fn load_payload(&self, job: &mut ClaimedJob) -> Result<()> {
        if job.payload().is_some() {
            return Ok(());
        }
        let (id, token) = (job.lease.id, job.lease.token);
        let query =
            sqlx::query_as("SELECT payload::text FROM jobs WHERE id = $1 AND status = 'running' AND claim_token = $2")
                .bind(id)
                .bind(token);
        let row: Option<(String,)> = self.bounded(async { Ok(query.fetch_optional(&self.pool).await?) }).await?;
        let (payload,) = row.ok_or(super::Error::NotFound)?;
        job.set_payload(payload)
    }
}

impl From<HeadRow> for LaneHead {
    fn from(row: HeadRow) -> Self {
        let HeadRow { kind, namespace, careful, priority, run_at, id, due_in } = row;
        Self {
            lane: Lane { kind, namespace, careful, priority },
            mark: Mark { run_at, id },
            due_in: Duration::try_from_secs_f64(due_in).unwrap_or(Duration::MAX),
        }
    }
}
