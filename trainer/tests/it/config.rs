//! The configuration files that users start from.

use std::path::{Path, PathBuf};

use forebay_trainer::config::TrainConfig;

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
}

fn shipped() -> String {
    std::fs::read_to_string(configs().join("trainer.toml")).expect("it is there")
}

fn parse(text: &str) -> Result<TrainConfig, String> {
    let config: TrainConfig = toml::from_str(text).map_err(|error| error.to_string())?;
    config.check().map_err(|error| error.to_string())?;
    Ok(config)
}

#[test]
fn the_shipped_file_shows_the_defaults() {
    let shown = parse(&shipped()).expect("it can be used");
    let least = parse("model = \"models/base\"\noutput = \"runs/default\"").expect("the rest has defaults");
    assert_eq!(format!("{shown:?}"), format!("{least:?}"));
}

#[test]
fn what_the_shipped_file_leaves_out_can_be_put_in() {
    // A key that is commented out has no space between the sign and its name; prose begins with a capital or a space.
    let is_key = |line: &str| {
        let rest = line.strip_prefix("# ").unwrap_or_default();
        rest.starts_with('[')
            || rest.split_once(" = ").is_some_and(|(key, _)| key.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    };
    let mut corrections = 0;
    let all: Vec<String> = shipped()
        .lines()
        .filter(|line| {
            // The file shows three values of the key `correction`, of which the first is put in. `old_logprobs`
            // contradicts that value.
            let is_correction = line.starts_with("# correction");
            corrections += usize::from(is_correction);
            let is_another = is_correction && corrections > 1;
            !is_another && !line.starts_with("# old_logprobs")
        })
        .map(|line| if is_key(line) { line["# ".len()..].to_owned() } else { line.to_owned() })
        // Only this objective accepts a critic.
        .map(|line| if line == "objective = \"grpo\"" { "objective = \"ppo\"".to_owned() } else { line })
        .collect();
    let config = parse(&all.join("\n")).expect("every key that is shown exists");
    assert!(config.critic.is_some() && config.reference.is_some() && config.publish.engine.len() == 1);
    assert!(config.objective.clip_c.is_some() && config.metrics_listen.is_some());
    assert!(config.report.wandb_project.is_some());
}

#[test]
fn what_cannot_work_is_refused_by_name() {
    let least = "model = \"m\"\noutput = \"o\"\n";
    for (wrong, named) in [
        ("steps = 0", "`steps`"),
        ("checkpoint = { every = 0 }", "`checkpoint.every`"),
        ("objective = { objective = \"ppo\" }", "`critic`"),
        ("objective = { kl_loss_coef = 0.1 }", "`reference`"),
        ("critic = {}", "`critic`"),
        ("data = { batches_per_step = 0 }", "`data.batches_per_step`"),
        ("data = { tokens_max = 0 }", "`data.tokens_max`"),
        ("patience_s = 0", "`patience_s`"),
        ("objective = { eps_low = -1.0 }", "eps_low"),
        ("schedule = { peak = -1.0 }", "peak"),
        ("learning_rate = 1e-3", "learning_rate"),
        (
            "publish.engine = [{ kind = \"sglang\", url = \"u\", key_file = \"f\", key_env = \"E\" }]",
            "`publish.engine` has both `key_file` and `key_env`",
        ),
    ] {
        let error = parse(&format!("{least}{wrong}")).expect_err("it cannot work");
        assert!(error.contains(named), "{wrong}: {error}");
    }
}
