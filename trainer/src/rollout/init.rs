//! `init`: makes a complete checkpoint of random weights, small enough to learn a task within minutes on one core.

use std::{fs, io, path::PathBuf};

use serde_json::{Value, json};
use tch::Device;

use super::{
    Tokenizer, TokenizerError,
    args::{Family, InitArgs},
    vocabulary::{Vocabulary, VocabularyError},
};
use crate::{
    checkpoint::{self, CheckpointError, Storage, WriteOptions},
    model::{ComputeKind, ConfigError, Decoder, ModelConfig},
};

/// Why no model was made.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The width of a head must be even, because rotation works on pairs.
    #[error("a hidden width of {hidden} does not divide into {heads} heads of even width")]
    Heads {
        /// Width of the residual stream.
        hidden: i64,
        /// Heads.
        heads: i64,
    },
    /// The model is not supported.
    #[error("a model with these settings is not supported")]
    Config(#[from] ConfigError),
    /// The tokenizer cannot be made or written.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The folder has no tokenizer that can be used.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The weights cannot be written.
    #[error("cannot write the weights")]
    Checkpoint(#[from] CheckpointError),
}

/// Makes the folder that `args` describe. The folder appears complete or not at all. Equal arguments make equal files.
pub fn init(args: &InitArgs) -> Result<(), InitError> {
    let InitArgs { hidden, heads, .. } = *args;
    if hidden % (2 * heads) != 0 {
        return Err(InitError::Heads { hidden, heads });
    }
    // A checkpoint is written from a source, whose companion files are copied.
    let source = tempfile::tempdir().map_err(|source| InitError::Write { path: std::env::temp_dir(), source })?;
    let vocabulary = match &args.tokenizer {
        Some(folder) => Vocabulary::of_folder(folder, source.path())?,
        None => Vocabulary::of_tokenizer(&tokenizer(args)?, source.path())?,
    };
    let config = format!("{:#}\n", model_config(args, &vocabulary));
    let decoder = Decoder::random(ModelConfig::parse(&config)?, Device::Cpu, ComputeKind::Float32, args.seed);

    let generation = format!("{:#}\n", generation_config(&vocabulary));
    // An empty safetensors file: eight bytes with the length of the header, and a header without tensors.
    let no_weights = b"\x02\0\0\0\0\0\0\0{}";
    let files: [(&str, &[u8]); 3] = [
        ("config.json", config.as_bytes()),
        ("generation_config.json", generation.as_bytes()),
        ("model.safetensors", no_weights),
    ];
    for (name, content) in files {
        let path = source.path().join(name);
        fs::write(&path, content).map_err(|source| InitError::Write { path, source })?;
    }
    let options = WriteOptions { storage: Storage::Float32, ..WriteOptions::default() };
    checkpoint::write(decoder.parameters(), source.path(), &args.folder, &options)?;
    tracing::info!(
        folder = %args.folder.display(),
        parameters = decoder.parameters().count(),
        vocabulary = vocabulary.size(),
        "made a model of random weights",
    );
    Ok(())
}

/// The tokenizer of the characters that `args` name.
fn tokenizer(args: &InitArgs) -> Result<Tokenizer, TokenizerError> {
    let alphabet = args.alphabet.as_deref().unwrap_or(args.task.task().alphabet());
    if args.chat { Tokenizer::for_chats(alphabet) } else { Tokenizer::new(alphabet) }
}

fn model_config(args: &InitArgs, vocabulary: &Vocabulary) -> Value {
    let (architecture, model_type) = match args.family {
        Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
        Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        Family::Llama => ("LlamaForCausalLM", "llama"),
    };
    let mut config = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocabulary.size(),
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate.unwrap_or(4 * args.hidden),
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "head_dim": args.hidden / args.heads,
        "max_position_embeddings": args.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": false,
        "initializer_range": args.initializer_range,
        "use_cache": true,
        "torch_dtype": "float32",
    });
    name_special(&mut config, vocabulary);
    config
}

fn generation_config(vocabulary: &Vocabulary) -> Value {
    let mut config = json!({"do_sample": true, "temperature": 1.0, "top_k": 0, "top_p": 1.0});
    name_special(&mut config, vocabulary);
    config
}

fn name_special(config: &mut Value, vocabulary: &Vocabulary) {
    for (key, id) in vocabulary.special() {
        config[key] = id;
    }
}
