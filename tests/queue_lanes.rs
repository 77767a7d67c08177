//! Surveys find the first job of each lane; claims from lanes take what they name and nothing else.

mod support;

use std::time::Duration;

use jobrequest::queue::{ClaimedJob, Lane, LaneHead, NewJob, Payloads, Queue, SurveyFrom, Want};
use serde_json::json;
use support::db::{Database, job};

const MANY: usize = 1000;

async fn survey(queue: &Queue, kinds: &[&str], per_kind: usize) -> Vec<LaneHead> {
    let from: Vec<_> = kinds.iter().map(|kind| SurveyFrom { kind: (*kind).to_owned(), after: None }).collect();
    queue.survey(&from, per_kind).await.expect("answered")
}

fn want(lane: &Lane, limit: usize) -> Want {
    Want { lane: lane.clone(), from: None, limit }
}

async fn claim(queue: &Queue, wants: &[Want], limit: usize) -> Vec<ClaimedJob> {
    queue.claim_from("w1", wants, limit, Payloads::All).await.expect("answered")
}

async fn enqueue(queue: &Queue, new: NewJob) -> uuid::Uuid {
    queue.enqueue(&new).await.expect("accepted").id()
}

fn lane(namespace: &str, priority: i16) -> Lane {
    Lane { kind: "test_kind".to_owned(), namespace: namespace.to_owned(), careful: false, priority }
}

async fn in_namespace(db: &Database, namespace: &str, priority: i16, jobs: i32) {
    db.run(&format!(
        "INSERT INTO jobs (kind, payload, namespace, priority) SELECT 'test_kind', '{{}}', '{namespace}', {priority} \
         FROM generate_series(1, {jobs})"
    ))
    .await;
}

#[tokio::test]
async fn a_survey_names_each_lane_once_with_its_first_job_and_when_that_is_due() {
    let db = Database::new().await;
    let queue = db.queue();
    in_namespace(&db, "b", 0, 3).await;
    in_namespace(&db, "a", 5, 2).await;
    in_namespace(&db, "a", -5, 2).await;
    let first = enqueue(&queue, job()).await;
    enqueue(&queue, job()).await;
    let last_chance = enqueue(&queue, NewJob { max_attempts: 1, ..job() }).await;
    db.run("INSERT INTO jobs (kind, payload, run_at) VALUES ('test_kind', '{}', now() + interval '1 hour')").await;
    db.run("INSERT INTO jobs (kind, payload, suspended) VALUES ('other', '{}', true)").await;
    db.run("INSERT INTO jobs (kind, payload, run_at) VALUES ('later', '{}', now() + interval '1 hour')").await;

    let heads = survey(&queue, &["later", "other", "test_kind"], MANY).await;
    let lanes: Vec<Lane> = heads.iter().map(|head| head.lane.clone()).collect();
    let later = Lane { kind: "later".to_owned(), ..lane("", 0) };
    let careful = Lane { careful: true, ..lane("", 0) };
    assert_eq!(lanes, [later, lane("", 0), careful.clone(), lane("a", -5), lane("a", 5), lane("b", 0)]);
    assert!(heads[0].due_in > Duration::from_secs(3500), "{:?}", heads[0]);
    assert!(heads[1..].iter().all(|head| head.due_in.is_zero()));
    let one = claim(&queue, &[want(&lane("", 0), 1)], 1).await.pop().expect("it is due");
    assert_eq!((one.id(), one.mark()), (first, heads[1].mark));
    assert_eq!(claim(&queue, &[want(&careful, 9)], 9).await[0].id(), last_chance);
}

#[tokio::test]
async fn a_survey_goes_on_behind_the_lane_where_it_stopped() {
    let db = Database::new().await;
    let queue = db.queue();
    for namespace in ["a", "b", "c", "d", "e"] {
        in_namespace(&db, namespace, 0, 2).await;
        in_namespace(&db, namespace, 1, 2).await;
    }
    let mut seen: Vec<Lane> = Vec::new();
    loop {
        let from = SurveyFrom { kind: "test_kind".to_owned(), after: seen.last().cloned() };
        let page = queue.survey(&[from], 3).await.expect("answered");
        let full = page.len() == 3;
        seen.extend(page.into_iter().map(|head| head.lane));
        if !full {
            break;
        }
    }
    let all: Vec<Lane> = ["a", "b", "c", "d", "e"].iter().flat_map(|ns| [lane(ns, 0), lane(ns, 1)]).collect();
    assert_eq!(seen, all);
}

#[tokio::test]
async fn a_claim_takes_from_each_lane_its_limit_in_the_order_given_and_its_own_limit_in_all() {
    let db = Database::new().await;
    let queue = db.queue();
    in_namespace(&db, "a", 0, 5).await;
    in_namespace(&db, "b", 0, 5).await;
    in_namespace(&db, "c", 0, 5).await;
    let wants = [want(&lane("b", 0), 2), want(&lane("missing", 0), 2), want(&lane("a", 0), 3), want(&lane("c", 0), 5)];
    let mut jobs = claim(&queue, &wants, 7).await;
    jobs.sort_by_key(ClaimedJob::mark);
    let count = |namespace| jobs.iter().filter(|job| job.namespace() == Some(namespace)).count();
    assert_eq!((count("a"), count("b"), count("c")), (3, 2, 2));
    assert!(jobs.iter().all(|job| job.attempt() == 1 && job.lane().priority == 0));
}

#[tokio::test]
async fn a_claim_from_a_mark_on_leaves_what_lies_before_it_to_the_next_survey() {
    let db = Database::new().await;
    let queue = db.queue();
    in_namespace(&db, "a", 0, 4).await;
    let first = claim(&queue, &[want(&lane("a", 0), 2)], 2).await;
    let mark = first.iter().map(ClaimedJob::mark).max().expect("two");
    db.run(
        "INSERT INTO jobs (kind, payload, namespace, run_at) \
         VALUES ('test_kind', '{}', 'a', now() - interval '1 day')",
    )
    .await;
    let from = Want { from: Some(mark), ..want(&lane("a", 0), 9) };
    assert_eq!(claim(&queue, &[from], 9).await.len(), 2);
    let heads = survey(&queue, &["test_kind"], MANY).await;
    assert!(heads.len() == 1 && heads[0].mark < mark, "{heads:?}");
    let from = Want { from: Some(heads[0].mark), ..want(&lane("a", 0), 9) };
    assert_eq!(claim(&queue, &[from], 9).await.len(), 1);
}

#[tokio::test]
async fn a_large_payload_is_left_out_of_a_prefetch_and_loaded_while_the_claim_stands() {
    let db = Database::new().await;
    let queue = db.queue();
    let (small, large) = (json!({"n": 1}), json!({"text": "a".repeat(5000)}));
    let ids = [
        enqueue(&queue, NewJob::new("test_kind", small)).await,
        enqueue(&queue, NewJob::new("test_kind", large)).await,
    ];
    let mut jobs = queue.claim_from("w1", &[want(&lane("", 0), 9)], 9, Payloads::Small).await.expect("answered");
    jobs.sort_by_key(ClaimedJob::mark);
    let [first, second] = &mut jobs[..] else { panic!("two jobs") };
    assert_eq!((first.id(), second.id()), (ids[0], ids[1]));
    assert!(first.payload().is_some() && second.payload().is_none());
    queue.load_payload(second).await.expect("the claim stands");
    assert_eq!(second.payload().expect("it is there now").get().len(), 5012);
    db.run("UPDATE jobs SET claim_token = NULL").await;
    let mut lost = queue.claim_from("w2", &[want(&lane("", 0), 9)], 9, Payloads::Small).await.expect("answered");
    assert!(lost.pop().is_none(), "they are running");
}
