//! A scripted SMTP server on loopback. What it says to a RCPT depends on the local part: `perm…` 550, `tmp…` 450 the
//! first time and 250 then, `late…` takes the message, stores it and hangs up before the last 250, `slow…` never
//! answers DATA's end, anything else 250.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// A message as it came, dot-stuffing undone.
#[derive(Debug, Clone)]
pub struct Envelope {
    pub from: String,
    pub to: Vec<String>,
    pub data: Vec<u8>,
}

impl Envelope {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.data).into_owned()
    }

    /// The value of a header with its folding undone.
    pub fn header(&self, name: &str) -> String {
        let text = self.text();
        let head = text.split("\r\n\r\n").next().unwrap().replace("\r\n ", " ").replace("\r\n\t", " ");
        let prefix = format!("{name}: ");
        head.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default().to_owned()
    }
}

#[derive(Default)]
struct State {
    stored: Vec<Envelope>,
    /// Every command line, and `DATA` bodies not.
    commands: Vec<String>,
    put_off: HashSet<String>,
}

#[derive(Clone)]
pub struct SmtpServer {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
    /// Told when a message has been read whole and not yet been answered.
    pub read: Arc<Notify>,
}

impl SmtpServer {
    pub async fn start() -> Self {
        Self::offering("8BITMIME\r\n250-SMTPUTF8").await
    }

    /// With these extensions in the answer to EHLO, `\r\n250-` between them.
    pub async fn offering(extensions: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server =
            Self { address: listener.local_addr().unwrap(), state: Arc::default(), read: Arc::new(Notify::new()) };
        let shared = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = shared.clone();
                tokio::spawn(async move { shared.converse(stream, extensions).await });
            }
        });
        server
    }

    pub fn url(&self) -> String {
        format!("smtp://{}", self.address)
    }

    pub fn stored(&self) -> Vec<Envelope> {
        self.state.lock().unwrap().stored.clone()
    }

    pub fn commands(&self) -> Vec<String> {
        self.state.lock().unwrap().commands.clone()
    }

    /// How many copies an address has got.
    pub fn copies(&self, address: &str) -> usize {
        self.stored().iter().filter(|envelope| envelope.to.iter().any(|to| to == address)).count()
    }

    async fn converse(&self, stream: TcpStream, extensions: &str) -> Option<()> {
        let mut stream = BufReader::new(stream);
        stream.write_all(b"220 sink ESMTP\r\n").await.ok()?;
        let (mut from, mut to) = (String::new(), Vec::new());
        let mut line = Vec::new();
        loop {
            line.clear();
            if stream.read_until(b'\n', &mut line).await.ok()? == 0 {
                return None;
            }
            let command = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.state.lock().unwrap().commands.push(command.clone());
            let verb = command.split([' ', ':']).next().unwrap_or_default().to_uppercase();
            let address = || command.split_once('<').and_then(|(_, rest)| rest.split('>').next()).map(str::to_owned);
            let reply = match verb.as_str() {
                "EHLO" => format!("250-sink\r\n250-{extensions}\r\n250 HELP\r\n"),
                "MAIL" => {
                    (from, to) = (address()?, Vec::new());
                    "250 2.1.0 ok\r\n".to_owned()
                }
                "RCPT" => {
                    let address = address()?;
                    let first = self.state.lock().unwrap().put_off.insert(address.clone());
                    if address.starts_with("perm") {
                        format!("550 5.1.1 <{address}> unknown\r\n")
                    } else if address.starts_with("tmp") && first {
                        "450 4.2.1 try later\r\n".to_owned()
                    } else {
                        to.push(address);
                        "250 2.1.5 ok\r\n".to_owned()
                    }
                }
                "DATA" => {
                    stream.write_all(b"354 go on\r\n").await.ok()?;
                    let data = read_data(&mut stream).await?;
                    let lost = to.iter().any(|address| address.starts_with("late"));
                    let slow = to.iter().any(|address| address.starts_with("slow"));
                    let envelope = Envelope { from: from.clone(), to: to.clone(), data };
                    self.state.lock().unwrap().stored.push(envelope);
                    self.read.notify_one();
                    if slow {
                        std::future::pending::<()>().await;
                    }
                    if lost {
                        return None;
                    }
                    "250 2.0.0 taken\r\n".to_owned()
                }
                "QUIT" => {
                    stream.write_all(b"221 bye\r\n").await.ok()?;
                    return None;
                }
                _ => "250 ok\r\n".to_owned(),
            };
            stream.write_all(reply.as_bytes()).await.ok()?;
        }
    }
}

async fn read_data(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut data = Vec::new();
    loop {
        let mut line = Vec::new();
        // to the LF, so that a bare one would show as a line of its own
        if stream.read_until(b'\n', &mut line).await.ok()? == 0 {
            return None;
        }
        if line == b".\r\n" {
            return Some(data);
        }
        data.extend_from_slice(line.strip_prefix(b".").unwrap_or(&line));
    }
}
