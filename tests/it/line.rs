//! The line of ready groups: a claim begins behind the groups that were claimed before, and still finds groups that
//! return to places in front of them.

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _};

use crate::support::{Cluster, TestApp, eventually, on_both_stores, rollout, text, with, without_autovacuum};

/// Posts groups of one rollout.
async fn post(app: &TestApp, groups: impl IntoIterator<Item = &str>) {
    for group in groups {
        app.accept(rollout(group, 1.0)).await;
    }
}

/// Leases a batch and acks it. Returns the ids of its groups.
async fn train(app: &TestApp, step: i64) -> Vec<String> {
    let batch = app.lease().await;
    app.ack(&batch, step).await.expect(200);
    app.group_ids(&batch).await
}

on_both_stores! {
    async fn groups_that_go_back_are_claimed_next_wherever_claims_begin_by_then(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 2}})).await;
        post(app, ["a", "b", "c", "d", "e", "f", "g", "h", "i"]).await;
        let first = app.lease().await;
        for (step, groups) in [(1, ["c", "d"]), (2, ["e", "f"])] {
            assert_eq!(train(app, step).await, groups);
        }
        app.nack(&first, &["a"]).await.expect(200);
        assert_eq!(train(app, 3).await, ["b", "g"]);
        app.post(&format!("/batches/{}/readmit", text(&first["batch_id"])), json!({})).await.expect(200);
        assert_eq!(train(app, 4).await, ["a", "h"]);
    }

    async fn the_line_of_a_new_run_is_found_from_its_front(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 1}})).await;
        post(app, ["a", "b", "c", "d"]).await;
        for (step, group) in [(1, "a"), (2, "b"), (3, "c")] {
            assert_eq!(train(app, step).await, [group]);
        }
        app.post("/policies/default/reset", json!({})).await.expect(200);
        post(app, ["a", "b"]).await;
        assert_eq!(train(app, 1).await, ["a"]);
        assert_eq!(train(app, 2).await, ["b"]);
    }

    async fn orders_can_change_while_groups_wait(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 1, "order": "freshest"}})).await;
        for (version, group) in [(0, "a"), (0, "b"), (1, "c"), (2, "d"), (2, "e")] {
            app.publish(version).await;
            app.accept(with(rollout(group, 1.0), json!({"policy_version": version}))).await;
        }
        for (step, group) in [(1, "d"), (2, "e"), (3, "c")] {
            assert_eq!(train(app, step).await, [group]);
        }
        app.rules("default", json!({"batch": {"groups": 1, "order": "fifo"}})).await;
        for (step, group) in [(4, "a"), (5, "b")] {
            assert_eq!(train(app, step).await, [group]);
        }
    }
}

/// A database on a server of its own, on which no other test has sessions.
async fn alone() -> (Cluster, String) {
    let start = || Cluster::start().expect("a cluster starts");
    let cluster = tokio::task::spawn_blocking(start).await.expect("nothing panics");
    let database = cluster.fresh_database().await;
    (cluster, database)
}

/// Number of pages of the table of groups and of its indexes that ended sessions of the service have read so far.
async fn pages_of_groups(database: &str) -> i64 {
    const COUNT: &str = "
        SELECT CAST(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read AS BIGINT)
        FROM pg_statio_user_tables
        WHERE relname = 'rollout_group'";
    const SESSIONS: &str = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'forebay'";
    let mut connection = sqlx::PgConnection::connect(database).await.expect("the server accepts");
    // A session reports its counters before it ends.
    while !sqlx::query(SESSIONS).fetch_all(&mut connection).await.expect("sessions can be read").is_empty() {
        tokio::task::yield_now().await;
    }
    sqlx::query_scalar(COUNT).fetch_one(&mut connection).await.expect("counters can be read")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_elsewhere_does_not_slow_down_claims() {
    const BATCHES: i64 = 15;
    const GROUPS: i64 = 10;
    const PHASES: i64 = 4;
    let (_cluster, database) = alone().await;
    let mut app = TestApp::start_on(&database).await;
    without_autovacuum(&database).await;
    app.rules("default", json!({"batch": {"groups": GROUPS}})).await;
    let groups = PHASES * BATCHES * GROUPS;
    app.accept(Value::Array((0..groups).map(|group| rollout(&format!("r{group}"), 1.0)).collect())).await;
    // The transaction starts as pg_dump does: entries of groups that are claimed from here on cannot be removed.
    let mut dump = sqlx::PgConnection::connect(&database).await.expect("the server accepts");
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT * FROM policy";
    sqlx::raw_sql(begin).fetch_all(&mut dump).await.expect("the snapshot is taken");
    let mut pages = Vec::new();
    for phase in 0..PHASES {
        app.stop().await;
        let before = pages_of_groups(&database).await;
        app.restart().await;
        for batch in 0..BATCHES {
            train(&app, phase * BATCHES + batch + 1).await;
        }
        app.stop().await;
        pages.push(pages_of_groups(&database).await - before);
        app.restart().await;
    }
    assert!(pages[3] < pages[0] * 3 / 2, "as many claims looked at {pages:?} pages while the transaction went on");
    sqlx::raw_sql("ROLLBACK").execute(&mut dump).await.expect("the transaction ends");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_is_committed_after_later_ones_were_claimed_is_still_claimed() {
    const HOLD: &str = "
        CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.group_id = 'late' THEN PERFORM pg_advisory_xact_lock(1); END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER hold AFTER INSERT ON rollout_group FOR EACH ROW EXECUTE FUNCTION hold();";
    const HELD: &str = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    let (_cluster, database) = alone().await;
    let app = TestApp::start_on(&database).await;
    app.rules("default", json!({"batch": {"groups": 1}})).await;
    let mut holder = sqlx::PgConnection::connect(&database).await.expect("the server accepts");
    sqlx::raw_sql(AssertSqlSafe(format!("{HOLD} SELECT pg_advisory_lock(1)")))
        .execute(&mut holder)
        .await
        .expect("a trigger can be made");
    post(&app, ["a"]).await;
    let late = app.post("/trajectories", rollout("late", 1.0));
    let others = async {
        eventually("the post that waits", || async {
            let mut connection = sqlx::PgConnection::connect(&database).await.expect("the server accepts");
            let held: i64 = sqlx::query_scalar(HELD).fetch_one(&mut connection).await.expect("locks can be read");
            held == 1
        })
        .await;
        post(&app, ["b", "c", "d", "e"]).await;
        for (step, group) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
            assert_eq!(train(&app, step).await, [group]);
        }
        sqlx::raw_sql("SELECT pg_advisory_unlock(1)").execute(&mut holder).await.expect("the lock is held");
    };
    let (answer, ()) = tokio::join!(late, others);
    answer.expect(201);
    assert_eq!(train(&app, 5).await, ["late"]);
    assert_eq!(train(&app, 6).await, ["e"]);
    app.finish().await;
}
