//! A server in this process that reads every body completely and does nothing with it.
//!
//! Its throughput is the ceiling: on this machine and with this generator, no service can be faster.

use axum::{Router, body::Body, http::header::CONTENT_TYPE, response::IntoResponse};
use http_body_util::BodyExt as _;
use tokio::net::TcpListener;

/// An answer that every protocol accepts as success.
const ANSWER: &str = r#"{"success":true}"#;

/// Starts the server on a free port and returns its URL. The server ends with the process.
pub(crate) async fn start() -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let router = Router::new().fallback(drain);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(url)
}

async fn drain(mut body: Body) -> impl IntoResponse {
    while let Some(Ok(_)) = body.frame().await {}
    ([(CONTENT_TYPE, "application/json")], ANSWER)
}
