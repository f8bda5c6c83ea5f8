//! The rule for trainers: a simulated trainer, killed at every point of its loop, trains every group exactly once.
//!
//! The loop is: resume, lease, compute, ack, change the weights, save, checkpoint, publish. A kill before a call
//! prevents the call; a kill after a call loses only its answer. Wherever the trainer is killed, the final weights are
//! those of an undisturbed run.

use serde_json::{Value, json};

use crate::support::{TestApp, group, on_both_stores, text, with};

const GROUPS: usize = 8;
const GROUPS_PER_BATCH: usize = 2;
const STEPS: usize = GROUPS / GROUPS_PER_BATCH;

/// The trainer was killed.
struct Killed;

/// What a trainer keeps on disk; everything else is lost when it is killed.
#[derive(Clone, Debug, Default, PartialEq)]
struct Saved {
    step: Option<i64>,
    /// What each optimizer step learned from: the rows of its batch.
    weights: Vec<Vec<Value>>,
}

struct Trainer<'a> {
    app: &'a TestApp,
    policy: &'a str,
    disk: &'a mut Saved,
    /// Number of kill points left in each life.
    fuse: usize,
}

impl Trainer<'_> {
    /// A point at which the trainer may be killed.
    fn point(&mut self) -> Result<(), Killed> {
        self.fuse = self.fuse.checked_sub(1).ok_or(Killed)?;
        Ok(())
    }

    async fn call(&mut self, path: &str, body: Value) -> Result<Value, Killed> {
        self.point()?;
        let answer = self.app.post(&path.replace("{p}", self.policy), body).await;
        self.point()?;
        assert!(answer.status.is_success(), "{path}: {}", answer.json);
        Ok(answer.json)
    }

    /// One life of the trainer, until its work is done or it is killed.
    async fn live(&mut self) -> Result<(), Killed> {
        let resumed = self.call("/policies/{p}/resume", json!({"step": self.disk.step})).await?;
        let epoch = resumed["epoch"].clone();
        let mut version = resumed["version"].as_i64().expect("a number");
        let mut weights = self.disk.weights.clone();
        while weights.len() < STEPS {
            let step = weights.len() as i64 + 1;
            let request =
                json!({"policy": self.policy, "consumer": "t", "request_id": format!("{step}"), "epoch": epoch});
            let batch = self.call("/batches", request).await?;
            let gradients = self.app.samples(&batch).await;
            let ack = format!("/batches/{}/ack", text(&batch["batch_id"]));
            self.call(&ack, json!({"lease": batch["lease"], "step": step, "epoch": epoch})).await?;
            weights.push(gradients);
            if step % 2 == 0 {
                self.point()?;
                *self.disk = Saved { step: Some(step), weights: weights.clone() };
                self.call("/policies/{p}/checkpoints", json!({"step": step, "epoch": epoch})).await?;
            }
            version += 1;
            self.point()?;
            let publish = json!({"version": version, "step": step, "epoch": epoch});
            let answer = self.app.put(&format!("/policies/{}/version", self.policy), publish).await;
            assert!(answer.status.is_success(), "{}", answer.json);
            self.point()?;
        }
        Ok(())
    }
}

/// Posts the same groups to a fresh policy.
async fn prepare(app: &TestApp, policy: &str) {
    app.rules(policy, json!({"group": {"size": 2}, "batch": {"groups": GROUPS_PER_BATCH}})).await;
    for index in 0..GROUPS {
        let members = group(&format!("g{index}"), &[index as f64, 0.0]);
        let members = members.as_array().expect("a group is an array").iter().cloned();
        app.accept(members.map(|member| with(member, json!({"policy": policy}))).collect()).await;
    }
}

/// Runs a trainer whose first lives end after these numbers of points. Returns what it saved and the number of kills.
async fn run(app: &TestApp, policy: &str, lives: &[usize]) -> (Saved, usize) {
    prepare(app, policy).await;
    let mut disk = Saved::default();
    let mut kills = 0;
    for &fuse in lives.iter().chain([&usize::MAX]) {
        match (Trainer { app, policy, disk: &mut disk, fuse }).live().await {
            Ok(()) => break,
            Err(Killed) => kills += 1,
        }
    }
    (disk, kills)
}

/// The ids of the groups that the weights learned from, in order.
fn learned(saved: &Saved) -> Vec<&str> {
    let rows = saved.weights.iter().flatten();
    rows.filter(|row| text(&row["rollout_id"]).ends_with("-0")).map(|row| text(&row["group_id"])).collect()
}

async fn check(app: &TestApp, policy: &str, undisturbed: &Saved, lives: &[usize]) -> usize {
    let (saved, kills) = run(app, policy, lives).await;
    assert_eq!(learned(&saved), learned(undisturbed), "killed after {lives:?} points");
    assert!(saved == *undisturbed, "a batch came back different, killed after {lives:?} points");
    kills
}

on_both_stores! {
    async fn killing_a_trainer_neither_repeats_nor_skips_a_group(app: TestApp) {
        let (undisturbed, kills) = run(app, "undisturbed", &[]).await;
        assert_eq!((kills, undisturbed.weights.len()), (0, STEPS));
        let expected: Vec<String> = (0..GROUPS).map(|index| format!("g{index}")).collect();
        assert_eq!(learned(&undisturbed), expected);
        let mut points = 0;
        loop {
            let kills = check(app, &format!("once{points}"), &undisturbed, &[points]).await;
            if kills == 0 {
                break;
            }
            points += 1;
        }
        assert!(points > 30, "only {points} points were tried");
        for first in (1..points).step_by(5) {
            for second in (2..points).step_by(11) {
                check(app, &format!("twice{first}.{second}"), &undisturbed, &[first, second]).await;
            }
        }
    }
}
