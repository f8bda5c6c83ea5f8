//! Simulated agents and trainers. They do not wait for some answers, forget some leases, and keep some leases past
//! their end.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use rand::{RngExt as _, rngs::StdRng};
use serde_json::{Value, json};

use super::{AGENTS, Call, GROUP_SIZE, Outcome, World};
use crate::support::{member, text};

/// The client abandons one call in this many before the answer.
const HANGS_UP: u32 = 12;

/// How long a client waits before it abandons a call.
const PATIENCE: Duration = Duration::from_millis(3);

/// One attempt at a call, at any replica.
async fn attempt(world: &World, random: &mut StdRng, path: &str, body: &Value) -> Outcome {
    let url = loop {
        // While no replica runs, there is nothing to call.
        match world.url(random) {
            Some(url) => break url,
            None => tokio::task::yield_now().await,
        }
    };
    let call = async {
        let response = world.http.post(format!("{url}{path}")).json(body).send().await.ok()?;
        let status = response.status().as_u16();
        let body = response.bytes().await.ok()?;
        Some((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
    };
    let patience = if random.random_range(0..HANGS_UP) == 0 { PATIENCE } else { Duration::from_secs(20) };
    match tokio::time::timeout(patience, call).await {
        Ok(Some((status @ 200..=299, body))) => Outcome::Ok(if status == 204 { Value::Null } else { body }),
        // A 503 leaves open whether the call took effect.
        Ok(Some((503, _)) | None) | Err(_) => Outcome::Unknown,
        Ok(Some((status, body))) => Outcome::Refused(status, body),
    }
}

/// Posts its share of every group, alone or as a bundle over two groups, until each post is answered.
pub(super) async fn agent(world: Arc<World>, agent: usize, groups: usize) {
    let mut random = world.random(agent);
    let mine: Vec<(usize, usize)> = (0..groups)
        .flat_map(|group| (0..GROUP_SIZE).map(move |index| (group, index)))
        .filter(|(group, index)| (group * GROUP_SIZE + index) % AGENTS == agent)
        .collect();
    for portion in mine.chunks(2) {
        let bodies: Vec<Value> =
            portion.iter().map(|(group, index)| member(&format!("g{group}"), *index, *index as f64)).collect();
        let rollouts: Vec<String> = bodies.iter().map(|body| text(&body["rollout_id"]).to_owned()).collect();
        let body = if random.random_bool(0.5) { vec![Value::Array(bodies)] } else { bodies };
        for body in body {
            let posted = match &body {
                Value::Array(_) => rollouts.clone(),
                one => vec![text(&one["rollout_id"]).to_owned()],
            };
            loop {
                let invoked = world.now();
                let outcome = attempt(&world, &mut random, "/trajectories", &body).await;
                world.record(invoked, Call::Post { rollouts: posted.clone() }, &outcome);
                match outcome {
                    Outcome::Ok(_) => break,
                    Outcome::Refused(status, body) => panic!("a post was refused: {status} {body}"),
                    Outcome::Unknown => {}
                }
            }
            world.stored.fetch_add(posted.len(), Ordering::SeqCst);
        }
    }
}

/// Leases, reads and acks until every group is trained.
pub(super) async fn trainer(world: Arc<World>, trainer: usize, groups: usize) {
    let mut random = world.random(AGENTS + trainer);
    for request in 0.. {
        let body = json!({
            "consumer": format!("t{trainer}"), "request_id": format!("{request}"), "wait_ms": 200, "partial": true,
        });
        let invoked = world.now();
        let outcome = attempt(&world, &mut random, "/batches", &body).await;
        world.record(invoked, Call::Lease, &outcome);
        match outcome {
            Outcome::Ok(Value::Null) if trained(&world, &mut random).await == Some(groups * GROUP_SIZE) => return,
            Outcome::Ok(Value::Null) | Outcome::Unknown => {}
            Outcome::Ok(batch) => consume(&world, &mut random, &batch).await,
            Outcome::Refused(status, body) => panic!("a lease was refused: {status} {body}"),
        }
    }
}

async fn trained(world: &World, random: &mut StdRng) -> Option<usize> {
    let url = world.url(random)?;
    let response = world.http.get(format!("{url}/policies/default")).send().await.ok()?;
    let policy: Value = response.json().await.ok()?;
    policy["rollouts"]["trained"].as_u64().map(|count| count as usize)
}

/// What a trainer does with a batch: usually it reads, extends and acks it; sometimes it gives it back or forgets it.
async fn consume(world: &World, random: &mut StdRng, descriptor: &Value) {
    let (batch, lease) = (text(&descriptor["batch_id"]).to_owned(), text(&descriptor["lease"]).to_owned());
    read(world, random, &batch, text(&descriptor["samples_url"])).await;
    match random.random_range(0..10) {
        0 => {}
        1 => {
            let body = json!({"lease": lease, "reason": "test"});
            let call = Call::Nack { batch: batch.clone(), lease };
            settle(world, random, &format!("/batches/{batch}/nack"), &body, call).await;
        }
        _ => {
            if random.random_bool(0.3) {
                let body = json!({"lease": lease, "ttl_s": 1});
                let call = Call::Extend { batch: batch.clone(), lease: lease.clone() };
                settle(world, random, &format!("/batches/{batch}/extend"), &body, call).await;
            }
            let step = world.step.fetch_add(1, Ordering::SeqCst) + 1;
            let body = json!({"lease": lease, "step": step});
            let call = Call::Ack { batch: batch.clone(), lease };
            settle(world, random, &format!("/batches/{batch}/ack"), &body, call).await;
        }
    }
}

async fn read(world: &World, random: &mut StdRng, batch: &str, path: &str) {
    let Some(url) = world.url(random) else { return };
    let invoked = world.now();
    let Ok(response) = world.http.get(format!("{url}{path}")).send().await else { return };
    let status = response.status().as_u16();
    let Ok(body) = response.text().await else { return };
    if status != 200 {
        return;
    }
    let rows = body.lines().map(|line| -> Value { serde_json::from_str(line).expect("every line is a row") });
    let rollouts = rows.map(|row| text(&row["rollout_id"]).to_owned()).collect();
    world.record(invoked, Call::Read { batch: batch.to_owned(), rollouts }, &Outcome::Ok(Value::Null));
}

/// Repeats a call until it is answered.
async fn settle(world: &World, random: &mut StdRng, path: &str, body: &Value, call: Call) {
    loop {
        let invoked = world.now();
        let outcome = attempt(world, random, path, body).await;
        world.record(invoked, call.clone(), &outcome);
        match outcome {
            Outcome::Ok(_) | Outcome::Refused(409, _) => return,
            Outcome::Refused(status, body) => panic!("{path}: {status} {body}"),
            Outcome::Unknown => {}
        }
    }
}
