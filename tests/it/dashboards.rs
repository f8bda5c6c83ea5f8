//! The sample files under `configs/`: the service accepts its own configuration, and every metric and label in a
//! dashboard or alert is exported by the service.
//!
//! The exported metrics are known only from a running service, so [`complaints`] compares with the text of its
//! `/metrics`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use forebay::config::Config;
use forebay_wire::PolicyRules;
use serde_json::Value;

/// Labels that Prometheus adds to every series of a target.
const TARGET_LABELS: [&str; 2] = ["instance", "job"];

/// Number of columns of a Grafana dashboard.
const GRID_COLUMNS: u64 = 24;

/// Lists everything that dashboards, variables and alerts use and that this text of `/metrics` lacks.
///
/// The service exports a labelled metric only after its first event, so it must have served traffic of every kind.
pub(crate) fn complaints(metrics_text: &str) -> Vec<String> {
    let mut expressions = dashboard_expressions(&dashboard());
    expressions.extend(alerts().iter().map(|alert| (format!("alert {}", text(alert, "alert")), text(alert, "expr"))));
    check_expressions(&expressions, metrics_text)
}

/// Compares expressions, each with its place in the files, with the exported metrics.
fn check_expressions(expressions: &[(String, String)], metrics_text: &str) -> Vec<String> {
    let exported = exported(metrics_text);
    let mut complaints = Vec::new();
    for (place, expression) in expressions {
        let found = match metrics_used(expression) {
            Ok(used) => used.iter().flat_map(|metric| compare(metric, &exported)).collect(),
            Err(complaint) => vec![complaint],
        };
        complaints.extend(found.into_iter().map(|complaint| format!("{place}: {complaint}")));
    }
    complaints
}

fn compare(metric: &MetricUse, exported: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let name = &metric.name;
    // Prometheus itself exports `up`.
    let of_target = BTreeSet::new();
    let labels = if name == "up" { Some(&of_target) } else { exported.get(name) };
    let Some(labels) = labels else { return vec![format!("`{name}` is not exported")] };
    let unknown = |label: &&String| !labels.contains(*label) && !TARGET_LABELS.contains(&label.as_str());
    metric.labels.iter().filter(unknown).map(|label| format!("`{name}` has no label `{label}`")).collect()
}

/// Names of exported series, those of histograms with their suffixes, and the labels that each has.
fn exported(metrics_text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut series: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in metrics_text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let tokens = tokens(line).expect("a line of /metrics is a selector and a number");
        let Some(Token::Word(name)) = tokens.first() else { panic!("`{line}` names no series") };
        let labels = series.entry(name.clone()).or_default();
        labels.extend(matchers(&tokens[1..]).into_iter().map(str::to_owned));
    }
    series
}

/// A metric in an expression, with all labels that the expression uses.
#[derive(Debug, PartialEq)]
struct MetricUse {
    name: String,
    labels: BTreeSet<String>,
    /// Index of its token.
    at: usize,
}

/// A token of `PromQL`. Only names matter here, so ranges in brackets are left out.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A metric, label, function or keyword.
    Word(String),
    /// A quoted text.
    Text,
    /// A number, a duration, or a dashboard's variable.
    Number,
    /// Anything else.
    Symbol(char),
}

fn tokens(expression: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = expression.trim_start();
    while let Some(first) = rest.chars().next() {
        let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
        let in_number = |c: char| in_word(c) || matches!(c, '.' | '$' | '{' | '}');
        let (token, length) = match first {
            '"' | '\'' | '`' => (Some(Token::Text), quoted(rest, first)?),
            '[' => (None, rest.find(']').ok_or_else(|| format!("`{rest}` does not close its bracket"))? + 1),
            '$' | '.' | '0'..='9' => (Some(Token::Number), span(rest, in_number)),
            _ if in_word(first) => {
                let length = span(rest, in_word);
                (Some(Token::Word(rest[..length].to_owned())), length)
            }
            _ => (Some(Token::Symbol(first)), first.len_utf8()),
        };
        tokens.extend(token);
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

fn span(text: &str, within: impl Fn(char) -> bool) -> usize {
    text.find(|c| !within(c)).unwrap_or(text.len())
}

/// Number of bytes of the quoted text at the start of `rest`, including the quotes. Backquoted text has no escapes.
fn quoted(rest: &str, quote: char) -> Result<usize, String> {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' if quote != '`' => escaped = true,
            _ if c == quote => return Ok(at + 1),
            _ => {}
        }
    }
    Err(format!("`{rest}` does not close its quote"))
}

/// Metrics of an expression, with the labels of their matchers and of the groupings that apply to them.
fn metrics_used(expression: &str) -> Result<Vec<MetricUse>, String> {
    let tokens = tokens(expression)?;
    let mut used = Vec::new();
    let mut groupings = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let next = tokens.get(at + 1);
        match &tokens[at] {
            Token::Word(word) if grouping(word) && next == Some(&Token::Symbol('(')) => {
                let end = closing(&tokens, at + 1)?;
                let listed = names(&tokens[at + 2..end]);
                groupings.push((scope(&tokens, at, end)?, listed));
                at = end;
            }
            Token::Word(word) if word == "label_values" => {
                let end = closing(&tokens, at + 1)?;
                groupings.push((at..end, names(&tokens[end - 1..end])));
                // The label at the end is not taken for a metric.
                used.extend(metrics_in(&tokens, at + 1..end - 1));
                at = end;
            }
            Token::Word(_) => {
                used.extend(metrics_in(&tokens, at..at + 1));
                at += matchers_length(&tokens[at + 1..]);
            }
            Token::Symbol('{') => return Err("a selector needs the name of a metric".to_owned()),
            _ => {}
        }
        at += 1;
    }
    for metric in &mut used {
        let around = groupings.iter().filter(|(scope, _)| scope.contains(&metric.at));
        metric.labels.extend(around.flat_map(|(_, listed)| listed.iter().cloned()));
    }
    Ok(used)
}

/// Keywords that are followed by a list of labels.
fn grouping(word: &str) -> bool {
    matches!(word, "by" | "without" | "on" | "ignoring" | "group_left" | "group_right")
}

/// Metrics that start within `range`: words that are neither functions, aggregations, keywords nor labels.
fn metrics_in(tokens: &[Token], range: std::ops::Range<usize>) -> Vec<MetricUse> {
    let mut metrics = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let next = tokens.get(at + 1);
        let called = next == Some(&Token::Symbol('(')) || matches!(next, Some(Token::Word(next)) if grouping(next));
        if let Token::Word(name) = &tokens[at]
            && !called
            && !matches!(name.as_str(), "and" | "or" | "unless" | "bool" | "offset" | "group_left" | "group_right")
        {
            let labels = matchers(&tokens[at + 1..]).into_iter().map(str::to_owned).collect();
            metrics.push(MetricUse { name: name.clone(), labels, at });
            at += matchers_length(&tokens[at + 1..]);
        }
        at += 1;
    }
    metrics
}

/// The range that a list of labels applies to: the parenthesis of its aggregation, or both sides of its operator.
fn scope(tokens: &[Token], at: usize, list_end: usize) -> Result<std::ops::Range<usize>, String> {
    if !matches!(&tokens[at], Token::Word(word) if word == "by" || word == "without") {
        return Ok(0..tokens.len());
    }
    if tokens.get(list_end + 1) == Some(&Token::Symbol('(')) {
        return Ok(list_end..closing(tokens, list_end + 1)?);
    }
    let opening = (0..at).rev().find(|&open| closing(tokens, open) == Ok(at.saturating_sub(1)));
    opening.map(|open| open..at).ok_or_else(|| "a grouping needs an aggregation".to_owned())
}

/// Index of the parenthesis that closes the one at `open`.
fn closing(tokens: &[Token], open: usize) -> Result<usize, String> {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Symbol('(') => depth += 1,
            Token::Symbol(')') if depth == 1 => return Ok(at),
            Token::Symbol(')') if depth > 1 => depth -= 1,
            _ if depth == 0 => break,
            _ => {}
        }
    }
    Err("a parenthesis is missing".to_owned())
}

/// Labels in the braces at the start of `tokens`.
fn matchers(tokens: &[Token]) -> Vec<&str> {
    let inside = &tokens[..matchers_length(tokens)];
    let words = inside.iter().filter_map(|token| match token {
        Token::Word(word) => Some(word.as_str()),
        _ => None,
    });
    words.collect()
}

/// Number of tokens of the braces at the start of `tokens`; 0 if there are none.
fn matchers_length(tokens: &[Token]) -> usize {
    if tokens.first() != Some(&Token::Symbol('{')) {
        return 0;
    }
    tokens.iter().position(|token| *token == Token::Symbol('}')).map_or(tokens.len(), |end| end + 1)
}

fn names(tokens: &[Token]) -> Vec<String> {
    let words = tokens.iter().filter_map(|token| match token {
        Token::Word(word) => Some(word.clone()),
        _ => None,
    });
    words.collect()
}

fn config_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("configs").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(config_path(name)).expect("the file is in the repository")
}

fn yaml(name: &str) -> Value {
    serde_norway::from_str(&read(name)).expect("the file is YAML whose keys are texts")
}

fn dashboard() -> Value {
    serde_json::from_str(&read("grafana-dashboard.json")).expect("the dashboard is JSON")
}

fn list<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

fn alerts() -> Vec<Value> {
    list(&yaml("alerts.yml"), "groups").iter().flat_map(|group| list(group, "rules").to_vec()).collect()
}

/// All panels, including those inside rows.
fn panels(dashboard: &Value) -> Vec<&Value> {
    let with_inner = |panel| std::iter::once(panel).chain(list(panel, "panels"));
    list(dashboard, "panels").iter().flat_map(with_inner).collect()
}

fn dashboard_expressions(dashboard: &Value) -> Vec<(String, String)> {
    let mut expressions = Vec::new();
    for panel in panels(dashboard) {
        for target in list(panel, "targets") {
            expressions.push((format!("panel {}", text(panel, "title")), text(target, "expr")));
        }
    }
    for variable in list(&dashboard["templating"], "list").iter().filter(|variable| variable["type"] == "query") {
        let place = format!("variable {}", text(variable, "name"));
        expressions.push((place.clone(), text(&variable["query"], "query")));
        expressions.push((place, text(variable, "definition")));
    }
    expressions
}

#[test]
fn the_sample_configurations_are_accepted() {
    for name in ["forebay.toml", "minimal.toml"] {
        let config = Config::load(Some(&config_path(name))).unwrap_or_else(|error| panic!("{name}: {error}"));
        let names: Vec<&str> = config.policies.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["math.solver"], "{name}");
    }
}

#[test]
fn the_sample_configuration_of_vllm_is_that_of_the_mode_exact() {
    let config = Config::load(Some(&config_path("vllm.toml"))).unwrap_or_else(|error| panic!("{error}"));
    let agents = config.agents.expect("it has a listener for agents");
    assert!(agents.upstreams[0].exact.is_some());
    assert_eq!(agents.upstreams[0].options.context_tokens, Some(32_768), "vLLM is started with this context");
}

#[test]
fn forebay_toml_shows_the_defaults() {
    let told = Config::load(Some(&config_path("forebay.toml"))).expect("the sample is valid");
    let silent = Config::parse("").expect("the defaults are valid");
    let shown = |config: Config| format!("{:#?}", Config { policies: Vec::new(), ..config });
    assert_eq!(shown(told), shown(silent));
}

#[test]
fn forebay_toml_shows_every_rule_that_has_a_default() {
    let file: toml::Table = toml::from_str(&read("forebay.toml")).expect("the sample is TOML");
    let rules = toml::Table::try_from(PolicyRules::default()).expect("rules are a table");
    assert_eq!(file["policy_defaults"], toml::Value::Table(rules));
}

#[test]
fn prometheus_scrapes_the_default_address_and_loads_the_alerts() {
    let prometheus = yaml("prometheus.yml");
    for file in list(&prometheus, "rule_files") {
        read(file.as_str().expect("a rule file is a path"));
    }
    let [scrape] = list(&prometheus, "scrape_configs") else { panic!("there is one job") };
    assert_eq!((text(scrape, "job_name"), text(scrape, "metrics_path")), ("forebay".into(), "/metrics".into()));
    let targets = &scrape["static_configs"][0]["targets"];
    assert_eq!(targets[0], Config::parse("").expect("the defaults are valid").listen);
}

#[test]
fn alerts_have_a_severity_and_instructions() {
    let mut names = BTreeSet::new();
    for alert in alerts() {
        let name = text(&alert, "alert");
        assert!(!name.is_empty() && names.insert(name.clone()), "`{name}` is not a name of its own");
        let severity = text(&alert["labels"], "severity");
        assert!(["info", "warning", "critical"].contains(&severity.as_str()), "{name}: severity `{severity}`");
        assert!(!text(&alert, "expr").is_empty() && text(&alert, "for").ends_with('m'), "{name}: expr or for");
        let annotations = &alert["annotations"];
        assert!(!text(annotations, "summary").is_empty() && !text(annotations, "description").is_empty(), "{name}");
    }
    assert!(names.contains("ForebayLedgerUnconserved"), "alerts: {names:?}");
}

#[test]
fn alerts_use_only_labels_that_their_expressions_keep() {
    for alert in alerts() {
        let used = metrics_used(&text(&alert, "expr")).expect("the expression has names");
        let kept: BTreeSet<&str> = used.iter().flat_map(|metric| &metric.labels).map(String::as_str).collect();
        for annotation in ["summary", "description"] {
            let annotation = text(&alert["annotations"], annotation);
            for rest in annotation.split("$labels.").skip(1) {
                let label = &rest[..span(rest, |c| c.is_ascii_alphanumeric() || c == '_')];
                let known = kept.contains(label) || TARGET_LABELS.contains(&label);
                assert!(known, "{}: `{label}` in `{annotation}`", alert["alert"]);
            }
        }
    }
}

#[test]
fn panels_are_labelled() {
    let dashboard = dashboard();
    let mut ids = BTreeSet::new();
    for panel in panels(&dashboard) {
        let title = text(panel, "title");
        assert!(ids.insert(panel["id"].as_u64()), "{title}: its id is there twice");
        assert!(!title.is_empty(), "panel {} has no title", panel["id"]);
        if panel["type"] == "row" {
            continue;
        }
        assert!(!text(panel, "description").is_empty(), "{title}: no description");
        assert!(!text(&panel["fieldConfig"]["defaults"], "unit").is_empty(), "{title}: no unit");
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        let references: BTreeSet<String> = list(panel, "targets").iter().map(|target| text(target, "refId")).collect();
        assert_eq!(references.len(), list(panel, "targets").len(), "{title}: a refId is there twice");
        assert!(!references.is_empty(), "{title}: no query");
    }
}

#[test]
fn panels_do_not_overlap() {
    let dashboard = dashboard();
    let mut taken = BTreeMap::new();
    for panel in panels(&dashboard) {
        let title = text(panel, "title");
        let side = |key: &str| panel["gridPos"][key].as_u64().expect("a position is whole numbers");
        let (x, y, width, height) = (side("x"), side("y"), side("w"), side("h"));
        assert!(width > 0 && height > 0 && x + width <= GRID_COLUMNS, "{title} is outside");
        for cell in (x..x + width).flat_map(|column| (y..y + height).map(move |line| (column, line))) {
            if let Some(other) = taken.insert(cell, title.clone()) {
                panic!("{title} covers {other}");
            }
        }
    }
}

mod expressions {
    use super::*;

    const METRICS: &str = "# HELP forebay_rollouts_total Rollouts, {by=\"verdict\"}.\n\
        # TYPE forebay_rollouts_total counter\n\
        forebay_rollouts_total{policy=\"a,b} \\\" x{y=\",verdict=\"kept\"} 3\n\
        # TYPE forebay_commit_seconds histogram\n\
        forebay_commit_seconds_bucket{le=\"+Inf\"} 1\n\
        forebay_commit_seconds_sum 0.5\n\
        forebay_commit_seconds_count 1\n";

    fn check(expression: &str) -> Vec<String> {
        check_expressions(&[("here".to_owned(), expression.to_owned())], METRICS)
    }

    #[test]
    fn exported_metrics_pass_the_check() {
        for expression in [
            r#"sum by (policy, verdict) (rate(forebay_rollouts_total{policy=~"$policy", job="x"}[$__rate_interval])) > 1e-6"#,
            "sum(rate(forebay_rollouts_total[5m])) by (verdict) / on (policy) group_left sum(forebay_rollouts_total)",
            "histogram_quantile(0.99, sum by (instance, le) (rate(forebay_commit_seconds_bucket[5m] offset 10m)))",
            "forebay_commit_seconds_sum unless up{job=\"forebay\"} == bool 0 or forebay_commit_seconds_count",
            "label_values(forebay_rollouts_total{verdict='kept'}, policy)",
        ] {
            assert_eq!(check(expression), Vec::<String>::new(), "{expression}");
        }
    }

    #[test]
    fn metrics_that_are_not_exported_are_reported() {
        for (expression, complaint) in [
            ("rate(forebay_rollout_total[5m])", "`forebay_rollout_total` is not exported"),
            ("forbay_rollouts_total", "`forbay_rollouts_total` is not exported"),
            ("forebay_commit_seconds", "`forebay_commit_seconds` is not exported"),
            ("process_open_fds", "`process_open_fds` is not exported"),
            ("forebay_rollouts_total{state!=\"x\"}", "`forebay_rollouts_total` has no label `state`"),
            ("sum by (reason) (forebay_rollouts_total)", "`forebay_rollouts_total` has no label `reason`"),
            ("sum(forebay_rollouts_total) without (reason)", "`forebay_rollouts_total` has no label `reason`"),
            ("sum by (le) (forebay_commit_seconds_sum)", "`forebay_commit_seconds_sum` has no label `le`"),
            ("up / on (type) forebay_commit_seconds_sum > 1", "`up` has no label `type`"),
            ("label_values(forebay_rollouts_total, route)", "`forebay_rollouts_total` has no label `route`"),
            ("{policy=\"a\"}", "a selector needs the name of a metric"),
            ("sum by (policy) (forebay_rollouts_total", "a parenthesis is missing"),
        ] {
            let complaints = check(expression);
            assert!(complaints.contains(&format!("here: {complaint}")), "{expression}: {complaints:?}");
        }
    }

    #[test]
    fn a_grouping_applies_only_to_its_own_aggregation() {
        let used = metrics_used("sum by (a) (x{b=\"1\"}) / sum(y) by (c)").expect("the expression is valid");
        let labels: Vec<(&str, Vec<&str>)> = used
            .iter()
            .map(|metric| (metric.name.as_str(), metric.labels.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(labels, [("x", vec!["a", "b"]), ("y", vec!["c"])]);
    }

    #[test]
    fn expressions_are_found_in_the_dashboard_and_the_alerts() {
        let all = complaints("");
        for place in ["panel Rollouts received by verdict", "variable policy", "alert ForebayLedgerUnconserved"] {
            assert!(all.iter().any(|complaint| complaint.starts_with(place)), "{place} is not in {all:?}");
        }
    }
}
