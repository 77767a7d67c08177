//! An HTTP receiver on loopback that keeps what it got and answers as the path says.
//!
//! `/ok` 204 · `/code/N` (with `?ra=VALUE` a Retry-After) · `/redir?to=URL` · `/hold` never answers · `/gate/NAME` 204, or
//! with `?code=N` that, once the test opens the gate of this name · `/endless` a body without end · `/trickle` the head at
//! once, then a byte every 100 ms · `/reset` closes without an answer · `/file` the bytes it was given.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

#[derive(Debug, Clone)]
pub struct Hit {
    pub method: String,
    pub target: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Hit {
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }
}

#[derive(Clone)]
pub struct Sink {
    pub address: SocketAddr,
    hits: Arc<Mutex<Vec<Hit>>>,
    gates: watch::Sender<HashSet<String>>,
    /// Targets whose caller hung up before the gate opened.
    abandoned: Arc<Mutex<Vec<String>>>,
}

impl Sink {
    pub async fn start() -> Self {
        Self::serving(Vec::new()).await
    }

    /// Answers `/file` with these bytes.
    pub async fn serving(file: Vec<u8>) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), file)
    }

    /// The same, where somebody has chosen the port.
    pub fn on(listener: TcpListener, file: Vec<u8>) -> Self {
        let address = listener.local_addr().unwrap();
        let hits: Arc<Mutex<Vec<Hit>>> = Arc::default();
        let gates = watch::Sender::default();
        let sink = Self { address, hits, gates, abandoned: Arc::default() };
        let (shared, file) = (sink.clone(), Arc::new(file));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (shared, file) = (shared.clone(), file.clone());
                tokio::spawn(async move { shared.serve(stream, file).await });
            }
        });
        sink
    }

    pub fn url(&self, target: &str) -> String {
        format!("http://{}{target}", self.address)
    }

    pub fn hits(&self) -> Vec<Hit> {
        self.hits.lock().unwrap().clone()
    }

    /// How often this target was asked for.
    pub fn count(&self, target: &str) -> usize {
        self.hits.lock().unwrap().iter().filter(|hit| hit.target == target).count()
    }

    /// Lets `/gate/NAME` answer, who waits there and who comes.
    pub fn open(&self, name: &str) {
        self.gates.send_modify(|open| _ = open.insert(name.to_owned()));
    }

    /// Whether a caller of this target hung up before its gate opened.
    pub fn was_abandoned(&self, target: &str) -> bool {
        self.abandoned.lock().unwrap().iter().any(|known| known == target)
    }

    /// Waits for the gate; none if the caller hangs up first.
    async fn pass_gate(&self, stream: &TcpStream, target: &str, name: &str) -> Option<()> {
        let mut gates = self.gates.subscribe();
        let hung_up = async {
            let mut byte = [0];
            while !matches!(stream.peek(&mut byte).await, Ok(0) | Err(_)) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            open = gates.wait_for(|open| open.contains(name)) => open.ok().map(drop),
            () = hung_up => {
                self.abandoned.lock().unwrap().push(target.to_owned());
                None
            }
        }
    }

    async fn serve(&self, mut stream: TcpStream, file: Arc<Vec<u8>>) -> Option<()> {
        let mut buffer = Vec::new();
        loop {
            let hit = read_request(&mut stream, &mut buffer).await?;
            self.hits.lock().unwrap().push(hit.clone());
            let (path, query) = hit.target.split_once('?').unwrap_or((&hit.target, ""));
            let parameter = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            let answer = match path {
                "/ok" => "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
                "/redir" => format!(
                    "HTTP/1.1 302 Found\r\nLocation: {}\r\nContent-Length: 0\r\n\r\n",
                    parameter("to").unwrap_or("/ok")
                ),
                "/hold" => std::future::pending().await,
                gate if gate.starts_with("/gate/") => {
                    self.pass_gate(&stream, &hit.target, &gate["/gate/".len()..]).await?;
                    let code = parameter("code").unwrap_or("204");
                    format!(
                        "HTTP/1.1 {code} Status\r\n{}\r\n",
                        if code == "204" { "" } else { "Content-Length: 0\r\n" }
                    )
                }
                "/reset" => return None,
                "/endless" => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n").await.ok()?;
                    loop {
                        stream.write_all(&[b'x'; 65536]).await.ok()?;
                    }
                }
                "/trickle" => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n").await.ok()?;
                    loop {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        stream.write_all(b"x").await.ok()?;
                    }
                }
                "/file" => {
                    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", file.len());
                    stream.write_all(head.as_bytes()).await.ok()?;
                    stream.write_all(&file).await.ok()?;
                    continue;
                }
                code => {
                    let code = code.strip_prefix("/code/").unwrap_or("404");
                    let retry = parameter("ra").map(|value| format!("Retry-After: {value}\r\n")).unwrap_or_default();
                    format!("HTTP/1.1 {code} Status\r\n{retry}Content-Length: 2\r\n\r\nno")
                }
            };
            stream.write_all(answer.as_bytes()).await.ok()?;
        }
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Hit> {
    let head_end = loop {
        if let Some(found) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break found + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&buffer[..head_end]).into_owned();
    let mut lines = head.lines();
    let mut request = lines.next()?.split(' ');
    let (method, target) = (request.next()?.to_owned(), request.next()?.to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length: usize = length.map_or(0, |(_, value)| value.parse().unwrap());
    while buffer.len() < head_end + length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    let body = buffer[head_end..head_end + length].to_vec();
    buffer.drain(..head_end + length);
    Some(Hit { method, target, headers, body })
}
