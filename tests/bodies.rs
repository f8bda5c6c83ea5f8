//! What a body takes in memory, measured with an allocator that counts, for bodies of any shape: posts, imports, facades and
//! control calls. The calls of agents are measured in the crate of the gateway.
//!
//! This is a program of its own with one test, because the allocator counts what the whole process does.

use std::{alloc::System, fmt::Write as _, io::Cursor};

use forebay_api::parsers as api;
use forebay_domain::{
    ingest::new_rollout::NewRollout,
    surrogates::LoneSurrogates,
    trajectory::{Trajectory, TrajectoryLimits},
};
use forebay_facades::parsers as facades;
use forebay_formats::{Importer, Options};
use forebay_gateway::structure::{price, price_with_columns};
use forebay_wire as wire;
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait as _};
use proptest::{prelude::*, sample::select, test_runner::TestRunner};

use Reader::{Atropos, Control, Import, Post, Slime};

#[global_allocator]
static MEMORY: &PeakMemAlloc<System> = &INSTRUMENTED_SYSTEM;

/// How many times its price a body may take.
const RATIO_MAX: usize = 8;

/// What any body may take, however small it is.
const FREE_BYTES: usize = 1 << 20;

/// What a receipt takes from the budget.
const RECEIPT_BYTES: usize = 1 << 10;

/// Bytes of a small body and of a large one.
const SIZES: [usize; 2] = [64 << 10, 1 << 20];

/// The default limits.
const LIMITS: TrajectoryLimits = TrajectoryLimits {
    tokens_max: 2_000_000,
    segments_max: 4_096,
    metadata_bytes_max: 256 << 10,
    lone_surrogates: LoneSurrogates::Replace,
};

/// Who reads a body.
#[derive(Clone, Copy, Debug)]
enum Reader {
    Post,
    Import(&'static str),
    Slime,
    Atropos,
    Control,
}

/// A body in which `@` stands for copies of a text with commas between them. In each copy, `%` stands for its number.
type Shape = (Reader, &'static str, &'static str);

const SHAPES: &[Shape] = &[
    (Post, r#"{"status":"failed","messages":[@]}"#, "0"),
    (Post, r#"{"status":"failed","messages":[@]}"#, "{}"),
    (Post, r#"{"status":"failed","metadata":{"a":[@]}}"#, "0"),
    (Post, r#"{"status":"failed","reward_components":{@}}"#, r#""%":0"#),
    (Post, r#"{"status":"failed","@":0}"#, "a"),
    (Post, "[@]", r#"{"status":"failed"}"#),
    (Post, r#"{"status":"completed","segments":[@]}"#, r#"{"tokens":[],"loss_mask":[]}"#),
    (Post, r#"{"status":"completed","segments":[@]}"#, "{}"),
    (Post, r#"[{"status":"completed","segments":[@]}"#, r#"{"loss_mask":[],"tokens":[]}"#),
    (Post, r#"{"status":"completed","turns":[@]}"#, r#"{"tokens":[]}"#),
    (Post, r#"{"status":"completed","turns":[@]}"#, "{}"),
    (Post, r#"{"status":"completed","segments":[{"tokens":[1,@],"loss_mask":[1]}]}"#, "0"),
    (Post, r#"{"status":"completed","segments":[{"tokens":[1,2],"loss_mask":[1],"logprobs":[@]}]}"#, "0"),
    (Post, r#"{"status":"completed","segments":[{"tokens":[1,2],"loss_mask":[1],"versions":[@]}]}"#, "[0,0,0]"),
    (Post, r#"{"status":"completed","turns":[{"prompt_tokens":[@],"tokens":[1]}]}"#, "0"),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[@]}"#,
        r#"{"step_id":%,"source":"user","message":""}"#,
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[{"step_id":1,"source":"user","message":[@]}]}"#,
        r#"{"type":"text"}"#,
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[{"step_id":1,"source":"agent","message":"","tool_calls":[@]}]}"#,
        r#"{"tool_call_id":"","function_name":"","arguments":{}}"#,
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[{"step_id":1,"source":"agent","message":"","observation":{"results":[@]}}]}"#,
        "{}",
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[{"step_id":1,"source":"agent","message":"","observation":{"results":[@]}}]}"#,
        r#"{"content":""}"#,
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[{"step_id":1,"source":"agent","message":"","observation":{"results":[{"subagent_trajectory_ref":[@]}]}}]}"#,
        "{}",
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1","tool_definitions":[@]},"steps":[]}"#,
        "{}",
    ),
    (
        Import("atif"),
        r#"{"schema_version":"ATIF-v1.6","agent":{"name":"a","version":"1"},"steps":[{"step_id":1,"source":"agent","message":"","metrics":{"prompt_token_ids":[1],"completion_token_ids":[@]}}]}"#,
        "0",
    ),
    (Import("chat"), r#"{"reward":1,"calls":[@]}"#, "{}"),
    (
        Import("chat"),
        r#"{"reward":1,"calls":[@]}"#,
        r#"{"response":{"prompt_token_ids":[1],"choices":[{"token_ids":[1]}]}}"#,
    ),
    (Import("chat"), r#"{"reward":1,"choices":[@]}"#, "{}"),
    (Import("chat"), r#"{"reward":1,"messages":[@]}"#, "0"),
    (Import("chat"), r#"{"reward":1,"messages":[],"tools":[@]}"#, "0"),
    (Import("chat"), r#"{"reward":1,"messages":[],"calls":[{"request":{"messages":[@]}}]}"#, "0"),
    (Import("chat"), r#"{"reward":1,"choices":[{"logprobs":{"content":[@]}}]}"#, r#"{"logprob":0}"#),
    (
        Import("chat"),
        r#"{"reward":1,"choices":[{"prompt_token_ids":[1],"meta_info":{"output_token_logprobs":[@]}}]}"#,
        "[0,0,0]",
    ),
    (Import("chat"), r#"{"reward":1,"choices":[{"matched_stop":[@]}]}"#, "0"),
    (Import("chat"), r#"{"reward":1,"choices":[{"stop_reason":[@]}]}"#, "[]"),
    (Import("chat"), r#"{"reward":1,"prompt_token_ids":[1],"token_ids":[@]}"#, "0"),
    (Import("chat"), r#"{"reward":1,"messages":[],@}"#, r#""%":0"#),
    (Import("forebay"), r#"{"status":"failed","reward":1,"messages":[@]}"#, "0"),
    (Import("forebay"), r#"{"status":"failed","reward":1,"reward_components":{@}}"#, r#""%":0"#),
    (Import("forebay"), r#"{"status":"completed","reward":1,"segments":[@]}"#, r#"{"tokens":[],"loss_mask":[]}"#),
    (Import("forebay"), r#"{"status":"completed","reward":1,"turns":[@]}"#, r#"{"tokens":[]}"#),
    (Import("forebay"), r#"{"status":"completed","reward":1,"segments":[{"tokens":[1,@],"loss_mask":[]}]}"#, "0"),
    (Import("forebay"), r#"{"status":"completed","reward":1,"segments":[{"tokens":[1],"loss_mask":[@]}]}"#, "0"),
    (
        Import("forebay"),
        r#"{"status":"completed","reward":1,"segments":[{"tokens":[1,2],"loss_mask":[1],"versions":[@]}]}"#,
        "[0,0,0]",
    ),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[@]}}"#, "{}"),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[[@]]}}"#, "{}"),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[@]}}"#, "[]"),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[@]}}"#, r#"{"content":""}"#),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[@]}}"#, r#"{"type":"function_call"}"#),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[{"content":[@]}]}}"#, r#"{"a":[]}"#),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[{"content":[@]}]}}"#, "0"),
    (
        Import("nemo-gym"),
        r#"{"reward":1,"response":{"output":[{"prompt_token_ids":[1],"generation_token_ids":[@]}]}}"#,
        "0",
    ),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[]},"responses_create_params":{"input":[@]}}"#, "{}"),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[]},"responses_create_params":{"tools":[@]}}"#, "0"),
    (
        Import("nemo-gym"),
        r#"{"reward":1,"response":{"output":[]},"responses_create_params":{"tools":[@]}}"#,
        r#"{"type":"function"}"#,
    ),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[],"incomplete_details":[@]}}"#, "0"),
    (Import("nemo-gym"), r#"{"reward":1,"response":{"output":[]},@}"#, r#""%":0"#),
    (Import("verifiers"), r#"{"traces":[@]}"#, "{}"),
    (Import("verifiers"), r#"{"traces":[@]}"#, "0"),
    (Import("verifiers"), r#"{"nodes":[@]}"#, "{}"),
    (Import("verifiers"), r#"{"nodes":[@]}"#, r#"{"message":{},"token_ids":[1],"mask":[true]}"#),
    (Import("verifiers"), r#"{"nodes":[{"token_ids":[@]}]}"#, "0"),
    (Import("verifiers"), r#"{"nodes":[],"calls":[@]}"#, "{}"),
    (Import("verifiers"), r#"{"nodes":[],"metrics":{@}}"#, r#""%":0"#),
    (Import("verifiers"), r#"{"nodes":[],"rewards":{@}}"#, r#""%":{"score":0}"#),
    (Slime, r#"{"instance_id":"i","reward":0,"messages":[@]}"#, "0"),
    (Slime, r#"{"instance_id":"i","reward":0,"messages":[],@}"#, r#""%":0"#),
    (Slime, r#"{"instance_id":"i","reward":{@},"messages":[]}"#, r#""%":0"#),
    (Slime, r#"{"instance_id":"i","reward":0,"extra_info":{@},"messages":[]}"#, r#""%":0"#),
    (Slime, r#"{"instance_id":"i","reward":0,"messages":[],"weight_versions":[@]}"#, "0"),
    (Slime, r#"{"instance_id":"i","reward":0,"messages":[],"weight_versions":[@]}"#, r#""0""#),
    (Slime, r#"{"instance_id":"i","reward":0,"response_length":1,"tokens":[1,@]}"#, "0"),
    (Slime, r#"{"instance_id":"i","reward":0,"tokens":[1,2],"loss_mask":[@]}"#, "0"),
    (Slime, r#"{"instance_id":"i","reward":0,"tokens":[1,2],"loss_mask":[1],"rollout_log_probs":[@]}"#, "0"),
    (Atropos, r#"{"tokens":[[1,@]],"masks":[[1]],"scores":[0]}"#, "0"),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[@]],"scores":[0]}"#, "0"),
    (Atropos, r#"{"tokens":[@],"masks":[],"scores":[]}"#, "[]"),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"inference_logprobs":[[@]]}"#, "0"),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"advantages":[[@]]}"#, "0"),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"ref_logprobs":[@]}"#, "[]"),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"messages":[[@]]}"#, r#"{"role":"","content":""}"#),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"generation_params":{@}}"#, r#""%":0"#),
    (
        Atropos,
        r#"{"tokens":[[1,2],[1,2],[1,2],[1,2]],"masks":[[1,2],[1,2],[1,2],[1,2]],"scores":[0,0,0,0],"generation_params":{@}}"#,
        r#""%":0"#,
    ),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"overrides":[{@}]}"#, r#""%":0"#),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"images":[@]}"#, "0"),
    (Atropos, r#"{"tokens":[[1,2]],"masks":[[1,2]],"scores":[0],"distill_token_ids":[[@]]}"#, "[0]"),
    (Control, r#"{"filter":[@]}"#, "{}"),
    (Control, r#"{"filter":[@]}"#, r#"{"name":"","scope":"group","when":"","action":"drop"}"#),
    (Control, r#"{"batch":{"environments":{@}}}"#, r#""%":{}"#),
    (Control, r#"{"require":[@]}"#, r#""tokens""#),
    (Control, r#"{"models":{@}}"#, r#""%":{"policy":"p"}"#),
    (Control, r#"{"models":{@}}"#, r#""%":{}"#),
    (Control, r#"{"metadata":{"a":[@]}}"#, "0"),
    (Control, r#"{"reward":1,"reward_components":{@}}"#, r#""%":0"#),
    (Control, r#"{"groups":[@]}"#, r#""%""#),
    (Control, r#"{"name":"a","role":"admin","policies":[@]}"#, r#""""#),
    (Control, "{@}", r#""%":0"#),
];

/// The body with as many copies as these bytes have room for.
fn filled((_, place, copy): Shape, bytes: usize) -> Vec<u8> {
    let (before, after) = place.split_once('@').expect("the body has a place");
    let mut body = String::with_capacity(bytes + place.len());
    body.push_str(before);
    let mut number = 0;
    while body.len() < bytes {
        if number > 0 {
            body.push(',');
        }
        match copy.split_once('%') {
            Some((left, right)) => write!(body, "{left}{number}{right}").expect("a string accepts all text"),
            None => body.push_str(copy),
        }
        number += 1;
    }
    body.push_str(after);
    body.into_bytes()
}

/// What is done with rollouts before they are stored. Returns how many are accepted.
fn packed(sent: impl IntoIterator<Item = wire::Trajectory>) -> usize {
    let parse = |sent| Trajectory::parse(sent, &LIMITS).ok();
    let packed = sent.into_iter().filter_map(parse).map(NewRollout::pack);
    packed.collect::<Vec<_>>().len()
}

/// Reads a body. Returns its price, and what became of it.
fn read(reader: Reader, body: &[u8]) -> (usize, String) {
    let with_columns = price_with_columns(body);
    match reader {
        Post => match api::decode_json(body, &LIMITS) {
            Ok(sent) => {
                // Receipts are paid for before anything is stored.
                let price = body.len().max(sent.len() * RECEIPT_BYTES);
                (price, format!("{} accepted", packed(sent)))
            }
            Err(problem) => (body.len(), format!("refused: {problem:?}")),
        },
        Import(name) => {
            let format = forebay_formats::format(name).expect("it is a format");
            let options = Options { tokens_max: LIMITS.tokens_max, ..Options::default() };
            let mut importer = Importer::new(format, &options, Cursor::new(body));
            let mut outcome = String::new();
            while let Some(record) = importer.next_record().expect("a slice can be read") {
                outcome = match record.outcome {
                    Ok(read) => format!("{} accepted", packed(read.trajectories)),
                    Err(found) => format!("refused: {} {}", found[0].pointer, found[0].detail),
                };
            }
            (with_columns, outcome)
        }
        Slime => (
            with_columns,
            facades::slime(body).map_or("refused".to_owned(), |sent| format!("{} accepted", packed([sent]))),
        ),
        Atropos => match facades::atropos(body) {
            Some((sent, more)) => (with_columns + more, format!("{} accepted", packed(sent))),
            None => (with_columns, "refused".to_owned()),
        },
        Control => (price(body), format!("{} calls refuse it", api::control(body).len())),
    }
}

/// Measures a body. Returns a line about it, and whether it takes too much.
fn row(shape: Shape, bytes: usize) -> (String, bool) {
    let (reader, place, copy) = shape;
    // Bodies of control calls are small.
    let body = filled(shape, if matches!(reader, Control) { bytes.min(250 << 10) } else { bytes });
    MEMORY.reset_peak_memory();
    let (price, outcome) = read(reader, &body);
    // The body is held, too.
    let peak = MEMORY.get_peak_memory();
    let outcome: String = outcome.chars().take(70).collect();
    let times = |bytes: usize| peak as f64 / bytes as f64;
    let line = format!(
        "{reader:?} {place} {copy}: {} bytes, {outcome}, {peak} bytes of memory, {:.1} x body, {:.1} x price",
        body.len(),
        times(body.len()),
        times(price)
    );
    eprintln!("{line}");
    (line, peak > RATIO_MAX * price + FREE_BYTES)
}

#[test]
fn a_body_takes_at_most_eight_times_its_price() {
    let shapes = SHAPES.iter().flat_map(|&shape| SIZES.map(|bytes| row(shape, bytes)));
    let too_much: Vec<_> = shapes.filter_map(|(line, is_too_much)| is_too_much.then_some(line)).collect();
    assert!(too_much.is_empty(), "too much memory:\n{}", too_much.join("\n"));
    // Any text in any place.
    let copies =
        select(vec!["0", "-1.5e9", "null", "{}", "[]", r#""""#, r#"{"a":0}"#, "[0,0]", "[[],{}]", r#"{"%":{}}"#]);
    let tested = TestRunner::new(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })
        .run(&(select(SHAPES), copies), |((reader, place, _), copy)| {
            let (line, is_too_much) = row((reader, place, copy), 256 << 10);
            prop_assert!(!is_too_much, "{line}");
            Ok(())
        });
    tested.unwrap_or_else(|error| panic!("{error}"));
}
