//! The files for containers and CI agree with each other and with the service.

use std::{collections::BTreeSet, path::PathBuf, process::Command};

use serde_json::Value;

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_norway::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Variables that `forebay serve` reads, as its help lists them.
fn variables() -> BTreeSet<String> {
    let help = Command::new(env!("CARGO_BIN_EXE_forebay")).args(["serve", "--help"]).output().expect("it starts");
    let help = String::from_utf8(help.stdout).expect("the help is text");
    let named = help.split("[env: ").skip(1).filter_map(|rest| rest.split(['=', ']']).next());
    named.map(str::to_owned).collect()
}

#[test]
fn one_compiler_builds_the_service_and_its_image() {
    let toolchain: toml::Table = toml::from_str(&read("rust-toolchain.toml")).expect("it is TOML");
    let version = toolchain["toolchain"]["channel"].as_str().expect("a channel is named");
    let image = read("Containerfile");
    assert!(image.contains(&format!("FROM docker.io/library/rust:{version}-slim-")), "the image's compiler");
    assert!(image.contains(&format!("ENV RUSTUP_TOOLCHAIN={version}\n")), "the toolchain in the image");
    let manifest: toml::Table = toml::from_str(&read("Cargo.toml")).expect("it is TOML");
    let oldest = manifest["workspace"]["package"]["rust-version"].as_str().expect("an oldest version is named");
    let numbers = |version: &str| version.split('.').map(str::parse::<u32>).collect::<Result<Vec<_>, _>>();
    assert!(numbers(oldest).expect("numbers") <= numbers(version).expect("numbers"), "{oldest} <= {version}");
}

#[test]
fn the_container_files_set_only_variables_that_the_service_reads() {
    let known = variables();
    let words = format!("{}\n{}", read("Containerfile"), read("compose.yaml"));
    let named: BTreeSet<String> = words
        .split(|character: char| !(character.is_ascii_uppercase() || character == '_'))
        .filter(|word| word.starts_with("FOREBAY_"))
        .map(str::to_owned)
        .collect();
    assert!(named.contains("FOREBAY_LISTEN") && named.contains("FOREBAY_DATABASE"), "{named:?}");
    assert!(named.is_subset(&known), "{named:?} beside {known:?}");
}

#[test]
fn files_that_the_compose_file_mounts_exist() {
    let compose = yaml("compose.yaml");
    let services = compose["services"].as_object().expect("there are services");
    let declared = compose["volumes"].as_object().expect("there are volumes");
    for (name, service) in services {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume.as_str().and_then(|volume| volume.split(':').next()).expect("a volume is text");
            let exists =
                if source.starts_with('.') { repository(source).exists() } else { declared.contains_key(source) };
            assert!(exists, "{name} mounts {source}");
        }
    }
    assert!(repository(compose["services"]["forebay"]["build"]["dockerfile"].as_str().expect("a file")).exists());
}

#[test]
fn images_are_built_with_every_file_that_the_program_contains() {
    for list in [".containerignore", ".dockerignore"] {
        let ignored = read(list);
        let ignored: Vec<&str> = ignored.lines().map(|line| line.trim_matches('/')).collect();
        for folder in ["console", "migrations", "openapi", "src"] {
            assert!(!ignored.contains(&folder), "{list} leaves out {folder}");
        }
    }
}

#[test]
fn both_prometheus_files_differ_only_in_address_and_secret() {
    let mut alone = yaml("configs/prometheus.yml");
    let mut composed = yaml("configs/prometheus-compose.yml");
    let target = composed["scrape_configs"][0]["static_configs"].take();
    assert_eq!(target[0]["targets"][0], "forebay:8080", "the service's name in the compose file");
    let secret = composed["scrape_configs"][0]["authorization"].take();
    let (_, file) = secret["credentials_file"].as_str().and_then(|path| path.rsplit_once('/')).expect("a path");
    assert_eq!(yaml("compose.yaml")["services"]["prometheus"]["secrets"][0], file, "the secret of the compose file");
    for document in [&mut alone, &mut composed] {
        for key in ["static_configs", "authorization"] {
            document["scrape_configs"][0].as_object_mut().expect("a job").remove(key);
        }
    }
    assert_eq!(alone, composed);
}
