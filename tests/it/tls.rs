//! TLS and mutual TLS, with certificates that the test makes.

use std::path::Path;

use forebay_client::{Client, ClientOptions, RetryPolicy};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::support::{Backend, TestApp};

/// An authority, and what it has signed.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).expect("no names are valid");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key can be made");
        Self(CertifiedIssuer::self_signed(params, key).expect("it signs itself"))
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate and its key.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key can be made");
        let params = CertificateParams::new([name.to_owned()]).expect("the name is valid");
        let certificate = params.signed_by(&key, &self.0).expect("the authority signs");
        (certificate.pem(), key.serialize_pem())
    }
}

fn write(folder: &Path, authority: &Authority) {
    let (certificate, key) = authority.sign("127.0.0.1");
    std::fs::write(folder.join("server.pem"), certificate).expect("the file is written");
    std::fs::write(folder.join("server.key"), key).expect("the file is written");
}

fn config(folder: &Path, mutual: bool) -> String {
    let path = |name: &str| folder.join(name).display().to_string();
    let client_ca = if mutual { format!("client_ca = '{}'\n", path("clients.pem")) } else { String::new() };
    format!("[tls]\ncertificate = '{}'\nkey = '{}'\n{client_ca}", path("server.pem"), path("server.key"))
}

fn client(url: &str, authority: &Authority, identity: Option<(String, String)>) -> Client {
    let options = ClientOptions {
        ca_pem: Some(authority.pem().into_bytes()),
        identity_pem: identity.map(|(certificate, key)| (certificate + &key).into_bytes()),
        key: None,
    };
    // A refused handshake is an answer here, not something to wait for.
    Client::with_options(url, &options).expect("the certificates are valid").with_retry(RetryPolicy::none())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_encrypted_and_prove_who_serves() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let authority = Authority::new();
    write(folder.path(), &authority);
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), false)).await;
    assert!(app.url.starts_with("https://"));
    // Somebody who connects and says nothing holds up nobody else.
    let address = app.url.trim_start_matches("https://").to_owned();
    let _silent = tokio::net::TcpStream::connect(&address).await.expect("the server accepts");
    client(&app.url, &authority, None).stats().await.expect("answered");
    assert!(client(&app.url, &Authority::new(), None).stats().await.is_err(), "another authority");
    let plain = format!("http://{address}");
    assert!(client(&plain, &authority, None).stats().await.is_err(), "unencrypted");

    // New files serve new connections; files that do not go together change nothing.
    let tls = app.tls.clone().expect("it is encrypted");
    assert!(!tls.renew().expect("the files are as they were"));
    let renewed = Authority::new();
    let (certificate, key) = renewed.sign("127.0.0.1");
    std::fs::write(folder.path().join("server.pem"), certificate).expect("the file is written");
    assert!(tls.renew().is_err(), "the certificate of another key");
    client(&app.url, &authority, None).stats().await.expect("answered");
    std::fs::write(folder.path().join("server.key"), key).expect("the file is written");
    assert!(tls.renew().expect("the files go together"));
    client(&app.url, &renewed, None).stats().await.expect("answered");
    assert!(client(&app.url, &authority, None).stats().await.is_err(), "the old certificate is gone");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_client_authority_only_its_clients_are_served() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (servers, clients) = (Authority::new(), Authority::new());
    write(folder.path(), &servers);
    std::fs::write(folder.path().join("clients.pem"), clients.pem()).expect("the file is written");
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), true)).await;
    client(&app.url, &servers, Some(clients.sign("agent"))).stats().await.expect("answered");
    assert!(client(&app.url, &servers, None).stats().await.is_err(), "no certificate");
    assert!(client(&app.url, &servers, Some(Authority::new().sign("agent"))).stats().await.is_err(), "another's");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_load_generator_proves_itself_and_believes_the_named_authority() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let authority = Authority::new();
    write(folder.path(), &authority);
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("clients.pem"), authority.pem()).expect("the file is written");
    let (certificate, key) = authority.sign("agent");
    std::fs::write(path("agent.pem"), certificate + &key).expect("the file is written");
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), true)).await;
    let bench = async |identity: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["bench", "--url", &app.url, "--bodies", "2", "--tokens", "20", "--trainers", "1"]);
        command.arg("--ca").arg(path("clients.pem")).args(identity);
        command.output().await.expect("the binary starts")
    };
    let identity = path("agent.pem");
    let proven = bench(&["--identity", identity.to_str().expect("text")]).await;
    assert!(proven.status.success(), "{}", String::from_utf8_lossy(&proven.stderr));
    let unproven = bench(&[]).await;
    let why = String::from_utf8_lossy(&unproven.stderr);
    assert!(!unproven.status.success() && !why.contains("nothing listens"), "{why}");
    app.finish().await;
}
