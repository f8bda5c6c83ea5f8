use serde_json::json;

use super::*;

fn refusal<T: fmt::Debug>(read: Result<T, Violation>) -> (String, String) {
    let found = read.expect_err("it is refused");
    (found.pointer, found.detail)
}

fn pointer<T: fmt::Debug>(read: Result<T, Violation>) -> String {
    refusal(read).0
}

#[test]
fn numbers_are_read_as_python_converts_them() {
    let body = br#"{"tokens": [[1, 2.0, "3", true]], "masks": [[-100, 2, 3, 1]], "scores": ["0.5"], "other": {}}"#;
    let read = ScoredData::parse(body).expect("it can be read");
    assert_eq!(read.tokens.0[0], [1, 2, 3, 1].map(Int));
    assert_eq!(read.scores.0, [Float(0.5)]);
    assert!(read.env_id.is_none() && read.messages.is_none());
}

#[test]
fn a_fault_is_named_by_its_pointer() {
    let read = |extra: &str| {
        let head = r#""tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1]"#;
        pointer(ScoredData::parse(format!("{{{head}, {extra}}}").as_bytes()))
    };
    assert_eq!(read(r#""messages": [[{"role": "user"}]]"#), "/messages/0/0");
    assert_eq!(read(r#""advantages": [[0.5, "x"]]"#), "/advantages/0/1");
    assert_eq!(read(r#""overrides": [[]]"#), "/overrides/0");
    assert_eq!(read(r#""distill_token_ids": [[1]]"#), "/distill_token_ids/0/0");
    assert_eq!(read(r#""inference_logprobs": [[1e99]]"#), "/inference_logprobs/0/0");
    assert_eq!(read(r#""env_id": "a""#), "/env_id");
    assert_eq!(refusal(ScoredData::parse(b"{}")), ("/tokens".to_owned(), "is required".to_owned()));
    assert!(ScoredData::parse(b"{\"tokens\": [[1").is_err());
    let body = br#"[{"tokens": [[1, 2]], "masks": [[1]], "scores": [1]}]"#;
    assert_eq!(pointer(ScoredData::parse_list(body)), "/0/masks/0");
}

#[test]
fn columns_have_one_entry_for_each_sequence() {
    let fault = |body: &str| pointer(ScoredData::parse(body.as_bytes()));
    assert_eq!(fault(r#"{"tokens": [], "masks": [], "scores": []}"#), "/tokens");
    assert_eq!(fault(r#"{"tokens": [[1]], "masks": [], "scores": [1]}"#), "/masks");
    assert_eq!(fault(r#"{"tokens": [[1]], "masks": [[1]], "scores": []}"#), "/scores");
    assert_eq!(fault(r#"{"tokens": [[-1]], "masks": [[1]], "scores": [1]}"#), "/tokens/0/0");
    let many = format!(r#"{{"tokens": [{}[]]}}"#, "[],".repeat(SEQUENCES_MAX));
    assert!(fault(&many).starts_with("/tokens"));
}

#[test]
fn registrations_are_bounded() {
    let trainer = |batch_size: i64| {
        let body = json!({
            "wandb_group": "", "wandb_project": "", "batch_size": batch_size, "max_token_len": -1,
            "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10,
        });
        Registration::parse(body.to_string().as_bytes())
    };
    assert!(trainer(32).is_ok());
    assert_eq!(pointer(trainer(0)), "/batch_size");
    let environment = |name: &str, size: i64, share: f64| {
        let body = json!({
            "max_token_length": 8, "desired_name": name, "weight": 1, "group_size": size,
            "min_batch_allocation": share,
        });
        RegisterEnv::parse(body.to_string().as_bytes())
    };
    assert!(environment("gsm8k", 8, 0.5).is_ok());
    assert_eq!(pointer(environment("a\nb", 8, 0.5)), "/desired_name");
    assert_eq!(pointer(environment("a", 0, 0.5)), "/group_size");
    assert_eq!(pointer(environment("a", 1, 1.5)), "/min_batch_allocation");
}
