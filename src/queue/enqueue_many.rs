//! Enqueue in bulk: what [`Queue::enqueue`] promises, item by item, at two round trips a thousand.

use std::collections::{HashMap, HashSet};

use serde_json::Value;
use sqlx::types::Json;
use uuid::Uuid;

use super::enqueue::{EnqueueOutcome, Holder, KEY_INDEX, NewJob, ROUNDS, check, lost_the_race, small, storable_time};
use super::error::{Error, Result};
use super::{Channel, Queue};

/// The most jobs that one statement of [`Queue::enqueue_many`] inserts.
pub const ENQUEUE_CHUNK: usize = 1000;
/// The most bytes of payloads in one statement, but for a single larger one.
const CHUNK_BYTES: usize = 16 * 1024 * 1024;

/// A job of a batch.
#[derive(Clone, Copy)]
struct Item<'a> {
    /// Its place in the batch.
    at: usize,
    id: Uuid,
    new: &'a NewJob,
}

impl Item<'_> {
    fn key(&self) -> Option<&str> {
        self.new.idempotency_key.as_deref()
    }

    /// Whether the table's own defaults are all that it asks for.
    fn is_plain(&self) -> bool {
        let NewJob {
            kind: _,
            payload: _,
            max_attempts,
            idempotency_key,
            run_at,
            priority,
            timeout_seconds,
            suspended,
            owner,
            last_retry,
        } = self.new;
        (*max_attempts, *priority, *timeout_seconds, *suspended) == (3, 0, 300, false)
            && idempotency_key.is_none()
            && run_at.is_none()
            && owner.is_none()
            && last_retry.is_none()
    }
}

impl Queue {
    /// Puts jobs into the queue: for each, - -> queued. The answers come in the order of the jobs.
    ///
    /// Guard, item by item: no live or succeeded row of the same install and key is there, and retention kept no such
    /// key. Of several items with one key the first makes the row, and the others are answered as if they had come
    /// after it.
    ///
    /// Outcomes: as [`Queue::enqueue`]'s, item by item. A refused item costs the others nothing.
    ///
    /// Items go in chunks of at most [`ENQUEUE_CHUNK`] jobs and 16 MiB of payloads. Each chunk is one statement, which
    /// takes effect as a whole or not at all, and a second one that looks for the holders of keys when not all items
    /// made rows; further ones when such a holder has freed its key meanwhile, at most five times. The chunks are no
    /// transaction together: after one that the database did not take, the rest is not tried and answered with the
    /// same error. Each statement has the time limit of an operation. Two batches with the same keys, in whatever
    /// order, wait for each other at most and are no deadlock.
    ///
    /// Safe to repeat for items with a key; a repeat of another item after an error of the database may make a second
    /// row. A connection that breaks is replaced once a chunk, and that makes no second row.
    ///
    /// # Errors
    /// For each item:
    /// [`Error::PayloadInvalid`], before anything of it is sent: a field is out of its range, or it has an
    /// [`Owner`](super::Owner): what a resource asks for is enqueued one by one.
    /// [`Error::IdempotencyConflict`]: the key's holder has another kind or payload; final.
    /// [`Error::KeyBeingFreed`]: the key's holder runs and was asked to stop; passing.
    /// [`Error::Db`], [`Error::Timeout`], [`Error::Batch`]: its chunk met an error of the database. It may be in the
    /// queue or not, as for [`Queue::enqueue`].
    pub async fn enqueue_many(&self, new: &[NewJob]) -> Vec<Result<EnqueueOutcome>> {
        let mut answers = Answers(new.iter().map(|_| None).collect());
        let mut chunk = Vec::with_capacity(new.len().min(ENQUEUE_CHUNK));
        let mut bytes = 0;
        let mut broken: Option<Error> = None;
        for (at, new) in new.iter().enumerate() {
            let size = match (check(new), &new.owner) {
                (Err(error), _) => {
                    answers.give(at, Err(error));
                    continue;
                }
                (Ok(_), Some(_)) => {
                    let problem = "is set: what a resource asks for is enqueued one by one";
                    answers.give(at, Err(Error::invalid("owner", problem)));
                    continue;
                }
                (Ok(size), None) => size,
            };
            if chunk.len() == ENQUEUE_CHUNK || (bytes + size > CHUNK_BYTES && !chunk.is_empty()) {
                self.enqueue_chunk(std::mem::take(&mut chunk), &mut answers, &mut broken).await;
                bytes = 0;
            }
            bytes += size;
            chunk.push(Item { at, id: Uuid::now_v7(), new });
        }
        self.enqueue_chunk(chunk, &mut answers, &mut broken).await;
        answers.0.into_iter().map(|answer| answer.unwrap_or_else(|| Err(lost_the_race()))).collect()
    }

    async fn enqueue_chunk(&self, items: Vec<Item<'_>>, answers: &mut Answers, broken: &mut Option<Error>) {
        let open = items.clone();
        let outcome = match broken {
            None => match self.try_chunk(items, answers).await {
                Err(error) if error.refuses_a_value() => self.one_by_one(&open, answers).await,
                outcome => outcome,
            },
            Some(error) => Err(error.again()),
        };
        if open.iter().any(|item| answers.is_created(item.at)) {
            self.notify(Channel::Ready);
        }
        if let Err(error) = outcome {
            for item in open {
                answers.0[item.at].get_or_insert_with(|| Err(error.again()));
            }
            *broken = Some(error);
        }
    }

    async fn try_chunk(&self, items: Vec<Item<'_>>, answers: &mut Answers) -> Result<()> {
        let mut open = items;
        let mut reconnected = false;
        for _ in 0..ROUNDS {
            if open.is_empty() {
                return Ok(());
            }
            let (first, mut rest) = first_of_each_key(open);
            let made = match self.bounded(self.insert_many(&first)).await {
                Err(error) if error.is_broken_connection() && !reconnected => {
                    reconnected = true;
                    self.bounded(self.insert_many(&first)).await
                }
                made => made,
            };
            let made = match made {
                // A trigger of the table found a key that retention has kept since: the next look sees it.
                Err(error) if error.violates(KEY_INDEX) => {
                    rest.extend(first);
                    open = rest;
                    continue;
                }
                made => made?,
            };
            for item in first {
                // Nothing but a first try whose reply was lost can stand in the way of an item without a key.
                if made.as_ref().is_none_or(|ids| ids.contains(&item.id)) || item.key().is_none() {
                    answers.give(item.at, Ok(EnqueueOutcome::Created(item.id)));
                } else {
                    rest.push(item);
                }
            }
            open = rest;
            if open.is_empty() {
                return Ok(());
            }
            let mut holders = self.bounded(self.holders_of_keys(&open)).await?;
            let mut freed = Vec::new();
            for (n, item) in (1..).zip(open) {
                match holders.remove(&n).map(Holder::shared) {
                    Some(Ok(id)) if id == item.id => answers.give(item.at, Ok(EnqueueOutcome::Created(id))),
                    Some(answer) => answers.give(item.at, answer.map(EnqueueOutcome::Existing)),
                    None => freed.push(item),
                }
            }
            open = freed;
        }
        Ok(())
    }

    /// The chunk was refused for one of its values, which no check of ours knows of (a database that is not in UTF-8):
    /// each item alone, to find it.
    async fn one_by_one(&self, items: &[Item<'_>], answers: &mut Answers) -> Result<()> {
        for item in items {
            if answers.0[item.at].is_some() {
                continue;
            }
            match self.bounded(self.enqueue_as(item.id, item.new)).await {
                Err(error) if error.is_passing() && !matches!(error, Error::KeyBeingFreed { .. }) => return Err(error),
                answer => answers.give(item.at, answer),
            }
        }
        Ok(())
    }

    /// One statement: the ids of the rows that it made; none stands for all of them.
    async fn insert_many(&self, items: &[Item<'_>]) -> Result<Option<HashSet<Uuid>>> {
        if items.is_empty() {
            return Ok(Some(HashSet::new()));
        }
        let ids: Vec<Uuid> = items.iter().map(|item| item.id).collect();
        let kinds: Vec<&str> = items.iter().map(|item| item.new.kind.as_str()).collect();
        let payloads: Vec<Json<&Value>> = items.iter().map(|item| Json(&item.new.payload)).collect();
        if items.iter().all(Item::is_plain) {
            let inserted = sqlx::query(
                "INSERT INTO jobs (id, kind, payload, install) \
                 SELECT i.id, i.kind, i.payload, $4 FROM unnest($1::uuid[], $2::text[], $3::jsonb[]) \
                     AS i(id, kind, payload)",
            )
            .bind(ids)
            .bind(kinds)
            .bind(payloads)
            .bind(&self.settings.install)
            .execute(&self.pool)
            .await
            .map_err(Error::from);
            return match inserted {
                Err(error) if !error.violates("jobs_pkey") => Err(error),
                // An id of ours is there: so an earlier try has inserted them.
                Ok(_) | Err(_) => Ok(None),
            };
        }
        // One snapshot sees a key's holder or, once that was purged, the kept key. A look for each item, by index: a
        // join planned while the table was small would read the whole of it later. Keys go in in their order: who
        // meets another batch waits for it at their first common key, and holds none behind it.
        let made: Vec<(Uuid,)> = sqlx::query_as(
            "INSERT INTO jobs (id, kind, payload, install, max_attempts, run_at, wanted_run_at, priority, \
                 timeout_seconds, suspended, last_retry, idempotency_key) \
             SELECT i.id, i.kind, i.payload, $4, i.max_attempts, coalesce(i.run_at, now()), i.run_at, i.priority, \
                 i.timeout_seconds, i.suspended, i.last_retry, i.key \
             FROM unnest($1::uuid[], $2::text[], $3::jsonb[], $5::int[], $6::timestamptz[], $7::smallint[], \
                     $8::int[], $9::boolean[], $10::text[], $11::text[]) WITH ORDINALITY \
                 AS i(id, kind, payload, max_attempts, run_at, priority, timeout_seconds, suspended, last_retry, key, n) \
             WHERE (SELECT k.job_id FROM job_keys k \
                     WHERE k.install = $4 AND k.namespace = '' AND k.idempotency_key = i.key LIMIT 1) IS NULL \
               AND (SELECT h.id FROM jobs h \
                     WHERE h.install = $4 AND coalesce(h.namespace, '') = '' AND h.idempotency_key = i.key \
                       AND h.status NOT IN ('failed_permanent', 'cancelled') LIMIT 1) IS NULL \
             ORDER BY i.n ON CONFLICT DO NOTHING RETURNING id",
        )
        .bind(ids)
        .bind(kinds)
        .bind(payloads)
        .bind(&self.settings.install)
        .bind(items.iter().map(|item| small(item.new.max_attempts)).collect::<Vec<_>>())
        .bind(items.iter().map(|item| item.new.run_at.map(storable_time)).collect::<Vec<_>>())
        .bind(items.iter().map(|item| item.new.priority).collect::<Vec<_>>())
        .bind(items.iter().map(|item| small(item.new.timeout_seconds)).collect::<Vec<_>>())
        .bind(items.iter().map(|item| item.new.suspended).collect::<Vec<_>>())
        .bind(items.iter().map(|item| item.new.last_retry.as_deref()).collect::<Vec<_>>())
        .bind(items.iter().map(Item::key).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await?;
        Ok(Some(made.into_iter().map(|(id,)| id).collect()))
    }

    /// Who holds the items' keys now, by the item's number from 1. Nobody is waited for.
    async fn holders_of_keys(&self, items: &[Item<'_>]) -> Result<HashMap<i64, Holder>> {
        let holders: Vec<HolderOf> = sqlx::query_as(
            "SELECT i.n, h.id, h.same_work, h.ending \
             FROM unnest($2::text[], $3::text[], $4::jsonb[]) WITH ORDINALITY AS i(key, kind, payload, n) \
             JOIN LATERAL ( \
                 SELECT j.id, j.kind = i.kind AND j.payload = i.payload AS same_work, \
                     j.cancel_requested AND j.status = 'running' AS ending, 1 AS place \
                 FROM jobs j WHERE j.install = $1 AND coalesce(j.namespace, '') = '' AND j.idempotency_key = i.key \
                   AND j.status NOT IN ('failed_permanent', 'cancelled') \
                 UNION ALL \
                 SELECT k.job_id, k.kind = i.kind \
                     AND k.payload_sha256 = sha256(convert_to(i.payload::text, 'UTF8')), false, 2 \
                 FROM job_keys k WHERE k.install = $1 AND k.namespace = '' AND k.idempotency_key = i.key \
                 ORDER BY place LIMIT 1) h ON true",
        )
        .bind(&self.settings.install)
        .bind(items.iter().map(Item::key).collect::<Vec<_>>())
        .bind(items.iter().map(|item| item.new.kind.as_str()).collect::<Vec<_>>())
        .bind(items.iter().map(|item| Json(&item.new.payload)).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await?;
        Ok(holders.into_iter().map(|HolderOf { n, holder }| (n, holder)).collect())
    }
}

#[derive(sqlx::FromRow)]
struct HolderOf {
    n: i64,
    #[sqlx(flatten)]
    holder: Holder,
}

/// One for each item, given once.
struct Answers(Vec<Option<Result<EnqueueOutcome>>>);

impl Answers {
    fn give(&mut self, at: usize, answer: Result<EnqueueOutcome>) {
        self.0[at] = Some(answer);
    }

    fn is_created(&self, at: usize) -> bool {
        matches!(self.0[at], Some(Ok(EnqueueOutcome::Created(_))))
    }
}

/// Those to be inserted, in the order of their keys, those without one first and as they came; and those whose key an
/// earlier item of the batch has.
fn first_of_each_key(mut items: Vec<Item<'_>>) -> (Vec<Item<'_>>, Vec<Item<'_>>) {
    if items.iter().all(|item| item.key().is_none()) {
        return (items, Vec::new());
    }
    items.sort_by(|a, b| (a.key(), a.at).cmp(&(b.key(), b.at)));
    let mut last = None;
    items.into_iter().partition(|item| match item.new.idempotency_key.as_deref() {
        None => true,
        key => std::mem::replace(&mut last, key) != key,
    })
}
