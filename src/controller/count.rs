//! Counts the calls to the API server: what this controller costs it.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use futures::{FutureExt, TryFutureExt};
use http::{Method, Request, Response};
use tower::{Layer, Service};

use crate::admin::Metrics;

/// Goes around a client's own layers: a call that these repeat counts once, by its last answer.
#[derive(Clone)]
pub(super) struct Count(pub(super) Metrics);

impl<S> Layer<S> for Count {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, metrics: self.0.clone() }
    }
}

/// A client whose calls are counted.
#[derive(Clone)]
pub(super) struct Counted<S> {
    inner: S,
    metrics: Metrics,
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (verb, metrics, unanswered) = (verb(&request), self.metrics.clone(), self.metrics.clone());
        self.inner
            .call(request)
            .inspect_ok(move |answer| metrics.api_request(verb, Some(answer.status().as_u16())))
            .inspect_err(move |_| unanswered.api_request(verb, None))
            .boxed()
    }
}

/// The API server's own word for what is asked, from a closed list.
fn verb<B>(request: &Request<B>) -> &'static str {
    let watches = || request.uri().query().is_some_and(|query| query.split('&').any(|part| part.starts_with("watch=")));
    match *request.method() {
        Method::GET if watches() => "watch",
        Method::GET => "get",
        Method::POST => "create",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_is_counted_by_its_verb_and_answer() {
        let metrics = Metrics::new([]);
        let (mut client, mut server) =
            tower_test::mock::spawn_layer::<Request<()>, Response<()>, _>(Count(metrics.clone()));
        for (method, target, code) in [
            (Method::GET, "/apis/jobrequest.dev/v1alpha1/jobrequests?&watch=true&timeoutSeconds=290", Some(200)),
            (Method::GET, "/api/v1/namespaces/kube-system", Some(403)),
            (Method::PATCH, "/apis/jobrequest.dev/v1alpha1/namespaces/a/jobrequests/b/status", Some(422)),
            (Method::DELETE, "/apis/jobrequest.dev/v1alpha1/namespaces/a/jobrequests/b", None),
        ] {
            assert!(client.poll_ready().is_ready());
            let request = Request::builder().method(method).uri(target).body(()).expect("a request");
            let answered = client.call(request);
            let (_, reply) = server.next_request().await.expect("the call");
            match code {
                Some(code) => reply.send_response(Response::builder().status(code).body(()).expect("an answer")),
                None => reply.send_error("cut"),
            }
            assert_eq!(answered.await.is_ok(), code.is_some());
        }
        let text = metrics.text();
        for labels in [
            r#"verb="watch",code="200""#,
            r#"verb="get",code="403""#,
            r#"verb="patch",code="422""#,
            r#"verb="delete",code="none""#,
        ] {
            assert!(
                text.contains(&format!("jobrequest_api_requests_total{{{labels}}} 1\n")),
                "{labels} is not in\n{text}"
            );
        }
    }
}
