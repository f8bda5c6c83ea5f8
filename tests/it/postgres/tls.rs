//! Encrypted connections to Postgres, with certificates that the test makes.

use rcgen::{CertificateParams, date_time_ymd};
use sqlx::{Connection as _, PgConnection, Row as _};

use super::work;
use crate::{
    commands::{complaint, forebay},
    support::{Cluster, TestApp, group},
    tls::Authority,
};

/// A server whose certificate an authority has signed, and a folder for the files of its clients.
struct Server {
    cluster: Cluster,
    database: String,
    authority: Authority,
    folder: tempfile::TempDir,
}

impl Server {
    /// Starts one that does not encrypt connections yet.
    async fn start() -> Self {
        let start = || Cluster::start().expect("a cluster starts");
        let cluster = tokio::task::spawn_blocking(start).await.expect("nothing panics");
        let database = cluster.fresh_database().await;
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let authority = Authority::new();
        std::fs::write(folder.path().join("root.pem"), authority.pem()).expect("the file is written");
        Self { cluster, database, authority, folder }
    }

    /// Encrypts connections from now on. If `clients` is given, clients need a certificate of that authority.
    async fn encrypt(self, (certificate, key): (String, String), clients: Option<String>) -> Self {
        let mut server = self;
        let encrypt = move || {
            server.cluster.encrypt(&certificate, &key, clients.as_deref()).expect("the server starts with it");
            server
        };
        tokio::task::spawn_blocking(encrypt).await.expect("nothing panics")
    }

    /// The URL with parameters. A name of a file in the folder follows `@`.
    fn url(&self, parameters: &str) -> String {
        format!("{}?{}", self.database, parameters.replace('@', &format!("{}/", self.folder.path().display())))
    }

    fn write(&self, name: &str, content: &str) {
        std::fs::write(self.folder.path().join(name), content).expect("the file is written");
    }

    /// What the service says when it does not start.
    async fn complaint(&self, parameters: &str) -> String {
        complaint(&["--listen", "127.0.0.1:0", "--database", &self.url(parameters)]).await
    }
}

/// The parameters of a client that verifies everything.
const VERIFY: &str = "sslmode=verify-full&sslrootcert=@root.pem";

/// The last statement of each of the service's sessions, and whether the session is encrypted.
async fn sessions(database: &str) -> Vec<(String, bool)> {
    const SESSIONS: &str = "
        SELECT query, ssl FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE application_name = 'forebay'";
    let mut connection = PgConnection::connect(database).await.expect("the server accepts");
    let rows = sqlx::query(SESSIONS).fetch_all(&mut connection).await.expect("sessions can be read");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_a_rollout_is_the_same_over_tls() {
    let server = Server::start().await;
    let certificate = server.authority.sign("127.0.0.1");
    let server = server.encrypt(certificate, None).await;
    let app = TestApp::start_on(&server.url(VERIFY)).await;
    work(&app).await;
    // More than one TLS record.
    app.accept(group("many", &[1.0; 300])).await;
    let sessions = sessions(&server.url(VERIFY)).await;
    assert!(sessions.iter().all(|(_, is_encrypted)| *is_encrypted), "{sessions:#?}");
    assert!(sessions.iter().any(|(query, _)| query.contains("LISTEN")), "{sessions:#?}");
    let batch = app.lease().await;
    app.ack(&batch, 3).await.expect(200);
    app.finish().await;
    let examined = forebay(&["doctor", "--database", &server.url(VERIFY)]).await;
    assert!(examined.status.success(), "{}", String::from_utf8_lossy(&examined.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_cannot_be_encrypted_says_what_to_change() {
    let server = Server::start().await;
    server.write("other.pem", &Authority::new().pem());
    let said = server.complaint("sslmode=require").await;
    assert!(said.contains("does not offer TLS") && said.contains("switch `ssl` on"), "{said}");

    let certificate = server.authority.sign("db.example.com");
    let server = server.encrypt(certificate, None).await;
    let said = server.complaint("sslmode=verify-ca").await;
    assert!(said.contains("UnknownIssuer") && said.contains("sslrootcert=FILE"), "{said}");
    let said = server.complaint("sslmode=verify-ca&sslrootcert=@other.pem").await;
    assert!(said.contains("is not accepted") && said.contains("sslrootcert=FILE"), "{said}");
    let said = server.complaint(VERIFY).await;
    assert!(said.contains("db.example.com") && said.contains("a host name in the URL"), "{said}");
    let said = server.complaint("sslmode=verify-ca&sslrootcert=@missing.pem").await;
    assert!(said.contains("sslrootcert") && said.contains("missing.pem cannot be read"), "{said}");

    let mut expired = CertificateParams::new(["127.0.0.1".to_owned()]).expect("the name is valid");
    expired.not_after = date_time_ymd(2020, 1, 1);
    let certificate = server.authority.sign_params(&expired);
    let server = server.encrypt(certificate, None).await;
    let said = server.complaint(VERIFY).await;
    assert!(said.contains("expired") && said.contains("whose dates are right"), "{said}");

    // As `openssl req -x509` makes it.
    let certificate = server.authority.itself();
    let server = server.encrypt(certificate, None).await;
    let said = server.complaint(VERIFY).await;
    assert!(said.contains("CaUsedAsEndEntity") && said.contains("which an authority has signed"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_wants_certificates_of_its_clients_is_given_one() {
    let clients = Authority::new();
    let server = Server::start().await;
    let certificate = server.authority.sign("127.0.0.1");
    let server = server.encrypt(certificate, Some(clients.pem())).await;
    let said = server.complaint(VERIFY).await;
    assert!(said.contains("a valid client certificate") && said.contains("sslcert"), "{said}");

    let (certificate, key) = clients.sign("forebay");
    server.write("client.pem", &certificate);
    server.write("client.key", &key);
    let said = server.complaint(&format!("{VERIFY}&sslcert=@client.pem")).await;
    assert!(said.contains("must be given together"), "{said}");
    let app = TestApp::start_on(&server.url(&format!("{VERIFY}&sslcert=@client.pem&sslkey=@client.key"))).await;
    work(&app).await;
    app.finish().await;
}
