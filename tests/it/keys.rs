//! `forebay keys` and `forebay serve` as processes: the first key, the log, and from where the service may be reached.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::support::text;

fn forebay(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    for name in ["FOREBAY_URL", "FOREBAY_KEY", "FOREBAY_DATABASE", "FOREBAY_CONFIG", "FOREBAY_INSECURE"] {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    forebay(args).output().expect("the binary starts")
}

#[track_caller]
fn printed(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it prints text")
}

fn complaint(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The service as a process whose log is read line by line.
struct Served {
    process: Child,
    log: BufReader<std::process::ChildStderr>,
    seen: String,
    url: String,
}

impl Served {
    fn start(args: &[&str], level: &str) -> Self {
        let mut process = forebay(&["serve", "--log", "json"])
            .args(args)
            .env("RUST_LOG", level)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut log = BufReader::new(process.stderr.take().expect("its log is a pipe"));
        let mut seen = String::new();
        let url = loop {
            let start = seen.len();
            assert_ne!(log.read_line(&mut seen).expect("the log is text"), 0, "it serves before its log ends: {seen}");
            let event: Value = serde_json::from_str(&seen[start..]).unwrap_or_default();
            if event["message"] == "serving" {
                break format!("http://{}", text(&event["listen"]).replace("0.0.0.0", "127.0.0.1"));
            }
        };
        Self { process, log, seen, url }
    }

    /// Stops the process and returns its whole log.
    fn stop(mut self) -> String {
        self.process.kill().expect("the process can be killed");
        self.log.read_to_string(&mut self.seen).expect("the log is text");
        std::mem::take(&mut self.seen)
    }
}

impl Drop for Served {
    /// Stops the process when a test fails.
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_created_before_the_first_start_and_managed_while_it_serves() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("x.db").display());
    let create = ["keys", "create", "--database", &database, "--name", "me", "--role", "admin", "--expires-in", "90d"];
    let admin = printed(run(&create));
    let admin = admin.strip_suffix('\n').expect("a line");
    assert!(admin.starts_with("fb_") && admin.len() == 80 && !admin.contains('\n'), "the key alone: {admin}");

    let served = Served::start(&["--listen", "127.0.0.1:0", "--database", &database], "info");
    let locked = complaint(&run(&["keys", "list", "--database", &database]));
    assert!(locked.contains("--url"), "{locked}");
    let over_http = |args: &[&str], key: &str| {
        let mut command = forebay(&["keys"]);
        command.args(args).env("FOREBAY_URL", &served.url).env("FOREBAY_KEY", key).output().expect("the binary starts")
    };
    let agent =
        printed(over_http(&["create", "--name", "agents", "--role", "produce", "--policies", "math.*,default"], admin));
    let agent = agent.trim_end();
    let listed = printed(over_http(&["list"], admin));
    assert!(listed.contains("math.*,default") && listed.contains(&agent[3..15]), "{listed}");
    assert!(!listed.contains(&agent[16..]) && !listed.contains(&admin[16..]), "{listed}");
    let denied = complaint(&over_http(&["list"], agent));
    assert!(denied.contains("forbidden"), "{denied}");
    printed(over_http(&["revoke", &agent[3..15]], admin));
    let denied = complaint(&over_http(&["list"], agent));
    assert!(denied.contains("unauthorized"), "{denied}");
    served.stop();

    let listed = printed(run(&["keys", "list", "--database", &database]));
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(!run(&["keys", "revoke", "--database", &database, "0123456789ab"]).status.success());
    // Help names the environment variables, but does not show their values.
    let help = forebay(&["keys", "--help"])
        .env("FOREBAY_KEY", admin)
        .env("FOREBAY_DATABASE", "postgres://a:hunter2@b/c")
        .output();
    let help = printed(help.expect("the binary starts"));
    assert!(help.contains("FOREBAY_KEY") && !help.contains(admin) && !help.contains("hunter2"), "{help}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_others_can_reach_needs_keys_or_an_explicit_setting() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("x.db").display());
    let serve = ["--listen", "0.0.0.0:0", "--database", &database];
    let mut command = tokio::process::Command::from(forebay(&serve));
    let refused = tokio::time::timeout(Duration::from_secs(30), command.kill_on_drop(true).output()).await;
    let refused = complaint(&refused.expect("it does not serve").expect("the binary starts"));
    assert!(refused.contains("no keys") && refused.contains("--insecure"), "{refused}");
    let log = Served::start(&[&serve[..], &["--insecure"]].concat(), "info").stop();
    assert!(log.contains("every client that can reach the service may do everything"), "{log}");
    printed(run(&["keys", "create", "--database", &database, "--name", "me", "--role", "admin"]));
    let log = Served::start(&serve, "info").stop();
    assert!(log.contains("unencrypted"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_keys_nor_passwords_are_logged() {
    forebay_client::install_tls_provider();
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("x.db").display());
    let admin = printed(run(&["keys", "create", "--database", &database, "--name", "me", "--role", "admin"]));
    let admin = admin.trim_end();
    // Logs everything from this crate and its dependencies.
    let served = Served::start(&["--listen", "127.0.0.1:0", "--database", &database], "trace");
    let http = crate::support::http();
    let post = |key: &str| {
        http.post(format!("{}/keys", served.url)).bearer_auth(key).json(&json!({"name": "n", "role": "read"}))
    };
    let created: Value = post(admin).send().await.expect("answered").json().await.expect("JSON");
    let created = text(&created["key"]).to_owned();
    let wrong = format!("fb_0123456789ab{}", &admin[15..]);
    assert_eq!(post(&wrong).send().await.expect("answered").status(), 401);
    assert_eq!(post(&created).send().await.expect("answered").status(), 403);
    // The service's trace log can fill the pipe. It is read only now, so the test makes few requests.
    let log = served.stop();
    assert!(log.contains("request rejected") && log.contains("key created"), "{log}");
    for secret in [&admin[16..], &created[16..]] {
        assert!(!log.contains(secret), "a secret was logged");
    }

    for url in [
        "postgres://me:hunter2@127.0.0.1:1/x",
        "postgers://me:hunter2@db/x",
        "postgres://127.0.0.1:1/x?password=hunter2",
    ] {
        let output = forebay(&["--listen", "127.0.0.1:0", "--database", url]).env("RUST_LOG", "trace").output();
        let output = output.expect("the binary starts");
        let said = complaint(&output) + &String::from_utf8_lossy(&output.stdout);
        assert!(!said.contains("hunter2"), "{said}");
    }
}
