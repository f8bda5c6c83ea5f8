//! Clients that leave while their read takes groups.

use serde_json::json;

use super::{count, item, read, read_as, slime, uids, write};
use crate::support::{eventually, group, on_both_stores, with};

/// Groups that are ready. A read leases eight at once, so it takes a while.
const GROUPS: usize = 96;

/// Items of 4 MiB among them, in pairs.
const LONG: usize = 8;

/// How many clients leave, each at another moment.
const LEAVING: usize = 4;

on_both_stores! {
    async fn a_client_that_leaves_while_groups_are_leased_keeps_none_of_them(app: TestApp) {
        slime(app).await;
        let rules = json!({"require": [], "group": {"size": 2}, "settle": "ack", "lease": {"max_deliveries": 1_000}});
        app.rules("default", rules).await;
        let mut posted: Vec<String> = Vec::new();
        for index in 0..GROUPS {
            app.accept(group(&format!("g{index}"), &[1.0, 0.0])).await;
            posted.extend([format!("g{index}-0"), format!("g{index}-1")]);
        }
        // Larger than what sockets hold, so that no answer is sent to its end.
        let long = json!({"messages": [{"role": "assistant", "content": "x".repeat(4 << 20)}], "extra_info": {}});
        for index in 0..LONG {
            let (instance, uid) = (format!("long{}", index / 2), format!("long-{index}"));
            write(app, &with(item(&instance, &uid, 1.0), long.clone())).await;
            posted.push(uid);
        }
        for _ in 0..LEAVING {
            let url = format!("{}/get_rollout_data", app.facades["slime"]);
            let client = tokio::spawn(app.http.post(url).json(&json!({})).send());
            eventually("the first leases", || async { count(app, "leased").await != json!(0) }).await;
            client.abort();
            drop(client.await);
            eventually("the return of all leases", || async { count(app, "leased").await == json!(0) }).await;
        }
        assert_eq!(count(app, "checkpointed").await, json!(0), "nobody has read anything");
        let mut delivered = uids(&read_as(app, "", json!({})).await);
        delivered.sort();
        posted.sort();
        assert_eq!(delivered, posted);
        assert_eq!(read(app).await, [""; 0]);
        assert_eq!(count(app, "checkpointed").await, json!(posted.len()));
    }
}
