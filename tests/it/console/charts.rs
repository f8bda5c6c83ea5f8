//! Charts by themselves: one cursor for those that are shown together, ranges, sentences and tables.

use serde_json::{Value, json};

use super::{Page, open, origin};
use crate::support::{Backend, TestApp, endure};

/// A chart over time, one over the steps that were acked at these times, and one that belongs to no other.
const CHARTS: &str = "import('/console/charts.js').then(() => {
    const minutes = [...Array(30).keys()];
    const times = minutes.map((minute) => 1767225600 + 60 * minute);
    const add = (title, x, at, together) => {
        const chart = document.createElement('forebay-chart');
        const values = minutes.map((minute) => minute === 20 ? null : minute * minute);
        const series = [{ label: 'a', values, colour: '--series-1', fill: true },
            { label: 'bound', values: minutes.map(() => 500), colour: '--series-4', dash: true }];
        const marks = [{ at: times[10], text: 'here' }];
        Object.assign(chart, { numbers: false, range: null,
            spec: { title, sentence: 'a: last 841', x, at, times, series, show: String, note: 'last', marks, together } });
        document.querySelector('main').append(chart);
    };
    const heading = document.createElement('h2');
    heading.textContent = 'charts';
    document.querySelector('main').append(heading);
    add('one', 'time', times, 'test');
    add('two', 'step', minutes.map((minute) => minute + 100), 'test');
    add('three', 'time', times, 'alone');
    addEventListener('chart-range', ({ detail }) => { window.asked = detail; });
    return document.querySelectorAll('forebay-chart .u-over').length;
})";

async fn with_charts(app: &TestApp) -> Page {
    let page = open(app, "").await;
    page.wait_for("document.querySelector('h1') !== null").await;
    assert_eq!(page.eval(CHARTS).await, 3);
    page
}

/// The middle of a chart in the window.
async fn middle(page: &Page, chart: u32) -> (f64, f64) {
    let place = page.eval(&format!("forebayTest.place('forebay-chart:nth-of-type({chart}) .u-over')")).await;
    (place[0].as_f64().expect("a number"), place[1].as_f64().expect("a number"))
}

/// What each legend says: the values, and where they are.
async fn legends(page: &Page) -> Value {
    let entries = "[...document.querySelectorAll('.legend')].map((legend) => [...legend.querySelectorAll('li')]\
         .map((entry) => entry.innerText.replace(/\\s+/g, ' ').trim()))";
    page.eval(entries).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charts_that_are_shown_together_have_one_cursor() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let page = with_charts(&app).await;
    assert_eq!(legends(&page).await[0], json!(["a 841", "bound 500", "last"]));
    let (x, y) = middle(&page, 1).await;
    page.point_at(x, y).await;
    page.wait_for("document.querySelector('.legend li:last-child').innerText !== 'last'").await;
    let shown = legends(&page).await;
    let moment = shown[0][2].as_str().expect("text");
    let minute: i64 = moment.strip_prefix("1 Jan 00:").and_then(|minute| minute.parse().ok()).expect("a time");
    assert_eq!(shown[0][0], format!("a {}", minute * minute));
    assert_eq!(shown[1][2], format!("step {}", minute + 100), "the step that was acked at that moment");
    assert_eq!(shown[1][0], shown[0][0]);
    assert_eq!(shown[2][2], "last", "the third belongs to no other");
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drag_over_a_chart_asks_for_a_range_of_moments() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let page = with_charts(&app).await;
    let (x, y) = middle(&page, 2).await;
    page.drag((x - 80.0, y), (x + 80.0, y)).await;
    page.wait_for("window.asked !== undefined").await;
    let asked = page.eval("window.asked").await;
    let (from, to) = (asked[0].as_i64().expect("a moment"), asked[1].as_i64().expect("a moment"));
    assert!(from >= 1_767_225_600 && from < to && to <= 1_767_225_600 + 60 * 29, "moments of steps: {asked}");
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chart_has_a_sentence_and_a_table_for_those_who_do_not_see_it() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let page = with_charts(&app).await;
    let labels = "[...document.querySelectorAll('[role=img]')].map((plot) => plot.ariaLabel)";
    assert_eq!(page.eval(labels).await[0], "one. a: last 841");
    page.eval("document.querySelectorAll('forebay-chart').forEach((chart) => { chart.numbers = true; })").await;
    let rows = "[...document.querySelector('forebay-chart').querySelectorAll('tbody tr')]\
         .map((row) => [...row.cells].map((cell) => cell.innerText))";
    let rows = page.eval(rows).await;
    assert_eq!(rows.as_array().map(Vec::len), Some(30));
    assert_eq!(rows[0], json!(["1 Jan 00:29", "841", "500"]), "the newest first");
    assert_eq!(page.axe().await, Vec::<String>::new());
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chart_of_one_point_or_none_is_drawn() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let page = with_charts(&app).await;
    let change = |at: &str, values: &str| {
        format!(
            "document.querySelectorAll('forebay-chart').forEach((chart) => {{ chart.spec = {{ title: 'few', sentence: '', \
             x: 'time', at: {at}, times: {at}, series: [{{ label: 'a', values: {values}, colour: '--series-1' }}], \
             show: String, note: 'last' }}; }})"
        )
    };
    for (at, values) in [("[1767225600]", "[7]"), ("[]", "[]"), ("[1767225600]", "[null]")] {
        page.eval(&change(at, values)).await;
        assert_eq!(page.eval("document.querySelectorAll('forebay-chart .u-over').length").await, 3, "{at} {values}");
    }
    page.assert_clean(origin(&app));
    app.finish().await;
}
