//! The strongest check of a try: the filters that decided groups decide them again in the same way, and nothing in the
//! database changes.

use forebay_domain::rules::filter::names::names_on_wire;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use sqlx::{Connection as _, Row as _};

use super::{PATH, filter};
use crate::support::{TestApp, member, on_both_stores, text, with};

/// Filters that together name every variable.
fn pool() -> Vec<Value> {
    vec![
        filter("status", "rollout", "status == 'failed'", "drop"),
        filter("truncated", "rollout", "status == 'truncated' && response_tokens > 2", "mask"),
        filter("low", "rollout", "reward != null && reward < 0.2", "drop"),
        filter("web", "rollout", "environment == 'web' && tokens > 6", "mask"),
        filter("tests", "rollout", "'tests' in reward_components && reward_components['tests'] < 0.1", "drop"),
        filter("scored", "rollout", "'tests' in scores && scores.tests > 0.9 && scores.reward > 0.5", "mask"),
        filter("behind", "rollout", "staleness > 0 && version_current > 1", "mask"),
        filter("ahead", "rollout", "policy_version == 0 && version_current == 2", "drop"),
        filter("hot", "rollout", "temperature > 1.4", "mask"),
        filter("quality", "rollout", "metadata.quality < 0.3", "drop"),
        filter("trained", "rollout", "trained_tokens < 2 && segments == 1", "mask"),
        filter("longest", "rollout", "max_segment_tokens > 7", "drop"),
        filter("flat", "group", "reward_std < 1e-6", "drop"),
        filter("few", "group", "kept * 2 < size && masked > 0", "drop"),
        filter("old", "group", "age_s > 20.0", "drop"),
        filter("third", "group", "rewards[2] > 0.9", "drop"),
        filter("large", "group", "tokens > 30 && environment == 'web'", "drop"),
        filter("unsure", "group", "components.tests.std > 0.3 && components.tests.count > 2", "drop"),
        filter("range", "group", "reward_max > 0.99 && reward_min < 0.01 && reward_mean < 0.4", "drop"),
    ]
}

/// The test below compares only variables that a filter of the pool names. A try makes their values from rows and
/// payloads, while ingest makes them from what was posted.
#[test]
fn the_pool_names_every_variable() {
    for variable in names_on_wire().variables {
        let scope = serde_json::to_value(variable.scope).expect("a scope is a name");
        let names = |filter: &Value| {
            let mut words = text(&filter["when"]).split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            filter["scope"] == scope && words.any(|word| word == variable.name)
        };
        assert!(pool().iter().any(names), "no filter of scope {scope} names `{}`", variable.name);
    }
}

fn random_rules(random: &mut StdRng) -> Value {
    let filters: Vec<Value> = pool().into_iter().filter(|_| random.random_bool(0.4)).collect();
    let size = random.random_range(1..5);
    let on_drop = if random.random_bool(0.5) { "refill" } else { "shrink" };
    let action = if random.random_bool(0.5) { "mask" } else { "drop" };
    json!({
        "group": {"size": size, "min_size": random.random_range(1..=size), "on_drop": on_drop, "timeout_s": 40},
        "filter": filters, "staleness": {"max": 1, "action": action}, "batch": {"groups": 2},
        "retention": {"dropped_s": 100_000},
    })
}

fn random_rollout(random: &mut StdRng, group: usize, index: usize, version: i64) -> Value {
    let status = ["completed", "completed", "truncated", "failed"][random.random_range(0..4)];
    let segment = |random: &mut StdRng| {
        let response: usize = random.random_range(1..5);
        let mask: Vec<u8> = (0..response).map(|_| u8::from(random.random_bool(0.8))).collect();
        json!({"tokens": vec![7; response + random.random_range(1..4)], "loss_mask": mask, "logprobs": vec![-0.5; response]})
    };
    let segments: Vec<Value> = (0..random.random_range(1..3)).map(|_| segment(random)).collect();
    let mut body = with(
        member(&format!("g{group}"), index, f64::from(random.random_range(0..5)) / 4.0),
        json!({
            "status": status, "segments": segments, "sampling": {"temperature": random.random_range(0.5..1.6)},
            "reward_components": {"tests": random.random_range(0.0..1.0)},
        }),
    );
    let fields = body.as_object_mut().expect("a rollout is an object");
    if random.random_bool(0.1) {
        fields.remove("reward");
    }
    if random.random_bool(0.5) {
        fields.insert("environment".to_owned(), "web".into());
    }
    if random.random_bool(0.7) {
        fields.insert("metadata".to_owned(), json!({"quality": random.random_range(0.0..1.0)}));
    }
    if random.random_bool(0.6) {
        fields.insert("policy_version".to_owned(), random.random_range(0..=version).into());
    }
    body
}

/// Posts rollouts of several groups in random order while time passes and versions are published.
async fn play(app: &TestApp, random: &mut StdRng) {
    let mut version = 0;
    let mut next = [0_usize; 12];
    for _ in 0..90 {
        app.clock.advance_s(random.random_range(0.1..2.0));
        let group = random.random_range(0..next.len());
        let answer = app.post("/trajectories", random_rollout(random, group, next[group], version)).await;
        assert!(answer.status.is_success(), "{}", answer.json);
        next[group] += 1;
        match random.random_range(0..30) {
            0 if version < 3 => {
                version += 1;
                app.clock.advance_s(0.5);
                app.publish(version).await.expect(200);
                app.clock.advance_s(0.5);
            }
            1 => drop(app.post("/groups/close", json!({"group_id": format!("g{group}")})).await),
            2 => drop(app.post("/batches", json!({})).await),
            3 => app.pass_s(10.0).await,
            _ => {}
        }
    }
    app.pass_s(60.0).await;
}

/// Every row of every table, as text.
pub(super) async fn dump(app: &TestApp) -> Vec<String> {
    let mut found = Vec::new();
    if app.database.starts_with("sqlite") {
        let mut connection = sqlx::SqliteConnection::connect(&app.database).await.expect("the file opens");
        let tables = sqlx::query("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name");
        for table in tables.fetch_all(&mut connection).await.expect("there is a schema") {
            let table: String = table.get(0);
            let columns = format!(
                "SELECT group_concat('quote(\"' || name || '\")', ' || '','' || ') FROM pragma_table_info('{table}')"
            );
            let columns = sqlx::query(sqlx::AssertSqlSafe(columns)).fetch_one(&mut connection).await.expect("a table");
            let columns: String = columns.get(0);
            let rows = format!("SELECT {columns} FROM \"{table}\"");
            let rows = sqlx::query(sqlx::AssertSqlSafe(rows)).fetch_all(&mut connection).await.expect("rows");
            found.extend(rows.iter().map(|row| format!("{table}: {}", row.get::<String, _>(0))));
        }
    } else {
        let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
        let tables = sqlx::query("SELECT tablename::TEXT FROM pg_tables WHERE schemaname = 'public' ORDER BY 1");
        for table in tables.fetch_all(&mut connection).await.expect("there is a schema") {
            let table: String = table.get(0);
            // Changes of tallies are folded when no other test has an older transaction. Their sums stay the same.
            let rows = match table.as_str() {
                "tally" => "SELECT ROW(policy_pk, name, SUM(value), SUM(amount), MAX(latest_us))::TEXT FROM tally_now \
                    GROUP BY policy_pk, name"
                    .to_owned(),
                "tally_change" | "tally_folded" => continue,
                _ => format!("SELECT t::TEXT FROM \"{table}\" AS t"),
            };
            let rows = sqlx::query(sqlx::AssertSqlSafe(rows)).fetch_all(&mut connection).await.expect("rows");
            found.extend(rows.iter().map(|row| format!("{table}: {}", row.get::<String, _>(0))));
        }
    }
    found.sort();
    found
}

/// The database when the sweep has nothing to do any more. The clock stands still, so it stays like that.
async fn settled(app: &TestApp) -> Vec<String> {
    let mut before = dump(app).await;
    loop {
        app.pass_s(0.0).await;
        let after = dump(app).await;
        if after == before {
            return after;
        }
        before = after;
    }
}

on_both_stores! {
    async fn the_filters_that_decided_groups_decide_them_again_in_the_same_way(app: TestApp) {
        for seed in 0..6 {
            let mut random = StdRng::seed_from_u64(seed);
            let rules = random_rules(&mut random);
            app.rules("default", rules.clone()).await;
            play(app, &mut random).await;
            // With one filter more, the filters are not those of the groups, so each is evaluated again.
            let mut draft = rules["filter"].as_array().expect("a list").clone();
            draft.push(filter("never", "rollout", "reward == 1000.0", "drop"));
            app.rules("default", with(rules, json!({"filter": draft}))).await;
            let before = settled(app).await;
            let found = app.post(PATH, json!({"filter": draft, "groups": 2_000})).await.expect(200);
            let after = dump(app).await;
            let new: Vec<&String> = after.iter().filter(|row| !before.contains(row)).collect();
            assert!(new.is_empty() && after.len() == before.len(), "a try changes nothing: {new:?}");
            assert!(before.iter().any(|row| row.starts_with("rollout_group: ")), "the dump has the groups");
            assert!(found["looked_at"]["groups"].as_u64() >= Some(8), "seed {seed}: {found}");
            assert_eq!(found["looked_at"]["complete"], true);
            assert_eq!(found["unjudged"], json!([]), "seed {seed}");
            for column in ["rules_now", "draft"] {
                assert_eq!(found["groups"][column], found["groups"]["as_decided"], "seed {seed}, {column}");
                assert_eq!(found["rollouts"][column], found["rollouts"]["as_decided"], "seed {seed}, {column}");
            }
            assert_eq!(found["changes"], json!([]), "seed {seed}");
            app.post("/policies/default/reset", json!({})).await.expect(200);
        }
    }
}
