//! `forebay top` in a terminal.

use std::{num::NonZero, process::ExitStatus, time::Duration};

use forebay_wire::Role;
use pty_process::{Pty, Size};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout,
};

use crate::support::{Backend, TestApp, group, process::Service, text};

/// How long a test waits for the screen that it expects.
const PATIENCE: Duration = Duration::from_mins(1);

/// A terminal in which a command runs.
struct Terminal {
    pty: Pty,
    process: Child,
    emulator: vt100::Parser,
}

impl Terminal {
    /// Starts `forebay top`, which asks every second.
    fn start(url: &str, (rows, columns): (u16, u16), environment: &[(&str, &str)]) -> Self {
        let (pty, side) = pty_process::open().expect("there is a terminal");
        pty.resize(Size::new(rows, columns)).expect("it has a size");
        let command = pty_process::Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["top", "--every", "1", "--url", url])
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .envs(environment.iter().copied())
            .kill_on_drop(true);
        let process = command.spawn(side).expect("the binary starts");
        Self { pty, process, emulator: vt100::Parser::new(cells(rows), cells(columns), 0) }
    }

    fn text(&self) -> String {
        self.emulator.screen().contents()
    }

    /// Reads what the command draws. Returns whether it still runs.
    async fn read(&mut self) -> bool {
        let mut bytes = [0; 4_096];
        // When the command has ended, Linux answers a read with an error.
        let read = self.pty.read(&mut bytes).await.unwrap_or(0);
        self.emulator.process(&bytes[..read]);
        read > 0
    }

    /// Waits until the screen is as expected, and returns its text.
    async fn until(&mut self, expected: impl Fn(&str) -> bool) -> String {
        let waited = timeout(PATIENCE, async {
            while !expected(&self.text()) {
                assert!(self.read().await, "the command ended:\n{}", self.emulator.screen().contents());
            }
        });
        assert!(waited.await.is_ok(), "the screen is:\n{}", self.text());
        self.text()
    }

    async fn shows(&mut self, text: &str) -> String {
        self.until(|screen| screen.contains(text)).await
    }

    async fn press(&mut self, keys: &str) {
        self.pty.write_all(keys.as_bytes()).await.expect("the terminal takes keys");
    }

    fn resize(&mut self, rows: u16, columns: u16) {
        self.emulator.screen_mut().set_size(cells(rows), cells(columns));
        self.pty.resize(Size::new(rows, columns)).expect("it can be resized");
    }

    /// Whether the first cell of the row with this text is drawn in reverse: the chosen row.
    fn is_chosen(&self, text: &str) -> bool {
        let row = self.text().lines().position(|line| line.starts_with(text)).expect("there is such a row");
        self.emulator.screen().cell(row as u16, 0).is_some_and(vt100::Cell::inverse)
    }

    /// Waits for the command to end. Returns its status and what it left on the normal screen.
    async fn ended(mut self) -> (ExitStatus, String) {
        let waited = timeout(PATIENCE, async { while self.read().await {} });
        assert!(waited.await.is_ok(), "it does not end:\n{}", self.text());
        let screen = self.emulator.screen();
        assert!(!screen.alternate_screen() && !screen.hide_cursor(), "the terminal is as it was");
        (self.process.wait().await.expect("it has a status"), self.text())
    }
}

fn cells(number: u16) -> NonZero<u16> {
    NonZero::new(number).expect("a terminal has cells")
}

/// Lets `default` starve, and gives `other` a batch that nobody asks for.
async fn two_policies(app: &TestApp) {
    for policy in ["default", "other"] {
        app.rules(policy, json!({"group": {"size": 2}, "batch": {"groups": 2}})).await;
    }
    post(app, "other", "a").await;
    post(app, "other", "b").await;
    post(app, "default", "a").await;
    for _ in 0..25 {
        app.post("/batches", json!({"consumer": "trainer-0"})).await.expect(204);
        app.pass_s(3.0).await;
    }
}

async fn post(app: &TestApp, policy: &str, group_id: &str) {
    let mut rollouts = group(group_id, &[0.0, 1.0]);
    for rollout in rollouts.as_array_mut().expect("an array") {
        rollout["policy"] = Value::from(policy);
    }
    app.accept(rollouts).await;
}

#[tokio::test]
async fn it_shows_the_worst_policy_first_and_why() {
    let app = TestApp::start(Backend::Sqlite).await;
    two_policies(&app).await;
    let mut terminal = Terminal::start(&app.url, (24, 160), &[]);
    let screen = terminal.shows("q quit").await;
    assert!(screen.contains("▼ 1 needs you") && screen.find("▼ starved") < screen.find("○ idle"), "{screen}");
    assert!(screen.contains("READY/NEED") && screen.contains("1/2") && screen.contains("2/2"), "{screen}");
    let overview = app.get("/overview").await.expect(200);
    let headline = overview["policies"][0]["headline"].as_str().expect("a sentence").to_owned();
    assert!(screen.contains(&headline), "below the table the sentence is whole: {screen}");
    assert!(terminal.is_chosen("default"));
    terminal.press("\r").await;
    let screen = terminal.shows("Not the reason").await;
    assert!(screen.contains(" why default ") && screen.contains("  1. "), "{screen}");
    terminal.press("\u{1b}").await;
    terminal.shows("READY/NEED").await;
    terminal.press("j").await;
    terminal.shows(" ○ other ").await;
    assert!(terminal.is_chosen("other"));
    // The chosen policy stays chosen in another row.
    post(&app, "default", "b").await;
    app.lease_with(json!({"consumer": "trainer-0"})).await;
    app.pass_s(3_000.0).await;
    terminal.until(|screen| screen.find("\nother") > screen.find("\ndefault") && !screen.contains("starved")).await;
    assert!(terminal.is_chosen("other"));
    terminal.press("q").await;
    let (status, _) = terminal.ended().await;
    assert!(status.success());
    app.finish().await;
}

#[tokio::test]
async fn it_goes_on_when_the_service_comes_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let database = format!("sqlite:{}/forebay.db", folder.path().display());
    let service = Service::start(&database).await;
    let (url, address) = (service.url.clone(), service.url.trim_start_matches("http://").to_owned());
    let mut terminal = Terminal::start(&url, (24, 120), &[]);
    terminal.shows("Nothing has been posted yet").await;
    assert!(service.stop().await.success());
    let screen = terminal.shows("No answer for").await;
    assert!(screen.contains(&format!("nothing listens at {url}")), "{screen}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["--listen", &address, "--database", &database]);
    let service = Service::spawn(command).await.expect("the address is free again");
    terminal.until(|screen| !screen.contains("No answer")).await;
    // A service that is silent is not awaited for long.
    service.signal("STOP").await;
    terminal.shows("No answer for").await;
    service.signal("CONT").await;
    terminal.until(|screen| !screen.contains("No answer")).await;
    terminal.press("\u{3}").await;
    assert!(terminal.ended().await.0.success());
    assert!(service.stop().await.success());
}

#[tokio::test]
async fn a_revoked_key_ends_it() {
    let app = TestApp::start(Backend::Sqlite).await;
    let admin = app.key(Role::Admin, &["*"]).await;
    let made = app.post_as(&admin, "/keys", json!({"role": "read", "name": "screen"})).await.expect(201);
    let (key, id) = (text(&made["key"]), text(&made["info"]["key_id"]));
    let mut terminal = Terminal::start(&app.url, (24, 120), &[("FOREBAY_KEY", key)]);
    terminal.shows("q quit").await;
    app.call_as(&admin, Method::DELETE, &format!("/keys/{id}"), None).await.expect(200);
    let (status, text) = terminal.ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(text.contains("forebay: the service refused") && text.contains("unauthorized"), "{text}");
}

#[tokio::test]
async fn it_fits_terminals_of_any_size() {
    let app = TestApp::start(Backend::Sqlite).await;
    two_policies(&app).await;
    let mut terminal = Terminal::start(&app.url, (24, 80), &[("NO_COLOR", "1")]);
    let screen = terminal.shows("q quit").await;
    assert!(screen.contains("REWARD") && !screen.contains("VERSION"), "{screen}");
    for (rows, columns) in [(6, 24), (1, 1), (3, 300), (2, 8), (24, 160)] {
        terminal.resize(rows, columns);
        terminal.press("j\r").await;
        // Not the escape key: with a key right behind it, it is read as that key with Alt.
        terminal.press("\u{7f}").await;
    }
    // What was drawn for other sizes may be shown for a moment.
    let widest = ["VERSION", "STALE MEAN/MAX", "WHY", "q quit"];
    let is_list = |screen: &str| widest.iter().all(|text| screen.contains(text));
    terminal.until(|screen| is_list(screen) || screen.contains("Esc back")).await;
    // The answer to the last Enter may have come after the key that goes back.
    terminal.press("\u{7f}").await;
    terminal.until(is_list).await;
    let cells = (0..24).flat_map(|row| (0..160).map(move |column| (row, column)));
    for (row, column) in cells {
        let cell = terminal.emulator.screen().cell(row, column).expect("a cell");
        assert_eq!(cell.fgcolor(), vt100::Color::Default, "no colours were asked for");
    }
    let id = terminal.process.id().expect("it runs").to_string();
    Command::new("kill").args(["-TERM", &id]).status().await.expect("there is kill");
    assert!(terminal.ended().await.0.success(), "a signal ends it, and the terminal is as it was");
    app.finish().await;
}

#[tokio::test]
async fn without_a_terminal_it_prints_once() {
    let app = TestApp::start(Backend::Sqlite).await;
    two_policies(&app).await;
    let run = async |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["top", "--url", &app.url]).args(arguments);
        command.stdin(std::process::Stdio::null()).output().await.expect("the binary starts")
    };
    let output = run(&[]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("add --once"));
    let output = run(&["--once"]).await;
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("it is text");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines.len() == 3 && lines[0].starts_with("POLICY ") && lines[0].ends_with("WHY"), "{text}");
    assert!(lines[1].starts_with("default  ▼ starved") && lines[1].contains("1 of 2 groups is ready"), "{text}");
    assert!(lines[2].starts_with("other    ○ idle"), "{text}");
    app.finish().await;
}

#[tokio::test]
async fn an_unreachable_service_is_said_before_the_screen_changes() {
    let terminal = Terminal::start("http://127.0.0.1:1", (24, 120), &[]);
    let (status, text) = terminal.ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(text.contains("nothing listens at http://127.0.0.1:1"), "{text}");
}
