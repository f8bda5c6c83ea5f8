//! Steps of the agent as turns.
//!
//! Turns of sub-agents come before those of the trajectory that has them, so that its own last call ends the rollout.

use forebay_wire::{Object, Turn};

use super::schema::{Metrics, Source, Step, Trajectory};
use crate::{
    format::{Imported, Note},
    json::Problems,
    turns::shorten,
};

/// The turns of a trajectory and of its sub-agents. The name of a sub-agent is the id of its trajectory.
pub(super) fn read(base: &str, trajectory: &Trajectory, imported: &mut Imported, problems: &mut Problems) -> Vec<Turn> {
    let mut turns = Turns { read: Vec::new(), places: Vec::new(), imported, problems };
    turns.add(base, trajectory, None);
    turns.check_logprobs();
    let mut read = turns.read;
    shorten(&mut read);
    read
}

struct Turns<'r> {
    read: Vec<Turn>,
    /// The place of the metrics of each turn.
    places: Vec<String>,
    imported: &'r mut Imported,
    problems: &'r mut Problems,
}

impl Turns<'_> {
    fn add(&mut self, base: &str, trajectory: &Trajectory, agent: Option<&str>) {
        for (index, Object(sub)) in trajectory.subagent_trajectories.iter().flatten().enumerate() {
            let name = sub.trajectory_id.as_deref();
            self.add(&format!("{base}/subagent_trajectories/{index}"), sub, name);
        }
        for (index, Object(step)) in trajectory.steps.iter().enumerate() {
            if let Some(Object(metrics)) = &step.metrics {
                self.add_step(&format!("{base}/steps/{index}/metrics"), step, metrics, agent);
            }
        }
    }

    fn add_step(&mut self, at: &str, step: &Step, metrics: &Metrics, agent: Option<&str>) {
        let tokens = metrics.completion_token_ids.as_deref().unwrap_or_default();
        if let Some(logprobs) = &metrics.logprobs
            && metrics.completion_token_ids.is_some()
            && logprobs.len() != tokens.len()
        {
            let detail = format!("has {} entries for {} tokens", logprobs.len(), tokens.len());
            self.problems.push(format!("{at}/logprobs"), detail);
        }
        if step.source != Source::Agent || tokens.is_empty() {
            return;
        }
        let prompt = metrics.prompt_token_ids.as_deref().unwrap_or_default();
        let why_not = if step.is_copied_context == Some(true) {
            Some(Note::CopiedContext)
        } else if step.llm_call_count.is_some_and(|count| count > 1) {
            Some(Note::AggregatedCalls)
        } else if prompt.is_empty() {
            Some(Note::CallWithoutPrompt)
        } else {
            None
        };
        if let Some(note) = why_not {
            self.imported.note(note, 1);
            return;
        }
        self.places.push(at.to_owned());
        self.read.push(Turn {
            prompt_tokens: prompt.to_vec(),
            tokens: tokens.to_vec(),
            logprobs: metrics.logprobs.clone(),
            agent: agent.map(str::to_owned),
            ..Turn::default()
        });
    }

    /// Either all turns have log-probabilities or none.
    fn check_logprobs(&mut self) {
        if self.read.iter().all(|turn| turn.logprobs.is_none()) {
            return;
        }
        for (turn, at) in self.read.iter().zip(&self.places) {
            let detail = "is needed, because other steps have it";
            self.problems.require(turn.logprobs.is_some(), &format!("{at}/logprobs"), detail);
        }
    }
}
