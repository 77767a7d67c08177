//! Every operation of the queue, on one scene that has a row for each of them; and what the tables hold, to be compared.

use futures::future::BoxFuture;
use jobrequest::job::Cause;
use jobrequest::queue::{
    AttemptEnd, ClaimTicket, ClaimedJob, Error, Finish, ListFilter, NewJob, Owner, Payloads, Queue, SpecEdit,
    SurveyFrom, Unfinished, Want,
};
use serde_json::json;
use uuid::Uuid;

use crate::db::{Database, failure, goes_through_pooler, settings};
use crate::proxy::{Cut, Proxy};

/// The row, and the resource, of this number.
pub fn id(n: u32) -> Uuid {
    Uuid::from_u128(0x0000_0000_0000_7000_8000_0000_0000_0000 + u128::from(n))
}

fn uid(n: u32) -> Uuid {
    Uuid::from_u128(0x0000_0000_0000_4000_8000_0000_0000_0000 + u128::from(n))
}

/// What an operation has in hand: five claims, of rows 2 to 6, and what became of earlier tries.
pub struct Hand {
    pub claims: Vec<ClaimedJob>,
    ticket: Option<ClaimTicket>,
}

type Act = for<'a> fn(&'a Queue, &'a mut Hand) -> BoxFuture<'a, Result<(), Error>>;

pub struct Operation {
    pub name: &'static str,
    /// One try. After an error it is called again, and does what the operation's docs say of that.
    pub act: Act,
    /// A repeat after a lost reply makes another job.
    pub repeats_make_more: bool,
    /// More than one statement on its own: each row is done or not.
    pub row_by_row: bool,
    /// A repeat raises the revision once more, and shows what is shown already.
    pub repeats_show_again: bool,
    /// It needs a claim whose reply was lost.
    lost_claim: bool,
}

const fn operation(name: &'static str, act: Act) -> Operation {
    Operation { name, act, repeats_make_more: false, row_by_row: false, repeats_show_again: false, lost_claim: false }
}

/// More bytes than come with a claim that wants small payloads only. Row 2 has more.
const LARGE: usize = 4096;

/// Empties the tables and sets the scene.
const SCENE: &str = "
    DELETE FROM job_resources; DELETE FROM job_keys; DELETE FROM jobs; DELETE FROM job_releases; DELETE FROM job_installs;
    INSERT INTO jobs (id, kind, payload, namespace, owner_uid, idempotency_key, max_attempts)
    SELECT job_id(n), CASE WHEN n BETWEEN 2 AND 6 THEN 'held_kind' ELSE 'test_kind' END, jsonb_build_object('n', n)
            || CASE WHEN n = 2 THEN jsonb_build_object('large', repeat('x', 5000)) ELSE '{}' END,
        CASE WHEN uid THEN 'shop' END, CASE WHEN uid THEN resource_id(n) END, key, 3
    FROM (VALUES (1, true, NULL), (2, false, NULL), (3, false, NULL), (4, false, NULL), (5, true, NULL), (6, false, NULL),
        (7, false, 'k7'), (8, true, NULL), (9, false, NULL), (10, false, NULL), (11, true, 'k11'), (12, true, 'k12'),
        (14, false, 'k14'), (16, true, NULL), (17, false, NULL)) AS s(n, uid, key);
    UPDATE jobs SET status = 'failed_permanent', attempts = 3, finished_at = now(), last_error = 'no'
    WHERE id IN (job_id(7), job_id(14));
    INSERT INTO jobs (id, kind, payload, idempotency_key) VALUES (job_id(15), 'test_kind', '{\"n\": 15}', 'k14');
    UPDATE jobs SET status = 'running', claim_token = gen_random_uuid(), locked_by = 'dead', started_at = now(),
        locked_at = now() - interval '1 h', attempts = CASE WHEN id = job_id(9) THEN 3 ELSE 1 END,
        cancel_requested = id = job_id(10)
    WHERE id IN (job_id(8), job_id(9), job_id(10));
    UPDATE jobs SET status = 'succeeded', result = '1', attempts = 1, finished_at = now() - interval '30 d'
    WHERE id = job_id(11);
    UPDATE jobs SET status = 'succeeded', result = '1', attempts = 1, finished_at = now(), revision = 3, mirror_due = true
    WHERE id IN (job_id(16), job_id(17));
    INSERT INTO job_resources (uid, job_id, install, namespace, name, mirrored_revision)
    SELECT resource_id(n), job_id(job), 'default', 'shop', 'r' || n, shown
    FROM (VALUES (1, 1, 1), (5, 5, 1), (8, 8, 1), (11, 11, 1), (12, 12, 1), (13, 12, 1), (16, 16, 1), (17, 17, 3),
        (30, 30, 1)) AS s(n, job, shown);
    INSERT INTO job_releases (uid, released_at) VALUES (resource_id(40), now() - interval '1 d');
    INSERT INTO job_installs (install, cluster) VALUES ('default', 'old');";

/// What the scene's SQL calls rows and resources.
pub const NAMES: &str = "
    CREATE FUNCTION job_id(n integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS
        $$ SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid $$;
    CREATE FUNCTION resource_id(n integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS
        $$ SELECT ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid $$;";

/// A database for scenes.
pub async fn stage() -> Database {
    let db = Database::new().await;
    db.run(NAMES).await;
    // Thousands of commits, and the server never crashes here.
    db.run(&format!("ALTER DATABASE {} SET synchronous_commit = off", db.name())).await;
    db
}

/// Sets the scene anew.
pub async fn prepare(db: &Database, queue: &Queue, operation: &Operation) -> Hand {
    db.run(SCENE).await;
    let wants = wants(queue, "held_kind", 9).await.expect("the scene is set");
    let mut claims = queue.claim_from("w1", &wants, 9, Payloads::Small).await.expect("the scene is set");
    claims.sort_by_key(ClaimedJob::id);
    assert_eq!(claims.len(), 5, "the scene is set");
    let ticket = match operation.lost_claim {
        true => Some(lost_claim(db).await),
        false => None,
    };
    db.run(&format!(
        "UPDATE jobs SET locked_at = now() - interval '9 s' WHERE locked_by = 'w1'; \
         UPDATE jobs SET cancel_requested = true WHERE id = '{}'",
        id(6)
    ))
    .await;
    Hand { claims, ticket }
}

/// So many from each lane where jobs of this kind are due.
async fn wants(queue: &Queue, kind: &str, limit: usize) -> Result<Vec<Want>, Error> {
    let heads = queue.survey(&[SurveyFrom { kind: kind.to_owned(), after: None }], 9).await?;
    Ok(heads.into_iter().map(|head| Want { lane: head.lane, from: None, limit }).collect())
}

async fn lost_claim(db: &Database) -> ClaimTicket {
    let proxy = Proxy::before(&db.queue_options()).await;
    let queue = Queue::new(proxy.options(db.queue_options()), settings(|_| {}));
    // Prepared, then run; within BEGIN and COMMIT through a pooler.
    proxy.cut(Cut::After, if goes_through_pooler() { 4 } else { 2 });
    queue.fetch_many("w1", &["test_kind"], 2).await.expect_err("its reply is lost").ticket
}

/// What the tables hold, a line for each row, without what differs from run to run: times, tokens, new ids.
pub async fn tables(db: &Database) -> Vec<String> {
    let lines: Vec<(String,)> = sqlx::query_as(
        "SELECT 'job ' || concat_ws(' ', payload ->> 'n', \
             (to_jsonb(j) - '{id,run_at,locked_at,claim_token,created_at,updated_at,started_at,finished_at, \
                              handed_back_at,wanted_run_at,history}'::text[])::text, \
             'lease', locked_at > now() - interval '5 s', 'token', claim_token IS NOT NULL, \
             'started', started_at IS NOT NULL, 'finished', finished_at IS NOT NULL, \
             'handed back', handed_back_at IS NOT NULL, 'wanted', wanted_run_at IS NOT NULL, \
             (SELECT jsonb_agg(h - 'from' - 'to') FROM jsonb_array_elements(history) h)) \
         FROM jobs j \
         UNION ALL SELECT 'resource ' || concat_ws(' ', r.name, mirrored_revision, released, 'of', payload ->> 'n') \
         FROM job_resources r LEFT JOIN jobs j ON j.id = r.job_id \
         UNION ALL SELECT 'key ' || concat_ws(' ', namespace, idempotency_key) FROM job_keys \
         UNION ALL SELECT 'release ' || uid FROM job_releases \
         UNION ALL SELECT 'install ' || concat_ws(' ', install, cluster) FROM job_installs ORDER BY 1",
    )
    .fetch_all(db.pool())
    .await
    .expect("answered");
    lines.into_iter().map(|(line,)| line).collect()
}

fn new(n: u32) -> NewJob {
    NewJob::new("test_kind", json!({ "n": n }))
}

fn owned(n: u32) -> NewJob {
    let owner = Owner { uid: uid(n), namespace: "shop".to_owned(), name: format!("r{n}") };
    NewJob { owner: Some(owner), ..new(n) }
}

/// A finish that is tried again is given the claim that came back.
async fn finish(
    hand: &mut Hand,
    at: usize,
    finish: impl AsyncFnOnce(ClaimedJob) -> Result<Finish, Box<Unfinished>>,
) -> Result<(), Error> {
    match finish(hand.claims.remove(at)).await {
        Ok(Finish::Done(_)) => Ok(()),
        Ok(Finish::Lost) => panic!("the lease is nobody else's"),
        Err(unfinished) => {
            let Unfinished { job, error } = *unfinished;
            hand.claims.insert(at, job);
            Err(error)
        }
    }
}

async fn claim(
    queue: &Queue,
    hand: &mut Hand,
    claim: impl AsyncFnOnce() -> Result<Vec<ClaimedJob>, jobrequest::queue::ClaimError>,
) -> Result<(), Error> {
    // A claim that may have taken effect is looked for before the next one.
    if let Some(ticket) = hand.ticket {
        let taken_up = queue.take_up(ticket).await?;
        hand.ticket = None;
        if !taken_up.is_empty() {
            assert_eq!(taken_up.len(), 2, "claimed whole");
            return Ok(());
        }
    }
    match claim().await {
        Ok(_) => Ok(()),
        Err(error) => {
            hand.ticket = Some(error.ticket);
            Err(error.error)
        }
    }
}

/// In no order.
pub const OPERATIONS: &[Operation] = &[
    Operation {
        repeats_make_more: true,
        ..operation("enqueue", |queue, _| Box::pin(async { queue.enqueue(&new(20)).await.map(drop) }))
    },
    operation("enqueue with a key", |queue, _| {
        Box::pin(async {
            let new = NewJob { idempotency_key: Some("k20".to_owned()), ..new(20) };
            queue.enqueue(&new).await.map(drop)
        })
    }),
    operation("enqueue_many with keys", |queue, _| {
        Box::pin(async {
            let keyed = |n, key: &str| NewJob { idempotency_key: Some(key.to_owned()), ..new(n) };
            let batch = [keyed(20, "k20"), keyed(15, "k14"), keyed(22, "k22"), keyed(20, "k20")];
            queue.enqueue_many(&batch).await.into_iter().try_for_each(|answer| answer.map(drop))
        })
    }),
    Operation {
        repeats_make_more: true,
        ..operation("enqueue_many", |queue, _| {
            Box::pin(async { queue.enqueue_many(&[new(20), new(21)]).await.into_iter().try_for_each(|a| a.map(drop)) })
        })
    },
    operation("enqueue for a resource", |queue, _| Box::pin(async { queue.enqueue(&owned(20)).await.map(drop) })),
    operation("enqueue for a resource that has a row", |queue, _| {
        Box::pin(async { queue.enqueue(&owned(1)).await.map(drop) })
    }),
    operation("enqueue for a resource that shares a row", |queue, _| {
        Box::pin(async {
            let shared = NewJob { idempotency_key: Some("k12".to_owned()), payload: json!({"n": 12}), ..owned(21) };
            queue.enqueue(&shared).await.map(drop)
        })
    }),
    operation("fetch_many", |queue, hand| {
        Box::pin(async { claim(queue, hand, async || queue.fetch_many("w1", &["test_kind"], 2).await).await })
    }),
    operation("survey and claim_from", |queue, hand| {
        Box::pin(async {
            let wants = wants(queue, "test_kind", 1).await?;
            claim(queue, hand, async || queue.claim_from("w1", &wants, 2, Payloads::All).await).await
        })
    }),
    Operation {
        lost_claim: true,
        ..operation("take_up", |queue, hand| {
            Box::pin(async {
                let ticket = hand.ticket.expect("of the claim whose reply was lost");
                let found = queue.take_up(ticket).await?;
                assert_eq!(found.len(), 2);
                Ok(())
            })
        })
    },
    operation("heartbeat", |queue, hand| {
        Box::pin(async {
            let leases: Vec<_> = hand.claims.iter().map(ClaimedJob::lease).collect();
            assert_eq!(queue.heartbeat(&leases).await?.len(), 5, "no lease is lost");
            Ok(())
        })
    }),
    operation("look_for_cancels", |queue, hand| {
        Box::pin(async {
            let leases: Vec<_> = hand.claims.iter().map(ClaimedJob::lease).collect();
            assert_eq!(queue.look_for_cancels(&leases).await?.len(), 5, "no lease is lost");
            Ok(())
        })
    }),
    operation("load_payload", |queue, hand| {
        Box::pin(async {
            assert!(hand.claims[0].payload().is_none(), "claimed without");
            queue.load_payload(&mut hand.claims[0]).await?;
            assert!(hand.claims[0].payload().is_some_and(|payload| payload.get().len() > LARGE));
            Ok(())
        })
    }),
    operation("mark_succeeded", |queue, hand| {
        Box::pin(finish(hand, 0, async |job| queue.mark_succeeded(job, &json!(1)).await))
    }),
    operation("mark_failed_or_retry, passing", |queue, hand| {
        Box::pin(finish(hand, 0, async |job| queue.mark_failed_or_retry(job, &failure(Cause::Passing)).await))
    }),
    operation("mark_failed_or_retry, permanent", |queue, hand| {
        Box::pin(finish(hand, 0, async |job| queue.mark_failed_or_retry(job, &failure(Cause::Permanent)).await))
    }),
    operation("mark_failed_or_retry, handed back", |queue, hand| {
        Box::pin(finish(hand, 0, async |job| queue.mark_failed_or_retry(job, &failure(Cause::HandBack)).await))
    }),
    operation("finalize_cancelled", |queue, hand| {
        Box::pin(finish(hand, 4, async |job| queue.finalize_cancelled(job).await))
    }),
    Operation {
        row_by_row: true,
        ..operation("finish_many", |queue, hand| {
            Box::pin(async {
                let ends = std::mem::take(&mut hand.claims).into_iter().map(|job| {
                    let failed = job.id() == id(3) || job.id() == id(4);
                    let end = match failed {
                        true => AttemptEnd::Failed(failure(Cause::Passing)),
                        false => AttemptEnd::Succeeded(json!(1)),
                    };
                    (job, end)
                });
                let mut first = Ok(());
                for answer in queue.finish_many(ends.collect()).await {
                    match answer {
                        Ok(Finish::Done(_)) => {}
                        Ok(Finish::Lost) => panic!("the lease is nobody else's"),
                        Err(unfinished) => {
                            let Unfinished { job, error } = *unfinished;
                            hand.claims.push(job);
                            first = first.and(Err(error));
                        }
                    }
                }
                first
            })
        })
    },
    operation("request_cancel of a waiting job", |queue, _| {
        Box::pin(async { queue.request_cancel(id(1)).await.map(drop) })
    }),
    operation("request_cancel of a running job", |queue, _| {
        Box::pin(async { queue.request_cancel(id(2)).await.map(drop) })
    }),
    operation("retry", |queue, _| Box::pin(async { queue.retry(id(7), "mark").await.map(drop) })),
    operation("retry of a job whose key is taken", |queue, _| {
        Box::pin(async { queue.retry(id(14), "mark").await.map(drop) })
    }),
    operation("retry_by_hand", |queue, _| {
        Box::pin(async {
            match queue.retry_by_hand(id(7)).await {
                // It was done, unheard.
                Err(Error::InvalidTransition { .. }) => Ok(()),
                answer => answer.map(drop),
            }
        })
    }),
    operation("recover_stale", |queue, _| Box::pin(async { queue.recover_stale().await.map(drop) })),
    operation("purge", |queue, _| Box::pin(async { queue.purge().await.map(drop) })),
    Operation {
        repeats_show_again: true,
        ..operation("edit_waiting", |queue, _| {
            Box::pin(async {
                let edit =
                    SpecEdit { priority: 7, suspended: true, max_attempts: 9, timeout_seconds: 60, run_at: None };
                queue.edit_waiting(uid(1), edit).await.map(drop)
            })
        })
    },
    operation("release of a waiting job", |queue, _| Box::pin(async { queue.release(uid(1)).await.map(drop) })),
    operation("release of a running job", |queue, _| Box::pin(async { queue.release(uid(5)).await.map(drop) })),
    operation("release of a shared job", |queue, _| Box::pin(async { queue.release(uid(12)).await.map(drop) })),
    operation("acknowledge", |queue, _| Box::pin(async { queue.acknowledge(uid(16), 3).await.map(drop) })),
    operation("bind_install", |queue, _| Box::pin(async { queue.bind_install("new", Some("old")).await.map(drop) })),
    operation("forget_releases", |queue, _| Box::pin(async { queue.forget_releases().await })),
    operation("due", |queue, _| Box::pin(async { queue.due(None, 100).await.map(drop) })),
    operation("forget_vanished", |queue, _| Box::pin(async { queue.forget_vanished(uid(30)).await })),
    operation("held", |queue, _| Box::pin(async { queue.held(uid(1)).await.map(drop) })),
    operation("holders", |queue, _| {
        Box::pin(async {
            queue.holders_of_live_rows(Uuid::nil(), 9).await?;
            queue.holders_of_vanished_rows(Uuid::nil(), 9).await.map(drop)
        })
    }),
    operation("get and list", |queue, _| {
        Box::pin(async {
            queue.get(id(1)).await?;
            queue.list(&ListFilter::default()).await.map(drop)
        })
    }),
    operation("depth and now", |queue, _| {
        Box::pin(async {
            queue.depth().await?;
            queue.now().await.map(drop)
        })
    }),
    operation("schema_state", |queue, _| Box::pin(async { queue.schema_state().await.map(drop) })),
];

/// More requests than any operation has, and more tries than any needs.
pub const MANY: usize = 100;

/// Does it again for as long as the error says that it passes: a server may still be busy with the end of the try before,
/// and holds its rows until then.
pub async fn repeat(queue: &Queue, operation: &Operation, hand: &mut Hand, what: &str) {
    let mut last = None;
    for _ in 0..MANY {
        match (operation.act)(queue, hand).await {
            Ok(()) => return,
            Err(error) => {
                assert!(error.is_passing(), "{what} repeated: {error}");
                last = Some(error);
            }
        }
    }
    panic!("{what} repeated: {last:?}");
}

/// The scene before, and after the operation was done once.
pub struct Expected {
    pub before: Vec<String>,
    pub done: Vec<String>,
}

impl Expected {
    pub async fn of(db: &Database, queue: &Queue, operation: &Operation) -> Self {
        let mut hand = prepare(db, queue, operation).await;
        let before = tables(db).await;
        repeat(queue, operation, &mut hand, operation.name).await;
        Self { before, done: tables(db).await }
    }

    /// Done is what was before: it finds out, or finds what it wants there already.
    pub fn is_no_change(&self) -> bool {
        self.before == self.done
    }

    /// Done once or not at all; true if done.
    pub fn is_done(&self, what: &str, operation: &Operation, found: &[String]) -> bool {
        if found == self.done {
            return true;
        }
        let row_by_row = operation.row_by_row
            && found.len() == self.done.len()
            && found.iter().all(|line| self.before.contains(line) || self.done.contains(line));
        if found != self.before && !row_by_row {
            self.fail(what, "is half done", found);
        }
        false
    }

    pub fn must_be_done(&self, what: &str, operation: &Operation, found: &[String]) {
        let shown = |lines: &[String]| {
            let revision = |line: &String| match line.split_once("\"revision\": ") {
                Some((start, rest)) => format!("{start}{}", rest.trim_start_matches(|c: char| c.is_ascii_digit())),
                None => line.clone(),
            };
            lines.iter().map(revision).collect::<Vec<_>>()
        };
        if found != self.done && !(operation.repeats_show_again && shown(found) == shown(&self.done)) {
            self.fail(what, "was repeated and is not done once", found);
        }
    }

    fn fail(&self, what: &str, how: &str, found: &[String]) -> ! {
        let more: Vec<_> = found.iter().filter(|line| !self.done.contains(line)).collect();
        let less: Vec<_> = self.done.iter().filter(|line| !found.contains(line)).collect();
        panic!("{what} {how}; instead of {less:#?} there is {more:#?}")
    }
}
