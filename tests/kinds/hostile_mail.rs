//! Mail servers that mean no good: each conversation ends by its time and takes no more than a bounded answer.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jobrequest::kinds::email::SmtpSettings;
use jobrequest::kinds::{Executed, KindSettings};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use super::{attempt_within, executor, tls};

/// Long enough for all of them at once on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);
/// What an attempt may take longer than its time.
const LATE: Duration = Duration::from_secs(2);
const MIB: usize = 1024 * 1024;
/// What a server without an end would send, and the most that can have left it when the client hangs up: the rest
/// stands in the two sockets' buffers.
const ENDLESS: usize = 256 * MIB;
const IN_SOCKETS: usize = 32 * MIB;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Hang,
    Garbage,
    /// A line without an end.
    Line,
    /// Lines without an end.
    Lines,
    HangUp,
}

#[derive(Debug, Clone, Copy)]
enum Tls {
    None,
    /// From the first byte, with this certificate.
    Implicit(&'static [u8]),
    /// After STARTTLS, to which it says this.
    Upgraded(&'static [u8], &'static str),
    /// Says that TLS may begin, and does not.
    Never,
}

#[derive(Clone)]
struct Server {
    address: SocketAddr,
    tls: Tls,
    /// It acts up at this verb: `greeting`, a command, or `.` for the end of a message.
    at: Option<(&'static str, Act)>,
    sent: Arc<AtomicUsize>,
    commands: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start(tls: Tls, at: Option<(&'static str, Act)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self { address, tls, at, sent: Arc::default(), commands: Arc::default() };
        let shared = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = shared.clone();
                tokio::spawn(async move { server.serve(stream).await });
            }
        });
        server
    }

    fn url(&self) -> String {
        match self.tls {
            Tls::None => format!("smtp://{}", self.address),
            Tls::Implicit(_) => format!("smtps://{}", self.address),
            Tls::Upgraded(..) | Tls::Never => format!("smtp://{}?tls=required", self.address),
        }
    }

    /// One mail to it, and how long that took.
    async fn mail(&self) -> (Executed, Duration) {
        let smtp = SmtpSettings::parse(&self.url(), "shop@example.org", false).unwrap();
        let settings =
            KindSettings { smtp: Some(smtp), extra_roots: Some(tls::ROOT.to_vec()), ..KindSettings::default() };
        let payload = json!({"to": "a@x.test", "subject": "Hi", "body": "Hello"});
        let (attempt, _stop) = attempt_within(&payload, TIMEOUT);
        let started = Instant::now();
        (executor("send_email", &settings).execute(&attempt).await, started.elapsed())
    }

    async fn serve(&self, stream: TcpStream) -> Option<()> {
        match self.tls {
            Tls::None => self.converse(BufReader::new(stream), true, false).await.map(drop),
            Tls::Implicit(certificate) => {
                let stream = tls::acceptor(certificate).accept(stream).await.ok()?;
                self.converse(BufReader::new(stream), true, false).await.map(drop)
            }
            Tls::Upgraded(certificate, _) => {
                let stream = self.converse(BufReader::new(stream), true, true).await?;
                let stream = tls::acceptor(certificate).accept(stream.into_inner()).await.ok()?;
                self.converse(BufReader::new(stream), false, false).await.map(drop)
            }
            Tls::Never => {
                let _stream = self.converse(BufReader::new(stream), true, true).await?;
                std::future::pending().await
            }
        }
    }

    /// Until STARTTLS, where it is offered: then the stream.
    async fn converse<S>(&self, mut stream: BufReader<S>, greets: bool, offers_tls: bool) -> Option<BufReader<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        if greets {
            self.say(&mut stream, "greeting", "220 here\r\n").await?;
        }
        let (mut line, mut in_data) = (Vec::new(), false);
        loop {
            line.clear();
            if stream.read_until(b'\n', &mut line).await.ok()? == 0 {
                return None;
            }
            let command = String::from_utf8_lossy(&line).trim_end().to_owned();
            if in_data && command != "." {
                continue;
            }
            self.commands.lock().unwrap().push(command.clone());
            let verb = command.split([' ', ':']).next().unwrap().to_uppercase();
            in_data = verb == "DATA";
            match verb.as_str() {
                "EHLO" if offers_tls => self.say(&mut stream, "EHLO", "250-here\r\n250 STARTTLS\r\n").await?,
                "EHLO" => self.say(&mut stream, "EHLO", "250-here\r\n250 8BITMIME\r\n").await?,
                "STARTTLS" => {
                    let answer = if let Tls::Upgraded(_, answer) = self.tls { answer } else { "220 go\r\n" };
                    self.say(&mut stream, "STARTTLS", answer).await?;
                    return Some(stream);
                }
                "DATA" => self.say(&mut stream, "DATA", "354 go on\r\n").await?,
                "QUIT" => {
                    self.say(&mut stream, "QUIT", "221 bye\r\n").await?;
                    return None;
                }
                verb => self.say(&mut stream, verb, "250 ok\r\n").await?,
            }
        }
    }

    /// Its answer at this verb, or what it does instead.
    async fn say(&self, stream: &mut (impl AsyncWrite + Unpin), verb: &str, answer: &str) -> Option<()> {
        let act = self.at.filter(|(at, _)| *at == verb).map(|(_, act)| act);
        let block = match act {
            None => return stream.write_all(answer.as_bytes()).await.ok(),
            Some(Act::Hang) => std::future::pending().await,
            Some(Act::HangUp) => return None,
            Some(Act::Garbage) => return stream.write_all(b"\x00\xff\xfe no SMTP at all\r\n").await.ok(),
            Some(Act::Line) => "2".repeat(MIB),
            Some(Act::Lines) => "250-more\r\n".repeat(MIB / 10),
        };
        while self.sent.fetch_add(block.len(), Ordering::SeqCst) < ENDLESS {
            stream.write_all(block.as_bytes()).await.ok()?;
        }
        None
    }
}

#[tokio::test]
async fn a_server_that_acts_up_at_any_verb_ends_the_attempt_in_time_and_is_not_listened_to_without_end() {
    const UNAVAILABLE: &str = "SmtpUnavailable";
    const UNCERTAIN: &str = "OutcomeUncertain";
    let acts = [Act::Hang, Act::Garbage, Act::Line, Act::Lines, Act::HangUp];
    let verbs = [
        ("greeting", "Timeout", UNAVAILABLE),
        ("EHLO", "Timeout", UNAVAILABLE),
        ("MAIL", "Timeout", UNAVAILABLE),
        ("RCPT", "Timeout", UNAVAILABLE),
        // from here on the server may have it
        ("DATA", UNCERTAIN, UNAVAILABLE),
        (".", UNCERTAIN, UNCERTAIN),
        ("QUIT", "", ""),
    ];
    let all = verbs.into_iter().flat_map(|verb| acts.map(|act| (verb, act)));
    futures::future::join_all(all.map(async |((verb, hanging, else_), act)| {
        let server = Server::start(Tls::None, Some((verb, act))).await;
        let (outcome, taken) = server.mail().await;
        let reason = outcome.as_ref().err().map_or("", |failure| failure.reason());
        assert_eq!(reason, if act == Act::Hang { hanging } else { else_ }, "{act:?} at {verb}: {outcome:?}");
        assert!(taken < TIMEOUT + LATE, "{act:?} at {verb}: {taken:?}");
        let sent = server.sent.load(Ordering::SeqCst);
        assert!(sent < IN_SOCKETS, "{act:?} at {verb}: {sent} bytes were taken");
    }))
    .await;
}

#[tokio::test]
async fn an_answer_put_behind_starttls_is_refused_and_no_mail_is_sent() {
    let honest = Server::start(Tls::Upgraded(tls::GOOD, "220 go\r\n"), None).await;
    honest.mail().await.0.unwrap();
    for answer in ["220 go\r\n250 injected\r\n", "220 go\r\n250-injected\r\n250 AUTH PLAIN\r\n", "220 go\r\n2"] {
        let server = Server::start(Tls::Upgraded(tls::GOOD, answer), None).await;
        assert_eq!(server.mail().await.0.unwrap_err().reason(), "SmtpTlsFailed", "{answer:?}");
        let commands = server.commands.lock().unwrap().clone();
        assert!(commands.iter().all(|command| !command.starts_with("MAIL")), "{commands:?}");
    }
}

#[tokio::test]
async fn a_mail_goes_only_to_a_server_whose_certificate_is_good() {
    Server::start(Tls::Implicit(tls::GOOD), None).await.mail().await.0.unwrap();
    for tls in [
        Tls::Implicit(tls::WRONG_NAME),
        Tls::Implicit(tls::EXPIRED),
        Tls::Implicit(tls::STRANGER),
        Tls::Upgraded(tls::WRONG_NAME, "220 go\r\n"),
        Tls::Upgraded(tls::EXPIRED, "220 go\r\n"),
        Tls::Upgraded(tls::STRANGER, "220 go\r\n"),
        Tls::Upgraded(tls::GOOD, "454 not now\r\n"),
    ] {
        let server = Server::start(tls, None).await;
        assert_eq!(server.mail().await.0.unwrap_err().reason(), "SmtpTlsFailed", "{}", server.url());
        assert!(server.commands.lock().unwrap().iter().all(|command| !command.starts_with("MAIL")));
    }
    let (outcome, taken) = Server::start(Tls::Never, None).await.mail().await;
    assert_eq!(outcome.unwrap_err().reason(), "Timeout");
    assert!(taken < TIMEOUT + LATE, "{taken:?}");
}
