//! Stands between a controller and its API server: keeps a list of all calls, and holds or refuses those that a test
//! chooses. Plain HTTP on loopback; towards the API server it has the identity of the given configuration.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Response, StatusCode, header};
use kube::{Client, Config};
use serde_json::json;
use tokio::sync::watch;

use super::wait::{PATIENCE, until_true};

/// The largest request that is passed on, in bytes.
const LIMIT: usize = 16 * 1024 * 1024;
/// What belongs to one connection and not to the message.
const HOP: [HeaderName; 5] =
    [header::HOST, header::CONNECTION, header::TRANSFER_ENCODING, header::CONTENT_LENGTH, header::AUTHORIZATION];

#[derive(Debug, Clone)]
pub struct Call {
    pub method: String,
    pub path: String,
    pub at: Instant,
    /// None as long as there is no answer.
    pub status: Option<u16>,
}

impl Call {
    pub fn is_write(&self) -> bool {
        self.method != "GET"
    }

    pub fn is_status_patch(&self) -> bool {
        self.method == "PATCH" && self.path.ends_with("/status")
    }

    /// Whether it is about who leads.
    pub fn is_election(&self) -> bool {
        self.path.contains("/leases")
    }

    /// Whether it is about this JobRequest.
    pub fn is_about(&self, name: &str) -> bool {
        self.path.split('/').skip_while(|part| *part != "jobrequests").nth(1) == Some(name)
    }
}

type Choice = Arc<dyn Fn(&Call) -> bool + Send + Sync>;

#[derive(Clone, Default)]
enum Rule {
    #[default]
    Pass,
    /// Not sent, not answered.
    Hold(Choice),
    /// Sent, not answered.
    HoldReply(Choice),
    Refuse(Choice, u16),
}

/// Counts a call as held until it goes on or its caller dies.
struct Held(Arc<Mutex<usize>>);

impl Held {
    fn new(count: &Arc<Mutex<usize>>) -> Self {
        *count.lock().unwrap() += 1;
        Self(count.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *self.0.lock().unwrap() -= 1;
    }
}

#[derive(Clone)]
pub struct ApiProxy {
    pub address: SocketAddr,
    /// Where programs that come this way are at home.
    namespace: String,
    upstream: Client,
    calls: Arc<Mutex<Vec<Call>>>,
    rule: watch::Sender<Rule>,
    held: Arc<Mutex<usize>>,
}

impl ApiProxy {
    pub async fn start(config: Config) -> Self {
        Self::start_on(0, config).await
    }

    pub async fn start_on(port: u16, mut config: Config) -> Self {
        // A repeated call would be counted once.
        config.default_retry = false;
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            namespace: config.default_namespace.clone(),
            upstream: Client::try_from(config).unwrap(),
            calls: Arc::default(),
            rule: watch::Sender::default(),
            held: Arc::default(),
        };
        let router = axum::Router::new().fallback(carry).with_state(proxy.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        proxy
    }

    /// Writes a kubeconfig that leads here.
    pub fn kubeconfig(&self, directory: &Path) -> PathBuf {
        kubeconfig(self.address.port(), directory, &self.namespace)
    }

    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// The calls that changed something, or tried to, but for the election.
    pub fn writes(&self) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.is_write() && !call.is_election()).collect()
    }

    /// Holds the calls of this choice unsent, until [`ApiProxy::pass`]. Those whose caller dies are never sent.
    pub fn hold(&self, choice: impl Fn(&Call) -> bool + Send + Sync + 'static) {
        self.rule.send_replace(Rule::Hold(Arc::new(choice)));
    }

    /// Sends the calls of this choice and holds their replies.
    pub fn hold_replies(&self, choice: impl Fn(&Call) -> bool + Send + Sync + 'static) {
        self.rule.send_replace(Rule::HoldReply(Arc::new(choice)));
    }

    /// Answers the calls of this choice with an HTTP status instead of sending them.
    pub fn refuse(&self, code: u16, choice: impl Fn(&Call) -> bool + Send + Sync + 'static) {
        self.rule.send_replace(Rule::Refuse(Arc::new(choice), code));
    }

    /// Lets everything through.
    pub fn pass(&self) {
        self.rule.send_replace(Rule::Pass);
    }

    /// Waits until a call is being held.
    pub async fn until_holding(&self) {
        until_true("a call is held", PATIENCE, async || *self.held.lock().unwrap() > 0).await;
    }

    /// Waits until the callers of all held calls are gone.
    pub async fn until_abandoned(&self) {
        until_true("no call is held", PATIENCE, async || *self.held.lock().unwrap() == 0).await;
    }

    /// Resolves at the next change of rules.
    async fn hold_here(&self, mut rules: watch::Receiver<Rule>) {
        let _held = Held::new(&self.held);
        drop(rules.changed().await);
    }

    fn answered(&self, index: usize, code: u16) {
        self.calls.lock().unwrap()[index].status = Some(code);
    }
}

/// Writes a kubeconfig that leads to a proxy on this port of loopback, and to this namespace.
pub fn kubeconfig(port: u16, directory: &Path, namespace: &str) -> PathBuf {
    let path = directory.join(format!("proxy-{port}.kubeconfig"));
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
        "clusters": [{"name": "proxy", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
        "users": [{"name": "proxy", "user": {}}],
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy", "namespace": namespace}}],
    });
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

async fn carry(State(proxy): State<ApiProxy>, request: Request) -> Response<Body> {
    let call = Call {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        at: Instant::now(),
        status: None,
    };
    let index = {
        let mut calls = proxy.calls.lock().unwrap();
        calls.push(call.clone());
        calls.len() - 1
    };
    let mut rules = proxy.rule.subscribe();
    let rule = rules.borrow_and_update().clone();
    match &rule {
        Rule::Hold(choice) if choice(&call) => proxy.hold_here(rules.clone()).await,
        Rule::Refuse(choice, code) if choice(&call) => {
            proxy.answered(index, *code);
            return answer(*code, "refused by the test");
        }
        Rule::Hold(_) | Rule::HoldReply(_) | Rule::Refuse(..) | Rule::Pass => {}
    }
    let response = forward(&proxy.upstream, request).await.unwrap_or_else(|why| answer(502, &why));
    if let Rule::HoldReply(choice) = &rule
        && choice(&call)
    {
        proxy.hold_here(rules).await;
    }
    proxy.answered(index, response.status().as_u16());
    response
}

fn answer(code: u16, text: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(text.to_owned()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}

async fn forward(upstream: &Client, request: Request) -> Result<Response<Body>, String> {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, LIMIT).await.map_err(|error| error.to_string())?;
    let mut forwarded = Request::new(kube::client::Body::from(body));
    *forwarded.method_mut() = parts.method;
    *forwarded.uri_mut() = parts.uri;
    *forwarded.headers_mut() = without_hop(parts.headers);
    let response = upstream.send(forwarded).await.map_err(|error| error.to_string())?;
    let (mut parts, body) = response.into_parts();
    parts.headers = without_hop(parts.headers);
    Ok(Response::from_parts(parts, Body::new(body)))
}

fn without_hop(mut headers: HeaderMap) -> HeaderMap {
    for name in HOP {
        headers.remove(name);
    }
    headers
}
