//! How the databases would run a statement, and which parts of a plan grow with the ledger.
//!
//! SQLite plans by the schema alone, because the service never lets it gather statistics. Postgres plans by the size of
//! the tables and by statistics of their contents, which a new database does not have. So the ledger is filled in
//! steps, and the statements are planned at each step without statistics, and after the last step with statistics.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _, SqliteConnection};

use super::Walked;

/// Tables with one row for every rollout, group, batch, session, call or upload that ever arrived, or for every minute or step.
const GROWING: [&str; 23] = [
    "rollout",
    "rollout_group",
    "payload",
    "scoring",
    "score",
    "turn_score",
    "eval_rollout",
    "eval_task",
    "score_work",
    "batch",
    "batch_group",
    "admission",
    "session",
    "session_policy",
    "session_key",
    "session_call",
    "session_saved",
    "history",
    "step_log",
    "journal",
    "waiting_consumer",
    "blob",
    "blob_use",
];

/// Columns that only identify the policy: a search by them alone reads everything that the policy ever had.
const OWNER: [&str; 2] = ["policy_pk", "run"];

/// Indexes with their tables, and whether they contain only rows in certain states: live or due.
type Indexes = BTreeMap<String, (String, bool)>;

/// The findings in SQLite's plans, by statement.
pub(super) async fn sqlite(database: &str, walked: &[Walked]) -> Vec<(String, String)> {
    let mut connection = SqliteConnection::connect(database).await.expect("the file can be opened");
    let rows = sqlx::query("SELECT name, tbl_name, COALESCE(sql, '') AS sql FROM sqlite_master WHERE type = 'index'");
    let rows = rows.fetch_all(&mut connection).await.expect("the schema can be read");
    let indexes = rows.iter().map(|row| (row.get("name"), (row.get("tbl_name"), is_partial(row.get("sql"))))).collect();
    let mut found = Vec::new();
    for Walked { name, text } in walked {
        let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"));
        let plan = sqlx::raw_sql(explain).fetch_all(&mut connection).await.expect("SQLite can plan it");
        for step in &plan {
            let step: String = step.get("detail");
            if sqlite_step_grows(&step, text, &indexes) {
                found.push((name.clone(), step));
            }
        }
    }
    found
}

fn is_partial(definition: &str) -> bool {
    definition.contains("WHERE")
}

/// Whether a step such as `SEARCH g USING INDEX rollout_group_open (policy_pk=?)` reads more rows as the ledger grows.
fn sqlite_step_grows(step: &str, statement: &str, indexes: &Indexes) -> bool {
    let words: Vec<&str> = step.split(' ').collect();
    match words[0] {
        "USE" => statement.lines().last().is_some_and(|line| line.trim().starts_with("LIMIT")),
        "SCAN" => GROWING.contains(&table_of(words[1], statement)),
        "SEARCH" if GROWING.contains(&table_of(words[1], statement)) => {
            let index = words.iter().skip_while(|word| **word != "INDEX").nth(1).copied();
            let is_partial = index.and_then(|index| indexes.get(index)).is_some_and(|(_, partial)| *partial);
            match step.split_once('(') {
                Some((_, condition)) => !narrows(condition) && !is_partial,
                // The smallest entry of an index, or of a table without an index.
                None => index.is_none(),
            }
        }
        _ => false,
    }
}

/// The table that an alias stands for.
fn table_of<'t>(alias: &'t str, statement: &'t str) -> &'t str {
    let words: Vec<&str> =
        statement.split_whitespace().map(|word| word.trim_matches(|c| c == ')' || c == ',')).collect();
    let named = words.windows(3).find(|three| three[1] == "AS" && three[2] == alias);
    named.map_or(alias, |three| three[0])
}

/// Whether a condition on an index is more selective than the policy alone.
fn narrows(condition: &str) -> bool {
    compares(condition, "(?:=|<|>|IS NOT NULL)")
}

/// Whether a condition compares, with one of these operators, a column that does more than identify the policy.
fn compares(condition: &str, operators: &str) -> bool {
    let column = format!(r"(?:^|[( .])([a-z_]+|<expr>|COALESCE\([^)]*\)+) ?{operators}");
    let column = Regex::new(&column).expect("the pattern is valid");
    column.captures_iter(condition).any(|found| !OWNER.contains(&&found[1]))
}

/// Estimated number of rows that may be sorted in order to take the first of them.
const FEW_ROWS: f64 = 1_000.0;

/// Batches in the ledger when Postgres is asked for its plans. At the first value, reading a whole table is cheap.
const SIZES: [i64; 2] = [4_000, 20_000];

/// The findings in Postgres' plans, by statement.
pub(super) async fn postgres(database: &str, walked: &[Walked]) -> Vec<(String, String)> {
    let mut connection = PgConnection::connect(database).await.expect("the server accepts");
    let rows = sqlx::raw_sql("SELECT indexname, tablename, indexdef FROM pg_indexes WHERE schemaname = 'public'");
    let rows = rows.fetch_all(&mut connection).await.expect("the schema can be read");
    let text = |row: &sqlx::postgres::PgRow, column| row.get_unchecked::<String, _>(column);
    let index = |row| (text(row, "indexname"), (text(row, "tablename"), is_partial(&text(row, "indexdef"))));
    let indexes = rows.iter().map(index).collect();
    let mut found = Vec::new();
    let mut filled = 0;
    for size in SIZES {
        let fill = FILL.replace("$FIRST", &(filled + 1).to_string()).replace("$LAST", &size.to_string());
        sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut connection).await.expect("the ledger can be filled");
        filled = size;
        let statistics = sqlx::raw_sql("SELECT 1 FROM pg_stats WHERE schemaname = 'public' AND tablename <> 'policy'");
        let statistics = statistics.fetch_all(&mut connection).await.expect("statistics can be read");
        assert!(statistics.is_empty(), "somebody has analyzed the database");
        found.extend(postgres_plans(&mut connection, walked, &indexes, &format!("{size} batches")).await);
    }
    sqlx::raw_sql("ANALYZE").execute(&mut connection).await.expect("the database can be analyzed");
    found.extend(postgres_plans(&mut connection, walked, &indexes, "analyzed").await);
    found
}

async fn postgres_plans(
    connection: &mut PgConnection,
    walked: &[Walked],
    indexes: &Indexes,
    when: &str,
) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for Walked { name, text: statement } in walked {
        let plan = postgres_plan(connection, statement).await;
        let mut steps = Vec::new();
        growing_steps(&plan[0]["Plan"], false, indexes, &mut steps);
        found.extend(steps.into_iter().map(|step| (name.clone(), format!("{step} ({when})"))));
    }
    found
}

/// The plan for given values. The service uses unnamed statements, so the server caches none of its plans.
async fn postgres_plan(connection: &mut PgConnection, statement: &str) -> Value {
    let prepare = AssertSqlSafe(format!("DEALLOCATE ALL; PREPARE walked AS {statement}"));
    sqlx::raw_sql(prepare).execute(&mut *connection).await.expect("Postgres can prepare it");
    let types = sqlx::raw_sql("SELECT unnest(parameter_types)::TEXT FROM pg_prepared_statements");
    let types = types.fetch_all(&mut *connection).await.expect("what is prepared can be read");
    let values: Vec<&str> = types.iter().map(|row| value_of(&row.get_unchecked::<String, _>(0))).collect();
    let values = if values.is_empty() { String::new() } else { format!("({})", values.join(", ")) };
    let explain =
        AssertSqlSafe(format!("SET plan_cache_mode = force_custom_plan; EXPLAIN (FORMAT JSON) EXECUTE walked{values}"));
    let rows = sqlx::raw_sql(explain).fetch_all(&mut *connection).await.expect("Postgres can plan it");
    let row = rows.last().expect("a plan is a row");
    serde_json::from_str(&row.get_unchecked::<String, _>(0)).expect("the plan is JSON")
}

/// A value of a parameter, as the service could bind it.
fn value_of(kind: &str) -> &'static str {
    match kind {
        "bigint" | "integer" | "double precision" => "1",
        "bigint[]" => "'{1,2,3,4,5,6,7,8}'",
        "bytea" => "'\\x00'",
        "bytea[]" => r#"'{"\\x01","\\x02","\\x03","\\x04","\\x05","\\x06","\\x07","\\x08"}'"#,
        "double precision[]" | "text[]" => "'{}'",
        "json" => "'[]'",
        "text" => "'x'",
        other => panic!("a parameter of type {other}"),
    }
}

/// Collects the findings in a plan. Below a limit, a sort reads all rows of which the limit takes some.
fn growing_steps(node: &Value, limited: bool, indexes: &Indexes, found: &mut Vec<String>) {
    let text = |field: &str| node[field].as_str().unwrap_or_default();
    let kind = text("Node Type");
    let grows = match kind {
        "Seq Scan" => GROWING.contains(&text("Relation Name")),
        "Sort" => limited && reads_a_range(node, indexes) && node["Plan Rows"].as_f64() > Some(FEW_ROWS),
        "Index Scan" | "Index Only Scan" | "Bitmap Index Scan" => {
            let (table, partial) = indexes.get(text("Index Name")).expect("the index is in the schema");
            GROWING.contains(&table.as_str()) && !partial && !narrows(text("Index Cond"))
        }
        _ => false,
    };
    if grows {
        let of = [text("Relation Name"), text("Index Name"), text("Index Cond")].join(" ");
        found.push(format!("{kind} {of}"));
    }
    let limited = limited || kind == "Limit";
    for child in node["Plans"].as_array().into_iter().flatten() {
        growing_steps(child, limited, indexes, found);
    }
}

/// Whether a part of a plan reads an unbounded number of rows of a growing table.
fn reads_a_range(node: &Value, indexes: &Indexes) -> bool {
    let text = |field: &str| node[field].as_str().unwrap_or_default();
    let table = indexes.get(text("Index Name")).map_or(text("Relation Name"), |(table, _)| table);
    let condition = text("Index Cond");
    let is_range = text("Node Type") == "Seq Scan" || (condition.contains(['<', '>']) && !compares(condition, "="));
    let children = node["Plans"].as_array().into_iter().flatten();
    GROWING.contains(&table) && is_range || children.into_iter().any(|child| reads_a_range(child, indexes))
}

/// Batches of one group with two rollouts, all settled, in the policy's current run: almost no row is live.
const FILL: &str = "
    INSERT INTO batch (
        batch_id, policy_pk, run, state, consumer, epoch, ttl_s, attempt, failed_deliveries, step, group_count,
        rollout_count, sample_count, token_count, loss_weighting, loss_constant, weight_samples, weight_tokens,
        version_current, metrics, live_bytes, created_us, granted_us, waited_us, resumes
    )
    SELECT decode(md5('batch' || n), 'hex'), p.policy_pk, p.run, 'checkpointed', '', 1, 600, 1, 0, n, 1, 2, 2, 6,
        'rollout_mean', 1, 2, 4, 0, '{}', 0, n, n, 0, 0
    FROM policy AS p, generate_series($FIRST, $LAST) AS n
    WHERE p.name = 'default';
    INSERT INTO rollout_group (
        policy_pk, run, group_key, group_id, rules_pk, state, size, min_size, kept, masked, dropped, late,
        payload_bytes, opened_us, ready_seq, samples, trained_samples, tokens, trained_tokens, reward_sum, reward_count,
        version_min, version_max, failed_deliveries, delivered, batch_pk
    )
    SELECT b.policy_pk, b.run, decode(md5('group' || b.step), 'hex'), 'group' || b.step, 1, 'batched', 2, 2, 2, 0, 0, 0,
        16, b.created_us, b.step, 2, 2, 6, 4, 1, 2, b.step, b.step, 0, 1, b.batch_pk
    FROM batch AS b
    WHERE b.token_count = 6 AND b.metrics = '{}' AND b.step >= $FIRST;
    INSERT INTO batch_group (batch_pk, place, group_pk)
    SELECT batch_pk, 0, group_pk FROM rollout_group WHERE batch_pk IS NOT NULL AND payload_bytes = 16 AND ready_seq >= $FIRST;
    INSERT INTO rollout (
        policy_pk, run, rollout_key, rollout_id, group_pk, verdict, reward, advantage, content_digest, policy_version,
        version_assumed, version_min, version_max, segments, trained_segments, tokens, trained_tokens, unpacked_bytes,
        received_us, execution, status, response_tokens, max_segment_tokens, seal
    )
    SELECT g.policy_pk, g.run, decode(md5(g.group_id || n), 'hex'), g.group_id || '-' || n, g.group_pk, 'kept', 1, 0,
        decode(md5(g.group_id), 'hex'), 0, 0, 0, 0, 1, 1, 3, 2, 8, g.opened_us,
        decode(md5('execution' || g.group_id), 'hex'), 0, 2, 3, decode(md5(g.group_id), 'hex')
    FROM rollout_group AS g, generate_series(0, 1) AS n
    WHERE g.payload_bytes = 16 AND g.ready_seq >= $FIRST;
    INSERT INTO payload (rollout_pk, codec, digest, body)
    SELECT rollout_pk, 1, content_digest, decode('0011223344556677', 'hex') FROM rollout WHERE unpacked_bytes = 8 AND received_us >= $FIRST;
    INSERT INTO score (rollout_pk, name, scorer, applied, value, given_us)
    SELECT rollout_pk, 'judge', 'a', 1, 0.5, received_us FROM rollout WHERE unpacked_bytes = 8 AND received_us >= $FIRST;
    INSERT INTO turn_score (rollout_pk, turn, scorer, applied, value, given_us)
    SELECT rollout_pk, 0, 'a', 1, 0.5, received_us FROM rollout WHERE unpacked_bytes = 8 AND received_us >= $FIRST;
    INSERT INTO eval_rollout (rollout_pk, suite_pk, run, version, task, mixed)
    SELECT rollout_pk, 1000 + rollout_pk % 100, 1, rollout_pk % 1000, 't' || rollout_pk, 0
    FROM rollout
    WHERE unpacked_bytes = 8 AND received_us >= $FIRST;
    INSERT INTO eval_task (suite_pk, run, version, task, rollouts, passed, reward_sum)
    SELECT suite_pk, run, version, task, 1, 1, 1 FROM eval_rollout WHERE version > 2
    ON CONFLICT DO NOTHING;
    INSERT INTO scoring (rollout_pk, group_pk, policy_pk, missing, since_us, due_us)
    SELECT rollout_pk, group_pk, policy_pk, '[]', received_us, 4000000000000000 + received_us
    FROM rollout
    WHERE unpacked_bytes = 8 AND received_us >= $FIRST;
    INSERT INTO score_work (
        policy_pk, group_pk, rollout_pk, name, state, since_us, attempts, attempts_max, lease, scorer, request_id,
        expires_us
    )
    SELECT r.policy_pk, r.group_pk, r.rollout_pk, 'judge', CASE WHEN h.held THEN 'leased' ELSE 'open' END, r.received_us,
        0, 5, CASE WHEN h.held THEN md5('lease' || r.rollout_pk) END, CASE WHEN h.held THEN 'a' END,
        CASE WHEN h.held THEN md5('request' || r.rollout_pk) END,
        CASE WHEN h.held THEN 4000000000000000 + r.received_us END
    FROM rollout AS r, LATERAL (SELECT r.rollout_pk % 2 = 0 AS held) AS h
    WHERE r.unpacked_bytes = 8 AND r.received_us >= $FIRST;
    INSERT INTO admission (admission_id, policy_pk, granted, used, version, expires_us, group_key, group_size)
    SELECT decode(md5('admission' || n), 'hex'), p.policy_pk, 1, 0, 0, 4000000000000000 + n,
        decode(md5('group' || n), 'hex'), 1
    FROM policy AS p, generate_series($FIRST, $LAST) AS n
    WHERE p.name = 'default';
    INSERT INTO session (
        session_id, state, spec, content_digest, max_calls, idle_s, calls, bytes, segments, tokens, is_full, opened_us,
        expires_us, ended_us, end_digest, outcome, purge_us, forget_us
    )
    SELECT decode(md5('session' || n), 'hex'), 'finished', '{}', decode('00', 'hex'), 8, 60, 1, 3, 1, n, 0, n, n, n,
        decode('00', 'hex'), '{}', 4000000000000000 + n, 4000000000000000 + n
    FROM generate_series($FIRST, $LAST) AS n;
    INSERT INTO session_policy (
        session_pk, policy_pk, run, rollout_key, group_key, group_size, admission_id, version, calls, sampled, is_live
    )
    SELECT s.session_pk, p.policy_pk, p.run, decode(md5('recorded' || s.tokens), 'hex'),
        decode(md5('group' || s.tokens), 'hex'), 1, s.session_id, 0, 1, 1, 0
    FROM session AS s, policy AS p
    WHERE p.name = 'default' AND s.spec = '{}' AND s.tokens >= $FIRST;
    INSERT INTO session_key (hash, session_pk)
    SELECT decode(md5('key' || tokens), 'hex'), session_pk FROM session WHERE spec = '{}' AND tokens >= $FIRST;
    INSERT INTO session_call (
        session_pk, seq, policy_pk, shared, prompt, sampled, dialect, model, finish_reason, stopped_on_token, delivered,
        retry_count, started_us, ended_us, body_digest, digest, body, request, response
    )
    SELECT s.session_pk, 1, 1, 0, 1, 1, 'chat', 'any', 'stop', 1, 1, 0, s.tokens, s.tokens,
        decode(md5('body' || s.tokens), 'hex'), decode('00', 'hex'), decode('00', 'hex'), decode('00', 'hex'),
        decode('00', 'hex')
    FROM session AS s
    WHERE s.spec = '{}' AND s.tokens >= $FIRST;
    INSERT INTO session_saved (session_pk, seq, attempt, content, stored_us)
    SELECT session_pk, 1, 1, decode('00', 'hex'), tokens FROM session WHERE spec = '{}' AND tokens >= $FIRST;
    INSERT INTO history (policy_pk, minute, since, at_us, keep_until, body)
    SELECT -1 - n % 100, n, n - 1, n, 4000000000000000 + n, '{}'
    FROM generate_series($FIRST, $LAST) AS n;
    INSERT INTO step_log (
        policy_pk, run, step, epoch, acked_us, batches, groups, flat_groups, rollouts, tokens, trained_tokens, reward_sum,
        reward_count, all_mean, stale_sum, stale_max, waited_us, held_us, attempts, version, undone
    )
    SELECT -1 - n % 100, 1, n, 0, n, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0
    FROM generate_series($FIRST, $LAST) AS n;
    INSERT INTO journal (policy_pk, at_us, kind, key_id, body)
    SELECT -1 - n % 100, n, 'reset', NULL, '{}'
    FROM generate_series($FIRST, $LAST) AS n;
    INSERT INTO waiting_consumer (policy_pk, consumer, since_us, asked_us, until_us)
    SELECT -1 - n % 100, 'consumer' || n, n, n, n
    FROM generate_series($FIRST, $LAST) AS n;
    INSERT INTO blob (digest, bytes, stored, kept_until_us, expires_us)
    SELECT decode(md5('blob' || n), 'hex'), 8, 8, 4000000000000000 + n, CASE WHEN n % 100 = 0 THEN 4000000000000000 + n END
    FROM generate_series($FIRST, $LAST) AS n;
    INSERT INTO blob_use (rollout_pk, blob_pk)
    SELECT r.rollout_pk, (SELECT MAX(blob_pk) FROM blob) - r.rollout_pk % 1000
    FROM rollout AS r
    WHERE r.unpacked_bytes = 8 AND r.received_us >= $FIRST;
";
