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
    gate: watch::Sender<Gate>,
}

/// How many more calls of the model go on. Others wait.
#[derive(Debug)]
struct Gate {
    open_for: usize,
    waiting: usize,
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
            gate: watch::Sender::new(Gate { open_for: usize::MAX, waiting: 0 }),
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

    /// Lets so many more calls of the model go on, and those that wait count among them.
    pub(crate) fn open_for(&self, calls: usize) {
        self.shared.gate.send_modify(|gate| gate.open_for = calls);
    }

    /// Waits until a call of the model waits.
    pub(crate) async fn held(&self) {
        // The sender exists as long as the recorder.
        let _ = self.shared.gate.subscribe().wait_for(|gate| gate.waiting > 0).await;
    }
}

impl Shared {
    /// Waits until a call may go on.
    async fn pass(&self) {
        let mut gate = self.gate.subscribe();
        let enter = || {
            self.gate.send_if_modified(|gate| {
                let is_open = gate.open_for > 0;
                if is_open {
                    gate.open_for -= 1;
                }
                is_open
            })
        };
        if enter() {
            return;
        }
        let _waiting = Waiting::new(self);
        while !enter() {
            // The sender exists as long as this.
            let _ = gate.wait_for(|gate| gate.open_for > 0).await;
        }
    }
}

/// Counts a call as long as it waits, also if its client goes away.
struct Waiting<'a>(&'a Shared);

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.gate.send_modify(|gate| gate.waiting += 1);
        Self(shared)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.gate.send_modify(|gate| gate.waiting -= 1);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Whether a path asks the model, and not for a list or a count.
fn is_call(path: &str) -> bool {
    let path = path.split('?').next().unwrap_or_default();
    ["/chat/completions", "/responses", "/messages"].iter().any(|end| path.ends_with(end))
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
    if is_call(&path) {
        shared.pass().await;
    }
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
