use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde_json::json;

use super::*;
use crate::api::AttemptRecord;

/// A status in this phase, with the conditions that tell.
fn status(phase: Phase, reason: &str) -> JobRequestStatus {
    let condition = |type_: &str| Condition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: reason.to_owned(),
        message: format!("because of {reason}"),
        observed_generation: Some(1),
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
    };
    let bad = matches!(phase, Phase::FailedPermanent | Phase::Cancelled | Phase::Rejected);
    let types = if bad { &["Ready", "Failed"][..] } else { &["Ready"] };
    JobRequestStatus {
        phase: Some(phase),
        conditions: types.iter().map(|type_| condition(type_)).collect(),
        ..Default::default()
    }
}

fn said(old: &JobRequestStatus, new: &JobRequestStatus, deleting: bool) -> Vec<String> {
    of_change(old, new, deleting).into_iter().map(|news| format!("{} {}", news.type_, news.reason.as_str())).collect()
}

fn every_status() -> Vec<JobRequestStatus> {
    [
        (Phase::Queued, "Queued"),
        (Phase::Queued, "Suspended"),
        (Phase::Running, "Running"),
        (Phase::Running, "Cancelling"),
        (Phase::Retrying, "Retrying"),
        (Phase::Succeeded, "Succeeded"),
        (Phase::FailedPermanent, "FailedPermanent"),
        (Phase::FailedPermanent, "RowLost"),
        (Phase::Cancelled, "Cancelled"),
        (Phase::Rejected, "PayloadInvalid"),
    ]
    .map(|(phase, reason)| status(phase, reason))
    .into()
}

#[test]
fn an_ordinary_life_and_a_status_that_stays_say_nothing() {
    let fresh = JobRequestStatus::default();
    let life = ["Queued", "Running", "Retrying", "Running", "Succeeded"];
    let phases = [Phase::Queued, Phase::Running, Phase::Retrying, Phase::Running, Phase::Succeeded];
    let mut before = fresh.clone();
    for (phase, reason) in phases.into_iter().zip(life) {
        let now = status(phase, reason);
        assert_eq!(said(&before, &now, false), [""; 0], "{reason}");
        assert_eq!(said(&fresh, &now, false), [""; 0], "{reason} at once");
        before = now;
    }
    for same in every_status() {
        let edited = JobRequestStatus { observed_generation: Some(9), last_retry: Some("1".into()), ..same.clone() };
        assert_eq!(said(&same, &edited, true), [""; 0], "{:?}", same.phase);
    }
}

#[test]
fn a_bad_end_is_said_in_the_words_of_its_condition() {
    let running = status(Phase::Running, "Running");
    for (phase, reason, expected) in [
        (Phase::FailedPermanent, "FailedPermanent", "Warning FailedPermanent"),
        (Phase::FailedPermanent, "RowLost", "Warning RowLost"),
        (Phase::Cancelled, "Cancelled", "Normal Cancelled"),
        (Phase::Rejected, "IdempotencyConflict", "Warning IdempotencyConflict"),
    ] {
        let ended = status(phase, reason);
        assert_eq!(said(&running, &ended, false), [expected]);
        assert_eq!(of_change(&running, &ended, false)[0].note, format!("because of {reason}"));
    }
}

#[test]
fn another_run_after_a_bad_end_is_said_and_its_own_end_too() {
    let failed = status(Phase::FailedPermanent, "FailedPermanent");
    for (phase, reason) in [(Phase::Queued, "Queued"), (Phase::Running, "Running"), (Phase::Succeeded, "Succeeded")] {
        let again = JobRequestStatus { history: vec![AttemptRecord::default()], ..status(phase, reason) };
        assert_eq!(said(&failed, &again, false), ["Normal Retried"], "{reason}");
    }
    let mut later = failed.clone();
    later.finished_at = Some(Time(Timestamp::UNIX_EPOCH));
    assert_eq!(said(&failed, &later, false), ["Normal Retried", "Warning FailedPermanent"]);
    let at_once = JobRequestStatus { history: vec![AttemptRecord::default()], ..failed.clone() };
    assert_eq!(said(&failed, &at_once, false), ["Normal Retried", "Warning FailedPermanent"]);
}

#[test]
fn a_cancel_is_said_while_the_resource_waits_for_it() {
    let (running, cancelling) = (status(Phase::Running, "Running"), status(Phase::Running, "Cancelling"));
    assert_eq!(said(&running, &cancelling, true), ["Normal Cancelling"]);
    assert_eq!(said(&running, &cancelling, false), [""; 0], "its end is said");
}

#[test]
fn an_event_is_within_the_api_servers_bounds() {
    let longest = format!("{}.{}", "a".repeat(235), "b".repeat(17));
    assert_eq!(longest.len(), NAME_MAX_BYTES);
    let regarding = |name: &str| ObjectReference {
        name: Some(name.to_owned()),
        namespace: Some("shop".to_owned()),
        ..Default::default()
    };
    let news = News::warning(Reason::FailedPermanent, "Run", "é".repeat(1024));
    let now = Timestamp::MAX;
    let event = event(regarding(&longest), news.clone(), "worker", now);
    let name = event.metadata.name.expect("a name");
    assert!(name.len() <= NAME_MAX_BYTES && name.starts_with(&format!("{}.", "a".repeat(235))), "{name}");
    assert!(event.note.is_some_and(|note| note.len() <= NOTE_MAX_BYTES));
    let short = super::event(regarding("a"), news, "w", Timestamp::UNIX_EPOCH);
    let written = serde_json::to_value(&short).expect("JSON");
    assert_eq!(written["metadata"], json!({"name": "a.0", "namespace": "shop"}));
}
