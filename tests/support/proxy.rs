//! Stands between a queue and its Postgres, and loses a reply when told to: the server has done what it was asked,
//! and nobody hears of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub struct Proxy {
    address: SocketAddr,
    lose: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    pub async fn before(server: &PgConnectOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let lose = Arc::new(AtomicBool::new(false));
        let (target, armed) = ((server.get_host().to_owned(), server.get_port()), Arc::clone(&lose));
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, target.clone(), Arc::clone(&armed)));
            }
        });
        Self { address, lose, task }
    }

    /// The same database by way of this proxy.
    pub fn options(&self, server: PgConnectOptions) -> PgConnectOptions {
        server.host(&self.address.ip().to_string()).port(self.address.port())
    }

    /// The next reply of the server ends its connection instead of being delivered; those after it arrive.
    pub fn lose_the_next_reply(&self) {
        self.lose.store(true, Ordering::SeqCst);
    }

    /// Whether a reply was lost since.
    pub fn has_lost_it(&self) -> bool {
        !self.lose.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, target: (String, u16), lose: Arc<AtomicBool>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async {
        drop(tokio::io::copy(&mut from_client, &mut to_server).await);
    };
    let replies = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = from_server.read(&mut buffer).await {
            if lose.swap(false, Ordering::SeqCst) || to_client.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { () = requests => {}, () = replies => {} }
}
