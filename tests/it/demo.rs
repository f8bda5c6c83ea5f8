//! `forebay demo`: a newcomer's first minute.

use std::process::Stdio;

use forebay_client::Client;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::{
    console::{browser::Browser, pictures::picture},
    support::endure,
};

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["demo", "--listen", "127.0.0.1:0"]).args(arguments).kill_on_drop(true);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_learns_through_a_restart_and_accounts_for_every_rollout() {
    let output = demo(&["--steps", "16", "--think-ms", "0", "--seconds", "600"]).output().await.expect("it starts");
    let (said, failed) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{failed}");
    assert!(said.starts_with("The page is http://127.0.0.1:"), "{said}");
    assert!(said.contains("killed after step 13"), "{said}");
    assert!(said.contains("starts again from step 10: steps 11 to 13 get the same batches once more"), "{said}");
    assert!(said.contains("The solver was trained for 16 steps"), "{said}");
    assert_eq!(said.matches("from none of them twice").count(), 2, "{said}");
    assert!(said.contains("They add up."), "{said}");
}

/// A demo that goes on, and the address of its page.
async fn started() -> (Child, String) {
    let mut process = demo(&["--serve"]).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(process.stdout.take().expect("its output is a pipe")).lines();
    let first = lines.next_line().await.expect("it prints text").expect("it says where the page is");
    let url = first.split_whitespace().find(|word| word.starts_with("http://")).expect("an address").to_owned();
    // It would end if nobody read what it prints.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (process, url)
}

/// The picture of README.md. It takes as long as the policy takes to learn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_page_shows_a_healthy_run() {
    if !endure::is_long() {
        return;
    }
    let (mut process, url) = started().await;
    let client = Client::new(&url).expect("an address");
    // Past the restart, and before everything is learned.
    let mut version = 0;
    while version <= 20 {
        if let Some(policy) = client.wait_version_above("solver", version, 60_000).await.expect("it serves") {
            version = policy.version;
        }
    }
    let page = Browser::shared().page().await;
    page.size(1200, 900).await;
    page.goto(&format!("{url}#/policies/solver")).await;
    page.wait_for("document.querySelector('.strip') !== null").await;
    picture(&page, "demo").await;
    let pid = process.id().expect("it runs").to_string();
    assert!(Command::new("kill").arg(pid).status().await.expect("kill can be run").success());
    assert!(process.wait().await.expect("it ends").success(), "it has removed its folder");
}
