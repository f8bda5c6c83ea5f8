//! A page of the browser, with the verbs of a reader: click, press, type, look.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};

use super::browser::{Browser, text};

/// What every document of a test runs first: a clock and a visibility that the test can take over.
const PRELUDE: &str = include_str!("prelude.js");

/// axe-core, which finds defects of accessibility.
const AXE: &str = include_str!("axe/axe.min.js");

/// The longest time that a condition may take to hold, on a machine with other work.
const PATIENCE: Duration = Duration::from_mins(2);

/// Events of the browser's protocol, in order.
type Events = Arc<Mutex<Vec<(String, Value)>>>;

/// A page.
pub(crate) struct Page {
    browser: &'static Browser,
    context: String,
    target: String,
    session: String,
    events: Events,
}

impl Page {
    pub(super) async fn prepare(
        browser: &'static Browser,
        context: String,
        target: String,
        session: String,
        events: Events,
    ) -> Self {
        let page = Self { browser, context, target, session, events };
        for domain in ["Page.enable", "Runtime.enable", "Network.enable", "Log.enable"] {
            page.command(domain, json!({})).await;
        }
        page.command("Page.addScriptToEvaluateOnNewDocument", json!({"source": PRELUDE})).await;
        page.command("Emulation.setFocusEmulationEnabled", json!({"enabled": true})).await;
        page.command("Emulation.setTimezoneOverride", json!({"timezoneId": "UTC"})).await;
        page.size(1480, 900).await;
        page
    }

    /// Another tab of the same browser: it shares what the origin stores, but not what a tab stores.
    pub(crate) async fn other_tab(&self) -> Self {
        self.browser.page_in(&self.context).await
    }

    async fn command(&self, method: &'static str, params: Value) -> Value {
        self.browser.command(Some(&self.session), method, params).await
    }

    /// The size of the window in pixels of CSS. Half of it is what a reader sees who zooms to 200%.
    pub(crate) async fn size(&self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.command("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Chooses the colours, `light` or `dark`, and whether the reader wants less motion.
    pub(crate) async fn prefers(&self, scheme: &str, less_motion: bool) {
        let motion = if less_motion { "reduce" } else { "no-preference" };
        let features = json!([
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]);
        self.command("Emulation.setEmulatedMedia", json!({"features": features})).await;
    }

    /// Opens an address.
    pub(crate) async fn goto(&self, url: &str) {
        let opened = self.command("Page.navigate", json!({"url": url})).await;
        assert_eq!(opened["errorText"], Value::Null, "{url}");
    }

    /// Evaluates an expression, which may be a promise, and returns its value.
    pub(crate) async fn eval(&self, expression: &str) -> Value {
        self.try_eval(expression).await.unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    async fn try_eval(&self, expression: &str) -> Result<Value, String> {
        let params = json!({
            "expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true,
        });
        let answer = self.browser.try_command(Some(&self.session), "Runtime.evaluate", params).await?;
        match answer.get("exceptionDetails") {
            Some(details) => Err(details["exception"]["description"].as_str().unwrap_or("it threw").to_owned()),
            None => Ok(answer["result"]["value"].clone()),
        }
    }

    /// Waits until an expression is true. A document that is replaced meanwhile is asked again.
    pub(crate) async fn wait_for(&self, condition: &str) {
        let attempt = format!("forebayTest.until(() => {condition})");
        let wait = async {
            while self.try_eval(&attempt).await != Ok(Value::Bool(true)) {
                tokio::task::yield_now().await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            let shown = self.try_eval("document.body?.innerText").await;
            panic!("`{condition}` did not come about; the page shows: {shown:?}; {:?}", self.complaints());
        }
    }

    /// Waits until the page shows a text, in capitals or not.
    pub(crate) async fn wait_for_text(&self, text: &str) {
        let text = Value::from(text.to_lowercase());
        self.wait_for(&format!("document.body.innerText.toLowerCase().includes({text})")).await;
    }

    /// The text of an element as it is shown.
    pub(crate) async fn text(&self, selector: &str) -> String {
        let found = self.eval(&format!("forebayTest.find({}).innerText", Value::from(selector))).await;
        text(&found).trim().to_owned()
    }

    /// Clicks an element with the mouse. The selector is CSS, or `text=` and the whole text of a link or a button.
    pub(crate) async fn click(&self, selector: &str) {
        self.wait_for(&format!("forebayTest.find({}) !== null", Value::from(selector))).await;
        let place = self.eval(&format!("forebayTest.place({})", Value::from(selector))).await;
        let place = (place[0].as_f64().expect("a number"), place[1].as_f64().expect("a number"));
        self.mouse("mouseMoved", place, 0).await;
        self.mouse("mousePressed", place, 1).await;
        self.mouse("mouseReleased", place, 0).await;
    }

    /// Moves the mouse to a place in the window.
    pub(crate) async fn point_at(&self, x: f64, y: f64) {
        self.mouse("mouseMoved", (x - 2.0, y), 0).await;
        self.mouse("mouseMoved", (x, y), 0).await;
    }

    /// Moves the mouse between two places of the window with its button pressed.
    pub(crate) async fn drag(&self, from: (f64, f64), to: (f64, f64)) {
        self.mouse("mouseMoved", from, 0).await;
        self.mouse("mousePressed", from, 1).await;
        self.mouse("mouseMoved", (f64::midpoint(from.0, to.0), to.1), 1).await;
        self.mouse("mouseMoved", to, 1).await;
        self.mouse("mouseReleased", to, 0).await;
    }

    async fn mouse(&self, kind: &str, (x, y): (f64, f64), buttons: u8) {
        let button = if kind == "mouseMoved" && buttons == 0 { "none" } else { "left" };
        let count = u8::from(kind != "mouseMoved");
        let event = json!({"type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": count});
        self.command("Input.dispatchMouseEvent", event).await;
    }

    /// Presses a key: a character, or a name such as `Enter`, `Tab`, `Shift+Tab`, `Escape`.
    pub(crate) async fn press(&self, key: &str) {
        let (modifiers, key) = key.strip_prefix("Shift+").map_or((0, key), |key| (8, key));
        let (code, typed) = match key {
            "Enter" => (13, "\r"),
            "Tab" => (9, ""),
            "Escape" => (27, ""),
            "ArrowDown" => (40, ""),
            "ArrowUp" => (38, ""),
            "ArrowLeft" => (37, ""),
            "ArrowRight" => (39, ""),
            character => (0, character),
        };
        let mut down = json!({"type": "keyDown", "key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code});
        if !typed.is_empty() {
            down["text"] = typed.into();
        }
        self.command("Input.dispatchKeyEvent", down).await;
        let up = json!({"type": "keyUp", "key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code});
        self.command("Input.dispatchKeyEvent", up).await;
    }

    /// Types a text into the field that has the focus.
    pub(crate) async fn type_text(&self, text: &str) {
        self.command("Input.insertText", json!({"text": text})).await;
    }

    /// Stops the timers of the page: from now on its time passes only with [`Self::pass_ms`].
    pub(crate) async fn hold_time(&self) {
        let source = json!({"source": "forebayTest.hold()"});
        self.command("Page.addScriptToEvaluateOnNewDocument", source).await;
    }

    /// Lets time pass for the page, which runs the timers that are due.
    pub(crate) async fn pass_ms(&self, milliseconds: u64) {
        self.eval(&format!("forebayTest.pass({milliseconds})")).await;
    }

    /// Puts the tab into the background, or brings it back.
    pub(crate) async fn hide(&self, is_hidden: bool) {
        self.eval(&format!("forebayTest.hide({is_hidden})")).await;
    }

    /// A picture of what is shown, as PNG.
    pub(crate) async fn screenshot(&self) -> Vec<u8> {
        // The last change is drawn with the second frame.
        self.eval("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(0))))").await;
        let answer = self.command("Page.captureScreenshot", json!({"format": "png"})).await;
        decode_base64(text(&answer["data"]))
    }

    fn events(&self, method: &str) -> Vec<Value> {
        let events = self.events.lock().expect("no test panics in it");
        events.iter().filter(|(name, _)| name == method).map(|(_, params)| params.clone()).collect()
    }

    /// The addresses of all requests so far, with their verbs: `GET http://...`.
    pub(crate) fn requests(&self) -> Vec<String> {
        let sent = self.events("Network.requestWillBeSent");
        let sent = sent.iter().map(|event| &event["request"]);
        sent.map(|request| format!("{} {}", text(&request["method"]), text(&request["url"]))).collect()
    }

    /// The headers of the requests to an address that contains a text.
    pub(crate) fn request_headers(&self, part: &str) -> Vec<Value> {
        let sent = self.events("Network.requestWillBeSent");
        let sent = sent.iter().map(|event| &event["request"]);
        sent.filter(|request| text(&request["url"]).contains(part)).map(|request| request["headers"].clone()).collect()
    }

    /// Everything that the browser complained about: exceptions, errors and warnings in its console, what the content
    /// security policy refused, and dialogs. Answers with an error status are not in it.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let console = self.events("Runtime.consoleAPICalled");
        let console =
            console.into_iter().filter(|event| matches!(text(&event["type"]), "error" | "warning" | "assert"));
        let log = self.events("Log.entryAdded");
        let log = log.into_iter().filter(|event| event["entry"]["source"] != "network");
        let log = log.filter(|event| matches!(text(&event["entry"]["level"]), "error" | "warning"));
        let others = self.events("Runtime.exceptionThrown").into_iter();
        let others = others.chain(self.events("Page.javascriptDialogOpening"));
        console.chain(log).chain(others).map(|event| event.to_string()).collect()
    }

    /// Checks that the page was quiet and asked nobody but the service.
    pub(crate) fn assert_clean(&self, origin: &str) {
        assert_eq!(self.complaints(), Vec::<String>::new());
        let origin = format!("{origin}/");
        let is_own = |request: &&String| {
            let url = request.split_once(' ').map_or("", |(_, url)| url);
            url.starts_with(&origin) || url.starts_with("data:") || url == "about:blank"
        };
        let requests = self.requests();
        assert!(requests.iter().all(|request| is_own(&request)), "{requests:#?}");
    }

    /// Checks the accessibility of what is shown. Each defect is a line with its rule and its elements.
    pub(crate) async fn axe(&self) -> Vec<String> {
        if self.eval("typeof axe").await == "undefined" {
            self.eval(&format!("{AXE}\n;0")).await;
        }
        let run = "forebayTest.inRealTime(() => axe.run(document, {resultTypes: ['violations']})).then(({violations}) => \
             violations.map(({id, help, nodes}) => `${id}: ${help}: ` + \
             nodes.map(({target, failureSummary}) => `${target} ${failureSummary}`).join('; ')))";
        let found = self.eval(run).await;
        found.as_array().expect("it is a list").iter().map(|defect| text(defect).to_owned()).collect()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.browser.close(&self.session, &self.target);
    }
}

fn decode_base64(encoded: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{byte} is no digit of base64"),
    };
    let digits: Vec<u8> = encoded.trim_end_matches('=').bytes().map(digit).collect();
    let decode = |four: &[u8]| {
        let bits = four.iter().fold(0_u32, |bits, &digit| bits << 6 | u32::from(digit)) << (6 * (4 - four.len()));
        bits.to_be_bytes()[1..four.len()].to_vec()
    };
    digits.chunks(4).flat_map(decode).collect()
}

#[test]
fn base64_is_decoded() {
    for (encoded, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob")] {
        assert_eq!(decode_base64(encoded), bytes.as_bytes(), "{encoded}");
    }
    assert_eq!(decode_base64("+/8="), [0xfb, 0xff]);
}
