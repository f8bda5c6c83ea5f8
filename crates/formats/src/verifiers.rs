//! Traces of verifiers v1: a graph of messages per trace, each with the tokens that it adds. A path from a root to a leaf
//! is a branch, and each branch becomes a segment.
//!
//! A line is an episode with its traces, or one trace. A node that several branches share is trained in the first of
//! them; in the others it is part of the prompt.

mod branches;

use std::collections::BTreeMap;

use forebay_wire::{Components, Sampling, Status, Violation};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use crate::{
    format::{Document, Format, Imported, Layout, Note, each},
    ids::digest_id,
    json::{self, Problems},
    labels::{Id, Labels, sampling},
    options::Options,
    tools,
};

pub(crate) const FORMAT: Format = Format {
    name: "verifiers",
    about: "episodes or traces of verifiers v1, one per line",
    layout: Layout::Lines,
    reader: |options| each(options, convert),
};

/// The newest version of the trace schema that is understood.
const TRACE_VERSION: u64 = 1;

/// What a result of verifiers v0 is told. It has texts in `prompt` and `completion`, and no token ids.
const OF_V0: &str = "is a result of verifiers v0, which has no token ids: save traces with verifiers v1, or write the \
                     texts as `messages` and import them with the format `chat`";

/// What `{agent}` in the name of a policy stands for.
const AGENT: &str = "{agent}";

/// The most traces of an episode, which become rollouts before any of them is stored.
const TRACES_MAX: usize = 4_096;

/// Reasons to stop that cut a rollout short.
const CUT_SHORT: [&str; 5] =
    ["max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length"];

#[derive(Default, Deserialize)]
#[serde(default)]
struct Episode {
    id: Option<String>,
    env: Option<Environment>,
    group: Option<Group>,
    run: Option<Run>,
    traces: Vec<Box<RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Environment {
    id: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
struct Group {
    id: Id,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Run {
    work: Option<Work>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Work {
    policy: Option<PolicySpan>,
}

#[derive(Deserialize)]
struct PolicySpan {
    start: i64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Trace {
    version: Option<u64>,
    id: Option<String>,
    task: Option<Task>,
    agent: Option<Agent>,
    tools: Option<Box<RawValue>>,
    nodes: Vec<Node>,
    calls: Option<Vec<Call>>,
    rewards: Option<BTreeMap<String, Option<Reward>>>,
    metrics: Option<BTreeMap<String, Option<f64>>>,
    ok: Option<bool>,
    stop_condition: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Task {
    r#type: Option<String>,
    key: Option<String>,
    hash: Option<String>,
}

#[derive(Deserialize)]
struct Agent {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    trainable: Option<bool>,
    #[serde(default)]
    config: Option<AgentConfig>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AgentConfig {
    sampling: Option<CallSampling>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Node {
    parent: Option<usize>,
    message: Option<Box<RawValue>>,
    token_ids: Vec<i32>,
    mask: Vec<bool>,
    logprobs: Vec<f32>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Call {
    sampling: Option<CallSampling>,
    finish_reason: Option<String>,
    error: Option<Box<RawValue>>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct CallSampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
}

#[derive(Deserialize)]
struct Reward {
    score: f64,
    #[serde(default)]
    weight: Option<f64>,
}

fn convert(document: &Document<'_>, options: &Options) -> Result<Imported, Vec<Violation>> {
    let mut imported = Imported::default();
    let text = json::characters(document.text, &mut imported)?;
    let fields = json::fields(text.as_bytes())?;
    let record: &RawValue = json::whole(text.as_bytes())?;
    if !fields.contains_key("traces") {
        if !fields.contains_key("nodes") && fields.contains_key("completion") {
            return Err(vec![json::violation("/completion", OF_V0)]);
        }
        let source = Source { base: String::new(), record, id: digest_id(FORMAT.name, document.text) };
        trace(&source, Labels::default(), options, &mut imported)?;
        return Ok(imported);
    }
    let episode: Episode = json::parse("", record.get()).map_err(|violation| vec![violation])?;
    if episode.traces.len() > TRACES_MAX {
        let detail = format!("has {} traces, and an episode may have {TRACES_MAX}", episode.traces.len());
        return Err(vec![json::violation("/traces", detail)]);
    }
    // Once for all traces: the work for a digest of each would grow with the square of the document.
    let of_document = digest_id(FORMAT.name, document.text);
    for (index, text) in episode.traces.iter().enumerate() {
        let id = format!("{of_document}-{index}");
        let source = Source { base: format!("/traces/{index}"), record: text, id };
        trace(&source, episode.labels(), options, &mut imported)?;
    }
    Ok(imported)
}

/// The text of a trace.
struct Source<'d> {
    /// Its place in the document.
    base: String,
    record: &'d RawValue,
    /// Its id if it names none.
    id: String,
}

fn trace(
    source: &Source<'_>,
    of_episode: Labels,
    options: &Options,
    imported: &mut Imported,
) -> Result<(), Vec<Violation>> {
    let base = &source.base;
    let trace: Trace = json::parse(base, source.record.get()).map_err(|violation| vec![violation])?;
    let mut problems = Problems::default();
    if trace.version.is_some_and(|version| version > TRACE_VERSION) {
        problems
            .push(format!("{base}/version"), format!("is newer than {TRACE_VERSION}, the newest that is understood"));
    }
    if trace.agent.as_ref().is_some_and(|agent| agent.trainable == Some(false)) {
        imported.note(Note::NotTrainable, 1);
        return problems.or(());
    }
    let mut given = Labels::of_options(options, source.record, &mut problems);
    let agent = trace.agent.as_ref().and_then(|agent| agent.name.as_deref());
    given.policy = given.policy.map(|policy| policy.replace(AGENT, agent.unwrap_or("agent")));
    // The bound holds for all traces of an episode together, because they are held together.
    let segments = imported.trajectories.iter().flat_map(|trajectory| &trajectory.segments);
    let held: usize = segments.map(|segment| segment.tokens.len()).sum();
    let branches = branches::read(base, &trace.nodes, options.tokens_max.saturating_sub(held), &mut problems);
    problems.or(())?;
    let labels = given.or(of_episode).or(trace.labels());
    let mut trajectory = labels.trajectory(options, || source.id.clone());
    trajectory.segments = branches.segments;
    trajectory.messages = (!branches.messages.is_empty()).then(|| json::raw(&branches.messages));
    trajectory.metadata = Some(json::raw(&trace.metadata(agent)));
    tools::add(&mut trajectory.metadata, trace.tools.as_deref(), imported);
    imported.trajectories.push(trajectory);
    Ok(())
}

impl Episode {
    fn labels(&self) -> Labels {
        let name = |env: &Environment| env.name.clone().or_else(|| env.id.clone()).filter(|name| !name.is_empty());
        let span = self.run.as_ref().and_then(|run| run.work.as_ref()?.policy.as_ref());
        Labels {
            group_id: self.group.as_ref().map(|group| group.id.as_str().to_owned()),
            execution_id: self.id.clone(),
            environment: self.env.as_ref().and_then(name),
            policy_version: span.map(|span| span.start),
            ..Labels::default()
        }
    }
}

impl Trace {
    fn labels(&self) -> Labels {
        let rewards =
            || self.rewards.iter().flatten().filter_map(|(name, reward)| Some((name, reward.as_ref()?.value())));
        let task = self.task.as_ref();
        Labels {
            rollout_id: self.id.clone(),
            group_id: task.and_then(|task| task.key.clone().or_else(|| task.hash.clone())),
            status: Some(self.status()),
            // Without a single score, the trace was never scored. A sum of nothing is no reward.
            reward: rewards().map(|(_, value)| value).reduce(|sum, value| sum + value),
            reward_components: Some(Components(rewards().map(|(name, value)| (name.clone(), value)).collect())),
            sampling: Some(self.sampling()),
            ..Labels::default()
        }
    }

    fn status(&self) -> Status {
        let last = self.calls.iter().flatten().rfind(|call| call.error.is_none());
        let is_cut = self.stop_condition.as_deref().is_some_and(|reason| CUT_SHORT.contains(&reason))
            || last.is_some_and(|call| call.finish_reason.as_deref() == Some("length"));
        match (self.ok, is_cut) {
            (Some(false), _) => Status::Failed,
            (_, true) => Status::Truncated,
            _ => Status::Completed,
        }
    }

    /// How tokens were sampled: as the first call says, or else the configuration of the agent.
    fn sampling(&self) -> Sampling {
        let of_call = self.calls.iter().flatten().find_map(|call| call.sampling);
        let of_agent = || self.agent.as_ref()?.config.as_ref()?.sampling;
        let said = of_call.or_else(of_agent).unwrap_or_default();
        sampling(said.temperature, said.top_p, None)
    }

    fn metadata(&self, agent: Option<&str>) -> Value {
        json!({
            "source": {"format": FORMAT.name, "agent": agent, "task_type": self.task.as_ref().and_then(|task| task.r#type.clone())},
            "stop_condition": self.stop_condition,
            "metrics": self.metrics,
        })
    }
}

impl Reward {
    fn value(&self) -> f64 {
        self.score * self.weight.unwrap_or(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_with(text: &str, options: &Options) -> Result<Imported, Vec<Violation>> {
        convert(&Document { line: 1, text: text.as_bytes() }, options)
    }

    fn read(text: &str) -> Result<Imported, Vec<Violation>> {
        read_with(text, &Options::default())
    }

    const TRACE: &str = r#"{"version":1,"id":"t1","tools":[{"name":"sh"}],"task":{"type":"T","key":"task-3"},"ok":true,
        "agent":{"name":"solver","trainable":true,"config":{"sampling":{"temperature":0.5}}},
        "rewards":{"right":{"score":1.0,"weight":2.0},"short":{"score":0.5},"never":null},
        "nodes":[
            {"message":{"role":"user","content":"q"},"token_ids":[1,2],"mask":[false,false]},
            {"parent":0,"message":{"role":"assistant","content":"a"},"token_ids":[3,4,5],"mask":[false,true,true],"logprobs":[-0.1,-0.2]},
            {"parent":1,"message":{"role":"user","content":"r"},"token_ids":[6],"mask":[false]},
            {"parent":2,"message":{"role":"assistant","content":"b"},"token_ids":[7],"mask":[true],"logprobs":[-0.3]},
            {"parent":1,"message":{"role":"assistant","content":"c"},"token_ids":[8,9],"mask":[true,true],"logprobs":[-0.4,-0.5]}]}"#;

    #[test]
    fn a_branch_is_a_segment_and_a_shared_node_is_trained_once() {
        let imported = read(TRACE).expect("the trace is right");
        let trajectory = &imported.trajectories[0];
        assert_eq!((trajectory.rollout_id.as_deref(), trajectory.group_id.as_deref()), (Some("t1"), Some("task-3")));
        assert_eq!(trajectory.reward, Some(2.5));
        assert_eq!(trajectory.reward_components.len(), 2);
        assert!(trajectory.metadata.as_ref().is_some_and(|it| it.get().contains(r#""tools":[{"name":"sh"}]"#)));
        let parts: Vec<(&[i32], &[u8], &[f32])> = trajectory
            .segments
            .iter()
            .map(|segment| {
                let logprobs = segment.logprobs.as_deref().expect("every node has them");
                (segment.tokens.as_slice(), segment.loss_mask.as_slice(), logprobs)
            })
            .collect();
        assert_eq!(
            parts,
            [
                (&[1, 2, 3, 4, 5, 6, 7][..], &[1, 1, 0, 1][..], &[-0.1, -0.2, 0.0, -0.3][..]),
                (&[1, 2, 3, 4, 5, 8, 9], &[1, 1], &[-0.4, -0.5]),
            ]
        );
        assert_eq!(trajectory.messages.as_ref().expect("the last branch").get().matches("role").count(), 3);
    }

    #[test]
    fn traces_of_an_episode_are_rollouts_of_one_execution() {
        let frozen = TRACE.replace("\"trainable\":true", "\"trainable\":false").replace("t1", "t2");
        let episode = format!(
            r#"{{"id":"e1","env":{{"id":"swe"}},"group":{{"id":"g7"}},"task":{{"type":"T"}},
                "run":{{"type":"train","id":"r","work":{{"type":"train","step":4,"policy":{{"start":3,"end":4}}}}}},
                "traces":[{TRACE},{frozen}]}}"#
        );
        let options = Options { policy: Some("math.{agent}".to_owned()), ..Options::default() };
        let imported = read_with(&episode, &options).expect("the episode is right");
        let [trajectory] = &imported.trajectories[..] else { panic!("one trace is trainable") };
        assert_eq!(imported.notes, [(Note::NotTrainable, 1)]);
        assert_eq!(trajectory.policy.as_deref(), Some("math.solver"));
        assert_eq!(trajectory.group_id.as_deref(), Some("g7"));
        assert_eq!(trajectory.execution_id.as_deref(), Some("e1"));
        assert_eq!((trajectory.environment.as_deref(), trajectory.policy_version), (Some("swe"), Some(3)));
    }

    #[test]
    fn a_trace_that_was_not_scored_has_no_reward() {
        let text = TRACE.replace("{\"score\":1.0,\"weight\":2.0}", "null").replace("{\"score\":0.5}", "null");
        assert_eq!(read(&text).expect("it is right").trajectories[0].reward, None);
    }

    #[test]
    fn what_is_wrong_is_refused_with_its_path() {
        let cases = [
            (TRACE.replace("[-0.4,-0.5]", "[-0.4]"), "/nodes/4/logprobs"),
            (TRACE.replace("[-0.4,-0.5]", "[]"), "/nodes/4/logprobs"),
            (TRACE.replace("\"mask\":[true,true]", "\"mask\":[true]"), "/nodes/4/mask"),
            (TRACE.replace("\"parent\":2", "\"parent\":3"), "/nodes/3/parent"),
            (TRACE.replace("\"version\":1", "\"version\":2"), "/version"),
            (TRACE.replace("[8,9]", "[8,\"x\"]"), "/nodes/4/token_ids/1"),
            (TRACE.replace("{\"score\":0.5}", "{\"score\":\"x\"}"), "/rewards/short/score"),
        ];
        for (text, pointer) in cases {
            let found = read(&text).expect_err(pointer);
            assert_eq!(found[0].pointer, pointer, "{found:?}");
        }
        let v0 = r#"{"example_id":0,"prompt":[],"completion":[{"role":"assistant","content":"a"}],"reward":1.0}"#;
        let found = read(v0).expect_err("it has no tokens");
        assert!(found[0].pointer == "/completion" && found[0].detail.contains("verifiers v0"), "{found:?}");
        let episode = format!("{{\"traces\":[{}]}}", TRACE.replace("[-0.4,-0.5]", "[-0.4]"));
        assert_eq!(read(&episode).expect_err("a trace is wrong")[0].pointer, "/traces/0/nodes/4/logprobs");
    }

    #[test]
    fn branches_are_bounded_in_sum() {
        let options = Options { tokens_max: 13, ..Options::default() };
        let found = read_with(TRACE, &options).expect_err("the branches have 14 tokens");
        assert_eq!(found[0].pointer, "/nodes");
        let options = Options { tokens_max: 27, ..Options::default() };
        assert!(read_with(TRACE, &options).is_ok());
        let episode = format!("{{\"traces\":[{TRACE},{TRACE}]}}");
        let found = read_with(&episode, &options).expect_err("the traces have 28 tokens together");
        assert_eq!(found[0].pointer, "/traces/1/nodes");
    }
}
