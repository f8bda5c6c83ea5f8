//! The command line: what it refuses, what it leaves unchanged, and how soon it reports errors.

use std::{
    path::Path,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use rcgen::{CertificateParams, KeyPair};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    process::Command,
};

use crate::support::{fresh_database, process::Service};

pub(crate) async fn forebay(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    for name in ["FOREBAY_URL", "FOREBAY_KEY", "FOREBAY_DATABASE", "FOREBAY_CONFIG", "FOREBAY_CA"] {
        command.env_remove(name);
    }
    command.args(arguments).output().await.expect("the binary starts")
}

/// The error output of a command that fails.
pub(crate) async fn complaint(arguments: &[&str]) -> String {
    let output = forebay(arguments).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
    said
}

fn path<'p>(folder: &'p tempfile::TempDir, name: &str) -> String {
    let path: &'p Path = folder.path();
    path.join(name).display().to_string()
}

/// A server that answers every connection with the same bytes after it has received something. Also returns the number
/// of connections.
async fn answering(answer: Vec<u8>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("a listener has an address").to_string();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut [0; 4_096]).await;
            let _ = stream.write_all(&answer).await;
        }
    });
    (address, count)
}

/// An address at which nothing listens.
async fn dead_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    listener.local_addr().expect("a listener has an address").to_string()
}

#[tokio::test]
async fn check_config_names_every_wrong_value_and_the_files_that_cannot_be_used() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = path(&folder, "forebay.toml");
    let text = format!(
        "listen = 'foo'\ndatabase = 'mysql://x'\n[tls]\ncertificate = '{}'\nkey = '{}'\n\
         [limits]\nheader_timeout_s = 9223372036854775807\nwaiters = 'many'\n\
         [[policy]]\nname = 'a b'\ngroup = {{ size = 'x', timeout_s = 0 }}\n",
        path(&folder, "no.pem"),
        path(&folder, "no.key")
    );
    std::fs::write(&file, text).expect("the file can be written");
    let said = complaint(&["check-config", &file]).await;
    for named in [
        "/listen: ",
        "/database: ",
        "/tls/certificate: cannot read",
        "/tls/key: cannot read",
        "/limits/header_timeout_s: must be at most",
        "/limits/waiters: ",
        "/policy/0/name: ",
        "/policy/0/group/size: ",
        "/policy/0/group/timeout_s: ",
    ] {
        assert!(said.contains(named), "{named} is not in {said}");
    }
    std::fs::write(&file, "[limits]\nheader_timeout_s = 18446744073709551615").expect("the file can be written");
    assert!(complaint(&["check-config", &file]).await.contains("header_timeout_s"));
    std::fs::write(&file, format!("database = 'sqlite:{}'", path(&folder, "no/x.db"))).expect("it can be written");
    let said = complaint(&["check-config", &file]).await;
    assert!(said.contains("/database: ") && said.contains("does not exist"), "{said}");
    assert!(!folder.path().join("no").exists());
}

#[tokio::test]
async fn check_config_reports_a_key_of_another_certificate_and_accepts_the_right_one() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (key, other) = (KeyPair::generate().expect("a key"), KeyPair::generate().expect("a key"));
    let params = CertificateParams::new(["localhost".to_owned()]).expect("the name is valid");
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).expect("it can be written");
    write("tls.pem", params.self_signed(&key).expect("it signs itself").pem());
    write("tls.key", other.serialize_pem());
    write(
        "forebay.toml",
        format!("[tls]\ncertificate = '{}'\nkey = '{}'", path(&folder, "tls.pem"), path(&folder, "tls.key")),
    );
    let file = path(&folder, "forebay.toml");
    let said = complaint(&["check-config", &file]).await;
    assert!(said.contains("/tls/key: ") && said.contains("does not belong to the certificate"), "{said}");
    write("tls.key", "no key".to_owned());
    let said = complaint(&["check-config", &file]).await;
    assert!(said.contains("/tls/key: ") && said.contains("contains no usable private key"), "{said}");
    write("tls.key", key.serialize_pem());
    assert!(forebay(&["check-config", &file]).await.status.success());
}

#[tokio::test]
async fn a_mistyped_path_makes_neither_folders_nor_a_database() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let copy = path(&folder, "copy.db");
    for name in ["typo.db", "no/such/folder.db"] {
        let database = format!("sqlite:{}", path(&folder, name));
        for command in [&["keys", "list"][..], &["keys", "revoke", "0123456789ab"], &["doctor"], &["backup", &copy]] {
            let said = complaint(&[command, &["--database", &database]].concat()).await;
            assert!(said.contains(&format!("{name} does not exist: correct the path")), "{command:?}: {said}");
        }
    }
    let nested = format!("sqlite:{}", path(&folder, "no/such/folder.db"));
    let create = ["keys", "create", "--name", "me", "--role", "admin", "--database", &nested];
    for command in [&create[..], &["--listen", "127.0.0.1:0", "--database", &nested]] {
        let said = complaint(command).await;
        assert!(said.contains("no/such") && said.contains("does not exist"), "{said}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder is there").count(), 0, "something was made");
    // The first key may be needed before the first start, so the command creates the database and says so.
    let database = format!("sqlite:{}", path(&folder, "new.db"));
    let created = forebay(&["keys", "create", "--name", "me", "--role", "admin", "--database", &database]).await;
    assert!(created.status.success());
    assert!(String::from_utf8_lossy(&created.stderr).contains("created database"));
    assert!(forebay(&["keys", "list", "--database", &database]).await.status.success());
    let nested_copy = path(&folder, "no/such/copy.db");
    let said = complaint(&["backup", &nested_copy, "--database", &database]).await;
    assert!(said.contains("no/such/copy.db does not exist: correct the path, or create the folder"), "{said}");
}

#[tokio::test]
async fn the_folder_of_the_default_database_is_created() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command
        .args(["--listen", "127.0.0.1:0", "--log", "json"])
        .current_dir(folder.path())
        .env_remove("FOREBAY_DATABASE");
    let service = Service::spawn(command).await.expect("it serves before it ends");
    assert!(folder.path().join("data/forebay.db").exists());
    service.kill().await;
}

#[tokio::test]
async fn keys_reports_at_once_that_nothing_listens_and_does_not_retry() {
    let url = format!("http://{}", dead_address().await);
    let said = complaint(&["keys", "list", "--url", &url]).await;
    assert!(said.contains(&format!("nothing listens at {url}")) && said.contains("forebay serve"), "{said}");
    let body = r#"{"type":"overloaded","title":"Too many bytes","status":503}"#;
    let answer = format!(
        "HTTP/1.1 503 x\r\ncontent-type: application/problem+json\r\nretry-after: 0\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    );
    let (address, count) = answering(answer.into_bytes()).await;
    let said = complaint(&["keys", "list", "--url", &format!("http://{address}")]).await;
    assert!(said.contains("overloaded"), "{said}");
    assert_eq!(count.load(Ordering::SeqCst), 1, "somebody waits at the terminal");
}

#[tokio::test]
async fn a_postgres_that_refuses_the_login_is_reported_with_its_answer() {
    let address = dead_address().await;
    let said = complaint(&["keys", "list", "--database", &format!("postgres://me@{address}/forebay")]).await;
    assert!(said.contains("connection refused") && said.contains(&address), "{said}");

    let database = fresh_database().await;
    let unknown = database.replacen("/t_", "/no_such_", 1);
    let said = complaint(&["--listen", "127.0.0.1:0", "--database", &unknown]).await;
    assert!(said.contains("unknown database") && said.contains("no_such_"), "{said}");

    // ErrorResponse: a length, then fields. Each field is a letter and a text that ends with a zero byte.
    let fields = b"SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user \"me\"\0\0";
    let length = u32::try_from(fields.len() + 4).expect("it is short").to_be_bytes();
    let (address, count) = answering([b"E", &length[..], fields].concat()).await;
    let said = complaint(&["keys", "list", "--database", &format!("postgres://me:secret@{address}/forebay")]).await;
    assert!(said.contains("authentication failed for user") && !said.contains("secret"), "{said}");
    assert_eq!(count.load(Ordering::SeqCst), 1, "the next attempt would end alike");
}
