//! TLS and mutual TLS, with certificates that the test makes.

mod facades;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use forebay_client::{Client, ClientError, ClientOptions, RetryPolicy};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use rustls::{
    SignatureScheme,
    client::ResolvesClientCert,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Backend, TestApp};

/// A certificate authority, and what it has signed.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new([]).expect("no names are valid");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key can be made");
        Self(CertifiedIssuer::self_signed(params, key).expect("it signs itself"))
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// The certificate of the authority and its key.
    pub(crate) fn itself(&self) -> (String, String) {
        (self.pem(), self.0.key().serialize_pem())
    }

    /// A certificate and its key.
    pub(crate) fn sign(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new([name.to_owned()]).expect("the name is valid");
        // OpenSSL takes a certificate with the name of its authority for one that signed itself.
        params.distinguished_name.push(DnType::CommonName, name);
        self.sign_params(&params)
    }

    /// The same from parameters.
    pub(crate) fn sign_params(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate().expect("a key can be made");
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
        ..ClientOptions::default()
    };
    // These tests expect refused handshakes, so the client does not retry.
    Client::with_options(url, &options).expect("the certificates are valid").with_retry(RetryPolicy::none())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_encrypted_and_authenticate_the_service() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let authority = Authority::new();
    write(folder.path(), &authority);
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), false)).await;
    assert!(app.url.starts_with("https://"));
    // A client that connects and sends nothing does not block other clients.
    let address = app.url.trim_start_matches("https://").to_owned();
    let _silent = tokio::net::TcpStream::connect(&address).await.expect("the server accepts");
    client(&app.url, &authority, None).stats().await.expect("answered");
    assert!(client(&app.url, &Authority::new(), None).stats().await.is_err(), "another authority");
    let plain = format!("http://{address}");
    assert!(client(&plain, &authority, None).stats().await.is_err(), "unencrypted");

    // New connections use new files. Files that do not match change nothing.
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
async fn with_a_client_ca_only_clients_with_its_certificates_are_served() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (servers, clients) = (Authority::new(), Authority::new());
    write(folder.path(), &servers);
    std::fs::write(folder.path().join("clients.pem"), clients.pem()).expect("the file is written");
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), true)).await;
    client(&app.url, &servers, Some(clients.sign("agent"))).stats().await.expect("answered");
    assert!(client(&app.url, &servers, None).stats().await.is_err(), "no certificate");
    assert!(client(&app.url, &servers, Some(Authority::new().sign("agent"))).stats().await.is_err(), "another's");
    // Agents are known by the keys of their sessions, and cannot present certificates. That of the service is checked.
    let options = ClientOptions { ca_pem: Some(servers.pem().into_bytes()), ..ClientOptions::default() };
    let http =
        reqwest::Client::builder().tls_backend_preconfigured(options.tls(true).expect("the certificate is valid"));
    let http = http.build().expect("the options are valid");
    let probe = http.get(format!("https://{}/", app.agents)).send().await.expect("the listener answers");
    assert_eq!(probe.status(), 200);
    app.finish().await;
}

/// A certificate that a client presents with any key.
#[derive(Debug)]
struct Presented(Arc<CertifiedKey>);

impl Presented {
    fn new(certificate: &str, key: &str) -> Self {
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).expect("it is PEM");
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("it is PEM");
        let key = ring::sign::any_supported_type(&key).expect("the key can sign");
        Self(Arc::new(CertifiedKey::new(vec![certificate], key)))
    }
}

impl ResolvesClientCert for Presented {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

async fn is_served(url: &str, authority: &Authority, presented: Presented) -> bool {
    let options = ClientOptions { ca_pem: Some(authority.pem().into_bytes()), ..ClientOptions::default() };
    let mut config = options.tls(true).expect("the certificates are valid");
    config.client_auth_cert_resolver = Arc::new(presented);
    let http = reqwest::Client::builder().tls_backend_preconfigured(config).build().expect("the settings are valid");
    http.get(format!("{url}/stats")).send().await.is_ok_and(|answer| answer.status().is_success())
}

/// A certificate and its key as OpenSSL 3.0 wrote them:
/// `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=agent -days 36500`.
const OF_OPENSSL: &str = include_str!("tls/openssl.pem");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_self_signed_client_is_served_when_its_certificate_is_the_one_that_was_named() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let servers = Authority::new();
    write(folder.path(), &servers);
    let (certificate, key) = OF_OPENSSL.split_at(OF_OPENSSL.find("-----BEGIN PRIVATE").expect("it has a key"));
    let (expired, named) = (like_openssl("agent", 2_001), like_openssl("agent", 2_999));
    let all = [certificate, &expired.0, &named.0].concat();
    std::fs::write(folder.path().join("clients.pem"), all).expect("the file is written");
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), true)).await;
    let answered =
        async |identity: (String, String)| client(&app.url, &servers, Some(identity)).stats().await.map(|_| ());
    answered((certificate.to_owned(), key.to_owned())).await.expect("as openssl made it");
    answered(named.clone()).await.expect("as rcgen makes it");
    assert!(answered(expired).await.is_err(), "a named certificate that has expired");
    let other = like_openssl("agent", 2_999);
    assert!(answered(other.clone()).await.is_err(), "another certificate of the same name");
    assert!(is_served(&app.url, &servers, Presented::new(&named.0, &named.1)).await, "with the certificate's own key");
    assert!(!is_served(&app.url, &servers, Presented::new(&named.0, &other.1)).await, "with another key");
    assert!(client(&app.url, &servers, None).stats().await.is_err(), "no certificate");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_load_generator_sends_its_certificate_and_trusts_the_named_authority() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let authority = Authority::new();
    write(folder.path(), &authority);
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("clients.pem"), authority.pem()).expect("the file is written");
    let (certificate, key) = authority.sign("agent");
    std::fs::write(path("agent.pem"), certificate + &key).expect("the file is written");
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path(), true)).await;
    let (identity, authority) = (path("agent.pem"), path("clients.pem"));
    let [identity, authority] = [&identity, &authority].map(|path| path.to_str().expect("text"));
    let load = ["--url", &app.url, "--bodies", "2", "--tokens", "20", "--trainers", "1", "--ca", authority];
    crate::bench::run(&[&load[..], &["--identity", identity]].concat()).await.expect("the identity is accepted");
    let unproven = crate::bench::run(&load).await.expect_err("no identity");
    assert!(!format!("{unproven:#}").contains("nothing listens"), "{unproven:#}");
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
    // The client has its usual retries, but must not repeat after a certificate error.
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
    // A named certificate must still have the service's name.
    let elsewhere = app.url.replace("127.0.0.1", "localhost");
    let why = complaint(&believing(&elsewhere, &own.0)).await;
    assert!(why.contains("not valid for name"), "{why}");

    let file = folder.path().join("server.pem");
    let keys = async |authority: Option<&Path>| {
        let mut process = tokio::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        process.args(["keys", "list", "--url", &app.url]).env_remove("FOREBAY_CA");
        process.envs(authority.map(|file| ("FOREBAY_CA", file)));
        process.output().await.expect("the binary starts")
    };
    let output = keys(Some(&file)).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = keys(None).await;
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("certificate is not accepted"), "{why}");

    let load = ["--url", &app.url, "--bodies", "2", "--tokens", "20"];
    let named = ["--ca", file.to_str().expect("text")];
    crate::bench::run(&[&load[..], &named].concat()).await.expect("the certificate is accepted");
    let why = crate::bench::run(&load).await.expect_err("the certificate is not named");
    assert!(format!("{why:#}").contains("certificate is not accepted"), "{why:#}");
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
async fn a_call_is_not_repeated_after_a_refused_certificate() {
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
