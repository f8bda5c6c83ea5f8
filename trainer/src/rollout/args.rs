//! The command lines of `rollout` and `init`.

use std::path::PathBuf;

use super::task::TaskName;
use crate::{config::DeviceConfig, service::Credentials};

/// Maximum number of bytes of a worker's name. Rollout ids begin with it and have at most 256 bytes.
const WORKER_BYTES_MAX: usize = 128;

/// Generate trajectories for a policy with its newest weights, until stopped.
#[derive(Clone, Debug, clap::Args)]
pub struct RolloutArgs {
    /// URL of the service.
    #[arg(long, env = "FOREBAY_SERVER", default_value = "http://127.0.0.1:8080", value_name = "URL")]
    pub server: String,

    /// How the worker authenticates itself.
    #[command(flatten)]
    pub credentials: Credentials,

    /// Policy to play for. Its versions must be published as file:// folders that this machine can read.
    #[arg(long, env = "FOREBAY_POLICY", default_value = "default", value_name = "NAME")]
    pub policy: String,

    /// Task to play.
    #[arg(long, value_enum, default_value_t = TaskName::Arithmetic)]
    pub task: TaskName,

    /// Number of rollouts of a group; the size in the policy's rules if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub group_size: Option<u32>,

    /// Number of groups played at once, between two checks for a new version.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub groups: u32,

    /// Divisor of the logits; higher values sample less probable tokens more often.
    #[arg(long, default_value_t = 1.0, value_name = "NUMBER", value_parser = temperature)]
    pub temperature: f32,

    /// Maximum number of tokens per turn; as many as the task can use if absent.
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub max_new_tokens: Option<usize>,

    /// Stop after this many rollouts, rounded up to whole rounds; run until stopped if absent.
    #[arg(long, value_name = "N")]
    pub rollouts: Option<u64>,

    /// Seed of all random numbers: the same seed, worker id and order of versions give the same rollouts. If absent,
    /// every start plays different ones.
    #[arg(long, env = "FOREBAY_SEED", value_name = "NUMBER")]
    pub seed: Option<u64>,

    /// Name of this worker; workers of one policy need different names.
    #[arg(long, env = "FOREBAY_WORKER", default_value = "rollout-0", value_name = "NAME", value_parser = worker_id)]
    pub worker_id: String,

    /// Device of the model.
    #[arg(long, value_enum, default_value_t = DeviceConfig::Auto)]
    pub device: DeviceConfig,

    /// Number of libtorch's CPU threads; one per core if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    pub threads: Option<i32>,
}

/// Make a small model of random weights for a task, an alphabet or a tokenizer, as a Hugging Face folder.
#[derive(Clone, Debug, clap::Args)]
pub struct InitArgs {
    /// Folder to create; it must not exist.
    pub folder: PathBuf,

    /// Task whose characters are the vocabulary.
    #[arg(long, value_enum, default_value_t = TaskName::Arithmetic)]
    pub task: TaskName,

    /// Folder whose tokenizer and chat template the model gets, in place of those of a task: a checkpoint, or only
    /// `tokenizer.json` and `tokenizer_config.json`.
    #[arg(long, value_name = "FOLDER", conflicts_with = "task")]
    pub tokenizer: Option<PathBuf>,

    /// Characters that are the vocabulary, in place of those of a task. Their ids are in this order.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["task", "tokenizer"])]
    pub alphabet: Option<String>,

    /// Give the model the tokens `<system>`, `<user>`, `<assistant>` and `<tool>`, and a chat template in which each of
    /// them begins a message of its role and `<eos>` ends it.
    #[arg(long, conflicts_with = "tokenizer")]
    pub chat: bool,

    /// Family of the model.
    #[arg(long, value_enum, default_value_t = Family::Llama)]
    pub family: Family,

    /// Width of the residual stream; a multiple of twice the number of heads.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub hidden: i64,

    /// Width inside the feed-forward part; four times the hidden width if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub intermediate: Option<i64>,

    /// Number of layers.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub layers: i64,

    /// Number of attention heads.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub heads: i64,

    /// Longest sequence in tokens that the model states. The trainer gives longer ones back.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    pub positions: i64,

    /// Standard deviation of the weights. Models as small as these do not learn with the 0.02 of large models.
    #[arg(long, default_value_t = 0.1, value_name = "NUMBER", value_parser = deviation)]
    pub initializer_range: f64,

    /// Seed of the weights.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub seed: u64,
}

/// Families of models that `init` can create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Family {
    /// Llama: no biases.
    Llama,
    /// Qwen 2 and 2.5: biases on queries, keys and values. `transformers` gives it the tokenizer class of Qwen 2, which
    /// skips characters outside the alphabet.
    Qwen2,
    /// Qwen 3, dense: queries and keys are normalized per head. Its tokenizer class is that of Qwen 2.
    Qwen3,
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && f32::is_finite(number) => Ok(number),
        _ => Err("it must be a number above 0".to_owned()),
    }
}

fn deviation(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number >= 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("it must be a number, 0 or more".to_owned()),
    }
}

fn worker_id(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > WORKER_BYTES_MAX || text.chars().any(char::is_control) {
        return Err(format!("it must have 1 to {WORKER_BYTES_MAX} bytes and no control characters"));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    enum Command {
        Rollout(RolloutArgs),
        Init(InitArgs),
    }

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Command::try_parse_from(std::iter::once("forebay-trainer").chain(line.split_whitespace()))
    }

    #[test]
    fn command_lines_are_consistent() {
        <Command as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn options_are_read() {
        let line = "rollout --policy math --task lookup --group-size 8 --temperature 0.7 --seed 3 --device cpu";
        let Ok(Command::Rollout(args)) = parse(line) else { panic!("the line is valid") };
        assert_eq!((args.policy.as_str(), args.task, args.group_size), ("math", TaskName::Lookup, Some(8)));
        assert_eq!((args.seed, args.rollouts, args.device), (Some(3), None, DeviceConfig::Cpu));
        let Ok(Command::Init(args)) = parse("init model --family qwen2 --layers 1") else {
            panic!("the line is valid")
        };
        assert_eq!((args.family, args.layers, args.hidden), (Family::Qwen2, 1, 64));
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (line, option) in [
            ("rollout --temperature 0", "--temperature"),
            ("rollout --temperature inf", "--temperature"),
            ("rollout --group-size 0", "--group-size"),
            ("rollout --max-new-tokens 0", "--max-new-tokens"),
            ("rollout --task chess", "--task"),
            ("init model --hidden 0", "--hidden"),
            ("init model --positions 0", "--positions"),
            ("init model --task lookup --tokenizer folder", "--tokenizer"),
            ("init model --task lookup --alphabet abc", "--alphabet"),
            ("init model --chat --tokenizer folder", "--tokenizer"),
            ("init model --initializer-range=-1", "--initializer-range"),
        ] {
            let error = parse(line).expect_err("the value is out of range").to_string();
            assert!(error.contains(option), "{error}");
        }
        let long = format!("rollout --worker-id {}", "w".repeat(WORKER_BYTES_MAX + 1));
        assert!(parse(&long).is_err());
    }
}
