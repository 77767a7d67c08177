use super::*;

use std::path::Path;

fn problem(field: &str, value: &str) -> String {
    let mut payload = json!({"to": "a@x.test", "subject": "Hi", "body": "Hello"});
    payload[field] = json!(value);
    Mail::parse(&payload).unwrap_err().to_string()
}

fn formatted(payload: Value) -> String {
    let smtp = SmtpSettings::parse("smtp://localhost", "株式会社 <shop@example.org>", false).unwrap();
    let bytes = Mail::parse(&payload).unwrap().formatted(uuid::Uuid::nil(), &smtp.from).unwrap();
    assert!(bytes.split(|&b| b == b'\n').all(|line| line.len() <= message::MAX_LINE + 1));
    String::from_utf8(bytes).unwrap()
}

#[test]
fn a_line_break_in_a_header_field_is_refused_on_acceptance() {
    const CONTROL: &str = "must hold no line breaks or other control characters";
    for (field, value) in [
        ("subject", "Hi\r\nBcc: spy@x.test"),
        ("subject", "Hi\nthere"),
        ("subject", "Hi\0"),
        ("to", "a@x.test>\r\nRCPT TO:<spy@x.test"),
        ("to", "a@x.test,\r\n b@x.test"),
        ("cc", "\"A\nB\" <b@x.test>"),
        ("bcc", "a@x.test\u{85}"),
        ("reply_to", "A\0 <a@x.test>"),
    ] {
        assert_eq!(problem(field, value), format!("payload.{field}: {CONTROL}"), "{value:?}");
    }
    assert_eq!(problem("body", "a\0b"), "payload.body: must hold no NUL");
}

#[test]
fn what_is_no_address_list_is_refused_without_being_shown() {
    for value in [
        "",
        " ",
        ",",
        "secret",
        "a@",
        "@x.test",
        "a@x..test",
        "a b@x.test",
        "a@x.test; b@x.test",
        "a@x.test,",
        "<a@x.test",
        "a@x.test> <b@y.test",
        "A <a@x.test",
        "a@@x.test",
        "a@x test",
        "a@exa%6Dple.test",
    ] {
        let problem = problem("to", value);
        assert!(problem.starts_with("payload.to: must"), "{value:?}: {problem}");
        assert!(!problem.contains("secret"));
    }
    assert_eq!(
        problem("to", &vec!["a@x.test"; 101].join(",")),
        "payload.to: has with cc and bcc more than 100 addresses"
    );
}

#[test]
fn address_lists_of_rfc_5322_are_read() {
    for (value, count) in [
        ("a@x.test", 1),
        (" a@x.test ", 1),
        ("a@x.test,b@x.test", 2),
        ("A B <a@x.test>, \"B, C\" <b@x.test> , c@x.test", 3),
        ("株式会社 <a@x.test>", 1),
        ("a+b.c'd@x.test", 1),
        ("user@例え.テスト", 1),
        ("用户@x.test", 1),
    ] {
        let mail = Mail::parse(&json!({"to": value, "subject": "", "body": ""})).unwrap();
        assert_eq!(mail.recipients().len(), if value.starts_with("a@x.test,") { 2 } else { count }, "{value}");
    }
}

#[test]
fn an_empty_optional_list_is_none() {
    let mail = Mail::parse(&json!({"to": "a@x.test", "subject": "", "body": "", "cc": "", "bcc": null})).unwrap();
    assert_eq!(mail.recipients().len(), 1);
}

#[test]
fn long_names_and_subjects_of_any_script_are_folded_and_read_back() {
    let name = "株式会社".repeat(60);
    let subject = "😀".repeat(300);
    let text = formatted(json!({"to": format!("{name} <ok@x.test>"), "subject": subject, "body": "x"}));
    assert!(text.is_ascii());
    // another program's reading of it
    let read = python(
        // the newer policy keeps the space between two encoded words of a phrase, against RFC 2047, section 6.2
        "import sys, email\nfrom email.header import decode_header, make_header\nfrom email.utils import parseaddr\n\
         m = email.message_from_bytes(sys.stdin.buffer.read())\n\
         read = lambda text: str(make_header(decode_header(text)))\n\
         (to, address), (sender, _) = parseaddr(m['To']), parseaddr(m['From'])\n\
         print(read(m['Subject']), read(to), address, read(sender))",
        text.as_bytes(),
    );
    if let Some(read) = read {
        assert_eq!(read.trim_end(), format!("{subject} {name} ok@x.test 株式会社"));
    }
}

#[test]
fn long_words_and_lines_never_make_a_line_over_998_octets() {
    formatted(json!({"to": "a@x.test", "subject": "x".repeat(998), "body": "y".repeat(5000)}));
    formatted(
        json!({"to": format!("{} <a@x.test>", "n".repeat(320)), "subject": "é".repeat(998), "body": "é".repeat(5000)}),
    );
    let many = (0..100).map(|n| format!("Name Number {n} <user{n}@example.test>")).collect::<Vec<_>>().join(", ");
    formatted(json!({"to": many, "subject": "", "body": "a\r\nb\rc\n"}));
}

#[test]
fn the_plaintext_rule_holds_and_a_wrong_url_says_why() {
    for (url, allow, ok) in [
        ("smtp://localhost", false, true),
        ("smtp://127.0.0.1:2525", false, true),
        ("smtp://[::1]:2525", false, true),
        ("smtp://mail.example.com", false, false),
        ("smtp://mail.example.com", true, true),
        ("smtp://mail.example.com?tls=required", false, true),
        ("smtp://mail.example.com?tls=opportunistic", true, false),
        ("smtp://mail.example.com?tls=maybe", true, false),
        ("smtp://mail.example.com?tsl=required", true, false),
        ("smtps://user:p%40ss@mail.example.com/worker.example.com", false, true),
        ("smtps://user@mail.example.com", false, false),
        ("http://mail.example.com", true, false),
        ("mail.example.com", true, false),
    ] {
        let parsed = SmtpSettings::parse(url, "shop@example.org", allow);
        assert_eq!(parsed.is_ok(), ok, "{url}: {parsed:?}");
        assert!(!format!("{parsed:?}").contains("p@ss"));
    }
    assert!(SmtpSettings::parse("smtp://localhost", "a@x.test, b@x.test", false).is_err());
    assert!(SmtpSettings::parse("smtp://localhost", "nobody", false).is_err());
}

/// What a Python program prints, when there is a Python.
fn python(program: &str, input: &[u8]) -> Option<String> {
    use std::io::Write;
    use std::process::{Command, Stdio};
    if !Path::new("/usr/bin/python3").exists() {
        return None;
    }
    let mut child = Command::new("/usr/bin/python3")
        .env("PYTHONIOENCODING", "utf-8")
        .args(["-c", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    Some(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap())
}
