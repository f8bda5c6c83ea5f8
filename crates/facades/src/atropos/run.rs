//! What Atropos' server remembers besides data: the trainer's registration, the environments, and how far it has read.
//!
//! The original keeps this in memory. Here it is one document in the database, which is changed by compare-and-set, so
//! that a restart continues the run and several replicas serve the same one. The functions are pure. The document is
//! bounded by [`ENVIRONMENTS_MAX`] and by the bounds of the registrations.

use forebay_domain::batch::{PackedEnvironment, Packing};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::atropos::wire::{RegisterEnv, Registration, SEQUENCES_MAX};

/// The most environments of a run. Each restart of an environment registers one more.
pub(super) const ENVIRONMENTS_MAX: usize = 4_096;

/// The smallest weight that an environment is told.
const WEIGHT_MIN: f64 = 0.01;

/// The state of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Run {
    /// The registration of the trainer that came last.
    pub(super) trainer: Option<Registration>,
    /// Whether a trainer has asked for a batch. Before that, environments have to wait.
    pub(super) started: bool,
    /// The step that environments are told: the starting step and the batches that were given out.
    pub(super) step: i64,
    /// The environments, in the order of their ids.
    pub(super) environments: Vec<Environment>,
}

/// A registered environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Environment {
    /// The name that it asked for.
    pub(super) name: String,
    /// How many environments with this name had registered before it.
    pub(super) number: usize,
    /// Its share of the inference, before it is divided by the sum of all.
    pub(super) weight: f64,
    /// The length of its longest sequences.
    pub(super) max_token_length: i64,
    /// The number of sequences of its groups.
    pub(super) group_size: u32,
    /// The share of each batch that is reserved for it.
    pub(super) min_batch_allocation: Option<f64>,
    /// Whether it is connected.
    pub(super) connected: bool,
}

impl Environment {
    /// The name with the number, which is the label of its rollouts. No two environments have the same label.
    pub(super) fn label(&self) -> String {
        format!("{}_{}", self.name, self.number)
    }

    fn demand(&self) -> f64 {
        self.max_token_length as f64 * self.weight
    }
}

/// What is ready for a batch, by environment and size.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Queued {
    /// The label of the environment.
    pub(super) environment: Option<String>,
    /// The number of sequences of a group.
    pub(super) sequences: u64,
    /// The number of such groups.
    pub(super) groups: u64,
}

/// There are as many environments as a run may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooManyEnvironments;

impl Run {
    /// A trainer registers. The environments stay; the step continues, or begins where the trainer says if that is
    /// later.
    pub(super) fn register(&mut self, trainer: Registration) {
        let first = self.trainer.is_none();
        self.step = if first { trainer.starting_step } else { self.step.max(trainer.starting_step) };
        self.trainer = Some(trainer);
    }

    /// An environment registers; returns its answer.
    pub(super) fn register_environment(&mut self, asked: RegisterEnv) -> Result<Value, TooManyEnvironments> {
        let Some(trainer) = self.trainer.as_ref().filter(|_| self.started) else {
            return Ok(json!({"status": "wait for trainer to start"}));
        };
        if self.environments.len() >= ENVIRONMENTS_MAX {
            return Err(TooManyEnvironments);
        }
        let number = self.environments.iter().filter(|other| other.name == asked.desired_name).count();
        let environment = Environment {
            name: asked.desired_name,
            number,
            weight: asked.weight,
            max_token_length: asked.max_token_length,
            group_size: u32::try_from(asked.group_size).unwrap_or(u32::MAX),
            min_batch_allocation: asked.min_batch_allocation,
            connected: true,
        };
        let answer = json!({
            "status": "success",
            "env_id": self.environments.len(),
            "wandb_name": environment.label(),
            "checkpoint_dir": trainer.checkpoint_dir,
            "starting_step": self.step,
            "checkpoint_interval": trainer.save_checkpoint_interval,
            "num_steps": trainer.num_steps,
        });
        self.environments.push(environment);
        Ok(answer)
    }

    pub(super) fn environment(&self, env_id: i64) -> Option<&Environment> {
        self.environments.get(usize::try_from(env_id).ok()?)
    }

    /// An environment leaves. None if there is no such environment.
    pub(super) fn disconnect(&mut self, env_id: i64) -> Option<()> {
        self.environments.get_mut(usize::try_from(env_id).ok()?)?.connected = false;
        Some(())
    }

    /// `GET /wandb_info`.
    pub(super) fn wandb_info(&self) -> Value {
        let trainer = self.trainer.as_ref();
        json!({
            "group": trainer.map(|trainer| &trainer.wandb_group),
            "project": trainer.map(|trainer| &trainer.wandb_project),
        })
    }

    /// `GET /info`.
    pub(super) fn info(&self) -> Value {
        let numbers = self.trainer.as_ref().map(|trainer| (trainer.batch_size, trainer.max_token_len));
        let (batch_size, max_token_len) = numbers.unwrap_or((-1, -1));
        json!({"batch_size": batch_size, "max_token_len": max_token_len})
    }

    /// How the next batch is selected: connected environments get their shares, and their groups of other sizes are held
    /// until they add up. If an environment has disconnected, nothing will complete its groups, so they are not held.
    pub(super) fn packing(&self) -> Packing {
        let of = |environment: &Environment| {
            let packed = PackedEnvironment {
                group_size: Some(environment.group_size),
                min_share: environment.min_batch_allocation.unwrap_or(0.0),
            };
            (environment.label(), packed)
        };
        // Before a trainer has registered, groups are only held.
        let batch_size = self.trainer.as_ref().and_then(|trainer| u32::try_from(trainer.batch_size).ok());
        Packing {
            samples: batch_size.unwrap_or(SEQUENCES_MAX as u32),
            environments: self.environments.iter().filter(|environment| environment.connected).map(of).collect(),
        }
    }

    /// Connected environments that have a share of each batch, with the share.
    pub(super) fn allocations(&self) -> impl Iterator<Item = (&Environment, f64)> {
        let connected = self.environments.iter().filter(|environment| environment.connected);
        connected.filter_map(|environment| Some((environment, environment.min_batch_allocation?)))
    }

    /// `GET /status`.
    pub(super) fn status(&self, queue: &[Queued]) -> Value {
        json!({"current_step": self.step, "queue_size": queue.iter().map(|queued| queued.groups).sum::<u64>()})
    }

    /// `GET /status-env` for an environment, with the numbers of the original.
    pub(super) fn status_of(&self, environment: &Environment, queue: &[Queued]) -> Value {
        let own = environment.label();
        let is_own = |queued: &&Queued| queued.environment.as_ref() == Some(&own);
        let largest = queue.iter().map(|queued| queued.sequences).max().unwrap_or(1).max(1);
        let own_largest = queue.iter().filter(is_own).map(|queued| queued.sequences).max().unwrap_or(0);
        let group_size = u64::from(environment.group_size).max(own_largest);
        let own_sequences: u64 = queue.iter().filter(is_own).map(|queued| queued.sequences * queued.groups).sum();
        let from_others = if largest > 1 { self.available_from_others(&own, queue, largest) } else { 0 };
        let reserved: f64 = self.allocations().map(|(_, share)| share).sum();
        json!({
            "current_step": self.step,
            "queue_size": (own_sequences + from_others) / group_size,
            "unallocated_fraction": 1.0 - reserved.min(1.0),
            "self_queue_size": own_sequences / group_size,
            "max_group_size": largest,
            "env_weight": self.weight_of(environment),
        })
    }

    /// Sequences of other environments above what is reserved for them, in packs of the largest group.
    fn available_from_others(&self, own: &str, queue: &[Queued], largest: u64) -> u64 {
        let mut sequences: std::collections::BTreeMap<Option<&str>, u64> = std::collections::BTreeMap::new();
        for queued in queue.iter().filter(|queued| queued.environment.as_deref() != Some(own)) {
            *sequences.entry(queued.environment.as_deref()).or_default() += queued.sequences * queued.groups;
        }
        let batch_size = self.trainer.as_ref().map_or(0, |trainer| trainer.batch_size);
        let reserved = |label: Option<&str>| {
            let share = self.allocations().find(|(other, _)| Some(other.label().as_str()) == label);
            share.map_or(0, |(_, share)| (batch_size as f64 * share) as u64)
        };
        let packed =
            |(label, count): (Option<&str>, u64)| (count.div_ceil(largest) * largest).saturating_sub(reserved(label));
        sequences.into_iter().map(packed).sum()
    }

    /// The part of the inference that an environment may use.
    fn weight_of(&self, environment: &Environment) -> f64 {
        let connected = self.environments.iter().filter(|other| other.connected);
        let total: f64 = connected.map(|other| other.demand().max(0.0)).sum();
        let share = environment.demand() / total;
        // Without any demand the original divides by zero.
        if share.is_finite() { share.max(WEIGHT_MIN) } else { WEIGHT_MIN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trainer(batch_size: i64) -> Registration {
        Registration {
            wandb_group: "g".to_owned(),
            wandb_project: "p".to_owned(),
            batch_size,
            max_token_len: 512,
            checkpoint_dir: "/c".to_owned(),
            save_checkpoint_interval: 5,
            starting_step: 3,
            num_steps: 100,
        }
    }

    fn asked(name: &str, weight: f64, share: Option<f64>) -> RegisterEnv {
        RegisterEnv {
            max_token_length: 100,
            desired_name: name.to_owned(),
            weight,
            group_size: 4,
            min_batch_allocation: share,
        }
    }

    fn run() -> Run {
        let mut run = Run::default();
        run.register(trainer(16));
        run.started = true;
        run
    }

    fn queued(environment: Option<&str>, sequences: u64, groups: u64) -> Queued {
        Queued { environment: environment.map(str::to_owned), sequences, groups }
    }

    #[test]
    fn environments_wait_for_the_first_batch_and_are_numbered_by_name() {
        let mut run = Run::default();
        run.register(trainer(16));
        let waiting = json!({"status": "wait for trainer to start"});
        assert_eq!(run.register_environment(asked("math", 1.0, None)), Ok(waiting));
        run.started = true;
        let mut register = |name: &str| {
            let answer = run.register_environment(asked(name, 1.0, None)).expect("there is room");
            (answer["env_id"].clone(), answer["wandb_name"].clone(), answer["starting_step"].clone())
        };
        assert_eq!(register("math"), (json!(0), json!("math_0"), json!(3)));
        assert_eq!(register("code"), (json!(1), json!("code_0"), json!(3)));
        assert_eq!(register("math"), (json!(2), json!("math_1"), json!(3)));
    }

    #[test]
    fn a_second_trainer_keeps_environments_and_the_step() {
        let mut run = run();
        run.register_environment(asked("math", 1.0, None)).expect("there is room");
        run.step = 9;
        run.register(trainer(8));
        assert_eq!((run.step, run.environments.len(), run.started), (9, 1, true));
        assert_eq!(run.info(), json!({"batch_size": 8, "max_token_len": 512}));
        run.register(Registration { starting_step: 20, ..trainer(8) });
        assert_eq!(run.step, 20);
    }

    #[test]
    fn before_a_trainer_registers_there_is_no_information() {
        assert_eq!(Run::default().info(), json!({"batch_size": -1, "max_token_len": -1}));
        assert_eq!(Run::default().wandb_info(), json!({"group": null, "project": null}));
    }

    #[test]
    fn groups_are_packed_by_the_sizes_and_shares_of_connected_environments() {
        let mut run = run();
        for share in [Some(0.25), Some(0.5)] {
            run.register_environment(asked("a", 1.0, share)).expect("there is room");
        }
        run.disconnect(1);
        let packing = run.packing();
        assert_eq!(packing.samples, 16);
        let of = |label: &str| packing.environments.get(label).copied();
        assert_eq!(of("a_0"), Some(PackedEnvironment { group_size: Some(4), min_share: 0.25 }));
        assert_eq!(of("a_1"), None);
        assert_eq!(Run::default().packing().samples, SEQUENCES_MAX as u32);
    }

    #[test]
    fn weights_are_shares_of_the_connected_environments() {
        let mut run = run();
        for weight in [3.0, 1.0, 0.0] {
            run.register_environment(asked("e", weight, None)).expect("there is room");
        }
        let weight = |run: &Run, id: i64| run.weight_of(run.environment(id).expect("it is registered")).to_string();
        assert_eq!([0, 1, 2].map(|id| weight(&run, id)), ["0.75", "0.25", "0.01"]);
        assert_eq!(run.disconnect(0), Some(()));
        assert_eq!([weight(&run, 1), weight(&run, 2)], ["1", "0.01"]);
        assert_eq!((run.disconnect(1), run.disconnect(2)), (Some(()), Some(())));
        assert_eq!(weight(&run, 2), "0.01", "no environment is connected");
        assert_eq!((run.disconnect(3), run.disconnect(-1)), (None, None));
    }

    #[test]
    fn the_status_of_an_environment_has_the_numbers_of_the_original() {
        let mut run = run();
        run.register_environment(asked("a", 1.0, Some(0.25))).expect("there is room");
        run.register_environment(asked("b", 1.0, Some(0.5))).expect("there is room");
        let queue = [queued(Some("a_0"), 4, 3), queued(Some("b_0"), 8, 2), queued(None, 2, 1)];
        let status = |id: i64| run.status_of(run.environment(id).expect("it is registered"), &queue);
        // Of b, 16 sequences are in two packs of 8 and 8 are reserved; the sequences without an environment are one pack.
        assert_eq!(status(0)["queue_size"], json!((12 + 8 + 8) / 4));
        assert_eq!(status(0)["self_queue_size"], json!(3));
        assert_eq!(status(0)["max_group_size"], json!(8));
        assert_eq!(status(0)["unallocated_fraction"], json!(0.25));
        // Of a, 12 sequences are in two packs of 8, and 4 are reserved. The group size of b is that of its groups.
        assert_eq!(status(1)["queue_size"], json!((16 + 12 + 8) / 8));
        assert_eq!(run.status(&queue), json!({"current_step": 3, "queue_size": 6}));
    }
}
