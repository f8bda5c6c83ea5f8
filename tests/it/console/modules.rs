//! The pure modules of the page, imported in the browser, and the contrast of its colours.

use serde_json::{Value, json};

use super::{Page, open};
use crate::support::{Backend, TestApp};

/// A page that shows something, in which modules can be imported.
async fn ready(app: &TestApp) -> Page {
    let page = open(app, "").await;
    page.wait_for("document.querySelector('h1') !== null").await;
    page
}

/// What a function of a module returns for arguments.
async fn call(page: &Page, module: &str, function: &str, arguments: &Value) -> Value {
    page.eval(&format!("import('/console/{module}').then((module) => module.{function}(...{arguments}))")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_and_times_are_written_for_people() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let at = "2026-01-01T02:10:31.004Z";
    let now = 1_767_233_435_000_i64;
    let cases = [
        ("count", json!([2677]), "2,677"),
        ("count", json!([-1_234_567.4]), "−1,234,567"),
        ("count", json!([null]), "–"),
        ("short", json!([1_900_000]), "1.9 M"),
        ("short", json!([999_950]), "1.0 M"),
        ("short", json!([9999]), "9,999"),
        ("bytes", json!([429_496_729]), "0.4 GiB"),
        ("bytes", json!([12]), "12 B"),
        ("real", json!([0.7134]), "0.71"),
        ("real", json!([-0.001]), "0.00"),
        ("real", json!(["NaN"]), "–"),
        ("signed", json!([0.021]), "+0.02"),
        ("signed", json!([-0.011]), "−0.01"),
        ("signed", json!([0.001]), "0.00"),
        ("percent", json!([0.97]), "97%"),
        ("percent", json!([0.9999]), ">99%"),
        ("percent", json!([1]), "100%"),
        ("percent", json!([0.0001]), "<0.1%"),
        ("percent", json!([0]), "0%"),
        ("duration", json!([250_000]), "4 min 10 s"),
        ("duration", json!([3_600_000]), "1 h"),
        ("duration", json!([59_600]), "1 min"),
        ("duration", json!([93_784_000]), "1 d 2 h"),
        ("duration", json!([4]), "4 ms"),
        ("ago", json!([at, now]), "3 s"),
        ("ago", json!([at, now - 60_000]), "0 s"),
        ("ago", json!([null, now]), "–"),
        ("clock", json!([at]), "02:10:31"),
        ("clockMs", json!([at]), "02:10:31.004"),
        ("day", json!([at]), "1 Jan 02:10"),
        ("shortId", json!(["0197a5a0-0000-7000-8000-00000000003f"]), "0197…003f"),
        ("shortId", json!(["a-short-id"]), "a-short-id"),
        ("plural", json!([1, "rollout"]), "1 rollout"),
        ("plural", json!([3, "batch", "batches"]), "3 batches"),
    ];
    for (function, arguments, expected) in cases {
        assert_eq!(call(&page, "format.js", function, &arguments).await, expected, "{function}({arguments})");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn characters_that_would_change_how_text_looks_are_shown() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let cases = [
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb", "a\nb"),
        ("\u{1b}[31mred\u{7f}", "␛[31mred␡"),
        ("user\u{202e}nimda", "user\\u{202e}nimda"),
        ("\u{2066}x\u{200b}y\u{feff}", "\\u{2066}x\\u{200b}y\\u{feff}"),
        ("\u{85}\u{e0041}\u{3164}", "\\u{0085}\\u{e0041}\\u{3164}"),
        ("日本 🙂", "日本 🙂"),
    ];
    for (text, expected) in cases {
        assert_eq!(call(&page, "format.js", "visible", &json!([text])).await, expected, "{text:?}");
    }
    let lone = "import('/console/format.js').then(({visible}) => visible('a' + String.fromCharCode(0xd800) + 'b'))";
    assert_eq!(page.eval(lone).await, "a\\u{d800}b");
    let sorted = "import('/console/format.js').then(({compareReal}) => [-1, 1].map((way) => \
         [2, NaN, null, 3, 1].sort((a, b) => compareReal(a, b, way)).slice(0, 3)))";
    assert_eq!(page.eval(sorted).await, json!([[3, 2, 1], [1, 2, 3]]), "what is not a number comes last");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_hold_any_id_and_lead_to_screens() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let arguments = json!(["policies/a.b/groups", {"id": "x/y?#&", "after": null}]);
    let made = call(&page, "address.js", "hash", &arguments).await;
    assert_eq!(made, "#/policies/a.b/groups?id=x%2Fy%3F%23%26");
    let parts = call(&page, "address.js", "split", &json!([made])).await;
    assert_eq!(parts, json!({"segments": ["policies", "a.b", "groups"], "query": {"id": "x/y?#&"}}));
    let cases = [
        (
            "./groups?policy=p&state=discarded&reason=zero-variance&order=newest",
            json!("#/policies/p/groups?state=discarded&reason=zero-variance"),
        ),
        ("./groups?policy=p&group_id=a%2Fb", json!("#/policies/p/groups?id=a%2Fb")),
        ("./trajectories?policy=p&rollout_id=r", json!("#/policies/p/rollout?id=r")),
        ("./policies/p/steps?order=newest", json!("#/policies/p/steps")),
        ("./policies/p", json!("#/policies/p")),
        ("./elsewhere", Value::Null),
    ];
    for (see, expected) in cases {
        assert_eq!(call(&page, "address.js", "fromSee", &json!([see])).await, expected, "{see}");
    }
    for (from, expected) in [
        ("#/policies/p/groups?id=g", json!("#/policies/p/groups")),
        ("#/policies/p/rollout?id=r", json!("#/policies/p/rollouts")),
        ("#/policies/p/groups", json!("#/policies/p")),
        ("#/policies/p", json!("#/")),
        ("#/", Value::Null),
    ] {
        assert_eq!(call(&page, "address.js", "above", &json!([from])).await, expected, "{from}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_and_steps_are_summed_up_from_what_the_service_says() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let siblings = json!([
        {"verdict": "kept", "reward": 1.0}, {"verdict": "masked", "reward": 0.0}, {"verdict": "late", "reward": 9.0},
        {"verdict": "dropped", "reward": null},
    ]);
    let found = call(&page, "group/decision.js", "statistics", &json!([siblings])).await;
    assert_eq!(found, json!({"count": 2, "mean": 0.5, "deviation": 0.5, "min": 0, "max": 1}));
    assert_eq!(call(&page, "group/decision.js", "statistics", &json!([[]])).await, Value::Null);

    // A filter that stands behind the one that matched was not asked, and one that failed did not answer.
    let rules = json!({"filter": [
        {"name": "failed", "scope": "group"}, {"name": "first", "scope": "group"}, {"name": "of-rollouts", "scope": "rollout"},
        {"name": "second", "scope": "group"}, {"name": "third", "scope": "group"},
    ]});
    let judged = async |state: &str, reason: Value| {
        let group = json!({"state": state, "reason": reason, "failed_filters": ["failed"]});
        let found = call(&page, "group/decision.js", "judged", &json!([group, rules])).await;
        let found = found.as_array().expect("a list").iter();
        Value::from(found.map(|entry| json!([entry[0]["name"], entry[1]])).collect::<Vec<_>>())
    };
    assert_eq!(judged("discarded", json!("second")).await, json!([["first", false], ["second", true]]));
    assert_eq!(judged("ready", Value::Null).await, json!([["first", false], ["second", false], ["third", false]]));
    assert_eq!(judged("discarded", json!("incomplete")).await, json!([]), "nobody asked the filters");
    assert_eq!(judged("open", Value::Null).await, json!([]));

    // Two trainers overlap; a moment is counted once, and a gap between steps is neither.
    let steps = json!([
        {"acked_at": "2026-01-01T00:01:40Z", "held_ms": 50_000, "waited_ms": 50_000},
        {"acked_at": "2026-01-01T00:01:45Z", "held_ms": 55_000, "waited_ms": 0},
        {"acked_at": "2026-01-01T00:03:20Z", "held_ms": 45_000, "waited_ms": 5_000},
        {"acked_at": "2026-01-01T00:04:00Z", "held_ms": null, "waited_ms": null},
    ]);
    let found = call(&page, "step/band.js", "stretches", &json!([steps])).await;
    let begin = 1_767_225_600_000_i64;
    let lengths: Vec<Value> = found
        .as_array()
        .expect("a list")
        .iter()
        .map(|part| {
            let at = |index: usize| (part[index].as_i64().expect("a moment") - begin) / 1000;
            json!([part[0], at(1), at(2)])
        })
        .collect();
    assert_eq!(
        json!(lengths),
        json!([
            ["waiting", 0, 50],
            ["training", 50, 100],
            ["training", 100, 105],
            ["neither", 105, 150],
            ["waiting", 150, 155],
            ["training", 155, 200],
        ])
    );
    let shares = call(&page, "step/band.js", "shares", &json!([found])).await;
    assert_eq!(shares, json!({"training": 0.5, "waiting": 0.275, "neither": 0.225}));
    assert_eq!(call(&page, "step/band.js", "shares", &json!([[]])).await["training"], Value::Null);

    let common = "import('/console/group/beside.js').then(({commonMessages}) => [[['a', 'b'], ['a', 'c']], [['a'], ['a']], [['a']], \
         [['a', null], ['a', null]], [['a'], ['a', 'b']]].map((lists) => commonMessages(lists.map((list) => list.map((message) => ({message}))))))";
    assert_eq!(page.eval(common).await, json!([1, 1, 0, 1, 1]), "what was left out is not known to be the same");
    app.finish().await;
}

/// Pairs of colour tokens that text is written in and on.
const PAIRS: [(&str, &str); 19] = [
    ("text", "ground"),
    ("text", "panel"),
    ("text", "quiet-ground"),
    ("text-quiet", "ground"),
    ("text-quiet", "panel"),
    ("text-quiet", "quiet-ground"),
    ("link", "ground"),
    ("link", "panel"),
    ("panel", "link"),
    ("good", "good-ground"),
    ("bad", "bad-ground"),
    ("warn", "warn-ground"),
    ("info", "info-ground"),
    ("good", "panel"),
    ("bad", "panel"),
    ("warn", "panel"),
    ("info", "panel"),
    ("text", "bad-ground"),
    ("text", "info-ground"),
];

/// The relative luminance of `#rrggbb`, as WCAG 2.2 defines it.
fn luminance(colour: &str) -> f64 {
    let channel = |at: usize| {
        let value = u8::from_str_radix(&colour[at..at + 2], 16).expect("two hexadecimal digits");
        let value = f64::from(value) / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
}

pub(super) fn contrast(first: &str, second: &str) -> f64 {
    let (first, second) = (luminance(first), luminance(second));
    (first.max(second) + 0.05) / (first.min(second) + 0.05)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_and_lines_have_enough_contrast_in_both_schemes() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    for scheme in ["light", "dark"] {
        page.prefers(scheme, false).await;
        let token = async |name: &str| {
            let value = format!("getComputedStyle(document.body).getPropertyValue('--{name}').trim()");
            page.eval(&value).await.as_str().expect("a token is text").to_owned()
        };
        for (text, ground) in PAIRS {
            let found = contrast(&token(text).await, &token(ground).await);
            assert!(found >= 4.5, "{scheme}: {text} on {ground}: {found:.2}");
        }
        // Lines of charts are no text: 3:1.
        for series in 1..=6 {
            let found = contrast(&token(&format!("series-{series}")).await, &token("panel").await);
            assert!(found >= 3.0, "{scheme}: series-{series}: {found:.2}");
        }
    }
    app.finish().await;
}
