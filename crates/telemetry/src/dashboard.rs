//! The Grafana dashboard, `configs/grafana-dashboard.json`, which `make generate` writes.
//!
//! It is beside the metrics, because a test demands that each of them is on a panel or says why not. The table of the
//! panels has what differs between them; this file has how Grafana draws them. Grafana's own SDK has no Rust edition, and
//! five kinds of panels need no more than this.

mod panels;

use serde_json::{Map, Value, json};

use self::panels::ROWS;

/// Metrics that are on no panel, with the reason. `docs/operations.md` says for which question one looks at them.
#[cfg(test)]
const NOT_SHOWN: &[(&str, &[&str])] = &[
    (
        "the backlog is shown, which is why room is refused; `waiting` of a policy has the reserved room of the moment",
        &["forebay_admissions_total", "forebay_ledger_reserved_rollouts"],
    ),
    (
        "looked up when a disk is full or samples are slow",
        &[
            "forebay_segment_files",
            "forebay_segment_bytes",
            "forebay_segment_live_bytes",
            "forebay_payloads_moved_total",
            "forebay_object_payloads_read_total",
        ],
    ),
    (
        "a habit of an agent, which its sessions show as warnings",
        &[
            "forebay_agent_calls_constrained_total",
            "forebay_agent_parts_left_out_total",
            "forebay_agent_special_tokens_total",
        ],
    ),
    (
        "alerts say when none come or attempts are used up, and `forebay why` which are missing and who works on them",
        &["forebay_scores_total", "forebay_score_work_total"],
    ),
    ("engines have dashboards of their own", &["forebay_upstream_seconds"]),
    ("the log has the error of each such scrape", &["forebay_gauge_failures_total"]),
];

/// Number of columns of a dashboard.
const COLUMNS: usize = 24;

/// A row of the dashboard: a title, and lines of panels of the same width below it.
struct Row {
    title: &'static str,
    lines: &'static [&'static [Panel]],
}

struct Panel {
    look: Look,
    title: &'static str,
    /// As Grafana names units. Names that it does not know, such as `si:groups`, are shown behind the number.
    unit: &'static str,
    /// What the panel shows and what a value means.
    about: &'static str,
    /// Expressions of Prometheus, with their names in the legend.
    queries: &'static [(&'static str, &'static str)],
}

/// How a panel is drawn.
enum Look {
    /// The newest value, in a colour.
    Number(&'static str),
    /// The newest value, in one colour below 1 and in another one from 1 on.
    Alarm(&'static str, &'static str),
    /// A bar for the newest value of each query.
    Bars,
    /// Lines over time, from 0.
    Lines,
    /// Lines over time of values that may be negative.
    SignedLines,
    /// Areas over time that add up.
    Stack,
    /// Buckets of a histogram over time.
    Heatmap,
}

/// The dashboard as Grafana imports it.
pub fn json() -> String {
    let mut panels = Vec::new();
    let mut y = 0;
    for row in ROWS {
        panels.push(json!({ "type": "row", "title": row.title, "collapsed": false, "panels": [],
            "gridPos": position(0, y, COLUMNS, 1) }));
        y += 1;
        for line in row.lines {
            let width = COLUMNS / line.len();
            let height = line.iter().map(|panel| panel.look.height()).max().unwrap_or_default();
            for (place, panel) in line.iter().enumerate() {
                panels.push(panel.drawn(&position(place * width, y, width, height)));
            }
            y += height;
        }
    }
    for (panel, id) in panels.iter_mut().zip(1..) {
        panel["id"] = Value::from(id);
    }
    let dashboard = json!({
        "title": "Forebay",
        "uid": "forebay",
        "description": "The durable rollout buffer between LLM agents and the trainers that learn from them.",
        "tags": ["forebay"],
        "schemaVersion": 39,
        "version": 1,
        "editable": true,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "",
        "time": { "from": "now-6h", "to": "now" },
        "timepicker": {},
        "links": [],
        "annotations": { "list": [] },
        "templating": { "list": [source_variable(), policy_variable()] },
        "panels": panels,
    });
    format!("{dashboard:#}\n")
}

fn source_variable() -> Value {
    json!({ "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {},
        "hide": 0, "refresh": 1, "regex": "", "includeAll": false, "multi": false, "options": [] })
}

fn policy_variable() -> Value {
    let policies = "label_values(forebay_ledger_received, policy)";
    json!({ "name": "policy", "label": "Policy", "type": "query", "datasource": source(), "definition": policies,
        "query": { "query": policies, "refId": "policy" },
        "current": { "selected": true, "text": ["All"], "value": ["$__all"] },
        "hide": 0, "refresh": 2, "regex": "", "sort": 1, "includeAll": true, "allValue": ".*", "multi": true,
        "options": [] })
}

fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

fn position(x: usize, y: usize, width: usize, height: usize) -> Value {
    json!({ "x": x, "y": y, "w": width, "h": height })
}

/// Colours of values: the first one below 1, and the second one from 1 on.
fn thresholds(below: &str, from_one: Option<&str>) -> Value {
    let mut steps = vec![json!({ "color": below, "value": null })];
    steps.extend(from_one.map(|colour| json!({ "color": colour, "value": 1 })));
    json!({ "mode": "absolute", "steps": steps })
}

impl Panel {
    fn drawn(&self, position: &Value) -> Value {
        let mut defaults = self.look.defaults();
        defaults.insert("unit".to_owned(), self.unit.into());
        json!({
            "type": self.look.kind(),
            "title": self.title,
            "description": self.about,
            "datasource": source(),
            "fieldConfig": { "defaults": defaults, "overrides": [] },
            "options": self.look.options(self.unit),
            "targets": self.queries.iter().zip('A'..).map(|(query, letter)| self.target(query, letter)).collect::<Vec<_>>(),
            "gridPos": position,
        })
    }

    fn target(&self, (expression, legend): &(&str, &str), letter: char) -> Value {
        let instant = matches!(self.look, Look::Number(_) | Look::Alarm(..) | Look::Bars);
        let mut target = json!({ "datasource": source(), "editorMode": "code", "expr": expression,
            "legendFormat": legend, "refId": letter, "instant": instant, "range": !instant });
        if matches!(self.look, Look::Heatmap) {
            target["format"] = "heatmap".into();
        }
        target
    }
}

impl Look {
    fn kind(&self) -> &'static str {
        match self {
            Self::Number(_) | Self::Alarm(..) => "stat",
            Self::Bars => "bargauge",
            Self::Lines | Self::SignedLines | Self::Stack => "timeseries",
            Self::Heatmap => "heatmap",
        }
    }

    fn height(&self) -> usize {
        match self {
            Self::Number(_) | Self::Alarm(..) => 4,
            Self::Bars => 9,
            Self::Lines | Self::SignedLines | Self::Stack | Self::Heatmap => 8,
        }
    }

    fn defaults(&self) -> Map<String, Value> {
        let lines = |fill: u8, stacking: &str| {
            json!({ "drawStyle": "line", "fillOpacity": fill, "lineWidth": 1, "showPoints": "auto", "spanNulls": false,
                "stacking": { "group": "A", "mode": stacking } })
        };
        let by_name = json!({ "mode": "palette-classic" });
        let by_value = json!({ "mode": "thresholds" });
        let defaults = match self {
            Self::Number(colour) => {
                json!({ "color": by_value, "thresholds": thresholds(colour, None), "noValue": "-" })
            }
            Self::Alarm(below, from_one) => {
                json!({ "color": by_value, "thresholds": thresholds(below, Some(from_one)), "noValue": "-" })
            }
            Self::Bars => json!({ "color": by_value, "thresholds": thresholds("blue", None), "min": 0 }),
            Self::Lines => json!({ "color": by_name, "custom": lines(8, "none"), "min": 0 }),
            Self::SignedLines => json!({ "color": by_name, "custom": lines(8, "none") }),
            Self::Stack => json!({ "color": by_name, "custom": lines(25, "normal"), "min": 0 }),
            Self::Heatmap => json!({}),
        };
        match defaults {
            Value::Object(defaults) => defaults,
            _ => unreachable!("each of them is an object"),
        }
    }

    fn options(&self, unit: &str) -> Value {
        let newest = json!({ "calcs": ["lastNotNull"], "fields": "", "values": false });
        match self {
            Self::Number(_) | Self::Alarm(..) => json!({ "colorMode": "value", "graphMode": "none",
                "justifyMode": "auto", "orientation": "auto", "reduceOptions": newest, "textMode": "auto" }),
            Self::Bars => json!({ "displayMode": "basic", "minVizHeight": 12, "minVizWidth": 8,
                "namePlacement": "left", "orientation": "horizontal", "reduceOptions": newest, "showUnfilled": true,
                "sizing": "auto", "valueMode": "color" }),
            Self::Lines | Self::SignedLines | Self::Stack => json!({
                "legend": { "calcs": ["lastNotNull"], "displayMode": "list", "placement": "bottom", "showLegend": true },
                "tooltip": { "mode": "multi", "sort": "desc" } }),
            Self::Heatmap => json!({ "calculate": false, "cellGap": 1,
                "color": { "exponent": 0.5, "mode": "scheme", "scheme": "Blues", "steps": 32 },
                "legend": { "show": true }, "rowsFrame": { "layout": "auto" },
                "tooltip": { "mode": "single", "yHistogram": false },
                "yAxis": { "axisPlacement": "left", "unit": unit } }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::metrics::NAMES;

    /// The metrics in the queries of all panels. Series of histograms have a suffix.
    fn shown() -> BTreeSet<&'static str> {
        let panels = ROWS.iter().flat_map(|row| row.lines).copied().flatten();
        let queries = panels.flat_map(|panel| panel.queries).map(|(expression, _)| *expression);
        let words = queries.flat_map(|query| query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
        let of_metric = |word: &'static str| {
            ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word)
        };
        words.map(of_metric).collect()
    }

    #[test]
    fn each_metric_is_on_a_panel_or_says_why_not() {
        let shown = shown();
        let declared: BTreeSet<&str> = NAMES.iter().copied().flatten().copied().collect();
        let excused: BTreeSet<&str> = NOT_SHOWN.iter().flat_map(|(_, metrics)| *metrics).copied().collect();
        for name in &declared {
            let places = u8::from(shown.contains(name)) + u8::from(excused.contains(name));
            assert_eq!(places, 1, "`{name}` belongs on a panel, or else in NOT_SHOWN");
        }
        assert_eq!(excused.difference(&declared).collect::<Vec<_>>(), Vec::<&&str>::new(), "these metrics are gone");
    }

    #[test]
    fn the_checked_in_dashboard_is_that_of_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/grafana-dashboard.json");
        let checked_in = std::fs::read_to_string(path).unwrap_or_default();
        assert!(checked_in == json(), "configs/grafana-dashboard.json has drifted: `make generate` writes it");
    }
}
