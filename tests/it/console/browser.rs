//! A real browser for tests: Chromium, which reads commands from a pipe and writes events into another one.
//!
//! There is no port and no WebSocket: each message is JSON that ends with a NUL, on the descriptors 3 and 4 of the
//! browser, which `sh` sets up. When the tests end, however they end, the pipe closes and the browser ends too.
//! <https://chromedevtools.github.io/devtools-protocol/>

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Write as _},
    process::{ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::page::Page;

/// The script that finds Chromium.
const FIND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/chromium-bin");

/// Gives the browser its pipes, and removes its profile when it has ended. Signals that end the tests end the browser
/// as well, so the shell waits for that.
const START: &str = "trap : HUP INT TERM; \"$@\" 3<&0 4>&1 0</dev/null 1>&2 2>/dev/null; rm -rf \"$PROFILE\"";

/// Every name but this address resolves to nothing, so the page must work without internet. The other switches turn
/// off what a browser does on its own.
const SWITCHES: [&str; 14] = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
];

/// The longest time that the browser may take to answer, on a machine with other work.
const PATIENCE: Duration = Duration::from_mins(2);

/// An answer, or the browser's error.
type Reply = Result<Value, String>;

/// What a page did, in order.
type Events = Arc<Mutex<Vec<(String, Value)>>>;

/// The browser of all tests of this process. Each page has storage of its own.
pub(crate) struct Browser {
    input: Mutex<ChildStdin>,
    next_id: AtomicU64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<HashMap<u64, oneshot::Sender<Reply>>>,
    pages: Mutex<HashMap<String, Events>>,
}

impl Browser {
    /// The browser, which starts with the first test that asks for it.
    pub(crate) fn shared() -> &'static Self {
        static BROWSER: OnceLock<Browser> = OnceLock::new();
        BROWSER.get_or_init(Self::start)
    }

    fn start() -> Self {
        let found = Command::new(FIND).stderr(Stdio::inherit()).output().expect("scripts/chromium-bin starts");
        assert!(found.status.success(), "scripts/chromium-bin found no browser; its output says what to install");
        let program = String::from_utf8(found.stdout).expect("a path is text");
        let profile = tempfile::tempdir().expect("a temporary folder can be made").keep();
        let mut process = Command::new("sh")
            .args(["-c", START, "sh", program.trim()])
            .args(SWITCHES)
            .arg(format!("--user-data-dir={}", profile.display()))
            .env("PROFILE", &profile)
            // The same everywhere, and the worst one: the browser reports a language that is not valid.
            .env("LC_ALL", "C.UTF-8")
            .env_remove("LANGUAGE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let output = process.stdout.take().expect("its output is a pipe");
        let input = Mutex::new(process.stdin.take().expect("its input is a pipe"));
        let shared = Arc::<Shared>::default();
        let reader = Arc::clone(&shared);
        std::thread::spawn(move || {
            reader.read(output);
            // The shell ends when it has removed the profile.
            let _ = process.wait();
        });
        Self { input, next_id: AtomicU64::new(1), shared }
    }

    /// A blank page with storage of its own.
    pub(crate) async fn page(&'static self) -> Page {
        let context = self.command(None, "Target.createBrowserContext", json!({"disposeOnDetach": false})).await;
        self.page_in(text(&context["browserContextId"])).await
    }

    /// A blank page that shares the storage of the others in its context.
    pub(super) async fn page_in(&'static self, context: &str) -> Page {
        let blank = json!({"url": "about:blank", "browserContextId": context});
        let target = self.command(None, "Target.createTarget", blank).await;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = self.command(None, "Target.attachToTarget", attach).await;
        let session = text(&session["sessionId"]).to_owned();
        let events = Events::default();
        self.shared.pages.lock().expect("no test panics in it").insert(session.clone(), Arc::clone(&events));
        Page::prepare(self, context.to_owned(), text(&target["targetId"]).to_owned(), session, events).await
    }

    /// Sends a command and returns its answer, which must not be an error.
    #[track_caller]
    pub(super) fn command(
        &self,
        session: Option<&str>,
        method: &'static str,
        params: Value,
    ) -> impl Future<Output = Value> {
        let answer = self.try_command(session, method, params);
        async move { answer.await.unwrap_or_else(|error| panic!("{method}: {error}")) }
    }

    /// Sends a command and returns its answer.
    pub(super) fn try_command(
        &self,
        session: Option<&str>,
        method: &'static str,
        params: Value,
    ) -> impl Future<Output = Reply> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.shared.waiting.lock().expect("no test panics in it").insert(id, sender);
        let mut message = json!({"id": id, "method": method});
        message["params"] = params;
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        let sent = self.input.lock().expect("no test panics in it").write_all(&bytes);
        async move {
            sent.expect("the browser runs");
            let answer = tokio::time::timeout(PATIENCE, receiver).await;
            answer.unwrap_or_else(|_| panic!("the browser did not answer {method}")).expect("the browser runs")
        }
    }

    /// Closes what a page has.
    pub(super) fn close(&self, session: &str, target: &str) {
        self.shared.pages.lock().expect("no test panics in it").remove(session);
        // A test that has ended does not wait for the answer.
        drop(self.try_command(None, "Target.closeTarget", json!({"targetId": target})));
    }
}

impl Shared {
    /// Hands out what the browser writes, until it ends.
    fn read(&self, output: ChildStdout) {
        let mut messages = BufReader::new(output).split(0);
        while let Some(Ok(message)) = messages.next() {
            let message: Value = serde_json::from_slice(&message).expect("the browser writes JSON");
            if let Some(id) = message["id"].as_u64() {
                let waiting = self.waiting.lock().expect("no test panics in it").remove(&id);
                let error = message.get("error").map(|error| error["message"].to_string());
                // A test that has ended does not wait any more.
                let _ = waiting.map(|waiting| waiting.send(error.map_or_else(|| Ok(message["result"].clone()), Err)));
            } else if let (Some(method), Some(session)) = (message["method"].as_str(), message["sessionId"].as_str()) {
                let events = self.pages.lock().expect("no test panics in it").get(session).cloned();
                if let Some(events) = events {
                    let mut events = events.lock().expect("no test panics in it");
                    events.push((method.to_owned(), message["params"].clone()));
                }
            }
        }
        // Whoever still waits is told that the browser has ended.
        self.waiting.lock().expect("no test panics in it").clear();
    }
}

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not text"))
}
