//! The guarded HTTP client: the only way a URL out of a payload is ever called.
//!
//! Payloads come from strangers and the worker sits inside somebody's network. So: http and https only, no ports of
//! other protocols, no redirects, no proxy, no credentials in the URL; a host is resolved, every address it has is
//! checked, and the connection goes to a checked address, because the check happens inside the client's own resolver
//! (a second answer of a rebinding server is checked again or never asked for). One deadline covers everything from
//! DNS to the body's last byte, and only so many bytes of a body are read, counted as they arrive; nothing is
//! decompressed. An origin gets so many calls of a namespace at once, and none while it rests (`origins`). Endpoints that
//! the operator sets (SMTP, object store) don't come through here.

mod address;
mod origins;
#[cfg(test)]
mod tests;

use std::error::Error as StdError;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use reqwest::{Client, Request, Response, StatusCode, redirect};
use tokio::time::Instant;
use url::{Host, Url};

pub use address::EgressPolicy;
pub use origins::OriginLimit;

use self::origins::{Call, Origins, Shown};
use super::{Attempt, Failure, NO_NAMESPACE, SettingsError};

/// The longest wait another server can ask for.
pub(crate) const RETRY_AFTER_CAP: Duration = Duration::from_secs(3600);

const MAX_URL_CHARS: usize = 2048;

/// So that a host that answers nothing at all is known for one that can't be reached.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Ports on which no web server is called, because something else that understands stray HTTP may listen: the "bad
/// ports" of the WHATWG Fetch standard, section 2.9, mail among them.
const OTHER_PROTOCOLS: &[u16] = &[
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109,
    110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530, 531,
    532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060,
    5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
];

/// A client for URLs from payloads. Cheap to clone; clones share its pool of kept-alive connections.
#[derive(Clone)]
pub struct Egress {
    client: Client,
    policy: Arc<EgressPolicy>,
    origins: Arc<Origins>,
}

/// What a server answered.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// The body's first bytes, as many as the caller wanted at most.
    pub body: Vec<u8>,
    /// Whether there was more.
    pub truncated: bool,
}

impl Egress {
    /// `extra_roots` are trusted beside the system's; `resolver` replaces the system's one.
    ///
    /// # Errors
    /// When the certificates can't be read or no TLS provider is installed.
    pub fn new(
        policy: EgressPolicy,
        limit: OriginLimit,
        extra_roots: Option<&[u8]>,
        resolver: Option<Arc<dyn Resolve>>,
    ) -> Result<Self, SettingsError> {
        let policy = Arc::new(policy);
        let inner = resolver.unwrap_or_else(|| Arc::new(SystemResolver));
        let mut builder = Client::builder()
            .dns_resolver(Guarded { inner, policy: policy.clone() })
            .redirect(redirect::Policy::none())
            .referer(false)
            .no_proxy()
            .connect_timeout(CONNECT_WITHIN)
            .pool_idle_timeout(Duration::from_secs(30))
            .user_agent(concat!("JobRequest/", env!("CARGO_PKG_VERSION")));
        if let Some(pem) = extra_roots {
            let roots = reqwest::Certificate::from_pem_bundle(pem)
                .map_err(|_| SettingsError::new("the extra CA certificates are not PEM"))?;
            builder = builder.tls_certs_merge(roots);
        }
        let client = builder
            .build()
            .map_err(|e| SettingsError::new(format!("the HTTP client can't start: {}", root_cause(&e))))?;
        Ok(Self { client, policy, origins: Arc::new(Origins::new(limit)) })
    }

    /// As [`Self::send`] until the attempt's time is nearly over, when its origin has room for its namespace.
    ///
    /// # Errors
    /// Those of [`Self::send`]; handed back `OriginBusy` or `OriginResting`, and then nothing was sent.
    pub(crate) async fn call(&self, attempt: &Attempt, request: Request, limit: usize) -> Result<Reply, Failure> {
        let call = self.enter(attempt, request.url()).await?;
        let outcome = self.send(request, limit, attempt.soft_deadline()).await;
        call.shows(Shown::by(outcome.as_ref()));
        outcome
    }

    async fn enter(&self, attempt: &Attempt, url: &Url) -> Result<Call, Failure> {
        self.check(url)?;
        let namespace = attempt.namespace.as_deref().unwrap_or(NO_NAMESPACE);
        self.origins.enter(namespace, url, attempt.remaining() / 2).await
    }

    /// Sends a request and reads up to `limit` bytes of the answer, all before `deadline`.
    ///
    /// # Errors
    /// Permanent `UrlNotAllowed` or `AddressNotAllowed`; passing `Timeout`, `DnsFailed`, `ConnectFailed` or
    /// `RequestFailed`. An answer of any status is not an error here: see [`Reply::accepted`].
    pub async fn send(&self, request: Request, limit: usize, deadline: Instant) -> Result<Reply, Failure> {
        self.check(request.url())?;
        tokio::time::timeout_at(deadline, self.exchange(request, limit)).await.unwrap_or_else(|_| Err(timed_out()))
    }

    /// A name is checked when it is resolved; an address literal never reaches a resolver.
    fn check(&self, url: &Url) -> Result<(), Failure> {
        check_url(url).map_err(|problem| Failure::permanent("UrlNotAllowed", format!("the URL {problem}")))?;
        let literal = match url.host() {
            Some(Host::Ipv4(v4)) => IpAddr::from(v4),
            Some(Host::Ipv6(v6)) => IpAddr::from(v6),
            Some(Host::Domain(_)) | None => return Ok(()),
        };
        self.policy.check(literal).map_err(|what| Refused { what }.into())
    }

    /// As [`Self::call`], with a body of an accepted status only, and none of it read before `room` has given some for
    /// its length; none when the server doesn't say it.
    ///
    /// # Errors
    /// Those of [`Self::call`], of [`Reply::accepted`] and of `room`.
    pub(crate) async fn download<R>(
        &self,
        attempt: &Attempt,
        request: Request,
        limit: usize,
        room: impl AsyncFnOnce(Option<u64>) -> Result<R, Failure>,
    ) -> Result<(Reply, R), Failure> {
        let call = self.enter(attempt, request.url()).await?;
        let exchange = async {
            let response = self.client.execute(request).await.map_err(failure);
            let mut response = response.inspect_err(|failure| call.shows(Shown::by(Err(failure))))?;
            let length = response.content_length();
            let reply = Reply::head(&mut response);
            call.shows(Shown::by(Ok(&reply)));
            let mut reply = reply.accepted()?;
            let room = room(length).await?;
            let known = length.and_then(|length| usize::try_from(length).ok());
            reply.read(&mut response, known.map_or(limit, |length| length.min(limit))).await?;
            Ok((reply, room))
        };
        tokio::time::timeout_at(attempt.soft_deadline(), exchange).await.unwrap_or_else(|_| Err(timed_out()))
    }

    async fn exchange(&self, request: Request, limit: usize) -> Result<Reply, Failure> {
        let mut response = self.client.execute(request).await.map_err(failure)?;
        let mut reply = Reply::head(&mut response);
        reply.read(&mut response, limit).await?;
        Ok(reply)
    }
}

fn timed_out() -> Failure {
    Failure::passing("Timeout", "the server had not answered in full when the attempt's time was over")
}

impl Reply {
    fn head(response: &mut Response) -> Self {
        let headers = std::mem::take(response.headers_mut());
        Self { status: response.status(), headers, body: Vec::new(), truncated: false }
    }

    async fn read(&mut self, response: &mut Response, limit: usize) -> Result<(), Failure> {
        while let Some(chunk) = response.chunk().await.map_err(failure)? {
            let room = limit - self.body.len();
            self.body.extend_from_slice(&chunk[..chunk.len().min(room)]);
            if chunk.len() > room {
                self.truncated = true;
                break;
            }
        }
        Ok(())
    }

    /// The reply itself when its status is 2xx.
    ///
    /// # Errors
    /// By status: 408, 425, 429 and 5xx may pass (no sooner than Retry-After says, when it says so), all others are
    /// permanent, redirects too.
    pub fn accepted(self) -> Result<Self, Failure> {
        let status = self.status;
        if status.is_success() {
            return Ok(self);
        }
        if !matches!(status.as_u16(), 408 | 425 | 429 | 500..=599) {
            let hint = if status.is_redirection() { "; redirects are not followed" } else { "" };
            return Err(Failure::permanent("StatusRefused", format!("the server answered {}{hint}", status.as_u16())));
        }
        let message = format!("the server answered {}", status.as_u16());
        Err(match retry_after(&self.headers, SystemTime::now()) {
            Some(delay) => Failure::retry_after(delay, "ServerBusy", message),
            None => Failure::passing("ServerBusy", message),
        })
    }
}

impl Shown {
    /// What the outcome of a call says of its origin.
    fn by(outcome: Result<&Reply, &Failure>) -> Self {
        match outcome {
            Ok(reply) if matches!(reply.status.as_u16(), 429 | 503) => {
                retry_after(&reply.headers, SystemTime::now()).map_or(Self::Answered, Self::Pause)
            }
            Ok(_) => Self::Answered,
            Err(failure) => match failure.reason {
                "ConnectFailed" => Self::Refused,
                "RequestFailed" => Self::Answered,
                _ => Self::Nothing,
            },
        }
    }
}

/// How long the server asks to wait: `Retry-After` in seconds or as a date, capped; none for a date that is over.
///
/// A date is measured against the answer's own `Date`, so that the two clocks are the same one; `now` is for a server
/// that sends none.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let delay = if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        // more digits than a u64 holds is an absurd wait, not an unreadable one
        value.parse().map_or(RETRY_AFTER_CAP, Duration::from_secs)
    } else {
        let until = httpdate::parse_http_date(value).ok()?;
        let sent = headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        until.duration_since(sent.unwrap_or(now)).ok()?
    };
    (!delay.is_zero()).then_some(delay.min(RETRY_AFTER_CAP))
}

/// Reads a URL from a payload as far as that can be judged without resolving its host.
///
/// # Errors
/// What is wrong, as the rest of a sentence that begins with the field: never the URL itself.
pub(crate) fn parse_url(text: &str) -> Result<Url, &'static str> {
    if text.len() > MAX_URL_CHARS {
        return Err("must be at most 2048 characters");
    }
    let url = Url::parse(text).map_err(|_| "must be an absolute URL such as https://example.com/path")?;
    check_url(&url)?;
    Ok(url)
}

fn check_url(url: &Url) -> Result<(), &'static str> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err("must begin with http:// or https://");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not hold a user name or password");
    }
    if url.host().is_none() {
        return Err("must name a host");
    }
    if url.port_or_known_default().is_none_or(|port| OTHER_PROTOCOLS.contains(&port)) {
        return Err("must not use a port of another protocol, such as 25 for mail");
    }
    Ok(())
}

/// Resolves a name and lets the client have its addresses only when all of them may be called: a name with one foot
/// inside is refused whole, whichever address a connection would have picked.
struct Guarded {
    inner: Arc<dyn Resolve>,
    policy: Arc<EgressPolicy>,
}

impl Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        let resolving = if is_localhost(name.as_str()) {
            let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            Box::pin(async move { Ok(Box::new(std::iter::once(loopback)) as Addrs) })
        } else {
            self.inner.resolve(name)
        };
        let policy = self.policy.clone();
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = resolving.await?.collect();
            for address in &addresses {
                policy.check(address.ip()).map_err(|what| Refused { what })?;
            }
            if addresses.is_empty() {
                return Err("the host has no address".into());
            }
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// These names are loopback by definition (RFC 6761, section 6.3), whatever a resolver makes of them.
fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.rsplit('.').next().is_some_and(|last| last.eq_ignore_ascii_case("localhost"))
}

struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((name.as_str(), 0)).await?;
            Ok(Box::new(addresses.collect::<Vec<_>>().into_iter()) as Addrs)
        })
    }
}

/// The policy said no. Travels through the client as an error and is found again in its chain of sources.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the host is {what}, which this install does not call")]
struct Refused {
    what: &'static str,
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        Failure::permanent(
            "AddressNotAllowed",
            format!("{refused}; an operator can open a range with JOBREQUEST_EGRESS_ALLOW"),
        )
    }
}

fn failure(error: reqwest::Error) -> Failure {
    let error = error.without_url();
    if let Some(refused) = sources(&error).find_map(|source| source.downcast_ref::<Refused>()) {
        return (*refused).into();
    }
    let cause = root_cause(&error);
    if error.is_dns() {
        Failure::passing("DnsFailed", format!("the host's name could not be resolved: {cause}"))
    } else if error.is_connect() {
        Failure::passing("ConnectFailed", format!("no connection to the host: {cause}"))
    } else {
        Failure::passing("RequestFailed", format!("the exchange with the server broke off: {cause}"))
    }
}

fn sources<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// The innermost error's text, printable and short: it can hold what a server said.
pub(crate) fn root_cause(error: &(dyn StdError + 'static)) -> String {
    let text = sources(error).last().map(ToString::to_string).unwrap_or_default();
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}
