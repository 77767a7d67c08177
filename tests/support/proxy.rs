//! Stands between a queue and its Postgres. It loses a reply when told to (the server has done what it was asked, and
//! nobody hears of it), refuses all connections (the server is down), or keeps them and passes nothing on (the network
//! is).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

type Needle = Arc<Mutex<Option<Vec<u8>>>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Open,
    /// Connections are closed, new ones at once.
    Refused,
    /// Connections stay, and nothing gets through.
    Silent,
}

pub struct Proxy {
    address: SocketAddr,
    needle: Needle,
    way: watch::Sender<Way>,
    connections: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    pub async fn before(server: &PgConnectOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let needle = Needle::default();
        let (target, wanted) = ((server.get_host().to_owned(), server.get_port()), Arc::clone(&needle));
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
        Self { address, needle, way, connections, task }
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
        *self.needle.lock().expect("not poisoned") = Some(bytes.to_vec());
    }

    /// Whether such a request came.
    pub fn has_seen_it(&self) -> bool {
        self.needle.lock().expect("not poisoned").is_none()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, target: (String, u16), needle: Needle, way: watch::Receiver<Way>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let lose = AtomicBool::new(false);
    let (mut out, mut back) = (way.clone(), way);
    let requests = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = from_client.read(&mut buffer).await {
            _ = out.wait_for(|way| *way == Way::Open).await;
            let bytes = &buffer[..n];
            let asked = needle
                .lock()
                .expect("not poisoned")
                .take_if(|wanted| bytes.windows(wanted.len()).any(|window| window == wanted.as_slice()));
            lose.fetch_or(asked.is_some(), Ordering::SeqCst);
            if to_server.write_all(bytes).await.is_err() {
                return;
            }
        }
    };
    let replies = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = from_server.read(&mut buffer).await {
            _ = back.wait_for(|way| *way == Way::Open).await;
            if lose.load(Ordering::SeqCst) || to_client.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { () = requests => {}, () = replies => {} }
}
