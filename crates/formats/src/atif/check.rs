//! The rules of ATIF that concern several fields.

use std::collections::HashSet;

use forebay_wire::Object;

use super::schema::{Content, Part, PartType, Source, Step, SubagentRef, Trajectory};
use crate::json::Problems;

/// The newest minor version that is understood.
const MINOR_MAX: u32 = 8;

/// The first version whose references to sub-agents need an id or a path. Earlier versions name them by session.
const MINOR_OF_TRAJECTORY_IDS: u32 = 7;

/// How deep sub-agents may be nested. It bounds recursion.
const SUBAGENT_DEPTH_MAX: usize = 16;

const IMAGES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];

const AUDIO: [&str; 19] = [
    "audio/wav",
    "audio/mpeg",
    "audio/mp4",
    "audio/aac",
    "audio/ogg",
    "audio/flac",
    "audio/webm",
    "audio/aiff",
    "audio/mp3",
    "audio/mpga",
    "audio/x-mpeg",
    "audio/x-wav",
    "audio/wave",
    "audio/vnd.wave",
    "audio/x-m4a",
    "audio/m4a",
    "audio/x-aac",
    "audio/x-flac",
    "audio/x-aiff",
];

/// Checks a trajectory and those of its sub-agents.
pub(super) fn check(base: &str, trajectory: &Trajectory, problems: &mut Problems) {
    check_at(base, trajectory, 0, problems);
}

fn check_at(base: &str, trajectory: &Trajectory, depth: usize, problems: &mut Problems) {
    if depth > SUBAGENT_DEPTH_MAX {
        problems.push(base, format!("sub-agents may be nested {SUBAGENT_DEPTH_MAX} times at most"));
        return;
    }
    let minor = minor(&trajectory.schema_version);
    if minor.is_none() {
        let detail = format!("must be ATIF-v1.0 to ATIF-v1.{MINOR_MAX}, not {:?}", trajectory.schema_version);
        problems.push(format!("{base}/schema_version"), detail);
    }
    for (index, Object(step)) in trajectory.steps.iter().enumerate() {
        check_step(&format!("{base}/steps/{index}"), step, index, minor.unwrap_or(MINOR_MAX), problems);
    }
    let mut seen = HashSet::new();
    for (index, Object(sub)) in trajectory.subagent_trajectories.iter().flatten().enumerate() {
        let at = format!("{base}/subagent_trajectories/{index}");
        match &sub.trajectory_id {
            None => problems.push(format!("{at}/trajectory_id"), "is needed in an embedded trajectory"),
            Some(id) if !seen.insert(id) => {
                problems.push(format!("{at}/trajectory_id"), format!("is also the id of another trajectory: {id:?}"));
            }
            Some(_) => {}
        }
        check_at(&at, sub, depth + 1, problems);
    }
}

/// The minor version, if the version is understood.
fn minor(version: &str) -> Option<u32> {
    let minor = version.strip_prefix("ATIF-v1.")?;
    let number: u32 = minor.parse().ok()?;
    (minor.bytes().all(|byte| byte.is_ascii_digit()) && number <= MINOR_MAX).then_some(number)
}

fn check_step(at: &str, step: &Step, index: usize, minor: u32, problems: &mut Problems) {
    if usize::try_from(step.step_id).ok() != Some(index + 1) {
        problems.push(format!("{at}/step_id"), format!("must be {}: steps are counted from 1", index + 1));
    }
    if step.source != Source::Agent {
        let of_agent = [
            ("model_name", step.model_name.is_some()),
            ("reasoning_effort", step.reasoning_effort.is_some()),
            ("reasoning_content", step.reasoning_content.is_some()),
            ("tool_calls", step.tool_calls.is_some()),
            ("metrics", step.metrics.is_some()),
        ];
        for (name, _) in of_agent.iter().filter(|(_, is_there)| *is_there) {
            problems.push(format!("{at}/{name}"), "is only allowed in a step of the agent");
        }
    }
    if step.llm_call_count.is_some_and(|count| count < 0) {
        problems.push(format!("{at}/llm_call_count"), "must be 0 or above");
    }
    if step.source == Source::Agent && step.llm_call_count == Some(0) {
        let detail = "must be absent where `llm_call_count` is 0";
        problems.require(step.metrics.is_none(), &format!("{at}/metrics"), detail);
        problems.require(step.reasoning_content.is_none(), &format!("{at}/reasoning_content"), detail);
    }
    check_content(&format!("{at}/message"), &step.message, problems);
    check_observation(at, step, minor, problems);
}

fn check_observation(at: &str, step: &Step, minor: u32, problems: &mut Problems) {
    let Some(Object(observation)) = &step.observation else { return };
    let calls = step.tool_calls.as_ref();
    let calls: Option<HashSet<&str>> =
        calls.map(|calls| calls.iter().map(|Object(call)| call.tool_call_id.as_str()).collect());
    for (index, Object(result)) in observation.results.iter().enumerate() {
        let at = format!("{at}/observation/results/{index}");
        if let (Some(id), Some(calls)) = (&result.source_call_id, &calls)
            && !calls.contains(id.as_str())
        {
            problems.push(format!("{at}/source_call_id"), format!("is the id of no tool call of this step: {id:?}"));
        }
        if let Some(content) = &result.content {
            check_content(&format!("{at}/content"), content, problems);
        }
        for (number, Object(reference)) in result.subagent_trajectory_ref.iter().flatten().enumerate() {
            let SubagentRef { trajectory_id, trajectory_path, session_id, .. } = reference;
            let by_session = minor < MINOR_OF_TRAJECTORY_IDS && session_id.is_some();
            let detail = "must have a `trajectory_id` or a `trajectory_path`";
            let holds = trajectory_id.is_some() || trajectory_path.is_some() || by_session;
            problems.require(holds, &format!("{at}/subagent_trajectory_ref/{number}"), detail);
        }
    }
}

fn check_content(at: &str, content: &Content, problems: &mut Problems) {
    let Content::Parts(parts) = content else { return };
    for (index, part) in parts.iter().enumerate() {
        check_part(&format!("{at}/{index}"), part, problems);
    }
}

fn check_part(at: &str, part: &Part, problems: &mut Problems) {
    let is_text = part.r#type == PartType::Text;
    if part.text.is_some() != is_text {
        problems.push(format!("{at}/text"), if is_text { "is missing" } else { "is only allowed in a part of text" });
    }
    if part.source.is_some() == is_text {
        problems.push(format!("{at}/source"), if is_text { "is not allowed in a part of text" } else { "is missing" });
    }
    let Some(source) = part.source.as_ref().filter(|_| !is_text) else { return };
    let media = source.media_type.trim().to_ascii_lowercase();
    let is_known = match part.r#type {
        PartType::Audio => AUDIO.contains(&media.as_str()),
        _ => IMAGES.contains(&source.media_type.as_str()),
    };
    problems.require(is_known, &format!("{at}/source/media_type"), "is no media type that ATIF allows in this part");
    if let Some(duration) = source.duration_sec {
        let is_right = part.r#type == PartType::Audio && duration >= 0.0;
        problems.require(is_right, &format!("{at}/source/duration_sec"), "must be 0 or above, in a part of audio");
    }
}
