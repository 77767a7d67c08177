//! The queue's operations without a worker, and a bare insert beside them.

use std::time::Instant;

use jobrequest::job::Status;
use jobrequest::queue::{AttemptEnd, Finish, NewJob, Queue};
use serde_json::Value;
use sqlx::postgres::PgConnectOptions;
use sqlx::types::Json;
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::{BARE_BATCH, KINDS, new_job};
use crate::{Failed, Outcome, protocol};

/// `enqueue_many` of so many, one after the other.
pub async fn bulk(queue: &Queue, jobs: u64, batch: u64) -> Outcome<()> {
    let new: Vec<NewJob> = (0..batch).map(|_| new_job(0)).collect();
    let enqueue = async || -> Outcome<()> {
        for outcome in queue.enqueue_many(&new).await {
            outcome?;
        }
        Ok(())
    };
    in_batches(jobs / batch, enqueue).await
}

/// So many, one after the other, and prints `seconds`.
async fn in_batches(batches: u64, mut batch: impl AsyncFnMut() -> Outcome<()>) -> Outcome<()> {
    for _ in 0..5 {
        batch().await?;
    }
    protocol::ready();
    let start = Instant::now();
    for _ in 0..batches {
        batch().await?;
    }
    protocol::say(&format!("seconds {}", start.elapsed().as_secs_f64()));
    Ok(())
}

/// The same rows without the queue, in as little as the table takes: what `enqueue_many` is measured against.
pub async fn insert(database: PgConnectOptions, jobs: u64, batch: u64) -> Outcome<()> {
    let mut connection = PgConnection::connect_with(&database).await?;
    let jobs_of_a_batch: Vec<NewJob> = (0..batch).map(|_| new_job(0)).collect();
    let insert = async || -> Outcome<()> {
        let columns = jobs_of_a_batch.iter().map(|job| (Uuid::now_v7(), job.kind.as_str(), Json(&job.payload)));
        let (ids, (kinds, payloads)): (Vec<_>, (Vec<_>, Vec<_>)) =
            columns.map(|(id, kind, payload)| (id, (kind, payload))).unzip();
        sqlx::query("INSERT INTO jobs (id, kind, payload) SELECT * FROM unnest($1::uuid[], $2::text[], $3::jsonb[])")
            .bind(ids)
            .bind(kinds)
            .bind(payloads)
            .execute(&mut connection)
            .await?;
        Ok(())
    };
    in_batches(jobs / batch, insert).await
}

/// The queue's claim and finish in batches, without a worker: how much the worker costs.
pub async fn bare(queue: &Queue) -> Outcome<()> {
    protocol::ready();
    protocol::report_done();
    let to_end = |job| (job, AttemptEnd::Succeeded(Value::Null));
    let drain = async |queue: &Queue| -> Outcome<()> {
        loop {
            let jobs = queue.fetch_many("bare", &KINDS, BARE_BATCH).await?;
            if jobs.is_empty() {
                return Ok(());
            }
            protocol::count(jobs.len() as u64);
            let mut ends: Vec<_> = jobs.into_iter().map(to_end).collect();
            while !ends.is_empty() {
                let answers = queue.finish_many(std::mem::take(&mut ends)).await;
                for answer in answers {
                    match answer {
                        Ok(finish) => expect_success(finish)?,
                        // The other connection's claim looked at the row just now.
                        Err(unfinished) if unfinished.error.is_passing() => ends.push(to_end(unfinished.job)),
                        Err(unfinished) => return Err(unfinished.error.into()),
                    }
                }
            }
        }
    };
    tokio::try_join!(drain(queue), drain(queue))?;
    protocol::told_to_end().await;
    Ok(())
}

fn expect_success(finish: Finish) -> Outcome<()> {
    match finish {
        Finish::Done(Status::Succeeded) => Ok(()),
        other => Err(Failed::from(format!("a finish came to {other:?}"))),
    }
}
