use super::*;

use reqwest::header::HeaderValue;

fn headers(pairs: &[(reqwest::header::HeaderName, &'static str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
}

#[test]
fn a_url_is_refused_with_its_reason() {
    for (url, problem) in [
        ("ftp://example.com/x", "must begin with http:// or https://"),
        ("file:///etc/passwd", "must begin with http:// or https://"),
        ("gopher://example.com/", "must begin with http:// or https://"),
        ("example.com/x", "must be an absolute URL such as https://example.com/path"),
        ("http://", "must be an absolute URL such as https://example.com/path"),
        ("http://1.2.3.256/", "must be an absolute URL such as https://example.com/path"),
        ("http://[::1/", "must be an absolute URL such as https://example.com/path"),
        ("https://user@example.com/", "must not hold a user name or password"),
        ("https://:secret@example.com/", "must not hold a user name or password"),
        ("http://example.com:25/", "must not use a port of another protocol, such as 25 for mail"),
        ("http://example.com:587/", "must not use a port of another protocol, such as 25 for mail"),
        ("http://example.com:22/", "must not use a port of another protocol, such as 25 for mail"),
        ("http://example.com:0/", "must not use a port of another protocol, such as 25 for mail"),
    ] {
        assert_eq!(parse_url(url).unwrap_err(), problem, "{url}");
    }
    assert_eq!(parse_url(&format!("https://e.com/{}", "x".repeat(2048))), Err("must be at most 2048 characters"));
    for url in ["http://example.com", "HTTPS://EXAMPLE.com:8443/a?b#c", "http://例え.テスト/", "http://10.0.0.1:8080/"]
    {
        assert!(parse_url(url).is_ok(), "{url}");
    }
}

#[test]
fn a_literal_is_judged_in_every_notation_and_every_failure_is_permanent() {
    crate::kinds::tests::install_crypto();
    let egress = Egress::new(EgressPolicy::default(), None, None).unwrap();
    for url in [
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1./",
        "http://①②⑦.⓪.⓪.①/",
        "http://127。0。0。1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://[fe80::1]/",
        "http://0/",
        "http://0.0.0.0:8080/",
        "http://169.254.169.254/latest/meta-data/",
        "http://2852039166/",
        "http://10.1/",
        "http://192.168.1.1/",
        "http://%31%32%37.0.0.1/",
    ] {
        let failure = egress.check(&Url::parse(url).unwrap()).expect_err(url);
        assert_eq!((failure.cause(), failure.reason()), (crate::kinds::FailureCause::Permanent, "AddressNotAllowed"));
    }
    for url in ["http://1.1.1.1/", "http://[2606:4700::1111]/", "http://0x01010101/"] {
        assert_eq!(egress.check(&Url::parse(url).unwrap()), Ok(()), "{url}");
    }
}

#[test]
fn each_status_succeeds_passes_or_ends_the_job() {
    use crate::kinds::FailureCause::{Passing, Permanent};
    let judged = |status: u16| {
        let status = StatusCode::from_u16(status).unwrap();
        let reply = Reply { status, headers: HeaderMap::new(), body: Vec::new(), truncated: false };
        reply.accepted().map(|_| ()).map_err(|failure| failure.cause())
    };
    for status in [200, 201, 202, 204, 206, 299] {
        assert_eq!(judged(status), Ok(()), "{status}");
    }
    for status in [408, 425, 429, 500, 501, 502, 503, 504, 507, 599] {
        assert_eq!(judged(status), Err(Passing), "{status}");
    }
    for status in [300, 301, 302, 303, 304, 307, 308, 400, 401, 403, 404, 405, 409, 410, 413, 418, 422, 451, 499, 600] {
        assert_eq!(judged(status), Err(Permanent), "{status}");
    }
}

#[test]
fn retry_after_is_read_in_both_forms_and_capped() {
    let now = httpdate::parse_http_date("Thu, 01 Jan 2026 00:00:00 GMT").unwrap();
    let seconds = Duration::from_secs;
    for (value, delay) in [
        ("7", Some(seconds(7))),
        (" 7 ", Some(seconds(7))),
        ("3600", Some(seconds(3600))),
        ("3601", Some(seconds(3600))),
        ("1000000000", Some(seconds(3600))),
        ("99999999999999999999999", Some(seconds(3600))),
        ("0", None),
        ("-1", None),
        ("7.5", None),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 2026 00:00:30 GMT", Some(seconds(30))),
        ("Thursday, 01-Jan-26 00:00:30 GMT", Some(seconds(30))),
        ("Fri, 01 Jan 2100 00:00:00 GMT", Some(seconds(3600))),
        ("Wed, 31 Dec 2025 23:59:59 GMT", None),
        ("Mon, 01 Jan 1990 00:00:00 GMT", None),
    ] {
        assert_eq!(retry_after(&headers(&[(RETRY_AFTER, value)]), now), delay, "{value:?}");
    }
    assert_eq!(retry_after(&HeaderMap::new(), now), None);
}

#[test]
fn a_retry_date_is_measured_on_the_clock_of_the_server_that_sent_it() {
    let wrong_by_years = httpdate::parse_http_date("Tue, 01 Jan 2030 00:00:00 GMT").unwrap();
    let sent = headers(&[(RETRY_AFTER, "Thu, 01 Jan 2026 00:01:00 GMT"), (DATE, "Thu, 01 Jan 2026 00:00:30 GMT")]);
    assert_eq!(retry_after(&sent, wrong_by_years), Some(Duration::from_secs(30)));
}
