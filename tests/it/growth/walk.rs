//! A walk that runs every statement: each operation of agents, trainers and people, and each timeout, at least once.

use serde_json::{Value, json};

use crate::support::{eventually, group, http, member, rollout, text, with};

/// A caller of one policy.
struct Caller<'a> {
    http: reqwest::Client,
    url: &'a str,
    policy: &'a str,
}

impl<'a> Caller<'a> {
    /// Makes a policy with these rules.
    async fn of(url: &'a str, policy: &'a str, rules: Value) -> Self {
        let caller = Self { http: http(), url, policy };
        caller.rules(rules).await;
        caller
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Value {
        let response = request.send().await.expect("the service answers");
        let status = response.status();
        let body = response.text().await.expect("the answer arrives whole");
        assert!(status.is_success(), "{status}: {body}");
        serde_json::from_str(&body).unwrap_or_default()
    }

    async fn get(&self, path: &str) -> Value {
        self.send(self.http.get(format!("{}{path}", self.url))).await
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        self.send(self.http.post(format!("{}{path}", self.url)).json(&body)).await
    }

    async fn rules(&self, rules: Value) {
        self.send(self.http.put(format!("{}/policies/{}", self.url, self.policy)).json(&rules)).await;
    }

    async fn publish(&self, version: i64) {
        let path = format!("{}/policies/{}/version", self.url, self.policy);
        self.send(self.http.put(path).json(&json!({"version": version, "step": version}))).await;
    }

    async fn accept(&self, rollout: Value) {
        self.post("/trajectories", with(rollout, json!({"policy": self.policy}))).await;
    }

    async fn lease(&self) -> Value {
        self.post("/batches", json!({"policy": self.policy, "request_id": "step"})).await
    }

    /// A call by the holder of a lease.
    async fn hold(&self, batch: &Value, call: &str, body: Value) {
        let body = with(body, json!({"lease": batch["lease"]}));
        self.post(&format!("/batches/{}/{call}", text(&batch["batch_id"])), body).await;
    }

    /// A call about the lineage.
    async fn lineage(&self, call: &str, body: Value) {
        self.post(&format!("/policies/{}/{call}", self.policy), body).await;
    }

    async fn readmit(&self, batch: &Value) {
        self.post(&format!("/batches/{}/readmit", text(&batch["batch_id"])), json!({})).await;
    }

    async fn status(&self, path: &str) -> u16 {
        self.http.get(format!("{}{path}", self.url)).send().await.expect("the service answers").status().as_u16()
    }
}

/// Runs all parts of the walk.
pub(super) async fn all(url: &str) {
    train(url).await;
    fail(url).await;
    age(url).await;
    wait(url).await;
    share(url).await;
    decide(url).await;
    score(url).await;
    look(url).await;
    give_up(url).await;
    record(url).await;
    pass_time(url).await;
    // The reset is last, because it leaves the ledger of a run behind.
    start_over(url).await;
}

/// Leases, acks, checkpoints and resumes.
async fn train(url: &str) {
    let gdpo = json!({"kind": "gdpo", "components": {"acc": 1.0}});
    let by_component = Caller::of(url, "by-component", json!({"group": {"size": 2}, "advantage": gdpo})).await;
    for index in 0..2 {
        let components = json!({"reward_components": {"acc": index}});
        by_component.accept(with(member("g", index, 1.0), components)).await;
    }
    let by_turn = json!({"group": {"size": 2}, "advantage": {"kind": "turn_return"}});
    let by_turn = Caller::of(url, "by-turn", by_turn).await;
    for index in 0..2 {
        by_turn.accept(member("g", index, 1.0)).await;
    }
    let trainer = Caller::of(url, "default", json!({"batch": {"groups": 1}})).await;
    trainer.rules(json!({"batch": {"groups": 1, "max_tokens": 1_000_000}})).await;
    for index in 0..4 {
        trainer.accept(rollout(&format!("r{index}"), 1.0)).await;
        trainer.accept(rollout(&format!("r{index}"), 1.0)).await;
    }
    let batch = trainer.lease().await;
    trainer.lease().await;
    trainer.get(text(&batch["samples_url"])).await;
    trainer.hold(&batch, "extend", json!({"ttl_s": 600})).await;
    trainer.hold(&batch, "ack", json!({"step": 1})).await;
    trainer.publish(1).await;
    trainer.lineage("checkpoints", json!({"step": 1})).await;
    let second = trainer.lease().await;
    trainer.hold(&second, "ack", json!({"step": 2})).await;
    trainer.publish(2).await;
    trainer.lease().await;
    trainer.lineage("resume", json!({"step": 1})).await;
    trainer.lineage("resume", json!({"step": 0, "force": true})).await;
    trainer.lease().await;
}

/// Deliveries that fail, and readmission of their batches.
async fn fail(url: &str) {
    let rules = json!({"group": {"size": 2}, "batch": {"groups": 2}, "lease": {"max_deliveries": 2}});
    let trainer = Caller::of(url, "fails", rules).await;
    for name in ["a", "b"] {
        for index in 0..2 {
            trainer.accept(member(name, index, index as f64)).await;
        }
    }
    for _ in 0..2 {
        trainer.hold(&trainer.lease().await, "nack", json!({"reason": "no"})).await;
    }
    let batches = trainer.get("/batches?policy=fails&state=quarantined").await;
    trainer.readmit(&batches["batches"][0]).await;
    let batch = trainer.lease().await;
    trainer.hold(&batch, "nack", json!({"reason": "bad", "groups": ["a"]})).await;
    trainer.readmit(&batch).await;
    trainer.lease().await;
}

/// Staleness, in both orders and with both actions.
async fn age(url: &str) {
    let spans = json!({"segments": [{"tokens": [1, 2, 3], "loss_mask": [1, 1], "versions": [[0, 0, 1], [1, 1, 1]]}]});
    for (policy, order, action) in
        [("drops", "fifo", "drop"), ("masks", "fifo", "mask"), ("drops-late", "freshest", "drop")]
    {
        let rules = json!({"batch": {"order": order}, "staleness": {"max": 0, "action": action}});
        let trainer = Caller::of(url, policy, rules).await;
        trainer.accept(with(rollout("old", 1.0), json!({"policy_version": 0}))).await;
        trainer.accept(with(rollout("both", 1.0), spans.clone())).await;
        trainer.accept(with(rollout("new", 1.0), json!({"policy_version": 1}))).await;
        trainer.publish(1).await;
        trainer.lease().await;
    }
}

/// Rollouts of each kind that are waited for.
async fn wait(url: &str) {
    let staleness = json!({"max": 0, "action": "wait"});
    for kind in ["session", "admission", "scoring"] {
        let policy = format!("waits-{kind}");
        let rules = json!({"scores": {"required": ["judge"]}, "staleness": staleness});
        let trainer = Caller::of(url, &policy, rules).await;
        match kind {
            "session" => drop(trainer.post("/sessions", json!({"policy": policy, "rollout_id": "slow"})).await),
            "admission" => drop(trainer.post("/admissions", json!({"policy": policy, "rollouts": 1})).await),
            _ => trainer.accept(rollout("unscored", 1.0)).await,
        }
        trainer.accept(with(rollout("ready", 1.0), json!({"reward_components": {"judge": 1.0}}))).await;
        let request = trainer.http.post(format!("{url}/batches")).json(&json!({"policy": policy})).send().await;
        assert_eq!(request.expect("the service answers").status(), 204);
        trainer.get(&format!("/policies/{policy}/why")).await;
    }
}

/// Shares of environments, in each order.
async fn share(url: &str) {
    let of = [("shares", "fifo", "drop"), ("shares-late", "freshest", "drop"), ("shares-early", "fifo", "wait")];
    for (policy, order, action) in of {
        let rules = json!({"batch": {"groups": 2, "order": order, "environments": {"swe": {"min_share": 0.5}}},
            "staleness": {"max": 1, "action": action}});
        let trainer = Caller::of(url, policy, rules).await;
        for name in ["a", "b"] {
            trainer.accept(rollout(name, 1.0)).await;
        }
        trainer.accept(with(rollout("c", 1.0), json!({"environment": "swe"}))).await;
        trainer.lease().await;
        trainer.get(&format!("/policies/{policy}")).await;
    }
}

/// Groups that people and filters decide, and reserved room.
async fn decide(url: &str) {
    let filter = json!([{"name": "zero", "scope": "rollout", "when": "reward == 0.0", "action": "drop"}]);
    let agent = Caller::of(url, "decides", json!({"group": {"size": 3, "min_size": 1}, "filter": filter})).await;
    let admission = agent.post("/admissions", json!({"policy": "decides", "rollouts": 4})).await;
    short_of_room(url).await;
    for (name, call) in [("closed", "close"), ("discarded", "discard")] {
        agent.accept(with(member(name, 0, 1.0), json!({"admission_id": admission["admission_id"]}))).await;
        agent.accept(member(name, 1, 0.0)).await;
        let body = json!({"policy": "decides", "group_id": name, "reason": "not wanted"});
        let body = if call == "close" { json!({"policy": "decides", "group_id": name}) } else { body };
        agent.post(&format!("/groups/{call}"), body).await;
    }
}

/// Rollouts that wait for scores, which come, or never come.
async fn score(url: &str) {
    let rules = json!({"group": {"size": 2, "min_size": 1, "timeout_s": 1}, "retention": {"dropped_s": 0},
        "scores": {"required": ["a", "b"], "timeout_s": 1}});
    let judge = Caller::of(url, "unscored", rules.clone()).await;
    judge.accept(member("g", 0, 1.0)).await;
    let is_dropped = async || judge.get("/trajectories?policy=unscored&rollout_id=g-0").await["verdict"] == "dropped";
    eventually("the end of a wait for scores", is_dropped).await;
    let judge = Caller::of(url, "scored", with(rules, json!({"scores": {"required": ["a", "b"]}}))).await;
    for group in ["scored", "closed", "discarded"] {
        judge.accept(member(group, 0, 1.0)).await;
    }
    for name in ["a", "b"] {
        judge.post("/scores", json!({"policy": "scored", "rollout_id": "scored-0", "name": name, "value": 1.0})).await;
    }
    judge.get("/scores?policy=scored&rollout_id=scored-0").await;
    let gdpo = json!({"kind": "gdpo", "components": {"a": 1.0}});
    let filter = json!([{"name": "no", "scope": "rollout", "when": "metadata != null", "action": "drop"}]);
    let rules = json!({"advantage": gdpo, "filter": filter, "scores": {"required": ["a", "b"]}});
    let judged = Caller::of(url, "judged", rules).await;
    judged.accept(member("g", 0, 1.0)).await;
    for name in ["a", "b"] {
        judged.post("/scores", json!({"policy": "judged", "rollout_id": "g-0", "name": name, "value": 1.0})).await;
        judged.get("/trajectories/content?policy=judged&rollout_id=g-0").await;
        judged.accept(member("open", 0, 1.0)).await;
        judged.get("/exports?policy=judged").await;
    }
    turns(url).await;
    evaluate(url).await;
    work(url).await;
    judge.post("/groups/close", json!({"policy": "scored", "group_id": "closed"})).await;
    judge.post("/groups/discard", json!({"policy": "scored", "group_id": "discarded", "reason": "no"})).await;
    judge.accept(member("reset", 0, 1.0)).await;
    judge.lineage("reset", json!({})).await;
}

/// Rollouts that evaluate a policy, at two versions, of which a resume undoes one.
async fn evaluate(url: &str) {
    let rules = json!({"group": {"size": 1}, "retention": {"evaluated_s": 0, "tombstone_s": 0}});
    let evaluated = Caller::of(url, "evaluated", rules.clone()).await;
    let suite = evaluated.http.put(format!("{url}/policies/evaluated/suites/s"));
    evaluated.send(suite.json(&json!({"tasks": 1}))).await;
    let eval = |rollout: &str, version: i64| {
        json!({"policy": "evaluated", "rollout_id": rollout, "purpose": "eval", "suite": "s", "task": "t",
            "policy_version": version, "reward": 1.0})
    };
    for (rollout, version) in [("a", 1), ("b", 1), ("c", 2)] {
        evaluated.accept(eval(rollout, version)).await;
    }
    evaluated.get("/policies/evaluated/evals?wait_complete=s@2&wait_ms=1000").await;
    evaluated.get("/policies/evaluated/suites/s/tasks").await;
    evaluated.get("/trajectories?policy=evaluated&purpose=eval").await;
    evaluated.get("/exports?policy=evaluated&purpose=eval").await;
    evaluated.rules(with(rules, json!({"scores": {"required": ["judge"]}}))).await;
    evaluated.accept(eval("d", 2)).await;
    let score = json!({"policy": "evaluated", "rollout_id": "d", "name": "judge", "value": 1.0});
    evaluated.post("/scores", score).await;
    evaluated.publish(3).await;
    evaluated.post("/policies/evaluated/resume", json!({"force": true})).await;
}

/// Turns that are rewarded later.
async fn turns(url: &str) {
    let rules = json!({"group": {"size": 1}, "advantage": {"kind": "turn_return"}, "scores": {"required": ["reward"]}});
    let judge = Caller::of(url, "turned", rules).await;
    judge.accept(member("g", 0, 1.0)).await;
    judge.accept(with(member("h", 0, 1.0), json!({"reward": null}))).await;
    let score = json!({"policy": "turned", "rollout_id": "h-0", "name": "reward", "value": 1.0});
    let call = json!([{"id": "c", "prompt_tokens": [1], "tokens": [2]}]);
    judge.accept(with(member("i", 0, 1.0), json!({"reward": null, "segments": null, "turns": call}))).await;
    judge.post("/scores", with(score.clone(), json!({"rollout_id": "i-0", "turn": "c"}))).await;
    judge.post("/scores", with(score.clone(), json!({"turn": 0}))).await;
    judge.post("/scores", score).await;
    judge.get("/scores?policy=turned&rollout_id=h-0").await;
    judge.get("/trajectories/content?policy=turned&rollout_id=h-0").await;
}

/// Work for scorers that is settled, fails, expires, is exhausted and retried, and ends unscored.
async fn work(url: &str) {
    let work = json!({"a": {"max_attempts": 1}, "b": {"per": "group"}});
    let rules = json!({"group": {"size": 2, "min_size": 1}, "lease": {"ttl_s": 1},
        "scores": {"required": ["a", "b"], "work": work}});
    let judge = Caller::of(url, "worked", rules).await;
    for index in 0..2 {
        judge.accept(member("g", index, 1.0)).await;
    }
    let lease = async |names: Value| {
        let request = json!({"policy": "worked", "names": names, "request_id": "r", "wait_ms": 5_000});
        judge.post("/scores/leases", request.clone()).await;
        judge.post("/scores/leases", request).await["items"][0].clone()
    };
    let item = lease(json!(["a"])).await;
    let of = |item: &Value, fields: Value| {
        let id = &item["rollouts"][0]["rollout_id"];
        let score = json!({"policy": "worked", "rollout_id": id, "name": item["name"], "lease": item["lease"]});
        with(score, fields)
    };
    judge.post("/scores/leases/extend", json!({"policy": "worked", "leases": [item["lease"]], "ttl_s": 60})).await;
    judge.post("/scores", of(&item, json!({"failed": "no"}))).await;
    judge.get("/policies/worked/why").await;
    judge.post("/scores/retry", json!({"policy": "worked", "name": "a"})).await;
    let item = lease(json!(["a"])).await;
    judge.post("/scores", of(&item, json!({"value": 1.0}))).await;
    lease(json!(["b"])).await;
    // The lease of the group expires, and it is leased again.
    judge.post("/scores/leases", json!({"policy": "worked", "names": ["b"], "wait_ms": 10_000})).await;
    // Work of earlier rules.
    judge.rules(json!({"scores": {"required": ["a", "b"]}})).await;
    judge.post("/scores/leases", json!({"policy": "worked", "names": ["b"]})).await;
    judge.post("/groups/close", json!({"policy": "worked", "group_id": "g"})).await;
}

/// Requests for room that depend on what a policy has, one of which is refused.
async fn short_of_room(url: &str) {
    let batch = json!({"groups": 1, "max_tokens": 100, "environments": {"swe": {"min_share": 1.0}}});
    let rules = json!({"group": {"size": 2}, "batch": batch, "staleness": {"max": 0}});
    let agent = Caller::of(url, "short", rules).await;
    agent.accept(with(member("open", 0, 1.0), json!({"environment": "swe"}))).await;
    for group in ["open", "new", "refused"] {
        agent.post("/admissions", json!({"policy": "short", "rollouts": 2, "group_id": group})).await;
    }
}

/// Reads of people and monitoring.
async fn look(url: &str) {
    let person = Caller { http: http(), url, policy: "default" };
    for path in [
        "/trajectories?rollout_id=r0",
        "/trajectories?policy=fails&group_id=a",
        "/trajectories?state=ready",
        "/trajectories?execution_id=x",
        "/trajectories?execution_id=x&policy=fails&group_id=a",
        "/trajectories?policy=fails&group_id=a&verdict=kept",
        "/groups",
        "/groups?state=quarantined",
        "/groups?policy=fails&group_id=a",
        "/batches",
        "/policies",
        "/policies/default",
        "/exports?where=reward%20%3E%200.0",
        "/stats",
        "/metrics",
    ] {
        person.get(path).await;
    }
    let lists = [
        "/trajectories?rollout_id=r0",
        "/trajectories?limit=10",
        "/trajectories?policy=fails&group_id=a",
        "/trajectories?state=ready",
        "/trajectories?environment=web",
        "/trajectories?execution_id=x",
        "/trajectories?execution_id=x&policy=fails&group_id=a",
        "/trajectories?policy=fails&group_id=a&verdict=kept",
        "/groups?limit=10",
        "/groups?reason=flat",
        "/groups?environment=web",
        "/groups?policy=fails&group_id=a",
        "/batches?limit=10",
        "/batches?state=leased",
        "/sessions?limit=10",
        "/sessions?state=open",
        "/sessions?rollout_id=r0",
    ];
    for list in lists {
        for order in ["oldest", "newest"] {
            person.get(&format!("{list}&order={order}")).await;
        }
    }
    let shown = Caller::of(url, "shown", json!({})).await;
    shown.accept(rollout("r", 1.0)).await;
    let batch = shown.lease().await;
    for order in ["oldest", "newest"] {
        shown.get(&format!("/groups?policy=shown&batch_id={}&order={order}", text(&batch["batch_id"]))).await;
    }
    shown.get("/trajectories/content?policy=shown&rollout_id=r").await;
    shown.get("/policies/shown/series?metrics=received").await;
    shown.get("/overview").await;
    shown.get("/policies/shown/why").await;
    Caller::of(url, "stands", json!({})).await.accept(member("whole", 0, 1.0)).await;
    for id in ["r", "whole-0", "whole", text(&batch["batch_id"])] {
        person.get(&format!("/why?id={id}")).await;
    }
    shown.get("/policies/shown/steps?from=0&to=9").await;
    for order in ["oldest", "newest"] {
        shown.get(&format!("/policies/shown/steps?order={order}")).await;
        shown.get(&format!("/policies/shown/journal?order={order}")).await;
    }
    // A consumer that waits, and one whose client has gone.
    let none = shown.http.post(format!("{url}/batches")).json(&json!({"policy": "shown", "consumer": "waits"}));
    assert_eq!(none.send().await.expect("the service answers").status(), 204);
    let gone = shown.http.post(format!("{url}/batches")).json(&json!({"policy": "shown", "wait_ms": 30_000}));
    let asking = async |count: usize| {
        let shown = shown.get("/policies/shown").await;
        shown["waiting"]["asking"].as_array().map(Vec::len) == Some(count)
    };
    let waits = tokio::spawn(gone.send());
    eventually("two consumers that wait", || asking(2)).await;
    waits.abort();
    eventually("the end of a wait", || asking(1)).await;
    let filter =
        json!([{"name": "old", "scope": "rollout", "when": "staleness > 1 && metadata == null", "action": "drop"}]);
    shown.post("/policies/shown/filters/try", json!({"filter": filter})).await;
    let filter = json!([{"name": "poor", "scope": "rollout", "when": "scores.judge < 0.5", "action": "drop"}]);
    shown.post("/policies/shown/filters/try", json!({"filter": filter})).await;
    shown.get("/filters/variables").await;
}

/// A resume over a batch whose payloads are purged.
async fn give_up(url: &str) {
    let trainer = Caller::of(url, "gives-up", json!({"retention": {"trained_s": 0}})).await;
    trainer.accept(rollout("lost", 1.0)).await;
    let batch = trainer.lease().await;
    trainer.hold(&batch, "ack", json!({"step": 1})).await;
    let samples = text(&batch["samples_url"]);
    eventually("the end of a payload", || async { trainer.status(samples).await == 410 }).await;
    trainer.lineage("resume", json!({"step": null, "force": true})).await;
}

/// Sessions: opened twice, refused their end, aborted, parked, resumed, expired and forgotten. No call is recorded.
async fn record(url: &str) {
    let retention = json!({"settled_s": 0, "dropped_s": 0, "tombstone_s": 0});
    let producer = Caller::of(url, "records", json!({"group": {"size": 2}, "retention": retention})).await;
    let open = |rollout_id: &str, idle_s: u64| json!({"policy": "records", "rollout_id": rollout_id, "group_id": "recorded", "idle_s": idle_s});
    let aborted = producer.post("/sessions", open("aborted", 600)).await;
    producer.post("/sessions", open("aborted", 600)).await;
    let path = format!("/sessions/{}", text(&aborted["session_id"]));
    producer.get(&path).await;
    producer.get("/sessions?policy=records&state=open").await;
    let finish = producer.http.post(format!("{url}{path}/finish")).json(&json!({"reward": 1.0})).send().await;
    assert_eq!(finish.expect("the service answers").status(), 422, "there are no calls");
    producer.post(&format!("{path}/abort"), json!({"reason": "no"})).await;
    let parked = producer.post("/sessions", open("parked", 1)).await;
    let of_parked = format!("/sessions/{}", text(&parked["session_id"]));
    let is_parked = || async { producer.get(&of_parked).await["state"] == "parked" };
    eventually("that a session is parked", is_parked).await;
    let resumed = producer.post(&format!("{of_parked}/resume"), json!({})).await;
    let state = producer.http.put(format!("{url}{of_parked}/state")).body("half").send().await;
    assert_eq!(state.expect("the service answers").status(), 200);
    assert_eq!(producer.status(&format!("{of_parked}/state")).await, 200);
    eventually("that it is parked again", is_parked).await;
    let call = producer.http.get(format!("{}/models", text(&resumed["base_urls"]["openai"])));
    let call = call.bearer_auth(text(&resumed["key"])).send().await;
    assert_eq!(call.expect("the listener answers").status(), 200, "its agent opens it");
    let expired = json!({"policy": "records", "rollout_id": "expired", "group_id": "recorded", "ttl_s": 1});
    let expired = producer.post("/sessions", expired).await;
    let expired = format!("/sessions/{}", text(&expired["session_id"]));
    for path in [path, expired] {
        eventually("the end of a session", || async { producer.status(&path).await == 404 }).await;
    }
    // A call that is refused keeps its session alive. `unserved` records one in it.
    let models = json!({"known": {"policy": "records"}});
    let kept = json!({"rollout_id": "kept", "group_id": "kept", "models": models});
    let kept = producer.post("/sessions", kept).await;
    let call = producer.http.post(format!("{}/chat/completions", text(&kept["base_urls"]["openai"])));
    let messages = json!([{"role": "user", "content": "Hello."}]);
    let call = call.bearer_auth(text(&kept["key"])).json(&json!({"model": "unknown", "messages": messages}));
    assert_eq!(call.send().await.expect("the listener answers").status(), 404);
}

/// Expiry of leases, group timeouts, admissions, payloads and tombstones.
async fn pass_time(url: &str) {
    let retention = json!({"trained_s": 0, "settled_s": 0, "dropped_s": 0, "tombstone_s": 0});
    let rules = json!({"group": {"size": 2, "timeout_s": 1}, "lease": {"ttl_s": 1}, "settle": "ack",
        "retention": retention, "columns": {"experts": {"dtype": "u8", "retention": "ack"}}});
    let brief = Caller::of(url, "brief", rules).await;
    brief.post("/admissions", json!({"policy": "brief", "rollouts": 4})).await;
    let image = blake3::hash(b"image");
    let put = brief.http.put(format!("{url}/media/{image}")).body("image").send().await;
    assert!(put.expect("the service answers").status().is_success());
    let named = json!({"messages": [{"image_url": {"url": format!("forebay:{image}")}}]});
    brief.accept(with(member("overdue", 0, 1.0), named)).await;
    let column = blake3::hash(b"ab").to_string();
    let put = brief.http.put(format!("{url}/columns/{column}")).body("ab").send().await;
    assert!(put.expect("the service answers").status().is_success());
    for name in ["acked", "expired"] {
        for index in 0..2 {
            let mut member = member(name, index, index as f64);
            member["segments"][0]["columns"] = json!({"experts": {"digest": column, "bytes": 2}});
            brief.accept(member).await;
        }
    }
    let acked = brief.lease().await;
    let mut late = member("acked", 2, 0.0);
    late["segments"][0]["columns"] = json!({"experts": {"digest": column, "bytes": 2}});
    brief.accept(late).await;
    let samples = format!("{url}{}?columns=experts", text(&acked["samples_url"]));
    let samples = brief.http.get(samples).header("accept", "application/vnd.apache.arrow.stream").send().await;
    assert!(samples.expect("the service answers").status().is_success());
    brief.hold(&acked, "ack", json!({"step": 1})).await;
    let expired = brief.lease().await;
    let expired = format!("/batches/{}", text(&expired["batch_id"]));
    eventually("the end of the lease", || async { brief.get(&expired).await["state"] == "returned" }).await;
    for rollout in ["overdue-0", "acked-0"] {
        let path = format!("/trajectories?policy=brief&rollout_id={rollout}");
        eventually("the end of a tombstone", || async { brief.status(&path).await == 404 }).await;
    }
    eventually("the end of the admission", || async {
        brief.get("/policies/brief").await["waiting"]["reserved_rollouts"] == 0
    })
    .await;
}

/// A new run; everything so far belongs to the old one.
async fn start_over(url: &str) {
    let trainer = Caller { http: http(), url, policy: "default" };
    trainer.post("/admissions", json!({"rollouts": 4})).await;
    trainer.http.post(format!("{url}/trajectories")).json(&group("late", &[1.0, 0.0])).send().await.expect("an answer");
    trainer.lineage("reset", json!({})).await;
}
