//! Web servers that mean no good, all at once on one worker: each costs its own job and nothing else.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jobrequest::kinds::FailureCause;
use jobrequest::queue::NewJob;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use uuid::Uuid;

use super::memory::{BESIDE_MIB, peak_kib};
use super::sink::Sink;
use super::support::db::Database;
use super::support::program::Program;
use super::{attempt, executor, loopback, tls};

const PATIENCE: Duration = Duration::from_secs(120);
/// Long enough for a busy machine to do a good job while those that never end still run.
const TIMEOUT_SECONDS: u32 = 10;
/// What a job that never ends may take longer than its time.
const LATE: f64 = 2.0;
/// Two sources without an end are read up to 32 MiB, into a buffer that doubles.
const SOURCES_MIB: u64 = 2 * 64;

const DONE: &str = "succeeded";
const OVER: &str = "Timeout";
const BROKEN: &str = "RequestFailed";
const UNREACHED: &str = "ConnectFailed";

/// What a server does, and what becomes of a webhook and of a picture's source that are its.
const CASES: &[(&str, &str, &str)] = &[
    ("silent", OVER, OVER),
    ("slow head", OVER, OVER),
    ("slow body", OVER, OVER),
    ("slow chunks", OVER, OVER),
    ("continue for ever", OVER, OVER),
    ("endless body", DONE, "SourceTooLarge"),
    ("endless chunks", DONE, "SourceTooLarge"),
    ("gzip bomb", DONE, "ImageUnsupported"),
    ("long header", BROKEN, BROKEN),
    ("many headers", BROKEN, BROKEN),
    ("large error", "ServerBusy", "ServerBusy"),
    ("redirects", "StatusRefused", "StatusRefused"),
    ("short body", BROKEN, BROKEN),
    ("two lengths", BROKEN, BROKEN),
    ("negative length", BROKEN, BROKEN),
    ("length over 64 bits", BROKEN, BROKEN),
    ("chunk size over 64 bits", BROKEN, BROKEN),
    ("chunk size of letters", BROKEN, BROKEN),
    ("chunk cut short", BROKEN, BROKEN),
    ("chunk too long", BROKEN, BROKEN),
    ("endless chunk extension", BROKEN, BROKEN),
    ("endless trailers", BROKEN, BROKEN),
    ("another protocol", BROKEN, BROKEN),
    ("another version", BROKEN, BROKEN),
    ("hang up", BROKEN, BROKEN),
    ("tls good", DONE, "ImageUnsupported"),
    ("tls wrong name", UNREACHED, UNREACHED),
    ("tls expired", UNREACHED, UNREACHED),
    ("tls stranger", UNREACHED, UNREACHED),
    ("tls spoken to in plain", UNREACHED, UNREACHED),
    ("tls silent", OVER, OVER),
];

/// One case's server, an origin of its own.
struct Hostile {
    url: String,
    connections: Arc<AtomicUsize>,
}

impl Hostile {
    async fn start(case: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = connections.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, case, address));
            }
        });
        let scheme = if case.starts_with("tls") { "https" } else { "http" };
        Self { url: format!("{scheme}://{address}/"), connections }
    }
}

async fn serve(mut stream: TcpStream, case: &str, address: SocketAddr) {
    let certificate = match case {
        "tls good" => tls::GOOD,
        "tls wrong name" => tls::WRONG_NAME,
        "tls expired" => tls::EXPIRED,
        "tls stranger" => tls::STRANGER,
        "tls spoken to in plain" => {
            drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await);
            return;
        }
        "tls silent" => std::future::pending().await,
        _ => {
            drop(converse(&mut stream, case, address).await);
            return;
        }
    };
    if let Ok(mut stream) = tls::acceptor(certificate).accept(stream).await {
        drop(converse(&mut stream, case, address).await);
        drop(stream.shutdown().await);
    }
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> std::io::Result<()> {
    let mut read = Vec::new();
    while !read.windows(4).any(|four| four == b"\r\n\r\n") {
        if stream.read_buf(&mut read).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

/// Ends when the other side hangs up, if it does not end by itself.
async fn converse(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    case: &str,
    address: SocketAddr,
) -> std::io::Result<()> {
    if case == "another protocol" {
        return stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await;
    }
    read_request(stream).await?;
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let answer = match case {
        "silent" => std::future::pending().await,
        "slow head" => return again(stream, "HTTP/1.1 200 OK\r\nX-Long: ", b"x", true).await,
        "slow body" => return again(stream, "HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n", b"x", true).await,
        "slow chunks" => return again(stream, chunked, b"1\r\nx\r\n", true).await,
        "continue for ever" => return again(stream, "", b"HTTP/1.1 100 Continue\r\n\r\n", true).await,
        "endless body" => {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n";
            // The length alone tells a picture's job; a body without one has to be counted.
            return again(stream, head, &[b'x'; 65536], false).await;
        }
        "endless chunks" => {
            let chunk = [b"10000\r\n".as_slice(), &[b'x'; 65536], b"\r\n"].concat();
            return again(stream, chunked, &chunk, false).await;
        }
        "gzip bomb" => {
            // One gzip stream that inflates to a gigabyte.
            let bomb = include_bytes!("../data/zeros.gz").repeat(100);
            let length = bomb.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {length}\r\n\r\n");
            stream.write_all(head.as_bytes()).await?;
            return stream.write_all(&bomb).await;
        }
        "long header" => return again(stream, "HTTP/1.1 200 OK\r\nX-Long: ", &[b'x'; 65536], false).await,
        "many headers" => return again(stream, "HTTP/1.1 200 OK\r\n", b"X: y\r\n", false).await,
        "redirects" => format!("HTTP/1.1 302 Found\r\nLocation: http://{address}/next\r\nContent-Length: 0\r\n\r\n"),
        "large error" => {
            let body = "é".repeat(1024 * 1024);
            format!("HTTP/1.1 500 {}\r\nContent-Length: {}\r\n\r\n{body}", "x".repeat(4096), body.len())
        }
        "short body" => "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n0123456789".to_owned(),
        "two lengths" => "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 2\r\n\r\nhello".to_owned(),
        "negative length" => "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello".to_owned(),
        "length over 64 bits" => "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nhello".to_owned(),
        "chunk size over 64 bits" => format!("{chunked}fffffffffffffffff\r\nhello"),
        "chunk size of letters" => format!("{chunked}five\r\nhello\r\n0\r\n\r\n"),
        "chunk cut short" => format!("{chunked}ff\r\nhello"),
        "chunk too long" => format!("{chunked}2\r\nhello\r\n0\r\n\r\n"),
        "endless chunk extension" => return again(stream, &format!("{chunked}5;"), &[b'x'; 65536], false).await,
        "endless trailers" => return again(stream, &format!("{chunked}0\r\n"), b"X: y\r\n", false).await,
        "another version" => "HTTP/3.7 200 OK\r\nContent-Length: 5\r\n\r\nhello".to_owned(),
        "hang up" => return Ok(()),
        "tls good" => "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello".to_owned(),
        other => unreachable!("{other} is no case"),
    };
    stream.write_all(answer.as_bytes()).await
}

/// A head, and then the same for ever.
async fn again(stream: &mut (impl AsyncWrite + Unpin), head: &str, bytes: &[u8], slowly: bool) -> std::io::Result<()> {
    stream.write_all(head.as_bytes()).await?;
    loop {
        stream.write_all(bytes).await?;
        if slowly {
            stream.flush().await?;
            sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn enqueue(db: &Database, kind: &str, url: &str) -> Uuid {
    let payload = match kind {
        "resize_image" => json!({"source_url": url, "width": 10, "height": 10}),
        _ => json!({"url": url, "body": {}}),
    };
    let job = NewJob { max_attempts: 1, timeout_seconds: TIMEOUT_SECONDS, ..NewJob::new(kind, payload) };
    db.queue().enqueue(&job).await.unwrap().id()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_web_server_costs_its_own_job_and_neither_memory_nor_time_of_others() {
    let (db, directory) = (Database::new().await, tempfile::tempdir().unwrap());
    let store = url::Url::from_directory_path(directory.path()).unwrap();
    let roots = directory.path().join("root.pem");
    std::fs::write(&roots, tls::ROOT).unwrap();
    let url = db.url();
    let worker = Program::start(
        &["worker"],
        &[
            ("DATABASE_URL", url.as_str()),
            ("JOBREQUEST_CONCURRENCY", "64"),
            ("JOBREQUEST_POLL_SECONDS", "0.1"),
            ("JOBREQUEST_EGRESS_ALLOW", "127.0.0.0/8"),
            ("JOBREQUEST_OBJECT_STORE_URL", store.as_str()),
            ("JOBREQUEST_EXTRA_CA_FILE", roots.to_str().unwrap()),
            // Sources of unknown length wait for each other: here is room for all of them.
            ("JOBREQUEST_MEMORY_BUDGET_MIB", "4096"),
        ],
    );
    worker.until("/readyz", 200).await;
    let sink = Sink::start().await;
    let first = enqueue(&db, "webhook_delivery", &sink.url("/ok")).await;
    db.until_status(first, DONE, PATIENCE).await;
    for (kind, most_mib) in [("webhook_delivery", BESIDE_MIB), ("resize_image", BESIDE_MIB + SOURCES_MIB)] {
        let before = peak_kib(&worker);
        let mut jobs = Vec::new();
        for (case, webhook, image) in CASES {
            let server = Hostile::start(case).await;
            let wanted = if kind == "resize_image" { image } else { webhook };
            jobs.push((*case, *wanted, enqueue(&db, kind, &server.url).await, server));
        }
        let holding = jobs.iter().filter(|(_, wanted, ..)| *wanted == OVER).count() as i64;
        let started = Instant::now();
        while db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'queued'").await > 0 {
            assert!(started.elapsed() < PATIENCE);
            sleep(Duration::from_millis(20)).await;
        }
        let asked = Instant::now();
        let good = enqueue(&db, "webhook_delivery", &sink.url("/ok")).await;
        db.until_status(good, DONE, PATIENCE).await;
        let beside = asked.elapsed();
        let running = db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'running'").await;
        assert!(running >= holding, "the good job was done after {beside:?}, when of {holding} {running} were running");
        for (case, wanted, id, server) in &jobs {
            let started = Instant::now();
            while ["queued", "running"].contains(&db.status(*id).await.as_str()) {
                assert!(started.elapsed() < PATIENCE, "{case}");
                sleep(Duration::from_millis(20)).await;
            }
            let (status, error, seconds) = db
                .one::<(String, Option<String>, f64)>(&format!(
                    "SELECT status, last_error, extract(epoch FROM finished_at - started_at)::float8 FROM jobs \
                     WHERE id = '{id}'"
                ))
                .await;
            let is_wanted = match &error {
                None => status == *wanted,
                Some(error) => error.starts_with(&format!("{wanted}: ")),
            };
            let shown = error.as_deref().unwrap_or_default();
            assert!(shown.len() < 512 && !shown.contains('é') && !shown.contains("xx"), "{case}: {shown}");
            assert!(is_wanted, "{kind}, {case}: {status}, {error:?}");
            assert!(seconds < f64::from(TIMEOUT_SECONDS) + LATE, "{kind}, {case}: {seconds} s");
            assert_eq!(server.connections.load(Ordering::SeqCst), 1, "{kind}, {case}");
        }
        let taken = (peak_kib(&worker) - before) / 1024;
        println!(
            "{kind}: {} hostile servers at once, {taken} MiB more, a good job beside them in {beside:?}",
            jobs.len()
        );
        assert!(taken < most_mib, "{kind}: {taken} MiB more than before");
    }
}

/// Answers with so many bytes as the path says, and resets the connection.
async fn cutting(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut read = Vec::new();
            while !read.ends_with(b"{}") {
                stream.read_buf(&mut read).await.unwrap();
            }
            let path = std::str::from_utf8(&read).unwrap().split(['/', ' ']).nth(2).unwrap();
            stream.write_all(&answer[..path.parse().unwrap()]).await.unwrap();
            stream.set_zero_linger().unwrap();
        }
    });
    address
}

#[tokio::test]
async fn an_answer_that_is_reset_at_any_byte_is_never_taken_for_whole() {
    for answer in [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello".as_slice(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
    ] {
        let address = cutting(answer).await;
        let executor = executor("webhook_delivery", &loopback());
        for length in 0..answer.len() {
            let payload = json!({"url": format!("http://{address}/{length}"), "body": {}});
            let failure = executor.execute(&attempt(&payload)).await.unwrap_err();
            assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, BROKEN), "after {length} bytes");
        }
    }
}
