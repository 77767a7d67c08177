use std::collections::{BTreeMap, BTreeSet};

use chrono::TimeZone;
use serde_json::json;
use uuid::Uuid;

use super::*;

fn at(second: u32) -> DateTime<Utc> {
    Utc.with_ymd_and_hms(2026, 12, 1, 8, 0, second).single().expect("a time")
}

fn now() -> Timestamp {
    time(at(30)).0
}

fn job(state: JobState) -> Job {
    Job {
        id: Uuid::nil(),
        kind: "send_email".into(),
        attempts: 1,
        max_attempts: 3,
        priority: 0,
        suspended: false,
        timeout_seconds: 300,
        idempotency_key: None,
        namespace: Some("shop".into()),
        install: "default".into(),
        last_error: None,
        run_at: at(0),
        wanted_run_at: None,
        started_at: Some(at(1)),
        finished_at: None,
        worker: Some("w-1".into()),
        created_at: at(0),
        updated_at: at(2),
        revision: 3,
        last_retry: None,
        history: Vec::new(),
        state,
    }
}

fn every_state() -> Vec<JobState> {
    vec![
        JobState::Queued { run_at: at(0) },
        JobState::Running { worker: "w-1".into(), since: at(1), cancel_requested: false },
        JobState::Retrying { run_at: at(9), error: "HttpStatus: the server answered 503".into() },
        JobState::Succeeded { at: at(2), result: json!({"status": 200}) },
        JobState::FailedPermanent { at: at(2), error: "HttpStatus: the server answered 404".into() },
        JobState::Cancelled { at: at(2) },
    ]
}

fn shown_for(job: &Job) -> JobRequestStatus {
    render(&JobRequestStatus::default(), Some(4), false, &Standing::Row { job, shared: false }, now())
}

#[test]
fn a_status_that_is_read_back_is_not_written_again() {
    let fraction = |second| at(second) + chrono::TimeDelta::microseconds(123_456);
    for state in every_state() {
        let past = PastAttempt {
            number: 1,
            worker: Some("w-1".into()),
            from: Some(fraction(1)),
            to: fraction(2),
            outcome: Outcome::Failed,
            error: Some("e".into()),
        };
        let state = match state {
            JobState::Succeeded { .. } => JobState::Succeeded { at: fraction(2), result: json!({"b": 1, "aa": [1.0]}) },
            JobState::Cancelled { .. } => JobState::Cancelled { at: fraction(2) },
            other => other,
        };
        let job = Job { run_at: fraction(0), started_at: Some(fraction(1)), history: vec![past], ..job(state) };
        let shown = shown_for(&job);
        // As the API server gives it back: through a tree, with sorted keys.
        let text = serde_json::to_value(&shown).expect("a status").to_string();
        let read: JobRequestStatus = serde_json::from_str(&text).expect("a status");
        let standing = Standing::Row { job: &job, shared: false };
        assert_eq!(render(&read, Some(4), false, &standing, time(fraction(59)).0), read);
    }
}

#[test]
fn ready_is_true_on_success_alone_and_a_bad_end_is_stalled_and_failed() {
    for state in every_state() {
        let status = shown_for(&job(state));
        let phase = status.phase.expect("a phase");
        let is = |type_| status.condition(type_).map(|c| c.status.as_str());
        let succeeded = phase == Phase::Succeeded;
        let ended_badly = phase.is_terminal() && !succeeded;
        assert_eq!(is("Ready"), Some(if succeeded { "True" } else { "False" }), "{phase:?}");
        assert_eq!(is("Complete"), succeeded.then_some("True"), "{phase:?}");
        assert_eq!(is("Failed"), ended_badly.then_some("True"), "{phase:?}");
        assert_eq!(is("Stalled"), ended_badly.then_some("True"), "{phase:?}");
        assert_eq!(is("Accepted"), Some("True"), "{phase:?}");
        assert_eq!(status.observed_generation, Some(4));
        assert!(status.conditions.iter().all(|c| c.observed_generation == Some(4)));
        assert_eq!(status.finished_at.is_some(), phase.is_terminal(), "{phase:?}");
    }
}

#[test]
fn rendering_again_changes_nothing_so_an_idle_controller_writes_nothing() {
    let later = time(at(59)).0;
    for state in every_state() {
        let job = job(state);
        let first = shown_for(&job);
        let again = render(&first, Some(4), false, &Standing::Row { job: &job, shared: false }, later);
        assert_eq!(again, first);
    }
}

#[test]
fn a_condition_keeps_its_time_while_its_status_stays() {
    let waiting = shown_for(&job(JobState::Queued { run_at: at(0) }));
    let running = job(JobState::Running { worker: "w".into(), since: at(1), cancel_requested: false });
    let later = time(at(59)).0;
    let status = render(&waiting, Some(5), false, &Standing::Row { job: &running, shared: false }, later);
    assert_eq!(status.condition("Ready").expect("Ready").last_transition_time, Time(now()));
    let done = job(JobState::Succeeded { at: at(2), result: Value::Null });
    let status = render(&status, Some(5), false, &Standing::Row { job: &done, shared: false }, later);
    assert_eq!(status.condition("Ready").expect("Ready").last_transition_time, Time(later));
}

#[test]
fn a_rejected_resource_says_why_and_stops_everybody_who_waits() {
    let standing =
        Standing::Rejected { reason: Reason::PayloadInvalid, message: "spec.payload.text holds a NUL".into() };
    let status = render(&JobRequestStatus::default(), Some(1), false, &standing, now());
    assert_eq!(status.phase, Some(Phase::Rejected));
    for (type_, is) in [("Accepted", "False"), ("Ready", "False"), ("Stalled", "True"), ("Failed", "True")] {
        let condition = status.condition(type_).expect(type_);
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), (is, "PayloadInvalid"), "{type_}");
    }
}

#[test]
fn a_database_that_is_away_leaves_what_was_known() {
    let running = job(JobState::Running { worker: "w".into(), since: at(1), cancel_requested: false });
    let known = shown_for(&running);
    let status = render(&known, Some(4), true, &Standing::DatabaseUnavailable, now());
    assert_eq!((status.phase, status.job_id.as_ref()), (known.phase, known.job_id.as_ref()));
    assert_eq!(status.condition("Ready").expect("Ready").reason, "DatabaseUnavailable");
    assert_eq!(status.condition("Accepted").expect("Accepted").status, "True");
    let fresh = render(&JobRequestStatus::default(), Some(1), false, &Standing::DatabaseUnavailable, now());
    assert_eq!(fresh.condition("Accepted").expect("Accepted").status, "Unknown");
}

#[test]
fn the_largest_status_stays_below_sixteen_kilobytes() {
    let long = "é".repeat(4096);
    let mut job = job(JobState::FailedPermanent { at: at(2), error: long.clone() });
    job.last_error = Some(long.clone());
    let attempt = |number| PastAttempt {
        number,
        worker: Some("w".repeat(255)),
        from: Some(at(1)),
        to: at(2),
        outcome: Outcome::Failed,
        error: Some(long.clone()),
    };
    job.history = (1..=20).map(attempt).collect();
    let status = shown_for(&job);
    assert_eq!(status.history.iter().map(|a| a.number).collect::<Vec<_>>(), [16, 17, 18, 19, 20].map(Some));
    assert!(status.last_error.as_ref().is_some_and(|text| text.len() <= 1024));
    let size = serde_json::to_string(&status).expect("JSON").len();
    assert!(size < 16 * 1024, "{size}");
    let list = self::job(JobState::Succeeded { at: at(2), result: json!([1]) });
    assert_eq!(shown_for(&list).result, Some(Json::from(json!({"value": [1]}))), "the schema has an object here");
    let large = self::job(JobState::Succeeded { at: at(2), result: json!("x".repeat(5000)) });
    assert_eq!(shown_for(&large).result, None, "a result over 4 KiB stays in the row");
}

#[test]
fn what_a_person_sees_of_a_retrying_job() {
    let mut job = job(JobState::Retrying { run_at: at(9), error: "HttpStatus: the server answered 503".into() });
    job.last_error = Some("HttpStatus: the server answered 503".into());
    job.history = vec![PastAttempt {
        number: 1,
        worker: Some("w-1".into()),
        from: Some(at(1)),
        to: at(2),
        outcome: Outcome::Failed,
        error: job.last_error.clone(),
    }];
    insta::assert_yaml_snapshot!(shown_for(&job));
}

/// What kstatus makes of a status, by its published rules for kinds that it does not know.
fn kstatus(status: &JobRequestStatus, generation: i64) -> &'static str {
    let is = |type_, value| status.condition(type_).is_some_and(|c| c.status == value);
    if status.observed_generation != Some(generation) || is("Reconciling", "True") {
        "InProgress"
    } else if is("Stalled", "True") {
        "Failed"
    } else if is("Ready", "False") || is("Ready", "Unknown") {
        "InProgress"
    } else {
        "Current"
    }
}

/// Every status that there can be, but for its texts: each standing, of each state, suspended or being deleted or not.
fn every_status() -> Vec<JobRequestStatus> {
    let fresh = JobRequestStatus::default();
    let running = JobState::Running { worker: "w".into(), since: at(1), cancel_requested: true };
    let mut all = Vec::new();
    let mut show = |old: &JobRequestStatus, deleting, standing: &Standing<'_>| {
        all.push(render(old, Some(4), deleting, standing, now()));
    };
    for state in every_state().into_iter().chain([running]) {
        for (suspended, shared, deleting) in [(false, false, false), (true, true, false), (false, false, true)] {
            let job = Job { suspended, ..job(state.clone()) };
            show(&fresh, deleting, &Standing::Row { job: &job, shared });
            show(&shown_for(&job), deleting, &Standing::DatabaseUnavailable);
            if job.state.status() == crate::job::Status::Running {
                show(&shown_for(&job), deleting, &Standing::RowLost);
            }
        }
    }
    for reason in [Reason::PayloadInvalid, Reason::SpecInvalid, Reason::IdempotencyConflict] {
        show(&fresh, false, &Standing::Rejected { reason, message: String::new() });
    }
    show(&fresh, false, &Standing::KeptKey { job_id: Uuid::nil(), attempts: 1, finished_at: at(2) });
    show(&fresh, false, &Standing::DatabaseUnavailable);
    all
}

/// The cells of the table below a heading of docs/conditions.md, without marks.
fn table(heading: &str) -> Vec<Vec<String>> {
    let page = include_str!("../../../docs/conditions.md");
    let below = page.split_once(&format!("\n## {heading}\n")).expect(heading).1;
    let below = below.split("\n## ").next().unwrap_or_default();
    let rows = below.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()).collect()
}

#[test]
fn the_page_about_conditions_has_every_row_that_can_be_shown_and_no_other() {
    let mut ready = BTreeMap::<_, BTreeSet<_>>::new();
    let mut others = BTreeSet::new();
    for status in every_status() {
        for Condition { type_, status: value, reason, .. } in &status.conditions {
            if type_ == "Ready" {
                let phase = status.phase.map_or("none".to_owned(), |phase| format!("{phase:?}"));
                let judged = (value.clone(), kstatus(&status, 4).to_owned());
                ready.entry((reason.clone(), judged)).or_default().insert(phase);
            } else {
                others.insert([type_.clone(), value.clone(), reason.clone()]);
            }
        }
    }
    // Of a resource that is being deleted, which is Terminating to kstatus: any phase.
    ready.retain(|(reason, (_, judged)), _| reason != "DatabaseUnavailable" || judged == "InProgress");
    let shown: Vec<_> =
        table("The others").into_iter().map(|row| [row[0].clone(), row[1].clone(), row[2].clone()]).collect();
    assert_eq!(shown.len(), others.len(), "{others:#?}");
    assert_eq!(shown.into_iter().collect::<BTreeSet<_>>(), others);

    let rows = table("Ready");
    assert_eq!(rows.len(), ready.len(), "{ready:#?}");
    for row in rows {
        let [reason, value, phases, judged, _] = <[String; 5]>::try_from(row).expect("five cells");
        let seen = ready.get(&(reason.clone(), (value, judged))).unwrap_or_else(|| panic!("{reason}: {ready:#?}"));
        if reason != "DatabaseUnavailable" {
            assert_eq!(phases.split(", ").map(str::to_owned).collect::<BTreeSet<_>>(), *seen, "{reason}");
        }
    }
}

#[test]
fn each_reason_in_the_code_is_on_the_page_and_each_on_the_page_in_the_code() {
    let cells = |heading, column: usize| table(heading).into_iter().map(move |row| row[column].clone());
    let page: BTreeSet<_> = cells("Ready", 0).chain(cells("The others", 2)).chain(cells("Events", 1)).collect();
    let code: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str().to_owned()).collect();
    assert_eq!(page, code);
}
