//! The HTTP server, on a thread and runtime of its own: it answers while jobs keep every other thread busy, and that is
//! when its answers matter.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::{Health, Metrics};

/// The longest life of a connection, whatever the other side does with it.
const CONNECTION_LIFE: Duration = Duration::from_secs(60);
/// How many connections are served at once; more wait.
const CONNECTIONS: usize = 256;
/// How long open connections may take to end after the shutdown.
const GOODBYE: Duration = Duration::from_secs(1);

/// Serves `/metrics`, `/healthz` and `/readyz` until the shutdown.
///
/// # Errors
/// When the address can't be bound; the error names it.
pub async fn serve(addr: SocketAddr, health: Health, metrics: Metrics, shutdown: CancellationToken) -> io::Result<()> {
    let listener = TcpListener::bind(addr)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|error| io::Error::new(error.kind(), format!("can't serve HTTP on {addr}: {error}")))?;
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new().name("admin".to_owned()).spawn(move || {
        let outcome = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .and_then(|runtime| runtime.block_on(serve_here(listener, health, metrics, shutdown)));
        // Nobody waits any more: the program is ending.
        _ = ended.send(outcome);
    })?;
    end.await.unwrap_or_else(|_| Err(io::Error::other("the HTTP server's thread panicked")))
}

async fn serve_here(
    listener: TcpListener,
    health: Health,
    metrics: Metrics,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let listener = Limited { listener, permits: Arc::new(Semaphore::new(CONNECTIONS)) };
    let asked = shutdown.clone().cancelled_owned();
    let serving = axum::serve(listener, router(health, metrics)).with_graceful_shutdown(asked);
    tokio::select! {
        outcome = serving => outcome,
        () = async { shutdown.cancelled().await; tokio::time::sleep(GOODBYE).await } => Ok(()),
    }
}

fn router(health: Health, metrics: Metrics) -> Router {
    let (alive, ready) = (health.clone(), health.clone());
    let answer = |state: Result<String, String>| match state {
        Ok(notes) => (StatusCode::OK, format!("ok\n{notes}")),
        Err(lines) => (StatusCode::SERVICE_UNAVAILABLE, lines),
    };
    Router::new()
        .route("/healthz", get(move || async move { answer(alive.liveness().map(|()| String::new())) }))
        .route("/readyz", get(move || async move { answer(health.readiness()) }))
        .route(
            "/metrics",
            get(move || async move {
                metrics.ready(ready.readiness().is_ok());
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                ([(header::CONTENT_TYPE, kind)], metrics.text())
            }),
        )
}

/// Accepts a bounded number of connections, each for a bounded time.
struct Limited {
    listener: tokio::net::TcpListener,
    permits: Arc<Semaphore>,
}

impl axum::serve::Listener for Limited {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        // The semaphore is never closed; without a permit the connection is just not counted.
        let permit = self.permits.clone().acquire_owned().await.ok();
        // axum's own accept goes on after an error, with a pause when the process is out of file descriptors.
        let (stream, peer) = axum::serve::Listener::accept(&mut self.listener).await;
        let life = Box::pin(tokio::time::sleep(CONNECTION_LIFE));
        (LimitedStream { stream, life, _permit: permit }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

struct LimitedStream {
    stream: TcpStream,
    life: Pin<Box<Sleep>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl LimitedStream {
    fn over(&mut self, context: &mut Context<'_>) -> bool {
        self.life.as_mut().poll(context).is_ready()
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn get(addr: SocketAddr, path: &str) -> String {
        let mut stream = loop {
            // The server's thread may not have bound yet.
            match TcpStream::connect(addr).await {
                Ok(stream) => break stream,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("the server answers");
        answer
    }

    #[tokio::test]
    async fn the_three_pages_tell_the_truth_even_while_the_programs_own_runtime_is_blocked() {
        let addr = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        let (health, metrics, shutdown) = (Health::new(), Metrics::new([]), CancellationToken::new());
        let part = health.part("postgres");
        let server = tokio::spawn(serve(addr, health.clone(), metrics, shutdown.clone()));
        assert!(get(addr, "/readyz").await.starts_with("HTTP/1.1 503"));
        assert!(get(addr, "/readyz").await.ends_with("postgres: not ready: starting\n"));
        assert!(get(addr, "/metrics").await.contains("\njobrequest_ready 0\n"));
        part.ready();
        assert!(get(addr, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(addr, "/metrics").await.contains("\njobrequest_ready 1\n"));
        assert!(get(addr, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(get(addr, "/metrics").await.contains("# EOF"));
        // This test's runtime has one thread, blocked from here on.
        let blocking = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(get(addr, "/healthz"))
        });
        assert!(blocking.join().expect("no panic").starts_with("HTTP/1.1 200"));
        shutdown.cancel();
        server.await.expect("no panic").expect("it ends well");
    }

    #[tokio::test]
    async fn an_address_in_use_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = taken.local_addr().expect("bound");
        let error = serve(addr, Health::new(), Metrics::new([]), CancellationToken::new()).await.expect_err("in use");
        assert!(error.to_string().starts_with(&format!("can't serve HTTP on {addr}: ")), "{error}");
    }
}
