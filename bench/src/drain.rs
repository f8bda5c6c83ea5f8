//! The ceiling: a server in this process that reads every body to its end and does nothing with it.
//!
//! What it reaches, no service can on this machine with this generator.

use axum::{Router, body::Body, http::header::CONTENT_TYPE, response::IntoResponse};
use http_body_util::BodyExt as _;
use tokio::net::TcpListener;

/// What every protocol takes for success.
const ANSWER: &str = r#"{"success":true}"#;

/// Starts it on a free port; its URL. It ends with the process.
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
