//! `forebay score`: programs as scorers.

use std::{path::Path, process::Stdio};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

use crate::{
    commands::complaint,
    support::{Backend, TestApp, eventually, member, text, with},
};

/// A running command, and what it prints.
struct Scorer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Scorer {
    /// Scores with a shell script.
    fn start(app: &TestApp, options: &[&str], script: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["score", "--url", &app.url, "--name", "judge"]).args(options);
        command.args(["--", "sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().expect("the binary starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, lines }
    }

    async fn line(&mut self) -> String {
        self.lines.next_line().await.expect("it is read").expect("it goes on")
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let id = self.child.id().expect("it runs").cast_signed();
        let id = rustix::process::Pid::from_raw(id).expect("it is no zero");
        rustix::process::kill_process(id, signal).expect("it runs");
    }

    /// Ends it as Ctrl-C would, and waits for that.
    async fn stop(mut self) -> Option<i32> {
        self.signal(rustix::process::Signal::INT);
        self.child.wait().await.expect("it ends").code()
    }
}

async fn rules(app: &TestApp, size: usize, work: Value) {
    app.rules(
        "default",
        json!({
            "group": {"size": size}, "batch": {"groups": 1}, "lease": {"ttl_s": 60},
            "scores": {"required": ["judge"], "reward": "scores.judge", "work": {"judge": work}},
        }),
    )
    .await;
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_reads_a_rollout_and_prints_its_score() {
    let app = TestApp::start(Backend::Sqlite).await;
    rules(&app, 2, json!({})).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let seen = shown(&folder.path().join("seen"));
    let messages = json!([{"role": "user", "content": "hi"}]);
    let fields = json!({"messages": messages, "metadata": {"big": 9_007_199_254_740_993_i64}});
    app.accept(with(member("g", 0, 1.0), fields)).await;
    let script = format!("cat > {seen}; echo looking; echo ' 0.25 '; echo");
    let mut scorer = Scorer::start(&app, &["--scorer", "sh"], &script);
    assert_eq!(scorer.line().await, "g-0 judge 0.25");
    let input: Value = serde_json::from_slice(&std::fs::read(&seen).expect("it was written")).expect("JSON");
    let expected = json!({
        "policy": "default", "name": "judge", "group_id": "g", "attempt": 1, "max_attempts": 5, "rollout_id": "g-0",
        "scoring": ["judge"], "policy_version": 0, "status": "completed", "reward": 1.0, "reward_components": {},
        "messages": messages, "metadata": {"big": 9_007_199_254_740_993_i64},
    });
    assert_eq!(input, expected);
    // It waits for more.
    app.accept(member("g", 1, 1.0)).await;
    assert_eq!(scorer.line().await, "g-1 judge 0.25");
    assert_eq!(app.story("g-1").await["group"]["state"], "ready");
    let list = app.get("/scores?rollout_id=g-1").await.expect(200);
    assert_eq!(list["scores"][0]["scorer"], "sh");
    assert_eq!(scorer.stop().await, Some(0));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_prints_a_score_for_each_rollout_of_a_group() {
    let app = TestApp::start(Backend::Sqlite).await;
    rules(&app, 2, json!({"per": "group", "max_attempts": 2})).await;
    app.accept(json!([member("g", 0, 1.0), member("g", 1, 1.0)])).await;
    let script = r#"if grep -q '"attempt":1'; then echo '[1]'; else echo '[0.5, 1]'; fi"#;
    let mut scorer = Scorer::start(&app, &[], script);
    let reason = "the last line that it printed is `[1]`, which is no JSON array of 2 numbers, one for each of \
                  `rollouts`";
    assert_eq!(scorer.line().await, format!("group g judge failed, attempt 1 of 2: {reason}"));
    assert_eq!(scorer.line().await, "group g judge 0.5 1");
    assert_eq!(app.story("g-0").await["reward"], 0.5);
    assert_eq!(scorer.stop().await, Some(0));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_say_why_and_use_up_attempts() {
    let app = TestApp::start(Backend::Sqlite).await;
    rules(&app, 1, json!({"max_attempts": 1})).await;
    for (group, script, reason) in [
        ("exits", "echo 1; echo 'no disk' >&2; exit 3", "exit status: 3: no disk"),
        ("silent", "exit 1", "exit status: 1"),
        ("nothing", "true", "the last line that it printed is ``, which is no number"),
        ("word", "echo good", "the last line that it printed is `good`, which is no number"),
        ("zero", "printf 'bad\\000byte\\n' >&2; exit 1", "exit status: 1: bad\u{fffd}byte"),
        ("nan", "echo nan", "the last line that it printed is `nan`, which is not finite"),
        ("hangs", "sleep 100 & sleep 100", "timeout: it ran for more than 1 s"),
    ] {
        app.accept(member(group, 0, 1.0)).await;
        let mut scorer = Scorer::start(&app, &["--timeout-s", "1"], script);
        assert_eq!(scorer.line().await, format!("{group}-0 judge failed, attempt 1 of 1: {reason}"));
        assert_eq!(scorer.stop().await, Some(0));
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_a_program_leaves_behind_does_not_keep_its_score() {
    let app = TestApp::start(Backend::Sqlite).await;
    rules(&app, 1, json!({})).await;
    app.accept(member("g", 0, 1.0)).await;
    // It has the pipes of the program, and is in no group of it.
    let mut scorer = Scorer::start(&app, &[], "setsid sleep 30 & echo 0.5");
    assert_eq!(scorer.line().await, "g-0 judge 0.5");
    assert_eq!(scorer.stop().await, Some(0));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_whose_lease_is_lost_is_killed_with_what_it_started() {
    let app = TestApp::start(Backend::Sqlite).await;
    rules(&app, 1, json!({})).await;
    // A heartbeat each third of a second.
    app.rules(
        "default",
        json!({
            "group": {"size": 1}, "lease": {"ttl_s": 1}, "scores": {"required": ["judge"], "work": {"judge": {}}},
        }),
    )
    .await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let started = folder.path().join("started");
    app.accept(member("g", 0, 1.0)).await;
    let script = format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait; echo 1", shown(&started));
    // A heartbeat each third of a second.
    let mut scorer = Scorer::start(&app, &["--lease-s", "1"], &script);
    eventually("the program", || async { started.exists() }).await;
    let id: i32 = std::fs::read_to_string(&started).expect("it is there").trim().parse().expect("a process");
    app.post("/scores", json!({"rollout_id": "g-0", "name": "judge", "value": 0.75})).await.expect(201);
    assert_eq!(scorer.line().await, "g-0 judge: the lease is lost; the work goes to another scorer");
    let id = rustix::process::Pid::from_raw(id).expect("it is no zero");
    eventually("its end", || async {
        // A killed process that nobody has waited for is a zombie.
        let state = std::fs::read_to_string(format!("/proc/{}/stat", id.as_raw_nonzero()));
        state.map_or(true, |state| state.contains(") Z "))
    })
    .await;
    assert_eq!(scorer.stop().await, Some(0));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_run_at_once_and_a_signal_lets_them_finish() {
    let app = TestApp::start(Backend::Sqlite).await;
    rules(&app, 2, json!({})).await;
    app.accept(json!([member("g", 0, 1.0), member("g", 1, 1.0), member("h", 0, 1.0)])).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let go = folder.path().join("go");
    let place = shown(folder.path());
    // Each waits until two of them run and the test lets them go on.
    let script = format!(
        "touch {place}/$$.runs; until [ $(ls {place} | grep -c runs) = 2 ] && [ -e {} ]; do sleep 0.02; done; echo 0.5",
        shown(&go)
    );
    let mut scorer = Scorer::start(&app, &["--jobs", "2"], &script);
    let running = || std::fs::read_dir(folder.path()).map_or(0, Iterator::count);
    eventually("two programs", || async { running() == 2 }).await;
    scorer.signal(rustix::process::Signal::TERM);
    std::fs::write(&go, "").expect("the folder can be written");
    let mut lines = vec![scorer.line().await, scorer.line().await];
    lines.sort();
    assert_eq!(lines, ["g-0 judge 0.5", "g-1 judge 0.5"]);
    assert_eq!(scorer.child.wait().await.expect("it ends").code(), Some(0));
    let left = app.post("/scores/leases", json!({"names": ["judge"]})).await.expect(200);
    assert_eq!(text(&left["items"][0]["rollouts"][0]["rollout_id"]), "h-0", "nothing new was begun");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_work_is_said_at_once() {
    let app = TestApp::start(Backend::Sqlite).await;
    let said = complaint(&["score", "--url", &app.url, "--name", "judge", "--", "true"]).await;
    assert!(said.contains("has no work for the score `judge`"), "{said}");
    let said = complaint(&["score", "--url", "http://127.0.0.1:1", "--name", "judge", "--", "true"]).await;
    assert!(said.contains("nothing listens at http://127.0.0.1:1"), "{said}");
    rules(&app, 1, json!({"max_attempts": 1})).await;
    app.accept(member("g", 0, 1.0)).await;
    let said = complaint(&["score", "--url", &app.url, "--name", "judge", "--", "/no/such/program"]).await;
    assert!(said.contains("/no/such/program cannot be run: No such file"), "{said}");
    app.finish().await;
}
