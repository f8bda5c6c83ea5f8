//! The command line of `serve`.

use std::{net::SocketAddr, path::PathBuf, str::FromStr};

use super::{Dialect, Limits, ModelSource, ServeConfig, WeightSource};
use crate::{
    config::{ComputeConfig, DeviceConfig},
    service::Credentials,
};

/// Serve models to agents, with the interface of `SGLang`; for tests, examples and single machines.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Checkpoint folders to serve. A model's name in requests is the last part of its folder, or NAME in NAME=FOLDER.
    /// The first model answers requests that name none, after those of --follow.
    #[arg(required_unless_present = "follow", value_name = "[NAME=]FOLDER")]
    pub models: Vec<ModelArgument>,

    /// Policy to follow: every version that its trainer publishes is loaded between two tokens. Its versions must be
    /// published as file:// folders that this machine can read. The option may be given several times. The model's name
    /// in requests is POLICY, or NAME in NAME=POLICY@URL.
    #[arg(long, value_name = "[NAME=]POLICY@URL")]
    pub follow: Vec<FollowArgument>,

    /// How the server authenticates itself to the services of these policies.
    #[command(flatten)]
    pub credentials: Credentials,

    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:30000", value_name = "ADDRESS")]
    pub listen: SocketAddr,

    /// Key that clients must send as `Authorization: Bearer KEY`; prefer the environment variable, because `ps` shows
    /// arguments.
    #[arg(long, env = "FOREBAY_ENGINE_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,

    /// Allow every machine that reaches the address to use the server, and to load other weights, without a key.
    #[arg(long)]
    pub insecure: bool,

    /// Label of the weights at the start; a version that is loaded later brings its own.
    #[arg(long, default_value = "default", value_name = "LABEL")]
    pub weight_version: String,

    /// Longest sequence in tokens, prompt and answer together; as the model's configuration says if absent.
    #[arg(long, value_name = "N", value_parser = count())]
    pub context_length: Option<usize>,

    /// Number of sequences of one model that run at once.
    #[arg(long, default_value_t = Limits::default().running, value_name = "N", value_parser = count())]
    pub max_running: usize,

    /// Number of requests that may wait for a model; further ones are answered with 503.
    #[arg(long, default_value_t = Limits::default().queue, value_name = "N")]
    pub max_queue: usize,

    /// Number of tokens that all accepted requests of a model may reach together; further ones are answered with 503.
    #[arg(long, default_value_t = Limits::default().tokens, value_name = "N", value_parser = count())]
    pub max_tokens: usize,

    /// Memory for the keys and values of the running sequences of a model, in MiB. Sequences that do not fit wait.
    #[arg(long, default_value_t = Limits::default().cache_bytes >> 20, value_name = "MIB", value_parser = count())]
    pub cache_mib: usize,

    /// Number of prompt tokens that are read in one pass. More read prompts faster, and make running answers pause longer.
    #[arg(long, default_value_t = Limits::default().piece_tokens, value_name = "N", value_parser = count())]
    pub prefill_tokens: usize,

    /// Which engine's fields the answers of the chat endpoint have.
    #[arg(long, value_enum, default_value_t = Dialect::Sglang)]
    pub dialect: Dialect,

    /// Device of the models.
    #[arg(long, value_enum, default_value_t = DeviceConfig::Auto)]
    pub device: DeviceConfig,

    /// Type that layers compute in.
    #[arg(long, value_enum, default_value_t = ComputeConfig::Auto)]
    pub compute: ComputeConfig,

    /// Number of libtorch's CPU threads; one per core if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    pub threads: Option<i32>,
}

fn count() -> impl clap::builder::TypedValueParser<Value = usize> {
    clap::builder::RangedU64ValueParser::<usize>::new().range(1..)
}

/// A model on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelArgument {
    name: String,
    folder: PathBuf,
}

impl FromStr for ModelArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, folder) = if let Some((name, folder)) = text.split_once('=') {
            (name.to_owned(), PathBuf::from(folder))
        } else {
            let folder = PathBuf::from(text);
            // `.` and `models/..` have no last part of their own.
            let whole = folder.canonicalize().unwrap_or_else(|_| folder.clone());
            (whole.file_name().unwrap_or_default().to_string_lossy().into_owned(), folder)
        };
        check_name(&name)?;
        Ok(Self { name, folder })
    }
}

/// A policy on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowArgument {
    name: String,
    policy: String,
    url: String,
}

impl FromStr for FollowArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (names, url) = text.split_once('@').ok_or("it must be POLICY@URL")?;
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(format!("`{url}` must begin with http:// or https://"));
        }
        let (name, policy) = names.split_once('=').unwrap_or((names, names));
        check_name(name)?;
        check_name(policy)?;
        Ok(Self { name: name.to_owned(), policy: policy.to_owned(), url: url.to_owned() })
    }
}

/// Names of models and policies have the same characters.
fn check_name(name: &str) -> Result<(), String> {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > 128 || !name.bytes().all(is_known) {
        return Err(format!("`{name}` is no name: put NAME= before it, with a NAME of A-Z a-z 0-9 . _ -"));
    }
    Ok(())
}

impl ServeArgs {
    /// The configuration that these arguments describe.
    #[must_use]
    pub fn config(&self) -> ServeConfig {
        let frozen = self.models.iter().map(|model| ModelSource {
            name: model.name.clone(),
            weights: WeightSource::Folder { folder: model.folder.clone(), version: self.weight_version.clone() },
        });
        let followed = self.follow.iter().map(|follow| ModelSource {
            name: follow.name.clone(),
            weights: WeightSource::Policy { policy: follow.policy.clone(), url: follow.url.clone() },
        });
        ServeConfig {
            // The first model answers requests that name none. This is rather a policy in training than a frozen model
            // beside it.
            models: followed.chain(frozen).collect(),
            credentials: self.credentials.clone(),
            limits: Limits {
                running: self.max_running,
                queue: self.max_queue,
                tokens: self.max_tokens,
                cache_bytes: self.cache_mib.saturating_mul(1 << 20),
                context: self.context_length,
                piece_tokens: self.prefill_tokens,
            },
            device: self.device,
            compute: self.compute,
            dialect: self.dialect,
            api_key: self.api_key.clone(),
            insecure: self.insecure,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        serve: ServeArgs,
    }

    fn parse(line: &str) -> Result<ServeArgs, clap::Error> {
        Command::try_parse_from(std::iter::once("serve").chain(line.split_whitespace())).map(|command| command.serve)
    }

    #[test]
    fn command_line_is_consistent() {
        <Command as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn models_are_named_by_their_folder_or_by_hand() {
        let config = parse("models/tiny judge=/big/model --cache-mib 2").expect("the line is valid").config();
        let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!((names.as_slice(), config.limits.cache_bytes), (["tiny", "judge"].as_slice(), 2 << 20));
        let expected = WeightSource::Folder { folder: "/big/model".into(), version: "default".to_owned() };
        assert_eq!(config.models[1].weights, expected);
    }

    #[test]
    fn followed_policies_come_before_frozen_models() {
        let line = "judge=/big/model --follow math@http://10.0.0.1:8080 --follow solver=code.v2@https://h";
        let config = parse(line).expect("the line is valid").config();
        let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["math", "solver", "judge"]);
        let expected = WeightSource::Policy { policy: "code.v2".to_owned(), url: "https://h".to_owned() };
        assert_eq!(config.models[1].weights, expected);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (line, expected) in [
            ("", "FOLDER"),
            ("a/b=c", "a/b"),
            ("model --max-running 0", "--max-running"),
            ("model --cache-mib 0", "--cache-mib"),
            ("model --prefill-tokens 0", "--prefill-tokens"),
            ("model --listen here", "--listen"),
            ("--follow math", "POLICY@URL"),
            ("--follow math@10.0.0.1", "http://"),
            ("--follow a/b@http://h", "a/b"),
        ] {
            let error = parse(line).expect_err("the line is wrong").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
