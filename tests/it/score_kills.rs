//! `kill -9` of scorers and of the service while they work: every item is scored once, and no attempt is made twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Stdio,
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::support::{endure, eventually, fresh_database, http, member, process::Service, with};

const GROUP_SIZE: usize = 3;

/// Scores with a script that notes each attempt, and prints a number that no other attempt prints.
fn scorer(url: &str, notes: &Path) -> Child {
    let script = format!(
        r#"input=$(cat)
        id=$(echo "$input" | sed 's/.*"rollout_id":"\([^"]*\)".*/\1/')
        attempt=$(echo "$input" | sed 's/.*"attempt":\([0-9]*\).*/\1/')
        # A scorer that is killed before it has written its input.
        [ -n "$attempt" ] || exit 1
        value=$(printf '0.%08d' $$)
        echo "$id $attempt $value" >> {}
        sleep 0.0$(($$ % 9))
        echo $value"#,
        notes.display()
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args([
        "score",
        "--url",
        url,
        "--name",
        "judge",
        "--lease-s",
        "1",
        "--jobs",
        "3",
        "--",
        "sh",
        "-c",
        &script,
    ]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().expect("the binary starts")
}

struct Attempt {
    rollout: String,
    number: u32,
    value: f64,
}

/// The attempts that were begun so far.
fn attempts(notes: &Path) -> Vec<Attempt> {
    let notes = std::fs::read_to_string(notes).unwrap_or_default();
    let read = |line: &str| {
        let mut words = line.split(' ');
        let mut word = || words.next().expect("a line has three words");
        Attempt {
            rollout: word().to_owned(),
            number: word().parse().expect("a number"),
            value: word().parse().expect("a number"),
        }
    };
    // The last line may be half written.
    notes.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).map(read).collect()
}

async fn survive(database: &str, what: &str) {
    let http = http();
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let notes = folder.path().join("notes");
    let mut random = StdRng::seed_from_u64(endure::seed());
    let rules = json!({"group": {"size": GROUP_SIZE}, "batch": {"groups": 1}, "lease": {"ttl_s": 1},
        "scores": {"required": ["judge"], "reward": "scores.judge", "work": {"judge": {"max_attempts": 1_000}}}});
    let (cycles, mut posted) = (endure::size(6, 100), BTreeSet::new());
    let (mut kills_of_scorers, mut kills_of_services) = (0, 0);
    for cycle in 0..cycles {
        let service = Service::start(database).await;
        let put = http.put(format!("{}/policies/default", service.url)).json(&rules).send().await;
        assert!(put.expect("the service answers").status().is_success());
        for group in 0..4 {
            let name = format!("c{cycle}g{group}");
            let bundle: Vec<Value> =
                (0..GROUP_SIZE).map(|index| with(member(&name, index, 0.0), json!({"reward": null}))).collect();
            let posts = http.post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
            assert!(posts.expect("the service answers").status().is_success());
            posted.extend((0..GROUP_SIZE).map(|index| format!("{name}-{index}")));
        }
        let mut judge = scorer(&service.url, &notes);
        for _ in 0..2 {
            // At some moment of an attempt.
            let enough = attempts(&notes).len() + random.random_range(1..4);
            eventually("some attempts", || async { attempts(&notes).len() >= enough }).await;
            judge.kill().await.expect("it can be killed");
            kills_of_scorers += 1;
            judge = scorer(&service.url, &notes);
        }
        let enough = attempts(&notes).len() + random.random_range(1..4);
        eventually("some attempts", || async { attempts(&notes).len() >= enough }).await;
        service.kill().await;
        kills_of_services += 1;
        judge.kill().await.expect("it can be killed");
    }
    let service = Service::start(database).await;
    let judge = scorer(&service.url, &notes);
    let get = async |path: String| {
        let answer = http.get(format!("{}{path}", service.url)).send().await.expect("the service answers");
        answer.json::<Value>().await.expect("JSON")
    };
    let ready = async || get("/stats".to_owned()).await["policies"]["default"]["rollouts"]["ready"].clone();
    eventually("the last score", || async { ready().await == posted.len() }).await;
    drop(judge);
    let mut begun: BTreeMap<String, Vec<Attempt>> = BTreeMap::new();
    for attempt in attempts(&notes) {
        begun.entry(attempt.rollout.clone()).or_default().push(attempt);
    }
    let mut repeated = 0;
    for rollout in &posted {
        let found = get(format!("/scores?rollout_id={rollout}")).await;
        let scores = found["scores"].as_array().expect("a list");
        assert_eq!(scores.len(), 1, "{rollout} is scored once: {found}");
        let of_rollout = &begun[rollout];
        let numbers: BTreeSet<u32> = of_rollout.iter().map(|attempt| attempt.number).collect();
        assert_eq!(numbers.len(), of_rollout.len(), "no attempt at {rollout} was given to two scorers");
        repeated += of_rollout.len() - 1;
        let winner = of_rollout.iter().find(|attempt| scores[0]["attempt"] == attempt.number);
        assert_eq!(
            winner.map(|attempt| json!(attempt.value)).as_ref(),
            Some(&scores[0]["value"]),
            "{rollout}: {found}"
        );
    }
    assert_eq!(begun.len(), posted.len(), "nothing else was scored");
    service.kill().await;
    let outcome = format!(
        "{} rollouts, each scored once; {repeated} attempts were begun again after {kills_of_scorers} kills of scorers and \
         {kills_of_services} of the service",
        posted.len()
    );
    endure::report(&format!("kill -9 of scorers and service, {what}"), cycles, &outcome);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_item_is_scored_once_although_scorers_and_the_service_are_killed_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    survive(&format!("sqlite:{}", folder.path().join("forebay.db").display()), "SQLite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_item_is_scored_once_although_scorers_and_the_service_are_killed_on_postgres() {
    survive(&fresh_database().await, "Postgres").await;
}
