//! Old clients, new trainer: what clients of other rollout buffers write to a facade is trained.

use forebay_client::wire::RolloutState;
use forebay_trainer::config::{DeviceConfig, TrainConfig};
use serde_json::{Value, json};

use crate::support::{TestService, VOCABULARY, http, noise, run, tiny_model};

/// The rollouts of a group.
const SIZE: u64 = 4;

/// An item with the fields of slime's `Sample`, as a generator writes it that knows the tokens.
fn sample(group: u64, member: u64) -> Value {
    let place = group * 1_000 + member * 100;
    let (prompt, response) = (3 + group, 5 + member);
    let tokens: Vec<u64> = (0..prompt + response).map(|t| (noise(place + t) * VOCABULARY as f64) as u64).collect();
    let logprobs: Vec<f64> = (0..response).map(|t| -4.2 + noise(place + 50 + t) * 0.2).collect();
    let mask: Vec<u64> = (0..response).map(|t| u64::from(t != 1)).collect();
    json!({
        "instance_id": format!("task-{group}"), "uid": format!("{group}-{member}"),
        "messages": [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}],
        "reward": member % 2, "extra_info": {"timestamp": "1.0"}, "index": member, "group_index": group,
        "tokens": tokens, "response_length": response, "loss_mask": mask, "rollout_log_probs": logprobs,
        "weight_versions": ["0"], "status": "completed",
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_of_slime_with_tokens_are_trained() {
    let service = TestService::start(
        r#"
        [facades]
        slime = "127.0.0.1:0"
        [policy_defaults]
        require = ["tokens", "logprobs"]
        group = { size = 4 }
        batch = { groups = 2 }
        "#,
    )
    .await;
    let mut trained = 0;
    for (group, member) in (0..2).flat_map(|group| (0..SIZE).map(move |member| (group, member))) {
        let item = sample(group, member);
        let mask = item["loss_mask"].as_array().expect("it has a mask");
        trained += mask.iter().filter(|bit| **bit == json!(1)).count();
        let url = format!("{}/buffer/write", service.facades["slime"]);
        let answer = http().post(url).json(&item).send().await.expect("the facade answers");
        assert_eq!(answer.status().as_u16(), 200);
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut config = TrainConfig::new(tiny_model(), folder.path().to_owned());
    config.server.clone_from(&service.url);
    config.steps = 1;
    config.device = DeviceConfig::Cpu;
    run(config).await.expect("it trains");

    let line = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("the step is reported");
    let report: Value = serde_json::from_str(&line).expect("there is one line");
    assert_eq!((&report["rollouts"], &report["trained_tokens"]), (&json!(2 * SIZE), &json!(trained)));
    for (rollout, reward) in [("0-0", 0.0), ("1-3", 1.0)] {
        let story = service.client.story("default", rollout).await.expect("it answers").expect("it is in the ledger");
        assert_eq!((story.state, story.step, story.reward), (RolloutState::Checkpointed, Some(1), Some(reward)));
    }
    service.stop().await;
}

/// A scored group, as an environment of Atropos posts it.
fn scored(group: u64) -> Value {
    let sequences: Vec<(Vec<u64>, usize)> = (0..SIZE)
        .map(|member| {
            let place = 10_000 + group * 1_000 + member * 100;
            let (prompt, response) = (3 + group, 5 + member);
            let tokens = (0..prompt + response).map(|t| (noise(place + t) * VOCABULARY as f64) as u64).collect();
            (tokens, prompt as usize)
        })
        .collect();
    let masked = |(tokens, prompt): &(Vec<u64>, usize)| -> Vec<i64> {
        tokens.iter().enumerate().map(|(at, token)| if at < *prompt { -100 } else { *token as i64 }).collect()
    };
    let logprobs = |(tokens, prompt): &(Vec<u64>, usize)| -> Vec<f64> {
        (0..tokens.len()).map(|at| if at < *prompt { 1.0 } else { -4.2 }).collect()
    };
    json!({
        "tokens": sequences.iter().map(|(tokens, _)| tokens).collect::<Vec<_>>(),
        "masks": sequences.iter().map(masked).collect::<Vec<_>>(),
        "scores": (0..SIZE).map(|member| (member % 2) as f64).collect::<Vec<_>>(),
        "inference_logprobs": sequences.iter().map(logprobs).collect::<Vec<_>>(),
        "overrides": (0..SIZE).map(|member| json!({"set_advantage_to_zero": member == 3})).collect::<Vec<_>>(),
        "env_id": 0,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scored_groups_of_atropos_are_trained() {
    let config = r#"
        [facades]
        atropos = "127.0.0.1:0"
        [policy_defaults]
        require = ["tokens", "logprobs"]
        batch = { groups = 2 }
    "#;
    let service = TestService::start(config).await;
    let post = async |path: &str, body: Value| {
        let url = format!("{}/{path}", service.facades["atropos"]);
        let answer = http().post(url).json(&body).send().await.expect("the facade answers");
        let status = answer.status().as_u16();
        assert_eq!(status, 200, "{}", answer.text().await.unwrap_or_default());
    };
    let trainer = json!({
        "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "",
        "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1,
    });
    post("register", trainer).await;
    let first = http().get(format!("{}/batch", service.facades["atropos"])).send().await.expect("the facade answers");
    assert_eq!(first.text().await.expect("the answer arrives"), r#"{"batch":null}"#);
    let environment = json!({"max_token_length": 64, "desired_name": "math", "weight": 1, "group_size": SIZE});
    post("register-env", environment).await;
    for group in 0..2 {
        post("scored_data", scored(group)).await;
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut config = TrainConfig::new(tiny_model(), folder.path().to_owned());
    config.server.clone_from(&service.url);
    config.steps = 1;
    config.device = DeviceConfig::Cpu;
    run(config).await.expect("it trains");

    let line = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("the step is reported");
    let report: Value = serde_json::from_str(&line).expect("there is one line");
    // The sequences whose advantage the environment sets to zero train nothing.
    let tokens = 2 * (5 + 6 + 7);
    assert_eq!((&report["rollouts"], &report["trained_tokens"]), (&json!(2 * SIZE), &json!(tokens)));
    let url = format!("{}/trajectories?policy=default&state=checkpointed", service.url);
    let listed: Value = http().get(url).send().await.expect("it answers").json().await.expect("it is JSON");
    assert_eq!(listed["trajectories"].as_array().map(Vec::len), Some(2 * SIZE as usize), "{listed}");
    service.stop().await;
}
