use super::*;

fn read(text: &str) -> Result<Imported, Vec<Violation>> {
    convert(&Document { line: 1, text: text.as_bytes() }, &Options::default())
}

fn one(text: &str) -> forebay_wire::Trajectory {
    read(text).expect("the trajectory is right").trajectories.remove(0)
}

const TRAJECTORY: &str = r#"{"schema_version":"ATIF-v1.8","session_id":"s","trajectory_id":"main",
    "agent":{"name":"terminus","version":"2","model_name":"m"},
    "extra":{"reward":0.5,"group_id":"task-1","policy":"swe"},
    "steps":[
        {"step_id":1,"source":"user","message":"q"},
        {"step_id":2,"source":"agent","message":"run","reasoning_content":"hm",
         "tool_calls":[{"tool_call_id":"c1","function_name":"sh","arguments":{"cmd":"ls"}}],
         "observation":{"results":[{"source_call_id":"c1","content":"a.txt"},{"content":[{"type":"text","text":"note"}]}]},
         "metrics":{"prompt_token_ids":[1,2],"completion_token_ids":[3,4],"logprobs":[-0.1,-0.2]}},
        {"step_id":3,"source":"agent","message":"done",
         "metrics":{"prompt_token_ids":[1,2,3,4,5],"completion_token_ids":[6],"logprobs":[-0.3]}}],
    "subagent_trajectories":[{"schema_version":"ATIF-v1.8","trajectory_id":"helper",
        "agent":{"name":"helper","version":"1"},
        "steps":[{"step_id":1,"source":"agent","message":"x",
            "metrics":{"prompt_token_ids":[9],"completion_token_ids":[8],"logprobs":[-0.4]}}]}]}"#;

#[test]
fn steps_of_the_agent_are_turns_and_those_of_sub_agents_come_first() {
    let trajectory = one(TRAJECTORY);
    assert_eq!((trajectory.policy.as_deref(), trajectory.group_id.as_deref()), (Some("swe"), Some("task-1")));
    assert_eq!((trajectory.rollout_id.as_deref(), trajectory.reward), (Some("main"), Some(0.5)));
    let turns: Vec<_> = trajectory.turns.iter().map(|turn| (turn.agent.as_deref(), &turn.tokens[..])).collect();
    assert_eq!(turns, [(Some("helper"), &[8][..]), (None, &[3, 4]), (None, &[6])]);
    let messages: Value = serde_json::from_str(trajectory.messages.expect("there are messages").get()).expect("JSON");
    assert_eq!(
        messages,
        json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "run", "reasoning_content": "hm",
             "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "sh", "arguments": "{\"cmd\":\"ls\"}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
            {"role": "user", "content": [{"type": "text", "text": "note"}]},
            {"role": "assistant", "content": "done"},
        ])
    );
}

#[test]
fn an_envelope_takes_precedence_over_extra() {
    let trajectory =
        one(&format!(r#"{{"trajectory":{TRAJECTORY},"reward":1,"rollout_id":"r9","status":"truncated"}}"#));
    assert_eq!((trajectory.reward, trajectory.rollout_id.as_deref()), (Some(1.0), Some("r9")));
    assert_eq!(trajectory.group_id.as_deref(), Some("task-1"));
    let found = read(&format!(r#"{{"trajectory":{TRAJECTORY},"rewards":1}}"#)).expect_err("it is misspelt");
    assert_eq!(found[0].pointer, "/rewards");
}

#[test]
fn a_trajectory_without_an_id_has_one_of_its_content() {
    let text = TRAJECTORY.replacen("\"trajectory_id\":\"main\",", "", 1);
    let id = one(&text).rollout_id;
    assert_eq!(id, one(&text.replace('\n', " ")).rollout_id);
    let indented = text.replace("{\"cmd\":\"ls\"}", "{\n  \"cmd\": \"ls\"\n}");
    assert_eq!(id, one(&indented).rollout_id);
    assert_eq!(json::raw(&one(&indented)).get(), json::raw(&one(&text)).get(), "the same id has the same content");
    assert_eq!(id, one(&format!("{{\"trajectory\":{text}}}")).rollout_id);
    assert_ne!(id, one(&text.replace("a.txt", "b.txt")).rollout_id);
}

#[test]
fn steps_that_cannot_be_trained_are_noted() {
    let text = TRAJECTORY
        .replace("\"prompt_token_ids\":[1,2],", "")
        .replace("\"step_id\":3,", "\"step_id\":3,\"is_copied_context\":true,")
        .replace("\"message\":\"x\",", "\"message\":\"x\",\"llm_call_count\":2,");
    let imported = read(&text).expect("the trajectory is right");
    assert!(imported.trajectories[0].turns.is_empty());
    let mut notes = imported.notes;
    notes.sort_unstable();
    assert_eq!(notes, [(Note::CallWithoutPrompt, 1), (Note::AggregatedCalls, 1), (Note::CopiedContext, 1)]);
}

#[test]
fn every_version_up_to_1_8_is_read() {
    for minor in 0..=8 {
        let version = format!("ATIF-v1.{minor}");
        assert!(read(&TRAJECTORY.replace("ATIF-v1.8", &version)).is_ok(), "{version}");
    }
    for version in ["ATIF-v1.9", "ATIF-v2.0", "ATIF-v1.", "ATIF-v1.+1", "1.8", ""] {
        let found = read(&TRAJECTORY.replacen("ATIF-v1.8", version, 1)).expect_err(version);
        assert_eq!(found[0].pointer, "/schema_version");
    }
}

#[test]
fn what_is_wrong_is_refused_with_its_path() {
    let part = |part: &str| TRAJECTORY.replacen("\"message\":\"q\"", &format!("\"message\":[{part}]"), 1);
    let cases = [
        (TRAJECTORY.replace("[-0.1,-0.2]", "[-0.1]"), "/steps/1/metrics/logprobs"),
        (TRAJECTORY.replace("[-0.4]", "[-0.4,0]"), "/subagent_trajectories/0/steps/0/metrics/logprobs"),
        (TRAJECTORY.replace(",\"logprobs\":[-0.3]", ""), "/steps/2/metrics/logprobs"),
        (TRAJECTORY.replace("[1,2],", "[1,2.5],"), "/steps/1/metrics/prompt_token_ids/1"),
        (TRAJECTORY.replace("\"step_id\":3", "\"step_id\":4"), "/steps/2/step_id"),
        (TRAJECTORY.replace("\"message\":\"q\"", "\"message\":\"q\",\"model_name\":\"m\""), "/steps/0/model_name"),
        (
            TRAJECTORY.replace("\"source_call_id\":\"c1\"", "\"source_call_id\":\"c2\""),
            "/steps/1/observation/results/0/source_call_id",
        ),
        (TRAJECTORY.replace("\"trajectory_id\":\"helper\",", ""), "/subagent_trajectories/0/trajectory_id"),
        (
            TRAJECTORY.replace("\"message\":\"x\",", "\"message\":\"x\",\"llm_call_count\":0,"),
            "/subagent_trajectories/0/steps/0/metrics",
        ),
        (
            TRAJECTORY.replace("\"content\":\"a.txt\"", "\"subagent_trajectory_ref\":[{\"session_id\":\"s\"}]"),
            "/steps/1/observation/results/0/subagent_trajectory_ref/0",
        ),
        (TRAJECTORY.replace("\"reward\":0.5", "\"reward\":\"good\""), "/extra/reward"),
        (TRAJECTORY.replace("\"arguments\":{\"cmd\":\"ls\"}", "\"arguments\":[]"), "/steps/1/tool_calls/0/arguments"),
        (part(r#"{"type":"text"}"#), "/steps/0/message/0/text"),
        (
            part(r#"{"type":"image","source":{"media_type":"image/bmp","path":"a"}}"#),
            "/steps/0/message/0/source/media_type",
        ),
        (part(r#"{"type":"audio"}"#), "/steps/0/message/0/source"),
    ];
    for (text, pointer) in cases {
        let found = read(&text).expect_err(pointer);
        assert_eq!(found[0].pointer, pointer, "{found:?}");
    }
    let found = read(&TRAJECTORY.replace("\"session_id\":\"s\"", "\"session\":\"s\"")).expect_err("a field is unknown");
    assert!(found[0].detail.contains("unknown field `session`"), "{found:?}");
}

#[test]
fn an_old_version_names_sub_agents_by_session() {
    let text = TRAJECTORY
        .replace("\"content\":\"a.txt\"", "\"subagent_trajectory_ref\":[{\"session_id\":\"s\"}]")
        .replace("ATIF-v1.8", "ATIF-v1.4");
    assert!(read(&text).is_ok());
}
