//! What a mail server says, bounded before anything reads it.
//!
//! lettre looks at a line's length once it has the whole line, and after STARTTLS it still believes what came in one
//! packet with the answer to it, unencrypted. From here it gets one line at a time and so much for each command at most:
//! what an attacker has put behind the answer goes to the TLS handshake, which fails over it.

#![expect(
    deprecated,
    reason = "lettre's stream is meant to be private; without it TLS would be set up here a second time"
)]

use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use futures::{AsyncRead as _, AsyncWrite as _};
use lettre::transport::smtp::client::{AsyncNetworkStream, AsyncTokioStream, TlsParameters};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The most bytes between two of ours. Below TLS, the other side's certificates are among them.
const MAX_ANSWER_BYTES: usize = 64 * 1024;
/// The most lines: lettre reads an answer from its beginning again with each. What is encrypted has one in 256 bytes.
const MAX_ANSWER_LINES: usize = 512;
const CHUNK: usize = 4096;

#[derive(Debug)]
pub(super) struct Bounded<S> {
    inner: S,
    peer: SocketAddr,
    /// Read and not yet asked for.
    held: BytesMut,
    left: usize,
    lines_left: usize,
}

impl<S> Bounded<S> {
    pub(super) fn new(inner: S, peer: SocketAddr) -> Self {
        Self { inner, peer, held: BytesMut::new(), left: MAX_ANSWER_BYTES, lines_left: MAX_ANSWER_LINES }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let Self { inner, peer: _, held, left, lines_left } = self.get_mut();
        let too_long = || Error::new(ErrorKind::InvalidData, "its answer has more than 64 KiB or 512 lines");
        if held.is_empty() {
            let mut chunk = [0; CHUNK];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(inner).poll_read(context, &mut read))?;
            let read = read.filled();
            *left = left.checked_sub(read.len()).ok_or_else(too_long)?;
            held.extend_from_slice(read);
        }
        let line = held.iter().position(|byte| *byte == b'\n').map_or(held.len(), |at| at + 1);
        let length = line.min(into.remaining());
        if held[..length].ends_with(b"\n") {
            *lines_left = lines_left.checked_sub(1).ok_or_else(too_long)?;
        }
        into.put_slice(&held[..length]);
        held.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        (this.left, this.lines_left) = (MAX_ANSWER_BYTES, MAX_ANSWER_LINES);
        Pin::new(&mut this.inner).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + Sync + std::fmt::Debug> AsyncTokioStream for Bounded<S> {
    fn peer_addr(&self) -> Result<SocketAddr> {
        Ok(self.peer)
    }
}

/// Encrypted from the first byte, so that it can be bounded above its TLS.
#[derive(Debug)]
pub(super) struct Encrypted(AsyncNetworkStream);

impl Encrypted {
    /// # Errors
    /// When the handshake fails or the certificate is not trusted.
    pub(super) async fn over(
        tcp: TcpStream,
        parameters: TlsParameters,
    ) -> std::result::Result<Self, lettre::transport::smtp::Error> {
        let mut stream = AsyncNetworkStream::use_existing_tokio1(Box::new(tcp));
        stream.upgrade_tls(parameters).await?;
        Ok(Self(stream))
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let read = ready!(Pin::new(&mut self.get_mut().0).poll_read(context, into.initialize_unfilled()))?;
        into.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_close(context)
    }
}
