//! Facades: listeners that speak the protocols of other rollout buffers.

mod access;
mod atropos;
mod slime;
mod slime_crash;

use std::path::Path;

use reqwest::Method;
use serde_json::Value;

use crate::support::{Answer, TestApp, process::Service};

/// Starts the service as a process with this configuration. Returns it and the address of its facade.
async fn start_process(database: &str, folder: &Path, protocol: &str, config: &str) -> (Service, String) {
    let path = |name: &str| folder.join(name).to_str().expect("the path is text").to_owned();
    std::fs::write(path("forebay.toml"), config).expect("the file is written");
    let arguments = ["--config", &path("forebay.toml"), "--port-file", &path("port")];
    let service = Service::start_with(database, &arguments, &[]).await;
    let address = std::fs::read_to_string(path(&format!("port.{protocol}"))).expect("the facade listens");
    (service, format!("http://{}", address.trim()))
}

/// A client of a facade, which only knows an address.
pub(crate) struct Facade<'a> {
    app: &'a TestApp,
    base: String,
}

impl<'a> Facade<'a> {
    pub(crate) fn of(app: &'a TestApp, protocol: &str) -> Self {
        Self { app, base: app.facades[protocol].clone() }
    }

    /// The same client with a longer address.
    pub(crate) fn at(&self, prefix: &str) -> Self {
        Self { app: self.app, base: format!("{}{prefix}", self.base) }
    }

    pub(crate) async fn call(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Answer {
        let mut request = self.app.http.request(method, format!("{}{path}", self.base)).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.expect("the facade answers");
        let status = response.status();
        let bytes = response.bytes().await.expect("the answer arrives whole");
        Answer { status, json: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::POST, path, &[("content-type", "application/json")], body.to_string().into_bytes()).await
    }

    /// The text of an answer.
    pub(crate) async fn text(&self, path: &str, body: &str) -> String {
        let request = self.app.http.post(format!("{}{path}", self.base)).body(body.to_owned());
        let response = request.header("content-type", "application/json").send().await.expect("the facade answers");
        response.text().await.expect("the answer arrives whole")
    }
}
