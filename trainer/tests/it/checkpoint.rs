//! Checkpoints survive reading and writing, and damage is named.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use forebay_trainer::checkpoint::{CheckpointError, Reader, Storage, WriteOptions, write};
use forebay_trainer::model::{ComputeKind, Decoder, LoadError};
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

use crate::golden::{Golden, assert_close};

/// Type, shape and bytes of every tensor, over all files.
type Contents = HashMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

fn contents(folder: &Path) -> Contents {
    let mut contents = HashMap::new();
    for path in weight_files(folder) {
        let bytes = fs::read(path).expect("a file of weights");
        for (name, view) in SafeTensors::deserialize(&bytes).expect("well-formed").tensors() {
            let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            assert!(contents.insert(name, tensor).is_none(), "a tensor is written once");
        }
    }
    contents
}

fn weight_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect()
}

fn load(folder: &Path) -> Result<Decoder, LoadError> {
    Decoder::load(folder, Device::Cpu, ComputeKind::Float32)
}

#[test]
fn what_is_read_and_written_again_is_the_same_to_the_byte() {
    for golden in Golden::all() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for (name, shard_bytes_max) in [("single", u64::MAX), ("sharded", 20_000), ("each", 1)] {
            let target = folder.path().join(name);
            let options = WriteOptions { shard_bytes_max, ..WriteOptions::default() };
            write(golden.decoder().parameters(), &golden.checkpoint(), &target, &options).expect("written");
            assert_eq!(weight_files(&target).len() == 1, name == "single");
            assert!(contents(&target) == contents(&golden.checkpoint()), "{} {name}", golden.name());
            load(&target).expect("what was written is valid");
        }
    }
}

#[test]
fn companions_are_copied_verbatim_and_other_weights_are_not() {
    let golden = Golden::open("qwen2-tied");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = folder.path().join("source");
    write(golden.decoder().parameters(), &golden.checkpoint(), &source, &WriteOptions::default()).expect("written");
    fs::write(source.join("tokenizer.json"), b"{ \"odd\":  spacing}\r\n").expect("written");
    fs::write(source.join("pytorch_model.bin"), b"weights").expect("written");
    let target = folder.path().join("target");
    write(golden.decoder().parameters(), &source, &target, &WriteOptions::default()).expect("written");

    for name in ["config.json", "generation_config.json", "tokenizer.json"] {
        assert_eq!(fs::read(source.join(name)).expect("there"), fs::read(target.join(name)).expect("copied"));
    }
    assert!(!target.join("pytorch_model.bin").exists());
}

#[test]
fn changed_weights_come_back_in_the_type_asked_for() {
    let golden = Golden::open("qwen2-tied");
    let decoder = golden.decoder();
    tch::no_grad(|| {
        for (_, parameter) in decoder.parameters().iter() {
            let _ = parameter.shallow_clone().g_add_scalar_(1e-4);
        }
    });
    let folder = tempfile::tempdir().expect("a temporary folder");
    let target = folder.path().join("new");
    let options = WriteOptions { storage: Storage::Float32, ..WriteOptions::default() };
    write(decoder.parameters(), &golden.checkpoint(), &target, &options).expect("written");
    let read = load(&target).expect("valid");
    for ((name, written), (_, read)) in decoder.parameters().iter().zip(read.parameters().iter()) {
        assert!(written == read, "{name}");
    }
}

#[test]
fn a_folder_that_is_there_is_never_replaced() {
    let golden = Golden::open("qwen2-tied");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let target = folder.path().join("new");
    fs::create_dir(&target).expect("created");
    let refused = write(golden.decoder().parameters(), &golden.checkpoint(), &target, &WriteOptions::default());
    assert!(matches!(refused, Err(CheckpointError::Exists(path)) if path == target));
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let golden = Golden::open("qwen2-tied");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = folder.path().join("source");
    fs::create_dir(&source).expect("created");
    fs::write(source.join("config.json"), "{}").expect("written");
    let refused = write(golden.decoder().parameters(), &source, &folder.path().join("new"), &WriteOptions::default());
    assert!(matches!(refused, Err(CheckpointError::Io { .. })));
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1);
}

/// Writes the weights of a model after `change`, with its configuration.
fn damaged(change: impl FnOnce(&mut Vec<(String, Tensor)>)) -> LoadError {
    let golden = Golden::open("llama3-rope");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = golden.checkpoint().join("config.json");
    fs::copy(config, folder.path().join("config.json")).expect("copied");
    let decoder = golden.decoder();
    let mut tensors: Vec<_> =
        decoder.parameters().iter().map(|(name, tensor)| (name.to_owned(), tensor.detach())).collect();
    change(&mut tensors);
    Tensor::write_safetensors(&tensors, folder.path().join("model.safetensors")).expect("written");
    load(folder.path()).expect_err("the change is refused")
}

#[test]
fn missing_unexpected_misshapen_and_mistyped_tensors_are_named() {
    const NAME: &str = "model.layers.1.mlp.up_proj.weight";
    let at = |tensors: &[(String, Tensor)]| tensors.iter().position(|(name, _)| name == NAME).expect("there");
    let messages = [
        damaged(|tensors| drop(tensors.remove(at(tensors)))),
        damaged(|tensors| {
            let place = at(tensors);
            tensors[place].1 = tensors[place].1.tr().contiguous();
        }),
        damaged(|tensors| {
            let place = at(tensors);
            tensors[place].1 = tensors[place].1.to_kind(Kind::Double);
        }),
    ]
    .map(|error| error.to_string());
    assert!(messages.iter().all(|message| message.contains(NAME)), "{messages:?}");
    let unexpected = damaged(|tensors| tensors.push(("model.layers.1.extra".into(), Tensor::from(1.0f32))));
    assert!(unexpected.to_string().contains("model.layers.1.extra"));
}

#[test]
fn a_truncated_file_and_an_index_that_leads_elsewhere_are_refused() {
    let golden = Golden::open("llama3-rope");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bytes = fs::read(golden.checkpoint().join("model.safetensors")).expect("read");
    fs::write(folder.path().join("model.safetensors"), &bytes[..bytes.len() - 1]).expect("written");
    assert!(matches!(Reader::open(folder.path()), Err(CheckpointError::Damaged { .. })));

    fs::remove_file(folder.path().join("model.safetensors")).expect("removed");
    let index = r#"{ "weight_map": { "x": "../outside.safetensors" } }"#;
    fs::write(folder.path().join("model.safetensors.index.json"), index).expect("written");
    assert!(matches!(Reader::open(folder.path()), Err(CheckpointError::Index { .. })));
}

#[test]
fn a_critic_starts_at_zero_and_is_saved_and_loaded() {
    let golden = Golden::open("qwen3-sharded");
    let tokens = golden.get("tokens");
    let critic = golden.decoder().critic();
    let fresh = Decoder::load_critic(&golden.checkpoint(), Device::Cpu, ComputeKind::Float32).expect("valid");
    for critic in [&critic, &fresh] {
        let values = critic.values(&critic.hidden(tokens));
        assert_eq!(values.size(), tokens.size());
        assert_close("values", &values, &values.zeros_like(), 0.0);
    }

    let _ = tch::no_grad(|| critic.head().shallow_clone().fill_(0.25));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let target = folder.path().join("critic");
    write(critic.parameters(), &golden.checkpoint(), &target, &WriteOptions::default()).expect("written");
    let read = Decoder::load_critic(&target, Device::Cpu, ComputeKind::Float32).expect("valid");
    let (values, expected) = (read.values(&read.hidden(tokens)), critic.values(&critic.hidden(tokens)));
    assert!(expected.abs().max().double_value(&[]) > 0.0);
    assert_close("values", &values, &expected, 0.0);
    assert!(load(&target).is_err(), "a critic is no policy");
}

#[test]
fn a_critic_shares_nothing_with_the_policy_it_came_from() {
    let policy = Golden::open("qwen2-tied").decoder();
    let critic = policy.critic();
    for (name, tensor) in critic.parameters().iter() {
        assert!(policy.parameters().get(name).is_none_or(|other| other.data_ptr() != tensor.data_ptr()), "{name}");
    }
}

#[test]
fn fresh_weights_follow_from_the_seed_and_have_the_deviation_asked_for() {
    let config = Golden::open("llama-yarn").decoder().config().clone();
    let random = |seed| Decoder::random(config.clone(), Device::Cpu, ComputeKind::Float32, seed);
    let (first, same, other) = (random(1), random(1), random(2));
    let embedding = |decoder: &Decoder| decoder.parameters().get("model.embed_tokens.weight").expect("there").copy();
    assert!(embedding(&first) == embedding(&same));
    assert!(embedding(&first) != embedding(&other));
    let deviation = embedding(&first).std(true).double_value(&[]);
    assert!((deviation / config.initializer_range - 1.0).abs() < 0.1, "{deviation}");
    for (name, tensor) in first.parameters().iter() {
        let mean = tensor.mean(Kind::Float).double_value(&[]);
        let expected = if name.contains("norm") { 1.0 } else { 0.0 };
        assert!((mean - expected).abs() < 5e-3, "{name} has mean {mean}");
    }
}
