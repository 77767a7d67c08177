use std::time::Duration;

use jobrequest::kinds::email::SmtpSettings;
use jobrequest::kinds::{Attempt, Failure, FailureCause, KindSettings};
use serde_json::{Value, json};

use super::smtp::SmtpServer;
use super::{attempt, attempt_within, executor};

const KIND: &str = "send_email";

fn settings(server: &SmtpServer) -> KindSettings {
    let smtp = SmtpSettings::parse(&server.url(), "The Shop <shop@example.org>", false).unwrap();
    KindSettings { smtp: Some(smtp), ..KindSettings::default() }
}

async fn send(server: &SmtpServer, attempt: &Attempt) -> Result<Value, Failure> {
    executor(KIND, &settings(server)).execute(attempt).await
}

fn mail(to: &str) -> Value {
    json!({"to": to, "subject": "Hi", "body": "Hello"})
}

/// The next attempt of the same job, as the worker makes it from the row.
fn next(first: &Attempt, payload: &Value, failure: &Failure) -> Attempt {
    let mut next = attempt(payload);
    next.job_id = first.job_id;
    next.number = first.number + 1;
    next.progress = failure.progress().cloned();
    next
}

#[tokio::test]
async fn a_mail_arrives_with_its_headers_its_alternative_and_all_its_recipients() {
    let server = SmtpServer::start().await;
    let attempt = attempt(&json!({
        "to": "a@x.test, \"Beh, B\" <b@x.test>", "cc": "株式会社 <c@x.test>", "bcc": "d@x.test, a@X.test",
        "reply_to": "help@x.test", "subject": "Grüße 😀", "body": "Hello\n", "html": "<p>Hello</p>",
    }));
    let result = send(&server, &attempt).await.unwrap();
    let message_id = format!("<{}@example.org>", attempt.job_id);
    assert_eq!(result, json!({"message_id": message_id, "delivered": 4}));
    let stored = &server.stored()[0];
    assert_eq!(stored.from, "shop@example.org");
    assert_eq!(stored.to, ["a@x.test", "b@x.test", "c@x.test", "d@x.test"], "each address once");
    assert_eq!(stored.header("Message-ID"), message_id);
    assert_eq!(stored.header("From"), "\"The Shop\" <shop@example.org>");
    assert_eq!(stored.header("Reply-To"), "help@x.test");
    assert!(stored.header("Content-Type").starts_with("multipart/alternative"));
    assert!(!stored.text().contains("d@x.test"), "Bcc stays in the envelope");
    assert!(stored.data.is_ascii());
    assert!(attempt.is_committed());
}

#[tokio::test]
async fn each_recipient_has_an_outcome_of_its_own_and_a_retry_mails_only_who_was_put_off() {
    let server = SmtpServer::start().await;
    let payload = mail("ok@x.test, perm@x.test, tmp@x.test");
    let first = attempt(&payload);
    let failure = send(&server, &first).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "RecipientsPutOff"));
    assert_eq!(
        failure.message(),
        "1 of 3 recipients have the mail; the server put off to 3 (450 4.2.1); it refused to 2 (550 5.1.1)"
    );
    assert_eq!(
        failure.progress(),
        Some(&json!({"delivered": ["ok@x.test"], "refused": [{"address": "perm@x.test", "code": "550 5.1.1"}]}))
    );
    let failure = send(&server, &next(&first, &payload, &failure)).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "RecipientsRefused"));
    assert_eq!(failure.message(), "2 of 3 recipients have the mail; the server refused to 2 (550 5.1.1)");
    let copies = ["ok@x.test", "tmp@x.test", "perm@x.test"].map(|address| server.copies(address));
    assert_eq!(copies, [1, 1, 0]);
}

#[tokio::test]
async fn a_retry_after_everybody_has_it_mails_nobody() {
    let server = SmtpServer::start().await;
    let mut again = attempt(&mail("ok@x.test"));
    again.progress = Some(json!({"delivered": ["ok@x.test"], "refused": []}));
    assert_eq!(send(&server, &again).await.unwrap()["delivered"], 1);
    assert!(server.commands().is_empty());
}

#[tokio::test]
async fn when_all_are_refused_there_is_no_data_and_no_retry() {
    let server = SmtpServer::start().await;
    let attempt = attempt(&mail("perm1@x.test, perm2@x.test"));
    let failure = send(&server, &attempt).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "RecipientsRefused"));
    assert!(!attempt.is_committed());
    assert!(!failure.message().contains('@'), "no address in a status: {}", failure.message());
    assert!(!server.commands().iter().any(|command| command == "DATA"));
}

#[tokio::test]
async fn a_connection_lost_after_data_leaves_the_outcome_uncertain_and_the_message_id_the_same() {
    let server = SmtpServer::start().await;
    let payload = mail("late@x.test");
    let first = attempt(&payload);
    let failure = send(&server, &first).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "OutcomeUncertain"));
    assert!(first.is_committed());
    send(&server, &next(&first, &payload, &failure)).await.unwrap_err();
    let ids: Vec<String> = server.stored().iter().map(|stored| stored.header("Message-ID")).collect();
    assert_eq!(ids, vec![format!("<{}@example.org>", first.job_id); 2]);
}

#[tokio::test]
async fn a_server_silent_after_data_is_uncertain_too_and_before_it_a_timeout() {
    let server = SmtpServer::start().await;
    let (slow, _stop) = attempt_within(&mail("slow@x.test"), Duration::from_secs(1));
    assert_eq!(send(&server, &slow).await.unwrap_err().reason(), "OutcomeUncertain");

    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("smtp://{}", silent.local_addr().unwrap());
    let smtp = SmtpSettings::parse(&url, "shop@example.org", false).unwrap();
    let settings = KindSettings { smtp: Some(smtp), ..KindSettings::default() };
    let (waiting, _stop) = attempt_within(&mail("ok@x.test"), Duration::from_secs(1));
    let failure = executor(KIND, &settings).execute(&waiting).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "Timeout"));
}

#[tokio::test]
async fn a_cancel_after_data_changes_nothing_and_before_it_sends_nothing() {
    let server = SmtpServer::start().await;
    let (attempt, stop) = attempt_within(&mail("slow@x.test"), Duration::from_secs(2));
    let sending = {
        let server = server.clone();
        tokio::spawn(async move { send(&server, &attempt).await })
    };
    server.read.notified().await;
    stop.cancel();
    assert_eq!(sending.await.unwrap().unwrap_err().reason(), "OutcomeUncertain");

    let (attempt, stop) = attempt_within(&mail("ok@x.test"), Duration::from_secs(2));
    stop.cancel();
    assert_eq!(send(&server, &attempt).await.unwrap_err().cause(), FailureCause::Cancelled);
    assert_eq!(server.copies("ok@x.test"), 0);
}

#[tokio::test]
async fn dots_and_bare_line_ends_neither_end_nor_split_a_message() {
    let server = SmtpServer::start().await;
    let payload = json!({"to": "ok@x.test", "subject": "Hi", "body": "a\n.\nMAIL FROM:<x@y.test>\n..b\r.c"});
    send(&server, &attempt(&payload)).await.unwrap();
    assert_eq!(server.stored().len(), 1);
    let text = server.stored()[0].text();
    let body = text.split_once("\r\n\r\n").unwrap().1;
    assert_eq!(body, "a\r\n.\r\nMAIL FROM:<x@y.test>\r\n..b\r\n.c\r\n");
    assert!(!text.replace("\r\n", "").contains(['\r', '\n']), "no bare CR or LF");
}

#[tokio::test]
async fn letters_of_any_script_need_smtputf8_only_before_the_at_sign() {
    let server = SmtpServer::start().await;
    let plain = SmtpServer::offering("8BITMIME").await;
    send(&plain, &attempt(&mail("user@例え.テスト"))).await.unwrap();
    assert_eq!(plain.stored()[0].to, ["user@xn--r8jz45g.xn--zckzah"]);

    let failure = send(&plain, &attempt(&mail("用户@例え.テスト"))).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "SmtpUtf8NotOffered"));
    assert_eq!(plain.stored().len(), 1);

    send(&server, &attempt(&mail("用户@例え.テスト"))).await.unwrap();
    assert_eq!(server.stored()[0].to, ["用户@xn--r8jz45g.xn--zckzah"]);
    assert!(server.commands().iter().any(|line| line.starts_with("MAIL") && line.contains("SMTPUTF8")));
}

#[tokio::test]
async fn a_server_without_starttls_gets_nothing_when_tls_is_required() {
    let server = SmtpServer::start().await;
    let smtp = SmtpSettings::parse(&format!("{}?tls=required", server.url()), "shop@example.org", false).unwrap();
    let settings = KindSettings { smtp: Some(smtp), ..KindSettings::default() };
    let failure = executor(KIND, &settings).execute(&attempt(&mail("ok@x.test"))).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "SmtpTlsFailed"));
    assert!(!server.commands().iter().any(|command| command.starts_with("MAIL")));
}

#[tokio::test]
async fn without_a_mail_server_the_operator_is_told_what_to_set() {
    let failure = executor(KIND, &KindSettings::default()).execute(&attempt(&mail("ok@x.test"))).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "NotConfigured"));
    assert!(failure.message().contains("JOBREQUEST_SMTP_URL"));
}
