use super::*;

use reqwest::header::HeaderValue;

fn headers(pairs: &[(reqwest::header::HeaderName, &'static str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
}

/// A resolver that answers these addresses to every name, wherever its aliases led it.
struct Answering(&'static [&'static str]);

impl Resolve for Answering {
    fn resolve(&self, _: Name) -> Resolving {
        let addresses: Vec<SocketAddr> = self.0.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect();
        Box::pin(async move { Ok(Box::new(addresses.into_iter()) as Addrs) })
    }
}

/// Why a URL is not called, when its name has these addresses.
async fn refusal(egress: &Egress, url: &str, answers: &'static [&'static str]) -> Option<String> {
    let url = match parse_url(url) {
        Ok(url) => url,
        Err(problem) => return Some(problem.to_owned()),
    };
    if let Err(failure) = egress.check(&url) {
        assert_eq!((failure.cause(), failure.reason()), (crate::kinds::FailureCause::Permanent, "AddressNotAllowed"));
        return Some(failure.message().to_owned());
    }
    let Some(Host::Domain(name)) = url.host() else { return None };
    let guarded = Guarded { inner: Arc::new(Answering(answers)), policy: egress.policy.clone() };
    match guarded.resolve(name.parse().unwrap()).await {
        Ok(addresses) => {
            let expected: Vec<IpAddr> = answers.iter().map(|ip| ip.parse().unwrap()).collect();
            assert_eq!(
                addresses.map(|address| address.ip()).collect::<Vec<_>>(),
                expected,
                "what was checked is called"
            );
            None
        }
        Err(error) => Some(error.to_string()),
    }
}

const SCHEME: &str = "must begin with http:// or https://";
const NO_URL: &str = "must be an absolute URL such as https://example.com/path";
const USER: &str = "must not hold a user name or password";
const PORT: &str = "must not use a port of another protocol, such as 25 for mail";
const LOOPBACK: &str = "a loopback address";
const PRIVATE: &str = "a private address";
const METADATA: &str = "a link-local or cloud metadata address";
const UNSPECIFIED: &str = "an unspecified address";
const OUTSIDE: &str = "an address outside the public range";
const MULTICAST: &str = "a multicast address";
const OK: &str = "";

/// A URL, what its name resolves to, and what is wrong with it.
const URLS: &[(&str, &[&str], &str)] = &[
    // other schemes, and what is no URL
    ("ftp://example.com/x", &[], SCHEME),
    ("file:///etc/passwd", &[], SCHEME),
    ("gopher://example.com/", &[], SCHEME),
    ("javascript:alert(1)", &[], SCHEME),
    ("unix:/var/run/docker.sock", &[], SCHEME),
    ("example.com/x", &[], NO_URL),
    ("//example.com/x", &[], NO_URL),
    ("http://", &[], NO_URL),
    ("http://1.2.3.256/", &[], NO_URL),
    ("http://1.2.3.4.5/", &[], NO_URL),
    ("http://0x1ffffffff/", &[], NO_URL),
    ("http://[::1/", &[], NO_URL),
    ("http://[fe80::1%25eth0]/", &[], NO_URL),
    ("http://[::1%lo]/", &[], NO_URL),
    ("http://exa mple.com/", &[], NO_URL),
    ("http://a.test:65536/", &[], NO_URL),
    // user names, which hide the host from a reader
    ("https://user@example.com/", &[], USER),
    ("https://:secret@example.com/", &[], USER),
    ("http://example.com:80@127.0.0.1/", &[], USER),
    ("http://example.com%2f@10.0.0.1/", &[], USER),
    ("http://a@b@127.0.0.1/", &[], USER),
    // where the host ends
    ("http://127.0.0.1\\@example.com/", &[], LOOPBACK),
    ("http://127.0.0.1#@example.com/", &[], LOOPBACK),
    ("http://127.0.0.1?@example.com/", &[], LOOPBACK),
    ("http:\\\\127.0.0.1/", &[], LOOPBACK),
    ("http:127.0.0.1/", &[], LOOPBACK),
    ("ht\ntp://127.0.0\t.1/", &[], LOOPBACK),
    (" http://127.0.0.1/ ", &[], LOOPBACK),
    // ports of other protocols
    ("http://example.com:25/", &[], PORT),
    ("http://example.com:587/", &[], PORT),
    ("http://example.com:465/", &[], PORT),
    ("http://example.com:22/", &[], PORT),
    ("http://example.com:53/", &[], PORT),
    ("http://example.com:143/", &[], PORT),
    ("http://example.com:0/", &[], PORT),
    ("http://example.com:00025/", &[], PORT),
    // one address in many notations
    ("http://127.0.0.1/", &[], LOOPBACK),
    ("http://2130706433/", &[], LOOPBACK),
    ("http://0x7f000001/", &[], LOOPBACK),
    ("http://017700000001/", &[], LOOPBACK),
    ("http://0x7f.1/", &[], LOOPBACK),
    ("http://0177.0.0.1/", &[], LOOPBACK),
    ("http://0x7f.0.0x0.01/", &[], LOOPBACK),
    ("http://127.1/", &[], LOOPBACK),
    ("http://127.0.1/", &[], LOOPBACK),
    ("http://127.0.0.1./", &[], LOOPBACK),
    ("http://0x7f.1./", &[], LOOPBACK),
    ("http://①②⑦.⓪.⓪.①/", &[], LOOPBACK),
    ("http://127。0。0。1/", &[], LOOPBACK),
    ("http://127．0｡0．1/", &[], LOOPBACK),
    ("http://１２７.0.0.1/", &[], LOOPBACK),
    ("http://%31%32%37.0.0.1/", &[], LOOPBACK),
    ("http://127.0.0\u{ad}.1/", &[], LOOPBACK),
    ("http://[::1]/", &[], LOOPBACK),
    ("http://[0:0:0:0:0:0:0:1]/", &[], LOOPBACK),
    ("http://[::ffff:127.0.0.1]/", &[], LOOPBACK),
    ("http://[::ffff:7f00:1]/", &[], LOOPBACK),
    ("http://[::127.0.0.1]/", &[], OUTSIDE),
    ("http://[64:ff9b::7f00:1]/", &[], LOOPBACK),
    ("http://[64:ff9b::127.0.0.1]/", &[], LOOPBACK),
    ("http://[2002:7f00:1::]/", &[], LOOPBACK),
    // every kind of address
    ("http://0/", &[], UNSPECIFIED),
    ("http://0.0.0.0:8080/", &[], UNSPECIFIED),
    ("http://0.255.1.1/", &[], UNSPECIFIED),
    ("http://[::]/", &[], UNSPECIFIED),
    ("http://10.1/", &[], PRIVATE),
    ("http://172.31.255.255/", &[], PRIVATE),
    ("http://192.168.1.1/", &[], PRIVATE),
    ("http://[fd00::1]/", &[], PRIVATE),
    ("http://[fd00:ec2::254]/latest/meta-data/", &[], PRIVATE),
    ("http://[2002:a00:1::]/", &[], PRIVATE),
    ("http://[64:ff9b::a00:1]/", &[], PRIVATE),
    ("http://169.254.169.254/latest/meta-data/", &[], METADATA),
    ("http://2852039166/", &[], METADATA),
    ("http://0xa9fea9fe/", &[], METADATA),
    ("http://[::ffff:a9fe:a9fe]/", &[], METADATA),
    ("http://[64:ff9b::169.254.169.254]/", &[], METADATA),
    ("http://169.254.170.2/v2/credentials", &[], METADATA),
    ("http://168.63.129.16/", &[], "a cloud metadata address"),
    ("http://100.100.100.200/latest/meta-data/", &[], "a carrier-grade NAT address"),
    ("http://100.64.0.1/", &[], "a carrier-grade NAT address"),
    ("http://192.0.0.192/", &[], "a protocol-assignment address"),
    ("http://[fe80::1]/", &[], "a link-local address"),
    ("http://224.0.0.1/", &[], MULTICAST),
    ("http://[ff02::1]/", &[], MULTICAST),
    ("http://255.255.255.255/", &[], "a reserved or broadcast address"),
    ("http://198.18.0.1/", &[], "a benchmarking address"),
    ("http://203.0.113.9/", &[], "a documentation address"),
    ("http://[64:ff9b:1::1]/", &[], OUTSIDE),
    ("http://[fec0::1]/", &[], OUTSIDE),
    ("http://[2001:0:7f00:1::]/", &[], "a protocol-assignment address"),
    // names that are loopback whatever a resolver says
    ("http://localhost/", &["93.184.216.34"], LOOPBACK),
    ("http://LOCALHOST./", &["93.184.216.34"], LOOPBACK),
    ("http://a.b.localhost/", &["93.184.216.34"], LOOPBACK),
    ("http://ｌocalhost/", &["93.184.216.34"], LOOPBACK),
    // names with an address inside, by themselves or as an alias of such a name
    ("http://inside.test/", &["10.0.0.5"], PRIVATE),
    ("http://inside.test./", &["10.0.0.5"], PRIVATE),
    ("http://metadata.google.internal/", &["169.254.169.254"], METADATA),
    ("http://127.0.0.1.nip.test/", &["127.0.0.1"], LOOPBACK),
    ("http://two.test/", &["93.184.216.34", "10.0.0.5"], PRIVATE),
    ("http://two.test/", &["10.0.0.5", "93.184.216.34"], PRIVATE),
    ("http://two.test/", &["2606:4700::1111", "fd00::1"], PRIVATE),
    ("http://two.test/", &["93.184.216.34", "::ffff:169.254.169.254"], METADATA),
    ("http://six.test/", &["64:ff9b::7f00:1"], LOOPBACK),
    ("http://closed.test/", &["9.9.9.9"], "an address this install denies"),
    ("http://9.9.9.9/", &[], "an address this install denies"),
    ("http://[::ffff:9.9.9.9]/", &[], "an address this install denies"),
    ("http://both.test/", &["10.77.9.1"], "an address this install denies"),
    ("http://none.test/", &[], "the host has no address"),
    // and what is called
    ("http://example.com", &["93.184.216.34"], OK),
    ("HTTPS://EXAMPLE.com:8443/a?b#c", &["93.184.216.34", "2606:4700::1111"], OK),
    ("http://例え.テスト/", &["93.184.216.34"], OK),
    ("http://localhost.test/", &["93.184.216.34"], OK),
    ("http://notlocalhost/", &["93.184.216.34"], OK),
    ("http://1.1.1.1/", &[], OK),
    ("http://0x01010101/", &[], OK),
    ("http://[2606:4700::1111]/", &[], OK),
    ("http://[64:ff9b::1.1.1.1]/", &[], OK),
    ("http://[2002:101:101::]/", &[], OK),
    ("http://opened.test/", &["10.77.0.1"], OK),
    ("http://10.77.0.1:8080/", &[], OK),
    ("http://[::ffff:10.77.0.1]/", &[], OK),
];

#[tokio::test]
async fn every_url_is_called_or_refused_with_its_reason() {
    crate::kinds::tests::install_crypto();
    let policy = EgressPolicy::parse("10.77.0.0/16", "9.9.9.0/24 10.77.9.0/24").unwrap();
    let egress = Egress::new(policy, OriginLimit::default(), None, None).unwrap();
    for (url, answers, wanted) in URLS {
        let refusal = refusal(&egress, url, answers).await;
        let as_wanted = match &refusal {
            None => wanted.is_empty(),
            Some(text) => !wanted.is_empty() && text.contains(wanted),
        };
        assert!(as_wanted, "{url:?} {answers:?}: {refusal:?}, not {wanted:?}");
    }
    assert_eq!(parse_url(&format!("https://e.com/{}", "x".repeat(2048))), Err("must be at most 2048 characters"));
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
