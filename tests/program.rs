//! The program as people run it: processes that are killed and told to end, settings that can't be used, a database
//! that is not there yet.

#[path = "support/sink.rs"]
#[allow(dead_code)]
mod sink;
mod support;

use std::time::{Duration, Instant};

use jobrequest::queue::NewJob;
use serde_json::json;
use sink::Sink;
use support::db::Database;
use support::program::{Program, ended, output};
use support::proxy::{Proxy, Way};
use tokio::time::sleep;
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(20);

/// A worker with leases of two seconds that may call the tests' receivers.
fn worker(db: &Database, more: &[(&str, &str)]) -> Program {
    let url = db.url();
    let own = [
        ("DATABASE_URL", url.as_str()),
        ("JOBREQUEST_LEASE_SECONDS", "2"),
        ("JOBREQUEST_POLL_SECONDS", "0.05"),
        ("JOBREQUEST_RETRY_BASE_SECONDS", "0.01"),
        ("JOBREQUEST_RETRY_CAP_SECONDS", "0.02"),
        ("JOBREQUEST_SHUTDOWN_GRACE_SECONDS", "2"),
        ("JOBREQUEST_EGRESS_ALLOW", "127.0.0.0/8"),
    ];
    let variables: Vec<_> = own.into_iter().chain(more.iter().copied()).collect();
    Program::start(&["worker"], &variables)
}

async fn webhook(db: &Database, url: &str, max_attempts: u32) -> Uuid {
    let new = NewJob::new("webhook_delivery", json!({"url": url, "body": {"n": 1}}));
    db.queue().enqueue(&NewJob { max_attempts, ..new }).await.expect("it is enqueued").id()
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !holds().await {
        assert!(started.elapsed() < PATIENCE, "waited in vain until {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

async fn until_hits(sink: &Sink, hits: usize) {
    until("the receiver is called", async || sink.hits().len() >= hits).await;
}

#[tokio::test]
async fn a_job_whose_worker_is_killed_runs_again_on_another_worker() {
    let (db, sink) = (Database::new().await, Sink::start().await);
    let id = webhook(&db, &sink.url("/hold"), 3).await;
    let mut killed = worker(&db, &[]);
    until_hits(&sink, 1).await;
    let other = worker(&db, &[]);
    other.until("/readyz", 200).await;
    killed.kill();
    // From here on the receiver answers.
    db.run(&format!(
        "UPDATE jobs SET payload = jsonb_set(payload, '{{url}}', '\"{}\"') WHERE id = '{id}'",
        sink.url("/ok")
    ))
    .await;
    db.until_status(id, "succeeded", PATIENCE).await;
    assert_eq!((db.attempts(id).await, sink.hits().len()), (2, 2));
    let outcomes: String = db
        .value(&format!(
            "SELECT string_agg(h ->> 'outcome', ',') FROM jobs, jsonb_array_elements(history) h WHERE id = '{id}'"
        ))
        .await;
    assert_eq!(outcomes, "lease_lost");
}

#[tokio::test]
async fn a_job_whose_worker_is_killed_on_its_last_attempt_fails_and_never_runs_again() {
    let (db, sink) = (Database::new().await, Sink::start().await);
    let id = webhook(&db, &sink.url("/hold"), 1).await;
    let mut killed = worker(&db, &[]);
    until_hits(&sink, 1).await;
    killed.kill();
    let _other = worker(&db, &[]);
    db.until_status(id, "failed_permanent", PATIENCE).await;
    assert_eq!((db.attempts(id).await, sink.hits().len()), (1, 1));
}

#[tokio::test]
async fn a_worker_told_to_end_hands_its_job_back_within_the_grace_and_exits_well() {
    let (db, sink) = (Database::new().await, Sink::start().await);
    let id = webhook(&db, &sink.url("/hold"), 1).await;
    let mut worker = worker(&db, &[]);
    until_hits(&sink, 1).await;
    let asked = Instant::now();
    worker.signal("TERM");
    assert_eq!(ended(worker.exit().await), "code 0", "{}", worker.log());
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    assert_eq!((db.status(id).await.as_str(), db.attempts(id).await), ("queued", 0));
}

#[tokio::test]
async fn a_second_signal_ends_a_worker_at_once() {
    let (db, sink) = (Database::new().await, Sink::start().await);
    webhook(&db, &sink.url("/hold"), 1).await;
    let mut worker = worker(&db, &[("JOBREQUEST_SHUTDOWN_GRACE_SECONDS", "3600")]);
    until_hits(&sink, 1).await;
    worker.signal("INT");
    until("it says that it ends", async || worker.log().contains("a second signal ends at once")).await;
    worker.signal("TERM");
    assert_eq!(ended(worker.exit().await), "code 130");
}

#[tokio::test]
async fn a_worker_without_a_database_waits_quietly_and_says_so() {
    let refused = std::net::TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr()).expect("a free port");
    let url = format!("postgres://nobody:hunter2@{refused}/nothing");
    let mut worker = Program::start(&["worker"], &[("DATABASE_URL", &url)]);
    let ready = worker.until("/readyz", 503).await;
    assert!(ready.contains("postgres: not ready"), "{ready}");
    let before = worker.cpu();
    // Processor time takes time to be used up.
    sleep(Duration::from_secs(4)).await;
    let used = worker.cpu() - before;
    assert!(used < Duration::from_millis(200), "{used:?} of processor time in 4 s of waiting: over 5 %");
    assert_eq!(worker.get("/healthz").await.0, 200);
    let log = worker.log();
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(!log.contains("hunter2") && !worker.get("/readyz").await.1.contains("hunter2"), "{log}");
    worker.signal("TERM");
    assert_eq!(ended(worker.exit().await), "code 0");
}

#[tokio::test]
async fn a_worker_whose_database_goes_away_waits_quietly_and_is_soon_ready_when_it_is_back() {
    let (db, sink) = (Database::new().await, Sink::start().await);
    let proxy = Proxy::before(&db.options()).await;
    let through = proxy.options(db.options());
    let mut url = url::Url::parse(&db.url()).expect("a URL");
    url.set_host(Some(through.get_host())).expect("a host");
    url.set_port(Some(through.get_port())).expect("it has one");
    let worker = worker(&db, &[("DATABASE_URL", url.as_str()), ("JOBREQUEST_POLL_SECONDS", "2")]);
    worker.until("/readyz", 200).await;
    proxy.set(Way::Refused);
    worker.until("/readyz", 503).await;
    let (cpu, lines) = (worker.cpu(), worker.log().lines().count());
    // Processor time takes time to be used up, and lines to be written.
    sleep(Duration::from_secs(6)).await;
    let (cpu, lines) = (worker.cpu() - cpu, worker.log().lines().count() - lines);
    assert!(cpu < Duration::from_millis(300), "{cpu:?} of processor time in 6 s of waiting: over 5 %");
    assert!(lines < 6, "over 60 lines a minute: {}", worker.log());
    assert_eq!(worker.get("/healthz").await.0, 200, "a restart would not help");
    let back = Instant::now();
    proxy.set(Way::Open);
    worker.until("/readyz", 200).await;
    let id = webhook(&db, &sink.url("/ok"), 3).await;
    db.until_status(id, "succeeded", PATIENCE).await;
    assert!(back.elapsed() < Duration::from_secs(30), "{:?}", back.elapsed());
}

/// A library that puts a program's wall clock wrong.
fn wrong_clock(directory: &std::path::Path) -> String {
    let library = directory.join("clock.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/clock.c");
    let mut compile = std::process::Command::new("cc");
    compile.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source);
    assert!(compile.status().expect("there is a C compiler").success());
    library.to_str().expect("UTF-8").to_owned()
}

#[tokio::test]
async fn a_worker_whose_wall_clock_is_ten_minutes_wrong_goes_by_the_databases() {
    let directory = tempfile::tempdir().expect("a directory");
    let library = wrong_clock(directory.path());
    for wrong_by in ["600", "-600"] {
        let (db, sink) = (Database::new().await, Sink::start().await);
        let wrong = [
            ("LD_PRELOAD", library.as_str()),
            ("WRONG_BY", wrong_by),
            ("JOBREQUEST_RETRY_BASE_SECONDS", "5"),
            ("JOBREQUEST_RETRY_CAP_SECONDS", "60"),
        ];
        let wrong = worker(&db, &wrong);
        wrong.until("/readyz", 200).await;
        let long = webhook(&db, &sink.url("/gate/long"), 3).await;
        until_hits(&sink, 1).await;
        // One whose clock is right leaves its lease alone.
        let right = worker(&db, &[]);
        right.until("/readyz", 200).await;
        let renewed = format!("SELECT locked_at - started_at > interval '4 s' FROM jobs WHERE id = '{long}'");
        until("two leases are over", async || db.value(&renewed).await).await;
        drop(right);
        let failing = webhook(&db, &sink.url("/code/500"), 100).await;
        db.until_status(failing, "retrying", PATIENCE).await;
        let wait: f64 = db
            .value(&format!("SELECT extract(epoch FROM run_at - updated_at)::float8 FROM jobs WHERE id = '{failing}'"))
            .await;
        assert!((5.0..=15.0).contains(&wait), "{wrong_by}: {wait} s after the first attempt");
        sink.open("long");
        db.until_status(long, "succeeded", PATIENCE).await;
        assert_eq!((db.attempts(long).await, sink.count("/gate/long")), (1, 1), "{wrong_by}");
        let told: i64 = sink.hits()[0].header("webhook-timestamp").parse().expect("a time");
        let off = told - chrono::Utc::now().timestamp();
        assert!((off - wrong_by.parse::<i64>().expect("a number")).abs() < 120, "its clock is wrong: by {off} s");
    }
}

#[tokio::test]
async fn a_worker_waits_for_the_schema_and_starts_once_it_is_there() {
    let db = Database::empty().await;
    let worker = worker(&db, &[]);
    let ready = worker.until("/readyz", 503).await;
    until("it names the remedy", async || worker.get("/readyz").await.1.contains("run jobrequest migrate")).await;
    assert!(!ready.contains("panic"), "{ready}");
    let (code, _, log) = output(&["migrate"], &[("DATABASE_URL", &db.url())]);
    assert_eq!(code, Some(0), "{log}");
    worker.until("/readyz", 200).await;
    let depth = "jobrequest_queue_depth{kind=\"send_email\",status=\"queued\"} 0";
    until("it measures the queue", async || worker.get("/metrics").await.1.contains(depth)).await;
}

#[test]
fn what_cannot_be_used_is_said_in_one_line_and_stops_the_start() {
    /// Arguments, variables, a part of the line.
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let database = ("DATABASE_URL", "postgres://u:hunter2@127.0.0.1:1/d");
    let cases: &[Case] = &[
        (&["worker"], &[], "DATABASE_URL is not set"),
        (&["worker"], &[("DATABASE_URL", "")], "DATABASE_URL is not set"),
        (&["controller"], &[], "DATABASE_URL is not set"),
        (&["migrate"], &[("DATABASE_URL", "mysql://u:hunter2@h/d")], "DATABASE_URL"),
        (&["worker"], &[("DATABASE_URL", "postgres://u:hunter2#@h:x/d")], "DATABASE_URL"),
        (&["worker"], &[database, ("JOBREQUEST_EGRESS_DENY", "10.0.0.0/33")], "JOBREQUEST_EGRESS_DENY"),
        (&["worker"], &[database, ("JOBREQUEST_CONCURRENCY", "-3")], "JOBREQUEST_CONCURRENCY"),
        (&["worker"], &[database, ("JOBREQUEST_KINDS", "send_mail")], "JOBREQUEST_KINDS"),
        (&["worker"], &[database, ("JOBREQUEST_LOG", "loud")], "JOBREQUEST_LOG"),
        (&["worker"], &[database, ("JOBREQUEST_SMTP_URL", "smtp://mail.example.com")], "JOBREQUEST_SMTP_FROM"),
        (&["controller"], &[database, ("JOBREQUEST_WATCH_NAMESPACES", "a,B")], "JOBREQUEST_WATCH_NAMESPACES"),
        (&["controller"], &[database, ("JOBREQUEST_LEASE", "30")], "did you mean JOBREQUEST_LEASE_SECONDS?"),
        (&["wroker"], &[], "unrecognized subcommand 'wroker'"),
        (&[], &[], "a subcommand is missing"),
        (&["jobs", "get", "12"], &[database], "is not a job's id"),
    ];
    for (arguments, variables, expected) in cases {
        let (code, out, err) = output(arguments, variables);
        assert_eq!((code, out.as_str(), err.lines().count()), (Some(2), "", 1), "{arguments:?} {variables:?}: {err}");
        assert!(err.contains(expected) && err.starts_with("jobrequest: "), "{arguments:?}: {err}");
        assert!(!err.contains("hunter2"), "{err}");
    }
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let variables =
        [("JOBREQUEST_WEBHOOK_SECRET", "0123456789abcdef"), ("JOBREQUEST_LEASE_SECONDS", ""), ("JOBREQUEST_LOG", "")];
    let (code, out, err) = output(&["jobs", "webhook-secret", "https://a.example"], &variables);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.starts_with("whsec_"), "{out}");
}

#[test]
fn an_address_in_use_stops_the_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let addr = taken.local_addr().expect("bound").to_string();
    let variables = [("DATABASE_URL", "postgres://127.0.0.1:1/d"), ("JOBREQUEST_HTTP_ADDR", addr.as_str())];
    let (code, _, err) = output(&["worker"], &variables);
    assert_eq!(code, Some(1));
    assert!(
        err.lines().last().is_some_and(|line| line.starts_with("jobrequest: can't serve HTTP on 127.0.0.1:")),
        "{err}"
    );
}

#[test]
fn the_printed_crd_is_the_one_in_the_repository() {
    let (code, out, _) = output(&["crd"], &[]);
    let kept = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/crds/jobrequests.yaml"));
    assert_eq!((code, out), (Some(0), kept.expect("crds/jobrequests.yaml is there")));
}

#[tokio::test]
async fn a_list_takes_the_filters_of_the_queue_as_a_table_and_as_json() {
    let db = Database::new().await;
    db.run(
        "INSERT INTO jobs (kind, payload, namespace, priority, created_at) VALUES \
             ('a', '{}', 'shop', 1, now() - interval '3 s'), ('b', '{}', 'shop', 2, now() - interval '2 s'), \
             ('b', '{}', 'blog', 3, now() - interval '1 s'), ('b', '{}', NULL, 4, now()); \
         UPDATE jobs SET status = 'cancelled', finished_at = now() WHERE priority = 2",
    )
    .await;
    let url = db.url();
    for (filter, wanted) in [
        ("", vec![4, 3, 2, 1]),
        ("--kind b", vec![4, 3, 2]),
        ("--namespace shop", vec![2, 1]),
        ("--status queued", vec![4, 3, 1]),
        ("--kind b --limit 1 --offset 1", vec![3]),
        ("--kind b -n shop --status cancelled", vec![2]),
        ("--kind c", vec![]),
    ] {
        let list = |format| {
            let arguments: Vec<&str> = ["jobs", "list"].into_iter().chain(filter.split_whitespace()).collect();
            let (code, out, err) = output(&[&arguments[..], &["-o", format]].concat(), &[("DATABASE_URL", &url)]);
            assert_eq!((code, err.as_str()), (Some(0), ""), "{filter}");
            out
        };
        let jobs: Vec<serde_json::Value> = serde_json::from_str(&list("json")).expect("JSON");
        assert_eq!(jobs.iter().map(|job| job["priority"].clone()).collect::<Vec<_>>(), wanted, "{filter}");
        let table = list("table");
        let ids: Vec<_> = table.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(ids, jobs.iter().filter_map(|job| job["id"].as_str()).collect::<Vec<_>>(), "{filter}");
    }
}

#[tokio::test]
async fn a_job_that_can_not_be_read_is_named_beside_the_list_of_the_others() {
    let db = Database::new().await;
    let (good, bad) = (webhook(&db, "https://a.example/", 3).await, webhook(&db, "https://a.example/", 3).await);
    db.run(&format!("UPDATE jobs SET history = '[1]' WHERE id = '{bad}'")).await;
    let (code, out, err) = output(&["jobs", "list"], &[("DATABASE_URL", &db.url())]);
    assert_eq!((code, out.lines().count()), (Some(1), 2), "{out}");
    assert!(out.contains(&good.to_string()), "{out}");
    let said = format!("jobrequest: job {bad}: column history is nothing that this version can read\n");
    assert_eq!(err, said);
}

#[tokio::test]
async fn a_person_can_list_show_cancel_and_retry_jobs() {
    let db = Database::new().await;
    let url = db.url();
    let variables = [("DATABASE_URL", url.as_str())];
    let jobs = |arguments: &[&str]| {
        let arguments: Vec<&str> = ["jobs"].into_iter().chain(arguments.iter().copied()).collect();
        output(&arguments, &variables)
    };
    let id = webhook(&db, "https://a.example/", 3).await;
    let text = id.to_string();
    let (code, listed, err) = jobs(&["list", "--status", "queued"]);
    assert_eq!((code, listed.lines().count()), (Some(0), 2), "{listed}{err}");
    assert!(listed.starts_with("ID ") && listed.contains(&text) && listed.contains("0/3"), "{listed}");
    let (_, cancelled, _) = jobs(&["cancel", &text]);
    assert_eq!(cancelled, format!("job {id} cancelled\n"));
    let (_, shown, _) = jobs(&["get", &text, "--output", "json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!((&shown["status"], &shown["attempts"]), (&json!("cancelled"), &json!(0)));
    assert!(!shown.to_string().contains("a.example"), "the payload is not shown");
    assert_eq!(jobs(&["retry", &text]).1, format!("job {id} queued\n"));
    let (_, cancelled, _) = jobs(&["cancel", &text, "-o", "json"]);
    let cancelled: serde_json::Value = serde_json::from_str(&cancelled).expect("JSON");
    assert_eq!((&cancelled["id"], &cancelled["status"]), (&json!(id), &json!("cancelled")));
    let (_, retried, _) = jobs(&["retry", &text, "-o", "table"]);
    assert!(retried.starts_with("ID ") && retried.contains(&text) && retried.contains("queued"), "{retried}");
    assert_eq!(db.status(id).await, "queued");
    let (code, _, err) = jobs(&["retry", &text]);
    assert_eq!((code, err), (Some(1), format!("jobrequest: {id}: a queued job can't be retried\n")));
    let other = [("DATABASE_URL", url.as_str()), ("JOBREQUEST_INSTALL", "other")];
    let (code, _, err) = output(&["jobs", "cancel", &text], &other);
    assert_eq!((code, err), (Some(1), format!("jobrequest: {id}: there is no such job\n")));
    assert_eq!(db.status(id).await, "queued", "another install's job is not touched");
}
