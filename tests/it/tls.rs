//! TLS and mutual TLS, with certificates that the test makes.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use forebay_client::{Client, ClientError, ClientOptions, RetryPolicy};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tokio::net::{TcpListener, TcpStream};

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

/// A certificate as `openssl req -x509` makes it, marked as an authority, and its key.
fn like_openssl(name: &str, last_year: i32) -> (String, String) {
    let mut params = CertificateParams::new([name.to_owned()]).expect("the name is valid");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_after = date_time_ymd(last_year, 1, 1);
    let key = KeyPair::generate().expect("a key can be made");
    (params.self_signed(&key).expect("it signs itself").pem(), key.serialize_pem())
}

async fn serve(folder: &Path, (certificate, key): &(String, String)) -> TestApp {
    std::fs::write(folder.join("server.pem"), certificate).expect("the file is written");
    std::fs::write(folder.join("server.key"), key).expect("the file is written");
    TestApp::start_with(Backend::Sqlite, &config(folder, false)).await
}

fn believing(url: &str, certificate: &str) -> Client {
    let options = ClientOptions { ca_pem: Some(certificate.to_owned().into_bytes()), ..ClientOptions::default() };
    // With its usual retries: what is wrong with a certificate must not be tried again.
    Client::with_options(url, &options).expect("the certificate is valid")
}

async fn complaint(client: &Client) -> String {
    match client.stats().await {
        Err(ClientError::Certificate(why)) => why,
        other => panic!("not refused for the certificate: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_self_signed_certificate_is_accepted_when_it_is_the_one_that_was_named() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let own = like_openssl("127.0.0.1", 2_999);
    let app = serve(folder.path(), &own).await;
    believing(&app.url, &own.0).stats().await.expect("answered");
    let why = complaint(&believing(&app.url, &like_openssl("127.0.0.1", 2_999).0)).await;
    assert!(why.contains("certificate is not accepted"), "{why}");
    // A named certificate still has to bear the name of the service.
    let elsewhere = app.url.replace("127.0.0.1", "localhost");
    let why = complaint(&believing(&elsewhere, &own.0)).await;
    assert!(why.contains("not valid for name"), "{why}");

    for command in [&["keys", "list"][..], &["bench", "--bodies", "2", "--tokens", "20"]] {
        let mut process = tokio::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        process.args(command).args(["--url", &app.url]).env("FOREBAY_CA", folder.path().join("server.pem"));
        let output = process.output().await.expect("the binary starts");
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        let mut process = tokio::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        process.args(command).args(["--url", &app.url]).env_remove("FOREBAY_CA");
        let output = process.output().await.expect("the binary starts");
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && why.contains("certificate is not accepted"), "{command:?}: {why}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_named_certificate_is_refused_once_it_has_expired() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let own = like_openssl("127.0.0.1", 2_001);
    let app = serve(folder.path(), &own).await;
    let why = complaint(&believing(&app.url, &own.0)).await;
    assert!(why.contains("expired"), "{why}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_certificate_of_the_same_name_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (own, other) = (like_openssl("127.0.0.1", 2_999), like_openssl("127.0.0.1", 2_999));
    let app = serve(folder.path(), &other).await;
    complaint(&believing(&app.url, &own.0)).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_is_not_accepted_is_not_asked_for_again() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let app = serve(folder.path(), &like_openssl("127.0.0.1", 2_999)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let proxy = listener.local_addr().expect("a listener has an address");
    let (count, behind) = (Arc::new(AtomicUsize::new(0)), app.url.trim_start_matches("https://").to_owned());
    let counted = Arc::clone(&count);
    let forwarding = tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let mut server = TcpStream::connect(&behind).await.expect("the service accepts");
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        }
    });
    complaint(&believing(&format!("https://{proxy}"), &Authority::new().pem())).await;
    assert_eq!(count.load(Ordering::SeqCst), 1);
    forwarding.abort();
    app.finish().await;
}
