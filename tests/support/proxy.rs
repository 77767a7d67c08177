//! Stands between a queue and its Postgres. It reads along: it knows where a request ends and when the server has done
//! it. It cuts a connection before the n-th request reaches the server, or after the server has done it and before
//! anybody hears of it; it refuses all connections (the server is down), or keeps them and passes nothing on (the
//! network is).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Open,
    /// Connections are closed, new ones at once.
    Refused,
    /// Connections stay, and nothing gets through.
    Silent,
}

/// When a request's connection is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The server never sees it.
    Before,
    /// The server has done it, and its reply is lost.
    After,
    /// Not at all: the server never sees it, and nobody hears of that.
    Never,
}

pub struct Proxy {
    address: SocketAddr,
    plan: Arc<Mutex<Plan>>,
    way: watch::Sender<Way>,
    connections: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

/// What is to happen to a request.
#[derive(Default)]
struct Plan {
    needle: Option<(Cut, Vec<u8>)>,
    /// With how many requests are left until then.
    cut: Option<(Cut, usize)>,
    /// How many came, notifications and a pool's bare Sync aside.
    met: usize,
}

/// What a pool asks a connection that comes back to it.
const SYNC: &[u8] = b"S\0\0\0\x04";

impl Plan {
    fn for_request(&mut self, request: &[u8]) -> Option<Cut> {
        let holds = |part: &[u8]| request.windows(part.len()).any(|window| window == part);
        self.met += usize::from(request != SYNC && !holds(b"NOTIFY "));
        if let Some((cut, _)) = self.needle.take_if(|(_, needle)| holds(needle)) {
            return Some(cut);
        }
        // A notification is sent beside the operation, at some time or other.
        let (_, left) = self.cut.as_mut().filter(|_| !holds(b"NOTIFY "))?;
        *left -= 1;
        self.cut.take_if(|(_, left)| *left == 0).map(|(cut, _)| cut)
    }
}

impl Proxy {
    pub async fn before(server: &PgConnectOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let plan = Arc::<Mutex<Plan>>::default();
        let (target, wanted) = ((server.get_host().to_owned(), server.get_port()), Arc::clone(&plan));
        let (way, seen) = watch::channel(Way::Open);
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&connections);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::SeqCst);
                let (mut closing, way) = (seen.clone(), seen.clone());
                let carrying = carry(client, target.clone(), Arc::clone(&wanted), way);
                tokio::spawn(async move {
                    tokio::select! {
                        biased;
                        _ = closing.wait_for(|way| *way == Way::Refused) => {}
                        () = carrying => {}
                    }
                });
            }
        });
        Self { address, plan, way, connections, task }
    }

    /// Takes effect at once, for the connections that are open too.
    pub fn set(&self, way: Way) {
        self.way.send_replace(way);
    }

    /// How many connections were tried so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// The same database by way of this proxy.
    pub fn options(&self, server: PgConnectOptions) -> PgConnectOptions {
        server.host(&self.address.ip().to_string()).port(self.address.port())
    }

    /// The reply to the next request that holds these bytes (an argument as Postgres gets it) ends its connection
    /// instead of being delivered.
    pub fn lose_the_reply_to(&self, bytes: &[u8]) {
        self.plan().needle = Some((Cut::After, bytes.to_vec()));
    }

    /// The next request that holds these bytes gets nowhere, and its connection stays.
    pub fn swallow(&self, bytes: &[u8]) {
        self.plan().needle = Some((Cut::Never, bytes.to_vec()));
    }

    /// Whether such a request came.
    pub fn has_seen_it(&self) -> bool {
        self.plan().needle.is_none()
    }

    /// Cuts the connection of the n-th request from now on, counted from 1 over all connections. Notifications and what
    /// it takes to connect don't count.
    pub fn cut(&self, cut: Cut, request: usize) {
        self.plan().cut = Some((cut, request));
    }

    /// Cuts nothing more. True if the cut was met before.
    pub fn heal(&self) -> bool {
        self.plan().cut.take().is_none()
    }

    /// How many requests came since the last call; notifications and a pool's bare Sync don't count.
    pub fn take_requests(&self) -> usize {
        std::mem::take(&mut self.plan().met)
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().expect("not poisoned")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, target: (String, u16), plan: Arc<Mutex<Plan>>, way: watch::Receiver<Way>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    // How many requests the server has been given and will say of that it is ready for the next.
    let (given, losing) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (mut out, mut back) = (way.clone(), way);
    let requests = async {
        let mut requests = Requests { from: from_client, read: Vec::new(), started: false };
        while let Some((bytes, kind)) = requests.next().await {
            _ = out.wait_for(|way| *way == Way::Open).await;
            if let Kind::Request = kind {
                let met = plan.lock().expect("not poisoned").for_request(&bytes);
                match met {
                    Some(Cut::Before) => return,
                    Some(Cut::Never) => std::future::pending().await,
                    Some(Cut::After) => losing.store(true, Ordering::SeqCst),
                    None => {}
                }
            }
            given.fetch_add(usize::from(kind != Kind::Unanswered), Ordering::SeqCst);
            if to_server.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    let replies = async {
        let mut buffer = vec![0; 64 * 1024];
        let (mut ready, mut done) = (Ready::default(), 0);
        while let Ok(n @ 1..) = from_server.read(&mut buffer).await {
            _ = back.wait_for(|way| *way == Way::Open).await;
            done += ready.count(&buffer[..n]);
            if losing.load(Ordering::SeqCst) {
                if done >= given.load(Ordering::SeqCst) {
                    return;
                }
            } else if to_client.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { () = requests => {}, () = replies => {} }
}

/// What a client sends, in Postgres' protocol.
struct Requests {
    from: OwnedReadHalf,
    read: Vec<u8>,
    started: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Asks for a session; the server says when it is ready.
    Startup,
    /// Up to its Sync, or a simple query; the server says when it is ready for the next.
    Request,
    /// A question for encryption, a password, a goodbye.
    Unanswered,
}

/// The code of the first message that asks for a session; others ask for encryption, or to cancel.
const SESSION: u32 = 196_608;

impl Requests {
    async fn next(&mut self) -> Option<(Vec<u8>, Kind)> {
        let mut at = 0;
        loop {
            // Before the session starts, messages have no letter, and a code after their length.
            let letter = usize::from(self.started);
            self.fill(at + 8 - 3 * letter).await?;
            let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four bytes"));
            let length = letter + number(&self.read[at + letter..at + letter + 4]) as usize;
            self.fill(at + length).await?;
            let kind = match self.read[at] {
                b'S' | b'Q' if self.started => Some(Kind::Request),
                b'X' | b'p' if self.started => Some(Kind::Unanswered),
                _ if self.started => None,
                _ if number(&self.read[at + 4..at + 8]) == SESSION => {
                    self.started = true;
                    Some(Kind::Startup)
                }
                _ => Some(Kind::Unanswered),
            };
            at += length;
            if let Some(kind) = kind {
                return Some((self.read.drain(..at).collect(), kind));
            }
        }
    }

    async fn fill(&mut self, bytes: usize) -> Option<()> {
        while self.read.len() < bytes {
            if self.from.read_buf(&mut self.read).await.ok()? == 0 {
                return None;
            }
        }
        Some(())
    }
}

/// Counts the server's words that it is ready.
#[derive(Default)]
struct Ready {
    head: Vec<u8>,
    /// How much of a message's body is still to come.
    body: usize,
    met: bool,
}

impl Ready {
    fn count(&mut self, mut bytes: &[u8]) -> usize {
        // Without encryption: one byte, no message.
        if !std::mem::replace(&mut self.met, true) && bytes[0] == b'N' {
            bytes = &bytes[1..];
        }
        let mut ready = 0;
        while !bytes.is_empty() {
            let skipped = self.body.min(bytes.len());
            (self.body, bytes) = (self.body - skipped, &bytes[skipped..]);
            let wanted = (5 - self.head.len()).min(bytes.len());
            self.head.extend_from_slice(&bytes[..wanted]);
            bytes = &bytes[wanted..];
            if let [kind, a, b, c, d] = self.head[..] {
                self.body = u32::from_be_bytes([a, b, c, d]) as usize - 4;
                ready += usize::from(kind == b'Z');
                self.head.clear();
            }
        }
        ready
    }
}
