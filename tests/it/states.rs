//! The states in the code are the states that the databases allow.

use std::collections::BTreeSet;

use forebay_domain::states::{BatchState, GroupState, SessionState, Verdict};
use sqlx::{Connection as _, Row as _};

use crate::support::{Backend, TestApp};

/// The names that the CHECK constraint of a column allows, in a migrated database.
async fn allowed(app: &TestApp, backend: Backend, table: &str, column: &str) -> BTreeSet<String> {
    let (constraints, pattern) = match backend {
        Backend::Sqlite => (sqlite_schema(app, table).await, format!(r"CHECK \(\s*{column} IN \(([^)]*)\)\s*\)")),
        Backend::Postgres => {
            (postgres_constraints(app, table).await, format!(r"CHECK \(\({column} = ANY \(ARRAY\[([^\]]*)\]\)\)\)"))
        }
    };
    let constraint = regex::Regex::new(&pattern).expect("the pattern is valid");
    let found: Vec<&str> =
        constraint.captures_iter(&constraints).filter_map(|found| Some(found.get(1)?.as_str())).collect();
    let [names] = found.as_slice() else {
        panic!("{table}.{column} is constrained {} times: {constraints}", found.len())
    };
    let quoted = regex::Regex::new("'([a-z]+)'").expect("the pattern is valid");
    quoted.captures_iter(names).map(|name| name[1].to_owned()).collect()
}

async fn sqlite_schema(app: &TestApp, table: &str) -> String {
    let mut connection = sqlx::SqliteConnection::connect(&app.database).await.expect("the file opens");
    let query = sqlx::query("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = $1").bind(table);
    query.fetch_one(&mut connection).await.expect("the table is there").get(0)
}

async fn postgres_constraints(app: &TestApp, table: &str) -> String {
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let query = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conrelid = $1::regclass";
    let rows = sqlx::query(query).bind(table).fetch_all(&mut connection).await.expect("the table is there");
    rows.iter().map(|row| row.get::<String, _>(0)).collect::<Vec<_>>().join("\n")
}

fn names<S: Copy>(states: &[S], name: fn(S) -> &'static str) -> BTreeSet<String> {
    states.iter().map(|state| name(*state).to_owned()).collect()
}

async fn check(backend: Backend) {
    let app = TestApp::start(backend).await;
    for (table, column, known) in [
        ("rollout", "verdict", names(Verdict::ALL, Verdict::as_str)),
        ("rollout_group", "state", names(GroupState::ALL, GroupState::as_str)),
        ("batch", "state", names(BatchState::ALL, BatchState::as_str)),
        ("session", "state", names(SessionState::ALL, SessionState::as_str)),
    ] {
        assert_eq!(allowed(&app, backend, table, column).await, known, "{table}.{column}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_allows_the_states_that_the_code_knows() {
    check(Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_allows_the_states_that_the_code_knows() {
    check(Backend::Postgres).await;
}
