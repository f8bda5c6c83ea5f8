//! A proxy between a client and the session listener, which keeps what the client sends.

use std::sync::Arc;

use axum::{
    body::{Body, to_bytes},
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode},
    response::Response,
    routing::any,
};
use tokio::{
    net::TcpListener,
    sync::{Notify, watch},
    task::JoinHandle,
};

/// The largest body of a client.
const BODY_BYTES_MAX: usize = 64 << 20;

/// A request of a client, and how it was answered.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// None if the client went away before the answer.
    pub(crate) status: Option<StatusCode>,
}

/// The running proxy. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) url: String,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    target: String,
    http: reqwest::Client,
    exchanges: watch::Sender<Vec<Exchange>>,
    cut: Notify,
}

impl Recorder {
    /// Starts a proxy in front of the address `target`.
    pub(crate) async fn start(target: &str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        forebay_client::install_tls_provider();
        let http = reqwest::Client::new();
        let shared = Arc::new(Shared {
            target: target.to_owned(),
            http,
            exchanges: watch::Sender::default(),
            cut: Notify::new(),
        });
        let router = axum::Router::new().fallback(any(forward)).with_state(Arc::clone(&shared));
        let task = tokio::spawn(async move {
            // It ends with the program.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { url, shared, task })
    }

    /// What was sent so far.
    pub(crate) fn exchanges(&self) -> Vec<Exchange> {
        self.shared.exchanges.borrow().clone()
    }

    /// Cuts the connection of a call that waits for its answer, and waits for the next call.
    pub(crate) async fn cut(&self) {
        let mut exchanges = self.shared.exchanges.subscribe();
        let before = exchanges.borrow_and_update().len();
        self.shared.cut.notify_one();
        // The sender exists as long as the recorder.
        let _ = exchanges.wait_for(|exchanges| exchanges.len() > before).await;
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn forward(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let body = to_bytes(body, BODY_BYTES_MAX).await.unwrap_or_default().to_vec();
    let mut headers = head.headers.clone();
    for hop in ["host", "connection", "content-length", "transfer-encoding"] {
        headers.remove(hop);
    }
    let (method, sent_headers, sent_body) = (head.method.clone(), head.headers, body.clone());
    let exchange = Exchange { method, path: path.clone(), headers: sent_headers, body: sent_body, status: None };
    let mut place = 0;
    shared.exchanges.send_modify(|exchanges| {
        place = exchanges.len();
        exchanges.push(exchange);
    });
    let sent = shared.http.request(head.method, format!("{}{path}", shared.target)).headers(headers).body(body);
    let mut response = Response::new(Body::empty());
    let answer = tokio::select! {
        answer = sent.send() => answer,
        // The task of the connection ends with this, without a word in the log, and both connections are closed.
        () = shared.cut.notified() => std::panic::resume_unwind(Box::new("the connection is cut")),
    };
    match answer {
        Ok(answer) => {
            *response.status_mut() = answer.status();
            *response.headers_mut() = answer.headers().clone();
            for hop in ["connection", "transfer-encoding"] {
                response.headers_mut().remove(hop);
            }
            *response.body_mut() = Body::from_stream(answer.bytes_stream());
        }
        Err(error) => {
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            *response.body_mut() = Body::from(error.to_string());
        }
    }
    shared.exchanges.send_modify(|exchanges| exchanges[place].status = Some(response.status()));
    response
}
